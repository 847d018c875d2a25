"""Operations of worker programs: what a rank's streams execute, and when the head of a stream is blocked.

A policy answers ``worker_program(rank)`` with a list of ``(stream, operation)``.  Which operations, with
which operands and in which order is the policy's; *when* a stream advances is the adversary's.  An operand
is fixed when the operation is enqueued (a plain field, or :class:`Imm` for a table row), or is read when it
executes (:class:`Deref`).  A kernel that runs late differs from one that runs in its own step exactly in what
its operands still mean by then.

Within one stream operations run in order.  Between streams, a transfer waits for the part of the main
stream that was enqueued before it (``after_main``), as ``stream.wait_stream`` does; the main stream waits
for a transfer only where a :class:`Wait` says so.  A forward waits for the previous stage's forward of its
step, a late kernel for the tokens it was sent: data that does not exist cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec import forward, transfers
from spec.arith import align
from spec.chains import EMPTY, ZERO
from spec.operands import Deref as Deref  # operands belong to this vocabulary
from spec.operands import Imm as Imm
from spec.operands import TableRow as TableRow
from spec.operands import UserId as UserId
from spec.operands import column as column
from spec.operands import table_row as table_row

if TYPE_CHECKING:
    from spec.world import Rank, World


class Op:
    """One operation.  ``blocked`` says what it waits for, or None; ``run`` does it."""

    __slots__ = ()

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None

    def run(self, world: World, rank: Rank) -> None:
        raise NotImplementedError


# -- batch slots and tables --------------------------------------------------------------------------------


@dataclass(slots=True)
class Take(Op):
    """A request enters a batch slot (``v1/worker/gpu/states.py::RequestState.add_request``)."""

    slot: int
    uid: UserId

    def run(self, world: World, rank: Rank) -> None:
        world.slot_taken(rank, self.slot, self.uid)


@dataclass(slots=True)
class Leave(Op):
    """A request leaves its slot (``RequestState.remove_request``); the slot can be taken in the same step."""

    slot: int

    def run(self, world: World, rank: Rank) -> None:
        world.slot_left(rank, self.slot)


@dataclass(slots=True)
class SetRow(Op):
    """Staged writes of one table row become visible (``BlockTables.apply_staged_writes``)."""

    group: int
    row: int
    first: int
    blocks: Sequence[int]  # a tuple, fixed when enqueued; or a list, read when the copy runs

    def run(self, world: World, rank: Rank) -> None:
        table = rank.memory.tables["source"][self.group][self.row]
        table[self.first : self.first + len(self.blocks)] = self.blocks


@dataclass(slots=True)
class SetSlot(Op):
    """Per-slot state at admission (``model_states/mamba_hybrid.py::MambaHybridModelState.add_request``)."""

    slot: int
    accepted: int
    state: int
    computed: int

    def run(self, world: World, rank: Rank) -> None:
        memory = rank.memory
        memory.accepted[self.slot] = self.accepted
        memory.state[self.slot] = self.state
        memory.computed[self.slot] = self.computed


@dataclass(slots=True)
class Permute(Op):
    """The v1 runner keeps its batch dense: rows move or swap, and everything kept by row moves along
    (``v1/worker/gpu_input_batch.py::InputBatch.condense``, ``swap_states``)."""

    moves: tuple[tuple[int, int], ...]  # (from, to)
    swaps: tuple[tuple[int, int], ...]

    def run(self, world: World, rank: Rank) -> None:
        memory = rank.memory
        kept = [memory.accepted, memory.state, memory.computed, memory.last, memory.drafted]
        tables = memory.tables["source"]
        for src, dst in self.moves:
            for values in kept:
                values[dst] = values[src]
            for table in tables:
                table[dst] = list(table[src])
        for one, two in self.swaps:
            for values in kept:
                values[one], values[two] = values[two], values[one]
            for table in tables:
                table[one], table[two] = table[two], table[one]
        for row, slot in [*self.moves]:
            world.slot_moved(rank, row, slot)
        for one, two in self.swaps:
            world.slot_swapped(rank, one, two)


@dataclass(slots=True)
class Gather(Op):
    """Batch rows of this step, copied from the slots' rows; padded rows become null rows; columns that a
    window can no longer reach become null
    (``v1/worker/gpu/block_table.py::BlockTables.gather_block_tables``)."""

    slots: tuple[int, ...]
    unreachable: tuple[tuple[int, ...], ...]  # per batch row, per group: leading columns to null
    padded: int
    buffer: str = "gathered"

    def run(self, world: World, rank: Rank) -> None:
        source = rank.memory.tables["source"]
        target = rank.memory.tables[self.buffer]
        for group, table in enumerate(source):
            rows = target[group]
            for index, slot in enumerate(self.slots):
                rows[index] = list(table[slot])
                for col in range(self.unreachable[index][group]):
                    rows[index][col] = 0
            for index in range(len(self.slots), self.padded):
                rows[index] = [0] * len(rows[index])


# -- pages -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Zero(Op):
    """Fresh blocks are zeroed (``KVCacheConfig.needs_kv_cache_zeroing``)."""

    blocks: tuple[tuple[int, int], ...]  # (block, group)

    def run(self, world: World, rank: Rank) -> None:
        for block, group in self.blocks:
            rank.memory.fill(block, group, ZERO)
            world.wrote(rank, block, group, "zero")


@dataclass(slots=True)
class CopyPage(Op):
    """Copy-on-write (``SchedulerOutput.kv_cache_block_copies``)."""

    pairs: tuple[tuple[int, int, int], ...]  # (from, to, group)

    def run(self, world: World, rank: Rank) -> None:
        for src, dst, group in self.pairs:
            rank.memory.put_page(dst, rank.memory.page(src))
            world.wrote(rank, dst, group, "copy")


# -- recurrent state ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class PreProcess(Op):
    """Before the forward: the running column advances; where it moves, the state to go on from is copied
    there.

    Per row: operand of the table, slot, query tokens.  Source: ``v1/worker/mamba_utils.py``,
    ``preprocess_mamba_align_fused_kernel`` and ``precopy_mamba_align_fused_kernel``."""

    rows: tuple[tuple[TableRow, int, int], ...]

    def run(self, world: World, rank: Rank) -> None:
        memory, block = rank.memory, world.mamba_block
        for operand, slot, q in self.rows:
            source, accepted = memory.state[slot], memory.accepted[slot]
            bias = align.accepted_offset(accepted)
            running = align.running_column(memory.computed[slot], q, block)
            memory.state[slot] = running
            if source < 0 or source == running:
                continue
            memory.accepted[slot] = 1
            for group in world.mamba_groups:
                row = table_row(rank, operand, group)
                target = column(row, running)
                state = column(row, align.source_column(source, accepted))
                memory.copy_state(group, column(row, source), state, bias, target)
                world.wrote(rank, target, group, "precopy")


@dataclass(slots=True)
class PostProcess(Op):
    """After verification: counts become true, the slot gets the token and the drafts that it is fed with
    next, and a boundary that the accepted tokens reached is put in its column.

    On the last stage this runs in its own step; on earlier stages when the tokens have come back, ``pp``
    steps later.  Per row: batch index in the step it belongs to, slot (or -1: masked), operand of the table.
    Source: ``v1/worker/gpu/pp_utils.py::PPHandler``;
    ``v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel``."""

    step: int
    rows: tuple[tuple[int, int, TableRow], ...]
    floor: int = 1  # accepted count of a row that sampled nothing
    settles: bool = True  # whether it corrects the slot's computed count
    feeds: tuple[tuple[int, int], ...] = ()  # per row: whose last token and whose drafts; empty: its own

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None if world.steps[self.step].sampled else f"tokens of step {self.step}"

    def run(self, world: World, rank: Rank) -> None:
        memory, block = rank.memory, world.mamba_block
        run = world.steps[self.step]
        results = run.results
        late = rank.index == 0 and rank.stage < world.config.pp - 1
        for i, (index, slot, operand) in enumerate(self.rows):
            sampled, rejected = results[index]
            if late:
                world.late_row(self.step, index, slot, operand)
            if slot < 0:
                continue
            if not sampled:
                memory.accepted[slot] = self.floor
                continue
            accepted = sampled
            memory.accepted[slot] = accepted
            last, drafts = self.feeds[i] if self.feeds else (index, index)
            memory.last[slot] = run.heads.get(last, EMPTY)
            if drafts >= 0:
                memory.drafted[slot] = run.heads.get(drafts, EMPTY)
            if self.settles:
                memory.computed[slot] -= rejected
            if not block:
                continue
            after = memory.computed[slot]
            if not align.boundary_reached(after, accepted, block):
                continue
            target_col = align.destination_column(after, block)
            bias = align.boundary_offset(after, accepted, block)
            source = memory.state[slot]
            if source == target_col:
                memory.accepted[slot] = 1
                if bias == 0:
                    continue
            for group in world.mamba_groups:
                row = table_row(rank, operand, group)
                target = column(row, target_col)
                memory.copy_state(group, column(row, source), column(row, source + bias), bias, target)
                world.wrote(rank, target, group, "boundary")
            world.witness("crossing_with_accepted_offset", bias > 0)
        run.counts = list(memory.accepted)


# -- the forward -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request in a step's batch."""

    uid: UserId
    slot: int
    tokens: int  # query tokens, drafts included
    decode: bool  # one state a query token, instead of the chunk's last
    padded: bool = False  # its drafts are placeholders that no drafter proposed: never accepted


@dataclass(slots=True)
class Forward(Op):
    """The model runs: attention writes the step's cells and reads its history, recurrent layers go on from
    a state.

    ``tables`` names the gathered tables that the (possibly captured) kernels address; ``index`` is, for
    each row of the padded batch, the table row from which recurrent layers take their state columns
    (``v1/worker/mamba_utils.py::compute_aligned_state_indices``)."""

    step: int
    rows: tuple[BatchRow, ...]
    index: tuple[TableRow, ...]
    tables: str = "gathered"

    def blocked(self, world: World, rank: Rank) -> str | None:
        return forward.blocked(world, self, rank)

    def run(self, world: World, rank: Rank) -> None:
        forward.compute(world, self, rank)


@dataclass(slots=True)
class Sample(Op):
    """The last stage verifies the drafts and samples one token more; the tokens go to the host and to
    earlier stages."""

    step: int

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None if rank.index in world.steps[self.step].forwards else f"forward of step {self.step}"

    def run(self, world: World, rank: Rank) -> None:
        forward.sample(world, self.step)


@dataclass(slots=True)
class Draft(Op):
    """A drafter of several modules re-reads, after rejections, the last tokens' window
    (``v1/worker/gpu/spec_decode/multi_module_mtp``): why a window group retains extra tokens."""

    step: int
    rows: tuple[BatchRow, ...]
    tables: str = "gathered"

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None if world.steps[self.step].sampled else f"tokens of step {self.step}"

    def run(self, world: World, rank: Rank) -> None:
        forward.draft(world, self, rank)


# -- transfers ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Wait(Op):
    """The stream waits for a transfer's end on this rank: the flush of a store before its source is
    overwritten."""

    job: int

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None if self.job in rank.ended else f"end of job {self.job}"

    def run(self, world: World, rank: Rank) -> None:
        world.witness("flush_waited", True)


@dataclass(slots=True)
class Begin(Op):
    """A transfer reads its source; its target is torn until the end."""

    job: int
    after_main: int  # main-stream operations enqueued before this one
    after_jobs: tuple[int, ...] = ()  # transfers that must have ended: a host waits before it asks a network

    def blocked(self, world: World, rank: Rank) -> str | None:
        for job in self.after_jobs:
            if job not in rank.ended:
                return f"end of job {job}"
        return None if rank.executed >= self.after_main else f"main stream to {self.after_main}"

    def run(self, world: World, rank: Rank) -> None:
        transfers.begin(world, self.job, rank)


@dataclass(slots=True)
class End(Op):
    """A transfer delivers what it read."""

    job: int

    def run(self, world: World, rank: Rank) -> None:
        transfers.end(world, self.job, rank)


@dataclass(slots=True)
class Collect(Op):
    """The rank's host asks which transfers have ended; the answer travels with the step's output, which waits
    for every rank's (``.../offloading/worker.py::get_finished``, ``KVOutputAggregator``)."""

    step: int

    def run(self, world: World, rank: Rank) -> None:
        world.collect(rank, self.step)


# -- accepted counts of the v1 runner ----------------------------------------------------------------------


@dataclass(slots=True)
class CopyCounts(Op):
    """Accepted counts of a step go to a host buffer, on a stream of their own
    (``v1/worker/gpu_model_runner.py::_update_states_after_model_execute``)."""

    step: int
    buffer: str
    after_main: int

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None if rank.executed >= self.after_main else f"main stream to {self.after_main}"

    def run(self, world: World, rank: Rank) -> None:
        counts = world.steps[self.step].counts
        rank.memory.counts[self.buffer][: len(counts)] = counts
        rank.landed[self.step] = None


@dataclass(slots=True)
class HostRows(Op):
    """The host rewrites its batch rows between two steps: moves, swaps, and rows of new requests set to 1.

    Real hosts run ahead of the device.  What matters here is only whether the count copy lands before or
    after, and that is free: the copy runs on its own stream, so the host's operations can stand in the main
    stream."""

    buffer: str
    moves: tuple[tuple[int, int], ...]
    swaps: tuple[tuple[int, int], ...]
    fresh: tuple[int, ...]

    def run(self, world: World, rank: Rank) -> None:
        values = rank.memory.counts[self.buffer]
        for src, dst in self.moves:
            values[dst] = values[src]
        for one, two in self.swaps:
            values[one], values[two] = values[two], values[one]
        for row in self.fresh:
            values[row] = 1


@dataclass(slots=True)
class HostCounts(Op):
    """After the copy has landed, each row takes its count: from row ``previous`` of the buffer, or 1 if it
    was not in the step (``_prepare_inputs``)."""

    step: int  # the step whose counts are awaited; 0 for none
    buffer: str
    previous: tuple[tuple[int, int], ...]  # (row now, row then or -1)

    def blocked(self, world: World, rank: Rank) -> str | None:
        return None if not self.step or self.step in rank.landed else f"counts of step {self.step}"

    def run(self, world: World, rank: Rank) -> None:
        values = rank.memory.counts[self.buffer]
        taken = [(row, values[then] if then >= 0 else 1) for row, then in self.previous]
        for row, count in taken:
            if rank.index == 0:  # whose slots the core follows
                world.count_taken(self.step, row, count)
            rank.memory.accepted[row] = count
            rank.memory.counts["rows"][row] = count
