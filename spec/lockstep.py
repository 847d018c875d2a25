"""Lockstep: an implementation drives a world while its answers are judged and the reference follows.

``python -m spec.lockstep [--config NAME|FILE|--list] [--policy NAME] [--runs R] [--choices N] [--seed S]
[--json FILE]``

``World(config, lockstep(factory))`` runs the implementation's answers.  Each answer is judged by the
contract of its question on the view before it; then the reference, which has absorbed every earlier
answer, is asked the same question on the same view.  Differences are compared up to renaming of blocks,
transfers and host places, and classified:

* **same**: the reference takes the same decisions;
* **equally right**: the contract allows the answer; it decides otherwise than the reference;
* **stricter**: allowed, and wherever it differs it does less (fewer tokens, shorter hits, more flushes);
* **wrong**: the contract refuses it.

What is no decision cannot be absorbed: the reference forgets which chunks the other policy has offered to
a tier that has since evicted them, and would offer those again.  Differences are reported, not raised:
whether a wrong answer does harm is for the world's invariants to say.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from spec.book import Book
from spec.chains import Chains
from spec.config import Config, ConfigError, find, load, shipped
from spec.contracts import Question, SchedulerView, copy_book, follow
from spec.events import SCHEMA, Event
from spec.ops import Begin, Forward, UserId, Wait
from spec.outputs import check_target, set_aside, write_json
from spec.policies import PolicyFactory, PolicyNameError, resolve
from spec.policy import Answer, Arrival, Output, Policy, PolicyError, Program
from spec.rankview import RankView, StepOrders, follow_program, orders
from spec.reference import Reference
from spec.reference.plan import Message
from spec.usage import JSON_HELP, OneLineParser, command, natural
from spec.walk import Run, walk_once

SAME, EQUAL, STRICTER, WRONG = "same", "equally right", "stricter", "wrong"

#: fields that hold names which a policy is free to pick
_NAMES = {"b": "block", "src": "block", "dst": "block", "j": "job", "place": "place"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One question on which the implementation and the reference part, or which the contract refuses."""

    question: str
    kind: str
    text: str


def renamed(decisions: list[Event]) -> list[Event]:
    """Decisions with blocks, transfers and places numbered in the order of their first use."""
    names: dict[tuple[str, int], int] = {}

    def name(kind: str, value: int) -> int:
        return names.setdefault((kind, value), len(names)) if value else 0

    result: list[Event] = []
    for event in decisions:
        fields: list[Any] = [event[0]]
        for label, value in zip(SCHEMA[event[0]][1], event[1:], strict=True):
            if label in _NAMES:
                value = name(_NAMES[label], value)
            elif event[0] == "job" and label == "chunks":
                value = tuple(
                    (k, name("place", p), tuple(name("block", b) for b in subs)) for k, p, subs in value
                )
            fields.append(value)
        result.append(tuple(fields))
    return result


@dataclass(frozen=True, slots=True)
class Gains:
    """What an answer achieves, whatever names it uses.  ``more`` is what stricter answers have less of."""

    more: dict[str, dict[Any, int]]
    less: Counter[str]  # what stricter answers have more of

    @classmethod
    def of(cls, decisions: list[Event]) -> Gains:
        """Tokens scheduled, hits, keys published, chunks stored; flushes, deferrals, preemptions."""
        more: dict[str, dict[Any, int]] = {
            "row": {},
            "hit": {},
            "publish": {},
            "store": {},
            "load": {},
            "drop": {},
        }
        less: Counter[str] = Counter()
        for event in decisions:
            kind = event[0]
            if kind == "row":
                more[kind][event[1]] = event[3]
            elif kind == "hit":
                more[kind][event[1]] = event[3]
            elif kind == "publish":
                more[kind][event[2], event[4], event[5]] = 1
            elif kind == "drop":
                more[kind][event[1], event[2], event[3]] = 1
            elif kind == "job":
                more[event[2]].update({key: 1 for key, _, _ in event[4]})
            elif kind in ("flush", "defer", "preempt"):
                less[kind] += 1
        return cls(more, less)

    def compare(self, other: Gains) -> tuple[bool, list[str]]:
        """Whether this never does more than ``other``, and where the two differ."""
        stricter, texts = True, []
        for what, mine in self.more.items():
            theirs = other.more[what]
            for item in dict.fromkeys([*mine, *theirs]):
                one, two = mine.get(item, 0), theirs.get(item, 0)
                if one != two:
                    stricter &= one < two
                    texts.append(f"{what} {item}: {one}, reference {two}")
        for what in dict.fromkeys([*self.less, *other.less]):
            if self.less[what] != other.less[what]:
                stricter &= self.less[what] > other.less[what]
                texts.append(f"{self.less[what]} {what}, reference {other.less[what]}")
        return stricter, texts


def classify(own: list[Event], reference: list[Event], refused: str | None) -> tuple[str, str]:
    """The class of a difference and what it is."""
    if refused:
        return WRONG, refused
    if renamed(own) == renamed(reference):
        return SAME, ""
    stricter, texts = Gains.of(own).compare(Gains.of(reference))
    if not texts:
        return EQUAL, "the same decisions in another order, or about other columns"
    return (STRICTER if stricter else EQUAL), "; ".join(texts)


def program_gains(program: Program) -> tuple[Any, ...]:
    """What a worker program does, whatever slots and order it picks."""
    forwards = [
        sorted((row.uid, row.tokens, row.decode) for row in op.rows)
        for _, op in program
        if isinstance(op, Forward)
    ]
    waits = sorted(op.job for _, op in program if isinstance(op, Wait))
    return forwards, waits, sorted(op.job for _, op in program if isinstance(op, Begin))


@dataclass(slots=True)
class Lockstep:
    """A policy that passes questions on, judges the answers and lets the reference follow."""

    config: Config
    policy: Policy
    view: SchedulerView
    reference: Reference
    ranks: list[RankView]
    found: list[Difference] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (question, class) -> answers
    orders: StepOrders | None = None
    message: Message | None = None
    lost: str | None = None  # why the reference no longer follows: a wrong answer led it where it cannot be

    def ask(self, question: Question) -> Answer:
        """Pass a question on; judge, compare, follow."""
        answer: Answer = getattr(self.policy, question[0])(*question[1:])
        refused = follow(self.view, question, answer)
        want: list[Event] = []
        if self.lost is None:
            try:
                want = self.would_answer(question)
                self.message = self.reference.absorb(question, answer.decisions)
            except (PolicyError, KeyError, ValueError, IndexError, StopIteration) as error:
                if refused is None and not self.counts[question[0], WRONG]:
                    raise
                self.lost = f"after a refused answer to {question[0]}: {error!r}"
        kind, text = classify(answer.decisions, want, refused)
        self.note(question[0], kind if self.lost is None or refused else EQUAL, text)
        return answer

    def would_answer(self, question: Question) -> list[Event]:
        """The reference's answer to the question, without taking it."""
        ref = self.reference
        shared = (self.config, ref.book.chains, ref.decide, ref.workers)  # no question here changes these
        memo: dict[int, Any] = {id(one): one for one in shared} | {id(ref.book): copy_book(ref.book)}
        fork = deepcopy(ref, memo)
        answer: Answer = getattr(fork, question[0])(*question[1:])
        return answer.decisions

    def note(self, question: str, kind: str, text: str) -> None:
        """Count an answer; keep what differs."""
        self.counts[question, kind] += 1
        if kind != SAME:
            self.found.append(Difference(question, kind, text))

    # -- the seven questions -------------------------------------------------------------------------------
    def on_arrive(self, arrival: Arrival) -> Answer:
        """Passed on."""
        return self.ask(("on_arrive", arrival))

    def schedule(self) -> Answer:
        """Passed on; the step's orders are kept for the worker programs."""
        answer = self.ask(("schedule",))
        self.orders = orders(self.view, answer.decisions)
        return answer

    def worker_program(self, rank: int, message: Any) -> Program:
        """Passed on; the reference worker gets the message that the reference would have sent."""
        program = self.policy.worker_program(rank, message)
        assert self.orders is not None
        refused = follow_program(self.ranks[rank], self.orders, program)
        text = ""
        kind = WRONG if refused else SAME
        if self.lost is None and self.message is not None:
            own, want = (
                program_gains(program),
                program_gains(self.reference.worker_program(rank, self.message)),
            )
            if kind is SAME and own != want:
                kind, text = EQUAL, f"{own}, reference {want}"
        self.note("worker_program", kind, refused or text)
        return program

    def on_output(self, output: Output) -> Answer:
        """Passed on."""
        return self.ask(("on_output", output))

    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        """Passed on."""
        return self.ask(("on_report", job, rank, ok))

    def on_abort(self, uid: UserId) -> Answer:
        """Passed on."""
        return self.ask(("on_abort", uid))

    def on_reset(self, scope: str) -> Answer:
        """Passed on."""
        return self.ask(("on_reset", scope))


def lockstep(factory: PolicyFactory) -> Callable[[Config, Chains], Lockstep]:
    """A factory for ``World``: the implementation's policy in lockstep with the reference."""

    def make(config: Config, chains: Chains) -> Lockstep:
        return Lockstep(
            config,
            factory(config, chains),
            SchedulerView.of(config, Book.empty(config, chains)),
            Reference(config, chains),
            [RankView.of(config, rank) for rank in range(config.ranks)],
        )

    return make


# -- the command -----------------------------------------------------------------------------------------


def compare(config: Config, factory: PolicyFactory, *, runs: int, choices: int, seed: int) -> Summary:
    """Random walks of a policy in lockstep with the reference; what there is when somebody interrupts."""
    summary = Summary()
    try:
        for number in range(runs):
            run = walk_once(config, lockstep(factory), seed, number, choices)
            summary.add(run)
    except KeyboardInterrupt:
        summary.stopped = True
    return summary


@dataclass(slots=True)
class Summary:
    """Answers by question and class over some walks, an example of each, and the rules that broke."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    broken: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    stopped: bool = False

    def add(self, run: Run) -> None:
        """Count one walk."""
        policy = run.world.policy
        assert isinstance(policy, Lockstep)
        self.runs += 1
        self.counts.update(policy.counts)
        for difference in policy.found:
            self.examples.setdefault((difference.question, difference.kind), difference.text)
        if run.world.verdict:
            self.broken[run.world.verdict.rule] += 1

    def lines(self) -> list[str]:
        """One line a question and class."""
        return [
            f"{question:16} {kind:14} {count:6}  {self.examples.get((question, kind), '')[:160]}".rstrip()
            for (question, kind), count in sorted(self.counts.items())
        ]

    @property
    def wrong(self) -> int:
        """Answers that a contract refused."""
        return sum(count for (_, kind), count in self.counts.items() if kind == WRONG)


@command("spec.lockstep")
def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = OneLineParser(prog="python -m spec.lockstep", description=__doc__.splitlines()[0])
    parser.add_argument("--config", metavar="NAME|FILE", default="composed")
    parser.add_argument("--list", action="store_true", help="list the shipped configurations and stop")
    parser.add_argument(
        "--policy", metavar="NAME", default="reference", help="reference, fault:NAME, repaired:NAME"
    )
    parser.add_argument("--runs", type=int, metavar="R", default=20)
    parser.add_argument("--choices", type=int, metavar="N", default=200, help="choices a run")
    parser.add_argument("--seed", type=natural, metavar="S", default=0)
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    args = parser.parse_args(argv)
    if args.list:
        for name, path in shipped().items():
            print(f"{name:<24}{load(path).description}")
        return 0
    try:
        config, factory = find(args.config), resolve(args.policy)
        if min(args.runs, args.choices) < 1:
            raise ConfigError("--runs and --choices must be at least 1")
    except (ConfigError, PolicyNameError) as error:
        print(f"spec.lockstep: {error}", file=sys.stderr)
        return 2
    check_target("--json", args.json)
    out = set_aside(args.json)
    budget = f"{args.runs} runs x {args.choices} choices, seed {args.seed}"
    print(f"lockstep: {args.policy} beside the reference; {config.name}; {budget}")
    summary = compare(config, factory, runs=args.runs, choices=args.choices, seed=args.seed)
    print("\n".join(summary.lines()))
    if summary.broken:
        print(f"rules broken in the world: {dict(summary.broken)}")
    verdict, code = "holds", 0
    if summary.wrong or summary.broken:
        verdict, code = "refuted", 1
    elif summary.stopped:
        verdict, code = "undetermined", 3
    if summary.stopped:
        print(f"stopped after {summary.runs} of {args.runs} runs")
    print(f"verdict: {verdict} (sampled: {summary.wrong} answers refused)")
    rows = [
        {"question": q, "class": k, "answers": n, "example": summary.examples.get((q, k), "")}
        for (q, k), n in sorted(summary.counts.items())
    ]
    found = {"verdict": verdict, "answers": rows, "broken": dict(summary.broken), "stopped": summary.stopped}
    write_json(args.json, found, out)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
