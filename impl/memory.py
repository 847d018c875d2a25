"""One worker's memory: pages that every group views, pinned host chunks, block tables, per-slot state.

The story.  All groups draw blocks from one pool, and a block is one page of bytes.  An attention group sees
it as cells, a recurrent group as a convolution window with a temporal state behind it; the block id alone
says whose it is.  A page is larger than any view of it, and pages lie further apart than they are large, as
in an engine's unified layout: a kernel that takes the state's size for the page's stride reads somebody
else.

Sources: `v1/worker/gpu/block_table.py`, `v1/kv_cache_interface.py` (page sizes),
`v1/kv_offload/cpu/gpu_worker.py`, vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from impl.kernels.layout import GatherTables, Layout, PagedChunks, Recurrent, SlotMemory, StateView
from impl.model import CELL_WORDS, INNER, LANES, TAPS
from spec.config import Config, Kind
from spec.world import table_columns

WORD_BYTES = 4
PAGE_PADDING_BYTES = 8  # a page is larger than any group's view of it
GAP_BYTES = 16  # and pages lie further apart than they are large
POISON = 0x5A5AA5A5  # what debug mode leaves in blocks that hold nothing


def page_bytes(config: Config) -> int:
    """Bytes of a page: the largest view, and some padding."""
    return PAGE_PADDING_BYTES + WORD_BYTES * max(
        window_words(config) + LANES if group.kind is Kind.MAMBA else group.block_tokens * CELL_WORDS
        for group in config.groups
    )


def window_words(config: Config) -> int:
    """Words of a convolution window: the taps before a token, for each of the 1 + K states of a step."""
    return (TAPS - 1 + config.drafts) * INNER


@dataclass(frozen=True, slots=True)
class StatePages:
    """A recurrent group's views of all pages."""

    window: torch.Tensor  # int32 [blocks, w, inner], whatever its layout
    temporal: torch.Tensor  # int32 [blocks, lanes]
    views: tuple[StateView, StateView]  # the same for the kernels


class Memory:
    """Everything that a worker keeps on its device, and its host chunks."""

    def __init__(self, config: Config, stage: int, device: torch.device) -> None:
        self.config, self.device = config, device
        blocks, slots = config.pool_blocks, config.slots
        size = page_bytes(config)
        self.stride_words = (size + GAP_BYTES) // WORD_BYTES
        self.words = torch.zeros((blocks, self.stride_words), dtype=torch.int32, device=device)
        self.pages = self.words.view(torch.uint8)[:, :size]
        self.chunks = torch.zeros(
            (config.tier_chunks, config.blocks_per_chunk, size),
            dtype=torch.uint8,
            pin_memory=device.type == "cuda",
        )
        self.half_bytes = (
            size // 2
        )  # a transfer copies one half of each page when it begins, and the other when it ends
        self.halves = (
            PagedChunks(self.pages[:, : self.half_bytes], self.chunks[:, :, : self.half_bytes]),
            PagedChunks(self.pages[:, self.half_bytes :], self.chunks[:, :, self.half_bytes :]),
        )
        self.source = tuple(self._table(g) for g in range(len(config.groups)))  # by request slot
        self.gathered = tuple(self._table(g) for g in range(len(config.groups)))  # by batch row
        self.num_blocks = torch.zeros((len(config.groups), slots), dtype=torch.int32, device=device)
        self.slots = SlotMemory.empty(slots, device)
        self.computed = torch.zeros(slots, dtype=torch.int32, device=device)  # by the device's own count
        self.mamba = tuple(i for i, g in enumerate(config.groups) if g.kind is Kind.MAMBA)
        self.kv = {g: self._cells(g) for g in range(len(config.groups)) if g not in self.mamba}
        layout = Layout.CONV_CHANNEL_FIRST if stage % 2 else Layout.CONV_TOKEN_FIRST
        self.states = {g: self._states(i, layout) for i, g in enumerate(self.mamba)}
        # Host buffers of the v1 runner: accepted counts by batch row, and where a step's counts land.  They
        # are kept beside the pages, because the host's operations stand in the main stream (spec.ops).
        self.counts = {name: torch.ones(slots, dtype=torch.int32, device=device) for name in ("rows", "own")}

    def _table(self, group: int) -> torch.Tensor:
        shape = (self.config.slots, table_columns(self.config, group))
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _cells(self, group: int) -> torch.Tensor:
        tokens = self.config.groups[group].block_tokens
        shape = (self.config.pool_blocks, tokens, CELL_WORDS)
        return self.words.as_strided(shape, (self.stride_words, CELL_WORDS, 1))

    def _states(self, index: int, layout: Layout) -> StatePages:
        blocks, width = self.config.pool_blocks, TAPS - 1 + self.config.drafts
        if layout is Layout.CONV_TOKEN_FIRST:
            window = self.words.as_strided((blocks, width, INNER), (self.stride_words, INNER, 1))
            logical = window
        else:
            window = self.words.as_strided((blocks, INNER, width), (self.stride_words, width, 1))
            logical = window.transpose(1, 2)
        behind = window_words(self.config)
        temporal = self.words.as_strided((blocks, LANES), (self.stride_words, 1), behind)
        views = (StateView(window, layout, index), StateView(temporal, Layout.TEMPORAL, index))
        return StatePages(logical, temporal, views)

    def recurrent(self) -> Recurrent | None:
        """What the align kernels bind, once and eagerly; None without recurrent groups."""
        if not self.mamba:
            return None
        return Recurrent(
            self.config.groups[self.mamba[0]].block_tokens,
            self.config.drafts,
            tuple(self.source[g] for g in self.mamba),
            tuple(self.gathered[g] for g in self.mamba),
            tuple(view for g in self.mamba for view in self.states[g].views),
        )

    def gather_tables(self) -> GatherTables:
        """What the gather binds once."""
        groups = self.config.groups
        return GatherTables(
            self.source,
            self.gathered,
            self.num_blocks,
            tuple(g.block_tokens for g in groups),
            tuple(g.window_tokens if g.kind is Kind.WINDOW else 0 for g in groups),
            tuple(g.extra_tokens for g in groups),
        )

    def clear(self) -> None:
        """Everything as it was at first."""
        zeroed = (self.words, self.chunks, *self.source, *self.gathered, self.num_blocks, self.computed)
        for tensor in zeroed:
            tensor.zero_()
        for tensor in (self.slots.accepted, *self.counts.values()):
            tensor.fill_(1)
        self.slots.columns.fill_(-1)

    def poison(self, blocks: list[int]) -> None:
        """Fill whole pages with a value that no layer computes on purpose; done when this returns."""
        if blocks:
            self.words[torch.tensor(blocks, device=self.device)] = POISON
            if self.words.is_cuda:
                torch.cuda.current_stream().synchronize()
