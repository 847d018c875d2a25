"""Which prefix hits a deployment can never have, why, what would allow them; each confirmed by brute force.

A *never* is a statement about all pairs of requests: the first leaves entries behind, the second shares some
tokens with it and looks them up.  It is printed with the deployment's own numbers, and it is confirmed on a
scaled twin: the same rules with smaller blocks and windows, every pair of requests up to a bound, through the
same lookup (``spec.lookup``).  A confirmation can fail in three ways: a forbidden hit happens, nothing was
ever in reach of being forbidden, or the remedy does not bring such a hit about.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, combinations, islice, product
from math import gcd, isqrt, lcm
from typing import Literal

from spec import arith, gaps, lookup
from spec.config import LARGEST, Config, ConfigError, Group, Kind, problems

Tier = Literal["local", "offload"]

FEW_TRIES = 60_000
"""Pairs of requests that a twin may have before a smaller one is looked for: seconds."""

MOST_TRIES = 60_000
"""Pairs of requests that are tried; of a twin with more, only some lengths are."""

LONGEST_PERIOD = 80
"""Tokens after which everything repeats, in a twin that is looked for."""

MOST_CHOICES = 200
"""Choices of windows that are looked at for each choice of blocks and chunks."""


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
    remedies: tuple[Remedy, ...] = ()  # changes that may allow it, of which the first that does is chosen


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of configuration, in words and done."""

    words: str
    change: Callable[[Config], Config]


NO_REMEDY = "no change of one setting that was tried"


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


def nevers(config: Config, twin: Config | None = None) -> list[Never]:
    """Every statement that applies to this deployment, the pool's first.

    The remedy of each is the first with which such a hit happens on the twin (None: no remedy is looked for).
    Raises :class:`ConfigError` if all groups are chunked-local: their lookup answers the start of an
    attention chunk whatever was left, so that no number of shared tokens decides.
    """
    if all(group.kind is Kind.CHUNKED for group in config.groups):
        raise ConfigError(
            "every group has kind = chunked: a hit at the start of an attention chunk needs no history, so "
            "no shared prefix decides what is reused; add the model's other group"
        )
    found = list(_statements(config))
    if twin is None:
        return found
    return [_with_remedy(about, small, config, twin) for about, small in _pairs(found, twin)]


def on_twin(about: list[Never], twin: Config) -> list[Never]:
    """The same statements about the twin, with the remedies that ``about`` tells."""
    return [replace(small, allow=large.allow) for large, small in _pairs(about, twin)]


def _pairs(about: list[Never], twin: Config) -> list[tuple[Never, Never]]:
    small = list(_statements(twin))
    if [(s.name, s.tier) for s in about] != [(s.name, s.tier) for s in small]:
        raise AssertionError(f"the scaled twin {twin.name} follows other rules")
    return list(zip(about, small, strict=True))


def _with_remedy(about: Never, small: Never, config: Config, twin: Config) -> Never:
    """The statement with the first of its remedies that can be served and brings such a hit about."""
    if about.allow_steps or not about.remedies:
        return about
    for remedy in about.remedies:
        changed = replace(remedy.change(config), pool_blocks=LARGEST)  # bounds are for the model's world
        if next(problems(changed), None) is None and _allowed(replace(small, allow=remedy.change), twin):
            return replace(about, remedy=remedy.words, allow=remedy.change)
    return about


def _statements(config: Config) -> Iterator[Never]:
    """Every statement, its remedy still open."""
    if not config.prefix_caching:
        yield Never(
            "no cache",
            "local",
            "no request ever reuses blocks of the pool",
            "prefix_caching is false",
            NO_REMEDY,
            lambda case, hit: hit > 0,
            None,
            remedies=(Remedy("prefix_caching = true", lambda c: replace(c, prefix_caching=True)),),
        )
    if config.prefix_caching:
        yield from _of_tier(config, Prefix(config, "local"))
    if config.offload:
        yield from _of_tier(config, Prefix(config, "offload"))


def _of_tier(config: Config, prefix: Prefix) -> Iterator[Never]:
    tier, smallest = prefix.tier, prefix.smallest_tokens
    if smallest is None:
        yield _nothing(config, prefix)
        return
    if smallest > 1:
        yield Never(
            "short prefix",
            tier,
            f"a shared prefix of fewer than {smallest} tokens is never reused",
            _why_smallest(config, prefix, smallest),
            NO_REMEDY,
            lambda case, hit: case.shared_tokens < smallest and hit > 0,
            None,
            remedies=tuple(_finer(config, prefix)),
        )
    if prefix.grid_tokens > 1:
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
            NO_REMEDY,
            lambda case, hit: hit > case.prompt_tokens,
            None,
            remedies=(Remedy("prompt_only = false", lambda c: replace(c, offload_prompt_only=False)),),
        )


def _nothing(config: Config, prefix: Prefix) -> Never:
    other = _chunk_that_works(config)
    found = () if other is None else (Remedy(f"blocks_per_chunk = {other}", _chunks_that_work),)
    return Never(
        "nothing",
        prefix.tier,
        "nothing is ever reused",
        "the lookup requires more chunks of a window in a row than the store keeps before any possible hit",
        NO_REMEDY,
        lambda case, hit: hit > 0,
        None,
        remedies=found,
    )


def _chunks_that_work(config: Config) -> Config:
    return replace(config, blocks_per_chunk=_chunk_that_works(config) or config.blocks_per_chunk)


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
        NO_REMEDY,
        lambda case, hit: hit % grid != 0 and not (last_too and hit == case.tokens - 1),
        None,
        remedies=tuple(_finer(config, prefix)),
    )


def _tail(config: Config, prefix: Prefix) -> Never:
    withheld = prefix.withheld_tokens
    dropping = Remedy(
        "tail_drop = false (upstream: disable_eagle_block_drop), at the drafter's risk", _no_drop
    )
    remedies = [dropping]
    if prefix.tier == "local" and not config.tail_drop:
        why = f"a block's hash covers {withheld} token(s) after it, so these must be shared too"
        remedies = [Remedy("without speculation nothing is withheld", _without_lookahead)]
    elif prefix.tier == "local" and not config.offload:
        why = "the drafter's group drops its last unit, whose draft-layer cache may be wrong"
        remedies.insert(
            0, Remedy("hash_lookahead_tokens instead of tail_drop (upstream's default)", _lookahead)
        )
    else:
        why = "the drafter's group drops its last unit, and the hash lookahead is off under a connector"
    return Never(
        "tail",
        prefix.tier,
        f"the last {withheld} token(s) of a shared prefix are never reused",
        why,
        NO_REMEDY,
        lambda case, hit: hit + withheld > case.shared_tokens and hit > 0,
        None,
        remedies=tuple(remedies),
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
        at = {arith.checkpoint_position(tokens, unit, drop, config.hash_lookahead_tokens) for unit in units}
        return at | ({tokens} if tokens % block == 0 else set())

    # In the tier a hit may end inside a Mamba chunk where another group's chunk is no multiple of it (theorem
    # 7); its load then names the state at the end of that chunk.
    chunk = prefix.unit_tokens[next(g.name for g in config.groups if g.kind is Kind.MAMBA)]
    inside = prefix.tier == "offload" and any(unit % chunk for unit in prefix.unit_tokens.values())
    what = (
        "no hit loads any state but the one kept, or that of its end on a boundary"
        if inside
        else "no hit ends anywhere but at its one kept state, or at its end on a boundary"
    )

    def state_of(hit: int) -> int:
        return arith.mamba_state_tokens(hit, chunk) if inside else hit

    return Never(
        "one-step prefill",
        prefix.tier,
        f"of a prompt prefilled in one step, {what} "
        f"(a prompt of {3 * block + 1} tokens: {max(kept(3 * block + 1))})",
        "a recurrent state exists only where a prefill step ended",
        f"prefill in steps of at most {block} tokens; a second request stops where it parts from the first",
        lambda case, hit: case.one_step and hit > 0 and state_of(hit) not in kept(case.prompt_tokens),
        None,
        allow_steps=True,
    )


# -- the remedies --------------------------------------------------------------------------------------------


def _finer(config: Config, prefix: Prefix) -> Iterator[Remedy]:
    """Changes that may make hits finer, the least costly first."""
    if prefix.tier == "offload" and config.blocks_per_chunk > 1:
        yield Remedy("blocks_per_chunk = 1", lambda c: replace(c, blocks_per_chunk=1))
    if prefix.tier == "local" and config.hash_block_tokens > 1 and _can_be_fine(config):
        yield Remedy(
            "a smaller hash_block_tokens (prefix_match_unit): hits may then end inside a block",
            lambda c: replace(
                c, hash_block_tokens=c.hash_block_tokens // smallest_factor(c.hash_block_tokens)
            ),
        )
    if _incommensurate(config):
        least = min(group.block_tokens for group in config.groups)
        yield Remedy(
            f"blocks that divide one another: with {least} tokens for all groups, hits end on every block",
            _one_block_size,
        )
    if gcd(*(group.block_tokens for group in config.groups)) > 1:
        yield Remedy("smaller blocks", _smaller_blocks)
    if len({group.block_tokens for group in config.groups}) > 1:
        least = min(group.block_tokens for group in config.groups)
        yield Remedy(f"blocks of {least} tokens for all groups", _one_block_size)


def _one_block_size(config: Config) -> Config:
    least = min(group.block_tokens for group in config.groups)
    return replace(config, groups=tuple(replace(group, block_tokens=least) for group in config.groups))


def _smaller_blocks(config: Config) -> Config:
    part = smallest_factor(gcd(*(group.block_tokens for group in config.groups)))
    groups = tuple(replace(group, block_tokens=group.block_tokens // part) for group in config.groups)
    hash_block = gcd(config.hash_block_tokens, *(group.block_tokens for group in groups))
    return replace(config, hash_block_tokens=hash_block, groups=groups)


def _incommensurate(config: Config) -> bool:
    """Whether hits align to more than the largest block, because no block size is a multiple of all."""
    return config.scheduler_block_tokens > max(group.block_tokens for group in config.groups)


def _can_be_fine(config: Config) -> bool:
    """Whether a smaller hash block alone makes hits finer: Mamba and full groups only."""
    kinds = {group.kind for group in config.groups}
    return Kind.MAMBA in kinds and not kinds & {Kind.WINDOW, Kind.CHUNKED}


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
        output = 0 if one_step else _output_tokens(config, tier)
        chosen = lengths(config, horizon + output)
        for known in chosen:
            prompt = max(1, known - output)
            left = lookup.left_by(config, prompt, known, states)
            for shared in chosen[: bisect_right(chosen, known)]:
                for tokens in (shared, shared + 1, shared + 1 + period):
                    yield Case(prompt, known, shared, tokens, one_step), left


def _output_tokens(config: Config, tier: Tier) -> int:
    return (1 + config.tail_drop) * period_tokens(config) if tier == "offload" else 0


def tries(config: Config) -> int:
    """How many pairs of requests there are up to the horizon, in the tier with more of them."""
    longest = horizon_tokens(config) + (_output_tokens(config, "offload") if config.offload else 0)
    modes = 2 if any(group.kind is Kind.MAMBA for group in config.groups) else 1
    return modes * 3 * longest * (longest + 1) // 2


def exhaustive(twin: Config) -> bool:
    """Whether every pair of requests up to the horizon is tried, rather than some lengths only."""
    return tries(twin) <= MOST_TRIES


def lengths(config: Config, longest: int) -> Sequence[int]:
    """The request lengths that are tried: all, or if these are too many some, spread evenly.

    One in each of equal parts, and within its part each time one further, so that remainders vary.
    """
    if exhaustive(config):
        return range(1, longest + 1)
    count = isqrt(2 * MOST_TRIES // (3 * 2))
    if longest <= count:
        return range(1, longest + 1)
    part = arith.floordiv(longest, count)
    return [1 + index * part + index % part for index in range(count)]


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
    for shared in lengths(config, known) if exhaustive(config) else lengths(config, known)[::20]:
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
