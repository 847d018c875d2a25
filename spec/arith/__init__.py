"""Coverage and alignment arithmetic, written once.

The modules hold pure cores: `division`, `coverage` (what a hit demands, what lookup checks, what the store
keeps) and `align` (Mamba columns, boundaries, splits, placement).  The names exported here are their
checked forms: `arith.cdiv(x, divisor)` refuses a divisor of 0 with one line that names the argument, and
`arith.cdiv.core` is the formula itself, the object that theorems prove and kernels compile.
"""

from spec.arith import align, division
from spec.arith.checked import ArithError, Checked, checked

floordiv = checked(division.floordiv)
floormod = checked(division.floormod)
cdiv = checked(division.cdiv)
round_down = checked(division.round_down)

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
next_boundary = checked(align.next_boundary)
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
    "boundaries_crossed",
    "boundary_offset",
    "boundary_reached",
    "boundary_registrable",
    "boundary_run",
    "byte_offset",
    "cdiv",
    "checked",
    "checkpoint_position",
    "chunk_of_column",
    "destination_column",
    "first_live_column",
    "floordiv",
    "floormod",
    "frees_last_state",
    "junction_stop",
    "landing_position",
    "last_state_column",
    "lookahead_reserve",
    "next_boundary",
    "pads_column",
    "relocates_column",
    "required_columns",
    "round_down",
    "running_column",
    "scratch_column",
    "seed_column",
    "source_column",
    "stop_inside",
    "subslot",
]
