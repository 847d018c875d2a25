"""Which theorems do not apply to a deployment, which number breaks the side condition, and what that risks.

The theorems are in ``spec.prove`` and hold for all integers in their domains; here each side condition that a
deployment can fail is checked with its numbers.  Theorems are named as the table of ``python -m spec.prove
arith`` names them (a test compares).  Upstream files are those of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spec import arith, lookup
from spec.config import Config, Group, Kind


@dataclass(frozen=True, slots=True)
class Gap:
    """A theorem that does not apply here."""

    number: int
    theorem: str
    condition: str  # the side condition that fails, with the numbers
    risk: str


THEOREMS = {
    1: "chunk coverage",
    5: "store and lookup agree",
    7: "common hit",
    11: "seed column",
    16: "registration",
    17: "aligned split",
    18: "sub-slots",
}
"""Theorems with a side condition that a deployment can fail; the configuration refuses K + 1 > block."""

LOADS = frozenset({1, 7})
"""Theorems without which a load may name what is absent, or a state of other tokens."""


def gaps(config: Config) -> list[Gap]:
    """All of them, by theorem number."""
    found = [*_mamba(config)]
    if config.offload:
        found += [*_offload(config)]
    return sorted(found, key=lambda gap: gap.number)


def _gap(number: int, condition: str, risk: str) -> Gap:
    return Gap(number, THEOREMS[number], condition, risk)


def _mamba(config: Config) -> Iterator[Gap]:
    mamba = [group for group in config.groups if group.kind is Kind.MAMBA]
    if not mamba:
        return
    block, least = mamba[0].block_tokens, min(group.block_tokens for group in config.groups)
    if least != block:
        yield _gap(
            11,
            f"the divisor must be the Mamba block ({block}); the smallest block of all groups is {least}",
            "up to 0.31.0 the worker divides by the smallest: after a hit it reads another column's state",
        )
        yield _gap(
            17,
            f"the divisor must be the Mamba block ({block}); the scheduler divides by the smallest, {least}",
            "chunks end off the Mamba boundaries: no state is kept there, or one of other tokens is",
        )
    if config.prefill_lookahead_tokens > 1:
        yield _gap(
            17,
            f"the split's ends stand, but the reserve of {config.prefill_lookahead_tokens} tokens for the "
            "drafter moves them",
            "a chunk may end off a boundary, or get no tokens at all and be tried again for ever",
        )
    if config.prefix_caching and config.hash_lookahead_tokens == 0:
        yield _gap(
            16,
            "no boundary is registered early iff hash_lookahead_tokens >= 1, got 0",
            "a boundary's hash is registered before its state exists: a reader in the same step, or on a "
            "rank whose save comes later, gets an older state under a valid key",
        )


def _offload(config: Config) -> Iterator[Gap]:
    for group in config.groups:
        chunk = lookup.chunk_tokens(config, group)
        if group.kind is Kind.CHUNKED and group.window_tokens % chunk and chunk % group.window_tokens:
            yield _gap(
                1,
                f"group {group.name!r}: one of attention chunk ({group.window_tokens}) and offload chunk "
                f"({chunk}) must divide the other",
                "a load names a chunk that was never looked up: an assertion in prepare_load, or other bytes",
            )
        lost = lost_hits(config, group) if group.kind is Kind.WINDOW else None
        if lost:
            yield _gap(5, f"group {group.name!r}: {lost}", "hits that were paid for are never found")
        if group.kind is Kind.WINDOW and config.blocks_per_chunk > 1:
            yield _gap(
                18,
                f"group {group.name!r}: columns that a job leaves out must be whole chunks of "
                f"{config.blocks_per_chunk} blocks; a window that moves on while a store waits leaves less",
                "the blocks after the gap land one sub-slot early, under right keys",
            )
    yield from _state_of_the_hit(config)


def _state_of_the_hit(config: Config) -> Iterator[Gap]:
    states = [lookup.chunk_tokens(config, group) for group in config.groups if group.kind is Kind.MAMBA]
    for group in config.groups:
        chunk = lookup.chunk_tokens(config, group)
        if states and group.kind is not Kind.MAMBA and chunk % states[0]:
            yield _gap(
                7,
                f"group {group.name!r}: its chunk ({chunk}) must be a multiple of the Mamba chunk "
                f"({states[0]})",
                "a hit may end inside a Mamba chunk; the load then names a state of more tokens than the hit",
            )


def lost_hits(config: Config, group: Group) -> str | None:
    """Which hits the store's mask for a window group loses, and by which numbers; None if it loses none.

    The exact condition is theorem 5's: the mask leaves a whole chunk of each segment out, and the lookup asks
    for one chunk more than the window itself needs.
    """
    align, block, chunk = (
        lookup.store_alignment_tokens(config),
        group.block_tokens,
        lookup.chunk_tokens(config, group),
    )
    if align is None or align % block:
        return None
    window, extra = group.window_tokens, group.extra_tokens
    segment = arith.floordiv(align, block)
    kept = arith.store_need_blocks(window, extra, block, int(lookup.drops(config, group)))
    if segment - kept < config.blocks_per_chunk:
        return None
    keeps = f"while the store keeps {kept} of {segment} blocks a segment"
    if extra == 0 and (window - 1) % chunk == 0:
        return f"window - 1 = {window - 1} is a multiple of the chunk ({chunk}), extra_tokens = 0, {keeps}"
    mamba = any(other.kind is Kind.MAMBA for other in config.groups)
    if (window + extra - 1) % chunk == 0 and not mamba:
        past = f"window + extra - 1 = {window + extra - 1}"
        return (
            f"{past} is a multiple of the chunk ({chunk}), {keeps}: a hit up to a prompt's last token but one"
        )
    return None
