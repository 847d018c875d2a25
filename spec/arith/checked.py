"""Argument checks around pure integer formulas.

Every formula of this package is a *pure core*: a plain function over integers that a solver can execute
path by path, that Python runs, and that a kernel compiler can compile.  A core therefore checks nothing.
Callers go through a `Checked` wrapper, which refuses arguments outside the core's domain with one line that
names the argument, and which carries the core as its attribute `core`.

`domain` marks a core with the limits of its arguments; `checked` builds the wrapper.  An argument without a
limit may be any integer.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ArithError(ValueError):
    """An argument outside a formula's domain; the message is one line that names function, argument and
    limit.
    """

    def __init__(self, function: str, argument: str, problem: str) -> None:
        super().__init__(f"{function}: {argument} {problem}")
        self.function = function
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Limit:
    """The least and the greatest value of an argument, or the name of another that it may not exceed."""

    least: int | None = None
    most: int | None = None
    at_most: str | None = None


POSITIVE = Limit(least=1)
NATURAL = Limit(least=0)
FLAG = Limit(least=0, most=1)
ANY = Limit()

DOMAINS: dict[Callable[..., object], dict[str, Limit]] = {}
"""The limits of every core, filled by `domain`; the domain of a theorem about it and of its brute-force
box.
"""


def domain(**limits: Limit) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Record the limits of a core's arguments; the core itself is returned unchanged.

    Raises TypeError where a name is not an argument of the core.
    """

    def record(core: Callable[P, R]) -> Callable[P, R]:
        names = tuple(inspect.signature(core).parameters)
        for name, limit in limits.items():
            if name not in names or (limit.at_most is not None and limit.at_most not in names):
                raise TypeError(f"{core.__name__} has no argument named as in {name}={limit}")
        DOMAINS[core] = {name: limits.get(name, ANY) for name in names}
        return core

    return record


class Checked(Generic[P, R]):
    """A formula with its argument checks; `core` is the formula without them."""

    def __init__(self, core: Callable[P, R]) -> None:
        if core not in DOMAINS:
            raise TypeError(f"{core.__name__} declares no domain; decorate it with @domain(...)")
        self.core = core
        self.__name__ = core.__name__
        self.__doc__ = core.__doc__
        self._limits = tuple(DOMAINS[core].items())
        self._bounded = tuple((name, limit) for name, limit in self._limits if limit.at_most is not None)
        self._names = tuple(DOMAINS[core])
        parameters = inspect.signature(core).parameters.values()
        self._flags = frozenset(p.name for p in parameters if p.annotation in (bool, "bool"))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(zip(self._names, args, strict=False))
        given.update(kwargs)
        for name, limit in self._limits:
            if name not in given:
                continue  # the call below reports a missing argument in Python's own words
            value = given[name]
            if name in self._flags:
                if not isinstance(value, bool):
                    raise ArithError(self.__name__, name, f"must be True or False, got {value!r}")
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ArithError(self.__name__, name, f"must be an integer, got {value!r}")
            if limit.least is not None and value < limit.least:
                raise ArithError(self.__name__, name, f"must be at least {limit.least}, got {value}")
            if limit.most is not None and value > limit.most:
                raise ArithError(self.__name__, name, f"must be at most {limit.most}, got {value}")
        for name, limit in self._bounded:
            if name in given and limit.at_most in given and given[name] > given[limit.at_most]:
                value = given[name]
                problem = f"must be at most {limit.at_most} ({given[limit.at_most]}), got {value}"
                raise ArithError(self.__name__, name, problem)
        return self.core(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<checked {self.__name__}{tuple(self._names)}>"


def checked(core: Callable[P, R]) -> Checked[P, R]:
    """The checked form of a core that `domain` marked."""
    return Checked(core)
