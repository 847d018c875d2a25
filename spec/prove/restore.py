"""Theorems 1, 3, 4 and 10: what a load demands is what lookup checked, and what the extra tokens cost.

The story of release 0.30.0: the allocator kept `e` more tokens of history for draft re-prefill, and so
a load filled their blocks; lookup and the in-flight check went on counting the window alone.  A chunk
that nobody had looked for was then loaded, absent or half written.
"""

from collections.abc import Callable

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod
from spec.prove import lemmas
from spec.prove import vocabulary as v
from spec.prove.symbolic import both, either, implies
from spec.prove.theorem import Claim, Hypothesis, LemmaUse, Refutation, Theorem

# 1 ---------------------------------------------------------------------------------------------------------


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
        (v.h, v.p, v.W, v.e, v.b, v.k, v.j),
        lambda h, p, W, e, b, k, j: both(j >= first(h, p, W, e, b * k), j < cdiv(h, b * k)),
        (v.HIT, _DEMANDED_WINDOW),
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
        f"hit {h}, {chunk}, window {W}, extra {e}, local {p}: restores {v.chunks_text(first, end)}, "
        f"0.30.0 looked up {v.chunks_text(int(looked), end)}; chunk {j} missing"
    )


def _tell_chunked(h: int, p: int, A: int, b: int, k: int, j: int) -> str:
    t, end = b * k, cdiv(h, b * k)
    first = cov.demand_first_chunk_chunked(h, p, A, b, k)
    window = cov.chunked_window_chunks(A, t)
    looked = cov.first_checked_chunk(h, p, window, t)
    return (
        f"hit {h}, attention chunk {A}, chunk {t}: restores {v.chunks_text(first, end)}, looked up "
        f"{window} of them, {v.chunks_text(looked, end)}; chunk {j} missing"
    )


CHUNK_COVERAGE = Theorem(
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
            (v.h, v.p, v.b, v.k, v.j),
            lambda h, p, b, k, j: both(
                j >= cov.lookup_first_chunk_full(p, cov.chunk_tokens(b, k)), j < cdiv(h, b * k)
            ),
            (v.HIT, _DEMANDED_FULL),
        ),
        Claim(
            "full attention, from the first fresh column",
            (v.p, v.b, v.k),
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
            (v.h, v.p, v.W, v.e, v.b, v.k),
            lambda h, p, W, e, b, k: both(
                cov.demand_first_column(h, p, W, e, b) >= cov.first_fresh_column(p, b),
                cov.demand_first_column(h, p, W, e, b) * b <= max(h - W + 1 - e, 0, p + b - 1),
                cov.demand_first_chunk_window(h, p, W, e, b, k) * k <= cov.demand_first_column(h, p, W, e, b),
                (cov.demand_first_chunk_window(h, p, W, e, b, k) + 1) * k
                > cov.demand_first_column(h, p, W, e, b),
            ),
        ),
        Claim(
            "chunked-local demand is not overstated",
            (v.h, v.p, v.A, v.b, v.k),
            lambda h, p, A, b, k: both(
                cov.demand_first_chunk_chunked(h, p, A, b, k) * k
                <= max(floordiv(cov.skipped_tokens_chunked(h, A), b), cov.first_fresh_column(p, b)),
                (cov.demand_first_chunk_chunked(h, p, A, b, k) + 1) * k
                > max(floordiv(cov.skipped_tokens_chunked(h, A), b), cov.first_fresh_column(p, b)),
            ),
        ),
        Claim(
            "lookup asks for no more: from the local prefix's last chunk or the window's first, "
            "whichever is later",
            (v.h, v.p, v.meant(v.w, "chunks in a row that lookup requires"), v.t),
            lambda h, p, w, t: both(
                cov.first_checked_chunk(h, p, w, t) >= cov.lookup_first_chunk_full(p, t),
                cov.first_checked_chunk(h, p, w, t) >= cdiv(h, t) - w,
                either(
                    cov.first_checked_chunk(h, p, w, t) == cov.lookup_first_chunk_full(p, t),
                    cov.first_checked_chunk(h, p, w, t) == cdiv(h, t) - w,
                ),
            ),
        ),
        Claim(
            "Mamba",
            (v.h, v.p, v.b, v.k),
            lambda h, p, b, k: both(
                cov.demand_first_chunk_mamba(h, b, k) >= cov.first_checked_chunk(h, p, 1, b * k),
                cov.demand_first_chunk_mamba(h, b, k) == _end(h, b, k) - 1,
            ),
            (v.HIT,),
            lambda h, p, b, k: (
                lemmas.nested(h - 1, b, k),
                lemmas.monotone(floordiv(h - 1, b * k) + 1, cdiv(h, b * k), b * k),
                lemmas.monotone(cdiv(h, b * k), floordiv(h - 1, b * k) + 1, b * k),
                lemmas.monotone(floordiv(h - 1, b * k), floordiv(p, b * k), b * k),
            ),
        ),
        Claim(
            "chunked-local attention, t divides A",
            (v.h, v.p, v.meant(v.m, "chunks in an attention chunk"), v.b, v.k, v.j),
            lambda h, p, m, b, k, j: (
                j >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(m * b * k, b * k), b * k)
            ),
            (
                v.HIT,
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
            (v.h, v.p, v.A, v.meant(v.m, "attention chunks in a chunk"), v.b, v.k, v.j),
            lambda h, p, A, b, k, j: (
                j >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(A, b * k), b * k)
            ),
            (
                Hypothesis("t = m*A", lambda A, m, b, k: b * k == m * A),
                v.HIT,
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
            (v.h, v.meant(v.m, "attention chunks before the hit's"), v.A, v.t),
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
            (v.meant(v.m, "attention chunks before the hit's"), v.A, v.t),
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
                (v.h, v.p, v.A, v.b, v.k, v.j),
                lambda h, p, A, b, k, j: (
                    j >= cov.first_checked_chunk(h, p, cov.chunked_window_chunks(A, b * k), b * k)
                ),
                (v.HIT, _DEMANDED_CHUNKED),
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
    (v.SCAN, v.PREFIX),
)

# 3 ---------------------------------------------------------------------------------------------------------

_m = v.meant(v.m, "chunks in the hit")

BASE_WINDOW = Theorem(
    3,
    "base window",
    "coverage",
    "One more extra token costs the base window 0 or 1 chunk: 1 exactly when e >= 1 and t | W - 1 + e. "
    "For e >= 1 the base equals the demand at every h that is a multiple of t with history enough; at e "
    "= 0 it exceeds the demand by one chunk when t | W - 1, else by none.",
    (
        Claim(
            "one more extra token",
            (v.W, v.e, v.t),
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
            (_m, v.W, v.e, v.b, v.k),
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
                *v.pairs(
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
            (_m, v.W, v.e, v.t),
            lambda m, W, e, t: both(
                cov.lookup_window_chunks(m * t, W, e, t) == cov.base_window_chunks(W, e, t),
                cov.base_window_chunks(W, e, t) >= 1,
            ),
            (),
            lambda m, W, t: (lemmas.scaled(0, -m, t), lemmas.monotone(-cdiv(W, t), -1, t)),
        ),
        Claim(
            "without extra tokens the releases agree",
            (v.h, v.W, v.t),
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
                (_m, v.W, v.e, v.b, v.k),
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
                (v.W, v.e, v.t),
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
                (_m, v.W, v.b, v.k),
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

# 4 ---------------------------------------------------------------------------------------------------------


def _in_flight_v0_30(h: int, p: int, W: int, e: int, t: int) -> int:
    return max(floordiv(p, t), cdiv(h, t) - cov.lookup_window_chunks_v0_30(h, W, t))


IN_FLIGHT = Theorem(
    4,
    "in-flight loads",
    "coverage",
    "The chunks compared with those being loaded include every chunk that the load names, so no load "
    "reads a chunk that another is still bringing in, unnoticed.",
    (
        _window_coverage("sliding window, in-flight check", cov.in_flight_first_chunk),
        Claim(
            "the check looks at no chunk that lookup did not",
            (v.h, v.p, v.W, v.e, v.t),
            lambda h, p, W, e, t: (
                cov.in_flight_first_chunk(h, p, W, e, t) >= cov.lookup_first_chunk(h, p, W, e, t)
            ),
        ),
        Claim(
            "the slice is never the whole list by accident: the load window is at least 1",
            (v.h, v.W, v.e, v.t),
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
                f"{v.chunks_text(cov.demand_first_chunk_window(h, p, W, e, b, k), cdiv(h, b * k))}, 0.30.0 "
                f"compared {v.chunks_text(int(_in_flight_v0_30(h, p, W, e, b * k)), cdiv(h, b * k))}; chunk "
                f"{j} may be in flight"
            ),
            ("b", "k"),
        ),
    ),
)

# 10 --------------------------------------------------------------------------------------------------------


def _first_chunk(h: int, W: int, e: int, b: int, k: int) -> int:
    return cov.demand_first_chunk_window(h, 0, W, e, b, k)


def _padded(h: int, W: int, e: int, t: int) -> int:
    return cdiv(W - 1 + e + floormod(-h, t), t)


COST = Theorem(
    10,
    "cost of the extra tokens",
    "coverage",
    "e extra tokens cost a load at a hit with history enough between e//t and cdiv(e,t) chunks, the "
    "lookup window at most cdiv(e,t), and the store between e//b and cdiv(e,b) blocks for each boundary "
    "whose blocks it keeps (under dense retention one a segment). A load asks for at most base*k + 1 blocks.",
    (
        Claim(
            "loaded chunks",
            (v.h, v.W, v.e, v.b, v.k),
            lambda h, W, e, b, k: both(
                _first_chunk(h, W, 0, b, k) - _first_chunk(h, W, e, b, k) >= floordiv(e, b * k),
                _first_chunk(h, W, 0, b, k) - _first_chunk(h, W, e, b, k) <= cdiv(e, b * k),
            ),
            (Hypothesis("h >= W - 1 + e", lambda h, W, e: h >= W - 1 + e),),
            lambda h, W, e, b, k: (
                lemmas.nested(cov.skipped_tokens(h, W, 0), b, k),
                lemmas.nested(cov.skipped_tokens(h, W, e), b, k),
                *v.pairs(
                    b * k,
                    floordiv(cov.skipped_tokens(h, W, 0), b * k),
                    floordiv(cov.skipped_tokens(h, W, e), b * k) + floordiv(e, b * k),
                ),
                *v.pairs(
                    b * k,
                    floordiv(cov.skipped_tokens(h, W, 0), b * k),
                    floordiv(cov.skipped_tokens(h, W, e), b * k) + cdiv(e, b * k),
                ),
            ),
        ),
        Claim(
            "looked up chunks",
            (v.h, v.W, v.e, v.t),
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
            "stored blocks a kept boundary",
            (v.W, v.e, v.b, v.d),
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
            "the corrected mask keeps at most one block more a kept boundary",
            (v.W, v.e, v.b, v.d),
            lambda W, e, b, d: both(
                cov.store_need_blocks_corrected(W, e, b, d) - cov.store_need_blocks(W, e, b, d)
                == (1 if floormod(W + e - 1, b) == 0 else 0),
                cov.store_need_blocks_v0_30(W, b, d) == cov.store_need_blocks(W, 0, b, d),
            ),
            (),
            lambda W, e, b: v.pairs(
                b, floordiv(W + e - 1, b), floordiv(W + e - 1, b) + 1, cdiv(W + e - 1, b), cdiv(W + e, b)
            ),
        ),
        Claim(
            "a load asks for at most base*k + 1 blocks (upstream asserts it)",
            (v.h, v.p, v.W, v.e, v.b, v.k),
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
            (v.b,),
            lambda b: (
                cdiv(3 * b + 1, b) - cov.demand_first_column(3 * b + 1, 0, b, 0, b)
                == cov.pending_blocks_bound(cov.base_window_chunks(b, 0, b), 1)
            ),
            (Hypothesis("b >= 3", lambda b: b >= 3),),
            lambda b: v.pairs(
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
                (v.h, v.W, v.e, v.b, v.k),
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
                (v.h, v.W, v.e, v.b, v.k),
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
    (),
    (v.DENSE,),
)
