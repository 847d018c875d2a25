"""Contracts: a right answer that differs from the reference's is accepted, a wrong one is refused.

Right answers come from other right policies, run in lockstep for whole walks: nothing they say may be
refused, and they must have differed.  Wrong answers are right ones with one thing changed, judged on the
view in which they were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any

import pytest

from spec.book import Request, Status
from spec.chains import Chains
from spec.config import Config, named
from spec.contracts import KINDS, Question, SchedulerView, allowed
from spec.events import Event
from spec.lockstep import EQUAL, SAME, STRICTER, WRONG, Lockstep, lockstep, renamed
from spec.ops import (
    Begin,
    Deref,
    End,
    Forward,
    Gather,
    HostCounts,
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
from spec.policy import Answer, Arrival, Policy, Program
from spec.rankview import RankView, StepOrders, allowed_program
from spec.reference import Reference
from spec.reference.plan import Message
from spec.walk import Adversary, draw_options
from spec.world import World

NAMES = ("composed", "composed-sync", "composed-tight", "composed-v1", "hybrid-pp2-async", "partial-tails")


def walk(config: Config, factory: Callable[[Config, Chains], Policy], seed: int, choices: int = 200) -> World:
    """A random walk, a reset, and a quiet phase."""
    random = Random(seed)
    world = World(config, factory)
    adversary = Adversary(config, random, draw_options(config, random))
    for _ in range(choices):
        choice = adversary.draw(world)
        if choice:
            world.choose(choice)
    world.choose(("reset", "local"))
    world.quiet()
    return world


def stepped(
    factory: Callable[[Config, Chains], Policy], name: str, seeds: int = 4
) -> Counter[tuple[str, str]]:
    """Answers by question and class over some walks, none of which may break anything."""
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(seeds):
        world = walk(named(name), lockstep(factory), seed)
        policy = world.policy
        assert isinstance(policy, Lockstep)
        assert world.verdict is None, (seed, world.verdict)
        wrong = [difference for difference in policy.found if difference.kind == WRONG]
        assert not wrong, (seed, wrong[0])
        counts += policy.counts
    return counts


# -- other right answers -----------------------------------------------------------------------------------


class OtherBlocks(Reference):
    """Takes the free block that was freed last instead of first."""

    def allocate(self, request: Request, g: int, col: int) -> int:
        self.book.free.rotate(1)
        return super().allocate(request, g, col)


class SmallSteps(Reference):
    """Prefills at most one block a step."""

    def prefill_tokens(self, request: Request, c: int, q: int) -> int:
        block = max(group.block_tokens for group in self.config.groups)
        return super().prefill_tokens(request, c, min(q, block - c % block))


class KeepsNothing(Reference):
    """Throws every stored chunk away, and clears the tier at every reset."""

    def tier(self, key: Any, place: int, state: str) -> None:
        if state != "ready":
            super().tier(key, place, state)
            return
        super().tier(key, place, "gone")
        self.places.append(place)

    def on_reset(self, scope: str) -> Answer:
        if self.book.free:
            self.do(("evict", self.book.free[0]))  # under a key or not: nothing is lost
        return super().on_reset("all")


class HeadFirst(Reference):
    """Gives columns up from the first on, and lets go of the key of a free block whenever a request
    arrives or is aborted."""

    def drop_all(self, request: Request) -> None:
        for g, cols in enumerate(request.cols):
            for col, block in enumerate(list(cols)):
                if block:
                    self.do(("drop", request.uid, g, col, block))
            cols.clear()
        super().drop_all(request)

    def on_abort(self, uid: UserId) -> Answer:
        for block in [b for b in self.book.core.key if b in self.book.free][:1]:
            self.do(("evict", block))
        return super().on_abort(uid)

    def on_arrive(self, arrival: Arrival) -> Answer:
        for block in [b for b in self.book.core.key if b in self.book.free][:1]:
            self.do(("evict", block))
        return super().on_arrive(arrival)


class OtherSlots(Reference):
    """Fills batch slots from the other end, and zeroes blocks one by one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for worker in self.workers:
            worker.free_slots.reverse()

    def worker_program(self, rank: int, message: Any) -> Program:
        program = []
        for stream, op in super().worker_program(rank, message):
            pieces = [Zero((pair,)) for pair in op.blocks] if isinstance(op, Zero) else [op]
            program += [(stream, piece) for piece in pieces]
        return program


RIGHT: tuple[tuple[type[Reference], tuple[str, ...]], ...] = (
    (OtherBlocks, ("schedule",)),
    (SmallSteps, ("schedule",)),
    (KeepsNothing, ("on_report", "on_reset")),
    (HeadFirst, ("on_arrive", "on_abort", "on_output")),
    (OtherSlots, ()),
)


@pytest.mark.parametrize(("policy", "differs"), RIGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_another_right_policy_is_accepted(policy: type[Reference], differs: tuple[str, ...]) -> None:
    counts = stepped(policy, "composed", seeds=5) + stepped(policy, "composed-tight", seeds=5)
    for question in differs:
        same_names = policy is OtherBlocks  # the same decisions about other blocks are the same decisions
        assert counts[question, EQUAL] + counts[question, STRICTER] > 0 or same_names, (question, counts)


def test_right_policies_cover_every_question() -> None:
    assert {q for _, differs in RIGHT for q in differs} == set(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_in_lockstep_with_itself_agrees(name: str) -> None:
    counts = stepped(Reference, name)
    total = sum(counts.values())
    assert total > 300
    # Chunks that a full tier has evicted meanwhile are offered again: offers are no decisions.
    assert sum(n for (_, kind), n in counts.items() if kind != SAME) <= total * 0.02, counts


class Hesitates(Reference):
    """Admits nobody in odd steps."""

    def admit(self, message: Message, request: Request, budget: int) -> int:
        if message.step % 2:
            self.do(("defer", request.uid, "not now"))
            return 0
        return super().admit(message, request, budget)


def test_doing_less_is_called_stricter() -> None:
    counts = stepped(Hesitates, "composed")
    assert counts["schedule", STRICTER] > 0 == counts["schedule", WRONG]


def test_renaming_forgets_ids_and_nothing_else() -> None:
    one = [("alloc", ("r1", 1), 0, 0, 5), ("alloc", ("r1", 1), 0, 1, 9), ("drop", ("r1", 1), 0, 0, 5)]
    two = [("alloc", ("r1", 1), 0, 0, 2), ("alloc", ("r1", 1), 0, 1, 1), ("drop", ("r1", 1), 0, 0, 2)]
    three = [*two[:2], ("drop", ("r1", 1), 0, 0, 1)]
    assert renamed(one) == renamed(two) != renamed(three)


# -- wrong answers -----------------------------------------------------------------------------------------

Sample_ = tuple[SchedulerView, Question, Answer]


Samples = tuple[list[Sample_], list[tuple[RankView, StepOrders, Program]]]


def watched(config: Config, kept: Samples, factory: Callable[[Config, Chains], Policy] = Reference) -> World:
    """A world whose answers and programs are kept, each with the view in which it was given."""
    answers, programs = kept

    def make(config: Config, chains: Chains) -> Lockstep:
        policy = lockstep(factory)(config, chains)
        policy.lost = "not needed here"  # judging is enough: the reference need not follow
        return policy

    world = World(config, make)
    policy = world.policy
    assert isinstance(policy, Lockstep)
    ask, program_of = policy.policy, policy.policy.worker_program

    def spy(method: str, view: SchedulerView) -> Callable[..., Answer]:
        real = getattr(ask, method)

        def call(*args: Any) -> Answer:
            before = view.copy()
            answer: Answer = real(*args)
            answers.append((before, (method, *args), Answer(list(answer.decisions))))
            return answer

        return call

    for method in KINDS:
        setattr(ask, method, spy(method, policy.view))

    def program(rank: int, message: Any) -> Program:
        assert policy.orders is not None
        before = deepcopy(policy.ranks[rank], {id(policy.config): policy.config})
        made: Program = program_of(rank, message)
        programs.append((before, policy.orders, made))
        return made

    ask.worker_program = program  # type: ignore[method-assign]
    return world


@cache
def samples(name: str) -> Samples:
    """Right answers of some walks, each with the view in which it was given."""
    kept: Samples = ([], [])
    for seed in range(6):
        random = Random(seed)
        config = named(name)
        world = watched(config, kept)
        adversary = Adversary(config, random, draw_options(config, random))
        for _ in range(200):
            choice = adversary.draw(world)
            if choice:
                world.choose(choice)
        world.quiet()
    return kept


Mutation = Callable[[SchedulerView, Question, list[Event]], list[Event] | None]


def change(kind: str, edit: Callable[[SchedulerView, Event], Event | list[Event] | None]) -> Mutation:
    """The first decision of a kind replaced; None where the change does not apply."""

    def mutate(view: SchedulerView, question: Question, decisions: list[Event]) -> list[Event] | None:
        for at, event in enumerate(decisions):
            if event[0] == kind:
                new = edit(view, event)
                if new is None:
                    continue
                return [*decisions[:at], *(new if isinstance(new, list) else [new]), *decisions[at + 1 :]]
        return None

    return mutate


def add(make: Callable[[SchedulerView, Question], Event | None]) -> Mutation:
    """One more decision in front."""

    def mutate(view: SchedulerView, question: Question, decisions: list[Event]) -> list[Event] | None:
        event = make(view, question)
        return [event, *decisions] if event else None

    return mutate


def remove(kind: str) -> Mutation:
    """All decisions of a kind left out."""

    def mutate(view: SchedulerView, question: Question, decisions: list[Event]) -> list[Event] | None:
        kept = [event for event in decisions if event[0] != kind]
        return kept if len(kept) < len(decisions) else None

    return mutate


def drop_last(view: SchedulerView, status: Status, flying: bool) -> Event | None:
    """A request of that status gives its last column up."""
    for uid, request in view.book.requests.items():
        if request.status is status and bool(request.flying) is flying:
            for g, cols in enumerate(request.cols):
                if cols and cols[-1]:
                    return ("drop", uid, g, len(cols) - 1, cols[-1])
    return None


def someone_held(view: SchedulerView) -> int | None:
    return next(iter(view.book.core.holders), None)


def other_key(view: SchedulerView, event: Event) -> Event | None:
    """The same column adopted from a block under another key."""
    mine = view.book.core.key.get(event[4])
    return next(((*event[:4], b) for b, key in view.book.core.key.items() if key != mine), None)


def hit_more(view: SchedulerView, event: Event) -> Event | None:
    return (*event[:3], view.book.requests[event[1]].known) if event[3] else None


def start_later(view: SchedulerView, event: Event) -> Event:
    return (*event[:2], event[2] + max(g.block_tokens for g in view.config.groups))


def ready_now(view: SchedulerView, question: Question) -> Event | None:
    """A stored chunk is declared ready although other ranks have not reported."""
    known, state = view.jobs.get(question[1]), view.book.core.jobs.get(question[1])
    if known is None or state is None or known.way != "store" or len(state.waiting) < 2:
        return None
    key, place, _ = known.chunks[0]
    return ("tier", *key, place, "ready")


def chunk_elsewhere(view: SchedulerView, event: Event) -> Event:
    (key, place, subs), *rest = event[4]
    return (*event[:4], ((key, place + 100, subs), *rest))


def chunk_of_others(view: SchedulerView, event: Event) -> Event | None:
    """A store that reads somebody else's block."""
    if event[2] != "store":
        return None
    (key, place, subs), *rest = event[4]
    strange = next((b for b in view.book.core.holders if b not in subs), None)
    return (*event[:4], ((key, place, (*subs[:-1], strange)), *rest)) if strange else None


def tokens_less(view: SchedulerView, event: Event) -> Event | None:
    return (*event[:3], event[3][:-1], event[4]) if event[3] else None


WRONG_ANSWERS: dict[str, dict[str, Mutation]] = {
    "on_arrive": {
        "not taken": remove("enqueue"),
        "taken twice": change("enqueue", lambda v, e: [e, e]),
        "other tokens": change("enqueue", lambda v, e: (*e[:2], (*e[2], 7))),
    },
    "schedule": {
        "a held block is allocated": change(
            "alloc", lambda v, e: (*e[:4], someone_held(v)) if someone_held(v) else None
        ),
        "the null block is allocated": change("alloc", lambda v, e: (*e[:4], 0)),
        "a block outside the pool": change("alloc", lambda v, e: (*e[:4], v.config.pool_blocks)),
        "a keyed block is reused": remove("evict"),
        "a hit under another key": change("adopt", other_key),
        "a hit of everything": change("hit", hit_more),
        "a start beyond the hit": change("start", start_later),
        "a row ahead": change("row", lambda v, e: (*e[:2], e[2] + 1, *e[3:])),
        "a row of unknown tokens": change("row", lambda v, e: (*e[:3], e[3] + 30, e[4])),
        "too many drafts": change("row", lambda v, e: (*e[:4], v.config.drafts + 1)),
        "two rows of one request": change("row", lambda v, e: [e, e]),
        "a state that nobody leaves": change("publish", lambda v, e: (*e[:4], e[4] + 1, e[5])),
        "another prefix": change("publish", lambda v, e: (*e[:5], e[5] + 1)),
        "no flush of reused sources": remove("flush"),
        "a flush of nothing": add(lambda v, q: ("flush", 999_999)),
        "a load of an absent chunk": change("job", lambda v, e: chunk_elsewhere(v, e)),
        "a store of others' bytes": change("job", chunk_of_others),
        "zeroes over bytes": add(lambda v, q: ("zero", someone_held(v), 0) if someone_held(v) else None),
        "a column in use is given up": add(lambda v, q: drop_last(v, Status.RUNNING, True)),
        "no step": remove("step"),
        "two steps": change("step", lambda v, e: [e, ("step", e[1] + 1)]),
        "a finish": add(lambda v, q: next((("finish", u, "length") for u in v.book.requests), None)),
    },
    "on_output": {
        "a token is lost": change("tokens", tokens_less),
        "a token is invented": change("tokens", lambda v, e: (*e[:3], (*e[3], 1), e[4])),
        "rejected drafts count": change("tokens", lambda v, e: (*e[:4], e[4] + 1)),
        "a row is left out": remove("tokens"),
        "nobody finishes": remove("finish"),
        "processed twice": change("done", lambda v, e: [e, e]),
        "not processed": remove("done"),
        "blocks of steps in flight are given up": add(lambda v, q: drop_last(v, Status.DONE, True)),
        "a step is scheduled": add(lambda v, q: ("step", v.book.step + 1)),
    },
    "on_report": {
        "not taken": remove("unfence"),
        "taken twice": change("unfence", lambda v, e: [e, e]),
        "taken for another rank": change("unfence", lambda v, e: (*e[:2], e[2] + 1)),
        "ready before the last rank": add(ready_now),
    },
    "on_abort": {
        "not finished": remove("finish"),
        "somebody else": change(
            "finish",
            lambda v, e: next(
                (
                    ("finish", u, e[2])
                    for u, r in v.book.requests.items()
                    if u != e[1] and r.status is not Status.DONE
                ),
                None,
            ),
        ),
        "blocks of steps in flight are given up": add(
            lambda v, q: next(
                (
                    ("drop", q[1], g, len(cols) - 1, cols[-1])
                    for g, cols in enumerate(v.book.requests[q[1]].cols)
                    if cols and cols[-1] and v.book.requests[q[1]].flying
                ),
                None,
            )
        ),
    },
    "on_reset": {
        "keys are kept": remove("evict"),
        "the tier is kept": lambda v, q, d: (
            [e for e in d if e[0] != "tier"] if q[1] == "all" and v.book.tier else None
        ),
    },
}


@pytest.mark.parametrize(("question", "fault"), [(q, f) for q, many in WRONG_ANSWERS.items() for f in many])
def test_a_wrong_answer_is_refused(question: str, fault: str) -> None:
    tried = 0
    for name in ("composed", "composed-tight", "composed-sync"):
        for view, asked, answer in samples(name)[0]:
            if asked[0] != question:
                continue
            wrong = WRONG_ANSWERS[question][fault](view, asked, answer.decisions)
            if wrong is None or wrong == answer.decisions:
                continue
            if fault == "a keyed block is reused" and not reuses(view, wrong):
                continue
            if fault == "no flush of reused sources" and not view_reuses(view, asked, answer.decisions):
                continue
            assert allowed(view, asked, answer) is None
            assert allowed(view, asked, Answer(wrong)), (name, wrong)
            tried += 1
            if tried == 30:
                return
    assert tried, "the walks offered no place for this fault"


def reuses(view: SchedulerView, decisions: list[Event]) -> bool:
    """Whether a block is handed out that carried a key before the answer."""
    return any(e[0] == "alloc" and e[4] in view.book.core.key for e in decisions)


def view_reuses(view: SchedulerView, question: Question, decisions: list[Event]) -> bool:
    """Whether some flush is due to reuse, rather than to a preemption."""
    fences = view.book.core.fences
    return any(e[0] == "alloc" and e[4] in fences for e in decisions)


def test_judging_leaves_the_view_alone() -> None:
    for view, asked, answer in samples("composed")[0][:200]:
        before = deepcopy(view.copy(), {id(view.config): view.config, id(view.book.chains): view.book.chains})
        allowed(view, asked, answer)
        assert view.copy() == before


# -- wrong programs ----------------------------------------------------------------------------------------

ProgramMutation = Callable[[RankView, StepOrders, Program], Program | None]


def without(*kinds: type) -> ProgramMutation:
    """All operations of these kinds left out."""

    def mutate(view: RankView, orders: StepOrders, program: Program) -> Program | None:
        kept = [entry for entry in program if not isinstance(entry[1], kinds)]
        return kept if len(kept) < len(program) else None

    return mutate


def moved(kind: type, *, last: bool) -> ProgramMutation:
    """Operations of a kind moved to an end of the program."""

    def mutate(view: RankView, orders: StepOrders, program: Program) -> Program | None:
        mine = [entry for entry in program if isinstance(entry[1], kind)]
        rest = [entry for entry in program if not isinstance(entry[1], kind)]
        return (rest + mine if last else mine + rest) if mine else None

    return mutate


def edited(kind: type, edit: Callable[[Any, RankView], bool]) -> ProgramMutation:
    """The first operation of a kind edited; the edit says whether it applied."""

    def mutate(view: RankView, orders: StepOrders, program: Program) -> Program | None:
        copy = deepcopy(program)
        return copy if any(isinstance(op, kind) and edit(op, view) for _, op in copy) else None

    return mutate


def twice(kind: type) -> ProgramMutation:
    """An operation enqueued a second time."""

    def mutate(view: RankView, orders: StepOrders, program: Program) -> Program | None:
        mine = [entry for entry in program if isinstance(entry[1], kind)]
        return program + mine[:1] if mine else None

    return mutate


def drop_row(op: Forward, view: RankView) -> bool:
    op.rows = op.rows[1:]
    return True


def unmask(op: PostProcess, view: RankView) -> bool:
    rows = tuple((i, max(slot, 0), operand) for i, slot, operand in op.rows)
    changed, op.rows = rows != op.rows, rows
    return changed


def mask(op: PostProcess, view: RankView) -> bool:
    rows = tuple((i, -1, operand) for i, _, operand in op.rows)
    changed, op.rows = rows != op.rows, rows
    return changed


def fed_by_slot(op: PostProcess, view: RankView) -> bool:
    op.feeds = tuple((max(slot, 0), max(slot, 0)) for _, slot, _ in op.rows)
    return any(slot >= 0 and slot != index for index, slot, _ in op.rows)


def by_batch(op: PreProcess, view: RankView) -> bool:
    rows = tuple((Deref("source", i), slot, q) for i, (_, slot, q) in enumerate(op.rows))
    changed, op.rows = rows != op.rows, rows
    return changed


def stale_buffer(op: Forward, view: RankView) -> bool:
    op.tables = "gathered.1"
    return True


def pad_through_slots(op: Forward, view: RankView) -> bool:
    padded = len(op.index) - len(op.rows)
    op.index = op.index[: len(op.rows)] + tuple(Deref("source", op.rows[0].slot) for _ in range(padded))
    return padded > 0


def seeded_elsewhere(op: SetSlot, view: RankView) -> bool:
    op.computed += 1
    return True


def taken_slot(op: Take, view: RankView) -> bool:
    before, op.slot = op.slot, next(iter(view.slots), op.slot)
    return op.slot != before


def counted_by_row(op: HostCounts, view: RankView) -> bool:
    previous = tuple((row, row) for row, _ in op.previous)
    changed, op.previous = previous != op.previous, previous
    return changed and op.step > 0


def rewritten_buffer(op: HostCounts, view: RankView) -> bool:
    op.buffer = "rows"
    return op.step > 0


WRONG_PROGRAMS: dict[str, ProgramMutation] = {
    "no forward": without(Forward),
    "two forwards": twice(Forward),
    "a row is left out": edited(Forward, drop_row),
    "rows are not set": without(SetRow),
    "nothing is gathered": without(Gather),
    "gathered before rows are set": moved(Gather, last=False),
    "gathered after the forward": moved(Gather, last=True),
    "another buffer is read": edited(Forward, stale_buffer),
    "padding through slots": edited(Forward, pad_through_slots),
    "fresh blocks are not zeroed": without(Zero),
    "zeroed after the forward": moved(Zero, last=True),
    "states are not prepared": without(PreProcess),
    "states are prepared late": moved(PreProcess, last=True),
    "states by batch index": edited(PreProcess, by_batch),
    "a slot is taken twice": edited(Take, taken_slot),
    "a slot starts elsewhere": edited(SetSlot, seeded_elsewhere),
    "late rows of others": edited(PostProcess, unmask),
    "late rows skipped": edited(PostProcess, mask),
    "tokens of other rows": edited(PostProcess, fed_by_slot),
    "nothing is sampled": without(Sample),
    "transfers are not submitted": without(Begin, End),
    "flushes are not waited for": without(Wait),
    "flushes are waited for last": moved(Wait, last=True),
    "counts of other rows": edited(HostCounts, counted_by_row),
    "counts from rewritten rows": edited(HostCounts, rewritten_buffer),
}


def must_wait_first(orders: StepOrders, view: RankView) -> bool:
    """Whether a flushed store reads a block that this step zeroes."""
    jobs = view.known_jobs | orders.jobs
    return any(
        b in {block for block, _ in orders.zero}
        for j in orders.flush
        if j in jobs
        for _, _, subs in jobs[j].chunks
        for b in subs
    )


@pytest.mark.parametrize("fault", WRONG_PROGRAMS)
def test_a_wrong_program_is_refused(fault: str) -> None:
    tried = 0
    for name in ("composed", "composed-v1", "composed-sync"):
        for view, orders, program in samples(name)[1]:
            wrong = WRONG_PROGRAMS[fault](view, orders, program)
            if wrong is None or not applies(fault, view, orders, program):
                continue
            assert allowed_program(view, orders, program) is None
            assert allowed_program(view, orders, wrong), (name, orders, wrong)
            tried += 1
            if tried == 30:
                return
    assert tried, "the walks offered no place for this fault"


def applies(fault: str, view: RankView, orders: StepOrders, program: Program) -> bool:
    """Where a change of the program is a fault at all, rather than another right program."""
    if fault == "flushes are waited for last":
        return must_wait_first(orders, view) and bool(orders.rows)
    if fault in (
        "rows are not set",
        "nothing is gathered",
        "gathered before rows are set",
        "gathered after the forward",
    ):
        return any(
            isinstance(op, Take) and op.uid in orders.rows for _, op in program
        )  # else old rows may do
    if fault == "padding through slots":
        first = next(op for _, op in program if isinstance(op, Forward)).rows[0].uid
        return any(
            orders.rows[first].cols[g][0]
            for g, group in enumerate(view.config.groups)
            if group.kind == "mamba"
        )
    if fault == "states by batch index":
        return differing_rows(view, orders, program)
    if fault == "transfers are not submitted":
        late = any(told < orders.step for told, _ in view.jobs.values())
        return late or bool(orders.flush) or any(k.way == "load" for k in orders.jobs.values())
    return True


def differing_rows(view: RankView, orders: StepOrders, program: Program) -> bool:
    """Whether some row's batch index is not its slot."""
    pre = next((op for _, op in program if isinstance(op, PreProcess)), None)
    return pre is not None and any(i != slot for i, (_, slot, _) in enumerate(pre.rows))
