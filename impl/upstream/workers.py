"""A release's worker as programs of the world: the order of ``worker_order``, step by step, on ghost memory.

``V2`` keeps persistent slots, source tables that only grow and a ring of late post-processing; ``V1`` keeps
dense batch rows that move.  Neither decides anything: *what* comes from the scheduler's message, the *order*
and the release's habits (which row a late copy reads, what the seed divides by, ...) from
:mod:`impl.upstream.worker_order`.

Not executed, because nothing reads it here: slot mappings, metadata, drafts of a single-module drafter, and
the null entries that 0.33.0 puts below a window.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from impl.upstream import worker_order
from impl.upstream.worker_order import Does, Facts, Operation
from spec.arith import align
from spec.config import Config, Kind
from spec.ops import (
    BatchRow,
    Begin,
    Collect,
    CopyCounts,
    CopyPage,
    Deref,
    Draft,
    End,
    Forward,
    Gather,
    HostCounts,
    HostRows,
    Leave,
    Op,
    Permute,
    PostProcess,
    PreProcess,
    Sample,
    SetRow,
    SetSlot,
    TableRow,
    Take,
    UserId,
    Wait,
    Zero,
)
from spec.policy import PolicyError, Program
from spec.world import Rank, World

Table = tuple[tuple[int, ...], ...]  # per group: block ids

#: repairs of a worker's order or habits, by name
REPAIRS = {
    "flush_before_overwriting": "queued stores are submitted and waited for before zeroing, copies and pre-copy",
    "padded_prompts_decode": "a padded prompt of one token leaves one state a token, at position 0 too",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One scheduled request."""

    uid: UserId
    computed: int  # by the scheduler's count
    tokens: int
    drafts: int
    padded: bool  # the drafts are placeholders


@dataclass(slots=True)
class Message:
    """One step as every worker receives it (``SchedulerOutput`` and the connector's metadata)."""

    step: int
    left: list[UserId] = field(default_factory=list)  # finished and preempted, in the worker's order
    fresh: list[tuple[UserId, int, int, int, Table]] = field(default_factory=list)
    """New and resumed requests: computed and known tokens, longest length, whole rows."""
    appended: list[tuple[UserId, Table]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    zero: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    loads: list[tuple[int, bool]] = field(default_factory=list)  # job, and whether this step's forward reads it


@dataclass(slots=True)
class ResetAccepted(Op):
    """Accepted counts of these slots become 1."""

    slots: tuple[int, ...]

    def run(self, world: World, rank: Rank) -> None:
        for slot in self.slots:
            rank.memory.accepted[slot] = 1


@dataclass(slots=True)
class Collected(Collect):
    """The same, remembered: what ends later travels with a later step."""

    worker: Worker = field(repr=False)

    def run(self, world: World, rank: Rank) -> None:
        world.collect(rank, self.step)
        self.worker.collected = self.step


@dataclass(slots=True)
class Lives:
    """What the host of a rank remembers about a request in its batch."""

    slot: int
    prefill: int  # tokens known when it entered: up to here it is prefilling
    longest: int  # tokens after which it ends
    lengths: list[int]  # columns per group


class Worker:
    """What both runners share: transfers, and the program's frame."""

    def __init__(
        self, release: str, config: Config, divisor: int, rank: int, repairs: tuple[str, ...] = ()
    ) -> None:
        self.release, self.config, self.rank, self.repairs = release, config, rank, repairs
        self.facts: Facts = worker_order.facts(release, config.runner)
        self.last_stage = rank // config.tp == config.pp - 1
        self.mamba_block = next((g.block_tokens for g in config.groups if g.kind is Kind.MAMBA), 0)
        self.divisor = self.mamba_block if self.facts.resume_divisor == "mamba_block" else divisor
        self.lives: dict[UserId, Lives] = {}
        self.queued: list[int] = []  # stores that the next step submits
        self.collected = 0  # last step that has collected the transfers that ended

    def fingerprint(self) -> str:
        """Private state as text."""
        return repr((self.lives, self.queued, self.collected))

    def prefilling(self, row: Row) -> bool:
        """Whether the row computes tokens that were known when the request entered the batch."""
        return min(row.computed, self.lives[row.uid].prefill) < self.lives[row.uid].prefill

    def decodes(self, row: Row) -> bool:
        """Whether recurrent layers leave one state a query token."""
        if not self.prefilling(row):
            return True
        known = min(row.computed, self.lives[row.uid].prefill)
        extends = known > 0 or "padded_prompts_decode" in self.repairs
        return self.release != "0.30.0" and row.tokens - row.drafts == 1 and extends

    def samples(self, row: Row) -> bool:
        """Whether a token is sampled for the row."""
        return row.computed + row.tokens >= self.lives[row.uid].prefill

    def transfer(self, does: Does, message: Message) -> Program:
        """Operations of a transfer's stage."""
        flush = message.flush
        if does is Does.SUBMIT_STORES:
            jobs = self.queued + [job for job in message.stores if job in flush]
            self.queued = []
            return [("store", op) for job in jobs for op in (Begin(job, -1), End(job))]
        if does is Does.FLUSH:
            return [("main", Wait(job)) for job in flush]
        if does is Does.QUEUE_STORES:
            self.queued = [job for job in message.stores if job not in flush]
            return []
        if does is Does.COLLECT:
            return [("main", Collected(message.step, self))] if self.config.offload else []
        now = [job for job, sync in message.loads if sync == (does is Does.SYNC_LOADS)]
        begun: Program = [("load", op) for job in now for op in (Begin(job, -1), End(job))]
        waits: Program = [("main", Wait(job)) for job in now]
        return begun + (waits if does is Does.SYNC_LOADS else [])

    def forward(self, message: Message, rows: list[Row]) -> Program:
        """The forward; up to 0.31 decode rows without drafts read the state at offset 0."""
        batch = self.batch(rows)
        before: Program = []
        if not self.facts.zero_draft_rows_use_offset:
            slots = tuple(self.lives[r.uid].slot for r in rows if self.decodes(r) and not r.drafts)
            before = [("main", ResetAccepted(slots))] if slots else []
        index: tuple[TableRow, ...] = tuple(Deref("gathered", i) for i in range(self.padded(len(rows))))
        return [*before, ("main", Forward(message.step, batch, index))]

    def batch(self, rows: list[Row]) -> tuple[BatchRow, ...]:
        """The batch as the world sees it."""
        return tuple(
            BatchRow(row.uid, self.lives[row.uid].slot, row.tokens, self.decodes(row), row.padded)
            for row in rows
        )

    def padded(self, rows: int) -> int:
        """Rows of a captured batch."""
        return min(rows + rows % 2, self.config.slots)

    def gather(self, rows: list[Row]) -> Program:
        """This step's rows, copied into the input tables."""
        slots = tuple(self.lives[row.uid].slot for row in rows)
        nothing = (0,) * len(self.config.groups)
        return [("main", Gather(slots, (nothing,) * len(rows), self.padded(len(rows))))]

    def precopy(self, rows: list[Row]) -> Program:
        """Running columns advance; states move to them."""
        if not self.mamba_block:
            return []
        operands = tuple((self.row(i, row), self.lives[row.uid].slot, row.tokens) for i, row in enumerate(rows))
        return [("main", PreProcess(operands))]

    def row(self, index: int, row: Row) -> TableRow:
        """The table row of a state copy."""
        if self.facts.copies_by == "slot":
            return Deref("source", self.lives[row.uid].slot)
        return Deref("gathered", index)

    def post(self, message: Message, rows: list[Row]) -> Program:
        """Counts become true, boundary states are copied."""
        late = tuple((i, self.lives[row.uid].slot, self.row(i, row)) for i, row in enumerate(rows))
        return [("main", PostProcess(message.step, late))]


def flush_first(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """The same program with submission and flush before whatever overwrites a block."""
    hooks = tuple(o for o in operations if o.does in (Does.SUBMIT_STORES, Does.FLUSH))
    rest = tuple(o for o in operations if o not in hooks)
    at = next(i for i, o in enumerate(rest) if o.does is Does.FINISH)
    return rest[:at] + hooks + rest[at:]


class V2(Worker):
    """The v2 runner (``v1/worker/gpu/model_runner.py``)."""

    def __init__(
        self, release: str, config: Config, divisor: int, rank: int, repairs: tuple[str, ...] = ()
    ) -> None:
        super().__init__(release, config, divisor, rank, repairs)
        self.free = list(range(config.slots))
        self.generation = [0] * config.slots
        # What each of the last pp steps still has to post-process: step, and by row (slot, generation, needed).
        self.ring: deque[tuple[int, list[tuple[int, int, bool]]] | None] = deque([None] * config.pp)

    def fingerprint(self) -> str:
        return repr((super().fingerprint(), self.free, self.generation, self.ring))

    def program(self, message: Message) -> Program:
        """The step's operations in the release's order."""
        config = self.config
        made: Program = []
        rows: list[Row] = []
        operations = worker_order.program(
            self.release,
            "v2",
            last_rank=self.last_stage,
            forward=bool(message.rows),
            speculation=config.drafts > 0,
        )
        if "flush_before_overwriting" in self.repairs:
            operations = flush_first(operations)
        late: tuple[int, list[tuple[int, int, bool]]] | None = None
        if not self.last_stage:
            late = self.ring.popleft()
            self.ring.append(None)
        for operation in operations:
            match operation.does:
                case Does.LATE_POSTPROCESS if late is not None:
                    made += self.late(*late)
                case Does.FINISH:
                    for uid in message.left:
                        made += self.leave(uid)
                case Does.ADD:
                    for uid, computed, known, longest, table in message.fresh:
                        made += self.leave(uid) + self.enter(uid, computed, known, longest, table)
                case Does.APPLY_ROWS:
                    made += self.append(message)
                    rows = sorted(message.rows, key=self.place)
                case Does.ZERO if message.zero:
                    made.append(("main", Zero(tuple(message.zero))))
                case Does.COPY_BLOCKS if message.copies:
                    made.append(("main", CopyPage(tuple(message.copies))))
                case Does.GATHER:
                    made += self.gather(rows)
                case Does.PRECOPY:
                    made += self.precopy(rows)
                case Does.FORWARD:
                    made += self.forward(message, rows)
                case Does.RECEIVE if any(self.needed(row, rows) for row in rows):
                    self.ring[-1] = (message.step, [self.entry(row, rows) for row in rows])
                case Does.RESET_ACCEPTED if not all(self.needed(row, rows) for row in rows):
                    made.append(("main", ResetAccepted(tuple(self.lives[row.uid].slot for row in rows))))
                case Does.SAMPLE:
                    made.append(("main", Sample(message.step)))
                case Does.POSTPROCESS:
                    made += self.post(message, rows)
                case Does.DRAFT if config.draft_modules > 1:
                    made.append(("main", Draft(message.step, self.batch(rows))))
                case (
                    Does.SUBMIT_STORES
                    | Does.FLUSH
                    | Does.SYNC_LOADS
                    | Does.LOADS
                    | Does.QUEUE_STORES
                    | Does.COLLECT
                ):
                    made += self.transfer(operation.does, message)
        return made

    def place(self, row: Row) -> tuple[bool, bool, int]:
        """Where the row stands in the batch (``model_runner.py::sort_batch_req_ids``)."""
        return not row.drafts, row.tokens != 1 + self.config.drafts, row.tokens

    def needed(self, row: Row, rows: list[Row]) -> bool:
        """Whether the row's tokens are needed by a later step (``pp_utils.py::compute_need_sampled_mask``)."""
        life = self.lives[row.uid]
        ends = self.release != "0.30.0" and self.prefilling(row) and life.prefill + 1 >= life.longest
        return self.samples(row) and not ends

    def entry(self, row: Row, rows: list[Row]) -> tuple[int, int, bool]:
        """The row as the ring keeps it."""
        slot = self.lives[row.uid].slot
        return slot, self.generation[slot], self.needed(row, rows)

    def late(self, step: int, entries: list[tuple[int, int, bool]]) -> Program:
        """Post-processing of an earlier step on a stage that does not sample."""
        rows: list[tuple[int, int, TableRow]] = []
        for index, (slot, generation, needed) in enumerate(entries):
            masked = not needed or self.generation[slot] != generation
            by_slot = self.facts.copies_by == "slot"
            operand = Deref("source", slot) if by_slot else Deref("gathered", index)
            rows.append((index, -1 if masked else slot, operand))
        if all(slot < 0 for _, slot, _ in rows):
            return []
        return [("main", PostProcess(step, tuple(rows)))]

    def leave(self, uid: UserId) -> Program:
        """A request leaves its slot, if it has one."""
        life = self.lives.pop(uid, None)
        if life is None:
            return []
        self.free.append(life.slot)
        self.generation[life.slot] += 1
        return [("main", Leave(life.slot))]

    def enter(self, uid: UserId, computed: int, known: int, longest: int, table: Table) -> Program:
        """A request takes a slot."""
        if not self.free:
            raise PolicyError("No free indices: v1/worker/gpu/states.py::RequestState.add_request")
        slot = self.free.pop()
        self.lives[uid] = Lives(slot, known, longest, [len(blocks) for blocks in table])
        seed = align.seed_column(computed, self.divisor) if self.mamba_block else -1
        made: Program = [("main", Take(slot, uid)), ("main", SetSlot(slot, 1, seed, computed))]
        made += [("main", SetRow(group, slot, 0, blocks)) for group, blocks in enumerate(table)]
        return made

    def append(self, message: Message) -> Program:
        """New columns of requests in the batch."""
        made: Program = []
        for uid, table in message.appended:
            life = self.lives[uid]
            for group, blocks in enumerate(table):
                if blocks:
                    made.append(("main", SetRow(group, life.slot, life.lengths[group], blocks)))
                    life.lengths[group] += len(blocks)
        return made
