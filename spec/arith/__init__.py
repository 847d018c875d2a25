"""Coverage and alignment arithmetic, written once.

The modules hold pure cores: `division`, `coverage` (what a hit demands, what lookup checks, what the store
keeps) and `align` (Mamba columns, boundaries, splits, placement).  The names exported here are their
checked forms: `arith.cdiv(x, divisor)` refuses a divisor of 0 with one line that names the argument, and
`arith.cdiv.core` is the formula itself, the object that theorems prove and kernels compile.
"""

from spec.arith import align, coverage, division
from spec.arith.checked import ArithError, Checked, checked

floordiv = checked(division.floordiv)
floormod = checked(division.floormod)
cdiv = checked(division.cdiv)
round_down = checked(division.round_down)

chunk_tokens = checked(coverage.chunk_tokens)
blocks_of = checked(coverage.blocks_of)
full_chunks_of = checked(coverage.full_chunks_of)
span_blocks = checked(coverage.span_blocks)
span_bound = checked(coverage.span_bound)
skipped_tokens = checked(coverage.skipped_tokens)
skipped_tokens_chunked = checked(coverage.skipped_tokens_chunked)
first_retained_column = checked(coverage.first_retained_column)
local_need_blocks = checked(coverage.local_need_blocks)
base_window_chunks = checked(coverage.base_window_chunks)
base_window_chunks_v0_30 = checked(coverage.base_window_chunks_v0_30)
lookup_window_chunks = checked(coverage.lookup_window_chunks)
lookup_window_chunks_v0_30 = checked(coverage.lookup_window_chunks_v0_30)
chunked_window_chunks = checked(coverage.chunked_window_chunks)
lookup_first_chunk_full = checked(coverage.lookup_first_chunk_full)
first_checked_chunk = checked(coverage.first_checked_chunk)
lookup_first_chunk = checked(coverage.lookup_first_chunk)
in_flight_first_chunk = checked(coverage.in_flight_first_chunk)
first_fresh_column = checked(coverage.first_fresh_column)
demand_end_chunk = checked(coverage.demand_end_chunk)
demand_first_chunk_full = checked(coverage.demand_first_chunk_full)
demand_first_column = checked(coverage.demand_first_column)
demand_first_chunk_window = checked(coverage.demand_first_chunk_window)
demand_first_chunk_chunked = checked(coverage.demand_first_chunk_chunked)
demand_first_chunk_mamba = checked(coverage.demand_first_chunk_mamba)
pending_blocks_bound = checked(coverage.pending_blocks_bound)
store_need_blocks = checked(coverage.store_need_blocks)
store_need_blocks_v0_30 = checked(coverage.store_need_blocks_v0_30)
store_need_blocks_corrected = checked(coverage.store_need_blocks_corrected)
store_keeps_block = checked(coverage.store_keeps_block)
store_keeps_final_block = checked(coverage.store_keeps_final_block)
store_keeps_all = checked(coverage.store_keeps_all)
store_keeps_chunk = checked(coverage.store_keeps_chunk)
lookup_candidate = checked(coverage.lookup_candidate)
shrink_hit = checked(coverage.shrink_hit)
worth_loading = checked(coverage.worth_loading)
tail_drop = checked(coverage.tail_drop)
query_end_chunk = checked(coverage.query_end_chunk)
common_hit = checked(coverage.common_hit)
mamba_state_tokens = checked(coverage.mamba_state_tokens)

seed_column = checked(align.seed_column)
running_column = checked(align.running_column)
aligned_first_column = checked(align.aligned_first_column)
scratch_column = checked(align.scratch_column)
accepted_offset = checked(align.accepted_offset)
source_column = checked(align.source_column)
boundary_run = checked(align.boundary_run)
boundary_reached = checked(align.boundary_reached)
boundary_offset = checked(align.boundary_offset)
destination_column = checked(align.destination_column)
boundaries_crossed = checked(align.boundaries_crossed)
required_columns = checked(align.required_columns)
last_state_column = checked(align.last_state_column)
pads_column = checked(align.pads_column)
relocates_column = checked(align.relocates_column)
first_live_column = checked(align.first_live_column)
frees_last_state = checked(align.frees_last_state)
boundary_registrable = checked(align.boundary_registrable)
checkpoint_position = checked(align.checkpoint_position)
boundary_from = checked(align.boundary_from)
aligned_chunk_end = checked(align.aligned_chunk_end)
stop_inside = checked(align.stop_inside)
junction_stop = checked(align.junction_stop)
aligned_split = checked(align.aligned_split)
lookahead_reserve = checked(align.lookahead_reserve)
aligned_reserve = checked(align.aligned_reserve)
chunk_of_column = checked(align.chunk_of_column)
subslot = checked(align.subslot)
landing_position = checked(align.landing_position)
byte_offset = checked(align.byte_offset)

__all__ = [
    "ArithError",
    "Checked",
    "accepted_offset",
    "aligned_chunk_end",
    "aligned_first_column",
    "aligned_reserve",
    "aligned_split",
    "base_window_chunks",
    "base_window_chunks_v0_30",
    "blocks_of",
    "boundaries_crossed",
    "boundary_from",
    "boundary_offset",
    "boundary_reached",
    "boundary_registrable",
    "boundary_run",
    "byte_offset",
    "cdiv",
    "checked",
    "checkpoint_position",
    "chunk_of_column",
    "chunk_tokens",
    "chunked_window_chunks",
    "common_hit",
    "demand_end_chunk",
    "demand_first_chunk_chunked",
    "demand_first_chunk_full",
    "demand_first_chunk_mamba",
    "demand_first_chunk_window",
    "demand_first_column",
    "destination_column",
    "first_checked_chunk",
    "first_fresh_column",
    "first_live_column",
    "first_retained_column",
    "floordiv",
    "floormod",
    "frees_last_state",
    "full_chunks_of",
    "in_flight_first_chunk",
    "junction_stop",
    "landing_position",
    "last_state_column",
    "local_need_blocks",
    "lookahead_reserve",
    "lookup_candidate",
    "lookup_first_chunk",
    "lookup_first_chunk_full",
    "lookup_window_chunks",
    "lookup_window_chunks_v0_30",
    "mamba_state_tokens",
    "pads_column",
    "pending_blocks_bound",
    "query_end_chunk",
    "relocates_column",
    "required_columns",
    "round_down",
    "running_column",
    "scratch_column",
    "seed_column",
    "shrink_hit",
    "skipped_tokens",
    "skipped_tokens_chunked",
    "source_column",
    "span_blocks",
    "span_bound",
    "stop_inside",
    "store_keeps_all",
    "store_keeps_block",
    "store_keeps_chunk",
    "store_keeps_final_block",
    "store_need_blocks",
    "store_need_blocks_corrected",
    "store_need_blocks_v0_30",
    "subslot",
    "tail_drop",
    "worth_loading",
]
