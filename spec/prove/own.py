"""Formulas of somebody's own in place of shared ones: ``python -m spec.prove --file FORMULAS.py``.

The file defines functions that bear the names of shared formulas, with their parameters.  Each stands in for
the shipped one as a mutant does (`spec.prove.mutants`), so that every caller and every theorem sees it, and
the claims that run it are judged anew.  What a theorem refutes is about shipped formulas, and is left out.

An error that such a function raises is the file's.  Only while it runs on symbols may a path that raises be
one that no integers take: the claim is said to fail on it (`Undefined`), and integers that do take it raise
the error anew.
"""

from __future__ import annotations

import ast
import difflib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

from spec.arith.checked import DOMAINS, FLAG, ArithError, Checked
from spec.ownfile import OwnFileError, in_words, line_in, module_of, place
from spec.prove import report
from spec.prove.engine import Settings, TheoremResult, obligation, prove_claim, smallest_counterexample
from spec.prove.mutants import Mutant, compiled, cores, in_place, is_predicate
from spec.prove.symbolic import Bool, Forked, Int, TooManyPaths, Truth, Undefined, both
from spec.prove.theorem import Claim, Hypothesis, Symbol, Theorem

MODULE = "formula_file"
"""What Python calls the module of the file."""

ALLOWED = (
    "a formula may use whole numbers, + - * // %, comparisons, if, and, or, not, min, max, abs and the "
    "functions of spec.arith.coverage, .align and .division; no /, no floats, no math, no range"
)

NEAR = 0.5
"""How alike a name is that may have been meant, from 0 to 1."""

NOT_ONLY_SAFETY = """\
A refuted claim is false of your formula.  Not every claim is about safety: one that says 'only if', 'no more'
or 'not overstated', or what a thing costs, is exact for the shipped formula; a better one may refute it."""

TRIED = 2_000
"""Assignments at which Python runs a claim that was proved: a function may tell symbols from integers."""

COMPARING_S = 10.0
"""How long the solver may look for a difference between two formulas."""


class RaisedAt(OwnFileError):
    """A formula raised an error at plain integers, at which it may never be asked."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A function of the file: the shared formula it is in place of, its line, and itself, answers checked."""

    name: str
    line: int | None
    function: Callable[..., Any]
    mutant: Mutant
    asked: Counter[str]
    """How often it was called, by its name."""


# -- reading ---------------------------------------------------------------------------------------------


def load(path: str) -> tuple[Formula, ...]:
    """The formulas of a file, in its order.  Raises :class:`OwnFileError`."""
    shipped, domains = cores(), dict(DOMAINS)
    try:
        module = module_of(path, MODULE)
    finally:  # a formula that was copied with its `domain` is no shipped one
        for core in DOMAINS.keys() - domains.keys():
            del DOMAINS[core]
    found = []
    for name, value in list(vars(module).items()):
        if isinstance(value, Checked):  # refuses symbols; its core does not
            value = value.core
            setattr(module, name, value)
        imported = getattr(value, "__module__", MODULE) != MODULE
        if name not in shipped:
            if isinstance(value, FunctionType) and not imported and not name.startswith("_"):
                raise OwnFileError(f"{place(path, line_of(value, path))}: {unknown(name, list(shipped))}")
        elif value is not shipped[name]:
            wrong = wrong_parameters(shipped[name], value)
            if wrong and not imported:
                raise OwnFileError(f"{place(path, line_of(value, path))}: {name} {wrong}")
            if not wrong:  # else a helper of another project that happens to bear the name
                found.append(formula(path, shipped[name], value))
                setattr(module, name, found[-1].function)
    if not found:
        raise OwnFileError(f"{path}: defines none of the shared formulas (spec/arith/coverage.py has most)")
    for one in found:
        check_operations(one, path)
    return tuple(found)


def unknown(name: str, known: list[str]) -> str:
    """What is said of a name that no formula bears."""
    near = ", ".join(difflib.get_close_matches(name, known, 3, NEAR)) or "none (spec/arith/ has them all)"
    return f"no shared formula is named {name}; near: {near}; begin a helper's name with _"


def line_of(function: object, path: str) -> int | None:
    """Where in the file a function is defined, if it is."""
    code = getattr(function, "__code__", None)
    return code.co_firstlineno if code is not None and code.co_filename == path else None


def wrong_parameters(core: FunctionType, own: Any) -> str:
    """What is wrong with a function that is to be called as a core is; empty if nothing."""
    wanted = list(signature(core).parameters)
    try:
        given = list(signature(own).parameters.values())
    except (TypeError, ValueError):
        return f"must be a function, got {own!r}"
    by_place = all(one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for one in given)
    if by_place and [one.name for one in given] == wanted:
        return ""
    return f"must take ({', '.join(wanted)}), got {signature(own)}; begin a helper's name with _"


def formula(path: str, core: FunctionType, own: Callable[..., Any]) -> Formula:
    """A function of the file in place of a core: the core's new code calls it, wherever it is defined."""
    call = f"{core.__name__}({', '.join(signature(core).parameters)})"
    source = f"def {call}:\n    from {MODULE} import {core.__name__}\n    return {call}\n"
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    mutant = Mutant(core.__name__, f"as in {path}", source, compiled(core, tree))
    asked = Counter[str]()
    return Formula(core.__name__, line_of(own, path), answering(path, core, own, asked), mutant, asked)


def answering(
    path: str, core: FunctionType, own: Callable[..., Any], asked: Counter[str]
) -> Callable[..., Any]:
    """The function, counted; its errors and answers of another kind than the core's are the file's errors."""
    name = core.__name__
    wanted = tuple(signature(core).parameters)
    kinds: tuple[type, ...] = (Bool, bool) if is_predicate(core) else (Int, int)

    @wraps(own)
    def answer(*given: Any, **named: Any) -> Any:
        asked[name] += 1
        symbolic = any(isinstance(one, Int | Bool) for one in (*given, *named.values()))
        try:
            found = own(*given, **named)
        except (OwnFileError, TooManyPaths, Undefined, Forked):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told in one line
            raise told(error, symbolic, dict(zip(wanted, given, strict=False)) | named) from None
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            words = "True or False" if bool in kinds else "a whole number"
            at = place(path, line_of(own, path))
            raise OwnFileError(f"{at}: {name} must return {words}, got {found!r}; {ALLOWED}")
        return found

    def told(error: BaseException, symbolic: bool, given: dict[str, Any]) -> Exception:
        at = place(path, line_in(error, path) or line_of(own, path))
        if isinstance(error, RecursionError):
            why = f"the shipped {name} is this function while it is tried, so write out what it would do"
            return OwnFileError(f"{at}: {name} calls itself without end; {why}")
        if isinstance(error, TypeError | AttributeError | ArithError | SystemExit):
            return OwnFileError(f"{at}: {in_words(error)}; {ALLOWED}")
        if symbolic and isinstance(error, ValueError | AssertionError | ArithmeticError):
            return Undefined(f"{at}: {in_words(error)}")
        where = "" if symbolic else f" at {', '.join(f'{key} = {value}' for key, value in given.items())}"
        return (OwnFileError if symbolic else RaisedAt)(f"{at}: {name} raises {in_words(error)}{where}")

    return answer


def check_operations(one: Formula, path: str) -> None:
    """Run a formula on symbols alone.  Raises :class:`OwnFileError` where the engine cannot."""
    try:
        obligation(comparison(one))
    except TooManyPaths as error:
        why = "a loop that an argument ends, or too many if, min and max"
        raise OwnFileError(f"{place(path, one.line)}: {one.name} has {error}: {why}; {ALLOWED}") from None


# -- judging ---------------------------------------------------------------------------------------------


@contextmanager
def in_their_places(formulas: tuple[Formula, ...]) -> Iterator[None]:
    """Run with these formulas in the places of the shipped ones, everywhere."""
    with ExitStack() as stack:
        for one in formulas:
            stack.enter_context(in_place(one.mutant))
        yield


def concerned(
    path: str, group: str, theorems: tuple[Theorem, ...], formulas: tuple[Formula, ...]
) -> tuple[Theorem, ...]:
    """The theorems with a claim that runs one of these formulas, with those claims alone.

    Raises :class:`OwnFileError` where a formula is run by none of them, or the engine cannot run it."""
    found, run = [], set[str]()
    with in_their_places(formulas):
        for theorem in theorems:
            runs = {claim: run_by(claim, formulas) for claim in theorem.claims}
            claims = tuple(claim for claim in theorem.claims if runs[claim])
            left = len(theorem.claims) - len(claims)
            said = f"{left} of {len(theorem.claims)} claims run none of your formulas and are left out."
            if claims:
                remarks = (said,) if left else ()
                found.append(replace(theorem, claims=claims, refutes=(), remarks=remarks))
                run |= set().union(*runs.values())
    idle = ", ".join(one.name for one in formulas if one.name not in run)
    if idle:
        raise OwnFileError(f"{path}: no theorem of group {group} runs {idle}; leave out the group")
    return tuple(found)


def run_by(claim: Claim, formulas: tuple[Formula, ...]) -> set[str]:
    """The formulas that a claim runs on some path, while they are in their places."""
    for one in formulas:
        one.asked.clear()
    with suppress(TooManyPaths):  # undetermined, as the verdict will say
        obligation(claim)
    return {one.name for one in formulas if one.asked}


def flags(core: FunctionType) -> set[str]:
    """The parameters of a core that are truth values."""
    return {name for name, one in signature(core).parameters.items() if one.annotation in (bool, "bool")}


def both_answers(one: Formula, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a formula and the shipped one return; a truth value is given as 0 or 1."""
    core = cores()[one.name]
    given = [value >= 1 if name in flags(core) else value for name, value in values.items()]
    return one.function(*given), core(*given)


def comparison(one: Formula) -> Claim:
    """The claim that a formula equals the shipped one, for all integers of the shipped one's domain."""
    core = cores()[one.name]
    limits = {name: FLAG if name in flags(core) else limit for name, limit in DOMAINS[core].items()}

    @wraps(core)  # the parameters of a predicate are its symbols
    def same(**values: Any) -> Truth:
        own, shipped = both_answers(one, values)
        equal: Truth = own == shipped
        return equal

    @wraps(core)
    def within(**values: Any) -> Truth:
        parts = [values[name] <= limit.most for name, limit in limits.items() if limit.most is not None]
        parts += [values[name] <= values[limit.at_most] for name, limit in limits.items() if limit.at_most]
        return both(*parts)

    symbols = tuple(Symbol(name, limit.least, "an argument") for name, limit in limits.items())
    return Claim(f"{one.name} as shipped", symbols, same, (Hypothesis("the upper limits", within),))


@dataclass(frozen=True, slots=True)
class Compared:
    """A formula beside the shipped one: whether they are equal, or where they first differ and how."""

    formula: Formula
    equal: bool | None
    at: dict[str, int] | None = None
    own: int | None = None
    shipped: int | None = None
    reason: str = ""

    def text(self, path: str) -> str:
        """The formula, and the comparison in a line."""
        if self.equal:
            told = "equals the shipped formula for all whole numbers of its domain"
        elif self.at is not None:
            told = f"differs first at {report.point_text(self.at)}: {self.own}, shipped {self.shipped}"
        else:
            told = f"not compared with the shipped formula: {self.reason}"
        return f"{place(path, self.formula.line)}: {self.formula.name} {told}"

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "name": self.formula.name,
            "line": self.formula.line,
            "equals_shipped": self.equal,
            "first_differs_at": self.at,
            "own": self.own,
            "shipped": self.shipped,
            "reason": self.reason,
        }


def compared(one: Formula, settings: Settings) -> Compared:
    """Where a formula first differs from the shipped one: where the sum of the arguments is the least."""
    claim = comparison(one)
    try:
        deadline = time.perf_counter() + min(settings.timeout_s, COMPARING_S)
        result = prove_claim(claim, replace(settings, smt2=None), deadline, claim.name)
    except RaisedAt as error:  # no theorem may ask there
        return Compared(one, None, reason=str(error))
    if result.counterexample is None:
        return Compared(one, result.verdict == "proved" or None, reason=result.reason)
    return Compared(one, False, result.counterexample, *both_answers(one, result.counterexample))


def tried(path: str, results: Sequence[TheoremResult]) -> None:
    """Run what was proved on plain integers, too.

    Raises :class:`OwnFileError` where a formula answers otherwise on them than on symbols."""
    for result in results:
        for one in result.claims:
            point = smallest_counterexample(one.claim, TRIED) if one.verdict == "proved" else None
            if point is not None:
                where = f"theorem {result.theorem.number}, {one.claim.name}"
                raise OwnFileError(
                    f"{path}: {where}: proved on symbols, but false at {report.point_text(point)}: "
                    "a formula may not use is, isinstance, try or anything that it remembers"
                )


def verdicts(results: Sequence[TheoremResult], left_out: Sequence[int]) -> str:
    """The numbers of the theorems by what became of them, and how to read a refuted one."""
    found: dict[str, list[str]] = {"proved": [], "refuted": [], "undetermined": [], "left out": []}
    for result in results:
        found[result.verdict].append(str(result.theorem.number))
    found["left out"] = list(map(str, left_out))
    told = (f"{verdict} {', '.join(numbers)}" for verdict, numbers in found.items() if numbers)
    line = f"theorems with your formulas: {'; '.join(told)}"
    return f"{line}\n{NOT_ONLY_SAFETY}" if found["refuted"] else line
