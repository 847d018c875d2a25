"""The decisions of the implementation that an author may replace: small functions, each one question.

``replace(Decisions(), lookup_first=mine)`` is another implementation; the harness (``impl.refine``) judges
it, and its tests put the faults of the catalogue in this way.  Names are those of the model's vocabulary.
What is arithmetic calls the shared formulas of ``spec.arith``.

``request`` stands for anything with ``computed``, ``processed`` and ``flying``; ``group`` for
``spec.config.Group``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from impl.scheduler.pool import Chunk
from spec.arith import align, coverage
from spec.config import Config, Group, Kind
from spec.ops import Deref, TableRow, UserId

V2_ORDER = (
    "post", "leave", "take", "update", "flush", "zero", "copy", "gather", "pre", "forward", "after", "load",
)  # fmt: skip
"""Stages of a step in the v2 runner: late work first, and a flush before anything overwrites."""

V1_ORDER = (
    "flush", "rows", "leave", "take", "update", "zero", "copy", "gather", "pre", "forward", "after", "load",
)  # fmt: skip
"""Stages of a step in the v1 runner."""

MODEL_ONLY = frozenset({"draft_row", "last_row"})
"""Decisions of the reference that are not taken here: a device gets its input tokens from the host."""


def _yes(*_: Any) -> bool:
    return True


def _no(*_: Any) -> bool:
    return False


def _processed(request: Any) -> int:
    return int(request.processed)


def _retained_column(group: Group, tokens: int) -> int:
    return coverage.first_retained_column(tokens, group.window_tokens, group.extra_tokens, group.block_tokens)


def _verified(config: Config, computed: int, scheduled: int, known: int) -> int:
    return min(computed + scheduled, known)


def _flying(request: Any) -> bool:
    return bool(request.flying)


def _table(table: list[int], mirror: list[int]) -> list[int]:
    return table


def _slot_row(index: int, slot: int) -> TableRow:
    return Deref("source", slot)


def _gathered_row(index: int, slot: int) -> TableRow:
    return Deref("gathered", index)


def _padded_row(index: int) -> TableRow:
    return Deref("gathered", index)


def _lookup_first(group: Group, hit: int, local: int, chunk: int) -> int:
    if group.kind is Kind.CHUNKED:
        window = coverage.chunked_window_chunks(group.window_tokens, chunk)
        return coverage.first_checked_chunk(hit, local, window, chunk)
    return coverage.lookup_first_chunk(hit, local, group.window_tokens, group.extra_tokens, chunk)


def _inflight_first(group: Group, hit: int, local: int, chunk: int) -> int:
    return coverage.in_flight_first_chunk(hit, local, group.window_tokens, group.extra_tokens, chunk)


def _store_window(group: Group, drops: int) -> int:
    return coverage.store_need_blocks_corrected(
        group.window_tokens, group.extra_tokens, group.block_tokens, drops
    )


def _store_limit(known: int, prompt: int, finished: bool) -> int:
    return max(prompt, known - 1) if finished else known


def _clipped(group: Group, columns: int, computed: int) -> int:
    if group.kind is Kind.MAMBA:
        return columns
    return min(columns, coverage.blocks_of(computed, group.block_tokens))


def _prefill_split(
    start: int, scheduled: int, prefill_end: int, block: int, step_tokens: int, last: int, tail: int
) -> int:
    return align.aligned_split(start, scheduled, prefill_end, block, step_tokens, last, tail, 0, False)


def _hit_first(group: Group, hit: int, drop: int) -> int:
    if group.kind is Kind.CHUNKED:
        return coverage.skipped_tokens_chunked(hit, group.window_tokens) // group.block_tokens
    return coverage.first_retained_column(hit, group.window_tokens, 0, group.block_tokens)


def _reserve(known: int, computed: int, scheduled: int, block: int, lookahead: int) -> int:
    return align.aligned_reserve(known, computed, scheduled, block, lookahead)


def _previous_row(then: int | None, same_life: bool) -> int:
    return then if then is not None and same_life else -1


@dataclass(frozen=True, slots=True)
class Decisions:
    """Every decision that can be replaced; the defaults are right."""

    # -- ownership
    free_basis: Callable[[Any], int] = _processed  # tokens behind which columns may be freed
    retained_column: Callable[[Group, int], int] = _retained_column  # first window column to keep
    publish_limit: Callable[[Config, int, int, int], int] = _verified  # tokens whose blocks get a key
    frees_wait_for_steps: Callable[[Any], bool] = _flying  # blocks of an ended request wait for its steps
    # a request that lacks blocks waits if as many come back by themselves, instead of preempting others
    waits_for_returns: Callable[[int, int], bool] = lambda lacking, returning: lacking <= returning
    gives_back: Callable[[bool], bool] = _yes  # an ended request's blocks, whether or not it ever ran
    forgets_key: Callable[[int], bool] = _yes  # a block that is handed out anew loses its key
    release_list: Callable[[list[int], list[int]], list[int]] = _table  # blocks that it gives back
    hit_first: Callable[[Group, int, int], int] = _hit_first  # first windowed column that a hit must find
    touches_hit_first: Callable[[], bool] = _yes  # a hit is held before anything is allocated
    longest_hit: Callable[[int], int] = lambda known: known - 1  # one token is left to compute
    hit_unit: Callable[[tuple[int, ...]], int] = lambda units: lcm(*units)  # of hits, from the groups' units
    group_must_serve: Callable[[Group], bool] = _yes  # whether a hit needs the group's blocks
    dropped_hit: Callable[[int, int, int], int] = lambda hit, unit, drops: hit  # after tail drops
    copies_tail: Callable[[int], bool] = _yes  # a key inside a block moves to a copy
    copies_adopted_tail: Callable[[int], bool] = _yes  # and its hit gets a private copy
    released_with_copy: Callable[[int], int] = lambda columns: 0  # leading columns that go with its source
    keeps_mirror: Callable[[], bool] = _no  # whether a copy of the row survives preemption
    # -- progress
    settled_count: Callable[[int, int], int] = lambda computed, rejected: computed - rejected
    # whether a request in flight may be in a step again, given the last one that samples for it
    runs_ahead: Callable[[int, int, int], bool] = lambda step, sampled_in, stages: step >= sampled_in + stages
    output_life: Callable[[UserId, tuple[UserId, ...]], UserId] = lambda uid, live: uid  # whose output it is
    delivers: Callable[[int], bool] = _yes  # sampled tokens, also the first since a preemption
    # -- recurrent state
    seed_divisor: Callable[[Config, int], int] = lambda config, block: block
    split_divisor: Callable[[Config, int], int] = lambda config, block: block
    # tokens of a prefill chunk, which ends on a boundary unless it ends the prefill
    prefill_split: Callable[[int, int, int, int, int, int, int], int] = _prefill_split
    # tokens of a chunk that leave a drafter of several modules nothing, or all it reads past the chunk
    reserve: Callable[[int, int, int, int, int], int] = _reserve
    same_step_hit: Callable[[bool], bool] = lambda cached_now: not cached_now
    boundary_block: Callable[[int, int], int] = lambda table, mirror: table
    publishes_unrun_boundary: Callable[[], bool] = _no
    mamba_drops: Callable[[], int] = lambda: 0
    positional_group: Callable[[Group], bool] = lambda group: group.kind is not Kind.MAMBA
    relocates: Callable[[bool], bool] = lambda allocated: allocated  # a grown row's last columns are scratch
    hand_off_stands: Callable[[bool], bool] = lambda current: current  # its block is still under that key
    # -- the worker
    stages_afresh: Callable[[], bool] = _yes  # each step's table writes leave the host in their own memory
    append_column: Callable[[int], int] = lambda length: length  # where new ids go in a row
    precopy_row: Callable[[int, int], TableRow] = _slot_row  # (batch index, slot) -> what the copy reads
    post_row: Callable[[int, int], TableRow] = _slot_row
    index_row: Callable[[int, int], TableRow] = _gathered_row
    padded_row: Callable[[int], TableRow] = _padded_row
    gather_buffer: Callable[[int], str] = lambda step: "gathered"
    gathers_padding: Callable[[int, int], int] = lambda rows, padded: padded
    settles_computed: Callable[[bool], bool] = _yes
    accepted_floor: Callable[[], int] = lambda: 1
    masks_late_row: Callable[[int, int], bool] = lambda then, now: then != now
    store_waits_for_main: Callable[[], bool] = _yes
    load_waits_for_main: Callable[[], bool] = _yes
    counts_buffer: Callable[[], str] = lambda: "own"
    previous_row: Callable[[int | None, bool], int] = _previous_row
    v2_order: tuple[str, ...] = V2_ORDER
    v1_order: tuple[str, ...] = V1_ORDER
    # -- the connector
    lookup_first: Callable[[Group, int, int, int], int] = _lookup_first
    inflight_first: Callable[[Group, int, int, int], int] = _inflight_first
    store_window: Callable[[Group, int], int] = _store_window
    store_segment: Callable[[int], int] = lambda alignment: alignment
    store_limit: Callable[[int, int, bool], int] = _store_limit
    storable_chunks: Callable[[int, int], int] = lambda full, held: min(full, held)
    clipped_columns: Callable[[Group, int, int], int] = _clipped
    final_stores: Callable[[str, bool], bool] = lambda why, running: running and why == "length"
    hands_over: Callable[[bool], bool] = lambda running: running  # a finished request's table
    fenced_blocks: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda blocks: blocks
    unfences: Callable[[int, tuple[int, ...]], tuple[int, ...]] = lambda job, jobs: (job,)
    flushed_jobs: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda jobs: jobs  # on a reused block
    fence_done: Callable[[int], bool] = lambda waiting: waiting == 0
    job_done: Callable[[int], bool] = lambda waiting: waiting == 0
    counts_report: Callable[[int, int], bool] = _yes
    reported_life: Callable[[UserId, tuple[UserId, ...]], UserId] = lambda uid, live: uid
    readmit_waits: Callable[[int], bool] = lambda jobs: jobs > 0
    flushes_preempted: Callable[[str], bool] = lambda way: way == "store"
    abort_waits_for_load: Callable[[], bool] = _yes
    loaded_give_way: Callable[[], bool] = _yes  # requests that loaded and wait free blocks for others
    load_parts: Callable[[tuple[Chunk, ...]], tuple[tuple[Chunk, ...], ...]] = lambda chunks: (chunks,)
    joins_loads: Callable[[int], bool] = lambda left: left > 0  # a request waits for its other transfers
    load_shift: Callable[[int], int] = lambda first: 0  # chunks by which sources lie before targets
    local_columns: Callable[[tuple[int, ...], int], int] = lambda columns, counted: counted
    recovered_groups: Callable[[int], int] = lambda groups: groups  # that a failed load gives up
    failure_waits: Callable[[int], bool] = lambda waiting: waiting > 0
    uses_failed_load: Callable[[], bool] = _no
    raises_on_failure: Callable[[], bool] = _no
    clears_loading: Callable[[], bool] = _yes
    # -- the host tier
    pending_is_present: Callable[[str], bool] = _no
    evictable: Callable[[int], bool] = lambda readers: readers == 0
    returns_readers: Callable[[], bool] = _yes
    keeps_failed_store: Callable[[], bool] = _no
    lists_stored: Callable[[], bool] = _yes  # what every rank has stored can be found
    reset_keeps_places: Callable[[], bool] = _yes
    reset_reaches: Callable[[str], bool] = _yes  # a chunk in this state is taken out of the tier
