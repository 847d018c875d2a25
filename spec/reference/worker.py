"""The reference worker: what each rank enqueues for a step, for both runners.

**v2** (``v1/worker/gpu/model_runner.py``): persistent slots; source tables that requests append to;
gathered tables in batch order; on all but the last stage, post-processing of a step ``pp`` steps later,
from a ring.  **v1** (``v1/worker/gpu_model_runner.py``): dense batch rows that move when a request leaves;
accepted counts go to the host and come back with the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from spec import ops
from spec.arith import align
from spec.config import Config, Kind
from spec.ops import BatchRow, Op, TableRow, UserId
from spec.policy import Program
from spec.reference.decisions import Decisions
from spec.reference.plan import Message, RowMessage

Stages = dict[str, list[tuple[str, Op]]]


class Worker:
    """One rank's host process."""

    def __init__(self, config: Config, decide: Decisions, rank: int) -> None:
        self.config, self.decide, self.rank = config, decide, rank
        self.mamba_block = next((g.block_tokens for g in config.groups if g.kind is Kind.MAMBA), 0)
        self.last_stage = rank // config.tp == config.pp - 1
        self.free_slots = list(range(config.slots - 1, -1, -1))
        self.slot: dict[UserId, int] = {}
        self.generation = [0] * config.slots
        self.length: dict[UserId, list[int]] = {}  # columns held per group
        # What each of the last pp steps still has to post-process: (batch index, request, slot, generation).
        self.ring: deque[tuple[int, list[tuple[int, UserId, int, int]]]] = deque(
            (0, []) for _ in range(config.pp)
        )
        self.staging: list[list[int]] = []  # pinned host memory, one list a table write of a step
        self.queued: list[int] = []  # stores of earlier steps, not yet submitted
        self.batch: list[UserId] = []  # v1: request by batch row
        self.last_rows: dict[UserId, int] = {}  # v1: batch row in the last step that computed something
        self.last_step = 0
        self.late: dict[
            UserId, tuple[int, int]
        ] = {}  # v1 stages: step and index that still need their counts

    def program(self, message: Message) -> Program:
        """All stages of the step, in the runner's order."""
        v1 = self.config.runner == "v1"
        order = self.decide.v1_order if v1 else self.decide.v2_order
        stages: Stages = {name: [] for name in order}
        if v1:
            self.v1_rows(message, stages)
        else:
            self.v2_rows(message, stages)
        self.transfers(message, stages)
        if message.zero:
            stages["zero"].append(("main", ops.Zero(tuple(message.zero))))
        if message.copies:
            stages["copy"].append(("main", ops.CopyPage(tuple(message.copies))))
        rows = sorted(message.rows, key=lambda row: (row.tokens, self.slot[row.uid]))
        if v1:
            rows = sorted(message.rows, key=lambda row: self.slot[row.uid])
        self.compute(message, rows, stages)
        return [entry for name in order for entry in stages[name]]

    # -- requests enter and leave --------------------------------------------------------------------------
    def v2_rows(self, message: Message, stages: Stages) -> None:
        """Late post-processing, then slots and table rows."""
        decide = self.decide
        step, entries = self.ring.popleft()
        if entries and not self.last_stage:
            rows = []
            for index, _, slot, generation in entries:
                masked = decide.masks_late_row(generation, self.generation[slot])
                rows.append((index, -1 if masked else slot, decide.post_row(index, slot)))
            floor, settles = decide.accepted_floor(), decide.settles_computed(True)
            feeds = self.feeds([(index, slot) for index, _, slot, _ in entries], late=True)
            stages["post"].append(("main", ops.PostProcess(step, tuple(rows), floor, settles, feeds)))
        for uid in message.left:
            left = self.slot.pop(uid, None)
            if left is not None:
                self.free_slots.append(left)
                self.generation[left] += 1
                stages["leave"].append(("main", ops.Leave(left)))
        for uid, computed, table in message.fresh:
            slot = self.free_slots.pop()
            self.slot[uid] = slot
            self.enter(uid, slot, computed, table, stages)
        self.append(message, stages)

    def enter(
        self, uid: UserId, slot: int, computed: int, table: tuple[tuple[int, ...], ...], stages: Stages
    ) -> None:
        """A request takes a slot: its rows are overwritten from column 0, its state seeded."""
        stages["take"].append(("main", ops.Take(slot, uid)))
        for group, blocks in enumerate(table):
            stages["take"].append(("main", ops.SetRow(group, slot, 0, blocks)))
        self.length[uid] = [len(blocks) for blocks in table]
        seed = -1
        if self.mamba_block:
            divisor = self.decide.seed_divisor(self.config, self.mamba_block)
            seed = align.seed_column(computed, divisor)
        stages["take"].append(("main", ops.SetSlot(slot, 1, seed, computed)))

    def append(self, message: Message, stages: Stages) -> None:
        """New columns of running requests."""
        staged = 0
        for uid, table in message.appended:
            for group, blocks in enumerate(table):
                if blocks:
                    at = self.decide.append_column(self.length[uid][group])
                    ids = blocks if self.decide.stages_afresh() else self.pinned(staged, blocks)
                    staged += 1
                    stages["update"].append(("main", ops.SetRow(group, self.slot[uid], at, ids)))
                    self.length[uid][group] += len(blocks)

    def pinned(self, at: int, blocks: Sequence[int]) -> Sequence[int]:
        """The step's table write number ``at``, in host memory that the next step's write goes to as well."""
        self.staging.extend([] for _ in range(at + 1 - len(self.staging)))
        self.staging[at][:] = blocks
        return self.staging[at]

    def v1_rows(self, message: Message, stages: Stages) -> None:
        """Rows are removed, the batch is made dense again, new requests go to the end; counts follow by
        identity."""
        config, decide = self.config, self.decide
        then: dict[UserId, int] = dict(self.last_rows)
        if not self.last_stage:
            self.v1_late(message, stages)
        moves: list[tuple[int, int]] = []
        swaps: list[tuple[int, int]] = []
        for uid in message.left:
            if uid not in self.slot:
                continue
            row = self.slot.pop(uid)
            stages["leave"].append(("main", ops.Leave(row)))
            last = len(self.batch) - 1
            if row != last:
                moved = self.batch[last]
                self.batch[row] = moved
                self.slot[moved] = row
                moves.append((last, row))
                stages["leave"].append(("main", ops.Permute(((last, row),), ())))
            self.batch.pop()
        for uid, computed, table in message.fresh:
            row = len(self.batch)
            self.batch.append(uid)
            self.slot[uid] = row
            self.enter(uid, row, computed, table, stages)
        tokens = {row.uid: row.tokens for row in message.rows}
        # Decode rows first (``_may_reorder_batch``): one swap when a long row stands before a short one.
        for one in range(len(self.batch)):
            for two in range(len(self.batch) - 1, one, -1):
                first, second = self.batch[one], self.batch[two]
                if first in tokens and second in tokens and tokens[second] < tokens[first]:
                    self.batch[one], self.batch[two] = second, first
                    self.slot[first], self.slot[second] = two, one
                    swaps.append((one, two))
                    stages["take"].append(("main", ops.Permute((), ((one, two),))))
                    break
        self.append(message, stages)
        if config.drafts and config.async_scheduling:
            buffer = decide.counts_buffer()
            fresh = [self.slot[uid] for uid, _, _ in message.fresh]  # after the swaps
            stages["rows"].append(("main", ops.HostRows("rows", tuple(moves), tuple(swaps), tuple(fresh))))
            known = [(row, decide.previous_row(then.get(uid), uid in then)) for uid, row in self.slot.items()]
            if (
                not self.last_step
            ):  # the last step computed nothing: counts stand as they are, new rows start from 1
                known = [(row, before) for row, before in known if row in fresh]
            stages["update"].append(("main", ops.HostCounts(self.last_step, buffer, tuple(known))))
            self.last_step = 0
            self.last_rows = {}

    def v1_late(self, message: Message, stages: Stages) -> None:
        """A stage that does not sample learns the counts of processed steps with the message (sync only)."""
        decide = self.decide
        for uid, _ in message.accepted:
            late = self.late.pop(uid, None)
            if late and uid in self.slot:
                slot = self.slot[uid]
                row, feeds = decide.post_row(late[1], slot), self.feeds([(late[1], slot)], late=True)
                post = ops.PostProcess(late[0], ((late[1], slot, row),), feeds=feeds)
                stages["flush"].append(("main", post))

    # -- transfers -----------------------------------------------------------------------------------------
    def transfers(self, message: Message, stages: Stages) -> None:
        """Stores of the last step are submitted now; flushed ones are waited for; this step's are queued."""
        flush = list(dict.fromkeys(message.flush))
        now = [job for job in message.stores if job in flush]
        store_after = -1 if self.decide.store_waits_for_main() else 0
        load_after = -1 if self.decide.load_waits_for_main() else 0
        for job in self.queued + now:
            stages["flush"].append(("store", ops.Begin(job, store_after)))
            stages["flush"].append(("store", ops.End(job)))
        for job in flush:
            stages["flush"].append(("main", ops.Wait(job)))
        self.queued = [job for job in message.stores if job not in flush]
        for job in message.loads:
            stages["load"].append(("load", ops.Begin(job, load_after, tuple(flush))))
            stages["load"].append(("load", ops.End(job)))

    # -- the model -----------------------------------------------------------------------------------------
    def compute(self, message: Message, rows: list[RowMessage], stages: Stages) -> None:
        """Tables, recurrent pre-processing, forward, and what follows it."""
        config, decide = self.config, self.decide
        entries = [
            (i, row.uid, self.slot[row.uid], self.generation[self.slot[row.uid]])
            for i, row in enumerate(rows)
        ]
        if config.runner == "v2":
            self.ring.append((message.step, entries))
        if not rows:
            return
        padded = min(len(rows) + len(rows) % 2, config.slots)  # captured graphs have even batch sizes here
        buffer = decide.gather_buffer(message.step)
        slots = tuple(self.slot[row.uid] for row in rows)
        reach = tuple(self.unreachable(row) for row in rows)
        gathered = decide.gathers_padding(len(rows), padded)
        stages["gather"].append(("main", ops.Gather(slots, reach, gathered, buffer)))
        if self.mamba_block:
            pre = tuple((decide.precopy_row(i, slot), slot, rows[i].tokens) for i, _, slot, _ in entries)
            stages["pre"].append(("main", ops.PreProcess(pre)))
        batch = tuple(BatchRow(row.uid, self.slot[row.uid], row.tokens, row.decode) for row in rows)
        index: list[TableRow] = [decide.index_row(i, slot) for i, _, slot, _ in entries]
        index += [decide.padded_row(i) for i in range(len(rows), padded)]
        stages["forward"].append(("main", ops.Forward(message.step, batch, tuple(index))))
        after = stages["after"]
        if self.last_stage:
            after.append(("main", ops.Sample(message.step)))
            post = tuple((i, slot, decide.post_row(i, slot)) for i, _, slot, _ in entries)
            floor, settles = decide.accepted_floor(), decide.settles_computed(False)
            feeds = self.feeds([(i, slot) for i, _, slot, _ in entries], late=False)
            after.append(("main", ops.PostProcess(message.step, post, floor, settles, feeds)))
            if config.draft_modules > 1:
                after.append(("main", ops.Draft(message.step, batch)))
            if config.runner == "v1" and config.drafts and config.async_scheduling:
                after.append(("counts", ops.CopyCounts(message.step, decide.counts_buffer(), -1)))
                self.last_step = message.step
                self.last_rows = dict(self.slot)
        elif config.runner == "v1":
            for i, row in enumerate(rows):
                self.late[row.uid] = (message.step, i)

    def feeds(self, rows: list[tuple[int, int]], *, late: bool) -> tuple[tuple[int, int], ...]:
        """Whose last token and whose drafts each row (index, slot) is fed with next; empty: its own."""
        decide = self.decide
        given = tuple((decide.last_row(*row), decide.draft_row(*row, late)) for row in rows)
        return () if given == tuple((index, index) for index, _ in rows) else given

    def unreachable(self, row: RowMessage) -> tuple[int, ...]:
        """Leading columns that a window can no longer reach, by the processed count (they may be reused
        already)."""
        counts = []
        for group in self.config.groups:
            reach = 0
            if group.kind.value == "window":
                reach = self.decide.retained_column(group, max(row.processed, 0))
            counts.append(reach)
        return tuple(counts)
