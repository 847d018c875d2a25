"""A request as the scheduler keeps it (`v1/request.py::Request`, vLLM 0.33.0)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from impl.scheduler.pool import Block
from spec.ops import UserId


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"  # holds blocks; a load is in flight, or has landed and the request may run
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class Request:
    """One incarnation of a request."""

    uid: UserId
    prompt: int
    outputs: int
    tokens: list[int]
    hashes: list[int]  # hashes[n]: of the first n known tokens; drafts are never in it
    tables: list[list[Block | None]]  # per group: logical column -> block
    published: list[int]  # per group: columns offered for publishing
    mirror: list[list[int]]  # per group: block ids as workers hold them, only ever appended to
    next_chunk: list[int]  # per group: chunks offered to the store
    told: list[int]  # per group: columns that workers know of
    status: Status = Status.WAITING
    computed: int = 0  # scheduled tokens included
    hit: int = 0  # tokens in place at the last admission
    flying: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # step -> (from, tokens, drafts)
    # transfers not reported by every rank, and their way
    jobs: dict[int, str] = field(default_factory=dict)
    landed: bool = False  # its load has landed everywhere
    load_failed: bool = False  # one of the transfers that load it has failed
    tried: bool = False  # a load failed: compute, do not look up again
    grown: bool = False  # a step has grown its recurrent rows
    sampled_in: int = 0  # last step that samples for it
    since: int = 0  # number of the next output since it was last preempted; 0: it never was
    in_batch: bool = False  # workers hold a slot for it
    tail: tuple[int, dict[int, Block]] | None = None  # published inside a block: (tokens, group -> block)
    retained: list[tuple[int, int, Block]] = field(default_factory=list)  # (step, group, block) until copied

    @classmethod
    def new(
        cls, uid: UserId, tokens: tuple[int, ...], hashes: list[int], outputs: int, groups: int
    ) -> Request:
        """A request that has just arrived."""
        empty: list[list[Block | None]] = [[] for _ in range(groups)]
        return cls(
            uid, len(tokens), outputs, list(tokens), hashes, empty, [0] * groups, [[] for _ in range(groups)],
            [0] * groups, [0] * groups,
        )  # fmt: skip

    @property
    def known(self) -> int:
        """Verified tokens: the prompt and what outputs have brought."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens that it will have at the end."""
        return self.prompt + self.outputs

    @property
    def processed(self) -> int:
        """Computed tokens whose step's output has been processed."""
        return self.computed - sum(q for _, q, _ in self.flying.values())

    @property
    def holds(self) -> bool:
        """Whether it holds any block."""
        return any(True for _ in self.blocks())

    @property
    def loads_left(self) -> int:
        """Transfers that still load it."""
        return sum(way == "load" for way in self.jobs.values())

    def blocks(self) -> Iterator[Block]:
        """Every block that it holds, once a reference."""
        yield from (block for table in self.tables for block in table if block)
        yield from (block for _, _, block in self.retained)

    @property
    def over(self) -> bool:
        """Whether it is done, holds nothing and flies in no step."""
        return self.status is Status.DONE and not self.flying and not self.holds

    def block(self, group: int, col: int) -> Block | None:
        """The block of a column; None for a null or a missing one."""
        table = self.tables[group]
        return table[col] if 0 <= col < len(table) else None

    def ids(self, group: int) -> list[int]:
        """The table as block ids, 0 for null."""
        return [block.id if block else 0 for block in self.tables[group]]

    def put(self, group: int, col: int, block: Block) -> None:
        """A block becomes a column; columns skipped before it are null."""
        table = self.tables[group]
        table.extend([None] * (col + 1 - len(table)))
        table[col] = block

    def start_over(self, *, keeps_mirror: bool) -> None:
        """Nothing is held any more: the next admission begins from nothing."""
        groups = len(self.tables)
        for table in self.tables:
            table.clear()
        self.published, self.next_chunk = [0] * groups, [0] * groups
        if not keeps_mirror:
            self.mirror = [[] for _ in range(groups)]
        self.landed = self.grown = False
        self.tail = None
