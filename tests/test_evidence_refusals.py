"""Every refusal of the two contracts has a wrong answer that it, and no other refusal, turns down.

The refusals are read off the source: every text that ``spec.contracts`` or ``spec.rankview`` can answer with.
A new one without a wrong answer fails the test of the table.  Where a refusal joins several conditions there
is a wrong answer for each of them, and where it compares numbers it is missed by one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import spec.contracts
import spec.rankview
from spec.book import Request, Status
from spec.config import Kind
from spec.config import named as configuration
from spec.contracts import SHARED_RULES, KnownJob, Question, SchedulerView, allowed, follow, retained_from
from spec.events import Event
from spec.faults.hunt import stored
from spec.ops import (
    Begin,
    CopyCounts,
    CopyPage,
    Deref,
    Draft,
    End,
    Forward,
    Gather,
    HostCounts,
    Leave,
    Op,
    Permute,
    PostProcess,
    PreProcess,
    Sample,
    SetRow,
    SetSlot,
    Take,
    UserId,
    Wait,
    Zero,
)
from spec.policy import Answer, Program
from spec.rankview import RankView, StepOrders, allowed_program
from spec.reference import Decisions, Reference
from spec.rules import STATE_RULES
from tests.test_evidence_contracts import Samples, samples, watched

# -- the refusals that there are ---------------------------------------------------------------------------

RULE = "{}: {}"  # what a rule of the model says, behind its name
NO_REFUSALS = {"{} {}s chunk {}", "load {}"}  # pieces of refusals: who does what
#: The book keeps the free queue: whatever spoils it was refused as an allocation, a hit or a release before.
NEVER_FIRST = {"free_queue_is_unheld"}


def shape(text: ast.expr) -> str:
    """A text as it stands in the source, ``{}`` for every value in it; empty if it is none."""
    if isinstance(text, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in text.values)
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


def texts(module: ModuleType) -> list[str]:
    """Every refusal of a module: its texts with values in them, and those without that are returned or given
    to ``refuse``."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    found: list[ast.expr] = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Return) and node.value is not None:
            given = [node.value]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refuse"
        ):
            given = list(node.args)
        for one in given:
            ends = [one.body, one.orelse] if isinstance(one, ast.IfExp) else [one]
            found += [end for end in ends if isinstance(end, ast.Constant)]
    return [text for text in map(shape, found) if text and text not in NO_REFUSALS]


def refusals() -> list[str]:
    """All of both modules; a rule of the model is a refusal by its name."""
    shared = {name for names in SHARED_RULES.values() for name in names}
    states = {rule.name for rule in STATE_RULES if "streams" not in rule.parts}
    found = [text for module in (spec.contracts, spec.rankview) for text in texts(module)]
    return [text for text in found if text != RULE] + [
        f"{name}: {{}}" for name in sorted(shared | states - NEVER_FIRST)
    ]


ALL = refusals()


def said_by(reason: str) -> list[str]:
    """The refusals that can have said this."""
    return [
        text for text in ALL
        if re.fullmatch(".*".join(map(re.escape, text.split("{}"))), reason, flags=re.DOTALL)
    ]  # fmt: skip


# -- wrong answers -----------------------------------------------------------------------------------------

Wrong = Callable[[SchedulerView, Question, list[Event]], Iterator[list[Event]]]
Edit = Callable[[SchedulerView, Event], "Event | list[Event] | None"]
Make = Callable[[SchedulerView, Question], Iterator[Event]]


def instead(kind: str, edit: Edit) -> Wrong:
    """One decision of a kind replaced, each in turn; the view is that before the answer."""

    def wrong(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
        for at, event in enumerate(decisions):
            if event[0] == kind:
                yield from replaced(decisions, at, edit(view, event))

    return wrong


def instead_then(kind: str, edit: Edit) -> Wrong:
    """The same; the view has learned the decisions before this one."""

    def wrong(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
        for at, event in enumerate(decisions):
            if event[0] == kind:
                yield from replaced(decisions, at, edit(after(view, question, decisions[:at]), event))

    return wrong


def replaced(decisions: list[Event], at: int, new: Event | list[Event] | None) -> Iterator[list[Event]]:
    """The decisions with others in the place of one; nothing if there is nothing to put there."""
    if new is not None:
        yield [*decisions[:at], *(new if isinstance(new, list) else [new]), *decisions[at + 1 :]]


def after(view: SchedulerView, question: Question, decisions: list[Event]) -> SchedulerView:
    """The view once it has learned these decisions of an answer."""
    then = view.copy()
    follow(then, question, Answer(decisions))
    return then


def first(make: Make) -> Wrong:
    """One more decision in front."""

    def wrong(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
        for event in make(view, question):
            yield [event, *decisions]

    return wrong


def last(make: Make) -> Wrong:
    """One more decision before the last one, which ends the step; the view has learned what stands before."""

    def wrong(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
        if decisions:
            for event in make(after(view, question, decisions[:-1]), question):
                yield [*decisions[:-1], event, decisions[-1]]

    return wrong


def without(*kinds: str) -> Wrong:
    """All decisions of these kinds left out."""

    def wrong(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
        kept = [event for event in decisions if event[0] not in kinds]
        if len(kept) < len(decisions):
            yield kept

    return wrong


# -- requests, blocks and chunks that a wrong answer may be about ------------------------------------------


def those(view: SchedulerView, status: Status, flying: bool | None = None) -> Iterator[Request]:
    """Requests of that status, with or without steps in flight."""
    for request in view.book.requests.values():
        if request.status is status and flying in (None, bool(request.flying)):
            yield request


def held(view: SchedulerView, request: Request) -> Iterator[tuple[int, int, int]]:
    """(group, column, block) of every column that a request holds."""
    for g, cols in enumerate(request.cols):
        for col, block in enumerate(cols):
            if block:
                yield g, col, block


def others(view: SchedulerView, uid: UserId, status: Status) -> Iterator[UserId]:
    """Other requests of that status."""
    return (request.uid for request in those(view, status) if request.uid != uid)


def under_key(view: SchedulerView, wanted: Callable[[Any], bool]) -> Iterator[int]:
    """Blocks that are published under such a key."""
    return (block for block, key in view.book.core.key.items() if wanted(key))


# -- allocation, hits, columns given up --------------------------------------------------------------------


def for_one_that_is_over(view: SchedulerView, event: Event) -> Event | None:
    over = next(others(view, event[1], Status.DONE), None)
    return (event[0], over, *event[2:]) if over else None


def into_a_held_column(view: SchedulerView, event: Event) -> Event | None:
    request = view.book.requests[event[1]]
    column = next((col for g, col, _ in held(view, request) if g == event[2]), None)
    return None if column is None else (*event[:3], column, event[4])


def adopted_twice(view: SchedulerView, event: Event) -> list[Event] | None:
    return [event, event] if event[3] >= 0 else None


def adopted_by_running(view: SchedulerView, _: Question) -> Iterator[Event]:
    for request in those(view, Status.RUNNING):
        for block, (g, n, _prefix) in view.book.core.key.items():  # type: ignore[misc]
            yield ("adopt", request.uid, g, (n - 1) // view.config.groups[g].block_tokens, block)


def adopted_from(wanted: Callable[[SchedulerView, Event, Any], bool]) -> Edit:
    """The same column, from a block under another key."""

    def edit(view: SchedulerView, event: Event) -> Event | None:
        block = next(under_key(view, lambda key: wanted(view, event, key)), None)
        return (*event[:4], block) if block else None

    return edit


def of_other_tokens(view: SchedulerView, event: Event, key: Any) -> bool:
    mine = view.book.core.key.get(event[4], (0, 0, 0))
    return bool(key[:2] == mine[:2] and key[2] != mine[2])  # type: ignore[index]


def of_more_tokens(view: SchedulerView, event: Event, key: Any) -> bool:
    return bool(key[0] == event[2] and key[1] > view.book.requests[event[1]].known)


def of_another_group(view: SchedulerView, event: Event, key: Any) -> bool:
    mine, groups = view.book.core.key.get(event[4], (0, 0, 0)), view.config.groups
    same = groups[key[0]].block_tokens == groups[event[2]].block_tokens  # else its column would differ too
    return bool(key[0] != mine[0] and key[1:] == mine[1:] and same)  # type: ignore[index]


def from_no_key(view: SchedulerView, event: Event) -> Event | None:
    block = next((b for b in view.book.core.holders if b not in view.book.core.key), None)
    return (*event[:4], block) if block else None


def adopted_in_the_same_step(view: SchedulerView, _: Question) -> Iterator[Event]:
    for block in view.written:
        g, n, _prefix = view.book.core.key[block]  # type: ignore[misc]
        for request in those(view, Status.WAITING):
            yield ("adopt", request.uid, g, n // view.config.groups[g].block_tokens - 1, block)


def source_given_up(view: SchedulerView, _: Question) -> Iterator[Event]:
    for request in view.book.requests.values():
        for block in request.retained:
            if block in view.copied.values():
                yield ("drop", request.uid, 0, -1, block)


def first_readable_column(kind: Kind) -> Make:
    """A running request gives up the first column that a step may still read: no earlier one would be
    wrong."""

    def make(view: SchedulerView, _: Question) -> Iterator[Event]:
        for request in those(view, Status.RUNNING):
            for g, col, block in held(view, request):
                group = view.config.groups[g]
                if group.kind is kind and col == retained_from(view.config, group, request.processed):
                    yield ("drop", request.uid, g, col, block)

    return make


def given_up(status: Status, flying: bool) -> Make:
    """Requests of that status give a column up."""

    def make(view: SchedulerView, _: Question) -> Iterator[Event]:
        for request in those(view, status, flying):
            for g, col, block in held(view, request):
                yield ("drop", request.uid, g, col, block)

    return make


# -- keys, copies, zeroes ----------------------------------------------------------------------------------


def key_of_unknown_tokens(view: SchedulerView, event: Event) -> Event:
    return (*event[:4], view.book.requests[event[1]].known + 1, event[5])


def key_of_fewer_tokens(view: SchedulerView, event: Event) -> Event | None:
    """A key of one token less, which is a prefix of the request all the same."""
    n = event[4] - 1
    return (*event[:4], n, view.book.requests[event[1]].line[n]) if n else None


def key_of(tokens: Callable[[SchedulerView, Event], int]) -> Edit:
    """A column under the key of another number of its request's tokens."""

    def edit(view: SchedulerView, event: Event) -> Event | None:
        n = tokens(view, event)
        line = view.book.requests[event[1]].line
        return (*event[:4], n, line[n]) if 0 < n < len(line) else None

    return edit


def block_of_another_column(view: SchedulerView, event: Event) -> Event | None:
    request = view.book.requests[event[1]]
    block = next((b for g, _, b in held(view, request) if g == event[2] and b != event[3]), None)
    return (*event[:3], block, *event[4:]) if block else None


def state_published(at: Callable[[int, int, int], int]) -> Make:
    """With an output, a held column goes under the key of a number of tokens, from those that were processed
    before and after it and the size of a block."""

    def make(view: SchedulerView, _: Question) -> Iterator[Event]:
        for uid, (before, now) in view.crossed.items():
            request = view.book.requests[uid]
            for g in view.mamba_groups:
                block = view.config.groups[g].block_tokens
                n = at(before, now, block)
                col = (n - 1) // block
                if 0 < n <= request.known and col < len(request.cols[g]) and request.cols[g][col]:
                    yield ("publish", uid, g, request.cols[g][col], n, request.line[n])

    return make


def copied_over_a_held_block(view: SchedulerView, event: Event) -> Event | None:
    block = next((b for b in view.book.core.holders if b != event[1]), None)
    return ("copy", event[1], block, event[3]) if block else None


def zeroed(view: SchedulerView, _: Question) -> Iterator[Event]:
    return (("zero", block, 0) for block in view.book.core.holders)


def other_key_for_the_copy(view: SchedulerView, event: Event) -> Event | None:
    """A copy goes under a key of its request's that the copied block did not carry."""
    request, n = view.book.requests[event[1]], event[4] - 1
    return (*event[:4], n, request.line[n]) if event[3] in request.retained and n else None


# -- admission and rows ------------------------------------------------------------------------------------


def a_hit_less(kind: Kind) -> Wrong:
    """The first column that a hit reads in a group of that kind is not adopted."""

    def wrong(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
        for at, event in enumerate(d):
            if event[0] == "adopt" and event[3] >= 0 and view.config.groups[event[2]].kind is kind:
                if all(e[:3] != event[:3] for e in d[:at]):
                    yield [*d[:at], *d[at + 1 :]]

    return wrong


def hit_of_running(view: SchedulerView, _: Question) -> Iterator[Event]:
    return (("hit", request.uid, 0, 0) for request in those(view, Status.RUNNING))


def starts(status: Status, flying: bool) -> Make:
    """Requests of that status start, at 0 tokens or where they stand."""

    def make(view: SchedulerView, _: Question) -> Iterator[Event]:
        return (("start", request.uid, request.computed) for request in those(view, status, flying))

    return make


def all_start(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
    """As many waiting requests start as make one more than there are slots."""
    then = after(view, question, decisions[:-1])
    running = sum(1 for _ in those(then, Status.RUNNING))
    new = [("start", r.uid, 0) for r in those(then, Status.WAITING, False)][: view.config.slots + 1 - running]
    if running + len(new) == view.config.slots + 1:
        yield [*decisions[:-1], *new, decisions[-1]]


def computing(change: Callable[[SchedulerView, Request, int, int, int], tuple[int, int, int] | None]) -> Edit:
    """A row of other (first position, tokens, drafts)."""

    def edit(view: SchedulerView, event: Event) -> Event | None:
        row = change(view, view.book.requests[event[1]], *event[2:])
        return (*event[:2], *row) if row else None

    return edit


def over_the_budget(view: SchedulerView, request: Request, c: int, q: int, d: int) -> Any:
    """As many tokens as make the step one too long, all of them known."""
    q = view.config.step_tokens + 1 - sum(tokens for _, tokens, _ in view.rows.values())
    return (c, q, 0) if c + q <= request.known else None


def one_token_too_many(view: SchedulerView, request: Request, c: int, q: int, d: int) -> Any:
    """A token more than is known, by a request without steps in flight."""
    return None if request.flying else (c, request.known - c + 1 + d, d)


def two_tokens_ahead(view: SchedulerView, request: Request, c: int, q: int, d: int) -> Any:
    """A request with steps in flight runs ahead by two tokens that nobody knows."""
    return (c, q + 1, d) if view.config.async_scheduling and request.flying and q == d + 1 else None


def drafts_inside_the_prompt(view: SchedulerView, request: Request, c: int, q: int, d: int) -> Any:
    return (c, q, 1) if not d and q > 1 and c + q - 1 < request.known else None


def sampling_too_soon(view: SchedulerView, _: Question) -> Iterator[Event]:
    """A request samples anew in the last step in which its tokens are still on their way."""
    step = view.book.step + 1
    for request in those(view, Status.RUNNING, True):
        if view.sampled_in.get(request.uid) == step + 1 - view.config.pp:
            yield ("row", request.uid, request.computed, 1, 0)


def ahead_without_async(view: SchedulerView, _: Question) -> Iterator[Event]:
    """A request with steps in flight runs ahead where outputs are waited for."""
    for request in those(view, Status.RUNNING, True):
        if not view.config.async_scheduling and request.computed >= request.known:
            yield ("row", request.uid, request.computed, 1, 0)


def a_column_less(*kinds: Kind, end: bool) -> Wrong:
    """A column that a row needs in groups of these kinds is not allocated: at its table's end, or inside."""

    def wrong(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
        rows = {event[1] for event in d if event[0] == "row"}
        for at, event in enumerate(d):
            if event[0] == "alloc" and event[1] in rows and view.config.groups[event[2]].kind in kinds:
                if end is all(e[:3] != event[:3] for e in d[at + 1 :]):
                    yield [*d[:at], *d[at + 1 :]]

    return wrong


def moved(choose: Callable[[SchedulerView, UserId, int, int, int], int]) -> Make:
    """A recurrent column moves to another."""

    def make(view: SchedulerView, _: Question) -> Iterator[Event]:
        for request in those(view, Status.RUNNING):
            for g, col, block in held(view, request):
                to = choose(view, request.uid, g, col, block)
                if g in view.mamba_groups and to >= 0:
                    yield ("move", request.uid, g, col, to, block)

    return make


def past_the_end_under_a_key(view: SchedulerView, uid: UserId, g: int, col: int, block: int) -> int:
    return len(view.book.requests[uid].cols[g]) if block in view.book.core.key else -1


def over_the_next(view: SchedulerView, uid: UserId, g: int, col: int, block: int) -> int:
    cols = view.book.requests[uid].cols[g]
    return col + 1 if block not in view.book.core.key and any(cols[col + 1 : col + 2]) else -1


def preempted(choose: Callable[[SchedulerView, Request], bool]) -> Make:
    """Requests are preempted of which this can be said."""

    def make(view: SchedulerView, _: Question) -> Iterator[Event]:
        return (("preempt", r.uid) for r in view.book.requests.values() if choose(view, r))

    return make


def loads(view: SchedulerView, request: Request) -> bool:
    return any(known.uid == request.uid and known.way == "load" for known in view.transfers.values())


def shorter_row(view: SchedulerView, event: Event) -> Event | None:
    """A prefill row of a token less: the keys of its last block come too early."""
    return (*event[:3], event[3] - 1, 0) if event[3] > 1 and not event[4] else None


def load_without_a_column(*, end: bool) -> Wrong:
    """A column of an external hit is neither allocated nor loaded: at the end of a table, or inside."""

    def wrong(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
        for at, event in enumerate(d):
            if event[0] == "job" and event[2] == "load":
                for back in range(at):
                    mine = d[back][:3]
                    if mine[:2] == ("alloc", event[3]) and end is all(
                        e[:3] != mine for e in d[back + 1 : at]
                    ):
                        gone = d[back][4]
                        chunks = tuple(
                            (key, place, tuple(0 if b == gone else b for b in subs))
                            for key, place, subs in event[4]
                        )
                        yield [*d[:back], *d[back + 1 : at], (*event[:4], chunks), *d[at + 1 :]]

    return wrong


def load_forgotten(view: SchedulerView, question: Question, decisions: list[Event]) -> Iterator[list[Event]]:
    """An external hit is not loaded."""
    for at, event in enumerate(decisions):
        if event[0] == "job" and event[2] == "load":
            yield [*decisions[:at], *decisions[at + 1 :]]


def tail_shared(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """A block that is published inside becomes the column itself, where it should be copied."""
    for event in d:
        if event[0] == "adopt" and event[3] < 0:
            copy = next(e for e in d if e[:2] == ("copy", event[4]) and e[3] == event[2])
            column = next(e[3] for e in d if e[0] == "alloc" and e[4] == copy[2])
            yield [(*event[:3], column, event[4]) if e is event else e for e in d if copy[2] not in e[1:]]


def tail_shared_without_key(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """The same, and the block's key is forgotten before the row writes into it."""
    for wrong in tail_shared(view, question, d):
        for at, event in enumerate(wrong):
            if event[0] == "adopt":
                yield [*wrong[: at + 1], ("evict", event[4]), *wrong[at + 1 :]]


# -- outputs and ends --------------------------------------------------------------------------------------


def given(change: Callable[[SchedulerView, Event], Event | list[Event] | None]) -> Wrong:
    return instead_then("tokens", change)


def of_a_step_in_flight(view: SchedulerView, event: Event) -> Event | None:
    """Tokens of another step of the request that is not over yet."""
    later = next((step for step in view.book.requests[event[1]].flying if step != event[2]), None)
    return (*event[:2], later, *event[3:]) if later else None


def more_than_asked_for(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """All that a step sampled, of which the client wanted less."""
    sampled = dict(question[1].tokens)
    for at, event in enumerate(d):
        if event[0] == "tokens" and len(sampled[event[1]]) > len(event[3]):
            yield from replaced(d, at, (*event[:3], sampled[event[1]], event[4]))


def output_of_nobody(view: SchedulerView, question: Question) -> Iterator[Event]:
    """Tokens for a request that has no row in the step."""
    rows = dict(question[1].tokens)
    return (
        ("tokens", u, question[1].step, (), r.computed)
        for u, r in view.book.requests.items()
        if u not in rows
    )


def finishes_early(view: SchedulerView, _: Question) -> Iterator[Event]:
    for request in view.book.live():
        if request.known == request.prompt + view.outputs[request.uid] - 1:
            yield ("finish", request.uid, "length")


UNKNOWN_JOB = 1_000_000

# -- transfers and the tier --------------------------------------------------------------------------------


def chunk(way: str, edit: Callable[[SchedulerView, UserId, Any, int, tuple[int, ...]], Any]) -> Wrong:
    """The last chunk of a transfer replaced."""

    def change(view: SchedulerView, event: Event) -> Event | None:
        *rest, one = event[4]
        new = edit(view, event[3], *one) if event[2] == way else None
        return (*event[:4], (*rest, new)) if new else None

    return instead_then("job", change)


def a_token_less(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    n = key[1] - 1
    return (key[0], n, view.book.requests[u].line[n]), place, subs


def a_chunk_further(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    n = key[1] + view.config.groups[key[0]].block_tokens * view.config.blocks_per_chunk
    return ((key[0], n, key[2]), place, subs) if n > view.book.requests[u].known else None


def of_the_prefix_of_others(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    return (*key[:2], key[2] - 1), place, subs


def a_sub_slot_less(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    return key, place, subs[1:]


def elsewhere(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    return key, place + 1, subs


def another_block(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    block = next((b for b in view.book.core.holders if b not in subs), None)
    return (key, place, (*subs[:-1], block)) if block else None


def another_fresh_block(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    block = next((b for b in view.fresh if b not in subs), None)
    return (key, place, (*subs[:-1], block)) if block else None


def nothing(view: SchedulerView, u: UserId, key: Any, place: int, subs: Any) -> Any:
    return (key, place, (*subs[:-1], 0)) if key[0] not in view.mamba_groups else None


def an_old_column(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """A load goes into a block that was the request's already: a hit on the device."""
    for at, event in enumerate(d):
        if event[0] == "job" and event[2] == "load":
            for (g, _n, _prefix), place, _subs in event[4]:
                for adopt in d[:at]:
                    block = view.config.groups[g].block_tokens
                    end = (adopt[3] + 1) * block if adopt[:3] == ("adopt", event[3], g) else 0
                    size = block * view.config.blocks_per_chunk
                    prefix = view.book.requests[event[3]].line[end - end % size]
                    slots = [0] * view.config.blocks_per_chunk
                    if end and not end % size:
                        slots[-1] = adopt[4]
                        yield from replaced(d, at, (*event[:4], (((g, end, prefix), place, tuple(slots)),)))


def stored_too_early(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """A chunk of a running request's prompt is stored of which the last token is not scheduled yet."""
    then = after(view, question, d[:-1])
    for request in those(then, Status.RUNNING):
        for g, group in enumerate(view.config.groups):
            size = group.block_tokens * view.config.blocks_per_chunk
            n = request.computed // size * size + size
            if group.kind is Kind.FULL and n <= request.known:
                key = (g, n, request.line[n])
                place = next(p for p in range(100) if all(c.place != p for c in then.book.tier.values()))
                if key not in then.book.tier:
                    job = (
                        "job",
                        1_000_000,
                        "store",
                        request.uid,
                        ((key, place, (0,) * view.config.blocks_per_chunk),),
                    )
                    yield [*d[:-1], ("tier", *key, place, "writing"), job, d[-1]]


def stored_without_a_column(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """A chunk of a window, thrown out of the tier, is stored anew when a column of it was given up."""
    then, per = after(view, question, d[:-1]), view.config.blocks_per_chunk
    used = {place for known in then.transfers.values() for _, place, _ in known.chunks}
    for request in those(then, Status.RUNNING):
        for (g, n, prefix), entry in then.book.tier.items():
            end = n // view.config.groups[g].block_tokens
            subs = tuple(request.cols[g][end - per : end])
            mine = n <= request.computed and prefix == request.line[n]
            if mine and 0 in subs and g not in view.mamba_groups and entry.place not in used:
                key, place = (g, n, prefix), entry.place
                job = ("job", UNKNOWN_JOB, "store", request.uid, ((key, place, subs),))
                yield [*d[:-1], ("tier", *key, place, "gone"), ("tier", *key, place, "writing"), job, d[-1]]


def stored_when_ready(view: SchedulerView, _: Question) -> Iterator[Event]:
    """A chunk that is ready is stored anew, over itself."""
    for key, entry in view.book.tier.items():
        for request in view.book.live():
            if entry.state == "ready" and key[1] <= request.known and request.line[key[1]] == key[2]:
                subs = (0,) * view.config.blocks_per_chunk
                yield ("job", UNKNOWN_JOB, "store", request.uid, ((key, entry.place, subs),))


def chunks(state: str, choose: Callable[[SchedulerView, Question, Any, Any], bool], by: int = 0) -> Make:
    """The chunks of the tier of which this can be said go over to a state, ``by`` places further."""

    def make(view: SchedulerView, question: Question) -> Iterator[Event]:
        for key, entry in view.book.tier.items():
            if choose(view, question, key, entry):
                yield ("tier", *key, entry.place + by, state)

    return make


def is_good_store(view: SchedulerView, question: Question, key: Any) -> bool:
    """Whether the transfer that is reported stores the chunk, and nothing went wrong with it."""
    known = view.jobs.get(question[1])
    good = known is not None and known.way == "store" and not known.failed and not known.stale
    return known is not None and good and any(k == key for k, _, _ in known.chunks)


def thrown_out_and_ready(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
    """A chunk becomes ready when its place has just been given up."""
    for at, event in enumerate(d):
        if event[0] == "tier" and event[5] == "ready":
            yield [*d[:at], (*event[:5], "gone"), *d[at:]]


def ready_after(choose: Callable[[KnownJob, bool], bool], *, strange: bool = False) -> Wrong:
    """With the last report of a transfer of which (and its outcome) this can be said, a chunk of it, or one
    that it does not name, becomes ready."""

    def wrong(view: SchedulerView, question: Question, d: list[Event]) -> Iterator[list[Event]]:
        _, job, rank, ok = question
        known, state = view.jobs.get(job), view.book.core.jobs.get(job)
        if known is None or state is None or state.waiting != {rank} or not choose(known, ok):
            return
        own = {key: place for key, place, _ in known.chunks}
        others = {key: entry.place for key, entry in view.book.tier.items() if key not in own}
        for key, place in (others if strange else own).items():
            yield [d[0], ("tier", *key, place, "ready"), *d[1:]]

    return wrong


SCHEDULE, OUTPUT, REPORT, ABORT = "schedule", "on_output", "on_report", "on_abort"

#: refusal of a scheduler's answer -> wrong answers to questions
ANSWERS: dict[str, list[tuple[str, Wrong]]] = {
    "{} is not answered with {}": [(OUTPUT, last(lambda v, q: iter([("step", v.book.step + 1)])))],
    # blocks and columns
    "{} is over and gets block {}": [(SCHEDULE, instead("alloc", for_one_that_is_over))],
    "block {} is not one of the pool's": [
        (SCHEDULE, instead("alloc", lambda v, e: (*e[:4], 0))),
        (SCHEDULE, instead("alloc", lambda v, e: (*e[:4], v.config.pool_blocks))),
    ],
    "column {} of {} already holds block {}": [
        (SCHEDULE, instead("alloc", into_a_held_column)),
        (SCHEDULE, instead("adopt", adopted_twice)),
    ],
    "{} is {} and adopts block {}": [(SCHEDULE, first(adopted_by_running))],
    "{} adopts block {} as column {}; the block is published as {}": [
        (SCHEDULE, instead("adopt", adopted_from(of_other_tokens))),
        (SCHEDULE, instead("adopt", adopted_from(of_more_tokens))),
        (SCHEDULE, instead("adopt", adopted_from(of_another_group))),
        (SCHEDULE, instead("adopt", from_no_key)),
        (SCHEDULE, instead("adopt", lambda v, e: (*e[:3], e[3] + 1, e[4]))),
        (SCHEDULE, instead("adopt", lambda v, e: (*e[:3], 0, e[4]) if e[3] == 1 else None)),
    ],
    "{} adopts block {}, whose state {} writes in this very step": [
        (SCHEDULE, last(adopted_in_the_same_step))
    ],
    "{} gives up block {} in the step that copies it": [(SCHEDULE, last(source_given_up))],
    "{} gives up column {}; steps may read from column {} on": [
        (SCHEDULE, first(first_readable_column(Kind.WINDOW))),
        (SCHEDULE, first(first_readable_column(Kind.MAMBA))),
        (SCHEDULE, first(first_readable_column(Kind.CHUNKED))),
        (SCHEDULE, first(first_readable_column(Kind.FULL))),
        (SCHEDULE, first(given_up(Status.RUNNING, True))),
    ],
    "{} gives up block {} while its steps {} are in flight": [
        (SCHEDULE, first(given_up(Status.DONE, True))),
        (SCHEDULE, first(given_up(Status.WAITING, True))),
    ],
    "{} gives up block {}, which load {} still writes": [
        (SCHEDULE, first(given_up(Status.LOADING, False))),
        (ABORT, last(given_up(Status.LOADING, False))),
        (OUTPUT, first(given_up(Status.DONE, False))),
    ],
    # keys, copies, zeroes
    "{} publishes block {} of group {} under a key that is not its {}-token prefix": [
        (SCHEDULE, instead_then("publish", key_of_unknown_tokens)),
        (SCHEDULE, instead_then("publish", lambda v, e: (*e[:5], e[5] + 1))),
    ],
    "{} publishes block {} as its first {} tokens of group {}, but holds it elsewhere": [
        (SCHEDULE, instead_then("publish", block_of_another_column)),
        (SCHEDULE, instead_then("publish", key_of(lambda v, e: e[4] - v.config.groups[e[2]].block_tokens))),
        (SCHEDULE, instead_then("publish", key_of(lambda v, e: v.book.requests[e[1]].known))),
    ],
    "{} publishes a state of {} tokens that no step leaves in column {}": [
        (SCHEDULE, instead_then("publish", key_of(lambda v, e: e[4] - 1))),
        (OUTPUT, last(state_published(lambda before, now, block: before // block * block))),
        (OUTPUT, last(state_published(lambda before, now, block: now // block * block + block))),
        (
            OUTPUT,
            last(state_published(lambda before, now, block: now if now % block and now > before else 0)),
        ),
    ],
    "block {} is copied over, but was not allocated in this step": [
        (SCHEDULE, instead("copy", copied_over_a_held_block))
    ],
    "the null block is copied": [(SCHEDULE, instead("copy", lambda v, e: ("copy", 0, *e[2:])))],
    "block {} is zeroed, but was not allocated in this step": [(SCHEDULE, first(zeroed))],
    "{} publishes block {}, which is no copy of a block under that key": [
        (SCHEDULE, instead_then("publish", other_key_for_the_copy))
    ],
    "{} publishes {} tokens; {} are scheduled": [(SCHEDULE, instead("row", shorter_row))],
    # admission
    "{} is {} and is admitted with a hit": [(SCHEDULE, first(hit_of_running))],
    "{} is admitted with {} then {} tokens; loads are created for {}": [
        (SCHEDULE, load_forgotten),
        (SCHEDULE, instead("hit", lambda v, e: (*e[:3], e[2]) if e[3] > e[2] else None)),
        (SCHEDULE, instead("hit", lambda v, e: (*e[:3], e[2] + 1) if e[3] == e[2] else None)),
    ],
    "{} hits {} tokens and holds no columns {} of group {}": [
        (SCHEDULE, load_without_a_column(end=True)),
        (SCHEDULE, load_without_a_column(end=False)),
    ],
    "{} is {} and starts": [(SCHEDULE, first(starts(Status.RUNNING, True)))],
    "{} starts over while its steps {} are in flight": [(SCHEDULE, first(starts(Status.WAITING, True)))],
    "{} starts at {} tokens on a state of {}, group {}": [
        (SCHEDULE, instead("start", lambda v, e: (*e[:2], e[2] - 1) if e[2] else None))
    ],
    "{} starts at {} tokens; columns {} of group {} were never filled": [
        (SCHEDULE, instead("start", lambda v, e: (*e[:2], e[2] + 1))),
        (SCHEDULE, a_hit_less(Kind.FULL)),
        (SCHEDULE, a_hit_less(Kind.WINDOW)),
        (SCHEDULE, a_hit_less(Kind.CHUNKED)),
        (SCHEDULE, a_hit_less(Kind.MAMBA)),
    ],
    "{} requests run in {} slots": [(SCHEDULE, all_start)],
    # rows
    "{} is {} and computes": [
        (SCHEDULE, last(lambda v, q: (("row", r.uid, 0, 1, 0) for r in those(v, Status.WAITING))))
    ],
    "{} has two rows in one step": [
        (SCHEDULE, instead("row", lambda v, e: [e, (*e[:2], e[2] + e[3], 1, 0)]))
    ],
    "{} computes from {}; {} tokens are computed or scheduled": [
        (SCHEDULE, instead("row", lambda v, e: (*e[:2], e[2] + 1, *e[3:]))),
        (SCHEDULE, instead("row", lambda v, e: (*e[:2], e[2] - 1, *e[3:]))),
    ],
    "{} computes {} tokens of which {} are drafts; {} are allowed": [
        (SCHEDULE, instead("row", lambda v, e: (*e[:3], 0, 0))),
        (SCHEDULE, instead("row", lambda v, e: (*e[:4], -1))),
        (SCHEDULE, instead("row", lambda v, e: (*e[:4], e[3]))),
        (SCHEDULE, instead("row", lambda v, e: (*e[:3], v.config.drafts + 2, v.config.drafts + 1))),
    ],
    "{} computes {} to {} without drafts, but only {} tokens are known": [
        (SCHEDULE, instead_then("row", computing(one_token_too_many))),
        (SCHEDULE, instead_then("row", computing(two_tokens_ahead))),
        (SCHEDULE, last(ahead_without_async)),
    ],
    "{} drafts after position {}, but {} tokens are known": [
        (SCHEDULE, instead_then("row", computing(drafts_inside_the_prompt)))
    ],
    "{} samples in step {}; the tokens of step {} are not at the first stage yet": [
        (SCHEDULE, first(sampling_too_soon))
    ],
    "the step computes {} tokens, more than {}": [
        (SCHEDULE, instead_then("row", computing(over_the_budget)))
    ],
    "{} computes {} to {}: group {} lacks state columns {}": [
        (SCHEDULE, a_column_less(Kind.MAMBA, end=True)),
        (SCHEDULE, a_column_less(Kind.MAMBA, end=False)),
    ],
    "{} is {} and is preempted": [
        (SCHEDULE, first(preempted(lambda v, r: r.status is Status.WAITING))),
        (SCHEDULE, first(preempted(lambda v, r: r.status is Status.DONE))),
        (SCHEDULE, last(preempted(lambda v, r: r.uid in v.rows))),
        (SCHEDULE, first(preempted(lambda v, r: r.status is Status.LOADING and loads(v, r)))),
        (REPORT, first(preempted(lambda v, r: r.status is Status.RUNNING))),
    ],
    "{} overwrites block {}, published as the state of {} tokens": [(SCHEDULE, tail_shared)],
    "{} writes past the {} published tokens of block {}, which others hold": [
        (SCHEDULE, tail_shared),
        (SCHEDULE, tail_shared_without_key),
    ],
    "a schedule ends with its one step": [
        (SCHEDULE, without("step")),
        (SCHEDULE, instead("step", lambda v, e: [e, e])),
        (SCHEDULE, instead("step", lambda v, e: [e, ("flush", 1)])),
    ],
    "step {} does not carry the row of {}": [(SCHEDULE, instead("step", lambda v, e: ("step", e[1] + 1)))],
    # outputs and ends
    "no output of step {} for {} is due": [
        (OUTPUT, instead("tokens", of_a_step_in_flight)),
        (OUTPUT, instead("tokens", lambda v, e: [e, e])),
        (OUTPUT, first(output_of_nobody)),
    ],
    "{} is given {}; the step sampled {} and {} tokens are still asked for": [
        (OUTPUT, instead("tokens", lambda v, e: (*e[:3], e[3][:-1], e[4]) if e[3] else None)),
        (OUTPUT, instead("tokens", lambda v, e: (*e[:3], (*e[3], 1), e[4]))),
        (OUTPUT, more_than_asked_for),
    ],
    "{} has computed {} tokens after the output, not {}": [
        (OUTPUT, instead("tokens", lambda v, e: (*e[:4], e[4] + 1))),
        (OUTPUT, instead("tokens", lambda v, e: (*e[:4], e[4] - 1))),
    ],
    "{} finishes twice": [
        (OUTPUT, instead("finish", lambda v, e: [e, e])),
        (ABORT, instead("finish", lambda v, e: [e, e])),
    ],
    "{} finishes; {} was aborted": [
        (ABORT, first(lambda v, q: (("finish", r.uid, "abort") for r in v.book.live() if r.uid != q[1])))
    ],
    "{} finishes with {} of {} tokens": [(OUTPUT, first(finishes_early))],
    "the output of step {} is processed once": [
        (OUTPUT, without("done")),
        (OUTPUT, instead("done", lambda v, e: [])),
    ],
    "the tokens of {} in step {} are left out": [(OUTPUT, without("tokens"))],
    "{} has all its tokens and does not finish": [
        (OUTPUT, without("finish", "drop", "handoff", "job", "tier"))
    ],
    "{} was aborted and does not finish": [(ABORT, without("finish"))],
    "an arrival is answered with {}, not {}": [
        ("on_arrive", without("enqueue")),
        ("on_arrive", instead("enqueue", lambda v, e: (*e[:2], (*e[2], 7)))),
        ("on_arrive", instead("enqueue", lambda v, e: [e, e])),
    ],
    "blocks {} keep their keys over a reset": [("on_reset", without("evict"))],
    "host chunks {} stay over a reset of the tier": [("on_reset", without("tier"))],
    # transfers and the tier
    "job {} is for {}, which is gone": [
        (SCHEDULE, instead("job", lambda v, e: (*e[:3], ("nobody", 1), e[4])))
    ],
    "{} under a key that is not one of its prefixes": [
        (SCHEDULE, chunk("store", a_token_less)),
        (SCHEDULE, chunk("store", a_chunk_further)),
        (SCHEDULE, chunk("store", of_the_prefix_of_others)),
        (SCHEDULE, chunk("store", a_sub_slot_less)),
        (SCHEDULE, chunk("load", of_the_prefix_of_others)),
    ],
    "{} at place {}, which the tier does not hold for it": [
        (SCHEDULE, without("tier")),
        (SCHEDULE, chunk("store", elsewhere)),
        (SCHEDULE, first(stored_when_ready)),
    ],
    "{}, but only {} tokens are computed": [(SCHEDULE, stored_too_early)],
    "{} into block {}, which is not a fresh column {}": [
        (SCHEDULE, chunk("load", another_block)),
        (SCHEDULE, chunk("load", another_fresh_block)),
        (SCHEDULE, an_old_column),
    ],
    "{} from block {}; column {} is block {}": [
        (SCHEDULE, chunk("store", another_block)),
        (SCHEDULE, chunk("store", nothing)),
        (SCHEDULE, stored_without_a_column),
    ],
    "chunk {} is written anew at place {}; place {} holds it": [
        (SCHEDULE, first(chunks("writing", lambda v, q, key, entry: True, 50)))
    ],
    "chunk {} becomes ready without a report": [
        (SCHEDULE, first(chunks("ready", lambda v, q, key, entry: entry.state == "writing")))
    ],
    "chunk {} becomes ready; transfer {} has not stored it on every rank": [
        (REPORT, first(chunks("ready", lambda v, q, key, entry: q[3] and is_good_store(v, q, key)))),
        (
            REPORT,
            ready_after(
                lambda known, ok: known.way == "store" and (known.failed or not ok) and not known.stale
            ),
        ),
        (
            REPORT,
            ready_after(lambda known, ok: known.way == "store" and known.stale and not known.failed and ok),
        ),
        (
            REPORT,
            ready_after(
                lambda known, ok: known.way == "load" and not known.failed and not known.stale and ok
            ),
        ),
    ],
    "chunk {} becomes ready at place {}; transfer {} wrote another": [
        (REPORT, instead("tier", lambda v, e: (*e[:4], e[4] + 1, "ready") if e[5] == "ready" else None)),
        (REPORT, ready_after(lambda known, ok: known.way == "store" and ok, strange=True)),
        (REPORT, thrown_out_and_ready),
    ],
    "chunk {} is thrown out of place {} while a transfer uses it": [
        (SCHEDULE, first(chunks("gone", lambda v, q, key, entry: entry.readers > 0))),
        (SCHEDULE, first(chunks("gone", lambda v, q, key, entry: entry.state == "writing"))),
    ],
    "the report of rank {} on transfer {} is taken as {}": [
        (REPORT, without("unfence")),
        (REPORT, instead("unfence", lambda v, e: (*e[:2], e[2] + 1))),
    ],
    # guards of the core, and rules of the model
    "core guard {}: {}": [
        (SCHEDULE, without("flush")),
        (SCHEDULE, without("evict")),
        (OUTPUT, instead("done", lambda v, e: [("done", e[1] + 1)])),
    ],
    "relocates_only_exclusive_scratch: {}": [(SCHEDULE, last(moved(past_the_end_under_a_key)))],
    "recurrent_store_by_hand_off: {}": [(SCHEDULE, chunk("store", another_block))],
    "loads_only_ready_chunks: {}": [(SCHEDULE, chunk("load", elsewhere))],
    "hit_below_known: {}": [
        (SCHEDULE, instead("hit", lambda v, e: (*e[:2], *2 * (v.book.requests[e[1]].known,)))),
        (SCHEDULE, instead("start", lambda v, e: (*e[:2], v.book.requests[e[1]].known))),
    ],
    "read_columns_present: {}": [
        (SCHEDULE, a_column_less(Kind.FULL, end=True)),
        (SCHEDULE, a_column_less(Kind.WINDOW, end=False)),
    ],
    "host_place_free: {}": [
        (
            SCHEDULE,
            instead("tier", lambda v, e: (*e[:4], v.config.tier_chunks, e[5]) if e[5] == "writing" else None),
        ),
    ],
    "references_match_tables: {}": [(SCHEDULE, last(moved(over_the_next)))],
}

# -- wrong programs ----------------------------------------------------------------------------------------

WrongProgram = Callable[[RankView, StepOrders, Program], Iterator[Program]]
EditOp = Callable[[RankView, StepOrders, Any], Any]  # changes the operation; False where it does not apply


def edited(kind: type[Op], edit: EditOp) -> WrongProgram:
    """One operation of a kind changed, each in turn."""

    def wrong(view: RankView, orders: StepOrders, program: Program) -> Iterator[Program]:
        for at, (_, op) in enumerate(program):
            if isinstance(op, kind):
                copy = deepcopy(program)
                if edit(view, orders, copy[at][1]) is not False:
                    yield copy

    return wrong


def changed(kind: type[Op], **by: Any) -> WrongProgram:
    """One operation of a kind with fields that are functions of what they were."""

    def edit(view: RankView, orders: StepOrders, op: Any) -> None:
        for name, function in by.items():
            setattr(op, name, function(getattr(op, name)))

    return edited(kind, edit)


def lacking(*kinds: type[Op]) -> WrongProgram:
    """All operations of these kinds left out."""

    def wrong(view: RankView, orders: StepOrders, program: Program) -> Iterator[Program]:
        kept = [entry for entry in program if not isinstance(entry[1], kinds)]
        if len(kept) < len(program):
            yield kept

    return wrong


def transfers_lacking(program: Program, jobs: set[int]) -> Iterator[Program]:
    """The program without these transfers, unless it waits for one."""
    if not any(isinstance(op, Wait) and op.job in jobs for _, op in program):
        yield [(s, op) for s, op in program if not (isinstance(op, (Begin, End)) and op.job in jobs)]


def in_stream(kind: type[Op], stream: str) -> WrongProgram:
    """An operation of a kind enqueued in another stream."""

    def wrong(view: RankView, orders: StepOrders, program: Program) -> Iterator[Program]:
        for at, (_, op) in enumerate(program):
            if isinstance(op, kind):
                yield [*program[:at], (stream, op), *program[at + 1 :]]

    return wrong


def put_first(kind: type[Op]) -> WrongProgram:
    """Operations of a kind before all others."""
    return lambda view, orders, program: iter(
        [sorted(program, key=lambda entry: not isinstance(entry[1], kind))]
    )


def put_last(kind: type[Op]) -> WrongProgram:
    """Operations of a kind after all others."""
    return lambda view, orders, program: iter([sorted(program, key=lambda entry: isinstance(entry[1], kind))])


def waiting_after(kind: type[Op], stream: str = "main") -> WrongProgram:
    """The waits for flushed stores stand right behind the operations of a kind."""

    def wrong(view: RankView, orders: StepOrders, program: Program) -> Iterator[Program]:
        waits = [entry for entry in program if isinstance(entry[1], Wait)]
        rest = [entry for entry in program if not isinstance(entry[1], Wait)]
        at = [i + 1 for i, (one, op) in enumerate(rest) if isinstance(op, kind) and one == stream]
        if waits and at:
            yield [*rest[: at[-1]], *waits, *rest[at[-1] :]]

    return wrong


def again(kind: type[Op]) -> WrongProgram:
    """Operations of a kind a second time, at the end."""
    return lambda view, orders, program: iter(
        [*program, entry] for entry in deepcopy(program) if isinstance(entry[1], kind)
    )


def before(make: Callable[[RankView, StepOrders], Iterator[Program]]) -> WrongProgram:
    """Further operations in front."""
    return lambda view, orders, program: ([*more, *program] for more in make(view, orders))


def behind(make: Callable[[RankView, StepOrders], Iterator[Program]]) -> WrongProgram:
    """Further operations at the end."""
    return lambda view, orders, program: ([*program, *more] for more in make(view, orders))


def main_op(
    make: Callable[[RankView, StepOrders], Op | None],
) -> Callable[[RankView, StepOrders], Iterator[Program]]:
    """One operation of the main stream, if there is one to make."""

    def program(view: RankView, orders: StepOrders) -> Iterator[Program]:
        op = make(view, orders)
        if op is not None:
            yield [("main", op)]

    return program


def free_slot(view: RankView) -> int | None:
    return next((slot for slot in range(view.config.slots) if slot not in view.slots), None)


def leave_nobody(view: RankView, orders: StepOrders) -> Op | None:
    slot = free_slot(view)
    return None if slot is None else Leave(slot)


def permuted(moves: bool, *, full: tuple[bool, bool]) -> Callable[[RankView, StepOrders], Op | None]:
    """A move or swap between two rows, of which each is or is not occupied."""

    def make(view: RankView, orders: StepOrders) -> Op | None:
        rows = [[s for s in range(view.config.slots) if (s in view.slots) is one] for one in full]
        pair = next(((a, b) for a in rows[0] for b in rows[1] if a != b), None)
        if pair is None:
            return None
        return Permute((pair,), ()) if moves else Permute((), (pair,))

    return make


def copied_into_a_load(view: RankView, orders: StepOrders) -> Iterator[Program]:
    for known in orders.jobs.values():
        for (g, _, _), _, subs in known.chunks:
            if known.way == "load" and subs[-1]:
                yield [("main", CopyPage(((1, subs[-1], g),)))]


def zeroed_without_order(view: RankView, orders: StepOrders, op: Zero) -> None:
    op.blocks = (*op.blocks, (max(block for block, _ in op.blocks) + 100, 0))


def of_another(operand: Any, slots: int) -> Any:
    return Deref("source", (operand.row + 1) % slots)


def prepared_as_another(view: RankView, orders: StepOrders, op: PreProcess) -> None:
    op.rows = tuple((of_another(operand, view.config.slots), slot, q) for operand, slot, q in op.rows)


def indexed_as_another(view: RankView, orders: StepOrders, op: Forward) -> Any:
    first = op.index[0]
    op.index = (of_another(first, view.config.slots), *op.index[1:])


def padded_through_slots(view: RankView, orders: StepOrders, op: Forward) -> Any:
    if len(op.index) == len(op.rows):
        return False
    op.index = (*op.index[: len(op.rows)], Deref("source", op.rows[0].slot))
    return None


def row_with(**change: Any) -> EditOp:
    """The first row of a forward with other fields."""

    def edit(view: RankView, orders: StepOrders, op: Forward) -> Any:
        now = {name: value(getattr(op.rows[0], name)) for name, value in change.items()}
        op.rows = (replace(op.rows[0], **now), *op.rows[1:])

    return edit


def prefill_as_decode(view: RankView, orders: StepOrders, op: Forward) -> Any:
    if orders.rows[op.rows[0].uid].samples:
        return False
    return row_with(decode=lambda _: True)(view, orders, op)


def decode_as_prefill(view: RankView, orders: StepOrders, op: Forward) -> Any:
    if not orders.rows[op.rows[0].uid].d:
        return False
    return row_with(decode=lambda _: False)(view, orders, op)


def gathered_with_one_column_less(view: RankView, orders: StepOrders, op: Gather) -> Any:
    """A leading column of the first row that is still read, if any, is taken for unreachable."""
    op.unreachable = (tuple(reach + 1 for reach in op.unreachable[0]), *op.unreachable[1:])


def unmasked(view: RankView, orders: StepOrders, op: PostProcess) -> Any:
    if all(slot >= 0 for _, slot, _ in op.rows):
        return False
    op.rows = tuple((index, max(slot, 0), operand) for index, slot, operand in op.rows)
    return None


def masked(rows: Any) -> Any:
    return tuple((index, -1, operand) for index, _, operand in rows)


def read_through_another(view: RankView, orders: StepOrders, op: PostProcess) -> None:
    """The row in slot 0 reads another's blocks."""
    op.rows = tuple(
        (index, slot, operand if slot else of_another(operand, view.config.slots))
        for index, slot, operand in op.rows
    )


def ahead_of_main(way: str) -> WrongProgram:
    """A transfer is submitted behind all but the last operation of the main stream that stands before it."""

    def wrong(view: RankView, orders: StepOrders, program: Program) -> Iterator[Program]:
        for at, (stream, op) in enumerate(program):
            before = view.enqueued + sum(one == "main" for one, _ in program[:at])
            if stream == way and isinstance(op, Begin) and before:
                yield [*program[:at], (stream, replace(op, after_main=before - 1)), *program[at + 1 :]]

    return wrong


def unordered(view: RankView, orders: StepOrders, op: Begin) -> Any:
    """A load waits neither for the main stream nor for the stores that it was told to wait for."""
    if not op.after_jobs:
        return False
    op.after_main, op.after_jobs = 0, ()
    return None


def stored_at_once(view: RankView, orders: StepOrders) -> Iterator[Program]:
    for job, known in orders.jobs.items():
        if known.way == "store" and job in orders.decided_now:
            yield [("store", Begin(job, -1)), ("store", End(job))]


def counted_by_row(view: RankView, orders: StepOrders, op: HostCounts) -> None:
    op.previous = tuple((row, row) for row, _ in op.previous)


def more(value: int) -> int:
    return value + 1


#: refusal of a worker's program -> wrong programs
PROGRAMS: dict[str, list[WrongProgram]] = {
    # slots
    "{} takes slot {}, which {} occupies": [again(Take)],
    "slot {} is left, but nobody occupies it": [before(main_op(leave_nobody))],
    "row {} moves to row {}": [
        before(main_op(permuted(True, full=(True, True)))),
        before(main_op(permuted(True, full=(False, False)))),
    ],
    "rows {} and {} are swapped, one is empty": [
        before(main_op(permuted(False, full=(True, False)))),
        before(main_op(permuted(False, full=(False, True)))),
    ],
    "slot {} is seeded, but its occupant is not scheduled": [
        before(main_op(lambda v, o: None if (slot := free_slot(v)) is None else SetSlot(slot, 1, 0, 0)))
    ],
    "{} starts from {} tokens, {} accepted, state column {}; "
    "it has {} tokens and its state is in column {}": [
        changed(SetSlot, computed=more),
        changed(SetSlot, accepted=more),
        changed(SetSlot, state=more),
    ],
    # order
    "{} stands in stream {}, not in {}": [in_stream(Forward, "load"), in_stream(CopyCounts, "main")],
    "{} writes block {} before the flush of transfer {} is waited for": [put_last(Wait)],
    "{} writes block {}, whose load was already submitted": [behind(copied_into_a_load)],
    "states are prepared after the forward": [again(PreProcess)],
    "the forward runs before all fresh blocks are zeroed and copied": [
        lacking(Zero),
        put_last(Zero),
        lacking(CopyPage),
    ],
    "{} goes on before step {} was post-processed": [lacking(PostProcess)],
    "the state of {} was not prepared": [lacking(PreProcess)],
    "the drafter runs before the step is sampled": [put_first(Draft)],
    # rows, blocks and tables
    "block {} is zeroed without an order": [edited(Zero, zeroed_without_order)],
    "slot {} is prepared for {} tokens; the step computes {}": [
        changed(PreProcess, rows=lambda rows: tuple((operand, slot, q + 1) for operand, slot, q in rows)),
        before(main_op(lambda v, o: PreProcess(((Deref("source", 0), v.config.slots, 1),)))),
    ],
    "{} of {} takes column {} of group {} from block {}; it is block {}": [
        edited(PreProcess, prepared_as_another),
        edited(Forward, indexed_as_another),
    ],
    "a second forward, or one of step {} in step {}": [again(Forward), changed(Forward, step=more)],
    "the forward computes {}; scheduled are {}": [
        changed(Forward, rows=lambda rows: rows[1:]),
        changed(Forward, rows=lambda rows: (*rows, rows[0])),
    ],
    "the forward finds {} in slot {}, where {} is": [
        edited(Forward, row_with(slot=more)),
        edited(Forward, row_with(slot=lambda _: UNKNOWN_JOB)),
    ],
    "the forward computes {} tokens of {}, not {}, or as another kind": [
        edited(Forward, row_with(tokens=more)),
        edited(Forward, decode_as_prefill),
        edited(Forward, prefill_as_decode),
    ],
    "a padded row does not resolve to the null block": [edited(Forward, padded_through_slots)],
    "the forward finds {}'s column {} of group {} in block {}; it is block {}": [
        lacking(SetRow),
        lacking(Gather),
        changed(Forward, tables=lambda _: "gathered.1"),
        edited(Gather, gathered_with_one_column_less),
    ],
    # after the forward
    "stage {} samples step {}, without its forward or not being last": [
        put_first(Sample),
        changed(Sample, step=more),
        behind(main_op(lambda v, o: Sample(o.step) if o.rows and v.stage < v.config.pp - 1 else None)),
    ],
    "row {} of step {} is post-processed, which is not due": [
        again(PostProcess),
        changed(PostProcess, rows=lambda rows: tuple((index + 7, slot, row) for index, slot, row in rows)),
    ],
    "{} of step {} is post-processed in slot {}; it is in {}": [
        edited(PostProcess, unmasked),
        changed(PostProcess, rows=masked),
    ],
    "post-processing of {}, step {}, reads {}: not its blocks": [edited(PostProcess, read_through_another)],
    "counts are taken from buffer {}, whose rows the host has just rewritten": [
        changed(HostCounts, buffer=lambda _: "rows")
    ],
    "{} in row {} takes the count of row {}; it sat in {}": [edited(HostCounts, counted_by_row)],
    # transfers
    "transfer {} is submitted twice, or was never ordered": [
        again(Begin),
        behind(lambda v, o: iter([[("load", Begin(UNKNOWN_JOB, -1))]])),
    ],
    "{} {} is submitted to stream {} ahead of the main stream": [
        in_stream(Begin, "load"),
        in_stream(Begin, "store"),
        ahead_of_main("store"),
    ],
    "load {} is not ordered after a step or store in flight that uses its targets": [
        ahead_of_main("load"),
        edited(Begin, unordered),
    ],
    "store {} is submitted before the forward that fills its source": [before(stored_at_once)],
    "transfer {} ends in stream {}, where it did not begin": [
        again(End),
        in_stream(End, "main"),
    ],
    "the main stream waits for transfer {}, which is not submitted": [
        before(lambda v, o: iter([[("main", Wait(UNKNOWN_JOB))]]))
    ],
    # the end
    "the step computes {}, but no forward is enqueued": [lacking(Forward, Sample, Draft)],
    "the last stage does not sample": [lacking(Sample, Draft)],
    "the flush of transfer {} is not waited for": [lacking(Wait)],
    "{} {}, ordered in step {}, is not submitted": [
        lambda v, o, p: transfers_lacking(p, {j for j, known in o.jobs.items() if known.way == "load"}),
        lambda v, o, p: transfers_lacking(p, {j for j, (told, _) in v.jobs.items() if told < o.step}),
    ],
    "transfers {} begin and do not end": [lacking(End)],
}

# -- where right answers come from -------------------------------------------------------------------------

SERVE = (("schedule",), ("drain",)) * 6
FORGET = ("reset", "local")


def sent(name: str, prompt: int) -> Event:
    return ("arrive", name, "0", prompt, 2)


#: prompts that come back from the host tier: whole, behind a hit on the device, aborted, failed, outlived
LOADS: tuple[Event, ...] = (
    sent("r1", 17), *SERVE,
    FORGET, sent("r2", 12), ("schedule",), sent("r1", 5), ("schedule",), ("drain",), *SERVE,
    sent("r3", 17), ("schedule",), ("schedule",), ("abort", "r3"), ("work",), ("drain",), *SERVE,
    FORGET, sent("r1", 16), ("schedule",), sent("r2", 17), ("schedule",), ("drain",), *SERVE,
    FORGET, sent("r1", 17), ("schedule",), ("run", 0, "main", 0), ("run", 0, "load", 0),
    ("fail", "r1", "load", 0), ("drain",), *SERVE,
    FORGET, sent("r1", 17), ("schedule",), ("reset", "all"), ("drain",), *SERVE,
)  # fmt: skip


@cache
def loading(name: str) -> Samples:
    """Right answers of those choices."""
    kept: Samples = ([], [])
    world = watched(configuration(name), kept)
    for choice in LOADS:
        world.choose(choice)
    assert world.quiet() and world.witnesses["external_hit"], name
    return kept


@cache
def of_a_fault(name: str, **wrong: Any) -> Samples:
    """Answers, with one decision wrong or none, along the stored run of a fault."""
    kept: Samples = ([], [])
    run = stored(name)
    assert run is not None
    config, _, choices = run
    world = watched(config, kept, lambda c, chains: Reference(c, chains, replace(Decisions(), **wrong)))
    for choice in choices:
        world.choose(choice)
    return kept


WALKED = (
    "composed",
    "chunked-local",
    "composed-v1",
    "composed-tight",
    "composed-sync",
    "partial-tails",
    "hybrid-pp2-async",
)
LOADED = ("plain-offload", "composed", "mamba-offload")
SOURCES = [
    *(partial(loading, name) for name in LOADED),
    *(partial(samples, name) for name in WALKED),
    partial(of_a_fault, "own-hit-evicted"),
    # orders that are wrong: nothing else gives a load blocks that a step in flight uses
    partial(of_a_fault, "blocks-reused-under-a-step", frees_wait_for_steps=lambda request: False),
]


@pytest.mark.parametrize(
    ("text", "which"), [(text, which) for text, wrong in ANSWERS.items() for which in range(len(wrong))]
)
def test_an_answer_is_refused_for_this_very_reason(text: str, which: int) -> None:
    question, wrong = ANSWERS[text][which]
    met: dict[str, None] = {}
    for source in SOURCES:
        for view, asked, answer in source()[0]:
            if asked[0] != question:
                continue
            for decisions in wrong(view, asked, answer.decisions):
                reason = allowed(view, asked, Answer(decisions))
                if reason and said_by(reason) == [text]:
                    assert allowed(view, asked, answer) is None
                    return
                met[str(reason)] = None
    pytest.fail(f"no wrong answer is refused so; {len(met)} others: {list(met)[:5]}")


@pytest.mark.parametrize(
    ("text", "which"), [(text, which) for text, wrong in PROGRAMS.items() for which in range(len(wrong))]
)
def test_a_program_is_refused_for_this_very_reason(text: str, which: int) -> None:
    met: dict[str, None] = {}
    for source in SOURCES:
        for view, orders, program in source()[1]:
            for wrong in PROGRAMS[text][which](view, orders, program):
                reason = allowed_program(view, orders, wrong)
                if reason and said_by(reason) == [text]:
                    assert allowed_program(view, orders, program) is None
                    return
                met[str(reason)] = None
    pytest.fail(f"no wrong program is refused so; {len(met)} others: {list(met)[:5]}")


def test_every_refusal_is_in_the_table_and_nothing_else_is() -> None:
    assert sorted([*ANSWERS, *PROGRAMS]) == sorted(ALL)


#: what writes blocks in the main stream, or may: the wait for a flushed store comes right after it
WRITERS: dict[str, WrongProgram] = {
    "zeroing": waiting_after(Zero),
    "pre-processing": waiting_after(PreProcess),
    "the forward": waiting_after(Forward),
    "load": waiting_after(End, "load"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_nothing_writes_before_the_flush_is_waited_for(what: str) -> None:
    for source in SOURCES:
        for view, orders, program in source()[1]:
            for wrong in WRITERS[what](view, orders, program):
                reason = allowed_program(view, orders, wrong) or ""
                if re.fullmatch(f"{what}( .*)? writes block .* before the flush of transfer .*", reason):
                    return
    pytest.fail("nothing was refused so")
