"""Lockstep over the catalogue of faults: contracts refuse the wrong answers, and no repaired design."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from spec.config import named
from spec.faults import CATALOGUE
from spec.lockstep import WRONG, Lockstep, lockstep, main
from spec.policies import PolicyFactory
from spec.walk import Adversary, draw_options
from spec.world import World


def refused(
    config: str, factory: PolicyFactory, seeds: range, choices: int = 150
) -> tuple[set[str], set[str]]:
    """(questions whose answers were refused, rules that broke) over some walks in lockstep."""
    questions, rules = set(), set()
    for seed in seeds:
        random = Random(seed)
        settings = named(config)
        world = World(settings, lockstep(factory))
        adversary = Adversary(settings, random, draw_options(settings, random))
        for _ in range(choices):
            choice = adversary.draw(world)
            if choice:
                world.choose(choice)
        world.quiet()
        policy = world.policy
        assert isinstance(policy, Lockstep)
        questions |= {difference.question for difference in policy.found if difference.kind == WRONG}
        rules |= {breach.rule for breach in [*world.disciplines, world.verdict] if breach}
    return questions, rules


#: fault -> the question whose contract refuses it
REFUSED = {
    "row-by-batch-index": "worker_program",
    "table-bound-at-capture": "worker_program",
    "rotating-table-pool": "worker_program",
    "state-indices-through-slots": "worker_program",
    "late-row-not-masked": "worker_program",
    "seed-divides-by-smallest-block": "worker_program",
    "counts-into-mutable-rows": "worker_program",
    "flush-after-zeroing": "worker_program",
    "store-does-not-wait": "worker_program",
    "boundary-from-mirror": "schedule",
    "state-hit-in-the-same-step": "schedule",
    "tail-shared-by-its-hit": "schedule",
    "no-fence": "schedule",
    "window-freed-on-optimistic-count": "schedule",
    "visible-after-one-rank": "on_report",
    "failed-store-keeps-its-key": "on_report",
    "freed-from-the-mirror": "on_output",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_is_refused_by_the_contract_of_its_question(name: str) -> None:
    fault = CATALOGUE[name]
    questions, _ = refused(fault.bites[0], fault.policy, range(12))
    assert REFUSED[name] in questions


#: faults of what no single process can see: the contracts must stay silent, and the world decides
UNSEEN = ("zero-accepted", "stages-on-optimistic-counts")


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_view_does_not_show_is_left_to_the_world(name: str) -> None:
    fault = CATALOGUE[name]
    questions, rules = refused(fault.bites[0], fault.policy, range(12))
    assert not questions and rules


def designs() -> dict[str, str]:
    """Repaired designs that differ: fault name -> configuration."""
    seen: dict[tuple[str, str], str] = {}
    for name, fault in CATALOGUE.items():
        if fault.change and fault.bites:
            seen.setdefault((fault.bites[0], repr(sorted(fault.base))), name)
    return {name: config for (config, _), name in seen.items()}


@pytest.mark.parametrize(("name", "config"), designs().items())
def test_no_repaired_design_is_refused(name: str, config: str) -> None:
    questions, rules = refused(config, CATALOGUE[name].repaired, range(4))
    assert not questions and not rules


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code and what the command printed."""
    code = main(["--runs", "3", "--choices", "120", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_reports_by_question_and_class(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lockstep.json"
    code, out, _ = command("--json", str(file), capsys=capsys)
    assert code == 0 and out.endswith("verdict: holds (sampled: 0 answers refused)\n")
    rows = json.loads(file.read_text(encoding="utf-8"))["answers"]
    assert {row["question"] for row in rows} >= {"on_arrive", "schedule", "on_output", "worker_program"}


def test_the_command_fails_on_a_wrong_policy(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("--policy", "fault:no-fence", "--config", "fences", "--runs", "10", capsys=capsys)
    assert code == 1 and "reuse_flushes_fence" in out and "verdict: refuted" in out


@pytest.mark.parametrize(
    "wrong", [("--policy", "fault:none-such"), ("--config", "none-such"), ("--runs", "0")]
)
def test_the_command_refuses_bad_input_in_one_line(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(*wrong, capsys=capsys)
    assert code == 2 and not out and err.count("\n") == 1 and err.startswith("spec.lockstep: ")


def test_the_command_lists_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("--list", capsys=capsys)
    assert code == 0 and "composed" in out
