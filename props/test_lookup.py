"""The scans over data, whatever is present: what a hit promises is there, and no longer one could be.

Oracles here are written from the meaning of a hit alone (which positions each kind of group reads), not from
the scans.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, event, find, given, settings
from hypothesis import strategies as st

from spec import arith, gaps, lookup
from spec.config import Config, Group, Kind

HASH = 2
TOKENS = st.integers(1, 60)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, ...]:
    """One to three groups, at most one of them full; Mamba groups have one block size."""
    made = []
    if draw(st.booleans()):
        made.append(Group("full", Kind.FULL, draw(st.sampled_from([2, 4, 8]))))
    if draw(st.booleans()) or not made:
        window = draw(st.integers(2, 20))
        made.append(
            Group("window", Kind.WINDOW, draw(st.sampled_from([2, 4])), window, draw(st.integers(0, 5)))
        )
    if draw(st.booleans()):
        made.append(Group("state", Kind.MAMBA, draw(st.sampled_from([2, 4, 8]))))
    return tuple(made)


@st.composite
def situations(draw: st.DrawFn, offload: bool) -> tuple[Config, lookup.Ends, int]:
    """A deployment without drops, entries of which some are missing, and a prompt."""
    config = Config(
        "any",
        draw(groups()),
        HASH,
        offload=offload,
        blocks_per_chunk=draw(st.integers(1, 3)) if offload else 1,
    )
    tokens = draw(TOKENS)
    left = lookup.left_by(config, tokens, tokens)
    ends = left.offload if offload else left.local
    gone = draw(st.sets(st.integers(1, 60), max_size=4))
    return config, tuple(group - gone for group in ends), tokens


def serves_locally(config: Config, ends: lookup.Ends, hit: int) -> bool:
    """Whether every group has what the first step after `hit` tokens reads, position by position."""
    for group, present in zip(config.groups, ends, strict=True):
        block = group.block_tokens
        if group.kind is Kind.MAMBA:
            if hit not in present:
                return False
            continue
        first = 0 if group.kind is Kind.FULL else max(0, hit - group.window_tokens + 1)
        if any((position // block + 1) * block not in present for position in range(first, hit)):
            return False
    return True


@given(situations(offload=False))
def test_a_local_hit_is_served_and_is_the_longest_aligned_one(
    situation: tuple[Config, lookup.Ends, int],
) -> None:
    config, ends, tokens = situation
    assume(not lookup.fine_grained(config))  # entries inside a block have a test of their own
    align = lookup.local_alignment_tokens(config)
    best = max(
        (h for h in range(align, tokens, align) if serves_locally(config, ends, h)),
        default=0,
    )
    hit = lookup.local_hit(config, ends, tokens)
    event("hit" if hit else "no hit")
    assert hit == best


@given(situations(offload=True))
def test_whatever_an_offload_hit_names_is_there(situation: tuple[Config, lookup.Ends, int]) -> None:
    config, ends, tokens = situation
    hit = lookup.offload_hit(config, ends, tokens)
    assert 0 <= hit <= tokens
    if hit == 0:
        return
    wrong = lookup.wrong_in_load(config, ends, hit)
    event("wrong" if wrong else "right")
    explained = {gap.number for gap in gaps.gaps(config)} & gaps.LOADS
    assert wrong is None or explained, wrong


@given(situations(offload=True), st.integers(0, 60))
def test_fewer_entries_never_make_a_longer_hit(situation: tuple[Config, lookup.Ends, int], gone: int) -> None:
    config, ends, tokens = situation
    fewer = tuple(group - {gone} for group in ends)
    assert lookup.offload_hit(config, fewer, tokens) <= lookup.offload_hit(config, ends, tokens)
    assert lookup.local_hit(config, fewer, tokens) <= lookup.local_hit(config, ends, tokens)


def test_the_window_of_release_0_30_names_what_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail: without the extra tokens in the lookup, a load names an absent chunk."""
    monkeypatch.setattr(arith, "base_window_chunks", lambda w, e, t: arith.base_window_chunks_v0_30(w, t))
    monkeypatch.setattr(
        arith, "lookup_window_chunks", lambda h, w, e, t: arith.lookup_window_chunks_v0_30(h, w, t)
    )

    def names_absent(situation: tuple[Config, lookup.Ends, int]) -> bool:
        config, ends, tokens = situation
        hit = lookup.offload_hit(config, ends, tokens)
        return hit > 0 and "absent" in (lookup.wrong_in_load(config, ends, hit) or "")

    config, ends, tokens = find(situations(offload=True), names_absent, settings=settings(max_examples=2000))
    window = next(group for group in config.groups if group.kind is Kind.WINDOW)
    assert window.extra_tokens > 0
