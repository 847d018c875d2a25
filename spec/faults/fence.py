"""Faults of fences: stores that read too early, too late, or a block that was already somebody else's."""

from __future__ import annotations

from spec.faults.fault import DECISION, LIVENESS, Fault
from spec.ops import UserId
from spec.reference.plan import Chunk

SEED = "https://github.com/1CatAI/1Cat-vLLM/pull/249"
META = ".../offloading/scheduler.py::build_connector_meta"


def halves(chunks: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], ...]:
    """A load in two transfers, as two connectors would split it."""
    middle = (len(chunks) + 1) // 2
    return tuple(part for part in (chunks[:middle], chunks[middle:]) if part)


def newest_of_that_name(uid: UserId, live: tuple[UserId, ...]) -> UserId:
    """Whoever has the client's name now."""
    return max((one for one in live if one[0] == uid[0]), default=uid)


FAULTS = (
    Fault(
        "fence-dropped-early", "fence", DECISION,
        "The first rank's report lifts the fence, while other ranks still copy.",
        "the last report lifts it (update_connector_output)", (SEED, ".../offloading/scheduler.py"),
        {"fence_done": lambda waiting: True}, bites=("fences",),
        harmless=("mamba-offload",),
        why_harmless="one rank: the first report is the last",
    ),
    Fault(
        "fence-released-twice", "mtp_alias", DECISION,
        "When a store is done, every fence on its blocks goes: also that "
        "of another store of the same physical block.",
        "a set of job ids a block (_block_id_to_pending_jobs)", (SEED,),
        {"unfences": lambda job, jobs: jobs}, bites=("state-fences",),
    ),
    Fault(
        "no-fence", "fence", DECISION,
        "Nothing marks the blocks that a store in flight still reads.",
        "fenced from creation on",
        ("https://github.com/ModelEngine-Group/unified-cache-management/pull/1088", META),
        {"fenced_blocks": lambda blocks: ()}, bites=("fences",),
        cases=("unified-cache-management-1088",),
    ),
    Fault(
        "visible-after-one-rank", "fence", DECISION,
        "A chunk is loadable when the first rank has stored its part.",
        "when the last one has (complete_store)", ("https://github.com/llm-d/llm-d-kv-cache/issues/504",),
        {"job_done": lambda waiting: True}, bites=("plain-offload",),
        harmless=("mamba-offload",),
        why_harmless="one rank", cases=("llm-d-kv-cache-504",),
    ),
    Fault(
        "store-does-not-wait", "fence", DECISION,
        "A store's stream does not wait for the step that produces its bytes.",
        "wait_stream(main) at submission (gpu_worker.py)",
        ("https://github.com/vllm-project/vllm/issues/45704",),
        {"store_waits_for_main": lambda: False}, bites=("plain-offload",),
        cases=("vllm-45704",),
    ),
    Fault(
        "abort-frees-load-targets", "fence", DECISION,
        "An abort frees the blocks that a load in flight is still writing.",
        "freed when the load has been reported (delay_free_blocks)",
        ("https://github.com/vllm-project/vllm/pull/32255",
         "https://github.com/sgl-project/sglang/pull/35049"),
        {"abort_waits_for_load": lambda: False}, bites=("plain-offload",),
        cases=("vllm-32255", "sglang-35049"),
    ),
    Fault(
        "first-failure-frees", "fence", DECISION,
        "The first rank that fails frees the targets, while its siblings are still writing.",
        "after every part has ended", ("https://github.com/vllm-project/vllm/pull/56104",),
        {"failure_waits": lambda waiting: False}, bites=("composed-sync",),
        harmless=("mamba-offload",), why_harmless="one rank", cases=("vllm-56104",),
    ),
    Fault(
        "blocks-reused-under-a-step", "ownership", DECISION,
        "A finished request's blocks go back while a step that still "
        "writes them is in flight; a transfer from the "
        "network, which no stream orders, lands in them first.",
        "deferred until the last step is processed (_free_request_blocks)",
        ("https://github.com/vllm-project/vllm/pull/45357",),
        {"frees_wait_for_steps": lambda request: False}, base={"load_waits_for_main": lambda: False},
        design="v2 async, loads over the network", bites=("network-loads",), cases=("vllm-45357",),
    ),
    Fault(
        "preemption-does-not-flush", "preemption", DECISION,
        "Preemption frees blocks that a queued store has not read, under no fence.",
        "all jobs of a preempted request are flushed in that step",
        ("https://github.com/vllm-project/vllm/issues/52360",),
        {"flushes_preempted": lambda way: False, "fenced_blocks": lambda blocks: ()}, base={},
        bites=("composed-tight",), cases=("vllm-52360",),
    ),
    Fault(
        "readmitted-while-storing", "preemption", DECISION,
        "A preempted request is admitted, and may load, while its own "
        "store is unfinished; the pending chunk counts "
        "as present.",
        "None while any job is in flight", ("https://github.com/vllm-project/vllm/issues/46014",),
        {"readmit_waits": lambda jobs: False, "pending_is_present": lambda state: True},
        bites=("preempting",), cases=("vllm-46014",),
    ),
    Fault(
        "preempts-in-vain", "preemption", LIVENESS,
        "A request that lacks blocks preempts on although those of its first victim only wait for a step in "
        "flight: everybody is preempted, itself at last, and all are admitted again together, for ever.",
        "it waits for what will come back",
        ("v1/core/sched/scheduler.py::Scheduler.schedule (preemption loop, deferred frees)",),
        {"waits_for_returns": lambda lacking, returning: False}, bites=("crowded",),
        harmless=("plain",), why_harmless="a pool for all: nobody is preempted",
        cases=("vllm-ascend-16315",),
    ),
    Fault(
        "loaded-requests-hold-on", "preemption", LIVENESS,
        "Requests whose load has landed keep their blocks until they can run; they block one another, or a "
        "running request preempts itself over and over without getting anywhere.",
        "the last of them starts over", ("https://github.com/vllm-project/vllm/issues/46283",),
        {"loaded_give_way": lambda: False}, bites=("state-fences",), harmless=("plain",),
        why_harmless="nothing is loaded",
        cases=("vllm-57104",),
    ),
    Fault(
        "stage-reports-dropped", "pp_delay", LIVENESS,
        "Only one rank's completions are counted: a transfer over several ranks never completes.",
        "every rank's are summed (KVOutputAggregator)", ("https://github.com/vllm-project/vllm/pull/28768",),
        {"counts_report": lambda rank, ranks: rank == ranks - 1}, bites=("plain-offload",),
        harmless=("mamba-offload",), why_harmless="one rank", cases=("vllm-28768",),
    ),
    Fault(
        "waits-for-one-report-too-many", "load_failure", LIVENESS,
        "A failed rank is not counted, and the number waited for is never reached.",
        "a failure is a report",
        ("https://github.com/vllm-project/vllm/pull/50754", "https://github.com/LMCache/LMCache/pull/4826"),
        {"job_done": lambda waiting: False, "failure_waits": lambda waiting: True}, bites=("plain-offload",),
        cases=("vllm-50754", "lmcache-4826", "vllm-46283"),
    ),
    Fault(
        "oldest-store-flushed-only", "fence", DECISION,
        "Of several stores that fence a reused block only the oldest is flushed.",
        "every one (_block_id_to_pending_jobs)", (META,),
        {"flushed_jobs": lambda jobs: jobs[:1]}, bites=("state-fences",), harmless=("plain",),
        why_harmless="nothing is stored",
    ),
    Fault(
        "faster-of-two-loads", "fence", DECISION,
        "A request that two transfers load goes on when the faster one has landed; the slower one still "
        "writes, also when the request is gone.",
        "one load a request, or wait for all that were started",
        ("https://github.com/vllm-project/vllm/issues/53049",),
        {"joins_loads": lambda left: False}, base={"load_parts": halves, "readmit_waits": lambda jobs: False},
        design="v2 async, two connectors", bites=("network-loads",), cases=("vllm-53049", "sglang-39846"),
    ),
    Fault(
        "load-overtakes-a-step", "fence", DECISION,
        "A load does not wait for the steps enqueued before it, one of which still uses the block that was "
        "handed out again.",
        "wait_stream(main) at submission (gpu_worker.py)", ("v1/kv_offload/cpu/gpu_worker.py",),
        {"load_waits_for_main": lambda: False}, bites=("plain-offload",), harmless=("plain",),
        why_harmless="nothing is loaded",
        cases=("vllm-47282",),
    ),
    Fault(
        "report-by-client-name", "id_reuse", DECISION,
        "Transfers are kept under the client's name: a late report of an earlier attempt is taken for one of "
        "whoever has the name now; the earlier one waits for it for ever, and keeps its blocks.",
        "an id an attempt", ("https://github.com/volcano-sh/kthena/issues/1423",),
        {"reported_life": newest_of_that_name}, bites=("plain-offload",), cases=("kthena-1423",),
    ),
)  # fmt: skip
