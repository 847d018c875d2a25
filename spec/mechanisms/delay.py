"""The PP delay: kernels that run many steps after their own, and what their operands mean by then.

**Story.**  With pipeline stages, only the last one samples.  An earlier stage learns the verified tokens
``pp`` steps later and post-processes then: it corrects counts, keeps the last token and the drafts for the
request's next row, and copies recurrent states to boundary columns.  Until that moment batches have been
permuted and gathered ``pp`` times, requests have left, slots have been taken by others, ids have come back.
What survives is the *slot*: its source table row is only appended to while the request lives in it, and its
generation tells whether it still does.  Gathered tables, batch order and captured buffers do not survive.

**In the field.**  Constant-token loops on non-last stages: late copies walked the current gathered tables
with an old row map (https://github.com/vllm-project/vllm/issues/54173,
https://github.com/vllm-project/vllm/pull/55506); a rotating pool of tables under a captured graph is the
same corruption by another road; stages that run on optimistic positions
(https://github.com/vllm-project/vllm/issues/44697), or on drafts that nobody sent them
(https://github.com/vllm-project/vllm/pull/52295).

Sources: vLLM 0.33.0 ``v1/worker/gpu/pp_utils.py``, ``v1/worker/gpu/block_table.py``,
``v1/worker/mamba_utils.py``.
"""

from __future__ import annotations

from spec.rule import Rule

RULES = (
    Rule(
        "forward_position_exact", "consequence", "pp_delay",
        "Every rank computes a request from the position that verification has really reached.",
        "a forward computes a row", "https://github.com/vllm-project/vllm/issues/44697",
    ),
    Rule(
        "input_tokens_exact", "consequence", "pp_delay",
        "Every rank feeds a decoding request with the token that was sampled for it last and with the drafts "
        "that were proposed behind it.",
        "a forward computes a row whose last token was sampled",
        "https://github.com/vllm-project/vllm/pull/52295",
    ),
    Rule(
        "late_kernel_reads_slot_rows", "discipline", "pp_delay",
        "A kernel that runs after its own step finds its blocks through "
        "the request's slot, never through batch order.",
        "post-processing runs on an earlier stage",
        "v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel (from 0.32.0)",
    ),
    Rule(
        "late_row_still_occupied", "discipline", "pp_delay",
        "A late row that is not masked belongs to the occupant that its step computed.",
        "post-processing runs on an earlier stage", "v1/worker/gpu/pp_utils.py::PPHandler (slot generations)",
    ),
    Rule(
        "padded_rows_write_null", "discipline", "pp_delay",
        "Rows that pad a captured batch resolve to the null block.",
        "a padded row writes its state", "v1/worker/gpu/block_table.py::gather_block_tables",
    ),
    Rule(
        "slot_single_occupant", "discipline", "pp_delay",
        "A batch slot has one occupant, and only an occupant leaves it.",
        "a slot is taken or left", "v1/worker/gpu/states.py::RequestState",
    ),
    Rule(
        "steps_end_in_order", "discipline", "pp_delay",
        "Outputs are processed in the order in which their steps were scheduled.",
        "an output is processed", "v1/engine/core.py::step_with_batch_queue", core=("done",),
    ),
)  # fmt: skip
