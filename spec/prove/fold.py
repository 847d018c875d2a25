"""Theorems 15 and 16: what a column's state has folded in, and when its boundary may be registered."""

from typing import Any

from spec.arith import align
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove.lemmas import scaled
from spec.prove.steps import (
    ACCEPTED,
    BLOCK,
    COMPUTED,
    COMPUTED_IN_DECODE,
    DECODE,
    DRAFTS,
    FITS,
    LAST_RUNNING,
    LOOKAHEAD,
    REACHED,
    SCHEDULED,
    TOO_LONG,
    equal,
)
from spec.prove.symbolic import Truth, both, iff, implies
from spec.prove.theorem import Claim, Hypothesis, LemmaUse, Refutation, Symbol, Theorem

# --- 15: the fold -------------------------------------------------------------------------------------------

_a0 = Symbol("a0", 1, "tokens accepted in the step before")
_SEED = Symbol("r0", -1, "running column of the step before, or the seed column")
_old = Symbol("old", None, "what the column held before the step")


class _Columns:
    """A row's contents as one step leaves them: what a column holds is the number of tokens folded into it.

    Before the step the source column holds c tokens; whatever else is read holds `old`.  A decode step
    writes the state after each of its q tokens and ends at c + a; a prefill chunk (`prefill`) writes one
    state, after all q, and counts as one accepted token.
    """

    def __init__(
        self, c: Any, q: Any, a: Any, r0: Any, a0: Any, bs: Any, old: Any, prefill: bool = False
    ) -> None:
        self.c, self.q, self.a, self.bs, self.old, self.prefill = c, q, a, bs, old, prefill
        self.source = align.source_column(r0, a0)
        self.running = align.running_column(c, q, bs)
        self.moved = bool(r0 != self.running)
        self.count = 1 if self.moved else a0
        after = c + q if prefill else c + a
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
        """After the forward, which writes the state after each of its q tokens, or after the last only."""
        if self.prefill:
            return self.c + self.q if column == self.running else self.before_forward(column)
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


def _admitted(n: Any, bs: Any, old: Any) -> Truth:
    # Admission puts one state into the row: that of the n tokens hit, in the column of the last of them.
    def held(column: Any) -> Any:
        return n if column == cdiv(n, bs) - 1 else old

    truth: Truth = held(align.source_column(align.seed_column(n, bs), 1)) == n
    return truth


def _chunk(c: Any, q: Any, r0: Any, a0: Any, bs: Any, old: Any) -> Truth:
    row = _Columns(c, q, 1, r0, a0, bs, old, prefill=True)
    reads = row.before_forward(align.source_column(row.running, row.count)) == c
    leaves = row.after_step(align.source_column(row.running, row.count_after)) == c + q
    boundary = row.after_step(floordiv(c + q, bs) - 1) == c + q
    return both(reads, leaves, implies(floormod(c + q, bs) == 0, boundary))


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


STEP = (COMPUTED, SCHEDULED, ACCEPTED, LAST_RUNNING, _a0, DRAFTS, BLOCK, _old)
IN_STEP = Hypothesis("c < m*bs <= c + a", lambda m, c, a, bs: both(c < m * bs, m * bs <= c + a))

THEOREM_15 = Theorem(
    15,
    "fold",
    "align",
    "after admission with n tokens hit the source column holds the fold of n; if it holds that of c "
    "verified tokens, a prefill chunk reads c tokens, the next step reads c + q, and a boundary c + q sits "
    "in its column; a decode step reads c, the next one reads c + a, and after post-process every boundary "
    "in (c, c+a] sits in its column as the fold of exactly that many tokens, all verified, under K+1 <= bs; "
    "for every K+1 > bs there is a step after which a boundary's column holds another state",
    (
        Claim(
            "admission: the first step reads the state after the n tokens hit, from the column of the last",
            (Symbol("n", 1, "tokens hit at admission"), BLOCK, _old),
            _admitted,
            (),
            lambda n, bs: equal(align.seed_column(n, bs), cdiv(n, bs) - 1, bs),
        ),
        Claim(
            "a prefill chunk reads the state after c tokens, the next step that after c + q, and so does the "
            "boundary's column if c + q is one",
            (COMPUTED, SCHEDULED, _SEED, _a0, BLOCK, _old),
            _chunk,
            (),
            lambda c, q, bs: equal(floordiv(c + q, bs), cdiv(c + q, bs), bs),
        ),
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
            (Symbol("m", 1, "blocks before the lost one"), DRAFTS, BLOCK),
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
                (Symbol("m", 1, "the boundary in blocks"), COMPUTED_IN_DECODE, *STEP[1:]),
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
                (COMPUTED, SCHEDULED, ACCEPTED, DRAFTS, BLOCK),
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
                (LAST_RUNNING, _a0, Symbol("other", 1, "another request's count"), DRAFTS),
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
        "By induction over a request's steps every step reads the state after its c tokens: admission is "
        "the base (a request without a hit starts from the empty state, its seed is -1), chunks and decode "
        "steps carry it on. A chunk that passes a boundary leaves no state for it; theorem 17 says where "
        "chunks end.",
        "Distinct columns are taken to be distinct blocks. Under K + 1 <= bs no decode step relocates one: a "
        "step takes only columns strictly between two running columns (theorem 13), and the running column "
        "advances by at most one (theorem 14).",
        "All tokens folded into a boundary are verified: it is at most c + a.",
    ),
)


# --- 16: registration ---------------------------------------------------------------------------------------

_B = Symbol("B", 1, "a boundary in tokens")
_v = Symbol("v", 0, "tokens known")
_q0 = Symbol("q", 0, "tokens scheduled in the step")

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
            (_B, COMPUTED, _q0, _v, LOOKAHEAD),
            lambda B, c, q, v, L: both(B + L <= v, B <= v, B <= c + q),
            (Hypothesis("B is registered", lambda B, c, q, v, L: align.boundary_registrable(B, c, q, v, L)),),
        ),
        Claim(
            "what the step and the known tokens cover is registered",
            (_B, COMPUTED, _q0, _v, LOOKAHEAD),
            lambda B, c, q, v, L: align.boundary_registrable(B, c, q, v, L),
            (
                Hypothesis("B <= c + q", lambda B, c, q: B <= c + q),
                Hypothesis("B + L <= v", lambda B, L, v: B + L <= v),
            ),
        ),
        Claim(
            "a boundary above c is registered, for some B, iff L < v - c",
            (_B, COMPUTED, SCHEDULED, _v, LOOKAHEAD),
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
            (_B, Symbol("t", 0, "tokens processed"), COMPUTED, SCHEDULED, LOOKAHEAD),
            lambda B, t, c, q, L: implies(align.boundary_registrable(B, c, q, t + 1, L), B <= t),
            (
                Hypothesis("t <= c", lambda t, c: t <= c),
                Hypothesis("L >= 1", lambda L: L >= 1),
            ),
        ),
        Claim(
            "in decode the boundary c + 1 = m*bs is registered before its step, for every bs, at L = 0",
            (Symbol("m", 1, "blocks"), SCHEDULED, BLOCK),
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
                (_B, COMPUTED, SCHEDULED, _v),
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
                (_B, COMPUTED, SCHEDULED),
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
