"""A device whose operations are only launched: on a CUDA device, nothing waits for it.

The story.  While a gate is closed (``impl.lanes``) nothing that synchronises may be called: no assignment
from a number, no copy from pageable memory, no allocation from the driver, no kernel that must first be
loaded.  So numbers go through pinned memory that was allocated before, every kernel is run once beforehand,
and forwards are CUDA graphs: captured once a device and batch size, with padded rows and tokens, and replayed
for run after run, over tables that every step gathers anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from impl.device import Activations, Device, Feed, Kernels, Transfer
from impl.lanes import Arena
from spec.config import Config
from spec.ops import (
    Begin,
    CopyCounts,
    Deref,
    End,
    Gather,
    HostCounts,
    Op,
    PostProcess,
    PreProcess,
    SetRow,
    SetSlot,
    Zero,
)

CACHING = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"
"""Whether freed device memory is kept.  If not (to let a memory checker see every allocation), nothing can be
captured in a graph, and freeing waits for all that runs: no gates then."""

SMALLEST_BATCH = 4  # tokens of the smallest captured batch


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
    graphs: dict[tuple[int, int], Captured]  # by rows and tokens
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
            self.transfers[0] = told = Transfer(0, way, ((0, 0, 0),))
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

    def capture_all(self) -> None:
        """Every batch size, while the tables are blank: even numbers of rows, powers of two of tokens."""
        slots, largest = self.config.slots, self.padded_tokens(self.config.step_tokens)
        sizes = [SMALLEST_BATCH << n for n in range(20) if CACHING and SMALLEST_BATCH << n <= largest]
        for rows in sorted({min(n + n % 2, slots) for n in range(1, slots + 1)}):
            for tokens in sizes:
                numbers = torch.zeros(3 * rows + 2 * tokens, dtype=torch.int64, device=self.device)
                x = torch.zeros(tokens, dtype=torch.int64, device=self.device)
                self.run_layers(numbers, x, rows, tokens, tokens)

    def run_layers(
        self, numbers: torch.Tensor, x: torch.Tensor, rows: int, tokens: int, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, int], tuple[int, int]]]:
        """Replay the graph of this size; what it leaves is set aside before the next replay.

        The first batch of a size runs as it is, and its graph is captured behind it.  A batch made up to warm
        the kernels would write wherever the tables of the batch before lead."""
        one = self.graphs.get((rows, tokens))
        if one is None:
            left = super().run_layers(numbers, x, rows, tokens, tokens)
            if CACHING:
                self.graphs[rows, tokens] = self.capture(numbers.clone(), x.clone(), rows, tokens)
            return left
        one.numbers.copy_(numbers)
        one.x.copy_(x)
        one.graph.replay()
        return one.output.clone(), one.read.clone(), one.places

    def capture(self, numbers: torch.Tensor, x: torch.Tensor, rows: int, tokens: int) -> Captured:
        """The graph of one batch size, over these inputs: nothing runs, but it waits for the device."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            left = super().run_layers(numbers, x, rows, tokens, tokens)
        return Captured(graph, numbers, x, *left)


class Kept:
    """Makes devices, and keeps them: the same configuration and rank gets the same device, started anew.

    ``gated``: operations may be held by gates, so that everything is compiled and captured before; else what
    is needed, when it is needed."""

    def __init__(self, device_type: type[Device], arena: Arena, *, gated: bool = True) -> None:
        self.gated = gated
        self.type: type[CudaDevice] = type(
            f"Cuda{device_type.__name__}", (CudaDevice, device_type), {"arena": arena, "gated": gated}
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
            device.graphs = {}
            if self.gated:
                device.restart(feed, wire)
                device.warm()
                device.capture_all()
        torch.cuda.synchronize()  # nothing of an earlier run is under way
        device.restart(feed, wire)
        device.debug = options.get("poison", False)
        torch.cuda.synchronize()  # and whatever stream comes next finds it blank
        return device
