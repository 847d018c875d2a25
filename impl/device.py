"""A worker's device: its streams run, one operation at a time, on real bytes.

The story.  A worker's host enqueues operations; when each of them runs is decided by whoever drives the
device: here a deterministic executor that is told "the next one of this stream", so that a run can be
replayed.  Operands are read when an operation runs, from the tables and counts as they are then.  State
copies find their blocks in the *source* tables, by request slot; forwards read the *gathered* tables, by
batch row.  A transfer copies one half of every page when it begins and the other when it ends: whatever
changes in between is torn for certain, not by luck.

What comes from outside the worker (token ids, how many drafts were right, what the stage before handed on)
comes through a :class:`Feed`.

Sources: `v1/worker/gpu/model_runner.py`, `v1/worker/gpu/pp_utils.py`, `v1/kv_offload/cpu/gpu_worker.py`,
vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from impl.kernels import reference
from impl.memory import Memory
from impl.model import Batch, Layers, Reads, embedded
from spec.config import Config, Kind
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
    Op,
    Permute,
    PostProcess,
    PreProcess,
    SetRow,
    SetSlot,
    Zero,
)


class Feed(Protocol):
    """What reaches a worker from outside."""

    def tokens(self, step: int) -> list[list[int]]:
        """Token ids of a step's query tokens, row by row."""
        ...

    def results(self, step: int) -> list[tuple[int, int]]:
        """Per row of a step: tokens verified (0: none sampled), drafts rejected."""
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a device runs: the plain torch ones, or those in Triton."""

    name: str
    align: Callable[..., Any]
    gather: Callable[..., Any]
    zero_blocks: Callable[..., None]
    copy_blocks: Callable[..., None]


def kernels_named(name: str) -> Kernels:
    """``torch`` or ``triton``; raises ``ImportError`` if the latter is not installed."""
    if name == "torch":
        return Kernels(name, reference.Align, reference.Gather, reference.zero_blocks, reference.copy_blocks)
    from impl.kernels import align, pages

    return Kernels(name, align.Align, pages.Gather, pages.zero_blocks, pages.copy_blocks)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer as a worker is told of it."""

    job: int
    way: str  # "store" | "load"
    pages: tuple[tuple[int, int, int], ...]  # (device block, host chunk, sub-slot)


Activations = dict[tuple[int, int, int], torch.Tensor]
"""What stages hand on: (stage, rank within the stage, step) -> one word a query token."""

STEPS_KEPT = 16  # of activations and counts; far more than there are stages


class Device:
    """One rank's memory and what runs on it."""

    def __init__(
        self,
        config: Config,
        rank: int,
        kernels: Kernels,
        feed: Feed,
        wire: Activations,
        *,
        device: torch.device | None = None,
        poison: bool = False,
    ) -> None:
        self.config, self.rank, self.stage = config, rank, rank // config.tp
        self.device = device or torch.device("cpu")
        self.memory = Memory(config, self.stage, self.device)
        self.kernels, self.feed, self.wire = kernels, feed, wire
        bound = self.memory.recurrent()
        self.align = kernels.align(bound, self.memory.slots) if bound else None
        self.gather = kernels.gather(self.memory.gather_tables())
        self.layers = Layers(config, self.stage, self.device)
        self.block = bound.block_tokens if bound else 0
        self.transfers: dict[int, Transfer] = {}
        self.counts: dict[
            int, torch.Tensor
        ] = {}  # step -> accepted counts by slot, as post-processing left them
        self.debug = poison
        self.before: dict[
            int, tuple[Op, list[int]]
        ] = {}  # debug mode: pages to poison right before an operation
        self.reads: Reads | None = None  # of the last forward or drafter
        self.output: torch.Tensor | None = None  # of the last forward, one word a query token

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Numbers on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def execute(self, op: Op) -> None:
        """Run one operation."""
        _, blocks = self.before.pop(id(op), (op, []))
        self.memory.poison(blocks)
        name = _HANDLERS.get(type(op))
        if name:
            getattr(self, name)(op)

    # -- slots and tables ----------------------------------------------------------------------------------
    def set_row(self, op: SetRow) -> None:
        """Staged writes of a source row become visible."""
        memory, last = self.memory, op.first + len(op.blocks)
        if op.blocks:
            memory.source[op.group][op.row, op.first : last] = self.tensor(op.blocks)
        memory.num_blocks[op.group, op.row] = last

    def set_slot(self, op: SetSlot) -> None:
        """A slot's state at admission."""
        memory = self.memory
        memory.slots.accepted[op.slot] = op.accepted
        memory.slots.columns[op.slot] = op.state
        memory.computed[op.slot] = op.computed

    def permute(self, op: Permute) -> None:
        """The v1 runner's rows move or swap, with everything kept by row."""
        memory = self.memory
        kept = [*memory.source, memory.slots.accepted, memory.slots.columns, memory.computed]
        for src, dst in op.moves:
            for values in kept:
                values[dst] = values[src].clone()
            memory.num_blocks[:, dst] = memory.num_blocks[:, src].clone()
        for one, two in op.swaps:
            for values in kept:
                values[[one, two]] = values[[two, one]]
            memory.num_blocks[:, [one, two]] = memory.num_blocks[:, [two, one]]

    def gather_rows(self, op: Gather) -> None:
        """Batch rows from slots' rows; padded rows become null."""
        padding = [-1] * (op.padded - len(op.slots))
        self.gather(self.tensor([*op.slots, *padding]), self.memory.computed)

    # -- pages ---------------------------------------------------------------------------------------------
    def zero(self, op: Zero) -> None:
        """Fresh blocks are zeroed."""
        self.kernels.zero_blocks(self.memory.pages, self.tensor([block for block, _ in op.blocks]))

    def copy_pages(self, op: CopyPage) -> None:
        """Copy-on-write, pair by pair."""
        for src, dst, _ in op.pairs:
            self.memory.pages[dst] = self.memory.pages[src]

    # -- recurrent state -----------------------------------------------------------------------------------
    def pre_process(self, op: PreProcess) -> None:
        """Advance the running columns; where one moves, its state follows."""
        if self.align is None:
            return
        slots = self.tensor([slot for _, slot, _ in op.rows])
        ends = [0]
        for _, _, q in op.rows:
            ends.append(ends[-1] + q)
        self.align.preprocess(slots, self.tensor(ends), self.memory.computed)
        self.align.precopy()

    def post_process(self, op: PostProcess) -> None:
        """Counts become true; boundary states go to their columns.  A masked row has slot -1."""
        memory, results = self.memory, self.feed.results(op.step)
        for index, slot, _ in op.rows:
            if slot >= 0 and op.settles:
                memory.computed[slot] -= results[index][1]
        slots = self.tensor([slot for _, slot, _ in op.rows])
        sampled = self.tensor([results[index][0] for index, _, _ in op.rows])
        if self.align is not None:
            self.align.postprocess(slots, sampled, memory.computed)
        else:
            live = slots >= 0
            memory.slots.accepted[slots[live].long()] = sampled[live].clamp(min=1)
        self.keep(self.counts, op.step, memory.slots.accepted.cpu().clone())

    def keep(self, what: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
        """Remember something of a step; the oldest ones go."""
        what[key] = value
        while len(what) > STEPS_KEPT * self.config.ranks:
            del what[next(iter(what))]

    # -- the model -----------------------------------------------------------------------------------------
    def batch(self, op: Forward | Draft) -> Batch:
        """The step's rows, from the slots' own counts."""
        slots = self.tensor([row.slot for row in op.rows], torch.int64)
        lengths = tuple(row.tokens for row in op.rows)
        starts = self.memory.computed[slots].long()
        rows = [i for i, length in enumerate(lengths) for _ in range(length)]
        within = [n for length in lengths for n in range(length)]
        at = self.tensor(rows, torch.int64)
        offsets = (self.memory.slots.accepted[slots].long() - 1).clamp(0, self.config.drafts)
        positions = starts[at] + self.tensor(within, torch.int64)
        return Batch(starts, lengths, tuple(row.decode for row in op.rows), at, positions, offsets)

    def forward(self, op: Forward) -> None:
        """All layers of the stage, in order."""
        memory, batch = self.memory, self.batch(op)
        lane = self.rank % self.config.tp
        if self.stage:
            x = self.wire[self.stage - 1, lane, op.step]
        else:
            x = embedded(self.feed.tokens(op.step), batch)
        columns = self.state_columns(op, batch)
        self.reads = reads = Reads({}, {}, {}, {})
        rows = len(op.rows)
        for g, group in enumerate(self.config.groups):
            if group.kind is Kind.MAMBA:
                pages, index = memory.states[g], memory.mamba.index(g)
                x = self.layers.recur(g, x, batch, pages.window, pages.temporal, columns[index], reads)
            else:
                x = self.layers.attend(g, x, batch, memory.kv[g], memory.gathered[g][:rows], reads)
        slots = self.tensor([row.slot for row in op.rows], torch.int64)
        memory.computed[slots] += self.tensor(batch.lengths)
        self.output = x
        self.keep(self.wire, (self.stage, lane, op.step), x)

    def state_columns(self, op: Forward, batch: Batch) -> torch.Tensor:
        """Blocks of each row's running and scratch columns, through the gathered tables; padding is null."""
        if self.align is None:
            return self.tensor([])
        sequence = torch.zeros(len(op.index), dtype=torch.int32, device=self.device)
        sequence[: len(op.rows)] = batch.starts.int() + self.tensor(batch.lengths)
        columns: torch.Tensor = self.align.aligned_state_indices(sequence)
        return columns

    def draft(self, op: Draft) -> None:
        """A drafter of several modules reads its retained history again, through the gathered tables."""
        rows = len(op.rows)
        self.reads = Reads({}, {}, {}, {})
        for g, group in enumerate(self.config.groups):
            if group.extra_tokens:
                kv = self.memory.kv[g]
                seen = kv[self.memory.gathered[g][:rows].long()]
                self.reads.cells[g] = seen.reshape(rows, -1, kv.shape[2])

    # -- transfers -----------------------------------------------------------------------------------------
    def begin(self, op: Begin) -> None:
        """The first half of every page."""
        self.copy_half(op.job, 0)

    def end(self, op: End) -> None:
        """The second half of every page."""
        self.copy_half(op.job, 1)

    def copy_half(self, job: int, half: int) -> None:
        """One half of every page of a transfer, to the host or from it."""
        transfer = self.transfers[job]
        if transfer.pages:
            pages = self.tensor(transfer.pages)
            self.kernels.copy_blocks(self.memory.halves[half], pages, transfer.way == "store")

    # -- accepted counts of the v1 runner ------------------------------------------------------------------
    def copy_counts(self, op: CopyCounts) -> None:
        """A step's accepted counts land in a host buffer."""
        self.memory.counts[op.buffer].copy_(self.counts[op.step])

    def host_rows(self, op: HostRows) -> None:
        """The host rewrites its rows."""
        values = self.memory.counts[op.buffer]
        for src, dst in op.moves:
            values[dst] = values[src]
        for one, two in op.swaps:
            values[[one, two]] = values[[two, one]]
        for row in op.fresh:
            values[row] = 1

    def host_counts(self, op: HostCounts) -> None:
        """Each row takes the count of the row where its request sat then, or 1."""
        values, memory = self.memory.counts[op.buffer].clone(), self.memory
        for row, then in op.previous:
            count = int(values[then]) if then >= 0 else 1
            memory.slots.accepted[row] = count
            memory.counts["rows"][row] = count


#: operation -> the device's method for it; what is not here leaves memory alone
_HANDLERS: dict[type[Op], str] = {
    SetRow: "set_row",
    SetSlot: "set_slot",
    Permute: "permute",
    Gather: "gather_rows",
    Zero: "zero",
    CopyPage: "copy_pages",
    PreProcess: "pre_process",
    PostProcess: "post_process",
    Forward: "forward",
    Draft: "draft",
    Begin: "begin",
    End: "end",
    CopyCounts: "copy_counts",
    HostRows: "host_rows",
    HostCounts: "host_counts",
}
