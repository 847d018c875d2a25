"""Lanes: the streams of all ranks, on which operations are launched ahead and run when they can.

Each rank has a stream a name (main, store, load, counts).  An operation may be behind a *gate*, on which a
spinning kernel waits until the host opens it, and behind other operations (events); *marks* say in which
order operations begin and end.  Gates and marks lie in pinned memory that host and device share.  What an
operation has read can be *watched*: a compare kernel on the same stream meets it with what it should be.

:class:`CudaLanes` is that on a CUDA device; :class:`HostLanes` does the same in the host's thread, where a
seeded draw decides what the device would.  Nothing here knows what an operation does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch

from impl.world import Words

Lane = tuple[int, str]
"""A rank's stream: (rank, name)."""

PATIENCE_SECONDS = 30.0  # after which a device that makes no mark is stuck
OPERATIONS = 1 << 16  # of one run, at most
ARENA_BYTES = 1 << 26  # pinned memory for the numbers of one run


class Stuck(RuntimeError):
    """The device makes no progress although it should."""


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
        """Up to some milliseconds, as a transfer of real size takes."""
        self.kernels.linger(self.gates, self.random.choice((0, 100, 1000, 10000)))

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
    """Pinned host memory for the numbers of one run: an allocation in between might wait for the device.

    ``around``: when it is full, wait for the device and begin again, where nothing is held by a gate."""

    def __init__(self, *, around: bool = False) -> None:
        self.bytes = torch.zeros(ARENA_BYTES, dtype=torch.uint8, pin_memory=True)
        self.used, self.around = 0, around

    def reset(self) -> None:
        """All of it is free again; nothing that was taken may still be copied from."""
        self.used = 0

    def take(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for some numbers.  Raises :class:`Stuck` when a run needs more than there is."""
        size = numbers * dtype.itemsize
        first = -(-self.used // 16) * 16
        if self.around and first + size > ARENA_BYTES:
            torch.cuda.synchronize()  # everything that was taken has been copied from
            first = 0
        self.used = first + size
        if self.used > ARENA_BYTES:
            raise Stuck(f"a run needs more than {ARENA_BYTES >> 20} MiB of numbers: make fewer choices")
        return self.bytes[first : first + size].view(dtype)
