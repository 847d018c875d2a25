"""Recurrent states in memory, and the tiles in which kernels copy them.

The story.  A recurrent layer keeps two states a block: a *temporal* state (one array) and a
*convolution* state (a window of the last `w` tokens' inputs).  The convolution window lies token first,
`[w, inner]`, or channel first, `[inner, w]`.  Every layer's state is a view of a page buffer: block b's
state starts `b * page_stride` bytes after block 0's, and a page is usually larger than the state.  A
copy between two columns of a request copies the temporal state whole, from the column that the accepted
offset selects, and shifts the window by that offset within the block.

A copy kernel does not want to know layers and layouts, it wants *tiles*: pieces of equal size, each
with the base address, the page stride, and the group whose rows name its blocks.  `tiles_of` cuts all
states of a model into tiles once, when the buffers are bound; nothing is recomputed in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from spec.arith import align

WIDE_BYTES = 16
"""States whose addresses, strides and sizes are all multiples of this are copied in vectors of this size."""

TILE_FIELDS = 8
"""Length of a tile's record, int64."""


class BindingError(ValueError):
    """A tensor that the kernels cannot take; the message names it and what is wrong."""


class Layout(Enum):
    """How a state lies within its block."""

    TEMPORAL = "temporal"  # [...], contiguous
    CONV_TOKEN_FIRST = "conv_token_first"  # [w, inner], contiguous (upstream: SD)
    CONV_CHANNEL_FIRST = "conv_channel_first"  # [inner, w], rows may be padded (upstream: DS)


@dataclass(frozen=True, slots=True)
class StateView:
    """One state of one layer: `tensor[block]` is a block's state, `group` the recurrent group's index."""

    tensor: torch.Tensor
    layout: Layout
    group: int = 0

    def __post_init__(self) -> None:
        """Raises BindingError where `tensor` has not the form that `layout` names."""
        block = self.tensor[0]
        if self.layout is Layout.CONV_CHANNEL_FIRST:
            if block.dim() != 2 or block.stride(1) != 1 or block.stride(0) < block.shape[1]:
                raise BindingError(
                    f"a channel-first state is [blocks, inner, w] with tokens next to each other, got shape "
                    f"{tuple(self.tensor.shape)}, strides {tuple(self.tensor.stride())}"
                )
        elif not block.is_contiguous() or (self.layout is Layout.CONV_TOKEN_FIRST and block.dim() != 2):
            raise BindingError(
                f"a {self.layout.value} state is contiguous within a block, got shape "
                f"{tuple(self.tensor.shape)}, strides {tuple(self.tensor.stride())}"
            )

    @property
    def tokens(self) -> int:
        """Width w of a convolution window, 0 for a temporal state."""
        if self.layout is Layout.TEMPORAL:
            return 0
        return self.tensor.shape[1 if self.layout is Layout.CONV_TOKEN_FIRST else 2]

    @property
    def page_stride_bytes(self) -> int:
        """Bytes from a block's state to the next block's."""
        return self.tensor.stride(0) * self.tensor.element_size()


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece of a state: `extent` units, apart by `unit_stride_bytes`, of each of its tokens."""

    base_address: int  # of the piece in block 0
    page_stride_bytes: int
    extent_units: int
    tokens: int  # of the window that the accepted offset shifts; 0: temporal, the offset selects a column
    group: int
    token_stride_bytes: int
    unit_stride_bytes: int
    unit_bytes: int  # 8, 4, 2 or 1; 16: 8-byte units, adjacent, and all numbers are multiples of 16

    def record(self) -> list[int]:
        """The fields in order, as the kernels read them."""
        return [getattr(self, name) for name in self.__slots__]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that a copy kernel is compiled for."""

    tile_bytes: int  # of a wide temporal tile
    window: int  # power of two, at least the widest convolution window

    def __post_init__(self) -> None:
        """Raises BindingError unless a tile holds a 16-byte unit of every token of a window."""
        if self.tile_bytes & (self.tile_bytes - 1) or self.tile_bytes < 16 * self.window:
            raise BindingError(
                f"tile_bytes must be a power of two, at least 16 x {self.window}, got {self.tile_bytes}"
            )

    @property
    def lanes(self) -> int:
        """Units of each token in a tile of a window."""
        return self.tile_bytes // 8 // self.window


def shape_of(states: Sequence[StateView], tile_bytes: int) -> Shape:
    """The sizes for these states; raises BindingError if a window does not fit a tile."""
    widest = max((state.tokens for state in states), default=1)
    return Shape(tile_bytes, 1 << max(widest - 1, 0).bit_length())


def tiles_of(state: StateView, shape: Shape) -> list[Tile]:
    """All pieces of one state."""
    tensor, element = state.tensor, state.tensor.element_size()
    base, page_stride = tensor.data_ptr(), state.page_stride_bytes
    if state.layout is Layout.CONV_CHANNEL_FIRST:
        channels, channel_stride = tensor.shape[1], tensor.stride(1) * element
        unit = math.gcd(8, base, page_stride, channel_stride, element)
        return [
            Tile(base + first * channel_stride + part, page_stride, min(shape.lanes, channels - first),
                 state.tokens, state.group, element, channel_stride, unit)
            for first in range(0, channels, shape.lanes)
            for part in range(0, element, unit)  # an element wider than a unit goes part by part
        ]  # fmt: skip
    temporal = state.layout is Layout.TEMPORAL
    size = element * (tensor[0].numel() if temporal else tensor.shape[2])  # of the state, or of one token
    wide = math.gcd(WIDE_BYTES, base, page_stride, size) == WIDE_BYTES
    unit = math.gcd(8, base, page_stride, size)
    step = shape.tile_bytes if temporal and wide else shape.lanes * unit
    return [
        Tile(base + start, page_stride, min(step, size - start) // unit, state.tokens, state.group, size,
             unit, WIDE_BYTES if wide else unit)
        for start in range(0, size, step)
    ]  # fmt: skip


def tile_records(states: Sequence[StateView], shape: Shape) -> list[list[int]]:
    """The records of all tiles of all states, in the order of the states."""
    return [tile.record() for state in states for tile in tiles_of(state, shape)]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """What a worker binds once: the recurrent groups' tables, states and per-slot memory.

    `source_tables[g]` is indexed by request slot, `input_tables[g]` by batch row of the current step
    (the gathered table); both int32, `[rows, columns]`. State copies read source tables, aligned
    indices read input tables.
    """

    block_tokens: int
    drafts: int
    source_tables: tuple[torch.Tensor, ...]
    input_tables: tuple[torch.Tensor, ...]
    states: tuple[StateView, ...]

    def __post_init__(self) -> None:
        """Raises BindingError for tables or states that do not fit together."""
        if self.block_tokens < 1 or self.drafts < 0:
            raise BindingError(
                f"block_tokens {self.block_tokens} and drafts {self.drafts} must be >= 1 and >= 0"
            )
        if len(self.source_tables) != len(self.input_tables) or not self.source_tables:
            raise BindingError("one source table and one input table a recurrent group, at least one group")
        for table in (*self.source_tables, *self.input_tables):
            if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
                raise BindingError(f"a block table is int32 [rows, columns], got {table.dtype} {table.shape}")
        for state in self.states:
            if not 0 <= state.group < len(self.source_tables):
                raise BindingError(f"a state names group {state.group} of {len(self.source_tables)}")
            if state.tensor.device != self.source_tables[0].device:
                raise BindingError("states and tables must be on one device")

    @property
    def slots(self) -> int:
        """Request slots, the rows of a source table."""
        return self.source_tables[0].shape[0]

    @property
    def rows(self) -> int:
        """Batch rows, the rows of an input table."""
        return self.input_tables[0].shape[0]


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What the align kernels keep for every request slot between steps, int32 [slots] each."""

    columns: torch.Tensor  # running column of the slot's last step; -1: nothing to read yet
    accepted: torch.Tensor  # accepted count of that step, 1 where the state lies at offset 0

    @classmethod
    def empty(cls, slots: int, device: torch.device | str) -> SlotMemory:
        """Memory of slots that hold no request."""
        minus_one = torch.full((slots,), -1, dtype=torch.int32, device=device)
        return cls(minus_one, torch.ones(slots, dtype=torch.int32, device=device))

    def admit(self, slot: int, computed_tokens: int, block_tokens: int) -> None:
        """Seed a slot for a request that has `computed_tokens` tokens (a new, resumed or re-added one).

        Source: `worker/gpu/model_states/mamba_hybrid.py::add_request`, vLLM 0.33.0.
        """
        self.columns[slot] = align.seed_column(computed_tokens, block_tokens)
        self.accepted[slot] = 1


@dataclass(frozen=True, slots=True)
class GatherTables:
    """What the gather binds once, for all groups; tables int32 [rows, columns], equal widths a group."""

    source_tables: tuple[torch.Tensor, ...]  # by request slot
    input_tables: tuple[torch.Tensor, ...]  # by batch row
    num_blocks: torch.Tensor  # int32 [groups, slots]: valid columns of a source row
    block_tokens: tuple[int, ...]
    window_tokens: tuple[int, ...]  # 0 for a group whose rows are gathered whole
    extra_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises BindingError for tables that do not fit together."""
        groups = len(self.source_tables)
        lengths = {len(getattr(self, name)) for name in self.__slots__ if name != "num_blocks"}
        if lengths != {groups} or self.num_blocks.shape[0] != groups or not groups:
            raise BindingError(f"the gather takes one entry a group everywhere, got lengths {lengths}")
        for source, target in zip(self.source_tables, self.input_tables, strict=True):
            if (
                source.dtype != torch.int32
                or target.dtype != torch.int32
                or source.shape[1] != target.shape[1]
            ):
                raise BindingError("source and input table of a group are int32 and equally wide")
            if source.stride(1) != 1 or target.stride(1) != 1:
                raise BindingError("the columns of a table lie next to each other")


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """Device pages and the pinned host chunks that keep them."""

    pages: torch.Tensor  # uint8 [blocks, page bytes], pages may be padded
    chunks: torch.Tensor  # uint8 [chunks, blocks a chunk, page bytes], pinned where the device is CUDA

    def __post_init__(self) -> None:
        """Raises BindingError unless both sides hold the same pages."""
        if self.pages.dtype != torch.uint8 or self.chunks.dtype != torch.uint8:
            raise BindingError("pages and chunks are bytes (uint8)")
        if (
            self.pages.shape[1] != self.chunks.shape[2]
            or self.pages.stride(1) != 1
            or self.chunks.stride(2) != 1
        ):
            raise BindingError(
                f"pages of {tuple(self.pages.shape)} bytes do not fit chunks of {tuple(self.chunks.shape)}"
            )
        if self.pages.is_cuda and not self.chunks.is_pinned():
            raise BindingError(
                "a kernel can only reach pinned host memory: allocate chunks with pin_memory=True"
            )
