"""Soak: what each fault of the catalogue does to a server's users, with nobody watching.

``python -m impl.soak [--device cpu|cuda] [--kernels torch|triton] [--runs R] [--requests N] [--seed S]
[--fault NAME|--all|--list] [--load NAME] [--jobs J] [--json FILE] [--markdown FILE] [--commit ID]``

The story.  In the field nobody holds a ghost beside the bytes.  One sees that some requests repeat one token
for ever, that the acceptance length of a drafter falls, that an engine stops.  So here clients are served and
that is all: eight at a time, with shared prefixes, resends, later turns, aborts, a pool that preempts, a host
tier that evicts, transfers that fail now and then.  Tokens come from what the tiny model's bytes really give
(an output word modulo the vocabulary), so that a wrong byte becomes a wrong token, is published under a
valid key, and is served to others.  The drafter knows the true model and hits most of the time, as a trained
one does; verification compares its drafts with the tokens that came out.

When everything is over, each request's tokens are compared with greedy decoding by the closed form
(:class:`impl.model.Truth`) from its prompt alone.  The streams are those of :class:`spec.world.World`, with
real memory instead of ghosts and without a single rule: what is blocked, late and in flight there is so here.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from impl import options

try:
    import torch
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    options.without_torch("impl.soak", options.soak())

from impl.device import kernels_named
from impl.inject import injectable
from impl.soak.runs import MAIN_LOAD, Task, load_named, load_names, outcomes
from impl.soak.service import Outcome, Stop
from impl.soak.table import LOOKED_FOR, UNSEEN, Row, line, markdown, rows_of, verdict_of
from spec import handbook
from spec.outputs import check_part, check_target, set_aside, write_json
from spec.trace import commit
from spec.usage import command

REFERENCE_RUNS = 10  # of the main load, for each run of a fault
OTHER_REFERENCE_RUNS = 4  # of other loads: how much their figures vary is known from them
PROGRESS_SECONDS = 3

# Nothing is held back here, and there are many processes: what they do not launch is not loaded.
os.environ["CUDA_MODULE_LOADING"] = "LAZY"


def planned(args: argparse.Namespace, faults: Sequence[str]) -> list[Task]:
    """Every run of the command: each load's reference, then the faults."""
    known, tasks = injectable(), list[Task]()

    def add(load: str, fault: str, design: str, runs: int) -> None:
        for run in range(runs):
            tasks.append(Task(load, run, fault, design, args.requests, args.seed, args.device, args.kernels))

    places = {name: (args.load, 1) if args.load else LOOKED_FOR.get(name, (MAIN_LOAD, 1)) for name in faults}
    loads = list(dict.fromkeys(load for load, _ in places.values())) or [args.load or MAIN_LOAD]
    for load in sorted(loads, key=load_names().index):
        add(load, "", "", args.runs * (REFERENCE_RUNS if load == MAIN_LOAD else OTHER_REFERENCE_RUNS))
        for name in faults:
            if places[name][0] == load and known[name].base:
                add(load, "", name, args.runs)
    for name in faults:
        add(places[name][0], name, "", args.runs * places[name][1])
    return tasks


def checked(args: argparse.Namespace) -> list[str]:
    """The faults that are asked for.  Raises ``ValueError`` with one line for what cannot be done."""
    known = injectable()
    unknown = [name for name in args.fault or () if name not in known]
    if unknown:
        raise ValueError(f"no fault named {unknown[0]!r}; --list shows all")
    for name in ("requests", "runs", "jobs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if args.device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {args.device!r}")
    args.kernels = args.kernels or ("triton" if args.device == "cuda" else "torch")
    if args.kernels not in ("torch", "triton"):
        raise ValueError(f"--kernels must be torch or triton, got {args.kernels!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if args.load:
        load_named(args.load)
    check_target("--json", args.json)
    check_part("--markdown", args.markdown, part(args))
    kernels_named(args.kernels)
    return list(known) if args.all else list(dict.fromkeys(args.fault or ()))


def part(args: argparse.Namespace) -> str:
    """The document's part that a run records."""
    return "soak" if args.device == "cpu" else "soak-cuda"


def machine(device: str) -> str:
    """Where this runs."""
    cores = f"{os.cpu_count()} cores, torch {torch.__version__}"
    return (
        f"{torch.cuda.get_device_name()}, {cores}" if device == "cuda" else f"{platform.machine()}, {cores}"
    )


@command("impl.soak")
def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = options.soak().parse_args(argv)
    if args.list:
        for name in load_names():
            print(f"load  {name:<36}{load_named(name).description}")
        for name, fault in injectable().items():
            print(f"fault {name:<36}{LOOKED_FOR.get(name, (MAIN_LOAD, 1))[0]:<10}{fault.did}")
        return 0
    try:
        tasks = planned(args, checked(args))
    except ModuleNotFoundError as missing:
        print(f"impl.soak: {missing.name} is not installed: pip install -e '.[kernels]'", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"impl.soak: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    out = set_aside(args.json)
    jobs = args.jobs or (min(options.JOBS, os.cpu_count() or 1) if args.device == "cuda" else 1)
    where = machine(args.device)
    budget = f"{len(tasks)} runs of {args.requests} requests, {jobs} at a time"
    print(f"soak: {where}; {args.kernels} kernels; seed {args.seed}; {budget}")
    print(f"{'':<36}{'load':<10}{'served':>7}{'differ':>9}  {'acceptance':<14}", flush=True)
    began = time.perf_counter()
    found, stop = run_all(tasks, jobs)
    seconds, rows = time.perf_counter() - began, rows_of(tasks, found)
    stopped = stop.is_set() or len(found) < len(tasks)
    verdict, code = verdict_of(rows, stopped)
    served = sum(row.whole.served for row in rows)
    print(f"\n{served:,} requests served in {seconds:.0f} s: {served / max(seconds, 1e-9):.0f} a second")
    print(f"verdict: {verdict} (sampled)")
    write_json(args.json, as_json(args, rows, verdict, seconds), out)
    if args.markdown and not stopped:
        given = "".join(f" {word}" for word in (argv if argv is not None else sys.argv[1:]))
        at = f"{where}, commit {args.commit or commit() or 'unknown'}"
        words = markdown(rows, f"python -m impl.soak{given}", at, seconds, verdict)
        handbook.record(args.markdown, part(args), words)
    return code


def run_all(tasks: Sequence[Task], jobs: int) -> tuple[dict[Task, Outcome], Stop]:
    """Everything, or what there is when somebody interrupts; a line is printed for each row that is done."""
    stop = threading.Event()
    found: dict[Task, Outcome] = {}
    printed: set[tuple[str, str, str]] = set()
    told = time.perf_counter()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        for task, outcome in outcomes(tasks, jobs, stop):
            found[task] = outcome
            if time.perf_counter() - told > PROGRESS_SECONDS:
                told = time.perf_counter()
                print(f"  {len(found)} of {len(tasks)} runs", flush=True)
            for row in rows_of(tasks, found):
                key = (row.name, row.did, row.whole.load)
                if key not in printed and (row.complete or outcome.stopped):
                    printed.add(key)
                    print(line(row), flush=True)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
    if stop.is_set():
        print("stopped: what was found so far is kept", flush=True)
    return found, stop


def as_json(args: argparse.Namespace, rows: Sequence[Row], verdict: str, seconds: float) -> dict[str, Any]:
    """What a program reads."""
    return {
        "seed": args.seed, "runs": args.runs, "requests": args.requests, "device": args.device,
        "kernels": args.kernels, "verdict": verdict, "seconds": round(seconds, 1),
        "commit": args.commit or commit(),
        "rows": [
            {"name": row.name, "shows": row.shows, "complete": row.complete, "symptoms": list(row.symptoms),
             "acceptance": round(row.whole.acceptance, 4), "share_differing": round(row.whole.share, 4),
             "acceptance_without": round(row.without.acceptance, 4),
             "unseen_because": UNSEEN.get(row.name, ""), **asdict(row.whole)}
            for row in rows
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
