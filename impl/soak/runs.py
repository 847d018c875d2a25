"""Loads by name, and runs of them: here or in processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
    """Devices whose operations are launched, forwards as graphs; a process keeps them until :func:`clean`."""
    return Kept(device_type, Arena(around=True), gated=False)


def serve(task: Task, stop: Stop | None = None) -> Outcome:
    """Run one load.  Determined by the task."""
    random = Random(f"{task.seed}/{task.load}/{task.run}")
    load = Load(load_named(task.load), engine_of(task), oracle(task.load, task.run, task.seed), random)
    seen = load.run(task.requests, stop)
    seen.load, seen.run, seen.fault = task.load, task.run, task.fault
    if task.device != "cpu" and not seen.error:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            seen.error = f"{type(error).__name__}: {error}"
        else:
            clean(task)
    return seen


def clean(task: Task) -> None:
    """Nothing that a fault may have written to, index past its table or not, is there for the next task."""
    if task.fault:
        launched.cache_clear()
        gc.collect()  # devices and engines name each other
        torch.cuda.empty_cache()


def outcomes(tasks: Sequence[Task], jobs: int, stop: Stop) -> Iterator[tuple[Task, Outcome]]:
    """Run all tasks.  Stopped, what was begun is still told; what was not is left out."""
    if jobs == 1 and tasks[0].device == "cpu":
        for task in tasks:
            if stop.is_set():
                return
            yield task, serve(task, stop)
    else:
        yield from in_processes(tasks, jobs, stop)


# -- processes ---------------------------------------------------------------------------------------------

Serve = Callable[[Task, Stop], Outcome]


def spoiled(task: Task, outcome: Outcome) -> bool:
    """Whether a process is of no more use: after an index out of bounds, CUDA refuses every call."""
    return bool(outcome.error) and task.device != "cpu"


def work(pipe: Connection, stop: Stop, serve: Serve) -> None:
    """A process: one task after another, until the pipe is closed.  It is stopped by being told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(serve(task, stop))
        except Exception as error:
            pipe.send(Outcome(task.load, task.run, task.fault, error=f"{ITSELF}: {error!r}"))


def in_processes(
    tasks: Sequence[Task], jobs: int, stop: Stop, serve: Serve = serve
) -> Iterator[tuple[Task, Outcome]]:
    """Run the tasks in so many processes at a time; a process that ends costs no other task.

    Nobody waits for a process that is about to end: to give back a CUDA context takes seconds."""
    context = multiprocessing.get_context("spawn")
    told, waiting = context.Event(), deque(tasks)
    busy: dict[Connection, Task] = {}
    begun: list[BaseProcess] = []

    def begin() -> Connection:
        pipe, other = context.Pipe()
        begun.append(context.Process(target=work, args=(other, told, serve), daemon=True))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            begun[-1].start()  # Ctrl-C goes to all of a group: it is not heard even while a process imports
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()
        return pipe

    def give(pipe: Connection | None = None) -> None:
        if waiting:
            pipe = pipe or begin()
            busy[pipe] = waiting.popleft()
            with suppress(OSError):  # it has ended: that is seen where its outcome is waited for
                pipe.send(busy[pipe])
        elif pipe:
            pipe.close()

    while waiting or busy:
        if stop.is_set():
            told.set()
            waiting.clear()
        while waiting and len(busy) < jobs:
            give()
        for pipe in wait(list(busy), timeout=0.5):
            assert isinstance(pipe, Connection)
            task = busy.pop(pipe)
            try:
                outcome = pipe.recv()
            except (EOFError, OSError):
                outcome = Outcome(task.load, task.run, task.fault, error=f"{ITSELF}: its process ended")
                pipe.close()
            if pipe.closed or spoiled(task, outcome):
                pipe.close()
                give()
            else:
                give(pipe)
            yield task, outcome
    for process in begun:
        process.join()
