"""A worker's host process: what it enqueues for a step, for both runners.

**v2** (`v1/worker/gpu/model_runner.py`): a request keeps one slot for as long as it is in the batch; its
row of the source tables is only appended to; gathered rows are rewritten by every step.  On all stages but
the last, a step is post-processed ``pp`` steps later, from a ring that remembers slot and generation: a
slot that has changed hands since is masked.  **v1** (`v1/worker/gpu_model_runner.py`): dense batch rows
that move when a request leaves; accepted counts go to the host and come back with the next step, through a
buffer that nobody else writes.

A store is submitted one step after it was decided, or at once if that step flushes it; a load is submitted
last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from impl.decisions import Decisions
from impl.device import Device
from impl.scheduler.output import ScheduledRow, SchedulerOutput, Table
from spec.arith import align
from spec.config import Config, Kind
from spec.ops import (
    BatchRow,
    Begin,
    CopyCounts,
    CopyPage,
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
from spec.policy import Program

Late = list[tuple[int, int, int]]
"""What a step still has to post-process: (batch index, slot, generation)."""


class Worker:
    """One rank's host: slots, rows, and the order of a step."""

    def __init__(self, config: Config, decide: Decisions, device: Device) -> None:
        self.config, self.decide, self.device = config, decide, device
        self.last_stage = device.stage == config.pp - 1
        self.v1 = config.runner == "v1"
        self.has_states = device.block > 0
        self.free_slots = list(range(config.slots - 1, -1, -1))
        self.slot: dict[UserId, int] = {}
        self.generation = [0] * config.slots
        self.columns: dict[UserId, list[int]] = {}  # per group: columns of the request's rows
        self.ring: deque[tuple[int, Late]] = deque((0, []) for _ in range(config.pp))
        self.queued: list[int] = []  # stores told of, not yet submitted
        self.batch: list[UserId] = []  # v1: request by batch row
        self.counted: tuple[int, dict[UserId, int]] = (0, {})  # v1: the last step that computed, rows then
        self.late: dict[UserId, tuple[int, int]] = {}  # v1 stages: step and index that still lack counts
        self.stages: dict[str, Program] = {}
        self.pinned: list[list[int]] = []  # one piece of pinned host memory a table write of a step

    def enqueue(self, stage: str, op: Op, stream: str = "main") -> None:
        """An operation of a stage of this step."""
        self.stages[stage].append((stream, op))

    def program(self, message: SchedulerOutput) -> Program:
        """Everything that the step enqueues, in the runner's order."""
        order = self.decide.v1_order if self.v1 else self.decide.v2_order
        self.stages = {name: [] for name in order}
        for transfer in (*message.stores, *message.loads):
            self.device.transfers[transfer.job] = transfer
        if self.v1:
            self.permute_rows(message)
        else:
            self.post_process_late()
            self.update_slots(message)
        self.submit_transfers(message)
        if message.zero:
            self.enqueue("zero", Zero(tuple(message.zero)))
        if message.copies:
            self.enqueue("copy", CopyPage(tuple(message.copies)))
        self.compute(message)
        program = [entry for name in order for entry in self.stages[name]]
        if self.device.debug:
            self.poison(message, program)
        return program

    def poison(self, message: SchedulerOutput, program: Program) -> None:
        """Debug mode: blocks that hold nothing are poisoned before the step writes anything."""
        first = next((op for _, op in program if isinstance(op, (Zero, CopyPage, Gather))), None)
        if first is not None:
            self.device.before[id(first)] = first, message.holds_nothing

    # -- slots and rows ------------------------------------------------------------------------------------
    def post_process_late(self) -> None:
        """The oldest step of the ring; a slot of another generation is masked."""
        step, entries = self.ring.popleft()
        if not entries or self.last_stage:
            return
        rows = []
        for index, slot, generation in entries:
            masked = self.decide.masks_late_row(generation, self.generation[slot])
            rows.append((index, -1 if masked else slot, self.decide.post_row(index, slot)))
        self.enqueue("post", self.post(step, rows, late=True))

    def post(self, step: int, rows: list[tuple[int, int, TableRow]], *, late: bool) -> PostProcess:
        """Counts become true, boundary states go to their columns."""
        return PostProcess(
            step, tuple(rows), self.decide.accepted_floor(), self.decide.settles_computed(late)
        )

    def update_slots(self, message: SchedulerOutput) -> None:
        """v2: requests leave their slots and take new ones; the others' rows are appended to."""
        for uid in message.left:
            if uid in self.slot:
                slot = self.slot.pop(uid)
                self.free_slots.append(slot)
                self.generation[slot] += 1
                self.enqueue("leave", Leave(slot))
        for uid, computed, table in message.fresh:
            self.slot[uid] = self.free_slots.pop()
            self.enter(uid, computed, table)
        self.append(message)

    def enter(self, uid: UserId, computed: int, table: Table) -> None:
        """A request's rows are overwritten from column 0, its slot's state is seeded."""
        slot = self.slot[uid]
        self.enqueue("take", Take(slot, uid))
        for group, blocks in enumerate(table):
            self.enqueue("take", SetRow(group, slot, 0, blocks))
        self.columns[uid] = [len(blocks) for blocks in table]
        seed = -1
        if self.has_states:
            seed = align.seed_column(computed, self.decide.seed_divisor(self.config, self.device.block))
        self.enqueue("take", SetSlot(slot, 1, seed, computed))

    def append(self, message: SchedulerOutput) -> None:
        """New columns go behind those that the row has."""
        written = 0
        for uid, table in message.appended:
            columns = self.columns[uid]
            for group, blocks in enumerate(table):
                if blocks:
                    first = self.decide.append_column(columns[group])
                    sent = self.staged(written, blocks)
                    self.enqueue("update", SetRow(group, self.slot[uid], first, sent))
                    columns[group] += len(blocks)
                    written += 1

    def staged(self, number: int, blocks: tuple[int, ...]) -> Sequence[int]:
        """Where the copy to the device finds a step's table write with this number."""
        if self.decide.stages_afresh():
            return blocks
        if number == len(self.pinned):
            self.pinned.append([])
        self.pinned[number][:] = blocks
        return self.pinned[number]

    def permute_rows(self, message: SchedulerOutput) -> None:
        """v1: rows are removed, the batch is made dense and sorted; counts follow their requests."""
        if not self.last_stage:
            self.post_process_processed(message)
        moves, swaps = self.condense(message), []
        for uid, computed, table in message.fresh:
            self.slot[uid] = len(self.batch)
            self.batch.append(uid)
            self.enter(uid, computed, table)
        tokens = {row.uid: row.tokens for row in message.rows}
        for one, two in self.unsorted(tokens):
            self.swap(one, two)
            swaps.append((one, two))
            self.enqueue("take", Permute((), ((one, two),)))
        self.append(message)
        if self.config.drafts and self.config.async_scheduling:
            fresh = [self.slot[uid] for uid, _, _ in message.fresh]  # after the swaps
            self.enqueue("rows", HostRows("rows", tuple(moves), tuple(swaps), tuple(fresh)))
            self.take_counts(fresh)

    def condense(self, message: SchedulerOutput) -> list[tuple[int, int]]:
        """The last row fills the place of one that has left (`InputBatch.condense`)."""
        moves = []
        for uid in message.left:
            if uid not in self.slot:
                continue
            row, last = self.slot.pop(uid), len(self.batch) - 1
            self.enqueue("leave", Leave(row))
            moved = self.batch.pop()
            if row != last:
                self.batch[row] = moved
                self.slot[moved] = row
                moves.append((last, row))
                self.enqueue("leave", Permute(((last, row),), ()))
        return moves

    def unsorted(self, tokens: dict[UserId, int]) -> list[tuple[int, int]]:
        """Swaps that bring short rows before long ones: each row with the last shorter one behind it."""
        rows, found = list(self.batch), []
        for one, uid in enumerate(rows):
            for two in range(len(rows) - 1, one, -1):
                if uid in tokens and tokens.get(rows[two], tokens[uid]) < tokens[uid]:
                    found.append((one, two))
                    rows[one], rows[two] = rows[two], rows[one]
                    break
        return found

    def swap(self, one: int, two: int) -> None:
        """Two requests change rows."""
        first, second = self.batch[one], self.batch[two]
        self.batch[one], self.batch[two] = second, first
        self.slot[first], self.slot[second] = two, one

    def take_counts(self, fresh: list[int]) -> None:
        """v1 async: each row takes its request's count of the last step that computed, whatever row it
        had."""
        step, then = self.counted
        rows = [
            (row, self.decide.previous_row(then.get(uid), uid in then))
            for uid, row in self.slot.items()
            if step or row in fresh
        ]
        self.enqueue("update", HostCounts(step, self.decide.counts_buffer(), tuple(rows)))
        self.counted = (0, {})

    def post_process_processed(self, message: SchedulerOutput) -> None:
        """v1 stages, sync: counts of processed steps come with the message."""
        for uid, _ in message.accepted:
            late = self.late.pop(uid, None)
            if late and uid in self.slot:
                step, index = late
                row = (index, self.slot[uid], self.decide.post_row(index, self.slot[uid]))
                self.enqueue("flush", PostProcess(step, (row,)))

    # -- transfers -----------------------------------------------------------------------------------------
    def submit_transfers(self, message: SchedulerOutput) -> None:
        """Stores of the last step, and those of this one that it flushes; flushed ones are waited for."""
        flush = list(dict.fromkeys(message.flush))
        told = [transfer.job for transfer in message.stores]
        after_store = -1 if self.decide.store_waits_for_main() else 0
        after_load = -1 if self.decide.load_waits_for_main() else 0
        for job in [*self.queued, *(job for job in told if job in flush)]:
            self.enqueue("flush", Begin(job, after_store), "store")
            self.enqueue("flush", End(job), "store")
        for job in flush:
            self.enqueue("flush", Wait(job))
        self.queued = [job for job in told if job not in flush]
        for transfer in message.loads:
            self.enqueue("load", Begin(transfer.job, after_load, tuple(flush)), "load")
            self.enqueue("load", End(transfer.job), "load")

    # -- the model -----------------------------------------------------------------------------------------
    def compute(self, message: SchedulerOutput) -> None:
        """Tables, recurrent pre-processing, forward, and what follows it."""
        decide, step = self.decide, message.step
        rows = sorted(message.rows, key=lambda row: (0 if self.v1 else row.tokens, self.slot[row.uid]))
        slots = [self.slot[row.uid] for row in rows]
        if not self.v1:
            self.ring.append((step, [(i, slot, self.generation[slot]) for i, slot in enumerate(slots)]))
        if not rows:
            return
        padded = min(len(rows) + len(rows) % 2, self.config.slots)  # captured batches have even sizes here
        reach = tuple(self.unreachable(row) for row in rows)
        gathered = decide.gathers_padding(len(rows), padded)
        self.enqueue("gather", Gather(tuple(slots), reach, gathered, decide.gather_buffer(step)))
        if self.has_states:
            pre = [(decide.precopy_row(i, slot), slot, rows[i].tokens) for i, slot in enumerate(slots)]
            self.enqueue("pre", PreProcess(tuple(pre)))
        batch = tuple(BatchRow(row.uid, self.slot[row.uid], row.tokens, row.decode) for row in rows)
        index = [decide.index_row(i, slot) for i, slot in enumerate(slots)]
        index += [decide.padded_row(i) for i in range(len(rows), padded)]
        self.enqueue("forward", Forward(step, batch, tuple(index)))
        if self.last_stage:
            self.enqueue("after", Sample(step))
            post = [(i, slot, decide.post_row(i, slot)) for i, slot in enumerate(slots)]
            self.enqueue("after", self.post(step, post, late=False))
            if self.config.draft_modules > 1:
                self.enqueue("after", Draft(step, batch))
            if self.v1 and self.config.drafts and self.config.async_scheduling:
                self.enqueue("after", CopyCounts(step, decide.counts_buffer(), -1), "counts")
                self.counted = (step, dict(self.slot))
        elif self.v1:
            self.late.update({row.uid: (step, i) for i, row in enumerate(rows)})

    def unreachable(self, row: ScheduledRow) -> tuple[int, ...]:
        """Leading columns, a group, that a window cannot reach any more: their blocks may be somebody
        else's."""
        return tuple(
            self.decide.retained_column(group, max(row.processed, 0)) if group.kind is Kind.WINDOW else 0
            for group in self.config.groups
        )
