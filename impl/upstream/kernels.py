"""The state-copy kernels of a release or tree, run by Triton's interpreter and judged.

The worlds of :mod:`impl.upstream.check` simulate workers, so a change in a kernel is not run there.  Here the
tree's own tables, hybrid model state and align kernels run on memory whose every block says where it came
from (:mod:`impl.upstream.statecopy`).  ``kernel-late-rows`` and ``kernel-resume-column`` are two defects of
old releases; ``kernel-steps`` compares whole steps with the plain rules of :mod:`spec.arith.align`.

What is not run: the compiled kernel, several tiles a state, the dimension-first layout of the window,
context parallelism, the v1 runner's ``batch_memcpy``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from impl.upstream.child import Child, Died
from impl.upstream.edits import known_edits
from impl.upstream.env import Prepared, with_kernels
from impl.upstream.record import HOLDS, REFUTED, UNDETERMINED
from spec.arith import align

Plain = dict[str, Any]
Ask = Callable[..., Plain]

#: files of the kernels that run here, and of what calls them
FILES = (
    "v1/worker/gpu/block_table.py",
    "v1/worker/gpu/buffer_utils.py",
    "v1/worker/gpu/model_states/mamba_hybrid.py",
    "v1/worker/mamba_utils.py",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: what it runs, and the case of the matrix that has the same defect in the world."""

    name: str
    why: str
    run: Callable[[Ask], tuple[str, str]]  # (verdict, what was seen)
    history: str = ""


def late_rows(ask: Ask) -> tuple[str, str]:
    """Three requests of four-token state blocks decode with two drafts; before their post-process runs, two
    of them are gathered again in another order.  Only slot 2 reaches a boundary: its own block must be
    written, from its own scratch state."""
    ask("new", slots=3, drafts=2, block_tokens=4, cache_block_tokens=2)
    for slot in range(3):
        ask("row", slot=slot, blocks=[10 * slot + col for col in range(1, 7)], overwrite=True)
        ask("add", slot=slot, computed=0)
    order = [2, 0, 1]
    ask("gather", slots=order)
    ask("before", slots=order, lengths=[6, 6, 6], computed=[0, 0, 0])
    ask("after", slots=order, sampled=[1, 1, 1], computed=[6, 6, 6])
    ask("gather", slots=order)
    ask("before", slots=order, lengths=[3, 3, 3], computed=[6, 6, 6])
    ask("gather", slots=[1, 2])
    late = ask("after", slots=order, sampled=[3, 1, 1], computed=[7, 7, 9])["copied"]
    written = {int(block): held[0] for block, held in late.items()}
    seen = ", ".join(f"block {to} from {source}" for to, source in written.items())
    return (HOLDS if written == {22: 24} else REFUTED), f"writes {seen or 'nothing'}"


def resume_column(ask: Ask) -> tuple[str, str]:
    """A request resumes at 8 tokens while the smallest block is 2: its state is in column 1."""
    ask("new", slots=3, drafts=2, block_tokens=4, cache_block_tokens=2)
    column = ask("add", slot=0, computed=8)["column"]
    return (HOLDS if column == 1 else REFUTED), f"starts from column {column}"


# -- whole steps ---------------------------------------------------------------------------------------------

STEPS = 12
#: (state block, drafts, elements of a recurrent state, bytes each): no whole number of 8-byte words, so that
#: the copy's head and tail run
SHAPES = ((4, 2, 3, 4), (8, 3, 7, 2))
SLOTS, COLUMNS = 4, 12


class Wrong(Exception):
    """What the kernels did and should not."""


@dataclass(slots=True)
class Slot:
    """One request: its row, what is computed, and the column and accepted count that it should have."""

    blocks: list[int]
    computed: int
    prompt: int
    column: int
    accepted: int = 1


@dataclass(slots=True)
class Steps:
    """Random requests in steps, beside the plain rules."""

    ask: Ask
    block: int
    drafts: int
    random: Random
    slots: dict[int, Slot] = field(default_factory=dict)
    copies: int = 0

    @property
    def width(self) -> int:
        """Positions of a convolution window (:class:`impl.upstream.statecopy.Rank`)."""
        return self.drafts + 3

    def pool(self, slot: int) -> list[int]:
        """The blocks that a slot's row is made of, in another order each time."""
        own = list(range(1 + slot * COLUMNS, 1 + (slot + 1) * COLUMNS))
        self.random.shuffle(own)
        return own

    def arrive(self, slot: int) -> None:
        """A new request, fresh or resumed on a boundary."""
        computed = self.block * self.random.choice((0, 0, 1, 2))
        column = align.seed_column(computed, self.block)
        made = Slot(self.pool(slot)[: column + 1], computed, computed + self.random.randrange(1, 10), column)
        self.slots[slot] = made
        self.ask("row", slot=slot, blocks=made.blocks, overwrite=True)
        same("the running column of a request that starts", self.ask("add", slot=slot, computed=computed),
             {"column": column})  # fmt: skip

    def grow(self, slot: int, columns: int) -> None:
        """Blocks at the end of a row, as the allocator appends them."""
        row = self.slots[slot].blocks
        fresh = [block for block in self.pool(slot) if block not in row][: columns - len(row)]
        if fresh:
            row += fresh
            self.ask("row", slot=slot, blocks=fresh, overwrite=False)

    def step(self) -> None:
        """One step of a random batch: gather, pre-copy, post-process."""
        random = self.random
        for slot in range(SLOTS):
            if slot not in self.slots:
                self.arrive(slot)
        order = random.sample(range(SLOTS), random.randrange(1, SLOTS + 1))
        lengths = [self.length(self.slots[slot]) for slot in order]
        for slot, length in zip(order, lengths, strict=True):
            one = self.slots[slot]
            self.grow(slot, align.required_columns(one.computed, length, self.block, self.drafts))
        rows = self.ask("gather", slots=order)["rows"]
        for slot, row in zip(order, rows, strict=True):
            known = self.slots[slot].blocks
            same(f"the gathered row of slot {slot}", row[: len(known)], known)
        self.tables(order, lengths)
        self.ask("relabel")
        crossings = [self.before(slot, length) for slot, length in zip(order, lengths, strict=True)]
        reply = self.ask("before", slots=order, lengths=lengths, computed=self.by_slot("computed"))
        self.compare("pre-copy", reply, crossings)
        masked = [slot for slot in order if random.random() < 0.15]  # ended, or another request's by now
        sampled = []
        for slot, length in zip(order, lengths, strict=True):
            one = self.slots[slot]
            decode = one.computed >= one.prompt
            sampled.append(
                random.randrange(1, length + 1) if decode else int(one.computed + length >= one.prompt)
            )
            one.computed += sampled[-1] if decode else length
        self.ask("relabel")
        late = [
            self.after(slot, count) for slot, count in zip(order, sampled, strict=True) if slot not in masked
        ]
        rows_of = [-1 if slot in masked else slot for slot in order]
        reply = self.ask("after", slots=rows_of, sampled=sampled, computed=self.by_slot("computed"))
        self.compare("post-process", reply, late)
        for slot in list(self.slots):
            if slot in masked or len(self.slots[slot].blocks) > COLUMNS - self.drafts - 3:
                del self.slots[slot]

    def length(self, one: Slot) -> int:
        """Tokens of a request's step: a verification, or a prefill chunk, also one that ends in a block."""
        if one.computed >= one.prompt:
            return 1 + self.drafts
        to_boundary = self.block - one.computed % self.block
        return min(one.prompt - one.computed, self.random.choice((1, to_boundary, to_boundary + self.block)))

    def by_slot(self, name: str) -> list[int]:
        """A number of every slot."""
        return [getattr(self.slots[slot], name) for slot in range(SLOTS)]

    def before(self, slot: int, length: int) -> tuple[int, int, int, int] | None:
        """The running column moves; (slot, from column, to column, offset) if the state must follow."""
        one = self.slots[slot]
        source, offset = one.column, align.accepted_offset(one.accepted)
        one.column = align.running_column(one.computed, length, self.block)
        if source < 0 or source == one.column:
            return None
        one.accepted = 1
        return slot, source, one.column, offset

    def after(self, slot: int, sampled: int) -> tuple[int, int, int, int] | None:
        """(slot, from column, to column, offset) if a boundary was reached, whose state must be put there."""
        one = self.slots[slot]
        one.accepted = accepted = max(sampled, 1)
        to = align.destination_column(one.computed, self.block)
        if to < 0 or not align.boundary_reached(one.computed, accepted, self.block):
            return None
        if one.column == to:
            one.accepted = 1
        return slot, one.column, to, align.boundary_offset(one.computed, accepted, self.block)

    def compare(self, what: str, reply: Plain, crossings: Iterable[tuple[int, int, int, int] | None]) -> None:
        """Columns, accepted counts and every block, after a kernel."""
        same(f"running columns after {what}", reply["columns"], self.by_slot("column"))
        same(f"accepted counts after {what}", reply["accepted"], self.by_slot("accepted"))
        want: dict[int, list[Any]] = {}
        for slot, source, to, offset in filter(None, crossings):
            row = self.slots[slot].blocks
            target, window = row[to], [100 * row[to] + place for place in range(self.width)]
            kept = max(self.width - offset, 0)
            window[:kept] = [100 * row[source] + offset + place for place in range(kept)]
            made = [row[align.scratch_column(source, offset)], window]
            if made != [target, [100 * target + place for place in range(self.width)]]:
                want[target] = made
                self.copies += 1
        have = {int(block): held for block, held in reply["copied"].items()}
        for block in sorted(have.keys() | want.keys()):
            if have.get(block) != want.get(block):
                raise Wrong(f"{what}: block {block} {holds(have.get(block))}, should {hold(want.get(block))}")

    def tables(self, order: list[int], lengths: list[int]) -> None:
        """Slot mappings of the step's tokens, from the rows."""
        reply = self.ask("mappings", slots=order, lengths=lengths, computed=self.by_slot("computed"))
        want = []
        for slot, length in zip(order, lengths, strict=True):
            one = self.slots[slot]
            for position in range(one.computed, one.computed + length):
                want.append(one.blocks[position // self.block] * self.block + position % self.block)
        same("slot mappings", reply["mappings"], [*want, -1, -1])


def holds(held: list[Any] | None) -> str:
    """What a block holds, in words; nothing was copied for None."""
    return "is not written" if held is None else f"is written with state {held[0]} and window {held[1]}"


def hold(held: list[Any] | None) -> str:
    """The same, as it should be."""
    return "stay as it is" if held is None else f"get state {held[0]} and window {held[1]}"


def same(what: str, have: Any, want: Any) -> None:
    """Raise :class:`Wrong` with both values unless they are equal."""
    if isinstance(want, dict):
        have = {name: have.get(name) for name in want}
        (have,), (want,) = have.values(), want.values()
    if have != want:
        raise Wrong(f"{what}: {have}, should be {want}")


def whole_steps(ask: Ask) -> tuple[str, str]:
    """Random requests, fresh, resumed and ending, in random batches: rows, slot mappings, running columns,
    accepted counts and all copied bytes beside the plain rules."""
    copies = 0
    for block, drafts, elements, size in SHAPES:
        ask("new", slots=SLOTS, drafts=drafts, block_tokens=block, cache_block_tokens=block,
            blocks=1 + SLOTS * COLUMNS, columns=COLUMNS, elements=elements, element_bytes=size)  # fmt: skip
        steps = Steps(ask, block, drafts, Random(f"steps {block}"))
        for number in range(1, STEPS + 1):
            try:
                steps.step()
            except Wrong as wrong:
                return REFUTED, f"blocks of {block}, {drafts} drafts, step {number}, {wrong}"
        copies += steps.copies
    return HOLDS, f"{STEPS * len(SHAPES)} steps, {copies} states copied"


SCENARIOS = (
    Scenario(
        "kernel-late-rows", "a late post-process after rows were gathered again", late_rows, "late-rows"
    ),
    Scenario(
        "kernel-resume-column",
        "the column that a resumed request starts from",
        resume_column,
        "resume-column",
    ),
    Scenario("kernel-steps", "whole steps beside the plain rules", whole_steps),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@dataclass(frozen=True, slots=True)
class Row:
    """What one scenario came to."""

    name: str
    verdict: str
    seen: str
    edited: tuple[str, ...] = ()  # what the tree's author edited in the kernels' files


def rows(use: Prepared, scenarios: Iterable[Scenario] = SCENARIOS) -> Iterator[Row]:
    """The scenarios' outcomes; a process that dies ends its scenario only.

    A signal is the kernels' doing (an address that is nobody's) and refutes; anything else that ends the
    process leaves the scenario undetermined.  Raises :class:`Unavailable` if Triton was not fetched.
    """
    environment = with_kernels(use)
    edits = known_edits(use.tree.directory, use.tree.release)
    own = tuple(str(one) for one in edits if one.path in FILES)
    todo = list(scenarios)
    while todo:
        with Child(use, module="impl.upstream.statecopy", environment=environment) as child:
            for scenario in tuple(todo):
                todo.remove(scenario)
                try:
                    verdict, seen = scenario.run(child.ask)
                except Died as died:
                    yield Row(scenario.name, REFUTED if died.signalled else UNDETERMINED, str(died), own)
                    break  # the others in a process of their own
                yield Row(scenario.name, verdict, seen, own)
