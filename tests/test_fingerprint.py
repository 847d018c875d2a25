"""Searches merge runs whose worlds have one fingerprint: all that decides a future is in it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from spec import config as configs
from spec import fingerprint
from spec.chains import Chains
from spec.config import Config
from spec.faults import CATALOGUE
from spec.faults.hunt import Choices, continued, stored
from spec.reduce import replay
from spec.reference import Reference
from spec.walk import Adversary, PolicyFactory, draw_options
from spec.world import World

HOLDERS = {  # every class that keeps state which a run can change
    "Book", "Client", "Core", "HostChunk", "Job", "JobState", "Memory", "Plan", "Rank", "Reference",
    "Request", "StepRun", "Transfer", "Worker", "World",
}  # fmt: skip
SETTINGS = {"config", "chains", "decide"}  # the same in all worlds of a search


def walked(config: Config, seed: int, choices: int) -> tuple[World, Adversary]:
    """A world in the middle of a random run."""
    random = Random(seed)
    adversary = Adversary(config, random, draw_options(config, random))
    world = World(config, Reference)
    while world.choices < choices:
        choice = adversary.draw(world)
        if choice is not None:
            world.choose(choice)
    return world, adversary


def names(one: Any) -> list[str]:
    """The fields of an object."""
    return [*vars(one)] if hasattr(one, "__dict__") else [*one.__slots__]


def holders(root: Any) -> Iterator[Any]:
    """Every object with fields that can be reached, each once."""
    todo, met = [root], {id(root)}
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            inner = [*one, *one.values()]
        elif isinstance(one, (list, tuple, set)) or type(one).__name__ == "deque":
            inner = [*one]
        elif type(one).__module__.startswith("spec.") and not isinstance(one, str):
            yield one
            inner = [getattr(one, name) for name in names(one) if name not in SETTINGS]
        else:
            continue
        for part in inner:
            if id(part) not in met:
                met.add(id(part))
                todo.append(part)


def test_every_field_counts_but_those_that_are_named() -> None:
    seen: set[str] = set()
    for config, seed in ((configs.named("composed"), 3), (configs.named("composed-v1"), 5)):
        world, _ = walked(config, seed, 120)
        before = fingerprint.text(world)
        for one in list(holders(world)):
            kind = type(one).__name__
            for name in names(one) if kind not in seen else ():
                kept = getattr(one, name)
                object.__setattr__(one, name, "something else")
                counts = fingerprint.text(world) != before
                object.__setattr__(one, name, kept)
                assert counts != (name in fingerprint.LEFT_OUT.get(kind, ())), f"{kind}.{name}"
            seen.add(kind)
        assert fingerprint.text(world) == before
    assert seen >= HOLDERS
    assert seen >= fingerprint.LEFT_OUT.keys()


def test_what_lies_inside_the_fields_counts() -> None:
    world, _ = walked(configs.named("composed"), 3, 120)
    memory = world.ranks[0].memory
    spot = next(iter(memory.host))
    run = next(run for run in world.steps.values() if run.lines)
    uid = next(iter(run.lines))
    before = fingerprint.mark(world)
    for kept, key, other in (
        (memory.host, spot, (0, (-1,))), (memory.torn_by, 1, 99), (memory.host_by, spot, 99),
        (memory.tables["source"][0][0], 0, 99), (memory.cells[1], 0, 99), (run.lines[uid], 0, 99),
        (run.starts, uid, 99), (world.book.core.slots, 0, (("r9", 1), 1)),
        (world.book.core.generation, 0, 99), (world.looked, ("r9", 1), {(0, 4, 1)}), (world.kept, (1,), uid),
    ):  # fmt: skip
        had = key in kept if isinstance(kept, dict) else True
        old = kept[key] if had else None  # type: ignore[index]
        kept[key] = other  # type: ignore[index]
        assert fingerprint.mark(world) != before, (key, other)
        if had:
            kept[key] = old  # type: ignore[index]
        else:
            del kept[key]  # type: ignore[arg-type]
        assert fingerprint.mark(world) == before


def test_what_is_left_out_changes_nothing_that_happens() -> None:
    config = configs.named("composed")
    for seed in range(6):
        world, adversary = walked(config, seed, 100)
        other, _ = walked(config, seed, 100)
        assert fingerprint.text(world) == fingerprint.text(other)
        for one in list(holders(other)):
            for name in fingerprint.LEFT_OUT.get(type(one).__name__, ()):
                kept = getattr(one, name)
                if name in ("handed_out", "published_in"):
                    kept.update(dict.fromkeys(kept, 77))
                elif name in ("forwarded", "preempted_at", "count", "choices"):
                    setattr(one, name, kept + 77)
        assert fingerprint.text(world) == fingerprint.text(other)
        for _ in range(150):
            choice = adversary.draw(world)
            if choice is not None:
                assert world.choose(choice) == other.choose(choice)
        assert world.quiet() and other.quiet()
        assert fingerprint.text(world) == fingerprint.text(other)


def test_an_object_of_another_package_is_refused() -> None:
    world = World(configs.named("plain"), Reference)
    world.kept[(1,)] = range(3)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"cannot look into builtins\.range"):
        fingerprint.text(world)


def test_a_list_with_two_names_is_not_two_lists() -> None:
    world = World(configs.named("plain"), Reference)
    table = world.ranks[0].memory.tables["source"][0]
    apart = fingerprint.text(world)
    table[1] = table[0]
    assert fingerprint.text(world) != apart


# -- equal marks, equal futures ---------------------------------------------------------------------------


def merged(
    config: Config, policy: PolicyFactory, alphabet: Choices, chains: Chains, states: int
) -> list[tuple[Choices, Choices]]:
    """Pairs of runs that a breadth-first search of so many states merges."""
    first: dict[bytes, Choices] = {fingerprint.mark(World(config, policy, chains=chains)): ()}
    level: list[Choices] = [()]
    pairs = []
    while level and len(first) < states:
        following = []
        for run, world in continued(config, policy, chains, level, alphabet):
            if world.verdict:
                continue
            mark = fingerprint.mark(world)
            if mark in first:
                pairs.append((first[mark], run))
            else:
                first[mark] = run
                following.append(run)
        level = following
    return pairs


def future(
    config: Config, policy: PolicyFactory, run: Choices, alphabet: Choices, chains: Chains
) -> list[tuple[Any, ...]]:
    """What every choice leads to: what breaks and where the world stands, and what a quiet phase finds."""
    found: list[tuple[Any, ...]] = []
    for choice in (*alphabet, ("quiet",)):
        world = replay(config, policy, run, chains=chains)
        made = world.choose(choice)
        verdict = world.verdict
        breach = verdict and (verdict.rule, verdict.text)
        found.append((choice, made, breach, made and not breach and fingerprint.mark(world)))
    return found


def parted(config: Config, policy: PolicyFactory, alphabet: Choices, *, states: int, pairs: int) -> int:
    """Pairs of merged runs over some choices, of the first so many, whose futures differ."""
    chains = Chains()
    found = merged(config, policy, alphabet, chains, states)
    assert found, "a search that merges nothing shows nothing"
    return sum(
        future(config, policy, one, alphabet, chains) != future(config, policy, two, alphabet, chains)
        for one, two in found[:pairs]
    )


@pytest.mark.parametrize(
    "name",
    [
        "abort-frees-load-targets", "fence-dropped-early", "counts-into-mutable-rows",
        "loaded-requests-hold-on", "pinned-table-rewritten", "tail-shared-by-its-hit",
    ],
)  # fmt: skip
def test_merged_runs_have_one_future(name: str) -> None:
    kept = stored(name)
    assert kept is not None
    config, _, choices = kept
    alphabet = tuple(dict.fromkeys(choices))
    assert parted(config, CATALOGUE[name].policy, alphabet, states=150, pairs=40) == 0


ACCEPTING = (("arrive", "r1", "0", 1, 6), ("accept", "r1", 0), ("schedule",), ("work",))
BY_ONE = (("arrive", "r1", "0", 2, 2), ("schedule",), ("work",), ("run", 0, "main", 1))


@pytest.mark.parametrize(
    ("config", "alphabet", "kind", "fields"),
    [
        ("composed-v1", ACCEPTING, "Client", {"agree"}),
        ("plain", BY_ONE, "World", {"ranks", "dirty"}),
        ("plain", BY_ONE, "Rank", {"streams", "executed"}),
    ],
)
def test_the_futures_part_when_something_is_forgotten(
    config: str, alphabet: Choices, kind: str, fields: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {"states": 120, "pairs": 60}
    assert parted(configs.named(config), Reference, alphabet, **bounds) == 0
    left_out = fingerprint.LEFT_OUT | {kind: fingerprint.LEFT_OUT.get(kind, frozenset()) | fields}
    monkeypatch.setattr(fingerprint, "LEFT_OUT", left_out)
    assert parted(configs.named(config), Reference, alphabet, **bounds) > 0
