"""What a right worker program is: the contract of ``worker_program``, judged on what one worker's host knows.

A worker's host knows the messages that it was sent and the operations that it has enqueued, in their
order; it does not know how far a stream has come, what memory holds, or what another rank does.  So the
contract reads a program as the device will: main-stream operations one after another, table rows as they
will be when each runs.  It demands that every scheduled row is computed once, through its request's own
blocks; that rows are set, then gathered, then used; that padded rows are null; that late work belongs to
the occupant it was enqueued for; that transfers are submitted, and flushed ones waited for before
anything writes what they read.

Sources: vLLM ``v1/worker/gpu/model_runner.py``, ``v1/worker/gpu_model_runner.py``,
``distributed/kv_transfer/kv_connector/v1/offloading/worker.py``.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from spec.arith import align
from spec.chains import EMPTY
from spec.config import Config, Kind
from spec.contracts import KnownJob, SchedulerView, read_from
from spec.events import Event
from spec.ops import (
    Begin,
    CopyCounts,
    CopyPage,
    Draft,
    End,
    Forward,
    Gather,
    HostCounts,
    HostRows,
    Imm,
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
    column,
)
from spec.policy import Program
from spec.world import table_columns

if TYPE_CHECKING:
    from spec.world import Rank, World

Occupancy = tuple[UserId, int]  # a request, and how many requests had taken slots here before it


@dataclass(frozen=True, slots=True)
class RowOrder:
    """One scheduled row, as a message must convey it."""

    uid: UserId
    c: int
    processed: int
    q: int
    d: int
    known: int
    cols: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> bool:
        """Whether the last stage samples a token for it."""
        return self.c + self.q >= self.known


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What a step demands of every rank, whatever form the message has."""

    step: int
    rows: dict[UserId, RowOrder]
    fresh: frozenset[int]  # blocks handed out by this step
    flush: tuple[int, ...]
    zero: frozenset[tuple[int, int]]
    copies: tuple[tuple[int, int, int], ...]
    jobs: dict[int, KnownJob]  # transfers created since the last step
    decided_now: frozenset[int]  # those of them that this step itself decided
    oldest: int  # step whose output has not been processed: what earlier steps enqueued has run


def orders(view: SchedulerView, decisions: list[Event]) -> StepOrders:
    """The orders of a ``schedule`` answer that the view has just followed; its new transfers count as
    told."""
    by_kind: dict[str, list[Event]] = {}
    for event in decisions:
        by_kind.setdefault(event[0], []).append(event)
    rows = {}
    for _, uid, c, q, d in by_kind.get("row", []):
        request = view.book.requests[uid]
        cols = tuple(tuple(cols) for cols in request.cols)
        processed = request.processed if len(request.flying) > 1 else c
        rows[uid] = RowOrder(uid, c, processed, q, d, request.known, cols)
    untold, view.untold = view.untold, {}
    return StepOrders(
        view.book.step,
        rows,
        frozenset(view.fresh),
        tuple(dict.fromkeys(event[1] for event in by_kind.get("flush", []))),
        frozenset(event[1:] for event in by_kind.get("zero", [])),
        tuple(event[1:] for event in by_kind.get("copy", [])),
        untold,
        frozenset(event[1] for event in by_kind.get("job", [])),
        min(view.book.core.steps, default=view.book.step),
    )


@dataclass(slots=True)
class Rows:
    """The rows that the device will have once it has run what is enqueued; the form that operations
    address."""

    tables: dict[str, list[list[list[int]]]]
    accepted: list[int]
    state: list[int]
    computed: list[int]
    last: list[int]
    drafted: list[int]


@dataclass(slots=True)
class RankView:
    """One worker's host process.  It stands in for the rank and the world where operations only move rows."""

    config: Config
    stage: int
    index: int
    memory: Rows
    slots: dict[int, Occupancy] = field(default_factory=dict)
    taken: int = 0  # occupancies so far
    owed: dict[int, dict[int, tuple[Occupancy, RowOrder]]] = field(
        default_factory=dict
    )  # step -> row -> post-processing due
    seats: dict[int, dict[Occupancy, int]] = field(default_factory=dict)  # step -> where everyone sat
    jobs: dict[int, tuple[int, KnownJob]] = field(default_factory=dict)  # told in step, not begun
    known_jobs: dict[int, KnownJob] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    touched: dict[int, int] = field(default_factory=dict)  # block -> last step that reads or writes it
    enqueued: int = 0  # main-stream operations
    problem: str | None = None

    @classmethod
    def of(cls, config: Config, rank: int) -> RankView:
        """The view of a worker that was never told anything."""
        columns = [table_columns(config, g) for g in range(len(config.groups))]
        slots = config.slots
        names = ("source", "gathered", "gathered.1")
        tables = {name: [[[0] * width for _ in range(slots)] for width in columns] for name in names}
        rows = Rows(tables, [1] * slots, [-1] * slots, [0] * slots, [EMPTY] * slots, [EMPTY] * slots)
        return cls(config, rank // config.tp, rank, rows)

    def refuse(self, text: str) -> None:
        """Note the first problem."""
        self.problem = self.problem or text

    # -- what operations on slots ask of a world
    def slot_taken(self, rank: object, slot: int, uid: UserId) -> None:
        """A request enters a slot."""
        if slot in self.slots:
            self.refuse(f"{uid} takes slot {slot}, which {self.slots[slot][0]} occupies")
        self.taken += 1
        self.slots[slot] = uid, self.taken

    def slot_left(self, rank: object, slot: int) -> None:
        """The occupant leaves."""
        if self.slots.pop(slot, None) is None:
            self.refuse(f"slot {slot} is left, but nobody occupies it")

    def slot_moved(self, rank: object, src: int, dst: int) -> None:
        """An occupant moves to another row."""
        if dst in self.slots or src not in self.slots:
            self.refuse(f"row {src} moves to row {dst}")
        else:
            self.slots[dst] = self.slots.pop(src)

    def slot_swapped(self, rank: object, one: int, two: int) -> None:
        """Two occupants change places."""
        if one not in self.slots or two not in self.slots:
            self.refuse(f"rows {one} and {two} are swapped, one is empty")
        else:
            self.slots[one], self.slots[two] = self.slots[two], self.slots[one]

    def row(self, operand: TableRow, group: int) -> list[int] | tuple[int, ...]:
        """Block ids that the operand will stand for when the operation runs."""
        if isinstance(operand, Imm):
            return operand.rows[group]
        return self.memory.tables[operand.buffer][group][operand.row]


def allowed_program(view: RankView, orders: StepOrders, program: Program) -> str | None:
    """Why the program is refused; None if it is right.  The view stays as it is."""
    return follow_program(deepcopy(view, {id(view.config): view.config}), orders, program)


def follow_program(view: RankView, orders: StepOrders, program: Program) -> str | None:
    """The same, and the view learns that the program was enqueued."""
    view.problem = None
    reader = _Reader(view, orders)
    for job, known in orders.jobs.items():
        view.jobs[job] = orders.step, known
        view.known_jobs[job] = known
    for stream, op in program:
        reader.read(stream, op)
        view.enqueued += stream == "main"
    reader.close()
    return view.problem


class _Reader:
    """Reads one program in order."""

    def __init__(self, view: RankView, orders: StepOrders) -> None:
        self.view, self.orders, self.config = view, orders, view.config
        self.mamba = [g for g, group in enumerate(view.config.groups) if group.kind is Kind.MAMBA]
        self.done: set[str] = set()
        self.zeroed: set[tuple[int, int]] = set()
        self.copied: list[tuple[int, int, int]] = []
        self.prepared: set[int] = set()  # slots pre-processed
        self.waited: set[int] = set()
        self.loading: set[int] = set()  # blocks of loads that this program has submitted
        self.open: dict[str, int] = {}  # stream -> transfer begun and not ended
        self.rewritten: set[str] = set()  # count buffers that the host has rewritten

    def read(self, stream: str, op: Op) -> None:
        """One operation."""
        expected = {Begin: None, End: None, CopyCounts: "counts"}.get(type(op), "main")
        if expected and stream != expected:
            self.view.refuse(f"{type(op).__name__} stands in stream {stream}, not in {expected}")
        handler = _READ.get(type(op))
        if handler:
            handler(self, stream, op)

    def writes(self, blocks: set[int], what: str) -> None:
        """A main-stream operation writes these blocks."""
        for job in self.orders.flush:
            if job not in self.waited:
                hit = blocks & self.orders.fresh & self.read_by(job)
                if hit:
                    self.view.refuse(
                        f"{what} writes block {min(hit)} before the flush of transfer {job} is waited for"
                    )
        self.view.touched.update(dict.fromkeys(blocks, self.orders.step))
        if blocks & self.loading:
            self.view.refuse(
                f"{what} writes block {min(blocks & self.loading)}, whose load was already submitted"
            )

    def read_by(self, job: int) -> set[int]:
        """Device blocks of a store in flight."""
        known = self.view.known_jobs.get(job)
        return (
            {b for _, _, subs in known.chunks for b in subs if b} if known and known.way == "store" else set()
        )

    # -- rows and tables ---------------------------------------------------------------------------------
    def rows(self, stream: str, op: Op) -> None:
        """Operations that only move rows do to the view what they will do to the device."""
        op.run(cast("World", self.view), cast("Rank", self.view))

    def zero(self, stream: str, op: Zero) -> None:
        """Only fresh blocks are zeroed, before the forward."""
        surplus = set(op.blocks) - self.orders.zero
        if surplus:
            self.view.refuse(f"block {min(surplus)[0]} is zeroed without an order")
        self.zeroed |= set(op.blocks)
        self.writes({block for block, _ in op.blocks}, "zeroing")

    def copy(self, stream: str, op: CopyPage) -> None:
        """Copies of the message, in its order."""
        self.copied += op.pairs
        self.writes({dst for _, dst, _ in op.pairs}, "copy-on-write")

    def pre(self, stream: str, op: PreProcess) -> None:
        """State copies before the forward: through the rows of the request itself."""
        if "forward" in self.done:
            self.view.refuse("states are prepared after the forward")
        for operand, slot, q in op.rows:
            order = self.order_in(slot)
            if order is None or order.q != q:
                self.view.refuse(
                    f"slot {slot} is prepared for {q} tokens; the step computes {order and order.q}"
                )
                continue
            self.prepared.add(slot)
            self.states(order, operand, "pre-processing")
            self.writes({b for g in self.mamba for b in self.state_blocks(order, g)}, "pre-processing")

    def order_in(self, slot: int) -> RowOrder | None:
        """The scheduled row of a slot's occupant."""
        occupant = self.view.slots.get(slot)
        return self.orders.rows.get(occupant[0]) if occupant else None

    def state_columns(self, order: RowOrder, group: int) -> range:
        """Columns in which the row may leave states, whatever was accepted meanwhile."""
        block = self.config.groups[group].block_tokens
        first = align.running_column(order.processed, order.q, block)
        return range(max(0, first), align.running_column(order.c, order.q, block) + order.d + 1)

    def state_blocks(self, order: RowOrder, group: int) -> set[int]:
        """The blocks in those columns."""
        return {column(order.cols[group], col) for col in self.state_columns(order, group)} - {0}

    def states(self, order: RowOrder, operand: TableRow, what: str) -> None:
        """The operand must lead to the request's own state columns."""
        for g in self.mamba:
            found = self.view.row(operand, g)
            for col in self.state_columns(order, g):
                want = column(order.cols[g], col)
                if want and column(found, col) != want:
                    name = self.config.groups[g].name
                    self.view.refuse(
                        f"{what} of {order.uid} takes column {col} of group {name} from block "
                        f"{column(found, col)}; it is block {want}"
                    )

    # -- the model ---------------------------------------------------------------------------------------
    def forward(self, stream: str, op: Forward) -> None:
        """Every scheduled row once, in its occupant's slot, through its own blocks; padding is null."""
        view, orders = self.view, self.orders
        if "forward" in self.done or op.step != orders.step:
            view.refuse(f"a second forward, or one of step {op.step} in step {orders.step}")
        self.done.add("forward")
        uids = [row.uid for row in op.rows]
        if sorted(uids) != sorted(orders.rows):
            view.refuse(f"the forward computes {sorted(uids)}; scheduled are {sorted(orders.rows)}")
            return
        if self.zeroed != orders.zero or tuple(self.copied) != orders.copies:
            view.refuse("the forward runs before all fresh blocks are zeroed and copied")
        view.owed[op.step] = {}
        for index, row in enumerate(op.rows):
            order = orders.rows[row.uid]
            occupancy = view.slots.get(row.slot)
            if occupancy is None or occupancy[0] != row.uid:
                view.refuse(f"the forward finds {row.uid} in slot {row.slot}, where {occupancy} is")
                continue
            if row.tokens != order.q or (order.d and not row.decode) or (not order.samples and row.decode):
                view.refuse(
                    f"the forward computes {row.tokens} tokens of {row.uid}, not {order.q}, or as "
                    f"another kind"
                )
            due = [
                s
                for s, rows in view.owed.items()
                for one, o in rows.values()
                if one == occupancy and o.samples
            ]
            if due:
                view.refuse(f"{row.uid} goes on before step {due[0]} was post-processed")
            if self.mamba and row.slot not in self.prepared:
                view.refuse(f"the state of {row.uid} was not prepared")
            view.owed[op.step][index] = occupancy, order
            view.touched.update({b: op.step for cols in order.cols for b in cols if b})
            self.attention(order, op.tables, index)
            self.states(order, op.index[index], "the forward")
            self.writes({b for g in self.mamba for b in self.state_blocks(order, g)}, "the forward")
        for operand in op.index[len(op.rows) :]:
            if any(column(view.row(operand, g), 0) for g in self.mamba):
                view.refuse("a padded row does not resolve to the null block")
        view.seats[op.step] = {occupancy: slot for slot, occupancy in view.slots.items()}

    def attention(self, order: RowOrder, buffer: str, index: int) -> None:
        """The gathered row must show every block that the row reads or writes."""
        for g, group in enumerate(self.config.groups):
            if group.kind is Kind.MAMBA:
                continue
            block = group.block_tokens
            found = self.view.memory.tables[buffer][g][index]
            written = range(order.processed // block, (order.c + order.q - 1) // block + 1)
            for col in range(read_from(group, order.processed) // block, written.stop):
                want = column(order.cols[g], col)
                if column(found, col) != want:
                    self.view.refuse(
                        f"the forward finds {order.uid}'s column {col} of group {group.name} in block "
                        f"{column(found, col)}; it is block {want}"
                    )
            self.writes({column(order.cols[g], col) for col in written} - {0}, "the forward")

    def sample(self, stream: str, op: Sample) -> None:
        """Only the last stage samples, after its forward."""
        last = self.view.stage == self.config.pp - 1
        if not last or "forward" not in self.done or op.step != self.orders.step:
            self.view.refuse(
                f"stage {self.view.stage} samples step {op.step}, without its forward or not being last"
            )
        self.done.add("sample")

    def post(self, stream: str, op: PostProcess) -> None:
        """Each row once; unmasked exactly while the occupant of its step is still there; through its own
        row, and fed with its own tokens."""
        view, owed = self.view, self.view.owed.get(op.step, {})
        for (index, slot, operand), feed in zip(op.rows, op.feeds or ((),) * len(op.rows), strict=True):
            if feed and slot >= 0 and feed != (index, index):
                view.refuse(f"row {index} of step {op.step} is fed with the last token and drafts of {feed}")
            due = owed.pop(index, None)
            if due is None:
                view.refuse(f"row {index} of step {op.step} is post-processed, which is not due")
                continue
            here = next((s for s, occupancy in view.slots.items() if occupancy == due[0]), -1)
            if slot != here:
                view.refuse(
                    f"{due[0][0]} of step {op.step} is post-processed in slot {slot}; it is in {here}"
                )
            elif slot >= 0:
                self.own_states(op.step, due[1], operand, slot)
        if not owed:
            view.owed.pop(op.step, None)

    def own_states(self, step: int, order: RowOrder, operand: TableRow, slot: int) -> None:
        """Whatever row the operand names, it must show the blocks of the slot's row where the step left
        states."""
        for g in self.mamba:
            found, want = self.view.row(operand, g), self.view.memory.tables["source"][g][slot]
            if any(column(found, col) != column(want, col) for col in self.state_columns(order, g)):
                self.view.refuse(
                    f"post-processing of {order.uid}, step {step}, reads {operand}: not its blocks"
                )

    def seed(self, stream: str, op: SetSlot) -> None:
        """A new occupant goes on from its own count, one accepted token, and the column that holds its
        state."""
        order = self.order_in(op.slot)
        if order is None:
            self.view.refuse(f"slot {op.slot} is seeded, but its occupant is not scheduled")
            return
        state = (
            align.seed_column(order.c, self.config.groups[self.mamba[0]].block_tokens)
            if self.mamba
            else op.state
        )
        if (op.accepted, op.state, op.computed) != (1, state, order.c):
            self.view.refuse(
                f"{order.uid} starts from {op.computed} tokens, {op.accepted} accepted, state "
                f"column {op.state}; "
                f"it has {order.c} tokens and its state is in column {state}"
            )

    def draft(self, stream: str, op: Draft) -> None:
        """The drafter runs on what was sampled."""
        if "sample" not in self.done:
            self.view.refuse("the drafter runs before the step is sampled")

    # -- transfers ---------------------------------------------------------------------------------------
    def begin(self, stream: str, op: Begin) -> None:
        """A transfer is submitted once, after what fills its source and before what reads its target."""
        view = self.view
        known = view.jobs.pop(op.job, (0, None))[1]
        if known is None:
            view.refuse(f"transfer {op.job} is submitted twice, or was never ordered")
            return
        view.begun.add(op.job)
        early = 0 <= op.after_main < view.enqueued
        if stream != known.way or (early and known.way == "store"):
            view.refuse(f"{known.way} {op.job} is submitted to stream {stream} ahead of the main stream")
        if known.way == "load":
            blocks = {b for _, _, subs in known.chunks for b in subs if b}
            used = any(view.touched.get(b, -1) >= self.orders.oldest for b in blocks)
            flushed = any(blocks & self.read_by(job) for job in self.orders.flush if job not in op.after_jobs)
            if early and (used or flushed):
                view.refuse(
                    f"load {op.job} is not ordered after a step or store in flight that uses its targets"
                )
            self.writes(blocks, f"load {op.job}")
            self.loading |= blocks
        elif (
            op.job in self.orders.decided_now and known.uid in self.orders.rows and "forward" not in self.done
        ):
            view.refuse(f"store {op.job} is submitted before the forward that fills its source")
        self.open[stream] = op.job

    def end(self, stream: str, op: End) -> None:
        """A transfer ends in the stream in which it began."""
        if self.open.pop(stream, None) != op.job:
            self.view.refuse(f"transfer {op.job} ends in stream {stream}, where it did not begin")

    def wait(self, stream: str, op: Wait) -> None:
        """Only submitted transfers can be waited for: others would wait for this very stream."""
        if op.job not in self.view.begun:
            self.view.refuse(f"the main stream waits for transfer {op.job}, which is not submitted")
        self.waited.add(op.job)

    # -- accepted counts of the v1 runner ----------------------------------------------------------------
    def host_rows(self, stream: str, op: HostRows) -> None:
        """The host rewrites its rows."""
        self.rewritten.add(op.buffer)

    def host_counts(self, stream: str, op: HostCounts) -> None:
        """Each row takes the count of the row where its occupant sat when the counts were made."""
        if op.step and op.buffer in self.rewritten:
            self.view.refuse(
                f"counts are taken from buffer {op.buffer!r}, whose rows the host has just rewritten"
            )
        seats = self.view.seats.get(op.step, {})
        for row, then in op.previous:
            occupancy = self.view.slots.get(row)
            if occupancy is not None and op.step and then != seats.get(occupancy, -1):
                self.view.refuse(
                    f"{occupancy[0]} in row {row} takes the count of row {then}; it sat in "
                    f"{seats.get(occupancy, -1)}"
                )

    # -- the end of the program --------------------------------------------------------------------------
    def close(self) -> None:
        """What must have been enqueued by now."""
        view, orders = self.view, self.orders
        if orders.rows and "forward" not in self.done:
            view.refuse(f"the step computes {sorted(orders.rows)}, but no forward is enqueued")
        if orders.rows and view.stage == self.config.pp - 1 and "sample" not in self.done:
            view.refuse("the last stage does not sample")
        for job in orders.flush:
            if job not in self.waited:
                view.refuse(f"the flush of transfer {job} is not waited for")
        for job, (told, known) in view.jobs.items():
            if known.way == "load" or told < orders.step:
                view.refuse(f"{known.way} {job}, ordered in step {told}, is not submitted")
        if self.open:
            view.refuse(f"transfers {sorted(self.open.values())} begin and do not end")
        for step in [s for s in view.seats if s < orders.step - self.config.pp - 2]:
            del view.seats[step]


_READ: dict[type[Op], Any] = {
    Take: _Reader.rows,
    Leave: _Reader.rows,
    SetRow: _Reader.rows,
    SetSlot: _Reader.seed,
    Permute: _Reader.rows,
    Gather: _Reader.rows,
    Zero: _Reader.zero,
    CopyPage: _Reader.copy,
    PreProcess: _Reader.pre,
    PostProcess: _Reader.post,
    Forward: _Reader.forward,
    Sample: _Reader.sample,
    Draft: _Reader.draft,
    Begin: _Reader.begin,
    End: _Reader.end,
    Wait: _Reader.wait,
    HostRows: _Reader.host_rows,
    HostCounts: _Reader.host_counts,
}
