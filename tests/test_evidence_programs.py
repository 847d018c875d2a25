"""Every refusal of a worker's program has a wrong program that it, and no other refusal, turns down.

As for answers: the refusals are read off the source, every text that ``spec.rankview`` can answer with, and
each of the conditions that a refusal joins has a program of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

import spec.rankview
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
    Wait,
    Zero,
)
from spec.policy import Program
from spec.rankview import RankView, StepOrders, allowed_program
from tests.refusals import SOURCES, refusals, said_by

ALL = refusals(spec.rankview)
UNKNOWN = 1_000_000

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


def in_the_slot_of_another(view: RankView, orders: StepOrders, op: Forward) -> Any:
    slot = next((s for s, (uid, _) in view.slots.items() if uid != op.rows[0].uid), None)
    return False if slot is None else row_with(slot=lambda _: slot)(view, orders, op)


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


def fed_by_slot(view: RankView, orders: StepOrders, op: PostProcess) -> None:
    """Every slot is fed with the tokens of the row of its number."""
    op.feeds = tuple((max(slot, 0), max(slot, 0)) for _, slot, _ in op.rows)


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
        edited(Forward, in_the_slot_of_another),
        edited(Forward, row_with(slot=lambda _: UNKNOWN)),
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
    "row {} of step {} is fed with the last token and drafts of {}": [edited(PostProcess, fed_by_slot)],
    "counts are taken from buffer {}, whose rows the host has just rewritten": [
        changed(HostCounts, buffer=lambda _: "rows")
    ],
    "{} in row {} takes the count of row {}; it sat in {}": [edited(HostCounts, counted_by_row)],
    # transfers
    "transfer {} is submitted twice, or was never ordered": [
        again(Begin),
        behind(lambda v, o: iter([[("load", Begin(UNKNOWN, -1))]])),
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
        before(lambda v, o: iter([[("main", Wait(UNKNOWN))]]))
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


@pytest.mark.parametrize(
    ("text", "which"), [(text, which) for text, wrong in PROGRAMS.items() for which in range(len(wrong))]
)
def test_a_program_is_refused_for_this_very_reason(text: str, which: int) -> None:
    met: dict[str, None] = {}
    for source in SOURCES:
        for view, orders, program in source()[1]:
            for wrong in PROGRAMS[text][which](view, orders, program):
                reason = allowed_program(view, orders, wrong)
                if said_by(reason, ALL) == [text]:
                    assert allowed_program(view, orders, program) is None
                    return
                met[str(reason)] = None
    pytest.fail(f"no wrong program is refused so; {len(met)} others: {list(met)[:5]}")


def test_every_refusal_is_in_the_table_and_nothing_else_is() -> None:
    assert sorted(PROGRAMS) == sorted(ALL)


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
