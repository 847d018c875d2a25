"""Puts the project's Hypothesis profile in force (see ``props/profiles.py``)."""

import pytest

from props import profiles

# At import: Hypothesis' own plugin looks ``--hypothesis-profile`` up before it is our turn.
profiles.register()


def pytest_configure(config: pytest.Config) -> None:
    # Without Hypothesis' plugin there is no such option, and the default applies.
    profiles.use(config.getoption("--hypothesis-profile", default=None))
