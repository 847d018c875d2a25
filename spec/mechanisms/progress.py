"""Progress: nothing gets stuck, nothing is left over, nobody stops with an error.

**Story.**  Once the adversary is quiet (every stream runs, every transfer ends and is reported, every
output is processed, and the engine goes on scheduling), all requests finish, all transfers are settled, all
fences clear, all blocks are free. An error that the code raises by itself, an assertion among them, is a
verdict too.

**In the field.**  Held blocks never released because a peer never reports
(https://github.com/vllm-project/vllm/issues/46283); a lookup that answers *later* for ever; assertions that
kill the engine (https://github.com/vllm-project/vllm/issues/56396).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.rule import Rule
from spec.waits import deadlock

if TYPE_CHECKING:
    from spec.world import World


def somebody_waits(world: World) -> bool:
    """Whether the head of some stream cannot run."""
    return any(ops and world.waits(ops[0], rank) for rank in world.ranks for ops in rank.streams.values())


RULES = (
    Rule(
        "policy_raises_no_error", "consequence", "progress",
        "The code does not stop with an error of its own.",
        "a question is asked", "https://github.com/vllm-project/vllm/issues/56396",
    ),
    Rule(
        "wait_graph_acyclic", "consequence", "progress",
        "No stream waits, through others, for itself, nor for what nobody has enqueued.",
        "the head of some stream is blocked", "https://github.com/vllm-project/vllm/issues/46283",
        parts=("streams", "steps"), applies=somebody_waits, holds=deadlock,
    ),
    Rule(
        "everything_drains", "consequence", "progress",
        "When the adversary is quiet, every request finishes and everything in flight settles.",
        "a quiet phase", "v1/engine/core.py; https://github.com/vllm-project/vllm/issues/46283",
    ),
    Rule(
        "nothing_left_when_idle", "consequence", "progress",
        "An idle engine holds no block, and no host chunk is still written or read.",
        "a quiet phase has ended", "https://github.com/sgl-project/sglang/issues/27789",
    ),
)  # fmt: skip
