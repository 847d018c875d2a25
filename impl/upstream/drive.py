"""The adversary of a release: the walker's draws and Hypothesis', without what a release does not have.

Released workers assert that every transfer succeeds, so nothing fails here.  A reset of the host tier is left
out where a configuration does not ask for it: two of them without a step between are a known assertion, which
would end every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from spec.chains import Chains
from spec.config import Config, Kind, pool_blocks_of_one_request
from spec.faults import hunt
from spec.policy import Policy
from spec.walk import Adversary, Options, draw_options, driven
from spec.world import Choice, World

PolicyFactory = Callable[[Config, Chains], Policy]
Choices = tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the adversary of a configuration leaves alone."""

    resets_tier: bool = False
    shortest_prompt: int = 1


class Drawn(Adversary):
    """The walker's adversary within limits."""

    def __init__(self, config: Config, random: Random, options: Options, limits: Limits) -> None:
        own = {"fail": 0, "reset": 10} if limits.resets_tier else {"fail": 0}
        weights = tuple((kind, own.get(kind, weight)) for kind, weight in options.weights)
        super().__init__(config, random, replace(options, weights=weights))
        self.limits = limits

    def draw(self, world: World) -> Choice | None:
        """A choice that is possible now, or None if this draw found none."""
        choice = super().draw(world)
        if choice is None:
            return None
        if choice == ("reset", "all") and not self.limits.resets_tier:
            return None
        if choice[0] == "arrive" and choice[3] < self.limits.shortest_prompt:
            return None
        return choice


def run(
    config: Config, policy: PolicyFactory, random: Random, choices: int, limits: Limits
) -> tuple[World, Choices]:
    """One run: a busy phase, then a quiet one; and the choices that were made."""
    adversary = Drawn(config, random, draw_options(config, random), limits)
    world = World(config, policy)
    return world, tuple(driven(world, adversary, choices))


def walked(
    config: Config, policy: PolicyFactory, seed: int, number: int, choices: int, limits: Limits
) -> tuple[World, Choices]:
    """The walker's run of that number; determined by its arguments."""
    return run(config, policy, Random(f"{seed}/{config.name}/{number}"), choices, limits)


def generated(
    config: Config,
    policy: PolicyFactory,
    seed: int,
    examples: int,
    choices: int,
    limits: Limits,
    seen: Callable[[World, Choices], None],
) -> None:
    """Runs whose draws Hypothesis makes (``spec.faults.hunt.generated``)."""

    def one(random: Random) -> None:
        seen(*run(config, policy, random, choices, limits))

    hunt.generated(one, examples=examples, seed=seed)


def required(config: Config) -> dict[str, Callable[[World], int]]:
    """What must have happened in a configuration that permits it, and how often it did in a run."""
    needed: dict[str, Callable[[World], int]] = {}
    if config.offload:
        needed["external_hit"] = lambda world: world.witnesses["external_hit"]
        needed["flush_waited"] = lambda world: world.witnesses["flush_waited"]
    if config.pp > 1 and config.runner == "v2":
        needed["late_post_process"] = lambda world: sum(world.tally["late_row_still_occupied"])
    if config.pool_blocks - 1 < config.slots * pool_blocks_of_one_request(config):
        needed["preempted"] = lambda world: world.witnesses["preempted"]
    if any(group.kind is Kind.MAMBA for group in config.groups) and config.drafts:
        needed["crossing_with_accepted_offset"] = lambda world: world.witnesses[
            "crossing_with_accepted_offset"
        ]
    return needed
