"""A Python file of somebody's own (a fault, formulas) run as a module; what is wrong with it is one line."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType


class OwnFileError(Exception):
    """The file is wrong, not what it decides; the message is the one line that is shown.

    No ``ValueError``, so that it does not pass for an error of a policy."""


def module_of(path: str, name: str) -> ModuleType:
    """The module that a file makes, known to Python by ``name``.  Raises :class:`OwnFileError`."""
    if not path:
        raise OwnFileError("--file '': an empty name; name a file")
    if Path(path).is_dir():
        raise OwnFileError(f"{path}: is a folder; name a file")
    if not Path(path).exists():
        raise OwnFileError(f"{path}: no such file")
    if Path(path).suffix != ".py":
        raise OwnFileError(f"{path}: not a Python file; its name must end in .py")
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # a dataclass looks its module up there
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the file raises is told in one line
        line = getattr(error, "lineno", None) or line_in(error, path)
        raise OwnFileError(f"{place(path, line)}: {in_words(error)}") from None
    return module


def place(path: str, line: int | None) -> str:
    """A file and the line in it, if that is known."""
    return f"{path}:{line}" if line else path


def in_words(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {getattr(error, 'msg', error)}".split())


def line_in(error: BaseException, path: str) -> int | None:
    """The last line of the file that the error passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None
