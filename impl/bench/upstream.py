"""Upstream's own kernels, run from a directory that the user names.

Only `mamba_utils.py` and `swap_blocks_triton.py` of a vLLM release are read; everything that they import from
the rest of vLLM is stubbed, because the kernels need none of it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from impl.bench.workload import CROSSED, RUNNING, Variant, Workload
from impl.kernels.jit import tl, triton
from impl.kernels.layout import PagedChunks

COPY_WORDS = 1024
TILES = 16  # of a temporal state, upstream's setting


class UpstreamError(ValueError):
    """A directory without the two kernel files; the message says what to do."""


class _Stub(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UpstreamError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Upstream:
    """The two modules of one release."""

    mamba: Any
    swap: Any

    def precopy(self, work: Workload, chosen: Variant) -> Any:
        """A launch of the pre-copy kernel over the variant's decisions."""
        arrays = _decisions(work, chosen)
        meta = _metadata(work)
        grid = (work.size.requests, len(work.bound.states), TILES)

        def launch() -> None:
            self.mamba.precopy_mamba_align_fused_kernel[grid](
                arrays["columns"], arrays["sources"], arrays["offsets"], *meta, work.idx_mapping,
                work.size.requests, COPY_BLOCK_SIZE=COPY_WORDS, CONV_STATE_DIM_FIRST=False,
                TEMPORAL_TILES=TILES,
            )  # fmt: skip

        return launch

    def postprocess(self, work: Workload, chosen: Variant) -> Any:
        """A launch of the post-process kernel (no snapshot copy) in a step that reaches no boundary."""
        arrays = _decisions(work, chosen)
        meta = _metadata(work)
        after = torch.full_like(arrays["columns"], 14)
        accepted = torch.full_like(arrays["columns"], 3)
        grid = (work.size.requests, len(work.bound.states), TILES)

        def launch() -> None:
            self.mamba.postprocess_mamba_fused_kernel[grid](
                accepted, arrays["sources"], None, after, None, *meta, accepted, work.idx_mapping,
                work.size.requests, block_size=work.bound.block_tokens, COPY_BLOCK_SIZE=COPY_WORDS,
                CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=True, PRECOMPUTED_NEW_COMPUTED=True,
                TEMPORAL_TILES=TILES,
            )  # fmt: skip

        return launch

    def swap_blocks(self, memory: PagedChunks, jobs: torch.Tensor, to_host: bool, programs: int) -> Any:
        """A launch of the scattered host copy on `programs` programs, in chunks of 8 KiB to 32 KiB."""
        pages = memory.pages.data_ptr() + jobs[:, 0].long() * memory.pages.stride(0)
        places = (
            memory.chunks.data_ptr()
            + jobs[:, 1].long() * memory.chunks.stride(0)
            + jobs[:, 2].long() * memory.chunks.stride(1)
        )
        size = memory.pages.shape[1]
        sizes = torch.full_like(pages, size)
        source, target = (pages, places) if to_host else (places, pages)
        chunk = min(max(1 << (size - 1).bit_length(), 8192), 32768)

        def launch() -> None:
            self.swap._swap_blocks_kernel[(programs,)](
                source, target, sizes, len(jobs), BYTES_PER_CHUNK=chunk
            )

        return launch


def _decisions(work: Workload, chosen: Variant) -> dict[str, torch.Tensor]:
    device, requests = work.idx_mapping.device, work.size.requests
    sources = torch.full((requests,), RUNNING, dtype=torch.int32, device=device)
    columns, offsets = sources.clone(), torch.zeros_like(sources)
    columns[chosen.crossing] = CROSSED
    offsets[chosen.crossing] = torch.tensor(chosen.offsets, dtype=torch.int32, device=device)
    return {"columns": columns, "sources": sources, "offsets": offsets}


def _metadata(work: Workload) -> tuple[Any, ...]:
    device = work.idx_mapping.device
    table = work.bound.source_tables[0]
    states = work.bound.states

    def array(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return (
        array([table.data_ptr()], torch.int64),
        table.stride(0),
        array([state.tensor.data_ptr() for state in states], torch.int64),
        array([state.page_stride_bytes for state in states], torch.int64),
        array([state.tensor.element_size() for state in states], torch.int32),
        array([state.tensor[0].numel() // max(state.tokens, 1) for state in states], torch.int64),
        array([state.tokens for state in states], torch.int32),
        array([state.group for state in states], torch.int32),
        array([0] * len(states), torch.int32),
        array([0] * len(states), torch.int64),
    )


def load(directory: Path) -> Upstream:
    """Read the two kernel files found anywhere below `directory`.

    Raises UpstreamError if one is missing.
    """
    found = {}
    for name in ("mamba_utils.py", "swap_blocks_triton.py"):
        paths = [path for path in sorted(directory.rglob(name)) if "model_executor" not in path.parts]
        if not paths:
            raise UpstreamError(
                f"{directory} holds no {name}: name a directory with vLLM's file of that name"
            )
        found[name] = paths[0]
    stubs = (
        "vllm", "vllm._custom_ops", "vllm.config", "vllm.logger", "vllm.triton_utils", "vllm.utils",
        "vllm.utils.gpu_sync_debug", "vllm.utils.math_utils", "vllm.model_executor",
        "vllm.model_executor.layers", "vllm.model_executor.layers.mamba",
        "vllm.model_executor.layers.mamba.mamba_utils", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched",
        "vllm.v1.core.sched.output", "vllm.v1.kv_cache_interface", "vllm.v1.utils",
        "vllm.v1.worker", "vllm.v1.worker.gpu_input_batch",
    )  # fmt: skip
    for name in stubs:
        sys.modules.setdefault(name, _Stub(name))
    sys.modules["vllm.logger"].init_logger = lambda name: None  # type: ignore[attr-defined]
    sys.modules["vllm.triton_utils"].tl = tl  # type: ignore[attr-defined]
    sys.modules["vllm.triton_utils"].triton = triton  # type: ignore[attr-defined]
    return Upstream(
        _load(found["mamba_utils.py"], "upstream_mamba_utils"),
        _load(found["swap_blocks_triton.py"], "upstream_swap_blocks"),
    )
