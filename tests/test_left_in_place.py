"""What a finished request must leave behind: worked numbers, one clause of the predicate at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec.config import Config, named
from spec.mechanisms.lookup import (
    Served,
    chunks_stored,
    dropping,
    largest_chunk,
    left_in_place,
    must_find,
)
from spec.reference import Decisions, Reference
from spec.world import World


def served(prompt: int, outputs: int = 1, began: int = 0, alone: bool = True) -> Served:
    return Served(prompt, prompt + outputs - 1, began, alone)


@pytest.mark.parametrize(
    ("name", "prompt", "tokens"),
    [
        ("plain", 4, 0),  # a token is left to compute
        ("plain", 5, 4),
        ("plain", 13, 12),
        ("hybrid-even", 13, 12),  # the checkpoint of blocks of 4
        ("hybrid-odd", 24, 0),  # blocks of 6, 3 and 4: a hit at 12, and the split leaves the state of 20 only
        ("hybrid-odd", 13, 12),
        ("tail-drop-full", 8, 6),  # the last unit is dropped
        ("hash-lookahead", 5, 4),
        ("state-fences", 17, 16),
        ("starved-split", 10, 0),  # three modules read 3 ahead: the reserve may move the end at 8
        ("starved-split", 11, 8),
        ("window-offload", 9, 6),  # keys lag by 3 tokens: 6 + 3 <= 9
    ],
)
def test_on_the_device(name: str, prompt: int, tokens: int) -> None:
    assert left_in_place(named(name), served(prompt), host=False) == tokens


def test_every_boundary_is_left_where_no_step_holds_two_blocks() -> None:
    config = replace(named("hybrid-odd"), step_tokens=7)
    assert left_in_place(config, served(24), host=False) == 12


def test_nothing_is_left_without_caching() -> None:
    assert left_in_place(named("no-caching"), served(20), host=False) == 0


def test_keys_of_states_lag_unless_the_request_is_alone() -> None:
    config = named("composed")
    assert left_in_place(config, served(12), host=False) == 8
    assert left_in_place(config, served(12, alone=False), host=False) == 0


def test_the_host_holds_what_the_request_held() -> None:
    config = named("window-offload")
    assert left_in_place(config, served(9), host=True) == 8
    assert left_in_place(config, served(9, began=8), host=True) == 0  # its window began at the hit
    state = named("mamba-offload")
    assert left_in_place(state, served(9), host=True) == 8
    assert left_in_place(state, served(9, began=8), host=True) == 0  # the state was left by another request


def test_a_chunk_longer_than_the_window_may_never_be_whole() -> None:
    config = named("preempting")
    assert left_in_place(config, served(9), host=True) == 8
    assert left_in_place(replace(config, blocks_per_chunk=3), served(9), host=True) == 0


def resent(config: Config, decide: Decisions, *between: tuple[str, str]) -> World:
    world = World(config, lambda config, chains: Reference(config, chains, decide))
    for choice in (
        ("arrive", "r1", "0", 9, 1),
        ("quiet",),
        *between,
        ("arrive", "r2", "0", 9, 1),
        ("quiet",),
    ):
        world.choose(choice)
    return world


def test_an_eviction_without_need_is_no_excuse() -> None:
    class Forgets(Reference):
        """Forgets whatever a request gives back."""

        def drop_all(self, request):  # type: ignore[no-untyped-def]
            blocks = [block for cols in request.cols for block in cols if block]
            super().drop_all(request)
            for block in blocks:
                self.do(("evict", block))

    world = World(named("plain"), Forgets)
    for choice in (("arrive", "r1", "0", 9, 1), ("quiet",), ("arrive", "r2", "0", 9, 1), ("quiet",)):
        world.choose(choice)
    assert world.verdict and world.verdict.rule == "resend_is_hit"


def test_a_reset_is_one() -> None:
    config = named("plain")
    assert resent(config, Decisions()).tally["resend_is_hit"][1] == 1
    assert resent(config, Decisions(), ("reset", "local")).tally["resend_is_hit"][1] == 0
    offload = named("plain-offload")
    assert resent(offload, Decisions(), ("reset", "local")).tally["resend_is_hit"][1] == 1
    assert resent(offload, Decisions(), ("reset", "all")).tally["resend_is_hit"][1] == 0


def test_what_the_host_must_keep_depends_on_the_tier_and_on_the_drafters_mark() -> None:
    """Three alarms on released vLLM that were the model's: each condition changes what must be found."""
    config = named("plain-offload")
    whole = Served(prompt=13, computed=14, began=0, alone=True)
    stored = chunks_stored(config, whole)
    kept = left_in_place(replace(config, tier_chunks=stored + 1), whole, host=True)
    assert kept >= largest_chunk(config) > 0
    assert left_in_place(replace(config, tier_chunks=stored), whole, host=True) == 0
    marked = replace(config, groups=tuple(replace(group, drafter=True) for group in config.groups))
    assert not marked.tail_drop and not dropping(marked, host=False)
    assert dropping(marked, host=True) == marked.groups
    marked = replace(marked, tier_chunks=stored + 1)
    assert left_in_place(marked, whole, host=True) < kept == left_in_place(config, whole, host=False)
    roomy = replace(config, tier_chunks=stored + 1)
    lost = {"device": False, "host": True}  # what is found locally is left over from a reset
    assert must_find(roomy, whole, kept - largest_chunk(config), **lost) == kept
    assert must_find(roomy, whole, kept - largest_chunk(config) + 1, **lost) == 0
    assert must_find(roomy, whole, 0, device=False, host=False) == 0
