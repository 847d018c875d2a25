"""What a prompt leaves in the caches and what a later prompt finds there: the scans over data.

The formulas (windows, alignment, reachability) are in ``spec.arith``; here are the loops that run over what
is present.  Two tiers are scanned: the pool of blocks (*local*) and the offload tier's chunks (*offload*).

An *entry* is known by the tokens up to which it reaches: block p of a group reaches (p + 1) * block tokens,
a chunk its last block's, a Mamba state exactly its tokens.  So what is present is one set of such *ends* for
each group, and a prompt that shares s tokens with an earlier one sees the ends up to s (less the hash
lookahead).  Eviction, jobs in flight and requests are left to the machines: here a prompt was processed
whole, nothing was evicted, and every store was completed.

Retention is dense: ``prefix_cache_retention_interval = None``.  Window groups then keep what hits at every
multiple of the alignment need, Mamba groups every boundary that has a state.  The default of 0.30.0 to 0.33.0
is 0: these groups keep only what hits at the prompt's replay boundaries need (the last multiple of the
alignment below the prompt's length; in the pool, with tail drop, one scheduler block below that, and below
the last one at or below the length), and at a junction, where the request's own lookup found a prefix that
some group had and another had not.  A number n adds what hits at the multiples of n need.  Full and
chunked-local groups are always dense.  So under 0 the *second* of two prompts with a common prefix finds
nothing of it in such groups unless the prefix reaches the first prompt's replay boundary; it marks the
junction, and a third may find that.

A hit is common to all groups.  Full attention must have everything below it, a window group the last blocks
of its window, chunked-local attention the current attention chunk, a Mamba group the one state at the hit.
Sources are functions of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spec import arith
from spec.config import Config, Group, Kind

Ends = tuple[frozenset[int], ...]
"""For each group the ends, in tokens, of the entries that are present."""


@dataclass(frozen=True, slots=True)
class Left:
    """What one request left behind: ``local`` in the pool, ``offload`` in the tier."""

    local: Ends
    offload: Ends


# -- units ---------------------------------------------------------------------------------------------------


def fine_grained(config: Config) -> bool:
    """Whether a hit may end inside a block, at a hash boundary.

    Source: ``v1/core/kv_cache_utils.py::partial_hash_hits_enabled``: some Mamba block must be larger than the
    hash block, and every other group must be able to look inside a block, which window and chunked-local
    groups are not.
    """
    larger = any(g.kind is Kind.MAMBA and g.block_tokens > config.hash_block_tokens for g in config.groups)
    coarse = (g for g in config.groups if g.kind in (Kind.WINDOW, Kind.CHUNKED))
    return larger and all(g.block_tokens == config.hash_block_tokens for g in coarse)


def local_alignment_tokens(config: Config) -> int:
    """What every local hit is a multiple of: the hash block if fine-grained, else the lcm of the blocks."""
    return config.hash_block_tokens if fine_grained(config) else config.scheduler_block_tokens


def chunk_tokens(config: Config, group: Group) -> int:
    """Tokens of one chunk of a group in the offload tier."""
    return arith.chunk_tokens(group.block_tokens, config.blocks_per_chunk)


def store_alignment_tokens(config: Config) -> int | None:
    """Tokens of which the store expects hits to be multiples; None: it keeps every chunk.

    Source: ``offloading/config.py::build_offloading_config``: the full-attention chunk if all full groups
    agree on it, the largest chunk if there is no full group.
    """
    full = {chunk_tokens(config, group) for group in config.groups if group.kind is Kind.FULL}
    if len(full) > 1:
        return None
    return full.pop() if full else max(chunk_tokens(config, group) for group in config.groups)


def drops(config: Config, group: Group) -> bool:
    """Whether lookups of this group drop a unit; the Mamba finder ignores the drop by design."""
    return group in config.dropping_groups() and group.kind is not Kind.MAMBA


def _spec(group: Group) -> tuple[Kind, int, int, int]:
    """What two groups must share to be looked up as one (``verify_and_split_kv_cache_groups``)."""
    return group.kind, group.block_tokens, group.window_tokens, group.extra_tokens


def local_drops(config: Config, group: Group) -> bool:
    """Whether lookups in the pool drop a unit: the group drops, or one that is looked up together with it."""
    return any(drops(config, other) for other in config.groups if _spec(other) == _spec(group))


def drop_margin_tokens(config: Config, group: Group) -> int:
    """Tokens past a local hit that a dropping group must have (``eagle_proof_margin``)."""
    if fine_grained(config) and group.block_tokens > config.hash_block_tokens:
        return config.hash_block_tokens
    return group.block_tokens


# -- what a request leaves -----------------------------------------------------------------------------------


def every_state(config: Config, group: Group, tokens: int) -> Iterable[int]:
    """States that prefilling ``tokens`` in steps of one block leaves: at every boundary."""
    return range(group.block_tokens, tokens + 1, group.block_tokens)


def one_state(config: Config, group: Group, tokens: int) -> Iterable[int]:
    """States that prefilling ``tokens`` in one step leaves: the checkpoint's, where the split cuts, and that
    of the end if it is a boundary.
    """
    drop = bool(config.dropping_groups())
    at = arith.checkpoint_position(tokens, group.block_tokens, drop, config.hash_lookahead_tokens)
    end = arith.round_down(tokens, group.block_tokens)
    return sorted({at, end if end == tokens else 0} - {0})


States = Callable[[Config, Group, int], Iterable[int]]


def left_by(config: Config, prompt_tokens: int, known_tokens: int, states: States = every_state) -> Left:
    """What a finished request left: a prompt of ``prompt_tokens`` within ``known_tokens`` verified tokens."""
    eligible = prompt_tokens if config.offload_prompt_only else known_tokens
    return Left(
        tuple(
            frozenset(_cached(config, group, prompt_tokens, known_tokens, states)) for group in config.groups
        ),
        tuple(frozenset(_stored(config, group, eligible, states)) for group in config.groups),
    )


def _cached(config: Config, group: Group, prompt_tokens: int, tokens: int, states: States) -> Iterable[int]:
    """Ends that the pool registers under dense retention.

    Source: ``kv_cache_coordinator.py::get_num_cacheable_tokens`` (of the coordinators for one and for several
    groups), ``single_type_kv_cache_manager.py::cache_blocks``.
    """
    if not config.prefix_caching:
        return
    if fine_grained(config) and group.block_tokens > config.hash_block_tokens:
        yield from _tail(config, group, prompt_tokens)
    if group.kind is Kind.MAMBA:
        yield from states(config, group, tokens)
        return
    align, final = local_alignment_tokens(config), max(0, tokens - config.reprefilled_tokens)
    if len(config.groups) == 1:
        extent = final
    elif local_drops(config, group):
        extent = min(final, arith.round_down(final, align) + group.block_tokens) if tokens >= align else 0
    else:
        extent = arith.round_down(tokens, align)
    keeps = _pool_mask(config, group)
    for column in range(arith.floordiv(extent, group.block_tokens)):
        if keeps(column):
            yield (column + 1) * group.block_tokens


def _tail(config: Config, group: Group, prompt_tokens: int) -> Iterable[int]:
    """The prompt's last hash boundary, registered on its block (``_cache_partial_tail_block``)."""
    unit = config.hash_block_tokens
    if group.kind is Kind.MAMBA:
        drop = bool(config.dropping_groups())
        tail = arith.checkpoint_position(prompt_tokens, unit, drop, config.hash_lookahead_tokens)
    else:
        tail = arith.round_down(prompt_tokens - (not local_drops(config, group)), unit)
    if tail:
        yield tail


def _stored(config: Config, group: Group, eligible_tokens: int, states: States) -> Iterable[int]:
    """Ends of the chunks that the tier holds (``offloading/scheduler.py::_build_store_jobs``)."""
    if not config.offload:
        return
    chunk = chunk_tokens(config, group)
    if group.kind is Kind.MAMBA:  # offers of boundary states; a boundary inside a chunk is skipped
        yield from (end for end in states(config, group, eligible_tokens) if end % chunk == 0)
        return
    keeps = _tier_mask(config, group, eligible_tokens)
    for index in range(arith.floordiv(eligible_tokens, chunk)):
        if keeps(index):
            yield (index + 1) * chunk


Mask = Callable[[int], bool]


def _everything(index: int) -> bool:
    return True


def _pool_mask(config: Config, group: Group) -> Mask:
    """Which columns the pool registers: all; of window groups those of ``reachable_block_mask`` under dense
    retention (without a final segment).
    """
    if group.kind is not Kind.WINDOW:
        return _everything
    drop = int(local_drops(config, group))
    need = arith.local_need_blocks(group.window_tokens, group.block_tokens) + drop
    segment = arith.floordiv(local_alignment_tokens(config), group.block_tokens)
    if arith.store_keeps_all(need, segment):
        return _everything
    return lambda column: arith.store_keeps_block(column, need, segment, drop)


def _tier_mask(config: Config, group: Group, eligible_tokens: int) -> Mask:
    """Which chunks the store names: of a window group, those with a block that dense retention keeps."""
    align, block, blocks = store_alignment_tokens(config), group.block_tokens, config.blocks_per_chunk
    if group.kind is not Kind.WINDOW or align is None or align % block:
        return _everything
    drop = int(drops(config, group))
    need = arith.store_need_blocks(group.window_tokens, group.extra_tokens, block, drop)
    segment, end = arith.floordiv(align, block), arith.floordiv(eligible_tokens, block)
    if arith.store_keeps_all(need, segment):
        return _everything

    def keeps(index: int) -> bool:
        if arith.store_keeps_chunk(index, blocks, need, segment, drop):
            return True
        columns = range(index * blocks, (index + 1) * blocks)
        return not drop and any(arith.store_keeps_final_block(c, end, need, segment) for c in columns)

    return keeps


def visible(ends: Ends, shared_tokens: int, lookahead_tokens: int = 0) -> Ends:
    """The entries whose tokens, and the lookahead that their hash covers, lie in the shared prefix."""
    return tuple(frozenset(e for e in group if e + lookahead_tokens <= shared_tokens) for group in ends)


# -- what a prompt finds in the pool -------------------------------------------------------------------------


def local_hit(config: Config, ends: Ends, tokens: int) -> int:
    """Tokens of a prompt of ``tokens`` tokens that the pool's entries ``ends`` spare it.

    Source: ``v1/core/kv_cache_coordinator.py::HybridKVCacheCoordinator.find_longest_cache_hit``.  Groups of
    one spec are looked up as one.  The candidate shrinks until every group accepts it; full groups are looked
    up once and then only trimmed; a dropping group looks one margin further and then drops it, once for each
    candidate.  A full group and one other are asked once only, and so is a single group
    (``UnitaryKVCacheCoordinator``), which looks no margin further.
    """
    hashed = arith.round_down(max(0, tokens - config.hash_lookahead_tokens), config.hash_block_tokens)
    alike: dict[tuple[Kind, int, int, int], tuple[Group, frozenset[int]]] = {}
    for group, present in zip(config.groups, ends, strict=True):
        first, common = alike.get(_spec(group), (group, present))
        alike[_spec(group)] = first, common & present
    order = sorted(alike.values(), key=lambda one: one[0].kind is not Kind.FULL)
    single = len(config.groups) == 1
    once = single or (len(order) == 2 and order[0][0].kind is Kind.FULL)
    full_hit: dict[int, int] = {}
    verified: set[int] = set()
    candidate = max(0, tokens - 1)
    while True:
        before = candidate
        for index, (group, present) in enumerate(order):
            if index in full_hit:
                candidate = min(candidate, full_hit[index])
                continue
            drop = local_drops(config, group) and index not in verified
            margin = drop_margin_tokens(config, group) if drop and not single else 0
            limit = min(candidate + margin, hashed) if margin else candidate
            found = _FINDERS[group.kind](config, group, present, limit, drop)
            if group.kind is Kind.FULL:
                full_hit[index] = found
            if drop:
                verified.add(index)
            elif found < candidate:
                verified.clear()
            candidate = min(candidate, found)
        if once or candidate == before or candidate == 0:
            return candidate


def _find_full(config: Config, group: Group, ends: frozenset[int], limit: int, drop: bool) -> int:
    block, align = group.block_tokens, local_alignment_tokens(config)
    length = 0
    while length + block <= limit and length + block in ends:
        length += block
    if fine_grained(config):
        inside = [end for end in ends if length < end <= min(limit, length + block - 1)]
        length = max(inside, default=length)
    if drop:
        length = max(0, length - min(align, block))
    return arith.round_down(length, align)


def _find_window(config: Config, group: Group, ends: frozenset[int], limit: int, drop: bool) -> int:
    block, align = group.block_tokens, local_alignment_tokens(config)
    need = arith.local_need_blocks(group.window_tokens, block) + drop
    run = 0
    for column in range(arith.floordiv(limit, block) - 1, -1, -1):
        if (column + 1) * block not in ends:
            run = 0
            continue
        if run == 0 and (column + 1 - drop) * block % align:
            continue
        run += 1
        if run >= need:
            return (column + run - drop) * block
    length = arith.round_down(run * block, align)  # a run that begins at the prompt's start needs no more
    return arith.round_down(max(0, length - block), align) if drop else length


def _find_chunked(config: Config, group: Group, ends: frozenset[int], limit: int, drop: bool) -> int:
    block, align = group.block_tokens, local_alignment_tokens(config)
    length = arith.round_down(arith.skipped_tokens_chunked(limit, group.window_tokens), block)
    while length + block <= limit and length + block in ends:
        length += block
    return arith.round_down(length, align)


def _find_mamba(config: Config, group: Group, ends: frozenset[int], limit: int, drop: bool) -> int:
    align = local_alignment_tokens(config)
    return max((end for end in ends if end <= limit and end % align == 0), default=0)


_FINDERS = {
    Kind.FULL: _find_full,
    Kind.WINDOW: _find_window,
    Kind.CHUNKED: _find_chunked,
    Kind.MAMBA: _find_mamba,
}


# -- what a prompt finds in the offload tier -----------------------------------------------------------------


def offload_hit(config: Config, ends: Ends, tokens: int, local_tokens: int = 0) -> int:
    """Tokens past a local prefix of ``local_tokens`` that the tier's entries ``ends`` spare a prompt.

    Source: ``offloading/scheduler.py::OffloadingConnectorScheduler._lookup_complete_chunks``.
    """
    mamba = [chunk_tokens(config, group) for group in config.groups if group.kind is Kind.MAMBA]
    windowed = any(group.kind is not Kind.FULL for group in config.groups)
    limit = arith.lookup_candidate(tokens, mamba[0] if mamba else 1) if windowed else tokens
    order = sorted(range(len(config.groups)), key=lambda i: _rank(config, config.groups[i]))
    window_order = [i for i in order if config.groups[i].kind is not Kind.FULL]
    verified: set[int] = set()
    gained = 0
    pending = order
    while pending:
        again: list[int] = []
        seen_window = False
        for index in pending:
            group, chunk = config.groups[index], chunk_tokens(config, config.groups[index])
            keyed = arith.full_chunks_of(tokens, chunk)
            limit = arith.shrink_hit(limit, keyed, chunk)
            if not arith.worth_loading(limit, local_tokens, chunk):
                return 0
            drop = drops(config, group) and index not in verified
            first = arith.lookup_first_chunk_full(local_tokens, chunk)
            last = arith.query_end_chunk(limit, chunk, int(drop), keyed)
            found = _find_chunks(config, group, ends[index], first, last, limit, drop)
            if found <= drop:
                return 0
            if drop:
                verified.add(index)
            limit = arith.shrink_hit(limit, arith.tail_drop(first + found, int(drop)), chunk)
            if not arith.worth_loading(limit, local_tokens, chunk):
                return 0
            if limit - local_tokens < gained:
                if not drops(config, group):
                    verified.clear()  # the marks were for a longer candidate
                if seen_window:
                    again = window_order  # full groups are not asked again: a prefix only got shorter
            seen_window |= group.kind is not Kind.FULL
            gained = limit - local_tokens
        pending = again
    return gained


def _rank(config: Config, group: Group) -> tuple[bool, int]:
    """Full groups first, then by decreasing window."""
    return group.kind is not Kind.FULL, -window_chunks(config, group)


def window_chunks(config: Config, group: Group, hit_tokens: int | None = None) -> int:
    """Chunks in a row that a lookup requires: at the candidate ``hit_tokens``, or further left (None)."""
    chunk = chunk_tokens(config, group)
    if group.kind is Kind.MAMBA:
        return 1
    if group.kind is Kind.CHUNKED:
        return arith.chunked_window_chunks(group.window_tokens, chunk)
    if group.kind is Kind.FULL:
        return 0
    if hit_tokens is None:
        return arith.base_window_chunks(group.window_tokens, group.extra_tokens, chunk)
    return arith.lookup_window_chunks(hit_tokens, group.window_tokens, group.extra_tokens, chunk)


def _find_chunks(
    config: Config, group: Group, ends: frozenset[int], first: int, last: int, limit: int, drop: bool
) -> int:
    """Chunks from ``first`` on that count as found, the dropped one included."""
    chunk = chunk_tokens(config, group)
    if group.kind is Kind.FULL:
        found = first
        while found < last and (found + 1) * chunk in ends:
            found += 1
        return found - first
    candidate = arith.shrink_hit(limit, arith.tail_drop(last, int(drop)), chunk) if last > drop else 0
    run, need = 0, window_chunks(config, group, candidate) + drop
    for index in range(last - 1, first - 1, -1):
        if (index + 1) * chunk not in ends:
            run, need = 0, window_chunks(config, group) + drop
            continue
        run += 1
        if run >= need:
            return index + run - first
    return run


# -- what a load then names ----------------------------------------------------------------------------------


def named_chunks(config: Config, group: Group, hit_tokens: int, local_tokens: int = 0) -> range:
    """Chunks of a group that a load names for a hit that ends ``hit_tokens`` after the prompt's start.

    Source: ``offloading/scheduler.py::update_state_after_alloc``: those of the columns that allocation made.
    """
    block, blocks = group.block_tokens, config.blocks_per_chunk
    if group.kind is Kind.FULL:
        first = arith.demand_first_chunk_full(local_tokens, block, blocks)
    elif group.kind is Kind.WINDOW:
        first = arith.demand_first_chunk_window(
            hit_tokens, local_tokens, group.window_tokens, group.extra_tokens, block, blocks
        )
    elif group.kind is Kind.CHUNKED:
        first = arith.demand_first_chunk_chunked(hit_tokens, local_tokens, group.window_tokens, block, blocks)
    else:
        first = arith.demand_first_chunk_mamba(hit_tokens, block, blocks)
    return range(first, arith.demand_end_chunk(hit_tokens, chunk_tokens(config, group)))


def wrong_in_load(config: Config, ends: Ends, hit_tokens: int) -> str | None:
    """What is wrong with an admitted hit's load: an absent chunk, a state past the hit; None if nothing."""
    for group, present in zip(config.groups, ends, strict=True):
        chunk = chunk_tokens(config, group)
        for index in named_chunks(config, group, hit_tokens):
            if (index + 1) * chunk not in present:
                return f"chunk {index} of group {group.name!r} is named and absent"
        if group.kind is Kind.MAMBA and arith.mamba_state_tokens(hit_tokens, chunk) != hit_tokens:
            state = arith.mamba_state_tokens(hit_tokens, chunk)
            return f"group {group.name!r} loads the state after {state} tokens"
    return None
