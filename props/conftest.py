"""Puts the project's Hypothesis profile in force (``props/profiles.py``); ends a full run with a report."""

from collections.abc import Iterator
from typing import Any

import pytest

from props import profiles
from props.report import REPORT, as_data

# At import: Hypothesis' own plugin looks ``--hypothesis-profile`` up before it is our turn.
profiles.register()


def pytest_configure(config: pytest.Config) -> None:
    # Without Hypothesis' plugin there is no such option, and the default applies.
    profiles.use(config.getoption("--hypothesis-profile", default=None))


# -- the action and antecedent report ----------------------------------------------------------------------


def complete() -> bool:
    """Whether every machine has run: a part that somebody selected is not judged."""
    from props.test_machines import MACHINES

    return {machine.__name__ for machine in MACHINES} <= set(REPORT.machines)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist is done: its counts are added to ours."""
    REPORT.merge(as_data(getattr(node, "workeroutput", {}).get("machines")))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """A full run in which an action or an antecedent never was is a failed run."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["machines"] = REPORT.dump()
    yield
    if output is None and complete() and REPORT.silent() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The report, if any machine has run."""
    if not REPORT.machines:
        return
    terminalreporter.section("what the machines have done")
    for line in REPORT.lines():
        terminalreporter.write_line(line)
    if not complete():
        terminalreporter.write_line("some machines were not selected: nothing is demanded of this run")
        return
    for line in REPORT.silent():
        terminalreporter.write_line(f"FAILED: {line}", red=True)
