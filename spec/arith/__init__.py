"""Coverage and alignment arithmetic, written once.

The modules hold pure cores: `division`, `coverage` (what a hit demands, what lookup checks, what the store
keeps) and `align` (Mamba columns, boundaries, splits, placement).  The names exported here are their
checked forms: `arith.cdiv(x, divisor)` refuses a divisor of 0 with one line that names the argument, and
`arith.cdiv.core` is the formula itself, the object that theorems prove and kernels compile.
"""

from spec.arith import division
from spec.arith.checked import ArithError, Checked, checked

floordiv = checked(division.floordiv)
floormod = checked(division.floormod)
cdiv = checked(division.cdiv)
round_down = checked(division.round_down)

__all__ = ["ArithError", "Checked", "cdiv", "checked", "floordiv", "floormod", "round_down"]
