"""Deployments as data: one TOML format for geometry, proofs, walks, faults and releases.

A configuration names the cache groups of a model and how an engine serves it.  Every number carries its
unit in its name.  ``load`` reads a file, ``shipped`` lists what the repository ships; both refuse unknown
keys, wrong types and clashing numbers in one line (:class:`ConfigError`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names the two numbers (or the key) that clash."""


class Kind(StrEnum):
    """What a group keeps per token, hence which columns a hit needs (vLLM: ``KVCacheSpec`` subclasses)."""

    FULL = "full"  # every past token
    WINDOW = "window"  # the last ``window_tokens`` tokens
    CHUNKED = "chunked"  # chunked-local attention: the tokens of the current attention chunk
    MAMBA = "mamba"  # one recurrent state, kept at block boundaries ("align" mode)


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group: layers that share a block table (vLLM: ``KVCacheGroupSpec``)."""

    name: str
    kind: Kind
    block_tokens: int
    window_tokens: int = 0  # WINDOW: attention window; CHUNKED: attention chunk; else 0
    extra_tokens: int = 0  # WINDOW only: history retained for a drafter that re-reads it (extra_retained_tokens)
    drafter: bool = False  # read by the drafter: drops its tail when ``tail_drop`` is on (is_eagle_group)


@dataclass(frozen=True, slots=True)
class Config:
    """A deployment, and the bounds within which the model walks it."""

    name: str
    groups: tuple[Group, ...]
    # [cache]
    hash_block_tokens: int  # granularity of prefix hashes
    prefix_caching: bool = True
    tail_drop: bool = False  # drafter groups match one unit past the hit and drop it (use_eagle_block_drop)
    hash_lookahead_tokens: int = 0  # L: a block's hash also covers the L tokens after it; replaces the drop
    # [speculation]
    drafts: int = 0  # K
    draft_modules: int = 0  # MTP modules of the drafter; more than one re-reads retained history
    # [engine]
    runner: str = "v2"  # "v1" | "v2": the order of operations in a worker's step
    pp: int = 1
    tp: int = 1
    async_scheduling: bool = False
    # [offload]
    offload: bool = False
    blocks_per_chunk: int = 1
    offload_prompt_only: bool = False
    # [bounds]: how large the model's world is; geometry and proofs ignore them
    pool_blocks: int = 24  # the null block included
    tier_chunks: int = 16
    slots: int = 4
    step_tokens: int = 16  # token budget of a step
    request_tokens: int = 24  # longest prompt plus output
    # [source]: where the numbers come from, one line each, key -> text
    source: tuple[tuple[str, str], ...] = ()

    @property
    def ranks(self) -> int:
        """Number of workers that report: pipeline stages times tensor-parallel ranks."""
        return self.pp * self.tp
