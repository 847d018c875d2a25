"""Theorems 0 and 9: division and units, and the blocks that an unaligned range touches."""

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove import lemmas
from spec.prove import vocabulary as v
from spec.prove.symbolic import both, either, iff
from spec.prove.theorem import Claim, Hypothesis, LemmaUse, Refutation, Symbol, Theorem

# 0 ---------------------------------------------------------------------------------------------------------

DIVISION = Theorem(
    0,
    "division",
    "coverage",
    "floordiv, floormod, cdiv and round_down are Euclid's for every integer x, negative ones too; chunks "
    "and blocks count what they say.",
    (
        Claim(
            "quotient and remainder",
            (v.x, v.c),
            lambda x, c: both(
                x == floordiv(x, c) * c + floormod(x, c), floormod(x, c) >= 0, floormod(x, c) < c
            ),
        ),
        Claim(
            "ceiling and floor",
            (v.x, v.c),
            lambda x, c: both(
                cdiv(x, c) * c >= x,
                cdiv(x, c) * c < x + c,
                round_down(x, c) <= x,
                round_down(x, c) > x - c,
                floormod(round_down(x, c), c) == 0,
            ),
            (),
            lambda x, c: (lemmas.scaled(0, floordiv(x, c), c),),
        ),
        Claim(
            "units",
            (v.n, v.b, v.k),
            lambda n, b, k: both(
                cov.blocks_of(n, b) * b >= n,
                (cov.blocks_of(n, b) - 1) * b < n,
                cov.full_chunks_of(n, cov.chunk_tokens(b, k)) * k * b <= n,
                (cov.full_chunks_of(n, cov.chunk_tokens(b, k)) + 1) * k * b > n,
            ),
        ),
    ),
    (
        Refutation(
            "truncating division, as a kernel's // divides: -1 // c = 0",
            "hypothetical",
            Claim(
                "truncating remainder",
                (v.x, v.c),
                lambda x, c: x - (floordiv(x, c) if x >= 0 else -floordiv(-x, c)) * c >= 0,
            ),
            {"x": -1, "c": 16},
            lambda x, c: (
                f"{x} by {c}: truncation leaves the remainder {x - -(-x // c) * c}, floor leaves {x % c}"
            ),
            ("c",),
        ),
    ),
)

# 9 ---------------------------------------------------------------------------------------------------------


def _span_hints(s: int, T: int, b: int) -> tuple[LemmaUse, ...]:
    return v.pairs(
        b,
        cdiv(s + T, b),
        floordiv(s, b) + floordiv(T - 1, b) + 1,
        floordiv(s, b) + floordiv(T - 1, b) + 2,
    ) + v.pairs(b, cdiv(T, b), floordiv(T - 1, b) + 1, cdiv(T - 1, b), floordiv(T - 1, b))


SPAN = Theorem(
    9,
    "span of an unaligned range",
    "coverage",
    "T tokens from any start s touch at least cdiv(T,b) blocks, attained iff s mod b + (T-1) mod b < b, "
    "and at most cdiv(T-1,b) + 1, attained iff s mod b + (T-1) mod b >= b or b | T - 1.",
    (
        Claim(
            "least and greatest",
            (v.s, v.T, v.b),
            lambda s, T, b: both(
                cov.span_blocks(s, T, b) >= cov.blocks_of(T, b),
                cov.span_blocks(s, T, b) <= cov.span_bound(T, b),
            ),
            (),
            lambda s, T, b: _span_hints(s, T, b),
        ),
        Claim(
            "when the least is attained",
            (v.s, v.T, v.b),
            lambda s, T, b: iff(
                cov.span_blocks(s, T, b) == cov.blocks_of(T, b), floormod(s, b) + floormod(T - 1, b) < b
            ),
            (),
            lambda s, T, b: _span_hints(s, T, b),
        ),
        Claim(
            "when the greatest is attained",
            (v.s, v.T, v.b),
            lambda s, T, b: iff(
                cov.span_blocks(s, T, b) == cov.span_bound(T, b),
                either(floormod(s, b) + floormod(T - 1, b) >= b, floormod(T - 1, b) == 0),
            ),
            (),
            lambda s, T, b: _span_hints(s, T, b),
        ),
        Claim(
            "the blocks of a span are those of its tokens",
            (v.s, v.T, v.b, Symbol("x", 0, "a token of the range")),
            lambda s, T, b, x: both(
                floordiv(x, b) >= floordiv(s, b), floordiv(x, b) < floordiv(s, b) + cov.span_blocks(s, T, b)
            ),
            (Hypothesis("s <= x < s + T", lambda s, T, x: both(x >= s, x < s + T)),),
            lambda s, T, b, x: v.pairs(b, floordiv(x, b), floordiv(s, b), cdiv(s + T, b)),
        ),
    ),
    (
        Refutation(
            "the bound without the + 1",
            "hypothetical",
            Claim(
                "at most cdiv(T,b) blocks",
                (v.s, v.T, v.b),
                lambda s, T, b: cov.span_blocks(s, T, b) <= cov.blocks_of(T, b),
            ),
            {"s": 15, "T": 32, "b": 16},
            lambda s, T, b: (
                f"{T} tokens from position {s}, block {b}: touch {cov.span_blocks(s, T, b)} blocks, not "
                f"{cov.blocks_of(T, b)}"
            ),
            ("b",),
        ),
    ),
)
