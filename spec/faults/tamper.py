"""Faults that no decision of the reference expresses: answers and programs, edited on their way to the world.

A tampered policy believes that it did the right thing; the world learns something else.  So a drop that is
forgotten, a report that is lost or an operation that one rank leaves out needs no decision of its own::

    FAULT = Fault(..., tamper=editing("drop", lambda book, event: [event, event]), bites=("plain",))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec.book import Book
from spec.chains import Chains
from spec.config import Config
from spec.events import Event, NotADecision, check_decision
from spec.policy import Answer, Policy, Program
from spec.walk import PolicyFactory

Tamper = Callable[[PolicyFactory], PolicyFactory]
EditAnswer = Callable[[Book, list[Event]], list[Event]]
EditProgram = Callable[[int, Program], Program]


@dataclass
class Tampered:
    """A policy, with the decisions of its answers and the programs of its ranks edited."""

    inner: Policy
    book: Book  # what the world knows, before the answer
    answer: EditAnswer
    program: EditProgram

    def ask(self, name: str, *args: Any) -> Answer:
        """The policy's answer as the world learns it.  Raises :class:`~spec.events.NotADecision`."""
        answer: Answer = getattr(self.inner, name)(*args)
        answer.decisions = self.answer(self.book, answer.decisions)
        if not isinstance(answer.decisions, list):
            raise NotADecision(f"an edited answer must be a list of decisions, got {answer.decisions!r}")
        for event in answer.decisions:
            check_decision(event)
            self.book.apply(event)
        return answer

    def __getattr__(self, name: str) -> Any:
        if name == "worker_program":
            return lambda rank, message: self.program(rank, self.inner.worker_program(rank, message))
        return lambda *args: self.ask(name, *args)


def as_it_is(_: object, given: Any) -> Any:
    """No edit."""
    return given


def tampering(answer: EditAnswer = as_it_is, program: EditProgram = as_it_is) -> Tamper:
    """Both edits at once."""

    def tamper(policy: PolicyFactory) -> PolicyFactory:
        def build(config: Config, chains: Chains) -> Policy:
            return Tampered(policy(config, chains), Book.empty(config, chains), answer, program)

        return build

    return tamper


def answering(edit: EditAnswer) -> Tamper:
    """Answers edited as a list; the book is the world's, before the answer."""
    return tampering(answer=edit)


def editing(kind: str, edit: Callable[[Book, Event], list[Event]]) -> Tamper:
    """Every decision of one kind replaced by others."""

    def whole(book: Book, decisions: list[Event]) -> list[Event]:
        return [new for event in decisions for new in (edit(book, event) if event[0] == kind else [event])]

    return answering(whole)


def enqueuing(edit: EditProgram) -> Tamper:
    """The program of every rank edited before it is enqueued."""
    return tampering(program=edit)
