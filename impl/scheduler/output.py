"""What a step tells every worker, as data (`v1/core/sched/output.py::SchedulerOutput`, vLLM 0.33.0)."""

from __future__ import annotations

from dataclasses import dataclass, field

from impl.device import Transfer
from spec.ops import UserId

Table = tuple[tuple[int, ...], ...]
"""Block ids a group."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request of a step."""

    uid: UserId
    computed: int  # by the scheduler's count, drafts in flight included
    processed: int
    tokens: int  # query tokens, drafts included
    decode: bool


@dataclass(slots=True)
class SchedulerOutput:
    """One step."""

    step: int
    left: list[UserId] = field(default_factory=list)  # finished and preempted
    fresh: list[tuple[UserId, int, Table]] = field(default_factory=list)  # entering the batch, whole rows
    appended: list[tuple[UserId, Table]] = field(default_factory=list)  # new columns of the others
    rows: list[ScheduledRow] = field(default_factory=list)
    zero: list[tuple[int, int]] = field(default_factory=list)  # (block, group)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (from, to, group)
    flush: list[int] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    accepted: list[tuple[UserId, int]] = field(
        default_factory=list
    )  # of processed steps (sync v1 with stages)
    holds_nothing: list[int] = field(
        default_factory=list
    )  # blocks just handed out or given back: for debug mode
