"""Deadlock: who waits for whom, as a graph.

Streams are the only things that wait.  The head of a stream may wait for another stream of its rank (a
flush for the end of a store, a transfer for the main stream, the host for a copy of counts), for the
stage before it, or for the last stage's tokens.  A cycle of such waits can never dissolve: no operation
of a waiting stream runs again.  A wait for something that nobody has enqueued is no cycle, but no end is
in sight either: it leads to :data:`NOBODY`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import networkx as nx

from spec.ops import Begin, CopyCounts, Draft, End, Forward, HostCounts, Op, PostProcess, Sample, Wait

if TYPE_CHECKING:
    from spec.world import Rank, World

Node = tuple[int, str]  # (rank, stream)
NOBODY: Node = (-1, "nobody")


def waited_for(world: World, rank: Rank, op: Op) -> Iterator[Node]:
    """The streams that must advance before this blocked operation can run."""
    if isinstance(op, Wait):
        yield ends(rank, op.job)
    elif isinstance(op, (Begin, CopyCounts)):
        if rank.executed < op.after_main:
            yield rank.index, "main"
        late = op.after_jobs if isinstance(op, Begin) else ()
        yield from (ends(rank, job) for job in late if job not in rank.ended)
    elif isinstance(op, HostCounts):
        copied = any(isinstance(o, CopyCounts) and o.step == op.step for o in rank.streams["counts"])
        yield (rank.index, "counts") if copied else NOBODY
    elif isinstance(op, (PostProcess, Draft)):
        yield from samplers(world, op.step)
    elif isinstance(op, Sample):  # its own forward stands behind it
        yield rank.index, "main"
    elif isinstance(op, Forward) and rank.stage:
        forwards = world.steps[op.step].forwards
        before = [r for r in world.ranks if r.stage == rank.stage - 1]
        yield from ((r.index, "main") for r in before if r.index not in forwards)
    elif isinstance(op, Forward):
        for row in op.rows:
            if world.clients[row.uid].pending:
                yield from samplers(world, world.clients[row.uid].pending)


def ends(rank: Rank, job: int) -> Node:
    """The stream in which a transfer will end."""
    for name, ops in rank.streams.items():
        if any(isinstance(o, End) and o.job == job for o in ops):
            return rank.index, name
    return NOBODY


def samplers(world: World, step: int) -> Iterator[Node]:
    """The first stream that will sample the step: one suffices."""
    for rank in world.ranks:
        if any(isinstance(o, Sample) and o.step == step for o in rank.streams["main"]):
            yield rank.index, "main"
            return
    yield NOBODY


def wait_graph(world: World) -> nx.DiGraph[Node]:
    """An edge from every blocked stream to the streams that it waits for."""
    graph: nx.DiGraph[Node] = nx.DiGraph()
    for rank in world.ranks:
        for name, ops in rank.streams.items():
            if ops and world.waits(ops[0], rank) is not None:
                graph.add_edges_from(((rank.index, name), node) for node in whom(world, rank, ops[0]))
    return graph


def whom(world: World, rank: Rank, op: Op) -> list[Node]:
    """The same as :func:`waited_for`, also if it names what is not there."""
    try:
        return list(waited_for(world, rank, op))
    except LookupError:
        return [NOBODY]


def deadlock(world: World) -> str | None:
    """A cycle of waits, or a wait for what nobody has enqueued, in words; None if there is neither."""
    graph = wait_graph(world)
    if NOBODY in graph:
        rank, name = next(iter(graph.predecessors(NOBODY)))
        op = world.ranks[rank].streams[name][0]
        return (
            f"stream {name} of rank {rank} waits for {world.waits(op, world.ranks[rank])}, which "
            f"nobody enqueued"
        )
    if nx.is_directed_acyclic_graph(graph):
        return None
    cycle = [edge[0] for edge in nx.find_cycle(graph)]
    return " waits for ".join(f"stream {name} of rank {rank}" for rank, name in [*cycle, cycle[0]])
