"""Refinement: the implementation drives a world on real bytes; all that anyone reads is compared.

``python -m impl.refine [--device cpu] [--kernels torch|triton] [--runs R] [--choices N] [--seed S]
[--config NAME|FILE|--all|--list] [--json FILE] [--poison]``

The implementation's answers are the policy's answers.  Host decisions are judged by the contracts and
compared with the reference (``spec.lockstep``).  Each operation that the world runs on its ghost is then
run on the rank's real memory, through the kernels, and what it read is compared with what the ghost says:
the bytes of every attended position, of every state that a forward goes on from, of every page that a
transfer delivered, of every block and host chunk that can still be found by a key when the run is over.
Token prefixes become bytes by the closed form of ``impl.model``.

Without ``--config``, ``--all``, ``--runs`` and ``--choices`` every kind of choice and every witness of the
walk must be reached, else the verdict is undetermined.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    print("impl.refine: torch is not installed: pip install -e '.[kernels]'", file=sys.stderr)
    sys.exit(2)

from impl.decisions import Decisions
from impl.device import Device, Feed, kernels_named
from impl.engine import Engine
from impl.model import CELL_WORDS, INNER, LANES, TAPS, Truth, first_attended
from spec import config as configs
from spec import handbook, reduce
from spec.book import Key
from spec.chains import ZERO, Chains
from spec.config import Config, ConfigError, Kind
from spec.events import Event
from spec.lockstep import WRONG, Lockstep, lockstep
from spec.memory import CONV, TEMPORAL, Page
from spec.ops import Draft, End, Forward, Op, UserId
from spec.trace import commit
from spec.walk import COMPOSED, WEIGHTS, WITNESSES, Adversary, Options, draw_options
from spec.world import Breach, Choice, Rank, Reply, Transfer, World

RUNS, CHOICES = 20, 200
BYTES = "bytes_match_ghost"
"""The rule that this harness adds to the world's: real bytes are those that the ghost stands for."""

CONTRACT = "contract of "
"""Begins the name under which a refused answer is noted, before the question's."""

Build = Callable[[Config, Chains, Feed], Engine]
"""An implementation: what an author's proposal replaces."""


def implementation(
    decide: Decisions | None = None,
    *,
    kernels: str = "torch",
    poison: bool = False,
    device_type: type[Device] = Device,
) -> Build:
    """The implementation with these decisions, on these kernels."""
    chosen = kernels_named(kernels)

    def build(config: Config, chains: Chains, feed: Feed) -> Engine:
        return Engine(
            config, chains, feed, decide=decide, kernels=chosen, poison=poison, device_type=device_type
        )

    return build


class RealWorld(World):
    """A world whose ranks have real memory beside their ghosts.  Also the feed of every worker."""

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
        if self.verdict:
            return
        device = self.engine.devices[rank.index]
        try:
            device.execute(op)
        except (LookupError, ValueError, RuntimeError) as error:
            self.broken(BYTES, f"rank {rank.index}: {type(op).__name__} fails on real memory: {error}")
            return
        self.compare(rank, device, op)

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
    def compare(self, rank: Rank, device: Device, op: Op) -> None:
        """What an operation read, or what a transfer delivered."""
        if isinstance(op, Forward):
            self.compare_forward(rank, device, op)
        elif isinstance(op, Draft):
            self.compare_draft(rank, device, op)
        elif isinstance(op, End):
            self.compare_transfer(rank, device, self.transfers[op.job])

    def same(self, want: Sequence[Any], got: Sequence[Any], text: Callable[[int], str]) -> bool:
        """Compare words; ``text`` says where a difference at an index is."""
        self.bytes_compared += 4 * len(want)
        self.tally[BYTES][1] += 1
        if want == got:
            return True
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), 0)
        self.broken(BYTES, f"{text(at)}: holds {_hex(got[at])}, should hold {_hex(want[at])}")
        return False

    def compare_forward(self, rank: Rank, device: Device, op: Forward) -> None:
        """Everything that the layers read, and what the stage hands on."""
        run, reads = self.steps[op.step], device.reads
        assert reads is not None and device.output is not None
        cells = {g: seen.cpu().numpy() for g, seen in reads.cells.items()}
        output, at = device.output.cpu().tolist(), 0
        for i, row in enumerate(op.rows):
            line, start = run.lines[row.uid], run.starts[row.uid]
            who = f"rank {rank.index}, {row.uid}, step {op.step}"
            for g, seen in cells.items():
                first = first_attended(self.config.groups[g], start)
                self.compare_cells(who, rank, device, g, i, seen[i], line, first, start + row.tokens)
            for g in reads.states if start else ():
                self.compare_state(who, rank, device, g, i, line[start])
            want = [self.truth.output(rank.stage, line[start + n + 1]) for n in range(row.tokens)]
            got = [_signed(word) for word in output[at : at + row.tokens]]
            at += row.tokens
            if self.verdict is None:
                self.same(want, got, lambda n, who=who, start=start: f"{who}: output of position {start + n}")  # type: ignore[misc]
            if rank.stage == self.config.pp - 1 and rank.index % self.config.tp == 0:
                self.outputs.setdefault(row.uid, {}).update(enumerate(got, start))

    def compare_cells(
        self, who: str, rank: Rank, device: Device, g: int, row: int, seen: Any, line: list[int],
        first: int, upto: int,
    ) -> None:  # fmt: skip
        """Attention's reads of positions ``first`` to ``upto - 1`` of one row."""
        if self.verdict:
            return
        want = [word for cell in self.truth.cells(rank.stage, g, line[first + 1 : upto + 1]) for word in cell]
        got = seen[first:upto].reshape(-1).tolist()
        group, table = self.config.groups[g], device.memory.gathered[g]

        def text(at: int) -> str:
            position = first + at // CELL_WORDS
            col, cell = divmod(position, group.block_tokens)
            block = int(table[row, col])
            byte = 4 * (block * device.memory.stride_words + cell * CELL_WORDS + at % CELL_WORDS)
            return (
                f"{who}, group {group.name}, position {position} (column {col}, block {block}, cell {cell}, "
                f"byte {byte} of the pages)"
            )

        self.same(want, got, text)

    def compare_state(self, who: str, rank: Rank, device: Device, g: int, row: int, prefix: int) -> None:
        """The state and the window that a recurrent row goes on from."""
        reads = device.reads
        if self.verdict or reads is None:
            return
        assert reads.offsets is not None
        offset, stride = int(reads.offsets[row]), device.memory.stride_words
        pages, blocks = device.memory.states[g], reads.columns[g][row].tolist()
        what = f"{who}, group {self.config.groups[g].name}, after {self.chains.name(prefix)}"

        def temporal(n: int) -> str:
            byte = 4 * (blocks[offset] * stride + int(pages.temporal.storage_offset()) + n)
            return f"{what}: temporal state, block {blocks[offset]}, word {n} (byte {byte} of the pages)"

        def window(n: int) -> str:
            inputs = (offset + n // INNER) * pages.window.stride(1) + n % INNER * pages.window.stride(2)
            byte = 4 * (blocks[0] * stride + inputs)
            return f"{what}: convolution window, block {blocks[0]}, word {n} (byte {byte} of the pages)"

        if self.same(list(self.truth.state(rank.stage, g, prefix)), reads.states[g][row].tolist(), temporal):
            want = [word for inputs in self.truth.window(rank.stage, g, prefix) for word in inputs]
            self.same(want, reads.windows[g][row].reshape(-1).tolist(), window)

    def compare_draft(self, rank: Rank, device: Device, op: Draft) -> None:
        """What a drafter of several modules reads again after a rejection."""
        run, reads = self.steps[op.step], device.reads
        assert reads is not None
        for g, seen in reads.cells.items():
            group, words = self.config.groups[g], seen.cpu().numpy()
            for i, row in enumerate(op.rows):
                request, (_, rejected) = self.book.requests.get(row.uid), run.results[i]
                if not rejected or request is None:
                    continue
                after = run.starts[row.uid] + row.tokens - rejected
                again = max(after - group.extra_tokens, request.hit)
                first = max(0, again - group.window_tokens + 1)
                who, line = (
                    f"rank {rank.index}, {row.uid}, drafter of step {op.step}",
                    self.clients[row.uid].line,
                )
                self.compare_cells(who, rank, device, g, i, words[i], line, first, after)

    def compare_transfer(self, rank: Rank, device: Device, transfer: Transfer) -> None:
        """Every page that the ghost delivered."""
        memory = device.memory
        for key, place, subs in transfer.chunks:
            for sub, block in enumerate(subs):
                if not block or self.verdict:
                    continue
                what = f"rank {rank.index}, {transfer.way} {transfer.job} of {transfer.uid}"
                if transfer.way == "store":
                    page = rank.memory.host.get((place, sub), (key[0], ()))
                    words = memory.chunks[place, sub].view(torch.int32)
                    self.compare_page(f"{what}, host chunk {place}.{sub}", rank.stage, page, words, device)
                else:
                    page, words = rank.memory.page(block), memory.words[block]
                    self.compare_page(f"{what}, block {block}", rank.stage, page, words, device)

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
                    words = device.memory.chunks[place, sub].view(torch.int32)
                    what = f"rank {rank.index}, host chunk {place}.{sub} under the key of {key[1]} tokens"
                    self.compare_page(what, rank.stage, page, words, device)

    def compare_findable(self) -> None:
        """Every block under a key and every ready host chunk, on every rank, against what the key names.

        A stage before the last moves a boundary's state to its column with a later step, before anybody can
        read it there; until then its block is compared with the ghost."""
        for key, blocks in self.book.by_key.items():
            for block in blocks:
                for rank, device in zip(self.ranks, self.engine.devices, strict=True):
                    what = f"rank {rank.index}, block {block} under the key of {key[1]} tokens"
                    late = key[0] in self.mamba_groups and rank.stage < self.config.pp - 1
                    page = rank.memory.page(block) if late else self.named_page(key, key[1])
                    self.compare_page(what, rank.stage, page, device.memory.words[block], device)
        for key, entry in self.book.tier.items():
            if entry.state == "ready":
                self.compare_chunk(key, entry.place)

    def named_page(self, key: Key, end: int) -> Page:
        """The page that a key names: the block in which its first ``end`` tokens end."""
        g, tokens, prefix = key
        line, group = self.chains.prefixes(prefix), self.config.groups[g]
        if group.kind is Kind.MAMBA:
            return g, ((line[tokens],), line[tokens])
        first = (end - 1) // group.block_tokens * group.block_tokens
        return g, tuple(line[first + 1 : end + 1])

    def compare_page(self, what: str, stage: int, page: Page, words: torch.Tensor, device: Device) -> None:
        """A page's bytes against its ghost; garbage and torn cells stand for any bytes."""
        g, cells = page
        if g < 0 or self.verdict:
            return
        name = self.config.groups[g].name
        for cell, first, want in self.ghost_words(stage, g, cells, device):
            got = (words[first] if len(first) > 1 else words[first[0] : first[0] + len(want)]).tolist()
            place = f"{what}, group {name}, cell {cell}"
            if not self.same(want, got, lambda n, place=place: f"{place}, word {n}"):  # type: ignore[misc]
                return

    def ghost_words(
        self, stage: int, g: int, cells: Sequence[Any], device: Device
    ) -> Iterator[tuple[int, list[int], list[int]]]:
        """(cell, where its words are in the page: the first one or all of them, the words) of each cell that
        stands for definite bytes."""
        if self.config.groups[g].kind is not Kind.MAMBA:
            for cell, value in enumerate(cells):
                if value >= 0 or value == ZERO:
                    kept = self.truth.kept(stage, g, value).cell if value > 0 else (0,) * CELL_WORDS
                    yield cell, [cell * CELL_WORDS], list(kept)
            return
        pages = device.memory.states[g]
        if len(cells) > TEMPORAL and (cells[TEMPORAL] > 0 or cells[TEMPORAL] == ZERO):
            state = self.truth.state(stage, g, max(cells[TEMPORAL], 0))
            yield TEMPORAL, [int(pages.temporal.storage_offset())], list(state[:LANES])
        window = cells[CONV] if cells and isinstance(cells[CONV], tuple) else ()
        token, inner = pages.window.stride(1), pages.window.stride(2)
        for offset, prefix in enumerate(window):
            if prefix > 0:
                inputs = self.truth.window(stage, g, prefix)
                where = [
                    (offset + n) * token + i * inner for n in range(TAPS - 1) for i in range(len(inputs[0]))
                ]
                yield CONV, where, [word for words in inputs for word in words]


def _signed(word: int) -> int:
    return ((word + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def _hex(word: int) -> str:
    return f"0x{word & 0xFFFFFFFF:08x}"


# -- runs --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """One finished run."""

    config: Config
    number: int
    options: Options
    choices: list[Choice]
    world: RealWorld

    @property
    def differences(self) -> Lockstep | None:
        """What the contracts and the reference say about the answers."""
        policy: object = self.world.policy
        return policy if isinstance(policy, Lockstep) else None


def refine_once(
    config: Config, build: Build, seed: int, number: int, choices: int,
    *, judged: bool = True, off: frozenset[str] = frozenset(),
) -> Run:  # fmt: skip
    """One run: a busy phase of ``choices`` choices, then a quiet one.  Determined by its arguments.

    ``judged``: by contracts and against the reference; ``off``: rules of the model that are not asked."""
    random = Random(f"{seed}/{config.name}/{number}")
    options = draw_options(config, random)
    adversary = Adversary(config, random, options)
    world = RealWorld(config, build, judged=judged, off=off)
    made: list[Choice] = []
    draws = 0
    while len(made) < choices and world.verdict is None and draws < 40 * choices and not refusals(world):
        draws += 1
        choice = adversary.draw(world)
        if choice is not None and world.choose(choice):
            made.append(choice)
    if world.choose(("quiet",)):
        made.append(("quiet",))
    return Run(config, number, options, made, world)


def replay(
    config: Config, build: Build, choices: Sequence[Choice], *, judged: bool = True,
    off: frozenset[str] = frozenset(),
) -> Run:  # fmt: skip
    """These choices, as far as they are possible, then quiet."""
    world = RealWorld(config, build, judged=judged, off=off)
    made = [choice for choice in (*choices, ("quiet",)) if not refusals(world) and world.choose(choice)]
    return Run(config, 0, draw_options(config, Random(0)), made, world)


def refusals(world: RealWorld) -> list[Breach]:
    """Answers that a contract refuses."""
    return [breach for breach in world.disciplines if breach.rule.startswith(CONTRACT)]


def failure(run: Run) -> tuple[str, str] | None:
    """(what broke, in words) if the run did not hold; a refused answer counts."""
    for breach in (*refusals(run.world), run.world.verdict):
        if breach:
            return breach.rule, breach.text
    return None


def reduced(run: Run, build: Build, rule: str) -> reduce.Choices:
    """A shortest run that fails in the same way."""
    judged = rule.startswith(CONTRACT)
    return reduce.reduce_in(
        run.config, lambda: RealWorld(run.config, build, judged=judged), run.choices, rule
    )


@dataclass(slots=True)
class Report:
    """What all runs add up to."""

    runs: int = 0
    choices: int = 0
    events: int = 0
    bytes_compared: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    per_config: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    witnesses: Counter[str] = field(default_factory=Counter)
    disciplines: Counter[str] = field(default_factory=Counter)
    classes: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    failed: Run | None = None
    stopped: bool = False

    def add(self, run: Run) -> None:
        """Count one run."""
        world = run.world
        self.runs += 1
        self.per_config[run.config.name] += 1
        self.choices += world.choices
        self.events += world.count
        self.bytes_compared += world.bytes_compared
        self.fired.update(world.fired)
        self.witnesses.update(world.witnesses)
        self.disciplines.update(breach.rule for breach in world.disciplines)
        if run.differences:
            self.classes.update(run.differences.counts)
            for one in run.differences.found:
                self.examples.setdefault((one.question, one.kind), one.text)
        if failure(run):
            self.failed = run


def refine(
    todo: Sequence[Config],
    build: Build,
    *,
    runs: int,
    choices: int,
    seed: int,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Run each configuration ``runs`` times; stop at the first failure, or when interrupted."""
    report = Report()
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        for number in range(runs):
            for config in todo:
                report.add(refine_once(config, build, seed, number, choices))
                report.seconds = time.perf_counter() - began
                report.cpu_seconds = time.process_time() - began_cpu
                if progress:
                    progress(report)
                if report.failed:
                    return report
    except KeyboardInterrupt:
        report.stopped = True
    return report


# -- the command -------------------------------------------------------------------------------------------


def lines(report: Report) -> Iterator[str]:
    """The tables that end a refinement."""
    yield f"{'choice':<38}{'made':>10}"
    for kind in WEIGHTS:
        yield f"{kind:<38}{report.fired[kind]:>10}"
    yield ""
    yield f"{'witness':<38}{'reached':>10}"
    for name in sorted(report.witnesses):
        yield f"{name:<38}{report.witnesses[name]:>10}"
    yield ""
    yield f"{'question':<18}{'against the reference':<24}{'answers':>9}  first example"
    for (question, kind), count in sorted(report.classes.items()):
        example = report.examples.get((question, kind), "")
        yield f"{question:<18}{kind:<24}{count:>9}  {example[:100]}".rstrip()
    if report.disciplines:
        yield f"\ndisciplines broken on the way: {dict(report.disciplines)}"


def unreached(report: Report) -> list[str]:
    """Kinds of choice and witnesses that no run has reached."""
    choices = [kind for kind in WEIGHTS if not report.fired[kind]]
    return choices + [name for name in WITNESSES if not report.witnesses[name]]


def show_failure(run: Run, build: Build) -> Iterator[str]:
    """The reduced trace of a failed run, and where the values differ."""
    broken = failure(run)
    assert broken is not None
    rule, text = broken
    yield f"\nrefuted in run {run.number} of {run.config.name} ({run.options.line()}): {rule}"
    yield f"  {text}"
    try:
        short = reduced(run, build, rule)
    except ValueError:
        yield f"  not reproduced by its {len(run.choices)} choices alone"
        return
    world = RealWorld(run.config, build, record=True, judged=rule.startswith(CONTRACT))
    for choice in short:
        world.choose(choice)
    yield f"  reduced to {len(short)} choices:"
    yield from (f"    {' '.join(map(str, choice))}" for choice in short)
    again = failure(Run(run.config, run.number, run.options, list(short), world))
    yield f"  there: {again[1] if again else text}"


def as_json(report: Report, seed: int, kernels: str, verdict: str) -> dict[str, Any]:
    """The machine-readable report."""
    failed: dict[str, Any] | None = None
    if report.failed:
        rule, text = failure(report.failed) or ("", "")
        failed = {
            "config": report.failed.config.name, "run": report.failed.number, "rule": rule, "text": text,
            "options": asdict(report.failed.options), "choices": report.failed.choices,
        }  # fmt: skip
    return {
        "verdict": verdict, "seed": seed, "device": "cpu", "kernels": kernels, "runs": report.runs,
        "runs_per_config": dict(report.per_config), "choices": report.choices, "events": report.events,
        "bytes_compared": report.bytes_compared, "seconds": round(report.seconds, 3),
        "cpu_seconds": round(report.cpu_seconds, 3),
        "fired": dict(report.fired),
        "witnesses": dict(report.witnesses), "disciplines": dict(report.disciplines),
        "differences": [[*which, count] for which, count in sorted(report.classes.items())],
        "failed": failed, "stopped": report.stopped,
    }  # fmt: skip


def markdown(report: Report, command: str, verdict: str) -> str:
    """The part of the documentation that this command records."""
    rate = max(report.cpu_seconds, 1e-9)
    least = min(report.per_config.values(), default=0)
    classes = [
        (f"`{question}`", kind, f"{count:,}") for (question, kind), count in sorted(report.classes.items())
    ]
    reached = [(f"`{name}`", f"{report.witnesses[name]:,}") for name in sorted(report.witnesses)]
    made = [(f"`{kind}`", f"{report.fired[kind]:,}") for kind in WEIGHTS]
    return (
        f"`{command}`\n\n"
        f"On {handbook.machine()}, commit {commit() or 'unknown'}: {report.runs:,} runs of "
        f"{len(report.per_config)} configurations, at least {least} each; {report.choices:,} choices, "
        f"{report.events:,} events, {report.bytes_compared:,} bytes compared in {report.cpu_seconds:.0f} s "
        f"of processor time on one core: {report.choices / rate:,.0f} choices and "
        f"{report.events / rate:,.0f} events a second. Verdict: {verdict} (sampled).\n\n"
        + handbook.table(("question", "against the reference", "answers"), classes)
        + "\n" + handbook.table(("choice", "made"), made)
        + "\n" + handbook.table(("witness", "reached"), reached)
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    one = argparse.ArgumentParser(prog="python -m impl.refine", description=(__doc__ or "").splitlines()[0])
    one.add_argument(
        "--config", metavar="NAME|FILE", action="append", help="default: the composed configurations"
    )
    one.add_argument("--all", action="store_true", help="every shipped configuration")
    one.add_argument("--list", action="store_true", help="list the shipped configurations and stop")
    one.add_argument("--device", default="cpu", metavar="cpu")
    one.add_argument("--kernels", default="torch", metavar="torch|triton")
    one.add_argument("--poison", action="store_true", help="blocks that hold nothing are filled with rubbish")
    one.add_argument("--runs", type=int, metavar="R", help=f"runs a configuration (default {RUNS})")
    one.add_argument("--choices", type=int, metavar="N", help=f"choices a run (default {CHOICES})")
    one.add_argument("--seed", type=int, default=0, metavar="S")
    one.add_argument("--json", metavar="FILE")
    one.add_argument("--markdown", metavar="FILE", help="write the tables into the document's part 'refine'")
    return one


def configurations(args: argparse.Namespace) -> list[Config]:
    """What is to be refined; raises :class:`ConfigError` for bad options too."""
    for name, value in (("--runs", args.runs), ("--choices", args.choices)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.device != "cpu":
        raise ConfigError(f"--device must be cpu, got {args.device!r}")
    if args.kernels not in ("torch", "triton"):
        raise ConfigError(f"--kernels must be torch or triton, got {args.kernels!r}")
    names = args.config or (list(configs.shipped()) if args.all else COMPOSED)
    return [configs.find(name) for name in names]


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = parser().parse_args(argv)
    if args.list:
        for name, path in configs.shipped().items():
            print(f"{name:<24}{configs.load(path).description}")
        return 0
    try:
        todo = configurations(args)
        build = implementation(kernels=args.kernels, poison=args.poison)
    except ModuleNotFoundError as missing:
        print(f"impl.refine: {missing.name} is not installed: pip install -e '.[kernels]'", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"impl.refine: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    whole = not (args.config or args.all or args.runs or args.choices)  # then everything must be reached
    runs, choices = args.runs or RUNS, args.choices or CHOICES
    print(
        f"refine: {', '.join(c.name for c in todo)}; cpu, {args.kernels} kernels; seed {args.seed}; "
        f"{runs} runs x {choices} choices"
    )
    last = [0.0]

    def progress(report: Report) -> None:
        if report.seconds - last[0] > 5:
            last[0] = report.seconds
            print(f"  {report.runs} runs, {report.choices} choices, {report.events} events", flush=True)

    report = refine(todo, build, runs=runs, choices=choices, seed=args.seed, progress=progress)
    print("\n" + "\n".join(lines(report)))
    rate = max(report.cpu_seconds, 1e-9)
    print(
        f"\n{report.runs} runs, {report.choices} choices, {report.events} events, "
        f"{report.bytes_compared} bytes compared in {report.seconds:.1f} s, {report.cpu_seconds:.1f} s of "
        f"one core: {report.choices / rate:,.0f} choices/s, {report.events / rate:,.0f} events/s"
    )
    verdict, code = "holds", 0
    if report.failed:
        verdict, code = "refuted", 1
        print("\n".join(show_failure(report.failed, build)))
    elif report.stopped:
        verdict, code = "undetermined", 3
        print("\nstopped before the budget was spent")
    elif whole and unreached(report):
        verdict, code = "undetermined", 3
        print(f"\nnot reached: {', '.join(unreached(report))}")
    print(f"\nverdict: {verdict} (sampled: {report.runs} runs)")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(as_json(report, args.seed, args.kernels, verdict), file, indent=1)
            file.write("\n")
    if args.markdown:
        given = "".join(f" {word}" for word in (argv if argv is not None else sys.argv[1:]))
        try:
            words = markdown(report, f"python -m impl.refine{given}", verdict)
            handbook.record(args.markdown, "refine", words)
        except (OSError, ValueError) as error:
            print(f"impl.refine: {error}", file=sys.stderr)
            return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
