"""Accepted tokens: counts that travel to the host and must find their request again.

**Story.**  How many tokens a step accepted decides from which scratch column, and from which offset of the
convolution window, the next step goes on.  The v2 runner keeps the count on the device, by slot.  The v1
runner copies it to the host on a stream of its own; meanwhile the host removes, condenses and swaps batch
rows for the next step.  A copy that lands in those very rows is applied before or after the permutation, as
the wind blows.  Repaired: it lands in a buffer of the runner's own, and after the wait each request takes
the count of the row it had *then*; a new, resumed or same-id request starts from 1.

**In the field.**  https://github.com/vllm-project/vllm/issues/51571 (rows rewritten before they are read),
https://github.com/vllm-project/vllm/pull/47199, https://github.com/vllm-project/vllm/issues/42655 (stale
row maps), https://github.com/vllm-project/vllm/pull/50021 (a count of zero).

Sources: vLLM 0.33.0 ``v1/worker/gpu_model_runner.py::_update_states_after_model_execute``,
``_prepare_inputs``.
"""

from __future__ import annotations

from spec.rule import Rule

RULES = (
    Rule(
        "accepted_count_belongs", "discipline", "accepted_state",
        "The count that a row takes is its own request's count of the last step, or 1 for a new life.",
        "the host hands out accepted counts", "https://github.com/vllm-project/vllm/issues/51571",
    ),
    Rule(
        "accepted_offset_in_range", "discipline", "accepted_state",
        "A request goes on from an offset between 0 and K.",
        "a recurrent forward starts past position 0", "https://github.com/vllm-project/vllm/pull/50021",
    ),
)  # fmt: skip
