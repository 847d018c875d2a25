"""Words of theorems 11 to 19: sizes, hypotheses about a decode step, and uses of lemmas.

Letters: c tokens computed (and verified) before a step, q scheduled in it, a accepted, n = c + a after it,
K drafts, bs the recurrent group's block, v tokens known (prompt and verified output), L hash lookahead, P
prefill lookahead of the drafter, b a block and k blocks a chunk of the offload tier.  A decode step
schedules 1 <= q <= K + 1 tokens and accepts 1 <= a <= q of them.
"""

from typing import Any

from spec.arith import align
from spec.arith.division import cdiv, floordiv
from spec.prove.lemmas import monotone, scaled
from spec.prove.theorem import Hypothesis, LemmaUse, Symbol

LOOKAHEAD = Symbol("L", 0, "hash lookahead")
COMPUTED = Symbol("c", 0, "tokens computed before the step")
COMPUTED_IN_DECODE = Symbol("c", 1, "tokens computed before a decode step")
SCHEDULED = Symbol("q", 1, "tokens scheduled in the step")
ACCEPTED = Symbol("a", 1, "tokens accepted in the step")
DRAFTS = Symbol("K", 0, "drafts")
BLOCK = Symbol("bs", 1, "tokens per block of the recurrent group")
OTHER_BLOCK = Symbol("d", 1, "another group's block, used as divisor")
COLUMN = Symbol("p", 0, "a column")
LAST_RUNNING = Symbol("r0", 0, "running column of the step before")
DECODE = (
    Hypothesis("q <= K + 1", lambda q, K: q <= K + 1),
    Hypothesis("a <= q", lambda a, q: a <= q),
)
FITS = Hypothesis("K + 1 <= bs", lambda K, bs: K + 1 <= bs)
TOO_LONG = Hypothesis("K + 1 > bs", lambda K, bs: K + 1 > bs)
REACHED = Hypothesis("a boundary was reached", lambda c, a, bs: align.boundary_reached(c + a, a, bs))


def equal(u: Any, v: Any, factor: Any) -> tuple[LemmaUse, ...]:
    """What rules out u < v and v < u where both products with the factor lie in one interval of its
    length."""
    return monotone(u, v, factor), monotone(v, u, factor)


def same(u: Any, v: Any, factor: Any) -> tuple[LemmaUse, ...]:
    """Equal numbers have equal products with the factor."""
    return monotone(u - 1, v, factor), monotone(v - 1, u, factor)


def same_boundary(s: Any, bs: Any) -> tuple[LemmaUse, ...]:
    """The boundary at or above s, counted by cdiv, lies at s or is the end of the block that s lies in."""
    up, down = cdiv(s, bs), floordiv(s, bs)
    return *equal(up, down, bs), *same(up, down, bs), *equal(up, down + 1, bs), *same(up, down + 1, bs)


def on_boundary(blocks: Any, bs: Any) -> tuple[LemmaUse, ...]:
    """blocks * bs leaves no remainder."""
    return scaled(0, blocks, bs), *same(blocks, floordiv(blocks * bs, bs), bs)
