"""Worked numbers for the alignment formulas: cases small enough to follow with a pencil, and those of
public reports."""

import pytest

from spec import arith

K, BLOCK = 2, 16


@pytest.mark.parametrize(
    ("computed", "accepted", "running", "copy", "next_count"),
    [
        # Three accepted across boundary 48: its state is the step's second, one column past the running one.
        (46, 3, 3, (4, 2), 3),
        # Three accepted up to boundary 48 exactly: the running column is the boundary's; the count restarts.
        (45, 3, 2, (4, 2), 1),
        # One accepted below the boundary: nothing is copied.
        (46, 1, 3, None, 1),
        # One accepted onto the boundary: its state is the running column's own first, in the column before.
        (47, 1, 3, (3, 2), 1),
        # Two of three accepted, the boundary behind them.
        (48, 2, 3, None, 2),
    ],
)
def test_post_process_of_a_decode_step(
    computed: int, accepted: int, running: int, copy: tuple[int, int] | None, next_count: int
) -> None:
    after = computed + accepted
    assert arith.running_column(computed, K + 1, BLOCK) == running
    assert arith.boundary_reached(after, accepted, BLOCK) == (copy is not None)
    count = accepted
    if copy is not None:
        source = running + arith.boundary_offset(after, accepted, BLOCK)
        assert (source, arith.destination_column(after, BLOCK)) == copy
        if copy[1] == running:
            count = 1
    assert count == next_count


def test_the_next_step_goes_on_from_the_last_accepted_token() -> None:
    # 46 tokens, three accepted: the state after 49 is in column 5, where the next step reads it.
    assert arith.source_column(arith.running_column(46, 3, BLOCK), 3) == 5
    assert arith.running_column(49, 3, BLOCK) == 3


def test_fewer_drafts_can_move_the_running_column_back() -> None:
    # Three tokens scheduled after 46 run in column 3.  One is accepted, the next step has no draft: column 2.
    assert arith.running_column(46, 3, BLOCK) == 3
    assert arith.running_column(47, 1, BLOCK) == 2


def test_a_prompt_of_106_tokens_in_four_chunks() -> None:
    # Chunks of 16, 64, 16 and 10 tokens, two drafts: the running column and the row's length after each.
    ends = (16, 80, 96, 106)
    running = [arith.running_column(0, end, BLOCK) for end in ends]
    assert running == [0, 4, 5, 6]
    columns = [arith.required_columns(0, end, BLOCK, K) for end in ends]
    assert columns == [3, 7, 8, 9]
    assert [arith.last_state_column(n, K) for n in columns] == running
    # The second chunk jumps from column 0 to 4: scratch columns 1 and 2 move, column 3 never has a block.
    assert [arith.relocates_column(c, columns[0], 4, K) for c in range(7)] == [False, True, True] + [
        False
    ] * 4
    assert [arith.pads_column(c, columns[0], 4) for c in range(7)] == [False] * 3 + [True] + [False] * 3
    # Later chunks advance by one column and move nothing.
    assert not any(arith.relocates_column(c, columns[1], 5, K) for c in range(8))


@pytest.mark.parametrize(
    ("processed", "first_live", "frees_column_5"),
    [(96, 5, False), (97, 6, True), (106, 6, True), (112, 6, True), (113, 7, True)],
)
def test_what_is_freed_once_tokens_are_processed(
    processed: int, first_live: int, frees_column_5: bool
) -> None:
    assert arith.first_live_column(processed, BLOCK) == first_live
    assert arith.frees_last_state(5, processed, BLOCK) == frees_column_5


@pytest.mark.parametrize(
    ("tokens", "divisor", "block", "wrong", "right"),
    [
        (134400, 16, 4480, 8399, 29),  # https://github.com/vllm-project/vllm/issues/53142
        (1600, 4, 1600, 399, 0),
        (64, 16, 880, 3, 0),
    ],
)
def test_seed_column_by_another_groups_block(
    tokens: int, divisor: int, block: int, wrong: int, right: int
) -> None:
    assert arith.seed_column(tokens, divisor) == wrong
    assert arith.seed_column(tokens, block) == right


def test_a_fresh_request_has_no_seed() -> None:
    assert arith.seed_column(0, BLOCK) == -1
    assert arith.aligned_first_column(0, BLOCK) == 0


@pytest.mark.parametrize(
    ("args", "scheduled"),
    [
        # start, scheduled, prefill_end, block, step_limit, last, tail, junction, exports
        ((0, 64, 65, 16, 64, 48, 0, 0, False), 48),  # stops at the last checkpoint
        ((48, 64, 65, 16, 64, 48, 0, 0, False), 64),  # final: not split
        ((0, 40, 65, 16, 64, 48, 0, 0, False), 32),  # moved down to a boundary
        ((0, 10, 65, 16, 64, 48, 0, 0, False), 0),  # no boundary within the budget: not in this step
        ((0, 10, 65, 16, 10, 48, 0, 0, False), 10),  # no step can hold a block: advances inside it
        ((10, 10, 65, 16, 10, 48, 0, 0, False), 6),  # and stops at the block's end
        ((0, 64, 65, 16, 64, 48, 0, 24, False), 16),  # a prefix shared up to 24: whole blocks only
        ((48, 16, 60, 16, 64, 48, 56, 0, False), 8),  # the partial tail's checkpoint
        ((8, 57, 65, 16, 64, 48, 0, 0, True), 57),  # an exporting backend is not cut
        ((65, 3, 65, 16, 64, 48, 0, 0, False), 3),  # decode
    ],
)
def test_split(args: tuple[int, int, int, int, int, int, int, int, bool], scheduled: int) -> None:
    assert arith.aligned_split(*args) == scheduled


def test_chunks_cut_on_another_groups_grid() -> None:
    # https://github.com/vllm-project/vllm/pull/54076: 816 where the recurrent block is 1648.
    end = arith.aligned_split(0, 2048, 4000, 816, 2048, 0, 0, 0, False)
    assert (end, end % 1648) == (1632, 1632)
    assert arith.aligned_split(0, 2048, 4000, 1648, 2048, 0, 0, 0, False) == 1648


def test_reserve_after_the_split_strands_a_prefill() -> None:
    # 65 tokens in 16-token blocks, a drafter that reads 3 ahead.
    def split(start: int, budget: int) -> int:
        return arith.aligned_split(start, min(budget, 65 - start), 65, 16, 64, 0, 0, 0, False)

    def release(start: int, budget: int) -> int:
        return arith.lookahead_reserve(65, start, split(start, budget), 3)

    def corrected(start: int, budget: int) -> int:
        return arith.aligned_reserve(65, start, split(start, budget), 16, 3)

    assert release(0, 64) == 62
    assert [release(62, budget) for budget in (1, 2, 3, 64)] == [0, 0, 0, 0]
    assert corrected(0, 64) == 48
    assert corrected(48, 64) == 17


@pytest.mark.parametrize(
    ("tokens", "drop", "lookahead", "position"),
    [
        (65, False, 0, 64),
        (64, False, 0, 48),
        (65, False, 3, 48),
        (67, False, 3, 64),
        (65, True, 0, 48),
        (15, True, 0, 0),
    ],
)
def test_checkpoint_position(tokens: int, drop: bool, lookahead: int, position: int) -> None:
    assert arith.checkpoint_position(tokens, BLOCK, drop, lookahead) == position


def test_registration_in_decode_needs_a_lookahead() -> None:
    # 47 tokens computed, 48 known, three scheduled: boundary 48 is registered with the step that computes it.
    assert arith.boundary_registrable(48, 47, 3, 48, 0)
    assert not arith.boundary_registrable(48, 47, 3, 48, 1)
    assert arith.boundary_registrable(48, 48, 3, 49, 1)


def test_blocks_land_by_their_ordinal() -> None:
    # Columns 4, 6 and 7 of a chunk of 4: column 5 was not listed, so the next two land one sub-slot too low.
    assert [arith.landing_position(4, ordinal, 4) for ordinal in range(3)] == [0, 1, 2]
    assert [arith.subslot(column, 4) for column in (4, 6, 7)] == [0, 2, 3]
    # A job that begins in mid-chunk skips the sub-slots before.
    assert arith.landing_position(6, 2, 4) == 4
    assert (arith.chunk_of_column(6, 4), arith.chunk_of_column(8, 4)) == (1, 2)


def test_block_1024_of_2_mib_needs_more_than_32_bits() -> None:
    assert arith.byte_offset(1023, 2 * 1024 * 1024) <= 2**31 - 1 < arith.byte_offset(1024, 2 * 1024 * 1024)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arith.seed_column(64, 0), "seed_column: block must be at least 1, got 0"),
        (lambda: arith.seed_column(-1, 16), "seed_column: computed must be at least 0, got -1"),
        (
            lambda: arith.boundary_run(2, 3),
            "boundary_run: accepted must be at most after (2), got 3",
        ),
        (
            lambda: arith.checkpoint_position(64, 16, 1, 0),
            "checkpoint_position: drop must be True or False, got 1",
        ),
        (lambda: arith.byte_offset(True, 16), "byte_offset: block_id must be an integer, got True"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(arith.ArithError) as error:
        call()
    assert str(error.value) == message
