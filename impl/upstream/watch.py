"""Inside the child process: which of some functions of the release were called.

They are wrapped where they are found, as methods of their class or as attributes of their module and of every
module that imported them; what they do and return stays untouched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

Name = tuple[str, str]  # path under the package, "Class.method" or "function"


class Watch:
    """The functions that are watched, and those of them that were called."""

    def __init__(self) -> None:
        self.known: set[Name] = set()
        self.called: set[Name] = set()  # since the last :meth:`take`
        self.ever: set[Name] = set()

    def take(self) -> list[Name]:
        """The functions that were called since the last time."""
        called = sorted(self.called)
        self.ever |= self.called
        self.called.clear()
        return called

    def add(self, names: Iterable[Name]) -> None:
        """Wrap functions; a name that is no function of the release is left out."""
        for name in names:
            if name not in self.known and self._wrapped(name):
                self.known.add(name)

    def _counting(self, name: Name, function: Any) -> Callable[..., Any]:
        called = self.called

        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return counting

    def _wrapped(self, name: Name) -> bool:
        path, function = name
        module = importlib.import_module("vllm." + path.removesuffix(".py").replace("/", "."))
        *outer, last = function.split(".")
        owner: Any = module
        for part in outer:
            owner = vars(owner).get(part)
            if not inspect.isclass(owner):
                return False
        found = vars(owner).get(last)
        made: Any
        if inspect.isfunction(found):
            made = self._counting(name, found)
        elif isinstance(found, staticmethod | classmethod):
            made = type(found)(self._counting(name, found.__func__))
        elif isinstance(found, property) and found.fget is not None:
            made = property(self._counting(name, found.fget), found.fset, found.fdel, found.__doc__)
        else:
            return False
        setattr(owner, last, made)
        if owner is module:
            for other in [one for key, one in sys.modules.items() if key.startswith("vllm.")]:
                for held in [key for key, value in vars(other).items() if value is found]:
                    setattr(other, held, made)
        return True
