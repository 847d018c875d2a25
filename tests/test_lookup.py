"""The scans over data: the published worked numbers of the offload lookup, and each finder on small rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec import lookup
from spec.config import Config, Group, Kind


def deployment(*groups: Group, hash_block: int, **rest: object) -> Config:
    return Config("example", groups, hash_block, **rest)  # type: ignore[arg-type]


def full_and_window(
    full: int, window_block: int, blocks: int, window: int, extra: int, drop: str = ""
) -> Config:
    """A full and a window group under offload; ``drop`` names the groups that drop: f, w or both."""
    drafts = extra + 1 if extra else int(bool(drop))
    return deployment(
        Group("f", Kind.FULL, full, drafter="f" in drop),
        Group("w", Kind.WINDOW, window_block, window, extra, drafter="w" in drop),
        hash_block=16,
        tail_drop=bool(drop),
        drafts=drafts,
        draft_modules=2 if extra else drafts,
        offload=True,
        blocks_per_chunk=blocks,
    )


# Produced by running vLLM 0.33.0's connector scheduler under dense retention: sizes, prompt, dropping groups;
# then the hit, the window's chunks (base, at the hit), the chunks that the load names, and those that the
# store kept.
WORKED = [
    ((16, 16, 1, 32, 3), 65, "", 64, (3, 3), [1, 2, 3], range(4)),
    ((16, 16, 1, 32, 0), 65, "", 64, (2, 2), [2, 3], range(4)),
    ((16, 16, 1, 32, 1), 65, "", 64, (2, 2), [2, 3], range(4)),
    ((16, 16, 1, 32, 2), 65, "", 64, (3, 3), [1, 2, 3], range(4)),
    ((16, 16, 1, 33, 0), 65, "", 64, (3, 3), [2, 3], range(4)),
    ((16, 16, 2, 32, 3), 129, "", 128, (2, 2), [2, 3], range(4)),
    ((16, 16, 1, 32, 3), 81, "w", 64, (3, 3), [1, 2, 3], range(5)),
    ((16, 16, 1, 32, 3), 97, "fw", 80, (3, 3), [2, 3, 4], range(6)),
    ((64, 16, 1, 32, 3), 257, "", 256, (3, 3), [13, 14, 15], [i for i in range(16) if i % 4 >= 1]),
    ((64, 16, 1, 32, 0), 257, "", 256, (2, 2), [14, 15], [i for i in range(16) if i % 4 >= 2]),
    ((64, 16, 1, 32, 3), 300, "", 256, (3, 3), [13, 14, 15], [i for i in range(16) if i % 4 >= 1] + [16, 17]),
    ((16, 48, 1, 32, 3), 81, "", 48, (1, 1), [0], range(1)),
]


@pytest.mark.parametrize(("sizes", "prompt", "drop", "hit", "windows", "named", "kept"), WORKED)
def test_offload_lookup_gives_the_published_numbers(
    sizes: tuple[int, int, int, int, int],
    prompt: int,
    drop: str,
    hit: int,
    windows: tuple[int, int],
    named: list[int],
    kept: list[int],
) -> None:
    config = full_and_window(*sizes, drop=drop)
    window = config.groups[1]
    left = lookup.left_by(config, prompt, prompt)
    chunk = lookup.chunk_tokens(config, window)
    assert lookup.offload_hit(config, left.offload, prompt) == hit
    assert (lookup.window_chunks(config, window), lookup.window_chunks(config, window, hit)) == windows
    assert list(lookup.named_chunks(config, window, hit)) == named
    assert sorted(end // chunk - 1 for end in left.offload[1]) == list(kept)
    assert lookup.wrong_in_load(config, left.offload, hit) is None


def test_a_local_prefix_shortens_what_is_asked_and_named() -> None:
    config = full_and_window(16, 16, 1, 32, 3)
    left = lookup.left_by(config, 129, 129)
    assert lookup.offload_hit(config, left.offload, 129, 64) == 64
    assert list(lookup.named_chunks(config, config.groups[1], 128, 64)) == [5, 6, 7]
    assert list(lookup.named_chunks(config, config.groups[0], 128, 64)) == [4, 5, 6, 7]


def test_a_missing_chunk_of_the_window_moves_the_hit_left() -> None:
    config = full_and_window(16, 16, 1, 32, 3)
    full, window = lookup.left_by(config, 129, 129).offload
    assert lookup.offload_hit(config, (full, window - {6 * 16}), 129) == 80
    assert lookup.offload_hit(config, (full - {6 * 16}, window), 129) == 80
    assert lookup.offload_hit(config, (full - {16}, window), 129) == 0


def test_a_wrong_load_is_seen() -> None:
    config = full_and_window(16, 16, 1, 32, 3)
    full, window = lookup.left_by(config, 65, 65).offload
    wrong = lookup.wrong_in_load(config, (full, window - {32}), 64)
    assert wrong == "chunk 1 of group 'w' is named and absent"
    mamba = deployment(Group("f", Kind.FULL, 16), Group("s", Kind.MAMBA, 32), hash_block=16, offload=True)
    ends = lookup.left_by(mamba, 64, 64).offload
    assert lookup.wrong_in_load(mamba, ends, 48) == "group 's' loads the state after 64 tokens"
    assert lookup.wrong_in_load(mamba, ends, 32) is None


def ends(*groups: set[int]) -> lookup.Ends:
    return tuple(frozenset(group) for group in groups)


FULL4, MAMBA4 = Group("f", Kind.FULL, 4), Group("s", Kind.MAMBA, 4)
WINDOW2 = Group("w", Kind.WINDOW, 2, window_tokens=4)


def test_full_attention_needs_every_block() -> None:
    config = deployment(FULL4, hash_block=4)
    assert lookup.local_hit(config, ends({4, 8, 12}), 20) == 12
    assert lookup.local_hit(config, ends({4, 12}), 20) == 4
    assert lookup.local_hit(config, ends({8, 12}), 20) == 0
    assert lookup.local_hit(config, ends({4, 8, 12}), 12) == 8, "one token is left to compute"


def test_a_window_needs_its_last_blocks_or_all_from_the_start() -> None:
    config = deployment(WINDOW2, hash_block=2)
    assert lookup.local_hit(config, ends({6, 8}), 20) == 8
    assert lookup.local_hit(config, ends({8}), 20) == 0
    assert lookup.local_hit(config, ends({2}), 20) == 2
    assert lookup.local_hit(config, ends({2, 6, 8, 12}), 20) == 8


def test_a_windows_right_edge_is_on_the_common_alignment() -> None:
    config = deployment(FULL4, WINDOW2, hash_block=2)
    everything = {2, 4, 6, 8, 10}
    assert lookup.local_hit(config, ends({4, 8}, everything), 20) == 8
    assert lookup.local_hit(config, ends({4, 8, 12}, everything), 20) == 8


def test_chunked_local_attention_needs_the_current_attention_chunk() -> None:
    config = deployment(Group("c", Kind.CHUNKED, 2, window_tokens=8), hash_block=2)
    assert lookup.local_hit(config, ends({10, 12}), 14) == 12
    assert lookup.local_hit(config, ends({12}), 14) == 8, "nothing of the chunk is needed at its start"
    assert lookup.local_hit(config, ends({2}), 8) == 2


def test_a_mamba_group_needs_one_state() -> None:
    config = deployment(FULL4, MAMBA4, hash_block=4)
    assert lookup.local_hit(config, ends({4, 8, 12}, {8}), 20) == 8
    assert lookup.local_hit(config, ends({4, 8, 12}, {16}), 20) == 0


def test_the_drop_takes_one_unit_of_the_drafters_group_only_once() -> None:
    config = deployment(
        replace(FULL4, drafter=True), MAMBA4, hash_block=4, tail_drop=True, drafts=1, draft_modules=1
    )
    assert lookup.local_hit(config, ends({4, 8, 12}, {4, 8, 12}), 20) == 8
    assert lookup.local_hit(config, ends({4, 8, 12}, {4}), 20) == 4
    both = replace(config, groups=(FULL4, MAMBA4))
    assert [lookup.drops(both, group) for group in both.groups] == [True, False], (
        "the Mamba finder never drops"
    )


def test_fine_grained_hits_end_inside_a_block() -> None:
    config = deployment(FULL4, MAMBA4, hash_block=2)
    assert lookup.fine_grained(config) and lookup.local_alignment_tokens(config) == 2
    left = lookup.left_by(config, 7, 7)
    assert left.local == (frozenset({4, 6}), frozenset({4, 6}))
    assert lookup.local_hit(config, left.local, 7) == 6
    window = deployment(MAMBA4, WINDOW2, hash_block=1)
    assert not lookup.fine_grained(window), "a window group cannot look inside its block"


def test_the_hash_lookahead_hides_blocks_whose_next_tokens_are_not_shared() -> None:
    config = deployment(FULL4, hash_block=4, hash_lookahead_tokens=1, drafts=1, draft_modules=1)
    left = lookup.left_by(config, 20, 20)
    assert lookup.visible(left.local, 8, 1) == ends({4})
    assert lookup.visible(left.local, 9, 1) == ends({4, 8})


def test_one_step_prefill_leaves_the_checkpoint_and_an_end_on_a_boundary() -> None:
    config = deployment(FULL4, MAMBA4, hash_block=4, offload=True)
    assert lookup.left_by(config, 13, 13, lookup.one_state).local[1] == frozenset({12})
    assert lookup.left_by(config, 13, 13).local[1] == frozenset({4, 8, 12})
    assert lookup.left_by(config, 12, 12, lookup.one_state).local[1] == frozenset({8, 12})


def test_a_single_group_that_drops_looks_no_margin_further() -> None:
    single = deployment(replace(FULL4, drafter=True), hash_block=4, tail_drop=True, drafts=1, draft_modules=1)
    assert lookup.local_hit(single, ends({4, 8, 12}), 13) == 8
    assert lookup.local_hit(single, ends({4, 8, 12}), 12) == 4, "at most 11 tokens, less a block"
    several = replace(single, groups=(*single.groups, MAMBA4))
    assert lookup.local_hit(several, ends({4, 8, 12}, {4, 8}), 12) == 8


def test_groups_of_one_spec_are_looked_up_as_one() -> None:
    twin = replace(FULL4, name="g", drafter=True)
    config = deployment(FULL4, twin, MAMBA4, hash_block=4, tail_drop=True, drafts=1, draft_modules=1)
    assert [lookup.drops(config, group) for group in config.groups] == [False, True, False]
    assert [lookup.local_drops(config, group) for group in config.groups] == [True, True, False]
    assert lookup.local_hit(config, ends({4, 8}, {4, 8, 12}, {4, 8, 12}), 20) == 4


def test_a_full_group_and_one_other_are_asked_once() -> None:
    """Windows of one token need no block, but one is looked for: asked again, the window would find less."""
    window = Group("w", Kind.WINDOW, 1, window_tokens=1, drafter=True)
    full = Group("f", Kind.FULL, 1)
    config = deployment(full, window, hash_block=1, tail_drop=True, drafts=1, draft_modules=1)
    run, holes = {1, 2, 3, 4, 5}, {1, 2, 3, 4, 6, 8, 9}
    assert lookup.local_hit(config, ends(run, holes), 9) == 5


def test_the_tail_of_a_dropping_full_group_is_the_whole_prompts() -> None:
    config = deployment(
        replace(FULL4, drafter=True), MAMBA4, hash_block=2, tail_drop=True, drafts=1, draft_modules=1
    )
    assert lookup.left_by(config, 7, 7).local == ends({4, 6}, {4})
    assert lookup.left_by(replace(config, tail_drop=False), 7, 7).local == ends({4, 6}, {4, 6})
    assert lookup.left_by(config, 6, 6).local == ends({4, 6}, {4})
    assert lookup.left_by(replace(config, tail_drop=False), 6, 6).local == ends({4}, {4})


def test_the_report_of_a_prompt_cut_at_1616_is_reproduced() -> None:
    """A prompt of 4538 tokens with the drop was cut at 1616: the state at 3232 was never made."""
    block = 1616
    config = deployment(
        Group("f", Kind.FULL, block, drafter=True),
        Group("s", Kind.MAMBA, block),
        hash_block=block,
        tail_drop=True,
        drafts=1,
        draft_modules=1,
        offload=True,
    )
    left = lookup.left_by(config, 4538, 4538, lookup.one_state)
    assert left.local[1] == left.offload[1] == frozenset({1616})
    assert lookup.local_hit(config, left.local, 4538) == 1616


def test_the_tier_keeps_the_prompt_only_if_asked_and_no_boundary_inside_a_chunk() -> None:
    config = deployment(FULL4, MAMBA4, hash_block=4, offload=True, blocks_per_chunk=2)
    assert lookup.left_by(config, 8, 24).offload == ends({8, 16, 24}, {8, 16, 24})
    prompt_only = replace(config, offload_prompt_only=True)
    assert lookup.left_by(prompt_only, 8, 24).offload == ends({8}, {8})


def test_nothing_is_left_where_a_tier_is_off() -> None:
    config = deployment(FULL4, hash_block=4, prefix_caching=False)
    assert lookup.left_by(config, 20, 20) == lookup.Left(ends(set()), ends(set()))


@pytest.mark.parametrize(
    ("groups", "blocks", "expected"),
    [
        ((FULL4, WINDOW2), 2, 8),
        ((FULL4, Group("g", Kind.FULL, 8)), 1, None),
        ((WINDOW2, Group("s", Kind.MAMBA, 4)), 1, 4),
    ],
)
def test_store_alignment(groups: tuple[Group, ...], blocks: int, expected: int | None) -> None:
    config = deployment(*groups, hash_block=2, offload=True, blocks_per_chunk=blocks)
    assert lookup.store_alignment_tokens(config) == expected
