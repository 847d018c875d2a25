"""What is proved: symbols with domains, hypotheses, claims, lemmas, and the formulas that a theorem refutes.

A claim is a Python function over its symbols; its parameter names say which.  The same function runs
symbolically (every path becomes an obligation), on plain integers (a counterexample is checked by running
it), and over boxes (the smallest witness).  Inside a claim, `and`, `or`, `if`, `min` and `max` fork;
`both`, `either`, `implies` and `iff` of `spec.prove.symbolic` do not.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from spec.prove.symbolic import Int, Truth, both, implies

Group = Literal["coverage", "align"]
Values = dict[str, Any]
Predicate = Callable[..., Truth]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A universally quantified integer with its least value (None: any integer) and what it counts."""

    name: str
    least: int | None
    meaning: str

    @property
    def domain(self) -> str:
        """The domain in print."""
        return f"{self.name} any" if self.least is None else f"{self.name} >= {self.least}"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A side condition in words or a formula, and its predicate."""

    text: str
    holds: Predicate


@cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a predicate's parameters."""
    return tuple(inspect.signature(function).parameters)


def apply(function: Callable[..., Any], values: Values) -> Any:
    """Call a predicate with those of the values that it names."""
    return function(**{name: values[name] for name in parameters(function)})


@dataclass(frozen=True, slots=True)
class LemmaUse:
    """An instance of a lemma; only `Lemma.__call__` makes one."""

    lemma: "Lemma"
    instance: Truth


Hints = Callable[..., Sequence[LemmaUse]]


def no_hints() -> Sequence[LemmaUse]:
    """No lemma is needed."""
    return ()


@dataclass(frozen=True, slots=True)
class Claim:
    """For all symbols in their domains: if the hypotheses hold, so does `holds`.

    `hints` names instances of lemmas that the solver may use; each lemma is an obligation of its own.
    """

    name: str
    symbols: tuple[Symbol, ...]
    holds: Predicate
    hypotheses: tuple[Hypothesis, ...] = ()
    hints: Hints = no_hints


@dataclass(frozen=True, slots=True)
class Lemma:
    """A claim that other claims may use at chosen arguments; proved before anything that uses it."""

    claim: Claim

    @property
    def name(self) -> str:
        """The lemma's name, as rows list it."""
        return self.claim.name

    def __call__(self, *arguments: Any) -> LemmaUse:
        """The instance at these arguments, in the order of the symbols: domain and hypotheses imply the
        claim.

        Raises Forked where the lemma's own predicates fork: an instance is used on every path, so it must be
        one formula.  The arguments may come from a path that forked, since the lemma holds for any integers.
        """
        names = [symbol.name for symbol in self.claim.symbols]
        values = dict(zip(names, arguments, strict=True))
        symbolic = next((argument for argument in arguments if isinstance(argument, Int)), None)
        with symbolic.context.unforked(f"lemma {self.name}") if symbolic is not None else nullcontext():
            premises = [values[s.name] >= s.least for s in self.claim.symbols if s.least is not None]
            premises += [apply(h.holds, values) for h in self.claim.hypotheses]
            instance = implies(both(*premises), apply(self.claim.holds, values))
        return LemmaUse(self, instance)


@dataclass(frozen=True, slots=True)
class Refutation:
    """A historic or hypothetical formula for which the claim is false.

    `witness` is the counterexample to report; `tell` puts a counterexample in words, in tokens and chunks.
    `pin` names the sizes that are held at the smallest witness's values when the solver is asked for a
    counterexample of its own: with numbers for divisors the question is linear and always decided.
    """

    formula: str
    kind: Literal["historic", "hypothetical"]
    claim: Claim
    witness: dict[str, int]
    tell: Callable[..., str]
    pin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contract:
    """A postcondition of a loop over data: assumed by a theorem, checked by brute force in `props/`."""

    name: str
    statement: str


@dataclass(frozen=True, slots=True)
class Theorem:
    """One row of the table: its claims, what it refutes, the contracts it rests on, and remarks on the
    result.
    """

    number: int
    name: str
    group: Group
    statement: str
    claims: tuple[Claim, ...]
    refutes: tuple[Refutation, ...] = ()
    contracts: tuple[Contract, ...] = ()
    remarks: tuple[str, ...] = ()
