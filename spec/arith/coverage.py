"""What a hit demands, what lookup checks, what the store keeps.

A request that finds `hit` tokens of its prompt in the offload tier, `local` of them already in GPU blocks,
gets a GPU block for every column that later steps may read, and each of those blocks is filled from the
chunk that covers it.  Three formulas must agree, and they live in three places upstream: the allocator
decides which columns a hit *demands* (retention), lookup decides which chunks were *checked* before the hit
was admitted, and the producer's mask decides which blocks were ever *stored*.  Release 0.30.0 retained
`extra` tokens for draft re-prefill in the first place and knew nothing of them in the other two; a demanded
chunk could then be absent.

Units are in the names: tokens, blocks (of one group), chunks (`blocks_per_chunk` blocks, the unit of the
offload tier), columns (block positions in a request's row).  A `window` of W tokens includes the token that
attends; `extra` more are retained for re-prefill by the drafter.  Sources name files of the vLLM package,
release 0.33.0 unless another is given; where a release has another formula, it has a function of its own,
`..._v0_30`.
"""

from spec.arith.checked import FLAG, NATURAL, POSITIVE, Limit, domain
from spec.arith.division import cdiv, floordiv, floormod, round_down

# units ------------------------------------------------------------------------------------------------------


@domain(block=POSITIVE, blocks_per_chunk=POSITIVE)
def chunk_tokens(block: int, blocks_per_chunk: int) -> int:
    """Tokens of a chunk (`.../offloading/config.py::build_offloading_config`)."""
    return block * blocks_per_chunk


@domain(tokens=NATURAL, block=POSITIVE)
def blocks_of(tokens: int, block: int) -> int:
    """Blocks that hold the first `tokens` tokens, the last one perhaps partly."""
    return cdiv(tokens, block)


@domain(tokens=NATURAL, chunk=POSITIVE)
def full_chunks_of(tokens: int, chunk: int) -> int:
    """Chunks that `tokens` tokens fill, hence that a store may name (`scheduler.py::storable_chunks`)."""
    return floordiv(tokens, chunk)


# spans ------------------------------------------------------------------------------------------------------


@domain(start=NATURAL, tokens=POSITIVE, block=POSITIVE)
def span_blocks(start: int, tokens: int, block: int) -> int:
    """Blocks that `tokens` tokens from position `start` touch."""
    return cdiv(start + tokens, block) - floordiv(start, block)


@domain(tokens=POSITIVE, block=POSITIVE)
def span_bound(tokens: int, block: int) -> int:
    """The most blocks that `tokens` tokens touch at any start.

    The + 1 is that of the admission cap (`v1/kv_cache_interface.py::SlidingWindowSpec`).
    """
    return cdiv(tokens - 1, block) + 1


# retention --------------------------------------------------------------------------------------------------


@domain(computed=NATURAL, window=POSITIVE, extra=NATURAL)
def skipped_tokens(computed: int, window: int, extra: int) -> int:
    """Leading tokens that no step after `computed` tokens reads in a sliding-window group.

    `v1/core/single_type_kv_cache_manager.py::SlidingWindowManager.get_num_skipped_tokens`.  The next query
    reads window - 1 tokens before itself, and re-prefill may start `extra` tokens earlier.
    """
    return max(0, computed - window + 1 - extra)


@domain(computed=NATURAL, attention_chunk=POSITIVE)
def skipped_tokens_chunked(computed: int, attention_chunk: int) -> int:
    """Leading tokens that no step reads in a chunked-local group: all before the current attention chunk.

    `single_type_kv_cache_manager.py::ChunkedLocalAttentionManager.get_num_skipped_tokens`.
    """
    return round_down(computed, attention_chunk)


@domain(computed=NATURAL, window=POSITIVE, extra=NATURAL, block=POSITIVE)
def first_retained_column(computed: int, window: int, extra: int, block: int) -> int:
    """The first column of a sliding-window group that is kept, and the number of columns freed before it.

    `single_type_kv_cache_manager.py::SingleTypeKVCacheManager.remove_skipped_blocks`.
    """
    return floordiv(skipped_tokens(computed, window, extra), block)


@domain(window=POSITIVE, block=POSITIVE)
def local_need_blocks(window: int, block: int) -> int:
    """Consecutive cached blocks that a local sliding-window hit needs; the extra tokens are not among them.

    `single_type_kv_cache_manager.py::SlidingWindowManager._contiguous_blocks_for_hit`.
    """
    return cdiv(window - 1, block)


# lookup -----------------------------------------------------------------------------------------------------


@domain(window=POSITIVE, extra=NATURAL, chunk=POSITIVE)
def base_window_chunks(window: int, extra: int, chunk: int) -> int:
    """Chunks that lookup requires for a hit that ends on a chunk boundary.

    `.../offloading/config.py::get_sliding_window_size_in_chunks`; in 0.31.0 and 0.32.0 the same formula in
    `.../offloading/scheduler.py`.  The first term is 0.30.0's, kept as a lower bound: it is the larger one
    only if extra = 0 and the chunk divides window - 1, by one chunk that no token of the hit reads.  There it
    costs a hit wherever that chunk was not stored (theorem 3; "A window one token past whole chunks" in
    docs/findings.md; https://github.com/vllm-project/vllm/pull/56709).
    """
    return max(cdiv(window, chunk), cdiv(window - 1 + extra, chunk))


@domain(window=POSITIVE, chunk=POSITIVE)
def base_window_chunks_v0_30(window: int, chunk: int) -> int:
    """The base window of release 0.30.0, without the extra retained tokens."""
    return cdiv(window, chunk)


@domain(hit=NATURAL, window=POSITIVE, extra=NATURAL, chunk=POSITIVE)
def lookup_window_chunks(hit: int, window: int, extra: int, chunk: int) -> int:
    """Chunks that lookup requires, counted back from the chunk that holds the last hit token.

    `.../offloading/scheduler.py::GroupOffloadConfig.load_window_size_in_chunks`.  A hit inside a chunk leaves
    padding to the chunk's right edge, so the window may begin one chunk further left.
    """
    padding = floormod(-hit, chunk)
    return max(base_window_chunks(window, extra, chunk), cdiv(window - 1 + extra + padding, chunk))


@domain(hit=NATURAL, window=POSITIVE, chunk=POSITIVE)
def lookup_window_chunks_v0_30(hit: int, window: int, chunk: int) -> int:
    """The load window of release 0.30.0, without the extra retained tokens."""
    padding = floormod(-hit, chunk)
    return max(base_window_chunks_v0_30(window, chunk), cdiv(window - 1 + padding, chunk))


@domain(attention_chunk=POSITIVE, chunk=POSITIVE)
def chunked_window_chunks(attention_chunk: int, chunk: int) -> int:
    """Chunks that lookup requires for a chunked-local group, padding or not.

    `.../offloading/config.py::get_sliding_window_size_in_chunks`.
    """
    return cdiv(attention_chunk, chunk)


@domain(local=NATURAL, chunk=POSITIVE)
def lookup_first_chunk_full(local: int, chunk: int) -> int:
    """The first chunk that lookup asks for: the one that the local prefix ends in.

    `.../offloading/scheduler.py::_lookup_complete_chunks`.
    """
    return floordiv(local, chunk)


@domain(hit=NATURAL, local=NATURAL, window_chunks=POSITIVE, chunk=POSITIVE)
def first_checked_chunk(hit: int, local: int, window_chunks: int, chunk: int) -> int:
    """The first chunk known to be present when a windowed group admits `hit` tokens.

    `.../offloading/scheduler.py::_sliding_window_lookup`: either `window_chunks` chunks back from the hit's
    last chunk, or the whole slice, which starts where the local prefix ends.
    """
    return max(lookup_first_chunk_full(local, chunk), cdiv(hit, chunk) - window_chunks)


@domain(hit=NATURAL, local=NATURAL, window=POSITIVE, extra=NATURAL, chunk=POSITIVE)
def lookup_first_chunk(hit: int, local: int, window: int, extra: int, chunk: int) -> int:
    """The first chunk that lookup has checked for a sliding-window group at `hit` tokens."""
    return first_checked_chunk(hit, local, lookup_window_chunks(hit, window, extra, chunk), chunk)


@domain(hit=NATURAL, local=NATURAL, window=POSITIVE, extra=NATURAL, chunk=POSITIVE)
def in_flight_first_chunk(hit: int, local: int, window: int, extra: int, chunk: int) -> int:
    """The first chunk of a sliding-window group that is compared with the chunks being loaded.

    The last part of `.../offloading/scheduler.py::_lookup_complete_chunks`: the end of the lookup slice, as
    long as the load window.
    """
    return max(floordiv(local, chunk), cdiv(hit, chunk) - lookup_window_chunks(hit, window, extra, chunk))


# restore demand ---------------------------------------------------------------------------------------------


@domain(local=NATURAL, block=POSITIVE)
def first_fresh_column(local: int, block: int) -> int:
    """The first column that a load may fill, after the columns of the local prefix.

    `.../offloading/scheduler.py::update_state_after_alloc`.
    """
    return cdiv(local, block)


@domain(hit=NATURAL, chunk=POSITIVE)
def demand_end_chunk(hit: int, chunk: int) -> int:
    """One past the last chunk that a load of `hit` tokens names."""
    return cdiv(hit, chunk)


@domain(local=NATURAL, block=POSITIVE, blocks_per_chunk=POSITIVE)
def demand_first_chunk_full(local: int, block: int, blocks_per_chunk: int) -> int:
    """The first chunk that a load names for a full-attention group."""
    return floordiv(first_fresh_column(local, block), blocks_per_chunk)


@domain(hit=NATURAL, local=NATURAL, window=POSITIVE, extra=NATURAL, block=POSITIVE)
def demand_first_column(hit: int, local: int, window: int, extra: int, block: int) -> int:
    """The first column of a sliding-window group that a load fills."""
    return max(first_retained_column(hit, window, extra, block), first_fresh_column(local, block))


@domain(hit=NATURAL, local=NATURAL, window=POSITIVE, extra=NATURAL, block=POSITIVE, blocks_per_chunk=POSITIVE)
def demand_first_chunk_window(
    hit: int, local: int, window: int, extra: int, block: int, blocks_per_chunk: int
) -> int:
    """The first chunk that a load names for a sliding-window group."""
    return floordiv(demand_first_column(hit, local, window, extra, block), blocks_per_chunk)


@domain(hit=NATURAL, local=NATURAL, attention_chunk=POSITIVE, block=POSITIVE, blocks_per_chunk=POSITIVE)
def demand_first_chunk_chunked(
    hit: int, local: int, attention_chunk: int, block: int, blocks_per_chunk: int
) -> int:
    """The first chunk that a load names for a chunked-local group."""
    first_retained = floordiv(skipped_tokens_chunked(hit, attention_chunk), block)
    return floordiv(max(first_retained, first_fresh_column(local, block)), blocks_per_chunk)


@domain(hit=POSITIVE, block=POSITIVE, blocks_per_chunk=POSITIVE)
def demand_first_chunk_mamba(hit: int, block: int, blocks_per_chunk: int) -> int:
    """The one chunk that a load names for a Mamba group: that of the column of the last hit token.

    `single_type_kv_cache_manager.py::MambaManager.get_num_skipped_tokens` keeps only that column.
    """
    return floordiv(floordiv(hit - 1, block), blocks_per_chunk)


@domain(base_chunks=POSITIVE, blocks_per_chunk=POSITIVE)
def pending_blocks_bound(base_chunks: int, blocks_per_chunk: int) -> int:
    """The most blocks that a windowed group may ask a load for; upstream asserts it.

    `.../offloading/scheduler.py::update_state_after_alloc`.
    """
    return base_chunks * blocks_per_chunk + 1


# store reachability -----------------------------------------------------------------------------------------


@domain(window=POSITIVE, extra=NATURAL, block=POSITIVE, drops=FLAG)
def store_need_blocks(window: int, extra: int, block: int, drops: int) -> int:
    """Blocks kept before an alignment boundary; `drops` is 1 for a group that drops its tail block, else 0.

    `.../offloading/scheduler.py::_reachable_store_block_mask`, from 0.31.0 on.
    """
    return cdiv(window + extra - 1, block) + drops


@domain(window=POSITIVE, block=POSITIVE, drops=FLAG)
def store_need_blocks_v0_30(window: int, block: int, drops: int) -> int:
    """Blocks kept before an alignment boundary in release 0.30.0, without the extra retained tokens."""
    return cdiv(window - 1, block) + drops


@domain(window=POSITIVE, extra=NATURAL, block=POSITIVE, drops=FLAG)
def store_need_blocks_corrected(window: int, extra: int, block: int, drops: int) -> int:
    """Blocks that would have to be kept so that no admissible hit is lost (theorem 5); no release has it."""
    return cdiv(window + extra, block) + drops


@domain(column=NATURAL, need=NATURAL, segment_blocks=POSITIVE, shift=FLAG)
def store_keeps_block(column: int, need: int, segment_blocks: int, shift: int) -> bool:
    """Whether the mask keeps a column: the last `need` of each segment, shifted by 1 in a group that drops.

    `single_type_kv_cache_manager.py::SlidingWindowManager.reachable_block_mask` under dense retention
    (`retention_interval=None`; the default of 0.30.0 to 0.33.0 is 0 and keeps fewer, see `spec.lookup`).
    """
    if column < shift:
        return False
    return floormod(column - shift, segment_blocks) >= segment_blocks - need


@domain(column=NATURAL, end=NATURAL, need=NATURAL, segment_blocks=POSITIVE)
def store_keeps_final_block(column: int, end: int, need: int, segment_blocks: int) -> bool:
    """Whether the mask keeps a column for the sake of a final segment that ends at column `end`, short of a
    boundary; asked only for groups that do not drop.

    `reachable_block_mask` with `final_segment_end_block`, which is set under dense retention only.
    """
    size = floormod(end, segment_blocks)
    if size == 0:
        return False
    if column >= end:
        return False
    return column >= max(end - size, end - need)


@domain(need=NATURAL, segment_blocks=POSITIVE)
def store_keeps_all(need: int, segment_blocks: int) -> bool:
    """Whether the mask of dense retention is not used because the tails of neighbouring segments meet."""
    return need >= segment_blocks


@domain(
    chunk_index=NATURAL,
    blocks_per_chunk=POSITIVE,
    need=Limit(least=0, at_most="segment_blocks"),
    segment_blocks=POSITIVE,
    shift=FLAG,
)
def store_keeps_chunk(
    chunk_index: int, blocks_per_chunk: int, need: int, segment_blocks: int, shift: int
) -> bool:
    """Whether some block of a chunk is kept, which is when the store names the chunk.

    `.../offloading/scheduler.py::_build_store_jobs` asks each block; here the first kept column at or after
    the chunk's first is computed and compared with the chunk's end.
    """
    if need == 0:
        return False
    first = chunk_index * blocks_per_chunk
    start = max(first, shift)
    gap = segment_blocks - need - floormod(start - shift, segment_blocks)
    return start + gap < first + blocks_per_chunk


# hits -------------------------------------------------------------------------------------------------------


@domain(tokens=POSITIVE, mamba_chunk=POSITIVE)
def lookup_candidate(tokens: int, mamba_chunk: int) -> int:
    """The longest hit that lookup tries for a prompt of `tokens` tokens (`mamba_chunk` 1 without a Mamba
    group).

    `.../offloading/scheduler.py::_lookup_complete_chunks`: one token is left to compute, and the result is
    rounded down to the Mamba chunk once, before any group is asked.
    """
    return round_down(tokens - 1, mamba_chunk)


@domain(candidate=NATURAL, found_end_chunk=NATURAL, chunk=POSITIVE)
def shrink_hit(candidate: int, found_end_chunk: int, chunk: int) -> int:
    """The candidate after a group that found its chunks present up to `found_end_chunk`."""
    return min(candidate, chunk * found_end_chunk)


@domain(hit=NATURAL, local=NATURAL, chunk=POSITIVE)
def worth_loading(hit: int, local: int, chunk: int) -> bool:
    """Whether a hit gains at least a chunk of a group over the local prefix; else the whole load is given up.

    `.../offloading/scheduler.py::_lookup_complete_chunks`.
    """
    return hit - local >= chunk


@domain(found_end_chunk=POSITIVE, drops=FLAG)
def tail_drop(found_end_chunk: int, drops: int) -> int:
    """The end of a group's hit after its tail drop: one unit less in a group that drops, once.

    `.../offloading/scheduler.py::_lookup_complete_chunks`; the local counterpart drops a block in
    `single_type_kv_cache_manager.py::find_longest_cache_hit`.
    """
    return found_end_chunk - drops


@domain(candidate=NATURAL, chunk=POSITIVE, drops=FLAG, keyed_chunks=NATURAL)
def query_end_chunk(candidate: int, chunk: int, drops: int, keyed_chunks: int) -> int:
    """One past the last chunk that lookup asks for: one more than the candidate needs in a group that
    drops.
    """
    return min(cdiv(candidate + drops * chunk, chunk), keyed_chunks)


@domain(first=NATURAL, second=NATURAL, alignment=POSITIVE)
def common_hit(first: int, second: int, alignment: int) -> int:
    """The longest aligned hit within two groups' hits.

    The fixed point of `v1/core/kv_cache_coordinator.py::find_longest_cache_hit` folds this over the groups;
    `alignment` is the least common multiple of their blocks.
    """
    return round_down(min(first, second), alignment)


@domain(hit=NATURAL, mamba_chunk=POSITIVE)
def mamba_state_tokens(hit: int, mamba_chunk: int) -> int:
    """Tokens folded into the Mamba state whose key a load of `hit` tokens names: those of the whole chunk."""
    return cdiv(hit, mamba_chunk) * mamba_chunk
