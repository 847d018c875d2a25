"""Which prefix hits a deployment can never have, why, what would allow them; each confirmed by brute force.

A *never* is a statement about all pairs of requests: the first leaves entries behind, the second shares some
tokens with it and looks them up.  It is printed with the deployment's own numbers, and it is confirmed on a
scaled twin: the same rules with smaller blocks and windows, every pair of requests up to a bound, through the
same lookup (``spec.lookup``).  A confirmation can fail in three ways: a forbidden hit happens, nothing was
ever in reach of being forbidden, or the remedy does not bring such a hit about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import gcd, lcm
from typing import Literal

from spec import arith, lookup
from spec.config import Config, Kind

Tier = Literal["local", "offload"]


@dataclass(frozen=True, slots=True)
class Case:
    """Two requests: the first ran to its end, the second looks up what it shares with the first."""

    prompt_tokens: int  # of the first request
    known_tokens: int  # of the first request: prompt and output
    shared_tokens: int  # the second request's first tokens, equal to the first request's
    tokens: int  # of the second request's prompt
    one_step: bool  # whether the first prompt was prefilled in one step


@dataclass(frozen=True, slots=True)
class Never:
    """A hit that cannot happen: ``forbids(case, hit)`` says whether this one is of that kind."""

    name: str
    tier: Tier
    statement: str
    why: str
    remedy: str
    forbids: Callable[[Case, int], bool]
    allow: Callable[[Config], Config] | None  # the remedy as a change of configuration; None: there is none
    allow_steps: bool = False  # the remedy is to prefill in more steps, not a change of configuration


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What brute force over the scaled twin said about one never."""

    cases: int  # pairs of requests tried
    tempted: int  # of these, pairs whose shared tokens alone would have made a forbidden hit
    broken: tuple[Case, int] | None  # a forbidden hit that happened
    allowed: tuple[Case, int] | None  # with the remedy: such a hit
    remedy_tried: bool

    @property
    def holds(self) -> bool:
        """Nothing forbidden happened although it was in reach, and the remedy, if any, works."""
        return (
            self.broken is None and self.tempted > 0 and (self.allowed is not None or not self.remedy_tried)
        )


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

    @cached_property
    def smallest_tokens(self) -> int | None:
        """The fewest shared tokens from which anything is reused, found by trying; None: nothing ever is.

        Entries appear at multiples of a group's unit (and of the hash block), so only those, moved by the
        hash lookahead, are tried; the request that left them may end there, go on for one token, or for long.
        """
        config, lookahead = self.config, self.config.hash_lookahead_tokens if self.tier == "local" else 0
        units = {*self.unit_tokens.values(), config.hash_block_tokens}
        far = horizon_tokens(config)
        ends = sorted({end for unit in units for end in range(unit, far + 1, unit)})
        for shared in (end + lookahead for end in ends):
            for known in sorted({shared, shared + 1, shared + max(units), far}):
                if known < shared:
                    continue
                left = lookup.left_by(config, known, known)
                for tokens in (shared, shared + 1):
                    if hit_tokens(config, self.tier, left, shared, tokens):
                        return shared
        return None


def hit_tokens(config: Config, tier: Tier, left: lookup.Left, shared_tokens: int, tokens: int) -> int:
    """What a prompt of ``tokens`` finds, ``shared_tokens`` of them shared with the request that left this."""
    return _look_up(config, tier, seen(config, tier, left, shared_tokens), tokens)


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


# -- the statements ------------------------------------------------------------------------------------------


def nevers(config: Config) -> list[Never]:
    """Every statement that applies to this deployment, the pool's first."""
    found: list[Never] = []
    if not config.prefix_caching:
        found.append(
            Never(
                "no cache",
                "local",
                "no request ever reuses blocks of the pool",
                "prefix_caching is false",
                "prefix_caching = true",
                lambda case, hit: hit > 0,
                lambda c: replace(c, prefix_caching=True),
            )
        )
    tiers: list[Tier] = ["local"] if config.prefix_caching else []
    tiers += ["offload"] if config.offload else []
    for tier in tiers:
        found += _of_tier(config, Prefix(config, tier))
    return found


def _of_tier(config: Config, prefix: Prefix) -> Iterator[Never]:
    tier, smallest = prefix.tier, prefix.smallest_tokens
    if smallest is None:
        yield _nothing(config, prefix)
        return
    yield Never(
        "short prefix",
        tier,
        f"a shared prefix of fewer than {smallest} tokens is never reused",
        _why_smallest(config, prefix, smallest),
        _finer_words(config, prefix),
        lambda case, hit: case.shared_tokens < smallest and hit > 0,
        lambda c: _finer(c, prefix),
    )
    yield _off_grid(config, prefix)
    if prefix.withheld_tokens:
        yield _tail(config, prefix)
    if any(group.kind is Kind.MAMBA for group in config.groups):
        yield _one_step(config, prefix)
    if tier == "offload" and config.offload_prompt_only:
        yield Never(
            "generated tokens",
            tier,
            "tokens that a request generated are never restored, only its prompt's",
            "the store stops at the prompt's end (prompt_only)",
            "prompt_only = false",
            lambda case, hit: hit > case.prompt_tokens,
            lambda c: replace(c, offload_prompt_only=False),
        )


def _nothing(config: Config, prefix: Prefix) -> Never:
    other = _chunk_that_works(config)
    return Never(
        "nothing",
        prefix.tier,
        "nothing is ever reused",
        "the lookup requires more chunks of a window in a row than the store keeps before any possible hit",
        "none found" if other is None else f"blocks_per_chunk = {other}",
        lambda case, hit: hit > 0,
        None if other is None else lambda c: replace(c, blocks_per_chunk=other),
    )


def _chunk_that_works(config: Config) -> int | None:
    """The smallest chunk, in blocks, with which the tier serves anything; None if none up to 8 does."""
    for blocks in range(1, 9):
        if Prefix(replace(config, blocks_per_chunk=blocks), "offload").smallest_tokens is not None:
            return blocks
    return None


def _why_smallest(config: Config, prefix: Prefix, smallest: int) -> str:
    lookahead = config.hash_lookahead_tokens if prefix.tier == "local" else 0
    parts = [f"a hit ends on a multiple of {prefix.grid_tokens} tokens"]
    if prefix.tier == "offload":
        parts = [f"only whole chunks are kept, the largest of {max(prefix.unit_tokens.values())} tokens"]
    if prefix.withheld_tokens - lookahead:
        parts.append(
            f"the drafter's group must match {prefix.withheld_tokens - lookahead} tokens more and drops them"
        )
    if lookahead:
        parts.append(f"a block's hash covers {lookahead} token(s) after it")
    return "; ".join(parts)


def _off_grid(config: Config, prefix: Prefix) -> Never:
    grid, windowed = prefix.grid_tokens, any(group.kind is not Kind.FULL for group in config.groups)
    last_too = (
        prefix.tier == "offload" and not any(group.kind is Kind.MAMBA for group in config.groups) and windowed
    )
    where = f"a hit never ends elsewhere than on a multiple of {grid} tokens"
    if last_too:
        where += " or at the prompt's last token but one"
    unit = "chunks" if prefix.tier == "offload" else "blocks"
    sizes = ", ".join(f"{name} {tokens}" for name, tokens in prefix.unit_tokens.items())
    return Never(
        "off the grid",
        prefix.tier,
        where,
        f"every group's {unit} must end there ({sizes} tokens)",
        _finer_words(config, prefix),
        lambda case, hit: hit % grid != 0 and not (last_too and hit == case.tokens - 1),
        lambda c: _finer(c, prefix),
    )


def _tail(config: Config, prefix: Prefix) -> Never:
    withheld = prefix.withheld_tokens
    if prefix.tier == "local" and not config.tail_drop:
        why = f"a block's hash covers {withheld} token(s) after it, so these must be shared too"
        remedy, allow = "without speculation nothing is withheld", _without_lookahead
    elif prefix.tier == "local" and not config.offload:
        why = "the drafter's group drops its last unit, whose draft-layer cache may be wrong"
        remedy, allow = "hash_lookahead_tokens instead of tail_drop (upstream's default)", _lookahead
    else:
        why = "the drafter's group drops its last unit, and the hash lookahead is off under a connector"
        remedy, allow = (
            "tail_drop = false (upstream: disable_eagle_block_drop), at the drafter's risk",
            _no_drop,
        )
    return Never(
        "tail",
        prefix.tier,
        f"the last {withheld} token(s) of a shared prefix are never reused",
        why,
        remedy,
        lambda case, hit: hit + withheld > case.shared_tokens and hit > 0,
        allow,
    )


def _one_step(config: Config, prefix: Prefix) -> Never:
    block = next(group.block_tokens for group in config.groups if group.kind is Kind.MAMBA)
    drop = bool(config.dropping_groups())
    units = (
        [block, config.hash_block_tokens]
        if prefix.tier == "local" and lookup.fine_grained(config)
        else [block]
    )

    def kept(tokens: int) -> set[int]:
        return {arith.checkpoint_position(tokens, unit, drop, config.hash_lookahead_tokens) for unit in units}

    return Never(
        "one-step prefill",
        prefix.tier,
        "of a prompt prefilled in one step, no hit ends anywhere but at its one kept state "
        f"(a prompt of {3 * block + 1} tokens: {max(kept(3 * block + 1))})",
        "a recurrent state exists only where a prefill step ended",
        f"prefill in steps of at most {block} tokens; a second request stops where it parts from the first",
        lambda case, hit: case.one_step and hit > 0 and hit not in kept(case.prompt_tokens),
        None,
        allow_steps=True,
    )


# -- the remedies --------------------------------------------------------------------------------------------


def _finer_words(config: Config, prefix: Prefix) -> str:
    if prefix.tier == "offload" and config.blocks_per_chunk > 1:
        return "blocks_per_chunk = 1"
    if prefix.tier == "local" and _can_be_fine(config):
        return "a smaller hash_block_tokens (prefix_match_unit): hits may then end inside a block"
    if _incommensurate(config):
        least = min(group.block_tokens for group in config.groups)
        return f"blocks that divide one another: with {least} tokens for all groups, hits end on every block"
    return "smaller blocks"


def _incommensurate(config: Config) -> bool:
    """Whether hits align to more than the largest block, because no block size is a multiple of all."""
    return config.scheduler_block_tokens > max(group.block_tokens for group in config.groups)


def _can_be_fine(config: Config) -> bool:
    """Whether a smaller hash block alone makes hits finer: Mamba and full groups only."""
    kinds = {group.kind for group in config.groups}
    return Kind.MAMBA in kinds and not kinds & {Kind.WINDOW, Kind.CHUNKED}


def _finer(config: Config, prefix: Prefix) -> Config:
    """The configuration with the remedy of `_finer_words`, in the same order."""
    if prefix.tier == "offload" and config.blocks_per_chunk > 1:
        return replace(config, blocks_per_chunk=1)
    part = smallest_factor(config.hash_block_tokens)
    finer = replace(config, hash_block_tokens=config.hash_block_tokens // part)
    if prefix.tier == "local" and _can_be_fine(config):
        return finer
    if _incommensurate(config):
        least = min(group.block_tokens for group in config.groups)
        return replace(config, groups=tuple(replace(group, block_tokens=least) for group in config.groups))
    blocks = (replace(group, block_tokens=group.block_tokens // part) for group in config.groups)
    return replace(finer, groups=tuple(blocks))


def smallest_factor(number: int) -> int:
    """The least divisor above 1 of a number above 1; 1 for 1."""
    return next((d for d in range(2, number + 1) if number % d == 0), 1)


def _lookahead(config: Config) -> Config:
    lookahead = config.prefill_lookahead_tokens
    return replace(config, tail_drop=False, hash_lookahead_tokens=lookahead, offload=False)


def _no_drop(config: Config) -> Config:
    return replace(config, tail_drop=False)


def _without_lookahead(config: Config) -> Config:
    return replace(config, hash_lookahead_tokens=0)


# -- brute force ---------------------------------------------------------------------------------------------


def scaled(config: Config) -> Config:
    """A twin with the same rules and smaller numbers, in which every pair of requests can be tried.

    1. One block size and no window: a block is three hash blocks at most.
    2. A chunk is four blocks at least, and windows keep their size in chunks.
    3. All sizes are divided by one number that divides them all, so that a hash block keeps two tokens, a
       step of K + 1 tokens fits a Mamba block, and no window becomes a whole number of blocks plus one token
       that was not one before.  Where extra tokens are retained there is no such number.
    4. Windows are shortened by whole periods to between one and two of them, which keeps where they begin
       within a block and a chunk.
    """
    config = _smaller_chunks(_fewer_hash_blocks(config))
    divisor = max(d for d in range(1, config.hash_block_tokens + 1) if _divides(config, d))
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


def cases(config: Config, tier: Tier) -> Iterator[tuple[Case, lookup.Left]]:
    """Every pair of requests up to the horizon, with what the first of them left.

    The first request has any length; what lies beyond its prompt is one period of output, two with the tail
    drop (none in the pool, which makes no difference between prompt and output, and none after a prefill in
    one step).  The second shares any number of its tokens and ends there, one token later, or one period
    after that.
    """
    horizon, period = horizon_tokens(config), period_tokens(config)
    mamba = any(group.kind is Kind.MAMBA for group in config.groups)
    for one_step in (False, True) if mamba else (False,):
        states = lookup.one_state if one_step else lookup.every_state
        output = (1 + config.tail_drop) * period if tier == "offload" and not one_step else 0
        for known in range(1, horizon + output + 1):
            prompt = max(1, known - output)
            left = lookup.left_by(config, prompt, known, states)
            for shared in range(1, known + 1):
                for tokens in (shared, shared + 1, shared + 1 + period):
                    yield Case(prompt, known, shared, tokens, one_step), left


def confirm(statements: list[Never], twin: Config) -> list[Confirmation]:
    """Try every statement, made about the twin, on every case; then look for the hits its remedy allows."""
    tempted = [0] * len(statements)
    broken: list[tuple[Case, int] | None] = [None] * len(statements)
    tried = {"local": 0, "offload": 0}
    for tier in sorted({statement.tier for statement in statements}):
        here = [(i, s) for i, s in enumerate(statements) if s.tier == tier]
        for case, _, hit in answers(twin, tier):
            tried[tier] += 1
            for index, statement in here:
                if hit and broken[index] is None and statement.forbids(case, hit):
                    broken[index] = (case, hit)
                tempted[index] += _tempts(statement, case)
    return [
        Confirmation(
            tried[s.tier], tempted[i], broken[i], _allowed(s, twin), s.allow is not None or s.allow_steps
        )
        for i, s in enumerate(statements)
    ]


@dataclass(frozen=True, slots=True)
class Loads:
    """What brute force said about the loads of all admitted hits of the twin."""

    admitted: int  # pairs of requests with a hit in the tier
    wrong: tuple[Case, int, str] | None  # the first hit whose load names something absent or of other tokens


def check_loads(twin: Config) -> Loads:
    """Restore every hit that the tier admits."""
    admitted, wrong = 0, None
    if not twin.offload:
        return Loads(0, None)
    for case, ends, hit in answers(twin, "offload"):
        admitted += hit > 0
        problem = lookup.wrong_in_load(twin, ends, hit) if hit and wrong is None else None
        if problem:
            wrong = (case, hit, problem)
    return Loads(admitted, wrong)


Answer = tuple[Case, lookup.Ends, int]
"""A case, the entries that its second request sees, and the hit that the lookup answers."""


def answers(config: Config, tier: Tier) -> Iterator[Answer]:
    """Every case with all that the first request left, then cases in which one entry of it was evicted."""
    return chain(_whole(config, tier), _evicted(config, tier))


def _whole(config: Config, tier: Tier) -> Iterator[Answer]:
    last: tuple[int, bool, int] | None = None
    ends: lookup.Ends = ()
    for case, left in cases(config, tier):
        key = (case.known_tokens, case.one_step, case.shared_tokens)
        if key != last:
            last, ends = key, seen(config, tier, left, case.shared_tokens)
        yield case, ends, _look_up(config, tier, ends, case.tokens)


def _evicted(config: Config, tier: Tier) -> Iterator[Answer]:
    """The longest first request, any shared prefix, any one entry gone."""
    known = horizon_tokens(config)
    left = lookup.left_by(config, known, known)
    for shared in range(1, known + 1):
        ends = seen(config, tier, left, shared)
        for index, group in enumerate(ends):
            for end in group:
                holed = (*ends[:index], group - {end}, *ends[index + 1 :])
                for tokens in (shared, shared + 1):
                    case = Case(known, known, shared, tokens, one_step=False)
                    yield case, holed, _look_up(config, tier, holed, tokens)


def _look_up(config: Config, tier: Tier, ends: lookup.Ends, tokens: int) -> int:
    if tier == "local":
        return lookup.local_hit(config, ends, tokens)
    return lookup.offload_hit(config, ends, tokens)


def _tempts(statement: Never, case: Case) -> bool:
    """Whether the shared tokens alone would allow a forbidden hit."""
    top = min(case.shared_tokens, case.tokens - 1)
    return any(0 < hit <= top and statement.forbids(case, hit) for hit in (top, top - 1, 1))


def _allowed(statement: Never, twin: Config) -> tuple[Case, int] | None:
    """The first hit of the forbidden kind once the remedy is applied."""
    if statement.allow is not None:
        found = answers(statement.allow(twin), statement.tier)
        return next(((case, hit) for case, _, hit in found if hit and statement.forbids(case, hit)), None)
    if statement.allow_steps:
        for case, _, hit in answers(twin, statement.tier):
            as_if = replace(case, one_step=True)
            if not case.one_step and hit and statement.forbids(as_if, hit):
                return case, hit
    return None
