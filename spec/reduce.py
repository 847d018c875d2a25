"""The reducer: a long failing run becomes a short one that breaks the same rule.

A run is determined by its configuration, its policy and its choices, so reducing is: change the choices,
replay, keep the change if the same rule still breaks. Choices are deleted first in large chunks, then one
by one; then several are merged into one and arguments are made simpler; and again, until nothing helps. The
result is *minimal*: no single choice of it can be left out. Everything is deterministic, and a replay takes
milliseconds.

Choices name things by the adversary's names and by role, so a shorter run keeps its meaning; a choice that
is not possible any more is skipped and dropped. (The method is delta debugging, Zeller and Hildebrandt
2002, with Hypothesis' idea of simplifying arguments afterwards.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from spec.chains import Chains
from spec.config import Config
from spec.events import Event
from spec.policies import PolicyFactory
from spec.world import World

Choices = tuple[Event, ...]


def replay(
    config: Config,
    policy_factory: PolicyFactory,
    choices: Sequence[Event],
    record: bool = False,
    off: frozenset[str] = frozenset(),
    chains: Chains | None = None,
) -> World:
    """The world after these choices, stopped at the first verdict; impossible choices are skipped.

    ``chains``: a table of prefixes that it shares with other worlds (:mod:`spec.fingerprint`)."""
    return replay_made(config, policy_factory, choices, record=record, off=off, chains=chains)[0]


def replay_made(
    config: Config,
    policy_factory: PolicyFactory,
    choices: Sequence[Event],
    *,
    record: bool = False,
    off: frozenset[str] = frozenset(),
    chains: Chains | None = None,
) -> tuple[World, Choices]:
    """The world, and the choices that were possible and therefore made."""
    world = World(config, policy_factory, record=record, off=off, chains=chains)
    made = tuple(choice for choice in choices if world.choose(choice))
    return world, made


def breaks(world: World, rule: str) -> bool:
    """Whether the run broke this rule, as its verdict or on the way."""
    return any(breach.rule == rule for breach in (*world.disciplines, world.verdict) if breach)


def reduce(
    config: Config,
    policy_factory: PolicyFactory,
    choices: Sequence[Event],
    rule: str,
    *,
    spelled_out: bool = False,
) -> Choices:
    """The shortest run found by deleting, merging and simplifying, that still breaks ``rule``.

    ``spelled_out``: every step is a choice of its own; the run does not end in ``quiet``.  Raises
    ``ValueError`` if the given run does not break the rule."""
    given = tuple(choices)
    if spelled_out:
        given = spell_out(config, policy_factory, given)
    return _Reducer(config, lambda: World(config, policy_factory), rule, quiet=not spelled_out).reduce(given)


def reduce_in(config: Config, make: Callable[[], World], choices: Sequence[Event], rule: str) -> Choices:
    """The same in worlds of another kind: ``make`` gives a fresh one."""
    return _Reducer(config, make, rule, quiet=True).reduce(tuple(choices))


def spell_out(config: Config, policy_factory: PolicyFactory, choices: Choices) -> Choices:
    """The same run with a final ``quiet`` as the ``drain`` and ``schedule`` choices that it stands for."""
    if choices[-1:] != (("quiet",),):
        return choices
    world, made = replay_made(config, policy_factory, choices[:-1])
    spelled = list(made)
    while world.verdict is None and len(spelled) < len(choices) + LONGEST_SPELLING:
        for choice in (("drain",), ("schedule",)):
            if world.choose(choice):
                spelled.append(choice)
    return tuple(spelled) if world.verdict else choices


class _Reducer:
    """One reduction: the rule to keep, and the runs already tried."""

    def __init__(self, config: Config, make: Callable[[], World], rule: str, *, quiet: bool) -> None:
        self.config, self.make, self.rule, self.quiet = config, make, rule, quiet
        self.tried: dict[Choices, Choices | None] = {}

    def attempt(self, choices: Choices) -> Choices | None:
        """The choices that were made until the rule broke, or None if it did not."""
        if choices not in self.tried:
            self.tried[choices] = self._attempt(choices)
        return self.tried[choices]

    def _attempt(self, choices: Choices) -> Choices | None:
        world = self.make()
        made = []
        try:
            for choice in choices:
                if world.choose(choice):
                    made.append(choice)
                    if breaks(world, self.rule):
                        return tuple(made)
        except Exception:  # noqa: BLE001 - a wrong policy may crash on the way to nothing; not the failure we keep
            return None
        return None

    def reduce(self, choices: Choices) -> Choices:
        """Delete, merge and simplify until nothing helps."""
        best = self.attempt(choices)
        if best is None:
            raise ValueError(f"these choices do not break {self.rule}")
        while True:
            before = best
            best = self.delete(best)
            best = self.merge(best)
            best = self.simplify(best)
            if best == before:
                best = self.grow(best)
            if best == before:
                return self.rename(best)

    def delete(self, best: Choices) -> Choices:
        """Delete chunks of halving size, from the end (late choices are most often noise), down to one."""
        size = max(1, len(best) // 2)
        while True:
            changed = False
            end = len(best)
            while end > 0:
                got = self.attempt(best[: max(0, end - size)] + best[end:])
                if got is not None and len(got) < len(best):
                    best, changed = got, True
                    end = min(end, len(best))
                else:
                    end -= size
            if size == 1 and not changed:
                return self.delete_pairs(best)
            if not changed or size > 1:
                size = max(1, size // 2)

    def delete_pairs(self, best: Choices) -> Choices:
        """Delete two choices at once: an arrival with what only served it.  For short runs only."""
        if len(best) > PAIRS_UP_TO:
            return best
        for one in range(len(best)):
            for two in range(one + 1, len(best)):
                got = self.attempt(best[:one] + best[one + 1 : two] + best[two + 1 :])
                if got is not None:
                    return self.delete(got)
        return best

    def merge(self, best: Choices) -> Choices:
        """Neighbours become one: a ``run`` until it blocks, a ``drain``, or all that is left ``quiet``.

        A run whose rest is ``quiet`` says that no clever scheduling was needed from there on.
        """
        for first in range(len(best) - 1 if self.quiet else 0):
            got = self.attempt((*best[:first], ("quiet",)))
            if got is not None:
                return got
        for length in range(min(len(best), LONGEST_MERGE), 1, -1):
            for first in range(len(best) - length + 1):
                part = best[first : first + length]
                runs = dict.fromkeys(("run", *c[1:3], 0) for c in part if c[0] == "run")
                for one in (*runs, ("work",), ("drain",)):
                    got = self.attempt((*best[:first], one, *best[first + length :]))
                    if got is not None and len(got) < len(best):
                        return self.merge(got)
        return best

    def grow(self, best: Choices) -> Choices:
        """A longer prompt may save choices: a block that is full at once needs no steps to fill it."""
        blocks = sorted({group.block_tokens for group in self.config.groups})
        for at, choice in enumerate(best):
            for prompt in (block + 1 for block in blocks if choice[0] == "arrive" and choice[3] <= block):
                got = self.attempt((*best[:at], (*choice[:3], prompt, choice[4]), *best[at + 1 :]))
                if got is not None and len(got) <= len(best):
                    shorter = self.delete(got)
                    if len(shorter) < len(best):
                        return shorter
        return best

    def simplify(self, best: Choices) -> Choices:
        """Simpler arguments, one at a time, first choice first."""
        at = 0
        while at < len(best):
            for simpler in simpler_choices(best[at], self.config):
                got = self.attempt((*best[:at], simpler, *best[at + 1 :]))
                if got is not None and len(got) <= len(best):
                    best = got
                    break
            else:
                at += 1
        return best

    def rename(self, best: Choices) -> Choices:
        """Clients are called r1, r2, ... as they arrive; ranks are named from 0 on where they are alike."""
        order = dict.fromkeys(choice[1] for choice in best if choice[0] == "arrive")
        names = {name: f"r{number}" for number, name in enumerate(order, start=1)}

        def renamed(choice: Event) -> Event:
            kind = choice[0]
            if kind == "arrive":
                return (kind, names[choice[1]], names.get(choice[2], choice[2]), *choice[3:])
            if kind in ("accept", "abort", "report", "fail"):
                return (kind, names.get(choice[1], choice[1]), *choice[2:])
            return choice

        best = self.attempt(tuple(map(renamed, best))) or best
        ranks: dict[int, int] = {}
        for choice in best:
            if choice[0] in RANK_FIELD:
                ranks.setdefault(choice[RANK_FIELD[choice[0]]], len(ranks))
        alike = []
        for choice in best:
            at = RANK_FIELD.get(choice[0])
            alike.append((*choice[:at], ranks[choice[at]], *choice[at + 1 :]) if at else choice)
        return self.attempt(tuple(alike)) or best


RANK_FIELD = {"run": 1, "report": 3, "fail": 3}  # kind -> where its rank stands
PAIRS_UP_TO = 24  # choices: at most 276 replays
LONGEST_SPELLING = 400  # choices
LONGEST_MERGE = 12  # choices


def simpler_choices(choice: Event, config: Config) -> Iterator[Event]:
    """Choices of the same kind that are simpler, simplest first."""
    kind = choice[0]
    if kind == "arrive":
        _, name, family, prompt, outputs = choice
        if family != "0":
            yield (kind, name, "0", prompt, outputs)
        for fewer in smaller(prompt, 1):
            yield (kind, name, family, fewer, outputs)
        for fewer in smaller(outputs, 1):
            yield (kind, name, family, prompt, fewer)
    elif kind == "accept":
        for fewer in smaller(choice[2], 0):
            yield (kind, choice[1], fewer)
    elif kind == "quiet":
        yield ("drain",)
    elif kind == "run" and choice[3]:
        yield (*choice[:3], 0)
        for fewer in smaller(choice[3], 1):
            yield (*choice[:3], fewer)


def smaller(value: int, least: int) -> Iterator[int]:
    """Numbers to try instead: the least, then ever closer ones."""
    gap = value - least
    while gap > 0:
        yield value - gap
        gap //= 2
