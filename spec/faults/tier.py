"""Faults of the host tier: references, failures, resets."""

from __future__ import annotations

from spec.faults.fault import DECISION, LIVENESS, Fault
from spec.policy import PolicyError


def leading_blocks(columns: tuple[int, ...], counted: int) -> int:
    """Columns before the first null one."""
    return next((col for col, block in enumerate(columns) if not block), len(columns))


def the_only_group(groups: int) -> int:
    """Unpacks one list of blocks.  Raises :class:`PolicyError` if there are more."""
    if groups != 1:
        raise PolicyError(f"expected one list of blocks, got {groups}")
    return groups


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
    Fault(
        "reset-leaves-the-tier", "hit_lookup", DECISION,
        "A reset clears the pool and leaves the host tier: prefixes from before it are loaded again.",
        "the connector's reset_cache, called with the pool's",
        ("https://github.com/vllm-project/vllm/issues/57727",),
        {"reset_reaches": lambda state: False}, bites=("plain-offload", "mamba-offload"),
        harmless=("plain",), why_harmless="no host tier", cases=("vllm-57727",),
    ),
    Fault(
        "chunks-in-flight-outlive-a-reset", "hit_lookup", DECISION,
        "A reset takes the chunks that can be loaded out of the tier, not those that are still being stored.",
        "jobs from before a reset are discarded",
        ("offloading/scheduler.py::OffloadingConnectorScheduler.reset_cache",),
        {"reset_reaches": lambda state: state == "ready"}, bites=("plain-offload", "fences"),
    ),
    Fault(
        "stored-chunk-never-listed", "hit_lookup", DECISION,
        "A chunk that every rank has stored does not enter the map that lookups read.",
        "listed with the last report (complete_store)",
        ("https://github.com/vllm-project/vllm/issues/53498",),
        {"lists_stored": lambda: False}, bites=("plain-offload",), cases=("vllm-53498",),
    ),
    Fault(
        "abort-stores-without-blocks", "preemption", DECISION,
        "An abort builds final stores from the prompt's hashes, also for chunks that have no blocks yet.",
        "keys are limited to chunks with known blocks",
        ("https://github.com/vllm-project/vllm/issues/49118",),
        {"final_stores": lambda why, running: True, "storable_chunks": lambda full, held: full},
        bites=("plain-offload",), cases=("vllm-49118",),
    ),
    Fault(
        "sources-from-the-front", "table_indexing", DECISION,
        "The targets are the tail of a request's blocks; the sources are paired with them from the front.",
        "paired by position", ("https://github.com/vllm-project/vllm/issues/48633",),
        {"load_shift": lambda first: first}, bites=("plain-offload",), cases=("vllm-48633",),
    ),
    Fault(
        "local-prefix-by-walk", "table_indexing", DECISION,
        "The load walks the row from column 0 to find the local prefix, is stopped by a null column, and "
        "asserts that the scheduler counted the same.",
        "the scan starts at the scheduler's count", ("https://github.com/1CatAI/1Cat-vLLM/issues/567",),
        {"local_columns": leading_blocks}, bites=("preempting", "mamba-offload"), harmless=("plain-offload",),
        why_harmless="full attention has no null columns", cases=("1cat-vllm-567",),
    ),
    Fault(
        "failed-load-of-one-list", "load_failure", DECISION,
        "Recovery from a failed load takes a request to have one list of blocks.",
        "every group's", ("https://github.com/vllm-project/vllm/pull/50388",),
        {"recovered_groups": the_only_group}, bites=("preempting", "mamba-offload"),
        harmless=("plain-offload",), why_harmless="one group", cases=("vllm-50388",),
    ),
)  # fmt: skip
