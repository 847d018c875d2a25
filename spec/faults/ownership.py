"""Faults of ownership: freed too early, twice, or under one's own hit."""

from __future__ import annotations

from spec.faults.fault import DECISION, Fault

FAULTS = (
    Fault(
        "window-freed-on-optimistic-count", "ownership", DECISION,
        "Columns behind the window are freed by the count that includes tokens in flight.",
        "by processed tokens (remove_skipped_blocks in allocate_slots)",
        ("https://github.com/vllm-project/vllm-ascend/issues/13501",),
        {"free_basis": lambda request: request.computed}, bites=("window-async",),
        harmless=("hybrid-pp1",), why_harmless="sync, one stage: nothing is in flight when columns are freed",
        cases=("vllm-ascend-13501", "vllm-33997", "vllm-47728"),
    ),
    Fault(
        "freed-from-the-mirror", "ownership", DECISION,
        "A finished request gives back every block it ever had, the ones freed behind its window included.",
        "its table as it stands", ("https://github.com/vllm-project/vllm/issues/42571",),
        {"release_list": lambda table, mirror: mirror}, bites=("window-async", "hybrid-pp1"),
        cases=("vllm-42571",),
    ),
    Fault(
        "own-hit-evicted", "eviction", DECISION,
        "A request's external blocks are allocated before its hit is held, and evict it.",
        "two phases: every group's hit is touched first",
        ("https://github.com/vllm-project/vllm/issues/39702",),
        {"touches_hit_first": lambda: False}, bites=("own-hit",), cases=("vllm-39702",),
    ),
    Fault(
        "key-survives-reuse", "eviction", DECISION,
        "A cached block is handed out anew and keeps its key: hits go on finding it.",
        "evicted first (_maybe_evict_cached_block)",
        ("v1/core/block_pool.py::BlockPool._maybe_evict_cached_block",),
        {"forgets_key": lambda block: False}, bites=("fences", "state-fences"),
        cases=("kvcached-362",),
    ),
    Fault(
        "prefix-published-ahead", "ownership", DECISION,
        "All known blocks of a prompt go under their keys with its first chunk, computed or not.",
        "what the step computes, and verified (allocate_slots caps the extent)",
        ("v1/core/kv_cache_manager.py::KVCacheManager.allocate_slots",),
        {"publish_limit": lambda config, computed, scheduled, known: known}, bites=("hybrid-pp1", "plain"),
    ),
    Fault(
        "unregistered-blocks-kept", "ownership", DECISION,
        "A request that goes away before a step has computed anything for it leaves its blocks with nobody.",
        "given back whatever it had reached", ("https://github.com/NVIDIA/TensorRT-LLM/pull/15018",),
        {"gives_back": lambda ran: ran}, bites=("plain-offload",), harmless=("plain",),
        why_harmless="nothing is held before the first step without loads", cases=("tensorrt-llm-15018",),
    ),
    Fault(
        "whole-path-released", "ownership", DECISION,
        "When a copy-on-write is done, more goes back than its lock had taken: the whole path of the prefix.",
        "a release undoes the increments of its own lock",
        ("https://github.com/sgl-project/sglang/pull/27038",),
        {"released_with_copy": lambda columns: columns}, bites=("partial-tails", "hybrid-pp1"),
        harmless=("hybrid-even",), why_harmless="no hit ends inside a block", cases=("sglang-27038",),
    ),
)  # fmt: skip
