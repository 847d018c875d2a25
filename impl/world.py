"""A world whose ranks have real memory beside their ghosts, and the comparison of the two.

The story.  The world runs an operation on its ghost; the same operation runs on the rank's device.  What it
*read* there is compared with what the ghost says: the bytes of every attended position, of every state that
a forward goes on from, of every page that a transfer delivered.  Token prefixes become bytes by the closed
form of ``impl.model``.  When everything has come to rest, all that can still be found by a key is compared
too.

An expectation is a list of :class:`Words`: definite words, where they lie in what was read, and how to name
the place.  Here they are compared at once; ``impl.streams`` compares them on the reader's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from impl.device import Device
from impl.engine import Engine
from impl.model import CELL_WORDS, INNER, LANES, TAPS, Truth, first_attended
from spec.arith import align
from spec.book import Key
from spec.chains import ZERO, Chains
from spec.config import Config, Kind
from spec.events import Event
from spec.lockstep import WRONG, Lockstep, lockstep
from spec.memory import CONV, TEMPORAL, Page
from spec.ops import Draft, End, Forward, Op, UserId, column, table_row
from spec.world import Breach, Choice, Rank, Reply, Transfer, World

BYTES = "bytes_match_ghost"
"""The rule that this harness adds to the world's: real bytes are those that the ghost stands for."""

CONTRACT = "contract of "
"""Begins the name under which a refused answer is noted, before the question's."""

FORWARD_OVERLAPS_TRANSFER = "forward_overlaps_transfer"
"""A witness of worlds whose streams run by themselves: a forward ran while a transfer had begun and not ended
on its rank."""

Build = Callable[[Config, Chains, Any], Engine]
"""An implementation: what an author's proposal replaces.  Takes configuration, chains and the feed."""


@dataclass(frozen=True, slots=True)
class Words:
    """Definite words of what was read, as signed 32-bit numbers.

    ``at``: the first one's index, if they lie next to each other, or all indices."""

    at: int | list[int]
    want: list[int]
    name: Callable[[int], str]  # of the word with this number

    def indices(self) -> Sequence[int]:
        """Where each word lies."""
        return self.at if isinstance(self.at, list) else range(self.at, self.at + len(self.want))

    def difference(self, number: int, got: int) -> str:
        """What is wrong with a word."""
        return f"{self.name(number)}: holds {_hex(got)}, should hold {_hex(self.want[number])}"


class RealWorld(World):
    """A world whose ranks have real memory beside their ghosts.  Also the feed of every worker.

    ``judged``: answers are judged by contracts and against the reference; ``off``: rules of the model that
    are not asked."""

    def __init__(
        self,
        config: Config,
        build: Build,
        *,
        record: bool = False,
        judged: bool = True,
        off: frozenset[str] = frozenset(),
    ) -> None:
        self.engine: Engine

        def policy(config: Config, chains: Chains) -> Any:
            self.engine = build(config, chains, self)
            return lockstep(lambda *_: self.engine)(config, chains) if judged else self.engine

        super().__init__(config, policy, record=record, off=off)
        self.truth = Truth(config, self.chains)
        self.tally[BYTES] = [0, 0]
        self.bytes_compared = 0
        self.outputs: dict[UserId, dict[int, int]] = {}  # the last stage's real outputs, by position
        self.made: list[Choice] = []  # through ``take``

    # -- driving -------------------------------------------------------------------------------------------
    def take(self, choice: Choice) -> bool:
        """Make a choice if it is possible now, and remember it; whether it was."""
        if not self.choose(choice):
            return False
        self.made.append(choice)
        return True

    def come_to_rest(self) -> None:
        """The adversary goes quiet."""
        self.take(("quiet",))

    def finish(self) -> None:
        """After the last choice: nothing is under way any more, and everything that was read is judged."""

    # -- the feed ------------------------------------------------------------------------------------------
    def tokens(self, step: int) -> list[list[int]]:
        """Token ids of a step's query tokens, row by row."""
        run = self.steps[step]
        return [
            [self.chains.token(one) for one in run.lines[row.uid][run.starts[row.uid] + 1 :][: row.tokens]]
            for row in run.rows
        ]

    def results(self, step: int) -> list[tuple[int, int]]:
        """Verified tokens and rejected drafts of a step's rows."""
        return self.steps[step].results

    # -- the world, with real memory -----------------------------------------------------------------------
    def guard(self, question: Callable[[], Reply]) -> Reply | None:
        """An implementation that stops with any error is as wrong as one that says so."""
        try:
            reply = super().guard(question)
        except (LookupError, AssertionError, ValueError, AttributeError, RuntimeError) as error:
            self.broken("policy_raises_no_error", f"{type(error).__name__}: {error}")
            return None
        self.note_refusals()
        return reply

    def note_refusals(self) -> None:
        """An answer that its contract refuses is a broken discipline: it may do no harm in this run."""
        policy: object = self.policy
        if isinstance(policy, Lockstep) and any(kind == WRONG for _, kind in policy.counts):
            for one in policy.found:
                rule = f"{CONTRACT}{one.question}"
                if one.kind == WRONG and all(breach.rule != rule for breach in self.disciplines):
                    self.disciplines.append(Breach(rule, "discipline", one.text, self.choices))

    def broken(self, name: str, text: str) -> None:
        """The world's rules, and the harness' own."""
        if name != BYTES:
            super().broken(name, text)
        elif self.verdict is None:
            self.verdict = Breach(BYTES, "consequence", text, self.choices)
            self.emit(("breach", BYTES, "consequence", text))

    def step_stream(self, rank: Rank, stream: str) -> None:
        """The head of a stream executes: on the ghost, then on real memory."""
        op = rank.streams[stream][0]
        super().step_stream(rank, stream)
        if not self.verdict:
            self.step_device(rank, stream, op)

    def step_device(self, rank: Rank, stream: str, op: Op) -> None:
        """The operation executes on real memory, and what it read is compared."""
        device = self.engine.devices[rank.index]
        try:
            device.execute(op)
        except (LookupError, ValueError, RuntimeError) as error:
            self.broken(BYTES, f"rank {rank.index}: {type(op).__name__} fails on real memory: {error}")
            return
        if isinstance(op, (Forward, Draft)):
            self.compare(device.read, list(self.expected(rank, op, device.places)))
            if isinstance(op, Forward):
                self.keep_outputs(rank, op, device)
        elif isinstance(op, End):
            read, words = device.delivered(self.transfers[op.job].way, pages_of(self.transfers[op.job]))
            self.compare(read, list(self.expected_pages(rank, self.transfers[op.job], words)))

    def spoil(self, transfer: Transfer, rank: Rank) -> None:
        """A failed transfer leaves rubbish in real memory too."""
        super().spoil(transfer, rank)
        memory = self.engine.devices[rank.index].memory
        for key, place, subs in transfer.chunks:
            for sub, block in enumerate(subs):
                if block and transfer.way == "load":
                    memory.poison([block])
                elif block and self.stored.get(place, (None,))[0] == key:
                    memory.chunks[place, sub] = 0x5A

    def _quiet(self) -> None:
        super()._quiet()
        if self.verdict is None and self.idle():
            self.compare_findable()

    # -- comparing -----------------------------------------------------------------------------------------
    def compare(self, read: torch.Tensor, expected: Sequence[Words]) -> None:
        """Compare what was read, int32, flat, with what should have been, as far as that is definite."""
        self.count_compared(expected)
        got = read.cpu().numpy()
        for words in expected:
            at = words.at
            found = (got[at] if isinstance(at, list) else got[at : at + len(words.want)]).tolist()
            if found != words.want:
                number = next(i for i, (a, b) in enumerate(zip(words.want, found, strict=True)) if a != b)
                self.broken(BYTES, words.difference(number, found[number]))
                return

    def count_compared(self, expected: Sequence[Words]) -> None:
        """Keep count."""
        self.bytes_compared += 4 * sum(len(words.want) for words in expected)
        self.tally[BYTES][1] += len(expected)

    def expected(
        self, rank: Rank, op: Forward | Draft, places: dict[tuple[str, int], tuple[int, int]]
    ) -> Iterator[Words]:
        """What a forward or a drafter should have read; ``places`` say where each part of it lies."""
        return (
            self.forward_words(rank, op, places)
            if isinstance(op, Forward)
            else self.draft_words(rank, op, places)
        )

    def forward_words(
        self, rank: Rank, op: Forward, places: dict[tuple[str, int], tuple[int, int]]
    ) -> Iterator[Words]:
        """Everything that the layers read, and what the stage hands on."""
        run, token = self.steps[op.step], 0
        for i, row in enumerate(op.rows):
            line, start = run.lines[row.uid], run.starts[row.uid]
            who = f"rank {rank.index}, {row.uid}, step {op.step}"
            for (part, g), (first_word, size) in places.items():
                if part == "cells":
                    first, table = (
                        first_attended(self.config.groups[g], start),
                        rank.memory.tables[op.tables][g][i],
                    )
                    yield self.cell_words(
                        who, rank, g, table, first_word + i * size, line, first, start + row.tokens
                    )
                elif part == "state" and start:
                    yield from self.state_words(who, rank, op, g, i, line[start], places)
            want = [self.truth.output(rank.stage, line[start + n + 1]) for n in range(row.tokens)]
            where = places["output", -1][0] + token
            token += row.tokens
            yield Words(where, want, lambda n, who=who, start=start: f"{who}: output of position {start + n}")  # type: ignore[misc]

    def cell_words(
        self,
        who: str,
        rank: Rank,
        g: int,
        table: Sequence[int],
        row: int,
        line: list[int],
        first: int,
        upto: int,
    ) -> Words:
        """Attention's reads of positions ``first`` to ``upto - 1`` of the row that begins at word ``row``."""
        want = [word for cell in self.truth.cells(rank.stage, g, line[first + 1 : upto + 1]) for word in cell]
        group, stride = self.config.groups[g], self.engine.devices[rank.index].memory.stride_words

        def name(number: int) -> str:
            position = first + number // CELL_WORDS
            col, cell = divmod(position, group.block_tokens)
            block = column(list(table), col)
            byte = 4 * (block * stride + cell * CELL_WORDS + number % CELL_WORDS)
            return (
                f"{who}, group {group.name}, position {position} (column {col}, block {block}, cell {cell}, "
                f"byte {byte} of the pages)"
            )

        return Words(row + first * CELL_WORDS, want, name)

    def state_words(
        self, who: str, rank: Rank, op: Forward, g: int, row: int, prefix: int,
        places: dict[tuple[str, int], tuple[int, int]],
    ) -> Iterator[Words]:  # fmt: skip
        """The state and the window that a recurrent row goes on from."""
        memory, one = self.engine.devices[rank.index].memory, op.rows[row]
        run, pages, stride = self.steps[op.step], memory.states[g], memory.stride_words
        first = align.aligned_first_column(run.starts[one.uid] + one.tokens, self.mamba_block)
        offset = rank.memory.accepted[one.slot] - 1
        table = table_row(rank, op.index[row], g)
        block, own = column(table, first), column(table, align.scratch_column(first, offset))
        what = f"{who}, group {self.config.groups[g].name}, after {self.chains.name(prefix)}"

        def temporal(n: int) -> str:
            byte = 4 * (own * stride + int(pages.temporal.storage_offset()) + n)
            return f"{what}: temporal state, block {own}, word {n} (byte {byte} of the pages)"

        def window(n: int) -> str:
            inputs = (offset + n // INNER) * pages.window.stride(1) + n % INNER * pages.window.stride(2)
            byte = 4 * (block * stride + inputs)
            return f"{what}: convolution window, block {block}, word {n} (byte {byte} of the pages)"

        at, size = places["state", g]
        yield Words(at + row * size, list(self.truth.state(rank.stage, g, prefix)), temporal)
        at, size = places["window", g]
        inputs = [word for words in self.truth.window(rank.stage, g, prefix) for word in words]
        yield Words(at + row * size, inputs, window)

    def draft_words(
        self, rank: Rank, op: Draft, places: dict[tuple[str, int], tuple[int, int]]
    ) -> Iterator[Words]:
        """What a drafter of several modules reads again after a rejection."""
        run = self.steps[op.step]
        for (_, g), (at, size) in places.items():
            group = self.config.groups[g]
            for i, row in enumerate(op.rows):
                request, (_, rejected) = self.book.requests.get(row.uid), run.results[i]
                if not rejected or request is None:
                    continue
                after = run.starts[row.uid] + row.tokens - rejected
                again = max(after - group.extra_tokens, request.hit)
                first = max(0, again - group.window_tokens + 1)
                who = f"rank {rank.index}, {row.uid}, drafter of step {op.step}"
                table, line = rank.memory.tables[op.tables][g][i], self.clients[row.uid].line
                yield self.cell_words(who, rank, g, table, at + i * size, line, first, after)

    def keep_outputs(self, rank: Rank, op: Forward, device: Device) -> None:
        """The last stage's real outputs, for whoever compares requests."""
        if rank.stage < self.config.pp - 1 or rank.index % self.config.tp:
            return
        run, at, output = self.steps[op.step], device.places["output", -1][0], device.read.tolist()
        for row in op.rows:
            words = output[at : at + row.tokens]
            self.outputs.setdefault(row.uid, {}).update(enumerate(words, run.starts[row.uid]))
            at += row.tokens

    # -- pages ---------------------------------------------------------------------------------------------
    def expected_pages(self, rank: Rank, transfer: Transfer, words: int) -> Iterator[Words]:
        """Every page that the ghost delivered; each lies ``words`` behind the one before."""
        at, spots = 0, [(key, place, sub, block) for key, place, subs in transfer.chunks
                        for sub, block in enumerate(subs) if block]  # fmt: skip
        for key, place, sub, block in spots:
            what = f"rank {rank.index}, {transfer.way} {transfer.job} of {transfer.uid}"
            if transfer.way == "store":
                page = rank.memory.host.get((place, sub), (key[0], ()))
                yield from self.page_words(f"{what}, host chunk {place}.{sub}", rank, page, at)
            else:
                yield from self.page_words(f"{what}, block {block}", rank, rank.memory.page(block), at)
            at += words

    def note(self, decision: Event) -> None:
        """A host chunk that becomes ready can be read from now on."""
        super().note(decision)
        if decision[0] == "tier" and decision[5] == "ready" and self.verdict is None:
            g, tokens, prefix, place, _ = decision[1:]
            self.compare_chunk((g, tokens, prefix), place)

    def compare_chunk(self, key: Key, place: int) -> None:
        """A ready host chunk, on every rank, against what its key names."""
        stored, subs = self.stored.get(place, (key, ()))
        per, block = self.config.blocks_per_chunk, self.config.groups[key[0]].block_tokens
        for rank, device in zip(self.ranks, self.engine.devices, strict=True):
            for sub, source in enumerate(subs if stored == key else ()):
                if source:
                    page = self.named_page(key, key[1] - (per - 1 - sub) * block)
                    what = f"rank {rank.index}, host chunk {place}.{sub} under the key of {key[1]} tokens"
                    self.compare_page(what, rank, page, device.memory.chunks[place, sub].view(torch.int32))

    def compare_findable(self) -> None:
        """Every block under a key and every ready host chunk, on every rank, against what the key names.

        A stage before the last moves a boundary's state to its column with a later step, before anybody can
        read it there; until then its block is compared with the ghost."""
        for rank, device in zip(self.ranks, self.engine.devices, strict=True):
            words = device.memory.words.cpu()
            for key, blocks in self.book.by_key.items():
                late = key[0] in self.mamba_groups and rank.stage < self.config.pp - 1
                for block in blocks:
                    what = f"rank {rank.index}, block {block} under the key of {key[1]} tokens"
                    page = rank.memory.page(block) if late else self.named_page(key, key[1])
                    self.compare_page(what, rank, page, words[block])
        for key, entry in self.book.tier.items():
            if entry.state == "ready":
                self.compare_chunk(key, entry.place)

    def compare_page(self, what: str, rank: Rank, page: Page, words: torch.Tensor) -> None:
        """One page's words at once."""
        if self.verdict is None:
            self.compare(words, list(self.page_words(what, rank, page, 0)))

    def named_page(self, key: Key, end: int) -> Page:
        """The page that a key names: the block in which its first ``end`` tokens end."""
        g, tokens, prefix = key
        line, group = self.chains.prefixes(prefix), self.config.groups[g]
        if group.kind is Kind.MAMBA:
            return g, ((line[tokens],), line[tokens])
        first = (end - 1) // group.block_tokens * group.block_tokens
        return g, tuple(line[first + 1 : end + 1])

    def page_words(self, what: str, rank: Rank, page: Page, at: int) -> Iterator[Words]:
        """A page's words by its ghost; the page begins at word ``at``.  Garbage and torn cells stand for any
        bytes."""
        g, cells = page
        if g < 0:
            return
        stage, pages = rank.stage, self.engine.devices[rank.index].memory.states.get(g)

        def words(cell: int, where: int | list[int], want: Sequence[int]) -> Words:
            name = f"{what}, group {self.config.groups[g].name}, cell {cell}"
            return Words(where, list(want), lambda n: f"{name}, word {n}")

        if pages is None:
            for cell, value in enumerate(cells):
                if isinstance(value, int) and (value >= 0 or value == ZERO):
                    kept = self.truth.kept(stage, g, value).cell if value > 0 else (0,) * CELL_WORDS
                    yield words(cell, at + cell * CELL_WORDS, kept)
            return
        state = cells[TEMPORAL] if len(cells) > TEMPORAL else -1
        if isinstance(state, int) and (state > 0 or state == ZERO):
            behind = int(pages.temporal.storage_offset())
            yield words(TEMPORAL, at + behind, self.truth.state(stage, g, max(state, 0))[:LANES])
        window = cells[CONV] if cells else ()
        token, inner = pages.window.stride(1), pages.window.stride(2)
        for offset, prefix in enumerate(window if isinstance(window, tuple) else ()):
            if prefix > 0:
                inputs = self.truth.window(stage, g, prefix)
                where = [
                    at + (offset + n) * token + i * inner
                    for n in range(TAPS - 1)
                    for i in range(len(inputs[0]))
                ]
                yield words(CONV, where, [word for one in inputs for word in one])


def pages_of(transfer: Transfer) -> list[tuple[int, int, int]]:
    """A transfer's pages: (device block, host chunk, sub-slot)."""
    return [
        (block, place, sub) for _, place, subs in transfer.chunks for sub, block in enumerate(subs) if block
    ]


def _hex(word: int) -> str:
    return f"0x{word & 0xFFFFFFFF:08x}"
