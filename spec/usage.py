"""Command lines: how all commands take options, and how they end when they cannot go on.

Bad usage, bad input and a file that cannot be written are one line on standard error and exit code 2;
Ctrl-C is one line and exit code 3, *undetermined*.  A reader that leaves early (``| head``) and an output
that is closed (``>&-``) change nothing but what is shown: files are written, the verdict is the exit code.
"""

from __future__ import annotations

import _thread
import argparse
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, ParamSpec, TextIO, cast

from spec.outputs import OutputError

P = ParamSpec("P")

BAD_INPUT, UNDETERMINED = 2, 3

LARGEST_SEED = 2**31 - 1
"""What the solvers take, too."""

JSON_HELP = "write the results for machines ('-': to standard output, and all else to standard error)"

AGAIN_SECONDS = 0.01


WRITTEN = ("json", "record", "markdown")
"""Options that name a file which a command writes."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports bad usage in one line; ``--help`` has the usage."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options; what none of the commands can do is bad usage: a report of ``--list``, and two reports
        in one file."""
        options = super().parse_args(args, namespace)
        given = {name: getattr(options, name, None) for name in WRITTEN}
        if getattr(options, "list", False) and given["json"] is not None:
            self.error("--list writes no report: leave out --json")
        files = {name: path for name, path in given.items() if isinstance(path, str) and path}
        named = {name: os.path.realpath(path) for name, path in files.items() if path != "-"}
        for name, path in named.items():
            first = next(other for other in named if named[other] == path)
            if first != name and not (os.path.exists(path) and not os.path.isfile(path)):
                self.error(f"--{first} and --{name} name the same file, {given[name]}: name another")
        return options

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with code 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} (--help shows the usage)\n")


def one_line(message: object) -> str:
    """A message as one line, whatever the names and values in it hold: control characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))


def natural(text: str) -> int:
    """The value of ``--seed``, the same range everywhere; argparse reports anything else."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {LARGEST_SEED}, got {text}")
    return value


def command(name: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Wrap a command's ``main``: the ends that it does not handle itself are one line and an exit code."""

    def wrap(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*given: P.args, **named: P.kwargs) -> int:
            before = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = shown = [lasting(stream) for stream in before]
            try:
                with interrupts_kept():
                    code = main(*given, **named)
                    sys.stdout.flush()
                return code
            except KeyboardInterrupt:
                print(f"{name}: stopped before it was done", file=sys.stderr)
                return UNDETERMINED
            except OutputError as error:
                print(f"{name}: {one_line(error)}", file=sys.stderr)
                return BAD_INPUT
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                print(f"{name}: {one_line(f'{where}{error.strerror or error}')}", file=sys.stderr)
                return BAD_INPUT
            finally:
                with suppress(OSError):
                    for stream in shown:
                        stream.flush()
                sys.stdout, sys.stderr = before

        return run

    return wrap


class Lasting:
    """An output whose reader may leave: what is written from then on goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        """``stream`` is all that this is, but for errors of a broken pipe."""
        self.stream = stream
        self.left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As the stream does."""
        return len(text) if self.left else self._kept(self.stream.write, text) or len(text)

    def flush(self) -> None:
        """As the stream does."""
        if not self.left:
            self._kept(self.stream.flush)

    def _kept(self, doing: Callable[..., Any], *given: str) -> Any:
        try:
            return doing(*given)
        except BrokenPipeError:
            self.left = True
            with suppress(OSError):  # what it still holds is flushed when Python ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
            return None


def lasting(stream: TextIO | None) -> TextIO:
    """Standard output or error for a whole command; None, where it was closed before, is as ``/dev/null``."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the command runs
    return cast(TextIO, Lasting(stream))


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Ctrl-C again where Python could not raise it: in a ``__del__`` or a callback it would be ignored."""
    before = sys.unraisablehook

    def hook(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN_SECONDS, _thread.interrupt_main).start()
        else:
            before(what)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
