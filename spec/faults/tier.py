"""Faults of the host tier: references, failures, resets."""

from __future__ import annotations

from spec.faults.fault import DECISION, LIVENESS, Fault

FAULTS = (
    Fault(
        "evicts-under-a-reader", "eviction", DECISION,
        "A host chunk is evicted, and its place rewritten, while a load reads it.",
        "only chunks without readers are evicted (CPUOffloadingManager, ref_cnt == 0)",
        ("https://github.com/LMCache/LMCache/pull/3130",
         "https://github.com/kvcache-ai/Mooncake/pull/3996"),
        {"evictable": lambda readers: True}, bites=("one-chunk",),
        cases=("lmcache-3130", "mooncake-3996", "lmcache-5090"),
    ),
    Fault(
        "readers-never-return", "eviction", LIVENESS,
        "A load does not give its read references back: nothing can be evicted any more.",
        "complete_load", ("https://github.com/LMCache/LMCache/pull/3884",),
        {"returns_readers": lambda: False}, bites=("tiny-tier",), cases=("lmcache-3884",),
    ),
    Fault(
        "failed-load-is-served", "load_failure", DECISION,
        "A load that failed on one rank counts as landed.",
        "recomputed (failed_recving)", ("https://github.com/vllm-project/vllm/issues/52234",),
        {"uses_failed_load": lambda: True}, bites=("plain-offload",), cases=("vllm-52234",),
    ),
    Fault(
        "failed-store-keeps-its-key", "load_failure", DECISION,
        "A store that failed leaves its key visible.",
        "complete_store(success=False) removes it", ("https://github.com/LMCache/LMCache/issues/4991",),
        {"keeps_failed_store": lambda: True}, bites=("plain-offload",),
        cases=("lmcache-4991",),
    ),
    Fault(
        "failed-load-is-an-assertion", "load_failure", DECISION,
        "A failed load kills the worker.",
        "one request is recomputed or fails", ("https://github.com/vllm-project/vllm/issues/39732",),
        {"raises_on_failure": lambda: True}, bites=("plain-offload",), cases=("vllm-39732",),
    ),
    Fault(
        "failed-load-stays-listed", "fence", LIVENESS,
        "The keys of a failed load stay on the list of chunks under load: "
        "whoever needs them is told to come back later, "
        "for ever.",
        "removed with the job", (".../offloading/scheduler.py::_chunks_being_loaded",),
        {"clears_loading": lambda: False}, bites=("tiny-tier",),
    ),
    Fault(
        "reset-reuses-places", "fence", DECISION,
        "A reset hands out host places that transfers from before it still write.",
        "ids below a threshold are counted down in a reset fence",
        (".../offloading/scheduler.py::reset_cache",),
        {"reset_keeps_places": lambda: False}, bites=("plain-offload",),
    ),
)  # fmt: skip
