"""The reference policy holds in any deployment that is accepted, not only in the shipped ones; and what the
geometry says must be left there is found."""

from __future__ import annotations

from random import Random

from hypothesis import assume, event, given
from hypothesis import strategies as st

from spec.config import Config, ConfigError, Group, Kind, check, dump
from spec.reference import Reference
from spec.walk import describe, walk_once
from spec.world import World


def deployment(random: Random) -> Config:
    """Any deployment: groups of several kinds and blocks, speculation, stages, ranks, offload, bounds."""
    drafts = random.choice((0, 0, 1, 2, 3, 4))
    modules = random.choice((0, 1, 1, 2, 3)) if drafts else 0
    ahead = 0 if not modules else drafts if min(modules, drafts) > 1 else 1
    unit = random.choice((1, 2, 4))
    drops = ahead > 0 and random.random() < 0.3

    def group(name: str, kind: Kind, most: int, window: int = 0, extra: int = 0) -> Group:
        drafter = drops and random.random() < 0.5
        return Group(name, kind, unit * random.randint(1, most), window, extra, drafter)

    groups = []
    if random.random() < 0.85:
        groups.append(group("full", Kind.FULL, 3))
    if random.random() < 0.5:
        groups.append(group("swa", Kind.WINDOW, 2, random.choice((1, 3, 4, 7, 8)), max(0, ahead - 1)))
    if random.random() < 0.2:
        groups.append(group("chunked", Kind.CHUNKED, 2, random.choice((4, 6, 8))))
    if random.random() < 0.6:
        groups.append(group("mamba", Kind.MAMBA, 3))
    if random.random() < 0.2:
        groups.append(group("second", Kind.FULL, 2))
    offload = random.random() < 0.5
    runner, asynchronous = random.choice(("v2", "v2", "v1")), random.random() < 0.5
    return Config(
        name="any",
        groups=tuple(groups),
        hash_block_tokens=unit,
        prefix_caching=random.random() < 0.9,
        tail_drop=drops,
        hash_lookahead_tokens=random.choice((0, 0, 1, 2)) if ahead and not (offload or drops) else 0,
        drafts=drafts,
        draft_modules=modules,
        runner=runner,
        pp=1 if runner == "v1" and asynchronous else random.choice((1, 1, 2, 3, 4)),
        tp=random.choice((1, 1, 2)),
        async_scheduling=asynchronous,
        offload=offload,
        blocks_per_chunk=random.choice((1, 1, 2, 3)) if offload else 1,
        offload_prompt_only=offload and random.random() < 0.3,
        pool_blocks=random.choice((20, 30, 45, 70)),
        tier_chunks=random.choice((1, 4, 12, 30)),
        slots=random.choice((1, 2, 3, 4)),
        step_tokens=random.choice((5, 8, 12, 20)),
        request_tokens=random.choice((8, 12, 20, 26)),
    )


@given(st.randoms(use_true_random=False), st.integers(0, 1_000_000))
def test_reference_holds_in_any_deployment(random: Random, seed: int) -> None:
    config = deployment(random)
    try:
        check(config)
    except ConfigError:
        assume(False)
    world = walk_once(config, Reference, seed, 0, 80).world
    assert world.verdict is None, f"{describe(world.verdict)}\nseed {seed}, 80 choices, in\n{dump(config)}"
    assert not world.disciplines, f"{world.disciplines}\nseed {seed}, 80 choices, in\n{dump(config)}"


@given(st.randoms(use_true_random=False), st.integers(1, 24), st.integers(1, 3), st.booleans())
def test_what_must_be_left_is_found(random: Random, prompt: int, outputs: int, cold: bool) -> None:
    config = deployment(random)
    try:
        check(config)
    except ConfigError:
        assume(False)
    assume(prompt + outputs <= config.request_tokens)
    world = World(config, Reference)
    first, again = (("arrive", name, "0", prompt, outputs) for name in ("r1", "r2"))
    for choice in (first, ("quiet",), *((("reset", "local"),) if cold else ()), again, ("quiet",)):
        world.choose(choice)
    event("something was demanded" if world.tally["resend_is_hit"][1] else "nothing was demanded")
    assert world.verdict is None, (
        f"{describe(world.verdict)}\n{prompt} and {outputs} tokens in\n{dump(config)}"
    )
