"""Hunting a fault of somebody's own file: where it says, in variants of that, and whether it is to blame."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from spec import config as configs
from spec.config import Config
from spec.faults import own
from spec.faults.fault import Fault
from spec.faults.guard import guarded, policy_of
from spec.faults.hunt import Hunt, find, show_run
from spec.faults.idle import does_nothing_else
from spec.faults.variants import variants
from spec.outputs import write_json
from spec.ownfile import OwnFileError
from spec.reduce import reduce, replay
from spec.walk import PolicyFactory
from spec.world import crash

COMPARED_RUNS = 50  # of a configuration, in which a tamper is compared with the design without it


@dataclass(frozen=True, slots=True)
class Ground:
    """A configuration to hunt in, how it is told, and how many runs it gets."""

    title: str
    config: Config
    runs: int


@dataclass(slots=True)
class Search:
    """A hunt of a file: what it hunts with, and what it has found so far."""

    path: str
    fault: Fault  # its own decisions watched
    args: argparse.Namespace
    asked: Counter[str]
    policy: PolicyFactory  # guarded, as are the others
    without: PolicyFactory
    hits: list[tuple[Hunt, Ground]] = field(default_factory=list)
    broken_without: list[str] = field(default_factory=list)  # grounds where the design breaks by itself
    stopped: bool = False

    @property
    def excused(self) -> list[str]:
        """Configurations of the file in which the design without the fault broke as well: not tried."""
        return [title for title in self.broken_without if title in self.fault.bites]

    @property
    def seeds(self) -> Sequence[int]:
        """Where its walks begin."""
        return range(self.args.seed, self.args.seed + self.args.seeds)


def hunt_file(path: str, args: argparse.Namespace) -> int:
    """Hunt somebody's own fault: 1 with a counterexample; 3 if no run asked for a decision of it, if all
    answers of one or all that a tamper did were the reference's, if the design without the fault broke as
    well, or if the hunt was stopped; else 0.

    Raises :class:`~spec.ownfile.OwnFileError`."""
    plain, asked, differed = own.load(path), Counter[str](), Counter[str]()
    fault = own.watched(plain, path, asked, differed)
    search = Search(path, fault, args, asked, policy_of(fault, path), guarded(fault.repaired, path))
    named = [Ground(name, configs.find(name), args.runs) for name in fault.bites]
    without, tampers = "", True
    tried = (asked, differed)
    try:
        hunt_on(search, named)
        tried = (
            asked.copy(),
            differed.copy(),
        )  # not by variants: they have too few runs to say that it holds
        hunt_on(search, varied(named))
        if fault.tamper and not search.hits and does_nothing_else(
            [one.config for one in named], policy_of(plain, path),
            policy_of(replace(plain, tamper=None), path), runs=min(COMPARED_RUNS, args.runs),
            choices=args.choices, seed=args.seed,
        ):  # fmt: skip
            tampers = False
        untried = own.never_asked(fault.change, tried[0], [one.config for one in named])
        if untried or own.never_differed(plain, tried[1]) or not tampers:
            hunt_on(search, shipped_others(named))
    except KeyboardInterrupt:
        search.stopped = True
    outcome, ground = min(search.hits, key=lambda hit: len(hit[0].choices), default=(Hunt(fault.name), None))
    try:
        if ground:
            show_hit(search, outcome, ground)
            without = "" if search.stopped else tried_without(search, outcome, ground)
            print(f"\nwithout the fault: {without or 'not tried'}")
    except KeyboardInterrupt:
        search.stopped = True
    if search.stopped:
        print("stopped before the budget was spent")
    counts = (asked, differed) if ground else tried
    idle = own.never_asked(fault.change, counts[0], [one.config for one in (*named, *filter(None, [ground]))])
    alike = [name for name in own.never_differed(plain, counts[1]) if name not in idle]
    alike += ["tamper"] * (not tampers)
    undecided = idle or alike or search.excused or search.stopped
    verdict = "refuted" if ground else "undetermined" if undecided else "holds"
    why = {"holds": " (sampled, not proved)", "undetermined": why_undetermined(search, idle, alike)}
    print(f"verdict: {verdict}{why.get(verdict, '')}")
    record = {
        "command": args.command, "file": path, "verdict": verdict, "seed": args.seed, "seeds": args.seeds,
        "runs": args.runs, "choices": args.choices, "never_asked": idle, "never_differed": alike,
        "broken_without": search.broken_without, "stopped": search.stopped, "without_the_fault": without,
        "configuration": configs.dump(ground.config) if ground else "", "hunt": asdict(outcome),
    }  # fmt: skip
    write_json(args.json, record, args.out)
    return {"refuted": 1, "undetermined": 3, "holds": 0}[verdict]


def why_undetermined(search: Search, idle: Sequence[str], alike: Sequence[str]) -> str:
    """What was not tried, and what to do about it; nothing if the hunt was only stopped."""
    reasons = [f"never asked: {', '.join(idle)}"] * bool(idle)
    decisions = ", ".join(name for name in alike if name != "tamper")
    reasons += [f"every answer was the reference's: {decisions}"] * bool(decisions)
    runs = min(COMPARED_RUNS, search.args.runs)
    reasons += [f"in {runs} runs of each configuration the tamper changed nothing"] * ("tamper" in alike)
    advice = ["name a configuration that needs it"] * bool(reasons)
    if search.excused:
        reasons.append(f"without the fault it breaks too: {', '.join(search.excused)}")
        advice.append("mend base, or name others")
    return f" ({'; '.join((*reasons, *advice))})" if reasons else ""


def varied(named: Sequence[Ground]) -> list[Ground]:
    """Variants of the configurations, which together get as many runs as these."""
    found: dict[Config, str] = {}
    for one in named:
        found |= {config: title for title, config in variants(one.config) if config not in found}
    total = sum(one.runs for one in named)
    each = max(1, total // max(1, len(found)))
    return [Ground(title, config, each) for config, title in list(found.items())[:total]]


def shipped_others(named: Sequence[Ground]) -> list[Ground]:
    """The other shipped configurations, for a fault that the file's own do not put to the test; together
    they get as many runs as these."""
    others = [name for name in configs.shipped() if name not in {one.config.name for one in named}]
    each = max(1, sum(one.runs for one in named) // len(others))
    return [Ground(name, configs.named(name), each) for name in others]


def hunt_on(search: Search, grounds: Sequence[Ground]) -> None:
    """Hunt in one after the other until something is found, telling of each in which nothing was."""
    seeds = search.seeds
    told = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    for ground in grounds:
        if search.hits:
            return
        before, broken = search.asked.copy(), len(search.broken_without)
        for hit in found_in(search, ground):
            search.hits.append((hit, ground))
        if search.hits or len(search.broken_without) > broken:
            continue
        idle = own.never_asked(search.fault.change, search.asked - before, [ground.config])
        print(
            f"{search.fault.name}: not refuted in {ground.title} "
            f"({ground.runs} runs of {search.args.choices} choices, {told})"
            + "".join(f"; {decision} was never asked" for decision in idle)
        )


def found_in(search: Search, ground: Ground) -> Iterator[Hunt]:
    """The shortened runs that refute a fault of a file in one configuration, at most one a seed; runs in
    which the design without the fault breaks as well are told, and are none.

    Raises :class:`~spec.ownfile.OwnFileError`."""
    fault, config, policy = search.fault, ground.config, search.policy
    for seed in search.seeds:
        try:
            found = find(config, policy, runs=ground.runs, choices=search.args.choices, seed=seed)
        except OwnFileError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the world cannot cope with comes from the file
            raise OwnFileError(
                f"{search.path}: what its policy answers or enqueues cannot happen: {crash(error)}"
            ) from None
        if found is None:
            continue
        breach = found.breach
        try:
            short = reduce(config, policy, found.choices, breach.rule)
        except ValueError:
            raise OwnFileError(
                f"{search.path}: the same run gives another result the second time: its functions must not "
                "draw numbers or remember anything"
            ) from None
        if replay(config, search.without, short).verdict:
            search.broken_without.append(ground.title)
            print(
                f"{fault.name}: breaks {breach.rule} in {ground.title}, and so does the design without the "
                "fault, in the same run: not the fault's doing"
            )
            return
        yield Hunt(
            fault.name, config.name, breach.rule, breach.text, choices=short, runs=found.runs,
            seconds=found.seconds,
        )  # fmt: skip


def show_hit(search: Search, outcome: Hunt, ground: Ground) -> None:
    """Print the shortest run of those that were found, and the configuration if the file does not name it."""
    others = ", ".join(str(len(hit.choices)) for hit, _ in search.hits)
    among = f"; the shortest of {len(search.hits)} seeds' runs ({others} choices)"
    print(
        f"refuted: {search.fault.name} in {ground.title}, found in run {outcome.runs} "
        f"({outcome.seconds:.2f} s){among if len(search.hits) > 1 else ''}"
    )
    if ground.title not in search.fault.bites:
        print(f"\nthe configuration, for a file to name in bites:\n\n{configs.dump(ground.config)}")
    show_run(search.fault, ground.config, outcome.choices)


def tried_without(search: Search, outcome: Hunt, ground: Ground) -> str:
    """What the repaired twin does in a few runs of its own, having held in the same run: what breaks there is
    not the fault's doing."""
    runs = max(20, search.args.runs // 16)
    again = find(ground.config, search.without, runs=runs, choices=search.args.choices, seed=search.args.seed)
    return (
        f"holds in the same run, but breaks {again.breach.rule} in one of {runs} runs of its own: "
        f"{again.breach.text}"
        if again
        else f"holds in the same run and in {runs} of its own"
    )
