"""The decisions of the reference policy: small named functions that a fault, or an author's proposal,
replaces.

Each field of :class:`Decisions` is one question with one right default.  A fault is this table with one field
replaced, or one of the two orders permuted; nothing else in the reference policy has to change.  Where a
decision is arithmetic it calls the shared functions of ``spec.arith``, the same objects that are proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec.arith import coverage
from spec.arith.division import floordiv
from spec.book import Request
from spec.config import Config, Group
from spec.ops import Deref, TableRow

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
    """First column of a sliding-window group that must be kept: the window, and what a drafter re-reads."""
    return coverage.first_retained_column(
        processed, group.window_tokens, group.extra_tokens, group.block_tokens
    )


def publish_limit(config: Config, computed: int, scheduled: int, known: int) -> int:
    """Tokens whose attention blocks may go under a key when a step is scheduled: verified ones only.

    Source: ``KVCacheManager.allocate_slots`` (``num_tokens`` caps the extent)."""
    return min(computed + scheduled, known)


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
    there."""
    return True


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


def same_step_hit(cached_this_step: bool) -> bool:
    """Whether a recurrent state cached in this very step may be hit: never, its reader would run before its
    writer (https://github.com/vllm-project/vllm/pull/29387)."""
    return not cached_this_step


def boundary_block(table_block: int, mirror_block: int) -> int:
    """Which block a boundary's store reads: the core's, exactly; a mirror that only appends names a stale one
    (https://github.com/1CatAI/1Cat-vLLM/pull/249)."""
    return table_block


def positional_group(group: Group) -> bool:
    """Whether a group's blocks are stored by column.  Recurrent rows are relocated and reused: never."""
    return group.kind.value != "mamba"


# -- late kernels ------------------------------------------------------------------------------------------
def slot_row(index: int, slot: int) -> TableRow:
    """The table row of a state copy: the persistent row of the request's slot, whatever the batch order.

    Source: ``v1/worker/mamba_utils.py``, from 0.32.0; by batch index before
    (https://github.com/vllm-project/vllm/pull/55506)."""
    return Deref("source", slot)


def gathered_row(index: int, slot: int) -> TableRow:
    """The table row of the forward's state columns: the gathered row, null for padding."""
    return Deref("gathered", index)


def padded_row(index: int) -> TableRow:
    """The same for a padded row: gathered rows past the batch are null."""
    return Deref("gathered", index)


def gather_buffer(step: int) -> str:
    """The buffer that this step's tables are gathered into: always the one that captured graphs address."""
    return "gathered"


def masks_late_row(then: int, now: int) -> bool:
    """Whether a late row is skipped: its slot has another generation by now."""
    return then != now


# -- offload -----------------------------------------------------------------------------------------------
def lookup_first(group: Group, hit: int, local: int, chunk: int) -> int:
    """First chunk of a window group that lookup must find: the window, the extra tokens, the padding."""
    return coverage.lookup_first_chunk(hit, local, group.window_tokens, group.extra_tokens, chunk)


def inflight_first(group: Group, hit: int, local: int, chunk: int) -> int:
    """First chunk of a window group that must not be under load by someone else."""
    return coverage.in_flight_first_chunk(hit, local, group.window_tokens, group.extra_tokens, chunk)


def store_window(group: Group, drops: int) -> int:
    """Blocks of a window group kept before each alignment boundary by the store."""
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
    """Tokens of a finished request that may be stored: its last token was sampled and never computed."""
    return max(prompt, known - 1) if finished else known


def clipped_columns(group: Group, columns: int, computed: int) -> int:
    """Columns of a finished request's table that are handed to the connector: attention is cut at the
    computed frontier, state groups keep every column the allocator defined
    (``KVCacheManager.get_block_ids_for_computed_tokens``)."""
    if group.kind.value == "mamba":
        return columns
    return min(columns, floordiv(computed, group.block_tokens))


def flushes_preempted(way: str) -> bool:
    """Whether a preempted request's unfinished transfers are flushed in the same step
    (https://github.com/vllm-project/vllm/pull/52360)."""
    return way == "store"


def reports_needed(ranks: int) -> int:
    """Reports that complete a transfer: one from every rank."""
    return ranks


# -- accepted counts of the v1 runner ----------------------------------------------------------------------
def counts_buffer() -> str:
    """Where accepted counts are copied: a buffer of the runner's own, which nobody rewrites meanwhile
    (https://github.com/vllm-project/vllm/issues/51571)."""
    return "own"


def previous_row(then: int | None, same_life: bool) -> int:
    """The row a request's count is taken from: its row in the last step, or -1 (the count is 1) for a new
    life."""
    return then if then is not None and same_life else -1


@dataclass(frozen=True, slots=True)
class Decisions:
    """Every decision that can be replaced; defaults are right."""

    free_basis: Callable[[Request], int] = free_basis
    retained_column: Callable[[Group, int], int] = retained_column
    publish_limit: Callable[[Config, int, int, int], int] = publish_limit
    frees_wait_for_steps: Callable[[Request], bool] = frees_wait_for_steps
    copies_tail: Callable[[int], bool] = copies_tail
    copies_adopted_tail: Callable[[int], bool] = copies_adopted_tail
    seed_divisor: Callable[[Config, int], int] = seed_divisor
    split_divisor: Callable[[Config, int], int] = split_divisor
    same_step_hit: Callable[[bool], bool] = same_step_hit
    boundary_block: Callable[[int, int], int] = boundary_block
    positional_group: Callable[[Group], bool] = positional_group
    precopy_row: Table = slot_row
    post_row: Table = slot_row
    index_row: Table = gathered_row
    padded_row: Callable[[int], TableRow] = padded_row
    gather_buffer: Callable[[int], str] = gather_buffer
    masks_late_row: Callable[[int, int], bool] = masks_late_row
    lookup_first: Callable[[Group, int, int, int], int] = lookup_first
    inflight_first: Callable[[Group, int, int, int], int] = inflight_first
    store_window: Callable[[Group, int], int] = store_window
    fence_done: Callable[[int], bool] = fence_done
    readmit_waits: Callable[[int], bool] = readmit_waits
    store_limit: Callable[[int, int, bool], int] = store_limit
    clipped_columns: Callable[[Group, int, int], int] = clipped_columns
    flushes_preempted: Callable[[str], bool] = flushes_preempted
    reports_needed: Callable[[int], int] = reports_needed
    counts_buffer: Callable[[], str] = counts_buffer
    previous_row: Callable[[int | None, bool], int] = previous_row
    v2_order: tuple[str, ...] = V2_ORDER
    v1_order: tuple[str, ...] = V1_ORDER
