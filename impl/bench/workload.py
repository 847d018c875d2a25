"""The workloads: GDN-like states of a decode step, permuted everywhere, with a chosen share of crossings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from impl.kernels.align import Align
from impl.kernels.layout import Layout, Recurrent, SlotMemory, StateView

BLOCK_TOKENS, DRAFTS, COLUMNS = 16, 4, 4
CONV_TOKENS, CONV_INNER = 7, 8192
RUNNING, CROSSED = 0, 3  # the columns before and after a crossing
COMPUTED_STAYS, COMPUTED_CROSSES = 8, 56  # plus 1 + DRAFTS scheduled tokens: columns 0 and 3


@dataclass(frozen=True, slots=True)
class Size:
    """How many requests, layers and bytes."""

    requests: int
    layers: int
    temporal_bytes: int = 2 << 20
    conv: bool = True

    @property
    def states(self) -> int:
        """States of all layers."""
        return self.layers * (2 if self.conv else 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Bound memory of one size, filled with random bytes."""

    size: Size
    bound: Recurrent
    idx_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class Variant:
    """One batch of decisions over a workload: who crosses, and from which offset."""

    align: Align
    query_start: torch.Tensor
    computed: torch.Tensor
    sequence: torch.Tensor
    crossing: list[int]  # slots
    offsets: list[int]  # of these slots


def build(size: Size, device: str, seed: int) -> Workload:
    """Per layer one page buffer that holds both states of a block; tables and row map are permutations."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = size.requests * COLUMNS + 1
    conv_elements = CONV_TOKENS * CONV_INNER if size.conv else 0
    temporal_elements = size.temporal_bytes // 2
    page = conv_elements + temporal_elements
    states = []
    for _ in range(size.layers):
        pages = torch.empty(blocks * page, dtype=torch.int16, device=device)
        pages.random_(-32768, 32767, generator=generator)
        if size.conv:
            window = pages.as_strided((blocks, CONV_TOKENS, CONV_INNER), (page, CONV_INNER, 1))
            states.append(StateView(window, Layout.CONV_TOKEN_FIRST))
        temporal = pages.as_strided((blocks, temporal_elements), (page, 1), conv_elements)
        states.append(StateView(temporal, Layout.TEMPORAL))
    names = torch.randperm(blocks - 1, generator=generator, device=device).to(torch.int32) + 1
    table = names.view(size.requests, COLUMNS).contiguous()
    mapping = torch.randperm(size.requests, generator=generator, device=device).to(torch.int32)
    gathered = table[mapping.long()].contiguous()
    bound = Recurrent(BLOCK_TOKENS, DRAFTS, (table,), (gathered,), tuple(states))
    return Workload(size, bound, mapping)


def variant(work: Workload, crossing: list[int], seed: int, warps: int | None = None) -> Variant:
    """Decisions in which exactly the slots of `crossing` cross, each from an offset of 0, 1 or 2."""
    device, requests = work.idx_mapping.device, work.size.requests
    offsets = torch.randint(0, 3, (requests,), generator=torch.Generator().manual_seed(seed))
    memory = SlotMemory.empty(requests, device)
    memory.columns.fill_(RUNNING)
    memory.accepted.copy_(offsets + 1)
    computed = torch.full((requests,), COMPUTED_STAYS, dtype=torch.int32, device=device)
    computed[crossing] = COMPUTED_CROSSES
    starts = torch.arange(0, (requests + 1) * (1 + DRAFTS), 1 + DRAFTS, dtype=torch.int32, device=device)
    sequence = computed[work.idx_mapping.long()] + 1 + DRAFTS
    align = Align(work.bound, memory, warps=warps)
    align.preprocess(work.idx_mapping, starts, computed)
    return Variant(align, starts, computed, sequence, crossing, offsets[crossing].tolist())


def decode_step(work: Workload, chosen: Variant) -> Callable[[], object]:
    """All align work of a decode step that nothing crosses: pre-process, indices, pre-copy, post-process."""
    if chosen.crossing:
        raise ValueError("a decode step can only be repeated if nothing crosses")
    requests, device = work.size.requests, work.idx_mapping.device
    sampled = torch.full((requests,), 3, dtype=torch.int32, device=device)
    after = torch.full((requests,), COMPUTED_STAYS + 3, dtype=torch.int32, device=device)

    def step() -> None:
        chosen.align.before_forward(work.idx_mapping, chosen.query_start, chosen.computed, chosen.sequence)
        chosen.align.postprocess(work.idx_mapping, sampled, after)

    return step


def naive_copies(work: Workload, chosen: Variant) -> Callable[[], object]:
    """What one would write with torch: index_select and index_copy_ for every state of every layer."""
    device = work.idx_mapping.device
    table = work.bound.source_tables[0].long()
    slots = torch.tensor(chosen.crossing, device=device)
    offsets = torch.tensor(chosen.offsets, device=device)
    window_source, target = table[slots, RUNNING], table[slots, CROSSED]
    temporal_source = table[slots, RUNNING + offsets]
    tokens = (torch.arange(CONV_TOKENS, device=device)[None] + offsets[:, None]).clamp(max=CONV_TOKENS - 1)
    tokens = tokens[:, :, None].expand(-1, -1, CONV_INNER)

    def copies() -> None:
        for state in work.bound.states:
            if state.tokens:
                moved = state.tensor.index_select(0, window_source).gather(1, tokens)
            else:
                moved = state.tensor.index_select(0, temporal_source)
            state.tensor.index_copy_(0, target, moved)

    return copies


def copied_bytes(work: Workload, chosen: Variant) -> int:
    """Bytes read plus bytes written by the copies of one variant."""
    total = 0
    for state in work.bound.states:
        block = state.tensor[0]
        size = block.numel() * block.element_size()
        for offset in chosen.offsets:
            total += size * (state.tokens - offset) // state.tokens if state.tokens else size
    return 2 * total


def expect_copies(work: Workload, chosen: Variant, states: list[int]) -> list[torch.Tensor]:
    """What these states must be after the copies: computed with torch from what they are now."""
    table = work.bound.source_tables[0].tolist()
    expected = []
    for number in states:
        state = work.bound.states[number]
        tensor = state.tensor.clone()
        for slot, offset in zip(chosen.crossing, chosen.offsets, strict=True):
            target = tensor[table[slot][CROSSED]]
            if state.tokens:
                target[: state.tokens - offset] = state.tensor[table[slot][RUNNING]][offset:]
            else:
                target.copy_(state.tensor[table[slot][RUNNING + offset]])
        expected.append(tensor)
    return expected


def sample_of_states(work: Workload) -> list[int]:
    """The states that a correctness check compares whole: both of the first, a middle and the last layer."""
    count = len(work.bound.states)
    return sorted({0, 1, count // 2, count // 2 + 1, count - 2, count - 1} & set(range(count)))
