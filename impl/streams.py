"""Streams that run by themselves: a world whose operations are enqueued ahead, and run on CUDA streams.

The story.  ``impl.world`` runs an operation when the world says so: nothing overlaps.  Real workers enqueue
a whole step, go on, and the device runs it when it can.  Here every operation is launched when the worker
enqueues it, on a stream of its own rank (main, store, load, counts), and host and device share a page of
memory:

* a *gate* an operation, on which a spinning kernel waits until the host opens it;
* *marks*, which the device appends in the order in which operations begin and end.

Two orders.  **Gated**: each operation is behind a gate, and the world's choices open them one by one: a late
copy is late for certain, operands are as they were enqueued, and a run replays and shrinks.  **Free**: there
are no gates, only the waits that the operations themselves demand (events); the device decides, and the
marks say what it decided.  The world's ghost follows the marks, so a run leaves a list of choices that can
be replayed gated.

Reading everything back after each choice would put an end to the overlap.  So what an operation read is set
aside on its stream, right behind it; a compare kernel on the reader's stream meets it with what the ghost
says; and what it found is collected when everything has come to rest.

Forwards are CUDA graphs: captured once a device and batch size, with padded rows and tokens, and replayed for
run after run, over tables that every step gathers anew.  A device is therefore kept from run to run.

Without a CUDA device :class:`HostLanes` does the same in one thread, by a seeded draw.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch

from impl.device import Activations, Device, Feed, Kernels
from impl.device import Transfer as DeviceTransfer
from impl.world import BYTES, FORWARD_OVERLAPS_TRANSFER, Build, RealWorld, Words, pages_of
from spec.config import Config
from spec.events import Event
from spec.ops import (
    Begin,
    CopyCounts,
    Deref,
    Draft,
    End,
    Forward,
    Gather,
    HostCounts,
    Op,
    PostProcess,
    PreProcess,
    Sample,
    SetRow,
    SetSlot,
    Wait,
    Zero,
)
from spec.world import QUIET_ROUNDS, STREAMS, Choice, Rank, StepRun, Transfer

Lane = tuple[int, str]
"""A rank's stream: (rank, name)."""

CACHING = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"
"""Whether freed device memory is kept.  If not (to let a memory checker see every allocation), nothing can be
captured in a graph, and freeing waits for all that runs: no gates then."""

PATIENCE_SECONDS = 30.0  # after which a device that makes no mark is stuck
OPERATIONS = 1 << 16  # of one run, at most
ARENA_BYTES = 1 << 26  # pinned memory for the numbers of one run
SMALLEST_BATCH = 4  # tokens of the smallest captured batch


class Stuck(RuntimeError):
    """The device makes no progress although it should."""


# -- lanes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """An operation (by its number) has begun, or ended."""

    number: int
    ended: bool


class Lanes(Protocol):
    """All streams of all ranks."""

    def begin(self) -> None:
        """A new run: whatever is left of the last one runs to its end and is forgotten."""
        ...

    def launch(self, lane: Lane, work: Callable[[], None], after: Sequence[int], *, gated: bool) -> int:
        """Enqueue an operation behind others (numbers); its own number, from 0."""
        ...

    def open(self, number: int) -> None:
        """Open an operation's gate."""
        ...

    def linger(self) -> None:
        """Called by an operation: take some time, drawn.  The pages of a test cross a bus in no time."""
        ...

    def marks(self) -> Iterator[Mark]:
        """What has begun and ended since this was last asked, in order."""
        ...

    def watch(self, lane: Lane, read: torch.Tensor, expected: list[Words]) -> None:
        """Compare, on the lane, what was read with what should have been."""
        ...

    def collect(self) -> Iterator[str]:
        """The differences that were found.  What is held is let go first: nothing more will be compared."""
        ...

    def settle(self) -> None:
        """Wait until everything has run; no gate may be closed."""
        ...


class HostLanes:
    """Lanes without a device: operations run in the host's thread, when they are allowed to."""

    def __init__(self, random: Random | None = None) -> None:
        self.random = random or Random(0)
        self.begin()

    def begin(self) -> None:
        """Nothing is enqueued."""
        self.queues: dict[Lane, deque[tuple[int, Callable[[], None], tuple[int, ...]]]] = {}
        self.gates: dict[int, bool] = {}
        self.over: set[int] = set()
        self.unseen: list[Mark] = []
        self.found: list[str] = []

    def launch(self, lane: Lane, work: Callable[[], None], after: Sequence[int], *, gated: bool) -> int:
        """Remember it."""
        number = len(self.gates)
        self.gates[number] = not gated
        self.queues.setdefault(lane, deque()).append((number, work, tuple(after)))
        return number

    def ready(self) -> list[Lane]:
        """Lanes whose head may run."""
        return [
            lane
            for lane, queue in self.queues.items()
            if queue and self.gates[queue[0][0]] and all(one in self.over for one in queue[0][2])
        ]

    def step(self, lane: Lane) -> None:
        """The head of a lane runs."""
        number, work, _ = self.queues[lane].popleft()
        self.unseen.append(Mark(number, False))
        work()
        self.over.add(number)
        self.unseen.append(Mark(number, True))

    def open(self, number: int) -> None:
        """It runs as soon as it is at the head."""
        self.gates[number] = True
        while any(self.queues[lane][0][0] == number for lane in self.ready()):
            self.step(next(lane for lane in self.ready() if self.queues[lane][0][0] == number))

    def linger(self) -> None:
        """Operations wait for one another's turn anyway."""

    def marks(self) -> Iterator[Mark]:
        """Some operations run first, drawn."""
        for _ in range(self.random.randrange(6)):
            ready = self.ready()
            if ready:
                self.step(self.random.choice(ready))
        found, self.unseen = self.unseen, []
        return iter(found)

    def watch(self, lane: Lane, read: torch.Tensor, expected: list[Words]) -> None:
        """Compared at once, told later."""
        got = read.tolist()
        for words in expected:
            for n, at in enumerate(words.indices()):
                if got[at] != words.want[n]:
                    self.found.append(words.difference(n, got[at]))
                    break

    def collect(self) -> Iterator[str]:
        """What was compared so far."""
        found, self.found = self.found, []
        return iter(found)

    def settle(self) -> None:
        """Everything that may runs."""
        while ready := self.ready():
            self.step(self.random.choice(ready))


class CudaLanes:
    """Lanes of CUDA streams, on the current device."""

    def __init__(self, random: Random) -> None:
        from impl.kernels import order

        self.kernels, self.random = order, random
        self.streams: dict[Lane, torch.cuda.Stream] = {}
        self.arena = Arena()
        self.gates = torch.zeros(OPERATIONS, dtype=torch.int32, pin_memory=True)
        self.order = torch.zeros(2 * OPERATIONS, dtype=torch.int32, pin_memory=True)
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        # Four words each: a kernel is compiled anew for pointers of another alignment.
        self.verdicts = torch.zeros((OPERATIONS, 4), dtype=torch.int32, device="cuda")
        self.seen = self.order.numpy()  # the same memory, read without a copy
        self.numbers, self.position = 0, 0
        self.watched: list[tuple[torch.Tensor, list[Words]]] = []
        self.events: list[torch.cuda.Event | None] = []
        self.gates[0] = 1
        self.kernels.wait(self.gates, 0)  # to load a kernel later might wait for a gate
        self.kernels.linger(self.gates, 1)
        self.kernels.mark(self.counter, self.order, 1)
        self.kernels.compare(self.order[:4].cuda(), self.order[:8].cuda(), self.verdicts[0])
        self.numbers = 1
        self.begin()

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """A lane's stream.  Its allocator gets memory now: an allocation later might wait for a gate."""
        if lane not in self.streams:
            self.streams[lane] = stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                kept = [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(32)]
                kept += [torch.empty(1 << 21, dtype=torch.uint8, device="cuda") for _ in range(4)]
            del kept
        return self.streams[lane]

    def begin(self) -> None:
        """All gates open, everything runs out, and the page is blank again."""
        self.release()
        self.settle()
        self.gates[: self.numbers] = 0
        self.order[: 2 * self.numbers] = 0
        self.counter.zero_()
        self.numbers = self.position = 0
        self.watched, self.events = [], []
        self.arena.reset()
        torch.cuda.synchronize()

    def launch(self, lane: Lane, work: Callable[[], None], after: Sequence[int], *, gated: bool) -> int:
        """Gate, mark, operation, mark: one behind the other on the lane's stream."""
        number = self.numbers
        if number == OPERATIONS:
            raise Stuck(f"a run has more than {OPERATIONS} operations: make fewer choices")
        self.numbers += 1
        stream = self.stream(lane)
        with torch.cuda.stream(stream):
            for one in after:
                event = self.events[one]
                assert event is not None
                stream.wait_event(event)
            if gated:
                self.kernels.wait(self.gates, number)
            self.kernels.mark(self.counter, self.order, 2 * number + 1)
            work()
            self.kernels.mark(self.counter, self.order, 2 * number + 2)
            self.events.append(None if gated else stream.record_event())
        return number

    def open(self, number: int) -> None:
        """The spinning kernel sees it."""
        self.gates[number] = 1

    def linger(self) -> None:
        """Up to two milliseconds, as a transfer of real size takes."""
        self.kernels.linger(self.gates, self.random.choice((0, 20, 200, 2000)))

    def marks(self) -> Iterator[Mark]:
        """As the device has written them."""
        while self.position < len(self.seen) and (word := int(self.seen[self.position])):
            self.position += 1
            yield Mark((word - 1) // 2, word % 2 == 0)

    def watch(self, lane: Lane, read: torch.Tensor, expected: list[Words]) -> None:
        """Wanted words and which of them are definite are uploaded; a kernel leaves the first difference."""
        if not expected:
            return
        size = read.numel()
        both = self.arena.take(2 * size, torch.int32)
        want, care = both[:size].numpy(), both[size:].numpy()
        care[:] = 0
        for words in expected:
            at: Any = words.at if isinstance(words.at, list) else slice(words.at, words.at + len(words.want))
            want[at], care[at] = words.want, 1
        with torch.cuda.stream(self.stream(lane)):
            device = torch.empty(2 * size, dtype=torch.int32, device="cuda")
            device.copy_(both, non_blocking=True)
            self.kernels.compare(read, device, self.verdicts[len(self.watched)])
        self.watched.append((read, expected))

    def collect(self) -> Iterator[str]:
        """The compare kernels' verdicts, in the order in which they were launched."""
        self.release()
        self.settle()
        table = self.verdicts[: len(self.watched), :2].cpu().tolist()
        for (_, expected), (first, got) in zip(self.watched, table, strict=True):
            for words in expected if first >= 0 else ():
                where = words.indices()
                if first in where:
                    yield words.difference(where.index(first), got)
                    break
        self.watched = []

    def settle(self) -> None:
        """Poll, so that a device that is stuck is told of instead of waited for."""
        done = [stream.record_event() for stream in self.streams.values()]
        limit = time.monotonic() + PATIENCE_SECONDS
        while not all(event.query() for event in done):
            if time.monotonic() > limit:
                self.release()
                raise Stuck(f"the device has not come to rest within {PATIENCE_SECONDS:.0f} s")

    def release(self) -> None:
        """Open every gate that somebody waits for."""
        self.gates[: self.numbers] = 1


class Arena:
    """Pinned host memory for the numbers of one run: an allocation in between might wait for the device."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(ARENA_BYTES, dtype=torch.uint8, pin_memory=True)
        self.used = 0

    def reset(self) -> None:
        """All of it is free again; nothing that was taken may still be copied from."""
        self.used = 0

    def take(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for some numbers.  Raises :class:`Stuck` when a run needs more than there is."""
        size = numbers * dtype.itemsize
        first = -(-self.used // 16) * 16
        self.used = first + size
        if self.used > ARENA_BYTES:
            raise Stuck(f"a run needs more than {ARENA_BYTES >> 20} MiB of numbers: make fewer choices")
        return self.bytes[first : first + size].view(dtype)


# -- devices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Captured:
    """A batch size's forward: the graph, its inputs, and what it leaves."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor
    x: torch.Tensor
    output: torch.Tensor
    read: torch.Tensor
    places: dict[tuple[str, int], tuple[int, int]]


class CudaDevice(Device):
    """A device whose operations are only launched: nothing here waits for the device.  Mixed into a device's
    class by :class:`Kept`."""

    arena: Arena
    gated = True  # or every number is known when an operation is launched

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Through pinned memory, in stream order."""
        known = torch.tensor(values, dtype=dtype)
        host = self.arena.take(known.numel(), dtype).view(known.shape)
        host.copy_(known)
        return torch.empty(known.shape, dtype=dtype, device=self.device).copy_(host, non_blocking=True)

    def late(self, op: Op, values: Callable[[], Sequence[int]], length: int) -> torch.Tensor:
        """The copy from pinned memory stands behind the gate; ``fill`` comes before the gate is opened."""
        if not self.gated:
            return self.tensor(values(), torch.int64)
        host = self.arena.take(length, torch.int64)
        host.zero_()
        self.unfilled.setdefault(id(op), []).append((values, host))
        return torch.empty(length, dtype=torch.int64, device=self.device).copy_(host, non_blocking=True)

    def fill(self, op: Op) -> None:
        """What the operation takes from outside is known now."""
        for values, host in self.unfilled.pop(id(op), ()):
            host.copy_(torch.tensor(values(), dtype=torch.int64))

    def restart(self, feed: Feed, wire: Activations) -> None:
        """As if it were new; captured graphs stay."""
        super().restart(feed, wire)
        self.unfilled: dict[int, list[tuple[Callable[[], Sequence[int]], torch.Tensor]]] = {}

    def padded_tokens(self, tokens: int) -> int:
        """The next captured size."""
        return max(SMALLEST_BATCH, 1 << (tokens - 1).bit_length())

    def warm(self) -> None:
        """Run every kernel once: to compile or load one while a gate is closed might wait for the gate."""
        groups = len(self.config.groups)
        for way in ("store", "load"):
            self.transfers[0] = told = DeviceTransfer(0, way, ((0, 0, 0),))
            self.begin(Begin(0, 0))
            self.end(End(0))
            self.delivered(way, told.pages)
        row = Deref("source", 0)
        operations: list[Op] = [
            SetRow(0, 0, 0, (0,)), SetSlot(0, 1, 0, 0), Gather((0,), ((0,) * groups,), 1), Zero(((0, 0),)),
            PreProcess(((row, 0, 1),)), PostProcess(0, ((0, 0, row),)), CopyCounts(0, "own", 0),
            HostCounts(0, "own", ((0, 0),)),
        ]  # fmt: skip
        for op in operations:
            self.execute(op)
        torch.cuda.synchronize()

    def capture(self) -> None:
        """One graph for every batch size: even numbers of rows, powers of two of tokens."""
        self.graphs: dict[tuple[int, int], Captured] = {}
        slots, largest = self.config.slots, self.padded_tokens(self.config.step_tokens)
        sizes = [SMALLEST_BATCH << n for n in range(20) if CACHING and SMALLEST_BATCH << n <= largest]
        for rows in sorted({min(n + n % 2, slots) for n in range(1, slots + 1)}):
            for tokens in sizes:
                numbers = torch.zeros(3 * rows + 2 * tokens, dtype=torch.int64, device=self.device)
                x = torch.zeros(tokens, dtype=torch.int64, device=self.device)
                super().run_layers(numbers, x, rows, tokens, tokens)  # compiles what is not compiled yet
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    left = super().run_layers(numbers, x, rows, tokens, tokens)
                self.graphs[rows, tokens] = Captured(graph, numbers, x, *left)

    def run_layers(
        self, numbers: torch.Tensor, x: torch.Tensor, rows: int, tokens: int, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, int], tuple[int, int]]]:
        """Replay the graph of this size; what it leaves is set aside before the next replay."""
        if not CACHING:
            return super().run_layers(numbers, x, rows, tokens, tokens)
        one = self.graphs[rows, tokens]
        one.numbers.copy_(numbers)
        one.x.copy_(x)
        one.graph.replay()
        return one.output.clone(), one.read.clone(), one.places


class Kept:
    """Makes devices, and keeps them: the same configuration and rank gets the same device, started anew."""

    def __init__(self, device_type: type[Device], arena: Arena) -> None:
        self.type: type[CudaDevice] = type(
            f"Cuda{device_type.__name__}", (CudaDevice, device_type), {"arena": arena}
        )
        self.kept: dict[tuple[Config, int], CudaDevice] = {}

    def __call__(
        self, config: Config, rank: int, kernels: Kernels, feed: Feed, wire: Activations, **options: Any
    ) -> Device:
        """A device for a new engine."""
        device = self.kept.get((config, rank))
        if device is None:
            device = self.kept[config, rank] = self.type(
                config, rank, kernels, feed, wire, **{**options, "device": torch.device("cuda")}
            )
            device.restart(feed, wire)
            device.warm()
            device.capture()
        device.restart(feed, wire)
        device.debug = options.get("poison", False)
        return device


# -- worlds ------------------------------------------------------------------------------------------------


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
            if isinstance(op, End) and not self.gated:
                self.lanes.linger()  # between its two halves
            device.execute(op)
            if isinstance(op, (Forward, Draft)):
                one.read, one.places = device.read, device.places
            elif transfer:
                one.read, one.page_words = device.delivered(transfer.way, pages)

        try:
            one.number = self.lanes.launch(one.lane, work, after, gated=self.gated)
        except (LookupError, ValueError) as error:
            self.broken(BYTES, f"rank {one.lane[0]}: {type(op).__name__} fails on real memory: {error}")
            return
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
        if self.forward_blocked(op, self.ranks[0]) is not None:
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
        return self.harvest() if choice[0] in ("run", "work", "drain") else super().take(choice)

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

    def come_to_rest(self) -> None:
        """Everything runs, and the engine schedules until nothing is left: spelled out, so that it can be
        replayed."""
        for _ in range(QUIET_ROUNDS):
            while self.verdict is None and self.advance():
                pass
            if self.verdict or self.idle():
                break
            super().take(("schedule",))
        super().come_to_rest()

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
