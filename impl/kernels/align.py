"""Align-mode kernels: advance columns, move recurrent states, index them; `reference.Align` in Triton.

The story.  Before a forward, a request whose running column changes must find its state in the new
column (pre-copy); after sampling, a request that reached a block boundary must leave the boundary's state
in the boundary's column (post-process).  On most steps no request of a batch does either, so deciding and
copying are two kernels.  One program decides for all rows: it updates the slots' memory and lists the
requests that cross, with the blocks to copy between.  A copy kernel of a fixed grid then reads how many
there are, and each program takes its share of (crossing, tile) pairs; if there are none it ends at once,
whatever the number of requests and states.  Nothing waits for the host, the grid does not depend on the
data, and every address was bound beforehand, so that all of it can be captured in a CUDA graph; a replay
reads the buffers as they are then.

What must hold.  Rows of the batch name request slots; copies take blocks from the *source* tables by slot,
because a late post-process runs after the gathered tables were filled for other batches.  A copy may shift
a window within one block, so all of a window tile is read before any of it is written.  Offsets in bytes
are 64-bit.  Slot memory is written by the one program that reads it.

Sources: `v1/worker/mamba_utils.py`, `v1/worker/gpu/model_states/mamba_hybrid.py`, vLLM 0.33.0, whose copy
kernels decide in every program of a grid of requests x states x 16.
"""

from __future__ import annotations

from typing import Any

import torch

from impl.kernels.jit import INTERPRETED, gdc_launch_dependents, gdc_wait, tl, triton, twin
from impl.kernels.layout import (
    TILE_FIELDS,
    BindingError,
    Recurrent,
    Shape,
    SlotMemory,
    shape_of,
    tile_records,
)
from spec.arith import align

_running_column = twin(align.running_column)
_aligned_first_column = twin(align.aligned_first_column)
_scratch_column = twin(align.scratch_column)
_accepted_offset = twin(align.accepted_offset)
_boundary_reached = twin(align.boundary_reached)
_boundary_offset = twin(align.boundary_offset)
_destination_column = twin(align.destination_column)
_byte_offset = twin(align.byte_offset)

FIELDS = tl.constexpr(TILE_FIELDS)

# PATHS says which kinds of tiles a binding has, so that code for the others is not compiled: the sum of 32
# (wide windows), 16 (wide temporal states), and 8, 4, 2, 1 (narrow tiles of that unit).


@triton.jit
def _copy_narrow(
    source, target, extent, kept, shift, token_stride, unit_stride,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Any alignment, any strides: one unit a lane and token."""
    lane = tl.arange(0, LANES)[:, None].to(tl.int64)
    token = tl.arange(0, WINDOW)[None, :].to(tl.int64)
    mask = (lane < extent) & (token < kept)
    at = lane * unit_stride + token * token_stride
    data = tl.load((source + shift * token_stride + at).to(tl.pointer_type(UNIT)), mask=mask)
    tl.debug_barrier()  # source and target may overlap
    tl.store((target + at).to(tl.pointer_type(UNIT)), data, mask=mask)


@triton.jit
def _copy_wide_window(
    source, target, words, kept, shift, token_stride, WINDOW: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A shift within a window whose tokens are adjacent 8-byte words, everything a multiple of 16 bytes."""
    from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    token_words = token_stride // 16 * 2
    token = tl.arange(0, WINDOW)[:, None].to(tl.int64)
    word = tl.arange(0, LANES)[None, :]
    mask = (token < kept) & (word < words // 2 * 2)
    data = tl.load(from_words + (token + shift) * token_words + word, mask=mask)
    tl.debug_barrier()  # source and target may overlap
    tl.store(to_words + token * token_words + word, data, mask=mask)


@triton.jit
def _fetch(tiles, entries, item, end, TILE_COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """What the copy of one (crossing, tile) pair needs first; nothing if `item` is not below `end`."""
    there = item < end
    record = tiles + (item % TILE_COUNT) * FIELDS
    entry = entries + (item // TILE_COUNT) * (GROUPS * 4)
    if GROUPS > 1:
        entry += tl.load(record + 4, mask=there, other=0) * 4
    base = tl.load(record, mask=there, other=0)
    page_stride = tl.load(record + 1, mask=there, other=0)
    extent = tl.load(record + 2, mask=there, other=0).to(tl.int32)
    tokens = tl.load(record + 3, mask=there, other=0).to(tl.int32)
    window_block = tl.load(entry, mask=there, other=0)
    temporal_block = tl.load(entry + 1, mask=there, other=0)
    to_block = tl.load(entry + 2, mask=there, other=0)
    offset = tl.load(entry + 3, mask=there, other=0)
    return base, page_stride, extent, tokens, window_block, temporal_block, to_block, offset


@triton.jit
def _copy_tile(
    record, from_address, to_address, extent, kept, shift,
    WINDOW: tl.constexpr, LANES: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """Every kind of tile but a wide temporal one."""
    token_stride = tl.load(record + 5)
    unit_stride = tl.load(record + 6)
    unit = tl.load(record + 7)
    if (PATHS & 32) != 0:
        if unit == 16:
            _copy_wide_window(from_address, to_address, extent, kept, shift, token_stride, WINDOW, LANES)
    if (PATHS & 8) != 0:
        if unit == 8:
            _copy_narrow(from_address, to_address, extent, kept, shift, token_stride, unit_stride,
                         tl.int64, WINDOW, LANES)  # fmt: skip
    if (PATHS & 4) != 0:
        if unit == 4:
            _copy_narrow(from_address, to_address, extent, kept, shift, token_stride, unit_stride,
                         tl.int32, WINDOW, LANES)  # fmt: skip
    if (PATHS & 2) != 0:
        if unit == 2:
            _copy_narrow(from_address, to_address, extent, kept, shift, token_stride, unit_stride,
                         tl.int16, WINDOW, LANES)  # fmt: skip
    if (PATHS & 1) != 0:
        if unit == 1:
            _copy_narrow(from_address, to_address, extent, kept, shift, token_stride, unit_stride,
                         tl.int8, WINDOW, LANES)  # fmt: skip


@triton.jit
def copy_kernel(
    count, entries, tiles, capacity,
    TILE_COUNT: tl.constexpr, GROUPS: tl.constexpr, TILE_BYTES: tl.constexpr, WINDOW: tl.constexpr,
    LANES: tl.constexpr, PATHS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy all tiles of all listed crossings.

    Pairs go to programs in order, by tickets: programs that took every n-th pair would drift apart, and
    memory that is read and written in many places at once is slower.  A program is two pairs ahead: while
    the words of one travel, it fetches what the next one needs and draws a ticket for the one after.
    """
    if OVERLAP:
        gdc_wait()  # until the kernel before this one has ended, which may yet be writing what is read here
        gdc_launch_dependents()
    item = tl.program_id(0)
    ahead = item + tl.num_programs(0)
    base, page_stride, extent, tokens, window_block, temporal_block, to_block, offset = _fetch(
        tiles, entries, item, capacity * TILE_COUNT, TILE_COUNT, GROUPS
    )  # before it is known whether there is any crossing
    end = tl.load(count) * TILE_COUNT
    ticket = count + 1
    word = tl.arange(0, TILE_BYTES // 8)
    while item < end:
        record = tiles + (item % TILE_COUNT) * FIELDS
        temporal = tokens == 0
        from_block = tl.where(temporal, temporal_block, window_block)
        shift = tl.where(temporal, 0, offset)
        kept = tl.where(temporal, 1, tokens - shift)
        moves = (from_block != to_block) | (shift > 0)
        units = extent
        from_address = base + _byte_offset(from_block.to(tl.int64), page_stride)
        to_address = base + _byte_offset(to_block.to(tl.int64), page_stride)
        wide_temporal = temporal
        if (PATHS & 15) != 0:
            wide_temporal = temporal & (tl.load(record + 7) == 16)
        from_words = tl.multiple_of(from_address.to(tl.pointer_type(tl.int64)), 16)
        to_words = tl.multiple_of(to_address.to(tl.pointer_type(tl.int64)), 16)
        words = tl.where(wide_temporal & moves, units, 0) // 2 * 2  # even, as the compiler now sees
        data = tl.load(from_words + word, mask=word < words)

        base, page_stride, extent, tokens, window_block, temporal_block, to_block, offset = _fetch(
            tiles, entries, ahead, end, TILE_COUNT, GROUPS
        )
        drawn = tl.atomic_add(ticket, 1, sem="relaxed")

        tl.store(to_words + word, data, mask=word < words)
        if moves & (wide_temporal == 0):
            _copy_tile(record, from_address, to_address, units, kept, shift, WINDOW, LANES, PATHS)
        if drawn == end - 1:
            tl.store(ticket, 0)  # as many tickets as pairs: this was the last
        item = ahead
        ahead = 2 * tl.num_programs(0) + drawn


@triton.jit
def _list_crossings(crossing, slot, source, destination, offset, source_tables, groups, count, entries):
    """Number the rows that cross and list, for every group, the blocks that their states move between."""
    number = tl.cumsum(crossing.to(tl.int32), axis=0) - 1
    for group in range(groups):
        table = tl.load(source_tables + group * 2).to(tl.pointer_type(tl.int32))
        row = table + slot.to(tl.int64) * tl.load(source_tables + group * 2 + 1)
        entry = entries + (number * groups + group) * 4
        tl.store(entry, tl.load(row + source, mask=crossing), mask=crossing)
        tl.store(entry + 1, tl.load(row + _scratch_column(source, offset), mask=crossing), mask=crossing)
        tl.store(entry + 2, tl.load(row + destination, mask=crossing), mask=crossing)
        tl.store(entry + 3, offset, mask=crossing)
    tl.store(count, tl.sum(crossing.to(tl.int32), axis=0))
    tl.store(count + 1, 0)


@triton.jit(do_not_specialize=["rows", "index_rows"])
def prepare_kernel(
    idx_mapping, query_start, computed, columns, accepted, source_tables, count, entries,
    sequence_tokens, input_tables, state_indices, rows, index_rows, groups, group_stride,
    BLOCK_TOKENS: tl.constexpr, DRAFTS: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr,
    PREPROCESS: tl.constexpr,
):  # fmt: skip
    """Program 0 advances the columns (with PREPROCESS), every other one indexes one group's states."""
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    if program < PREPROCESS:
        slot = tl.load(idx_mapping + row, mask=row < rows, other=-1)
        live = slot >= 0
        source = tl.load(columns + slot, mask=live, other=-1)
        offset = _accepted_offset(tl.load(accepted + slot, mask=live, other=1))
        end = tl.load(query_start + row + 1, mask=live, other=0)
        scheduled = (end - tl.load(query_start + row, mask=live, other=0)).to(tl.int32)
        before = tl.load(computed + slot, mask=live, other=0).to(tl.int32)
        running = _running_column(before, scheduled, BLOCK_TOKENS)
        crossing = live & (source >= 0) & (source != running)
        tl.store(columns + slot, running, mask=live)
        tl.store(accepted + slot, 1, mask=crossing)
        _list_crossings(crossing, slot, source, running, offset, source_tables, groups, count, entries)
    else:
        group = program - PREPROCESS
        table = tl.load(input_tables + group * 3).to(tl.pointer_type(tl.int32))
        stride = tl.load(input_tables + group * 3 + 1)
        width = tl.load(input_tables + group * 3 + 2)
        tokens = tl.load(sequence_tokens + row, mask=row < index_rows, other=0).to(tl.int32)
        draft = tl.arange(0, STATES)[None, :]
        column = _scratch_column(_aligned_first_column(tokens, BLOCK_TOKENS)[:, None], draft)
        known = (tokens > 0)[:, None] & (draft <= DRAFTS) & (column < width)
        block = tl.load(table + row[:, None].to(tl.int64) * stride + column, mask=known, other=0)
        at = state_indices + group * group_stride + row[:, None] * (DRAFTS + 1) + draft
        tl.store(at, block, mask=(row < index_rows)[:, None] & (draft <= DRAFTS))


@triton.jit(do_not_specialize=["rows"])
def decide_kernel(
    idx_mapping, sampled, computed, columns, accepted, source_tables, count, entries, rows, groups,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    slot = tl.load(idx_mapping + row, mask=row < rows, other=-1)
    live = slot >= 0
    tokens = tl.maximum(tl.load(sampled + row, mask=live, other=1), 1).to(tl.int32)
    after = tl.load(computed + slot, mask=live, other=0).to(tl.int32)
    source = tl.load(columns + slot, mask=live, other=-1)
    destination = _destination_column(after, BLOCK_TOKENS)
    offset = _boundary_offset(after, tokens, BLOCK_TOKENS)
    reached = live & (destination >= 0) & _boundary_reached(after, tokens, BLOCK_TOKENS)
    stays = source == destination
    tl.store(accepted + slot, tl.where(reached & stays, 1, tokens), mask=live)
    crossing = reached & ((offset > 0) | (source != destination))
    _list_crossings(crossing, slot, source, destination, offset, source_tables, groups, count, entries)


@triton.jit(do_not_specialize=["rows"])
def scatter_kernel(idx_mapping, sampled, accepted, rows, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    slot = tl.load(idx_mapping + row, mask=row < rows, other=-1)
    tokens = tl.maximum(tl.load(sampled + row, mask=slot >= 0, other=1), 1)
    tl.store(accepted + slot, tokens.to(tl.int32), mask=slot >= 0)


class Crossings:
    """The requests that one decision found crossing: how many, and per request and group the blocks."""

    def __init__(self, rows: int, groups: int, device: torch.device) -> None:
        self.count = torch.zeros(2, dtype=torch.int32, device=device)  # and the copy kernel's next ticket
        self.entries = torch.zeros((rows, groups, 4), dtype=torch.int32, device=device)


def power_of_two_at_least(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


class Align:
    """`reference.Align` on a device; see there for what each method does and takes.

    `programs` is the size of the copy kernel's grid, `tile_bytes` what one program copies at a time and
    `warps` its width; all three change the speed only.  `idx_mapping` and the other arguments of a row may
    be longer than the batch: rows past it have slot -1.
    """

    def __init__(
        self,
        bound: Recurrent,
        memory: SlotMemory,
        programs: int | None = None,
        tile_bytes: int | None = None,
        warps: int | None = None,
    ) -> None:
        device = bound.source_tables[0].device
        self.bound = bound
        self.memory = memory
        self.programs = programs or (2 if INTERPRETED else multiprocessors(device))
        self.shape: Shape = shape_of(bound.states, tile_bytes or 65536)
        records = tile_records(bound.states, self.shape)
        self.tiles = torch.tensor(records or [[0] * TILE_FIELDS], dtype=torch.int64, device=device)
        self.tile_count = len(records)
        self.groups = len(bound.source_tables)
        self.source_tables = torch.tensor(
            [[table.data_ptr(), table.stride(0)] for table in bound.source_tables],
            dtype=torch.int64, device=device,
        )  # fmt: skip
        self.input_tables = torch.tensor(
            [[table.data_ptr(), table.stride(0), table.shape[1]] for table in bound.input_tables],
            dtype=torch.int64, device=device,
        )  # fmt: skip
        self.state_indices = torch.zeros(
            (self.groups, bound.rows, 1 + bound.drafts), dtype=torch.int32, device=device
        )
        self.before = Crossings(bound.rows, self.groups, device)
        self.after = Crossings(bound.rows, self.groups, device)
        self._rows = power_of_two_at_least(bound.rows)
        self._sizes: dict[str, Any] = {
            "TILE_BYTES": self.shape.tile_bytes,
            "WINDOW": self.shape.window,
            "LANES": self.shape.lanes,
            "PATHS": _paths(records),
            "OVERLAP": not INTERPRETED,
            "TILE_COUNT": self.tile_count,
            "GROUPS": self.groups,
            "num_warps": warps or 16,
            "launch_pdl": not INTERPRETED,
        }

    def preprocess(
        self, idx_mapping: torch.Tensor, query_start: torch.Tensor, computed: torch.Tensor
    ) -> None:
        """One program: it alone reads and writes the slots' memory."""
        self._prepare(idx_mapping, query_start, computed, None)

    def precopy(self) -> None:
        """One launch of `programs` programs."""
        self._copy(self.before)

    def aligned_state_indices(self, sequence_tokens: torch.Tensor) -> torch.Tensor:
        """One program a group."""
        self._prepare(None, None, None, sequence_tokens)
        return self.state_indices[:, : sequence_tokens.numel()]

    def scatter_accepted(self, idx_mapping: torch.Tensor, sampled: torch.Tensor) -> None:
        """One program over all rows."""
        rows = self._check(idx_mapping)
        if rows:
            scatter_kernel[(1,)](idx_mapping, sampled, self.memory.accepted, rows, ROWS=self._rows)

    def decide(self, idx_mapping: torch.Tensor, sampled: torch.Tensor, computed: torch.Tensor) -> None:
        """One program; accepted counts come from the rows, so that no snapshot of the slots' is needed."""
        rows, memory = self._check(idx_mapping), self.memory
        decide_kernel[(1,)](
            idx_mapping, sampled, computed, memory.columns, memory.accepted, self.source_tables,
            self.after.count, self.after.entries, rows, self.groups,
            BLOCK_TOKENS=self.bound.block_tokens, ROWS=self._rows,
        )  # fmt: skip

    def postcopy(self) -> None:
        """One launch of `programs` programs."""
        self._copy(self.after)

    def postprocess(self, idx_mapping: torch.Tensor, sampled: torch.Tensor, computed: torch.Tensor) -> None:
        """Two launches."""
        self.decide(idx_mapping, sampled, computed)
        self.postcopy()

    def before_forward(
        self,
        idx_mapping: torch.Tensor,
        query_start: torch.Tensor,
        computed: torch.Tensor,
        sequence_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Two launches: pre-process with the indices, then pre-copy."""
        self._prepare(idx_mapping, query_start, computed, sequence_tokens)
        self.precopy()
        return self.state_indices[:, : sequence_tokens.numel()]

    def _copy(self, crossings: Crossings) -> None:
        if self.tile_count:
            copy_kernel[(self.programs,)](
                crossings.count, crossings.entries, self.tiles, self.bound.rows, **self._sizes,
            )  # fmt: skip

    def _prepare(
        self,
        idx_mapping: torch.Tensor | None,
        query_start: torch.Tensor | None,
        computed: torch.Tensor | None,
        sequence_tokens: torch.Tensor | None,
    ) -> None:
        rows = 0 if idx_mapping is None else self._check(idx_mapping)
        index_rows = 0 if sequence_tokens is None else self._check(sequence_tokens)
        advance = int(idx_mapping is not None)
        programs = advance + (self.groups if index_rows else 0)
        if not programs:
            return
        memory, unused = self.memory, self.memory.columns
        prepare_kernel[(programs,)](
            unused if idx_mapping is None else idx_mapping,
            unused if query_start is None else query_start,
            unused if computed is None else computed,
            memory.columns, memory.accepted, self.source_tables, self.before.count, self.before.entries,
            unused if sequence_tokens is None else sequence_tokens,
            self.input_tables, self.state_indices, rows, index_rows, self.groups,
            self.state_indices.stride(0),
            BLOCK_TOKENS=self.bound.block_tokens, DRAFTS=self.bound.drafts, ROWS=self._rows,
            STATES=power_of_two_at_least(1 + self.bound.drafts), PREPROCESS=advance,
        )  # fmt: skip

    def _check(self, row_tensor: torch.Tensor) -> int:
        if row_tensor.numel() > self.bound.rows or row_tensor.stride(0) != 1:
            raise BindingError(
                f"{row_tensor.numel()} rows with stride {row_tensor.stride(0)}: bound for {self.bound.rows} "
                "adjacent rows"
            )
        return row_tensor.numel()


def _paths(records: list[list[int]]) -> int:
    """The kinds of tiles among the records, as a bit mask."""
    paths = 0
    for record in records:
        tokens, unit = record[3], record[7]
        paths |= (32 if tokens else 16) if unit == 16 else unit
    return paths


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
