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
        cases=("vllm-ascend-13501",),
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
)  # fmt: skip
