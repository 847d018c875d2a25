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

from spec.arith import align
from spec.config import Kind
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


def hit_leaves_a_token(world: World, event: Event) -> None:
    """Judged at every hit, and when the request starts: a load may bring all tokens, of which the last is
    computed again (vLLM 0.33.0, ``Scheduler._update_waiting_for_remote_kv``)."""
    if event[0] == "start":
        _, uid, computed = event
        known = world.book.requests[uid].known
        world.judge(
            "hit_below_known", computed > 0, computed < known,
            lambda: f"{uid} starts at {computed} of {known} tokens",
        )  # fmt: skip
        return
    _, uid, local, total = event
    known = world.book.requests[uid].known
    good = 0 <= local <= total <= known and local < known
    world.judge(
        "hit_below_known", total > 0, good, lambda: f"{uid}: hit {local} then {total} of {known} tokens"
    )


def window_columns_present(world: World, event: Event) -> None:
    """Judged at every scheduled row."""
    _, uid, c, q, _ = event
    request = world.book.requests[uid]
    processed = request.processed if request.flying else c
    for g, group in enumerate(world.config.groups):
        if group.kind is Kind.MAMBA:
            continue
        first = 0
        if group.kind is Kind.WINDOW:
            first = max(0, processed - group.window_tokens + 1)
        elif group.kind is Kind.CHUNKED:
            first = processed - processed % group.window_tokens
        cols = request.cols[g]
        missing = [
            col for col in range(first // group.block_tokens, (c + q - 1) // group.block_tokens + 1)
            if col >= len(cols) or not cols[col]
        ]  # fmt: skip
        world.judge(
            "read_columns_present", True, not missing,
            lambda group=group, missing=missing: (  # type: ignore[misc]
                f"{uid} computes {c} to {c + q}: group {group.name} lacks columns {missing}"
            ),
        )  # fmt: skip


def resend_is_hit(world: World, event: Event) -> None:
    """Judged at every admission: what an identical, complete request left behind is found again.

    For the host tier only if that request computed everything itself: one that hit locally holds no more of a
    window than the hit reads, without what a drafter re-reads, and can store no more."""
    _, uid, _, total = event
    config, client = world.config, world.clients[uid]
    first = world.kept.get(tuple(client.tokens[: client.prompt]))
    before = world.tally["resend_is_hit"]
    if first is None or first == uid or not config.prefix_caching or len(client.tokens) > client.prompt:
        before[0] += 1
        return
    if world.mamba_block and config.reprefilled_tokens:  # chunks may have to end elsewhere, and keys lag
        before[0] += 1
        return
    stored = config.offload and not any(t.uid == first for t in world.transfers.values())
    stored &= world.clients[first].began_at == 0
    want = 0
    for kept, per in ((not world.lost_local, 1), (stored and not world.lost_host, config.blocks_per_chunk)):
        unit = config.scheduler_block_tokens * per
        drops = bool(config.dropping_groups())
        hit = align.checkpoint_position(client.prompt, unit, drops, config.hash_lookahead_tokens)
        state = hit
        if world.mamba_block:
            state = align.checkpoint_position(
                client.prompt, world.mamba_block, drops, config.hash_lookahead_tokens
            )
        if kept and state == hit:
            want = max(want, hit)
    world.judge(
        "resend_is_hit", want > 0, total >= want,
        lambda: f"{uid}: hit {total} of {client.prompt} tokens, of which {first} left {want} in place",
    )  # fmt: skip


def handed_table_serves(world: World, event: Event) -> None:
    """Judged when a finished request's table is handed to the connector."""
    _, uid, g, blocks = event
    group, client = world.config.groups[g], world.clients[uid]
    request = world.book.requests[uid]
    start, tokens, verified = client.last
    if request.flying or not verified or not request.computed:  # nothing computed since it was last admitted
        world.tally["handed_table_serves"][0] += 1
        return
    computed = request.computed
    if group.kind is not Kind.MAMBA:
        beyond = [col for col, block in enumerate(blocks) if block and col * group.block_tokens >= computed]
        world.judge(
            "handed_table_serves", True, not beyond,
            lambda: f"{uid}, group {group.name}: columns {beyond} lie past the {computed} computed tokens",
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
        "resend_is_hit", "consequence", "hit_lookup",
        "While nothing was evicted, an identical prompt finds what the first one left: no reuse is lost.",
        "a prompt that was served before, with everything kept, is admitted",
        "https://github.com/vllm-project/vllm/pull/57616; https://github.com/vllm-project/vllm/issues/53498",
        on=("hit",), judges=resend_is_hit,
    ),
    Rule(
        "handed_table_serves", "consequence", "coverage",
        "A table handed to a connector ends attention at the computed "
        "frontier and includes the column of the final state.",
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
        "hit_below_known", "discipline", "hit_lookup",
        "A request starts with at least one token to compute, whatever was hit or loaded.",
        "a request is admitted, or starts, with a hit",
        "v1/core/kv_cache_manager.py::KVCacheManager.get_computed_blocks",
        on=("hit", "start"), judges=hit_leaves_a_token,
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
