"""A fault file of somebody's own: read, checked before anything runs, and watched while it does.

What is wrong with the file itself (a name that does not exist, a function of the wrong arity, an error that
it raises) is bad input and never a verdict; and a change that no run ever asked for, or that answered as the
reference does whenever it was asked, has not been tried.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from spec import config as configs
from spec.config import Config
from spec.faults import CATALOGUE
from spec.faults.fault import DECISION, LIVENESS, Fault
from spec.ownfile import OwnFileError, module_of
from spec.reference import Decisions

WORDS = ("name", "mechanism", "kind", "did", "repair")  # fields of a fault that are text
LISTS = ("source", "bites", "harmless", "cases")  # and those that are tuples of text


# -- reading ---------------------------------------------------------------------------------------------


def load(path: str) -> Fault:
    """The checked ``FAULT`` of a Python file.  Raises :class:`OwnFileError`."""
    module = module_of(path, "fault_file")
    fault = getattr(module, "FAULT", None)
    if not isinstance(fault, Fault):
        raise OwnFileError(f"{path}: must define FAULT = Fault(...) (from spec.faults import Fault)")
    for problem in problems(fault):
        raise OwnFileError(f"{path}: FAULT.{problem}")
    return fault


# -- checking --------------------------------------------------------------------------------------------


def problems(fault: Fault) -> Iterator[str]:
    """What is wrong with an entry, each beginning with the name of the field."""
    for field in WORDS:
        if not isinstance(getattr(fault, field), str) or not getattr(fault, field):
            yield f"{field} must be text, got {getattr(fault, field)!r}"
    for field in LISTS:
        value = getattr(fault, field)
        if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
            yield f'{field} must be a tuple of text, as ("one",), got {value!r}'
    yield from unknown("kind", fault.kind, (DECISION, LIVENESS))
    yield from unknown("mechanism", fault.mechanism, sorted({one.mechanism for one in CATALOGUE.values()}))
    if not fault.bites:
        yield "bites must name at least one configuration to hunt in"
    for field in ("bites", "harmless"):
        for name in getattr(fault, field):
            try:
                configs.find(name)
            except configs.ConfigError as error:
                yield f"{field}: {error}"
    for field in ("change", "base"):
        yield from wrong_decisions(field, getattr(fault, field))
    if not fault.change and not fault.tamper:
        yield "change replaces no decision, and there is no tamper: nothing to hunt"
    if fault.tamper is not None and not (callable(fault.tamper) and takes(fault.tamper, 1)):
        yield f"tamper must be a function of one argument, a policy factory, got {fault.tamper!r}"


def unknown(field: str, value: str, known: Sequence[str]) -> Iterator[str]:
    """A value that is none of those known."""
    if value not in known:
        yield f"{field} must be one of {', '.join(known)}; got {value!r}"


def wrong_decisions(field: str, changes: object) -> Iterator[str]:
    """What is wrong with a table of replacements for :class:`~spec.reference.decisions.Decisions`."""
    if not isinstance(changes, Mapping):
        yield f"{field} must be a dictionary of decisions, got {changes!r}"
        return
    right = {one.name: getattr(Decisions(), one.name) for one in fields(Decisions)}
    for name, value in changes.items():
        where = f"{field}[{name!r}]"
        if name not in right:
            yield f"{where}: no such decision; spec/reference/decisions.py has all of them"
        elif isinstance(right[name], tuple):
            if not isinstance(value, tuple) or sorted(map(str, value)) != sorted(right[name]):
                yield f"{where} must be a tuple of the same parts in another order: {', '.join(right[name])}"
        elif not callable(value):
            yield f"{where} must be a function, got {value!r}"
        elif not takes(value, len(given := list(inspect.signature(right[name]).parameters))):
            yield f"{where} must take {len(given)} argument(s): {', '.join(given) or '-'}"


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments; if it does not tell, yes."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


# -- watching --------------------------------------------------------------------------------------------


def counted(changes: Mapping[str, Any], asked: Counter[str]) -> dict[str, Any]:
    """The replacements, each counting in ``asked`` how often it is asked.  Of any table of decisions."""

    def counting(name: str, decide: Any) -> Any:
        @wraps(decide, updated=())
        def count(*given: Any) -> Any:
            asked[name] += 1
            return decide(*given)

        return count

    return {name: counting(name, one) if callable(one) else one for name, one in changes.items()}


def never_asked(changes: Mapping[str, Any], asked: Counter[str], todo: Sequence[Config]) -> list[str]:
    """Replacements that no run in these configurations asked for: they were not tried.

    An order is used by every step of its runner."""
    orders = {f"{config.runner}_order" for config in todo}
    return [name for name, one in changes.items() if not (asked[name] if callable(one) else name in orders)]


def differing(changes: Mapping[str, Any], right: Mapping[str, Any], differed: Counter[str]) -> dict[str, Any]:
    """The replacements, each counting in ``differed`` how often its answer was another than the right one."""

    def comparing(name: str, decide: Any) -> Any:
        @wraps(decide, updated=())
        def compare(*given: Any) -> Any:
            try:
                expected = right[name](*given)
            except Exception:  # noqa: BLE001 - asked for what the reference is never asked: nothing to equal
                differed[name] += 1
                return decide(*given)
            answer = decide(*given)
            differed[name] += answer != expected
            return answer

        return compare

    return {name: comparing(name, one) if callable(one) else one for name, one in changes.items()}


def never_differed(fault: Fault, differed: Counter[str]) -> list[str]:
    """Replacements whose answers were all those of the design that the fault is in: nothing was tried."""
    right = decisions_of(fault)
    return [
        name
        for name, one in fault.change.items()
        if not (differed[name] if callable(one) else one != right[name])
    ]


def decisions_of(fault: Fault) -> dict[str, Any]:
    """Every decision of the design that the fault is in."""
    return {one.name: getattr(Decisions(), one.name) for one in fields(Decisions)} | dict(fault.base)


def watched(fault: Fault, path: str, asked: Counter[str], differed: Counter[str]) -> Fault:
    """The fault with every answer of its own decisions counted, and of the right type."""
    kept = {field: answering_right(getattr(fault, field), path) for field in ("change", "base")}
    change = differing(kept["change"], decisions_of(fault), differed)
    return replace(fault, change=counted(change, asked), base=kept["base"])


def answering_right(changes: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The replacements; an answer of another type than the decision has is the file's error."""
    hints = get_type_hints(Decisions)

    def checking(name: str, decide: Any) -> Any:
        wanted = classes(get_args(hints[name])[-1])

        @wraps(decide, updated=())
        def check(*given: Any) -> Any:
            answer = decide(*given)
            if not isinstance(answer, wanted) or (isinstance(answer, bool) and bool not in wanted):
                code = getattr(decide, "__code__", None)
                at = f":{code.co_firstlineno}" if code and code.co_filename == path else ""
                words = " or ".join(one.__name__ for one in wanted if bool not in wanted or one is bool)
                raise OwnFileError(f"{path}{at}: {name} must answer {words}, got {answer!r}")
            return answer

        return check

    return {name: checking(name, one) if callable(one) else one for name, one in changes.items()}


def classes(hint: Any) -> tuple[type, ...]:
    """The classes that an annotation admits; a truth value may be a number, a list a tuple."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(one for part in get_args(hint) for one in classes(part))
    found = get_origin(hint) or hint
    return {bool: (bool, int), list: (list, tuple)}.get(found, (found,))
