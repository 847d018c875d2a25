"""The kernels' plain twins: the same classes and methods, written as loops over rows with torch slices.

They run on any device and are slow on purpose; nothing is clever here.  A row of a batch carries its
request slot in `idx_mapping`; -1 marks a padded row, or a row whose slot has changed hands since
(another generation), and nothing is read or written for it.

Sources: `v1/worker/mamba_utils.py`, `v1/worker/gpu/block_table.py`,
`v1/worker/gpu/model_states/mamba_hybrid.py` and `v1/kv_offload/cpu/gpu_worker.py`, vLLM 0.33.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from impl.kernels.layout import GatherTables, Layout, PagedChunks, Recurrent, SlotMemory, StateView
from spec.arith import align, coverage


class Crossing(NamedTuple):
    """A request whose state moves between two columns of its row."""

    slot: int
    source: int
    destination: int
    offset: int


class Align:
    """Align-mode state copies and indices over one binding (tables, states) and its slots' memory."""

    def __init__(self, bound: Recurrent, memory: SlotMemory) -> None:
        self.bound = bound
        self.memory = memory
        shape = (len(bound.source_tables), bound.rows, 1 + bound.drafts)
        self.state_indices = torch.zeros(shape, dtype=torch.int32, device=bound.source_tables[0].device)
        self.before: list[Crossing] = []
        self.after: list[Crossing] = []

    def preprocess(
        self, idx_mapping: torch.Tensor, query_start: torch.Tensor, computed: torch.Tensor
    ) -> None:
        """Before a forward: advance each slot's column, and list the slots whose state must follow.

        `query_start` [rows + 1] are the batch rows' token offsets, `computed` [slots] the tokens before
        the step.  A column that changes resets the slot's accepted count to 1.
        """
        memory = self.memory
        self.before = []
        for row, slot in enumerate(idx_mapping.tolist()):
            if slot < 0:
                continue
            scheduled = int(query_start[row + 1]) - int(query_start[row])
            source, offset = int(memory.columns[slot]), align.accepted_offset(int(memory.accepted[slot]))
            running = align.running_column(int(computed[slot]), scheduled, self.bound.block_tokens)
            memory.columns[slot] = running
            if source >= 0 and source != running:
                memory.accepted[slot] = 1
                self.before.append(Crossing(slot, source, running, offset))

    def precopy(self) -> None:
        """After `preprocess`, before the forward: bring listed slots' states to their new column."""
        self._copy(self.before)

    def aligned_state_indices(self, sequence_tokens: torch.Tensor) -> torch.Tensor:
        """Blocks of columns first .. first + K of every batch row's gathered table, [groups, rows, 1 + K].

        `sequence_tokens` [rows] count the scheduled tokens; 0 marks a padded row, whose indices are the
        null block's, as are those of columns past the row's end.
        """
        for group, table in enumerate(self.bound.input_tables):
            for row, tokens in enumerate(sequence_tokens.tolist()):
                first = align.aligned_first_column(tokens, self.bound.block_tokens)
                for draft in range(1 + self.bound.drafts):
                    column = align.scratch_column(first, draft)
                    known = tokens > 0 and column < table.shape[1]
                    self.state_indices[group, row, draft] = int(table[row, column]) if known else 0
        return self.state_indices[:, : sequence_tokens.numel()]

    def scatter_accepted(self, idx_mapping: torch.Tensor, sampled: torch.Tensor) -> None:
        """After sampling: each row's accepted count to its slot, 1 for a row that sampled nothing."""
        for row, slot in enumerate(idx_mapping.tolist()):
            if slot >= 0:
                self.memory.accepted[slot] = max(int(sampled[row]), 1)

    def decide(self, idx_mapping: torch.Tensor, sampled: torch.Tensor, computed: torch.Tensor) -> None:
        """After sampling: accepted counts to slots, and list the slots that reached a boundary.

        `sampled` [rows] and `computed` [slots], the tokens *after* the step.  A boundary whose column is
        the running column moves to offset 0 there, and the slot's accepted count becomes 1.
        """
        block, memory = self.bound.block_tokens, self.memory
        self.after = []
        for row, slot in enumerate(idx_mapping.tolist()):
            if slot < 0:
                continue
            accepted, after = max(int(sampled[row]), 1), int(computed[slot])
            memory.accepted[slot] = accepted
            source, destination = int(memory.columns[slot]), align.destination_column(after, block)
            # Upstream's test alone also holds where no boundary lies at or below `after`; no step ends there.
            if destination < 0 or not align.boundary_reached(after, accepted, block):
                continue
            if source == destination:
                memory.accepted[slot] = 1
            offset = align.boundary_offset(after, accepted, block)
            self.after.append(Crossing(slot, source, destination, offset))

    def postcopy(self) -> None:
        """After `decide`: save the listed slots' boundary states in their boundaries' columns."""
        self._copy(self.after)

    def postprocess(self, idx_mapping: torch.Tensor, sampled: torch.Tensor, computed: torch.Tensor) -> None:
        """`decide` and `postcopy`: upstream's scatter of accepted counts, and its post-process."""
        self.decide(idx_mapping, sampled, computed)
        self.postcopy()

    def before_forward(
        self,
        idx_mapping: torch.Tensor,
        query_start: torch.Tensor,
        computed: torch.Tensor,
        sequence_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """`preprocess`, `aligned_state_indices` and `precopy` of a step."""
        self.preprocess(idx_mapping, query_start, computed)
        indices = self.aligned_state_indices(sequence_tokens)
        self.precopy()
        return indices

    def _copy(self, crossings: list[Crossing]) -> None:
        for slot, source, destination, offset in crossings:
            for state in self.bound.states:
                row = self.bound.source_tables[state.group][slot]
                copy_state(state, row, source, destination, offset)


def copy_state(state: StateView, row: torch.Tensor, source: int, destination: int, offset: int) -> None:
    """Copy one state between two columns of a request's row, `offset` accepted tokens further."""
    to = int(row[destination])
    if state.layout is Layout.TEMPORAL:
        state.tensor[to] = state.tensor[int(row[align.scratch_column(source, offset)])].clone()
        return
    window = state.tensor[int(row[source])].clone()  # source and destination may be the same block
    kept = state.tokens - offset
    if kept <= 0:
        return
    if state.layout is Layout.CONV_TOKEN_FIRST:
        state.tensor[to][:kept] = window[offset:]
    else:
        state.tensor[to][:, :kept] = window[:, offset:]


class Gather:
    """Source rows by request slot to input rows by batch row, for every group."""

    def __init__(self, bound: GatherTables) -> None:
        self.bound = bound
        self._dirty_rows = 0

    def __call__(self, idx_mapping: torch.Tensor, computed: torch.Tensor) -> None:
        """Fill rows 0 .. rows - 1 of every input table, and null the rows that an earlier, larger batch left.

        A row takes its slot's first `num_blocks` columns; columns past them stay as they are.  In a window
        group, columns wholly below the reach of the first scheduled position (`computed` [slots]) become
        null.  A row of slot -1 becomes null all over.
        """
        rows = idx_mapping.numel()
        slots = idx_mapping.tolist() + [-1] * max(self._dirty_rows - rows, 0)
        self._dirty_rows = rows
        for group, source in enumerate(self.bound.source_tables):
            target, window = self.bound.input_tables[group], self.bound.window_tokens[group]
            for row, slot in enumerate(slots):
                if slot < 0:
                    target[row] = 0
                    continue
                used = int(self.bound.num_blocks[group, slot])
                target[row, :used] = source[slot, :used]
                if window:
                    extra, block = self.bound.extra_tokens[group], self.bound.block_tokens[group]
                    first = coverage.first_retained_column(int(computed[slot]), window, extra, block)
                    target[row, : min(first, used)] = 0


def zero_blocks(pages: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Zero the pages of the named blocks; -1 names none.  `pages` is uint8 [blocks, page bytes]."""
    for block in block_ids.tolist():
        if block >= 0:
            pages[block] = 0


def copy_blocks(memory: PagedChunks, jobs: torch.Tensor, to_host: bool) -> None:
    """Copy scattered pages between device blocks and sub-slots of host chunks.

    `jobs` is int32 [n, 3]: block, chunk, sub-slot; a negative block names no copy.
    """
    for block, chunk, subslot in jobs.tolist():
        if block < 0:
            continue
        if to_host:
            memory.chunks[chunk, subslot] = memory.pages[block].to(memory.chunks.device)
        else:
            memory.pages[block] = memory.chunks[chunk, subslot].to(memory.pages.device)
