"""Chunk ends predicted by the alignment formulas, against the scheduler of a release.

Needs a release in the cache directory (``python -m impl.upstream fetch 0.33.0``); skipped with a reason
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from impl.upstream.child import Child
from impl.upstream.env import Unavailable, prepared
from spec import arith
from spec.config import Config, Group, Kind

BLOCK = 8
DRAFTS = 3
HYBRID = Config(
    name="full + Mamba in blocks of 8",
    groups=(Group("full", Kind.FULL, BLOCK), Group("mamba", Kind.MAMBA, BLOCK)),
    hash_block_tokens=BLOCK,
    pool_blocks=60,
    request_tokens=64,
)
ONE_MODULE = replace(HYBRID, drafts=DRAFTS, draft_modules=1, tail_drop=True)
THREE_MODULES = replace(HYBRID, drafts=DRAFTS, draft_modules=DRAFTS, tail_drop=True)


@pytest.fixture(scope="module")
def release() -> Iterator[Child]:
    """The newest known release, one process for the module."""
    try:
        use = prepared("0.33.0")
    except Unavailable as error:
        pytest.skip(str(error))
    with Child(use) as child:
        yield child


def predicted(config: Config, prompt: int) -> list[int]:
    """The chunks that the formulas give a prompt that has the budget for itself; 0 where they never go on."""
    ahead = 0 if not config.drafts else config.drafts if config.draft_modules > 1 else 1
    last = arith.checkpoint_position(prompt, BLOCK, config.tail_drop, config.hash_lookahead_tokens)
    computed, chunks = 0, []
    while computed < prompt:
        asked = min(config.step_tokens, prompt - computed)
        split = arith.aligned_split(computed, asked, prompt, BLOCK, config.step_tokens, last, 0, 0, False)
        chunk = arith.lookahead_reserve(prompt, computed, split, ahead)
        chunks.append(chunk)
        if chunk == 0:
            break
        computed += chunk
    return chunks


def scheduled(child: Child, config: Config, prompt: int, quiet_steps: int) -> list[int]:
    """The chunks that the release schedules; 0 once it schedules nothing in so many steps."""
    child.new(config)
    child.ask("arrive", request="r", tokens=list(range(3, 3 + prompt)), output_tokens=1)
    chunks: list[int] = []
    quiet = 0
    while sum(chunks) < prompt and quiet < quiet_steps:
        out = child.ask("schedule")["out"]
        if chunk := out["tokens"].get("r", 0):
            chunks.append(chunk)
        else:
            quiet += 1
        child.ask("output", sampled={name: [5] for name in out["samples"]})
    return [*chunks, 0] if quiet else chunks


@pytest.mark.slow
@pytest.mark.parametrize("config", [HYBRID, ONE_MODULE, THREE_MODULES], ids=["no drafts", "1 module", "3"])
@pytest.mark.parametrize("step_tokens", [4, 8, 12, 16])
def test_chunks_are_the_predicted_ones(release: Child, config: Config, step_tokens: int) -> None:
    served = replace(config, step_tokens=step_tokens)
    for prompt in range(1, 34):
        assert scheduled(release, served, prompt, 3) == predicted(served, prompt), prompt


@pytest.mark.slow
def test_a_prompt_is_stranded_beside_two_decoding_requests(release: Child) -> None:
    """Theorem 17's witness in the release: with two requests decoding, 8 of 16 tokens of budget are left;
    the third prompt's chunk ends 2 tokens below a boundary, and it is not scheduled again even when it is
    alone."""
    release.new(replace(THREE_MODULES, step_tokens=16))
    for name, first in (("a", 20), ("b", 40)):
        release.ask("arrive", request=name, tokens=list(range(first, first + 8)), output_tokens=8)
    got: list[int] = []
    alone = 0
    for step in range(40):
        if step == 2:
            release.ask("arrive", request="r", tokens=list(range(100, 125)), output_tokens=1)
        out = release.ask("schedule")["out"]
        if step >= 2:
            got.append(out["tokens"].get("r", 0))
        alone += not out["tokens"]
        answers = {name: [5] for name in out["samples"]}
        release.ask("output", sampled=answers, drafts={name: [6] * DRAFTS for name in answers})
    assert got[:3] == [8, 8, 6]
    assert set(got[3:]) == {0}
    assert alone > 20
    assert arith.lookahead_reserve(25, 22, arith.aligned_split(22, 3, 25, BLOCK, 16, 16, 0, 0, False), 3) == 0
    assert arith.aligned_reserve(25, 16, 8, BLOCK, 3) == 8
