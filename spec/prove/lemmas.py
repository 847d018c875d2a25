"""Lemmas about products and quotients, the non-linear facts that proofs over symbolic block sizes need.

With these stated for the right terms, everything else is linear: a product of two symbols is then one more
unknown. `monotone` is instantiated by the engine for each pair of quotients with a common divisor; the
others where a claim's hints name them.
"""

from spec.prove.theorem import Claim, Hypothesis, Lemma, Symbol

_u = Symbol("u", None, "an integer")
_v = Symbol("v", None, "an integer")
_c = Symbol("c", 1, "a positive factor")

monotone = Lemma(
    Claim(
        "monotone product",
        (_u, _v, _c),
        lambda u, v, c: u * c + c <= v * c,
        (Hypothesis("u < v", lambda u, v: u < v),),
    )
)

nonnegative = Lemma(
    Claim(
        "nonnegative product",
        (Symbol("u", 0, "a count"), Symbol("v", 0, "a count")),
        lambda u, v: u * v >= 0,
    )
)

scaled = Lemma(
    Claim(
        "scaled quotient",
        (_u, _v, _c),
        lambda u, v, c: (u + v * c) // c == u // c + v,
        (),
        lambda u, v, c: (
            monotone((u + v * c) // c - v, u // c, c),
            monotone(u // c, (u + v * c) // c - v, c),
        ),
    )
)

nested = Lemma(
    Claim(
        "nested quotient",
        (Symbol("x", None, "an integer"), Symbol("b", 1, "inner divisor"), Symbol("k", 1, "outer divisor")),
        lambda x, b, k: (x // b) // k == x // (b * k),
        (),
        lambda x, b, k: (
            monotone((x // b) % k, k, b),
            monotone(-1, (x // b) % k, b),
            monotone((x // b) // k, x // (b * k), b * k),
            monotone(x // (b * k), (x // b) // k, b * k),
        ),
    )
)

ordered = Lemma(
    Claim(
        "ordered quotient",
        (Symbol("x", None, "an integer"), Symbol("y", None, "an integer"), _c),
        lambda x, y, c: x // c <= y // c,
        (Hypothesis("x <= y", lambda x, y: x <= y),),
    )
)

covering = Lemma(
    Claim(
        "covering quotient",
        (Symbol("x", None, "an integer"), Symbol("b", 1, "inner divisor"), Symbol("k", 1, "outer divisor")),
        lambda x, b, k: x // (b * k) <= -(-x // b) // k,
        (),
        lambda x, b, k: (
            monotone(-(-x // b), x // (b * k) * k, b),
            monotone(-(-x // b) // k, x // (b * k), k),
        ),
    )
)

congruent = Lemma(
    Claim(
        "equal factors",
        (_u, _v, Symbol("w", None, "an integer")),
        lambda u, v, w: u * w == v * w,
        (Hypothesis("u = v", lambda u, v: u == v),),
    )
)

multiple = Lemma(
    Claim(
        "remainder of a multiple",
        (_v, _c),
        lambda v, c: (v * c) % c == 0,
        (),
        lambda v, c: (scaled(0, v, c), congruent((v * c) // c, v, c)),
    )
)
