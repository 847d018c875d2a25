"""Deployments as data: one TOML format for geometry, proofs, walks, faults and releases.

A configuration names the cache groups of a model and how an engine serves it.  Every number carries its
unit in its name.  ``load`` reads a file, ``shipped`` lists what the repository ships, ``find`` takes either;
all refuse unknown keys, wrong types and clashing numbers in one line (:class:`ConfigError`).

The TOML mirrors the dataclasses below; ``name``, ``hash_block_tokens`` and one ``[[group]]`` are required::

    name = "example"
    description = "one line, shown by --list"
    [cache]        # hash_block_tokens, prefix_caching, tail_drop, hash_lookahead_tokens
    [speculation]  # drafts, draft_modules
    [engine]       # runner, pp, tp, async_scheduling
    [offload]      # enabled, blocks_per_chunk, prompt_only
    [bounds]       # pool_blocks, tier_chunks, slots, step_tokens, request_tokens
    [source]       # any key = "where the number comes from"
    [[group]]      # name, kind, block_tokens, window_tokens, extra_tokens, drafter
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from math import lcm
from pathlib import Path
from typing import Any

from spec.arith.division import cdiv

SHIPPED_FOLDERS = (Path(__file__).parent / "configs", Path(__file__).parent / "configs" / "models")
LARGEST_PARALLEL = 4  # pipeline stages, and ranks of one stage, that the model walks
LARGEST = 2**24  # of every number in a file; the longest contexts served have ten million tokens
LARGEST_CHUNK = 2**20  # tokens of a chunk, and after which all blocks repeat
LARGEST_BOUNDS = {  # of the model's world, which is built whole: some hundred megabytes at most
    "pool_blocks": 2**16,
    "tier_chunks": 2**16,
    "slots": 2**10,
    "step_tokens": 2**12,
    "request_tokens": 2**12,
}
LONGEST_MESSAGE = 400  # characters
BARE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names the two numbers (or the key) that clash.

    It is one line whatever a file's keys, names and values hold: control characters are escaped and a long
    text is cut in its middle.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        half = LONGEST_MESSAGE // 2
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} ... {text[-half:]}")


class Kind(StrEnum):
    """What a group keeps per token, hence which columns a hit needs (vLLM: ``KVCacheSpec`` subclasses)."""

    FULL = "full"  # every past token
    WINDOW = "window"  # the last ``window_tokens`` tokens
    CHUNKED = "chunked"  # chunked-local attention: the tokens of the current attention chunk
    MAMBA = "mamba"  # one recurrent state, kept at block boundaries ("align" mode)


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group: layers that share a block table (vLLM: ``KVCacheGroupSpec``)."""

    name: str  # what messages call it
    kind: Kind  # full, window, chunked (chunked-local attention) or mamba (any recurrent state)
    block_tokens: int  # tokens of a block
    window_tokens: int = 0  # window: the attention window; chunked: the attention chunk; else 0
    extra_tokens: int = 0  # window: history retained for a drafter that re-reads it (extra_retained_tokens)
    drafter: bool = False  # read by the drafter: drops its tail when tail_drop is on (is_eagle_group)


@dataclass(frozen=True, slots=True)
class Config:
    """A deployment, and the bounds within which the model walks it."""

    name: str  # lower case letters, digits, '.', '_' and '-'
    groups: tuple[Group, ...]
    # [cache]
    hash_block_tokens: int  # granularity of prefix hashes, in tokens; every group's block is a multiple of it
    prefix_caching: bool = True  # whether prefixes are found again
    tail_drop: bool = False  # drafter groups match one unit past the hit and drop it (use_eagle_block_drop)
    hash_lookahead_tokens: int = 0  # L: a block's hash also covers the L tokens after it; replaces the drop
    # [speculation]
    drafts: int = 0  # K, drafts of a decode step
    draft_modules: int = 0  # MTP modules; only as many as drafts run; 1: EAGLE; 0: reads no cache
    # [engine]
    runner: str = "v2"  # v1 or v2: the order of operations in a worker's step
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks of one stage
    async_scheduling: bool = False  # whether one more step is scheduled than there are stages
    # [offload]
    offload: bool = False  # whether there is a host tier
    blocks_per_chunk: int = 1  # blocks of a group in one host chunk
    offload_prompt_only: bool = False  # whether only blocks of prompts are stored
    # [bounds]: how large the model's world is; geometry and proofs ignore them
    pool_blocks: int = 24  # blocks of the device's pool, the null block included
    tier_chunks: int = 16  # chunks that the host tier holds
    slots: int = 4  # most requests in a batch
    step_tokens: int = 16  # token budget of a step
    request_tokens: int = 24  # longest prompt plus output
    # [source]: where the numbers come from, one line each, key -> text
    source: tuple[tuple[str, str], ...] = ()
    description: str = ""  # one line, for --list

    @property
    def ranks(self) -> int:
        """Number of workers that report: pipeline stages times tensor-parallel ranks."""
        return self.pp * self.tp

    @property
    def concurrent_batches(self) -> int:
        """Most steps scheduled and not yet processed (``max_concurrent_batches``)."""
        return self.pp + (1 if self.async_scheduling else 0)

    @property
    def prefill_lookahead_tokens(self) -> int:
        """Tokens past the computed range that the drafter reads (``num_prefill_lookahead_tokens``).

        K if the drafter runs several MTP modules, else 1; 0 if it reads no cache at all.
        """
        if self.drafts == 0 or self.draft_modules == 0:
            return 0
        return self.drafts if min(self.draft_modules, self.drafts) > 1 else 1

    @property
    def reprefilled_tokens(self) -> int:
        """Trailing tokens whose draft-layer cache may be rewritten (``num_reprefillable_tokens``).

        The same number is the ``extra_tokens`` of every window group.
        """
        return max(0, self.prefill_lookahead_tokens - 1)

    @property
    def scheduler_block_tokens(self) -> int:
        """Least common multiple of the groups' blocks (``resolve_kv_cache_block_sizes``)."""
        return lcm(*(group.block_tokens for group in self.groups))

    @property
    def partial_hits(self) -> bool:
        """Whether a local hit may end inside a block (``kv_cache_utils.py::partial_hash_hits_enabled``).

        That takes a Mamba group whose block is larger than the hash block, and no group that cannot look up
        inside a block: a window or chunked group unless its block is the hash block.
        """
        unit = self.hash_block_tokens
        coarse = any(g.kind is Kind.MAMBA and g.block_tokens > unit for g in self.groups)
        return coarse and all(
            g.kind in (Kind.FULL, Kind.MAMBA) or g.block_tokens == unit for g in self.groups
        )

    def dropping_groups(self) -> tuple[Group, ...]:
        """Groups that drop one unit of each hit: the drafter's, or all of them when none is flagged."""
        if not self.tail_drop:
            return ()
        return tuple(group for group in self.groups if group.drafter) or self.groups


# TOML key -> field of Config, table by table.  ``dump`` writes and ``parse`` reads by this list alone.
_TABLES: dict[str, dict[str, str]] = {
    "cache": {
        "hash_block_tokens": "hash_block_tokens",
        "prefix_caching": "prefix_caching",
        "tail_drop": "tail_drop",
        "hash_lookahead_tokens": "hash_lookahead_tokens",
    },
    "speculation": {"drafts": "drafts", "draft_modules": "draft_modules"},
    "engine": {"runner": "runner", "pp": "pp", "tp": "tp", "async_scheduling": "async_scheduling"},
    "offload": {
        "enabled": "offload",
        "blocks_per_chunk": "blocks_per_chunk",
        "prompt_only": "offload_prompt_only",
    },
    "bounds": {
        "pool_blocks": "pool_blocks",
        "tier_chunks": "tier_chunks",
        "slots": "slots",
        "step_tokens": "step_tokens",
        "request_tokens": "request_tokens",
    },
}
_TOP_LEVEL = {"name": "name", "description": "description"}
_GROUP_KEYS = {field.name: field.name for field in fields(Group)}

# Smallest admissible value of every integer field.
_LEAST = {
    "hash_block_tokens": 1,
    "hash_lookahead_tokens": 0,
    "drafts": 0,
    "draft_modules": 0,
    "pp": 1,
    "tp": 1,
    "blocks_per_chunk": 1,
    "pool_blocks": 2,
    "tier_chunks": 1,
    "slots": 1,
    "step_tokens": 1,
    "request_tokens": 2,
    "block_tokens": 1,
    "window_tokens": 0,
    "extra_tokens": 0,
}
_TYPE_WORDS = {"int": "an integer", "bool": "true or false", "str": "a string", "Kind": "a string"}


def load(path: str | Path) -> Config:
    """Read and check one TOML file.

    Raises :class:`ConfigError`, one line that begins with the path, if the file cannot be read or served.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # the path itself can be none: a NUL in it
        what = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"is no path: {error}"
        raise ConfigError(f"{path}: {what}") from None
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def shipped() -> dict[str, Path]:
    """The configurations that come with the repository: name -> file, walk configurations before models."""
    return {path.stem: path for folder in SHIPPED_FOLDERS for path in sorted(folder.glob("*.toml"))}


def named(name: str) -> Config:
    """Load a shipped configuration by name.  Raises :class:`ConfigError` that lists the names otherwise."""
    files = shipped()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3) or sorted(files)[:3]
        raise ConfigError(f"no configuration named {name!r}; --list names all, such as {', '.join(near)}")
    return load(files[name])


def find(name_or_path: str) -> Config:
    """What ``--config NAME|FILE`` means: a path (ends in ``.toml`` or has a slash), or a shipped name."""
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return load(name_or_path)
    return named(name_or_path)


def parse(text: str) -> Config:
    """Read and check one configuration from TOML text.  Raises :class:`ConfigError`."""
    try:
        data = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise ConfigError(f"not TOML: {error}") from None
    except RecursionError:
        raise ConfigError("not TOML that can be read: nested too deeply") from None
    _refuse_unknown(data, [*_TOP_LEVEL, *_TABLES, "source", "group"], "at the top level")
    values = _read(
        Config, {key: data[key] for key in _TOP_LEVEL if key in data}, _TOP_LEVEL, "at the top level"
    )
    for table, keys in _TABLES.items():
        if table in data:
            values |= _read(Config, _table(data[table], f"[{table}]"), keys, f"in [{table}]")
    if "offload" in data and "enabled" not in data["offload"]:
        raise ConfigError("[offload] lacks the key enabled; write enabled = true or enabled = false")
    values["groups"] = tuple(_groups(data.get("group", [])))
    values["source"] = tuple(_sources(data.get("source", {})))
    for key, where in (("name", "at the top level"), ("hash_block_tokens", "in [cache]")):
        if key not in values:
            raise ConfigError(f"missing key {key} {where}")
    return check(Config(**values))


def dump(config: Config) -> str:
    """The TOML text of a configuration; ``parse(dump(config)) == config``.  Defaults are left out."""
    lines = [f"name = {_toml(config.name)}"]
    if config.description:
        lines.append(f"description = {_toml(config.description)}")
    defaults = {field.name: field.default for field in fields(Config)}
    for table, keys in _TABLES.items():
        changed = {
            key: getattr(config, name)
            for key, name in keys.items()
            if getattr(config, name) != defaults[name]
        }
        if table == "offload" and changed:
            changed = {"enabled": config.offload} | changed
        lines += (
            ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in changed.items())]
            if changed
            else []
        )
    if config.source:
        lines += ["", "[source]", *(f"{_toml(key)} = {_toml(text)}" for key, text in config.source)]
    for group in config.groups:
        lines += ["", "[[group]]"]
        for field in fields(Group):
            value = getattr(group, field.name)
            if value != field.default:
                lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def check(config: Config) -> Config:
    """Return the configuration unchanged, or raise :class:`ConfigError` with the first problem found."""
    for problem in problems(config):
        raise ConfigError(problem)
    return config


def problems(config: Config) -> Iterator[str]:
    """Every reason why this configuration cannot be served, each one line naming the numbers that clash."""
    yield from _group_problems(config)
    yield from _cache_problems(config)
    yield from _speculation_problems(config)
    yield from _engine_problems(config)
    yield from _bound_problems(config)


def pool_blocks_of_one_request(config: Config) -> int:
    """Blocks that the longest request holds at most, over all groups, null block not counted.

    Full attention keeps every token and the lookahead; a window group keeps what a step may read plus what is
    in flight (``SlidingWindowManager`` admission cap); a Mamba group its running state, the one before and K
    scratch columns (``MambaSpec.max_memory_usage_bytes``).
    """
    total = 0
    in_flight_tokens = config.concurrent_batches * config.step_tokens
    for group in config.groups:
        whole = cdiv(config.request_tokens + config.drafts, group.block_tokens)
        if group.kind is Kind.WINDOW:
            kept_tokens = group.window_tokens - 1 + group.extra_tokens + in_flight_tokens
            total += min(whole, cdiv(kept_tokens, group.block_tokens) + 1)
        elif group.kind is Kind.MAMBA:
            total += 2 + config.drafts
        else:
            total += whole
    return total


# -- reading ---------------------------------------------------------------------------------------------


def _refuse_unknown(data: Mapping[str, object], known: list[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} {where}; known: {', '.join(known)}")


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a table, got {value!r}")
    return value


def _read(
    owner: type[Any], data: Mapping[str, object], keys: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Values by field name, types and smallest values checked."""
    _refuse_unknown(data, list(keys), where)
    by_name = {field.name: field for field in fields(owner)}
    return {keys[key]: _typed(by_name[keys[key]], key, value, where) for key, value in data.items()}


def _typed(field: Field[Any], key: str, value: object, where: str) -> object:
    expected = str(field.type)
    python_type = {"int": int, "bool": bool, "str": str, "Kind": str}[expected]
    if type(value) is not python_type:  # not isinstance: true is not a number here
        raise ConfigError(f"{key} {where} must be {_TYPE_WORDS[expected]}, got {value!r}")
    if isinstance(value, int) and expected == "int" and value < _LEAST[field.name]:
        raise ConfigError(f"{key} {where} must be at least {_LEAST[field.name]}, got {value}")
    most = LARGEST_BOUNDS.get(field.name, LARGEST)
    if isinstance(value, int) and value > most:
        raise ConfigError(f"{key} {where} must be at most {most}, got {value}")
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{key} {where} must be one printable line, got {value!r}")
    if expected == "Kind":
        if value not in list(Kind):
            raise ConfigError(f"{key} {where} must be one of {', '.join(Kind)}, got {value!r}")
        return Kind(str(value))
    return value


def _groups(value: object) -> Iterator[Group]:
    if not isinstance(value, list):
        raise ConfigError("groups are written [[group]], with two brackets")
    for number, entry in enumerate(value, start=1):
        table = _table(entry, f"[[group]] {number}")
        label = f"in [[group]] {table.get('name', number)!r}"
        values = _read(Group, table, _GROUP_KEYS, label)
        for field in fields(Group):
            if field.default is MISSING and field.name not in values:
                raise ConfigError(f"missing key {field.name} {label}")
        yield Group(**values)


def _sources(value: object) -> Iterator[tuple[str, str]]:
    for key, text in _table(value, "[source]").items():
        if not isinstance(text, str):
            raise ConfigError(f"{key} in [source] must be a string, got {text!r}")
        if not (key + text).isprintable():
            raise ConfigError(f"{key} in [source] must be one printable line, got {text!r}")
        yield key, text


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # a TOML basic string


# -- checking --------------------------------------------------------------------------------------------


def _group_problems(config: Config) -> Iterator[str]:
    if not BARE_NAME.fullmatch(config.name):
        yield f"name = {config.name!r} must be lower case letters, digits, '.', '_' and '-'"
    if not config.groups:
        yield "no [[group]]: a deployment has at least one cache group"
    seen: set[str] = set()
    for group in config.groups:
        if not group.name.strip():
            yield f"name = {group.name!r} of a group must not be blank"
        if group.name in seen:
            yield f"two groups are named {group.name!r}"
        seen.add(group.name)
        if group.kind in (Kind.WINDOW, Kind.CHUNKED) and group.window_tokens < 1:
            got = group.window_tokens
            yield f"group {group.name!r}: kind = {group.kind} needs window_tokens >= 1, got {got}"
        if group.kind in (Kind.FULL, Kind.MAMBA) and group.window_tokens:
            got = group.window_tokens
            yield f"group {group.name!r}: kind = {group.kind} has no window, got window_tokens = {got}"
        if group.kind is not Kind.WINDOW and group.extra_tokens:
            yield (
                f"group {group.name!r}: extra_tokens = {group.extra_tokens} is for kind = window, "
                f"this group has kind = {group.kind}"
            )
    mamba = [group for group in config.groups if group.kind is Kind.MAMBA]
    for group in mamba[1:]:
        if group.block_tokens != mamba[0].block_tokens:
            yield (
                f"Mamba groups need one block size: {mamba[0].name!r} has block_tokens = "
                f"{mamba[0].block_tokens}, {group.name!r} has {group.block_tokens}"
            )


def _cache_problems(config: Config) -> Iterator[str]:
    for group in config.groups:
        if group.block_tokens % config.hash_block_tokens:
            yield (
                f"hash_block_tokens = {config.hash_block_tokens} does not divide "
                f"block_tokens = {group.block_tokens} of group {group.name!r}"
            )
        if group.block_tokens * config.blocks_per_chunk > LARGEST_CHUNK:
            yield (
                f"blocks_per_chunk = {config.blocks_per_chunk} times block_tokens = {group.block_tokens} "
                f"of group {group.name!r} is more than {LARGEST_CHUNK} tokens a chunk"
            )
    if config.groups and config.scheduler_block_tokens > LARGEST_CHUNK:
        sizes = ", ".join(str(size) for size in sorted({group.block_tokens for group in config.groups}))
        yield (
            f"block_tokens = {sizes}: their least common multiple, which hits align to, is "
            f"{config.scheduler_block_tokens}, more than {LARGEST_CHUNK} tokens"
        )
    if config.groups and config.prefix_caching:
        yield from _chunked_problems(config)
    lookahead = config.hash_lookahead_tokens
    if lookahead and not config.prefix_caching:
        yield f"hash_lookahead_tokens = {lookahead} needs prefix_caching = true"
    if lookahead and config.tail_drop:
        yield f"hash_lookahead_tokens = {lookahead} replaces tail_drop = true: set one of them"
    if lookahead and config.offload:
        yield f"hash_lookahead_tokens = {lookahead} with offload enabled = true: a connector switches it off"
    if lookahead and not config.prefill_lookahead_tokens:
        yield _needs_drafter(f"hash_lookahead_tokens = {lookahead}", config)
    elif lookahead > config.prefill_lookahead_tokens:
        yield (
            f"hash_lookahead_tokens = {lookahead} is more than the {config.prefill_lookahead_tokens} that "
            f"drafts = {config.drafts} with draft_modules = {config.draft_modules} read past a hit"
        )
    if config.tail_drop and not config.prefill_lookahead_tokens:
        yield _needs_drafter("tail_drop = true", config)


def _chunked_problems(config: Config) -> Iterator[str]:
    """What the lookup of chunked-local groups asserts.

    Source: ``v1/core/single_type_kv_cache_manager.py::ChunkedLocalAttentionManager.find_longest_cache_hit``.
    """
    aligned = config.hash_block_tokens if config.partial_hits else config.scheduler_block_tokens
    for group in config.groups:
        if group.kind is not Kind.CHUNKED:
            continue
        if group in config.dropping_groups():
            yield (
                f"tail_drop = true with group {group.name!r} of kind = chunked: its lookup knows no drop; "
                "flag the drafter's group with drafter = true"
            )
        if group.block_tokens != aligned:
            yield (
                f"block_tokens = {group.block_tokens} of chunked group {group.name!r} differs from "
                f"{aligned}, which hits align to: its lookup needs them equal"
            )


def _needs_drafter(what: str, config: Config) -> str:
    return (
        f"{what} is for a drafter that reads the cache, "
        f"got drafts = {config.drafts} and draft_modules = {config.draft_modules}"
    )


def _speculation_problems(config: Config) -> Iterator[str]:
    if config.draft_modules and not config.drafts:
        yield f"draft_modules = {config.draft_modules} with drafts = 0: no module is ever run"
    for group in config.groups:
        if group.kind is Kind.MAMBA and config.drafts + 1 > group.block_tokens:
            yield (
                f"drafts + 1 = {config.drafts + 1} exceeds block_tokens = {group.block_tokens} of Mamba "
                f"group {group.name!r}: one step could cross two boundaries"
            )
        if group.kind is Kind.WINDOW and group.extra_tokens != config.reprefilled_tokens:
            yield (
                f"group {group.name!r}: extra_tokens = {group.extra_tokens}, but drafts = {config.drafts} "
                f"with draft_modules = {config.draft_modules} retains {config.reprefilled_tokens}"
            )
        if group.drafter and not config.prefill_lookahead_tokens:
            yield _needs_drafter(f"group {group.name!r}: drafter = true", config)
    drops = config.prefix_caching and config.tail_drop
    if drops and config.groups and config.scheduler_block_tokens < config.prefill_lookahead_tokens:
        yield (
            f"drafts = {config.drafts} read {config.prefill_lookahead_tokens} tokens past a hit, more than "
            f"the scheduler block of {config.scheduler_block_tokens} tokens that the tail drop gives back"
        )


def _engine_problems(config: Config) -> Iterator[str]:
    if config.runner not in ("v1", "v2"):
        yield f"runner = {config.runner!r} must be 'v1' or 'v2'"
    for name, value in (("pp", config.pp), ("tp", config.tp)):
        if value > LARGEST_PARALLEL:
            yield f"{name} = {value} is more than the {LARGEST_PARALLEL} that the model walks"
    if config.runner == "v1" and config.async_scheduling and config.pp > 1:
        yield f"runner = 'v1' with async_scheduling = true needs pp = 1, got pp = {config.pp}"


def _bound_problems(config: Config) -> Iterator[str]:
    if config.step_tokens < config.drafts + 1:
        yield (
            f"step_tokens = {config.step_tokens} is less than drafts + 1 = {config.drafts + 1}: "
            "no step could verify all drafts"
        )
    needed = pool_blocks_of_one_request(config)
    if config.pool_blocks - 1 < needed:
        yield (
            f"pool_blocks = {config.pool_blocks} (one is the null block) cannot hold one request of "
            f"request_tokens = {config.request_tokens}, which needs {needed}"
        )
