"""Coverage: what a hit demands must be what lookup checked and what the store kept.

**Story.**  A hit over several groups is as long as every group can serve: full attention from the start, a
window its last tokens, a recurrent group one state.  For an external hit the allocator gives every group
fresh blocks from the first retained column on, and every one of them must be loaded.  A drafter of several
modules re-reads the last K - 1 tokens with their windows after a rejection, so a window group *retains*
extra tokens; the extra columns are then demanded by a restore too.  Lookup, the check against loads in
flight, and the store's mask each have to count them.

**In the field.**  64 tokens hit, blocks of 16, window 32, 3 extra: restore names chunks 1 to 3, lookup had
checked 2 and 3, and the engine died on an assertion after the hit was admitted
(https://github.com/vllm-project/vllm/issues/56701, https://github.com/vllm-project/vllm/pull/56709).

Sources: vLLM 0.33.0 ``.../offloading/config.py``, ``.../offloading/scheduler.py::_lookup_complete_chunks``,
``v1/core/kv_cache_coordinator.py::find_longest_cache_hit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.config import Group, Kind
from spec.events import Event
from spec.rule import Rule

if TYPE_CHECKING:
    from spec.world import World


def demand_was_looked_up(world: World, event: Event) -> None:
    """Judged at every load that is created."""
    _, _, way, uid, chunks = event
    if way != "load":
        return
    for key, _, _ in chunks:
        seen = key in world.looked.get(uid, ())
        world.judge(
            "demand_within_lookup", True, seen,
            lambda key=key: f"{uid} loads {key}, which lookup did not check",  # type: ignore[misc]
        )  # fmt: skip


def window_columns_present(world: World, event: Event) -> None:
    """Judged at every scheduled row."""
    _, uid, c, q, _ = event
    request = world.book.requests[uid]
    processed = request.processed if request.flying else c
    for g, group in enumerate(world.config.groups):
        if group.kind is Kind.MAMBA:
            continue
        cols, first = request.cols[g], first_read(group, processed) // group.block_tokens
        missing = [
            col for col in range(first, (c + q - 1) // group.block_tokens + 1)
            if col >= len(cols) or not cols[col]
        ]  # fmt: skip
        world.judge(
            "read_columns_present", True, not missing,
            lambda group=group, missing=missing: (  # type: ignore[misc]
                f"{uid} computes {c} to {c + q}: group {group.name} lacks columns {missing}"
            ),
        )  # fmt: skip


def first_read(group: Group, position: int) -> int:
    """The first position that a token at ``position`` reads in an attention group."""
    if group.kind is Kind.WINDOW:
        return max(0, position - group.window_tokens + 1)
    if group.kind is Kind.CHUNKED:
        return position - position % group.window_tokens
    return 0


def handed_table_serves(world: World, event: Event) -> None:
    """Judged when a finished request's table is handed to the connector: whoever goes on from it reads the
    history of the next token, and the final state.

    A request that was aborted before it computed anything serves nobody; one that finished while it was
    preempted has to be served all the same."""
    _, uid, g, blocks = event
    group, client = world.config.groups[g], world.clients[uid]
    request = world.book.requests[uid]
    start, tokens, verified = client.last
    computed = request.computed or (0 if client.aborted else request.known - 1)
    if request.flying or not verified or not computed:
        world.tally["handed_table_serves"][0] += 1
        return
    if group.kind is not Kind.MAMBA:
        beyond = [col for col, block in enumerate(blocks) if block and col * group.block_tokens >= computed]
        read = range(first_read(group, computed) // group.block_tokens, -(-computed // group.block_tokens))
        missing = [col for col in read if col >= len(blocks) or not blocks[col]]
        world.judge(
            "handed_table_serves", True, not beyond and not missing,
            lambda: (
                f"{uid}, group {group.name}, {computed} computed tokens: columns {missing} are missing, "
                f"columns {beyond} lie past them"
            ),
        )  # fmt: skip
        return
    running = (start + tokens - 1) // group.block_tokens
    decode = start >= client.prompt
    col = (
        running + verified - 1
        if decode and computed % group.block_tokens
        else (computed - 1) // group.block_tokens
    )
    found = blocks[col] if col < len(blocks) else 0
    world.judge(
        "handed_table_serves", True, found != 0,
        lambda: (
            f"{uid}, group {group.name}: column {col}, which holds the final state, "
            f"is not among {len(blocks)}"
        ),
    )  # fmt: skip


RULES = (
    Rule(
        "handed_table_serves", "consequence", "coverage",
        "A table handed to a connector holds what the next token reads: attention up to the computed "
        "frontier and not past it, and the column of the final state.",
        "a request finishes with no step in flight",
        "v1/core/kv_cache_manager.py::KVCacheManager.get_block_ids_for_computed_tokens",
        on=("handoff",), judges=handed_table_serves,
    ),
    Rule(
        "demand_within_lookup", "discipline", "coverage",
        "Every chunk that a load names was seen present by the lookup that admitted the hit.",
        "a load is created", "https://github.com/vllm-project/vllm/pull/56709",
        on=("job",), judges=demand_was_looked_up,
    ),
    Rule(
        "read_columns_present", "discipline", "coverage",
        "Every attention column that a scheduled row reads or writes holds a block.",
        "a row is scheduled",
        "v1/core/single_type_kv_cache_manager.py::SlidingWindowManager.get_num_skipped_tokens",
        on=("row",), judges=window_columns_present,
    ),
    Rule(
        "drafter_reads_exact", "consequence", "coverage",
        "After a rejection, a drafter of several modules finds its retained history intact.",
        "a multi-module drafter re-reads after a rejection",
        "https://github.com/vllm-project/vllm/issues/56701",
    ),
)  # fmt: skip
