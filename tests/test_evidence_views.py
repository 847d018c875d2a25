"""What a policy can see, and what names mean: a view holds no ghost, and renaming ids changes no verdict."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import Enum
from random import Random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from spec.book import Request
from spec.chains import Chains
from spec.config import Config, named
from spec.lockstep import Lockstep, lockstep
from spec.memory import Memory
from spec.ops import Deref
from spec.policy import Policy
from spec.reference import Decisions, Reference
from spec.walk import Adversary, draw_options
from spec.world import Choice, Client, Rank, StepRun, Transfer, World

GHOSTS = (World, Rank, Memory, Client, StepRun, Transfer)
CONFIGS = ("composed", "composed-sync", "composed-v1", "partial-tails")


def run(
    config: Config, factory: Callable[[Config, Chains], Policy], seed: int, choices: int = 200
) -> tuple[World, list[Choice]]:
    """A random walk, and the choices that were made."""
    random = Random(seed)
    world = World(config, factory)
    adversary = Adversary(config, random, draw_options(config, random))
    made = []
    for _ in range(choices):
        choice = adversary.draw(world)
        if choice and world.choose(choice):
            made.append(choice)
    return world, made


# -- no ghost ----------------------------------------------------------------------------------------------


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Everything that an object leads to: fields, elements, and what a function closes over."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield "key", key
            yield f"[{key!r}]", value
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        for index, item in enumerate(thing):
            yield f"[{index}]", item
    elif isinstance(thing, MethodType):
        yield ".__self__", thing.__self__
        yield ".__func__", thing.__func__
    elif isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            yield ".closure", cell.cell_contents
        yield ".defaults", thing.__defaults__ or ()
        yield ".kwdefaults", thing.__kwdefaults__ or {}
    elif not isinstance(thing, (str, int, bytes, float, type, ModuleType, BuiltinFunctionType, Enum)):
        for name in {name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())}:
            if hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
        for name, value in getattr(thing, "__dict__", {}).items():
            yield f".{name}", value


def ghosts(root: Any, root_name: str) -> list[str]:
    """Paths from an object to ghosts."""
    found, seen, todo = [], {id(root)}, [(root_name, root)]
    keep = [root]  # ids are unique only while their objects live
    while todo:
        path, thing = todo.pop()
        if isinstance(thing, GHOSTS):
            found.append(path)
            continue
        for name, part in parts(thing):
            if id(part) not in seen:
                seen.add(id(part))
                keep.append(part)
                todo.append((path + name, part))
    return found


class Keeps(Reference):
    """Keeps every message that it sends, for the test to look at."""

    def schedule(self) -> Any:
        answer = super().schedule()
        self.sent = [*getattr(self, "sent", []), answer.message]
        return answer


@pytest.mark.parametrize("name", CONFIGS)
def test_a_view_leads_to_no_ghost(name: str) -> None:
    for seed in range(3):
        world, _ = run(named(name), lockstep(Keeps), seed)
        policy = world.policy
        assert isinstance(policy, Lockstep)
        assert world.clients and world.steps
        assert ghosts(world.book, "book") == []
        assert ghosts(policy, "policy") == []
        assert len(policy.policy.sent) > 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("hide", ["field", "closure", "method", "default"])
def test_a_hidden_ghost_is_found(hide: str) -> None:
    world, _ = run(named("plain"), Keeps, 0, choices=40)
    policy: Any = world.policy
    if hide == "field":
        policy.plans["spy"] = [world.ranks[0].memory]
    elif hide == "closure":
        policy.spy = lambda: world.clients
    elif hide == "method":
        policy.spy = world.head_blocked
    else:
        policy.spy = lambda clients=world.clients: clients
    assert ghosts(policy, "policy")


class OnlyFold(Chains):
    """Prefix hashes as an engine has them: they can be made from tokens, not read back."""

    __slots__ = ()

    def refuse(self, *args: Any) -> Any:
        raise AssertionError("a policy reads what a hash stands for")

    prefixes = length = next_token = name = refuse  # type: ignore[assignment]


@pytest.mark.parametrize("name", CONFIGS)
def test_hashes_are_made_but_never_read(name: str) -> None:
    def blind(config: Config, chains: Chains) -> Policy:
        hashes = OnlyFold()
        for slot in ("_child", "_last", "_line", "_parent"):
            setattr(hashes, slot, getattr(chains, slot))
        return lockstep(Reference)(config, hashes)

    for seed in range(2):
        plain, choices = run(named(name), Reference, seed)
        world, again = run(named(name), blind, seed)
        assert (world.verdict, again) == (plain.verdict, choices)


# -- renaming ----------------------------------------------------------------------------------------------


def faulty(config: Config, chains: Chains) -> Reference:
    """State copies that find their row by batch index."""
    return Reference(config, chains, Decisions(precopy_row=lambda index, slot: Deref("source", index)))


def picture(world: World, names: Callable[[str], str] = str) -> tuple[Any, ...]:
    """What must not depend on names: verdict, choices, events by kind, antecedents, witnesses."""
    verdict = world.verdict and (world.verdict.rule, world.verdict.kind, world.verdict.at)
    disciplines = [(d.rule, d.at) for d in world.disciplines]
    return (
        verdict, disciplines, world.choices, world.count, dict(world.fired), world.tally,
        dict(world.witnesses), Counter(map(names, world.lives.elements())),
    )  # fmt: skip


def shuffled(
    factory: Callable[[Config, Chains], Reference], seed: int
) -> Callable[[Config, Chains], Reference]:
    """The same policy, its pool in another order: every block id is another one."""

    def make(config: Config, chains: Chains) -> Reference:
        policy = factory(config, chains)
        order = list(policy.book.free)
        Random(seed).shuffle(order)
        policy.book.free = deque(order)
        return policy

    return make


@pytest.mark.parametrize("factory", [Reference, faulty], ids=["right", "wrong"])
@pytest.mark.parametrize("name", CONFIGS)
def test_block_ids_are_names(name: str, factory: Callable[[Config, Chains], Reference]) -> None:
    verdicts = set()
    for seed in range(6):
        world, choices = run(named(name), factory, seed)
        other = World(named(name), shuffled(factory, seed + 1))
        assert [c for c in choices if other.choose(c)] == choices
        assert picture(other) == picture(world)
        verdicts.add(world.verdict and world.verdict.rule)
    assert (verdicts == {None}) == (factory is Reference)


@pytest.mark.parametrize("factory", [Reference, faulty], ids=["right", "wrong"])
@pytest.mark.parametrize("name", CONFIGS)
def test_request_names_and_families_are_names(
    name: str, factory: Callable[[Config, Chains], Reference]
) -> None:
    new = {"r1": "zoe", "r2": "bob", "r3": "r1", "r4": "r2", "3": "other"}

    def renamed(choice: Choice) -> Choice:
        kind, *rest = choice
        return (kind, *(new.get(v, v) if isinstance(v, str) and kind != "reset" else v for v in rest))

    for seed in range(6):
        world, choices = run(named(name), factory, seed)
        other = World(named(name), factory)
        assert all(other.choose(renamed(choice)) for choice in choices)
        assert picture(other) == picture(world, lambda n: new.get(n, n))


def test_a_policy_that_looks_at_ids_would_be_seen() -> None:
    class Superstitious(Reference):
        """Puts a step off while the next free block is a multiple of three."""

        def fits(self, request: Request, c: int, q: int) -> bool:
            return super().fits(request, c, q) and self.book.free[0] % 3 != 0

    differs = False
    for seed in range(6):
        world, choices = run(named("composed-tight"), Superstitious, seed)
        other = World(named("composed-tight"), shuffled(Superstitious, seed + 1))
        same = [c for c in choices if other.choose(c)] == choices
        differs |= not same or picture(other) != picture(world)
    assert differs
