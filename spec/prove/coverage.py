"""Theorems 0 to 10: division, and coverage of what a hit demands by what was checked and what was stored.

Names, as in the statements: n prompt or known tokens, h hit, p local prefix, W window, e extra retained
tokens, b block, k blocks a chunk, t = b*k tokens a chunk, F full-attention chunk = f*b, M Mamba chunk, A
attention chunk of chunked-local attention, j a chunk, i a column.  All are integers of any size; none is
bounded above.
"""

from collections.abc import Callable
from dataclasses import replace

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove import lemmas
from spec.prove.symbolic import Truth, both, either, iff, implies, negation
from spec.prove.theorem import Claim, Contract, Hypothesis, LemmaUse, Refutation, Symbol, Theorem

_n = Symbol("n", 1, "tokens of the prompt")
_h = Symbol("h", 1, "hit tokens")
_p = Symbol("p", 0, "tokens of the local prefix")
_W = Symbol("W", 1, "window tokens")
_e = Symbol("e", 0, "extra retained tokens")
_b = Symbol("b", 1, "tokens a block")
_k = Symbol("k", 1, "blocks a chunk")
_t = Symbol("t", 1, "tokens a chunk")
_F = Symbol("F", 1, "tokens of a full-attention chunk")
_f = Symbol("f", 1, "blocks of this group in a full-attention chunk")
_m = Symbol("m", 1, "full-attention chunks in the hit")
_M = Symbol("M", 1, "tokens of a Mamba chunk")
_A = Symbol("A", 1, "tokens of an attention chunk")
_g = Symbol("g", 1, "chunks, or Mamba chunks in full-attention chunks")
_r = Symbol("r", 1, "chunks of this group in a full-attention chunk")
_w = Symbol("w", 0, "whole chunks in the window before the current token")
_j = Symbol("j", 0, "a chunk")
_i = Symbol("i", 0, "a column")
_d = Symbol("d", 0, "1 for a group that drops its tail, else 0")
_s = Symbol("s", 0, "first token of a range")
_T = Symbol("T", 1, "tokens of a range")
_x = Symbol("x", None, "an integer")
_c = Symbol("c", 1, "a divisor")


def chunks_text(first: int, end: int) -> str:
    """A range of chunks for people, the end exclusive."""
    if end <= first:
        return "no chunk"
    return f"chunk {first}" if end == first + 1 else f"chunks {first} to {end - 1}"


def _pairs(c: int, *values: int) -> tuple[LemmaUse, ...]:
    """The order and equality of each two values, carried over to their products with c."""
    uses = []
    for index, u in enumerate(values):
        for v in values[index + 1 :]:
            uses += [lemmas.monotone(u, v, c), lemmas.monotone(v, u, c), lemmas.congruent(u, v, c)]
    return tuple(uses)


# 0 --------------------------------------------------------------------------------------------------------

_division = Theorem(
    0,
    "division",
    "coverage",
    "floordiv, floormod, cdiv and round_down are Euclid's for every integer x, negative ones too; chunks "
    "and blocks count what they say.",
    (
        Claim(
            "quotient and remainder",
            (_x, _c),
            lambda x, c: both(
                x == floordiv(x, c) * c + floormod(x, c), floormod(x, c) >= 0, floormod(x, c) < c
            ),
        ),
        Claim(
            "ceiling and floor",
            (_x, _c),
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
            (_n, _b, _k),
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
                (_x, _c),
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

# 1 --------------------------------------------------------------------------------------------------------

_SCAN = Contract(
    "right-to-left scan",
    "a windowed group is admitted at h only if the chunks from first_checked_chunk(h, ...) to the chunk "
    "of the last hit token were all found present",
)
_PREFIX = Contract(
    "prefix scan", "a full-attention group is admitted at h only if every chunk of its slice was present"
)

_HIT = Hypothesis("p < h", lambda p, h: p < h)


def _end(h: int, b: int, k: int) -> int:
    return cov.demand_end_chunk(h, cov.chunk_tokens(b, k))


_DEMANDED_FULL = Hypothesis(
    "the load names chunk j of a full-attention group, from p//t on",
    lambda h, p, b, k, j: both(j >= floordiv(p, b * k), j < _end(h, b, k)),
)
_DEMANDED_WINDOW = Hypothesis(
    "the load names chunk j of a sliding-window group",
    lambda h, p, W, e, b, k, j: both(j >= cov.demand_first_chunk_window(h, p, W, e, b, k), j < _end(h, b, k)),
)
_DEMANDED_CHUNKED = Hypothesis(
    "the load names chunk j of a chunked-local group",
    lambda h, p, A, b, k, j: both(j >= cov.demand_first_chunk_chunked(h, p, A, b, k), j < _end(h, b, k)),
)


def _window_hints(h: int, p: int, W: int, e: int, b: int, k: int) -> tuple[LemmaUse, ...]:
    t = b * k
    retained = cov.first_retained_column(h, W, e, b)
    start = cdiv(h, t) - cov.lookup_window_chunks(h, W, e, t)
    return (
        lemmas.nested(cov.skipped_tokens(h, W, e), b, k),
        lemmas.covering(p, b, k),
        lemmas.ordered(retained, cov.first_fresh_column(p, b), k),
        lemmas.monotone(floordiv(retained, k), start, t),
    )


def _chunked_hints(h: int, p: int, A: int, b: int, k: int) -> tuple[LemmaUse, ...]:
    t = b * k
    skipped = cov.skipped_tokens_chunked(h, A)
    return (
        lemmas.nested(skipped, b, k),
        lemmas.covering(p, b, k),
        lemmas.ordered(floordiv(skipped, b), cov.first_fresh_column(p, b), k),
        lemmas.monotone(floordiv(skipped, t), cdiv(h, t) - cov.chunked_window_chunks(A, t), t),
    )


def _window_coverage(name: str, first: Callable[[int, int, int, int, int], int]) -> Claim:
    return Claim(
        name,
        (_h, _p, _W, _e, _b, _k, _j),
        lambda h, p, W, e, b, k, j: both(j >= first(h, p, W, e, b * k), j < cdiv(h, b * k)),
        (_HIT, _DEMANDED_WINDOW),
        _window_hints,
    )


def _first_v0_30(h: int, p: int, W: int, e: int, t: int) -> int:
    return cov.first_checked_chunk(h, p, cov.lookup_window_chunks_v0_30(h, W, t), t)


def _tell_v0_30(h: int, p: int, W: int, e: int, b: int, k: int, j: int) -> str:
    t, end = b * k, cdiv(h, b * k)
    first = cov.demand_first_chunk_window(h, p, W, e, b, k)
    looked = _first_v0_30(h, p, W, e, t)
    chunk = f"chunk {t}" if k == 1 else f"block {b}, chunk {t}"
    return (
        f"hit {h}, {chunk}, window {W}, extra {e}, local {p}: restores {chunks_text(first, end)}, "
        f"0.30.0 looked up {chunks_text(int(looked), end)}; chunk {j} missing"
    )


def _tell_chunked(h: int, p: int, A: int, b: int, k: int, j: int) -> str:
    t, end = b * k, cdiv(h, b * k)
    first = cov.demand_first_chunk_chunked(h, p, A, b, k)
    window = cov.chunked_window_chunks(A, t)
    looked = cov.first_checked_chunk(h, p, window, t)
    return (
        f"hit {h}, attention chunk {A}, chunk {t}: restores {chunks_text(first, end)}, looked up "
        f"{window} of them, {chunks_text(looked, end)}; chunk {j} missing"
    )


_coverage = Theorem(
    1,
    "chunk coverage",
    "coverage",
    "Every chunk that a load of h tokens over a local prefix p names was found present by lookup: full "
    "attention all of [p//t, cdiv(h,t)); sliding window from the first retained column, never below the "
    "first fresh one; Mamba the last; chunked-local when t divides A or A divides t. h aligned or not, "
    "any b, k >= 1.",
    (
        Claim(
            "full attention",
            (_h, _p, _b, _k, _j),
            lambda h, p, b, k, j: both(
                j >= cov.lookup_first_chunk_full(p, cov.chunk_tokens(b, k)), j < cdiv(h, b * k)
            ),
            (_HIT, _DEMANDED_FULL),
        ),
        Claim(
            "full attention, from the first fresh column",
            (_p, _b, _k),
            lambda p, b, k: both(
                cov.demand_first_chunk_full(p, b, k) >= cov.lookup_first_chunk_full(p, b * k),
                implies(
                    floormod(p, b) == 0,
                    cov.demand_first_chunk_full(p, b, k) == cov.lookup_first_chunk_full(p, b * k),
                ),
            ),
            (),
            lambda p, b, k: (
                lemmas.covering(p, b, k),
                lemmas.nested(p, b, k),
                lemmas.monotone(floordiv(p, b), cdiv(p, b), b),
                lemmas.monotone(cdiv(p, b), floordiv(p, b), b),
                lemmas.ordered(cdiv(p, b), floordiv(p, b), k),
            ),
        ),
        _window_coverage("sliding window", cov.lookup_first_chunk),
        Claim(
            "demand is not overstated: the first demanded chunk holds a retained or a fresh column",
            (_h, _p, _W, _e, _b, _k),
            lambda h, p, W, e, b, k: both(
                cov.demand_first_column(h, p, W, e, b) >= cov.first_fresh_column(p, b),
                cov.demand_first_column(h, p, W, e, b) * b <= max(h - W + 1 - e, 0, p + b - 1),
                cov.demand_first_chunk_window(h, p, W, e, b, k) * k <= cov.demand_first_column(h, p, W, e, b),
                (cov.demand_first_chunk_window(h, p, W, e, b, k) + 1) * k
                > cov.demand_first_column(h, p, W, e, b),
            ),
        ),
        Claim(
            "Mamba",
            (_h, _p, _b, _k),
            lambda h, p, b, k: both(
                cov.demand_first_chunk_mamba(h, b, k) >= cov.first_checked_chunk(h, p, 1, b * k),
                cov.demand_first_chunk_mamba(h, b, k) == _end(h, b, k) - 1,
            ),
            (_HIT,),
            lambda h, p, b, k: (
                lemmas.nested(h - 1, b, k),
                lemmas.monotone(floordiv(h - 1, b * k) + 1, cdiv(h, b * k), b * k),
                lemmas.monotone(cdiv(h, b * k), floordiv(h - 1, b * k) + 1, b * k),
                lemmas.monotone(floordiv(h - 1, b * k), floordiv(p, b * k), b * k),
            ),
        ),
        Claim(
            "chunked-local attention, t divides A",
            (_h, _p, _m, _b, _k, _j),
            lambda h, p, m, b, k, j: (
                j >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(m * b * k, b * k), b * k)
            ),
            (
                _HIT,
                Hypothesis(
                    "A = m*t and the load names chunk j of a chunked-local group",
                    lambda h, p, m, b, k, j: both(
                        j >= cov.demand_first_chunk_chunked(h, p, m * b * k, b, k), j < _end(h, b, k)
                    ),
                ),
            ),
            lambda h, p, m, b, k: (
                _chunked_hints(h, p, m * b * k, b, k)
                + (
                    lemmas.scaled(0, floordiv(h, m * b * k) * m, b * k),
                    lemmas.scaled(0, -m, b * k),
                    lemmas.monotone((floordiv(h, m * b * k) + 1) * m, cdiv(h, b * k), b * k),
                )
            ),
        ),
        Claim(
            "chunked-local attention, A divides t",
            (_h, _p, _A, _m, _b, _k, _j),
            lambda h, p, A, b, k, j: (
                j >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(A, b * k), b * k)
            ),
            (
                Hypothesis("t = m*A", lambda A, m, b, k: b * k == m * A),
                _HIT,
                _DEMANDED_CHUNKED,
            ),
            lambda h, p, A, m, b, k: (
                _chunked_hints(h, p, A, b, k)
                + (
                    lemmas.congruent(b * k, m * A, cdiv(h, b * k)),
                    lemmas.monotone(floordiv(h, A), (cdiv(h, b * k) - 1) * m, A),
                    lemmas.nonnegative(floordiv(h, A) - (cdiv(h, b * k) - 1) * m, A),
                    lemmas.monotone(
                        floordiv(cov.skipped_tokens_chunked(h, A), b * k), cdiv(h, b * k) - 1, b * k
                    ),
                    lemmas.nonnegative(m - 1, A),
                    lemmas.monotone(floordiv(-A, b * k), -1, b * k),
                )
            ),
        ),
        Claim(
            "chunked-local attention, exact: every hit in the attention chunk from s = m*A is covered if "
            "s mod t + A - 1 <= t*cdiv(A,t)",
            (_h, _m, _A, _t),
            lambda h, m, A, t: (
                floordiv(cov.skipped_tokens_chunked(h, A), t) >= cdiv(h, t) - cov.chunked_window_chunks(A, t)
            ),
            (
                Hypothesis("m*A <= h < m*A + A", lambda h, m, A: both(h >= m * A, h < m * A + A)),
                Hypothesis(
                    "s mod t + A - 1 <= t*cdiv(A,t)",
                    lambda m, A, t: floormod(m * A, t) + A - 1 <= t * cdiv(A, t),
                ),
            ),
            lambda h, m, A, t: (
                lemmas.monotone(floordiv(h, A), m, A),
                lemmas.monotone(m, floordiv(h, A), A),
                lemmas.congruent(floordiv(h, A), m, A),
                lemmas.monotone(floordiv(m * A, t) + cdiv(A, t), cdiv(h, t), t),
                lemmas.ordered(m * A, floordiv(h, A) * A, t),
            ),
        ),
        Claim(
            "chunked-local attention, exact: otherwise the last hit in it, s + A - 1, is not covered",
            (_m, _A, _t),
            lambda m, A, t: floordiv(m * A, t) < cdiv(m * A + A - 1, t) - cov.chunked_window_chunks(A, t),
            (
                Hypothesis(
                    "s mod t + A - 1 > t*cdiv(A,t)",
                    lambda m, A, t: floormod(m * A, t) + A - 1 > t * cdiv(A, t),
                ),
            ),
        ),
    ),
    (
        Refutation(
            "0.33.0: chunked-local window cdiv(A,t) without a side condition",
            "historic",
            Claim(
                "chunked-local attention without a side condition",
                (_h, _p, _A, _b, _k, _j),
                lambda h, p, A, b, k, j: (
                    j >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(A, b * k), b * k)
                ),
                (_HIT, _DEMANDED_CHUNKED),
            ),
            {"h": 16383, "p": 0, "A": 8192, "b": 16, "k": 3, "j": 170},
            _tell_chunked,
            ("b", "k", "A"),
        ),
        Refutation(
            "0.30.0: lookup window max(cdiv(W,t), cdiv(W-1+pad,t)), without the extra tokens",
            "historic",
            _window_coverage("sliding window, release 0.30.0", _first_v0_30),
            {"h": 64, "p": 0, "W": 32, "e": 3, "b": 16, "k": 1, "j": 1},
            _tell_v0_30,
            ("b", "k"),
        ),
    ),
    (_SCAN, _PREFIX),
)

# 2 ----------------------------------------------------------------------------------------------------------

_STORE = Contract(
    "store rule",
    "a chunk is stored only if its last block is present, the mask keeps one of its blocks, and every "
    "block of it that the mask keeps is present; without a mask, every block of it",
)


def _hit_aligned(m: int, f: int, b: int) -> int:
    return m * f * b


def _segment_hints(i: int, m: int, f: int) -> tuple[LemmaUse, ...]:
    """Column i against the segment that ends at column m*f."""
    q = floordiv(i, f)
    return (
        lemmas.monotone(q, m - 1, f),
        lemmas.monotone(m - 1, q, f),
        lemmas.monotone(q, m - 2, f),
        lemmas.congruent(q, m - 1, f),
        lemmas.congruent(q, m - 2, f),
        lemmas.nonnegative(m - 1, f),
    )


def _read_columns(last_hit: Callable[..., int]) -> Hypothesis:
    return Hypothesis(
        "a reader at hit h may read column i: demand_first_column <= i < cdiv(h, b)",
        lambda m, f, b, p, W, e, i: both(
            i >= cov.demand_first_column(last_hit(m, f, b), p, W, e, b), i < cdiv(last_hit(m, f, b), b)
        ),
    )


Need = Callable[[int, int, int, int], int]


def _need_v0_30(W: int, e: int, b: int, d: int) -> int:
    return cov.store_need_blocks_v0_30(W, b, d)


def _kept(need: Need, d: int) -> Callable[..., Truth]:
    def kept(f: int, b: int, W: int, e: int, i: int) -> Truth:
        blocks = need(W, e, b, d)
        return either(cov.store_keeps_all(blocks, f), cov.store_keeps_block(i, blocks, f, d))

    return kept


def _first_kept(start: int, need: int, f: int, d: int) -> int:
    """The first column from `start` on that the mask keeps."""
    first = max(start, d)
    return first + max(0, f - need - floormod(first - d, f))


def _chunk_mask_hints(start: int, i: int, f: int, d: int) -> tuple[LemmaUse, ...]:
    first = floordiv(max(start, d) - d, f)
    q = floordiv(i - d, f)
    return (
        lemmas.monotone(first, q, f),
        lemmas.monotone(q, first, f),
        lemmas.congruent(first, q, f),
    )


def _blocks_claim(name: str, need: Need, d: int, before_end: int = 0) -> Claim:
    """Readable columns at hit m*F (before_end 0) or m*F - 1 (before_end 1) are kept by the mask."""

    def hit(m: int, f: int, b: int) -> int:
        return _hit_aligned(m, f, b) - before_end

    return Claim(
        name,
        (_m, _f, _b, _p, _W, _e, _i),
        _kept(need, d),
        (Hypothesis("p < h", lambda m, f, b, p: p < hit(m, f, b)), _read_columns(hit)),
        lambda m, f, b, p, W, e, i: (
            *_segment_hints(i - d, m, f),
            lemmas.monotone(m * f, i + 1, b),
            lemmas.monotone(m * f, i, b),
            lemmas.scaled(-before_end, m * f, b),
            lemmas.scaled(before_end, -m * f, b),
            lemmas.monotone(i, m * f - need(W, e, b, d) + d, b),
        ),
    )


def _tell_blocks(need: Need, before_end: int, formula: str) -> Callable[..., str]:
    def tell(m: int, f: int, b: int, p: int, W: int, e: int, i: int) -> str:
        hit = m * f * b - before_end
        first = cov.demand_first_column(hit, p, W, e, b)
        blocks = int(need(W, e, b, 0))
        return (
            f"hit {hit}, full-attention chunk {f * b}, block {b}, window {W}, extra {e}: reads blocks "
            f"{first} to {m * f - 1}, {formula} keeps {blocks} of {f} a segment, {m * f - blocks} to "
            f"{m * f - 1}; block {i} may be unwritten"
        )

    return tell


def _hole_claim() -> Claim:
    """Readable columns at m*F - 1 are kept, asked only of chunks that the store names."""
    plain = _blocks_claim("hit n - 1, mask of release 0.33.0", cov.store_need_blocks, 0, 1)
    named = Hypothesis(
        "k >= 2 and the store names chunk i//k",
        lambda f, b, W, e, i, k: both(
            k >= 2, cov.store_keeps_chunk(floordiv(i, k), k, cov.store_need_blocks(W, e, b, 0), f, 0)
        ),
    )
    return replace(plain, symbols=(_m, _f, _b, _k, _p, _W, _e, _i), hypotheses=(*plain.hypotheses, named))


def _tell_hole(m: int, f: int, b: int, k: int, p: int, W: int, e: int, i: int) -> str:
    chunk = i // k
    return (
        _tell_blocks(cov.store_need_blocks, 1, "0.33.0")(m, f, b, p, W, e, i)
        + f", a hole in chunk {chunk} (blocks {chunk * k} to {chunk * k + k - 1}), which the store names"
    )


_blocks = Theorem(
    2,
    "block coverage",
    "coverage",
    "At a hit that is a multiple of F, every block that a reader may read is one that the mask keeps, so "
    "it was written by any store that wrote its chunk, whatever holes the chunk has; k >= 1, any local "
    "prefix, windows that begin mid-chunk. At h = n - 1 with F | n it holds iff b does not divide W + e "
    "- 1 or the mask keeps all; with one token more in the mask, always.",
    (
        _blocks_claim("hit m*F, group without drop", cov.store_need_blocks, 0),
        _blocks_claim("hit m*F, group with drop", cov.store_need_blocks, 1),
        Claim(
            "hit m*F, group with drop: the block past the hit is kept",
            (_m, _f, _b, _W, _e),
            lambda m, f, b, W, e: either(
                cov.store_keeps_all(cov.store_need_blocks(W, e, b, 1), f),
                cov.store_keeps_block(m * f, cov.store_need_blocks(W, e, b, 1), f, 1),
            ),
            (),
            lambda m, f: _segment_hints(m * f - 1, m, f),
        ),
        Claim(
            "hit n - 1, F | n: kept, but for the first readable block when b divides W + e - 1",
            (_m, _f, _b, _W, _e, _i),
            lambda m, f, b, W, e, i: iff(
                _kept(cov.store_need_blocks, 0)(f, b, W, e, i),
                either(
                    floormod(W + e - 1, b) != 0,
                    cov.store_keeps_all(cov.store_need_blocks(W, e, b, 0), f),
                    i * b > m * f * b - W - e,
                ),
            ),
            (
                Hypothesis(
                    "column i is readable at m*F - 1",
                    lambda m, f, b, W, e, i: both(
                        i >= cov.first_retained_column(m * f * b - 1, W, e, b), i < m * f
                    ),
                ),
            ),
            lambda m, f, b, W, e, i: (
                *_segment_hints(i, m, f),
                lemmas.monotone(i, m * f - cov.store_need_blocks(W, e, b, 0), b),
                lemmas.monotone(m * f - cov.store_need_blocks(W, e, b, 0), i, b),
                lemmas.monotone(i, m * f - cov.store_need_blocks(W, e, b, 0) - 1, b),
                lemmas.congruent(i, m * f - cov.store_need_blocks(W, e, b, 0) - 1, b),
                lemmas.monotone(floordiv(W + e - 1, b), cov.store_need_blocks(W, e, b, 0), b),
                lemmas.monotone(cov.store_need_blocks(W, e, b, 0), floordiv(W + e - 1, b), b),
                lemmas.monotone(0, m * f - cov.store_need_blocks(W, e, b, 0), b),
                lemmas.monotone(i, m * f - floordiv(W + e - 1, b), b),
                lemmas.monotone(m * f - floordiv(W + e - 1, b), i, b),
                lemmas.congruent(i, m * f - floordiv(W + e - 1, b), b),
                lemmas.monotone(i, m * f - floordiv(W + e - 1, b) - 1, b),
                lemmas.congruent(i, m * f - floordiv(W + e - 1, b) - 1, b),
            ),
        ),
        _blocks_claim("hit n - 1, F | n, corrected mask", cov.store_need_blocks_corrected, 0, 1),
        _blocks_claim("hit m*F, corrected mask", cov.store_need_blocks_corrected, 0),
        Claim(
            "hit at the end of a final partial segment",
            (Symbol("E", 1, "columns of the prompt's whole chunks"), _f, _b, _W, _e, _i),
            lambda E, f, b, W, e, i: either(
                cov.store_keeps_all(cov.store_need_blocks(W, e, b, 0), f),
                cov.store_keeps_block(i, cov.store_need_blocks(W, e, b, 0), f, 0),
                cov.store_keeps_final_block(i, E, cov.store_need_blocks(W, e, b, 0), f),
            ),
            (
                Hypothesis(
                    "column i is readable at E*b",
                    lambda E, f, b, W, e, i: both(i >= cov.first_retained_column(E * b, W, e, b), i < E),
                ),
            ),
            lambda E, f, b, W, e, i: (
                *_segment_hints(i, floordiv(E, f), f),
                lemmas.monotone(floordiv(i, f), floordiv(E, f), f),
                lemmas.monotone(i, E - cov.store_need_blocks(W, e, b, 0), b),
            ),
        ),
        Claim(
            "a final segment's mask keeps nothing that no hit at its end reads",
            (Symbol("E", 1, "columns of the prompt's whole chunks"), _f, _b, _W, _e, _i),
            lambda E, f, b, W, e, i: both(
                i < E,
                i >= E - cov.store_need_blocks(W, e, b, 0),
                i >= cov.first_retained_column(E * b, W, e, b),
                floormod(E, f) != 0,
            ),
            (
                Hypothesis(
                    "the mask keeps column i for a final segment that ends at column E",
                    lambda E, f, b, W, e, i: cov.store_keeps_final_block(
                        i, E, cov.store_need_blocks(W, e, b, 0), f
                    ),
                ),
            ),
            lambda E, b, W, e, i: (
                lemmas.monotone(E - cov.store_need_blocks(W, e, b, 0), i, b),
                lemmas.nonnegative(i - E + cov.store_need_blocks(W, e, b, 0), b),
                lemmas.monotone(i, cov.first_retained_column(E * b, W, e, b), b),
            ),
        ),
        Claim(
            "a chunk is named by the store if a block of it is kept",
            (_i, _k, _f, Symbol("need", 0, "blocks kept a segment"), Symbol("d", 0, "shift")),
            lambda i, k, f, need, d: cov.store_keeps_chunk(floordiv(i, k), k, need, f, d),
            (
                Hypothesis("need < f, d <= 1", lambda f, need, d: both(need < f, d <= 1)),
                Hypothesis("column i is kept", lambda i, f, need, d: cov.store_keeps_block(i, need, f, d)),
            ),
            lambda i, k, f, need, d: _chunk_mask_hints(floordiv(i, k) * k, i, f, d),
        ),
        Claim(
            "a chunk is named by the store only if a block of it is kept",
            (_j, _k, _f, Symbol("need", 0, "blocks kept a segment"), Symbol("d", 0, "shift")),
            lambda j, k, f, need, d: both(
                _first_kept(j * k, need, f, d) >= j * k,
                _first_kept(j * k, need, f, d) < j * k + k,
                cov.store_keeps_block(_first_kept(j * k, need, f, d), need, f, d),
            ),
            (
                Hypothesis("1 <= need < f, d <= 1", lambda f, need, d: both(need >= 1, need < f, d <= 1)),
                Hypothesis(
                    "chunk j is named", lambda j, k, f, need, d: cov.store_keeps_chunk(j, k, need, f, d)
                ),
            ),
            lambda j, k, f, need, d: (
                *_chunk_mask_hints(j * k, _first_kept(j * k, need, f, d), f, d),
                lemmas.nonnegative(j, k),
            ),
        ),
    ),
    (
        Refutation(
            "0.30.0: mask of cdiv(W-1,b) blocks, without the extra tokens, at h = m*F",
            "historic",
            _blocks_claim("hit m*F, mask of release 0.30.0", _need_v0_30, 0),
            {"m": 4, "f": 4, "b": 16, "p": 0, "W": 32, "e": 3, "i": 13},
            _tell_blocks(_need_v0_30, 0, "0.30.0"),
            ("f", "b"),
        ),
        Refutation(
            "0.33.0: mask of cdiv(W+e-1,b) blocks, at h = n - 1 with F | n",
            "historic",
            _hole_claim(),
            {"m": 1, "f": 4, "b": 16, "k": 2, "p": 0, "W": 17, "e": 0, "i": 2},
            _tell_hole,
            ("f", "b", "k"),
        ),
    ),
    (_STORE,),
    (
        "0.33.0 at h = n - 1, F | n, b | W + e - 1, b*k not dividing W + e - 1: the hit is admitted, "
        "since the store names the chunk for its other blocks, and its first readable block may be a "
        "hole.",
    ),
)

# 3 ----------------------------------------------------------------------------------------------------------

_base = Theorem(
    3,
    "base window",
    "coverage",
    "One more extra token costs the base window 0 or 1 chunk: 1 exactly when e >= 1 and t | W - 1 + e. "
    "For e >= 1 the base equals the demand at every h that is a multiple of t with history enough; at e "
    "= 0 it exceeds the demand by one chunk when t | W - 1, else by none.",
    (
        Claim(
            "one more extra token",
            (_W, _e, _t),
            lambda W, e, t: (
                cov.base_window_chunks(W, e + 1, t) - cov.base_window_chunks(W, e, t)
                == (1 if e >= 1 and floormod(W - 1 + e, t) == 0 else 0)
            ),
            (),
            lambda W, e, t: (
                lemmas.monotone(cdiv(W - 1 + e, t), floordiv(W - 1 + e, t) + 1, t),
                lemmas.monotone(cdiv(W - 1 + e, t), floordiv(W - 1 + e, t), t),
                lemmas.monotone(floordiv(W - 1 + e, t), cdiv(W - 1 + e, t), t),
                lemmas.monotone(cdiv(W + e, t), floordiv(W - 1 + e, t) + 1, t),
                lemmas.monotone(floordiv(W - 1 + e, t) + 1, cdiv(W + e, t), t),
            ),
        ),
        Claim(
            "base against demand at h = m*t",
            (_m, _W, _e, _b, _k),
            lambda m, W, e, b, k: (
                cov.base_window_chunks(W, e, b * k)
                - (_end(m * b * k, b, k) - cov.demand_first_chunk_window(m * b * k, 0, W, e, b, k))
                == (1 if e == 0 and floormod(W - 1, b * k) == 0 else 0)
            ),
            (Hypothesis("h >= W - 1 + e", lambda m, W, e, b, k: m * b * k >= W - 1 + e),),
            lambda m, W, e, b, k: (
                lemmas.nested(cov.skipped_tokens(m * b * k, W, e), b, k),
                lemmas.scaled(-W + 1 - e, m, b * k),
                lemmas.scaled(0, -m, b * k),
                *_pairs(
                    b * k,
                    m,
                    cdiv(W - 1 + e, b * k),
                    cdiv(W, b * k),
                    floordiv(W - 1, b * k),
                    floordiv(W - 1, b * k) + 1,
                ),
            ),
        ),
        Claim(
            "the base window is the load window at a multiple of t, and at least 1",
            (_m, _W, _e, _t),
            lambda m, W, e, t: both(
                cov.lookup_window_chunks(m * t, W, e, t) == cov.base_window_chunks(W, e, t),
                cov.base_window_chunks(W, e, t) >= 1,
            ),
            (),
            lambda m, W, t: (lemmas.scaled(0, -m, t), lemmas.monotone(-cdiv(W, t), -1, t)),
        ),
        Claim(
            "without extra tokens the releases agree",
            (_h, _W, _t),
            lambda h, W, t: both(
                cov.base_window_chunks(W, 0, t) == cov.base_window_chunks_v0_30(W, t),
                cov.lookup_window_chunks(h, W, 0, t) == cov.lookup_window_chunks_v0_30(h, W, t),
            ),
            (),
            lambda W, t: (lemmas.ordered(-W, 1 - W, t),),
        ),
    ),
    (
        Refutation(
            "0.30.0: base cdiv(W,t), whatever e",
            "historic",
            Claim(
                "base of 0.30.0 covers the demand at h = m*t",
                (_m, _W, _e, _b, _k),
                lambda m, W, e, b, k: (
                    cov.base_window_chunks_v0_30(W, b * k)
                    >= _end(m * b * k, b, k) - cov.demand_first_chunk_window(m * b * k, 0, W, e, b, k)
                ),
                (Hypothesis("h >= W - 1 + e", lambda m, W, e, b, k: m * b * k >= W - 1 + e),),
            ),
            {"m": 4, "W": 32, "e": 2, "b": 16, "k": 1},
            lambda m, W, e, b, k: (
                f"hit {m * b * k}, chunk {b * k}, window {W}, extra {e}: demands "
                f"{m - cov.demand_first_chunk_window(m * b * k, 0, W, e, b, k)} chunks, base of 0.30.0 is "
                f"{cov.base_window_chunks_v0_30(W, b * k)}"
            ),
            ("b", "k"),
        ),
        Refutation(
            "each extra token costs a chunk",
            "hypothetical",
            Claim(
                "each extra token costs a chunk",
                (_W, _e, _t),
                lambda W, e, t: cov.base_window_chunks(W, e + 1, t) == cov.base_window_chunks(W, e, t) + 1,
            ),
            {"W": 32, "e": 0, "t": 16},
            lambda W, e, t: (
                f"chunk {t}, window {W}: base {cov.base_window_chunks(W, e, t)} with {e} extra tokens and "
                f"with {e + 1}"
            ),
            ("t",),
        ),
        Refutation(
            "0.33.0: the base equals the demand, also at e = 0",
            "historic",
            Claim(
                "base equals demand at e = 0",
                (_m, _W, _b, _k),
                lambda m, W, b, k: (
                    cov.base_window_chunks(W, 0, b * k)
                    == _end(m * b * k, b, k) - cov.demand_first_chunk_window(m * b * k, 0, W, 0, b, k)
                ),
                (Hypothesis("h >= W - 1", lambda m, W, b, k: m * b * k >= W - 1),),
            ),
            {"m": 4, "W": 33, "b": 16, "k": 1},
            lambda m, W, b, k: (
                f"hit {m * b * k}, chunk {b * k}, window {W}: demands "
                f"{m - cov.demand_first_chunk_window(m * b * k, 0, W, 0, b, k)} chunks, looks up "
                f"{cov.base_window_chunks(W, 0, b * k)}"
            ),
            ("b", "k"),
        ),
    ),
)

# 4 ----------------------------------------------------------------------------------------------------------


def _in_flight_v0_30(h: int, p: int, W: int, e: int, t: int) -> int:
    return max(floordiv(p, t), cdiv(h, t) - cov.lookup_window_chunks_v0_30(h, W, t))


_in_flight = Theorem(
    4,
    "in-flight loads",
    "coverage",
    "The chunks compared with those being loaded include every chunk that the load names, so no load "
    "reads a chunk that another is still bringing in, unnoticed.",
    (
        _window_coverage("sliding window, in-flight check", cov.in_flight_first_chunk),
        Claim(
            "the check looks at no chunk that lookup did not",
            (_h, _p, _W, _e, _t),
            lambda h, p, W, e, t: (
                cov.in_flight_first_chunk(h, p, W, e, t) >= cov.lookup_first_chunk(h, p, W, e, t)
            ),
        ),
        Claim(
            "the slice is never the whole list by accident: the load window is at least 1",
            (_h, _W, _e, _t),
            lambda h, W, e, t: cov.lookup_window_chunks(h, W, e, t) >= 1,
            (),
            lambda W, t: (lemmas.monotone(-cdiv(W, t), -1, t),),
        ),
    ),
    (
        Refutation(
            "0.30.0: in-flight check over the load window without the extra tokens",
            "historic",
            _window_coverage("in-flight check, release 0.30.0", _in_flight_v0_30),
            {"h": 64, "p": 0, "W": 32, "e": 3, "b": 16, "k": 1, "j": 1},
            lambda h, p, W, e, b, k, j: (
                f"hit {h}, chunk {b * k}, window {W}, extra {e}: restores "
                f"{chunks_text(cov.demand_first_chunk_window(h, p, W, e, b, k), cdiv(h, b * k))}, 0.30.0 "
                f"compared {chunks_text(int(_in_flight_v0_30(h, p, W, e, b * k)), cdiv(h, b * k))}; chunk "
                f"{j} may be in flight"
            ),
            ("b", "k"),
        ),
    ),
)

# 5 ----------------------------------------------------------------------------------------------------------

_LARGEST = Contract(
    "lookup order",
    "lookup tries candidates from the longest down and admits the first whose chunks are all present",
)


def _stored(j: int, n: int, b: int, k: int, f: int, need: int, d: int) -> Truth:
    """Chunk j was stored by a prompt of n tokens: kept by the mask, and whole."""
    kept = either(cov.store_keeps_all(need, f), cov.store_keeps_chunk(j, k, need, f, d))
    return both(kept, (j + 1) * cov.chunk_tokens(b, k) <= n)


def _window_at(h: int, W: int, e: int, t: int) -> int:
    return cov.first_checked_chunk(h, 0, cov.lookup_window_chunks(h, W, e, t), t)


def _aligned_condition(need: Need, d: int) -> Hypothesis:
    return Hypothesis(
        "e >= 1, or t does not divide W - 1, or t does not divide h, or fewer than k blocks a segment go "
        "unkept",
        lambda m, f, b, k, W, e: either(
            e >= 1,
            floormod(W - 1, b * k) != 0,
            floormod(m * f * b, b * k) != 0,
            f - need(W, e, b, d) < k,
        ),
    )


def _window_pairs(h: int, W: int, e: int, t: int, *values: int) -> tuple[LemmaUse, ...]:
    """The terms of the lookup window at h against each other and the given values."""
    padded = cdiv(W - 1 + e + floormod(-h, t), t)
    return _pairs(t, cdiv(W, t), cdiv(W - 1 + e, t), padded, *values)


def _found_aligned(name: str, need: Need, condition: bool) -> Claim:
    """Every chunk that lookup asks for at h = m*F was stored, in a group without drop."""
    return Claim(
        name,
        (_m, _f, _b, _k, _W, _e, _n, _j),
        lambda m, f, b, k, W, e, n, j: _stored(j, n, b, k, f, need(W, e, b, 0), 0),
        (
            Hypothesis(
                "h < n and the last hit token's chunk is whole: cdiv(h,t)*t <= n",
                lambda m, f, b, k, n: both(m * f * b < n, cdiv(m * f * b, b * k) * b * k <= n),
            ),
            *((_aligned_condition(need, 0),) if condition else ()),
            Hypothesis(
                "lookup asks for chunk j at h = m*F",
                lambda m, f, b, k, W, e, j: both(
                    j >= _window_at(m * f * b, W, e, b * k), j < cdiv(m * f * b, b * k)
                ),
            ),
        ),
        lambda m, f, b, k, W, e, j: (
            *_pairs(f, floordiv(j * k, f), m - 1, m - 2),
            *_pairs(b, m * f, j * k),
            *_pairs(b, j * k + k, m * f - need(W, e, b, 0)),
            lemmas.nonnegative(j, k),
            *_window_pairs(m * f * b, W, e, b * k, floordiv(W - 1, b * k)),
            *_pairs(b * k, cdiv(m * f * b, b * k), floordiv(m * f * b, b * k)),
        ),
    )


def _found_last(name: str, need: Need, condition: bool) -> Claim:
    """Every chunk that lookup asks for at h = n - 1 was stored, for n = g*t a multiple of F = f*b."""
    conditions = (
        Hypothesis(
            "t does not divide W + e - 1, or fewer than k blocks a segment go unkept",
            lambda f, b, k, W, e: either(floormod(W + e - 1, b * k) != 0, f - need(W, e, b, 0) < k),
        ),
    )
    return Claim(
        name,
        (_g, _m, _f, _b, _k, _W, _e, _j),
        lambda g, f, b, k, W, e, j: _stored(j, g * k * b, b, k, f, need(W, e, b, 0), 0),
        (
            Hypothesis("n = g*t = m*F", lambda g, m, f, k: g * k == m * f),
            Hypothesis("t >= 2", lambda b, k: b * k >= 2),
            *(conditions if condition else ()),
            Hypothesis(
                "lookup asks for chunk j at h = n - 1",
                lambda g, b, k, W, e, j: both(
                    j >= _window_at(g * k * b - 1, W, e, b * k), j < cdiv(g * k * b - 1, b * k)
                ),
            ),
        ),
        lambda g, m, f, b, k, W, e, j: (
            *_pairs(f, floordiv(j * k, f), m - 1, m - 2),
            *_pairs(b, m * f, j * k),
            *_pairs(b, j * k + k, g * k - need(W, e, b, 0)),
            *_pairs(k, j, g, g - 1),
            lemmas.nonnegative(j, k),
            lemmas.scaled(1, -g, b * k),
            *_pairs(b * k, 0, floordiv(1, b * k)),
            *_pairs(
                b * k,
                floordiv(W + e - 1, b * k),
                floordiv(W + e - 1, b * k) + 1,
                cdiv(W - 1 + e, b * k),
                cdiv(W + e, b * k),
                cdiv(W, b * k),
            ),
        ),
    )


def _found_dropping(name: str, need: Need, condition: bool) -> Claim:
    """Every chunk that lookup asks for at h = m*F, and the one past it, was stored, in a group with drop; F
    = r*t.
    """
    return Claim(
        name,
        (_m, _r, _b, _k, _W, _e, _n, _j),
        lambda m, r, b, k, W, e, n, j: _stored(j, n, b, k, r * k, need(W, e, b, 1), 1),
        (
            Hypothesis("h + t <= n", lambda m, r, b, k, n: m * r * k * b + b * k <= n),
            *(
                (
                    Hypothesis(
                        "e >= 1, or t does not divide W - 1, or fewer than k blocks a segment go unkept "
                        "(none or fewer than k - 1 if m = 1)",
                        lambda m, r, b, k, W, e: either(
                            e >= 1,
                            floormod(W - 1, b * k) != 0,
                            cov.store_keeps_all(need(W, e, b, 1), r * k),
                            both(m >= 2, r * k - need(W, e, b, 1) < k),
                            r * k - need(W, e, b, 1) < k - 1,
                        ),
                    ),
                )
                if condition
                else ()
            ),
            Hypothesis(
                "lookup asks for chunk j at h = m*F, one more than the hit for the drop",
                lambda m, r, b, k, W, e, j: both(
                    j >= _window_at(m * r * k * b, W, e, b * k), j <= cdiv(m * r * k * b, b * k)
                ),
            ),
        ),
        lambda m, r, b, k, W, e, j: (
            lemmas.scaled(0, -m * r, b * k),
            *_pairs(r * k, floordiv(max(j * k, 1) - 1, r * k), m - 1, m - 2, m),
            *_pairs(b, j * k + k, m * r * k - need(W, e, b, 1) + 1),
            *_pairs(k, j, m * r, m * r - 1),
            lemmas.nonnegative(j, k),
            lemmas.nonnegative(m - 1, r * k),
            lemmas.nonnegative(m * r - j, b * k),
            *_window_pairs(m * r * k * b, W, e, b * k, floordiv(W - 1, b * k)),
        ),
    )


def _lost_dropping(name: str, gap: Hypothesis) -> Claim:
    """The first chunk that lookup asks for at h = m*F in a group with drop was not stored; e = 0, W = w*t +
    1.
    """
    return Claim(
        name,
        (_m, _r, _b, _k, _w),
        lambda m, r, b, k, w: both(
            _window_at(m * r * k * b, w * b * k + 1, 0, b * k) == m * r - w - 1,
            negation(
                _stored(
                    m * r - w - 1,
                    m * r * k * b + b * k,
                    b,
                    k,
                    r * k,
                    cov.store_need_blocks(w * b * k + 1, 0, b, 1),
                    1,
                )
            ),
        ),
        (gap,),
        lambda m, r, b, k, w: (
            lemmas.scaled(0, -w * k, b),
            lemmas.scaled(0, -m * r, b * k),
            *_window_pairs(m * r * k * b, w * b * k + 1, 0, b * k, w, w + 1),
            *_pairs(r * k, floordiv(max((m * r - w - 1) * k, 1) - 1, r * k), m - 1),
            *_pairs(k, r, w + 1),
            *_pairs(r, m, 1),
            *_pairs(r * k, m, 1),
            *_pairs(k, m * r, w + 1, w + 2),
            lemmas.nonnegative(m - 1, r * k),
        ),
    )


def _tell_lost(release: str, before_end: int) -> Callable[..., str]:
    def tell(h: int, f: int, b: int, k: int, W: int, e: int, j: int) -> str:
        t = b * k
        first, end = _window_at(h, W, e, t), cdiv(h, t)
        need = cov.store_need_blocks(W, e, b, 0)
        return (
            f"hit {h}, full-attention chunk {f * b}, chunk {t}, window {W}, extra {e}: lookup asks for "
            f"{chunks_text(int(first), end)}, {release} keeps {need} blocks of {f} a segment; chunk {j} is "
            "never stored"
        )

    if before_end:
        return lambda g, m, f, b, k, W, e, j: tell(g * k * b - 1, f, b, k, W, e, j)
    return lambda m, f, b, k, W, e, n, j: tell(m * f * b, f, b, k, W, e, j)


_agreement = Theorem(
    5,
    "store and lookup agree",
    "coverage",
    "After a whole prompt of n tokens was stored under the mask and nothing was evicted, a hit h that "
    "the drop rule allows is found, for multiples of F iff cdiv(h,t)*t <= n (h + t <= n in a group that "
    "drops) and not (e = 0, t | W - 1, t | h, at least k blocks a segment unkept; with drop, k - 1 of "
    "them in the first segment); for h = n - 1, F | n, t | n, t >= 2 iff not (t | W + e - 1, at least k "
    "blocks a segment unkept). With a Mamba chunk that is a multiple of F only the first case arises. A "
    "mask of cdiv(W + e, b) blocks loses nothing.",
    (
        _found_aligned("h = m*F: found if", cov.store_need_blocks, True),
        Claim(
            "h = m*F: found only if (the last chunk is whole)",
            (_h, _n, _b, _k, _f),
            lambda h, n, b, k, f: negation(_stored(cdiv(h, b * k) - 1, n, b, k, f, f, 0)),
            (Hypothesis("cdiv(h,t)*t > n", lambda h, n, b, k: cdiv(h, b * k) * b * k > n),),
        ),
        Claim(
            "h = m*F: found only if (no gap): e = 0, W = w*t + 1, h = g*t, f - need >= k",
            (_g, _m, _f, _b, _k, _w),
            lambda g, f, b, k, w: both(
                _window_at(g * k * b, w * b * k + 1, 0, b * k) == g - w - 1,
                negation(
                    _stored(g - w - 1, g * k * b, b, k, f, cov.store_need_blocks(w * b * k + 1, 0, b, 0), 0)
                ),
            ),
            (
                Hypothesis("h = g*t = m*F", lambda g, m, f, k: g * k == m * f),
                Hypothesis("f - need >= k", lambda f, k, w: f - w * k >= k),
            ),
            lambda g, m, f, b, k, w: (
                lemmas.scaled(0, -w * k, b),
                lemmas.scaled(0, -g, b * k),
                *_window_pairs(g * k * b, w * b * k + 1, 0, b * k, w, w + 1),
                *_pairs(f, floordiv((g - w - 1) * k, f), m - 1),
                lemmas.nonnegative(m - 1, f),
                *_pairs(k, g, w + 1),
            ),
        ),
        _found_last("h = n - 1: found if", cov.store_need_blocks, True),
        Claim(
            "h = n - 1: found only if: W = w*t + 1 - e, f - need >= k",
            (_g, _m, _f, _b, _k, _e, _w),
            lambda g, f, b, k, e, w: both(
                _window_at(g * k * b - 1, w * b * k + 1 - e, e, b * k) == g - w - 1,
                negation(
                    _stored(
                        g - w - 1, g * k * b, b, k, f, cov.store_need_blocks(w * b * k + 1 - e, e, b, 0), 0
                    )
                ),
            ),
            (
                Hypothesis("n = g*t = m*F", lambda g, m, f, k: g * k == m * f),
                Hypothesis("f - need >= k", lambda f, k, w: f - w * k >= k),
                Hypothesis("t >= 2", lambda b, k: b * k >= 2),
                Hypothesis("W >= 1", lambda b, k, e, w: w * b * k + 1 - e >= 1),
            ),
            lambda g, m, f, b, k, e, w: (
                lemmas.scaled(0, -w * k, b),
                lemmas.scaled(1, -g, b * k),
                *_pairs(b * k, floordiv(1, b * k), 0),
                *_window_pairs(g * k * b - 1, w * b * k + 1 - e, e, b * k, w, w + 1),
                *_pairs(f, floordiv((g - w - 1) * k, f), m - 1),
                lemmas.nonnegative(m - 1, f),
                *_pairs(k, g, w + 1),
            ),
        ),
        _found_dropping("h = m*F, group with drop: found if", cov.store_need_blocks, True),
        _lost_dropping(
            "h = m*F, group with drop: found only if (no gap): e = 0, W = w*t + 1, f - need >= k",
            Hypothesis("f - need >= k", lambda r, k, w: r * k - w * k - 1 >= k),
        ),
        _lost_dropping(
            "h = F, group with drop: found only if: e = 0, W = w*t + 1, f - need = k - 1, the first segment",
            Hypothesis("m = 1, F = (w + 1)*t, k >= 2", lambda m, r, k, w: both(m == 1, r == w + 1, k >= 2)),
        ),
        Claim(
            "the largest hit that full attention allows: n - 1 if F | n, else the last multiple of F; "
            "with its drop, F less than the last multiple",
            (_n, _F, _d),
            lambda n, F, d: (
                cov.shrink_hit(cov.lookup_candidate(n, 1), cov.tail_drop(cov.full_chunks_of(n, F), d), F)
                == (n - 1 if d == 0 and floormod(n, F) == 0 else round_down(n, F) - d * F)
            ),
            (Hypothesis("d <= 1", lambda d: d <= 1),),
            lambda d, n, F: (*_pairs(F, d, 0, 1), *_pairs(F, floordiv(n, F), d)),
        ),
        Claim(
            "with a Mamba chunk M = g*F: the candidate is the last multiple of M below n, a multiple of "
            "F that full attention does not shrink",
            (_n, _F, _g, Symbol("y", 0, "a multiple of M, in units of M")),
            lambda n, F, g, y: both(
                cov.lookup_candidate(n, g * F) == floordiv(n - 1, g * F) * g * F,
                cov.lookup_candidate(n, g * F) < n,
                implies(y * g * F < n, y * g * F <= cov.lookup_candidate(n, g * F)),
                cov.shrink_hit(cov.lookup_candidate(n, g * F), cov.full_chunks_of(n, F), F)
                == cov.lookup_candidate(n, g * F),
            ),
            (),
            lambda n, F, g, y: (
                *_pairs(g * F, y, floordiv(n - 1, g * F)),
                *_pairs(F, floordiv(n, F), floordiv(n - 1, g * F) * g),
            ),
        ),
        _found_aligned("h = m*F, corrected mask: found", cov.store_need_blocks_corrected, False),
        _found_last("h = n - 1, corrected mask: found", cov.store_need_blocks_corrected, False),
        _found_dropping(
            "h = m*F, group with drop, corrected mask: found", cov.store_need_blocks_corrected, False
        ),
    ),
    (
        Refutation(
            "0.33.0: every multiple of F is found (e = 0, t | W - 1)",
            "historic",
            _found_aligned("h = m*F: found, release 0.33.0", cov.store_need_blocks, False),
            {"m": 4, "f": 4, "b": 16, "k": 1, "W": 33, "e": 0, "n": 257, "j": 13},
            _tell_lost("0.33.0", 0),
            ("f", "b", "k"),
        ),
        Refutation(
            "0.33.0: h = n - 1 is found when F | n (t | W + e - 1)",
            "historic",
            _found_last("h = n - 1: found, release 0.33.0", cov.store_need_blocks, False),
            {"g": 16, "m": 4, "f": 4, "b": 16, "k": 1, "W": 32, "e": 1, "j": 13},
            _tell_lost("0.33.0", 1),
            ("f", "b", "k"),
        ),
    ),
    (_LARGEST, _SCAN, _PREFIX, _STORE),
    (
        "Where h = n - 1 is lost, lookup falls back to the next multiple of F: an identical prompt of "
        "length n = m*F reuses m*F - F tokens instead of n - 1.",
    ),
)

# 6 ----------------------------------------------------------------------------------------------------------

_y = Symbol("y", 1, "candidate hit tokens")
_R = Symbol("R", 1, "one past the last chunk found present")
_N = Symbol("N", 0, "chunks that have a key")
_ASKED = Hypothesis(
    "the run ends within the query: R <= query end, one chunk past the candidate",
    lambda y, t, R, N: cov.query_end_chunk(y, t, 1, N) >= R,
)


def _dropped(y: int, R: int, t: int) -> int:
    return cov.shrink_hit(y, cov.tail_drop(R, 1), t)


_tail = Theorem(
    6,
    "tail drop",
    "coverage",
    "A dropping group asks for one chunk past the candidate and gives one back, once. Sliding window: "
    "the whole window of the final hit and the chunk past it were present; after another group shrank "
    "the hit by s chunks without a new drop, the chunk past it still is iff s <= the window. Full "
    "attention: the chunk past every smaller hit is present. Where the extra chunk is present the drop "
    "costs nothing, and otherwise at most one chunk.",
    (
        Claim(
            "sliding window: the final hit ends with the chunk before the last present one",
            (_y, _R, _N, _t),
            lambda y, R, N, t: cov.demand_end_chunk(_dropped(y, R, t), t) == cov.tail_drop(R, 1),
            (_ASKED,),
            lambda y, R, N, t: (
                lemmas.scaled(-y, -1, t),
                lemmas.scaled(0, 1 - R, t),
                *_pairs(t, cdiv(y, t), R - 1, R),
            ),
        ),
        Claim(
            "sliding window: the window of the final hit and the chunk past it lie in the run of R - 1 - "
            "w to R - 1",
            (_y, _R, _N, _t, _p, _W, _e, _j),
            lambda y, R, t, W, e, j: both(
                j >= R - 1 - cov.lookup_window_chunks(_dropped(y, R, t), W, e, t), j < R
            ),
            (
                _ASKED,
                Hypothesis(
                    "chunk j was asked for at the final hit, or is the chunk past it",
                    lambda y, R, t, p, W, e, j: both(
                        j >= cov.lookup_first_chunk(_dropped(y, R, t), p, W, e, t),
                        j <= cov.demand_end_chunk(_dropped(y, R, t), t),
                    ),
                ),
            ),
            lambda y, R, N, t: (
                lemmas.scaled(-y, -1, t),
                lemmas.scaled(0, 1 - R, t),
                *_pairs(t, cdiv(y, t), R - 1, R),
            ),
        ),
        Claim(
            "sliding window: the chunk past a later, smaller hit is in the run iff it shrank by at most "
            "w chunks",
            (_R, _w, _s),
            lambda R, w, s: iff(both(R - 1 - s >= R - 1 - w, R - 1 - s < R), s <= w),
            (Hypothesis("s < R", lambda R, s: s < R),),
        ),
        Claim(
            "full attention: the chunk past any hit up to the final one is present",
            (_y, _R, _t, Symbol("h", 0, "a hit up to the final one")),
            lambda R, t, h: cov.demand_end_chunk(h, t) < R,
            (Hypothesis("h <= final hit", lambda y, R, t, h: h <= _dropped(y, R, t)),),
            lambda R, t, h: _pairs(t, cdiv(h, t), R, R - 1),
        ),
        Claim(
            "the drop costs nothing if the chunk past the candidate is present",
            (_y, _R, _N, _t),
            lambda y, R, t: _dropped(y, R, t) == y,
            (
                Hypothesis("R = query end", lambda y, R, N, t: cov.query_end_chunk(y, t, 1, N) == R),
                Hypothesis("the chunk past the candidate has a key", lambda y, N, t: cdiv(y, t) + 1 <= N),
            ),
            lambda y, R, t: (lemmas.scaled(-y, -1, t), *_pairs(t, cdiv(y, t), R - 1)),
        ),
        Claim(
            "the drop costs at most a chunk: all chunks before the final hit's end but one are in it",
            (_y, _R, _t),
            lambda y, R, t: either(_dropped(y, R, t) == y, _dropped(y, R, t) == (R - 1) * t),
        ),
        Claim(
            "a group that does not drop keeps its hit and asks for no chunk past the candidate",
            (_y, _R, _N, _t),
            lambda y, R, N, t: both(
                cov.tail_drop(R, 0) == R,
                cov.query_end_chunk(y, t, 0, N) <= cdiv(y, t),
                cov.query_end_chunk(y, t, 0, N) <= N,
                either(cov.query_end_chunk(y, t, 0, N) == cdiv(y, t), cov.query_end_chunk(y, t, 0, N) == N),
            ),
        ),
    ),
    (
        Refutation(
            "the drop applied twice to one group",
            "hypothetical",
            Claim(
                "a second drop costs nothing more",
                (_y, _R, _N, _t),
                lambda y, R, t: (
                    cov.shrink_hit(_dropped(y, R, t), cov.tail_drop(cov.tail_drop(R, 1), 1), t)
                    == _dropped(y, R, t)
                ),
                (_ASKED, Hypothesis("R >= 2", lambda R: R >= 2)),
            ),
            {"y": 64, "R": 5, "N": 5, "t": 16},
            lambda y, R, N, t: (
                f"candidate {y}, chunk {t}, chunks 0 to {R - 1} present: one drop leaves "
                f"{_plain_drop(y, R, t)} tokens, two leave {min(_plain_drop(y, R, t), (R - 2) * t)}"
            ),
            ("t",),
        ),
        Refutation(
            "the drop without the extra chunk in the query",
            "hypothetical",
            Claim(
                "the drop costs nothing although nothing past the candidate was asked for",
                (_y, _R, _N, _t),
                lambda y, R, t: _dropped(y, R, t) == y,
                (
                    Hypothesis("R = query end", lambda y, R, N, t: cov.query_end_chunk(y, t, 0, N) == R),
                    Hypothesis("the chunk past the candidate has a key", lambda y, N, t: cdiv(y, t) + 1 <= N),
                ),
            ),
            {"y": 64, "R": 4, "N": 5, "t": 16},
            lambda y, R, N, t: (
                f"candidate {y}, chunk {t}, {N} chunks present but only {R} asked for: the drop leaves "
                f"{_plain_drop(y, R, t)} tokens"
            ),
            ("t",),
        ),
    ),
    (_SCAN, _PREFIX),
    (
        "A Mamba group never drops (0.33.0): its one state is exact at the hit, and the drop would lose "
        "a whole chunk.",
    ),
)


def _plain_drop(y: int, R: int, t: int) -> int:
    return cov.shrink_hit(y, cov.tail_drop(R, 1), t)


# 7 ----------------------------------------------------------------------------------------------------------

_FOLD = Contract(
    "common-hit fixed point",
    "the local hit of a hybrid cache is common_hit folded over the groups and n - 1, with the least "
    "common multiple of the blocks as alignment",
)

_common = Theorem(
    7,
    "common hit",
    "coverage",
    "The local common hit is within every group and below n, a multiple of the alignment, hence of every "
    "block, and the longest such. Over the offload lookup the hit is below n and within every group, but "
    "a multiple of the Mamba chunk M only if each group that shrank it has a chunk that M divides; the "
    "load names the Mamba state after cdiv(h,M)*M tokens, which is the state at h iff M | h.",
    (
        Claim(
            "local: within both hits, aligned",
            (Symbol("a", 0, "one group's hit"), Symbol("c", 0, "another's hit"), _A),
            lambda a, c, A: both(
                cov.common_hit(a, c, A) <= a,
                cov.common_hit(a, c, A) <= c,
                floormod(cov.common_hit(a, c, A), A) == 0,
                cov.common_hit(a, c, A) >= 0,
            ),
            (),
            lambda a, c, A: (
                lemmas.multiple(floordiv(min(a, c), A), A),
                *_pairs(A, floordiv(min(a, c), A), 0),
            ),
        ),
        Claim(
            "local: the longest aligned one",
            (Symbol("a", 0, "one group's hit"), Symbol("c", 0, "another's hit"), _A, _m),
            lambda a, c, A, m: m * A <= cov.common_hit(a, c, A),
            (Hypothesis("m*A is within both", lambda a, c, A, m: both(m * A <= a, m * A <= c)),),
            lambda a, c, A, m: _pairs(A, m, floordiv(min(a, c), A)),
        ),
        Claim(
            "local: a multiple of each block that divides the alignment",
            (Symbol("a", 0, "one group's hit"), Symbol("c", 0, "another's hit"), _b, _m),
            lambda a, c, b, m: floormod(cov.common_hit(a, c, m * b), b) == 0,
            (),
            lambda a, c, b, m: (lemmas.multiple(floordiv(min(a, c), m * b) * m, b),),
        ),
        Claim(
            "local: below n",
            (_n, Symbol("c", 0, "a group's hit"), _A),
            lambda n, c, A: cov.common_hit(n - 1, c, A) < n,
        ),
        Claim(
            "lookup: the candidate is below n, a multiple of M, and the longest such",
            (_n, _M, Symbol("y", 0, "a multiple of M, in units of M")),
            lambda n, M, y: both(
                cov.lookup_candidate(n, M) < n,
                cov.lookup_candidate(n, M) >= 0,
                floormod(cov.lookup_candidate(n, M), M) == 0,
                implies(y * M < n, y * M <= cov.lookup_candidate(n, M)),
            ),
            (),
            lambda n, M, y: (
                lemmas.multiple(floordiv(n - 1, M), M),
                *_pairs(M, y, floordiv(n - 1, M), 0),
            ),
        ),
        Claim(
            "lookup: a group keeps the candidate or cuts it to its own chunk",
            (_y, _R, _t),
            lambda y, R, t: both(
                cov.shrink_hit(y, R, t) <= y,
                cov.shrink_hit(y, R, t) <= R * t,
                either(cov.shrink_hit(y, R, t) == y, cov.shrink_hit(y, R, t) == R * t),
            ),
        ),
        Claim(
            "lookup: a multiple of M stays one if M divides the group's chunk",
            (_m, _M, _R, _g),
            lambda m, M, R, g: floormod(cov.shrink_hit(m * M, R, g * M), M) == 0,
            (),
            lambda m, M, R, g: (lemmas.multiple(m, M), lemmas.multiple(R * g, M)),
        ),
        Claim(
            "lookup: rounding down to M after each group keeps a multiple of M within both",
            (_y, _R, _t, _M),
            lambda y, R, t, M: both(
                floormod(cov.common_hit(y, R * t, M), M) == 0, cov.common_hit(y, R * t, M) <= y
            ),
            (),
            lambda y, R, t, M: (lemmas.scaled(0, floordiv(min(y, R * t), M), M),),
        ),
        Claim(
            "the Mamba state that a load names is the state at h iff M | h",
            (_h, _M),
            lambda h, M: both(
                iff(cov.mamba_state_tokens(h, M) == h, floormod(h, M) == 0),
                cov.mamba_state_tokens(h, M) >= h,
                cov.mamba_state_tokens(h, M) < h + M,
            ),
            (),
            lambda h, M: _pairs(M, cdiv(h, M), floordiv(h, M)),
        ),
        Claim(
            "the Mamba state that a load names is that of the demanded chunk",
            (_h, _b, _k),
            lambda h, b, k: (
                cov.mamba_state_tokens(h, b * k) == (cov.demand_first_chunk_mamba(h, b, k) + 1) * b * k
            ),
            (),
            lambda h, b, k: (
                lemmas.nested(h - 1, b, k),
                *_pairs(b * k, cdiv(h, b * k), floordiv(h - 1, b * k) + 1),
            ),
        ),
    ),
    (
        Refutation(
            "0.33.0: rounding to M once, before the groups are asked",
            "historic",
            Claim(
                "the lookup's hit is a multiple of M",
                (_n, _M, _t, _R),
                lambda n, M, t, R: (
                    cov.mamba_state_tokens(cov.shrink_hit(cov.lookup_candidate(n, M), R, t), M)
                    == cov.shrink_hit(cov.lookup_candidate(n, M), R, t)
                ),
            ),
            {"n": 65, "M": 64, "t": 16, "R": 3},
            lambda n, M, t, R: (
                f"prompt {n}, Mamba chunk {M}, another group's chunk {t} present up to chunk {R - 1}: hit "
                f"{min((n - 1) // M * M, R * t)}, the load names the Mamba state after "
                f"{cov.mamba_state_tokens(min((n - 1) // M * M, R * t), M)} tokens"
            ),
            ("M", "t"),
        ),
    ),
    (_FOLD, _SCAN, _PREFIX),
    (
        "So a lookup that shrinks between multiples of M hands the forward pass a state that has already "
        "folded up to M - 1 tokens that it will fold again; re-rounding after each group repairs it.",
    ),
)

# 8 ----------------------------------------------------------------------------------------------------------

_C = Symbol("C", 0, "tokens computed when columns are freed: processed, none in flight")
_c2 = Symbol("c", 0, "tokens computed at a later step")
_x2 = Symbol("x", 0, "a token that the later step reads")
_LATER = Hypothesis("c >= C", lambda C, c: c >= C)

_freeing = Theorem(
    8,
    "freed columns",
    "coverage",
    "Columns freed at C processed tokens are never read by a step at c >= C: a query reads W - 1 tokens "
    "back, re-prefill starts at most e tokens earlier; and no more could be freed. After a local hit of "
    "h = g*b tokens the window is held, and all that a later external hit would retain is held iff W - 1 "
    "+ e <= b*cdiv(W-1,b) or h is no longer than that.",
    (
        Claim(
            "no freed column is read",
            (_C, _c2, _x2, _W, _e, _b),
            lambda C, x, W, e, b: floordiv(x, b) >= cov.first_retained_column(C, W, e, b),
            (
                _LATER,
                Hypothesis("x >= c - e - W + 1", lambda c, x, W, e: x >= c - e - W + 1),
            ),
            lambda C, x, W, e, b: (lemmas.ordered(cov.skipped_tokens(C, W, e), x, b),),
        ),
        Claim(
            "no more could be freed: the first retained column holds a token that is read at C",
            (_C, _W, _e, _b),
            lambda C, W, e, b: both(
                cov.skipped_tokens(C, W, e) == max(C - e - W + 1, 0),
                cov.first_retained_column(C, W, e, b) * b <= max(C - e - W + 1, 0),
                cov.first_retained_column(C, W, e, b) * b + b > max(C - e - W + 1, 0),
            ),
        ),
        Claim(
            "chunked-local attention: no freed column is read",
            (_C, _c2, _x2, _A, _b),
            lambda C, x, A, b: floordiv(x, b) >= floordiv(cov.skipped_tokens_chunked(C, A), b),
            (
                _LATER,
                Hypothesis("x is in the attention chunk of token c", lambda c, x, A: x >= floordiv(c, A) * A),
            ),
            lambda C, c, x, A, b: (
                *_pairs(A, floordiv(C, A), floordiv(c, A)),
                lemmas.ordered(cov.skipped_tokens_chunked(C, A), x, b),
            ),
        ),
        Claim(
            "chunked-local attention: no more could be freed",
            (_C, _A),
            lambda C, A: both(
                cov.skipped_tokens_chunked(C, A) <= C,
                cov.skipped_tokens_chunked(C, A) > C - A,
                floormod(cov.skipped_tokens_chunked(C, A), A) == 0,
            ),
            (),
            lambda C, A: (lemmas.scaled(0, floordiv(C, A), A),),
        ),
        Claim(
            "local hit: the window is held",
            (_g, _W, _b),
            lambda g, W, b: both(
                cov.first_retained_column(g * b, W, 0, b) >= max(g - cov.local_need_blocks(W, b), 0),
                cov.local_need_blocks(W, b) * b < W - 1 + b,
            ),
            (),
            lambda g, W, b: _pairs(
                b, cov.first_retained_column(g * b, W, 0, b), g - cov.local_need_blocks(W, b)
            ),
        ),
        Claim(
            "local hit: everything retained at h is held iff",
            (_g, _W, _e, _b),
            lambda g, W, e, b: iff(
                cov.first_retained_column(g * b, W, e, b) >= g - cov.local_need_blocks(W, b),
                either(W - 1 + e <= b * cov.local_need_blocks(W, b), g <= cov.local_need_blocks(W, b)),
            ),
            (),
            lambda g, W, e, b: _pairs(
                b, cov.first_retained_column(g * b, W, e, b), g - cov.local_need_blocks(W, b), 0
            ),
        ),
    ),
    (
        Refutation(
            "freeing at c tokens while K of them are drafts still in flight",
            "hypothetical",
            Claim(
                "freed at c + K, read at c",
                (_c2, Symbol("K", 1, "drafts"), _W, _e, _b),
                lambda c, K, W, e, b: floordiv(c - e - W + 1, b) >= cov.first_retained_column(c + K, W, e, b),
                (Hypothesis("c >= e + W - 1", lambda c, W, e: c >= e + W - 1),),
            ),
            {"c": 62, "K": 3, "W": 32, "e": 0, "b": 16},
            lambda c, K, W, e, b: (
                f"{c} verified tokens and {K} drafts, block {b}, window {W}, extra {e}: frees "
                f"{cov.first_retained_column(c + K, W, e, b)} columns, and after rejection reads column "
                f"{(c - e - W + 1) // b}"
            ),
            ("b",),
        ),
        Refutation(
            "a local hit holds the extra tokens too",
            "hypothetical",
            Claim(
                "local hit: the extra tokens are held",
                (_g, _W, _e, _b),
                lambda g, W, e, b: (
                    cov.first_retained_column(g * b, W, e, b) >= g - cov.local_need_blocks(W, b)
                ),
            ),
            {"g": 4, "W": 32, "e": 3, "b": 16},
            lambda g, W, e, b: (
                f"local hit {g * b}, block {b}, window {W}, extra {e}: retention names column "
                f"{cov.first_retained_column(g * b, W, e, b)}, the hit holds columns from "
                f"{g - cov.local_need_blocks(W, b)}"
            ),
            ("b",),
        ),
    ),
    (),
    ("The unheld column is not read after a local hit: the first re-prefill starts at h or later.",),
)

# 9 ----------------------------------------------------------------------------------------------------------


def _span_hints(s: int, T: int, b: int) -> tuple[LemmaUse, ...]:
    return _pairs(
        b,
        cdiv(s + T, b),
        floordiv(s, b) + floordiv(T - 1, b) + 1,
        floordiv(s, b) + floordiv(T - 1, b) + 2,
    ) + _pairs(b, cdiv(T, b), floordiv(T - 1, b) + 1, cdiv(T - 1, b), floordiv(T - 1, b))


_span = Theorem(
    9,
    "span of an unaligned range",
    "coverage",
    "T tokens from any start s touch at least cdiv(T,b) blocks, attained iff s mod b + (T-1) mod b < b, "
    "and at most cdiv(T-1,b) + 1, attained iff s mod b + (T-1) mod b >= b or b | T - 1.",
    (
        Claim(
            "least and greatest",
            (_s, _T, _b),
            lambda s, T, b: both(
                cov.span_blocks(s, T, b) >= cov.blocks_of(T, b),
                cov.span_blocks(s, T, b) <= cov.span_bound(T, b),
            ),
            (),
            lambda s, T, b: _span_hints(s, T, b),
        ),
        Claim(
            "when the least is attained",
            (_s, _T, _b),
            lambda s, T, b: iff(
                cov.span_blocks(s, T, b) == cov.blocks_of(T, b), floormod(s, b) + floormod(T - 1, b) < b
            ),
            (),
            lambda s, T, b: _span_hints(s, T, b),
        ),
        Claim(
            "when the greatest is attained",
            (_s, _T, _b),
            lambda s, T, b: iff(
                cov.span_blocks(s, T, b) == cov.span_bound(T, b),
                either(floormod(s, b) + floormod(T - 1, b) >= b, floormod(T - 1, b) == 0),
            ),
            (),
            lambda s, T, b: _span_hints(s, T, b),
        ),
        Claim(
            "the blocks of a span are those of its tokens",
            (_s, _T, _b, Symbol("x", 0, "a token of the range")),
            lambda s, T, b, x: both(
                floordiv(x, b) >= floordiv(s, b), floordiv(x, b) < floordiv(s, b) + cov.span_blocks(s, T, b)
            ),
            (Hypothesis("s <= x < s + T", lambda s, T, x: both(x >= s, x < s + T)),),
            lambda s, T, b, x: _pairs(b, floordiv(x, b), floordiv(s, b), cdiv(s + T, b)),
        ),
    ),
    (
        Refutation(
            "the bound without the + 1",
            "hypothetical",
            Claim(
                "at most cdiv(T,b) blocks",
                (_s, _T, _b),
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

# 10 ---------------------------------------------------------------------------------------------------------


def _first_chunk(h: int, W: int, e: int, b: int, k: int) -> int:
    return cov.demand_first_chunk_window(h, 0, W, e, b, k)


def _padded(h: int, W: int, e: int, t: int) -> int:
    return cdiv(W - 1 + e + floormod(-h, t), t)


_cost = Theorem(
    10,
    "cost of the extra tokens",
    "coverage",
    "e extra tokens cost a load at a hit with history enough between e//t and cdiv(e,t) chunks, the "
    "lookup window at most cdiv(e,t), and the store between e//b and cdiv(e,b) blocks a segment. A load "
    "asks for at most base*k + 1 blocks.",
    (
        Claim(
            "loaded chunks",
            (_h, _W, _e, _b, _k),
            lambda h, W, e, b, k: both(
                _first_chunk(h, W, 0, b, k) - _first_chunk(h, W, e, b, k) >= floordiv(e, b * k),
                _first_chunk(h, W, 0, b, k) - _first_chunk(h, W, e, b, k) <= cdiv(e, b * k),
            ),
            (Hypothesis("h >= W - 1 + e", lambda h, W, e: h >= W - 1 + e),),
            lambda h, W, e, b, k: (
                lemmas.nested(cov.skipped_tokens(h, W, 0), b, k),
                lemmas.nested(cov.skipped_tokens(h, W, e), b, k),
                *_pairs(
                    b * k,
                    floordiv(cov.skipped_tokens(h, W, 0), b * k),
                    floordiv(cov.skipped_tokens(h, W, e), b * k) + floordiv(e, b * k),
                ),
                *_pairs(
                    b * k,
                    floordiv(cov.skipped_tokens(h, W, 0), b * k),
                    floordiv(cov.skipped_tokens(h, W, e), b * k) + cdiv(e, b * k),
                ),
            ),
        ),
        Claim(
            "looked up chunks",
            (_h, _W, _e, _t),
            lambda h, W, e, t: both(
                cov.lookup_window_chunks(h, W, e, t) >= cov.lookup_window_chunks(h, W, 0, t),
                cov.lookup_window_chunks(h, W, e, t) - cov.lookup_window_chunks(h, W, 0, t) <= cdiv(e, t),
            ),
            (),
            lambda h, W, e, t: (
                lemmas.monotone(_padded(h, W, 0, t) + cdiv(e, t), _padded(h, W, e, t), t),
                lemmas.monotone(cdiv(W, t) + cdiv(e, t), cdiv(W - 1 + e, t), t),
                lemmas.monotone(_padded(h, W, e, t), _padded(h, W, 0, t), t),
                lemmas.monotone(cdiv(W, t), _padded(h, W, 0, t), t),
                lemmas.monotone(_padded(h, W, 0, t), cdiv(W, t), t),
                lemmas.monotone(cdiv(W - 1 + e, t), cdiv(W - 1, t), t),
            ),
        ),
        Claim(
            "stored blocks a segment",
            (_W, _e, _b, _d),
            lambda W, e, b, d: both(
                cov.store_need_blocks(W, e, b, d) - cov.store_need_blocks(W, 0, b, d) >= floordiv(e, b),
                cov.store_need_blocks(W, e, b, d) - cov.store_need_blocks(W, 0, b, d) <= cdiv(e, b),
            ),
            (),
            lambda W, e, b: (
                lemmas.monotone(cdiv(W - 1 + e, b), cdiv(W - 1, b) + floordiv(e, b), b),
                lemmas.monotone(cdiv(W - 1, b) + cdiv(e, b), cdiv(W - 1 + e, b), b),
            ),
        ),
        Claim(
            "the corrected mask keeps at most one block more a segment",
            (_W, _e, _b, _d),
            lambda W, e, b, d: both(
                cov.store_need_blocks_corrected(W, e, b, d) - cov.store_need_blocks(W, e, b, d)
                == (1 if floormod(W + e - 1, b) == 0 else 0),
                cov.store_need_blocks_v0_30(W, b, d) == cov.store_need_blocks(W, 0, b, d),
            ),
            (),
            lambda W, e, b: _pairs(
                b, floordiv(W + e - 1, b), floordiv(W + e - 1, b) + 1, cdiv(W + e - 1, b), cdiv(W + e, b)
            ),
        ),
        Claim(
            "a load asks for at most base*k + 1 blocks (upstream asserts it)",
            (_h, _p, _W, _e, _b, _k),
            lambda h, p, W, e, b, k: (
                cdiv(h, b) - cov.demand_first_column(h, p, W, e, b)
                <= cov.pending_blocks_bound(cov.base_window_chunks(W, e, b * k), k)
            ),
            (),
            lambda h, p, W, e, b, k: (
                lemmas.monotone(
                    cov.first_retained_column(h, W, e, b) + cov.base_window_chunks(W, e, b * k) * k + 1,
                    cdiv(h, b),
                    b,
                ),
            ),
        ),
        Claim(
            "that bound is attained, at base = 1, k = 1",
            (_b,),
            lambda b: (
                cdiv(3 * b + 1, b) - cov.demand_first_column(3 * b + 1, 0, b, 0, b)
                == cov.pending_blocks_bound(cov.base_window_chunks(b, 0, b), 1)
            ),
            (Hypothesis("b >= 3", lambda b: b >= 3),),
            lambda b: _pairs(
                b,
                cdiv(3 * b + 1, b),
                4,
                cov.first_retained_column(3 * b + 1, b, 0, b),
                2,
                cdiv(b, b),
                1,
                cdiv(b - 1, b),
            ),
        ),
    ),
    (
        Refutation(
            "each extra token is one more block to load",
            "hypothetical",
            Claim(
                "extra tokens always cost",
                (_h, _W, _e, _b, _k),
                lambda h, W, e, b, k: (
                    _first_chunk(h, W, 0, b, k) - _first_chunk(h, W, e, b, k) >= cdiv(e, b * k)
                ),
                (Hypothesis("h >= W - 1 + e", lambda h, W, e: h >= W - 1 + e),),
            ),
            {"h": 64, "W": 32, "e": 1, "b": 16, "k": 1},
            lambda h, W, e, b, k: (
                f"hit {h}, chunk {b * k}, window {W}: {e} extra token costs "
                f"{_first_chunk(h, W, 0, b, k) - _first_chunk(h, W, e, b, k)} chunks"
            ),
            ("b", "k"),
        ),
        Refutation(
            "a load asks for at most base*k blocks",
            "hypothetical",
            Claim(
                "at most base*k blocks",
                (_h, _W, _e, _b, _k),
                lambda h, W, e, b, k: (
                    cdiv(h, b) - cov.demand_first_column(h, 0, W, e, b)
                    <= cov.base_window_chunks(W, e, b * k) * k
                ),
            ),
            {"h": 49, "W": 16, "e": 0, "b": 16, "k": 1},
            lambda h, W, e, b, k: (
                f"hit {h}, block {b}, chunk {b * k}, window {W}, extra {e}: "
                f"{cdiv(h, b) - cov.demand_first_column(h, 0, W, e, b)} blocks, base "
                f"{cov.base_window_chunks(W, e, b * k)}"
            ),
            ("b", "k"),
        ),
    ),
)

THEOREMS: tuple[Theorem, ...] = (
    _division,
    _coverage,
    _blocks,
    _base,
    _in_flight,
    _agreement,
    _tail,
    _common,
    _freeing,
    _span,
    _cost,
)
