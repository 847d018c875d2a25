"""The fence: from a store's creation to its last report, through reuse of its source.

**Story.**  A store is decided in one step, queued, submitted to a copy stream a step later, and reads its
source blocks whenever the stream gets there.  Meanwhile the blocks may be freed (a window moves on, the
request ends or is preempted) and handed to somebody else.  The fence, a set of job ids a physical block,
does not stop that; it obliges the step that reuses a block to *flush*: submit, then wait on the device,
before anything overwrites.  Every rank copies and reports for itself, in any order.  A chunk may be loaded
once every rank has stored it; the fence may go with the last report.

**In the field.**  A window block reused while its dump still reads
(https://github.com/ModelEngine-Group/unified-cache-management/pull/1088); preemption that frees blocks
before a queued store has read them (https://github.com/vllm-project/vllm/issues/52360); a request re-admitted
while its earlier store is unfinished (https://github.com/vllm-project/vllm/issues/46014); failed stores
that keep their key (https://github.com/LMCache/LMCache/issues/4991).

Sources: vLLM 0.33.0 ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` and ``worker.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.chains import GARBAGE, TORN
from spec.config import Kind
from spec.events import Event
from spec.memory import CONV, TEMPORAL
from spec.rule import Rule

if TYPE_CHECKING:
    from spec.world import Rank, World


def chunk_problem(world: World, rank: Rank, event: Event, subs: tuple[int, ...]) -> str | None:
    """How a host chunk on one rank differs from what its key names, if it does."""
    _, g, n, prefix, place, _ = event
    group = world.config.groups[g]
    line = world.chains.prefixes(prefix)
    per = world.config.blocks_per_chunk
    for sub, block in enumerate(subs):
        if not block:
            continue
        view, cells = rank.memory.host.get((place, sub), (g, (GARBAGE,)))
        if group.kind is Kind.MAMBA:
            window = cells[CONV] if len(cells) > 1 else GARBAGE
            found = (
                window[0] if isinstance(window, tuple) and window else window,
                cells[TEMPORAL % len(cells)],
            )
            if view != g or found != (line[n], line[n]):
                return (
                    f"state of {world.chains.name(found[1])}, should be that of {world.chains.name(line[n])}"
                )
            continue
        first = n - (per - sub) * group.block_tokens
        want = tuple(line[first + 1 : first + group.block_tokens + 1])
        if view != g or cells != want:
            at = next((i for i, cell in enumerate(cells) if i >= len(want) or cell != want[i]), 0)
            held = cells[at] if at < len(cells) else TORN
            name = world.chains.name
            return f"position {first + at} holds {name(held)}, should hold {name(want[at])}"
    return None


def ready_exact(world: World, event: Event) -> None:
    """Judged when a host chunk becomes loadable: every rank must hold the bytes that the key names."""
    _, g, n, prefix, place, state = event
    if state != "ready":
        world.tally["ready_chunk_exact"][0] += 1
        return
    entry = world.stored.get(place)
    if entry is None or entry[0] != (g, n, prefix):
        world.judge(
            "ready_chunk_exact", True, False, lambda: f"chunk {(g, n)} at place {place} was never stored"
        )
        return
    for rank in world.ranks:
        problem = chunk_problem(world, rank, event, entry[1])
        world.judge(
            "ready_chunk_exact", True, problem is None,
            lambda rank=rank, problem=problem: (  # type: ignore[misc]
                f"host chunk of group {world.config.groups[g].name} up to {n} tokens, "
                f"rank {rank.index}: {problem}"
            ),
        )  # fmt: skip


def place_is_free(world: World, event: Event) -> None:
    """Judged when a host chunk begins to be written."""
    _, g, n, _, place, state = event
    if state != "writing":
        world.tally["host_place_free"][0] += 1
        return
    held = [key[:2] for key, entry in world.book.tier.items() if entry.place == place]
    used = [t.job for t in world.transfers.values() if any(spot == place for _, spot, _ in t.chunks)]
    inside = 0 <= place < world.config.tier_chunks
    world.judge(
        "host_place_free", True, inside and not held and not used,
        lambda: (
            f"chunk {(g, n)} is written at place {place} of {world.config.tier_chunks}, "
            f"which chunks {held} hold and unreported transfers {used} use"
        ),
    )  # fmt: skip


def loads_ready(world: World, event: Event) -> None:
    """Judged at every load that is created."""
    _, _, way, uid, chunks = event
    if way != "load":
        return
    for key, place, _ in chunks:
        entry = world.book.tier.get(key)
        good = entry is not None and entry.state == "ready" and entry.place == place
        world.judge(
            "loads_only_ready_chunks", True, good,
            lambda key=key, entry=entry: f"{uid} loads {key}, which is {entry.state if entry else 'absent'}",  # type: ignore[misc]
        )  # fmt: skip


def load_xor_store(world: World, event: Event) -> None:
    """Judged at every load that is created."""
    _, _, way, uid, _ = event
    if way != "load":
        return
    others = [t.job for t in world.transfers.values() if t.uid == uid and t.way == "store"]
    world.judge(
        "load_xor_store", True, not others, lambda: f"{uid} loads while its stores {others} are in flight"
    )


RULES = (
    Rule(
        "job_ids_unique", "discipline", "fence",
        "A transfer's id is not in use.",
        "a transfer is created", ".../offloading/scheduler.py::_jobs", core=("job",),
    ),
    Rule(
        "report_once_per_rank", "discipline", "fence",
        "Every rank is counted once for every transfer; the pending count never goes negative.",
        "a report is taken", ".../offloading/scheduler.py::update_connector_output (asserts pending_count)",
        core=("unfence",),
    ),
    Rule(
        "flush_only_pending", "discipline", "fence",
        "Only transfers that are in flight are flushed.",
        "a flush is decided", ".../offloading/scheduler.py::build_connector_meta", core=("flush",),
    ),
    Rule(
        "reuse_flushes_fence", "discipline", "fence",
        "A step that hands out a fenced block flushes the stores that fence it.",
        "a step is handed to the ranks", ".../offloading/scheduler.py::build_connector_meta (jobs_to_flush)",
        core=("step",),
    ),
    Rule(
        "ready_chunk_exact", "consequence", "fence",
        "When a host chunk becomes loadable, every rank holds in it exactly the bytes that its key names.",
        "a host chunk becomes ready", "https://github.com/vllm-project/vllm/pull/51358",
        on=("tier",), judges=ready_exact,
    ),
    Rule(
        "host_place_free", "discipline", "fence",
        "A host chunk is written only at a place of the tier that no other chunk and no unreported transfer "
        "uses.",
        "a host chunk begins to be written",
        "v1/kv_offload/cpu/manager.py::CPUOffloadingManager.prepare_store; "
        "https://github.com/LMCache/LMCache/pull/3130",
        on=("tier",), judges=place_is_free,
    ),
    Rule(
        "loads_only_ready_chunks", "consequence", "fence",
        "A load that was admitted names only chunks that are present and ready.",
        "a load is created", "v1/kv_offload/cpu/manager.py::CPUOffloadingManager.prepare_load (asserts)",
        on=("job",), judges=loads_ready,
    ),
    Rule(
        "load_xor_store", "discipline", "fence",
        "A request does not load while its own stores are in flight.",
        "a load is created", "https://github.com/vllm-project/vllm/issues/46014",
        on=("job",), judges=load_xor_store,
    ),
)  # fmt: skip
