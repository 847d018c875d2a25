"""The catalogue: every stored run breaks its fault and spares its repair; bad input is refused."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from spec import config as configs
from spec.faults import CATALOGUE, Fault
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
    assert main(["hunt", "--file", str(file), "--runs", "160", "--choices", "100"]) == 1
    assert re.search(r"without the fault: breaks \w+ in (the same run|one of)", capsys.readouterr().out)


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
