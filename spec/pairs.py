"""Brute force over pairs of requests: the first runs to its end, the second looks up what it shares with it.

Every statement of ``spec.never`` is tried on every pair up to a bound, on the deployment's scaled twin
(``spec.twins``).  A confirmation can fail in three ways: a forbidden hit happens, nothing was ever in reach
of being forbidden, or the remedy does not bring such a hit about.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isqrt

from spec import arith, lookup
from spec.config import LARGEST, Config, Kind, problems
from spec.never import Never, paired
from spec.prefix import Case, Tier, horizon_tokens, look_up, period_tokens, seen

MOST_TRIES = 60_000
"""Pairs of requests that are tried; of a twin with more, only some lengths are."""


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
            tried[s.tier], tempted[i], broken[i], allowed(s, twin), s.allow is not None or s.allow_steps
        )
        for i, s in enumerate(statements)
    ]


def with_remedies(about: list[Never], config: Config, twin: Config) -> list[Never]:
    """The statements, each with the first of its remedies that can be served and brings such a hit about."""
    return [_with_remedy(large, small, config, twin) for large, small in paired(about, twin)]


def _with_remedy(about: Never, small: Never, config: Config, twin: Config) -> Never:
    if about.allow_steps:
        return about
    for remedy in about.remedies:
        changed = replace(remedy.change(config), pool_blocks=LARGEST)  # bounds are for the model's world
        if next(problems(changed), None) is None and allowed(replace(small, allow=remedy.change), twin):
            return replace(about, remedy=remedy.words, allow=remedy.change)
    return about


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
        yield case, ends, look_up(config, tier, ends, case.tokens)


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
                    yield case, holed, look_up(config, tier, holed, tokens)


def _tempts(statement: Never, case: Case) -> bool:
    """Whether the shared tokens alone would allow a forbidden hit."""
    top = min(case.shared_tokens, case.tokens - 1)
    return any(0 < hit <= top and statement.forbids(case, hit) for hit in (top, top - 1, 1))


def allowed(statement: Never, twin: Config) -> tuple[Case, int] | None:
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
