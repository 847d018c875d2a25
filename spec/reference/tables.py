"""Blocks and columns: finding a local hit, adopting it, growing a row for a step, freeing behind it.

One manager a group kind, all drawing from one pool (vLLM ``v1/core/single_type_kv_cache_manager.py``).
Functions take the scheduler, whose ``do`` records a decision and applies it to the policy's own book.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.arith import align, coverage
from spec.arith.division import floordiv
from spec.book import Key, Request
from spec.config import Config, Group, Kind

if TYPE_CHECKING:
    from spec.reference.scheduler import Reference

Hit = list[list[tuple[int, int]]]  # per group: (column, block)
Tail = list[tuple[int, int, int]]  # (group, column, block) published inside a block: to be copied, not shared


def key_of(ref: Reference, request: Request, group: int, n: int) -> Key | None:
    """The key of the group's block that ends at ``n`` tokens; None while the tokens that the hash covers
    are unknown."""
    covered = n + ref.config.hash_lookahead_tokens
    return (group, n, request.line[covered]) if covered <= request.known else None


def hit_columns(ref: Reference, g: int, hit: int) -> range:
    """Columns that a group must find cached to serve a local hit, its dropped tail included."""
    group, drop = ref.config.groups[g], ref.drops[g]
    block = group.block_tokens
    if group.kind is Kind.FULL:
        return range(0, hit // block + drop)
    if group.kind is not Kind.MAMBA:
        return range(ref.decide.hit_first(group, hit, drop), hit // block + drop)
    return range(hit // block - 1, hit // block + drop) if hit % block == 0 else range(0)


def tail_hit(ref: Reference, request: Request, hit: int) -> Tail | None:
    """The blocks that hold a prefix which ends inside them, group by group; None if one is missing."""
    tail: Tail = []
    for g, group in enumerate(ref.config.groups):
        if hit % group.block_tokens:
            key = key_of(ref, request, g, hit)
            block = ref.book.cached(key) if key else 0
            if not block:
                return None
            tail.append((g, hit // group.block_tokens, block))
    return tail


def local_hit(ref: Reference, request: Request) -> tuple[int, Hit, Tail] | None:
    """The longest prefix that every group can serve, with its blocks; None to ask again next step.

    Equals the fixed point of ``v1/core/kv_cache_coordinator.py::find_longest_cache_hit``: the longest
    aligned hit common to all groups, below the number of known tokens."""
    config = ref.config
    empty: Hit = [[] for _ in config.groups]
    if not config.prefix_caching:
        return 0, empty, []
    unit = ref.decide.hit_unit(tuple(g.block_tokens for g in config.groups))
    if ref.partial_hits:
        unit = config.hash_block_tokens
    for hit in range(ref.decide.longest_hit(request.known) // unit * unit, 0, -unit):
        tail = tail_hit(ref, request, hit)
        if tail is None:
            continue
        found: Hit = []
        for g, group in enumerate(config.groups):
            blocks: list[tuple[int, int]] = []
            if not ref.decide.group_must_serve(group):
                found.append(blocks)
                continue
            for col in hit_columns(ref, g, hit):
                key = key_of(ref, request, g, (col + 1) * group.block_tokens)
                block = ref.book.cached(key) if key else 0
                if not block:
                    break
                if col < hit // group.block_tokens:
                    blocks.append((col, block))
            else:
                found.append(blocks)
                continue
            break
        else:
            hit = ref.decide.dropped_hit(hit, unit, max(ref.drops))
            states = [block for g in ref.mamba_groups for _, block in found[g]] + [
                block for _, _, block in tail
            ]
            if not all(ref.decide.same_step_hit(block in ref.cached_now) for block in states):
                return None
            return hit, found, tail
    return 0, empty, []


def first_kept_column(ref: Reference, group: Group, tokens: int) -> int:
    """First column that is not null once ``tokens`` tokens are in place."""
    if group.kind is Kind.WINDOW:
        return ref.decide.retained_column(group, tokens)
    if group.kind is Kind.CHUNKED:
        return coverage.skipped_tokens_chunked(tokens, group.window_tokens) // group.block_tokens
    if group.kind is Kind.MAMBA:
        return align.first_live_column(tokens, group.block_tokens)
    return 0


def fresh_columns(ref: Reference, g: int, local: int, total: int) -> range:
    """Columns that an external hit must allocate and load (``allocate_external_computed_blocks``)."""
    group = ref.config.groups[g]
    if total == local:
        return range(0)
    first = max(coverage.first_fresh_column(local, group.block_tokens), first_kept_column(ref, group, total))
    return range(first, coverage.blocks_of(total, group.block_tokens))


def lookahead_tokens(config: Config) -> int:
    """Attention slots reserved past the scheduled tokens for the drafter (``num_lookahead_tokens``)."""
    return config.drafts


def new_columns(
    ref: Reference, request: Request, g: int, c: int, q: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """What a group's row needs for a step: scratch moves ``(from, to)`` and columns to allocate."""
    config, group = ref.config, ref.config.groups[g]
    cols = request.cols[g]
    length = len(cols)
    plan = ref.plans[request.uid]
    if group.kind is not Kind.MAMBA:
        upto = min(c + q + lookahead_tokens(config), request.prompt + plan.outputs)
        first = max(length, floordiv(c, group.block_tokens))  # nothing will be written before the first token
        return [], list(range(first, coverage.blocks_of(max(upto, c + q), group.block_tokens)))
    required = align.required_columns(c, q, group.block_tokens, config.drafts)
    if required <= length:
        return [], []
    running = required - config.drafts - 1
    place = max(length, running)
    moves = []
    if ref.decide.relocates(plan.allocated):
        for col in range(max(length - config.drafts, 0), length):
            if align.relocates_column(col, length, running, config.drafts) and cols[col]:
                moves.append((col, place))
                place += 1
    return moves, list(range(place, required))


def grow(ref: Reference, request: Request, c: int, q: int) -> None:
    """Give the request every column that the step will write."""
    for g in range(len(ref.config.groups)):
        moves, fresh = new_columns(ref, request, g, c, q)
        for col, to in moves:
            ref.do(("move", request.uid, g, col, to, request.cols[g][col]))
        for col in fresh:
            ref.allocate(request, g, col)
    ref.plans[request.uid].allocated = True


def free_behind(ref: Reference, request: Request) -> None:
    """Free the columns that no step will read again (``remove_skipped_blocks``)."""
    basis = ref.decide.free_basis(request)
    for g, group in enumerate(ref.config.groups):
        if group.kind is Kind.FULL or basis <= 0:
            continue
        cols = request.cols[g]
        for col in range(min(first_kept_column(ref, group, basis), len(cols)) - 1, -1, -1):
            if cols[col]:
                ref.do(("drop", request.uid, g, col, cols[col]))
            elif group.kind is not Kind.MAMBA:
                break  # everything before a null column is null already


def publish_attention(ref: Reference, request: Request, c: int, q: int) -> None:
    """Put full attention blocks under their keys, before the step that fills them has run."""
    if not ref.config.prefix_caching:
        return
    upto = ref.decide.publish_limit(ref.config, c, q, request.known)
    for g, group in enumerate(ref.config.groups):
        if group.kind is not Kind.MAMBA:
            publish_columns(ref, request, g, upto)


def publish_columns(ref: Reference, request: Request, g: int, upto: int) -> None:
    """Publish a group's full columns below ``upto`` tokens."""
    plan = ref.plans[request.uid]
    block = ref.config.groups[g].block_tokens
    while (plan.published[g] + 1) * block <= upto:
        col = plan.published[g]
        n = (col + 1) * block
        if n + ref.config.hash_lookahead_tokens > len(request.line) - 1:
            break
        held = request.cols[g][col] if col < len(request.cols[g]) else 0
        carried = ref.book.core.key.get(held)
        if held and (carried is None or carried[1] < n):  # type: ignore[index]
            prefix = request.line[n + ref.config.hash_lookahead_tokens]
            ref.do(("publish", request.uid, g, held, n, prefix))
        plan.published[g] += 1


def publish_states(ref: Reference, request: Request, upto: int, *, now: bool) -> None:
    """Put recurrent columns below ``upto`` tokens under their keys, and offer them to the store.

    Column p is published as the state after ``(p + 1)`` blocks.  That is what it holds only because prefill
    chunks end on boundaries and post-processing moves a crossed boundary's state to its column.  ``now``: the
    step being scheduled will write it, so no reader of the same step may adopt it."""
    if not ref.config.prefix_caching:
        return
    plan = ref.plans[request.uid]
    for g in ref.mamba_groups:
        while (plan.published[g] + 1) * ref.mamba_block <= upto:
            col = plan.published[g]
            n = (col + 1) * ref.mamba_block
            key = key_of(ref, request, g, n)
            lookahead = ref.config.hash_lookahead_tokens
            if key is None or not align.boundary_registrable(n, upto, 0, request.known, lookahead):
                break
            plan.published[g] += 1
            held = request.cols[g][col] if col < len(request.cols[g]) else 0
            if not held or held in ref.book.core.key:
                continue
            ref.do(("publish", request.uid, g, held, n, key[2]))
            if now:
                ref.cached_now[held] = None
            ref.offers.append((request.uid, g, held, n))


def publish_tail(ref: Reference, request: Request, n: int) -> None:
    """Put the blocks in which a prompt's last hash boundary lies under its key: a prefix that ends inside
    them."""
    if not ref.partial_hits or n != ref.tail_position(request):
        return
    blocks = {}
    for g, group in enumerate(ref.config.groups):
        col = n // group.block_tokens
        held = request.cols[g][col] if n % group.block_tokens and col < len(request.cols[g]) else 0
        key = key_of(ref, request, g, n)
        if held and key and held not in ref.book.core.key:
            ref.do(("publish", request.uid, g, held, n, key[2]))
            ref.cached_now[held] = None
            blocks[g] = held
    if blocks:
        ref.plans[request.uid].tail = (n, blocks)


def copy_tail_away(ref: Reference, request: Request, step: int, spare: int) -> list[tuple[int, int, int]]:
    """Before the request's next step overwrites a recurrent state published inside a block, copy it to a
    block of its own, which takes the key along; the request stays on the original, since the ranks' rows
    are append-only.

    ``spare``: free blocks that the step itself does not need; without one the key is forgotten instead."""
    plan = ref.plans[request.uid]
    if plan.tail is None:
        return []
    n, blocks = plan.tail
    plan.tail = None
    copies = []
    for g, block in blocks.items():
        carried = ref.book.core.key.get(block)
        if g not in ref.mamba_groups or carried is None or carried[:2] != (g, n):  # type: ignore[index]
            continue
        if not ref.decide.copies_tail(block):
            continue
        if spare < 1:
            ref.do(("evict", block))
            continue
        spare -= 1
        copy = ref.allocate(request, g, -1)
        ref.do(("evict", block))
        ref.do(("publish", request.uid, g, copy, n, carried[2]))  # type: ignore[index]
        ref.do(("copy", block, copy, g))
        copies.append((block, copy, g))
        plan.retained.append((step, g, copy))
    return copies
