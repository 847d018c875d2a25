"""A bare random walker: the fast way to drive a world, with swarm options, a quiet phase and a witness table.

``python -m spec.walk [--config NAME|FILE|--list] [--policy NAME] [--runs R] [--choices N] [--seed S]
[--json FILE] [--record FILE] [--markdown FILE]``

Each run draws *options* (swarm testing: some kinds of choice off, some weighted up, prompts short or long),
makes choices among those that are possible, then goes quiet: everything in flight must drain and every
request finish.  The same seed gives the same choices in any process.  Without ``--config``, ``--runs`` and
``--choices`` the composed configurations are walked; every witness of :data:`WITNESSES` must be reached and
every rule tried, else the verdict is undetermined.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from spec import config as configs
from spec.chains import Chains
from spec.config import Config, ConfigError
from spec.outputs import check_part, check_target, set_aside, write_json
from spec.policy import Policy
from spec.rules import RULES
from spec.usage import JSON_HELP, OneLineParser, command, natural
from spec.world import STREAMS, Breach, Choice, World

PolicyFactory = Callable[[Config, Chains], Policy]

COMPOSED = (
    "composed", "composed-sync", "composed-pp4", "composed-tight", "composed-wide", "composed-v1",
    "composed-v1-pp2",
)  # fmt: skip

#: what a live walk must reach, and why it is worth reaching
WITNESSES = {
    "store_reads_reallocated_source": "a store reads its source after the block was handed out again and "
    "before it was overwritten",
    "reports_of_two_ranks_cross": "two ranks report two transfers in opposite orders",
    "post_process_due_after_slot_reuse": "a post-process comes due, masked, after its slot was taken by "
    "another request",
    "hit_before_bytes": "a hit is adopted before its bytes exist",
    "load_lands_after_abort": "a load lands after its request was aborted",
    "same_id_back_before_late_report": "the same id is back before a late report of its earlier life",
    "crossing_with_accepted_offset": "a boundary is crossed in the middle of the accepted tokens",
    "relocated_while_job_unreported": "a scratch block is relocated while a transfer on it is unreported",
    "resumed_on_shorter_hit": "a preempted request resumes on a shorter prefix than it had",
}
NAMES = ("r1", "r2", "r3", "r4")
WEIGHTS = {
    "arrive": 12, "accept": 5, "abort": 2, "reset": 1, "schedule": 22, "output": 14, "run": 34, "report": 12,
    "fail": 1, "work": 8, "drain": 4,
}  # fmt: skip
OPTIONAL = ("accept", "abort", "reset", "fail", "drain", "work", "report")


@dataclass(frozen=True, slots=True)
class Options:
    """What one run's adversary likes to do."""

    weights: tuple[tuple[str, int], ...]
    longest_prompt: int
    longest_output: int
    families: tuple[str, ...]
    names: tuple[str, ...]
    whole_streams: int  # percent of ``run`` choices that go on until the stream blocks
    slow: tuple[int, str] | None  # a rank's stream that is left behind most of the time

    def line(self) -> str:
        """One printable line."""
        off = [kind for kind, weight in self.weights if not weight]
        strong = [kind for kind, weight in self.weights if weight > 2 * WEIGHTS[kind]]
        return (
            f"off {','.join(off) or '-'}; strong {','.join(strong) or '-'}; prompt <= {self.longest_prompt}, "
            f"output <= {self.longest_output}; families {','.join(self.families)}; names {len(self.names)}; "
            f"whole streams {self.whole_streams}%; "
            + (f"slow rank {self.slow[0]} {self.slow[1]}" if self.slow else "slow -")
        )


def lagging(config: Config, random: Random) -> Options:
    """Options of a run in which one rank's main stream lags behind while prompts of different families come:
    blocks change hands between what is scheduled and what has run.  Half the time nothing else disturbs."""
    weights = WEIGHTS | {"work": 0, "drain": 0, "arrive": 25}
    if random.random() < 0.5:
        weights |= {"accept": 0, "abort": 0, "reset": 0, "fail": 0}
    return Options(
        tuple(weights.items()),
        max(1, config.request_tokens - 2),
        3,
        ("0", "1", "2"),
        NAMES,
        95,
        (random.randrange(config.ranks), "main"),
    )


def draw_options(config: Config, random: Random) -> Options:
    """Options of one run."""
    weights = {}
    for kind, weight in WEIGHTS.items():
        roll = random.random()
        if kind in OPTIONAL and roll < 0.2:
            weight = 0
        elif roll > 0.85:
            weight *= 3
        weights[kind] = weight
    apart = Random(roll)  # so that the other runs stay what they are
    if apart.random() < 0.125:
        return lagging(config, apart)
    slow = random.choice((None, (random.randrange(config.ranks), random.choice(STREAMS[:3]))))
    if slow:
        weights["drain"] = 0  # would catch it up
        if slow[1] == "main":
            weights["work"] = 0
    longest = max(1, config.request_tokens - 1)
    return Options(
        tuple(weights.items()),
        random.choice((max(1, longest // 3), max(1, longest * 2 // 3), longest)),
        random.choice((2, 5, max(1, longest // 2))),
        random.choice((("0",), ("0", "1"), ("0", "1", "2", "3"), ("0", "r1", "r2"))),
        NAMES[: random.randint(1, len(NAMES))],
        random.choice((30, 60, 95)),
        slow,
    )


class Adversary:
    """Draws possible choices by role."""

    def __init__(self, config: Config, random: Random, options: Options) -> None:
        self.config, self.random, self.options = config, random, options
        self.kinds = [kind for kind, weight in options.weights for _ in range(weight)]
        self.sent: list[tuple[str, int, int]] = []  # prompts of this run: family, tokens, outputs

    def draw(self, world: World) -> Choice | None:
        """A choice that is possible now, or None if this draw found none."""
        random = self.random
        kind = self.kinds[int(random.random() * len(self.kinds))]
        if kind == "run":
            ready = [
                (rank, stream)
                for rank in range(len(world.ranks))
                for stream in STREAMS
                if world.ranks[rank].streams[stream] and world.head_blocked(rank, stream) is None
            ]
            if not ready:
                return None
            rank, stream = random.choice(ready)
            if (rank, stream) == self.options.slow and random.random() < 0.9:
                return None
            return (
                kind,
                rank,
                stream,
                0 if random.random() * 100 < self.options.whole_streams else random.randint(1, 3),
            )
        if kind in ("report", "fail"):
            ended = [
                (transfer.uid[0], transfer.way, rank.index)
                for transfer in world.transfers.values()
                for rank in world.ranks
                if transfer.job in rank.ended and rank.index not in transfer.reported
            ]
            return (kind, *random.choice(ended)) if ended else None
        if kind == "arrive":
            name = random.choice(self.options.names)
            if self.sent and random.random() < 0.3:  # clients repeat themselves
                return (kind, name, *random.choice(self.sent))
            family = random.choice(self.options.families)
            prompt = random.randint(1, self.options.longest_prompt)
            output = random.randint(1, self.options.longest_output)
            if family not in NAMES:
                self.sent.append((family, prompt, output))
            return (kind, name, family, prompt, output)
        if kind == "accept":
            return (kind, random.choice(self.options.names), random.randint(0, self.config.drafts))
        if kind == "abort":
            return (kind, random.choice(self.options.names))
        if kind == "reset":
            return (kind, random.choice(("local", "local", "all")))
        return (kind,)


@dataclass(slots=True)
class Run:
    """One finished run."""

    config: Config
    number: int
    options: Options
    choices: list[Choice]
    world: World


def walk_once(
    config: Config, policy: PolicyFactory, seed: int, number: int, choices: int, *, record: bool = False
) -> Run:
    """One run: a busy phase of ``choices`` choices, then a quiet one.  Determined by its arguments."""
    random = Random(f"{seed}/{config.name}/{number}")
    options = draw_options(config, random)
    adversary = Adversary(config, random, options)
    world = World(config, policy, record=record)
    made = driven(world, adversary, choices)
    return Run(config, number, options, made, world)


def driven(world: World, adversary: Adversary, choices: int) -> list[Choice]:
    """Let an adversary make so many choices in a fresh world, then go quiet; the choices that were made."""
    made: list[Choice] = []
    draws = 0
    while len(made) < choices and world.verdict is None and draws < 40 * choices:
        draws += 1
        choice = adversary.draw(world)
        if choice is not None and world.choose(choice):
            made.append(choice)
    if world.choose(("quiet",)):
        made.append(("quiet",))
    return made


@dataclass(slots=True)
class Report:
    """What all runs of a walk add up to."""

    runs: int = 0
    choices: int = 0
    events: int = 0
    seconds: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    tally: dict[str, list[int]] = field(default_factory=lambda: {rule.name: [0, 0] for rule in RULES})
    witnesses: Counter[str] = field(default_factory=Counter)
    disciplines: Counter[str] = field(default_factory=Counter)
    failed: Run | None = None
    stopped: bool = False

    def add(self, run: Run) -> None:
        """Count one run."""
        world = run.world
        self.runs += 1
        self.choices += world.choices
        self.events += world.count
        self.fired.update(world.fired)
        self.witnesses.update(world.witnesses)
        self.disciplines.update(breach.rule for breach in world.disciplines)
        for name, (no, yes) in world.tally.items():
            self.tally[name][0] += no
            self.tally[name][1] += yes
        if world.verdict:
            self.failed = run


def walk(
    todo: list[Config],
    policy: PolicyFactory,
    *,
    runs: int,
    choices: int,
    seed: int,
    progress: Callable[[Report, Run], None] | None = None,
) -> Report:
    """Walk each configuration ``runs`` times; stop at the first verdict, or when interrupted."""
    report = Report()
    began = time.perf_counter()
    try:
        for config, number in ((config, number) for number in range(runs) for config in todo):
            run = walk_once(config, policy, seed, number, choices)
            report.add(run)
            report.seconds = time.perf_counter() - began
            if progress:
                progress(report, run)
            if report.failed:
                break
    except KeyboardInterrupt:
        report.stopped = True
    return report


# -- the command -------------------------------------------------------------------------------------------


def counts_table(
    fired: Counter[str], witnesses: Counter[str], required: Collection[str] = tuple(WITNESSES)
) -> Iterator[str]:
    """How often each kind of choice was made and each witness was reached, of one run or of many."""
    yield f"{'choice':<38}{'made':>10}"
    for kind in WEIGHTS:
        yield f"{kind:<38}{fired[kind]:>10}"
    yield ""
    yield f"{'witness':<38}{'reached':>10}"
    for name in sorted({*required, *witnesses}):
        mark = "" if name in required else "  (not required)"
        yield f"{name:<38}{witnesses[name]:>10}{mark}"


def table(report: Report) -> Iterator[str]:
    """The tables that end a walk: choices and witnesses, then antecedents."""
    yield from counts_table(report.fired, report.witnesses)
    yield ""
    yield f"{'invariant':<38}{'kind':<13}{'applied':>10}{'did not':>10}"
    for rule in RULES:
        no, yes = report.tally[rule.name]
        yield f"{rule.name:<38}{rule.kind:<13}{yes:>10}{no:>10}"


def untried(report: Report) -> list[str]:
    """Rules that never said anything; and those that are asked in states where they may be silent, and never
    were."""
    return [
        rule.name
        for rule in RULES
        if 0 in (report.tally[rule.name] if rule.applies is not None else report.tally[rule.name][1:])
    ]


def as_json(report: Report, seed: int, verdict: str) -> dict[str, Any]:
    """The machine-readable report."""
    failed: dict[str, Any] | None = None
    if report.failed and report.failed.world.verdict:
        failed = {
            "config": report.failed.config.name,
            "run": report.failed.number,
            "options": asdict(report.failed.options),
            "breach": asdict(report.failed.world.verdict),
            "choices": report.failed.choices,
        }
    return {
        "verdict": verdict, "seed": seed, "runs": report.runs, "choices": report.choices, "events":
        report.events, "seconds": round(report.seconds, 3), "fired": dict(report.fired), "antecedents":
        report.tally, "witnesses": dict(report.witnesses), "disciplines": dict(report.disciplines),
        "failed": failed, "stopped": report.stopped,
    }  # fmt: skip


def describe(breach: Breach) -> str:
    """One line for a broken invariant."""
    return f"{breach.kind} {breach.rule}: {breach.text}"


def parser() -> OneLineParser:
    """The command's options."""
    made = OneLineParser(prog="python -m spec.walk", description=__doc__.splitlines()[0])
    made.add_argument(
        "--config", metavar="NAME|FILE", action="append", help="default: the composed configurations"
    )
    made.add_argument("--list", action="store_true", help="list the shipped configurations and stop")
    made.add_argument(
        "--policy", metavar="NAME", default="reference", help="reference, fault:NAME, repaired:NAME"
    )
    made.add_argument("--runs", type=int, metavar="R", help="runs a configuration (default 120)")
    made.add_argument("--choices", type=int, metavar="N", help="choices a run (default 250)")
    made.add_argument("--seed", type=natural, default=0, metavar="S")
    made.add_argument("--json", metavar="FILE", help=JSON_HELP)
    made.add_argument(
        "--record", metavar="FILE", help="write the trace of the run that broke, else of the last run"
    )
    made.add_argument("--markdown", metavar="FILE", help="write the tables into the document's part 'walk'")
    made.add_argument("--verbose", action="store_true", help="print every run's options")
    return made


@command("spec.walk")
def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = parser().parse_args(argv)
    if args.list:
        for name, path in configs.shipped().items():
            print(f"{name:<24}{configs.load(path).description}")
        return 0
    from spec.policies import PolicyNameError, resolve

    try:
        todo = [configs.find(name) for name in args.config or COMPOSED]
        policy = resolve(args.policy)
        for name, value in (("--runs", args.runs), ("--choices", args.choices)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
    except (ConfigError, PolicyNameError) as error:
        print(f"spec.walk: {error}", file=sys.stderr)
        return 2
    check_target("--json", args.json)
    check_target("--record", args.record)
    check_part("--markdown", args.markdown, "walk")
    out = set_aside(args.json)
    judged = args.config is None and args.runs is None and args.choices is None and args.policy == "reference"
    runs, choices = args.runs or 120, args.choices or 250
    print(
        f"walk: {', '.join(c.name for c in todo)}; policy {args.policy}; seed {args.seed}; "
        f"{runs} runs x {choices} choices"
    )
    last = [0.0]

    def progress(report: Report, run: Run) -> None:
        if args.verbose or runs * len(todo) <= 12:
            print(f"  run {run.number} of {run.config.name}: {run.options.line()}")
        elif report.seconds - last[0] > 5:
            last[0] = report.seconds
            print(f"  {report.runs} runs, {report.choices} choices; now: {run.options.line()}", flush=True)

    report = walk(todo, policy, runs=runs, choices=choices, seed=args.seed, progress=progress)
    print()
    print("\n".join(table(report)))
    rate = max(report.seconds, 1e-9)
    print(
        f"\n{report.runs} runs, {report.choices} choices, {report.events} events in {report.seconds:.1f} s: "
        f"{report.choices / rate:,.0f} choices/s, {report.events / rate:,.0f} events/s"
    )
    verdict, code = "holds", 0
    missing = [name for name in WITNESSES if not report.witnesses[name]]
    idle = untried(report)
    if report.failed and report.failed.world.verdict:
        run = report.failed
        verdict, code = "refuted", 1
        print(
            f"\nrefuted in run {run.number} of {run.config.name} ({run.options.line()}) "
            f"after {len(run.choices)} choices"
        )
        print("  " + describe(report.failed.world.verdict))
        for breach in run.world.disciplines:
            print("  on the way: " + describe(breach))
    elif report.stopped:
        verdict, code = "undetermined", 3
        print("\nstopped before the budget was spent")
    elif judged and (missing or idle):
        verdict, code = "undetermined", 3
        print(
            f"\nwitnesses not reached: {', '.join(missing) or '-'}; rules not tried: {', '.join(idle) or '-'}"
        )
    if report.disciplines and not report.failed:
        print(f"\ndisciplines broken on the way: {dict(report.disciplines)}")
    print(f"\nverdict: {verdict} (sampled: {report.runs} runs)")
    write_json(args.json, as_json(report, args.seed, verdict), out)
    if args.markdown and not report.stopped:
        from spec.handbook import write_walk

        given = "".join(f" {word}" for word in (argv if argv is not None else sys.argv[1:]))
        write_walk(args.markdown, report, f"python -m spec.walk{given}", verdict)
    if args.record:
        run = report.failed or walk_once(todo[-1], policy, args.seed, runs - 1, choices)
        from spec.trace import write_run

        write_run(args.record, run.config, args.policy, run.choices)
        print(f"trace written to {args.record}")
    return code


if __name__ == "__main__":
    sys.exit(main())
