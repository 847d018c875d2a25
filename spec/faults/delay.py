"""Faults of late kernels: rows, tables and pointers that mean something else by the time they are read."""

from __future__ import annotations

from typing import Any

from spec.faults.fault import DECISION, Fault
from spec.ops import Deref
from spec.reference.decisions import V2_ORDER

ISSUE = "https://github.com/vllm-project/vllm/issues/54173"
BY_SLOT = (
    "both copy kernels read the persistent tables by request slot (v1/worker/mamba_utils.py, from 0.32.0)"
)


def by_batch_index(index: int, slot: int) -> Deref:
    """The persistent table at the row of the batch."""
    return Deref("source", index)


def gathered(index: int, slot: int) -> Deref:
    """The tables of whichever step gathered last."""
    return Deref("gathered", index)


def never_filled(index: int, slot: int) -> Deref:
    """Tables of a dummy batch."""
    return Deref("gathered.1", index)


def order(*names: str) -> dict[str, Any]:
    """A permuted v2 step."""
    assert sorted(names) == sorted(V2_ORDER)
    return {"v2_order": names}


FAULTS = (
    Fault(
        "precopy-row-by-batch-index", "table_indexing", DECISION,
        "The pre-copy finds a request's row in the per-slot tables by its index in the batch.",
        BY_SLOT, (ISSUE, "https://github.com/vllm-project/vllm/pull/55506"),
        {"precopy_row": by_batch_index}, bites=("hybrid-pp1", "hybrid-pp2-async"), cases=("vllm-54173",),
    ),
    Fault(
        "row-by-batch-index", "table_indexing", DECISION,
        "Post-processing finds a request's row in the per-slot tables by its index in the batch.",
        BY_SLOT, (ISSUE, "https://github.com/vllm-project/vllm/pull/55506"),
        {"post_row": by_batch_index}, bites=("hybrid-pp2-async", "hybrid-pp1"),
    ),
    Fault(
        "table-bound-at-capture", "pp_delay", DECISION,
        "Post-processing reads the gathered tables whose pointer was captured once: by then another batch's.",
        BY_SLOT, (ISSUE, "https://github.com/vllm-project/vllm/issues/54199"),
        {"post_row": gathered}, bites=("hybrid-pp2-async", "hybrid-pp2"), harmless=("hybrid-pp1",),
        why_harmless="one stage: post-processing runs in its own step, before the tables are gathered again",
        cases=("vllm-backport-63",),
    ),
    Fault(
        "context-bound-by-profiling", "cuda_graph_capture", DECISION,
        "The copy context is bound by whoever calls first: profiling, with tables that no step fills.",
        "bound once and eagerly in initialize_kv_cache (v1/worker/gpu/model_runner.py)",
        ("https://github.com/vllm-project/vllm/pull/57807",),
        {"post_row": never_filled, "precopy_row": never_filled}, bites=("hybrid-pp1", "hybrid-pp2-async"),
    ),
    Fault(
        "context-bound-by-capture", "cuda_graph_capture", DECISION,
        "The copy context is bound during graph capture, to the gathered tables of the captured batch order.",
        "bound once and eagerly to the per-slot tables in initialize_kv_cache",
        ("https://github.com/vllm-project/vllm/pull/57807",),
        {"post_row": gathered, "precopy_row": gathered}, bites=("hybrid-pp2-async",),
        harmless=("hybrid-pp1",),
        why_harmless="pre-copy and, with one stage, post-processing run in the step that gathered the tables",
    ),
    Fault(
        "rotating-table-pool", "cuda_graph_capture", DECISION,
        "Gathered tables rotate through a pool; a captured graph goes "
        "on reading the one it was captured with.",
        "one buffer for life; late kernels do not read it at all",
        ("https://github.com/vllm-project/vllm/pull/55506",),
        {"gather_buffer": lambda step: "gathered" if step % 2 else "gathered.1"},
        bites=("plain", "hybrid-pp2-async"),
    ),
    Fault(
        "captured-tables-never-refreshed", "cuda_graph_capture", DECISION,
        "A replayed graph keeps the tables of the step it was captured in.",
        "tables are gathered into the captured buffer in every step",
        ("https://github.com/vllm-project/vllm/pull/44868",
         "https://github.com/vllm-project/vllm/pull/42947"),
        {"gather_buffer": lambda step: "gathered" if step == 1 else "gathered.1"},
        bites=("plain", "hybrid-pp1"), cases=("vllm-44868", "vllm-42947"),
    ),
    Fault(
        "state-indices-through-slots", "table_indexing", DECISION,
        "State indices are taken from the per-slot tables through the "
        "row map, where padded rows map to slot 0.",
        "they stay on the gathered tables, whose padded rows are null (compute_aligned_state_indices)",
        ("https://github.com/vllm-project/vllm/pull/55506",),
        {"index_row": lambda index, slot: Deref("source", slot),
         "padded_row": lambda index: Deref("source", 0)},
        bites=("hybrid-pp1", "hybrid-pp2-async"),
    ),
    Fault(
        "padding-is-the-last-slot", "cuda_graph_capture", DECISION,
        "Padded rows carry slot -1, which an index takes for the last slot.",
        "padded rows resolve to the null block, slot mappings to PAD",
        ("https://github.com/vllm-project/vllm/issues/43810",),
        {"padded_row": lambda index: Deref("source", -1)}, bites=("hybrid-pp2-async",),
        cases=("vllm-43810", "tokenspeed-700"),
    ),
    Fault(
        "padded-rows-not-cleared", "cuda_graph_capture", DECISION,
        "Only real rows are gathered: a padded row still shows the request that stood there before.",
        "gather_block_tables zeroes rows up to the padded count",
        ("https://github.com/vllm-project/vllm/pull/37728",
         "https://github.com/GeeeekExplorer/nano-vllm/issues/190"),
        {"gathers_padding": lambda rows, padded: rows}, bites=("hybrid-pp1", "hybrid-pp2-async"),
        cases=("vllm-37728", "nano-vllm-190"),
    ),
    Fault(
        "late-row-not-masked", "id_reuse", DECISION,
        "A late row is applied to its slot whoever lives there by now.",
        "slot generations mask it (v1/worker/gpu/pp_utils.py::PPHandler)", (ISSUE,),
        {"masks_late_row": lambda then, now: False}, bites=("hybrid-pp2-async", "hybrid-pp2"),
        harmless=("hybrid-pp1",), why_harmless="with one stage nothing is late",
    ),
    Fault(
        "generation-of-one-bit", "id_reuse", DECISION,
        "The tag that tells two occupants of a slot apart keeps one "
        "bit: every second one looks like the first.",
        "generations are full integers", ("https://github.com/NVIDIA/TensorRT-LLM/issues/17665",),
        {"masks_late_row": lambda then, now: then % 2 != now % 2}, bites=("slots", "hybrid-pp4-async"),
        harmless=("hybrid-pp1",), why_harmless="with one stage nothing is late",
        cases=("tensorrt-llm-17665",),
    ),
    Fault(
        "post-process-after-forward", "pp_delay", DECISION,
        "A stage applies the late tokens of an earlier step after its forward instead of before everything.",
        "update_pp_decode_requests is the first thing in a worker's step", (ISSUE,),
        order(
            "leave", "take", "update", "flush", "zero", "copy", "gather", "pre", "forward", "post", "after",
            "load",
        ),
        bites=("hybrid-pp2-async",), harmless=("hybrid-pp1",), why_harmless="with one stage nothing is late",
    ),
    Fault(
        "stages-on-optimistic-counts", "pp_delay", DECISION,
        "Accepted counts reach only the last stage; the others go on from optimistic positions.",
        "every stage takes rejected tokens off its count",
        ("https://github.com/vllm-project/vllm/issues/44697",),
        {"settles_computed": lambda late: not late}, bites=("hybrid-pp2", "hybrid-pp2-async"),
        harmless=("hybrid-pp1",), why_harmless="with one stage there is no other",
        cases=("vllm-44697", "vllm-57755"),
    ),
    Fault(
        "drafts-stay-on-the-last-stage", "pp_delay", DECISION,
        "The drafter runs on the last stage and its drafts stay there: the other stages verify what they had "
        "before, or zeroes.",
        "open upstream: drafts travel with the sampled tokens",
        ("https://github.com/vllm-project/vllm/pull/52295",),
        {"draft_row": lambda index, slot, late: -1 if late else index},
        bites=("hybrid-pp2-async", "hybrid-pp2", "composed-v1-pp2"), harmless=("hybrid-pp1",),
        why_harmless="with one stage there is no other", cases=("vllm-52295",),
    ),
    Fault(
        "drafts-of-another-row", "table_indexing", DECISION,
        "Drafts of the last step are taken by the row that a request has now, though they stand in the batch "
        "order of then.",
        "open upstream: by the row that it had",
        ("https://github.com/vllm-project/vllm/pull/43434",),
        {"draft_row": lambda index, slot, late: slot}, design="v1 async",
        bites=("v1-async", "composed-v1"), harmless=("plain",), why_harmless="no drafts",
        cases=("vllm-43434",),
    ),
    Fault(
        "last-token-of-another-row", "table_indexing", DECISION,
        "The last sampled token is taken by the row that a request has now, though tokens stand in the batch "
        "order of the step that sampled them.",
        "by the row that it had then (_prepare_input_ids)",
        ("https://github.com/vllm-project/vllm-gaudi/pull/642",),
        {"last_row": lambda index, slot: slot}, bites=("plain", "hybrid-pp1", "hybrid-pp2-async"),
        cases=("vllm-gaudi-642",),
    ),
    Fault(
        "new-ids-from-position-zero", "table_indexing", DECISION,
        "New block ids of a running request are written from the start of its row.",
        "appended behind the columns it has (BlockTables.append_block_ids)",
        ("https://github.com/vllm-project/vllm-ascend/pull/15674",),
        {"append_column": lambda length: 0}, bites=("plain", "hybrid-pp1"), cases=("vllm-ascend-15674",),
    ),
    Fault(
        "runs-ahead-of-post-processing", "pp_delay", DECISION,
        "A request is in a step again before every stage will have post-processed the one that sampled "
        "for it.",
        "one step later (async scheduling with stages)",
        ("v1/core/sched/async_scheduler.py::AsyncScheduler",),
        {"runs_ahead": lambda step, sampled_in, stages: step >= sampled_in + stages - 1},
        bites=("hybrid-pp2-async", "composed-pp4"), harmless=("hybrid-pp2",),
        why_harmless="sync: nothing runs ahead",
    ),
    Fault(
        "rejected-drafts-counted", "pp_delay", DECISION,
        "The scheduler's count keeps drafts that verification has rejected.",
        "taken off when the output is processed (update_from_output)",
        ("v1/core/sched/scheduler.py::Scheduler.update_from_output",),
        {"settled_count": lambda computed, rejected: computed}, bites=("composed", "hybrid-pp1"),
        harmless=("plain",), why_harmless="no drafts",
    ),
    Fault(
        "pinned-table-rewritten", "fence", DECISION,
        "Table rows are sent from one pinned buffer, which the host rewrites for the next step before the "
        "copy has read it.",
        "a fresh staging buffer each iteration", ("https://github.com/NVIDIA/TensorRT-LLM/pull/15546",),
        {"stages_afresh": lambda: False}, bites=("hybrid-pp2-async",), cases=("tensorrt-llm-15546",),
    ),
)  # fmt: skip
