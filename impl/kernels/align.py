"""Align-mode kernels: advance columns, move recurrent states, index them; `reference.Align` in Triton.

The story.  Before a forward, a request whose running column changes must find its state in the new column
(pre-copy); after sampling, a request that reached a block boundary must leave the boundary's state in the
boundary's column (post-process).  On most steps no request of a batch does either, so the common case is to
find that out and leave: the grid is small and of fixed size, and every program reads all rows' decision
inputs, counts the requests that cross and, if there are any, takes its share of (crossing, tile) pairs.
Nothing waits for the host, the grid does not depend on the data, and every address was bound beforehand,
so that all of it can be captured in a CUDA graph; a replay reads the buffers as they are then.

What must hold.  Rows of the batch name request slots; copies read the *source* tables by slot, because a
late post-process runs after the gathered tables were filled for other batches.  A copy may shift a window
within one block, so all of a window tile is read before any of it is written.  Offsets in bytes are 64-bit.
In the kernel that decides, nothing that a program reads is written by another program.

Sources: `v1/worker/mamba_utils.py`, `v1/worker/gpu/model_states/mamba_hybrid.py`, vLLM 0.33.0, whose grid
is requests x states x 16 instead.
"""

from __future__ import annotations

from typing import Any

import torch

from impl.kernels.jit import INTERPRETED, tl, triton, twin
from impl.kernels.layout import TILE_FIELDS, BindingError, Recurrent, Shape, SlotMemory, shape_of, tile_records
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
def _copy_wide(source, target, words, TILE_BYTES: tl.constexpr):
    """Adjacent 8-byte words, everything a multiple of 16 bytes."""
    from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    word = tl.arange(0, TILE_BYTES // 8)
    if words == TILE_BYTES // 8:
        tl.store(to_words + word, tl.load(from_words + word))
    else:
        mask = word < tl.multiple_of(words.to(tl.int32), 2)
        tl.store(to_words + word, tl.load(from_words + word, mask=mask), mask=mask)


@triton.jit
def _copy_wide_window(
    source, target, words, kept, shift, token_stride, WINDOW: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A shift within a window whose tokens are adjacent 8-byte words, everything a multiple of 16 bytes."""
    from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    token_words = tl.multiple_of(token_stride // 8, 2)
    token = tl.arange(0, WINDOW)[:, None].to(tl.int64)
    word = tl.arange(0, LANES)[None, :]
    mask = (token < kept) & (word < tl.multiple_of(words.to(tl.int32), 2))
    data = tl.load(from_words + (token + shift) * token_words + word, mask=mask)
    tl.debug_barrier()  # source and target may overlap
    tl.store(to_words + token * token_words + word, data, mask=mask)


@triton.jit
def _copy_tile(
    tiles, tile, slot, source, destination, offset,
    TILE_BYTES: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    record = tiles + tile * FIELDS
    base = tl.load(record)
    page_stride = tl.load(record + 1)
    table = tl.load(record + 2).to(tl.pointer_type(tl.int32)) + slot.to(tl.int64) * tl.load(record + 3)
    extent = tl.load(record + 4)
    tokens = tl.load(record + 5)
    temporal = tokens == 0
    column = tl.where(temporal, _scratch_column(source, offset), source)
    shift = tl.where(temporal, 0, offset).to(tl.int64)
    from_block = tl.load(table + column).to(tl.int64)
    to_block = tl.load(table + destination).to(tl.int64)
    if (from_block != to_block) | (shift > 0):
        kept = tl.where(temporal, 1, tokens - shift)
        from_address = base + _byte_offset(from_block, page_stride)
        to_address = base + _byte_offset(to_block, page_stride)
        wide = tl.load(record + 9) != 0
        if wide:
            if temporal:
                if (PATHS & 16) != 0:
                    _copy_wide(from_address, to_address, extent, TILE_BYTES)
            else:
                if (PATHS & 32) != 0:
                    _copy_wide_window(from_address, to_address, extent, kept, shift, tl.load(record + 6),
                                      WINDOW, LANES)  # fmt: skip
        else:
            token_stride = tl.load(record + 6)
            unit_stride = tl.load(record + 7)
            unit = tl.load(record + 8)
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
def _copy_crossings(
    crossing, slot, source, destination, offset, tiles, tile_count,
    TILE_BYTES: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """This program's share of (crossing, tile) pairs; rows' decisions are in the arguments, one a lane."""
    count = tl.sum(crossing.to(tl.int32), axis=0)
    if count > 0:
        order = tl.where(crossing, tl.cumsum(crossing.to(tl.int32), axis=0), 0)  # 1, 2, ... for those that cross
        program = tl.program_id(0)
        current = program * 0
        one_slot, one_source, one_destination, one_offset = current, current, current, current
        for item in range(program, count * tile_count, tl.num_programs(0)):
            wanted = item // tile_count + 1
            if wanted != current:
                picked = order == wanted
                one_slot = tl.sum(tl.where(picked, slot, 0), axis=0)
                one_source = tl.sum(tl.where(picked, source, 0), axis=0)
                one_destination = tl.sum(tl.where(picked, destination, 0), axis=0)
                one_offset = tl.sum(tl.where(picked, offset, 0), axis=0)
                current = wanted
            _copy_tile(tiles, item % tile_count, one_slot, one_source, one_destination, one_offset,
                       TILE_BYTES, WINDOW, LANES, PATHS)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def precopy_kernel(
    idx_mapping, columns, source_columns, source_offsets, tiles, rows, tile_count,
    ROWS: tl.constexpr, TILE_BYTES: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr,
    PATHS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    slot = tl.load(idx_mapping + row, mask=row < rows, other=-1)
    live = slot >= 0
    source = tl.load(source_columns + slot, mask=live, other=-1)
    destination = tl.load(columns + slot, mask=live, other=-1)
    offset = tl.load(source_offsets + slot, mask=live, other=0)
    crossing = (source >= 0) & (source != destination)
    _copy_crossings(crossing, slot, source, destination, offset, tiles, tile_count,
                    TILE_BYTES, WINDOW, LANES, PATHS)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def postprocess_kernel(
    idx_mapping, sampled, computed, columns, accepted, tiles, rows, tile_count,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE_BYTES: tl.constexpr, WINDOW: tl.constexpr,
    LANES: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    slot = tl.load(idx_mapping + row, mask=row < rows, other=-1)
    live = slot >= 0
    count = tl.maximum(tl.load(sampled + row, mask=live, other=1), 1).to(tl.int32)
    after = tl.load(computed + slot, mask=live, other=0).to(tl.int32)
    source = tl.load(columns + slot, mask=live, other=-1)
    destination = _destination_column(after, BLOCK_TOKENS)
    offset = _boundary_offset(after, count, BLOCK_TOKENS)
    reached = live & (destination >= 0) & _boundary_reached(after, count, BLOCK_TOKENS)
    stays = source == destination
    if tl.program_id(0) == 0:  # no program reads accepted counts here, so writing them races with nothing
        tl.store(accepted + slot, tl.where(reached & stays, 1, count), mask=live)
    crossing = reached & ((offset > 0) | (source != destination))
    _copy_crossings(crossing, slot, source, destination, offset, tiles, tile_count,
                    TILE_BYTES, WINDOW, LANES, PATHS)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "index_rows"])
def prepare_kernel(
    idx_mapping, query_start, computed, columns, accepted, source_columns, source_offsets,
    sequence_tokens, input_tables, state_indices, rows, index_rows, group_stride,
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
        scheduled = tl.load(query_start + row + 1, mask=live, other=0) - tl.load(query_start + row, mask=live, other=0)
        before = tl.load(computed + slot, mask=live, other=0).to(tl.int32)
        running = _running_column(before, scheduled.to(tl.int32), BLOCK_TOKENS)
        tl.store(source_columns + slot, source, mask=live)
        tl.store(source_offsets + slot, offset, mask=live)
        tl.store(columns + slot, running, mask=live)
        tl.store(accepted + slot, 1, mask=live & (source >= 0) & (source != running))
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
def scatter_kernel(idx_mapping, sampled, accepted, rows, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    slot = tl.load(idx_mapping + row, mask=row < rows, other=-1)
    count = tl.maximum(tl.load(sampled + row, mask=slot >= 0, other=1), 1)
    tl.store(accepted + slot, count.to(tl.int32), mask=slot >= 0)


def power_of_two_at_least(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


class Align:
    """`reference.Align` on a device; see there for what each method does and takes.

    `programs` is the size of the copy kernels' grid, `tile_bytes` what one program copies at a time and
    `warps` its width; all three change the speed only.  `idx_mapping` and the other arguments of a row may
    be longer than the batch: rows past it have slot -1.
    """

    def __init__(
        self,
        bound: Recurrent,
        memory: SlotMemory,
        programs: int | None = None,
        tile_bytes: int | None = None,
        warps: int = 4,
    ) -> None:
        device = bound.source_tables[0].device
        self.bound = bound
        self.memory = memory
        self.programs = programs or (2 if INTERPRETED else 4 * multiprocessors(device))
        self.warps = warps
        self.shape: Shape = shape_of(bound.states, tile_bytes or 32768)
        records = tile_records(bound.states, bound.source_tables, self.shape)
        self.tiles = torch.tensor(records or [[0] * TILE_FIELDS], dtype=torch.int64, device=device)
        self.tile_count = len(records)
        groups, drafts = len(bound.input_tables), bound.drafts
        rows = [[t.data_ptr(), t.stride(0), t.shape[1]] for t in bound.input_tables]
        self.input_tables = torch.tensor(rows, dtype=torch.int64, device=device)
        self.state_indices = torch.zeros((groups, bound.rows, 1 + drafts), dtype=torch.int32, device=device)
        self._rows = power_of_two_at_least(bound.rows)
        self._copy_sizes: dict[str, Any] = {
            "ROWS": self._rows,
            "TILE_BYTES": self.shape.tile_bytes,
            "WINDOW": self.shape.window,
            "LANES": self.shape.lanes,
            "PATHS": _paths(records),
            "num_warps": warps,
        }

    def preprocess(
        self, idx_mapping: torch.Tensor, query_start: torch.Tensor, computed: torch.Tensor
    ) -> None:
        """One program over all rows: it reads a slot's column before it writes it."""
        self._prepare(idx_mapping, query_start, computed, None)

    def precopy(self, idx_mapping: torch.Tensor) -> None:
        """One launch of `programs` programs."""
        rows, memory = self._check(idx_mapping), self.memory
        if rows and self.tile_count:
            precopy_kernel[(self.programs,)](
                idx_mapping, memory.columns, memory.source_columns, memory.source_offsets, self.tiles, rows,
                self.tile_count, **self._copy_sizes,
            )  # fmt: skip

    def aligned_state_indices(self, sequence_tokens: torch.Tensor) -> torch.Tensor:
        """One program a group."""
        self._prepare(None, None, None, sequence_tokens)
        return self.state_indices[:, : sequence_tokens.numel()]

    def scatter_accepted(self, idx_mapping: torch.Tensor, sampled: torch.Tensor) -> None:
        """One program over all rows."""
        rows = self._check(idx_mapping)
        if rows:
            scatter_kernel[(1,)](idx_mapping, sampled, self.memory.accepted, rows, ROWS=self._rows)

    def postprocess(self, idx_mapping: torch.Tensor, sampled: torch.Tensor, computed: torch.Tensor) -> None:
        """One launch of `programs` programs; accepted counts come from the rows, so no snapshot is needed."""
        rows, memory = self._check(idx_mapping), self.memory
        if rows:
            postprocess_kernel[(self.programs,)](
                idx_mapping, sampled, computed, memory.columns, memory.accepted, self.tiles, rows,
                self.tile_count, BLOCK_TOKENS=self.bound.block_tokens, **self._copy_sizes,
            )  # fmt: skip

    def before_forward(
        self,
        idx_mapping: torch.Tensor,
        query_start: torch.Tensor,
        computed: torch.Tensor,
        sequence_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Two launches: pre-process with the indices, then pre-copy."""
        self._prepare(idx_mapping, query_start, computed, sequence_tokens)
        self.precopy(idx_mapping)
        return self.state_indices[:, : sequence_tokens.numel()]

    def _prepare(
        self,
        idx_mapping: torch.Tensor | None,
        query_start: torch.Tensor | None,
        computed: torch.Tensor | None,
        sequence_tokens: torch.Tensor | None,
    ) -> None:
        rows = 0 if idx_mapping is None else self._check(idx_mapping)
        index_rows = 0 if sequence_tokens is None else self._check(sequence_tokens)
        advance = int(rows > 0)
        programs = advance + (self.input_tables.shape[0] if index_rows else 0)
        if not programs:
            return
        memory, unused = self.memory, self.memory.columns
        prepare_kernel[(programs,)](
            unused if idx_mapping is None else idx_mapping,
            unused if query_start is None else query_start,
            unused if computed is None else computed,
            memory.columns, memory.accepted, memory.source_columns, memory.source_offsets,
            unused if sequence_tokens is None else sequence_tokens,
            self.input_tables, self.state_indices, rows, index_rows, self.state_indices.stride(0),
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
        tokens, unit, wide = record[5], record[8], record[9]
        paths |= (32 if tokens else 16) if wide else unit
    return paths


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
