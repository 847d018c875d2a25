"""Theorems 11 to 19: where recurrent state lives, how prefill is cut, where chunks and bytes land.

Letters: c tokens computed (and verified) before a step, q scheduled in it, a accepted, n = c + a after it,
K drafts, bs the recurrent group's block, v tokens known (prompt and verified output), L hash lookahead, P
prefill lookahead of the drafter, b a block and k blocks a chunk of the offload tier.  A decode step
schedules 1 <= q <= K + 1 tokens and accepts 1 <= a <= q of them.

A statement of the form "for all sizes A iff B" is two claims: A under B, and outside B a counterexample
whose numbers are given as formulas of the sizes (so that it exists for every size outside).
"""

from typing import Any

from spec.arith import align
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove.lemmas import monotone, nested, nonnegative, scaled
from spec.prove.symbolic import Truth, both, either, iff, implies, negation
from spec.prove.theorem import Claim, Hypothesis, LemmaUse, Refutation, Symbol, Theorem

_c = Symbol("c", 0, "tokens computed before the step")
_c1 = Symbol("c", 1, "tokens computed before a decode step")
_q = Symbol("q", 1, "tokens scheduled in the step")
_a = Symbol("a", 1, "tokens accepted in the step")
_K = Symbol("K", 0, "drafts")
_bs = Symbol("bs", 1, "tokens per block of the recurrent group")
_d = Symbol("d", 1, "another group's block, used as divisor")
_p = Symbol("p", 0, "a column")
_r0 = Symbol("r0", 0, "running column of the step before")

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
            (Symbol("n", 0, "tokens computed"), Symbol("p", None, "a column"), _bs),
            lambda n, p, bs: iff(p == align.seed_column(n, bs), both(p * bs < n, n <= (p + 1) * bs)),
            (),
            lambda n, p, bs: equal(p, align.seed_column(n, bs), bs),
        ),
        Claim(
            "seed column is the running column of the step that ended there",
            (_c, Symbol("q", 0, "tokens scheduled"), _bs),
            lambda c, q, bs: align.seed_column(c + q, bs) == align.running_column(c, q, bs),
            (),
            lambda c, q, bs: equal(align.seed_column(c + q, bs), align.running_column(c, q, bs), bs),
        ),
        Claim(
            "seed column of a hit of m blocks is the hit's last",
            (Symbol("m", 1, "blocks hit"), _bs),
            lambda m, bs: align.seed_column(m * bs, bs) == m - 1,
            (),
            lambda m, bs: (scaled(-1, m, bs), *equal(floordiv(-1, bs), -1, bs)),
        ),
        Claim(
            "seed column -1 marks a fresh request, and nothing else does",
            (Symbol("n", 0, "tokens computed"), _bs),
            lambda n, bs: both(
                iff(align.seed_column(n, bs) < 0, n == 0), implies(n == 0, align.seed_column(n, bs) == -1)
            ),
            (),
            lambda n, bs: equal(align.seed_column(n, bs), -1, bs),
        ),
        Claim(
            "another divisor names another column at n = d*bs",
            (_d, _bs),
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
                (Symbol("n", 0, "tokens computed"), _d, _bs),
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
                (Symbol("n", 0, "tokens computed"), _bs),
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
            (_c, Symbol("q", 1, "tokens scheduled"), Symbol("i", 0, "draft"), _K, _bs),
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
            (_c, _q, Symbol("M", 1, "longest sequence"), _K, _bs),
            lambda c, q, M, K, bs: align.required_columns(c, q, bs, K) <= align.required_columns(M, 0, bs, K),
            (Hypothesis("c + q <= M", lambda c, q, M: c + q <= M),),
        ),
        Claim(
            "source column lies between the running column and its last scratch column",
            (_r0, Symbol("a", 0, "tokens accepted"), _K),
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
            (_c, _q, Symbol("t", 0, "tokens processed"), _bs),
            lambda c, q, t, bs: both(
                align.first_live_column(t, bs) >= 0,
                align.first_live_column(t, bs) <= align.running_column(c, q, bs),
                negation(align.frees_last_state(align.running_column(c, q, bs), t, bs)),
            ),
            (Hypothesis("t <= c + q", lambda t, c, q: t <= c + q),),
        ),
        Claim(
            "aligned state indices begin at the running column, and at 0 for a padded row",
            (_c, Symbol("q", 0, "tokens scheduled"), _bs),
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
                (_c, _q, _K, _bs),
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
                (_r0, _a, _K),
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
                (_r0, Symbol("a", 0, "tokens accepted")),
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
        Claim("copy in range", (_c, _q, _a, _K, _bs), _copy_in_range, (*DECODE, REACHED)),
        Claim(
            "a boundary was reached iff a multiple of bs lies in (c, c+a]",
            (_c, _a, _bs),
            lambda c, a, bs: both(
                align.boundary_run(c + a, a) == c + 1,
                iff(align.boundary_reached(c + a, a, bs), align.boundaries_crossed(c, a, bs) >= 1),
                iff(align.boundary_reached(c + a, a, bs), align.boundary_offset(c + a, a, bs) >= 0),
            ),
        ),
        Claim(
            "destination is the running column only if every scheduled token was accepted",
            (_c, _q, _a, _K, _bs),
            lambda c, q, a, K, bs: implies(
                align.destination_column(c + a, bs) == align.running_column(c, q, bs),
                both(a == q, align.boundary_offset(c + a, a, bs) == a - 1),
            ),
            (*DECODE, REACHED),
        ),
        Claim(
            "prefill's boundary is its running column at offset 0",
            (_c, _q, _bs),
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
            (_c, _q, _p, Symbol("e", 1, "tokens that the row was allocated for"), _K, _bs),
            _gap,
            (Hypothesis("p <= running column", lambda p, c, q, bs: p <= align.running_column(c, q, bs)),),
        ),
        Claim(
            "no decode step takes its destination, under K + 1 <= bs",
            (_c, _q, _a, _w, _g, _K, _bs),
            lambda c, q, a, w, g, K, bs: negation(_destination_taken(c, q, a, w, g, K, bs)),
            (*DECODE, *ROW_BEFORE, FITS, REACHED),
        ),
        Claim(
            "some decode step takes its destination, for every K + 1 > bs",
            (Symbol("m", 1, "blocks computed"), _K, _bs),
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
            (_c, _a, Symbol("t", 0, "tokens processed"), _bs),
            lambda c, a, t, bs: both(
                align.destination_column(c + a, bs) >= align.first_live_column(t, bs),
                negation(align.frees_last_state(align.destination_column(c + a, bs), t, bs)),
            ),
            (Hypothesis("t <= c", lambda t, c: t <= c), REACHED),
        ),
        Claim(
            "destination is freed once its step is processed, iff n is not a multiple of bs",
            (_c, _a, _bs),
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
                (_c1, _q, _a, _w, _g, _K, _bs),
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
            (_c, _a, _K, _bs),
            lambda c, a, K, bs: both(
                align.boundaries_crossed(c, a, bs) >= 0, align.boundaries_crossed(c, a, bs) <= 1
            ),
            (Hypothesis("a <= K + 1", lambda a, K: a <= K + 1), FITS),
        ),
        Claim(
            "two boundaries at c = m*bs - 1, a = bs + 1, for every K + 1 > bs",
            (Symbol("m", 1, "blocks"), _K, _bs),
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
            (Symbol("e", 1, "end of the step before"), _q, _w, _K, _bs),
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
            (Symbol("m", 1, "blocks"), _K, _bs),
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
                (_c1, _a, _K, _bs),
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


# --- 15: the fold -------------------------------------------------------------------------------------------

_a0 = Symbol("a0", 1, "tokens accepted in the step before")
_old = Symbol("old", None, "what the column held before the step")


class _Columns:
    """A row's contents as one decode step leaves them: what a column holds is the number of tokens folded
    into it.

    Before the step the source column holds c tokens; whatever else is read holds `old`.
    """

    def __init__(self, c: Any, q: Any, a: Any, r0: Any, a0: Any, bs: Any, old: Any) -> None:
        self.c, self.q, self.a, self.bs, self.old = c, q, a, bs, old
        self.source = align.source_column(r0, a0)
        self.running = align.running_column(c, q, bs)
        self.moved = bool(r0 != self.running)
        self.count = 1 if self.moved else a0
        after = c + a
        self.copied = bool(align.boundary_reached(after, a, bs))
        self.destination = align.destination_column(after, bs)
        self.offset = align.boundary_offset(after, a, bs)
        self.count_after = 1 if self.copied and self.destination == self.running else a

    def before_forward(self, column: Any) -> Any:
        """After the pre-copy."""
        if self.moved and column == self.running:
            return self.c
        return self.c if column == self.source else self.old

    def after_forward(self, column: Any) -> Any:
        """After the forward, which writes the state after each of its q tokens."""
        if column >= self.running and column < self.running + self.q:
            return self.c + 1 + (column - self.running)
        return self.before_forward(column)

    def after_step(self, column: Any) -> Any:
        """After the post-process copy."""
        if self.copied and column == self.destination:
            return self.after_forward(self.running + self.offset)
        return self.after_forward(column)


def _reads_computed(c: Any, q: Any, a: Any, r0: Any, a0: Any, bs: Any, old: Any) -> Truth:
    row = _Columns(c, q, a, r0, a0, bs, old)
    truth: Truth = row.before_forward(align.source_column(row.running, row.count)) == c
    return truth


def _next_reads_verified(c: Any, q: Any, a: Any, r0: Any, a0: Any, bs: Any, old: Any) -> Truth:
    row = _Columns(c, q, a, r0, a0, bs, old)
    truth: Truth = row.after_step(align.source_column(row.running, row.count_after)) == c + a
    return truth


def _boundary_exact(m: Any, c: Any, q: Any, a: Any, r0: Any, a0: Any, bs: Any, old: Any) -> Truth:
    row = _Columns(c, q, a, r0, a0, bs, old)
    truth: Truth = row.after_step(m - 1) == m * bs
    return truth


def _boundary_lost(m: Any, K: Any, bs: Any) -> Truth:
    # A prefill left c = (m + 1)*bs - 1 tokens in column m; the step accepts bs + 1 of K + 1 tokens.
    c, a = (m + 1) * bs - 1, bs + 1
    row = _Columns(c, K + 1, a, m, 1, bs, c)
    return both(a <= K + 1, row.after_step(m) == c, align.boundaries_crossed(c, a, bs) == 2)


def _quotient_hints(m: Any, c: Any, a: Any, bs: Any) -> tuple[LemmaUse, ...]:
    return *equal(m, floordiv(c + a, bs), bs), *equal(m, floordiv(c, bs), bs)


STEP = (_c, _q, _a, _r0, _a0, _K, _bs, _old)
IN_STEP = Hypothesis("c < m*bs <= c + a", lambda m, c, a, bs: both(c < m * bs, m * bs <= c + a))

THEOREM_15 = Theorem(
    15,
    "fold",
    "align",
    "if the source column holds the fold of c verified tokens, the step reads c tokens, the next one reads "
    "c + a, and after post-process every boundary in (c, c+a] sits in its column as the fold of exactly "
    "that many tokens, all verified, under K+1 <= bs; for every K+1 > bs there is a step after which a "
    "boundary's column holds another state",
    (
        Claim(
            "the step reads the state after c tokens",
            STEP,
            lambda c, q, a, r0, a0, bs, old: _reads_computed(c, q, a, r0, a0, bs, old),
            DECODE,
        ),
        Claim(
            "the next step reads the state after c + a tokens",
            STEP,
            lambda c, q, a, r0, a0, bs, old: _next_reads_verified(c, q, a, r0, a0, bs, old),
            DECODE,
        ),
        Claim(
            "every boundary in (c, c+a] is in its column, under K + 1 <= bs",
            (Symbol("m", 1, "the boundary in blocks"), *STEP),
            lambda m, c, q, a, r0, a0, bs, old: _boundary_exact(m, c, q, a, r0, a0, bs, old),
            (*DECODE, FITS, IN_STEP),
            _quotient_hints,
        ),
        Claim(
            "a boundary is lost, for every K + 1 > bs",
            (Symbol("m", 1, "blocks before the lost one"), _K, _bs),
            _boundary_lost,
            (TOO_LONG,),
            lambda m, K, bs: (
                scaled(-1 - K, -m - 1, bs),
                scaled(-K, -m - 1, bs),
                scaled(bs, m + 1, bs),
                scaled(-1, m + 1, bs),
                *equal(floordiv(bs, bs), 1, bs),
                *equal(floordiv(-1, bs), -1, bs),
            ),
        ),
    ),
    (
        Refutation(
            "no side condition on K and bs",
            "hypothetical",
            Claim(
                "every boundary in (c, c+a] is in its column",
                (Symbol("m", 1, "the boundary in blocks"), _c1, *STEP[1:]),
                lambda m, c, q, a, r0, a0, bs, old: _boundary_exact(m, c, q, a, r0, a0, bs, old),
                (*DECODE, IN_STEP),
            ),
            {"m": 2, "c": 7, "q": 5, "a": 5, "r0": 1, "a0": 1, "K": 4, "bs": 4, "old": 7},
            lambda m, c, q, a, r0, a0, K, bs, old: (
                f"{a} of {q} tokens accepted after {c}: boundaries {c // bs * bs + bs} to "
                f"{(c + a) // bs * bs}, of which only the last is copied; column {m - 1} holds {old} "
                f"tokens instead of {m * bs}"
            ),
            ("bs", "K", "m"),
        ),
        Refutation(
            "the boundary column takes the state after the last accepted token",
            "hypothetical",
            Claim(
                "copy at offset a-1",
                (_c, _q, _a, _K, _bs),
                lambda c, q, a, K, bs: c + 1 + align.accepted_offset(a) == round_down(c + a, bs),
                (*DECODE, FITS, REACHED),
            ),
            {"c": 46, "q": 3, "a": 3, "K": 2, "bs": 16},
            lambda c, q, a, K, bs: (
                f"{a} of {q} tokens accepted after {c}: column {(c + a) // bs - 1} holds {c + a} tokens "
                f"instead of {(c + a) // bs * bs}"
            ),
            ("bs",),
        ),
        Refutation(
            "the accepted count of another request (vllm issue 51571)",
            "historic",
            Claim(
                "any accepted count reads the same state",
                (_r0, _a0, Symbol("other", 1, "another request's count"), _K),
                lambda r0, a0, other, K: align.source_column(r0, other) == align.source_column(r0, a0),
                (
                    Hypothesis("a0 <= K + 1", lambda a0, K: a0 <= K + 1),
                    Hypothesis("other <= K + 1", lambda other, K: other <= K + 1),
                ),
            ),
            {"r0": 6, "a0": 4, "other": 1, "K": 4},
            lambda r0, a0, other, K: (
                f"{a0} tokens were accepted, the count read is {other}: the step goes on from column "
                f"{r0 + other - 1} instead of {r0 + a0 - 1}, {abs(a0 - other)} tokens away"
            ),
        ),
    ),
    (),
    (
        "Distinct columns are taken to be distinct blocks; theorem 13 shows that no decode step relocates "
        "a block under K + 1 <= bs.",
        "All tokens folded into a boundary are verified: it is at most c + a.",
    ),
)


# --- 16: registration ---------------------------------------------------------------------------------------

_B = Symbol("B", 1, "a boundary in tokens")
_v = Symbol("v", 0, "tokens known")
_L = Symbol("L", 0, "hash lookahead")
_q0 = Symbol("q", 0, "tokens scheduled")

THEOREM_16 = Theorem(
    16,
    "registration",
    "align",
    "a boundary is registered only if its last token is known (prompt or verified output), and so are the "
    "L after it; a step registers a boundary above the c tokens computed iff L < v - c; so in decode (v = "
    "c + 1) no boundary is registered before its state is computed iff L >= 1",
    (
        Claim(
            "a registered boundary's tokens are known, for every L",
            (_B, _c, _q0, _v, _L),
            lambda B, c, q, v, L: both(B + L <= v, B <= v, B <= c + q),
            (Hypothesis("B is registered", lambda B, c, q, v, L: align.boundary_registrable(B, c, q, v, L)),),
        ),
        Claim(
            "what the step and the known tokens cover is registered",
            (_B, _c, _q0, _v, _L),
            lambda B, c, q, v, L: align.boundary_registrable(B, c, q, v, L),
            (
                Hypothesis("B <= c + q", lambda B, c, q: B <= c + q),
                Hypothesis("B + L <= v", lambda B, L, v: B + L <= v),
            ),
        ),
        Claim(
            "a boundary above c is registered, for some B, iff L < v - c",
            (_B, _c, _q, _v, _L),
            lambda B, c, q, v, L: both(
                iff(align.boundary_registrable(c + 1, c, q, v, L), L < v - c),
                implies(
                    both(B > c, align.boundary_registrable(B, c, q, v, L)),
                    align.boundary_registrable(c + 1, c, q, v, L),
                ),
            ),
        ),
        Claim(
            "in decode a registered boundary's state is processed, under L >= 1",
            (_B, Symbol("t", 0, "tokens processed"), _c, _q, _L),
            lambda B, t, c, q, L: implies(align.boundary_registrable(B, c, q, t + 1, L), B <= t),
            (
                Hypothesis("t <= c", lambda t, c: t <= c),
                Hypothesis("L >= 1", lambda L: L >= 1),
            ),
        ),
        Claim(
            "in decode the boundary c + 1 = m*bs is registered before its step, for every bs, at L = 0",
            (Symbol("m", 1, "blocks"), _q, _bs),
            lambda m, q, bs: both(
                align.boundary_registrable(m * bs, m * bs - 1, q, m * bs, 0),
                align.boundaries_crossed(m * bs - 1, 1, bs) == 1,
            ),
            (),
            lambda m, q, bs: (scaled(0, m, bs), scaled(-1, m, bs), *equal(floordiv(-1, bs), -1, bs)),
        ),
    ),
    (
        Refutation(
            "boundaries registered up to the step's end, drafts included",
            "hypothetical",
            Claim(
                "B <= c + q implies that B is known",
                (_B, _c, _q, _v),
                lambda B, c, q, v: B <= v,
                (
                    Hypothesis("v = c + 1", lambda v, c: v == c + 1),
                    Hypothesis("B <= c + q", lambda B, c, q: B <= c + q),
                ),
            ),
            {"B": 48, "c": 46, "q": 3, "v": 47},
            lambda B, c, q, v: f"boundary {B} is registered with {v} tokens known, {q} scheduled after {c}",
        ),
        Refutation(
            "no hash lookahead in decode (L = 0, as with a KV connector up to 0.33.0): registered before "
            "its state",
            "historic",
            Claim(
                "B is registered only after its state",
                (_B, _c, _q),
                lambda B, c, q: B <= c,
                (
                    Hypothesis(
                        "B is registered", lambda B, c, q: align.boundary_registrable(B, c, q, c + 1, 0)
                    ),
                ),
            ),
            {"B": 48, "c": 47, "q": 3},
            lambda B, c, q: (
                f"boundary {B} is registered at the schedule of the step that computes it ({c} tokens "
                f"before the step)"
            ),
        ),
    ),
    (),
    (
        "Up to 0.33.0 a prompt's boundaries are registered at the schedule of the step that computes them "
        "whatever L is (v - c is large there); readers of the same step are turned away by other means.",
    ),
)


# --- 17: the aligned split ----------------------------------------------------------------------------------

_start = Symbol("s", 0, "tokens computed before the chunk")
_q17 = Symbol("q", 0, "tokens scheduled")
_end = Symbol("pe", 0, "end of the prefill")
_limit = Symbol("limit", 1, "largest step")
_last = Symbol("last", 0, "last checkpoint")
_tail = Symbol("tail", 0, "checkpoint of the prompt's partial tail")
_junction = Symbol("j", 0, "end of a shared prefix")
_P = Symbol("P", 0, "prefill lookahead")
_known = Symbol("v", 0, "tokens known")
_budget = Symbol("g", 1, "token budget of the step")

SPLIT = (_start, _q17, _end, _limit, _last, _tail, _junction, _bs)
PREFILL = Hypothesis("s < pe", lambda s, pe: s < pe)
LAST_ON_BOUNDARY = Hypothesis("last is a multiple of bs", lambda last, bs: floormod(last, bs) == 0)


def _split(s: Any, q: Any, pe: Any, limit: Any, last: Any, tail: Any, j: Any, bs: Any) -> Any:
    return align.aligned_split(s, q, pe, bs, limit, last, tail, j, False)


def _exporting(s: Any, q: Any, pe: Any, limit: Any, last: Any, tail: Any, j: Any, bs: Any) -> Any:
    return align.aligned_split(s, q, pe, bs, limit, last, tail, j, True)


def _next_boundary(s: Any, bs: Any) -> Any:
    """The first boundary above s."""
    return (floordiv(s, bs) + 1) * bs


def _non_final_end(s: Any, q: Any, pe: Any, limit: Any, last: Any, tail: Any, j: Any, bs: Any) -> Truth:
    end = s + _split(s, q, pe, limit, last, tail, j, bs)
    wide = both(bs > limit, end < _next_boundary(s, bs))
    return implies(both(end > s, end < pe), either(floormod(end, bs) == 0, end == tail, wide))


def _progress(s: Any, q: Any, pe: Any, limit: Any, last: Any, tail: Any, j: Any, bs: Any) -> Truth:
    scheduled = _split(s, q, pe, limit, last, tail, j, bs)
    free = either(s >= pe, s + q >= pe, round_down(s + q, bs) > s, bs > limit)
    return both(
        iff(scheduled > 0, both(q >= 1, free)),
        implies(both(q >= 1, either(q >= bs, bs > limit)), scheduled > 0),
        scheduled >= 0,
        scheduled <= q,
        implies(s >= pe, scheduled == q),
    )


def _what_cuts(s: Any, q: Any, pe: Any, limit: Any, last: Any, tail: Any, j: Any, bs: Any) -> Truth:
    uncut = align.aligned_chunk_end(s, s + q, pe, bs, limit)
    end = s + _split(s, q, pe, limit, last, tail, j, bs)
    return either(
        end == uncut,
        both(end == s, uncut <= s),
        end == last,
        both(end == tail, tail > last),
        both(end == _next_boundary(s, bs), floormod(s, bs) != 0),
        both(end == align.junction_stop(s, j, bs), j > s, j < uncut),
    )


def _passes_no_stop(s: Any, q: Any, pe: Any, limit: Any, last: Any, tail: Any, j: Any, bs: Any) -> Truth:
    end = s + _split(s, q, pe, limit, last, tail, j, bs)
    return both(
        implies(floormod(s, bs) != 0, end <= _next_boundary(s, bs)),
        either(last <= s, end <= last),
        either(tail <= s, tail <= last, end <= tail),
        implies(both(j > s, j < end), align.junction_stop(s, j, bs) <= s),
    )


def _checkpoint_kept(v: Any, u: Any, L: Any) -> Truth:
    position, spare = align.checkpoint_position(v, u, False, L), max(1, L)
    return both(
        floormod(position, u) == 0,
        position >= 0,
        implies(v >= spare, both(position + spare <= v, v < position + u + spare)),
        implies(v < spare, position == 0),
    )


def _checkpoint_dropped(v: Any, u: Any, L: Any) -> Truth:
    position = align.checkpoint_position(v, u, True, L)
    return both(
        floormod(position, u) == 0,
        implies(v >= u, both(position + u <= v, v < position + u + u)),
        implies(v < u, position == 0),
    )


def _reserve(v: Any, s: Any, q: Any, P: Any) -> Truth:
    kept = align.lookahead_reserve(v, s, q, P)
    left, rest = v - s - kept, v - s - q
    return both(
        kept >= 0,
        kept <= q,
        either(kept == 0, left <= 0, left >= P),
        implies(either(rest <= 0, rest >= P), kept == q),
        implies(both(rest > 0, rest < P, kept > 0), left == P),
        implies(both(rest > 0, rest < P, s + P < v), kept > 0),
    )


def _composed(s: Any, q: Any, limit: Any, bs: Any, v: Any, P: Any) -> Any:
    """The release's order, split and then reserve, for a prompt of v tokens without stops of its own."""
    return align.lookahead_reserve(v, s, align.aligned_split(s, q, v, bs, limit, 0, 0, 0, False), P)


def _aligned_reserve(v: Any, s: Any, q: Any, bs: Any, P: Any) -> Truth:
    kept = align.aligned_reserve(v, s, q, bs, P)
    left = v - s - kept
    return both(
        iff(kept > 0, q > 0),
        kept <= q,
        either(kept == q, floormod(s + kept, bs) == 0),
        implies(either(v - s - q <= 0, v - s - q >= P), kept == q),
        implies(both(left > 0, left < P), round_down(v - P, bs) <= s),
    )


def _divisor_misses(d: Any, bs: Any) -> Truth:
    truth: Truth = align.aligned_split(0, d, d + 1, d, d, 0, 0, 0, False) == d
    return truth


def _guarded_export(s: Any, q: Any, pe: Any, limit: Any, j: Any, bs: Any) -> Truth:
    end = s + align.aligned_split(s, q, pe, bs, limit, 0, 0, j, floormod(s, bs) == 0)
    wide = both(bs > limit, end < _next_boundary(s, bs))
    return both(
        implies(floormod(s, bs) != 0, end <= _next_boundary(s, bs)),
        implies(both(end > s, end < pe), either(floormod(end, bs) == 0, wide)),
    )


def _coarse_end(i: Any, bs: Any) -> Any:
    """Where a chunk that starts at token 1 ends, with i blocks as divisor and budget."""
    return 1 + align.aligned_split(1, i * bs - 1, i * bs + 1, i * bs, i * bs, 0, 0, 0, False)


EXPORT_VALID = (
    Hypothesis("the chunk ends the prefill", lambda s, q, pe: s + q >= pe),
    # v1/kv_cache_interface.py::is_mamba_prefill_checkpoint_valid for a hash block h, and an alignment of 1.
    Hypothesis("s is a multiple of h", lambda s, h: floormod(s, h) == 0),
    Hypothesis("s + h <= x < s + q", lambda s, h, x, q: both(s + h <= x, x < s + q)),
    Hypothesis(
        "the export column lies after the initial state's",
        lambda s, q, bs: cdiv(s + q, bs) - 2 > align.seed_column(s, bs),
    ),
)
_h = Symbol("h", 1, "tokens per hash block")
_x = Symbol("x", 0, "exported checkpoint")

THEOREM_17 = Theorem(
    17,
    "aligned split",
    "align",
    "with the group's own block as divisor: a chunk is scheduled iff q >= 1 and it ends the prefill, or "
    "holds a boundary, or no step can hold a block, so always with bs tokens of budget; a non-final chunk "
    "ends on a boundary, or at the tail checkpoint, or short of the next boundary of a block that no step "
    "can hold; no chunk passes the boundary of a block that it starts inside, nor the last checkpoint.  "
    "With an internal checkpoint a chunk is cut by a shared prefix only, and then ends on a boundary iff "
    "it starts on one.  The release's reserve after the split loses progress; the corrected one keeps it.  "
    "With a divisor d a non-final chunk ends on a boundary iff bs divides d, and stops at the boundary of "
    "its first block iff d = bs",
    (
        Claim(
            "progress; the split only shortens, and leaves decode alone",
            SPLIT,
            _progress,
            (),
            lambda s, q, bs: same_boundary(s, bs),
        ),
        Claim(
            "a non-final chunk ends on a boundary, or where it must",
            SPLIT,
            _non_final_end,
            (PREFILL, LAST_ON_BOUNDARY),
            lambda s, q, j, bs: (
                *same_boundary(s, bs),
                *on_boundary(cdiv(s, bs), bs),
                *on_boundary(floordiv(s + q, bs), bs),
                scaled(s, floordiv(j - s, bs), bs),
            ),
        ),
        Claim(
            "what cuts a chunk short",
            SPLIT,
            _what_cuts,
            (PREFILL,),
            lambda s, bs: same_boundary(s, bs),
        ),
        Claim(
            "a non-final chunk that holds a boundary is moved down to its last one",
            (_start, _q17, _end, _limit, _bs),
            lambda s, q, pe, limit, bs: both(
                floormod(align.aligned_chunk_end(s, s + q, pe, bs, limit), bs) == 0,
                align.aligned_chunk_end(s, s + q, pe, bs, limit) <= s + q,
                align.aligned_chunk_end(s, s + q, pe, bs, limit) + bs > s + q,
            ),
            (
                Hypothesis("s + q < pe", lambda s, q, pe: s + q < pe),
                Hypothesis("a boundary lies in it", lambda s, q, bs: _next_boundary(s, bs) <= s + q),
            ),
            lambda s, q, bs: (
                scaled(0, floordiv(s + q, bs), bs),
                *same(floordiv(s + q, bs), floordiv(floordiv(s + q, bs) * bs, bs), bs),
                *same(floordiv(s, bs), floordiv(s + q, bs), bs),
            ),
        ),
        Claim(
            "a chunk passes no stop: end of the block it starts inside, last checkpoint, tail, shared prefix",
            SPLIT,
            _passes_no_stop,
            (PREFILL,),
            lambda s, bs: same_boundary(s, bs),
        ),
        Claim(
            "the first boundary at or above s",
            (_start, _bs),
            lambda s, bs: both(
                align.boundary_from(s, bs) >= s,
                align.boundary_from(s, bs) < s + bs,
                floormod(align.boundary_from(s, bs), bs) == 0,
            ),
            (),
            lambda s, bs: (
                scaled(0, cdiv(s, bs), bs),
                *same(cdiv(s, bs), floordiv(cdiv(s, bs) * bs, bs), bs),
            ),
        ),
        Claim(
            "checkpoint position without the drop: the last with max(1, L) tokens above it",
            (_known, Symbol("u", 1, "unit"), _L),
            _checkpoint_kept,
            (),
            lambda v, u, L: (
                scaled(0, floordiv(v - max(1, L), u), u),
                *equal(floordiv(v - max(1, L), u), 0, u),
            ),
        ),
        Claim(
            "checkpoint position with the drop: one unit below the last whole one",
            (_known, Symbol("u", 1, "unit"), _L),
            _checkpoint_dropped,
            (),
            lambda v, u, L: (
                scaled(0, floordiv(v, u) - 1, u),
                *equal(floordiv(v, u), 0, u),
                *equal(floordiv(v, u), 1, u),
            ),
        ),
        Claim(
            "junction stop",
            (_start, _junction, _bs),
            lambda s, j, bs: both(
                align.junction_stop(s, j, bs) >= s,
                align.junction_stop(s, j, bs) <= j,
                j < align.junction_stop(s, j, bs) + bs,
                floormod(align.junction_stop(s, j, bs) - s, bs) == 0,
            ),
            (Hypothesis("s <= j", lambda s, j: s <= j),),
            lambda s, j, bs: (
                same(floordiv(j - s, bs), floordiv(floordiv(j - s, bs) * bs, bs), bs)
                + (scaled(0, floordiv(j - s, bs), bs), nonnegative(floordiv(j - s, bs), bs))
            ),
        ),
        Claim(
            "with an internal checkpoint a chunk is cut by a shared prefix only",
            SPLIT,
            lambda s, q, pe, limit, last, tail, j, bs: (
                _exporting(s, q, pe, limit, last, tail, j, bs)
                == max(align.aligned_chunk_end(s, s + q, pe, bs, limit) - s, 0)
            ),
            (Hypothesis("no shared prefix ends inside it", lambda s, q, j: either(j <= s, j >= s + q)),),
        ),
        Claim(
            "with an internal checkpoint a chunk cut by a shared prefix ends on a boundary iff it starts "
            "on one",
            SPLIT,
            lambda s, q, pe, limit, last, tail, j, bs: iff(
                floormod(s + _exporting(s, q, pe, limit, last, tail, j, bs), bs) == 0, floormod(s, bs) == 0
            ),
            (
                PREFILL,
                Hypothesis("the chunk ends the prefill", lambda s, q, pe: s + q >= pe),
                Hypothesis("the prefix ends inside it", lambda s, q, j: both(j > s, j < s + q)),
                Hypothesis("a block or more after s", lambda s, j, bs: j >= s + bs),
            ),
            lambda s, j, bs: (
                scaled(s, floordiv(j - s, bs), bs),
                *same(floordiv(s, bs) + floordiv(j - s, bs), floordiv(s + floordiv(j - s, bs) * bs, bs), bs),
            ),
        ),
        Claim(
            "corrected: an internal checkpoint only for a start on a boundary, so that no boundary is passed",
            (_start, _q17, _end, _limit, _junction, _bs),
            _guarded_export,
            (PREFILL,),
            lambda s, q, j, bs: (
                *same_boundary(s, bs),
                *on_boundary(cdiv(s, bs), bs),
                *on_boundary(floordiv(s + q, bs), bs),
                scaled(s, floordiv(j - s, bs), bs),
                *same(floordiv(s, bs) + floordiv(j - s, bs), floordiv(s + floordiv(j - s, bs) * bs, bs), bs),
            ),
        ),
        Claim("the reserve leaves nothing or enough", (_known, _start, _q17, _P), _reserve),
        Claim(
            "the release's reserve can end a chunk P-1 tokens below a boundary",
            (_start, _limit, _bs, _known, _P),
            lambda s, limit, bs, v, P: _composed(s, bs, limit, bs, v, P) == bs - (P - 1),
            (
                Hypothesis("2 <= P <= bs <= limit", lambda P, bs, limit: both(P >= 2, P <= bs, bs <= limit)),
                Hypothesis("v = s + bs + 1", lambda v, s, bs: v == s + bs + 1),
                Hypothesis("s is a multiple of bs", lambda s, bs: floormod(s, bs) == 0),
            ),
            lambda s, bs: (*same_boundary(s, bs), scaled(s, 1, bs)),
        ),
        Claim(
            "and from there no budget ever continues the prefill",
            (_start, _q17, _limit, _bs, _known, _P),
            lambda s, q, limit, bs, v, P: _composed(s, q, limit, bs, v, P) == 0,
            (
                Hypothesis("2 <= P <= bs", lambda P, bs: both(P >= 2, P <= bs)),
                Hypothesis("v = s + P", lambda v, s, P: v == s + P),
                Hypothesis("s + P - 1 is a multiple of bs", lambda s, P, bs: floormod(s + P - 1, bs) == 0),
            ),
            lambda s, q, bs, P: (
                *same_boundary(s, bs),
                *equal(floordiv(s + P - 1, bs), cdiv(s, bs), bs),
                *same(floordiv(s + P - 1, bs), cdiv(s, bs), bs),
            ),
        ),
        Claim(
            "the corrected reserve keeps progress and boundaries, and reserves wherever a boundary allows it",
            (_known, _start, _q17, _bs, _P),
            _aligned_reserve,
            (),
            lambda v, s, q, bs, P: (
                scaled(0, floordiv(s, bs), bs),
                scaled(0, floordiv(v - P, bs), bs),
            ),
        ),
        Claim(
            "another group's divisor d ends a non-final chunk at d, which is no boundary, unless bs "
            "divides d",
            (_d, _bs),
            _divisor_misses,
            (Hypothesis("bs does not divide d", lambda d, bs: floormod(d, bs) != 0),),
            lambda d, bs: (*equal(floordiv(d, d), 1, d), *equal(floordiv(0, d), 0, d)),
        ),
        Claim(
            "a divisor d = i*bs lets a chunk pass the boundary of the block that it starts inside, unless "
            "d = bs",
            (Symbol("i", 2, "blocks in d"), Symbol("bs", 2, "tokens per block of the recurrent group")),
            lambda i, bs: both(_coarse_end(i, bs) == i * bs, _coarse_end(i, bs) > bs),
            (),
            lambda i, bs: (
                *equal(floordiv(i * bs, i * bs), 1, i * bs),
                *equal(floordiv(-1, i * bs), -1, i * bs),
                monotone(1, i, bs),
            ),
        ),
        Claim(
            "multiples of d = i*bs are boundaries",
            (Symbol("x", 0, "end of a chunk"), Symbol("i", 1, "blocks in d"), _bs),
            lambda x, i, bs: implies(floormod(x, i * bs) == 0, floormod(x, bs) == 0),
            (),
            lambda x, i, bs: (
                *equal(floordiv(x, bs), floordiv(x, i * bs) * i, bs),
                *same(floordiv(x, bs), floordiv(x, i * bs) * i, bs),
            ),
        ),
    ),
    (
        Refutation(
            "the smallest block of all groups as divisor (up to 0.33.0, vllm pull 54076)",
            "historic",
            Claim(
                "a non-final chunk ends on a boundary, divided by d",
                (_start, _q17, _end, _d, _bs),
                lambda s, q, pe, d, bs: (
                    floormod(s + align.aligned_split(s, q, pe, d, q, 0, 0, 0, False), bs) == 0
                ),
                (
                    Hypothesis("s is a multiple of bs", lambda s, bs: floormod(s, bs) == 0),
                    Hypothesis("s + q < pe", lambda s, q, pe: s + q < pe),
                    Hypothesis("d < bs <= q", lambda d, bs, q: both(d < bs, bs <= q)),
                ),
            ),
            {"s": 0, "q": 2048, "pe": 4000, "d": 816, "bs": 1648},
            lambda s, q, pe, d, bs: (
                f"a chunk of {q} tokens after {s} ends at {(s + q) // d * d}, divided by {d}; the state is "
                f"filed in column {cdiv((s + q) // d * d, bs) - 1}, whose boundary is "
                f"{cdiv((s + q) // d * d, bs) * bs}"
            ),
            ("d", "bs"),
        ),
        Refutation(
            "an internal checkpoint whatever the chunk's start (0.33.0): it passes the boundary it starts "
            "below",
            "historic",
            Claim(
                "an exporting chunk stops at the boundary of a block that it starts inside",
                (_start, _q17, _end, _h, _x, _bs),
                lambda s, q, pe, h, x, bs: implies(
                    floormod(s, bs) != 0,
                    s + align.aligned_split(s, q, pe, bs, q, 0, 0, 0, True) <= _next_boundary(s, bs),
                ),
                (PREFILL, *EXPORT_VALID),
            ),
            {"s": 8, "q": 42, "pe": 50, "h": 8, "x": 48, "bs": 16},
            lambda s, q, pe, h, x, bs: (
                f"after a hit of {s} tokens (hash block {h}) the chunk of {q} runs past boundary "
                f"{s // bs * bs + bs}: column {s // bs} keeps {s} tokens"
            ),
            ("h", "bs"),
        ),
        Refutation(
            "a shared prefix counted in blocks from the chunk's start, with an internal checkpoint (0.33.0)",
            "historic",
            Claim(
                "an exporting chunk that a shared prefix cuts ends on a boundary",
                (_start, _q17, _end, _h, _x, _junction, _bs),
                lambda s, q, pe, h, x, j, bs: either(
                    s + align.aligned_split(s, q, pe, bs, q, 0, 0, j, True) >= pe,
                    floormod(s + align.aligned_split(s, q, pe, bs, q, 0, 0, j, True), bs) == 0,
                ),
                (PREFILL, *EXPORT_VALID),
            ),
            {"s": 8, "q": 42, "pe": 50, "h": 8, "x": 48, "j": 40, "bs": 16},
            lambda s, q, pe, h, x, j, bs: (
                f"a chunk from {s} with a prefix shared up to {j} ends at {s + (j - s) // bs * bs}, "
                f"inside a {bs}-token block"
            ),
            ("h", "bs"),
        ),
        Refutation(
            "the prefill lookahead reserve after the split (up to 0.33.0): progress",
            "historic",
            Claim(
                "a chunk with a block of budget is scheduled",
                (_start, _budget, _bs, _known, _P),
                lambda s, g, bs, v, P: _composed(s, min(g, v - s), g, bs, v, P) > 0,
                (
                    Hypothesis("s < v", lambda s, v: s < v),
                    Hypothesis("P <= bs <= g", lambda P, bs, g: both(P <= bs, bs <= g)),
                ),
            ),
            {"s": 62, "g": 2048, "bs": 16, "v": 65, "P": 3},
            lambda s, g, bs, v, P: (
                f"{s} of {v} tokens computed, budget {g}: the split stops at boundary {s // bs * bs + bs}, "
                f"the reserve of {P} takes these {s // bs * bs + bs - s} tokens back; the prefill never "
                f"ends"
            ),
            ("bs", "P"),
        ),
        Refutation(
            "the prefill lookahead reserve after the split (up to 0.33.0): chunk ends",
            "historic",
            Claim(
                "a non-final chunk ends on a boundary after the reserve",
                (_start, _q17, _bs, _known, _P),
                lambda s, q, bs, v, P: floormod(s + _composed(s, q, q, bs, v, P), bs) == 0,
                (
                    Hypothesis("s is a multiple of bs", lambda s, bs: floormod(s, bs) == 0),
                    Hypothesis("s + q < v", lambda s, q, v: s + q < v),
                    Hypothesis("P <= bs <= q", lambda P, bs, q: both(P <= bs, bs <= q)),
                ),
            ),
            {"s": 0, "q": 64, "bs": 16, "v": 65, "P": 3},
            lambda s, q, bs, v, P: (
                f"{v} tokens, budget {q}: the split ends the chunk at {(s + q) // bs * bs}, the reserve of "
                f"{P} at {v - P}, inside a {bs}-token block"
            ),
            ("bs", "P"),
        ),
    ),
    (),
    (
        "For a drafter of one module (P <= 1) the reserve changes nothing.",
        "The smallest block d of all groups is at most bs, so it serves iff d = bs.",
        "What a passed boundary costs: the column that the chunk starts in is then full by count and holds "
        "fewer tokens than its boundary's hash names; the next prompt that hits it starts from the wrong "
        "state.",
        "The stranded prefill and the passed boundary are seen in the released scheduler "
        "(tests/test_align_release.py).",
    ),
)


# --- 18: sub-slots ------------------------------------------------------------------------------------------

_f = Symbol("f", 0, "first column of the job")
_j = Symbol("j", 0, "a listed block's column")
_holes = Symbol("h", 0, "columns between them that the job does not list")
_skipped = Symbol("x", 0, "chunks between them that the job does not store")
_k = Symbol("k", 1, "blocks per chunk")
LISTED = (
    Hypothesis("f + h < j, or j = f", lambda f, h, j: either(f + h < j, both(j == f, h == 0))),
)  # the first column is listed, so it is not one of the holes


def _lands(f: Any, j: Any, h: Any, k: Any) -> Any:
    return align.landing_position(f, j - f - h, k)


THEOREM_18 = Theorem(
    18,
    "sub-slots",
    "align",
    "a job lists blocks without gaps from its first column f; the block of column j, with h unlisted "
    "columns and x unstored chunks between, lands in its own sub-slot of its own chunk iff h = x*k, and in "
    "its own sub-slot of some chunk iff k divides h",
    (
        Claim(
            "right chunk and right sub-slot, iff h = x*k",
            (_f, _j, _holes, _skipped, _k),
            lambda f, j, h, x, k: iff(
                both(
                    align.subslot(_lands(f, j, h, k), k) == align.subslot(j, k),
                    align.chunk_of_column(_lands(f, j, h, k), k)
                    == align.chunk_of_column(j, k) - align.chunk_of_column(f, k) - x,
                ),
                h == x * k,
            ),
            LISTED,
            lambda f, j, h, x, k: (
                scaled(j - h, -floordiv(f, k), k),
                scaled(j, -x, k),
            ),
        ),
        Claim(
            "right sub-slot, iff k divides h",
            (_f, _j, _holes, _k),
            lambda f, j, h, k: iff(
                align.subslot(_lands(f, j, h, k), k) == align.subslot(j, k), floormod(h, k) == 0
            ),
            LISTED,
            lambda f, j, h, k: (
                scaled(j - h, -floordiv(f, k), k),
                scaled(j, -floordiv(h, k), k),
                *equal(floordiv(h, k), floordiv(j, k) - floordiv(j - h, k), k),
            ),
        ),
        Claim(
            "a token's chunk and place, for blocks of b tokens",
            (Symbol("t", 0, "a token's position"), Symbol("b", 1, "tokens per block"), _k),
            lambda t, b, k: both(
                align.chunk_of_column(floordiv(t, b), k) == floordiv(t, b * k),
                align.subslot(floordiv(t, b), k) * b + floormod(t, b) == floormod(t, b * k),
                align.subslot(floordiv(t, b), k) >= 0,
                align.subslot(floordiv(t, b), k) <= k - 1,
            ),
            (),
            lambda t, b, k: (nested(t, b, k),),
        ),
        Claim(
            "a boundary that is a multiple of the chunk lands in the last sub-slot of its chunk",
            (Symbol("m", 1, "chunks"), Symbol("b", 1, "tokens per block"), _k),
            lambda m, b, k: both(
                align.subslot(align.destination_column(m * b * k, b), k) == k - 1,
                align.chunk_of_column(align.destination_column(m * b * k, b), k) == m - 1,
            ),
            (),
            lambda m, b, k: (scaled(0, m * k, b), scaled(-1, m, k), *equal(floordiv(-1, k), -1, k)),
        ),
    ),
    (
        Refutation(
            "0.33.0: a store lists a chunk's blocks without the freed ones",
            "historic",
            Claim(
                "right chunk and right sub-slot whatever the holes",
                (_f, _j, _holes, _k),
                lambda f, j, h, k: align.subslot(_lands(f, j, h, k), k) == align.subslot(j, k),
                LISTED,
            ),
            {"f": 2, "j": 7, "h": 3, "k": 2},
            lambda f, j, h, k: (
                f"chunks of {k} blocks, columns {f} and {j} listed, {h} between them not: the block of "
                f"column {j} lands in sub-slot {(f % k + j - f - h) % k} instead of {j % k}"
            ),
            ("k",),
        ),
        Refutation(
            "whole chunks left out, but not counted",
            "hypothetical",
            Claim(
                "right chunk when whole chunks are left out",
                (_f, _j, _skipped, _k),
                lambda f, j, x, k: (
                    align.chunk_of_column(_lands(f, j, x * k, k), k)
                    == align.chunk_of_column(j, k) - align.chunk_of_column(f, k)
                ),
                (Hypothesis("f + x*k < j", lambda f, x, k, j: f + x * k < j),),
            ),
            {"f": 0, "j": 9, "x": 1, "k": 4},
            lambda f, j, x, k: (
                f"{x} chunk of {k} blocks between columns {f} and {j} is left out: the block of column {j} "
                f"lands in the {j // k - f // k - x + 1}. chunk of the job's list"
            ),
            ("k",),
        ),
    ),
    (),
    (
        "In the released store (tests/test_align_release.py): a tier that is full delays the store, the "
        "window moves on, and a block that no hit reads is freed and given away while a later one of its "
        "chunk is still kept.  It takes chunks of two blocks or more, and window blocks kept at more "
        "boundaries than the last.",
    ),
)


# --- 19: byte offsets ---------------------------------------------------------------------------------------

_id = Symbol("id", 0, "block id")
_N = Symbol("N", 1, "blocks in the pool")
_stride = Symbol("stride", 1, "bytes from one block to the next")
TWO_MIB = 2 * 1024 * 1024
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

THEOREM_19 = Theorem(
    19,
    "byte offsets",
    "align",
    "for id < N and N*stride <= 2^63 - 1 every byte of a block has an offset of 0 to 2^63 - 2, blocks are "
    "adjacent and disjoint; in 32 bits a block's offset fits iff id <= (2^31 - 1)//stride: for a stride of "
    "2 MiB the first that does not is 1024",
    (
        Claim(
            "offsets fit 64 bits",
            (_id, _N, _stride),
            lambda id, N, stride: both(
                align.byte_offset(id, stride) >= 0, align.byte_offset(id, stride) + stride <= INT64_MAX
            ),
            (
                Hypothesis("id < N", lambda id, N: id < N),
                Hypothesis("N*stride <= 2^63 - 1", lambda N, stride: N * stride <= INT64_MAX),
            ),
            lambda id, N, stride: (monotone(id, N, stride), nonnegative(id, stride)),
        ),
        Claim(
            "blocks are adjacent and start at 0",
            (_id, _stride),
            lambda id, stride: both(
                align.byte_offset(0, stride) == 0,
                align.byte_offset(id + 1, stride) == align.byte_offset(id, stride) + stride,
            ),
        ),
        Claim(
            "blocks are disjoint",
            (_id, Symbol("other", 0, "another block's id"), _stride),
            lambda id, other, stride: (
                align.byte_offset(id, stride) + stride <= align.byte_offset(other, stride)
            ),
            (Hypothesis("id < other", lambda id, other: id < other),),
            lambda id, other, stride: (monotone(id, other, stride),),
        ),
        Claim(
            "an offset fits 32 bits iff id <= (2^31 - 1)//stride",
            (_id, _stride),
            lambda id, stride: iff(
                align.byte_offset(id, stride) <= INT32_MAX, id <= floordiv(INT32_MAX, stride)
            ),
            (),
            lambda id, stride: equal(id, floordiv(INT32_MAX, stride), stride),
        ),
        Claim(
            "at a stride of 2 MiB, 1024 is the smallest id whose offset does not fit 32 bits",
            (_id,),
            lambda id: iff(align.byte_offset(id, TWO_MIB) > INT32_MAX, id >= 1024),
        ),
    ),
    (
        Refutation(
            "an offset of 32 bits, at a stride of 2 MiB (vllm issue 50427)",
            "historic",
            Claim(
                "offsets fit 32 bits",
                (_id,),
                lambda id: align.byte_offset(id, TWO_MIB) <= INT32_MAX,
            ),
            {"id": 1024},
            lambda id: (
                f"block {id} begins at byte {id * TWO_MIB}, in 32 bits "
                f"{(id * TWO_MIB + 2**31) % 2**32 - 2**31}"
            ),
        ),
    ),
)

THEOREMS = (
    THEOREM_11,
    THEOREM_12,
    THEOREM_13,
    THEOREM_14,
    THEOREM_15,
    THEOREM_16,
    THEOREM_17,
    THEOREM_18,
    THEOREM_19,
)
