"""The decisions of the reference policy: small named functions that a fault, or an author's proposal,
replaces.

Each field of :class:`Decisions` is one question with one right default.  A fault is this table with one field
replaced, or one of the two orders permuted; nothing else in the reference policy has to change.  Where a
decision is arithmetic it calls the shared functions of ``spec.arith``, the same objects that are proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

from spec.arith import align, coverage
from spec.book import Request
from spec.config import Config, Group
from spec.ops import Deref, TableRow, UserId
from spec.reference.plan import Chunk

Table = Callable[[int, int], TableRow]

V2_ORDER = (
    "post",
    "leave",
    "take",
    "update",
    "flush",
    "zero",
    "copy",
    "gather",
    "pre",
    "forward",
    "after",
    "load",
)
"""A worker's step, reference order: late work of earlier steps first, and a flush before anything overwrites.

vLLM 0.33.0 differs in one place that matters: its v2 runner flushes after zeroing, copy-on-write and pre-copy
(``v1/worker/gpu/model_runner.py::execute_model``: ``update_requests`` precedes ``pre_forward``).
"""

V1_ORDER = (
    "flush",
    "rows",
    "leave",
    "take",
    "update",
    "zero",
    "copy",
    "gather",
    "pre",
    "forward",
    "after",
    "load",
)
"""The v1 runner: flush first, then the host's batch rows
(``v1/worker/gpu_model_runner.py::execute_model``)."""


# -- ownership ---------------------------------------------------------------------------------------------
def free_basis(request: Request) -> int:
    """Tokens behind which columns may be freed: *processed* ones; steps in flight still read behind the
    others.

    Source: ``v1/core/kv_cache_manager.py::allocate_slots``.  Freed on the optimistic count in
    https://github.com/vllm-project/vllm-ascend/issues/13501."""
    return request.processed


def retained_column(group: Group, processed: int) -> int:
    """First column of a sliding-window group that must be kept: the window, and what a drafter re-reads.

    Source: ``SlidingWindowManager.get_num_skipped_tokens``; https://github.com/vllm-project/vllm/issues/56701.
    """
    return coverage.first_retained_column(
        processed, group.window_tokens, group.extra_tokens, group.block_tokens
    )


def publish_limit(config: Config, computed: int, scheduled: int, known: int) -> int:
    """Tokens whose attention blocks may go under a key when a step is scheduled: verified ones only.

    Source: ``KVCacheManager.allocate_slots`` (``num_tokens`` caps the extent)."""
    return min(computed + scheduled, known)


def waits_for_returns(lacking: int, returning: int) -> bool:
    """Whether a request that lacks blocks waits for those that come back when steps in flight are over,
    instead of preempting others.

    What a victim holds does not come at once either where it waits for its steps: whoever preempts on
    preempts everybody, itself at last, and all are admitted again together, for ever.

    Source: ``v1/core/sched/scheduler.py::Scheduler.schedule``, its loop of preemptions.
    """
    return lacking <= returning


def frees_wait_for_steps(request: Request) -> bool:
    """Whether a finished or preempted request's blocks wait for its steps in flight
    (``Scheduler._free_request_blocks``; https://github.com/vllm-project/vllm/pull/45357)."""
    return bool(request.flying)


def copies_tail(block: int) -> bool:
    """Whether a state published inside a block is copied away before its owner's next step overwrites it
    (``MambaManager._cache_partial_tail_block``)."""
    return True


def copies_adopted_tail(block: int) -> bool:
    """Whether a request that hits a prefix ending inside a block gets a private copy, since it will write
    there.

    Source: ``v1/core/kv_cache_manager.py::take_kv_cache_block_copies``.
    """
    return True


def release_list(table: list[int], mirror: list[int]) -> list[int]:
    """Blocks that a finished request gives back: those in its table, each once
    (https://github.com/vllm-project/vllm/issues/42571)."""
    return table


def hit_first(group: Group, hit: int, drop: int) -> int:
    """First column of a windowed group that a local hit must find, ``drop`` blocks behind it being dropped:
    that of the window, or attention chunk, that ends at the hit
    (https://github.com/vllm-project/vllm/pull/17398)."""
    if group.kind.value == "chunked":
        return coverage.skipped_tokens_chunked(hit, group.window_tokens) // group.block_tokens
    return coverage.first_retained_column(hit, group.window_tokens, 0, group.block_tokens)


def touches_hit_first() -> bool:
    """Whether every group's hit is held before any group allocates
    (https://github.com/vllm-project/vllm/issues/39702)."""
    return True


def longest_hit(known: int) -> int:
    """Tokens that a hit may cover: one is left to compute
    (https://github.com/vllm-project/vllm/pull/44599)."""
    return known - 1


def group_must_serve(group: Group) -> bool:
    """Whether a hit needs this group's blocks: every group's
    (https://github.com/vllm-project/vllm/issues/46453)."""
    return True


def dropped_hit(hit: int, unit: int, drops: int) -> int:
    """A hit after the groups' tail drop: the dropped unit was matched past the hit, so nothing more is taken
    off (https://github.com/vllm-project/vllm/issues/51771)."""
    return hit


def append_column(length: int) -> int:
    """Where a running request's new block ids go in its row: behind those it has
    (https://github.com/vllm-project/vllm-ascend/pull/15674)."""
    return length


def keeps_mirror() -> bool:
    """Whether the copy of a request's block ids survives preemption
    (https://github.com/LMCache/LMCache/pull/1361)."""
    return False


def forgets_key(block: int) -> bool:
    """Whether a cached block that is handed out anew loses its key
    (``BlockPool._maybe_evict_cached_block``)."""
    return True


def settled_count(computed: int, rejected: int) -> int:
    """The scheduler's count once a step's drafts are verified: without the rejected ones
    (``Scheduler.update_from_output``)."""
    return computed - rejected


def runs_ahead(step: int, sampled_in: int, stages: int) -> bool:
    """Whether a request with a step in flight is in ``step`` again: once every stage will have post-processed
    the step that last sampled for it (``AsyncScheduler._update_after_schedule``, ``decode_stagger``)."""
    return step >= sampled_in + stages


def hit_unit(units: tuple[int, ...]) -> int:
    """Tokens that a hit is a multiple of, the groups' blocks (or chunks) being ``units``: their least common
    multiple (``v1/core/kv_cache_utils.py::resolve_kv_cache_block_sizes``)."""
    return lcm(*units)


def gives_back(ran: bool) -> bool:
    """Whether a request that is over gives its blocks back; ``ran``: a step has grown its row.  Whatever it
    had reached (https://github.com/NVIDIA/TensorRT-LLM/pull/15018)."""
    return True


def released_with_copy(columns: int) -> int:
    """Leading columns of the group that go back with the source of a copy-on-write: none, the hit holds them
    for itself (https://github.com/sgl-project/sglang/pull/27038)."""
    return 0


def output_life(uid: UserId, live: tuple[UserId, ...]) -> UserId:
    """Which request an output is about: the incarnation that was in the step, not whoever has its name now
    (https://github.com/vllm-project/vllm/issues/42492)."""
    return uid


def delivers(since: int) -> bool:
    """Whether sampled tokens reach their request; ``since``: how many outputs, these included, have come
    since it was last preempted (0: it never was).  Always: each is sampled once
    (https://github.com/vllm-project/vllm/issues/42043)."""
    return True


def hands_over(running: bool) -> bool:
    """Whether a request that has all its tokens hands its table to the connector: one that was preempted in
    its last step has none any more (https://github.com/vllm-project/vllm/pull/48141)."""
    return running


# -- recurrent state ---------------------------------------------------------------------------------------
def seed_divisor(config: Config, block: int) -> int:
    """Block size that the seed column divides by: the recurrent group's own.

    Source: ``MambaHybridModelState.add_request``; the smallest block of all groups up to 0.31.0
    (https://github.com/vllm-project/vllm/issues/53142)."""
    return block


def split_divisor(config: Config, block: int) -> int:
    """Block size that prefill chunks are cut by: the recurrent group's own
    (https://github.com/vllm-project/vllm/pull/54076)."""
    return block


def prefill_split(
    start: int, scheduled: int, prefill_end: int, block: int, step_tokens: int, last: int, tail: int
) -> int:
    """Tokens of a prefill chunk: it ends on a boundary of ``block`` tokens unless it ends the prefill, behind
    the last checkpoint (``last``, that of hash blocks ``tail``) as well as before it.

    Only before it in https://github.com/vllm-project/vllm/pull/51113.  It knows of no prefix shared with
    another request: 0.33.0 also stops a whole number of blocks behind the start at such a junction
    (``align.junction_stop``), or at the junction itself where hashes are finer than blocks and
    ``enable_mamba_shared_prefix_checkpoint`` is set, which no formula here models."""
    return align.aligned_split(start, scheduled, prefill_end, block, step_tokens, last, tail, 0, False)


def same_step_hit(cached_this_step: bool) -> bool:
    """Whether a recurrent state cached in this very step may be hit: never, its reader would run before its
    writer (https://github.com/vllm-project/vllm/pull/29387)."""
    return not cached_this_step


def boundary_block(table_block: int, mirror_block: int) -> int:
    """Which block a store of a recurrent column reads: the core's, exactly; a mirror that only appends names
    a stale one (https://github.com/1CatAI/1Cat-vLLM/pull/249)."""
    return table_block


def reserve(known: int, computed: int, scheduled: int, block: int, lookahead: int) -> int:
    """Tokens of a prefill chunk that leave a multi-module drafter nothing, or all it reads past the chunk.

    The plain reserve, applied after the split, can undo it for ever
    (``Scheduler._reserve_prefill_lookahead``); this one moves the end to a boundary, or not at all."""
    return align.aligned_reserve(known, computed, scheduled, block, lookahead)


def publishes_unrun_boundary() -> bool:
    """Whether a decode step's boundary is published when the step is scheduled.

    It reaches its column only with post-processing, ``pp`` steps later on an earlier stage; so it is
    published when the step's output is processed.  vLLM 0.33.0 registers a boundary at the step's first token
    when it is scheduled (``KVCacheManager.allocate_slots``: ``cache_blocks``), unless hashes look ahead.

    No discipline localises it.  What forbids publishing too early are consequences: ``state_reads_exact`` at
    the reader, ``ready_chunk_exact`` at the store (candidate S29 of docs/invariants.md)."""
    return False


def mamba_drops() -> int:
    """Units that a recurrent group drops from a hit when its peers drop theirs: none, its boundary states are
    exact (disputed upstream: https://github.com/vllm-project/vllm/pull/48375)."""
    return 0


def positional_group(group: Group) -> bool:
    """Whether a group's blocks are stored by column.  Recurrent rows are relocated and reused: never.

    Source: ``offloading/scheduler.py::_build_aligned_boundary_store_jobs``;
    https://github.com/1CatAI/1Cat-vLLM/pull/249.
    """
    return group.kind.value != "mamba"


def relocates(allocated: bool) -> bool:
    """Whether the last K columns of a row are scratch, which a step may relocate: if a step has grown the
    row; after a hit its last column is somebody's state (``MambaManager.allocate_new_blocks``)."""
    return allocated


def hand_off_stands(current: bool) -> bool:
    """Whether a boundary that was offered is stored; ``current``: its block is still under that key.  Reused
    ones are not (``take_boundary_state_offloads``)."""
    return current


# -- late kernels ------------------------------------------------------------------------------------------
def slot_row(index: int, slot: int) -> TableRow:
    """The table row of a state copy: the persistent row of the request's slot, whatever the batch order.

    Source: ``v1/worker/mamba_utils.py``, from 0.32.0; by batch index before
    (https://github.com/vllm-project/vllm/pull/55506)."""
    return Deref("source", slot)


def gathered_row(index: int, slot: int) -> TableRow:
    """The table row of the forward's state columns: the gathered row, null for padding.

    Source: ``v1/worker/gpu/block_table.py::gather_block_tables``;
    https://github.com/vllm-project/vllm/pull/55506.
    """
    return Deref("gathered", index)


def padded_row(index: int) -> TableRow:
    """The same for a padded row: gathered rows past the batch are null.

    Source: https://github.com/vllm-project/vllm/issues/43810.
    """
    return Deref("gathered", index)


def gather_buffer(step: int) -> str:
    """The buffer that this step's tables are gathered into: always the one that captured graphs address.

    Source: https://github.com/vllm-project/vllm/pull/44868.
    """
    return "gathered"


def gathers_padding(rows: int, padded: int) -> int:
    """Gathered rows that a step rewrites: the padded ones too, so that no old row is left behind
    (https://github.com/vllm-project/vllm/pull/37728)."""
    return padded


def settles_computed(late: bool) -> bool:
    """Whether post-processing takes rejected drafts off the device's count, on every stage
    (https://github.com/vllm-project/vllm/issues/44697)."""
    return True


def last_row(index: int, slot: int) -> int:
    """Row of the step whose sampled token the slot is fed with next: its own, in whatever order the batch is
    by then (https://github.com/vllm-project/vllm-gaudi/pull/642)."""
    return index


def draft_row(index: int, slot: int, late: bool) -> int:
    """Row of the step whose drafts the slot is fed with next; ``late``: on a stage that does not sample.  Its
    own, on every stage; -1 for none (https://github.com/vllm-project/vllm/pull/52295)."""
    return index


def accepted_floor() -> int:
    """The least accepted count: a row that sampled nothing counts one
    (https://github.com/vllm-project/vllm/pull/50021)."""
    return 1


def masks_late_row(then: int, now: int) -> bool:
    """Whether a late row is skipped: its slot has another generation by now.

    Source: ``v1/worker/gpu/pp_utils.py``; https://github.com/vllm-project/vllm/issues/54173.
    """
    return then != now


def stages_afresh() -> bool:
    """Whether each step's table writes leave the host in memory of their own: a pinned buffer that is
    rewritten before the copy has read it sends the next step's
    (https://github.com/NVIDIA/TensorRT-LLM/pull/15546)."""
    return True


# -- offload -----------------------------------------------------------------------------------------------
def lookup_first(group: Group, hit: int, local: int, chunk: int) -> int:
    """First chunk of a windowed group that lookup must find: the window, the extra tokens, the padding; of a
    chunked one the attention chunk (https://github.com/vllm-project/vllm/issues/51150)."""
    if group.kind.value == "chunked":
        chunks = coverage.chunked_window_chunks(group.window_tokens, chunk)
        return coverage.first_checked_chunk(hit, local, chunks, chunk)
    return coverage.lookup_first_chunk(hit, local, group.window_tokens, group.extra_tokens, chunk)


def inflight_first(group: Group, hit: int, local: int, chunk: int) -> int:
    """First chunk of a window group that must not be under load by someone else.

    Source: ``offloading/scheduler.py::get_num_new_matched_tokens``.
    """
    return coverage.in_flight_first_chunk(hit, local, group.window_tokens, group.extra_tokens, chunk)


def store_window(group: Group, drops: int) -> int:
    """Blocks of a window group kept before each alignment boundary by the store.

    Source: ``offloading/scheduler.py::_reachable_store_block_mask``;
    https://github.com/vllm-project/vllm/pull/56709.
    """
    return coverage.store_need_blocks_corrected(
        group.window_tokens, group.extra_tokens, group.block_tokens, drops
    )


def fence_done(waiting: int) -> bool:
    """Whether a job's fence may go, ``waiting`` ranks not having reported: after the last report."""
    return waiting == 0


def readmit_waits(jobs: int) -> bool:
    """Whether a request with jobs in flight has to wait before it is admitted again
    (https://github.com/vllm-project/vllm/issues/46014)."""
    return jobs > 0


def store_limit(known: int, prompt: int, finished: bool) -> int:
    """Tokens of a finished request that may be stored: its last token was sampled and never computed.

    Source: ``offloading/scheduler.py::_calc_num_offloadable_tokens``.
    """
    return max(prompt, known - 1) if finished else known


def final_stores(why: str, running: bool) -> bool:
    """Whether a request that is over stores what is full and new: one that ran to its end
    (https://github.com/vllm-project/vllm/issues/49118)."""
    return running and why == "length"


def storable_chunks(full: int, held: int) -> int:
    """Chunks of a group that may be stored, tokens filling ``full`` and columns ``held``: those that have
    blocks (https://github.com/vllm-project/vllm/issues/49118)."""
    return min(full, held)


def clipped_columns(group: Group, columns: int, computed: int) -> int:
    """Columns of a finished request's table that are handed to the connector: attention is cut at the
    computed frontier, state groups keep every column the allocator defined
    (``KVCacheManager.get_block_ids_for_computed_tokens``)."""
    if group.kind.value == "mamba":
        return columns
    return min(columns, coverage.blocks_of(computed, group.block_tokens))


def job_done(waiting: int) -> bool:
    """Whether a transfer is complete, ``waiting`` ranks not having reported: after the last report.

    A chunk visible before every rank has stored it: https://github.com/llm-d/llm-d-kv-cache/issues/504."""
    return waiting == 0


def lists_stored() -> bool:
    """Whether a chunk that every rank has stored enters the map that lookups read
    (https://github.com/vllm-project/vllm/issues/53498)."""
    return True


def reported_life(uid: UserId, live: tuple[UserId, ...]) -> UserId:
    """Which request a report is about: the incarnation that started the transfer, not whoever has its name
    now (https://github.com/volcano-sh/kthena/issues/1423)."""
    return uid


def flushed_jobs(jobs: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the stores that fence a reused block are flushed: every one.

    Source: ``offloading/scheduler.py::build_connector_meta``.
    """
    return jobs


def load_parts(chunks: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], ...]:
    """The transfers that a load is made of: one; several where several connectors serve one request.

    Source: https://github.com/vllm-project/vllm/issues/53049.
    """
    return (chunks,)


def joins_loads(left: int) -> bool:
    """Whether a request waits for the other transfers of its load, ``left`` in number
    (https://github.com/vllm-project/vllm/issues/53049)."""
    return left > 0


def load_shift(first: int) -> int:
    """Chunks by which sources lie before their targets, whose list starts at chunk ``first``: the same
    position on both sides (https://github.com/vllm-project/vllm/issues/48633)."""
    return 0


def local_columns(columns: tuple[int, ...], counted: int) -> int:
    """Leading columns that a load takes for local: as many as the scheduler counted, whatever they hold
    (https://github.com/1CatAI/1Cat-vLLM/issues/567)."""
    return counted


def recovered_groups(groups: int) -> int:
    """Groups whose blocks a failed load gives up: all of them
    (https://github.com/vllm-project/vllm/pull/50388)."""
    return groups


def fenced_blocks(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Device blocks that a store fences: all it reads
    (https://github.com/ModelEngine-Group/unified-cache-management/pull/1088)."""
    return blocks


def unfences(job: int, jobs: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the stores that fence one physical block lose the fence when ``job`` is done: that one
    alone."""
    return (job,)


def store_waits_for_main() -> bool:
    """Whether a store starts only after everything enqueued before it has run
    (https://github.com/vllm-project/vllm/issues/45704)."""
    return True


def load_waits_for_main() -> bool:
    """The same for a load.  False for writes that come over the network, which no stream orders.

    Source: ``v1/kv_offload/cpu/gpu_worker.py``; https://github.com/vllm-project/vllm/pull/45357.
    """
    return True


def abort_waits_for_load() -> bool:
    """Whether the targets of a load in flight stay held when its request is aborted
    (https://github.com/vllm-project/vllm/pull/32255)."""
    return True


def failure_waits(waiting: int) -> bool:
    """Whether a failed transfer waits for the ranks that are still copying
    (https://github.com/vllm-project/vllm/pull/56104)."""
    return waiting > 0


def uses_failed_load() -> bool:
    """Whether a load that failed on some rank counts as landed
    (https://github.com/vllm-project/vllm/issues/52234)."""
    return False


def keeps_failed_store() -> bool:
    """Whether a store that failed on some rank leaves its key
    (https://github.com/LMCache/LMCache/issues/4991)."""
    return False


def raises_on_failure() -> bool:
    """Whether a failed load is an assertion (https://github.com/vllm-project/vllm/issues/39732)."""
    return False


def counts_report(rank: int, ranks: int) -> bool:
    """Whether a rank's report is counted: every rank's is
    (https://github.com/vllm-project/vllm/pull/28768)."""
    return True


def evictable(readers: int) -> bool:
    """Whether a ready host chunk may be evicted, ``readers`` loads reading it
    (https://github.com/LMCache/LMCache/pull/3130)."""
    return readers == 0


def returns_readers() -> bool:
    """Whether a load gives its read references back (https://github.com/LMCache/LMCache/pull/3884)."""
    return True


def pending_is_present(state: str) -> bool:
    """Whether a chunk that is still being written counts as present: the request asks again instead.

    Source: ``v1/kv_offload/cpu/manager.py::lookup``; https://github.com/vllm-project/vllm/issues/46014.
    """
    return False


def clears_loading() -> bool:
    """Whether a load that failed takes its keys off the list of chunks under load.

    Source: ``offloading/scheduler.py::_chunks_being_loaded``.
    """
    return True


def reset_keeps_places() -> bool:
    """Whether host places of transfers in flight stay reserved through a reset of the tier.

    Source: ``offloading/scheduler.py::reset_cache``.
    """
    return True


def reset_reaches(state: str) -> bool:
    """Whether a reset that includes the host tier takes a chunk in this state (``writing``, ``ready``) out of
    it: each, or prefixes from before the reset are found again
    (https://github.com/vllm-project/vllm/issues/57727)."""
    return True


def loaded_give_way() -> bool:
    """Whether loaded requests that wait to run give their blocks up when others cannot go on without.

    Source: https://github.com/vllm-project/vllm/issues/46283.
    """
    return True


def flushes_preempted(way: str) -> bool:
    """Whether a preempted request's unfinished transfers are flushed in the same step
    (https://github.com/vllm-project/vllm/issues/52360)."""
    return way == "store"


def store_segment(alignment: int) -> int:
    """Tokens of one segment of the store's mask: the unit that external hits are aligned to
    (https://github.com/vllm-project/vllm-ascend/pull/11383)."""
    return alignment


# -- accepted counts of the v1 runner ----------------------------------------------------------------------
def counts_buffer() -> str:
    """Where accepted counts are copied: a buffer of the runner's own, which nobody rewrites meanwhile
    (https://github.com/vllm-project/vllm/issues/51571)."""
    return "own"


def previous_row(then: int | None, same_life: bool) -> int:
    """The row a request's count is taken from: its row in the last step, or -1 (the count is 1) for a new
    life.

    Source: https://github.com/vllm-project/vllm/pull/47199.
    """
    return then if then is not None and same_life else -1


@dataclass(frozen=True, slots=True)
class Decisions:
    """Every decision that can be replaced; defaults are right."""

    free_basis: Callable[[Request], int] = free_basis
    retained_column: Callable[[Group, int], int] = retained_column
    publish_limit: Callable[[Config, int, int, int], int] = publish_limit
    waits_for_returns: Callable[[int, int], bool] = waits_for_returns
    frees_wait_for_steps: Callable[[Request], bool] = frees_wait_for_steps
    release_list: Callable[[list[int], list[int]], list[int]] = release_list
    hit_first: Callable[[Group, int, int], int] = hit_first
    touches_hit_first: Callable[[], bool] = touches_hit_first
    longest_hit: Callable[[int], int] = longest_hit
    group_must_serve: Callable[[Group], bool] = group_must_serve
    dropped_hit: Callable[[int, int, int], int] = dropped_hit
    append_column: Callable[[int], int] = append_column
    keeps_mirror: Callable[[], bool] = keeps_mirror
    forgets_key: Callable[[int], bool] = forgets_key
    settled_count: Callable[[int, int], int] = settled_count
    runs_ahead: Callable[[int, int, int], bool] = runs_ahead
    hit_unit: Callable[[tuple[int, ...]], int] = hit_unit
    gives_back: Callable[[bool], bool] = gives_back
    released_with_copy: Callable[[int], int] = released_with_copy
    output_life: Callable[[UserId, tuple[UserId, ...]], UserId] = output_life
    delivers: Callable[[int], bool] = delivers
    hands_over: Callable[[bool], bool] = hands_over
    copies_tail: Callable[[int], bool] = copies_tail
    copies_adopted_tail: Callable[[int], bool] = copies_adopted_tail
    seed_divisor: Callable[[Config, int], int] = seed_divisor
    split_divisor: Callable[[Config, int], int] = split_divisor
    prefill_split: Callable[[int, int, int, int, int, int, int], int] = prefill_split
    same_step_hit: Callable[[bool], bool] = same_step_hit
    boundary_block: Callable[[int, int], int] = boundary_block
    reserve: Callable[[int, int, int, int, int], int] = reserve
    publishes_unrun_boundary: Callable[[], bool] = publishes_unrun_boundary
    mamba_drops: Callable[[], int] = mamba_drops
    positional_group: Callable[[Group], bool] = positional_group
    relocates: Callable[[bool], bool] = relocates
    hand_off_stands: Callable[[bool], bool] = hand_off_stands
    precopy_row: Table = slot_row
    post_row: Table = slot_row
    index_row: Table = gathered_row
    padded_row: Callable[[int], TableRow] = padded_row
    gather_buffer: Callable[[int], str] = gather_buffer
    gathers_padding: Callable[[int, int], int] = gathers_padding
    settles_computed: Callable[[bool], bool] = settles_computed
    last_row: Callable[[int, int], int] = last_row
    draft_row: Callable[[int, int, bool], int] = draft_row
    accepted_floor: Callable[[], int] = accepted_floor
    masks_late_row: Callable[[int, int], bool] = masks_late_row
    stages_afresh: Callable[[], bool] = stages_afresh
    lookup_first: Callable[[Group, int, int, int], int] = lookup_first
    inflight_first: Callable[[Group, int, int, int], int] = inflight_first
    store_window: Callable[[Group, int], int] = store_window
    fence_done: Callable[[int], bool] = fence_done
    job_done: Callable[[int], bool] = job_done
    fenced_blocks: Callable[[tuple[int, ...]], tuple[int, ...]] = fenced_blocks
    unfences: Callable[[int, tuple[int, ...]], tuple[int, ...]] = unfences
    store_waits_for_main: Callable[[], bool] = store_waits_for_main
    load_waits_for_main: Callable[[], bool] = load_waits_for_main
    abort_waits_for_load: Callable[[], bool] = abort_waits_for_load
    failure_waits: Callable[[int], bool] = failure_waits
    uses_failed_load: Callable[[], bool] = uses_failed_load
    keeps_failed_store: Callable[[], bool] = keeps_failed_store
    raises_on_failure: Callable[[], bool] = raises_on_failure
    counts_report: Callable[[int, int], bool] = counts_report
    evictable: Callable[[int], bool] = evictable
    returns_readers: Callable[[], bool] = returns_readers
    pending_is_present: Callable[[str], bool] = pending_is_present
    clears_loading: Callable[[], bool] = clears_loading
    reset_keeps_places: Callable[[], bool] = reset_keeps_places
    reset_reaches: Callable[[str], bool] = reset_reaches
    store_segment: Callable[[int], int] = store_segment
    loaded_give_way: Callable[[], bool] = loaded_give_way
    readmit_waits: Callable[[int], bool] = readmit_waits
    store_limit: Callable[[int, int, bool], int] = store_limit
    clipped_columns: Callable[[Group, int, int], int] = clipped_columns
    flushes_preempted: Callable[[str], bool] = flushes_preempted
    final_stores: Callable[[str, bool], bool] = final_stores
    storable_chunks: Callable[[int, int], int] = storable_chunks
    lists_stored: Callable[[], bool] = lists_stored
    reported_life: Callable[[UserId, tuple[UserId, ...]], UserId] = reported_life
    flushed_jobs: Callable[[tuple[int, ...]], tuple[int, ...]] = flushed_jobs
    load_parts: Callable[[tuple[Chunk, ...]], tuple[tuple[Chunk, ...], ...]] = load_parts
    joins_loads: Callable[[int], bool] = joins_loads
    load_shift: Callable[[int], int] = load_shift
    local_columns: Callable[[tuple[int, ...], int], int] = local_columns
    recovered_groups: Callable[[int], int] = recovered_groups
    counts_buffer: Callable[[], str] = counts_buffer
    previous_row: Callable[[int | None, bool], int] = previous_row
    v2_order: tuple[str, ...] = V2_ORDER
    v1_order: tuple[str, ...] = V1_ORDER
