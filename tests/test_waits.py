"""Deadlock: no walked state has a cycle of waits, and a program that makes one is caught with the cycle
named."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import networkx as nx
import pytest

from spec.config import named
from spec.faults import hunt
from spec.ops import Begin, End, Wait
from spec.policy import Program
from spec.reference import Reference
from spec.waits import NOBODY, deadlock, wait_graph
from spec.walk import Adversary, draw_options
from spec.world import World


class FlushWaitsForItself(Reference):
    """Submits stores after everything else of the step: a flush waits for a store that waits for later
    main work."""

    def worker_program(self, rank: int, message: Any) -> Program:
        program = super().worker_program(rank, message)
        late = [(s, op) for s, op in program if s == "store" and isinstance(op, (Begin, End))]
        return [entry for entry in program if entry not in late] + late


class NeverSubmits(Reference):
    """Waits for stores that it has not enqueued."""

    def worker_program(self, rank: int, message: Any) -> Program:
        program = super().worker_program(rank, message)
        flushed = {op.job for _, op in program if isinstance(op, Wait)}
        return [(s, op) for s, op in program if not (isinstance(op, (Begin, End)) and op.job in flushed)]


def walked(name: str, policy: type[Reference], seed: int, off: frozenset[str] = frozenset()) -> World:
    """A random walk that looks at the wait graph after every choice."""
    random = Random(seed)
    config = named(name)
    world = World(config, policy, off=off)
    adversary = Adversary(config, random, draw_options(config, random))
    for _ in range(200):
        choice = adversary.draw(world)
        if choice and world.choose(choice) and not world.verdict:
            graph = wait_graph(world)
            assert nx.is_directed_acyclic_graph(graph) and NOBODY not in graph
    return world


@pytest.mark.parametrize(
    "name", ["composed", "composed-sync", "composed-pp4", "composed-v1", "composed-v1-pp2"]
)
def test_no_walked_state_has_a_cycle(name: str) -> None:
    waited = 0
    for seed in range(4):
        world = walked(name, Reference, seed)
        assert world.verdict is None
        waited += world.tally["wait_graph_acyclic"][1]
    assert waited > 20


@pytest.mark.parametrize("policy", [FlushWaitsForItself, NeverSubmits])
def test_a_deadlock_is_found_and_told(policy: type[Reference]) -> None:
    for seed in range(40):
        world = walked("composed", policy, seed)
        if world.verdict and world.verdict.rule == "wait_graph_acyclic":
            break
    else:
        raise AssertionError("no walk came to the deadlock")
    text = world.verdict.text
    assert text == deadlock(world)
    if policy is FlushWaitsForItself:
        rank = text.split()[4]
        assert text == (
            f"stream main of rank {rank} waits for stream store of rank {rank} waits for stream "
            f"main of rank {rank}"
        ) or text == (
            f"stream store of rank {rank} waits for stream main of rank {rank} waits for stream "
            f"store of rank {rank}"
        )
    else:
        assert text.endswith("which nobody enqueued")


def test_without_the_graph_a_deadlock_is_seen_only_when_the_adversary_goes_quiet() -> None:
    for seed in range(40):
        random = Random(seed)
        config = named("composed")
        world = World(config, FlushWaitsForItself, off=frozenset({"wait_graph_acyclic"}))
        adversary = Adversary(config, random, draw_options(config, random))
        for _ in range(200):
            choice = adversary.draw(world)
            if choice:
                world.choose(choice)
        if not world.verdict and deadlock(world):
            world.quiet()
            assert world.verdict and world.verdict.rule == "everything_drains"
            return
    raise AssertionError("no walk came to the deadlock")


@pytest.mark.parametrize(("tokens", "step"), [(1000, 16), (600, 1)])
def test_a_long_request_is_no_livelock(tokens: int, step: int) -> None:
    config = replace(named("plain"), request_tokens=tokens, step_tokens=step, slots=1, pool_blocks=2 * tokens)
    world = World(config, Reference)
    assert world.choose(("arrive", "r1", "0", tokens // 2, tokens // 2))
    assert world.quiet() and world.book.step > 400


class FlushesBeforeItSubmits(Reference):
    """A store that is flushed in the very step that brings it is waited for and not submitted (the class of
    https://github.com/vllm-project/vllm/pull/29870)."""

    def worker_program(self, rank: int, message: Any) -> Program:
        now = {job for job in message.stores if job in message.flush}
        program = super().worker_program(rank, message)
        return [(s, op) for s, op in program if not (isinstance(op, (Begin, End)) and op.job in now)]


def test_an_engine_that_stands_still_in_the_end_says_what_it_waits_for() -> None:
    """Also where its queue is full, so that nothing is scheduled any more."""
    found = hunt.find(named("preempting"), FlushesBeforeItSubmits, runs=200, choices=200, seed=0)
    assert found and found.breach.rule == "wait_graph_acyclic"
    assert "which nobody enqueued" in found.breach.text
