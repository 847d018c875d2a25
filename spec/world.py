"""The world: what happens whatever the code decides.

A world holds one engine: clients, the scheduler's book, and one :class:`Rank` a worker with streams and
ghost memory. It asks the policy its questions, applies the decisions, enqueues the programs, and lets the
adversary's choices decide when each stream, transfer and report advances.  It never decides *what*, nor in
which order one stream runs.

**The engine loop** is the same in both runners (vLLM ``v1/engine/core.py::step_with_batch_queue``): up to Q
steps are in flight (sync: ``pp``; async: ``pp + 1``); the oldest output is processed when the queue is
full, or when no request is left.  So with sync scheduling the output of step T is processed after
``schedule(T + pp - 1)`` and before ``schedule(T + pp)``; with async one step later.

What the forward reads and writes is in :mod:`spec.forward`, what a copy does in :mod:`spec.transfers`.

**What a reader should see** comes from the clients alone: verified tokens and the step's own drafts.
Tables, counts and the policy have no part in it.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spec import forward, transfers
from spec.book import Book, Key, Status
from spec.chains import EMPTY, Chains
from spec.config import Config, Kind
from spec.events import Event
from spec.mechanisms import lookup
from spec.memory import Memory, Page
from spec.ops import (
    BatchRow,
    Begin,
    Collect,
    CopyCounts,
    Deref,
    Forward,
    Op,
    TableRow,
    UserId,
)
from spec.policy import Answer, Arrival, Output, Policy, PolicyError
from spec.rules import BY_DECISION, BY_NAME, CORE_RULES, STATE_RULES

if TYPE_CHECKING:
    from spec.rules import Rule

Reply = TypeVar("Reply")
STREAMS = ("main", "store", "load", "counts")
CRASHES = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
QUIET_ROUNDS = 400  # schedules after which a quiet engine is stuck, beside those that its tokens may need
LONG_PHASE = 60  # schedules after which one looks whether a quiet engine stands where it stood,
RETURNS = 12  # and how often it must, to be stuck
Choice = Event


@dataclass(frozen=True, slots=True)
class Breach:
    """An invariant that broke: its name, its kind, and what was expected and found."""

    rule: str
    kind: str  # "consequence" | "discipline"
    text: str
    at: int  # choices made before


@dataclass(slots=True)
class Client:
    """A request as its client sees it: the ghost truth about its tokens."""

    uid: UserId
    tokens: list[int]
    line: list[int]  # line[n]: prefix of n verified tokens
    prompt: int
    outputs: int
    agree: int  # leading drafts that are right
    computed: int = 0  # tokens that were really computed
    given: int = 0  # tokens that the host had when it last started, and sends to every rank
    pending: int = 0  # step in flight that will bring tokens
    aborted: bool = False
    last: tuple[int, int, int] = (0, 0, 0)  # last processed step: start, query tokens, verified tokens
    preempted_at: int = 0  # tokens computed when it was last preempted
    began_at: int = -1  # tokens that it found in place when it first started
    disturbed: bool = False  # it had to start over
    reset: bool = False  # caches were reset under it
    due: int = 0  # its tokens that may be under keys since its last row was scheduled
    lost: tuple[int, int] = (0, 0)  # what had been lost when it arrived, on the device and on the host
    crowd: int = 0  # host chunks taken since it arrived, at most
    shared: bool = False  # another request computed in a step of its prefill


@dataclass(slots=True)
class StepRun:
    """A step in flight."""

    step: int
    rows: tuple[BatchRow, ...] = ()
    lines: dict[UserId, list[int]] = field(default_factory=dict)  # prefixes with the step's tokens appended
    starts: dict[UserId, int] = field(default_factory=dict)
    right: dict[UserId, int] = field(default_factory=dict)  # leading drafts that are right
    forwards: set[int] = field(default_factory=set)
    results: list[tuple[int, int]] = field(
        default_factory=list
    )  # per row: tokens verified (0: none sampled), rejected
    new: dict[UserId, tuple[int, ...]] = field(default_factory=dict)
    fed: dict[UserId, int] = field(
        default_factory=dict
    )  # verified tokens of rows whose last token was sampled, not sent by the host
    heads: dict[int, int] = field(default_factory=dict)  # per row that sampled: all its tokens by then
    counts: list[int] = field(default_factory=list)  # accepted counts by slot, as post-processing left them
    marks: list[int] = field(default_factory=list)  # per rank: main-stream operations enqueued with this step
    sampled: bool = False
    owed: set[int] = field(default_factory=set)  # ranks whose ended transfers are not collected yet


@dataclass(slots=True)
class Transfer:
    """A transfer as the ranks execute it."""

    job: int
    way: str
    uid: UserId
    chunks: tuple[tuple[Key, int, tuple[int, ...]], ...]
    handed_out: dict[int, int]  # source block -> how often it had been handed out at creation
    snapshots: dict[int, list[tuple[int, tuple[int, int], Page]]] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Rank:
    """A worker: its streams, its memory, and how far it has come."""

    index: int
    stage: int
    memory: Memory
    streams: dict[str, deque[Op]]
    enqueued: int = 0  # main-stream operations enqueued and executed so far
    executed: int = 0
    ended: dict[int, None] = field(default_factory=dict)  # transfers that ended here
    landed: dict[int, None] = field(default_factory=dict)  # steps whose accepted counts have landed (v1)
    forwarded: int = 0  # last step whose forward ran here


class World:
    """One engine under one policy.  ``choose`` makes a choice; ``verdict`` is the first consequence that
    broke."""

    def __init__(
        self,
        config: Config,
        policy: Callable[[Config, Chains], Policy],
        *,
        record: bool = False,
        off: frozenset[str] = frozenset(),
        every: int = 64,
        chains: Chains | None = None,
    ) -> None:
        self.config = config
        self.chains = Chains() if chains is None else chains  # shared by worlds that are compared
        self.policy = policy(config, self.chains)
        self.book: Book = Book.empty(config, self.chains)
        self.mamba_groups = tuple(i for i, g in enumerate(config.groups) if g.kind is Kind.MAMBA)
        self.mamba_block = config.groups[self.mamba_groups[0]].block_tokens if self.mamba_groups else 0
        columns = tuple(table_columns(config, i) for i in range(len(config.groups)))
        self.ranks = [
            Rank(i, i // config.tp, Memory(config, columns), {name: deque() for name in STREAMS})
            for i in range(config.ranks)
        ]
        self.clients: dict[UserId, Client] = {}
        self.lives: Counter[str] = Counter()
        self.finished: dict[str, tuple[int, ...]] = {}  # tokens of the client's last finished request
        self.steps: dict[int, StepRun] = {}
        self.queue: deque[int] = deque()
        self.depth = config.pp + 1 if config.async_scheduling else config.pp
        self.transfers: dict[int, Transfer] = {}
        self.handed_out: Counter[int] = Counter()  # block -> allocations so far
        self.published_in: dict[int, int] = {}  # block -> step that fills it
        self.stored: dict[int, tuple[Key, tuple[int, ...]]] = {}  # host place -> what was last stored there
        # What may cost reuse, counted: a cached block was handed out anew, or the caches were reset; the tier
        # was reset, or a transfer has failed.
        self.lost_local = 0
        self.lost_host = 0
        self.forgotten: dict[int, None] = {}  # blocks that lost their key and were not handed out since
        self.row_now: list[
            tuple[UserId, bool]
        ] = []  # rows of the step being scheduled, and whether they prefill
        self.kept: dict[tuple[int, ...], UserId] = {}  # prompts that were served to the end, undisturbed
        self.looked: dict[UserId, set[Key]] = {}  # keys that lookup saw, by request
        # -- bookkeeping of the run itself
        self.record = record
        self.off = off
        self.every = every
        self.events: list[Event] = []
        self.count = 0  # events so far
        self.choices = 0
        self.fired: Counter[str] = Counter()
        self.tally: dict[str, list[int]] = {
            name: [0, 0] for name in BY_NAME
        }  # rule -> [did not apply, applied]
        self.witnesses: Counter[str] = Counter()
        self.dirty: set[str] = set()
        self.verdict: Breach | None = None
        self.disciplines: list[Breach] = []

    # -- events and rules ----------------------------------------------------------------------------------
    def emit(self, event: Event) -> None:
        """One line of the trace."""
        self.count += 1
        if self.record:
            self.events.append(event)

    def witness(self, name: str, seen: bool) -> None:
        """Something that a live walk must reach."""
        if seen:
            self.witnesses[name] += 1

    def judge(self, name: str, applies: bool, holds: bool, text: Callable[[], str]) -> None:
        """Evaluate a rule at this moment: whether its antecedent is true, and if so whether it holds."""
        self.tally[name][applies] += 1
        if applies and not holds:
            self.broken(name, text())

    def broken(self, name: str, text: str) -> None:
        """A rule broke.  A consequence ends the run; a discipline is noted, once."""
        if name in self.off or self.verdict:
            return
        kind = BY_NAME[name].kind
        breach = Breach(name, kind, text, self.choices)
        if kind == "consequence":
            self.verdict = breach
        elif any(seen.rule == name for seen in self.disciplines):
            return
        else:
            self.disciplines.append(breach)
        self.emit(("breach", name, kind, text))

    def check_state(self, *, everything: bool = False) -> None:
        """Evaluate the rules over states whose parts have changed (or all of them)."""
        for rule in STATE_RULES:
            if everything or not self.dirty.isdisjoint(rule.parts):
                self.evaluate(rule)
        self.dirty.clear()

    def evaluate(self, rule: Rule) -> None:
        """Evaluate one state rule now."""
        assert rule.holds is not None
        applies = rule.applies is None or rule.applies(self)
        problem = rule.holds(self) if applies else None
        self.judge(rule.name, applies, problem is None, lambda: str(problem))

    # -- choices -------------------------------------------------------------------------------------------
    def choose(self, choice: Choice) -> bool:
        """Make a choice if it is possible now; whether it was."""
        if self.verdict or not self.enabled(choice):
            return False
        kind = choice[0]
        self.emit(choice)
        self.fired[kind] += 1
        getattr(self, "_" + kind)(*choice[1:])
        self.choices += 1
        if not self.verdict:
            self.check_state(everything=self.choices % self.every == 0)
        return True

    def enabled(self, choice: Choice) -> bool:
        """Whether the choice makes sense in this state."""
        kind = choice[0]
        if kind == "arrive":
            name, family, prompt, outputs = choice[1:]
            if self.live(name) or prompt < 1 or outputs < 1:
                return False
            if prompt + outputs > self.config.request_tokens:
                return False  # before tokens are made: a file may ask for any number
            return bool(len(self.prompt_tokens(family, prompt)) + outputs <= self.config.request_tokens)
        if kind in ("accept", "abort"):
            return self.live(str(choice[1])) is not None
        if kind == "schedule":
            return len(self.queue) < self.depth
        if kind == "output":
            return self.output_due()
        if kind == "run":
            rank, stream = choice[1], choice[2]
            return rank < len(self.ranks) and stream in STREAMS and self.head_blocked(rank, stream) is None
        if kind in ("report", "fail"):
            return self.reportable(*choice[1:]) is not None
        return kind in ("reset", "drain", "quiet", "work")

    def lies_under(self, key: Key) -> bool:
        """Whether a block went under the key before this step."""
        return any(self.published_in.get(b, 0) <= self.book.step for b in self.book.by_key.get(key, ()))

    def host_chunks_taken(self) -> int:
        """Host places with an entry, or on which a transfer still works although its entry is gone."""
        flying = {place for transfer in self.transfers.values() for _, place, _ in transfer.chunks}
        return len(flying | {chunk.place for chunk in self.book.tier.values()})

    def live(self, name: str) -> Client | None:
        """The client of that name whose request is not over."""
        client = self.clients.get((name, self.lives[name]))
        if client is None or client.aborted:
            return None
        request = self.book.requests.get(client.uid)
        return client if request is not None and request.status is not Status.DONE else None

    def prompt_tokens(self, family: str, prompt: int) -> tuple[int, ...]:
        """Tokens of a prompt.  Families ``0`` to ``3`` share prefixes; a client's name continues its last
        conversation."""
        base = self.conversation(family)
        if base:
            return base + tuple(500 + i for i in range(prompt))
        branch = {"0": 1_000_000, "1": 6, "2": 0}.get(family, 11)
        return tuple(1 if i < branch else 2 + branch for i in range(prompt))

    def conversation(self, name: str) -> tuple[int, ...]:
        """The tokens of that client's last request, as far as they were delivered; empty if it never sent
        one."""
        request = self.book.requests.get((name, self.lives[name]))
        if request is not None and request.status is not Status.DONE:
            return tuple(request.tokens)
        return self.finished.get(name, ())

    def output_due(self) -> bool:
        """Whether the engine loop processes an output now."""
        if not self.queue or not self.steps[self.queue[0]].sampled or self.steps[self.queue[0]].owed:
            return False
        return len(self.queue) == self.depth or not self.book.live()

    def head_blocked(self, rank: int, stream: str) -> str | None:
        """What the head of a stream waits for; None if it can run."""
        ops = self.ranks[rank].streams[stream]
        return self.waits(ops[0], self.ranks[rank]) if ops else "nothing enqueued"

    def waits(self, op: Op, rank: Rank) -> str | None:
        """What an operation waits for; None if it can run.  One that names a step, or a request, that is not
        there waits for nobody."""
        try:
            return op.blocked(self, rank)
        except LookupError as error:
            return f"something that is not there ({crash(error)})"

    def reportable(self, name: str, way: str, rank: int) -> Transfer | None:
        """The oldest transfer of that client and direction that ended on the rank and was not reported."""
        if rank >= len(self.ranks):
            return None
        ended = self.ranks[rank].ended
        for transfer in self.transfers.values():
            if transfer.way == way and transfer.uid[0] == name and transfer.job in ended:
                if rank not in transfer.reported:
                    return transfer
        return None

    # -- what each choice does -----------------------------------------------------------------------------
    def _arrive(self, name: str, family: str, prompt: int, outputs: int) -> None:
        tokens = self.prompt_tokens(family, prompt)
        self.witness(
            "same_id_back_before_late_report", any(t.uid[0] == name for t in self.transfers.values())
        )
        self.lives[name] += 1
        uid = (name, self.lives[name])
        line = [EMPTY]
        for token in tokens:
            line.append(self.chains.fold(line[-1], token))
        self.clients[uid] = Client(
            uid,
            list(tokens),
            line,
            len(tokens),
            outputs,
            self.config.drafts,
            lost=(self.lost_local, self.lost_host),
            crowd=self.host_chunks_taken(),
        )
        self.ask(lambda: self.policy.on_arrive(Arrival(uid, tokens, outputs)))

    def _accept(self, name: str, drafts: int) -> None:
        client = self.live(name)
        assert client is not None
        client.agree = drafts

    def _abort(self, name: str) -> None:
        client = self.live(name)
        assert client is not None
        client.aborted = True
        self.ask(lambda: self.policy.on_abort(client.uid))

    def _reset(self, scope: str) -> None:
        self.caches_reset(scope)
        held = bool(self.book.core.holders)
        self.ask(lambda: self.policy.on_reset(scope))
        lookup.reset_forgets(self, scope, held)

    def caches_reset(self, scope: str) -> None:
        """Ghost bookkeeping: what lay there need not be found, nor what requests under way leave."""
        self.lost_local += 1
        self.lost_host += scope == "all"
        for uid, client in self.clients.items():
            client.reset |= uid in self.book.requests

    def _schedule(self) -> None:
        answer = self.ask(self.policy.schedule)
        if answer is None:
            return
        step = self.book.step
        run = StepRun(step)
        self.steps[step] = run
        self.queue.append(step)
        for rank in self.ranks:
            program = self.guard(partial(self.policy.worker_program, rank.index, answer.message))
            for stream, op in program or ():
                if isinstance(op, Forward):
                    run.rows = op.rows
                if isinstance(op, (Begin, CopyCounts)) and op.after_main < 0:
                    op.after_main = rank.enqueued
                if isinstance(op, Collect):
                    run.owed.add(rank.index)
                rank.streams[stream].append(op)
                rank.enqueued += stream == "main"
            run.marks.append(rank.enqueued)
        run.sampled = not run.rows

    def _output(self) -> None:
        step = self.queue.popleft()
        run = self.steps[step]
        for row, (verified, _) in zip(run.rows, run.results, strict=True):
            self.clients[row.uid].last = (run.starts[row.uid], row.tokens, verified)
        tokens = tuple((row.uid, run.new.get(row.uid, ())) for row in run.rows)
        self.ask(lambda: self.policy.on_output(Output(step, tokens)))
        self.prune()

    def prune(self) -> None:
        """Forget steps that nothing late can name: every rank is past the program ``pp + 1`` steps later."""
        for step in list(self.steps):
            later = self.steps.get(step + self.config.pp + 1)
            if later is None or step + self.config.pp + 1 in self.queue:
                return
            if any(rank.executed < later.marks[rank.index] or rank.streams["counts"] for rank in self.ranks):
                return
            del self.steps[step]

    def _run(self, rank: int, stream: str, ops: int) -> None:
        left = ops or 1_000_000
        while left and self.verdict is None and self.head_blocked(rank, stream) is None:
            self.step_stream(self.ranks[rank], stream)
            left -= 1

    def step_stream(self, rank: Rank, stream: str) -> None:
        """The head of a stream executes."""
        op = rank.streams[stream].popleft()
        self.dirty.add("streams")
        self.emit(("exec", rank.index, stream, type(op).__name__))
        try:
            op.run(self, rank)
        except LookupError as error:  # it names a slot, a row, a step that is not there
            self.broken("policy_raises_no_error", f"rank {rank.index}, {op}: {crash(error)}")
        except PolicyError as error:
            self.broken("policy_raises_no_error", f"rank {rank.index}, {op}: {error}")
        rank.executed += stream == "main"

    def _report(self, name: str, way: str, rank: int) -> None:
        self.deliver_report(name, way, rank, ok=True)

    def _fail(self, name: str, way: str, rank: int) -> None:
        self.deliver_report(name, way, rank, ok=False)

    def deliver_report(self, name: str, way: str, rank: int, *, ok: bool) -> None:
        """A rank's report of a transfer reaches the scheduler."""
        transfer = self.reportable(name, way, rank)
        assert transfer is not None
        self.report(transfer, rank, ok=ok)

    def collect(self, rank: Rank, step: int) -> None:
        """All that has ended on the rank and was not reported is reported with the step's output."""
        self.steps[step].owed.discard(rank.index)
        for transfer in list(self.transfers.values()):
            if transfer.job in rank.ended and rank.index not in transfer.reported:
                self.report(transfer, rank.index, ok=True)

    def report(self, transfer: Transfer, rank: int, *, ok: bool) -> None:
        """One rank is done with a transfer."""
        transfer.reported.add(rank)
        self.witness("reports_of_two_ranks_cross", transfers.crosses(self, transfer, rank))
        self.witness("transfer_failed", not ok)
        self.lost_host += not ok
        if not ok:
            self.spoil(transfer, self.ranks[rank])
        if len(transfer.reported) == len(self.ranks):
            del self.transfers[transfer.job]
        self.ask(lambda: self.policy.on_report(transfer.job, rank, ok))

    def prepare(self, run: StepRun) -> None:
        """Fix the step's tokens."""
        forward.prepare(self, run)

    def spoil(self, transfer: Transfer, rank: Rank) -> None:
        """What a failed transfer was to bring is not there."""
        transfers.spoil(self, transfer, rank)

    def _work(self) -> None:
        moved = True
        while moved and self.verdict is None:
            moved = False
            for rank in self.ranks:
                while self.verdict is None and self.head_blocked(rank.index, "main") is None:
                    self.step_stream(rank, "main")
                    moved = True
            if self.verdict is None and self.output_due():
                self._output()
                moved = True

    def _drain(self) -> None:
        while self.verdict is None and self.progress():
            pass

    def progress(self) -> bool:
        """Whatever is in flight goes one round further; whether anything did.  Nothing is scheduled."""
        moved = False
        for rank in self.ranks:
            for stream in STREAMS:
                while self.verdict is None and self.head_blocked(rank.index, stream) is None:
                    self.step_stream(rank, stream)
                    moved = True
        for transfer in list(self.transfers.values()):
            for rank in self.ranks:
                if (
                    self.verdict is None
                    and transfer.job in rank.ended
                    and rank.index not in transfer.reported
                ):
                    self.deliver_report(transfer.uid[0], transfer.way, rank.index, ok=True)
                    moved = True
        if self.verdict is None and self.output_due():
            self._output()
            moved = True
        return moved

    def quiet(self) -> bool:
        """Make the choice ``quiet``; whether everything came to rest and nothing was left over."""
        self.choose(("quiet",))
        return self.verdict is None

    def _quiet(self) -> None:
        """The adversary goes quiet: everything runs, and the engine schedules until nothing is left.

        If it does not come to rest, or if something is left over, that is a verdict."""
        stood: Counter[str] = Counter()
        rounds, patience = 0, self.patience()
        while rounds < patience and max(stood.values(), default=0) < RETURNS:
            rounds += 1
            self._drain()
            if self.verdict or self.idle():
                break
            if rounds > LONG_PHASE:
                stood[self.standing()] += 1
            if len(self.queue) < self.depth:
                self._schedule()
                if not self.verdict:
                    self.check_state()
        if not self.verdict and not self.idle():
            self.check_state(everything=True)  # why it stands says more than that it stands
        if self.verdict:
            return
        stuck = sorted(str(r.uid) for r in self.book.live())
        self.judge(
            "everything_drains",
            True,
            self.idle(),
            lambda: f"after {rounds} rounds: {stuck or 'transfers'} left",
        )
        if not self.verdict:
            left = self.leftover()
            self.judge("nothing_left_when_idle", True, left is None, lambda: str(left))

    def patience(self) -> int:
        """Schedules after which a quiet engine that still has work is stuck.

        A token may need a step of its own that all stages and the queue have to pass; whoever is preempted
        begins again."""
        owed = sum(self.clients[one.uid].prompt + self.clients[one.uid].outputs for one in self.book.live())
        return QUIET_ROUNDS + (self.depth + self.config.pp) * owed

    def standing(self) -> str:
        """How far everybody has come, without step numbers and job ids: a run that stands where it stood has
        made no progress in between."""
        book = self.book
        return repr((
            sorted(
                (u, r.status, r.known, r.computed, r.hit, r.cols, len(r.flying))
                for u, r in book.requests.items()
            ),
            list(book.free), sorted(book.by_key),
            sorted((k, c.state, c.readers) for k, c in book.tier.items()),
            sorted((t.uid, t.way, sorted(t.reported)) for t in self.transfers.values()), len(self.queue),
            [[len(rank.streams[stream]) for stream in STREAMS] for rank in self.ranks],
        ))  # fmt: skip

    def leftover(self) -> str | None:
        """What an idle engine still holds.  Transfers, and with them fences, were over before it was idle."""
        holders = self.book.core.holders
        if holders:
            return f"blocks held: {dict(sorted(holders.items()))}"
        writing = [key for key, entry in self.book.tier.items() if entry.state == "writing" or entry.readers]
        return f"host chunks {writing} still written or read" if writing else None

    def idle(self) -> bool:
        """Nothing lives, flies, transfers or waits."""
        return not (
            self.book.requests
            or self.queue
            or self.transfers
            or self.book.core.jobs  # reported, and the report not counted yet
            or any(any(r.streams.values()) for r in self.ranks)
        )

    # -- asking the policy ---------------------------------------------------------------------------------
    def guard(self, question: Callable[[], Reply]) -> Reply | None:
        """Ask; an error that the policy raises is a verdict, be it one of its assertions or a crash."""
        self.tally["policy_raises_no_error"][1] += 1
        try:
            return question()
        except PolicyError as error:
            self.broken("policy_raises_no_error", str(error))
        except CRASHES as error:
            if type(error).__module__ != "builtins":
                raise  # somebody's own error, about something else
            self.broken("policy_raises_no_error", crash(error))
        return None

    def ask(self, question: Callable[[], Answer]) -> Answer | None:
        """Ask a question and apply the decisions of the answer, judging each."""
        answer = self.guard(question)
        if answer is None:
            return None
        for decision in answer.decisions:
            self.decide(decision)
            if self.verdict:
                return None
        return answer

    def decide(self, decision: Event) -> None:
        """One decision happens: the rules about it are judged, then the book applies it."""
        self.emit(decision)
        kind = decision[0]
        for rule in BY_DECISION.get(kind, ()):
            assert rule.judges is not None
            if rule.name not in self.off:
                rule.judges(self, decision)
        self.note(decision)
        broken = self.book.apply(decision)
        for name in CORE_RULES.get(kind, ()):
            self.judge(name, True, broken != name, lambda: f"{decision[0]} {decision[1:]}")
        self.dirty.update(PARTS.get(kind, ()))

    def note(self, decision: Event) -> None:
        """Ghost bookkeeping of decisions, and the witnesses that decisions make."""
        kind = decision[0]
        if kind == "alloc":
            self.handed_out[decision[4]] += 1
            self.lost_local += self.forgotten.pop(decision[4], 0) is None
        elif kind == "publish":
            self.published_in[decision[3]] = self.book.step + 1
        elif kind == "adopt":
            due = self.published_in.get(decision[4], 0)
            self.witness("hit_before_bytes", any(rank.forwarded < due for rank in self.ranks))
        elif kind == "move":
            self.witness("relocated_while_job_unreported", decision[5] in self.book.core.fences)
        elif kind == "job":
            job, way, uid, chunks = decision[1:]
            blocks = {b: self.handed_out[b] for _, _, subs in chunks for b in subs if b}
            self.transfers[job] = Transfer(job, way, uid, chunks, blocks)
            if way == "store":
                self.stored.update({place: (key, subs) for key, place, subs in chunks})
            self.witness("external_hit", way == "load")
        elif kind == "evict":
            self.forgotten[decision[1]] = None
        elif kind == "tier":
            taken = self.host_chunks_taken() + 1
            for client in self.clients.values():
                client.crowd = max(client.crowd, taken)
        elif kind == "look":
            self.looked.setdefault(decision[1], set()).add((decision[2], decision[4], decision[5]))
        elif kind == "preempt":
            client = self.clients[decision[1]]
            client.preempted_at, client.disturbed = self.book.requests[decision[1]].computed, True
            self.witness("preempted", True)
        elif kind == "start":
            client = self.clients[decision[1]]
            client.computed, client.given = decision[2], self.book.requests[client.uid].known
            if client.began_at < 0:
                client.began_at = decision[2]
            self.witness("resumed_on_shorter_hit", 0 < decision[2] < client.preempted_at)
            client.preempted_at = 0
        elif kind == "row":
            client = self.clients[decision[1]]
            self.row_now.append((decision[1], decision[2] < client.prompt))
            client.due = min(decision[2] + decision[3], self.book.requests[decision[1]].known)
        elif kind == "step":
            for uid, prefills in self.row_now if len(self.row_now) > 1 else ():
                self.clients[uid].shared |= prefills
            self.row_now.clear()
        elif kind == "finish":
            client = self.clients[decision[1]]
            if decision[2] != "length":
                self.finished[client.uid[0]] = tuple(self.book.requests[client.uid].tokens)
            else:
                # A later turn continues what the client was given, not what steps in flight go on sampling.
                if not client.disturbed and not client.reset:
                    self.kept[tuple(client.tokens[: client.prompt])] = client.uid
                self.finished[client.uid[0]] = tuple(client.tokens[: client.prompt + client.outputs])

    # -- slots ---------------------------------------------------------------------------------------------
    def slot_taken(self, rank: Rank, slot: int, uid: UserId) -> None:
        """Every rank keeps the same slots; the core follows rank 0."""
        self.emit(("take", rank.index, slot, uid))
        if rank.index == 0:
            broken = self.book.core.take(uid, slot)
            self.judge("slot_single_occupant", True, broken is None, lambda: f"slot {slot} taken by {uid}")

    def slot_left(self, rank: Rank, slot: int) -> None:
        """The request of a slot leaves it."""
        self.emit(("leave", rank.index, slot))
        if rank.index == 0:
            broken = self.book.core.leave(slot)
            self.judge("slot_single_occupant", True, broken is None, lambda: f"empty slot {slot} left")

    def slot_moved(self, rank: Rank, src: int, dst: int) -> None:
        """The v1 runner's batch rows move; an occupancy goes with its row."""
        if rank.index == 0:
            self.book.core.slots[dst] = self.book.core.slots.pop(src)

    def slot_swapped(self, rank: Rank, one: int, two: int) -> None:
        """Two batch rows change places."""
        if rank.index == 0:
            slots = self.book.core.slots
            slots[one], slots[two] = slots[two], slots[one]

    def late_row(self, step: int, index: int, slot: int, operand: TableRow) -> None:
        """A row of late post-processing on rank 0, whose slots the core follows: whose it was, how it finds
        its blocks."""
        row = self.steps[step].rows[index]
        occupant = self.book.core.slots.get(row.slot if slot < 0 else slot)
        if slot < 0:
            self.witness("post_process_due_after_slot_reuse", occupant is not None and occupant[0] != row.uid)
            self.tally["late_row_still_occupied"][0] += 1
            return
        self.judge(
            "late_kernel_reads_slot_rows",
            bool(self.mamba_groups),
            operand == Deref("source", slot),
            lambda: f"step {step}, {row.uid}: reads {operand}, its slot is {slot}",
        )
        self.judge(
            "late_row_still_occupied",
            True,
            occupant is not None and occupant[0] == row.uid,
            lambda: f"step {step}, {row.uid}: slot {slot} is now {occupant}",
        )

    def count_taken(self, step: int, row: int, count: int) -> None:
        """The host gives a batch row its accepted count (v1 runner)."""
        occupant = self.book.core.slots.get(row)
        if occupant is None:
            return
        run = self.steps.get(step)
        then = {r.uid: run.counts[r.slot] for r in run.rows} if run else {}
        want = then.get(occupant[0], 1)  # type: ignore[call-overload]
        self.judge(
            "accepted_count_belongs",
            occupant[0] in then,
            count == want,
            lambda: f"row {row}, {occupant[0]}: {count}, not {want}",
        )

    def wrote(self, rank: Rank, block: int, group: int, why: str) -> None:
        """A page was written."""
        self.emit(("write", rank.index, block, group, why))


def crash(error: Exception) -> str:
    """An error that nobody foresaw: what it is, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}, in {last.name} ({Path(last.filename).name}:{last.lineno})"


def table_columns(config: Config, group: int) -> int:
    """Columns of a worker's table row: all tokens that a request may have, drafts, and scratch columns."""
    block = config.groups[group].block_tokens
    return -(-(config.request_tokens + config.drafts) // block) + config.drafts + 1


#: decision kind -> state parts that it touches
PARTS: dict[str, tuple[str, ...]] = {
    "alloc": ("blocks", "tables"),
    "adopt": ("blocks", "tables"),
    "move": ("tables",),
    "drop": ("blocks", "tables"),
    "publish": ("keys",),
    "evict": ("keys",),
    "enqueue": ("requests",),
    "start": ("requests",),
    "row": ("requests",),
    "preempt": ("requests",),
    "tokens": ("requests",),
    "finish": ("requests",),
    "job": ("jobs",),
    "unfence": ("jobs",),
    "flush": ("jobs",),
    "tier": ("tier",),
    "step": ("steps",),
    "done": ("steps", "requests"),
}
