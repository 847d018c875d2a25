"""What of a shared prefix one tier of a deployment can reuse at all: the sizes that decide it, and the least
prefix from which anything is reused, found through the lookup (``spec.lookup``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd, lcm
from typing import Literal

from spec import lookup
from spec.config import Config

Tier = Literal["local", "offload"]


@dataclass(frozen=True, slots=True)
class Case:
    """Two requests: the first ran to its end, the second looks up what it shares with the first."""

    prompt_tokens: int  # of the first request
    known_tokens: int  # of the first request: prompt and output
    shared_tokens: int  # the second request's first tokens, equal to the first request's
    tokens: int  # of the second request's prompt
    one_step: bool  # whether the first prompt was prefilled in one step


class Prefix:
    """Sizes that decide what can be reused, for one tier of one configuration."""

    def __init__(self, config: Config, tier: Tier) -> None:
        self.config = config
        self.tier = tier

    @cached_property
    def unit_tokens(self) -> dict[str, int]:
        """Tokens of a group's entry: its block in the pool, its chunk in the tier."""
        if self.tier == "local":
            return {group.name: group.block_tokens for group in self.config.groups}
        return {group.name: lookup.chunk_tokens(self.config, group) for group in self.config.groups}

    @cached_property
    def grid_tokens(self) -> int:
        """Hits are multiples of this many tokens (in the tier also at the last token, see `nevers`)."""
        if self.tier == "local":
            return lookup.local_alignment_tokens(self.config)
        return gcd(*self.unit_tokens.values())

    @cached_property
    def withheld_tokens(self) -> int:
        """Trailing tokens of a shared prefix that no hit includes: the dropped unit or the hash lookahead."""
        dropping = [group for group in self.config.groups if lookup.drops(self.config, group)]
        if self.tier == "offload":
            return max((self.unit_tokens[group.name] for group in dropping), default=0)
        margins = (lookup.drop_margin_tokens(self.config, group) for group in dropping)
        return max(margins, default=0) + self.config.hash_lookahead_tokens

    @property
    def smallest_tokens(self) -> int | None:
        """The fewest shared tokens from which anything is reused; None: nothing ever is."""
        alone = self.config if self.tier == "offload" else replace(self.config, offload=False)
        return _smallest_tokens(alone, self.tier)


@cache
def _smallest_tokens(config: Config, tier: Tier) -> int | None:
    """The fewest shared tokens from which anything is reused, found by trying.

    Entries appear at multiples of a group's unit (and of the hash block), so only those, moved by the hash
    lookahead, are tried; the request that left them may end there, a little later, or much later.
    """
    prefix = Prefix(config, tier)
    lookahead = config.hash_lookahead_tokens if tier == "local" else 0
    units = set(prefix.unit_tokens.values())
    if tier == "local":
        units.add(config.hash_block_tokens)
    far, period = horizon_tokens(config), period_tokens(config)
    ends = sorted({end for unit in units for end in range(unit, far + 1, unit)})
    # In between, everything repeats: what is missing there is missing one period earlier.
    ends = [end for end in ends if end <= 3 * period or end >= far - 3 * period]
    least = max(units) if tier == "offload" else prefix.grid_tokens  # of a hit
    longest = lookup.left_by(config, far, far)
    later = max(units) if tier == "offload" else config.hash_block_tokens
    for shared in (end + lookahead for end in ends if end >= least):
        ended = (0, 1, later, config.reprefilled_tokens)
        for known in sorted({*(shared + more for more in ended), far}):
            if known < shared:
                continue
            left = longest if known == far else lookup.left_by(config, known, known)
            for tokens in (shared, shared + 1, shared + 1 + period):
                if hit_tokens(config, tier, left, shared, tokens):
                    return shared
    return None


def hit_tokens(config: Config, tier: Tier, left: lookup.Left, shared_tokens: int, tokens: int) -> int:
    """What a prompt of ``tokens`` finds, ``shared_tokens`` of them shared with the request that left this."""
    return look_up(config, tier, seen(config, tier, left, shared_tokens), tokens)


def seen(config: Config, tier: Tier, left: lookup.Left, shared_tokens: int) -> lookup.Ends:
    """The entries of one tier that lie in the shared prefix."""
    if tier == "local":
        return lookup.visible(left.local, shared_tokens, config.hash_lookahead_tokens)
    return lookup.visible(left.offload, shared_tokens)


def period_tokens(config: Config) -> int:
    """Tokens after which all blocks, chunks and the store's alignment repeat."""
    chunks = [lookup.chunk_tokens(config, group) for group in config.groups] if config.offload else []
    return lcm(config.scheduler_block_tokens, *chunks)


def horizon_tokens(config: Config) -> int:
    """A prompt so long that everything has happened once: the widest window, two periods, one unit more."""
    widest = max(group.window_tokens + group.extra_tokens for group in config.groups)
    unit = max(group.block_tokens for group in config.groups) * (
        config.blocks_per_chunk if config.offload else 1
    )
    return widest + 2 * period_tokens(config) + unit


def look_up(config: Config, tier: Tier, ends: lookup.Ends, tokens: int) -> int:
    """The lookup's answer to a prompt of ``tokens`` over these entries of one tier."""
    if tier == "local":
        return lookup.local_hit(config, ends, tokens)
    return lookup.offload_hit(config, ends, tokens)
