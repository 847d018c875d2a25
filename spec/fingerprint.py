"""The state of a world as text, for searches that must not visit a state twice.

Everything that can be reached from the world is written down, its policy included, but for what is named in
:data:`LEFT_OUT`; so a new field counts from the day it is added.  Equal texts, equal futures: the same
choices are possible and the same consequences break, now and later.  That holds among worlds of one
configuration, one policy and *one table of prefixes*, which alone explains the numbers that pages hold.

Maps are written in their order, which decides who goes first; sets are sorted.  A list that is met twice is
written once and named after that: what is written through one name is read through the other (block ids of a
table write that lie in pinned memory).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from types import FunctionType
from typing import TYPE_CHECKING, Any

from spec.book import Status
from spec.chains import Chains
from spec.config import Config
from spec.reference.decisions import Decisions

if TYPE_CHECKING:
    from spec.world import World

SCALARS = frozenset({int, str, bool, type(None), Status})
CONSTANT = (Config, Chains, Decisions, FunctionType)  # the same in every world of a search; without memory

#: fields that say how a run was, and do not decide how it goes on
LEFT_OUT = {
    "World": frozenset({  # what was counted, noted and asked for
        "count", "choices", "disciplines", "events", "every", "fired", "handed_out", "off", "published_in",
        "record", "tally", "witnesses",
    }),
    "Transfer": frozenset({"handed_out"}),
    "Client": frozenset({"preempted_at"}),
    "Rank": frozenset({"forwarded"}),
}  # fmt: skip
"""``handed_out``, ``published_in``, ``preempted_at`` and ``forwarded`` are read by witnesses only."""


def mark(world: World) -> bytes:
    """A digest of the text: 16 bytes, so that no search will meet two texts with the same one."""
    return blake2b(text(world).encode(), digest_size=16).digest()


def text(world: World) -> str:
    """All that decides how the run goes on.  Raises :class:`TypeError` for an object that it cannot look
    into."""
    return _written(world, {})


def _written(value: Any, met: dict[int, int]) -> str:
    kind: Any = type(value)
    if kind in SCALARS:
        return repr(value)
    if kind is tuple:
        return repr(value) if SCALARS.issuperset(map(type, value)) else _row(value, met)
    if id(value) in met:
        return f"@{met[id(value)]}"
    if isinstance(value, CONSTANT):
        return ""
    met[id(value)] = len(met)
    if kind is list:
        return repr(value) if SCALARS.issuperset(map(type, value)) else _row(value, met)
    if kind is deque:
        return _row(value, met)
    if kind in (dict, Counter):
        return "{" + ",".join([f"{_written(k, met)}:{_written(v, met)}" for k, v in value.items()]) + "}"
    if kind is set:
        return "{" + ",".join(sorted([_written(one, met) for one in value])) + "}"
    names = _fields(kind) or tuple(vars(value))
    skipped = LEFT_OUT.get(kind.__name__, ())
    parts = [_written(getattr(value, name), met) for name in names if name not in skipped]
    return f"{kind.__name__}({';'.join(parts)})"


def _row(values: Iterable[Any], met: dict[int, int]) -> str:
    return "[" + ",".join([_written(one, met) for one in values]) + "]"


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The slots of a class of the model; empty for one that has none.  Raises :class:`TypeError`."""
    if kind.__module__.partition(".")[0] != "spec":
        raise TypeError(f"a fingerprint cannot look into {kind.__module__}.{kind.__name__}")
    return tuple(name for base in reversed(kind.__mro__) for name in vars(base).get("__slots__", ()))
