"""Which prefix hits a deployment can never have, why, and what would allow them.

A *never* is a statement about all pairs of requests: the first leaves entries behind, the second shares some
tokens with it and looks them up.  It is printed with the deployment's own numbers, and confirmed by brute
force (``spec.pairs``) on a scaled twin (``spec.twins``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from spec import arith, lookup
from spec.config import Config, ConfigError, Kind
from spec.prefix import Case, Prefix, Tier


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


# -- the statements ------------------------------------------------------------------------------------------


def nevers(config: Config) -> list[Never]:
    """Every statement that applies to this deployment, the pool's first; remedies are still to be tried
    (``spec.pairs.with_remedies``).

    Raises :class:`ConfigError` if all groups are chunked-local: their lookup answers the start of an
    attention chunk whatever was left, so that no number of shared tokens decides.
    """
    if all(group.kind is Kind.CHUNKED for group in config.groups):
        raise ConfigError(
            "every group has kind = chunked: a hit at the start of an attention chunk needs no history, so "
            "no shared prefix decides what is reused; add the model's other group"
        )
    return list(_statements(config))


def on_twin(about: list[Never], twin: Config) -> list[Never]:
    """The same statements about the twin, with the remedies that ``about`` tells."""
    return [replace(small, allow=large.allow) for large, small in paired(about, twin)]


def paired(about: list[Never], twin: Config) -> list[tuple[Never, Never]]:
    """Each statement beside the same one about the twin."""
    small = list(_statements(twin))
    if [(s.name, s.tier) for s in about] != [(s.name, s.tier) for s in small]:
        raise AssertionError(f"the scaled twin {twin.name} follows other rules")
    return list(zip(about, small, strict=True))


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
