"""Worlds whose operations are on streams that run by themselves: gated, and free.

The story.  ``impl.world`` runs an operation when the world says so: nothing overlaps.  Real workers enqueue
a whole step, go on, and the device runs it when it can.  Here every operation is launched when the worker
enqueues it, on a lane of its own rank (``impl.lanes``).

Two orders.  **Gated**: each operation is behind a gate, and the world's choices open them one by one: a late
copy is late for certain, operands are as they were enqueued, and a run replays and shrinks.  **Free**: there
are no gates, only the waits that the operations themselves demand; the device decides, and its marks say
what it decided.  The world's ghost follows the marks, so a run leaves a list of choices that can be replayed
gated.

Reading everything back after each choice would put an end to the overlap.  So what an operation read is set
aside on its lane, right behind it; a compare kernel on the reader's lane meets it with what the ghost says;
and what it found is collected when everything has come to rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from impl.cuda import CudaDevice, Kept
from impl.device import Device
from impl.lanes import PATIENCE_SECONDS, CudaLanes, HostLanes, Lane, Lanes, Mark, Stuck
from impl.world import BYTES, FORWARD_OVERLAPS_TRANSFER, Build, RealWorld, pages_of
from spec.config import Config
from spec.events import Event
from spec.ops import Begin, CopyCounts, Draft, End, Forward, HostCounts, Op, PostProcess, Sample, Wait
from spec.world import STREAMS, Choice, Rank, StepRun, Transfer


@dataclass(slots=True)
class Launched:
    """An operation on its lane: its number once it is launched, and what it read."""

    lane: Lane
    op: Op
    number: int = -1
    read: torch.Tensor | None = None
    places: dict[tuple[str, int], tuple[int, int]] | None = None
    page_words: int = 0


class StreamWorld(RealWorld):
    """A world whose operations are on lanes from the moment they are enqueued: gated."""

    gated = True

    def __init__(self, config: Config, build: Build, lanes: Lanes, **options: Any) -> None:
        lanes.begin()
        self.lanes = lanes
        self.operations: dict[int, Launched] = {}  # by the identity of the operation, which is kept alive
        self.by_number: dict[int, Launched] = {}
        self.running: dict[int, set[int]] = {}  # per rank: numbers of forwards that have begun, not ended
        self.moving: dict[int, set[int]] = {}  # per rank: transfers that have begun, not ended
        self.over: set[int] = set()
        self.opened = -1  # the last operation whose gate was opened
        super().__init__(config, build, **options)
        for device in self.engine.devices:
            if isinstance(device, CudaDevice):
                device.gated = self.gated

    # -- enqueueing ----------------------------------------------------------------------------------------
    def _schedule(self) -> None:
        before = {(rank.index, name): len(rank.streams[name]) for rank in self.ranks for name in STREAMS}
        super()._schedule()
        for rank in self.ranks:
            for name in STREAMS:
                for op in list(rank.streams[name])[before[rank.index, name] :]:
                    self.intake(Launched((rank.index, name), op))

    def intake(self, one: Launched) -> None:
        """A worker has enqueued an operation."""
        self.operations[id(one.op)] = one
        self.launch(one, ())

    def launch(self, one: Launched, after: Sequence[int]) -> None:
        """Put it on its lane."""
        device, op = self.engine.devices[one.lane[0]], one.op
        transfer = self.transfers.get(op.job) if isinstance(op, End) else None
        pages = pages_of(transfer) if transfer else []

        def work() -> None:
            try:
                if isinstance(op, End) and not self.gated:
                    self.lanes.linger()  # between its two halves
                device.execute(op)
                if isinstance(op, (Forward, Draft)):
                    one.read, one.places = device.read, device.places
                elif transfer:
                    one.read, one.page_words = device.delivered(transfer.way, pages)
            except Stuck:
                raise
            except (LookupError, ValueError, RuntimeError) as error:
                what = f"rank {one.lane[0]}: {type(op).__name__} fails on real memory"
                self.broken(BYTES, f"{what}: {type(error).__name__}: {error}")

        one.number = self.lanes.launch(one.lane, work, after, gated=self.gated)
        self.by_number[one.number] = one

    # -- running -------------------------------------------------------------------------------------------
    def step_device(self, rank: Rank, stream: str, op: Op) -> None:
        """The ghost has run; the gate is opened, the operation before being over."""
        one, device = self.operations[id(op)], self.engine.devices[rank.index]
        if isinstance(device, CudaDevice):
            device.fill(op)
        self.wait_opened()
        self.lanes.open(one.number)
        self.opened = one.number
        self.watch(rank, one)

    def wait_opened(self) -> None:
        """Until the last operation whose gate was opened is over."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while self.opened >= 0 and self.opened not in self.over:
            for mark in self.lanes.marks():
                self.observe(mark)
            if time.monotonic() > limit:
                op = type(self.by_number[self.opened].op).__name__
                raise Stuck(f"operation {self.opened} ({op}) is not over within {PATIENCE_SECONDS:.0f} s")

    def observe(self, mark: Mark) -> None:
        """Follow a mark: what is over, and whether a forward and a transfer were under way together."""
        one = self.by_number[mark.number]
        rank, op = one.lane[0], one.op
        running, moving = self.running.setdefault(rank, set()), self.moving.setdefault(rank, set())
        if mark.ended:
            self.over.add(mark.number)
            running.discard(mark.number)
            if isinstance(op, End):
                moving.discard(op.job)
            return
        if isinstance(op, Forward):
            running.add(mark.number)
            self.witness(FORWARD_OVERLAPS_TRANSFER, bool(moving))
        elif isinstance(op, Begin):
            moving.add(op.job)
            self.witness(FORWARD_OVERLAPS_TRANSFER, bool(running))

    def watch(self, rank: Rank, one: Launched) -> None:
        """What the operation read is to be compared with what the ghost says now."""
        op, expected = one.op, []
        if isinstance(op, (Forward, Draft)) and one.places is not None:
            expected = list(self.expected(rank, op, one.places))
        elif isinstance(op, End) and one.read is not None:
            expected = list(self.expected_pages(rank, self.transfers[op.job], one.page_words))
        if one.read is not None:
            self.count_compared(expected)
            self.lanes.watch(one.lane, one.read, expected)
            one.read = None

    def spoil(self, transfer: Transfer, rank: Rank) -> None:
        """Not while anything is under way."""
        self.wait_opened()
        super().spoil(transfer, rank)

    def note(self, decision: Event) -> None:
        """Chunks that become ready are read by the host."""
        if decision[0] == "tier" and decision[5] == "ready":
            self.wait_opened()
        super().note(decision)

    # -- the end -------------------------------------------------------------------------------------------
    def compare_findable(self) -> None:
        """Everything has come to rest."""
        self.tell_found()
        super().compare_findable()

    def tell_found(self) -> None:
        """What compare kernels have found."""
        for text in self.lanes.collect():
            self.broken(BYTES, text)

    def finish(self) -> None:
        """After the last choice: whatever is still held runs out, and what was found is told."""
        self.wait_opened()
        self.tell_found()
        self.lanes.begin()


class FreeWorld(StreamWorld):
    """A world that follows its device: operations are launched as soon as what they demand is known, the
    device runs them when it can, and the ghost runs them in the order of the device's marks.

    An operation is held back only while it demands something that does not exist yet: a forward's tokens,
    which the clients fix (``prepare``) when its rows' earlier tokens are there; an operation that another
    rank has not enqueued."""

    gated = False

    def __init__(self, config: Config, build: Build, lanes: Lanes, **options: Any) -> None:
        self.held: dict[Lane, deque[Launched]] = {}
        self.main: dict[int, list[Launched]] = {}  # per rank: operations of its main stream, in order
        self.named: dict[tuple[Any, ...], Launched] = {}  # what others wait for
        self.prepared: dict[int, list[tuple[int, int]]] = {}  # step -> results that it will have
        self.due: deque[Launched] = deque()  # over on the device, not yet on the ghost
        super().__init__(config, build, lanes, **options)

    # -- launching -----------------------------------------------------------------------------------------
    def _schedule(self) -> None:
        super()._schedule()
        self.pump()

    def intake(self, one: Launched) -> None:
        """Held until it can be launched."""
        (rank, stream), op = one.lane, one.op
        self.operations[id(op)] = one
        self.held.setdefault(one.lane, deque()).append(one)
        if stream == "main":
            self.main.setdefault(rank, []).append(one)
        if isinstance(op, End):
            self.named["end", rank, op.job] = one
        elif isinstance(op, Forward):
            self.named["forward", rank, op.step] = one
        elif isinstance(op, Sample):
            self.named.setdefault(("sample", op.step), one)
        elif isinstance(op, CopyCounts):
            self.named["counts", rank, op.step] = one

    def demands(self, one: Launched) -> list[Launched] | None:
        """The operations that must be over first; None while one of them, or a token, is not known yet."""
        (rank, _), op = one.lane, one.op
        names: list[tuple[Any, ...]] = []
        found: list[Launched] = []
        if isinstance(op, (Begin, CopyCounts)) and op.after_main:
            main = self.main.get(rank, [])
            if len(main) < op.after_main:
                return None
            found.append(main[op.after_main - 1])
        if isinstance(op, Begin):
            names += [("end", rank, job) for job in op.after_jobs]
        elif isinstance(op, Wait):
            names.append(("end", rank, op.job))
        elif isinstance(op, Forward):
            stage = self.ranks[rank].stage
            before = [other.index for other in self.ranks if other.stage == stage - 1]
            names += [("forward", other, op.step) for other in before]
            if not self.prepare_early(op):
                return None
        elif isinstance(op, PostProcess):
            names.append(("sample", op.step))
        elif isinstance(op, HostCounts) and op.step:
            names.append(("counts", rank, op.step))
        for name in names:
            if name not in self.named:
                return None
            found.append(self.named[name])
        return None if any(other.number < 0 for other in found) else found

    def pump(self) -> None:
        """Launch what can be launched."""
        moved = True
        while moved and self.verdict is None:
            moved = False
            for queue in self.held.values():
                while queue and self.verdict is None:
                    after = self.demands(queue[0])
                    if after is None:
                        break
                    self.launch(queue.popleft(), [other.number for other in after])
                    moved = True

    def prepare_early(self, op: Forward) -> bool:
        """Fix the step's tokens before the ghost's forward, as soon as its rows' earlier ones are there; what
        the step will give follows from them."""
        run = self.steps.get(op.step)
        if run is None or run.lines:
            return True
        if op.blocked(self, self.ranks[0]) is not None:
            return False
        self.prepare(run)
        return True

    def prepare(self, run: StepRun) -> None:
        """Results are known with the tokens."""
        super().prepare(run)
        self.prepared[run.step] = results = []
        for row in run.rows:
            drafts = run.starts[row.uid] + row.tokens - len(self.clients[row.uid].tokens)
            right = run.right[row.uid]
            results.append((0, 0) if drafts < 0 else (right + 1, drafts - right))

    def results(self, step: int) -> list[tuple[int, int]]:
        """As they will be."""
        return self.prepared[step]

    def enabled(self, choice: Choice) -> bool:
        """A client changes its mind about drafts only while none of them are under way: a replay fixes them
        later than the device needs them."""
        if choice[0] == "accept":
            client = self.live(str(choice[1]))
            if client is not None and client.pending:
                return False
        return super().enabled(choice)

    # -- following -----------------------------------------------------------------------------------------
    def take(self, choice: Choice) -> bool:
        """Choices of *when* are the device's: they only look how far it has come."""
        if choice[0] in ("run", "work", "drain"):
            return self.harvest()
        if choice[0] == "quiet":
            self.spell_out()
        return super().take(choice)

    def harvest(self) -> bool:
        """The ghost runs what is over on the device, in its order; whether there was any."""
        for mark in self.lanes.marks():
            self.observe(mark)
            if mark.ended:
                self.due.append(self.by_number[mark.number])
        moved = False
        while self.due and self.verdict is None:
            one = self.due.popleft()
            rank, stream = one.lane
            queue = self.ranks[rank].streams[stream]
            blocked = self.head_blocked(rank, stream)
            if not queue or queue[0] is not one.op or blocked:
                self.broken(
                    BYTES, f"rank {rank}: {type(one.op).__name__} has run on the device before {blocked}"
                )
                break
            super().take(("run", rank, stream, 1))
            moved = True
        self.pump()
        return moved

    def step_device(self, rank: Rank, stream: str, op: Op) -> None:
        """It has run."""
        one = self.operations[id(op)]
        self.watch(rank, one)
        if isinstance(op, Sample) and self.steps[op.step].results != self.prepared.get(op.step):
            raise Stuck(
                f"step {op.step} gave {self.steps[op.step].results}, not {self.prepared.get(op.step)}"
            )

    def spell_out(self) -> None:
        """Everything runs, and the engine schedules until nothing is left: choice by choice, so that it can
        be replayed."""
        for _ in range(self.patience()):
            while self.verdict is None and self.advance():
                pass
            if self.verdict or self.idle():
                return
            super().take(("schedule",))

    def advance(self) -> bool:
        """Whatever is in flight goes further; whether anything did."""
        self.lanes.settle()
        moved = self.harvest()
        for transfer in list(self.transfers.values()):
            for rank in self.ranks:
                if (
                    self.verdict is None
                    and transfer.job in rank.ended
                    and rank.index not in transfer.reported
                ):
                    moved |= super().take(("report", transfer.uid[0], transfer.way, rank.index))
        return moved | super().take(("output",))


class Place:
    """Where runs happen: lanes, and the devices that are kept on them.

    ``cuda``: on the current CUDA device, where ``seed`` draws how long transfers take; else in the host's
    thread, where it draws what a device would decide."""

    def __init__(self, *, cuda: bool, seed: int = 0) -> None:
        self.lanes: Lanes = (CudaLanes if cuda else HostLanes)(Random(seed))
        self.kept: dict[type[Device], Kept] = {}

    def devices(self, device_type: type[Device] = Device) -> type[Device] | Kept:
        """What makes an engine's devices."""
        if not isinstance(self.lanes, CudaLanes):
            return device_type
        if device_type not in self.kept:
            self.kept[device_type] = Kept(device_type, self.lanes.arena)
        return self.kept[device_type]

    def gated(self, config: Config, build: Build, **options: Any) -> StreamWorld:
        """A world whose choices open gates.  At most one world of a place at a time."""
        return StreamWorld(config, build, self.lanes, **options)

    def free(self, config: Config, build: Build, **options: Any) -> FreeWorld:
        """A world that follows the device."""
        return FreeWorld(config, build, self.lanes, **options)
