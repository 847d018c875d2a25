"""Ownership: one pool, many groups, references, keys before bytes.

**Story.**  Full attention, sliding-window and recurrent layers take their blocks from one pool.  A block id
is all that says whose bytes a page holds.  A request's columns are references; the block is free when the
last one goes.  A full block goes under a prefix key when the step that *will* fill it is scheduled, so that
a request of the same step can already hit it; that is right only because every reader comes later in stream
order.  A free block keeps its key until it is handed out again, unhashed ones first, the least recently
freed of the others next.

Columns that a window has left behind are freed while steps that still read behind them are in flight, so
freeing goes by *processed* tokens.  A finished request's blocks wait for its steps in flight.

**In the field.**  A block listed twice in one release (https://github.com/vllm-project/vllm/issues/42571);
blocks handed to a transfer while an issued step still writes them
(https://github.com/vllm-project/vllm/pull/45357); windows pruned on the optimistic count
(https://github.com/vllm-project/vllm-ascend/issues/13501); an allocation evicting the hit of its own
request (https://github.com/vllm-project/vllm/issues/39702).

Sources: vLLM 0.33.0 ``v1/core/block_pool.py``, ``v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from spec.core import NULL
from spec.events import Event
from spec.rule import Rule

if TYPE_CHECKING:
    from spec.world import World


def lost_or_doubly_owned(world: World) -> str | None:
    """References and table columns disagree."""
    book = world.book
    inside: Counter[tuple[int, object]] = Counter()
    for uid, request in book.requests.items():
        for cols in request.cols:
            for block in cols:
                if block != NULL:
                    inside[block, uid] += 1
        for block in request.retained:
            inside[block, uid] += 1
    for block, owners in book.core.holders.items():
        for owner, count in owners.items():
            if owner not in book.requests:
                return f"block {block} is held by {owner}, which is gone: lost"
            columns = inside.pop((block, owner), 0)
            if columns != count:
                return f"block {block} is in {columns} columns of {owner}, which has {count} references"
    if inside:
        block, owner = next(iter(inside))
        return f"block {block} is in a column of {owner} without a reference"
    return None


def free_queue_wrong(world: World) -> str | None:
    """The free queue and the unheld blocks disagree."""
    free, held = world.book.free, world.book.core.holders
    if len(set(free)) != len(free):
        return f"the free queue lists a block twice: {list(free)}"
    for block in free:
        if block in held:
            return f"block {block} is free and held by {list(held[block])}"
    if len(free) + len(held) != world.config.pool_blocks - 1:
        known = set(free) | set(held)
        lost = [b for b in range(1, world.config.pool_blocks) if b not in known]
        return f"blocks {lost} are neither free nor held"
    return None


def key_names_column(world: World, event: Event) -> None:
    """Judged when a holder's column goes under a key."""
    _, uid, g, block, n, _ = event
    request, size = world.book.requests[uid], world.config.groups[g].block_tokens
    cols = [col for col, held in enumerate(request.cols[g]) if held == block and block != NULL]
    ends = any(col * size < n <= (col + 1) * size for col in cols)
    world.judge(
        "key_names_its_column", bool(cols), ends and n <= request.known,
        lambda: (
            f"{uid}, group {world.config.groups[g].name}: block {block} stands in columns {cols} of {size} "
            f"tokens and goes under a key of {n}, {request.known} being known"
        ),
    )  # fmt: skip


RULES = (
    Rule(
        "no_double_owner", "consequence", "ownership",
        "A block is handed out as fresh only while nobody holds it.",
        "a block is allocated", "v1/core/block_pool.py::BlockPool.get_new_blocks (asserts ref_cnt == 0)",
        core=("alloc",),
    ),
    Rule(
        "null_block_unowned", "discipline", "ownership",
        "The null block is never allocated, published or transferred.",
        "a block is allocated, published or put into a job", "v1/core/block_pool.py::BlockPool.null_block",
        core=("alloc", "publish", "job"),
    ),
    Rule(
        "evict_before_reuse", "discipline", "ownership",
        "A block that is handed out carries no key any more.",
        "a block is allocated", "v1/core/block_pool.py::BlockPool._maybe_evict_cached_block",
        core=("alloc",),
    ),
    Rule(
        "adopt_only_published", "discipline", "ownership",
        "A hit adopts only blocks that are under a key.",
        "a block is adopted", "v1/core/block_pool.py::BlockPool.touch",
        core=("adopt",),
    ),
    Rule(
        "release_only_held", "consequence", "ownership",
        "A request gives back only references that it has: no block is freed twice.",
        "a column is given up", "https://github.com/vllm-project/vllm/issues/42571",
        core=("drop",),
    ),
    Rule(
        "publish_only_held", "discipline", "ownership",
        "Only a holder puts a block under a key.",
        "a block is published", "v1/core/block_pool.py::BlockPool.cache_full_blocks",
        core=("publish",),
    ),
    Rule(
        "references_match_tables", "consequence", "ownership",
        "A block's references are exactly the columns that hold it, and every "
        "holder exists: nothing lost, nothing shared unknowingly.",
        "some block is held",
        "v1/core/single_type_kv_cache_manager.py::SingleTypeKVCacheManager.req_to_blocks",
        parts=("blocks", "tables"), applies=lambda world: bool(world.book.core.holders),
        holds=lost_or_doubly_owned,
    ),
    Rule(
        "free_queue_is_unheld", "consequence", "ownership",
        "The free queue lists every unheld block once, and no held one.",
        "some block is held",
        "v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue; https://github.com/vllm-project/vllm/issues/42571",
        parts=("blocks",), applies=lambda world: bool(world.book.core.holders), holds=free_queue_wrong,
    ),
    Rule(
        "key_names_its_column", "discipline", "ownership",
        "A column goes under a key of as many tokens as end in it, all of them known.",
        "a column is published", "v1/core/block_pool.py::BlockPool.cache_full_blocks",
        on=("publish",), judges=key_names_column,
    ),
    Rule(
        "attention_reads_exact", "consequence", "ownership",
        "Every position that full attention reads holds the bytes of exactly that request's prefix.",
        "a forward reads history of a full-attention group",
        "https://github.com/vllm-project/vllm/pull/45357",
    ),
    Rule(
        "window_reads_exact", "consequence", "ownership",
        "Every position inside a window or attention chunk holds the bytes of exactly that request's prefix.",
        "a forward reads history of a windowed group",
        "https://github.com/vllm-project/vllm-ascend/issues/13501",
    ),
)  # fmt: skip
