"""The core protocol by itself: breakable guards, bounded state spaces, the map from the full machine.

The exploration wraps bounds *around* the core: the core is asked for an action's guard on a copy, and is
not changed to suit the search.
"""

from __future__ import annotations

import ast
from collections import Counter, deque
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest

import spec.core
from spec.config import named
from spec.core import CORE_ACTION, NULL, Core
from spec.events import DECISION, EFFECT, SCHEMA, Event
from spec.reference import Reference
from spec.walk import Adversary, draw_options
from spec.world import Rank, World

Step = tuple[Any, ...]  # (action, arguments ...)


def play(*steps: Step, ranks: int = 2) -> list[str | None]:
    """What the guards say to a sequence of actions."""
    core = Core(ranks)
    return [getattr(core, step[0])(*step[1:]) for step in steps]


STORE = (("allocate", "a", 1), ("create", 7, "store", (1,)))

#: guard -> an action sequence whose last action it refuses, and only that one
BREAKS: dict[str, tuple[tuple[Step, ...], ...]] = {
    "null_block_unowned": (
        (("allocate", "a", NULL),),
        (("allocate", "a", 1), ("publish", "a", NULL, "k")),
        (("create", 1, "store", (NULL,)),),
    ),
    "no_double_owner": ((("allocate", "a", 1), ("allocate", "b", 1)),),
    "evict_before_reuse": (
        (("allocate", "a", 1), ("publish", "a", 1, "k"), ("release", "a", 1), ("allocate", "b", 1)),
    ),
    "adopt_only_published": ((("adopt", "a", 1),), (("allocate", "a", 1), ("adopt", "b", 1))),
    "release_only_held": (
        (("allocate", "a", 1), ("release", "b", 1)),
        (("allocate", "a", 1), ("release", "a", 1), ("release", "a", 1)),
    ),
    "publish_only_held": ((("allocate", "a", 1), ("publish", "b", 1, "k")),),
    "job_ids_unique": ((*STORE, ("create", 7, "load", (1,))),),
    "report_once_per_rank": (
        (*STORE, ("report", 7, 0), ("report", 7, 0)),
        (*STORE, ("report", 7, 0), ("report", 7, 1), ("report", 7, 1)),
    ),
    "flush_only_pending": ((*STORE, ("report", 7, 0), ("report", 7, 1), ("flush", 7)),),
    "slot_single_occupant": ((("take", "a", 0), ("take", "b", 0)), (("leave", 0),)),
    "reuse_flushes_fence": ((*STORE, ("release", "a", 1), ("allocate", "b", 1), ("begin", 1, ("b",))),),
    "steps_end_in_order": (
        (("begin", 1, ("a",)), ("begin", 2, ("a",)), ("end", 2)),
        (("end", 1),),
    ),
}


def guards() -> set[str]:
    """Every guard that the source of the core names."""
    tree = ast.parse(Path(spec.core.__file__).read_text(encoding="utf-8"))
    core = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Core")
    texts = {n.value for n in ast.walk(core) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {text for text in texts if text.count("_") and text.replace("_", "").isalpha()}


def test_every_guard_has_a_sequence_that_breaks_it() -> None:
    assert guards() == set(BREAKS)


@pytest.mark.parametrize(("guard", "steps"), [(g, s) for g, many in BREAKS.items() for s in many])
def test_a_guard_refuses_the_last_action_and_no_earlier_one(guard: str, steps: tuple[Step, ...]) -> None:
    *before, last = play(*steps)
    assert not any(before)
    assert last == guard


def test_a_refused_action_happens_all_the_same() -> None:
    core = Core(1)
    core.allocate("a", 1)
    assert core.allocate("b", 1) == "no_double_owner"
    assert core.holders[1] == {"a": 1, "b": 1}


def test_a_flush_before_the_step_settles_the_reuse() -> None:
    steps = (*STORE, ("release", "a", 1), ("allocate", "b", 1), ("flush", 7), ("begin", 1, ("b",)))
    assert not any(play(*steps))


def test_the_fence_outlives_reuse_and_goes_with_the_last_report() -> None:
    core = Core(2)
    for step in (*STORE, ("release", "a", 1), ("allocate", "b", 1), ("flush", 7), ("report", 7, 1)):
        assert getattr(core, step[0])(*step[1:]) is None
    assert core.fences == {1: {7: None}}
    assert core.report(7, 0) is None
    assert not core.fences and not core.jobs


# -- exploration -----------------------------------------------------------------------------------------


def actions(core: Core, *, blocks: int, owners: str, jobs: int, depth: int) -> Iterator[Step]:
    """Every action with arguments inside the bounds.  One slot, one key an owner; ``depth`` bounds
    counters."""
    for owner in owners:
        for block in range(1, blocks + 1):
            if core.holders.get(block, {}).get(owner, 0) < 1:
                yield "allocate", owner, block
                yield "adopt", owner, block
            yield "release", owner, block
            if block not in core.key:
                yield "publish", owner, block, "k" + owner
        if core.generation.get(0, 0) < depth:
            yield "take", owner, 0
    for block in range(1, blocks + 1):
        if block in core.key:
            yield "evict", block
    for job in range(1, jobs + 1):
        if job not in core.jobs:
            for block in range(1, blocks + 1):
                for way in ("store", "load"):
                    if core.holders.get(block):
                        yield "create", job, way, (block,)
        elif job in core.reused:
            yield "flush", job
        for rank in range(core.ranks):
            yield "report", job, rank
    if 0 in core.slots:
        yield "leave", 0
    began = max(core.steps, default=0)
    if len(core.steps) < 2 and began < depth:
        yield "begin", began + 1, (core.slots[0][0],) if 0 in core.slots else ()
    if core.steps:
        yield "end", min(core.steps)


def explore(ranks: int, **bounds: Any) -> tuple[int, Counter[str], Counter[str]]:
    """Breadth first: (states, actions taken, guards that refused an action).  Only allowed actions are
    followed."""
    start = Core(ranks)
    seen = {start.frozen()}
    queue = deque([start])
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    while queue:
        core = queue.popleft()
        for step in actions(core, **bounds):
            after = deepcopy(core)
            broken = getattr(after, step[0])(*step[1:])
            if broken:
                refused[broken] += 1
                continue
            taken[step[0]] += 1
            assert problem(after) is None, (step, problem(after))
            if after.frozen() not in seen:
                seen.add(after.frozen())
                queue.append(after)
    return len(seen), taken, refused


def problem(core: Core) -> str | None:
    """What must hold in every state that allowed actions reach."""
    if any(count < 1 for held in core.holders.values() for count in held.values()) or NULL in core.holders:
        return "references"
    if any(not held for held in core.holders.values()):
        return "an entry without holders"
    fences = {(b, j) for b, jobs in core.fences.items() for j in jobs}
    if fences != {(b, j) for j, job in core.jobs.items() for b in job.blocks}:
        return "fences are not exactly the blocks of jobs that wait for a report"
    if any(not job.waiting for job in core.jobs.values()) or not set(core.reused) <= set(core.jobs):
        return "a job without a waiting rank, or a reuse without a job"
    return None


#: Golden counts: a change of the core that changes them must be explained.
GOLDEN = (
    ({"ranks": 2, "blocks": 1, "owners": "a", "jobs": 1, "depth": 1}, 320),
    ({"ranks": 1, "blocks": 1, "owners": "ab", "jobs": 1, "depth": 1}, 576),
    ({"ranks": 1, "blocks": 2, "owners": "a", "jobs": 1, "depth": 1}, 896),
)


@pytest.mark.parametrize(("bounds", "states"), GOLDEN)
def test_bounded_state_spaces(bounds: dict[str, Any], states: int) -> None:
    found, taken, refused = explore(**bounds)
    assert found == states
    assert set(taken) == set(CORE_ACTION.values())
    assert {"adopt_only_published", "evict_before_reuse", "reuse_flushes_fence"} <= set(refused)


# -- the map from the full machine ------------------------------------------------------------------------

STUTTERS = frozenset(
    "move copy zero enqueue hit defer start row preempt tokens finish look tier handoff".split()
)


def test_every_kind_of_decision_is_a_core_action_or_a_stutter() -> None:
    decisions = {kind for kind, (category, _, _) in SCHEMA.items() if category == DECISION}
    assert decisions == {k for k in CORE_ACTION if SCHEMA[k][0] == DECISION} | STUTTERS
    assert {k for k in CORE_ACTION if SCHEMA[k][0] == EFFECT} == {"take", "leave"}


def core_step(event: Event, core: Core, rows: list[object]) -> Step:
    """The core action of a decision, arguments included; rows are the owners scheduled since the last
    step."""
    kind, *rest = event
    match kind:
        case "alloc" | "adopt" | "drop":
            return CORE_ACTION[kind], rest[0], rest[3]
        case "publish":
            u, g, b, n, prefix = rest
            return "publish", u, b, (g, n, prefix)
        case "job":
            j, way, _, chunks = rest
            return "create", j, way, tuple(dict.fromkeys(b for _, _, subs in chunks for b in subs if b))
        case "step":
            return "begin", rest[0], tuple(rows)
        case "unfence" | "flush" | "evict" | "done":
            return CORE_ACTION[kind], *rest
    raise AssertionError(kind)


class Mapped(World):
    """A world that replays every decision and slot change on a core of its own, and compares."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shadow = Core(self.config.ranks)
        self.rows: list[object] = []
        self.kinds: Counter[str] = Counter()

    def decide(self, decision: Event) -> None:
        before = self.book.core.frozen()
        super().decide(decision)
        kind = decision[0]
        self.kinds[kind] += 1
        if kind == "row":
            self.rows.append(decision[1])
        if kind in STUTTERS:
            assert self.book.core.frozen() == before, decision
            return
        rows = [u for u in self.book.requests if u in self.rows]
        step = core_step(decision, self.shadow, rows)
        assert getattr(self.shadow, step[0])(*step[1:]) is None
        if kind == "step":
            self.rows.clear()
        assert self.shadow.frozen() == self.book.core.frozen(), decision

    def slot_taken(self, rank: Rank, slot: int, uid: Any) -> None:
        super().slot_taken(rank, slot, uid)
        if rank.index == 0:
            assert self.shadow.take(uid, slot) is None
            assert self.shadow.frozen() == self.book.core.frozen()

    def slot_left(self, rank: Rank, slot: int) -> None:
        super().slot_left(rank, slot)
        if rank.index == 0:
            assert self.shadow.leave(slot) is None
            assert self.shadow.frozen() == self.book.core.frozen()

    def slot_moved(self, rank: Rank, src: int, dst: int) -> None:
        super().slot_moved(rank, src, dst)
        self.renamed(rank)

    def slot_swapped(self, rank: Rank, one: int, two: int) -> None:
        super().slot_swapped(rank, one, two)
        self.renamed(rank)

    def renamed(self, rank: Rank) -> None:
        """Dense batch rows are slots under other numbers: a stutter up to renaming."""
        if rank.index == 0:
            assert sorted(self.shadow.slots.values()) == sorted(self.book.core.slots.values())
            self.shadow.slots = dict(self.book.core.slots)


@pytest.mark.parametrize(
    "name", ["composed", "composed-sync", "composed-v1", "partial-tails", "composed-tight"]
)
def test_every_walked_step_is_a_core_step_or_a_stutter(name: str) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(4):
        random = Random(seed)
        config = named(name)
        world = Mapped(config, Reference)
        adversary = Adversary(config, random, draw_options(config, random))
        for _ in range(250):
            choice = adversary.draw(world)
            if choice:
                world.choose(choice)
        world.quiet()
        assert world.verdict is None
        kinds += world.kinds
    assert kinds["alloc"] > 20 and kinds["drop"] > 20 and kinds["step"] > 20
