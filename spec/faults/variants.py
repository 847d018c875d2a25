"""Configurations near a given one, in which room is scarce or the runner is another: where a fault that the
given one does not show may show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spec.config import Config, pool_blocks_of_one_request, problems

NULL_BLOCK = 1
FEW_CHUNKS = 2  # of a tier that a load and a store fill
TOLD = ("tp", "tier_chunks", "request_tokens", "drafts", "async_scheduling", "pool_blocks")
Changes = dict[str, Any]


def variants(config: Config) -> Iterator[tuple[str, Config]]:
    """Each variant that can be served, and how it is told: its origin ``with`` the numbers that differ.

    A host tier of a few chunks, read and written by two ranks; pools that hold one or two of the longest
    requests; short requests; the other kind of scheduling; at last short requests without drafts, who
    reuse blocks soonest.  A variant's name says what differs, too, so that its runs are its own
    (:func:`spec.walk.walk_once`)."""
    known = {config}
    for changes in scarce(config):
        differ = {name: value for name, value in changes.items() if value != getattr(config, name)}
        varied = replace(config, **differ)
        if varied in known or any(problems(varied)):
            continue
        known.add(varied)
        words = [(name, str(value).lower()) for name, value in differ.items() if name in TOLD]
        told = ", ".join(f"{name} = {value}" for name, value in words)
        named = ".".join((config.name, *(f"{name}-{value}" for name, value in words)))
        yield f"{config.name} with {told}", replace(varied, name=named, description="", source=())


def scarce(config: Config) -> Iterator[Changes]:
    """The fields of all variants that are thought of."""
    other: Changes = {"async_scheduling": not config.async_scheduling}
    short: Changes = {"request_tokens": shortest_requests(config)}
    if config.offload:
        for changes in ({}, other):
            few = {"tp": max(2, config.tp), "tier_chunks": FEW_CHUNKS, **changes}
            yield few | pool_for(config, 2, few)
    for requests, changes in ((1, {}), (2, {}), (1, other), (1, short)):
        yield changes | pool_for(config, requests, changes)
    if config.drafts:
        plain = without_drafts(config)
        short_plain = plain | {"request_tokens": shortest_requests(replace(config, **plain))}
        for changes in (short_plain, short_plain | other):
            yield changes | pool_for(config, 1, changes)


def without_drafts(config: Config) -> Changes:
    """What a model without a drafter has otherwise."""
    groups = tuple(replace(group, extra_tokens=0, drafter=False) for group in config.groups)
    drops = {"tail_drop": False, "hash_lookahead_tokens": 0}
    return {"drafts": 0, "draft_modules": 0, "groups": groups, **drops}


def shortest_requests(config: Config) -> int:
    """Tokens of requests that still fill a block of every group and begin another one, drafts included."""
    return min(config.request_tokens, max(group.block_tokens for group in config.groups) + config.drafts + 2)


def pool_for(config: Config, requests: int, changes: Changes) -> Changes:
    """The pool that holds so many of the longest requests in the changed configuration, if it is smaller than
    the given one."""
    blocks = requests * pool_blocks_of_one_request(replace(config, **changes)) + NULL_BLOCK
    return {"pool_blocks": min(config.pool_blocks, blocks)}
