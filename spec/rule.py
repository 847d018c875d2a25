"""What an invariant is, and the three moments at which one can be judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec.events import Event

if TYPE_CHECKING:
    from spec.world import World


@dataclass(frozen=True, slots=True)
class Rule:
    """One invariant.

    ``kind`` is ``consequence`` (a harm by itself: a wrong read, a lost or doubly owned block, a stuck
    request, an error) or ``discipline`` (a sufficient rule that correct code may replace by another: it
    localises a cause).  A rule is judged either by the core protocol's guard for the decisions in ``core``;
    or at the decisions in ``on`` by ``judges``; or on states, whenever one of ``parts`` has changed, by
    ``applies`` and ``holds`` (which answers with the problem); or, with none of these, by the operation that
    reads the bytes or moves the slot, where ``World.judge`` names it.
    """

    name: str
    kind: str
    mechanism: str
    sentence: str  # what must hold, in words that a reviewer of an engine can judge
    antecedent: str  # when it says anything
    source: str  # upstream function, or public report of the harm
    core: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    judges: Callable[[World, Event], None] | None = None
    parts: tuple[str, ...] = ()
    applies: Callable[[World], bool] | None = None
    holds: Callable[[World], str | None] | None = None
