"""The scaled twin of a deployment: the same rules with smaller numbers, so that every pair of requests can
be tried (``spec.pairs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from math import isqrt, lcm

from spec import arith, gaps, lookup
from spec.config import LARGEST, Config, Group, Kind, problems
from spec.pairs import tries
from spec.prefix import Prefix, Tier, period_tokens

FEW_TRIES = 60_000
"""Pairs of requests that a twin may have before a smaller one is looked for: seconds."""

LONGEST_PERIOD = 80
"""Tokens after which everything repeats, in a twin that is looked for."""

MOST_CHOICES = 200
"""Choices of windows that are looked at for each choice of blocks and chunks."""


def scaled(config: Config) -> Config:
    """A twin with the same rules and smaller numbers, in which every pair of requests can be tried.

    1. One block size and no window: a block is three hash blocks at most.
    2. A chunk is four blocks at least, and windows keep their size in chunks.
    3. All sizes are divided by one number that divides them all, so that a hash block keeps two tokens, a
       step of K + 1 tokens fits a Mamba block, and no window becomes a whole number of blocks plus one token
       that was not one before.  Where extra tokens are retained there is no such number.
    4. Windows are shortened by whole periods to between one and two of them, which keeps where they begin
       within a block and a chunk.

    Where that leaves too much to try, the smallest deployment is looked for in which the sizes are related in
    the same way (``related``).
    """
    twin = _divided(config)
    if tries(twin) <= FEW_TRIES:
        return twin
    serves = _serves(config)
    for found in _related_deployments(config):
        if tries(found) <= FEW_TRIES and _serves(found) == serves:
            return found
    return twin


def _serves(config: Config) -> list[bool]:
    """Whether the pool, and whether the tier, ever reuses anything."""
    tiers: tuple[Tier, ...] = ("local", "offload")
    return [Prefix(config, tier).smallest_tokens is not None for tier in tiers]


def related(config: Config) -> tuple[object, ...]:
    """How a deployment's sizes are related: what its twin must share with it.

    Which sizes divide which, whether hits may end inside a block, what windows and extra tokens take in
    blocks and chunks (three stands for more), what the store prunes of a segment, and which theorems do not
    apply.
    """
    sizes, windows = [g.block_tokens for g in config.groups], [g.window_tokens for g in config.groups]
    return (
        [size == config.hash_block_tokens for size in sizes],
        [(a < b, a % b == 0) for a in sizes for b in sizes],
        [a < b for a in windows for b in windows],
        lookup.fine_grained(config),
        config.blocks_per_chunk > 1,
        [gap.number for gap in gaps.gaps(config)],
        [_window_relations(config, group) for group in config.groups],
    )


def _window_relations(config: Config, group: Group) -> tuple[object, ...]:
    """What ``related`` says about one group's window."""
    block, chunk = group.block_tokens, lookup.chunk_tokens(config, group)
    window, extra = group.window_tokens, group.extra_tokens
    if group.kind is Kind.CHUNKED:
        return window % block == 0, window % chunk == 0, chunk % window == 0, min(window // chunk, 3)
    if group.kind is not Kind.WINDOW:
        return ()
    facts: list[object] = []
    for unit in (block, chunk):
        alone, whole = arith.cdiv(window - 1, unit), arith.cdiv(window - 1 + extra, unit)
        facts += [min(alone, 3), whole - alone]
        facts += [(window - 1) % unit == 0, (window - 1 + extra) % unit == 0, window % unit == 0]
    inside = lookup.window_chunks(config, group, 1)  # the hit with the most padding behind it
    facts.append(inside - lookup.window_chunks(config, group))
    align = lookup.store_alignment_tokens(config)
    if align is not None and align % block == 0:
        need = arith.store_need_blocks(window, extra, block, int(lookup.drops(config, group)))
        unkept = align // block - need
        facts += [unkept <= 0, unkept < config.blocks_per_chunk, min(align // chunk, 3)]
    return tuple(facts)


def _related_deployments(config: Config) -> Iterator[Config]:
    """Smaller deployments whose sizes are related as this one's are, the smallest first."""
    sizes = sorted({group.block_tokens for group in config.groups})
    largest_hash = min(config.hash_block_tokens, config.drafts + config.prefill_lookahead_tokens + 2)
    for hash_block in range(min(2, config.hash_block_tokens), largest_hash + 1):
        for factors in sorted(combinations(range(1, 10), len(sizes)), key=lambda made: (lcm(*made), made)):
            blocks = {size: hash_block * factor for size, factor in zip(sizes, factors, strict=True)}
            for per_chunk in range(1, min(config.blocks_per_chunk, 6) + 1):
                groups = tuple(replace(g, block_tokens=blocks[g.block_tokens]) for g in config.groups)
                base = replace(
                    config,
                    name=f"{config.name}-scaled",
                    hash_block_tokens=hash_block,
                    blocks_per_chunk=per_chunk,
                    groups=groups,
                )
                if period_tokens(base) <= LONGEST_PERIOD:
                    yield from _with_windows(base, config)


def _with_windows(base: Config, config: Config) -> Iterator[Config]:
    """The deployment with each choice of short windows that keeps the relations."""
    longest = 4 * period_tokens(base) + 1  # three chunks stand for more
    choices: list[list[Group]] = []
    for group, real in zip(base.groups, config.groups, strict=True):
        made = (
            [replace(group, window_tokens=w) for w in range(1, longest + 1)]
            if group.window_tokens
            else [group]
        )
        wanted = _window_relations(config, real)
        alike = (replace(base, groups=tuple(m if g is group else g for g in base.groups)) for m in made)
        choices.append([m for m, c in zip(made, alike, strict=True) if _window_relations(c, m) == wanted])
    wanted_all = related(config)
    for groups in islice(product(*choices), MOST_CHOICES):
        twin = replace(base, groups=groups)
        roomy = replace(twin, pool_blocks=LARGEST)  # bounds are for the model's world
        if related(twin) == wanted_all and next(problems(roomy), None) is None:
            yield twin


def _divided(config: Config) -> Config:
    """Steps 1 to 4 of ``scaled``."""
    config = _smaller_chunks(_fewer_hash_blocks(config))
    divisor = max(d for d in _divisors(config.hash_block_tokens) if _divides(config, d))
    groups = tuple(
        replace(g, block_tokens=g.block_tokens // divisor, window_tokens=g.window_tokens // divisor)
        for g in config.groups
    )
    config = replace(config, hash_block_tokens=config.hash_block_tokens // divisor, groups=groups)
    period = period_tokens(config)
    shorter = (replace(g, window_tokens=_shorter(g.window_tokens, period)) for g in config.groups)
    return replace(config, name=f"{config.name}-scaled", groups=tuple(shorter))


def _fewer_hash_blocks(config: Config) -> Config:
    sizes = {group.block_tokens for group in config.groups}
    block, hash_block = max(sizes), config.hash_block_tokens
    windowed = any(group.window_tokens for group in config.groups)
    if windowed or len(sizes) > 1 or block <= 3 * hash_block or 3 * hash_block < config.drafts + 1:
        return config
    return replace(config, groups=tuple(replace(g, block_tokens=3 * hash_block) for g in config.groups))


def _smaller_chunks(config: Config) -> Config:
    blocks = config.blocks_per_chunk
    if not config.offload or any(group.extra_tokens for group in config.groups):
        return config
    for fewer in range(4, blocks):
        windows = [group.window_tokens * fewer for group in config.groups]
        if blocks % fewer == 0 and not any(window % blocks for window in windows):
            groups = (replace(g, window_tokens=g.window_tokens * fewer // blocks) for g in config.groups)
            return replace(config, blocks_per_chunk=fewer, groups=tuple(groups))
    return config


def _divisors(number: int) -> set[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return {*low, *(arith.floordiv(number, d) for d in low)}


def _divides(config: Config, divisor: int) -> bool:
    if divisor == 1:
        return True
    if any(group.extra_tokens for group in config.groups) or config.hash_block_tokens // divisor < 2:
        return False
    lookahead = config.prefill_lookahead_tokens + config.hash_lookahead_tokens
    for group in config.groups:
        if (
            group.block_tokens % divisor
            or group.window_tokens % divisor
            or config.hash_block_tokens % divisor
        ):
            return False
        block, window = group.block_tokens // divisor, group.window_tokens // divisor
        if block < max(lookahead, config.drafts + 1) or (group.kind is Kind.WINDOW and window % block == 1):
            return False
    return True


def _shorter(window_tokens: int, period_tokens: int) -> int:
    if window_tokens <= 2 * period_tokens:
        return window_tokens
    return window_tokens - period_tokens * (arith.floordiv(window_tokens - 1, period_tokens) - 1)
