"""Loads by name, and runs of them: here or in processes of their own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random

import torch

from impl.cuda import Kept
from impl.decisions import Decisions
from impl.device import Device, Feed, kernels_named
from impl.engine import Engine
from impl.inject import Swapped, injectable
from impl.lanes import Arena
from impl.soak.service import Build, Load, Oracle, Outcome, Stop
from spec import config as configs
from spec.chains import Chains
from spec.config import Config, ConfigError
from spec.policy import Policy

LOADS = Path(__file__).parent / "loads"
MAIN_LOAD = "pp4"
ITSELF = "the soak itself failed"  # begins the error of a run whose process died


@lru_cache(maxsize=1)
def oracle(load: str, run: int, seed: int) -> Oracle:
    """One for all faults that see the same clients: most prompts are theirs in common."""
    return Oracle(load_named(load))


def load_named(name: str) -> Config:
    """The deployment of a load.  Raises :class:`ConfigError` for an unknown name."""
    path = LOADS / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"no load {name!r}; there are {', '.join(load_names())}")
    return configs.load(path)


def load_names() -> list[str]:
    """All loads, the main one first."""
    names = sorted(path.stem for path in LOADS.glob("*.toml"))
    return sorted(names, key=lambda name: name != MAIN_LOAD)


@dataclass(frozen=True, slots=True)
class Task:
    """One run of one load: what a process is told."""

    load: str
    run: int
    fault: str  # "": none
    design: str  # the fault whose base design this is; "" for the usual one
    requests: int
    seed: int
    device: str
    kernels: str


def engine_of(task: Task) -> Build:
    """The implementation as it is, or with the task's fault in it."""
    known = injectable()
    base = known[task.fault or task.design].base if task.fault or task.design else {}
    change = known[task.fault].change if task.fault else {}
    tamper = known[task.fault].tamper if task.fault else None
    decide = replace(Decisions(), **{**base, **change})
    kernels, device_type = kernels_named(task.kernels), Swapped if task.fault else Device
    made = device_type if task.device == "cpu" else launched(device_type)

    def build(config: Config, chains: Chains, feed: Feed) -> tuple[Engine, Policy]:
        engine = Engine(config, chains, feed, decide=decide, kernels=kernels, device_type=made)
        return engine, tamper(lambda *_: engine)(config, chains) if tamper else engine

    return build


@lru_cache
def launched(device_type: type[Device]) -> Kept:
    """Devices whose operations are launched, forwards as graphs; a process keeps them from run to run."""
    return Kept(device_type, Arena(around=True), gated=False)


STOP: list[Stop] = []
"""In a process that serves for another one: the event that ends it."""


def take_event(stop: Stop) -> None:
    """A process begins: it stops when it is told, and not by itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    STOP.append(stop)


def serve(task: Task, stop: Stop | None = None) -> Outcome:
    """Run one load.  Determined by the task."""
    stop = STOP[0] if STOP else stop
    random = Random(f"{task.seed}/{task.load}/{task.run}")
    load = Load(load_named(task.load), engine_of(task), oracle(task.load, task.run, task.seed), random)
    seen = load.run(task.requests, stop)
    seen.load, seen.run, seen.fault = task.load, task.run, task.fault
    return seen


def outcomes(tasks: Sequence[Task], jobs: int, stop: Stop) -> Iterator[tuple[Task, Outcome]]:
    """Run all tasks.

    On CUDA each fault has a process of its own: there an index out of bounds ends the process.  Stopped,
    what was begun is still told; what was not is left out."""
    if jobs == 1 and tasks[0].device == "cpu":
        for task in tasks:
            if stop.is_set():
                return
            yield task, serve(task, stop)
        return
    alone = [task for task in tasks if task.fault and task.device != "cpu"]
    for some, each in (([task for task in tasks if task not in alone], None), (alone, 1)):
        if some and not stop.is_set():
            yield from in_processes(some, jobs, each, stop)


@contextmanager
def born_deaf() -> Iterator[None]:
    """Processes and threads that begin meanwhile never hear Ctrl-C, which goes to all of a group: not even
    before :func:`take_event`, while they import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_processes(
    tasks: Sequence[Task], jobs: int, each: int | None, stop: Stop
) -> Iterator[tuple[Task, Outcome]]:
    """Run the tasks in so many processes at a time, ``each`` of which runs that many."""
    context = multiprocessing.get_context("spawn")
    shared = context.Event()
    with ProcessPoolExecutor(jobs, context, take_event, (shared,), max_tasks_per_child=each) as pool:
        with born_deaf():
            waiting: dict[Future[Outcome], Task] = {pool.submit(serve, task): task for task in tasks}
        while waiting:
            if stop.is_set():
                shared.set()
                for future in [one for one in waiting if one.cancel()]:
                    del waiting[future]
            for future in wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED).done:
                task = waiting.pop(future)
                try:
                    yield task, future.result()
                except Exception as error:  # what the others found is not lost
                    yield task, Outcome(task.load, task.run, task.fault, error=f"{ITSELF}: {error!r}")
