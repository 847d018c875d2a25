"""Ordinary tests: command lines, codecs, worked numbers, and tests of the tests."""
