"""Hypothesis profiles: how much the property tests try, and whether two runs try the same.

``dev``      quick, random: while editing
``ci``       the default: no seed, nothing read from or written to disk, no deadline.  A test's examples
             follow from its code, but for one draw in twenty: Hypothesis tries constants of the modules that
             are loaded, so some tests alone may draw otherwise than the whole suite
``nightly``  many random examples

Hypothesis ships a ``ci`` of its own and selects it by itself when the variable ``CI`` is set; ours replaces
it.  Both ``conftest.py`` call :func:`use`, so plain ``pytest`` and any selection of files get ``ci``, and
``--hypothesis-profile NAME`` still wins.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

DEFAULT = "ci"

# Machines that share two cores stall: a slow example is not a defect here, a wrong one is.
_BASE = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])

PROFILES: dict[str, settings] = {
    "dev": settings(_BASE, max_examples=25),
    "ci": settings(_BASE, max_examples=100, derandomize=True, database=None),
    "nightly": settings(_BASE, max_examples=5000),
}


def register() -> None:
    """Register the profiles under their names, replacing those of Hypothesis."""
    for name, profile in PROFILES.items():
        settings.register_profile(name, profile)


def use(chosen: str | None) -> None:
    """Put the ``chosen`` profile in force, or :data:`DEFAULT` when none was asked for on the command line."""
    register()
    settings.load_profile(chosen or DEFAULT)
