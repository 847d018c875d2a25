"""The Hypothesis profile in force is ours, whatever the environment says; an explicit choice still wins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A test in a subprocess prints the settings it runs under; it sits beside the real tests so that the real
# conftest applies, and is removed at once.
PROBE = """
from hypothesis import settings

def test_print_settings():
    s = settings()
    print("PROBE", s.max_examples, s.derandomize, s.database is None, s.deadline)
"""


def probe(folder: str, *options: str, env: dict[str, str] | None = None) -> str:
    """The settings that a test in ``folder`` runs under, as printed by it."""
    path = ROOT / folder / f"test_probe_{os.getpid()}.py"
    path.write_text(PROBE)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *options, str(path)]
        clean = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTEST_ADDOPTS")}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=clean | (env or {})
        )
    finally:
        path.unlink()
    lines = [line for line in done.stdout.splitlines() if "PROBE" in line]
    assert done.returncode == 0 and len(lines) == 1, done.stdout + done.stderr
    return lines[0].removeprefix("PROBE ")


OURS = "100 True True None"


@pytest.mark.parametrize("folder", ["tests", "props"])
def test_plain_pytest_uses_our_ci_profile(folder: str) -> None:
    assert probe(folder) == OURS


def test_our_ci_profile_replaces_the_one_hypothesis_selects_under_CI() -> None:
    assert probe("props", env={"CI": "true"}) == OURS


def test_an_explicit_profile_wins() -> None:
    assert probe("props", "--hypothesis-profile", "dev") == "25 False False None"
    assert probe("tests", "--hypothesis-profile", "nightly") == "5000 False False None"
    assert probe("props", "--hypothesis-profile", "ci") == OURS


def test_without_hypothesis_plugin_our_profile_is_still_in_force() -> None:
    assert probe("props", "-p", "no:hypothesispytest") == OURS
