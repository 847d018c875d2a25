"""Theorems 2 and 5: the mask under which a prompt is stored, against what hits read and lookup asks for."""

from collections.abc import Callable
from dataclasses import replace

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove import lemmas
from spec.prove import vocabulary as v
from spec.prove.symbolic import Truth, both, either, iff, implies, negation
from spec.prove.theorem import Claim, Contract, Hypothesis, LemmaUse, Refutation, Symbol, Theorem

_PROMPT_FULL = v.meant(v.m, "full-attention chunks in the prompt")
_PROMPT_CHUNKS = v.meant(v.g, "chunks in the prompt")

# 2 ---------------------------------------------------------------------------------------------------------

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
        (_PROMPT_FULL if before_end else v.m, v.f, v.b, v.p, v.W, v.e, v.i),
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
        "n > F, k >= 2 and the store names chunk i//k",
        lambda m, f, b, W, e, i, k: both(
            m >= 2, k >= 2, cov.store_keeps_chunk(floordiv(i, k), k, cov.store_need_blocks(W, e, b, 0), f, 0)
        ),
    )
    return replace(
        plain,
        symbols=(_PROMPT_FULL, v.f, v.b, v.k, v.p, v.W, v.e, v.i),
        hypotheses=(*plain.hypotheses, named),
    )


def _between_claim() -> Claim:
    """Readable columns at a hit h = g*t in a group with drop are kept, whatever h is modulo F = f*b."""
    return Claim(
        "hit g*t, group with drop, mask of release 0.33.0",
        (v.g, v.f, v.b, v.k, v.W, v.e, v.i),
        lambda f, b, W, e, i: _kept(cov.store_need_blocks, 1)(f, b, W, e, i),
        (
            Hypothesis(
                "column i is readable at g*t",
                lambda g, b, k, W, e, i: both(i >= cov.first_retained_column(g * k * b, W, e, b), i < g * k),
            ),
            Hypothesis(
                "k >= 2, t | F, and the store names chunks g, past the hit, and i//k",
                lambda g, f, b, k, W, e, i: both(
                    k >= 2,
                    floormod(f, k) == 0,
                    cov.store_keeps_chunk(g, k, cov.store_need_blocks(W, e, b, 1), f, 1),
                    cov.store_keeps_chunk(floordiv(i, k), k, cov.store_need_blocks(W, e, b, 1), f, 1),
                ),
            ),
        ),
    )


def _tell_between(g: int, f: int, b: int, k: int, W: int, e: int, i: int) -> str:
    hit, need = g * k * b, cov.store_need_blocks(W, e, b, 1)
    first = cov.first_retained_column(hit, W, e, b)
    return (
        f"hit {hit}, full-attention chunk {f * b}, block {b}, chunk {b * k}, window {W}, extra {e}, drop: "
        f"reads blocks {first} to {g * k - 1}, 0.33.0 keeps {need} blocks around each multiple of {f * b}; "
        f"block {i} may be a hole in chunk {i // k}, which the store names"
    )


def _tell_hole(m: int, f: int, b: int, k: int, p: int, W: int, e: int, i: int) -> str:
    chunk = i // k
    return (
        _tell_blocks(cov.store_need_blocks, 1, "0.33.0")(m, f, b, p, W, e, i)
        + f", a hole in chunk {chunk} (blocks {chunk * k} to {chunk * k + k - 1}), which the store names"
    )


BLOCK_COVERAGE = Theorem(
    2,
    "block coverage",
    "coverage",
    "Under dense retention, at a hit that is a multiple of F, every block that a reader may read is one that "
    "the mask keeps, so it was written by any store that wrote its chunk, whatever holes the chunk has; k >= "
    "1, any local prefix, windows that begin mid-chunk. At h = n - 1 with F | n it holds iff b does not "
    "divide W + e - 1 or the mask keeps all; with one token more in the mask, always.",
    (
        _blocks_claim("hit m*F, group without drop", cov.store_need_blocks, 0),
        _blocks_claim("hit m*F, group with drop", cov.store_need_blocks, 1),
        Claim(
            "hit m*F, group with drop: the block past the hit is kept",
            (v.m, v.f, v.b, v.W, v.e),
            lambda m, f, b, W, e: either(
                cov.store_keeps_all(cov.store_need_blocks(W, e, b, 1), f),
                cov.store_keeps_block(m * f, cov.store_need_blocks(W, e, b, 1), f, 1),
            ),
            (),
            lambda m, f: _segment_hints(m * f - 1, m, f),
        ),
        Claim(
            "hit n - 1, F | n: kept, but for the first readable block when b divides W + e - 1",
            (_PROMPT_FULL, v.f, v.b, v.W, v.e, v.i),
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
            (Symbol("E", 1, "columns of the prompt's whole chunks"), v.f, v.b, v.W, v.e, v.i),
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
            (Symbol("E", 1, "columns of the prompt's whole chunks"), v.f, v.b, v.W, v.e, v.i),
            lambda E, f, b, W, e, i: both(
                i < E,
                i >= E - cov.store_need_blocks(W, e, b, 0),
                i >= cov.first_retained_column(E * b, W, e, b),
                i >= E - floormod(E, f),
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
            (v.i, v.k, v.f, Symbol("need", 0, "blocks kept a segment"), Symbol("d", 0, "shift")),
            lambda i, k, f, need, d: cov.store_keeps_chunk(floordiv(i, k), k, need, f, d),
            (
                Hypothesis("need < f, d <= 1", lambda f, need, d: both(need < f, d <= 1)),
                Hypothesis("column i is kept", lambda i, f, need, d: cov.store_keeps_block(i, need, f, d)),
            ),
            lambda i, k, f, need, d: _chunk_mask_hints(floordiv(i, k) * k, i, f, d),
        ),
        Claim(
            "a chunk is named by the store only if a block of it is kept",
            (v.j, v.k, v.f, Symbol("need", 0, "blocks kept a segment"), Symbol("d", 0, "shift")),
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
            "0.30.0, dense retention: mask of cdiv(W-1,b) blocks, without the extra tokens, at h = m*F",
            "historic",
            _blocks_claim("hit m*F, mask of release 0.30.0", _need_v0_30, 0),
            {"m": 4, "f": 4, "b": 16, "p": 0, "W": 32, "e": 3, "i": 13},
            _tell_blocks(_need_v0_30, 0, "0.30.0"),
            ("f", "b"),
        ),
        Refutation(
            "0.33.0, dense retention: mask of cdiv(W+e-1,b) blocks, at h = n - 1 with F | n",
            "historic",
            _hole_claim(),
            {"m": 2, "f": 4, "b": 16, "k": 2, "p": 0, "W": 17, "e": 0, "i": 6},
            _tell_hole,
            ("f", "b", "k"),
        ),
        Refutation(
            "0.33.0, dense retention: hits that are multiples of t but not of F, in a group with drop",
            "historic",
            _between_claim(),
            {"g": 3, "f": 4, "b": 16, "k": 2, "W": 16, "e": 1, "i": 5},
            _tell_between,
            ("f", "b", "k"),
        ),
    ),
    (_STORE,),
    (
        v.DENSE,
        "Hits that are no multiple of F do occur without eviction: in a group with drop, lookup finds a "
        "run that ends inside a segment (the third formula refuted). Rounding such a hit down to F would "
        "restore the theorem; the corrected mask does not.",
        "0.33.0 at h = n - 1, F | n, b | W + e - 1, b*k not dividing W + e - 1: the hit is admitted, "
        "since the store names the chunk for its other blocks, and its first readable block may be a "
        "hole.",
    ),
)

# 5 ---------------------------------------------------------------------------------------------------------

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
        "e >= 1, or W >= 2 and: t does not divide W - 1, or t does not divide h, or fewer than k blocks a "
        "segment go unkept",
        lambda m, f, b, k, W, e: either(
            e >= 1,
            both(
                W >= 2,
                either(
                    floormod(W - 1, b * k) != 0,
                    floormod(m * f * b, b * k) != 0,
                    f - need(W, e, b, d) < k,
                ),
            ),
        ),
    )


def _window_pairs(h: int, W: int, e: int, t: int, *values: int) -> tuple[LemmaUse, ...]:
    """The terms of the lookup window at h against each other and the given values."""
    padded = cdiv(W - 1 + e + floormod(-h, t), t)
    return v.pairs(t, cdiv(W, t), cdiv(W - 1 + e, t), padded, *values)


def _found_aligned(name: str, need: Need, condition: bool) -> Claim:
    """Every chunk that lookup asks for at h = m*F was stored, in a group without drop."""
    return Claim(
        name,
        (v.m, v.f, v.b, v.k, v.W, v.e, v.n, v.j),
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
            *v.pairs(f, floordiv(j * k, f), m - 1, m - 2),
            *v.pairs(b, m * f, j * k),
            *v.pairs(b, j * k + k, m * f - need(W, e, b, 0)),
            lemmas.nonnegative(j, k),
            *_window_pairs(m * f * b, W, e, b * k, floordiv(W - 1, b * k)),
            *v.pairs(b * k, cdiv(m * f * b, b * k), floordiv(m * f * b, b * k)),
        ),
    )


def _found_last(name: str, need: Need, condition: bool) -> Claim:
    """Every chunk that lookup asks for at h = n - 1 was stored, for n = g*t a multiple of F = f*b."""
    conditions = (
        Hypothesis(
            "t does not divide W + e - 1, or W + e >= 2 and fewer than k blocks a segment go unkept",
            lambda f, b, k, W, e: either(
                floormod(W + e - 1, b * k) != 0, both(W + e >= 2, f - need(W, e, b, 0) < k)
            ),
        ),
    )
    return Claim(
        name,
        (_PROMPT_CHUNKS, _PROMPT_FULL, v.f, v.b, v.k, v.W, v.e, v.j),
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
            *v.pairs(f, floordiv(j * k, f), m - 1, m - 2),
            *v.pairs(b, m * f, j * k),
            *v.pairs(b, j * k + k, g * k - need(W, e, b, 0)),
            *v.pairs(k, j, g, g - 1),
            lemmas.nonnegative(j, k),
            lemmas.scaled(1, -g, b * k),
            *v.pairs(b * k, 0, floordiv(1, b * k)),
            *v.pairs(
                b * k,
                floordiv(W + e - 1, b * k),
                floordiv(W + e - 1, b * k) + 1,
                cdiv(W - 1 + e, b * k),
                cdiv(W + e, b * k),
                cdiv(W, b * k),
            ),
        ),
    )


def _worth(last: Claim) -> Claim:
    """The claim at h = n - 1 where that is worth loading."""
    worth = Hypothesis("n > F, n > t", lambda g, m: both(g >= 2, m >= 2))
    return replace(last, hypotheses=(worth, *last.hypotheses))


def _found_dropping(name: str, need: Need, condition: bool) -> Claim:
    """Every chunk that lookup asks for at h = g*t = m*F, and the one past it, was stored; group with drop."""
    conditions = (
        Hypothesis(
            "e >= 1, or t does not divide W - 1, or fewer than k blocks a segment go unkept (none, or fewer "
            "than k - 1, if m = 1)",
            lambda m, f, b, k, W, e: either(
                e >= 1,
                floormod(W - 1, b * k) != 0,
                cov.store_keeps_all(need(W, e, b, 1), f),
                both(m >= 2, f - need(W, e, b, 1) < k),
                f - need(W, e, b, 1) < k - 1,
            ),
        ),
    )
    return Claim(
        name,
        (v.g, v.m, v.f, v.b, v.k, v.W, v.e, v.n, v.j),
        lambda f, b, k, W, e, n, j: _stored(j, n, b, k, f, need(W, e, b, 1), 1),
        (
            Hypothesis("h = g*t = m*F", lambda g, m, f, k: g * k == m * f),
            Hypothesis("h + t <= n", lambda g, b, k, n: g * k * b + b * k <= n),
            *(conditions if condition else ()),
            Hypothesis(
                "lookup asks for chunk j at h, or chunk j is the one past it, for the drop",
                lambda g, b, k, W, e, j: both(
                    j >= _window_at(g * k * b, W, e, b * k), j <= cdiv(g * k * b, b * k)
                ),
            ),
        ),
        lambda g, m, f, b, k, W, e, j: (
            lemmas.scaled(0, -g, b * k),
            *v.pairs(f, floordiv(max(j * k, 1) - 1, f), m - 1, m - 2, m),
            *v.pairs(b, j * k + k, g * k - need(W, e, b, 1) + 1),
            *v.pairs(k, j, g, g - 1),
            lemmas.nonnegative(j, k),
            lemmas.nonnegative(m - 1, f),
            lemmas.nonnegative(g - j, b * k),
            *_window_pairs(g * k * b, W, e, b * k, floordiv(W - 1, b * k)),
        ),
    )


def _found_dropping_inside(name: str, need: Need) -> Claim:
    """As `_found_dropping` where h = m*F lies inside a chunk, for all chunks but the one past the hit."""
    return Claim(
        name,
        (v.m, v.f, v.b, v.k, v.W, v.e, v.n, v.j),
        lambda f, b, k, W, e, n, j: _stored(j, n, b, k, f, need(W, e, b, 1), 1),
        (
            Hypothesis("t does not divide h = m*F", lambda m, f, b, k: floormod(m * f * b, b * k) != 0),
            Hypothesis("cdiv(h,t)*t <= n", lambda m, f, b, k, n: cdiv(m * f * b, b * k) * b * k <= n),
            Hypothesis(
                "lookup asks for chunk j at h",
                lambda m, f, b, k, W, e, j: both(
                    j >= _window_at(m * f * b, W, e, b * k), j < cdiv(m * f * b, b * k)
                ),
            ),
        ),
        lambda m, f, b, k, W, e, j: (
            *v.pairs(f, floordiv(max(j * k, 1) - 1, f), m - 1, m - 2, m),
            *v.pairs(b, m * f, j * k),
            *v.pairs(b, j * k + k, m * f - need(W, e, b, 1) + 1),
            *v.pairs(b * k, cdiv(m * f * b, b * k), floordiv(m * f * b, b * k)),
            lemmas.nonnegative(j, k),
            lemmas.nonnegative(m - 1, f),
            *_window_pairs(m * f * b, W, e, b * k, floordiv(W - 1, b * k)),
        ),
    )


def _lost_dropping(name: str, gap: Hypothesis) -> Claim:
    """The first chunk that lookup asks for at h = g*t = m*F was not stored; drop, e = 0, W = w*t + 1."""
    return Claim(
        name,
        (v.g, v.m, v.f, v.b, v.k, v.w),
        lambda g, f, b, k, w: both(
            _window_at(g * k * b, w * b * k + 1, 0, b * k) == g - w - 1,
            negation(
                _stored(
                    g - w - 1,
                    g * k * b + b * k,
                    b,
                    k,
                    f,
                    cov.store_need_blocks(w * b * k + 1, 0, b, 1),
                    1,
                )
            ),
        ),
        (Hypothesis("h = g*t = m*F", lambda g, m, f, k: g * k == m * f), gap),
        lambda g, m, f, b, k, w: (
            lemmas.scaled(0, -w * k, b),
            lemmas.scaled(0, -g, b * k),
            *_window_pairs(g * k * b, w * b * k + 1, 0, b * k, w, w + 1),
            *v.pairs(f, floordiv(max((g - w - 1) * k, 1) - 1, f), m - 1),
            *v.pairs(f, m, 1),
            *v.pairs(k, g, w + 1, w + 2),
            lemmas.nonnegative(m - 1, f),
        ),
    )


def _tell_lost(release: str, before_end: int) -> Callable[..., str]:
    def tell(h: int, f: int, b: int, k: int, W: int, e: int, j: int) -> str:
        t = b * k
        first, end = _window_at(h, W, e, t), cdiv(h, t)
        need = cov.store_need_blocks(W, e, b, 0)
        return (
            f"hit {h}, full-attention chunk {f * b}, chunk {t}, window {W}, extra {e}: lookup asks for "
            f"{v.chunks_text(int(first), end)}, {release} keeps {need} blocks of {f} a segment; chunk {j} is "
            "never stored"
        )

    if before_end:
        return lambda g, m, f, b, k, W, e, j: tell(g * k * b - 1, f, b, k, W, e, j)
    return lambda m, f, b, k, W, e, n, j: tell(m * f * b, f, b, k, W, e, j)


AGREEMENT = Theorem(
    5,
    "store and lookup agree",
    "coverage",
    "After a whole prompt of n tokens was stored under the mask of dense retention and nothing was evicted, "
    "a hit h that the drop rule allows is found. Multiples of F, no drop: iff h >= t, cdiv(h,t)*t <= n, W + "
    "e >= 2, and not (e = 0, t | W - 1, t | h, at least k blocks a segment unkept). Multiples of F, with "
    "drop: iff h >= t, cdiv(h,t)*t + t <= n and, where t | h, not (e = 0, t | W - 1, and at least k blocks a "
    "segment unkept, or k - 1 >= 1 of them at h = F), and where t does not divide h, the mask names the "
    "chunk past the hit. h = n - 1, F | n, t | n, t >= 2: iff n > F, n > t, W + e >= 2 and not (t | W + "
    "e - 1, at least k blocks a segment unkept). With a Mamba chunk that is a multiple of F only "
    "multiples of F arise. A mask of cdiv(W + e, b) blocks loses nothing.",
    (
        _found_aligned("h = m*F: found if", cov.store_need_blocks, True),
        Claim(
            "h = m*F: found only if (the last chunk is whole)",
            (v.h, v.n, v.b, v.k, v.f),
            lambda h, n, b, k, f: negation(_stored(cdiv(h, b * k) - 1, n, b, k, f, f, 0)),
            (Hypothesis("cdiv(h,t)*t > n", lambda h, n, b, k: cdiv(h, b * k) * b * k > n),),
        ),
        Claim(
            "h = m*F: found only if (no gap): e = 0, W = w*t + 1, h = g*t, f - need >= k",
            (v.g, v.m, v.f, v.b, v.k, v.w),
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
                *v.pairs(f, floordiv((g - w - 1) * k, f), m - 1),
                lemmas.nonnegative(m - 1, f),
                *v.pairs(k, g, w + 1),
            ),
        ),
        Claim(
            "any h, no drop: found only if W + e >= 2, for the mask keeps nothing else",
            (v.j, v.n, v.b, v.k, v.f),
            lambda j, n, b, k, f: negation(_stored(j, n, b, k, f, cov.store_need_blocks(1, 0, b, 0), 0)),
        ),
        _found_last("h = n - 1: found if", cov.store_need_blocks, True),
        Claim(
            "h = n - 1: found only if: W = w*t + 1 - e, f - need >= k",
            (
                _PROMPT_CHUNKS,
                _PROMPT_FULL,
                v.f,
                v.b,
                v.k,
                v.e,
                v.meant(v.w, "whole chunks in the window and the extra tokens before the current token"),
            ),
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
                *v.pairs(b * k, floordiv(1, b * k), 0),
                *_window_pairs(g * k * b - 1, w * b * k + 1 - e, e, b * k, w, w + 1),
                *v.pairs(f, floordiv((g - w - 1) * k, f), m - 1),
                lemmas.nonnegative(m - 1, f),
                *v.pairs(k, g, w + 1),
            ),
        ),
        _found_dropping("h = m*F, group with drop: found if", cov.store_need_blocks, True),
        _found_dropping_inside(
            "h = m*F inside a chunk, group with drop: all chunks but the one past the hit",
            cov.store_need_blocks,
        ),
        Claim(
            "h = m*F, group with drop: found only if (the chunk past the hit is whole)",
            (v.h, v.n, v.b, v.k, v.f),
            lambda h, n, b, k, f: negation(_stored(cdiv(h, b * k), n, b, k, f, f, 1)),
            (Hypothesis("cdiv(h,t)*t + t > n", lambda h, n, b, k: cdiv(h, b * k) * b * k + b * k > n),),
        ),
        _lost_dropping(
            "h = m*F, group with drop: found only if (no gap): e = 0, W = w*t + 1, f - need >= k",
            Hypothesis("f - need >= k", lambda f, k, w: f - w * k - 1 >= k),
        ),
        _lost_dropping(
            "h = F, group with drop: found only if: e = 0, W = w*t + 1, f - need = k - 1, the first segment",
            Hypothesis("m = 1, F = (w + 1)*t, k >= 2", lambda g, m, k, w: both(m == 1, g == w + 1, k >= 2)),
        ),
        Claim(
            "a hit m*F past p gains a chunk of full attention, and at p = 0 one of the window group iff h "
            ">= t; n - 1 past p gains both iff n > F, n > t",
            (v.meant(v.m, "full-attention chunks past the local prefix"), v.F, v.t, v.n, v.p),
            lambda m, F, t, n, p: both(
                cov.worth_loading(m * F, 0, F),
                cov.worth_loading(p + m * F, p, F),
                iff(cov.worth_loading(m * F, 0, t), m * F >= t),
                iff(cov.worth_loading(p + n - 1, p, F), n > F),
                iff(cov.worth_loading(p + n - 1, p, t), n > t),
            ),
            (),
            lambda m, F: (lemmas.nonnegative(m - 1, F),),
        ),
        Claim(
            "the largest hit that full attention allows: n - 1 if F | n, else the last multiple of F; "
            "with its drop, F less than the last multiple",
            (v.n, v.F, v.d),
            lambda n, F, d: (
                cov.shrink_hit(cov.lookup_candidate(n, 1), cov.tail_drop(cov.full_chunks_of(n, F), d), F)
                == (n - 1 if d == 0 and floormod(n, F) == 0 else round_down(n, F) - d * F)
            ),
            (Hypothesis("d <= 1", lambda d: d <= 1),),
            lambda d, n, F: (*v.pairs(F, d, 0, 1), *v.pairs(F, floordiv(n, F), d)),
        ),
        Claim(
            "with a Mamba chunk M = g*F: the candidate is the last multiple of M below n, a multiple of "
            "F that full attention does not shrink",
            (
                v.n,
                v.F,
                v.meant(v.g, "full-attention chunks in a Mamba chunk"),
                Symbol("y", 0, "a multiple of M, in units of M"),
            ),
            lambda n, F, g, y: both(
                cov.lookup_candidate(n, g * F) == floordiv(n - 1, g * F) * g * F,
                cov.lookup_candidate(n, g * F) < n,
                implies(y * g * F < n, y * g * F <= cov.lookup_candidate(n, g * F)),
                cov.shrink_hit(cov.lookup_candidate(n, g * F), cov.full_chunks_of(n, F), F)
                == cov.lookup_candidate(n, g * F),
            ),
            (),
            lambda n, F, g, y: (
                *v.pairs(g * F, y, floordiv(n - 1, g * F)),
                *v.pairs(F, floordiv(n, F), floordiv(n - 1, g * F) * g),
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
            "0.33.0, dense retention: every multiple of F is found (e = 0, t | W - 1)",
            "historic",
            _found_aligned("h = m*F: found, release 0.33.0", cov.store_need_blocks, False),
            {"m": 4, "f": 4, "b": 16, "k": 1, "W": 33, "e": 0, "n": 257, "j": 13},
            _tell_lost("0.33.0", 0),
            ("f", "b", "k"),
        ),
        Refutation(
            "0.33.0, dense retention: h = n - 1 is found when F | n (t | W + e - 1)",
            "historic",
            _worth(_found_last("h = n - 1: found, release 0.33.0", cov.store_need_blocks, False)),
            {"g": 16, "m": 4, "f": 4, "b": 16, "k": 1, "W": 32, "e": 1, "j": 13},
            _tell_lost("0.33.0", 1),
            ("f", "b", "k"),
        ),
    ),
    (_LARGEST, v.SCAN, v.PREFIX, _STORE),
    (
        v.DENSE,
        "Where b does not divide F the store uses no mask, and the conditions on what is unkept fall away.",
        "With drop, h = n - 1 never arises: full attention drops to F*(n//F - 1), and a window group has "
        "no chunk past it.",
        "Where h = n - 1 is lost, lookup falls back to the next multiple of F: an identical prompt of "
        "length n = m*F reuses m*F - F tokens instead of n - 1.",
        "The release's own lookup shows it: of 256 stored tokens (F = 64, t = 16, W = 32, e = 1) it "
        "finds 192, not 255 (tests/test_coverage_release.py).",
    ),
)
