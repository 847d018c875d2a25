"""Where recurrent state lives: columns, offsets, boundaries, chunk ends, sub-slots and bytes.

The story.  A recurrent (Mamba, GDN) layer keeps one state for all past tokens, and every step overwrites
it.  To reuse a prefix, its state must have been put aside: in "align" mode column p of a request's row ends
up holding the state after exactly (p + 1) * block tokens, the *boundary* of column p.  A step writes its
state at the *running* column.  With K drafts it writes one state a query token: at the running column after
the first, at scratch columns running + 1 .. running + K after the drafts.  Verification then accepts `a` of
these tokens, so the state to go on from lies at offset a - 1, and if the accepted tokens reached a
boundary, a copy kernel moves the state of the boundary's offset to the boundary's column.  Prefill writes
no state inside a chunk, so the scheduler cuts chunks at boundaries.

What must hold.  Every reader and every copy divides by the *same* block size, that of the recurrent group;
offsets are counted from the running column of the step that wrote them; a step crosses at most one
boundary.

What went wrong in the field.  Another group's block size as divisor of the seed column
(https://github.com/vllm-project/vllm/issues/53142) and of the chunk split
(https://github.com/vllm-project/vllm/pull/54076); accepted counts, hence offsets, of another request
(https://github.com/vllm-project/vllm/issues/51571); a split that returns no tokens, step after step
(https://github.com/vllm-project/vllm/issues/40707).  Two more follow from the formulas of 0.33.0 and are
seen there (theorem 17): the reserve of `lookahead_reserve` can strand a prefill for good, and a chunk that
saves its checkpoint from inside may leave a column short of the boundary it is named for.

Sources are functions of the vLLM package, release 0.33.0 unless another is named.  Tokens are counts ("n
tokens" are positions 0 to n - 1), columns index a request's row of one group, and a block is the group's
own block in tokens.
"""

from spec.arith.checked import ANY, NATURAL, POSITIVE, Limit, domain
from spec.arith.division import cdiv, floordiv, floormod, round_down

ACCEPTED = Limit(least=1, at_most="after")
"""Accepted tokens of a step: the sampled one at least, and all of them among the tokens after the step."""

# --- columns of a step --------------------------------------------------------------------------------------


@domain(computed=NATURAL, block=POSITIVE)
def seed_column(computed: int, block: int) -> int:
    """The column that holds the state after `computed` tokens at admission; -1 (nothing to read) at 0.

    Source: `v1/worker/gpu/model_states/mamba_hybrid.py::add_request`.  Up to 0.31.0 the divisor was the
    smallest block of all groups (https://github.com/vllm-project/vllm/issues/53142).
    """
    return floordiv(computed - 1, block)


@domain(computed=NATURAL, scheduled=NATURAL, block=POSITIVE)
def running_column(computed: int, scheduled: int, block: int) -> int:
    """The column that a step writes its first state to; drafts count as scheduled.

    Source: `v1/worker/mamba_utils.py::preprocess_mamba_align_fused_kernel`; the allocator's count of skipped
    blocks in `v1/core/single_type_kv_cache_manager.py::MambaManager.allocate_new_blocks` is the same number.
    """
    return cdiv(computed + scheduled, block) - 1


@domain(sequence=NATURAL, block=POSITIVE)
def aligned_first_column(sequence: int, block: int) -> int:
    """The first column of a batch row's state indices, from its sequence length with scheduled tokens; 0
    for a padded row (length 0).

    Source: `v1/worker/mamba_utils.py::get_aligned_state_indices_multi_group_kernel`.
    """
    return max(floordiv(sequence - 1, block), 0)


@domain(running=NATURAL, draft=NATURAL)
def scratch_column(running: int, draft: int) -> int:
    """The column that takes the state after draft number `draft` (1 to K) of a step; number 0 is the first
    token.

    Source: `v1/worker/mamba_utils.py::get_aligned_state_indices_multi_group_kernel` (columns first to first +
    K).
    """
    return running + draft


@domain(accepted=NATURAL)
def accepted_offset(accepted: int) -> int:
    """How far past the running column the state to go on from lies, after `accepted` tokens (0 if none was
    sampled).

    Source: `v1/worker/mamba_utils.py::precopy_mamba_align_fused_kernel`.
    """
    return max(accepted - 1, 0)


@domain(running=ANY, accepted=NATURAL)
def source_column(running: int, accepted: int) -> int:
    """The column that the next step's copy reads, given the last step's running column and accepted count.

    Source: `v1/worker/mamba_utils.py::precopy_mamba_align_fused_kernel` (recurrent state; convolution state
    stays in the running column and is shifted by the offset instead).
    """
    return running + accepted_offset(accepted)


# --- boundaries after a step --------------------------------------------------------------------------------


@domain(after=NATURAL, accepted=ACCEPTED)
def boundary_run(after: int, accepted: int) -> int:
    """Tokens in the state at offset 0 of the running column, after a step that ends at `after` verified
    tokens.

    Source: `v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel`.
    """
    return after - accepted + 1


@domain(after=NATURAL, accepted=ACCEPTED, block=POSITIVE)
def boundary_reached(after: int, accepted: int, block: int) -> bool:
    """Whether one of the states that the step's accepted tokens left is a boundary's.

    Source: `v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel`.
    """
    return round_down(after, block) >= boundary_run(after, accepted)


@domain(after=NATURAL, accepted=ACCEPTED, block=POSITIVE)
def boundary_offset(after: int, accepted: int, block: int) -> int:
    """Offset from the running column of the state of the last boundary at or below `after`; negative if it
    was not reached in this step.

    Source: `v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel`.
    """
    return round_down(after, block) - boundary_run(after, accepted)


@domain(after=NATURAL, block=POSITIVE)
def destination_column(after: int, block: int) -> int:
    """The column of the last boundary at or below `after` tokens; -1 if there is none.

    Source: `v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel`.
    """
    return floordiv(after, block) - 1


@domain(computed=NATURAL, accepted=NATURAL, block=POSITIVE)
def boundaries_crossed(computed: int, accepted: int, block: int) -> int:
    """How many multiples of the block lie above `computed` and at or below `computed + accepted`."""
    return floordiv(computed + accepted, block) - floordiv(computed, block)


# --- the allocator's row ------------------------------------------------------------------------------------


@domain(computed=NATURAL, scheduled=NATURAL, block=POSITIVE, drafts=NATURAL)
def required_columns(computed: int, scheduled: int, block: int, drafts: int) -> int:
    """Columns that a request's row must have for a step: up to the running column, and one for every draft.

    With all tokens a request may ever have as `computed`, the capacity of a row
    (`MambaSpec.max_num_blocks_per_req`). Source:
    `v1/core/single_type_kv_cache_manager.py::MambaManager.allocate_new_blocks`.
    """
    return cdiv(computed + scheduled, block) + drafts


@domain(columns=NATURAL, drafts=NATURAL)
def last_state_column(columns: int, drafts: int) -> int:
    """The running column of the step that made a row `columns` long.

    Source: `v1/core/single_type_kv_cache_manager.py::MambaManager.allocate_new_blocks`
    (`last_state_block_idx`).
    """
    return columns - 1 - drafts


@domain(column=NATURAL, columns=NATURAL, running=NATURAL)
def pads_column(column: int, columns: int, running: int) -> bool:
    """Whether a step with this running column fills `column` with the null block, the row being `columns`
    long.

    Source: `v1/core/single_type_kv_cache_manager.py::MambaManager.allocate_new_blocks`.
    """
    return column >= columns and column < running


@domain(column=NATURAL, columns=NATURAL, running=NATURAL, drafts=NATURAL)
def relocates_column(column: int, columns: int, running: int, drafts: int) -> bool:
    """Whether a step with this running column moves the scratch block of `column` to the end of the row and
    leaves the null block in its place; the row is `columns` long and was allocated before.

    Source: `v1/core/single_type_kv_cache_manager.py::MambaManager.allocate_new_blocks`.
    """
    return column >= columns - drafts and column < columns and column < running


@domain(processed=NATURAL, block=POSITIVE)
def first_live_column(processed: int, block: int) -> int:
    """The first column that is not freed once `processed` tokens are verified and their step is over.

    Source: `v1/core/single_type_kv_cache_manager.py::MambaManager.get_num_skipped_tokens` (processed - 1
    tokens).
    """
    return max(floordiv(processed - 1, block), 0)


@domain(last_state=NATURAL, processed=NATURAL, block=POSITIVE)
def frees_last_state(last_state: int, processed: int, block: int) -> bool:
    """Whether the running column of the step before the last one that grew the row is freed as well.

    Source: `v1/core/single_type_kv_cache_manager.py::MambaManager.remove_skipped_blocks`.
    """
    return last_state < cdiv(processed, block) - 1


# --- registration and chunk ends ----------------------------------------------------------------------------


@domain(boundary=NATURAL, computed=NATURAL, scheduled=NATURAL, known=NATURAL, lookahead=NATURAL)
def boundary_registrable(boundary: int, computed: int, scheduled: int, known: int, lookahead: int) -> bool:
    """Whether scheduling a step registers a boundary's hash: the step's end covers it, and so do the
    `known` tokens (prompt and verified output, never drafts), with `lookahead` (L) more, which the hash
    covers.

    Source: `v1/core/kv_cache_manager.py::KVCacheManager.allocate_slots` (extent) and
    `v1/core/single_type_kv_cache_manager.py::SingleTypeKVCacheManager.cache_blocks` (hashes).
    """
    return boundary <= computed + scheduled and boundary + lookahead <= known


@domain(tokens=NATURAL, unit=POSITIVE, lookahead=NATURAL)
def checkpoint_position(tokens: int, unit: int, drop: bool, lookahead: int) -> int:
    """The last multiple of `unit` at which a prefill of `tokens` tokens leaves a reusable state, 0 if none.

    With the drop (`drop`), one unit less than the last; otherwise at least max(1, lookahead) tokens stay
    above it. Source: `v1/kv_cache_interface.py::get_mamba_prefill_checkpoint_position`.
    """
    limit = tokens if drop else tokens - max(1, lookahead)
    return max(round_down(limit, unit) - (unit if drop else 0), 0)


@domain(tokens=NATURAL, block=POSITIVE)
def boundary_from(tokens: int, block: int) -> int:
    """The first boundary at or above `tokens`.

    Source: `v1/core/sched/scheduler.py::Scheduler._mamba_block_aligned_split`.
    """
    return cdiv(tokens, block) * block


@domain(start=NATURAL, end=NATURAL, prefill_end=NATURAL, block=POSITIVE, step_limit=POSITIVE)
def aligned_chunk_end(start: int, end: int, prefill_end: int, block: int, step_limit: int) -> int:
    """The end of a chunk [start, end) moved down to a boundary, unless it finishes the prefill, or a step
    of at most `step_limit` tokens can never hold a block and no boundary lies in the chunk.

    At or below `start` when the chunk cannot be scheduled.
    Source: `v1/core/sched/scheduler.py::Scheduler._mamba_block_aligned_split`.
    """
    aligned = round_down(end, block)
    moves = end < prefill_end and (aligned > start or block <= step_limit)
    return aligned if moves else end


@domain(start=NATURAL, end=NATURAL, stop=NATURAL)
def stop_inside(start: int, end: int, stop: int) -> int:
    """The stop if it lies strictly inside the chunk [start, end), else the chunk's end."""
    return min(end, stop) if stop > start else end


@domain(start=NATURAL, junction=NATURAL, block=POSITIVE)
def junction_stop(start: int, junction: int, block: int) -> int:
    """Where a chunk stops for a prefix shared up to `junction`, counted in whole blocks *from the chunk's
    start*.  Not modelled: with `enable_mamba_shared_prefix_checkpoint` and hashes finer than blocks, 0.33.0
    stops at the prefix's end itself.

    Source: `v1/core/sched/scheduler.py::Scheduler._mamba_block_aligned_split` (`block_floored`).
    """
    return start + round_down(junction - start, block)


@domain(start=NATURAL, scheduled=NATURAL, prefill_end=NATURAL, block=POSITIVE, step_limit=POSITIVE,
        last=NATURAL, tail=NATURAL, junction=NATURAL)  # fmt: skip
def aligned_split(
    start: int,
    scheduled: int,
    prefill_end: int,
    block: int,
    step_limit: int,
    last: int,
    tail: int,
    junction: int,
    exports: bool,
) -> int:
    """Tokens of a prefill chunk after the split; 0 means that it cannot be scheduled in this step.

    `prefill_end` is max(prompt tokens, known tokens - 1); a chunk that starts there is decode and is not
    split.  `last` is the checkpoint position in blocks and `tail` that in hash blocks (both of
    `checkpoint_position`, 0 for none), `junction` the end of a prefix shared with another request (0 for
    none).  With `exports` the backend saves the checkpoint from inside the chunk, and neither `last`, nor
    `tail`, nor the boundary after a start inside a block stops it.  Source:
    `v1/core/sched/scheduler.py::Scheduler._mamba_block_aligned_split`, with its divisor as `block`
    (`cache_config.block_size`, the smallest block of all groups, in all releases up to 0.33.0:
    https://github.com/vllm-project/vllm/pull/54076).
    """
    if start >= prefill_end:
        return scheduled
    end = aligned_chunk_end(start, start + scheduled, prefill_end, block, step_limit)
    if junction < end:
        end = stop_inside(start, end, junction_stop(start, junction, block))
    if not exports:
        end = stop_inside(start, end, boundary_from(start, block))
        end = stop_inside(start, end, last if last > start else tail)
    return max(end - start, 0)


@domain(known=NATURAL, computed=NATURAL, scheduled=NATURAL, prefill_lookahead=NATURAL)
def lookahead_reserve(known: int, computed: int, scheduled: int, prefill_lookahead: int) -> int:
    """Tokens of a chunk that leaves either nothing or at least `prefill_lookahead` known tokens for the
    next one.

    A drafter of several modules reads that many tokens past a chunk's end.
    Source: `v1/core/sched/scheduler.py::Scheduler._reserve_prefill_lookahead`, applied after the split.
    """
    remaining = known - computed - scheduled
    if remaining <= 0:
        return scheduled
    return max(scheduled - max(prefill_lookahead - remaining, 0), 0)


@domain(known=NATURAL, computed=NATURAL, scheduled=NATURAL, block=POSITIVE, prefill_lookahead=NATURAL)
def aligned_reserve(known: int, computed: int, scheduled: int, block: int, prefill_lookahead: int) -> int:
    """The reserve applied to a chunk that the split returned, without undoing the split.

    A corrected formula, of no release: where the reserve moves the chunk's end, it moves it on to the
    boundary below, and where there is none inside the chunk, it leaves the end alone.  The plain reserve
    can end a chunk inside a block, from where the split stops at the next boundary and the reserve takes
    all of it away again, for ever.
    """
    reserved = lookahead_reserve(known, computed, scheduled, prefill_lookahead)
    aligned = round_down(computed + reserved, block)
    if reserved == scheduled:
        return scheduled
    return aligned - computed if aligned > computed else scheduled


# --- chunks of the offload tier and bytes -------------------------------------------------------------------


@domain(column=NATURAL, blocks_per_chunk=POSITIVE)
def chunk_of_column(column: int, blocks_per_chunk: int) -> int:
    """The chunk that a column's block belongs to.

    Source: `distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py` (every division by the chunk's
    blocks).
    """
    return floordiv(column, blocks_per_chunk)


@domain(column=NATURAL, blocks_per_chunk=POSITIVE)
def subslot(column: int, blocks_per_chunk: int) -> int:
    """The place of a column's block within its chunk, 0 to blocks_per_chunk - 1.

    Source: `v1/kv_offload/cpu/gpu_worker.py::SingleDirectionOffloadingHandler` (sub-blocks skipped in the
    first chunk).
    """
    return floormod(column, blocks_per_chunk)


@domain(first_column=NATURAL, ordinal=NATURAL, blocks_per_chunk=POSITIVE)
def landing_position(first_column: int, ordinal: int, blocks_per_chunk: int) -> int:
    """The position, in blocks from the start of a job's first chunk, of the block listed as number
    `ordinal` (from 0).

    A job names its first block's column only; the others follow without gaps, whatever their columns, so
    freed blocks may be left out at the start of a job only (https://github.com/vllm-project/vllm/pull/42945
    counts them right; theorem 18 says when the places are right too). Source:
    `v1/kv_offload/cpu/gpu_worker.py::compute_sub_block_ptrs`.
    """
    return subslot(first_column, blocks_per_chunk) + ordinal


@domain(block_id=NATURAL, stride_bytes=POSITIVE)
def byte_offset(block_id: int, stride_bytes: int) -> int:
    """Bytes from a tensor's start to a block, in 64 bits.

    Source: `v1/worker/mamba_utils.py::_copy_mamba_state_block`,
    `v1/kv_offload/cpu/gpu_worker.py::compute_sub_block_ptrs`.
    """
    return block_id * stride_bytes
