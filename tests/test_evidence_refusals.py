"""Every refusal of a scheduler's answer has a wrong answer that it, and no other refusal, turns down.

The refusals are read off the source: every text that ``spec.contracts`` can answer with.  A new one without
a wrong answer fails the test of the table.  Where a refusal joins several conditions there is a wrong answer
for each of them, and where it compares numbers it is missed by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import spec.contracts
from spec.book import Key, Request, Status
from spec.config import Kind
from spec.contracts import KnownJob, Question, SchedulerView, allowed, follow, retained_from
from spec.events import Event
from spec.ops import UserId
from spec.policy import Answer
from tests.refusals import SOURCES, refusals, said_by

ALL = refusals(spec.contracts)

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


def published(view: SchedulerView) -> dict[int, Key]:
    """Blocks and their keys."""
    return cast("dict[int, Key]", view.book.core.key)


def under_key(view: SchedulerView, wanted: Callable[[Any], bool]) -> Iterator[int]:
    """Blocks that are published under such a key."""
    return (block for block, key in published(view).items() if wanted(key))


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
        for block, (g, n, _prefix) in published(view).items():
            yield ("adopt", request.uid, g, (n - 1) // view.config.groups[g].block_tokens, block)


def adopted_from(wanted: Callable[[SchedulerView, Event, Any], bool]) -> Edit:
    """The same column, from a block under another key."""

    def edit(view: SchedulerView, event: Event) -> Event | None:
        block = next(under_key(view, lambda key: wanted(view, event, key)), None)
        return (*event[:4], block) if block else None

    return edit


def of_other_tokens(view: SchedulerView, event: Event, key: Any) -> bool:
    mine = published(view).get(event[4], (0, 0, 0))
    return bool(key[:2] == mine[:2] and key[2] != mine[2])


def of_more_tokens(view: SchedulerView, event: Event, key: Any) -> bool:
    return bool(key[0] == event[2] and key[1] > view.book.requests[event[1]].known)


def of_another_group(view: SchedulerView, event: Event, key: Any) -> bool:
    mine, groups = published(view).get(event[4], (0, 0, 0)), view.config.groups
    same = groups[key[0]].block_tokens == groups[event[2]].block_tokens  # else its column would differ too
    return bool(key[0] != mine[0] and key[1:] == mine[1:] and same)


def from_no_key(view: SchedulerView, event: Event) -> Event | None:
    block = next((b for b in view.book.core.holders if b not in view.book.core.key), None)
    return (*event[:4], block) if block else None


def adopted_in_the_same_step(view: SchedulerView, _: Question) -> Iterator[Event]:
    for block in view.written:
        g, n, _prefix = published(view)[block]
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


def fresh_block_of_another_column(view: SchedulerView, event: Event) -> Event | None:
    request = view.book.requests[event[1]]
    fresh = (b for g, _, b in held(view, request) if g == event[2] and b != event[3] and b in view.fresh)
    block = next(fresh, None)
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
        (SCHEDULE, instead_then("publish", fresh_block_of_another_column)),
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
                if said_by(reason, ALL) == [text]:
                    assert allowed(view, asked, answer) is None
                    return
                met[str(reason)] = None
    pytest.fail(f"no wrong answer is refused so; {len(met)} others: {list(met)[:5]}")


def test_every_refusal_is_in_the_table_and_nothing_else_is() -> None:
    assert sorted(ANSWERS) == sorted(ALL)
