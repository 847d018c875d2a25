"""Theorems 6, 7 and 8: tail drop, the common hit of several groups, and columns that are freed."""

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod
from spec.prove import lemmas
from spec.prove import vocabulary as v
from spec.prove.symbolic import both, either, iff, implies
from spec.prove.theorem import Claim, Contract, Hypothesis, Refutation, Symbol, Theorem

# 6 ---------------------------------------------------------------------------------------------------------

_y = Symbol("y", 1, "candidate hit tokens")
_R = Symbol("R", 1, "one past the last chunk found present")
_N = Symbol("N", 0, "chunks that have a key")
_ASKED = Hypothesis(
    "the run ends within the query: R <= query end, one chunk past the candidate",
    lambda y, t, R, N: cov.query_end_chunk(y, t, 1, N) >= R,
)


def _dropped(y: int, R: int, t: int) -> int:
    return cov.shrink_hit(y, cov.tail_drop(R, 1), t)


TAIL_DROP = Theorem(
    6,
    "tail drop",
    "coverage",
    "A dropping group asks for one chunk past the candidate and gives one back, once. Sliding window: "
    "the whole window of the final hit and the chunk past it were present; after another group shrank "
    "the hit without a new drop, the chunk past it is one of those iff the hit shrank by at most as many "
    "chunks as that window has. Full attention: the chunk past every smaller hit is present. Where the "
    "extra chunk is present the drop costs nothing, and otherwise at most one chunk.",
    (
        Claim(
            "sliding window: the final hit ends with the chunk before the last present one",
            (_y, _R, _N, v.t),
            lambda y, R, N, t: cov.demand_end_chunk(_dropped(y, R, t), t) == cov.tail_drop(R, 1),
            (_ASKED,),
            lambda y, R, N, t: (
                lemmas.scaled(-y, -1, t),
                lemmas.scaled(0, 1 - R, t),
                *v.pairs(t, cdiv(y, t), R - 1, R),
            ),
        ),
        Claim(
            "sliding window: the window of the final hit and the chunk past it lie in the run of R - 1 - "
            "w to R - 1",
            (_y, _R, _N, v.t, v.p, v.W, v.e, v.j),
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
                *v.pairs(t, cdiv(y, t), R - 1, R),
            ),
        ),
        Claim(
            "sliding window: the chunk past a later, smaller hit is among those found present with the "
            "final one iff the hit shrank by at most the final one's window, in chunks",
            (_y, _R, v.t, v.p, v.W, v.e, v.meant(v.h, "a later, smaller hit")),
            lambda y, R, t, p, W, e, h: iff(
                both(
                    cov.demand_end_chunk(h, t) >= cov.lookup_first_chunk(_dropped(y, R, t), p, W, e, t),
                    cov.demand_end_chunk(h, t) < R,
                ),
                cov.demand_end_chunk(_dropped(y, R, t), t) - cov.demand_end_chunk(h, t)
                <= cov.lookup_window_chunks(_dropped(y, R, t), W, e, t),
            ),
            (Hypothesis("p < h <= final hit", lambda y, R, t, p, h: both(p < h, h <= _dropped(y, R, t))),),
            lambda y, R, t, p, h: (
                *v.pairs(t, cdiv(h, t), R - 1),
                lemmas.monotone(cdiv(h, t), floordiv(p, t), t),
            ),
        ),
        Claim(
            "full attention: the chunk past any hit up to the final one is present",
            (_y, _R, v.t, Symbol("h", 0, "a hit up to the final one")),
            lambda R, t, h: cov.demand_end_chunk(h, t) < R,
            (Hypothesis("h <= final hit", lambda y, R, t, h: h <= _dropped(y, R, t)),),
            lambda R, t, h: v.pairs(t, cdiv(h, t), R, R - 1),
        ),
        Claim(
            "the drop costs nothing if the chunk past the candidate is present",
            (_y, _R, _N, v.t),
            lambda y, R, t: _dropped(y, R, t) == y,
            (
                Hypothesis("R = query end", lambda y, R, N, t: cov.query_end_chunk(y, t, 1, N) == R),
                Hypothesis("the chunk past the candidate has a key", lambda y, N, t: cdiv(y, t) + 1 <= N),
            ),
            lambda y, R, t: (lemmas.scaled(-y, -1, t), *v.pairs(t, cdiv(y, t), R - 1)),
        ),
        Claim(
            "the drop costs at most a chunk: all chunks before the final hit's end but one are in it",
            (_y, _R, v.t),
            lambda y, R, t: either(_dropped(y, R, t) == y, _dropped(y, R, t) == (R - 1) * t),
        ),
        Claim(
            "a group that does not drop keeps its hit and asks for no chunk past the candidate",
            (_y, _R, _N, v.t),
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
                (_y, _R, _N, v.t),
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
                (_y, _R, _N, v.t),
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
    (v.SCAN, v.PREFIX),
    (
        "A Mamba group never drops (0.33.0): its one state is exact at the hit, and the drop would lose "
        "a whole chunk.",
    ),
)


def _plain_drop(y: int, R: int, t: int) -> int:
    return cov.shrink_hit(y, cov.tail_drop(R, 1), t)


# 7 ---------------------------------------------------------------------------------------------------------

_a = Symbol("a", 0, "one group's hit")
_c = Symbol("c", 0, "another group's hit")
_ALIGNMENT = v.meant(v.A, "alignment of hits in tokens")
_FOLD = Contract(
    "common-hit fixed point",
    "the local hit of a hybrid cache is common_hit folded over the groups and n - 1, with the least "
    "common multiple of the blocks as alignment",
)

COMMON_HIT = Theorem(
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
            (_a, _c, _ALIGNMENT),
            lambda a, c, A: both(
                cov.common_hit(a, c, A) <= a,
                cov.common_hit(a, c, A) <= c,
                floormod(cov.common_hit(a, c, A), A) == 0,
                cov.common_hit(a, c, A) >= 0,
            ),
            (),
            lambda a, c, A: (
                lemmas.multiple(floordiv(min(a, c), A), A),
                *v.pairs(A, floordiv(min(a, c), A), 0),
            ),
        ),
        Claim(
            "local: the longest aligned one",
            (_a, _c, _ALIGNMENT, v.meant(v.m, "units of alignment")),
            lambda a, c, A, m: m * A <= cov.common_hit(a, c, A),
            (Hypothesis("m*A is within both", lambda a, c, A, m: both(m * A <= a, m * A <= c)),),
            lambda a, c, A, m: v.pairs(A, m, floordiv(min(a, c), A)),
        ),
        Claim(
            "local: a multiple of each block that divides the alignment",
            (_a, _c, v.b, v.meant(v.m, "blocks in the alignment")),
            lambda a, c, b, m: floormod(cov.common_hit(a, c, m * b), b) == 0,
            (),
            lambda a, c, b, m: (lemmas.multiple(floordiv(min(a, c), m * b) * m, b),),
        ),
        Claim(
            "local: below n",
            (v.n, v.meant(_c, "a group's hit"), _ALIGNMENT),
            lambda n, c, A: cov.common_hit(n - 1, c, A) < n,
        ),
        Claim(
            "lookup: the candidate is below n, a multiple of M, and the longest such",
            (v.n, v.M, Symbol("y", 0, "a multiple of M, in units of M")),
            lambda n, M, y: both(
                cov.lookup_candidate(n, M) < n,
                cov.lookup_candidate(n, M) >= 0,
                floormod(cov.lookup_candidate(n, M), M) == 0,
                implies(y * M < n, y * M <= cov.lookup_candidate(n, M)),
            ),
            (),
            lambda n, M, y: (
                lemmas.multiple(floordiv(n - 1, M), M),
                *v.pairs(M, y, floordiv(n - 1, M), 0),
            ),
        ),
        Claim(
            "lookup: a group keeps the candidate or cuts it to its own chunk",
            (_y, _R, v.t),
            lambda y, R, t: both(
                cov.shrink_hit(y, R, t) <= y,
                cov.shrink_hit(y, R, t) <= R * t,
                either(cov.shrink_hit(y, R, t) == y, cov.shrink_hit(y, R, t) == R * t),
            ),
        ),
        Claim(
            "lookup: a multiple of M stays one if M divides the group's chunk",
            (
                v.meant(v.m, "Mamba chunks in the candidate"),
                v.M,
                _R,
                v.meant(v.g, "Mamba chunks in the group's chunk"),
            ),
            lambda m, M, R, g: floormod(cov.shrink_hit(m * M, R, g * M), M) == 0,
            (),
            lambda m, M, R, g: (lemmas.multiple(m, M), lemmas.multiple(R * g, M)),
        ),
        Claim(
            "lookup: rounding down to M after each group keeps a multiple of M within both",
            (_y, _R, v.t, v.M),
            lambda y, R, t, M: both(
                floormod(cov.common_hit(y, R * t, M), M) == 0, cov.common_hit(y, R * t, M) <= y
            ),
            (),
            lambda y, R, t, M: (lemmas.scaled(0, floordiv(min(y, R * t), M), M),),
        ),
        Claim(
            "the Mamba state that a load names is the state at h iff M | h",
            (v.h, v.M),
            lambda h, M: both(
                iff(cov.mamba_state_tokens(h, M) == h, floormod(h, M) == 0),
                cov.mamba_state_tokens(h, M) >= h,
                cov.mamba_state_tokens(h, M) < h + M,
            ),
            (),
            lambda h, M: v.pairs(M, cdiv(h, M), floordiv(h, M)),
        ),
        Claim(
            "the Mamba state that a load names is that of the demanded chunk",
            (v.h, v.b, v.k),
            lambda h, b, k: (
                cov.mamba_state_tokens(h, b * k) == (cov.demand_first_chunk_mamba(h, b, k) + 1) * b * k
            ),
            (),
            lambda h, b, k: (
                lemmas.nested(h - 1, b, k),
                *v.pairs(b * k, cdiv(h, b * k), floordiv(h - 1, b * k) + 1),
            ),
        ),
    ),
    (
        Refutation(
            "0.33.0: rounding to M once, before the groups are asked",
            "historic",
            Claim(
                "the lookup's hit is a multiple of M",
                (v.n, v.M, v.t, _R),
                lambda n, M, t, R: (
                    cov.mamba_state_tokens(cov.shrink_hit(cov.lookup_candidate(n, M), R, t), M)
                    == cov.shrink_hit(cov.lookup_candidate(n, M), R, t)
                ),
                (
                    Hypothesis(
                        "the hit is worth loading",
                        lambda n, M, t, R: cov.worth_loading(
                            cov.shrink_hit(cov.lookup_candidate(n, M), R, t), 0, M
                        ),
                    ),
                ),
            ),
            {"n": 129, "M": 64, "t": 16, "R": 7},
            lambda n, M, t, R: (
                f"prompt {n}, Mamba chunk {M}, another group's chunk {t} present up to chunk {R - 1}: hit "
                f"{min((n - 1) // M * M, R * t)}, the load names the Mamba state after "
                f"{cov.mamba_state_tokens(min((n - 1) // M * M, R * t), M)} tokens"
            ),
            ("M", "t"),
        ),
    ),
    (_FOLD, v.SCAN, v.PREFIX),
    (
        "So a lookup that shrinks between multiples of M hands the forward pass a state that has already "
        "folded up to M - 1 tokens that it will fold again; re-rounding after each group repairs it.",
        "The release's own lookup admits the reported witness's hit of 112 tokens "
        "(tests/test_coverage_release.py).",
    ),
)

# 8 ---------------------------------------------------------------------------------------------------------

_C = Symbol("C", 0, "tokens computed when columns are freed: processed, none in flight")
_c2 = Symbol("c", 0, "tokens computed at a later step")
_x2 = Symbol("x", 0, "a token that the later step reads")
_g = v.meant(v.g, "blocks in the local hit")
_LATER = Hypothesis("c >= C", lambda C, c: c >= C)

FREED_COLUMNS = Theorem(
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
            (_C, _c2, _x2, v.W, v.e, v.b),
            lambda C, x, W, e, b: floordiv(x, b) >= cov.first_retained_column(C, W, e, b),
            (
                _LATER,
                Hypothesis("x >= c - e - W + 1", lambda c, x, W, e: x >= c - e - W + 1),
            ),
            lambda C, x, W, e, b: (lemmas.ordered(cov.skipped_tokens(C, W, e), x, b),),
        ),
        Claim(
            "no more could be freed: the first retained column holds a token that is read at C",
            (_C, v.W, v.e, v.b),
            lambda C, W, e, b: both(
                cov.skipped_tokens(C, W, e) == max(C - e - W + 1, 0),
                cov.first_retained_column(C, W, e, b) * b <= max(C - e - W + 1, 0),
                cov.first_retained_column(C, W, e, b) * b + b > max(C - e - W + 1, 0),
            ),
        ),
        Claim(
            "chunked-local attention: no freed column is read",
            (_C, _c2, _x2, v.A, v.b),
            lambda C, x, A, b: floordiv(x, b) >= floordiv(cov.skipped_tokens_chunked(C, A), b),
            (
                _LATER,
                Hypothesis("x is in the attention chunk of token c", lambda c, x, A: x >= floordiv(c, A) * A),
            ),
            lambda C, c, x, A, b: (
                *v.pairs(A, floordiv(C, A), floordiv(c, A)),
                lemmas.ordered(cov.skipped_tokens_chunked(C, A), x, b),
            ),
        ),
        Claim(
            "chunked-local attention: no more could be freed",
            (_C, v.A),
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
            (_g, v.W, v.b),
            lambda g, W, b: both(
                cov.first_retained_column(g * b, W, 0, b) >= max(g - cov.local_need_blocks(W, b), 0),
                cov.local_need_blocks(W, b) * b < W - 1 + b,
            ),
            (),
            lambda g, W, b: v.pairs(
                b, cov.first_retained_column(g * b, W, 0, b), g - cov.local_need_blocks(W, b)
            ),
        ),
        Claim(
            "local hit: everything retained at h is held iff",
            (_g, v.W, v.e, v.b),
            lambda g, W, e, b: iff(
                cov.first_retained_column(g * b, W, e, b) >= g - cov.local_need_blocks(W, b),
                either(W - 1 + e <= b * cov.local_need_blocks(W, b), g <= cov.local_need_blocks(W, b)),
            ),
            (),
            lambda g, W, e, b: v.pairs(
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
                (_c2, Symbol("K", 1, "drafts"), v.W, v.e, v.b),
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
                (_g, v.W, v.e, v.b),
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
