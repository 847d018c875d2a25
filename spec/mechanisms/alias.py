"""The MTP alias: recurrent rows whose blocks move, and one physical block under two columns.

**Story.**  In align mode a recurrent group keeps one *running* column and K *scratch* columns, one state a
draft.  When a prefill chunk carries the running column past the scratch columns, the allocator *relocates*
the scratch blocks: the same block object goes to the end of the row, its old column becomes null.  The
ranks' rows and a connector's mirror only ever append, so they keep the old column: one physical block
stands under two columns there, and a mirror's column p may name a block that by now holds some other state.

A *boundary* state, after exactly (p + 1) blocks of tokens, is in column p once post-processing has put it
there.  It is published and stored by an exact hand-off (group, block, tokens) from the core, never by
position.

**In the field.**  An external hit restored a stale state and the output lost exactly the draft width
(https://github.com/1CatAI/1Cat-vLLM/pull/249); stores of null, reassigned or scratch blocks under a valid
hash (https://github.com/vllm-project/vllm/pull/51358).

Sources: vLLM 0.33.0 ``v1/core/single_type_kv_cache_manager.py::MambaManager``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.events import Event
from spec.rule import Rule

if TYPE_CHECKING:
    from spec.world import World


def relocates_exclusive(world: World, event: Event) -> None:
    """Judged at every relocation."""
    _, uid, _, col, _, block = event
    core = world.book.core
    held = core.holders.get(block, {})
    exclusive = block not in core.key and held == {uid: 1}
    world.judge(
        "relocates_only_exclusive_scratch", True, exclusive,
        lambda: f"column {col} of {uid}, block {block}: key {core.key.get(block)}, holders {held}",
    )  # fmt: skip


def stores_by_hand_off(world: World, event: Event) -> None:
    """Judged at every store that names a recurrent block."""
    _, _, way, uid, chunks = event
    for key, _, subs in chunks:
        if way != "store" or key[0] not in world.mamba_groups:
            continue
        block = subs[-1]
        carried = world.book.core.key.get(block)
        published = carried is not None and carried[:2] == key[:2]  # type: ignore[index]
        world.judge(
            "recurrent_store_by_hand_off", True, published,
            lambda block=block, key=key, carried=carried: (  # type: ignore[misc]
                f"{uid} stores block {block} as the state of {key[1]} tokens; it is published as {carried}"
            ),
        )  # fmt: skip


RULES = (
    Rule(
        "relocates_only_exclusive_scratch", "discipline", "mtp_alias",
        "Only a block that one request holds once, under no key, is relocated.",
        "a scratch column is relocated", "v1/core/block_pool.py::BlockPool.is_block_writable",
        on=("move",), judges=relocates_exclusive,
    ),
    Rule(
        "recurrent_store_by_hand_off", "discipline", "mtp_alias",
        "A store of a recurrent state names the block that is published as exactly that boundary.",
        "a store names a block of a recurrent group",
        "https://github.com/1CatAI/1Cat-vLLM/pull/249; "
        ".../offloading/scheduler.py::_build_aligned_boundary_store_jobs",
        on=("job",), judges=stores_by_hand_off,
    ),
    Rule(
        "state_reads_exact", "consequence", "mtp_alias",
        "The state and the convolution window that a forward goes on from are "
        "those after exactly the computed, verified tokens.",
        "a forward of a recurrent group starts past position 0",
        "https://github.com/vllm-project/vllm/issues/54173",
    ),
)  # fmt: skip
