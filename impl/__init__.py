"""Implementations checked in the model's world: the reference kernels and connector, and released vLLM."""
