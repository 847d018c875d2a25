"""Theorems 18 and 19: where chunks and bytes land."""

from typing import Any

from spec.arith import align
from spec.arith.division import floordiv, floormod
from spec.prove.lemmas import monotone, nested, nonnegative, scaled
from spec.prove.steps import equal
from spec.prove.symbolic import both, either, iff
from spec.prove.theorem import Claim, Hypothesis, Refutation, Symbol, Theorem

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
