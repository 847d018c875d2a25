"""Trace files, reducer, timelines: round trips, determinism, refusals, exact minimal counterexamples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from spec import config, reduce, render, scenario, script, trace, walk
from spec.config import Config
from spec.events import CHOICE, DECISION, EFFECT, FIELDS, MEANING, SCHEMA, Event, from_record, to_record
from spec.narrate import Narrator, span
from spec.policies import POLICIES, PolicyNameError, register, resolve
from spec.trace import Header, Trace, TraceError

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
COMPOSED = config.named("composed")


def recorded(policy: str = "reference", cfg: Config = COMPOSED, choices: list[Event] | None = None) -> Trace:
    """A trace as a file would hold it, unwritten."""
    made = choices or walk.walk_once(cfg, resolve(policy), 7, 0, 80).choices
    world = reduce.replay(cfg, resolve(policy), made, record=True)
    return Trace(Header(policy, cfg), tuple(world.events))


def rewritten(run: Trace) -> Trace:
    """Through text and back."""
    return trace.parse("".join(trace.lines(run.header, run.events)))


def scenario_run(name: str) -> tuple[Config, str, list[Event], str]:
    """Configuration, policy, choices and the rule that breaks, of a shipped scenario."""
    one = scenario.load(scenario.shipped()[name])
    return one.config, one.policy, scenario.choices(one), one.expect


# -- the schema ------------------------------------------------------------------------------------------


def test_every_event_of_walks_survives_the_file_and_has_a_sentence() -> None:
    seen: set[str] = set()
    for name in walk.COMPOSED:
        cfg = config.named(name)
        for number in range(6):
            made = walk.walk_once(cfg, resolve("reference"), 1, number, 120)
            run = recorded("reference", cfg, made.choices)
            assert rewritten(run) == run
            seen |= {event[0] for event in run.events}
    assert seen >= {kind for kind, (category, _, _) in SCHEMA.items() if category != CHOICE} - {
        "breach",
        "copy",
    }
    sentences = {name[1:] for name in dir(Narrator) if name.startswith("_")}
    assert {kind for kind, (category, _, _) in SCHEMA.items() if category == DECISION} <= sentences


def test_the_schema_is_consistent() -> None:
    for kind, (category, names, meaning) in SCHEMA.items():
        assert category in (CHOICE, DECISION, EFFECT) and meaning
        assert "kind" not in names and "at" not in names, f"{kind} hides a field of the line itself"
        assert len(set(names)) == len(names)
    used = {name for _, names, _ in SCHEMA.values() for name in names}
    assert set(FIELDS) | set(MEANING) <= used, "fields that no event has"


@pytest.mark.parametrize(
    "choice",
    [
        ("arrive", "r1", "0", 9, 2),
        ("arrive", "r2", "r1", 1, 1),
        ("accept", "r1", 0),
        ("abort", "r1"),
        ("reset", "all"),
        ("schedule",),
        ("output",),
        ("run", 1, "store", 0),
        ("run", 0, "main", 3),
        ("report", "r1", "load", 1),
        ("fail", "r1", "store", 0),
        ("drain",),
        ("quiet",),
    ],
)
def test_choices_survive_their_text_and_their_record(choice: Event) -> None:
    assert script.parse(script.line(choice)) == choice
    assert from_record(json.loads(json.dumps(to_record(choice)))) == choice


def test_choices_may_leave_defaults_out() -> None:
    assert script.parse("arrive r1 9 2") == script.parse("arrive r1 outputs=2 prompt=9 family=0")
    assert script.parse("run 0 main") == ("run", 0, "main", 0)


# -- checking --------------------------------------------------------------------------------------------


def test_a_good_run_holds_and_everything_was_computed_again() -> None:
    checked = trace.check(rewritten(recorded()))
    assert checked.recomputed and not checked.findings and checked.judged > 15


def test_a_broken_run_names_event_rule_and_both_values() -> None:
    cfg, policy, choices, rule = scenario_run("fence-dropped-early")
    run = rewritten(recorded(policy, cfg, choices))
    findings = trace.check(run).findings
    assert [finding.rule for finding in findings] == ["reuse_flushes_fence", rule]
    assert run.events[findings[-1].at][0] == "breach"
    told = trace.explain(run, findings[-1])
    assert "holds 5tok#10, should hold 1tok#1" in told and "what must hold:" in told and "line" in told


def changed(run: Trace, kind: str, field: int, value: object) -> tuple[Trace, int]:
    """The trace with one field of the first event of that kind changed, and the event's number."""
    at = next(at for at, event in enumerate(run.events) if event[0] == kind)
    event = run.events[at]
    events = (*run.events[:at], (*event[:field], value, *event[field + 1 :]), *run.events[at + 1 :])
    return Trace(run.header, events), at


@pytest.mark.parametrize(
    ("kind", "field", "value"), [("alloc", 4, 49), ("step", 1, 9), ("write", 2, 49), ("sample", 3, 9)]
)
def test_a_changed_decision_or_effect_is_found_where_it_is(kind: str, field: int, value: object) -> None:
    run, at = changed(recorded(), kind, field, value)
    (finding,) = trace.check(run).findings
    assert finding.at == at and finding.mark == "recording"
    assert "recorded" in finding.text and "computed" in finding.text


def test_missing_and_surplus_events_are_found() -> None:
    run = recorded()
    short = Trace(run.header, run.events[:-1])
    (finding,) = trace.check(short).findings
    assert finding.at == len(run.events) - 1 and "recorded nothing more" in finding.text
    long = Trace(run.header, (*run.events, ("step", 99)))
    (finding,) = trace.check(long).findings
    assert finding.at == len(run.events) and "nothing more happens" in finding.text


def test_a_choice_that_was_not_possible_is_found() -> None:
    run = recorded()
    (finding,) = trace.check(Trace(run.header, (("output",), *run.events))).findings
    assert finding.at == 0 and "not possible" in finding.text


def unknown(run: Trace) -> Trace:
    """The same run by somebody we do not know."""
    return Trace(Header("somebody-else", run.header.config), run.events)


def test_decisions_of_an_unknown_policy_are_judged() -> None:
    for name in walk.COMPOSED:
        cfg = config.named(name)
        checked = trace.check(unknown(recorded("reference", cfg)))
        assert not checked.recomputed and not checked.findings and checked.judged > 8


def test_a_breach_that_an_unknown_policy_recorded_is_reported() -> None:
    cfg, policy, choices, rule = scenario_run("fence-dropped-early")
    findings = trace.check(unknown(recorded(policy, cfg, choices))).findings
    assert rule in {finding.rule for finding in findings}


def test_rules_over_decisions_catch_an_unknown_policy_that_recorded_no_breach() -> None:
    cfg, policy, choices, _ = scenario_run("fence-dropped-early")
    run = recorded(policy, cfg, choices)
    silent = Trace(run.header, tuple(event for event in run.events if event[0] != "breach"))
    (finding,) = trace.check(unknown(silent)).findings
    assert finding.rule == "reuse_flushes_fence"


@pytest.mark.parametrize(
    ("kind", "field", "value", "rule"),
    [
        ("alloc", 4, 0, "null_block_unowned"),
        ("drop", 4, 49, "release_only_held"),
        ("evict", 1, 49, None),
        ("unfence", 2, 9, "report_once_per_rank"),
        ("row", 1, ("nobody", 1), "recording"),
    ],
)
def test_wrong_decisions_of_an_unknown_policy(kind: str, field: int, value: object, rule: str | None) -> None:
    run, at = changed(recorded("reference", config.named("composed-tight")), kind, field, value)
    findings = trace.check(unknown(run)).findings
    if (
        rule is None
    ):  # forgetting a key that is not there harms nobody; the one that stays is found when reused
        assert "evict_before_reuse" in {finding.rule for finding in findings}
    else:
        assert findings[0].rule == rule and findings[0].at == at


# -- bad input -------------------------------------------------------------------------------------------


def text_of(run: Trace) -> list[str]:
    return "".join(trace.lines(run.header, run.events)).splitlines()


def line_with(lines: list[str], kind: str) -> int:
    return next(at for at, line in enumerate(lines) if f'"kind":"{kind}"' in line)


#: what is wrong -> the kind of line, what is done to its text, what the message must say
SPOILT: dict[str, tuple[str, Callable[[str], str], str]] = {
    "not JSON": ("alloc", lambda line: line[:-1], "not JSON"),
    "not an object": ("alloc", lambda line: "[1, 2]", "is not an object"),
    "empty line": ("alloc", lambda line: "", "not JSON"),
    "unknown kind": (
        "alloc",
        lambda line: line.replace("alloc", "grab"),
        "unknown kind 'grab'; expected one",
    ),
    "kind is no word": ("alloc", lambda line: line.replace('"alloc"', "[]"), "unknown kind []"),
    "lacks a field": ("alloc", lambda line: line.replace('"b":', '"x":'), "'alloc' lacks 'b'; expected the"),
    "unknown field": ("alloc", lambda line: line[:-1] + ',"x":1}', "has an unknown field 'x'"),
    "wrong number": ("evict", lambda line: line.replace('"b":', '"b":0.5'), "expected an integer"),
    "true is no number": ("done", lambda line: line.replace('"step":1', '"step":true'), "is True; expected"),
    "wrong word": ("begin", lambda line: line.replace("store", "shop"), "expected 'store' or 'load'"),
    "not a request": ("hit", lambda line: line.replace('["r', '[1,"r'), "expected a request incarnation"),
    "not tokens": ("enqueue", lambda line: line.replace("[1,1", '["1",1'), "expected a list of integers"),
    "not chunks": ("job", lambda line: line.replace('"chunks":[[[', '"chunks":[[['[:-1]), "not JSON"),
    "out of place": (
        "hit",
        lambda line: line.replace('"at":', '"at":1'),
        "a line is missing or out of place",
    ),
    "deep": (
        "hit",
        lambda line: "[" * 100_000,
        "not JSON that can be read: nested too deeply",
    ),
    "negative choice": ("arrive", lambda line: line.replace('"prompt":', '"prompt":-'), "numbers from 0 on"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_malformed_line_is_reported_with_its_number_and_what_was_expected(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, spoil, message = SPOILT[what]
    lines = text_of(recorded())
    at = line_with(lines, kind)
    lines[at] = spoil(lines[at])
    path = tmp_path / "bad.trace"
    path.write_text("\n".join(lines) + "\n")
    for verb in (["check"], ["render"], ["shrink", "-o", str(tmp_path / "out")]):
        assert trace.main([*verb, str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"line {at + 1}: " in err and message in err


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no header": (lambda head: {"kind": "schedule"}, "no header; expected an object with the fields schema,"),
    "version of tomorrow": (lambda head: head | {"schema": 2}, "schema version 2; this is a reader of"),
    "version is no number": (lambda head: head | {"schema": True}, "schema version True"),
    "no policy": (lambda head: head | {"policy": None}, "header field 'policy' is None; expected a string"),
    "bad configuration": (
        lambda head: head | {"config": head["config"].replace("pp = 2", "pp = 9")},
        "the configuration cannot be served: pp = 9",
    ),
    "surplus": (lambda head: head | {"mood": "good"}, "unknown header field 'mood'"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_wrong_header_is_refused(what: str) -> None:
    change, message = HEADERS[what]
    lines = text_of(recorded())
    lines[0] = json.dumps(change(json.loads(lines[0])))
    with pytest.raises(TraceError) as caught:
        trace.parse("\n".join(lines))
    assert str(caught.value).startswith("line 1: ") and message in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, binary, idle = tmp_path / "empty", tmp_path / "binary", tmp_path / "idle"
    idle.write_text(text_of(recorded())[0] + "\n")
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "missing", "cannot be read"),
        (tmp_path, "cannot be read"),
        (empty, "line 1: no header"),
        (binary, "is not UTF-8"),
        (idle, "has a header and no event: nothing to check"),
        (tmp_path / "a\nb", "a\\nb: cannot be read"),
    ):
        assert trace.main(["check", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err


def test_a_prompt_that_nobody_can_serve_is_no_reason_to_fill_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.loads(text_of(recorded())[0])
    huge = {"at": 0, "kind": "arrive", "name": "r1", "family": "0", "prompt": 10**12, "outputs": 1}
    path = tmp_path / "huge.trace"
    path.write_text(f"{json.dumps(header)}\n{json.dumps(huge)}\n")
    assert trace.main(["check", str(path)]) == 1
    assert "it is not possible in this state" in capsys.readouterr().out
    assert trace.main(["shrink", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "no invariant breaks" in capsys.readouterr().err


def test_shrinking_needs_a_known_policy_and_a_broken_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "run.trace", tmp_path / "out"
    run = recorded()
    trace.write(path, run.header, run.events)
    assert trace.main(["shrink", str(path), "-o", str(out)]) == 2
    trace.write(path, unknown(run).header, run.events)
    assert trace.main(["shrink", str(path), "-o", str(out)]) == 2
    err = capsys.readouterr().err
    assert "no invariant breaks" in err and "no policy named 'somebody-else'" in err and not out.exists()


def test_policies_are_found_by_name() -> None:
    assert resolve("reference") is POLICIES["reference"]
    with pytest.raises(PolicyNameError, match="known: reference"):
        resolve("nobody")
    with pytest.raises(ValueError, match="registered already"):
        register("reference", resolve("reference"))


# -- determinism -----------------------------------------------------------------------------------------


def test_same_seed_same_bytes_in_any_process(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate(("0", "1", "random")):
        path = tmp_path / f"{number}.trace"
        command = f"-m spec.walk --config composed --runs 2 --choices 120 --seed 5 --record {path}"
        subprocess.run(
            [sys.executable, *command.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        texts.append(path.read_bytes().split(b"\n", 1)[1])  # the header's commit may move while we run
    assert texts[0] == texts[1] == texts[2] and texts[0].count(b"\n") > 300


def test_reducing_is_deterministic() -> None:
    cfg, policy, choices, rule = scenario_run("table-bound-at-capture-pp2")
    first = reduce.reduce(cfg, resolve(policy), choices, rule)
    assert reduce.reduce(cfg, resolve(policy), choices, rule) == first


# -- the reducer -----------------------------------------------------------------------------------------


def noise(random: Random, cfg: Config, length: int) -> list[Event]:
    """Choices of no particular use, many of them impossible when their turn comes."""
    kinds = "arrive accept schedule schedule schedule output run run run run report report drain".split()
    out: list[Event] = []
    for _ in range(length):
        kind, name = random.choice(kinds), random.choice(("a", "b", "c"))
        rank = random.randrange(cfg.ranks)
        words: dict[str, Event] = {
            "arrive": (kind, name, random.choice("0012"), random.randint(1, 9), random.randint(1, 6)),
            "accept": (kind, name, random.randint(0, 2)),
            "run": (kind, rank, random.choice(("main", "main", "store", "load")), random.choice((0, 0, 1))),
            "report": (kind, name, random.choice(("store", "load")), rank),
        }
        out.append(words.get(kind, (kind,)))
    return out


def assert_minimal(cfg: Config, policy: str, choices: reduce.Choices, rule: str) -> None:
    """The run breaks the rule with its last choice, and no single choice can be left out."""
    assert reduce.breaks(reduce.replay(cfg, resolve(policy), choices), rule)
    for at in range(len(choices)):
        shorter = choices[:at] + choices[at + 1 :]
        assert not reduce.breaks(reduce.replay(cfg, resolve(policy), shorter), rule)


def test_a_transfer_settled_too_early_shrinks_to_one_request_and_one_report() -> None:
    """Each result is minimal: nothing can be left out.  Some seeds end in a longer one (a prompt of
    two tokens that grows into a block, step by step); the shortest is the story itself."""
    cfg, policy, rule = config.named("plain-offload"), "fault:visible-after-one-rank", "ready_chunk_exact"
    found = []
    for seed in range(60):
        choices = noise(Random(seed), cfg, 120)
        if reduce.breaks(reduce.replay(cfg, resolve(policy), choices), rule):
            short = reduce.reduce(cfg, resolve(policy), choices, rule)
            assert_minimal(cfg, policy, short, rule)
            assert len(short) <= 12
            found.append(short)
    assert [script.line(choice) for choice in min(found, key=len)] == [
        "arrive r1 prompt=5 outputs=2",
        "schedule",
        "drain",
        "schedule",
        "run 0 store",
        "report r1 store 0",
    ]


def test_a_fence_dropped_too_early_shrinks_to_two_requests_that_share_a_block() -> None:
    cfg, policy, choices, rule = scenario_run("fence-dropped-early")
    random = Random(3)
    long = [extra for choice in choices for extra in (("accept", "r1", random.randint(0, 3)), choice)]
    least = reduce.reduce(cfg, resolve(policy), [*long, *noise(random, cfg, 20)], rule)
    assert_minimal(cfg, policy, least, rule)
    assert [script.line(choice) for choice in least] == [
        "arrive r1 prompt=4 outputs=1",
        "schedule",
        "drain",
        "schedule",
        "run 0 main",
        "run 0 store",
        "report r1 store 0",
        "output",
        "arrive r2 family=2 prompt=5 outputs=1",
        "schedule",
        "drain",
    ]


def test_a_row_found_by_batch_index_shrinks_to_two_requests_and_no_scheduling_at_all() -> None:
    cfg, policy, choices, rule = scenario_run("row-by-batch-index-pp2")
    least = reduce.reduce(cfg, resolve(policy), choices, rule)
    assert_minimal(cfg, policy, least, rule)
    assert [script.line(choice) for choice in least] == [
        "arrive r1 prompt=1 outputs=1",
        "arrive r2 prompt=1 outputs=5",
        "quiet",
    ]


def test_a_repaired_policy_survives_the_counterexample_of_the_broken_one() -> None:
    for name in ("fence-dropped-early", "visible-after-one-rank", "table-bound-at-capture-pp2"):
        cfg, policy, choices, rule = scenario_run(name)
        least = reduce.reduce(cfg, resolve(policy), choices, rule)
        world = reduce.replay(cfg, resolve("reference"), least)
        assert world.verdict is None and not world.disciplines


def test_the_same_rule_is_kept_not_just_any() -> None:
    cfg, policy, choices, _ = scenario_run("fence-dropped-early")
    least = reduce.reduce(cfg, resolve(policy), choices, "reuse_flushes_fence")
    world = reduce.replay(cfg, resolve(policy), least)
    assert world.verdict is None and [breach.rule for breach in world.disciplines] == ["reuse_flushes_fence"]


def test_a_run_that_breaks_nothing_cannot_be_reduced() -> None:
    with pytest.raises(ValueError, match="do not break state_reads_exact"):
        reduce.reduce(COMPOSED, resolve("reference"), [("schedule",)], "state_reads_exact")


def test_impossible_choices_are_dropped() -> None:
    choices: list[Event] = [("output",), ("abort", "r9"), ("schedule",), ("run", 9, "main", 0)]
    world, made = reduce.replay_made(COMPOSED, resolve("reference"), choices)
    assert made == (("schedule",),) and world.choices == 1


def test_shrink_writes_a_trace_that_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, policy, choices, rule = scenario_run("visible-after-one-rank")
    source, out = tmp_path / "long.trace", tmp_path / "short.trace"
    trace.write_run(source, cfg, policy, choices)
    assert trace.main(["shrink", str(source), "-o", str(out)]) == 0
    assert f"{rule} still breaks" in capsys.readouterr().out
    assert trace.main(["check", str(out), "--json", str(tmp_path / "out.json")]) == 1
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["verdict"] == "refuted" and told["findings"][-1]["rule"] == rule
    assert len(trace.read(out).choices) <= len(choices)


# -- timelines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("golden", "arguments"), [("text", []), ("mermaid", ["--format", "mermaid"]), ("all", ["--all"])]
)
def test_timelines_read_as_kept(
    golden: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is kept too, so that what is compared here is the drawing.  After a change of the drawing:
    ``python -m spec.trace render tests/golden/fence-dropped-early.trace [--format mermaid | --all]``."""
    path = GOLDEN / "fence-dropped-early.trace"
    assert trace.main(["render", str(path), *arguments]) == 0
    assert capsys.readouterr().out == (GOLDEN / f"fence-dropped-early.{golden}").read_text()


def test_long_runs_stay_readable() -> None:
    made = walk.walk_once(COMPOSED, resolve("reference"), 1, 0, 400)
    run = recorded("reference", COMPOSED, made.choices)
    drawn = render.text(COMPOSED, "reference", run.events)
    whole = render.text(COMPOSED, "reference", run.events, everything=True)
    assert 3 * drawn.count("\n") < whole.count("\n")
    assert f"1-{len(made.choices) - render.LONG_RUN}" in drawn and "no invariant broke" in drawn
    assert max(map(len, drawn.splitlines())) <= render.WIDTH + 20


def test_mermaid_has_no_character_that_ends_a_statement() -> None:
    cfg, policy, choices, _ = scenario_run("fence-dropped-early")
    run = recorded(policy, cfg, choices)
    for line in render.mermaid(cfg, policy, run.events).splitlines():
        assert "#" not in line.replace("#35;", "") and ";" not in line.replace("#35;", "")


def test_spans() -> None:
    assert span([1, 2, 3, 7, 8]) == "1..3 7 8" and span([4]) == "4" and span([3, 2, 1]) == "3 2 1"


# -- the documentation -----------------------------------------------------------------------------------


def test_the_documentation_has_the_schema_and_the_timeline_as_they_are() -> None:
    page = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
    table = page.split("<!-- schema -->\n")[1].split("<!-- end schema -->")[0]
    assert table == trace.schema_table(), "regenerate: python -m spec.trace schema"
    assert (GOLDEN / "fence-dropped-early.text").read_text() in page
    assert f"version of the schema, an integer: {trace.VERSION} |" in page
    assert scenario.listing() in page, "regenerate: python -m spec.scenario --list"


def test_the_documented_scenario_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8").split("## Scenario files")[1]
    path = tmp_path / "documented.txt"
    path.write_text(page.split("```\n")[1])
    assert scenario.main([str(path)]) == 0 and "1 of 1 as written" in capsys.readouterr().out
    for setting in ("config NAME", "config <<", "policy NAME", "expect RULE"):
        assert f"| `{setting}`" in page
    for question, meaning in scenario.QUESTIONS.items():
        assert re.search(rf"^\| `{question}[ r12]*` \| {re.escape(meaning)} \|$", page, re.MULTILINE)
