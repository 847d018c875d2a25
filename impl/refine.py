"""Refinement: the implementation drives a world on real bytes; all that anyone reads is compared.

``python -m impl.refine [--device cpu|cuda] [--order turns|gated|free] [--kernels torch|triton] [--runs R]
[--choices N] [--seed S] [--config NAME|FILE|--all|--list] [--record FILE] [--replay FILE] [--json FILE]
[--poison]``

The implementation's answers are the policy's answers.  Host decisions are judged by the contracts and
compared with the reference (``spec.lockstep``).  Each operation that the world runs on its ghost is then
run on the rank's real memory, through the kernels, and what it read is compared with what the ghost says:
the bytes of every attended position, of every state that a forward goes on from, of every page that a
transfer delivered, of every block and host chunk that can still be found by a key when the run is over.
Token prefixes become bytes by the closed form of ``impl.model``.

**Order**: in *turns*, an operation runs when the world says so, and nothing overlaps (the CPU's default).
*gated*, operations are enqueued ahead on streams of their own, each behind a gate that the world's choices
open (the default on a CUDA device).  *free*, the device decides; the order is recorded, and each run is then
replayed gated, which must make the same choices and hold.  Without a CUDA device a seeded draw stands for
it.  See ``impl.streams``.

Without ``--config``, ``--all``, ``--runs`` and ``--choices`` every kind of choice and every witness of the
walk must be reached, else the verdict is undetermined.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from random import Random
from typing import Any

from impl import options

try:
    import torch
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    options.without_torch("impl.refine", options.refine())

from impl.decisions import Decisions
from impl.device import Device, Feed, Kernels, kernels_named
from impl.engine import Engine
from impl.lanes import Stuck
from impl.world import BYTES, CONTRACT, FORWARD_OVERLAPS_TRANSFER, Build, RealWorld
from spec import config as configs
from spec import handbook, reduce, script, trace
from spec.chains import Chains
from spec.config import Config, ConfigError
from spec.faults import own
from spec.lockstep import Lockstep
from spec.outputs import check_part, check_target, set_aside, write_json
from spec.trace import commit
from spec.usage import command
from spec.walk import COMPOSED, WEIGHTS, WITNESSES, Adversary, Options, counts_table, draw_options
from spec.world import Breach, Choice

__all__ = ["BYTES", "Build", "RealWorld"]

ORDERS = ("turns", "gated", "free")

MakeWorld = Callable[..., RealWorld]
"""Makes a world from a configuration and an implementation, with :class:`RealWorld`'s options."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """A :data:`Build` that counts how often each decision is asked that was put in the place of another."""

    decide: Decisions
    kernels: Kernels
    poison: bool
    device_type: Callable[..., Device]
    changes: dict[str, Any]
    asked: Counter[str]

    def __call__(self, config: Config, chains: Chains, feed: Feed) -> Engine:
        return Engine(
            config, chains, feed, decide=self.decide, kernels=self.kernels, poison=self.poison,
            device_type=self.device_type,
        )  # fmt: skip


def implementation(
    decide: Decisions | None = None,
    *,
    kernels: str = "torch",
    poison: bool = False,
    device_type: Callable[..., Device] = Device,
) -> Implementation:
    """The implementation with these decisions, on these kernels."""
    right, mine, asked = Decisions(), decide or Decisions(), Counter[str]()
    names = [one.name for one in fields(right) if getattr(mine, one.name) is not getattr(right, one.name)]
    changes = {name: getattr(mine, name) for name in names}
    counting = replace(mine, **own.counted(changes, asked))
    return Implementation(counting, kernels_named(kernels), poison, device_type, changes, asked)


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
    *, judged: bool = True, off: frozenset[str] = frozenset(), make: MakeWorld = RealWorld,
) -> Run:  # fmt: skip
    """One run: a busy phase of ``choices`` choices, then a quiet one.  Determined by its arguments, unless
    the device decides the order.

    ``judged``: by contracts and against the reference; ``off``: rules of the model that are not asked."""
    random = Random(f"{seed}/{config.name}/{number}")
    options = draw_options(config, random)
    adversary = Adversary(config, random, options)
    world = make(config, build, judged=judged, off=off)
    taken = draws = 0
    while taken < choices and world.verdict is None and draws < 40 * choices and not refusals(world):
        draws += 1
        choice = adversary.draw(world)
        taken += choice is not None and world.take(choice)
    world.come_to_rest()
    world.finish()
    return Run(config, number, options, world.made, world)


def replay(
    config: Config, build: Build, choices: Sequence[Choice], *, judged: bool = True,
    off: frozenset[str] = frozenset(), make: MakeWorld = RealWorld,
) -> Run:  # fmt: skip
    """These choices, as far as they are possible, then quiet."""
    world = make(config, build, judged=judged, off=off)
    for choice in (*choices, ("quiet",)):
        if not refusals(world):
            world.take(choice)
    world.finish()
    return Run(config, 0, draw_options(config, Random(0)), world.made, world)


def refusals(world: RealWorld) -> list[Breach]:
    """Answers that a contract refuses."""
    return [breach for breach in world.disciplines if breach.rule.startswith(CONTRACT)]


def failure(run: Run) -> tuple[str, str] | None:
    """(what broke, in words) if the run did not hold; a refused answer counts."""
    for breach in (*refusals(run.world), run.world.verdict):
        if breach:
            return breach.rule, breach.text
    return None


def reduced(run: Run, build: Build, rule: str, make: MakeWorld = RealWorld) -> reduce.Choices:
    """A shortest run that fails in the same way."""
    judged = rule.startswith(CONTRACT)
    return reduce.reduce_in(run.config, lambda: make(run.config, build, judged=judged), run.choices, rule)


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
    replayed: int = 0  # free runs whose recorded order held when it was replayed gated
    never_asked: list[str] = field(default_factory=list)  # decisions of one's own that no run needed
    failed: Run | None = None
    last: Run | None = None
    stopped: bool = False

    @property
    def verdict(self) -> str:
        """Refuted, undetermined (stopped, or a decision of one's own was never asked), or holds."""
        return "refuted" if self.failed else "undetermined" if self.stopped or self.never_asked else "holds"

    def add(self, run: Run) -> None:
        """Count one run."""
        world = run.world
        self.last = run
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
    make: MakeWorld = RealWorld,
    again: MakeWorld | None = None,
) -> Report:
    """Run each configuration ``runs`` times; stop at the first failure, or when interrupted.

    ``again``: each run is replayed in worlds of this kind, too.  A decision that was put in and that no run
    asked for has not been tried: it is listed in ``never_asked``."""
    report = Report()
    before = build.asked.copy() if isinstance(build, Implementation) else Counter[str]()
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        for number in range(runs):
            for config in todo:
                run = refine_once(config, build, seed, number, choices, make=make)
                report.add(run)
                if again and not report.failed:
                    repeat(run, build, report, again)
                report.seconds = time.perf_counter() - began
                report.cpu_seconds = time.process_time() - began_cpu
                if progress:
                    progress(report)
                if report.failed:
                    return report
    except KeyboardInterrupt:
        report.stopped = True
    if isinstance(build, Implementation):
        report.never_asked = own.never_asked(build.changes, build.asked - before, todo)
    return report


def repeat(run: Run, build: Build, report: Report, make: MakeWorld) -> None:
    """Replay a run that held: it must make the same choices, and hold."""
    second = replay(run.config, build, run.choices, make=make)
    if failure(second) is None and second.choices[: len(run.choices)] != run.choices:
        at = next(n for n, choice in enumerate(run.choices) if second.choices[n : n + 1] != [choice])
        second.world.broken(BYTES, f"choice {at}, {run.choices[at]}, was possible when it ran free only")
    report.replayed += failure(second) is None
    report.failed = second if failure(second) else None


# -- the command -------------------------------------------------------------------------------------------


def lines(report: Report, order: str) -> Iterator[str]:
    """The tables that end a refinement."""
    yield from counts_table(report.fired, report.witnesses, required(order))
    yield ""
    yield f"{'question':<18}{'against the reference':<24}{'answers':>9}  first example"
    for (question, kind), count in sorted(report.classes.items()):
        example = report.examples.get((question, kind), "")
        yield f"{question:<18}{kind:<24}{count:>9}  {example[:100]}".rstrip()
    if report.disciplines:
        yield f"\ndisciplines broken on the way: {dict(report.disciplines)}"


def required(order: str) -> tuple[str, ...]:
    """Witnesses that must be reached."""
    return (*WITNESSES, *(() if order == "turns" else (FORWARD_OVERLAPS_TRANSFER,)))


def unreached(report: Report, order: str) -> list[str]:
    """Kinds of choice and witnesses that no run has reached, of those that the order permits."""
    when = ("work", "drain") if order == "free" else ()  # the device decides when
    choices = [kind for kind in WEIGHTS if not report.fired[kind] and kind not in when]
    return choices + [name for name in required(order) if not report.witnesses[name]]


def show_failure(run: Run, build: Build, make: MakeWorld = RealWorld) -> Iterator[str]:
    """The reduced trace of a failed run, and where the values differ."""
    broken = failure(run)
    assert broken is not None
    rule, text = broken
    yield f"\nrefuted in run {run.number} of {run.config.name} ({run.options.line()}): {rule}"
    yield f"  {text}"
    try:
        short = reduced(run, build, rule, make)
    except ValueError:
        yield f"  not reproduced by its {len(run.choices)} choices alone"
        return
    world = make(run.config, build, record=True, judged=rule.startswith(CONTRACT))
    for choice in short:
        world.choose(choice)
    world.finish()
    yield f"  reduced to {len(short)} choices:"
    yield from (f"    {script.line(choice)}" for choice in short)
    again = failure(Run(run.config, run.number, run.options, list(short), world))
    yield f"  there: {again[1] if again else text}"


def as_json(report: Report, args: argparse.Namespace, verdict: str) -> dict[str, Any]:
    """The machine-readable report."""
    failed: dict[str, Any] | None = None
    if report.failed:
        rule, text = failure(report.failed) or ("", "")
        failed = {
            "config": report.failed.config.name, "run": report.failed.number, "rule": rule, "text": text,
            "options": asdict(report.failed.options), "choices": report.failed.choices,
        }  # fmt: skip
    return {
        "verdict": verdict, "seed": args.seed, "device": args.device, "order": args.order,
        "kernels": args.kernels, "runs": report.runs, "replayed": report.replayed,
        "runs_per_config": dict(report.per_config), "choices": report.choices, "events": report.events,
        "bytes_compared": report.bytes_compared, "seconds": round(report.seconds, 3),
        "cpu_seconds": round(report.cpu_seconds, 3),
        "fired": dict(report.fired),
        "witnesses": dict(report.witnesses), "disciplines": dict(report.disciplines),
        "differences": [[*which, count] for which, count in sorted(report.classes.items())],
        "failed": failed, "stopped": report.stopped,
    }  # fmt: skip


def machine() -> str:
    """Where this runs, the CUDA device included."""
    cuda = torch.cuda.is_available()
    return handbook.machine() + (f", {torch.cuda.get_device_name()}" if cuda else "")


def markdown(report: Report, args: argparse.Namespace, command: str, verdict: str) -> str:
    """The part of the documentation that this command records."""
    rate = max(report.cpu_seconds, 1e-9)
    least = min(report.per_config.values(), default=0)
    classes = [
        (f"`{question}`", kind, f"{count:,}") for (question, kind), count in sorted(report.classes.items())
    ]
    reached = [(f"`{name}`", f"{report.witnesses[name]:,}") for name in sorted(report.witnesses)]
    made = [(f"`{kind}`", f"{report.fired[kind]:,}") for kind in WEIGHTS]
    again = (
        f" {report.replayed:,} of them replayed gated: the same choices, and they hold."
        if args.order == "free"
        else ""
    )
    return (
        f"`{command}`\n\n"
        f"On {machine()}, commit {args.commit or commit() or 'unknown'}: {report.runs:,} runs of "
        f"{len(report.per_config)} configurations, at least {least} each; {report.choices:,} choices, "
        f"{report.events:,} events, {report.bytes_compared:,} bytes compared in {report.cpu_seconds:.0f} s "
        f"of processor time on one core ({report.seconds:.0f} s in all): {report.choices / rate:,.0f} "
        f"choices and {report.events / rate:,.0f} events a second of it.{again} "
        f"Verdict: {verdict} (sampled).\n\n"
        + handbook.table(("question", "against the reference", "answers"), classes)
        + "\n" + handbook.table(("choice", "made"), made)
        + "\n" + handbook.table(("witness", "reached"), reached)
    )  # fmt: skip


def configurations(args: argparse.Namespace) -> list[Config]:
    """What is to be refined; raises :class:`ConfigError` for bad options too."""
    for name, value in (("--runs", args.runs), ("--choices", args.choices)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.config and args.all:
        raise ConfigError("--all is every shipped configuration: leave out --config")
    if args.replay:
        given = ("config", "all", "runs", "choices")
        others = [f"--{option}" for option in given if getattr(args, option)]
        if others:
            raise ConfigError(f"--replay makes the choices of its trace alone: leave out {', '.join(others)}")
    place(args)
    names = args.config or (list(configs.shipped()) if args.all else COMPOSED)
    return [configs.find(name) for name in names]


def place(args: argparse.Namespace) -> None:
    """Check where to run, and fill in what was not said; raises :class:`ConfigError`."""
    if args.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {args.device!r}")
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    args.order = args.order or ("gated" if cuda else "turns")
    args.kernels = args.kernels or ("triton" if cuda else "torch")
    if args.order not in ORDERS:
        raise ConfigError(f"--order must be turns, gated or free, got {args.order!r}")
    if args.kernels not in ("torch", "triton"):
        raise ConfigError(f"--kernels must be torch or triton, got {args.kernels!r}")
    if cuda and args.order == "turns":
        raise ConfigError("--device cuda takes --order gated or free: in turns nothing overlaps")
    if cuda and args.order == "gated" and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
        raise ConfigError("--order gated needs the caching allocator (PYTORCH_NO_CUDA_MEMORY_CACHING is 1)")
    if cuda and args.kernels == "torch":
        raise ConfigError("--device cuda takes --kernels triton: the plain ones wait for the device")


def worlds(
    args: argparse.Namespace, device_type: type[Device] = Device
) -> tuple[MakeWorld, MakeWorld | None, Callable[..., Device]]:
    """The kind of world to run in, that in which each run is replayed, and what makes the devices."""
    if args.order == "turns":
        return RealWorld, None, device_type
    from impl.cuda import CACHING
    from impl.streams import Place

    where = Place(cuda=args.device == "cuda", seed=args.seed)
    free = args.order == "free"
    again = where.gated if free and (CACHING or args.device == "cpu") else None
    return where.free if free else where.gated, again, where.devices(device_type)


def part(args: argparse.Namespace) -> str:
    """The document's part that a run records."""
    return "refine" if args.order == "turns" else f"refine-{args.order}"


@command("impl.refine")
def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = options.refine().parse_args(argv)
    if args.list:
        for name, path in configs.shipped().items():
            print(f"{name:<24}{configs.load(path).description}")
        return 0
    try:
        todo = configurations(args)
        known = trace.read(args.replay) if args.replay else None
        make, again, device_type = worlds(args)
        build = implementation(kernels=args.kernels, poison=args.poison, device_type=device_type)
    except ModuleNotFoundError as absent:
        print(f"impl.refine: {absent.name} is not installed: pip install -e '.[kernels]'", file=sys.stderr)
        return 2
    except (ConfigError, trace.TraceError) as error:
        print(f"impl.refine: {error}", file=sys.stderr)
        return 2
    check_target("--json", args.json)
    check_target("--record", args.record)
    check_part("--markdown", args.markdown, part(args))
    out = set_aside(args.json)
    torch.set_num_threads(1)
    chosen = args.config or args.all or args.runs or args.choices or known
    runs, choices = args.runs or options.RUNS, args.choices or options.CHOICES
    where = f"{args.device}, {args.order}, {args.kernels} kernels"
    if known:
        print(f"refine: {known.header.config.name}; {where}; the choices of {args.replay}")
    else:
        print(
            f"refine: {', '.join(c.name for c in todo)}; {where}; seed {args.seed}; "
            f"{runs} runs x {choices} choices"
        )
    last = [0.0]

    def progress(report: Report) -> None:
        if report.seconds - last[0] > 5:
            last[0] = report.seconds
            print(f"  {report.runs} runs, {report.choices} choices, {report.events} events", flush=True)

    try:
        if known:
            report = Report()
            report.add(replay(known.header.config, build, known.choices, make=make))
        else:
            report = refine(
                todo, build, runs=runs, choices=choices, seed=args.seed, progress=progress, make=make,
                again=again,
            )  # fmt: skip
    except Stuck as stuck:
        print(f"impl.refine: {stuck}", file=sys.stderr)
        return 1
    print("\n" + "\n".join(lines(report, args.order)))
    rate = max(report.cpu_seconds, 1e-9)
    print(
        f"\n{report.runs} runs, {report.choices} choices, {report.events} events, "
        f"{report.bytes_compared} bytes compared in {report.seconds:.1f} s, {report.cpu_seconds:.1f} s of "
        f"one core: {report.choices / rate:,.0f} choices/s, {report.events / rate:,.0f} events/s"
    )
    if again:
        print(f"{report.replayed} of {report.runs} runs replayed gated: the same choices, and they hold")
    verdict, code = "holds", 0
    missing = [] if chosen else unreached(report, args.order)
    if report.failed:
        verdict, code = "refuted", 1
        print("\n".join(show_failure(report.failed, build, again or make)))
    elif report.stopped:
        verdict, code = "undetermined", 3
        print("\nstopped before the budget was spent")
    elif missing:
        verdict, code = "undetermined", 3
        print(f"\nnot reached: {', '.join(missing)}")
    print(f"\nverdict: {verdict} (sampled: {report.runs} runs)")
    given = "".join(f" {word}" for word in (argv if argv is not None else sys.argv[1:]))
    kept = report.failed or report.last
    write_json(args.json, as_json(report, args, verdict), out)
    if args.record and kept:
        trace.write_run(args.record, kept.config, "reference", kept.choices, note=f"impl.refine{given}")
        print(f"run {kept.number} of {kept.config.name} written to {args.record}")
    if args.markdown and not report.stopped:
        words = markdown(report, args, f"python -m impl.refine{given}", verdict)
        handbook.record(args.markdown, part(args), words)
    return code


if __name__ == "__main__":
    sys.exit(main())
