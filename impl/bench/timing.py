"""Timing on the device: medians of CUDA-graph replays, or of plain launches where a graph runs other code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Launch = Callable[[], object]

REST_SECONDS = 0.05
WARM_UP_MS = 30.0  # a device that has rested starts at a lower clock


def _milliseconds(run: Launch, repeats: int) -> list[float]:
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in pairs]


def graph_of(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """A graph of all launches in order; each runs once before the capture, so that it is compiled."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def replayed_us(launches: Sequence[Launch], repeats: int = 20) -> float:
    """Median microseconds of one launch, over replays of a graph of all of them, on a device that is warm."""
    graph = graph_of(launches)
    warmed = 0.0
    while warmed < WARM_UP_MS:
        warmed += sum(_milliseconds(graph.replay, 3))
    return 1000 * statistics.median(_milliseconds(graph.replay, repeats)) / len(launches)


def eager_us(launch: Launch, repeats: int = 8) -> float:
    """Median microseconds of one plain launch."""
    _milliseconds(launch, 2)
    return 1000 * statistics.median(_milliseconds(launch, repeats))


def busy_us(other: Launch | None, other_us: float, work: torch.cuda.CUDAGraph, work_us: float) -> float:
    """Median microseconds of `work` while launches of `other` keep another stream busy; None: alone.

    `work_us`, roughly what it takes alone, says how much to queue.  Alone and beside are measured in
    the same way, each time after the same rest, because a device that has rested clocks higher.  Raises
    RuntimeError if `other` ended first.
    """
    stream = torch.cuda.Stream()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        done = torch.cuda.Event(enable_timing=True)
        if other is not None:
            with torch.cuda.stream(stream):
                for _ in range(2 + int(6 * work_us / other_us)):
                    other()
                done.record()
        torch.cuda._sleep(100_000)  # until the other stream is under way
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work.replay()
        end.record()
        torch.cuda.synchronize()
        if other is None or end.elapsed_time(done) > 0:
            times.append(1000 * start.elapsed_time(end))
    if not times:
        raise RuntimeError("the copies ended before the matrix products: queue more of them")
    return float(statistics.median(times))
