"""Brute-force oracles for the alignment formulas: each is compared with a definition by counting or by
moving blocks.

The boxes include 0, unaligned values and every draft count around the block size.  The last part runs the
steps of a recurrent group on lists (allocator row, copies, forward), with every acceptance sequence, and
reads off what each column holds.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from spec.arith import align

BLOCKS = range(1, 6)


def column_of_last_token(tokens: int, block: int) -> int:
    """The column whose block holds position tokens - 1, found by filling blocks one token at a time; -1 for
    none."""
    column, free = -1, 0
    for _ in range(tokens):
        if free == 0:
            column, free = column + 1, block
        free -= 1
    return column


def multiples(unit: int, low: int, high: int) -> list[int]:
    """The multiples of unit above low and at most high."""
    return [n for n in range(low + 1, high + 1) if n % unit == 0]


def test_columns_of_a_step() -> None:
    for tokens, block in product(range(30), BLOCKS):
        expected = column_of_last_token(tokens, block)
        assert align.seed_column(tokens, block) == expected
        assert align.aligned_first_column(tokens, block) == (expected if tokens else 0)
        for scheduled in range(tokens + 1):
            assert align.running_column(tokens - scheduled, scheduled, block) == expected


def test_offsets_and_scratch_columns_number_the_states_of_a_step() -> None:
    for running, accepted in product(range(-1, 6), range(8)):
        states = [running + i for i in range(8)]  # the column of the state after each query token
        assert align.source_column(running, accepted) == states[max(0, accepted - 1)]
        assert align.accepted_offset(accepted) == states.index(states[max(0, accepted - 1)])
        if running >= 0:
            assert [align.scratch_column(running, i) for i in range(8)] == states


def test_boundaries_of_a_step() -> None:
    for block, computed, accepted in product(BLOCKS, range(16), range(1, 9)):
        after = computed + accepted
        states = [computed + 1 + i for i in range(accepted)]  # tokens in the state at each offset
        assert align.boundary_run(after, accepted) == states[0]
        reached = [i for i, tokens in enumerate(states) if tokens % block == 0]
        assert align.boundaries_crossed(computed, accepted, block) == len(reached)
        assert align.boundary_reached(after, accepted, block) == bool(reached)
        if reached:
            assert align.boundary_offset(after, accepted, block) == reached[-1]
        else:
            assert align.boundary_offset(after, accepted, block) < 0
        below = multiples(block, 0, after)
        assert align.destination_column(after, block) == len(below) - 1


def test_checkpoint_position() -> None:
    for tokens, unit, lookahead in product(range(25), BLOCKS, range(6)):
        whole = [0, *multiples(unit, 0, tokens)]
        dropped = whole[-2] if len(whole) > 1 else 0
        assert align.checkpoint_position(tokens, unit, True, lookahead) == dropped
        spare = [n for n in whole if tokens - n >= max(1, lookahead)]
        assert align.checkpoint_position(tokens, unit, False, lookahead) == (spare[-1] if spare else 0)


def test_registration_covers_extent_and_hash() -> None:
    for boundary, computed, scheduled, known, lookahead in product(
        range(8), range(5), range(4), range(9), range(4)
    ):
        extent = set(range(min(computed + scheduled, known)))
        hashed = set(range(boundary + lookahead))
        expected = set(range(boundary)) <= extent and hashed <= set(range(known))
        assert align.boundary_registrable(boundary, computed, scheduled, known, lookahead) == expected


def split_by_search(
    start: int,
    scheduled: int,
    prefill_end: int,
    block: int,
    step_limit: int,
    last: int,
    tail: int,
    junction: int,
    exports: bool,
) -> int:
    """The split as a search: the first position past the start at which something demands a stop."""
    if start >= prefill_end:
        return scheduled
    end = start + scheduled
    if end < prefill_end:
        inside = multiples(block, start, end)
        if inside:
            end = inside[-1]
        elif block <= step_limit:
            return 0
    for position in range(start + 1, end):
        mid_block = position % block == 0 and start % block != 0
        at_checkpoint = position == last or (position == tail and tail > last)
        whole_blocks = junction < end and position <= junction < position + block
        at_junction = whole_blocks and (position - start) % block == 0
        if at_junction or (not exports and (mid_block or at_checkpoint)):
            return position - start
    return max(end - start, 0)


def test_aligned_split() -> None:
    compared = 0
    for block, start, scheduled, prefill_end, step_limit in product(
        range(1, 5), range(7), range(9), (0, 3, 8, 11), (1, 3, 20)
    ):
        for last, tail, junction in product((0, 4, 6), (0, 5, 7), (0, 5, 8)):
            for exports in (False, True):
                args = (start, scheduled, prefill_end, block, step_limit, last, tail, junction, exports)
                assert align.aligned_split(*args) == split_by_search(*args), args
                compared += 1
    assert compared > 100_000


def test_pieces_of_the_split() -> None:
    for start, end, block in product(range(12), range(12), BLOCKS):
        assert align.boundary_from(start, block) == multiples(block, start - 1, start + block)[0]
        for stop in range(12):
            inside = stop in range(start + 1, end)
            assert align.stop_inside(start, end, stop) == (stop if inside else end)
        if end >= start:
            blocks = len([n for n in range(start + 1, end + 1) if (n - start) % block == 0])
            assert align.junction_stop(start, end, block) == start + blocks * block
        for prefill_end, step_limit in product((0, 6, 12), (1, 3, 9)):
            expected = end
            if end < prefill_end and (multiples(block, start, end) or block <= step_limit):
                expected = ([0, *multiples(block, 0, end)])[-1]
            assert align.aligned_chunk_end(start, end, prefill_end, block, step_limit) == expected


def test_lookahead_reserve_is_the_longest_chunk_that_leaves_nothing_or_enough() -> None:
    for known, computed, scheduled, lookahead in product(range(10), range(10), range(10), range(5)):
        whole = [
            q for q in range(scheduled + 1) if not 0 < known - computed - q < lookahead
        ]  # chunks after which nothing, or enough, is left
        assert align.lookahead_reserve(known, computed, scheduled, lookahead) == (whole[-1] if whole else 0)


def test_chunks_subslots_and_bytes() -> None:
    for k, column in product(range(1, 6), range(20)):
        places = [(chunk, slot) for chunk in range(26) for slot in range(k)]
        assert (align.chunk_of_column(column, k), align.subslot(column, k)) == places[column]
        for ordinal in range(6):
            start = places.index((align.chunk_of_column(column, k), 0))
            position = align.landing_position(column, ordinal, k)
            assert places[start + position] == places[column + ordinal]
    for block_id, stride in product(range(6), range(1, 9)):
        assert align.byte_offset(block_id, stride) == len(b"x" * stride * block_id)


# --- the allocator's row, by moving blocks ------------------------------------------------------------------

NULL = 0


class Row:
    """A request's row of block ids as the allocator keeps it; block 0 is the null block."""

    def __init__(self, block: int, drafts: int) -> None:
        self.block, self.drafts = block, drafts
        self.columns: list[int] = []
        self.fresh = 1
        self.allocated = False
        self.last_state: int | None = None

    def allocate(self, end: int) -> None:
        """Allocate for a step that ends at `end` tokens, drafts included."""
        required = column_of_last_token(end, self.block) + 1 + self.drafts
        if required > len(self.columns):
            before = len(self.columns)
            if self.allocated:
                self.last_state = before - 1 - self.drafts
            elif before:
                self.last_state = before - 1
            running = required - self.drafts - 1
            while len(self.columns) < running:
                self.columns.append(NULL)
            if self.allocated:
                for column in range(before - self.drafts, before):
                    if column < running:
                        self.columns.append(self.columns[column])
                        self.columns[column] = NULL
            while len(self.columns) < required:
                self.columns.append(self.fresh)
                self.fresh += 1
        self.allocated = True

    def free(self, processed: int) -> None:
        """Free what no step after `processed` verified tokens reads."""
        for column in range(min(max(column_of_last_token(processed, self.block), 0), len(self.columns))):
            self.columns[column] = NULL
        if self.last_state is not None and self.last_state < column_of_last_token(processed, self.block):
            self.columns[self.last_state] = NULL


def test_row_matches_the_predicates() -> None:
    for block, drafts, first, second in product(range(1, 5), range(5), range(1, 12), range(12)):
        row = Row(block, drafts)
        row.allocate(first)
        columns, last = len(row.columns), row.columns[:]
        assert columns == align.required_columns(0, first, block, drafts)
        assert align.last_state_column(columns, drafts) == column_of_last_token(first, block)
        for column in range(columns):
            assert align.pads_column(column, 0, column_of_last_token(first, block)) == (last[column] == NULL)
        row.allocate(first + second)
        running = align.running_column(first, second, block)
        for column in range(len(row.columns)):
            padded = column >= columns and row.columns[column] == NULL
            moved = column < columns and last[column] != NULL and row.columns[column] == NULL
            assert align.pads_column(column, columns, running) == padded
            assert align.relocates_column(column, columns, running, drafts) == moved


def test_freed_columns_match_the_predicates() -> None:
    for block, drafts, first, second in product(range(1, 5), range(3), range(1, 12), range(4)):
        for processed in range(first + second + 1):
            row = Row(block, drafts)
            row.allocate(first)
            row.allocate(first + second)
            before, last_state = row.columns[:], row.last_state
            row.free(processed)
            for column, held in enumerate(before):
                freed = held != NULL and row.columns[column] == NULL
                expected = column < align.first_live_column(processed, block) or (
                    column == last_state and align.frees_last_state(column, processed, block)
                )
                assert freed == (expected and held != NULL)


# --- steps of a recurrent group -----------------------------------------------------------------------------


def acceptances(drafts: int, steps: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of accepted counts over so many decode steps."""
    return product(range(1, drafts + 2), repeat=steps)


def run_decode(block: int, drafts: int, prompt: int, accepted: tuple[int, ...]) -> list[str]:
    """Run decode steps after a prompt on a list of columns; what each column holds is the number of
    verified tokens folded into it.  Returns what went wrong: a stale read, or a boundary that its column
    does not hold."""
    columns = [-1] * (prompt + sum(accepted) + 3 * drafts + 3)
    running = align.seed_column(prompt, block)
    columns[running] = prompt
    computed, count, wrong = prompt, 1, []
    for a in accepted:
        scheduled = drafts + 1
        column = align.running_column(computed, scheduled, block)
        if running != column:
            columns[column] = columns[align.source_column(running, count)]
            count = 1
        running = column
        if columns[align.source_column(running, count)] != computed:
            wrong.append(f"step at {computed} reads another state")
        for i in range(scheduled):
            columns[running + i] = computed + 1 + i
        after = computed + a
        count = a
        if align.boundary_reached(after, a, block):
            destination = align.destination_column(after, block)
            columns[destination] = columns[running + align.boundary_offset(after, a, block)]
            if destination == running:
                count = 1
        for boundary in multiples(block, computed, after):
            if columns[boundary // block - 1] != boundary:
                wrong.append(f"boundary {boundary} is missing from its column")
        computed = after
    return wrong


@pytest.mark.parametrize("drafts", range(5))
def test_every_boundary_is_put_aside_while_a_step_fits_a_block(drafts: int) -> None:
    for block in range(drafts + 1, drafts + 5):
        for prompt in range(1, 2 * block + 1):
            for accepted in acceptances(drafts, 4):
                assert run_decode(block, drafts, prompt, accepted) == []


@pytest.mark.parametrize(("block", "drafts"), [(1, 1), (2, 2), (2, 4), (3, 3), (4, 5)])
def test_a_boundary_is_lost_once_a_step_is_longer_than_a_block(block: int, drafts: int) -> None:
    lost = [
        (prompt, accepted)
        for prompt in range(1, 2 * block + 1)
        for accepted in acceptances(drafts, 1)
        if run_decode(block, drafts, prompt, accepted)
    ]
    assert (2 * block - 1, (block + 1,)) in lost
