"""What only a CUDA device shows: captured graphs, launches that repeat, memory a kernel cannot reach."""

from __future__ import annotations

import pytest

try:
    import torch

    from impl.kernels import align, reference
    from impl.kernels.jit import DEVICE
    from impl.kernels.layout import BindingError, PagedChunks
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "triton"):
        raise
    pytest.skip(f"kernels left out: {missing.name} is not installed", allow_module_level=True)

from tests import test_kernels as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="captured graphs need a CUDA device"),
]


@pytest.mark.parametrize("model", cases.MODELS, ids=lambda model: model.name)
def test_a_captured_step_follows_its_buffers(model: cases.Model) -> None:
    """Captured once with padded rows; every replay reads other rows, counts, columns and tables."""
    plain, fast = cases.build(model, 1000), cases.build(model, 1000)
    rows = cases.ROWS
    names = ("idx_mapping", "query_start", "before", "after", "sampled", "sequence")
    buffers = {
        name: torch.zeros(rows + 1 if name == "query_start" else max(rows, cases.SLOTS), dtype=torch.int32)
        for name in names
    }
    held = {name: value.cuda() for name, value in buffers.items()}
    held["idx_mapping"].fill_(-1)
    kernels = align.Align(
        fast.bound, fast.memory, programs=model.programs, tile_bytes=model.tile_bytes, warps=model.warps
    )
    twin = reference.Align(plain.bound, plain.memory)

    def step(side: align.Align | reference.Align) -> None:
        side.before_forward(
            held["idx_mapping"][:rows], held["query_start"], held["before"], held["sequence"][:rows]
        )
        side.postprocess(held["idx_mapping"][:rows], held["sampled"][:rows], held["after"])

    step(kernels)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(kernels)
    for seed in range(20):
        drawn = cases.build(model, seed)
        for name in names:
            value = drawn.arguments[name].to(torch.int32)
            held[name].fill_(-1 if name == "idx_mapping" else 0)
            if name == "query_start":
                held[name].fill_(value[-1])
            held[name][: value.numel()] = value
        for case in (plain, fast):
            case.memory.columns.copy_(drawn.memory.columns.clamp(min=0))
            case.memory.accepted.copy_(drawn.memory.accepted)
            for table, other in zip(case.bound.source_tables, drawn.bound.source_tables, strict=True):
                table.copy_(other)
            for table, other in zip(case.bound.input_tables, drawn.bound.input_tables, strict=True):
                table.copy_(other)
        step(twin)
        graph.replay()
        torch.cuda.synchronize()
        assert plain.arena.differences(fast.arena) == [], f"seed {seed}"
        assert torch.equal(twin.state_indices, kernels.state_indices), f"seed {seed}"
        assert int(kernels.before.count[1]) == int(kernels.after.count[1]) == 0, "a ticket is left over"


def test_pageable_host_memory_is_refused() -> None:
    pages = torch.zeros((2, 64), dtype=torch.uint8, device="cuda")
    with pytest.raises(BindingError, match="pin_memory=True"):
        PagedChunks(pages, torch.zeros((2, 1, 64), dtype=torch.uint8))
