"""The catalogue at work: ``python -m spec.faults list | show NAME | hunt ... | table | check``.

``hunt`` judges the expectations of catalogue entries and exits 0 when all are met, 1 when one failed, 3 when
something was not found within the budget.  On a file of your own it exits 1 with the counterexample it found,
3 if what the file replaces or tampers with never did anything else than the reference, or if the design
without the fault broke as well, else 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path

from spec import config as configs
from spec.faults import CATALOGUE
from spec.faults.fault import CONFIGURATION, DECISION, FORMULA, HARMLESS, LIVENESS, Fault
from spec.faults.hunt import Hunt, check_stored, hunt, show_run, store, stored
from spec.faults.ownhunt import hunt_file
from spec.outputs import check_target, set_aside, write_json, write_whole
from spec.ownfile import OwnFileError
from spec.usage import JSON_HELP, OneLineParser, command, natural, one_line

RECORD = Path(__file__).parent / "record.json"
READ = "0.33.0"  # the vLLM release that entries without a public report come from
ALONE = {"states": 2000, "jobs": 2, "machine": "unnamed machine"}  # options of catalogue hunts


class UsageError(ValueError):
    """Bad input; the message is the one line that is shown."""


def named(name: str) -> Fault:
    """A catalogue entry.  Raises :class:`UsageError`."""
    if name not in CATALOGUE:
        raise UsageError(f"no fault named {name!r}; `python -m spec.faults list` shows all")
    return CATALOGUE[name]


# -- list, show, table -----------------------------------------------------------------------------------


def list_faults() -> int:
    """One line a fault."""
    for fault in CATALOGUE.values():
        print(f"{fault.name:<36}{fault.kind:<14}{fault.mechanism:<20}{fault.did}")
    return 0


def show(fault: Fault) -> int:
    """All that the catalogue knows of one fault, and its stored run."""
    print(f"{fault.name}  ({fault.kind}, {fault.mechanism}; base design: {fault.design})")
    print(f"  did       {fault.did}\n  repair    {fault.repair}")
    print(f"  decisions {', '.join((*fault.change, *(f'base {name}' for name in fault.base))) or '-'}")
    print(f"  bites in  {', '.join(fault.bites) or '-'}")
    if fault.harmless:
        print(f"  harmless  {', '.join(fault.harmless)}: {fault.why_harmless}")
    if fault.theorem:
        print(f"  theorem   {fault.theorem} (python -m spec.prove arith)")
    for source in fault.source:
        print(f"  source    {source}")
    if fault.cases:
        print(f"  cases     {', '.join(fault.cases)}")
    run = stored(fault.name)
    if run:
        config, rule, choices = run
        print(f"\nshortest stored run: {config.name}, {len(choices)} choices, breaks {rule}")
        show_run(fault, config, choices)
    return 0


def counts() -> str:
    """How many entries of each kind there are, and what they rest on."""
    kinds = Counter(fault.kind for fault in CATALOGUE.values())
    words = {DECISION: "decisions", LIVENESS: "decisions that never let a run end", FORMULA: "formulas"}
    words |= {CONFIGURATION: "configurations", HARMLESS: "disputed, and here not a fault"}
    reported = sum(any(one.startswith("http") for one in fault.source) for fault in CATALOGUE.values())
    return (
        f"{len(CATALOGUE)} entries: {', '.join(f'{kinds[kind]} {word}' for kind, word in words.items())}. "
        f"{reported} rest on a public report; {len(CATALOGUE) - reported} come from reading vLLM {READ}, "
        f"and no report of them is known here."
    )


def table() -> int:
    """The documentation's table: the stored runs, and the record of the last full hunt."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"hunts": {}}
    print(f"<!-- made by `python -m spec.faults table`; hunted with `{record.get('command', '-')}`")
    print(f"     on {record.get('machine', '-')} -->\n")
    print(f"{counts()}\n")
    print("| fault | mechanism | kind | consequence broken | config | choices | found in, s | source |")
    print("|---|---|---|---|---|---:|---:|---|")
    for fault in CATALOGUE.values():
        one, run = record["hunts"].get(fault.name, {}), stored(fault.name)
        rule, config, choices = one.get("rule"), "-", "-"
        if run:
            config, rule, choices = run[0].name, run[1], str(len(run[2]))
        link = fault.source[0]
        link = f"[report]({link})" if link.startswith("http") else f"from reading {READ}: `{link}`"
        seconds = f"{one['seconds']:.2f}" if one.get("choices") else "-"
        print(
            f"| `{fault.name}` | {fault.mechanism} | {fault.kind} | {rule or '-'} "
            f"| {config} | {choices} | {seconds} | {link} |"
        )
    return 0


# -- hunt ------------------------------------------------------------------------------------------------


def report(fault: Fault, outcome: Hunt, *, trace: bool) -> None:
    """Print one hunt: what became of the fault, and each expectation that failed."""
    state = "undetermined" if outcome.missed else "holds" if fault.kind == HARMLESS else "refuted"
    state = "unexpected" if outcome.wrong else state
    if outcome.choices:
        print(
            f"{state:<14}{fault.name:<36}{outcome.rule} in {outcome.config}: {len(outcome.choices)} choices, "
            f"found in {outcome.seconds:.2f} s; {outcome.search}; "
            f"Hypothesis {outcome.by_hypothesis or 'not asked'}",
            flush=True,
        )
    else:
        print(
            f"{state:<14}{fault.name:<36}{outcome.rule or fault.kind}: {outcome.text or fault.why_harmless}",
            flush=True,
        )
    if outcome.cycle:
        print(
            f"       a lasso: {len(outcome.choices)} choices, "
            f"then {len(outcome.cycle)} more lead back to where it stood"
        )
    for line in (*outcome.wrong, *outcome.missed):
        print(f"       {line}")
    if trace and outcome.choices:
        show_run(fault, configs.named(outcome.config), outcome.choices)


def hunt_one(name: str, runs: int, choices: int, seed: int, seeds: int, states: int) -> Hunt:
    """A job of the pool."""
    return hunt(CATALOGUE[name], runs=runs, choices=choices, seed=seed, seeds=seeds, states=states)


def keep(outcome: Hunt, args: argparse.Namespace) -> None:
    """Store a run as soon as it is there: a stopped hunt loses nothing.  A stored one that still does what
    it should and is no longer stays."""
    if args.store and outcome.choices and not outcome.wrong:
        known = stored(outcome.fault)
        shorter = not known or len(outcome.choices) < len(known[2])
        if shorter or any(check_stored(CATALOGUE[outcome.fault])):
            store(outcome)


def hunt_many(names: list[str], args: argparse.Namespace) -> int:
    """Hunt catalogue entries and judge their expectations."""
    work = partial(
        hunt_one, runs=args.runs, choices=args.choices, seed=args.seed, seeds=args.seeds, states=args.states
    )
    outcomes: list[Hunt] = []
    began = time.perf_counter()
    stopped = False
    try:
        if args.jobs > 1 and len(names) > 1:
            with multiprocessing.Pool(args.jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
                for outcome in pool.imap_unordered(work, names):
                    outcomes.append(outcome)
                    keep(outcome, args)
                    report(CATALOGUE[outcome.fault], outcome, trace=False)
        else:
            for name in names:
                outcomes.append(work(name))
                keep(outcomes[-1], args)
                report(CATALOGUE[name], outcomes[-1], trace=len(names) == 1)
    except KeyboardInterrupt:
        stopped = True
        print("stopped before all were hunted")
    wrong = [one.fault for one in outcomes if one.wrong]
    missed = [one.fault for one in outcomes if one.missed and not one.wrong]
    refuted = sum(1 for one in outcomes if one.choices or one.rule)
    print(
        f"\n{len(outcomes)} of {len(names)} hunted in {time.perf_counter() - began:.0f} s: "
        f"{refuted} refuted; unexpected: {', '.join(wrong) or 'none'}; "
        f"undetermined: {', '.join(missed) or 'none'}"
    )
    shared_rules(outcomes)
    record = {
        "command": args.command,
        "machine": args.machine,
        "hunts": {one.fault: asdict(one) for one in sorted(outcomes, key=lambda one: one.fault)},
    }
    write_json(args.json, record, args.out)
    if args.store and len(names) == len(CATALOGUE):
        write_whole(RECORD, json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 3 if missed or stopped else 0


def shared_rules(outcomes: list[Hunt]) -> None:
    """How many faults fall to a consequence that another fault breaks too."""
    by_rule: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.choices:
            by_rule.setdefault(outcome.rule, []).append(outcome.fault)
    total = sum(map(len, by_rule.values()))
    shared = sum(len(names) for names in by_rule.values() if len(names) > 1)
    if total > 1:
        print(
            f"of the {total} refuted with a trace, {shared} break a consequence that another of them breaks"
        )


def check() -> int:
    """Replay every stored run on its fault and on its repair."""
    problems = []
    for fault in CATALOGUE.values():
        if fault.kind in (DECISION, LIVENESS):
            problems += list(check_stored(fault))
    for problem in problems:
        print(problem)
    print(
        f"{sum(f.kind in (DECISION, LIVENESS) for f in CATALOGUE.values())} stored runs replayed, "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


@command("spec.faults")
def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = OneLineParser(prog="python -m spec.faults", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="one line a fault")
    verbs.add_parser("table", help="the documentation's table")
    verbs.add_parser("check", help="replay the stored runs on fault and repair")
    one = verbs.add_parser("show", help="everything about one fault")
    one.add_argument("name")
    hunting = verbs.add_parser("hunt", help="find, shrink, and try the repair")
    hunting.add_argument("names", nargs="*", metavar="NAME")
    hunting.add_argument("--all", action="store_true")
    hunting.add_argument("--file", metavar="FILE", help="a file that defines FAULT = Fault(...)")
    hunting.add_argument("--runs", type=int, default=800, metavar="R")
    hunting.add_argument("--choices", type=int, default=200, metavar="N")
    hunting.add_argument("--seed", type=natural, default=0, metavar="S")
    hunting.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="search from this many seeds (default 1): of a file's fault the shortest run is kept, in the "
        "catalogue's hunts times are medians",
    )
    hunting.add_argument("--states", type=int, help="states of the breadth-first search (default 2000)")
    hunting.add_argument("--jobs", type=int, help="processes (default 2)")
    hunting.add_argument("--store", action="store_true", help="keep the shortest runs in the repository")
    hunting.add_argument("--machine", help="what to call this machine in the record")
    hunting.add_argument("--json", metavar="FILE", help=JSON_HELP)
    args = parser.parse_args(argv)
    try:
        if args.verb == "list":
            return list_faults()
        if args.verb == "table":
            return table()
        if args.verb == "check":
            return check()
        if args.verb == "show":
            return show(named(args.name))
        args.command = shlex.join(["python", "-m", "spec.faults", *(sys.argv[1:] if argv is None else argv)])
        return start(args)
    except (UsageError, OwnFileError) as error:
        print(f"spec.faults: {one_line(error)}", file=sys.stderr)
        return 2


def start(args: argparse.Namespace) -> int:
    """Check the options of ``hunt``, and hunt.  Raises :class:`UsageError`."""
    given = [option for option in ALONE if getattr(args, option) is not None]
    if args.file and (args.names or args.all or args.store or given):
        others = [*args.names, *(f"--{one}" for one in ("all", "store") if getattr(args, one))]
        others += [f"--{one}" for one in given]
        raise UsageError(f"--file hunts the fault of that file alone: leave out {', '.join(others)}")
    for option, usual in ALONE.items():
        setattr(args, option, getattr(args, option) if option in given else usual)
    for option in ("runs", "choices", "seeds", "states", "jobs"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} must be at least 1, got {getattr(args, option)}")
    check_target("--json", args.json)
    args.out = set_aside(args.json)
    if args.file:
        return hunt_file(args.file, args)
    if args.all and args.names:
        raise UsageError(f"--all hunts every fault: leave out {', '.join(args.names)}")
    names = list(CATALOGUE) if args.all else list(dict.fromkeys(named(name).name for name in args.names))
    if not names:
        raise UsageError("name a fault, or give --all or --file FILE")
    return hunt_many(names, args)


if __name__ == "__main__":
    sys.exit(main())
