"""Division, written once.

Python's `//` and `%` round towards minus infinity; a GPU kernel's truncate towards zero, so that `(n - 1)
// bs` at n = 0 is -1 here and 0 there, and a fresh request loses its marker.  Every other formula divides
through `floordiv` and `floormod`, so these two are the only ones that a kernel replaces by twins of its
own.
"""

from spec.arith.checked import ANY, POSITIVE, domain


@domain(x=ANY, divisor=POSITIVE)
def floordiv(x: int, divisor: int) -> int:
    """The greatest q with q * divisor <= x."""
    return x // divisor


@domain(x=ANY, divisor=POSITIVE)
def floormod(x: int, divisor: int) -> int:
    """x - floordiv(x, divisor) * divisor, from 0 to divisor - 1, also for a negative x."""
    return x % divisor


@domain(x=ANY, divisor=POSITIVE)
def cdiv(x: int, divisor: int) -> int:
    """The least q with q * divisor >= x (upstream `utils/math_utils.py::cdiv`, all releases)."""
    return -floordiv(-x, divisor)


@domain(x=ANY, unit=POSITIVE)
def round_down(x: int, unit: int) -> int:
    """The greatest multiple of unit that is at most x."""
    return floordiv(x, unit) * unit
