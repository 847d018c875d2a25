"""A policy that is made of somebody's own code, and what that code does wrong by itself.

An error that the file's own code raises, in a policy, a tamper or an operation, and an answer or a program
of no known form are the file's errors (:class:`~spec.ownfile.OwnFileError`) and never a verdict.
:class:`~spec.policy.PolicyError` is not: an engine's assertion, which is a verdict.  Only policies of a file
are looked at like this; the shipped ones pay nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import spec
from spec.chains import Chains
from spec.config import Config
from spec.events import STREAMS, NotADecision, check_decision
from spec.faults.fault import Fault
from spec.faults.tamper import Tampered
from spec.ops import Op
from spec.ownfile import OwnFileError, in_words, line_in, place
from spec.policy import Answer, Policy, PolicyError
from spec.walk import PolicyFactory

HERE = str(Path(spec.__file__).parent)
QUESTIONS = ("on_arrive", "schedule", "worker_program", "on_output", "on_report", "on_abort", "on_reset")
OWN_CODE = ("run", "blocked")  # what an operation of the file may define


def policy_of(fault: Fault, path: str) -> PolicyFactory:
    """The guarded policy of a file's fault.  Raises :class:`~spec.ownfile.OwnFileError`."""
    made: Any = blaming(lambda: fault.policy, path)()
    if not callable(made):
        at = place(path, line_of(fault.tamper, path))
        raise OwnFileError(
            f"{at}: tamper must return a policy factory, a function of a configuration and its table of "
            f"prefixes (or a policy's class), got {made!r}"
        )
    return guarded(made, path)


def guarded(policy: PolicyFactory, path: str) -> PolicyFactory:
    """Policies whose errors in the file's own code are the file's."""

    def build(config: Config, chains: Chains) -> Policy:
        made: Any = blaming(policy, path)(config, chains)
        for question in QUESTIONS:
            if not callable(getattr(made, question, None)):
                raise OwnFileError(
                    f"{place(path, line_of(policy, path))}: must make a policy (spec.policy.Policy), "
                    f"got {made!r}, which has no {question}"
                )
        return Guarded(made, path)

    return build


@dataclass
class Guarded:
    """A policy whose code, answers and programs are looked at as the world asks for them."""

    inner: Policy
    path: str
    known: set[type] = field(default_factory=set)  # classes of operations whose own code is guarded

    def __getattr__(self, name: str) -> Any:
        question = blaming(getattr(self.inner, name), self.path)
        if name not in QUESTIONS:
            return question

        def ask(*given: Any) -> Any:
            try:
                reply = question(*given)
                self.check(name, reply)
            except NotADecision as error:
                raise OwnFileError(f"{self.asked(name)}: {error}") from None
            return reply

        vars(self)[name] = ask  # asked often
        return ask

    def check(self, name: str, reply: Any) -> None:
        """Raises :class:`~spec.ownfile.OwnFileError` or :class:`~spec.events.NotADecision` if a reply has no
        known form."""
        if name == "worker_program":
            self.check_program(reply)
            return
        if not isinstance(reply, Answer):
            raise OwnFileError(f"{self.asked(name)}: must answer a spec.policy.Answer, got {reply!r}")
        if not isinstance(reply.decisions, list):
            raise NotADecision(f"an answer's decisions must be a list, got {reply.decisions!r}")
        for event in reply.decisions:
            check_decision(event)

    def check_program(self, program: Any) -> None:
        """A program is a list of pairs, a stream and an operation."""
        at = "worker_program"
        if not isinstance(program, (list, tuple)):
            raise OwnFileError(f"{self.asked(at)}: a program must be a list of pairs, got {program!r}")
        for entry in program:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], Op):
                raise OwnFileError(
                    f"{self.asked(at)}: a program's entries must be pairs (stream, operation), got {entry!r}"
                )
            stream, op = entry
            if stream not in STREAMS:
                raise OwnFileError(
                    f"{self.asked(at)}: there is no stream {stream!r}; there are {', '.join(STREAMS)}"
                )
            if type(op) not in self.known:
                guard_operation(type(op), self.path)
                self.known.add(type(op))

    def asked(self, question: str) -> str:
        """The question in words, behind the place of the file's code that answers it, if that is found."""
        policy: Any = self.inner
        while isinstance(policy, Tampered):
            edit = policy.program if question == "worker_program" else policy.answer
            if line := line_of(edit, self.path):
                return f"{place(self.path, line)}: {question}"
            policy = policy.inner
        return f"{place(self.path, line_of(getattr(policy, question), self.path))}: {question}"


def guard_operation(kind: type, path: str) -> None:
    """Errors of the file's own code in an operation's class are the file's from now on."""
    for one in kind.__mro__:
        for name in OWN_CODE:
            code = vars(one).get(name)
            if getattr(getattr(code, "__code__", None), "co_filename", None) == path:
                setattr(one, name, blaming(code, path))


def blaming(function: Any, path: str) -> Callable[..., Any]:
    """The function; what the file's code raises in it is an :class:`~spec.ownfile.OwnFileError`."""

    @wraps(function, updated=())
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except (PolicyError, OwnFileError, NotADecision):
            raise
        except (Exception, SystemExit) as error:
            if not isinstance(error, SystemExit) and not raised_in(error, path):
                raise  # nothing but the file calls exit()
            at = place(path, line_in(error, path))
            raise OwnFileError(f"{at}: {in_words(error)}") from None

    return call


def raised_in(error: BaseException, path: str) -> bool:
    """Whether the file's code raised it: no code of the model lies between the two."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = (name for name in reversed(files) if name == path or name.startswith(HERE))
    return next(ours, "") == path


def line_of(function: Any, path: str) -> int | None:
    """The line of the file where a function stands, or one that it is made of."""
    todo, seen = [function], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        code = getattr(one, "__code__", None)
        if code is None:  # a class, a partial, a method of an instance
            todo += [
                part
                for part in (
                    getattr(one, "__func__", None),
                    getattr(one, "func", None),
                    vars(one).get("__init__") if isinstance(one, type) else None,
                )
                if part is not None
            ]
            continue
        if code.co_filename == path:
            return int(code.co_firstlineno)
        todo += [cell.cell_contents for cell in getattr(one, "__closure__", None) or () if filled(cell)]
    return None


def filled(cell: Any) -> bool:
    """Whether a closure's cell holds anything yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
