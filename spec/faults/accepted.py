"""Faults of accepted counts, in the v1 runner's trip through the host and on the device, and of outputs."""

from __future__ import annotations

from spec.faults.fault import DECISION, Fault
from spec.faults.fence import newest_of_that_name

FAULTS = (
    Fault(
        "counts-into-mutable-rows", "accepted_state", DECISION,
        "Accepted counts are copied into the very batch rows that the host permutes meanwhile.",
        "open upstream: a buffer of the runner's own, remapped by request identity",
        ("https://github.com/vllm-project/vllm/issues/51571",
         "https://github.com/vllm-project/vllm/pull/51599"),
        {"counts_buffer": lambda: "rows"}, design="v1 async", bites=("composed-v1", "v1-async"),
        harmless=("composed-v1-pp2",),
        why_harmless="sync: tokens reach the host after the counts, on one stream",
        cases=("vllm-51571",),
    ),
    Fault(
        "no-reset-for-a-new-life", "accepted_state", DECISION,
        "A new, resumed or same-id request takes the count of whoever had its row.",
        "removal drops the previous row; such a request starts from 1 (InputBatch.add_request)",
        ("https://github.com/vllm-project/vllm/pull/47199",
         "https://github.com/vllm-project/vllm/issues/42655"),
        {"previous_row": lambda then, same: then if then is not None else 0}, design="v1 async",
        bites=("composed-v1", "v1-async"), harmless=("composed-v1-pp2",),
        why_harmless="sync: no counts travel through rows", cases=("vllm-47199", "vllm-42655"),
    ),
    Fault(
        "zero-accepted", "accepted_state", DECISION,
        "A row that sampled nothing counts zero accepted tokens: the next read is one column too low.",
        "max(count, 1)", ("https://github.com/vllm-project/vllm/pull/50021",),
        {"accepted_floor": lambda: 0}, bites=("hybrid-pp1", "hybrid-pp2"), cases=("vllm-50021",),
    ),
    Fault(
        "output-by-client-name", "id_reuse", DECISION,
        "A batch's outputs are looked up by the client's name: after an abort they are taken for those of "
        "whoever has the name now.",
        "open upstream: whoever was in the batch",
        ("https://github.com/vllm-project/vllm/issues/42492",
         "https://github.com/vllm-project/vllm/pull/42523"),
        {"output_life": newest_of_that_name}, bites=("window-async", "hybrid-pp2-async"),
        cases=("vllm-42492",),
    ),
    Fault(
        "output-lost-after-preemption", "preemption", DECISION,
        "After a preemption one output is thrown away as stale, whether or not a step was in flight: the "
        "first token of the resumed request is missing, and all that follow stand one place too early.",
        "as many as are in flight then, or none (Scheduler._preempt_request)",
        ("https://github.com/vllm-project/vllm/issues/42043",
         "https://github.com/vllm-project/vllm/pull/42117"),
        {"delivers": lambda since: since != 1}, bites=("crowded", "composed-tight"), harmless=("plain",),
        why_harmless="a pool that never preempts", cases=("vllm-42043",),
    ),
)  # fmt: skip
