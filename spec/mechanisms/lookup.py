"""Hit lookup: what a request must leave behind, and what the next one must find.

**Story.**  A hit is as long as every group can serve, and it leaves a token to compute.  That says how long a
hit may be.  How long it *must* be depends on what earlier requests left: a policy that never finds anything
is safe and useless.  What one finished request leaves for certain follows from the geometry alone.
Attention blocks stay under their keys up to the *publish limit*.  A recurrent state stays where the *split*
ends a chunk, whatever the budgets of the steps were.  A host chunk is stored if the request held all of it
when its last token came.

**In the field.**  Hits that are always empty: the drop applied to every group and in every round
(https://github.com/vllm-project/vllm/issues/51771, https://github.com/vllm-project/vllm/pull/57616), blocks
on the host that no lookup sees (https://github.com/vllm-project/vllm/issues/53498).

Sources: vLLM 0.33.0 ``v1/core/kv_cache_coordinator.py::find_longest_cache_hit``,
``v1/core/sched/scheduler.py::Scheduler._mamba_block_aligned_split``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec import lookup
from spec.arith import align, coverage
from spec.config import Config, Group, Kind
from spec.events import Event
from spec.rule import Rule

if TYPE_CHECKING:
    from spec.world import World


@dataclass(frozen=True, slots=True)
class Served:
    """How a request was served that finished without being preempted."""

    prompt: int  # tokens
    computed: int  # tokens, at its end
    began: int  # tokens that were in place when it began
    alone: bool  # no other request computed in the steps of its prefill


def left_in_place(config: Config, served: Served, *, host: bool) -> int:
    """Tokens that an identical prompt must find in place after a request that nobody disturbed, on the device
    or (``host``) in the host tier: the longest hit that the split and the publish limit leave for certain.

    A hit is a multiple of every group's unit (block, or host chunk), and stays below the prompt by what a
    hit must leave: a token, the tokens that a hash covers past its block, or the unit that is dropped
    (``checkpoint_position``)."""
    if not config.prefix_caching or (host and chunks_stored(config, served) >= config.tier_chunks):
        return 0
    per = config.blocks_per_chunk if host else 1
    unit, drops = config.scheduler_block_tokens * per, bool(dropping(config, host=host))
    longest = align.checkpoint_position(served.prompt, unit, drops, config.hash_lookahead_tokens)
    for hit in range(longest, 0, -unit):
        if all(
            keys_reach(config, group, served, hit, host=host)
            and (group.kind is not Kind.MAMBA or state_left(config, group, served, hit, host=host))
            and (not host or chunks_held(config, group, served, hit))
            for group in config.groups
        ):
            return hit
    return 0


def dropping(config: Config, *, host: bool) -> tuple[Group, ...]:
    """Groups that drop a unit of each hit.  The connector goes by the drafter's mark alone
    (``OffloadingConnectorScheduler``), the pool drops nothing where ``tail_drop`` is off."""
    marked = tuple(group for group in config.groups if group.drafter)
    return marked if host and marked else config.dropping_groups()


def keys_reach(config: Config, group: Group, served: Served, hit: int, *, host: bool) -> bool:
    """Whether the publish limit covers all that the group is asked for: the hit, and one unit more if its
    tail is dropped.

    On the device keys may lag behind the computed tokens by those whose draft-layer cache is rewritten after
    a rejection (``KVCacheCoordinator.get_num_cacheable_tokens``); host chunks are stored by computed tokens
    (``_calc_num_offloadable_tokens``)."""
    dropped = group in dropping(config, host=host) and group.kind is not Kind.MAMBA
    unit = group.block_tokens * (config.blocks_per_chunk if host else 1)
    return hit + unit * dropped + (0 if host else config.reprefilled_tokens) <= served.computed


def state_left(config: Config, group: Group, served: Served, hit: int, *, host: bool) -> bool:
    """Whether the split is certain to end a chunk at the hit, and the state's column is held until its key
    may be published.

    A chunk always ends at the prompt's checkpoint; at every boundary only if no step holds two blocks.  The
    drafter's reserve moves the end of a chunk that leaves less than it reads ahead.  Where keys lag, the key
    of a state comes with the next chunk, before the column is freed, if that chunk is as long as the lag: in
    steps that the request has for itself, it is, unless it stops for a tail inside a block.  A request stores
    only the states that it has left itself: the one that it began from came from elsewhere."""
    block, drops = group.block_tokens, bool(config.dropping_groups())
    checkpoint = align.checkpoint_position(served.prompt, block, drops, config.hash_lookahead_tokens)
    tail = align.checkpoint_position(
        served.prompt, config.hash_block_tokens, drops, config.hash_lookahead_tokens
    )
    stop = tail if config.partial_hits and hit == checkpoint < tail else served.prompt
    lag = config.reprefilled_tokens
    return (
        (hit == checkpoint or (hit < checkpoint and config.step_tokens < 2 * block))
        and served.prompt - hit >= config.prefill_lookahead_tokens
        and (not lag or (served.alone and stop - hit >= lag))
        and (not host or hit > served.began)
    )


def chunks_held(config: Config, group: Group, served: Served, hit: int) -> bool:
    """Whether the request is certain to have held, whole, every host chunk that the hit is asked for.

    A chunk is stored when it is full.  By then no column of it may have been left behind, even if its last
    token came in a step of its own; and the columns before those that a local hit reads were never held."""
    size = coverage.chunk_tokens(group.block_tokens, config.blocks_per_chunk)
    end = coverage.demand_end_chunk(hit, size) + (group in dropping(config, host=True))
    first = 0
    if group.kind is Kind.WINDOW:
        first = max(0, coverage.lookup_first_chunk(hit, 0, group.window_tokens, group.extra_tokens, size))
    elif group.kind is Kind.CHUNKED:
        window = coverage.chunked_window_chunks(group.window_tokens, size)
        first = max(0, coverage.first_checked_chunk(hit, 0, window, size))
    elif group.kind is Kind.MAMBA:
        return True  # a state is one block, stored by its hand-off
    return all(
        max(first_held(group, (chunk + 1) * size - 1, group.extra_tokens), first_held(group, served.began, 0))
        <= chunk * config.blocks_per_chunk
        for chunk in range(first, end)
    )


def must_find(config: Config, served: Served, local: int, *, device: bool, host: bool) -> int:
    """Tokens that an identical prompt must find, which found ``local`` of them on the device: what is left
    there and on the host, as far as each (``device``, ``host``) has lost nothing.  The host counts if it has
    a largest chunk or more beyond the local hit."""
    there = left_in_place(config, served, host=True) if host else 0
    return max(
        left_in_place(config, served, host=False) if device else 0,
        there if there - local >= largest_chunk(config) else 0,
    )


def largest_chunk(config: Config) -> int:
    """Tokens of the largest host chunk: a load that would bring less is not asked for
    (``offloading/scheduler.py::_lookup_complete_chunks``)."""
    return max(coverage.chunk_tokens(group.block_tokens, config.blocks_per_chunk) for group in config.groups)


def chunks_stored(config: Config, served: Served) -> int:
    """Host chunks that the request may want to store, of all groups: more than the tier has at once are
    refused (``CPUOffloadingManager.prepare_store``)."""
    return sum(
        served.computed // coverage.chunk_tokens(group.block_tokens, config.blocks_per_chunk)
        for group in config.groups
    )


def first_held(group: Group, tokens: int, extra: int) -> int:
    """The first column that a request at ``tokens`` tokens holds of an attention group; ``extra``: tokens
    that a window retains beyond itself."""
    if group.kind is Kind.WINDOW:
        return coverage.first_retained_column(tokens, group.window_tokens, extra, group.block_tokens)
    if group.kind is Kind.CHUNKED:
        return coverage.skipped_tokens_chunked(tokens, group.window_tokens) // group.block_tokens
    return 0


def resend_is_hit(world: World, event: Event) -> None:
    """Judged at every admission: what an identical, complete request left behind is found again."""
    _, uid, local, total = event
    config, client = world.config, world.clients[uid]
    first = world.kept.get(tuple(client.tokens[: client.prompt]))
    if first is None or first == uid or len(client.tokens) > client.prompt:
        world.tally["resend_is_hit"][0] += 1
        return
    before = world.clients[first]
    served = Served(before.prompt, before.prompt + before.outputs - 1, before.began_at, not before.shared)
    device, host = (
        now == then for now, then in zip((world.lost_local, world.lost_host), before.lost, strict=True)
    )
    host &= before.crowd + chunks_stored(config, served) <= config.tier_chunks
    host &= config.offload and not any(t.uid == first for t in world.transfers.values())
    want = must_find(config, served, local, device=device, host=host)
    world.judge(
        "resend_is_hit", want > 0, total >= want,
        lambda: f"{uid}: hit {total} of {client.prompt} tokens, of which {first} left {want} in place",
    )  # fmt: skip


def hit_is_longest(world: World, event: Event) -> None:
    """Judged at every admission: of all that went under keys in earlier steps, whoever left it, nothing was
    overlooked.  Hits that end inside a block are not asked for: 0.33.0 cuts a full block for them, the
    reference takes only one that was published at that very token."""
    _, uid, local, _ = event
    config, request = world.config, world.book.requests[uid]
    line, known = request.line, request.known
    ahead, unit = config.hash_lookahead_tokens, config.hash_block_tokens
    ends = range(unit, known - ahead + 1, unit)
    cached = tuple(
        frozenset(n for n in ends if world.lies_under((g, n, line[n + ahead])))
        for g in range(len(config.groups))
    )
    want = lookup.local_hit(config, cached, known) if config.prefix_caching else 0
    whole = want % config.scheduler_block_tokens == 0
    world.judge(
        "hit_is_longest", want > 0 and whole, local >= want or not whole,
        lambda: f"{uid}: {local} of {known} tokens are hit in the pool, which has {want} under keys",
    )  # fmt: skip


def finished_is_cached(world: World, event: Event) -> None:
    """Judged when a request has all its tokens: full attention keeps every block under its key that was full
    when its last row was scheduled, but for those that the drafter may still rewrite."""
    _, uid, why = event
    config, client = world.config, world.clients[uid]
    ahead = config.hash_lookahead_tokens
    limit = min(client.due - ahead, client.due - config.reprefilled_tokens)
    missing = [
        (group.name, n)
        for g, group in enumerate(config.groups)
        if group.kind is Kind.FULL
        for n in range(group.block_tokens, limit + 1, group.block_tokens)
        if not world.book.cached((g, n, world.book.requests[uid].line[n + ahead]))
    ]
    served = config.prefix_caching and why == "length" and not client.reset
    world.judge(
        "finished_is_cached", served and limit > 0, not served or not missing,
        lambda: f"{uid} is served, and no block is under the key of its prefixes {missing}",
    )  # fmt: skip


def reset_forgets(world: World, scope: str, held: bool) -> None:
    """Judged behind the answer to a reset.  A pool of which somebody holds blocks may refuse, as a whole
    (``BlockPool.reset_prefix_cache``)."""
    keys, chunks = len(world.book.core.key), len(world.book.tier)
    world.judge(
        "reset_forgets", not held or scope == "all", (held or not keys) and (scope != "all" or not chunks),
        lambda: f"after the reset {keys} blocks and {chunks} host chunks are still under keys",
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


RULES = (
    Rule(
        "resend_is_hit", "consequence", "hit_lookup",
        "An identical prompt finds what the first one must have left, unless room was needed, a transfer "
        "failed or caches were reset: no reuse is lost without a reason.",
        "a prompt that was served before, with everything kept, is admitted",
        "https://github.com/vllm-project/vllm/pull/57616; https://github.com/vllm-project/vllm/issues/53498",
        on=("hit",), judges=resend_is_hit,
    ),
    Rule(
        "hit_is_longest", "consequence", "hit_lookup",
        "A request finds all that the pool has of its tokens, whoever left it there: the longest prefix that "
        "every group can serve.",
        "a request is admitted, and the pool has a prefix that it may reuse",
        "https://github.com/vllm-project/vllm/pull/57616; "
        "v1/core/kv_cache_coordinator.py::HybridKVCacheCoordinator.find_longest_cache_hit",
        on=("hit",), judges=hit_is_longest,
    ),
    Rule(
        "finished_is_cached", "consequence", "hit_lookup",
        "A request that got all its tokens, preempted on the way or not, leaves all its full blocks under "
        "keys: whoever continues it finds them.",
        "a request ends with all its tokens, and no reset came in between",
        "https://github.com/vllm-project/vllm/issues/53498; "
        "v1/core/kv_cache_manager.py::KVCacheManager.allocate_slots",
        on=("finish",), judges=finished_is_cached,
    ),
    Rule(
        "reset_forgets", "consequence", "hit_lookup",
        "After a reset nothing is found that lay there before: it may have been computed with other weights.",
        "nobody holds a block when the caches are reset, or the host tier is reset too",
        "v1/core/block_pool.py::BlockPool.reset_prefix_cache; "
        "offloading/scheduler.py::OffloadingConnectorScheduler.reset_cache",
    ),
    Rule(
        "hit_below_known", "discipline", "hit_lookup",
        "A request starts with at least one token to compute, whatever was hit or loaded.",
        "a request is admitted, or starts, with a hit",
        "v1/core/kv_cache_manager.py::KVCacheManager.get_computed_blocks",
        on=("hit", "start"), judges=hit_leaves_a_token,
    ),
)  # fmt: skip
