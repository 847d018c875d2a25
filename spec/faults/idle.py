"""Whether a tamper does anything at all: its runs beside those of the design without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from spec import ops
from spec.chains import Chains
from spec.config import Config
from spec.events import Event
from spec.memory import Memory
from spec.policy import Policy, Program
from spec.walk import PolicyFactory, walk_once
from spec.world import World


def does_nothing_else(
    todo: Sequence[Config],
    policy: PolicyFactory,
    without: PolicyFactory,
    *,
    runs: int,
    choices: int,
    seed: int,
) -> bool:
    """Whether under the same choices a policy decides, enqueues and does to memory just what another does, in
    so many runs of each configuration."""
    return not any(
        differs(config, policy, without, walk_once(config, policy, seed, number, choices).choices)
        for number in range(runs)
        for config in todo
    )


def differs(config: Config, policy: PolicyFactory, without: PolicyFactory, choices: Sequence[Event]) -> bool:
    """Whether two policies do different things in one run."""
    chains, one, other = Chains(), Noting(policy), Noting(without)
    worlds = [World(config, noting.build, record=True, chains=chains) for noting in (one, other)]
    for choice in choices:
        if worlds[0].choose(choice) != worlds[1].choose(choice):
            return True
        if one.programs != other.programs or worlds[0].count != worlds[1].count:
            return True
        told = [[event for event in world.events if event[0] != "exec"] for world in worlds]
        if told[0] != told[1] or (one.own and memories(worlds[0]) != memories(worlds[1])):
            return True
        for world in worlds:
            world.events.clear()
        one.programs.clear()
        other.programs.clear()
    return False


def memories(world: World) -> list[list[object]]:
    """All that the ranks' memories hold, which what an operation of the file's does may change unseen."""
    return [[getattr(rank.memory, name) for name in Memory.__slots__] for rank in world.ranks]


@dataclass
class Noting:
    """A policy factory whose policies' programs are noted."""

    factory: PolicyFactory
    programs: list[Any] = field(default_factory=list)
    own: bool = False  # whether an operation was met that is none of the model's

    def build(self, config: Config, chains: Chains) -> Policy:
        """A policy that notes."""
        return NotedPolicy(self.factory(config, chains), self)

    def note(self, program: Program) -> None:
        """Keep what the program says now; tables may be written later."""
        self.programs.append([(stream, *written(op)) for stream, op in program])
        self.own |= any(type(op).__module__ != ops.__name__ for _, op in program)


@dataclass
class NotedPolicy:
    """One policy of these."""

    inner: Policy
    noting: Noting

    def __getattr__(self, name: str) -> Any:
        if name == "worker_program":
            return self.worker_program_noted
        return getattr(self.inner, name)

    def worker_program_noted(self, rank: int, message: Any) -> Program:
        """The program, noted."""
        program = self.inner.worker_program(rank, message)
        self.noting.note(program)
        return program


def written(op: ops.Op) -> tuple[str, ...]:
    """An operation as the model knows it: the class that it extends, and the fields that this has."""
    kind = next(one for one in type(op).__mro__ if one.__module__ == ops.__name__)
    names = [one.name for one in fields(kind)] if is_dataclass(kind) else []
    return (kind.__name__, *(repr(getattr(op, name)) for name in names))
