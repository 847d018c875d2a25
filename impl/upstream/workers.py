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
from spec.chains import EMPTY
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
    "flush_before_overwriting": "queued stores are submitted and waited for before anything overwrites",
    "counts_kept_while_left_out": "v1: a request that a step leaves out finds its accepted count again",
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
    loads: list[tuple[int, bool]] = field(
        default_factory=list
    )  # job, and whether this step's forward reads it


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

    def program(self, message: Message) -> Program:
        """The step's operations in the release's order."""
        raise NotImplementedError

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
        batch = self.verified(rows)
        before: Program = []
        if not self.facts.zero_draft_rows_use_offset:
            slots = tuple(self.lives[r.uid].slot for r in rows if self.decodes(r) and not r.drafts)
            before = [("main", ResetAccepted(slots))] if slots else []
        index: tuple[TableRow, ...] = tuple(Deref("gathered", i) for i in range(self.padded(len(rows))))
        return [*before, ("main", Forward(message.step, batch, index))]

    def verified(self, rows: list[Row]) -> tuple[BatchRow, ...]:
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
        operands = tuple(
            (self.row(i, row), self.lives[row.uid].slot, row.tokens) for i, row in enumerate(rows)
        )
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
        # What each of the last pp steps still has to post-process: step; by row slot, generation, needed.
        self.ring: deque[tuple[int, list[tuple[int, int, bool]]] | None] = deque([None] * config.pp)

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
                    made.append(("main", Draft(message.step, self.verified(rows))))
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
        """Whether a later step needs the row's tokens (``pp_utils.py::compute_need_sampled_mask``)."""
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


@dataclass(slots=True)
class KeepCount(Op):
    """A request leaves its row for a step: its accepted count is put aside."""

    row: int
    uid: UserId
    kept: dict[UserId, int] = field(repr=False)

    def run(self, world: World, rank: Rank) -> None:
        self.kept[self.uid] = rank.memory.accepted[self.row]


@dataclass(slots=True)
class PutCount(Op):
    """The request is back, perhaps in another row."""

    row: int
    uid: UserId
    kept: dict[UserId, int] = field(repr=False)

    def run(self, world: World, rank: Rank) -> None:
        rank.memory.accepted[self.row] = self.kept.pop(self.uid)


@dataclass(slots=True)
class SetComputed(Op):
    """The host's counts of computed tokens reach the device, row by row."""

    counts: tuple[tuple[int, int], ...]  # (row, tokens)

    def run(self, world: World, rank: Rank) -> None:
        for row, tokens in self.counts:
            rank.memory.computed[row] = tokens


@dataclass(slots=True)
class HostTokens(Op):
    """Rows are fed with tokens and drafts that the host has by request (``InputBatch.token_ids_cpu``)."""

    rows: tuple[tuple[int, UserId, int], ...]  # (row, request, its tokens by then)

    def run(self, world: World, rank: Rank) -> None:
        for row, uid, known in self.rows:
            line = world.clients[uid].line
            rank.memory.last[row] = rank.memory.drafted[row] = line[known] if known < len(line) else EMPTY


class V1(Worker):
    """The v1 runner (``v1/worker/gpu_model_runner.py``): batch rows are dense, and move.

    A row that its request leaves, for good or because a step left it out, loses the accepted count; the
    running column is kept by request.  What a row is fed with comes from the host, but for a request that was
    in the last step of an asynchronous engine (``_prepare_input_ids``).
    """

    def __init__(
        self, release: str, config: Config, divisor: int, rank: int, repairs: tuple[str, ...] = ()
    ) -> None:
        super().__init__(release, config, divisor, rank, repairs)
        self.batch: list[UserId | None] = []
        self.tables: dict[UserId, list[list[int]]] = {}  # what the host knows of each request's blocks
        self.columns: dict[UserId, int] = {}  # running column of its last step
        self.last_rows: dict[UserId, int] = {}  # rows of the last step that computed something
        self.last_step = 0
        self.fed_by_device: set[UserId] = set()  # requests of the last step that computed something
        self.aside: dict[UserId, int] = {}  # repaired: accepted counts of requests that a step leaves out

    def decodes(self, row: Row) -> bool:
        """Whether the row is a verification (``_prepare_inputs``: ``num_decode_draft_tokens``)."""
        return row.tokens == row.drafts + 1

    def row(self, index: int, row: Row) -> TableRow:
        """Its one set of tables has the batch's order."""
        return Deref("source", self.lives[row.uid].slot)

    def program(self, message: Message) -> Program:
        """The step's operations in the release's order."""
        made: Program = []
        rows: list[Row] = []
        moves: list[tuple[int, int]] = []
        fresh: list[UserId] = []
        operations = worker_order.program(
            self.release,
            "v1",
            last_rank=self.last_stage,
            forward=bool(message.rows),
            speculation=self.config.drafts > 0,
        )
        scheduled = {row.uid for row in message.rows}
        for operation in operations:
            match operation.does:
                case Does.FINISH:
                    for uid in message.left:
                        made += self.leave(uid)
                        self.tables.pop(uid, None)
                        self.columns.pop(uid, None)
                case Does.ZERO if message.zero:
                    made.append(("main", Zero(tuple(message.zero))))
                case Does.COPY_BLOCKS if message.copies:
                    made.append(("main", CopyPage(tuple(message.copies))))
                case Does.LEAVE_BATCH:
                    for uid in [uid for uid in self.lives if uid not in scheduled]:
                        if "counts_kept_while_left_out" in self.repairs:
                            made.append(("main", KeepCount(self.lives[uid].slot, uid, self.aside)))
                        made += self.leave(uid)
                case Does.APPEND_ROW:
                    made += self.append(message)
                case Does.ADD:
                    added, fresh = self.add(message)
                    made += added
                case Does.CONDENSE:
                    moves = self.condense()
                    made += [("main", Permute((move,), ())) for move in moves]
                case Does.REORDER:
                    swaps = self.reorder(message)
                    made += [("main", Permute((), (swap,))) for swap in swaps]
                    made += self.counts(moves, swaps, fresh)
                    rows = sorted(message.rows, key=lambda row: self.lives[row.uid].slot)
                case Does.COMMIT_ROWS:
                    made += self.gather(rows)
                    ahead = self.fed_by_device if self.config.async_scheduling else set()
                    host = [row for row in rows if row.uid not in ahead]
                    made.append(("main", HostTokens(tuple(map(self.tokens, host)))))
                    self.fed_by_device = {row.uid for row in rows}
                    if not self.config.async_scheduling:
                        counts = tuple((self.lives[row.uid].slot, row.computed) for row in rows)
                        made.append(("main", SetComputed(counts)))
                case Does.PRECOPY:
                    made += self.precopy(rows)
                    if self.mamba_block:
                        for row in rows:
                            column = align.running_column(row.computed, row.tokens, self.mamba_block)
                            self.columns[row.uid] = column
                case Does.FORWARD:
                    made += self.forward(message, rows)
                case Does.SAMPLE:
                    made.append(("main", Sample(message.step)))
                case Does.POSTPROCESS:
                    made += self.post(message, rows)
                case Does.ACCEPTED_COPY if self.config.async_scheduling:
                    made.append(("counts", CopyCounts(message.step, "rows", -1)))
                    self.last_step = message.step
                    self.last_rows = {uid: life.slot for uid, life in self.lives.items()}
                case Does.DRAFT if self.config.draft_modules > 1:
                    made.append(("main", Draft(message.step, self.verified(rows))))
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

    def tokens(self, row: Row) -> tuple[int, UserId, int]:
        """What the host feeds the row with."""
        return self.lives[row.uid].slot, row.uid, row.computed + row.tokens - row.drafts

    def leave(self, uid: UserId) -> Program:
        """A request leaves its row; the gap is filled later."""
        life = self.lives.pop(uid, None)
        if life is None:
            return []
        self.batch[life.slot] = None
        return [("main", Leave(life.slot))]

    def append(self, message: Message) -> Program:
        """New blocks at the end of what the host knows, and of the row if the request has one."""
        made: Program = []
        for uid, table in message.appended:
            for group, blocks in enumerate(table):
                known = self.tables[uid][group]
                if uid in self.lives and blocks:
                    made.append(("main", SetRow(group, self.lives[uid].slot, len(known), blocks)))
                known.extend(blocks)
        return made

    def add(self, message: Message) -> tuple[Program, list[UserId]]:
        """New, resumed and left-out requests take the smallest gaps, then new rows at the end."""
        for uid, computed, _, _, table in message.fresh:
            self.tables[uid] = [list(blocks) for blocks in table]
            self.columns[uid] = align.seed_column(computed, self.divisor) if self.mamba_block else -1
        known = {uid: (prefill, longest) for uid, _, prefill, longest, _ in message.fresh}
        made: Program = []
        fresh = []
        for row in message.rows:
            if row.uid in self.lives:
                continue
            gap = next((at for at, uid in enumerate(self.batch) if uid is None), len(self.batch))
            if gap == len(self.batch):
                self.batch.append(None)
            self.batch[gap] = row.uid
            prefill, longest = known.get(row.uid, (0, 0))
            self.lives[row.uid] = Lives(gap, prefill, longest, [])
            column = self.columns.get(row.uid, -1)
            made += [("main", Take(gap, row.uid)), ("main", SetSlot(gap, 1, column, row.computed))]
            made += [
                ("main", SetRow(group, gap, 0, tuple(blocks)))
                for group, blocks in enumerate(self.tables[row.uid])
            ]
            if row.uid not in known and "counts_kept_while_left_out" in self.repairs:
                made.append(("main", PutCount(gap, row.uid, self.aside)))
            fresh.append(row.uid)
        return made, fresh

    def condense(self) -> list[tuple[int, int]]:
        """The last rows move into the gaps (``InputBatch.condense``)."""
        moves = []
        while None in self.batch:
            if self.batch[-1] is None:
                self.batch.pop()
                continue
            gap, last = self.batch.index(None), len(self.batch) - 1
            uid = self.batch.pop()
            assert uid is not None
            self.batch[gap] = uid
            self.lives[uid].slot = gap
            moves.append((last, gap))
        return moves

    def reorder(self, message: Message) -> list[tuple[int, int]]:
        """Verifications first, longer rows after them
        (``v1/attention/backends/utils.py::reorder_batch_to_split_decodes_and_prefills``)."""
        tokens = {row.uid: row.tokens for row in message.rows}
        swaps = []
        first, last = 0, len(self.batch) - 1
        while first < last:
            one, two = self.batch[first], self.batch[last]
            assert one is not None and two is not None
            if tokens[one] <= 1 + self.config.drafts:
                first += 1
            elif tokens[two] > 1 + self.config.drafts:
                last -= 1
            else:
                self.batch[first], self.batch[last] = two, one
                self.lives[one].slot, self.lives[two].slot = last, first
                swaps.append((first, last))
        return swaps

    def counts(
        self, moves: list[tuple[int, int]], swaps: list[tuple[int, int]], fresh: list[UserId]
    ) -> Program:
        """Asynchronous scheduling: accepted counts come back through the batch's own host rows."""
        if not (self.config.async_scheduling and self.config.drafts):
            return []
        rows = tuple(self.lives[uid].slot for uid in fresh)
        made: Program = [("main", HostRows("rows", tuple(moves), tuple(swaps), rows))]
        before = [(life.slot, self.last_rows.get(uid, -1)) for uid, life in self.lives.items()]
        if not self.last_step:
            before = [(slot, then) for slot, then in before if then < 0]
        made.append(("main", HostCounts(self.last_step, "rows", tuple(before))))
        self.last_step, self.last_rows = 0, {}
        return made
