"""Brute force over small boxes: every coverage formula against counting.

The oracles divide nothing: they fill blocks token by token, label columns, walk windows.  A box holds 0, 1,
negative values where they are defined, and sizes that divide nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest

from spec.arith import coverage as cov
from spec.arith import division
from spec.arith.checked import DOMAINS

FAR = 12
"""A number of units beyond every box: ranges that would begin below 0 are moved right by so many."""


@cache
def label(position: int, unit: int) -> int:
    """The unit (block, chunk, segment) that holds a position: units are filled one position at a time."""
    name, left = 0, unit
    for _ in range(position):
        left -= 1
        if left == 0:
            name, left = name + 1, unit
    return name


def touched(start: int, end: int, unit: int) -> int:
    """How many units the positions from start to end - 1 touch; start may be negative, down to FAR units."""
    base = FAR * unit
    return len({label(base + position, unit) for position in range(start, end)})


def before_boundary(tokens: int, unit: int) -> int:
    """How many units the `tokens` positions before a unit's boundary touch."""
    return touched(-tokens, 0, unit)


def greatest_multiple(x: int, unit: int) -> int:
    """The greatest multiple of unit that is at most x."""
    multiple = 0
    while multiple > x:
        multiple -= unit
    while multiple + unit <= x:
        multiple += unit
    return multiple


def quotient(x: int, divisor: int) -> int:
    """How many steps of `divisor` lead from 0 to the greatest multiple at most x."""
    steps, target = 0, greatest_multiple(x, divisor)
    while steps * divisor != target:
        steps += 1 if target > 0 else -1
    return steps


def first_read(computed: int, window: int, extra: int) -> int:
    """The first token that a query after `computed` tokens reads, re-prefill of `extra` tokens included."""
    queries = range(max(0, computed - extra), computed + 2)
    return min(token for q in queries for token in range(max(0, q - window + 1), q + 1))


def first_read_chunked(computed: int, attention_chunk: int) -> int:
    """The first token in the attention chunk of the next query."""
    own = label(computed, attention_chunk)
    return min(t for t in range(computed + 1) if label(t, attention_chunk) == own)


@cache
def window_chunks(hit: int, window: int, extra: int, chunk: int) -> int:
    """Chunks from the one that holds the first retained token of an unlimited history to the hit's last."""
    edge = hit
    while label(edge, chunk) * chunk != edge:
        edge += 1
    return touched(hit - (window - 1 + extra), edge, chunk)


def first_demanded_column(hit: int, local: int, window: int, extra: int, block: int) -> int:
    """The first column that is not wholly before the first token read, and not in the local prefix."""
    column = touched(0, local, block)
    while (column + 1) * block <= first_read(hit, window, extra):
        column += 1
    return column


def kept(column: int, need: int, segment: int, shift: int) -> bool:
    """Whether a column is among the `need` before some segment's end, all moved right by `shift`."""
    ends = [segment * i + shift for i in range(1, column + 3)]
    return column >= shift and any(end - need <= column < end for end in ends)


def walk_back(hit: int, local: int, window: int, chunk: int) -> int:
    """From the hit's last chunk back by the window, stopping where the local prefix ends."""
    first, stop = touched(0, hit, chunk), label(local, chunk)
    for _ in range(window):
        first -= 1
    return first if first > stop else stop


def load_window(hit: int, window: int, extra: int, chunk: int) -> int:
    """The longer of the base window and the window at this hit."""
    return max(base_window(window, extra, chunk), window_chunks(hit, window, extra, chunk))


@cache
def base_window(window: int, extra: int, chunk: int) -> int:
    """Chunks of W tokens before a boundary, or of all retained ones if those are more."""
    return max(before_boundary(window, chunk), before_boundary(window - 1 + extra, chunk))


def least_multiple(x: int, unit: int) -> int:
    """The least multiple of unit that is at least x."""
    return -greatest_multiple(-x, unit)


ORACLES: dict[str, Callable[..., int | bool]] = {
    "floordiv": lambda x, divisor: quotient(x, divisor),
    "floormod": lambda x, divisor: x - greatest_multiple(x, divisor),
    "cdiv": lambda x, divisor: quotient(least_multiple(x, divisor), divisor),
    "round_down": lambda x, unit: greatest_multiple(x, unit),
    "chunk_tokens": lambda block, blocks_per_chunk: sum(block for _ in range(blocks_per_chunk)),
    "blocks_of": lambda tokens, block: touched(0, tokens, block),
    "full_chunks_of": lambda tokens, chunk: sum((i + 1) * chunk <= tokens for i in range(tokens)),
    "span_blocks": lambda start, tokens, block: touched(start, start + tokens, block),
    "span_bound": lambda tokens, block: max(touched(s, s + tokens, block) for s in range(block)),
    "skipped_tokens": first_read,
    "skipped_tokens_chunked": first_read_chunked,
    "first_retained_column": lambda computed, window, extra, block: label(
        first_read(computed, window, extra), block
    ),
    "local_need_blocks": lambda window, block: before_boundary(window - 1, block),
    "base_window_chunks": base_window,
    "base_window_chunks_v0_30": lambda window, chunk: before_boundary(window, chunk),
    "lookup_window_chunks": load_window,
    "lookup_window_chunks_v0_30": lambda hit, window, chunk: load_window(hit, window, 0, chunk),
    "chunked_window_chunks": lambda attention_chunk, chunk: touched(0, attention_chunk, chunk),
    "lookup_first_chunk_full": lambda local, chunk: label(local, chunk),
    "first_checked_chunk": lambda hit, local, window_chunks, chunk: walk_back(
        hit, local, window_chunks, chunk
    ),
    "lookup_first_chunk": lambda hit, local, window, extra, chunk: walk_back(
        hit, local, load_window(hit, window, extra, chunk), chunk
    ),
    "in_flight_first_chunk": lambda hit, local, window, extra, chunk: walk_back(
        hit, local, load_window(hit, window, extra, chunk), chunk
    ),
    "first_fresh_column": lambda local, block: touched(0, local, block),
    "demand_end_chunk": lambda hit, chunk: touched(0, hit, chunk),
    "demand_first_chunk_full": lambda local, block, blocks_per_chunk: label(
        touched(0, local, block), blocks_per_chunk
    ),
    "demand_first_column": first_demanded_column,
    "demand_first_chunk_window": lambda hit, local, window, extra, block, blocks_per_chunk: label(
        first_demanded_column(hit, local, window, extra, block), blocks_per_chunk
    ),
    "demand_first_chunk_chunked": lambda hit, local, attention_chunk, block, blocks_per_chunk: label(
        max(label(first_read_chunked(hit, attention_chunk), block), touched(0, local, block)),
        blocks_per_chunk,
    ),
    "demand_first_chunk_mamba": lambda hit, block, blocks_per_chunk: label(
        label(hit - 1, block), blocks_per_chunk
    ),
    "pending_blocks_bound": lambda base_chunks, blocks_per_chunk: max(
        touched(s, s + 2 * base_chunks * blocks_per_chunk, 2) for s in range(2)
    ),
    "store_need_blocks": lambda window, extra, block, drops: (
        before_boundary(window - 1 + extra, block) + drops
    ),
    "store_need_blocks_v0_30": lambda window, block, drops: before_boundary(window - 1, block) + drops,
    "store_need_blocks_corrected": lambda window, extra, block, drops: (
        before_boundary(window + extra, block) + drops
    ),
    "store_keeps_block": kept,
    "store_keeps_final_block": lambda column, end, need, segment_blocks: (
        label(column, segment_blocks) == label(end, segment_blocks)
        and label(end, segment_blocks) * segment_blocks <= column < end <= column + need
    ),
    "store_keeps_all": lambda need, segment_blocks: all(
        kept(c, need, segment_blocks, 0) for c in range(segment_blocks, 2 * segment_blocks)
    ),
    "store_keeps_chunk": lambda chunk_index, blocks_per_chunk, need, segment_blocks, shift: any(
        kept(chunk_index * blocks_per_chunk + i, need, segment_blocks, shift) for i in range(blocks_per_chunk)
    ),
    "lookup_candidate": lambda tokens, mamba_chunk: max(
        m for m in range(0, tokens, 1) if greatest_multiple(m, mamba_chunk) == m
    ),
    "shrink_hit": lambda candidate, found_end_chunk, chunk: len(
        set(range(candidate)) & set(range(found_end_chunk * chunk))
    ),
    "worth_loading": lambda hit, local, chunk: len(range(local, hit)) >= chunk,
    "tail_drop": lambda found_end_chunk, drops: len(range(found_end_chunk)[drops:]),
    "query_end_chunk": lambda candidate, chunk, drops, keyed_chunks: len(
        range(keyed_chunks)[: touched(0, candidate, chunk) + drops]
    ),
    "common_hit": lambda first, second, alignment: max(
        m for m in range(min(first, second) + 1) if greatest_multiple(m, alignment) == m
    ),
    "mamba_state_tokens": lambda hit, mamba_chunk: least_multiple(hit, mamba_chunk),
}

# Values tried for an argument, by its name; the smallest are those of its domain.
BOX: dict[str, range] = {
    "x": range(-13, 14),
    "divisor": range(1, 7),
    "unit": range(1, 7),
    "hit": range(0, 13),
    "local": range(0, 8),
    "tokens": range(0, 20),
    "start": range(0, 13),
    "computed": range(0, 20),
    "candidate": range(0, 14),
    "window": range(1, 7),
    "extra": range(0, 4),
    "block": range(1, 5),
    "blocks_per_chunk": range(1, 4),
    "chunk": range(1, 7),
    "column": range(0, 16),
    "end": range(0, 16),
    "need": range(0, 6),
    "segment_blocks": range(1, 6),
    "shift": range(0, 2),
    "drops": range(0, 2),
    "first": range(0, 14),
    "second": range(0, 14),
}
REST = range(0, 7)


def cores() -> dict[str, Callable[..., int | bool]]:
    """The cores of the two modules, by name."""
    modules = (cov.__name__, division.__name__)
    return {core.__name__: core for core in DOMAINS if core.__module__ in modules}  # type: ignore[misc]


def points(core: Callable[..., object]) -> Iterator[tuple[int, ...]]:
    """Every point of the box that lies in the core's domain."""
    domain = DOMAINS[core]
    names = tuple(inspect.signature(core).parameters)
    for values in product(*(BOX.get(name, REST) for name in names)):
        named = dict(zip(names, values, strict=True))
        if all(
            (limit.least is None or named[n] >= limit.least)
            and (limit.most is None or named[n] <= limit.most)
            and (limit.at_most is None or named[n] <= named[limit.at_most])
            for n, limit in domain.items()
        ):
            yield values


def test_every_formula_has_an_oracle() -> None:
    assert set(ORACLES) == set(cores())


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_formula_agrees_with_counting(name: str) -> None:
    core, oracle = cores()[name], ORACLES[name]
    count = 0
    for values in points(core):
        assert core(*values) == oracle(*values), f"{name}{values}"
        count += 1
    assert count >= 12


def test_an_oracle_notices_a_wrong_formula() -> None:
    wrong = [v for v in points(cov.span_blocks) if cov.blocks_of(*v[1:]) != ORACLES["span_blocks"](*v)]
    assert (1, 2, 2) in wrong and len(wrong) > 100
