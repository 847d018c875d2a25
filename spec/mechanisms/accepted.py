"""Accepted tokens: counts that travel to the host and must find their request again, and what clients get.

**Story.**  How many tokens a step accepted decides from which scratch column, and from which offset of the
convolution window, the next step goes on.  The v2 runner keeps the count on the device, by slot.  The v1
runner copies it to the host on a stream of its own; meanwhile the host removes, condenses and swaps batch
rows for the next step.  A copy that lands in those very rows is applied before or after the permutation, as
the wind blows.  Repaired: it lands in a buffer of the runner's own, and after the wait each request takes
the count of the row it had *then*; a new, resumed or same-id request starts from 1.

The tokens themselves reach the scheduler steps later.  By then their request may be preempted, gone, or back
under the same name: an output that is thrown away with the preemption, or given to whoever has the name now,
leaves every page right and the answer wrong.

**In the field.**  https://github.com/vllm-project/vllm/issues/51571 (rows rewritten before they are read),
https://github.com/vllm-project/vllm/pull/47199, https://github.com/vllm-project/vllm/issues/42655 (stale
row maps), https://github.com/vllm-project/vllm/pull/50021 (a count of zero),
https://github.com/vllm-project/vllm/issues/42043 (the first valid output after a preemption is dropped),
https://github.com/vllm-project/vllm/issues/42492 (an old batch's output under a name that is used again).

Sources: vLLM 0.33.0 ``v1/worker/gpu_model_runner.py::_update_states_after_model_execute``,
``_prepare_inputs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.events import Event
from spec.rule import Rule

if TYPE_CHECKING:
    from spec.world import World


def output_exact(world: World, event: Event) -> None:
    """Judged when a step's tokens are delivered, and when a request ends whose client has not gone away."""
    kind, uid = event[0], event[1]
    request, client = world.book.requests.get(uid), world.clients[uid]
    if request is None or (kind == "finish" and client.aborted):
        world.tally["output_exact"][0] += 1
        return
    whole = client.prompt + client.outputs
    if kind == "finish":
        world.judge(
            "output_exact", True, request.known == whole,
            lambda: f"{uid} ends with {request.known - client.prompt} of {client.outputs} tokens",
        )  # fmt: skip
        return
    new, first = event[3], request.known
    due = tuple(client.tokens[first : min(first + len(new), whole)])
    world.judge(
        "output_exact", bool(new), new == due,
        lambda: f"{uid} gets {new} behind its first {first} tokens; sampled for it: {due}",
    )  # fmt: skip


RULES = (
    Rule(
        "output_exact", "consequence", "accepted_state",
        "A client gets the tokens that were sampled for it, each once and in order, and all of them if it "
        "does not go away.",
        "tokens are delivered, or a request ends that was not aborted",
        "https://github.com/vllm-project/vllm/issues/42043; https://github.com/vllm-project/vllm/issues/42492",
        on=("tokens", "finish"), judges=output_exact,
    ),
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
