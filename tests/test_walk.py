"""What a walk says about itself."""

from __future__ import annotations

from collections import Counter

import pytest

from spec import walk
from spec.rules import RULES


def tried() -> walk.Report:
    """A report in which everything was reached."""
    return walk.Report(
        runs=1,
        events=1000,
        tally={rule.name: [int(rule.applies is not None), 1] for rule in RULES},
        witnesses=Counter(dict.fromkeys(walk.WITNESSES, 1)),
    )


def test_a_rule_is_tried_when_it_spoke_and_where_it_can_be_silent_was_silent() -> None:
    report = tried()
    assert walk.untried(report) == []
    report.tally["no_double_owner"] = [0, 0]
    report.tally["references_match_tables"] = [0, 5]  # there was never a state without held blocks
    assert walk.untried(report) == ["no_double_owner", "references_match_tables"]


def test_the_table_has_the_counts_as_they_are() -> None:
    report = tried()
    report.tally["no_double_owner"] = [0, 7]
    report.tally["output_exact"] = [3, 4]
    lines = {line.split()[0]: line.split()[2:] for line in walk.table(report) if line.count("  ") > 1}
    assert lines["no_double_owner"] == ["7", "0"]  # and not the 993 events at which nobody asked it
    assert lines["output_exact"] == ["4", "3"]


@pytest.mark.parametrize("lacking", ["resend_is_hit", "wait_graph_acyclic"])
def test_the_default_walk_is_undetermined_if_a_rule_was_not_tried(
    lacking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tried()
    monkeypatch.setattr(walk, "walk", lambda *args, **options: report)
    assert walk.main([]) == 0
    report.tally[lacking] = [0, 5] if lacking == "wait_graph_acyclic" else [5, 0]
    assert walk.main([]) == 3
    assert f"rules not tried: {lacking}" in capsys.readouterr().out
