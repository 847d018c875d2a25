"""Named changes to a release inside the child: mutants that the checker must find, and repairs of what it
found.

A mutant is a plausible mistake put into a release that holds; a repair is the smallest change to one decision
that lets a trace survive.  Both are applied to vLLM's classes when a scheduler is made (``new`` with
``patches``) and taken back when the next one is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Undo = Callable[[], None]


def _replace(owner: type, name: str, made: Callable[[Any], Any]) -> Undo:
    original = owner.__dict__[name]
    plain = original.__func__ if isinstance(original, classmethod) else original
    changed = made(plain)
    setattr(owner, name, classmethod(changed) if isinstance(original, classmethod) else changed)
    return lambda: setattr(owner, name, original)


# ---- mutants


def early_window_free() -> Undo:
    """A window group lets go of its oldest block one block early, while queries still read it."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    def made(original: Any) -> Any:
        def skipped(self: Any, num_computed_tokens: int) -> int:
            tokens: int = original(self, num_computed_tokens)
            most: int = tokens + self.block_size
            return min(most, max(num_computed_tokens - 1, 0))

        return skipped

    return _replace(SlidingWindowManager, "get_num_skipped_tokens", made)


def lost_touch() -> Undo:
    """A hit on a block that somebody holds already adds no reference."""
    from vllm.v1.core.block_pool import BlockPool

    def made(original: Any) -> Any:
        def touch(self: Any, blocks: Any) -> Any:
            return original(self, [block for block in blocks if block.ref_cnt == 0])

        return touch

    return _replace(BlockPool, "touch", made)


def key_one_token_early() -> Undo:
    """An output publishes one token more than was computed: that slot may hold a rejected draft's bytes.

    It bites when the request is not scheduled again: it finishes, or is preempted, with that output.  By
    hand: block of 4, 3 tokens computed and a fourth sampled by the last step, whose slot holds the draft that
    was rejected in its place; the block is published as the prefix of 4 tokens, and the next request with
    that prefix adopts it.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def made(original: Any) -> Any:
        def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> Any:
            return original(self, request, min(num_computed_tokens + 1, request.num_tokens))

        return cache_blocks

    return _replace(KVCacheManager, "cache_blocks", made)


# ---- repairs


def reserve_keeps_progress() -> Undo:
    """The reserve for the drafter never takes the last token of a chunk away.

    Unrepaired, ``Scheduler._reserve_prefill_lookahead`` (0.30.0 to 0.33.0) may return 0 for a chunk that the
    aligned split must end at the next state boundary, in every later step alike.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def made(original: Any) -> Any:
        def reserve(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            tokens: int = original(self, request, num_computed_tokens, num_new_tokens)
            return tokens or max(num_new_tokens, 0)

        return reserve

    return _replace(Scheduler, "_reserve_prefill_lookahead", made)


def lookup_within_hashes() -> Undo:
    """A look-up never asks for a block whose hash does not exist yet (0.33.0, lookahead hashes of two or
    more).
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def made(original: Any) -> Any:
        def computed(self: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
            known = len(request.block_hashes) * self.block_pool.hash_block_size
            bound = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
            return original(self, request, min(bound, known))

        return computed

    return _replace(KVCacheManager, "get_computed_blocks", made)


def split_by_state_block() -> Undo:
    """Prefill chunks are cut by the state group's own block, not by the smallest block of all groups
    (https://github.com/vllm-project/vllm/pull/54076, open).
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def made(original: Any) -> Any:
        def split(self: Any, *args: Any, **kwargs: Any) -> int:
            kept, own = self.cache_config.block_size, self.cache_config.mamba_block_size
            self.cache_config.block_size = own or kept
            try:
                tokens: int = original(self, *args, **kwargs)
                return tokens
            finally:
                self.cache_config.block_size = kept

        return split

    return _replace(Scheduler, "_mamba_block_aligned_split", made)


def publish_computed_boundaries() -> Undo:
    """A decode step publishes and offers no state boundary that it computes itself.

    Post-processing has yet to put the state there, on an earlier stage ``pp`` steps later.
    """
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    def made(original: Any) -> Any:
        def cache_blocks(self: Any, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if request.num_computed_tokens >= max(request.num_prompt_tokens, request.num_tokens - 1):
                num_tokens = min(num_tokens, request.num_computed_tokens)
            return original(self, request, num_tokens, *args, **kwargs)

        return cache_blocks

    return _replace(MambaManager, "cache_blocks", made)


def offers_still_held() -> Undo:
    """A boundary whose block lost its key in the pass that offers it is not handed to the connector."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    def made(original: Any) -> Any:
        def take(self: Any) -> Any:
            return [offer for offer in original(self) if offer[2].block_hash_num_tokens == offer[3]]

        return take

    return _replace(SingleTypeKVCacheManager, "take_pending_boundary_state_offloads", made)


def stale_windows_rescanned() -> Undo:
    """Window blocks that were handed out again are struck from the connector's tables wherever they stand.

    Not only past the store's cursor: a finished request's last segment is looked at again from before it.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )

    def made(original: Any) -> Any:
        def update(self: Any, scheduler_output: Any) -> Any:
            before = {
                name: [len(group.block_ids) for group in status.group_states]
                for name, status in self._req_status.items()
            }
            resumed = {new.req_id for new in scheduler_output.scheduled_new_reqs}
            result = original(self, scheduler_output)
            for name, status in self._req_status.items():
                for index in self._sliding_window_groups if name not in resumed else ():
                    blocks = status.group_states[index].block_ids
                    for at in range(min(before.get(name, [0] * (index + 1))[index], len(blocks))):
                        if blocks[at] in self._current_batch_allocated_block_ids:
                            blocks[at] = 0
            return result

        return update

    return _replace(OffloadingConnectorScheduler, "_update_req_states", made)


def tails_not_published_late() -> Undo:
    """A state inside a block is not published by a count that lags: by then the block has gone on."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    lagging = [False]

    def outer(original: Any) -> Any:
        def cache_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
            lagging[0] = self.num_reprefillable_tokens > 0
            return original(self, *args, **kwargs)

        return cache_blocks

    def inner(original: Any) -> Any:
        def cache_tail(self: Any, *args: Any, **kwargs: Any) -> Any:
            return None if lagging[0] else original(self, *args, **kwargs)

        return cache_tail

    undo = [
        _replace(KVCacheCoordinator, "cache_blocks", outer),
        _replace(MambaManager, "_cache_partial_tail_block", inner),
    ]

    def back() -> None:
        for one in undo:
            one()

    return back


def decode_cadence() -> Undo:
    """With stages, a synchronous scheduler leaves a decode alone until its token is back, as an asynchronous
    one does (https://github.com/vllm-project/vllm/pull/52179, open).
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def made(original: Any) -> Any:
        def update(self: Any, scheduler_output: Any) -> Any:
            original(self, scheduler_output)
            for name in scheduler_output.num_scheduled_tokens:
                if not self.requests[name].is_prefill_chunk:
                    stages = self.parallel_config.pipeline_parallel_size
                    self.requests[name].next_decode_eligible_step = self.current_step + stages

        return update

    return _replace(Scheduler, "_update_after_schedule", made)


def copies_counted() -> Undo:
    """Start-up counts one more state block a request: that which a copy on write takes, beside the running
    state, its source and the scratch states.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    def made(original: Any) -> Any:
        def most(self: Any, vllm_config: Any) -> int:
            return int(original(self, vllm_config)) + int(self.page_size_bytes)

        return most

    return _replace(MambaSpec, "max_memory_usage_bytes", made)


def _changed_mask(change: Callable[[Any, dict[str, Any]], Any]) -> Undo:
    """Change what ``OffloadingConnectorScheduler._reachable_store_block_mask`` is asked or answers:
    ``change(ask, asked)``, where ``asked`` are its arguments, ``self`` among them, and ``ask(**other)`` asks
    the original with some of them replaced.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )

    def made(original: Any) -> Any:
        def mask(self: Any, **asked: Any) -> Any:
            return change(lambda **more: original(self, **{**asked, **more}), {"self": self, **asked})

        return mask

    return _replace(OffloadingConnectorScheduler, "_reachable_store_block_mask", made)


def chunks_without_holes() -> Undo:
    """A chunk of which one block is wanted is wanted whole: not stored while another block is missing.

    It changes nothing before 0.33.0: those releases store a chunk if its last block is there, and ask for no
    other.
    """

    def change(ask: Any, asked: dict[str, Any]) -> Any:
        kept = ask()
        per = asked["self"].config.blocks_per_chunk
        if kept is None:
            return None
        return [any(kept[at - at % per : at - at % per + per]) for at in range(len(kept))]

    return _changed_mask(change)


def stores_at_dropped_boundary() -> Undo:
    """The connector keeps windows where a resend can resume: with the drop, a block lower
    (``kv_cache_coordinator.py::replay_boundaries``, which the pool goes by).
    """

    def change(ask: Any, asked: dict[str, Any]) -> Any:
        config, boundaries = asked["self"].config, asked["reachable_boundaries"]
        if not boundaries or not any(group.is_eagle_group for group in config.kv_group_configs):
            return ask()
        prompt, unit = boundaries[0] + 1, config.alignment_tokens
        lower = {max(tokens // unit * unit - unit, 0) for tokens in (prompt - 1, prompt)}
        return ask(reachable_boundaries=(*sorted(lower), *boundaries))

    return _changed_mask(change)


def window_looked_up_exactly() -> Undo:
    """The look-up wants the chunks that a window reads, ``cdiv(window - 1 + extra, chunk)``, and not one more
    where the window is one token longer than whole chunks.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    offloading: Any = scheduler
    if not hasattr(scheduler, "get_sliding_window_size_in_chunks"):  # 0.33.0
        offloading = import_module(f"{scheduler.__package__}.config")
    original = offloading.get_sliding_window_size_in_chunks

    def size(spec: Any, tokens_per_chunk: int) -> Any:
        if not isinstance(spec, SlidingWindowSpec):
            return original(spec, tokens_per_chunk)
        return max(1, -(-(spec.sliding_window - 1 + spec.extra_retained_tokens) // tokens_per_chunk))

    offloading.get_sliding_window_size_in_chunks = size
    return lambda: setattr(offloading, "get_sliding_window_size_in_chunks", original)


def second_reset_adds() -> Undo:
    """A reset of the tier while jobs are still to be flushed for the one before adds its own to them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )

    def made(original: Any) -> Any:
        def reset(self: Any) -> Any:
            kept, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
            try:
                return original(self)
            finally:
                self._current_batch_jobs_to_flush |= kept

        return reset

    return _replace(OffloadingConnectorScheduler, "reset_cache", made)


def single_group_looks_past() -> Undo:
    """A single group that drops its last block is asked for one block more than the hit, as several groups
    are (``HybridKVCacheCoordinator``): the dropped block leaves tokens to compute already.
    """
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator

    def made(original: Any) -> Any:
        def find(self: Any, block_hashes: Any, max_cache_hit_length: int) -> Any:
            if self.single_type_managers[0].use_eagle:
                known = len(block_hashes) * self.block_pool.hash_block_size
                max_cache_hit_length = min(max_cache_hit_length + self.block_size, known)
            return original(self, block_hashes, max_cache_hit_length)

        return find

    return _replace(UnitaryKVCacheCoordinator, "find_longest_cache_hit", made)


def boundaries_within_hashes() -> Undo:
    """Windows are also kept where a resend can resume with hashes that look ahead: the last tokens of a
    prompt have none yet.
    """
    from vllm.v1.core import kv_cache_coordinator
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    coordinators: Any = kv_cache_coordinator
    if not hasattr(coordinators, "replay_boundaries"):  # 0.30.0 and 0.31.0
        return lambda: None
    asked = coordinators.replay_boundaries

    def made(original: Any) -> Any:
        def cache(self: Any, *given: Any, **named: Any) -> Any:
            ahead = max(getattr(self.block_pool, "num_hash_lookahead_tokens", 0) - 1, 0)  # since 0.33.0

            def boundaries(prompt_tokens: int, *rest: Any, **more: Any) -> tuple[int, ...]:
                both = (prompt_tokens, max(prompt_tokens - ahead, 1))
                return tuple(sorted({at for tokens in both for at in asked(tokens, *rest, **more)}))

            coordinators.replay_boundaries = boundaries
            try:
                return original(self, *given, **named)
            finally:
                coordinators.replay_boundaries = asked

        return cache

    return _replace(KVCacheCoordinator, "cache_blocks", made)


# ---- options


def dense_retention() -> Undo:
    """``prefix_cache_retention_interval = None``: window and state groups keep every block that is cached, as
    older releases did by default.  An option of the release, not a change of it.
    """
    from impl.upstream import build

    original = build._vllm_config

    def made(config: Any) -> Any:
        built = original(config)
        built.cache_config.prefix_cache_retention_interval = None
        return built

    def put(function: Any) -> None:
        build._VLLM_CONFIGS.clear()
        build._vllm_config = function

    put(made)
    return lambda: put(original)


MUTANTS = {made.__name__: made for made in (early_window_free, lost_touch, key_one_token_early)}
REPAIRS = {
    made.__name__: made
    for made in (
        reserve_keeps_progress,
        lookup_within_hashes,
        split_by_state_block,
        publish_computed_boundaries,
        offers_still_held,
        stale_windows_rescanned,
        tails_not_published_late,
        decode_cadence,
        copies_counted,
        chunks_without_holes,
        stores_at_dropped_boundary,
        window_looked_up_exactly,
        single_group_looks_past,
        boundaries_within_hashes,
        second_reset_adds,
    )
}
OPTIONS = {"dense_retention": dense_retention}
KNOWN: dict[str, Callable[[], Undo]] = MUTANTS | REPAIRS | OPTIONS
