"""What a policy is: the questions that an implementation answers, and the form of its answers.

The reference model, a fault, the reference implementation and a vLLM release behind an adapter are all
policies in one world.  A policy is asked these questions and no others.  It learns what the process it
stands for really learns: requests, sampled tokens, reports.  It sees no ghost, no stream position and no
other rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from spec.events import Event
from spec.ops import Op, UserId

Program = list[tuple[str, Op]]
"""Operations in the order in which a rank's host enqueues them, each with its stream: main, store, load or
counts."""


@dataclass(slots=True)
class Answer:
    """A policy's answer: its decisions in the order taken, and for ``schedule`` the message to every rank."""

    decisions: list[Event] = field(default_factory=list)
    message: Any = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the server receives it."""

    uid: UserId
    tokens: tuple[int, ...]
    outputs: int  # tokens to generate


@dataclass(frozen=True, slots=True)
class Output:
    """A step's sampled tokens as they reach the scheduler: per row of the step, the verified tokens."""

    step: int
    tokens: tuple[tuple[UserId, tuple[int, ...]], ...]


class PolicyError(AssertionError):
    """A policy stops with an error of its own (an engine's assertion): a verdict, never hidden."""


class Policy(Protocol):
    """Seven questions, and the private state as text.

    Sources of the names: vLLM ``v1/core/sched/interface.py``, ``KVConnectorBase_V1``."""

    def on_arrive(self, arrival: Arrival) -> Answer:
        """A client's request has arrived."""
        ...

    def schedule(self) -> Answer:
        """The next step: rows, blocks, keys, transfers, flushes; and the message for the ranks."""
        ...

    def worker_program(self, rank: int, message: Any) -> Program:
        """What this rank enqueues for the step."""
        ...

    def on_output(self, output: Output) -> Answer:
        """A step's tokens have come back."""
        ...

    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        """A rank says that its part of a transfer has ended, well or not."""
        ...

    def on_abort(self, uid: UserId) -> Answer:
        """The client has gone away."""
        ...

    def on_reset(self, scope: str) -> Answer:
        """Clear the prefix caches: ``local`` keeps the host tier."""
        ...
