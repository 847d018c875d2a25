"""Whole pages: gather of block tables, zeroing of fresh blocks, copies to and from pinned host chunks.

All three run a fixed grid over (job, piece) pairs.  A host copy is bound by the bus, so its grid is small: it
must leave the multiprocessors and the memory system to the forward pass beside it.

Sources: `v1/worker/gpu/block_table.py`, `v1/kv_offload/cpu/gpu_worker.py`,
`v1/kv_offload/cpu/swap_blocks_triton.py`, vLLM 0.33.0.
"""

from __future__ import annotations

import math

import torch

from impl.kernels.align import multiprocessors, power_of_two_at_least
from impl.kernels.jit import INTERPRETED, tl, triton, twin
from impl.kernels.layout import GatherTables, PagedChunks
from spec.arith import align, coverage

_byte_offset = twin(align.byte_offset)
_first_retained_column = twin(coverage.first_retained_column)

GATHER_FIELDS = tl.constexpr(8)


@triton.jit(do_not_specialize=["rows", "all_rows"])
def gather_kernel(
    idx_mapping, computed, groups_ptr, num_blocks, slots, groups, rows, all_rows, COLUMNS: tl.constexpr
):  # fmt: skip
    for item in range(tl.program_id(0), groups * all_rows, tl.num_programs(0)):
        group = item % groups
        row = item // groups
        record = groups_ptr + group * GATHER_FIELDS
        width = tl.load(record + 4)
        target = tl.load(record + 2).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * tl.load(record + 3)
        slot = tl.load(idx_mapping + row, mask=row < rows, other=-1).to(tl.int64)
        live = slot >= 0
        source = tl.load(record).to(tl.pointer_type(tl.int32)) + slot * tl.load(record + 1)
        used = tl.load(num_blocks + group * slots + slot, mask=live, other=0)
        window = tl.load(record + 5).to(tl.int32)
        first = used * 0
        if window > 0:
            extra = tl.load(record + 6).to(tl.int32)
            block = tl.load(record + 7).to(tl.int32)
            tokens = tl.load(computed + slot, mask=live, other=0).to(tl.int32)
            first = _first_retained_column(tokens, window, extra, block)
        end = tl.where(live, used, width)  # a row without a slot becomes null all over
        for start in range(0, end.to(tl.int32), COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            kept = (column >= first) & (column < used)
            tl.store(target + column, tl.load(source + column, mask=kept, other=0), mask=column < end)


@triton.jit(do_not_specialize=["jobs"])
def zero_kernel(
    base, page_stride, page_units, block_ids, jobs, pieces,
    UNITS: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    unit = tl.arange(0, UNITS)
    for item in range(tl.program_id(0), jobs * pieces, tl.num_programs(0)):
        block = tl.load(block_ids + item // pieces).to(tl.int64)
        if block >= 0:
            start = (item % pieces) * UNITS
            target = (base + _byte_offset(block, page_stride)).to(tl.pointer_type(TYPE))
            if WIDE:
                target = tl.multiple_of(target, 16)
            tl.store(target + start + unit, tl.zeros([UNITS], dtype=TYPE), mask=start + unit < page_units)


@triton.jit(do_not_specialize=["jobs"])
def copy_kernel(
    device_base, page_stride, host_base, chunk_stride, subslot_stride, page_units, job_list, jobs, pieces,
    TO_HOST: tl.constexpr, PAGES: tl.constexpr, UNITS: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each item is one piece of a page, or PAGES whole pages; all of it is in flight at once."""
    unit = tl.arange(0, UNITS)[None, :]
    for item in range(tl.program_id(0), tl.cdiv(jobs, PAGES) * pieces, tl.num_programs(0)):
        number = (item // pieces) * PAGES + tl.arange(0, PAGES)
        job = job_list + number * 3
        block = tl.load(job, mask=number < jobs, other=-1).to(tl.int64)
        live = block >= 0
        chunk = tl.load(job + 1, mask=live, other=0).to(tl.int64)
        subslot = tl.load(job + 2, mask=live, other=0).to(tl.int64)
        page = device_base + _byte_offset(block, page_stride)
        place = host_base + _byte_offset(chunk, chunk_stride) + _byte_offset(subslot, subslot_stride)
        if TO_HOST:
            source, target = page[:, None], place[:, None]
        else:
            source, target = place[:, None], page[:, None]
        source, target = source.to(tl.pointer_type(TYPE)), target.to(tl.pointer_type(TYPE))
        if WIDE:
            source, target = tl.multiple_of(source, [16, 16]), tl.multiple_of(target, [16, 16])
        at = (item % pieces) * UNITS + unit
        mask = live[:, None] & (at < page_units)
        tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


_UNIT_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Gather:
    """`reference.Gather` on a device; `programs` is the size of the grid."""

    def __init__(self, bound: GatherTables, programs: int | None = None, columns: int = 1024) -> None:
        device = bound.num_blocks.device
        self.bound = bound
        self.programs = programs or (2 if INTERPRETED else multiprocessors(device))
        self.columns = columns
        records = [
            [source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0), target.shape[1],
             window, extra, block]
            for source, target, window, extra, block in zip(
                bound.source_tables, bound.input_tables, bound.window_tokens, bound.extra_tokens,
                bound.block_tokens, strict=True)
        ]  # fmt: skip
        self.records = torch.tensor(records, dtype=torch.int64, device=device)
        self._dirty_rows = 0

    def __call__(self, idx_mapping: torch.Tensor, computed: torch.Tensor) -> None:
        """One launch; in a captured graph, rows that a larger batch left are those up to the capture's."""
        rows = idx_mapping.numel()
        all_rows = max(rows, self._dirty_rows)
        self._dirty_rows = rows
        if all_rows:
            gather_kernel[(self.programs,)](
                idx_mapping, computed, self.records, self.bound.num_blocks, self.bound.num_blocks.stride(0),
                len(self.records), rows, all_rows, COLUMNS=self.columns,
            )  # fmt: skip


def zero_blocks(
    pages: torch.Tensor, block_ids: torch.Tensor, programs: int | None = None, piece_bytes: int = 32768
) -> None:
    """`reference.zero_blocks` on a device."""
    if not block_ids.numel():
        return
    base, stride, size = pages.data_ptr(), pages.stride(0), pages.shape[1]
    wide = math.gcd(16, base, stride, size) == 16
    unit = math.gcd(8, base, stride, size)
    units = piece_bytes // 8
    zero_kernel[(programs or (2 if INTERPRETED else 4 * multiprocessors(pages.device)),)](
        base, stride, size // unit, block_ids, block_ids.numel(), -(-(size // unit) // units),
        UNITS=units, TYPE=_UNIT_TYPES[unit], WIDE=wide, num_warps=4,
    )  # fmt: skip


def copy_blocks(
    memory: PagedChunks,
    jobs: torch.Tensor,
    to_host: bool,
    programs: int = 1,
    multiprocessors_each: int = 2,
    piece_bytes: int | None = None,
    warps: int | None = None,
) -> None:
    """`reference.copy_blocks` on a device.

    `programs` times `multiprocessors_each` multiprocessors are held; those of one program are neighbours,
    so that clusters of a matrix product lose one place and not two.  `piece_bytes` is what a program keeps
    in flight: to the device as much as registers hold, because reads wait for the bus; to the host little,
    because writes that pile up before the bus slow every other kernel's memory traffic.
    """
    if not jobs.shape[0]:
        return
    pages, chunks = memory.pages, memory.chunks
    size = pages.shape[1]
    numbers = (pages.data_ptr(), pages.stride(0), chunks.data_ptr(), chunks.stride(0), chunks.stride(1), size)
    wide = math.gcd(16, *numbers) == 16
    unit = math.gcd(8, *numbers)
    large = size >= 65536
    piece_bytes = piece_bytes or ((131072 if large else 65536) if to_host else 262144)
    warps = warps or ((8 if large else 16) if to_host else 32)
    units = min(piece_bytes // 8, power_of_two_at_least(size // unit))
    together = piece_bytes // 8 // units  # pages an item
    copy_kernel[(programs,)](
        *numbers[:5], size // unit, jobs, jobs.shape[0], -(-(size // unit) // units),
        TO_HOST=to_host, PAGES=together, UNITS=units, TYPE=_UNIT_TYPES[unit], WIDE=wide,
        num_warps=warps, num_ctas=multiprocessors_each,
    )  # fmt: skip
