"""The catalogue: every stored run breaks its fault and spares its repair; bad input is refused."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spec import config as configs
from spec.faults import CATALOGUE, Fault, own
from spec.faults.__main__ import main
from spec.faults.fault import CONFIGURATION, DECISION, FORMULA, HARMLESS, LIVENESS
from spec.faults.hunt import (
    LONGEST_TRACE,
    NEVER_ENDS,
    Choices,
    Hunt,
    breadth_first,
    check_stored,
    find,
    hunt,
    lasso,
    removable,
    stored,
)
from spec.reference import Decisions
from spec.rules import BY_NAME
from spec.world import World

ROOT = Path(__file__).parents[1]
TRACED = [fault for fault in CATALOGUE.values() if fault.kind in (DECISION, LIVENESS)]
SEED_DECISIONS = (
    "precopy-row-by-batch-index", "row-by-batch-index", "table-bound-at-capture", "rotating-table-pool",
    "context-bound-by-profiling", "context-bound-by-capture", "state-indices-through-slots",
    "seed-divides-by-smallest-block", "drop-ignored-by-states", "counts-into-mutable-rows",
    "no-reset-for-a-new-life", "attention-not-clipped", "states-clipped-too", "positional-store-of-states",
    "boundary-from-mirror", "fence-dropped-early", "fence-released-twice", "lookup-without-extra",
    "inflight-check-without-extra", "store-mask-without-extra", "base-window-widened",
)  # fmt: skip


def names(faults: list[Fault]) -> list[str]:
    return [fault.name for fault in faults]


def test_every_decision_of_the_first_write_ups_is_there() -> None:
    assert set(SEED_DECISIONS) <= set(CATALOGUE)


def test_at_least_thirty_public_cases_are_covered() -> None:
    cases = {case for fault in CATALOGUE.values() for case in fault.cases}
    assert len(cases) >= 30


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=lambda fault: fault.name)
def test_entry_is_whole(fault: Fault) -> None:
    for name in (*fault.bites, *fault.harmless):
        configs.named(name)
    fields = set(Decisions.__dataclass_fields__)
    assert set(fault.change) | set(fault.base) <= fields
    assert fault.source and fault.did and fault.repair
    assert bool(fault.harmless) == bool(fault.why_harmless), "say why it is harmless there"
    if fault.kind in (DECISION, LIVENESS):
        assert fault.change and fault.bites
    elif fault.kind == FORMULA:
        assert fault.theorem and fault.formula
    elif fault.kind == CONFIGURATION:
        assert fault.refused
    else:
        assert fault.kind == HARMLESS and fault.harmless


@pytest.mark.parametrize("fault", TRACED, ids=names(TRACED))
def test_stored_run_breaks_the_fault_and_spares_the_repair(fault: Fault) -> None:
    assert not list(check_stored(fault))
    run = stored(fault.name)
    assert run is not None
    config, rule, choices = run
    assert BY_NAME[rule].kind == "consequence"
    assert len(choices) <= LONGEST_TRACE
    assert not removable(config, fault.policy, choices, rule)
    assert choices[-1] != ("quiet",) or rule in NEVER_ENDS, "a stored run spells its steps out"


def test_three_quarters_fall_to_a_consequence_that_another_fault_breaks_too() -> None:
    rules = Counter(run[1] for fault in TRACED if (run := stored(fault.name)))
    shared = sum(count for count in rules.values() if count > 1)
    assert 4 * shared >= 3 * sum(rules.values())


def test_stored_runs_belong_to_the_catalogue() -> None:
    from spec.faults.hunt import TRACES

    assert {path.stem for path in TRACES.glob("*.txt")} == set(names(TRACED))


def test_a_fault_is_hunted_from_scratch() -> None:
    outcome = hunt(CATALOGUE["table-bound-at-capture"], runs=100, hypothesis=False, states=50)
    assert outcome.choices and not outcome.wrong and not outcome.missed
    assert outcome.rule in ("state_reads_exact", "ready_chunk_exact")


def test_hypothesis_generation_finds_one_too() -> None:
    fault = CATALOGUE["row-by-batch-index"]
    from spec.faults.hunt import find_by_hypothesis

    config = configs.named(fault.bites[0])
    said = find_by_hypothesis(config, fault.policy, examples=150, choices=80, seed=0)
    assert said.startswith("found in example")


def test_the_repair_is_not_refuted() -> None:
    fault = CATALOGUE["table-bound-at-capture"]
    assert find(configs.named(fault.bites[0]), fault.repaired, runs=30, choices=120, seed=3) is None


def test_breadth_first_search_finds_the_shortest() -> None:
    fault = CATALOGUE["rotating-table-pool"]
    run = stored(fault.name)
    assert run is not None
    config, rule, choices = run
    said, shortest = breadth_first(config, fault.policy, choices, rule, states=2000, seconds=60)
    assert f": {len(choices)} (" in said and len(shortest) == len(choices)


def test_a_run_that_never_ends_is_a_lasso() -> None:
    fault = CATALOGUE["reserve-undoes-the-split"]
    run = stored(fault.name)
    assert run is not None
    loop = lasso(run[0], fault.policy, run[2])
    assert loop is not None and loop.cycle
    assert lasso(run[0], fault.repaired, run[2]) is None


# -- the command --------------------------------------------------------------------------------------------

OWN = """
from spec.faults import Fault
from spec.ops import Deref

FAULT = Fault(
    name="mine", mechanism="pp_delay", kind="decision",
    did="late copies read the tables of whichever step gathered last", repair="the slot's own row",
    source=("my change",),
    change={"post_row": lambda index, slot: Deref("gathered", index)},
    bites=("hybrid-pp2-async",),
)
"""


def test_own_fault_is_refuted_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    assert main(["hunt", "--file", str(file)]) == 1
    out = capsys.readouterr().out
    assert "refuted: mine in hybrid-pp2-async" in out and "breaks state_reads_exact" in out
    assert "without the fault: holds in the same run and in 50 of its own" in out


def test_a_base_that_breaks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    base = "    base={'accepted_floor': lambda: 0},\n    bites"
    file.write_text(OWN.replace("    bites", base), encoding="utf-8")
    assert base in file.read_text(encoding="utf-8")
    assert main(["hunt", "--file", str(file), "--runs", "160", "--choices", "100"]) == 3
    assert re.search(r"so does the design without the fault, in the same run", capsys.readouterr().out)


def test_own_fault_in_a_configuration_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, toml = tmp_path / "mine.py", tmp_path / "own.toml"
    text = configs.dump(configs.named("hybrid-pp2-async")).replace("hybrid-pp2-async", "mine-alone")
    toml.write_text(text, encoding="utf-8")
    file.write_text(OWN.replace("hybrid-pp2-async", str(toml)), encoding="utf-8")
    assert main(["hunt", "--file", str(file)]) == 1
    assert "choices in mine-alone:" in capsys.readouterr().out
    toml.write_text(text.replace("pool_blocks = ", "pool_blocks = -"), encoding="utf-8")
    assert main(["hunt", "--file", str(file)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_own_harmless_change_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("hybrid-pp2-async", "hybrid-pp1"), encoding="utf-8")
    assert main(["hunt", "--file", str(file), "--runs", "20", "--choices", "80"]) == 0
    assert "holds (sampled" in capsys.readouterr().out


REPLACED = """
from spec.faults import Fault
from spec.policy import PolicyError

def refuses(waiting):
    raise PolicyError("no fence")

FAULT = Fault(
    name="mine", mechanism="fence", kind="decision", did="it", repair="that", source=("me",),
    change=CHANGE, bites=BITES,
)
"""


def hunt_own(tmp_path: Path, change: str, bites: str, *options: str) -> int:
    """Hunt a file that replaces these decisions in these configurations."""
    file = tmp_path / "mine.py"
    file.write_text(REPLACED.replace("CHANGE", change).replace("BITES", bites), encoding="utf-8")
    return main(["hunt", "--file", str(file), "--runs", "30", "--choices", "100", *options])


@pytest.mark.parametrize(
    ("change", "bites", "code", "said"),
    [
        (
            "{'fence_done': lambda waiting: waiting == 0}",
            "('plain',)",
            3,
            "undetermined (never asked: fence_done;",
        ),
        (
            "{'fence_done': lambda waiting: waiting == 0}",
            "('plain',)",
            3,
            "in plain (30 runs of 100 choices, seed 0);",
        ),
        (
            "{'fence_done': lambda waiting: waiting == 0}",
            "('plain', 'fences')",
            3,
            "undetermined (every answer was the reference's: fence_done;",
        ),
        (  # its group has no window, and one batch at a time: scheduled is processed
            "{'free_basis': lambda request: request.computed}",
            "('fences',)",
            3,
            "undetermined (every answer was the reference's: free_basis;",
        ),
        ("{'fence_done': lambda waiting: True}", "('plain', 'fences')", 1, "verdict: refuted"),
        # never asked for there: another shipped configuration shows it
        ("{'v1_order': FAULTY}", "('plain',)", 1, "refuted: mine in composed-v1"),
        ("{'fence_done': refuses}", "('fences',)", 1, "breaks policy_raises_no_error"),
    ],
)
def test_a_decision_that_was_never_asked_or_changed_nothing_is_undetermined(
    change: str, bites: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = change.replace("FAULTY", repr(tuple(reversed(Decisions().v1_order))))
    assert hunt_own(tmp_path, change, bites) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("{'fence_done': lambda waiting: 1 / 0}", "mine.py:10: ZeroDivisionError: division by zero"),
        ("{'fence_done': lambda waiting: exit(0)}", "mine.py:10: SystemExit: 0"),
        ("{'free_basis': lambda request: True}", "mine.py:10: free_basis must answer int, got True"),
        ("{'free_basis': lambda request: request.procesed}", "mine.py:10: AttributeError: "),
        ("{'fence_done': lambda waiting: None}", "mine.py:10: fence_done must answer bool, got None"),
        ("{'post_row': lambda index, slot: slot}", "mine.py:10: post_row must answer Deref or Imm, got 0"),
        (
            "{'gather_buffer': lambda step, seen=[]: 'gathered' if seen or seen.append(1) else 'nowhere'}",
            "remember",
        ),
    ],
)
def test_an_error_of_the_file_is_no_verdict(
    change: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunt_own(tmp_path, change, "('fences', 'hybrid-pp1')") == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_an_error_elsewhere_is_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hunt_own(tmp_path, "{'gather_buffer': lambda step: 'nowhere'}", "('plain',)") == 1
    assert "policy_raises_no_error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'kind="decision"',
            'kind="nonsense"',
            "FAULT.kind must be one of decision, liveness; got 'nonsense'",
        ),
        ('mechanism="fence"', 'mechanism="magic"', "FAULT.mechanism must be one of "),
        ("CHANGE", "{}", "FAULT.change replaces no decision"),
        ("CHANGE", "[]", "FAULT.change must be a dictionary of decisions, got []"),
        ("CHANGE", "{'fence_done': 3}", "FAULT.change['fence_done'] must be a function, got 3"),
        (
            "CHANGE",
            "{'fence_done': lambda: True}",
            "FAULT.change['fence_done'] must take 1 argument(s): waiting",
        ),
        ("CHANGE", "{}, base={'fence_done': True}", "FAULT.base['fence_done'] must be a function, got True"),
        ("CHANGE", "{'v2_order': ('post',)}", "FAULT.change['v2_order'] must be a tuple of the same parts"),
        ("CHANGE", "{}, tamper=lambda: None", "FAULT.tamper must be a function of one argument"),
        ("BITES", "'fences'", "FAULT.bites must be a tuple of text, as (\"one\",), got 'fences'"),
        ("BITES", "('nowhere',)", "FAULT.bites: no configuration named 'nowhere'"),
        ('did="it"', "did=None", "FAULT.did must be text, got None"),
        ("FAULT", "raise SystemExit(0)\nFAULT", "mine.py:8: SystemExit: 0"),
        ("FAULT", "1 +\nFAULT", "mine.py:8: SyntaxError: invalid syntax"),
        ("FAULT", "int('x\\ny')\nFAULT", "mine.py:8: ValueError: "),
    ],
)
def test_a_wrong_entry_is_told_before_anything_runs(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    text = REPLACED.replace(old, new, 1)
    assert text != REPLACED
    text = text.replace("CHANGE", "{'fence_done': lambda waiting: True}").replace("BITES", "('fences',)")
    file.write_text(text, encoding="utf-8")
    assert main(["hunt", "--file", str(file)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("name", "said"),
    [("bad.toml", "must end in .py"), (".", "is a folder"), ("/dev/null", "must end in .py")],
)
def test_what_is_no_python_file(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("x = 1\n", encoding="utf-8")
    assert main(["hunt", "--file", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_every_entry_of_the_catalogue_would_pass_as_a_file() -> None:
    assert not [found for fault in TRACED for found in own.problems(fault)]


def test_a_hunt_of_a_file_is_written_down(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    for decision, code in (("lambda waiting: True", 1), ("lambda waiting: waiting == 0", 3)):
        assert hunt_own(tmp_path, f"{{'fence_done': {decision}}}", "('fences',)", "--json", str(file)) == code
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["verdict"] == ("refuted" if code == 1 else "undetermined")
        assert found["never_differed"] == ([] if code == 1 else ["fence_done"])
        assert (
            found["command"].startswith("python -m spec.faults hunt --file ")
            and "--runs 30" in found["command"]
        )
        assert bool(found["hunt"]["choices"]) == bool(found["without_the_fault"]) == (code == 1)


def test_of_several_seeds_the_shortest_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*options: str) -> tuple[int, str]:
        mine, file = tmp_path / "mine.py", tmp_path / "found.json"
        mine.write_text(OWN, encoding="utf-8")
        less = ("--runs", "40", "--choices", "100")
        assert main(["hunt", "--file", str(mine), *less, "--json", str(file), *options]) == 1
        return len(json.loads(file.read_text())["hunt"]["choices"]), capsys.readouterr().out

    alone = [found("--seed", str(seed))[0] for seed in range(3)]
    shortest, out = found("--seeds", "3")
    assert shortest == min(alone) < max(alone)
    told = ", ".join(map(str, alone))
    assert f"the shortest of 3 seeds' runs ({told} choices)" in out and out.count("refuted: mine in") == 1


def test_what_was_found_before_a_stop_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec.faults import ownhunt

    def once(*given: Any, seed: int, **options: Any) -> Any:
        if seed:
            raise KeyboardInterrupt
        return find(*given, seed=seed, **options)

    monkeypatch.setattr(ownhunt, "find", once)
    assert hunt_own(tmp_path, "{'fence_done': lambda waiting: True}", "('fences',)", "--seeds", "5") == 1
    out = capsys.readouterr().out
    assert "refuted: mine in fences" in out and "without the fault: not tried" in out
    assert "stopped before the budget was spent" in out


@pytest.mark.parametrize("more", [["no-fence"], ["--all"], ["--store"], ["--jobs", "2"], ["--states", "3"]])
def test_a_hunt_of_a_file_takes_nothing_else(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hunt", "--file", "mine.py", *more]) == 2
    assert f"leave out {more[0]}" in capsys.readouterr().err


def test_a_stopped_hunt_of_a_file_is_undetermined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec.faults import ownhunt

    def stop(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ownhunt, "find", stop)
    assert hunt_own(tmp_path, "{'fence_done': lambda waiting: True}", "('fences',)") == 3
    assert "stopped before the budget was spent" in capsys.readouterr().out


def test_a_file_may_tamper_with_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from spec.faults import Fault\n"
        "from spec.faults.tamper import editing\n"
        "FAULT = Fault('mine', 'ownership', 'decision', 'frees twice', 'once', ('me',), bites=('plain',),\n"
        "              tamper=editing('drop', lambda book, event: [event, event]))\n",
        encoding="utf-8",
    )
    assert main(["hunt", "--file", str(file), "--runs", "20", "--choices", "80"]) == 1
    assert "release_only_held" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("x = 1\n", "must define FAULT = Fault(...)"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError"),
        (OWN.replace('"hybrid-pp2-async",', ""), "must name at least one configuration"),
        (OWN.replace("post_row", "no_such_decision"), "no_such_decision"),
        (OWN.replace("hybrid-pp2-async", "no-such-config"), "no configuration named"),
    ],
)
def test_bad_file_is_one_line_and_exit_2(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert main(["hunt", "--file", str(file)]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hunt"], "name a fault"),
        (["hunt", "no\nbody"], "no fault named 'no\\nbody'"),
        (["hunt", "nobody"], "no fault named 'nobody'"),
        (["show", "nobody"], "no fault named 'nobody'"),
        (["hunt", "row-by-batch-index", "--runs", "0"], "--runs must be at least 1"),
    ],
)
def test_bad_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_list_show_table_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CATALOGUE)
    assert main(["show", "row-by-batch-index"]) == 0
    assert "state_reads_exact" in capsys.readouterr().out
    assert main(["table"]) == 0
    assert "| `row-by-batch-index` |" in capsys.readouterr().out
    assert main(["check"]) == 0


def test_not_found_within_the_budget_is_undetermined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    arguments = ["hunt", "fence-dropped-early", "--runs", "1", "--choices", "2", "--json", str(record)]
    assert main(arguments) == 3
    assert json.loads(record.read_text(encoding="utf-8"))["hunts"]["fence-dropped-early"]["missed"]


def test_a_hunt_of_all_that_is_stopped_says_so_and_nothing_else() -> None:
    command = [sys.executable, "-m", "spec.faults", "hunt", "--all", "--runs", "100", "--states", "20"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in background jobs
    ) as hunting:
        assert hunting.stdout is not None and hunting.stdout.readline()  # one has been hunted
        os.killpg(hunting.pid, signal.SIGINT)
        out, err = hunting.communicate(timeout=60)
    assert (hunting.returncode, err) == (3, "") and "stopped before all were hunted" in out


def test_a_record_names_the_command_that_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "a record.json"
    assert main(["hunt", "hash-unit-clashes", "--runs", "9", "--json", str(record)]) == 0
    command = json.loads(record.read_text(encoding="utf-8"))["command"]
    assert command == f"python -m spec.faults hunt hash-unit-clashes --runs 9 --json '{record}'"
    out = capsys.readouterr().out
    assert re.search(r"^refuted +hash-unit-clashes", out, re.MULTILINE) and "unexpected: none" in out


def test_without_hypothesis_that_search_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert main(["hunt", "row-by-batch-index", "--runs", "100", "--choices", "100", "--states", "50"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("refuted ") and "Hypothesis is not installed (pip install" in out


def test_a_shorter_stored_run_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec.faults import __main__ as command

    known = stored("no-fence")
    assert known is not None
    config, rule, choices = known
    kept: list[int] = []
    monkeypatch.setattr(command, "store", lambda outcome: kept.append(len(outcome.choices)))

    def keep(choices: Choices) -> None:
        found = Hunt("no-fence", config.name, rule, choices=choices)
        command.keep(found, argparse.Namespace(store=True))

    for found in ((*choices, ("work",)), choices, choices[:-1]):
        keep(found)
    assert kept == [len(choices) - 1]
    monkeypatch.setattr(command, "check_stored", lambda fault: iter(["it breaks nothing any more"]))
    keep((*choices, ("work",)))
    assert kept == [len(choices) - 1, len(choices) + 1]


def test_the_documentation_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["table"])
    page = (Path(__file__).parents[1] / "docs" / "faults.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page, "python -m spec.faults table"


def test_the_record_of_the_hunt_is_of_this_catalogue() -> None:
    from spec.faults.__main__ import RECORD

    hunts = json.loads(RECORD.read_text(encoding="utf-8"))["hunts"]
    assert set(hunts) == set(CATALOGUE)
    assert not [name for name, one in hunts.items() if one["missed"] or one["wrong"]]


# -- what else names the catalogue -------------------------------------------------------------------------


def test_every_file_of_the_packages_is_in_an_installed_one() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for package, patterns in data["package-data"].items():
        shipped = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
        here = {
            path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        }
        assert not {path for path in here - shipped if path.suffix != ".py"}


def test_the_decisions_that_the_readme_suggests_bite_where_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- section: write a fault -->")[1]
    pairs = re.findall(r"`(\w+)`\s+in\s+`([\w-]+)`", text.split("<!-- end section")[0])
    wrong = {
        "release_list": "lambda table, mirror: mirror",
        "fence_done": "lambda waiting: True",
        "post_row": "lambda index, slot: __import__('spec.ops').ops.Deref('source', index)",
    }
    assert {decision for decision, _ in pairs} == set(wrong)
    for decision, config in pairs:
        assert hunt_own(tmp_path, f"{{'{decision}': {wrong[decision]}}}", f"('{config}',)") == 1


@pytest.mark.parametrize(
    "name", ["drafts-stay-on-the-last-stage", "drafts-of-another-row", "last-token-of-another-row"]
)
def test_wrong_input_tokens_make_wrong_cells(name: str) -> None:
    """With the rule about inputs off, the same run breaks where the cells that they made are read."""
    config, rule, choices = stored(name) or pytest.fail("no stored run")
    world = World(config, CATALOGUE[name].policy, off=frozenset({rule}))
    for choice in choices:
        world.choose(choice)
    assert rule == "input_tokens_exact" and world.verdict and world.verdict.rule == "attention_reads_exact"


def test_what_the_readme_shows_of_a_fault_is_what_show_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.split("<!-- part: refuted -->")[1].split("<!-- end part -->")[0].split("```")[1]
    shown, *lines = part.strip().splitlines()
    assert main(shown.split()[4:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 20 and [line for line in lines if line != "..." and line not in printed] == []


@pytest.mark.parametrize(("page", "part"), [("refine", "inject"), ("soak", "soak")])
def test_the_tables_of_the_cpu_name_every_fault_that_can_be_put_in(page: str, part: str) -> None:
    pytest.importorskip("torch")
    from impl.inject import injectable

    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    table = text.split(f"<!-- part: {part} -->")[1].split("<!-- end part -->")[0]
    missing = [name for name in injectable() if f"| `{name}` |" not in table]
    assert not missing, f"record docs/{page}.md anew: it lacks {', '.join(missing)}"


def test_a_decision_that_no_run_asks_for_does_not_refine() -> None:
    pytest.importorskip("torch")
    from impl import refine
    from impl.decisions import Decisions as Implemented

    mine = refine.implementation(replace(Implemented(), fence_done=lambda waiting: waiting == 0))
    for config, verdict in (("plain", "undetermined"), ("fences", "holds"), ("plain", "undetermined")):
        report = refine.refine([configs.named(config)], mine, runs=3, choices=100, seed=0)
        assert (report.verdict, bool(report.never_asked)) == (verdict, verdict == "undetermined")
    plain = refine.refine([configs.named("plain")], refine.implementation(), runs=1, choices=20, seed=0)
    assert plain.verdict == "holds" and plain.never_asked == []


def test_what_is_generated_does_not_change_with_source_text(tmp_path: Path) -> None:
    """Hypothesis draws numbers that stand in local modules; a seed must give the same whatever is loaded."""
    (tmp_path / "more_text.py").write_text("X = 0.1234567\nY = [0.777777, 0.33333, 0.919191, 4711]\n")
    code = (
        "from spec.faults import hunt\n"
        "seen = []\n"
        "hunt.generated(lambda random: seen.extend([random.random(), random.randrange(10**6)]), "
        "examples=60, seed=0)\n"
        "print(seen)\n"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{more}{code}"],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ("", "import more_text\n")
    ]
    assert told[0] == told[1] and told[0].count(",") == 119


def test_a_name_given_twice_is_hunted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec.faults import __main__ as command

    def found(name: str, **_: object) -> Hunt:
        return Hunt(name, "fences", "ready_chunk_exact", choices=(("quiet",),))

    monkeypatch.setattr(command, "hunt_one", found)
    monkeypatch.setattr(command, "show_run", lambda *_: None)
    names = ["no-fence", "no-fence", "fence-dropped-early"]
    assert main(["hunt", *names, "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "\n2 of 2 hunted in " in out
    assert "of the 2 refuted with a trace, 2 break a consequence that another of them breaks" in out
