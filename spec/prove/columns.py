"""Theorems 11 to 14: in which columns recurrent state lies, and which copy puts it there."""

from typing import Any

from spec.arith import align
from spec.arith.division import cdiv, floordiv, floormod
from spec.prove.lemmas import scaled
from spec.prove.steps import (
    ACCEPTED,
    BLOCK,
    COLUMN,
    COMPUTED,
    COMPUTED_IN_DECODE,
    DECODE,
    DRAFTS,
    FITS,
    LAST_RUNNING,
    OTHER_BLOCK,
    REACHED,
    SCHEDULED,
    TOO_LONG,
    equal,
)
from spec.prove.symbolic import Truth, both, either, iff, implies, negation
from spec.prove.theorem import Claim, Hypothesis, Refutation, Symbol, Theorem

# --- 11: the seed column ------------------------------------------------------------------------------------


def _other_divisor(d: Any, bs: Any) -> Truth:
    tokens = d * bs
    return both(
        iff(align.seed_column(tokens, d) == align.seed_column(tokens, bs), d == bs),
        implies(d < bs, align.seed_column(tokens, d) > floordiv(tokens, bs) - 1),
    )


def _truncated_seed(n: Any, bs: Any) -> Any:
    """(n - 1) / bs rounded towards zero."""
    return -floordiv(1 - n, bs) if n < 1 else floordiv(n - 1, bs)


THEOREM_11 = Theorem(
    11,
    "seed column",
    "align",
    "the seed column (n-1)//bs is in range and is the column whose state is after n tokens; a divisor d "
    "gives the same column for all n iff d = bs, and for every d < bs there is a hit at which it lies past "
    "the row; at n = 0 the seed is -1, and only there",
    (
        Claim(
            "seed column holds the last token, and no other column does",
            (Symbol("n", 0, "tokens computed"), Symbol("p", None, "a column"), BLOCK),
            lambda n, p, bs: iff(p == align.seed_column(n, bs), both(p * bs < n, n <= (p + 1) * bs)),
            (),
            lambda n, p, bs: equal(p, align.seed_column(n, bs), bs),
        ),
        Claim(
            "seed column is the running column of the step that ended there",
            (COMPUTED, Symbol("q", 0, "tokens scheduled in the step"), BLOCK),
            lambda c, q, bs: align.seed_column(c + q, bs) == align.running_column(c, q, bs),
            (),
            lambda c, q, bs: equal(align.seed_column(c + q, bs), align.running_column(c, q, bs), bs),
        ),
        Claim(
            "seed column of a hit of m blocks is the hit's last",
            (Symbol("m", 1, "blocks hit"), BLOCK),
            lambda m, bs: align.seed_column(m * bs, bs) == m - 1,
            (),
            lambda m, bs: (scaled(-1, m, bs), *equal(floordiv(-1, bs), -1, bs)),
        ),
        Claim(
            "seed column -1 marks a fresh request, and nothing else does",
            (Symbol("n", 0, "tokens computed"), BLOCK),
            lambda n, bs: both(
                iff(align.seed_column(n, bs) < 0, n == 0), implies(n == 0, align.seed_column(n, bs) == -1)
            ),
            (),
            lambda n, bs: equal(align.seed_column(n, bs), -1, bs),
        ),
        Claim(
            "another divisor names another column at n = d*bs",
            (OTHER_BLOCK, BLOCK),
            _other_divisor,
            (),
            lambda d, bs: (
                scaled(-1, d, bs),
                scaled(-1, bs, d),
                scaled(0, d, bs),
                *equal(floordiv(-1, bs), -1, bs),
                *equal(floordiv(-1, d), -1, d),
            ),
        ),
    ),
    (
        Refutation(
            "the smallest block of all groups as divisor (up to 0.31.0, vllm issue 53142)",
            "historic",
            Claim(
                "seed column by another divisor",
                (Symbol("n", 0, "tokens computed"), OTHER_BLOCK, BLOCK),
                lambda n, d, bs: align.seed_column(n, d) == align.seed_column(n, bs),
            ),
            {"n": 134400, "d": 16, "bs": 4480},
            lambda n, d, bs: (
                f"{n} tokens are held by column {(n - 1) // bs} of {bs}-token blocks; divided by {d} "
                f"the seed is column {(n - 1) // d}"
            ),
            ("d", "bs"),
        ),
        Refutation(
            "division that truncates, as in a GPU kernel",
            "hypothetical",
            Claim(
                "a fresh request is marked",
                (Symbol("n", 0, "tokens computed"), BLOCK),
                lambda n, bs: iff(_truncated_seed(n, bs) < 0, n == 0),
            ),
            {"n": 0, "bs": 16},
            lambda n, bs: (
                f"at {n} tokens the seed is column 0 instead of -1: a fresh request reads a state in "
                f"{bs}-token block 0 that it does not have"
            ),
            ("bs",),
        ),
    ),
)


# --- 12: columns lie in the row -----------------------------------------------------------------------------

THEOREM_12 = Theorem(
    12,
    "columns of a step",
    "align",
    "running, scratch and source columns lie inside the row, K scratch columns after the running one are "
    "exactly what the row has; the source offset a-1 is at most K; the aligned state indices begin at the "
    "running column",
    (
        Claim(
            "running and scratch columns fill the row",
            (COMPUTED, SCHEDULED, Symbol("i", 0, "draft"), DRAFTS, BLOCK),
            lambda c, q, i, K, bs: both(
                align.running_column(c, q, bs) >= 0,
                align.last_state_column(align.required_columns(c, q, bs, K), K)
                == align.running_column(c, q, bs),
                iff(
                    align.scratch_column(align.running_column(c, q, bs), i)
                    <= align.required_columns(c, q, bs, K) - 1,
                    i <= K,
                ),
                align.scratch_column(align.running_column(c, q, bs), i) >= align.running_column(c, q, bs),
                implies(
                    i == 0,
                    align.scratch_column(align.running_column(c, q, bs), i) == align.running_column(c, q, bs),
                ),
            ),
        ),
        Claim(
            "a row of full capacity has room for every step",
            (COMPUTED, SCHEDULED, Symbol("M", 1, "longest sequence"), DRAFTS, BLOCK),
            lambda c, q, M, K, bs: align.required_columns(c, q, bs, K) <= align.required_columns(M, 0, bs, K),
            (Hypothesis("c + q <= M", lambda c, q, M: c + q <= M),),
        ),
        Claim(
            "source column lies between the running column and its last scratch column",
            (LAST_RUNNING, Symbol("a", 0, "tokens accepted in the step"), DRAFTS),
            lambda r0, a, K: both(
                align.accepted_offset(a) >= 0,
                align.accepted_offset(a) <= K,
                implies(a >= 1, align.accepted_offset(a) == a - 1),
                align.source_column(r0, a) == align.scratch_column(r0, align.accepted_offset(a)),
                align.source_column(r0, a) >= r0,
                align.source_column(r0, a) <= align.scratch_column(r0, K),
            ),
            (Hypothesis("a <= K + 1", lambda a, K: a <= K + 1),),
        ),
        Claim(
            "source column is not freed before its step is processed",
            (COMPUTED, SCHEDULED, Symbol("t", 0, "tokens processed"), BLOCK),
            lambda c, q, t, bs: both(
                align.first_live_column(t, bs) >= 0,
                align.first_live_column(t, bs) <= align.running_column(c, q, bs),
                negation(align.frees_last_state(align.running_column(c, q, bs), t, bs)),
            ),
            (Hypothesis("t <= c + q", lambda t, c, q: t <= c + q),),
        ),
        Claim(
            "aligned state indices begin at the running column, and at 0 for a padded row",
            (COMPUTED, Symbol("q", 0, "tokens scheduled in the step"), BLOCK),
            lambda c, q, bs: (
                align.aligned_first_column(c + q, bs) == (align.running_column(c, q, bs) if c + q >= 1 else 0)
            ),
            (),
            lambda c, q, bs: equal(align.seed_column(c + q, bs), align.running_column(c, q, bs), bs),
        ),
    ),
    (
        Refutation(
            "a row of cdiv(longest sequence, bs) columns, without K more",
            "hypothetical",
            Claim(
                "a row without scratch columns",
                (COMPUTED, SCHEDULED, DRAFTS, BLOCK),
                lambda c, q, K, bs: (
                    align.scratch_column(align.running_column(c, q, bs), q - 1) <= cdiv(c + q, bs) - 1
                ),
                (Hypothesis("q <= K + 1", lambda q, K: q <= K + 1),),
            ),
            {"c": 46, "q": 3, "K": 2, "bs": 16},
            lambda c, q, K, bs: (
                f"{q} tokens after {c} write columns {cdiv(c + q, bs) - 1} to {cdiv(c + q, bs) + q - 2} "
                f"of a row of {cdiv(c + q, bs)} ({bs}-token blocks, {K} drafts)"
            ),
            ("bs",),
        ),
        Refutation(
            "the accepted count itself as offset",
            "hypothetical",
            Claim(
                "offset a",
                (LAST_RUNNING, ACCEPTED, DRAFTS),
                lambda r0, a, K: r0 + a <= align.scratch_column(r0, K),
                (Hypothesis("a <= K + 1", lambda a, K: a <= K + 1),),
            ),
            {"r0": 3, "a": 3, "K": 2},
            lambda r0, a, K: (
                f"{a} tokens accepted: column {r0 + a} is read, the last scratch column is {r0 + K}"
            ),
        ),
        Refutation(
            "an accepted count that is not bounded from below (vllm pull 50021)",
            "historic",
            Claim(
                "offset a-1 without a bound",
                (LAST_RUNNING, Symbol("a", 0, "tokens accepted in the step")),
                lambda r0, a: r0 + a - 1 >= r0,
            ),
            {"r0": 3, "a": 0},
            lambda r0, a: f"{a} tokens accepted: column {r0 + a - 1} is read, the running column is {r0}",
        ),
    ),
)


# --- 13: the post-process copy ------------------------------------------------------------------------------

_w = Symbol("w", 0, "rejected tokens of the step before")
_g = Symbol("g", 0, "of these, still counted by the scheduler")
ROW_BEFORE = (
    Hypothesis("w <= K", lambda w, K: w <= K),
    Hypothesis("g <= w", lambda g, w: g <= w),
)


def _taken_by_step(column: Any, before: Any, running: Any, drafts: Any, bs: Any) -> Truth:
    """Whether a step that allocates up to column `running` nulls or relocates a column, the row having been
    allocated for `before` tokens."""
    columns = align.required_columns(before, 0, bs, drafts)
    pads = align.pads_column(column, columns, running)
    return either(pads, align.relocates_column(column, columns, running, drafts))


def _gap(c: Any, q: Any, p: Any, e: Any, K: Any, bs: Any) -> Truth:
    running, before = align.running_column(c, q, bs), align.running_column(e, 0, bs)
    columns = align.required_columns(e, 0, bs, K)
    return both(
        iff(_taken_by_step(p, e, running, K, bs), both(p > before, p < running)),
        implies(align.relocates_column(p, columns, running, K), p < columns),
    )


def _destination_taken(c: Any, q: Any, a: Any, w: Any, g: Any, K: Any, bs: Any) -> Truth:
    running = align.running_column(c + g, q, bs)
    return _taken_by_step(align.destination_column(c + a, bs), c + w, running, K, bs)


def _destination_taken_witness(m: Any, K: Any, bs: Any) -> Truth:
    c, q, a = m * bs, K + 1, bs
    return both(
        a >= 1,
        a <= q,
        align.boundary_reached(c + a, a, bs),
        _destination_taken(c, q, a, 0, 0, K, bs),
    )


def _copy_in_range(c: Any, q: Any, a: Any, K: Any, bs: Any) -> Truth:
    running = align.running_column(c, q, bs)
    offset, destination = align.boundary_offset(c + a, a, bs), align.destination_column(c + a, bs)
    return both(
        offset >= 0,
        offset <= a - 1,
        offset <= K,
        destination >= 0,
        destination <= running,
        align.scratch_column(running, offset) <= align.required_columns(c, q, bs, K) - 1,
    )


THEOREM_13 = Theorem(
    13,
    "post-process copy",
    "align",
    "if a boundary was reached, the offset lies in [0, a-1] and in [0, K] and the destination in [0, "
    "running column]; a step's allocation nulls or relocates a column iff it lies strictly between the "
    "running columns before and after; it never takes the destination, for all decode steps, iff K + 1 <= "
    "bs; before the step is processed the destination is not freed, and after that it is iff n is not a "
    "multiple of bs",
    (
        Claim(
            "copy in range",
            (COMPUTED, SCHEDULED, ACCEPTED, DRAFTS, BLOCK),
            _copy_in_range,
            (*DECODE, REACHED),
        ),
        Claim(
            "a boundary was reached iff a multiple of bs lies in (c, c+a]",
            (COMPUTED, ACCEPTED, BLOCK),
            lambda c, a, bs: both(
                align.boundary_run(c + a, a) == c + 1,
                iff(align.boundary_reached(c + a, a, bs), align.boundaries_crossed(c, a, bs) >= 1),
                iff(align.boundary_reached(c + a, a, bs), align.boundary_offset(c + a, a, bs) >= 0),
            ),
        ),
        Claim(
            "destination is the running column only if every scheduled token was accepted",
            (COMPUTED, SCHEDULED, ACCEPTED, DRAFTS, BLOCK),
            lambda c, q, a, K, bs: implies(
                align.destination_column(c + a, bs) == align.running_column(c, q, bs),
                both(a == q, align.boundary_offset(c + a, a, bs) == a - 1),
            ),
            (*DECODE, REACHED),
        ),
        Claim(
            "prefill's boundary is its running column at offset 0",
            (COMPUTED, SCHEDULED, BLOCK),
            lambda c, q, bs: both(
                iff(align.boundary_reached(c + q, 1, bs), floormod(c + q, bs) == 0),
                implies(
                    align.boundary_reached(c + q, 1, bs),
                    both(
                        align.boundary_offset(c + q, 1, bs) == 0,
                        align.destination_column(c + q, bs) == align.running_column(c, q, bs),
                    ),
                ),
            ),
            (),
            lambda c, q, bs: equal(align.destination_column(c + q, bs), align.running_column(c, q, bs), bs),
        ),
        Claim(
            "a step takes the columns strictly between two running columns",
            (
                COMPUTED,
                SCHEDULED,
                COLUMN,
                Symbol("e", 1, "tokens that the row was allocated for"),
                DRAFTS,
                BLOCK,
            ),
            _gap,
            (Hypothesis("p <= running column", lambda p, c, q, bs: p <= align.running_column(c, q, bs)),),
        ),
        Claim(
            "no decode step takes its destination, under K + 1 <= bs",
            (COMPUTED, SCHEDULED, ACCEPTED, _w, _g, DRAFTS, BLOCK),
            lambda c, q, a, w, g, K, bs: negation(_destination_taken(c, q, a, w, g, K, bs)),
            (*DECODE, *ROW_BEFORE, FITS, REACHED),
        ),
        Claim(
            "some decode step takes its destination, for every K + 1 > bs",
            (Symbol("m", 1, "blocks computed"), DRAFTS, BLOCK),
            _destination_taken_witness,
            (TOO_LONG,),
            lambda m, K, bs: (
                scaled(bs, m, bs),
                scaled(0, m, bs),
                scaled(-bs, -m, bs),
                scaled(-K - 1, -m, bs),
                scaled(0, -m, bs),
            ),
        ),
        Claim(
            "destination is live while at most c tokens are processed",
            (COMPUTED, ACCEPTED, Symbol("t", 0, "tokens processed"), BLOCK),
            lambda c, a, t, bs: both(
                align.destination_column(c + a, bs) >= align.first_live_column(t, bs),
                negation(align.frees_last_state(align.destination_column(c + a, bs), t, bs)),
            ),
            (Hypothesis("t <= c", lambda t, c: t <= c), REACHED),
        ),
        Claim(
            "destination is freed once its step is processed, iff n is not a multiple of bs",
            (COMPUTED, ACCEPTED, BLOCK),
            lambda c, a, bs: both(
                iff(
                    align.destination_column(c + a, bs) < align.first_live_column(c + a, bs),
                    floormod(c + a, bs) != 0,
                ),
                iff(
                    align.frees_last_state(align.destination_column(c + a, bs), c + a, bs),
                    floormod(c + a, bs) != 0,
                ),
            ),
            (REACHED,),
        ),
    ),
    (
        Refutation(
            "no side condition on K and bs",
            "hypothetical",
            Claim(
                "no decode step takes its destination",
                (COMPUTED_IN_DECODE, SCHEDULED, ACCEPTED, _w, _g, DRAFTS, BLOCK),
                lambda c, q, a, w, g, K, bs: negation(_destination_taken(c, q, a, w, g, K, bs)),
                (*DECODE, *ROW_BEFORE, REACHED),
            ),
            {"c": 4, "q": 5, "a": 4, "w": 0, "g": 0, "K": 4, "bs": 4},
            lambda c, q, a, w, g, K, bs: (
                f"{a} of {q} tokens accepted after {c}: boundary {(c + a) // bs * bs} belongs to column "
                f"{(c + a) // bs - 1}, which the step's allocation took "
                f"({bs}-token blocks, running column {cdiv(c + w, bs) - 1} to {cdiv(c + g + q, bs) - 1})"
            ),
            ("bs", "K"),
        ),
    ),
    (),
    (
        "w and g cover both schedulers: with g = 0 the row was allocated for w tokens that have since been "
        "rejected; an asynchronous scheduler still counts them (g = w).",
        "A row that shrinks (fewer drafts than the step before) takes nothing: the claims hold for it as "
        "well.",
    ),
)


# --- 14: at most one boundary a step ------------------------------------------------------------------------


def _advance(e: Any, q: Any, w: Any, bs: Any) -> Any:
    """Columns by which the running column moves when a step of q tokens follows one that ended at e, w
    rejected."""
    return align.running_column(e - w, q, bs) - align.running_column(e, 0, bs)


THEOREM_14 = Theorem(
    14,
    "one boundary a step",
    "align",
    "(for all c and 1 <= a <= K+1 at most one multiple of bs lies in (c, c+a]) iff K+1 <= bs; (for all "
    "consecutive decode schedules the running column advances by at most one) iff K+1 <= bs",
    (
        Claim(
            "at most one boundary, under K + 1 <= bs",
            (COMPUTED, ACCEPTED, DRAFTS, BLOCK),
            lambda c, a, K, bs: both(
                align.boundaries_crossed(c, a, bs) >= 0, align.boundaries_crossed(c, a, bs) <= 1
            ),
            (Hypothesis("a <= K + 1", lambda a, K: a <= K + 1), FITS),
        ),
        Claim(
            "two boundaries at c = m*bs - 1, a = bs + 1, for every K + 1 > bs",
            (Symbol("m", 1, "blocks"), DRAFTS, BLOCK),
            lambda m, K, bs: both(bs + 1 <= K + 1, align.boundaries_crossed(m * bs - 1, bs + 1, bs) == 2),
            (TOO_LONG,),
            lambda m, K, bs: (
                scaled(bs, m, bs),
                scaled(-1, m, bs),
                *equal(floordiv(bs, bs), 1, bs),
                *equal(floordiv(-1, bs), -1, bs),
            ),
        ),
        Claim(
            "the running column advances by at most one, under K + 1 <= bs",
            (Symbol("e", 1, "end of the step before"), SCHEDULED, _w, DRAFTS, BLOCK),
            lambda e, q, w, K, bs: _advance(e, q, w, bs) <= 1,
            (
                Hypothesis("q <= K + 1", lambda q, K: q <= K + 1),
                Hypothesis("w <= K", lambda w, K: w <= K),
                Hypothesis("w < e", lambda w, e: w < e),
                FITS,
            ),
        ),
        Claim(
            "the running column advances by two or more from e = m*bs, for every K + 1 > bs",
            (Symbol("m", 1, "blocks"), DRAFTS, BLOCK),
            lambda m, K, bs: _advance(m * bs, K + 1, 0, bs) >= 2,
            (TOO_LONG,),
            lambda m, K, bs: (scaled(-K - 1, -m, bs), scaled(0, -m, bs)),
        ),
    ),
    (
        Refutation(
            "K <= bs as side condition",
            "hypothetical",
            Claim(
                "at most one boundary under K <= bs",
                (COMPUTED_IN_DECODE, ACCEPTED, DRAFTS, BLOCK),
                lambda c, a, K, bs: align.boundaries_crossed(c, a, bs) <= 1,
                (
                    Hypothesis("a <= K + 1", lambda a, K: a <= K + 1),
                    Hypothesis("K <= bs", lambda K, bs: K <= bs),
                ),
            ),
            {"c": 7, "a": 5, "K": 4, "bs": 4},
            lambda c, a, K, bs: (
                f"{a} tokens accepted after {c} reach {(c + a) // bs - c // bs} boundaries of {bs} tokens "
                f"with {K} drafts"
            ),
            ("bs",),
        ),
    ),
)
