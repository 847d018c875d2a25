"""The configurations in which a release is checked, and what is expected of each.

A *default* case is what ``check`` runs.  A case of its own holds a defect that is known, upstream in public or
from here: it would end every run of a broader one.  ``repairs`` names what is repaired in a case so that
something else can be seen (:mod:`impl.upstream.patches`, and the worker's in :mod:`impl.upstream.workers`).

Prefix-cache retention: the releases' default (0) is kept in every case.  Window and state groups then keep
only what ends at a prompt's replay boundary or at a junction; dense retention is an option of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from impl.upstream.drive import Limits
from spec import config as configs
from spec.config import Config, ConfigError

FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration, how it is driven, and why it is here."""

    name: str
    config: str  # name of a configuration here or under spec/configs
    why: str
    default: bool = False
    limits: Limits = Limits()
    repairs: tuple[str, ...] = ()
    runs: int = 30
    choices: int = 150

    def load(self) -> Config:
        """The configuration."""
        return load(self.config)


def load(name: str) -> Config:
    """A configuration of this package, a shipped one, or a file.  Raises :class:`ConfigError`."""
    path = FOLDER / f"{name}.toml"
    return configs.load(path) if path.exists() else configs.find(name)


# One-token prompts beside a decode are padded and run as a prefill (docs/findings.md): kept to a case of its own.
TWO = Limits(shortest_prompt=2)

CASES: tuple[Case, ...] = (
    Case("attention", "plain-offload", "one attention group, two ranks, offload", True),
    Case("attention-tight", "preempting", "attention and a window, offload, a pool that preempts", True),
    Case("retained-window", "restore-small", "a window with retained history, restored from the tier", True),
    Case("window-async", "window-async", "attention and a window, async, two stages, drafts", True),
    Case("hybrid", "hybrid-even", "attention and states, sync, one stage", True, TWO),
    Case("hybrid-async", "hybrid-pp4-async", "attention and states, async, four stages", True, TWO),
    Case("hybrid-lookahead", "hash-lookahead", "hashes that look ahead, async, two stages (0.33.0)", True, TWO),
    Case("hybrid-uncached", "no-caching", "states without prefix caching, async, three stages", True, TWO),
    Case("hybrid-partial", "partial-tails", "hits that end inside a block, async, two stages", True, TWO),
    Case("hybrid-offload", "mamba-offload", "attention and states, offload", True, TWO),
    Case("hybrid-sync-pp", "hybrid-pp3", "attention and states, sync, three stages", True, TWO),
    Case("short-prompt", "hybrid-even", "prompts of one token beside a decode"),
    Case("split-divisor", "hybrid-pp1", "an attention block smaller than the state block (open upstream)"),
    Case("late-rows", "hybrid-pp2-async-even", "late state copies, two stages", limits=TWO),
    Case("resume-column", "hybrid-pp1", "where a resumed request's state is looked for", limits=TWO,
         repairs=("split_by_state_block", "flush_before_overwriting")),
    Case("mtp-stall", "mtp-stall", "a multi-module drafter's reserve after the aligned split", limits=TWO),
    Case("lookup-past-hashes", "lookup-past-hashes", "lookahead hashes without a full-attention group"),
    Case("double-reset", "plain-offload", "resets of the host tier", limits=Limits(resets_tier=True)),
    Case("flush-repaired", "mamba-offload", "hybrid-offload with the flush before what it protects", limits=TWO,
         repairs=("flush_before_overwriting",)),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def find(name: str) -> Case:
    """What ``--config NAME|FILE`` means here: a case, else a configuration under the limits of none."""
    if name in BY_NAME:
        return BY_NAME[name]
    try:
        config = load(name)
    except ConfigError as error:
        if name.endswith(".toml") or "/" in name:
            raise
        raise ConfigError(f"{error}; cases: {', '.join(BY_NAME)}") from None
    return Case(config.name, name, config.description)
