"""Theorem 17: how prefill is cut, and what the drafter's reserve does to the cut."""

from typing import Any

from spec.arith import align
from spec.arith.division import cdiv, floordiv, floormod, round_down
from spec.prove.lemmas import monotone, nonnegative, scaled
from spec.prove.steps import BLOCK, LOOKAHEAD, OTHER_BLOCK, equal, on_boundary, same, same_boundary
from spec.prove.symbolic import Truth, both, either, iff, implies
from spec.prove.theorem import Claim, Hypothesis, Refutation, Symbol, Theorem

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

SPLIT = (_start, _q17, _end, _limit, _last, _tail, _junction, BLOCK)
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
            (_start, _q17, _end, _limit, BLOCK),
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
            (_start, BLOCK),
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
            (_known, Symbol("u", 1, "unit"), LOOKAHEAD),
            _checkpoint_kept,
            (),
            lambda v, u, L: (
                scaled(0, floordiv(v - max(1, L), u), u),
                *equal(floordiv(v - max(1, L), u), 0, u),
            ),
        ),
        Claim(
            "checkpoint position with the drop: one unit below the last whole one",
            (_known, Symbol("u", 1, "unit"), LOOKAHEAD),
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
            (_start, _junction, BLOCK),
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
            (_start, _q17, _end, _limit, _junction, BLOCK),
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
            (_start, _limit, BLOCK, _known, _P),
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
            (_start, _q17, _limit, BLOCK, _known, _P),
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
            (_known, _start, _q17, BLOCK, _P),
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
            (OTHER_BLOCK, BLOCK),
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
            (Symbol("x", 0, "end of a chunk"), Symbol("i", 1, "blocks in d"), BLOCK),
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
                (_start, _q17, _end, OTHER_BLOCK, BLOCK),
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
            "below; dense retention puts that block under a key",
            "historic",
            Claim(
                "an exporting chunk stops at the boundary of a block that it starts inside",
                (_start, _q17, _end, _h, _x, BLOCK),
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
            "a shared prefix counted in blocks from the chunk's start, with an internal checkpoint (0.33.0 "
            "without its option of a checkpoint at the shared prefix's end)",
            "historic",
            Claim(
                "an exporting chunk that a shared prefix cuts ends on a boundary",
                (_start, _q17, _end, _h, _x, _junction, BLOCK),
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
                (_start, _budget, BLOCK, _known, _P),
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
                (_start, _q17, BLOCK, _known, _P),
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
