"""Timing on the device: medians of CUDA-graph replays, and of plain launches where a graph changes what runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Launch = Callable[[], object]


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
    """Median microseconds of one launch, over replays of a graph of all of them."""
    graph = graph_of(launches)
    _milliseconds(graph.replay, 3)
    return 1000 * statistics.median(_milliseconds(graph.replay, repeats)) / len(launches)


def eager_us(launch: Launch, repeats: int = 8) -> float:
    """Median microseconds of one plain launch."""
    _milliseconds(launch, 2)
    return 1000 * statistics.median(_milliseconds(launch, repeats))


def slowdown_beside(other: Launch, other_us: float, work: torch.cuda.CUDAGraph, work_us: float) -> float:
    """How much longer `work` takes while launches of `other` keep another stream busy; 1.0: not at all.

    Raises RuntimeError if `other` ended before the work did.
    """
    stream = torch.cuda.Stream()
    ratios = []
    for _ in range(3):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2 + int(6 * work_us / other_us)):
                other()
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        torch.cuda._sleep(100_000)  # until the other stream is under way
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work.replay()
        end.record()
        torch.cuda.synchronize()
        if end.elapsed_time(done) > 0:
            ratios.append(1000 * start.elapsed_time(end) / work_us)
    if not ratios:
        raise RuntimeError("the copies ended before the matrix products: queue more of them")
    return float(statistics.median(ratios))
