"""Faults of hit lookup: hits that are too long for a group, and reuse that is lost."""

from __future__ import annotations

from spec.arith import coverage
from spec.config import Group, Kind
from spec.faults.fault import DECISION, Fault


def window_before_the_drop(group: Group, hit: int, drop: int) -> int:
    """The window that ends where the dropped tail ends."""
    matched = hit + drop * group.block_tokens
    return coverage.first_retained_column(matched, group.window_tokens, 0, group.block_tokens)


FAULTS = (
    Fault(
        "hit-of-one-group-for-all", "hit_lookup", DECISION,
        "The hit of the full-attention group is taken for all; the window's blocks are not asked for.",
        "the common hit of all groups (find_longest_cache_hit)",
        ("https://github.com/vllm-project/vllm/issues/46453",
         "https://github.com/vllm-project/vllm/issues/43090"),
        {"group_must_serve": lambda group: group.kind is not Kind.WINDOW}, bites=("window-local",),
        harmless=("plain",), why_harmless="one group",
        cases=("vllm-46453", "vllm-43090", "tensorrt-llm-10875"),
    ),
    Fault(
        "drop-applied-again", "hit_lookup", DECISION,
        "Every round of the fixed point drops a unit once more.",
        "once a group",
        ("https://github.com/vllm-project/vllm/issues/51771",
         "https://github.com/vllm-project/vllm/pull/57616"),
        {"dropped_hit": lambda hit, unit, drops: hit - unit * drops}, bites=("tail-drop-full",),
        harmless=("plain",),
        why_harmless="nothing is dropped", cases=("vllm-51771", "vllm-57616"),
    ),
    Fault(
        "window-matched-before-the-drop", "hit_lookup", DECISION,
        "A window's blocks are matched up to the tail that is then dropped: the hit lacks as many at its "
        "other end.",
        "a block more is matched (SlidingWindowManager.find_longest_cache_hit)",
        ("https://github.com/vllm-project/vllm/pull/17398",),
        {"hit_first": window_before_the_drop}, bites=("tail-drop",), harmless=("window-local",),
        why_harmless="nothing is dropped", cases=("vllm-17398",),
    ),
    Fault(
        "pending-counts-as-present", "fence", DECISION,
        "A chunk that is still being written is taken for present, and the load asserts.",
        "the request asks again (HIT_PENDING)", ("https://github.com/vllm-project/vllm/issues/56701",),
        {"pending_is_present": lambda state: True}, bites=("plain-offload", "mamba-offload"),
    ),
    Fault(
        "mirror-kept-on-resume", "preemption", DECISION,
        "A resumed request's copy of its block ids is extended instead of replaced, and stores follow it.",
        "rebuilt from scratch", ("https://github.com/LMCache/LMCache/pull/1361",),
        {"keeps_mirror": lambda: True, "positional_group": lambda group: True, "boundary_block": lambda table,
         mirror: mirror},
        bites=("composed-tight",), cases=("lmcache-1361",),
    ),
    Fault(
        "hit-aligned-to-attention-only", "hit_lookup", DECISION,
        "Hits are aligned to the first group's unit instead of to all groups': a state is asked for where "
        "none can be.",
        "the least common multiple of the groups' blocks or chunks",
        ("v1/core/kv_cache_coordinator.py::HybridKVCacheCoordinator",),
        {"hit_unit": lambda units: units[0]}, bites=("composed",), harmless=("hybrid-even",),
        why_harmless="all groups have one block size",
    ),
)  # fmt: skip
