"""Scenario files: each runs as written, what is wrong is noticed, bad files are refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spec import scenario, trace

SHIPPED = scenario.shipped()


@pytest.mark.parametrize("name", SHIPPED)
def test_scenario_runs_as_written(name: str) -> None:
    text, wrong = scenario.run(scenario.load(SHIPPED[name]))
    assert not wrong
    assert text == SHIPPED[name].read_text(encoding="utf-8"), "regenerate: python -m spec.scenario --rewrite"


def test_scenarios_show_good_and_bad_runs_and_say_what() -> None:
    expected = {name: scenario.load(path) for name, path in SHIPPED.items()}
    assert {"ready_chunk_exact", "state_reads_exact", "policy_raises_no_error"} <= {
        s.expect for s in expected.values()
    }
    assert sum(s.expect == "holds" for s in expected.values()) >= 10
    for name, one in expected.items():
        assert len(one.title.split()) > 4, f"{name} opens with what it shows"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A scenario that a test may spoil."""
    return Path(shutil.copy(SHIPPED["reports-cross"], tmp_path / "copy.txt"))


def test_a_wrong_narration_is_noticed_and_rewritten(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = copy.read_text()
    copy.write_text(good.replace("fences lifted", "fences kept", 1))
    assert scenario.main([str(copy)]) == 1
    out = capsys.readouterr().out
    assert "-rank" in out and "fences kept" in out and "+rank" in out and "0 of 1 as written" in out
    assert scenario.main([str(copy), "--rewrite"]) == 0
    assert copy.read_text() == good
    assert scenario.main([str(copy)]) == 0


def test_a_wrong_verdict_is_not_rewritten_away(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "policy fault:visible-after-one-rank"
    copy.write_text(copy.read_text().replace("policy reference", bad))
    assert scenario.main([str(copy), "--rewrite"]) == 1
    assert "expected holds, found " in capsys.readouterr().out


def test_outputs_that_differ_fail_the_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrivals = "arrive r1 prompt=3 outputs=2\narrive r2 prompt=4 outputs=2\n"
    text = f"# two prompts\nconfig plain\n\n{arrivals}serve r1 r2\nsame r1 r2\n----\n"
    said, wrong = scenario.run(scenario.parse(text))
    assert len(wrong) == 1 and wrong[0].startswith("line 7: outputs differ: r1 ") and "; r2 " in wrong[0]
    path = tmp_path / "differ.txt"
    path.write_text(said)  # the narration is as it runs; the expectation fails all the same
    assert scenario.main([str(path)]) == 1
    out, err = capsys.readouterr()
    assert not err and "differ: line 7: outputs differ" in out and "0 of 1 as written" in out


BAD = {
    "no configuration": ("# t\n", "no configuration; write 'config NAME'"),
    "unknown configuration": ("# t\nconfig nothing\n", "no configuration named 'nothing'"),
    "bad inline": ("# t\nconfig <<\nname = 1\n>>\n", "name at the top level must be a string"),
    "no narration": ("# t\nconfig plain\n\nschedule\n", "line 4: choices without '----'"),
    "gap": ("# t\nconfig plain\n\nschedule\n\n----\n", "line 5: expected '----'"),
    "nothing above": ("# t\nconfig plain\n\n----\n", "line 4: '----' without choices"),
    "unknown word": ("# t\nconfig plain\n\njump r1\n----\n", "line 4: unknown choice 'jump'"),
    "lacks a field": ("# t\nconfig plain\n\narrive r1 prompt=3\n----\n", "line 4: 'arrive' lacks 'outputs'"),
    "not a number": ("# t\nconfig plain\n\narrive r1 prompt=x outputs=1\n----\n", "field 'prompt' is 'x'"),
    "wrong word": ("# t\nconfig plain\n\nreset everything\n----\n", "expected 'local' or 'all'"),
    "one too many": ("# t\nconfig plain\n\nschedule now\n----\n", "'now' is one word too many"),
    "no such field": ("# t\nconfig plain\n\naccept r1 tokens=2\n----\n", "'accept' has no field 'tokens'"),
    "same without names": ("# t\nconfig plain\n\nsame\n----\n", "line 4: 'same' compares clients; name at"),
    "same with one name": ("# t\nconfig plain\n\nsame r1\n----\n", "line 4: 'same' compares clients"),
    "slip in a rule": ("# t\nconfig plain\nexpect hlods\n", "expect hlods: neither holds nor the name of an"),
    "unknown rule": ("# t\nconfig plain\nexpect zzz\n", "docs/invariants.md has all"),
    "unknown policy": ("# t\nconfig plain\npolicy nobody\n", "no policy named 'nobody'"),
    "unclosed": ("# t\nconfig <<\nname = 1\n", "line 2: 'config <<' without a line '>>'"),
    "nobody": ("# t\nconfig plain\n\noutputs r9\n----\n", "no client 'r9' has arrived"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_in_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD[what]
    path = tmp_path / "bad.txt"
    path.write_text(text)
    assert scenario.main([str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and str(path) in err


def test_missing_file_and_unknown_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scenario.main([str(tmp_path / "none.txt")]) == 2
    path = tmp_path / "p.txt"
    path.write_text("# t\nconfig plain\npolicy nobody\n\nschedule\n----\n")
    assert scenario.main([str(path)]) == 2
    err = capsys.readouterr().err
    assert "cannot be read" in err and "no policy named 'nobody'" in err


def test_a_file_that_cannot_be_read_is_refused_before_any_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("# Grüße\n".encode("latin-1"))
    for file, said in ((path, "is not UTF-8 text"), (tmp_path / "none", "cannot be read: No such file")):
        assert scenario.main(["exact-boundary", str(file)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith(f"spec.scenario: {file}: {said}") and err.count("\n") == 1


def test_show_prints_the_narration(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenario.main(["exact-boundary"]) == 0
    assert capsys.readouterr().out == "exact-boundary: ok\n1 of 1 as written\n"
    assert scenario.main(["exact-boundary", "--show"]) == 0
    assert capsys.readouterr().out.startswith(SHIPPED["exact-boundary"].read_text(encoding="utf-8"))


def test_what_is_not_possible_is_told() -> None:
    text = "# t\nconfig plain\n\noutput\nabort r1\n----\n"
    said, wrong = scenario.run(scenario.parse(text))
    assert not wrong and said.endswith("----\nnot possible: output\nnot possible: abort r1\n")


def test_list_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scenario.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in SHIPPED)
    assert scenario.main(["exact-boundary", "fence-dropped-early", "--record", str(tmp_path)]) == 0
    assert not trace.check(trace.read(tmp_path / "exact-boundary.trace")).findings
    broken = trace.check(trace.read(tmp_path / "fence-dropped-early.trace")).findings
    assert [finding.rule for finding in broken] == ["reuse_flushes_fence", "ready_chunk_exact"]


def test_a_counterexample_is_drawn_and_its_scenario_runs_as_printed(tmp_path: Path) -> None:
    one = scenario.load(SHIPPED["visible-after-one-rank"])
    told = scenario.counterexample(one.config, one.policy, scenario.choices(one), one.expect)
    drawing, kept = told.split("python -m spec.scenario FILE.txt\n\n")
    assert "! consequence ready_chunk_exact" in drawing and "what must hold" in drawing
    path = tmp_path / "kept.txt"
    path.write_text(kept)
    assert scenario.main([str(path)]) == 0
    text, wrong = scenario.run(scenario.parse(kept.replace(one.policy, "reference")))
    assert wrong == ["expected ready_chunk_exact, found holds"] and "fences lifted" not in text
