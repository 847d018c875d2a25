"""Theorems 0 to 10: division, and coverage of what a hit demands by what was checked and what was stored.

Names, as in the statements: n prompt or known tokens, h hit, p local prefix, W window, e extra retained tokens, b block,
k blocks a chunk, t = b*k tokens a chunk, F full-attention chunk = f*b, M Mamba chunk, A attention chunk of chunked-local
attention, j a chunk, i a column.  All are integers of any size; none is bounded above.
"""

from collections.abc import Callable
from dataclasses import replace

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove import lemmas
from spec.prove.symbolic import Int, Truth, both, either, iff, implies, negation
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


def _pairs(c: Int, *values: Int) -> tuple[LemmaUse, ...]:
    """The order and equality of each two values, carried over to their products with c."""
    uses = []
    for index, u in enumerate(values):
        for v in values[index + 1 :]:
            uses += [lemmas.monotone(u, v, c), lemmas.monotone(v, u, c), lemmas.congruent(u, v, c)]
    return tuple(uses)


# 0 ----------------------------------------------------------------------------------------------------------------

_division = Theorem(
    0,
    "division",
    "coverage",
    "floordiv, floormod, cdiv and round_down are Euclid's for every integer x, negative ones too; chunks and blocks "
    "count what they say.",
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
            lambda x, c: f"{x} by {c}: truncation leaves the remainder {x - -(-x // c) * c}, floor leaves {x % c}",
            ("c",),
        ),
    ),
)

# 1 ----------------------------------------------------------------------------------------------------------------

_SCAN = Contract(
    "right-to-left scan",
    "a windowed group is admitted at h only if the chunks from first_checked_chunk(h, ...) to the chunk of the last hit "
    "token were all found present",
)
_PREFIX = Contract("prefix scan", "a full-attention group is admitted at h only if every chunk of its slice was present")

_HIT = Hypothesis("p < h", lambda p, h: p < h)


def _end(h: Int, b: Int, k: Int) -> Int:
    return cov.demand_end_chunk(h, cov.chunk_tokens(b, k))


_DEMANDED_FULL = Hypothesis(
    "the load names chunk j of a full-attention group, from p//t on",
    lambda h, p, b, k, j: both(j >= floordiv(p, b * k), j < _end(h, b, k)),
)
_DEMANDED_WINDOW = Hypothesis(
    "the load names chunk j of a sliding-window group",
    lambda h, p, W, e, b, k, j: both(
        j >= cov.demand_first_chunk_window(h, p, W, e, b, k), j < _end(h, b, k)
    ),
)
_DEMANDED_CHUNKED = Hypothesis(
    "the load names chunk j of a chunked-local group",
    lambda h, p, A, b, k, j: both(
        j >= cov.demand_first_chunk_chunked(h, p, A, b, k), j < _end(h, b, k)
    ),
)


def _window_hints(h: Int, p: Int, W: Int, e: Int, b: Int, k: Int) -> tuple[LemmaUse, ...]:
    t = b * k
    retained = cov.first_retained_column(h, W, e, b)
    start = cdiv(h, t) - cov.lookup_window_chunks(h, W, e, t)
    return (
        lemmas.nested(cov.skipped_tokens(h, W, e), b, k),
        lemmas.covering(p, b, k),
        lemmas.ordered(retained, cov.first_fresh_column(p, b), k),
        lemmas.monotone(floordiv(retained, k), start, t),
    )


def _chunked_hints(h: Int, p: Int, A: Int, b: Int, k: Int) -> tuple[LemmaUse, ...]:
    t = b * k
    skipped = cov.skipped_tokens_chunked(h, A)
    return (
        lemmas.nested(skipped, b, k),
        lemmas.covering(p, b, k),
        lemmas.ordered(floordiv(skipped, b), cov.first_fresh_column(p, b), k),
        lemmas.monotone(floordiv(skipped, t), cdiv(h, t) - cov.chunked_window_chunks(A, t), t),
    )


def _window_coverage(name: str, first: Callable[[Int, Int, Int, Int, Int], Int]) -> Claim:
    return Claim(
        name,
        (_h, _p, _W, _e, _b, _k, _j),
        lambda h, p, W, e, b, k, j: both(j >= first(h, p, W, e, b * k), j < cdiv(h, b * k)),
        (_HIT, _DEMANDED_WINDOW),
        _window_hints,
    )


def _first_v0_30(h: Int, p: Int, W: Int, e: Int, t: Int) -> Int:
    return cov.first_checked_chunk(h, p, cov.lookup_window_chunks_v0_30(h, W, t), t)


def _tell_v0_30(h: int, p: int, W: int, e: int, b: int, k: int, j: int) -> str:
    t, end = b * k, cdiv(h, b * k)
    first = cov.demand_first_chunk_window(h, p, W, e, b, k)
    looked = _first_v0_30(h, p, W, e, t)  # type: ignore[arg-type]
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
    "Every chunk that a load of h tokens over a local prefix p names was found present by lookup: full attention all "
    "of [p//t, cdiv(h,t)); sliding window from the first retained column, never below the first fresh one; Mamba the "
    "last; chunked-local when t divides A or A divides t. h aligned or not, any b, k >= 1.",
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
            lambda h, p, m, b, k, j: j
            >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(m * b * k, b * k), b * k),
            (
                _HIT,
                Hypothesis(
                    "A = m*t and the load names chunk j of a chunked-local group",
                    lambda h, p, m, b, k, j: both(
                        j >= cov.demand_first_chunk_chunked(h, p, m * b * k, b, k), j < _end(h, b, k)
                    ),
                ),
            ),
            lambda h, p, m, b, k: _chunked_hints(h, p, m * b * k, b, k)
            + (
                lemmas.scaled(0, floordiv(h, m * b * k) * m, b * k),
                lemmas.scaled(0, -m, b * k),
                lemmas.monotone((floordiv(h, m * b * k) + 1) * m, cdiv(h, b * k), b * k),
            ),
        ),
        Claim(
            "chunked-local attention, A divides t",
            (_h, _p, _A, _m, _b, _k, _j),
            lambda h, p, A, b, k, j: j
            >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(A, b * k), b * k),
            (
                Hypothesis("t = m*A", lambda A, m, b, k: b * k == m * A),
                _HIT,
                _DEMANDED_CHUNKED,
            ),
            lambda h, p, A, m, b, k: _chunked_hints(h, p, A, b, k)
            + (
                lemmas.congruent(b * k, m * A, cdiv(h, b * k)),
                lemmas.monotone(floordiv(h, A), (cdiv(h, b * k) - 1) * m, A),
                lemmas.nonnegative(floordiv(h, A) - (cdiv(h, b * k) - 1) * m, A),
                lemmas.monotone(floordiv(cov.skipped_tokens_chunked(h, A), b * k), cdiv(h, b * k) - 1, b * k),
                lemmas.nonnegative(m - 1, A),
                lemmas.monotone(floordiv(-A, b * k), -1, b * k),
            ),
        ),
        Claim(
            "chunked-local attention, exact: every hit in the attention chunk from s = m*A is covered if "
            "s mod t + A - 1 <= t*cdiv(A,t)",
            (_h, _m, _A, _t),
            lambda h, m, A, t: floordiv(cov.skipped_tokens_chunked(h, A), t)
            >= cdiv(h, t) - cov.chunked_window_chunks(A, t),
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
                lambda h, p, A, b, k, j: j
                >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(A, b * k), b * k),
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
    "a chunk is stored only if its last block is present, the mask keeps one of its blocks, and every block of it that "
    "the mask keeps is present; without a mask, every block of it",
)


def _hit_aligned(m: Int, f: Int, b: Int) -> Int:
    return m * f * b


def _segment_hints(i: Int, m: Int, f: Int) -> tuple[LemmaUse, ...]:
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


def _read_columns(last_hit: Callable[..., Int]) -> Hypothesis:
    return Hypothesis(
        "a reader at hit h may read column i: demand_first_column <= i < cdiv(h, b)",
        lambda m, f, b, p, W, e, i: both(
            i >= cov.demand_first_column(last_hit(m, f, b), p, W, e, b), i < cdiv(last_hit(m, f, b), b)
        ),
    )


Need = Callable[[Int, Int, Int, int], Int]


def _need_v0_30(W: Int, e: Int, b: Int, d: int) -> Int:
    return cov.store_need_blocks_v0_30(W, b, d)


def _kept(need: Need, d: int) -> Callable[..., Truth]:
    def kept(f: Int, b: Int, W: Int, e: Int, i: Int) -> Truth:
        blocks = need(W, e, b, d)
        return either(cov.store_keeps_all(blocks, f), cov.store_keeps_block(i, blocks, f, d))

    return kept


def _first_kept(start: Int, need: Int, f: Int, d: Int) -> Int:
    """The first column from `start` on that the mask keeps."""
    first = max(start, d)
    return first + max(0, f - need - floormod(first - d, f))


def _chunk_mask_hints(start: Int, i: Int, f: Int, d: Int) -> tuple[LemmaUse, ...]:
    first = floordiv(max(start, d) - d, f)
    q = floordiv(i - d, f)
    return (
        lemmas.monotone(first, q, f),
        lemmas.monotone(q, first, f),
        lemmas.congruent(first, q, f),
    )


def _blocks_claim(name: str, need: Need, d: int, before_end: int = 0) -> Claim:
    """Readable columns at hit m*F (before_end 0) or m*F - 1 (before_end 1) are kept by the mask."""

    def hit(m: Int, f: Int, b: Int) -> Int:
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
        blocks = int(need(W, e, b, 0))  # type: ignore[arg-type]
        return (
            f"hit {hit}, full-attention chunk {f * b}, block {b}, window {W}, extra {e}: reads blocks {first} to "
            f"{m * f - 1}, {formula} keeps {blocks} of {f} a segment, {m * f - blocks} to {m * f - 1}; block {i} may be "
            "unwritten"
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
    "At a hit that is a multiple of F, every block that a reader may read is one that the mask keeps, so it was written "
    "by any store that wrote its chunk, whatever holes the chunk has; k >= 1, any local prefix, windows that begin "
    "mid-chunk. At h = n - 1 with F | n it holds iff b does not divide W + e - 1 or the mask keeps all; with one token "
    "more in the mask, always.",
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
                Hypothesis("chunk j is named", lambda j, k, f, need, d: cov.store_keeps_chunk(j, k, need, f, d)),
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
        "0.33.0 at h = n - 1, F | n, b | W + e - 1, b*k not dividing W + e - 1: the hit is admitted, since the store "
        "names the chunk for its other blocks, and its first readable block may be a hole.",
    ),
)

# 3 ----------------------------------------------------------------------------------------------------------

_base = Theorem(
    3,
    "base window",
    "coverage",
    "One more extra token costs the base window 0 or 1 chunk: 1 exactly when e >= 1 and t | W - 1 + e. For e >= 1 the "
    "base equals the demand at every h that is a multiple of t with history enough; at e = 0 it exceeds the demand by "
    "one chunk when t | W - 1, else by none.",
    (
        Claim(
            "one more extra token",
            (_W, _e, _t),
            lambda W, e, t: cov.base_window_chunks(W, e + 1, t) - cov.base_window_chunks(W, e, t)
            == (1 if e >= 1 and floormod(W - 1 + e, t) == 0 else 0),
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
            lambda m, W, e, b, k: cov.base_window_chunks(W, e, b * k)
            - (_end(m * b * k, b, k) - cov.demand_first_chunk_window(m * b * k, 0, W, e, b, k))
            == (1 if e == 0 and floormod(W - 1, b * k) == 0 else 0),
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
                lambda m, W, e, b, k: cov.base_window_chunks_v0_30(W, b * k)
                >= _end(m * b * k, b, k) - cov.demand_first_chunk_window(m * b * k, 0, W, e, b, k),
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
                f"chunk {t}, window {W}: base {cov.base_window_chunks(W, e, t)} with {e} extra tokens and with {e + 1}"
            ),
            ("t",),
        ),
        Refutation(
            "0.33.0: the base equals the demand, also at e = 0",
            "historic",
            Claim(
                "base equals demand at e = 0",
                (_m, _W, _b, _k),
                lambda m, W, b, k: cov.base_window_chunks(W, 0, b * k)
                == _end(m * b * k, b, k) - cov.demand_first_chunk_window(m * b * k, 0, W, 0, b, k),
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


def _in_flight_v0_30(h: Int, p: Int, W: Int, e: Int, t: Int) -> Int:
    return max(floordiv(p, t), cdiv(h, t) - cov.lookup_window_chunks_v0_30(h, W, t))


_in_flight = Theorem(
    4,
    "in-flight loads",
    "coverage",
    "The chunks compared with those being loaded include every chunk that the load names, so no load reads a chunk that "
    "another is still bringing in, unnoticed.",
    (
        _window_coverage("sliding window, in-flight check", cov.in_flight_first_chunk),
        Claim(
            "the check looks at no chunk that lookup did not",
            (_h, _p, _W, _e, _t),
            lambda h, p, W, e, t: cov.in_flight_first_chunk(h, p, W, e, t) >= cov.lookup_first_chunk(h, p, W, e, t),
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
                f"{chunks_text(cov.demand_first_chunk_window(h, p, W, e, b, k), cdiv(h, b * k))}, 0.30.0 compared "
                f"{chunks_text(int(_in_flight_v0_30(h, p, W, e, b * k)), cdiv(h, b * k))}; chunk {j} may be in flight"
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


def _stored(j: Int, n: Int, b: Int, k: Int, f: Int, need: Int, d: int) -> Truth:
    """Chunk j was stored by a prompt of n tokens: kept by the mask, and whole."""
    kept = either(cov.store_keeps_all(need, f), cov.store_keeps_chunk(j, k, need, f, d))
    return both(kept, (j + 1) * cov.chunk_tokens(b, k) <= n)


def _window_at(h: Int, W: Int, e: Int, t: Int) -> Int:
    return cov.first_checked_chunk(h, 0, cov.lookup_window_chunks(h, W, e, t), t)


def _aligned_condition(need: Need, d: int) -> Hypothesis:
    return Hypothesis(
        "e >= 1, or t does not divide W - 1, or t does not divide h, or fewer than k blocks a segment go unkept",
        lambda m, f, b, k, W, e: either(
            e >= 1,
            floormod(W - 1, b * k) != 0,
            floormod(m * f * b, b * k) != 0,
            f - need(W, e, b, d) < k,
        ),
    )


def _window_pairs(h: Int, W: Int, e: Int, t: Int, *values: Int) -> tuple[LemmaUse, ...]:
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
    """Every chunk that lookup asks for at h = m*F, and the one past it, was stored, in a group with drop; F = r*t."""
    return Claim(
        name,
        (_m, _r, _b, _k, _W, _e, _n, _j),
        lambda m, r, b, k, W, e, n, j: _stored(j, n, b, k, r * k, need(W, e, b, 1), 1),
        (
            Hypothesis("h + t <= n", lambda m, r, b, k, n: m * r * k * b + b * k <= n),
            *(
                (
                    Hypothesis(
                        "e >= 1, or t does not divide W - 1, or fewer than k blocks a segment go unkept (none or fewer "
                        "than k - 1 if m = 1)",
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
    """The first chunk that lookup asks for at h = m*F in a group with drop was not stored; e = 0, W = w*t + 1."""
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
        first, end = _window_at(h, W, e, t), cdiv(h, t)  # type: ignore[arg-type]
        need = cov.store_need_blocks(W, e, b, 0)
        return (
            f"hit {h}, full-attention chunk {f * b}, chunk {t}, window {W}, extra {e}: lookup asks for "
            f"{chunks_text(int(first), end)}, {release} keeps {need} blocks of {f} a segment; chunk {j} is never stored"
        )

    if before_end:
        return lambda g, m, f, b, k, W, e, j: tell(g * k * b - 1, f, b, k, W, e, j)
    return lambda m, f, b, k, W, e, n, j: tell(m * f * b, f, b, k, W, e, j)


_agreement = Theorem(
    5,
    "store and lookup agree",
    "coverage",
    "After a whole prompt of n tokens was stored under the mask and nothing was evicted, a hit h that the drop rule "
    "allows is found, for multiples of F iff cdiv(h,t)*t <= n (h + t <= n in a group that drops) and not (e = 0, t | W "
    "- 1, t | h, at least k blocks a segment unkept; with drop, k - 1 of them in the first segment); for h = n - 1, F | n, t | n, t >= 2 iff not (t | W + e - 1, at least "
    "k blocks a segment unkept). With a Mamba chunk that is a multiple of F only the first case arises. A mask of "
    "cdiv(W + e, b) blocks loses nothing.",
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
            "the largest hit that full attention allows: n - 1 if F | n, else the last multiple of F; with its drop, "
            "F less than the last multiple",
            (_n, _F, _d),
            lambda n, F, d: cov.shrink_hit(
                cov.lookup_candidate(n, 1), cov.tail_drop(cov.full_chunks_of(n, F), d), F
            )
            == (n - 1 if d == 0 and floormod(n, F) == 0 else round_down(n, F) - d * F),
            (Hypothesis("d <= 1", lambda d: d <= 1),),
            lambda d, n, F: (*_pairs(F, d, 0, 1), *_pairs(F, floordiv(n, F), d)),
        ),
        Claim(
            "with a Mamba chunk M = g*F: the candidate is the last multiple of M below n, a multiple of F that full "
            "attention does not shrink",
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
        _found_dropping("h = m*F, group with drop, corrected mask: found", cov.store_need_blocks_corrected, False),
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
        "Where h = n - 1 is lost, lookup falls back to the next multiple of F: an identical prompt of length n = m*F "
        "reuses m*F - F tokens instead of n - 1.",
    ),
)

THEOREMS: tuple[Theorem, ...] = (_division, _coverage, _blocks, _base, _in_flight, _agreement)
