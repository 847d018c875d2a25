"""What the reference scheduler remembers about a request beyond the book, and what it tells the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec.book import Key
from spec.ops import UserId

Chunk = tuple[Key, int, tuple[int, ...]]  # (key, host place, device block by sub-slot; 0: not copied)


@dataclass(slots=True)
class Plan:
    """Private state of the reference scheduler for one request."""

    outputs: int
    published: list[int]  # per group: columns already offered for publishing
    mirror: list[list[int]]  # per group: block ids as the ranks hold them: only ever appended
    next_chunk: list[int]  # per group: chunks already offered to the store
    told: list[int] = field(default_factory=list)  # per group: columns that the ranks know of
    jobs: dict[int, str] = field(default_factory=dict)  # transfers not fully reported -> "store" or "load"
    ready: bool = False  # an external load has completed; admission goes on from the book's hit
    load_failed: bool = False  # a part of its load has failed
    tried: bool = False  # a load failed: recompute, do not look up again
    allocated: bool = False  # its recurrent columns were grown by a step (not only adopted)
    sampled_in: int = 0  # last step that samples for it
    since: int = 0  # number of the next output since it was last preempted; 0: it never was
    in_batch: bool = False  # the ranks hold a slot for it
    tail: tuple[int, dict[int, int]] | None = None  # published inside a block: (tokens, group -> block)
    retained: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # (step, group, block) until the copy has run


@dataclass(slots=True)
class JobState:
    """A transfer until the last report."""

    uid: UserId
    way: str
    chunks: tuple[Chunk, ...]
    waiting: set[int]
    failed: bool = False
    stale: bool = False  # created before a reset of the host tier


@dataclass(frozen=True, slots=True)
class RowMessage:
    """One scheduled request, as the ranks learn of it."""

    uid: UserId
    computed: int  # by the scheduler's count
    processed: int
    tokens: int
    decode: bool


@dataclass(slots=True)
class Message:
    """One step's message to every rank (``v1/core/sched/output.py::SchedulerOutput``)."""

    step: int
    left: list[UserId] = field(default_factory=list)  # finished and preempted
    fresh: list[tuple[UserId, int, tuple[tuple[int, ...], ...]]] = field(default_factory=list)  # whole rows
    appended: list[tuple[UserId, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    rows: list[RowMessage] = field(default_factory=list)
    zero: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    accepted: list[tuple[UserId, int]] = field(
        default_factory=list
    )  # sync v1 with stages: counts of processed steps
