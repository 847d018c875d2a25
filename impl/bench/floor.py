"""Floors: stripped kernels that move the same bytes, or none, without deciding anything."""

from __future__ import annotations

import torch

from impl.bench.workload import CROSSED, RUNNING, Variant, Workload
from impl.kernels.jit import tl, triton

PIECE_BYTES = 65536


@triton.jit
def empty_kernel(unused):
    pass


@triton.jit
def pieces_kernel(pieces, ticket, count, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    piece = tl.program_id(0)
    while piece < count:
        source = tl.multiple_of(tl.load(pieces + piece * 3).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of(tl.load(pieces + piece * 3 + 1).to(tl.pointer_type(tl.int64)), 16)
        words = tl.load(pieces + piece * 3 + 2).to(tl.int32)
        mask = word < words // 2 * 2
        data = tl.load(source + word, mask=mask)
        drawn = tl.atomic_add(ticket, 1, sem="relaxed")
        tl.store(target + word, data, mask=mask)
        if drawn == count - 1:
            tl.store(ticket, 0)
        piece = tl.num_programs(0) + drawn


def piece_list(work: Workload, chosen: Variant) -> torch.Tensor:
    """Source address, target address and 8-byte words of every piece that the variant's copies move."""
    table = work.bound.source_tables[0].tolist()
    pieces = []
    for slot, offset in zip(chosen.crossing, chosen.offsets, strict=True):
        row = table[slot]
        for state in work.bound.states:
            tensor, stride = state.tensor, state.page_stride_bytes
            size = tensor[0].numel() * tensor.element_size()
            skipped = size * offset // state.tokens if state.tokens else 0
            source = tensor.data_ptr() + row[RUNNING if state.tokens else RUNNING + offset] * stride + skipped
            target = tensor.data_ptr() + row[CROSSED] * stride
            for start in range(0, size - skipped, PIECE_BYTES):
                words = min(PIECE_BYTES, size - skipped - start) // 8
                pieces.append([source + start, target + start, words])
    return torch.tensor(pieces, dtype=torch.int64, device=work.idx_mapping.device)


def copy_pieces(pieces: torch.Tensor, ticket: torch.Tensor, programs: int) -> None:
    """Move the pieces, handed out in order to a fixed grid; `ticket` is one int32, 0 before and after."""
    pieces_kernel[(programs,)](pieces, ticket, len(pieces), WORDS=PIECE_BYTES // 8, num_warps=16)


def launch_nothing(device: torch.Tensor) -> None:
    """An empty kernel."""
    empty_kernel[(1,)](device)
