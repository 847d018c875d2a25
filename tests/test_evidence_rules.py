"""Every invariant is alive: each has a stated way to break it, and so has every condition that a rule joins.

A rule is broken by a policy: the reference with one decision replaced, or with one answer or program
tampered with.  The table says which; a rule without an entry fails the test of the table.  A rule that joins
conditions is broken in one of them at a time, and must say which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest

from spec.book import Book, Key, Status
from spec.chains import GARBAGE, TORN, Chains
from spec.config import Config, Kind, named
from spec.events import Event
from spec.faults import tamper
from spec.memory import CONV, TEMPORAL, Page
from spec.ops import Begin, Deref, End, Forward, Leave, PostProcess, Sample, SetSlot
from spec.policy import Answer, Output, Policy, PolicyError, Program
from spec.reference import Decisions, Reference
from spec.reference.plan import Chunk
from spec.rules import BY_NAME, RULES, STATE_RULES
from spec.walk import Adversary, draw_options
from spec.world import Rank, World

Factory = Callable[[Config, Chains], Policy]


# -- policies that do one thing wrong ----------------------------------------------------------------------


def deciding(**decisions: Any) -> Factory:
    """The reference with other decisions."""
    return lambda config, chains: Reference(config, chains, replace(Decisions(), **decisions))


def editing(kind: str, edit: Callable[[Book, Event], list[Event]]) -> Factory:
    """The reference, with every decision of one kind replaced."""
    return tamper.editing(kind, edit)(Reference)


def enqueuing(edit: Callable[[Program], Program]) -> Factory:
    """The reference with its worker programs edited."""
    return tamper.enqueuing(lambda rank, program: edit(program))(Reference)


def other_request(book: Book, uid: Any) -> Any:
    """Somebody else, if there is somebody else."""
    return next((u for u in book.requests if u != uid), uid)


def unkeyed_free(book: Book, block: int) -> int:
    """A free block under no key."""
    return next((b for b in book.free if b not in book.core.key), block)


def held(book: Book, block: int) -> int:
    """A block that somebody holds."""
    return next(iter(book.core.holders), block)


def reversed_done(book: Book, event: Event) -> list[Event]:
    """The youngest step's output is processed first."""
    return [("done", max(book.core.steps))]


def seeds_changed(**change: int) -> Callable[[Program], Program]:
    """New occupants start from other values."""

    def edit(program: Program) -> Program:
        for _, op in program:
            if isinstance(op, SetSlot):
                for name, delta in change.items():
                    setattr(op, name, getattr(op, name) + delta)
        return program

    return edit


def without_leaves(program: Program) -> Program:
    """Nobody leaves a slot."""
    return [(stream, op) for stream, op in program if not isinstance(op, Leave)]


def submitted_last(program: Program) -> Program:
    """Stores are submitted after everything else, flushed ones too: a flush then waits for what waits for
    it."""
    late = [(s, op) for s, op in program if s == "store" and isinstance(op, (Begin, End))]
    return [entry for entry in program if entry not in late] + late


class Idle(Reference):
    """Never admits anybody."""

    def admit(self, *args: Any) -> int:
        return 0


class Forgetful(Reference):
    """Throws away the first output that comes after a preemption, whether or not it was under way then."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.preempted: set[Any] = set()

    def preempt(self, request: Any) -> None:
        self.preempted.add(request.uid)
        super().preempt(request)

    def on_output(self, output: Output) -> Answer:
        kept = []
        for uid, tokens in output.tokens:
            dropped = tokens and uid in self.preempted
            self.preempted -= {uid} if dropped else set()
            kept.append((uid, () if dropped else tokens))
        return super().on_output(replace(output, tokens=tuple(kept)))


class ForgetsTheServed(Reference):
    """Takes all keys away when a request ends."""

    def finish(self, request: Any, why: str) -> None:
        super().finish(request, why)
        for block in list(self.book.core.key):
            self.do(("evict", block))


class RefusesResets(Reference):
    """Answers a reset with nothing."""

    def on_reset(self, scope: str) -> Answer:
        return self.answer()


class Stops(Reference):
    """Stops with an error of its own when the first request arrives."""

    def on_abort(self, uid: Any) -> Answer:
        raise PolicyError("assertion failed")


# -- the table ---------------------------------------------------------------------------------------------

BATCH = {"post_row": lambda index, slot: Deref("source", index)}
SLOTS = {
    "index_row": lambda index, slot: Deref("source", slot),
    "padded_row": lambda index: Deref("source", 0),
}
TOO_EARLY = (
    "post",
    "leave",
    "take",
    "gather",
    "update",
    "flush",
    "zero",
    "copy",
    "pre",
    "forward",
    "after",
    "load",
)

#: rule -> (configuration, the policy that breaks it)
BREAKERS: dict[str, tuple[str, Factory]] = {
    # ownership
    "no_double_owner": ("plain", editing("alloc", lambda k, e: [(*e[:4], held(k, e[4]))])),
    "null_block_unowned": ("plain", editing("publish", lambda k, e: [(*e[:3], 0, *e[4:])])),
    "evict_before_reuse": ("plain", editing("evict", lambda k, e: [])),
    "adopt_only_published": ("plain", editing("adopt", lambda k, e: [(*e[:4], unkeyed_free(k, e[4]))])),
    "release_only_held": ("plain", editing("drop", lambda k, e: [e, e])),
    "publish_only_held": ("plain", editing("publish", lambda k, e: [(e[0], other_request(k, e[1]), *e[2:])])),
    "key_names_its_column": ("plain", editing("publish", lambda k, e: [(*e[:4], e[4] - 4, e[5])])),
    "references_match_tables": ("plain", editing("alloc", lambda k, e: [(*e[:3], 0, e[4])])),
    "free_queue_is_unheld": ("plain", editing("alloc", lambda k, e: [(*e[:4], e[4] + 1000)])),
    "attention_reads_exact": ("composed", deciding(v2_order=TOO_EARLY)),
    "window_reads_exact": (
        "composed",
        deciding(retained_column=lambda group, n: n // group.block_tokens + 1),
    ),
    # alias
    "relocates_only_exclusive_scratch": (
        "composed",
        editing("move", lambda k, e: [("publish", e[1], e[2], e[5], 4, 1), e]),
    ),
    "recurrent_store_by_hand_off": ("composed", deciding(positional_group=lambda group: True)),
    "state_reads_exact": ("composed", deciding(precopy_row=lambda index, slot: Deref("source", index))),
    # fence
    "job_ids_unique": (
        "composed",
        editing("job", lambda k, e: [(e[0], next(iter(k.core.jobs), e[1]), *e[2:])]),
    ),
    "report_once_per_rank": ("composed", editing("unfence", lambda k, e: [e, e])),
    "flush_only_pending": ("composed", editing("flush", lambda k, e: [("flush", 10_000)])),
    "reuse_flushes_fence": ("composed", editing("flush", lambda k, e: [])),
    "ready_chunk_exact": ("composed", deciding(job_done=lambda waiting: True)),
    "host_place_free": ("tiny-tier", deciding(evictable=lambda readers: True)),
    "loads_only_ready_chunks": (
        "composed",
        editing("job", lambda k, e: [(*e[:4], tuple((key, p + (e[2] == "load"), s) for key, p, s in e[4]))]),
    ),
    "load_xor_store": (
        "plain-offload",
        editing("job", lambda k, e: [(e[0], e[1] + 5000, "store", *e[3:]), e] if e[2] == "load" else [e]),
    ),
    # delay
    "forward_position_exact": ("composed", enqueuing(seeds_changed(computed=1))),
    "input_tokens_exact": ("composed", deciding(draft_row=lambda index, slot, late: -1 if late else index)),
    "late_kernel_reads_slot_rows": ("composed", deciding(**BATCH)),
    "late_row_still_occupied": ("composed", deciding(masks_late_row=lambda then, now: False)),
    "padded_rows_write_null": ("composed", deciding(**SLOTS)),
    "slot_single_occupant": ("composed", enqueuing(without_leaves)),
    "steps_end_in_order": ("composed", editing("done", reversed_done)),
    # accepted tokens
    "output_exact": ("crowded", Forgetful),
    "accepted_count_belongs": ("composed-v1", deciding(counts_buffer=lambda: "rows")),
    "accepted_offset_in_range": ("hybrid-pp1", enqueuing(seeds_changed(accepted=-1))),
    # coverage and lookup
    "resend_is_hit": ("plain", ForgetsTheServed),
    "hit_is_longest": ("plain", editing("hit", lambda k, e: [(*e[:2], 0, 0)])),
    "finished_is_cached": (
        "plain",
        deciding(publish_limit=lambda config, computed, scheduled, known: min(scheduled, known)),
    ),
    "reset_forgets": ("plain", RefusesResets),
    "handed_table_serves": ("composed", deciding(clipped_columns=lambda group, columns, computed: 0)),
    "demand_within_lookup": ("composed", editing("look", lambda k, e: [])),
    "hit_below_known": ("plain", editing("hit", lambda k, e: [(*e[:2], *2 * (k.requests[e[1]].known,))])),
    "read_columns_present": ("composed", deciding(free_basis=lambda request: request.computed)),
    "drafter_reads_exact": (
        "composed-sync",
        deciding(retained_column=lambda g, n: max(0, n - 7) // g.block_tokens),
    ),
    # progress
    "policy_raises_no_error": ("plain", Stops),
    "wait_graph_acyclic": ("composed", enqueuing(submitted_last)),
    "everything_drains": ("plain", Idle),
    "nothing_left_when_idle": (
        "composed",
        editing("tier", lambda k, e: [] if e[5] == "ready" else [e]),
    ),
}


def past_the_known(book: Book, event: Event) -> list[Event]:
    """A column that a request's known tokens do not fill goes under a key of the whole column."""
    g, size = event[2], book.config.groups[event[2]].block_tokens
    for request in book.requests.values():
        col = request.known // size
        if request.known % size and any(request.cols[g][col : col + 1]):
            return [("publish", request.uid, g, request.cols[g][col], (col + 1) * size, event[5])]
    return [event]


def finished_early(book: Book, event: Event) -> list[Event]:
    """Whoever runs is finished before it has all its tokens."""
    running = [r.uid for r in book.requests.values() if r.status is Status.RUNNING]
    return [*(("finish", uid, "length") for uid in running), event]


def ready_at(place: Callable[[Book, Event], int]) -> Factory:
    """Chunks become ready at other places."""
    return editing("tier", lambda k, e: [(*e[:4], place(k, e), e[5])] if e[5] == "ready" else [e])


def place_of_another(book: Book, event: Event) -> int:
    """Where another chunk is ready."""
    ready = (entry.place for entry in book.tier.values() if entry.state == "ready")
    return next((place for place in ready if place != event[4]), event[4])


def written_at(place: Callable[[Book, Event], int]) -> Factory:
    """Chunks begin to be written at other places."""
    return editing("tier", lambda k, e: [(*e[:4], place(k, e), e[5])] if e[5] == "writing" else [e])


def loading(chunk: Callable[[Book, Chunk], Chunk]) -> Factory:
    """Loads whose chunks are others."""

    def edit(book: Book, event: Event) -> list[Event]:
        if event[2] == "load":
            event = (*event[:4], tuple(chunk(book, one) for one in event[4]))
        return [event]

    return editing("job", edit)


def of_another_boundary(book: Book, event: Event) -> list[Event]:
    """A store of a state names a block that is published as the state of other tokens."""
    chunks = []
    for key, place, subs in event[4]:
        if book.config.groups[key[0]].kind is Kind.MAMBA:
            keys = cast("dict[int, Key]", book.core.key)
            other = (b for b, k in keys.items() if k[0] == key[0] and k[1] != key[1])
            subs = (*subs[:-1], next(other, subs[-1]))
        chunks.append((key, place, subs))
    return [(*event[:4], tuple(chunks))]


def in_writing(book: Book, chunk: Chunk) -> Chunk:
    """Another chunk, which is being written."""
    return next(((k, e.place, chunk[2]) for k, e in book.tier.items() if e.state == "writing"), chunk)


#: rule -> (configuration, a policy that breaks one of its conditions alone, what the rule then says)
CONDITIONS: dict[str, list[tuple[str, Factory, str]]] = {
    "ready_chunk_exact": [
        ("plain-offload", ready_at(lambda book, event: 1000), "never stored"),
        ("plain-offload", ready_at(place_of_another), "never stored"),
    ],
    "host_place_free": [
        ("plain-offload", written_at(lambda k, e: k.config.tier_chunks), r"chunks \[\] hold and .* \[\] use"),
        ("plain-offload", written_at(lambda k, e: -1), r"chunks \[\] hold and .* \[\] use"),
        ("plain-offload", written_at(place_of_another), r"chunks \[.+\] hold and .* \[\] use"),
    ],
    "loads_only_ready_chunks": [
        ("plain-offload", loading(lambda k, c: ((*c[0][:2], c[0][2] - 1), *c[1:])), "which is absent"),
        ("plain-offload", loading(in_writing), "which is writing"),
        ("plain-offload", loading(lambda k, c: (c[0], c[1] + 1, c[2])), "which is ready"),
    ],
    "relocates_only_exclusive_scratch": [
        (
            "composed",
            editing("move", lambda k, e: [("adopt", other_request(k, e[1]), e[2], -1, e[5]), e]),
            "key None",
        ),
    ],
    "recurrent_store_by_hand_off": [
        ("composed", editing("job", of_another_boundary), r"it is published as \(")
    ],
    "handed_table_serves": [
        (
            "composed",
            editing("handoff", lambda k, e: [e if e[2] else (*e[:3], (0, *e[3][1:]))]),
            r"columns \[0\] are missing, columns \[\] lie past",
        ),
        (
            "composed",
            editing("handoff", lambda k, e: [e if e[2] else (*e[:3], (*e[3], *(1,) * 9))]),
            r"columns \[\] are missing, columns \[\d.*\] lie past",
        ),
    ],
    "key_names_its_column": [
        ("plain", editing("publish", past_the_known), "."),
    ],
    "reset_forgets": [
        ("plain-offload", editing("tier", lambda k, e: [e] if e[5] != "gone" else []), "0 blocks and"),
        ("plain", RefusesResets, "blocks and 0 host"),
    ],
    "hit_below_known": [
        ("plain", editing("hit", lambda k, e: [(*e[:2], -1, e[3])] if e[3] else [e]), "hit -1 then"),
        ("plain", editing("hit", lambda k, e: [(*e[:2], e[3], e[3] - 1)] if e[3] else [e]), "."),
        ("plain", editing("hit", lambda k, e: [(*e[:2], 0, k.requests[e[1]].known + 1)]), "hit 0 then"),
        (
            "plain",
            editing("start", lambda k, e: [(*e[:2], k.requests[e[1]].known)] if e[2] else [e]),
            r"starts at (\d+) of \1 tokens",
        ),
    ],
    "output_exact": [("plain", editing("done", finished_early), "ends with")],
}


def seen(
    rule: str, config: Config, factory: Factory, said: str = "", tries: int = 60
) -> tuple[int, str] | None:
    """The first walk in which the rule breaks and says this: (seed, what it says)."""
    for seed in range(tries):
        random = Random(seed)
        world = World(config, factory)
        adversary = Adversary(config, random, draw_options(config, random))
        found = None
        for step in range(260):
            choice = adversary.draw(world)
            try:
                if choice and step < 250:
                    world.choose(choice)
                elif step >= 250:
                    world.quiet()
            except (KeyError, ValueError, IndexError, StopIteration, AssertionError):
                break  # a tampered policy lost its own way; what the world saw until then counts
            found = next((b for b in [*world.disciplines, world.verdict] if b and b.rule == rule), None)
            if found or world.verdict:
                break
        if found and re.search(said, found.text):
            return seed, found.text
    return None


def test_every_rule_is_in_the_table() -> None:
    assert {rule.name for rule in RULES} == set(BREAKERS)


@pytest.mark.parametrize("rule", BREAKERS)
def test_a_rule_breaks(rule: str) -> None:
    name, factory = BREAKERS[rule]
    assert seen(rule, named(name), factory), f"nothing broke {rule}"


@pytest.mark.parametrize(
    ("rule", "which"), [(rule, which) for rule, many in CONDITIONS.items() for which in range(len(many))]
)
def test_each_condition_of_a_rule_breaks_by_itself(rule: str, which: int) -> None:
    name, factory, said = CONDITIONS[rule][which]
    assert seen(rule, named(name), factory, said), f"nothing broke {rule} so that it says {said}"


# -- books that cannot be ----------------------------------------------------------------------------------

HELD = ("r1", 1)  # a request that runs, and holds blocks

#: state rule, what is done to a right book, what the rule then says
BOOKS: list[tuple[str, Callable[[Book], Any], str]] = [
    ("references_match_tables", lambda book: book.requests.pop(HELD), "which is gone: lost"),
    ("references_match_tables", lambda book: book.core.allocate(HELD, 1), "1 columns of .*, which has 2"),
    ("references_match_tables", lambda book: book.requests[HELD].retained.append(9), "without a reference"),
    ("references_match_tables", lambda book: book.requests[HELD].cols[0].append(9), "without a reference"),
    ("free_queue_is_unheld", lambda book: book.free.append(book.free[0]), "lists a block twice"),
    ("free_queue_is_unheld", lambda book: book.free.append(1), "is free and held by"),
    ("free_queue_is_unheld", lambda book: book.free.pop(), "neither free nor held"),
]


@pytest.mark.parametrize("which", range(len(BOOKS)))
def test_each_way_in_which_a_book_cannot_be_is_named(which: int) -> None:
    name, spoil, said = BOOKS[which]
    world = World(named("plain"), Reference)
    for choice in (("arrive", "r1", "0", 5, 2), ("schedule",)):
        world.choose(choice)
    holds = BY_NAME[name].holds
    assert holds and holds(world) is None
    spoil(world.book)
    assert re.search(said, holds(world) or "")


# -- bytes that change behind everybody's back -------------------------------------------------------------


def blank(at: int) -> Callable[[Page], Page]:
    """A page with one cell lost."""
    return lambda page: (page[0], (*page[1][:at], GARBAGE, *page[1][at + 1 :]))


def shared_by_another(page: Page) -> Page:
    """The same bytes, written by another group."""
    return page[0] + 1, page[1]


class Spoilt(World):
    """A group's pages on the last rank change: in the host tier when a chunk of it becomes loadable, or on
    the device when a forward is about to run."""

    def __init__(self, config: Config, where: str, group: int, spoil: Callable[[Page], Page]) -> None:
        super().__init__(config, Reference)
        self.where, self.group, self.changed = where, group, spoil

    def decide(self, decision: Event) -> None:
        if decision[:2] == ("tier", self.group) and decision[5] == "ready" and self.where == "host":
            host = self.ranks[-1].memory.host
            host.update({spot: self.changed(page) for spot, page in host.items() if page[0] == self.group})
        super().decide(decision)

    def step_stream(self, rank: Rank, stream: str) -> None:
        memory = rank.memory
        if self.where == "device" and rank is self.ranks[-1] and isinstance(rank.streams[stream][0], Forward):
            for block in range(1, self.config.pool_blocks):
                if memory.view[block] == self.group:
                    memory.put_page(block, self.changed(memory.page(block)))
        super().step_stream(rank, stream)


FULL, WINDOW, MAMBA = range(3)  # the groups of the composed configuration

#: where, in which group's pages, what is lost -> the rule that says so
BYTES: list[tuple[str, int, Callable[[Page], Page], str]] = [
    ("host", MAMBA, blank(CONV), "ready_chunk_exact"),
    ("host", MAMBA, blank(TEMPORAL), "ready_chunk_exact"),
    ("host", MAMBA, shared_by_another, "ready_chunk_exact"),
    ("host", FULL, blank(0), "ready_chunk_exact"),
    ("host", WINDOW, blank(3), "ready_chunk_exact"),
    ("host", WINDOW, shared_by_another, "ready_chunk_exact"),
    ("device", MAMBA, blank(CONV), "state_reads_exact"),
    ("device", MAMBA, blank(TEMPORAL), "state_reads_exact"),
    ("device", FULL, blank(1), "attention_reads_exact"),
    ("device", FULL, shared_by_another, "attention_reads_exact"),
    ("device", WINDOW, blank(0), "window_reads_exact"),
    ("device", WINDOW, shared_by_another, "window_reads_exact"),
]


@pytest.mark.parametrize("which", range(len(BYTES)))
def test_every_part_of_a_page_is_compared(which: int) -> None:
    where, group, spoil, rule = BYTES[which]
    config = named("composed")
    world = Spoilt(config, where, group, spoil)
    for choice in (("arrive", "r1", "0", 17, 4), *(("schedule",), ("drain",)) * 8):
        world.choose(choice)
    assert world.verdict and world.verdict.rule == rule
    assert f"group {config.groups[group].name}" in world.verdict.text and "rank 1" in world.verdict.text


def test_a_copy_tears_its_target_until_it_ends() -> None:
    world = World(named("plain-offload"), Reference)
    sent: Event = ("arrive", "r1", "0", 8, 2)
    for choice in (sent, ("schedule",), ("work",), ("schedule",), ("work",), ("run", 0, "store", 1)):
        assert world.choose(choice), choice
    memory, (store,) = world.ranks[0].memory, world.transfers.values()
    spots = [(place, sub) for _, place, subs in store.chunks for sub in range(len(subs))]
    assert spots and all(set(memory.host[spot][1]) == {TORN} for spot in spots)
    assert world.choose(("run", 0, "store", 1))
    assert all(TORN not in memory.host[spot][1] for spot in spots)

    for choice in (("quiet",), ("reset", "local"), sent, ("schedule",), ("work",), ("run", 0, "load", 1)):
        assert world.choose(choice), choice
    (load,) = world.transfers.values()
    blocks = [block for _, _, subs in load.chunks for block in subs]
    assert blocks and all(set(memory.cells[block]) == {TORN} for block in blocks)
    assert world.choose(("run", 0, "load", 1))
    assert all(TORN not in memory.cells[block] for block in blocks) and world.verdict is None


# -- errors that nobody foresaw ----------------------------------------------------------------------------


class Crashes(Reference):
    """Looks up a request that it has never heard of."""

    def on_abort(self, uid: Any) -> Answer:
        return super().on_abort(("nobody", 1))


def sampled_first(program: Program) -> Program:
    """Tokens are sampled before the forward that gives them."""
    return sorted(program, key=lambda entry: not isinstance(entry[1], Sample))


def row_of_nobody(program: Program) -> Program:
    """Post-processing names a row that its step does not have."""
    for _, op in program:
        if isinstance(op, PostProcess):
            op.rows = tuple((index + 7, slot, operand) for index, slot, operand in op.rows)
    return program


def step_of_nobody(program: Program) -> Program:
    """Post-processing names a step that there is not."""
    for _, op in program:
        if isinstance(op, PostProcess):
            op.step += 7
    return program


@pytest.mark.parametrize(
    ("factory", "rule", "said"),
    [
        (enqueuing(step_of_nobody), "wait_graph_acyclic", "something that is not there (KeyError: 8, in "),
        (Crashes, "policy_raises_no_error", "KeyError: ('nobody', 1), in on_abort (scheduler.py:"),
        (enqueuing(sampled_first), "wait_graph_acyclic", "stream main of rank 0 waits for"),
        (enqueuing(row_of_nobody), "policy_raises_no_error", "rank 0, PostProcess("),
    ],
)
def test_a_crash_is_a_verdict(factory: Factory, rule: str, said: str) -> None:
    world = World(named("plain"), factory)
    for choice in (("arrive", "r1", "0", 5, 2), ("schedule",), ("drain",), ("schedule",), ("abort", "r1")):
        world.choose(choice)
    assert world.verdict and world.verdict.rule == rule and said in world.verdict.text


def test_somebody_elses_error_is_not() -> None:
    class Other(Exception):
        pass

    class Broken(Reference):
        def on_abort(self, uid: Any) -> Answer:
            raise Other

    world = World(named("plain"), Broken)
    world.choose(("arrive", "r1", "0", 5, 2))
    with pytest.raises(Other):
        world.choose(("abort", "r1"))


# -- on change, and always ---------------------------------------------------------------------------------


def outcome(config: Config, factory: Factory, seed: int, every: int) -> tuple[Any, ...]:
    """Verdict and disciplines of a walk, with the choices after which they were noticed."""
    random = Random(seed)
    world = World(config, factory, every=every)
    adversary = Adversary(config, random, draw_options(config, random))
    for _ in range(150):
        choice = adversary.draw(world)
        if choice:
            try:
                world.choose(choice)
            except (KeyError, ValueError, IndexError, AssertionError):
                break
        if world.verdict:
            break
    names = {rule.name for rule in STATE_RULES}
    states = [d for d in world.disciplines if d.rule in names]
    return world.verdict, states


STATE_BREAKERS = (
    "references_match_tables",
    "free_queue_is_unheld",
    "release_only_held",
    "wait_graph_acyclic",
)


@pytest.mark.parametrize("rule", [*STATE_BREAKERS, None])
def test_rules_on_states_agree_on_change_and_after_every_choice(rule: str | None) -> None:
    name, factory = BREAKERS[rule] if rule else ("composed", Reference)
    config = named(name)
    verdicts = set()
    for seed in range(12):
        seldom, always = outcome(config, factory, seed, 10**9), outcome(config, factory, seed, 1)
        assert seldom == always
        verdicts.add(always[0] and always[0].rule)
    assert rule in verdicts
