"""Lockstep over the catalogue of faults: contracts refuse the wrong answers, and no repaired design."""

from __future__ import annotations

from random import Random

import pytest

from spec.config import named
from spec.faults import CATALOGUE
from spec.lockstep import WRONG, Lockstep, lockstep
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
