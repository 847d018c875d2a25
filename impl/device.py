"""A worker's device: what each operation of its streams does to real bytes.

The story.  A worker's host enqueues operations; whoever drives the device decides when each of them runs.
Operands are read when an operation runs, from the tables and counts as they are then.  State copies find
their blocks in the *source* tables, by request slot; forwards read the *gathered* tables, by batch row.  A
transfer copies one half of every page when it begins and the other when it ends: whatever changes in
between is torn for certain, not by luck.

On a CPU an operation runs when ``execute`` is called.  On a CUDA device ``execute`` only launches it, on the
current stream, and never waits: numbers that the host knows go through :meth:`Device.tensor`, those that it
learns later (token ids, how many drafts were right: a :class:`Feed`) through :meth:`Device.late`.  See
``impl.cuda`` for both.

Sources: `v1/worker/gpu/model_runner.py`, `v1/worker/gpu/pp_utils.py`, `v1/kv_offload/cpu/gpu_worker.py`,
vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from impl.kernels import reference
from impl.memory import POISON, Memory
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
        # step -> accepted counts by slot, as post-processing left them
        self.counts: dict[int, torch.Tensor] = {}
        self.debug = poison
        # Debug mode: pages to poison right before an operation.
        self.before: dict[int, tuple[Op, list[int]]] = {}
        self.read = torch.zeros(0, dtype=torch.int32)  # what the last forward or drafter read, flat
        self.places: dict[tuple[str, int], tuple[int, int]] = {}  # and where its parts lie
        self.output: torch.Tensor | None = None  # of the last forward, one word a query token

    def restart(self, feed: Feed, wire: Activations) -> None:
        """A new engine takes over, and finds everything as if it were new; no address changes."""
        self.feed, self.wire = feed, wire
        self.memory.clear()
        self.transfers.clear()
        self.counts.clear()
        self.before.clear()

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Numbers on the device, known to the host now."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def late(self, op: Op, values: Callable[[], Sequence[int]], length: int) -> torch.Tensor:
        """``length`` numbers (int64) that the host knows by the time the operation runs."""
        return self.tensor(values(), torch.int64)

    def padded_tokens(self, tokens: int) -> int:
        """Query tokens of the batch that a step's are padded to: here none are added."""
        return tokens

    def execute(self, op: Op) -> None:
        """Run one operation."""
        _, blocks = self.before.pop(id(op), (op, []))
        if blocks:
            self.memory.words.index_fill_(0, self.tensor(blocks, torch.int64), POISON)
        name = _HANDLERS.get(type(op))
        if name:
            getattr(self, name)(op)

    # -- slots and tables ----------------------------------------------------------------------------------
    def set_row(self, op: SetRow) -> None:
        """Staged writes of a source row become visible."""
        memory, last = self.memory, op.first + len(op.blocks)
        if op.blocks:
            memory.source[op.group][op.row, op.first : last] = self.tensor(op.blocks)
        memory.num_blocks[op.group, op.row].fill_(last)

    def set_slot(self, op: SetSlot) -> None:
        """A slot's state at admission."""
        memory = self.memory
        memory.slots.accepted[op.slot].fill_(op.accepted)  # assigning a number would wait for the device
        memory.slots.columns[op.slot].fill_(op.state)
        memory.computed[op.slot].fill_(op.computed)

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
                exchange(values, one, two)
            exchange(memory.num_blocks.T, one, two)

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
        memory, (sampled, rejected) = self.memory, self.results(op)
        live = [i for i, (_, slot, _) in enumerate(op.rows) if slot >= 0]
        if live:
            index = self.tensor(live, torch.int64)
            slots = self.tensor([op.rows[i][1] for i in live], torch.int64)
            if op.settles:
                memory.computed.index_add_(0, slots, -rejected[index])
            if self.align is None:
                memory.slots.accepted.index_copy_(0, slots, sampled[index].clamp(min=1))
        if self.align is not None and op.rows:
            slots = self.tensor([slot for _, slot, _ in op.rows])
            self.align.postprocess(slots, sampled, memory.computed)
        self.keep(self.counts, op.step, memory.slots.accepted.clone())

    def results(self, op: PostProcess) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row: tokens verified, drafts rejected; int32 [rows] each."""

        def values() -> list[int]:
            results = self.feed.results(op.step)
            return [results[index][part] for part in (0, 1) for index, _, _ in op.rows]

        both = self.late(op, values, 2 * len(op.rows)).int()
        return both[: len(op.rows)], both[len(op.rows) :]

    def keep(self, what: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
        """Remember something of a step; the oldest ones go."""
        what[key] = value
        while len(what) > STEPS_KEPT * self.config.ranks:
            del what[next(iter(what))]

    # -- the model -----------------------------------------------------------------------------------------
    def forward(self, op: Forward) -> None:
        """All layers of the stage, in order."""
        lengths = [row.tokens for row in op.rows]
        rows, tokens = len(op.index), self.padded_tokens(sum(lengths))
        numbers = self.tensor(row_numbers(op, rows, tokens), torch.int64)
        lane = self.rank % self.config.tp

        def ids() -> list[int]:
            known = [one for row in self.feed.tokens(op.step) for one in row]
            return known + [0] * (tokens - len(known))

        x = self.wire[self.stage - 1, lane, op.step] if self.stage else self.late(op, ids, tokens)
        self.show_index(op)
        longest = max(lengths, default=0)
        self.output, self.read, self.places = self.run_layers(numbers, x, rows, tokens, longest)
        self.keep(self.wire, (self.stage, lane, op.step), self.output)

    def show_index(self, op: Forward) -> None:
        """The rows from which the layers take their state columns are the gathered ones."""

    def run_layers(
        self, numbers: torch.Tensor, x: torch.Tensor, rows: int, tokens: int, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, int], tuple[int, int]]]:
        """One batch: slots, lengths and kinds of ``rows`` rows, then row and number within it of ``tokens``
        tokens; and what enters the stage.  Returns what it hands on, what it read, and where that lies."""
        memory, config = self.memory, self.config
        slots, lengths, decode = numbers[: 3 * rows].view(3, rows)
        row, within = numbers[3 * rows :].view(2, tokens)
        starts = memory.computed[slots].long() * (lengths > 0)
        positions = starts[row.clamp(max=rows - 1)] + within
        offsets = (memory.slots.accepted[slots].long() - 1).clamp(0, config.drafts)
        batch = Batch(lengths, decode > 0, starts, offsets, row, within, positions)
        if not self.stage:
            x = embedded(x, batch)
        columns = self.state_columns(starts + lengths, lengths)
        reads = Reads()
        for g, group in enumerate(config.groups):
            if group.kind is Kind.MAMBA:
                pages, index = memory.states[g], memory.mamba.index(g)
                window, temporal = pages.window, pages.temporal
                x = self.layers.recur(g, x, batch, window, temporal, columns[index], reads, longest)
            else:
                x = self.layers.attend(g, x, batch, memory.kv[g], memory.gathered[g][:rows], reads)
        memory.computed.index_add_(0, slots, lengths.int())
        reads.parts["output", -1] = x.int()
        return x, reads.flat(), reads.places()

    def state_columns(self, sequence: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Blocks of each row's running and scratch columns, through the gathered tables; padding is null."""
        if self.align is None:
            return sequence
        columns: torch.Tensor = self.align.aligned_state_indices(sequence.int())
        return columns

    def draft(self, op: Draft) -> None:
        """A drafter of several modules reads its retained history again, through the gathered tables."""
        rows, reads = len(op.rows), Reads()
        for g, group in enumerate(self.config.groups):
            if group.extra_tokens:
                kv = self.memory.kv[g]
                seen = kv[self.memory.gathered[g][:rows].long()]
                reads.parts["cells", g] = seen.reshape(rows, -1, kv.shape[2])
        self.read, self.places = reads.flat(), reads.places()

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

    def delivered(self, way: str, pages: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, int]:
        """The pages (device block, host chunk, sub-slot) that a transfer has written, one behind the other,
        and the words of each."""
        memory, words = self.memory, self.memory.half_bytes // 2
        read = torch.empty((len(pages), words), dtype=torch.int32, device=self.device)
        for i, (block, place, sub) in enumerate(pages):
            chunk = memory.chunks[place, sub].view(torch.int32)
            read[i].copy_(chunk if way == "store" else memory.words[block, :words], non_blocking=True)
        return read.reshape(-1), words

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
            exchange(values, one, two)
        for row in op.fresh:
            values[row].fill_(1)

    def host_counts(self, op: HostCounts) -> None:
        """Each row takes the count of the row where its request sat then, or 1."""
        if not op.previous:
            return
        rows = self.tensor([row for row, _ in op.previous], torch.int64)
        then = self.tensor([then for _, then in op.previous], torch.int64)
        counts = self.memory.counts[op.buffer][then.clamp(min=0)]
        counts = torch.where(then >= 0, counts, torch.ones_like(counts))
        self.memory.slots.accepted.index_copy_(0, rows, counts)
        self.memory.counts["rows"].index_copy_(0, rows, counts)


def row_numbers(op: Forward, rows: int, tokens: int) -> list[int]:
    """A batch as numbers: slot, query tokens and kind of every row, padded to ``rows``; row and number within
    it of every token, padded to ``tokens``."""
    more = [0] * (rows - len(op.rows))
    row = [i for i, one in enumerate(op.rows) for _ in range(one.tokens)]
    within = [n for one in op.rows for n in range(one.tokens)]
    rest = tokens - len(row)
    return [
        *(one.slot for one in op.rows), *more,
        *(one.tokens for one in op.rows), *more,
        *(int(one.decode) for one in op.rows), *more,
        *row, *[rows] * rest, *within, *[0] * rest,
    ]  # fmt: skip


def exchange(values: torch.Tensor, one: int, two: int) -> None:
    """Two rows change places."""
    first = values[one].clone()
    values[one] = values[two]
    values[two] = first


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
