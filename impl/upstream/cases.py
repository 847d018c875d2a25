"""The configurations in which a release is checked, and what is expected of each.

A *default* case is what ``check`` runs.  A case of its own holds a defect that is known, upstream in public
or from here: it would end every run of a broader one.  ``repairs`` names what is repaired, or set to another
option, in a case so that something else can be seen (:mod:`impl.upstream.patches`, and the worker's in
:mod:`impl.upstream.workers`).

Prefix-cache retention: the releases' default (0), in pool and connector.  Window and state groups then keep
only what ends at a prompt's replay boundary or at a junction.  Cases with ``dense_retention`` set it to None.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
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
    run: tuple[str, ...] = ()  # tried first: found in a search over configurations, rare in this one

    def load(self) -> Config:
        """The configuration."""
        return load(self.config)


def load(name: str) -> Config:
    """A configuration of this package, a shipped one, or a file.  Raises :class:`ConfigError`."""
    path = FOLDER / f"{name}.toml"
    return configs.load(path) if path.exists() else configs.find(name)


# One-token prompts beside a decode are padded and run as a prefill (docs/findings.md): a case of its own.
TWO = Limits(shortest_prompt=2)

FLUSH, PUBLISH, OFFER = "flush_before_overwriting", "publish_computed_boundaries", "offers_still_held"
# Synchronous scheduling with stages and drafts goes wrong at once (stages-sync): repaired to see further.
CADENCE, RESERVE = "decode_cadence", "reserve_keeps_progress"
AHEAD, DENSE = "boundaries_within_hashes", "dense_retention"

HOLE = (
    "arrive r1 family=1 prompt=9 outputs=1", "quiet", "arrive r2 family=2 prompt=13 outputs=1", "quiet",
    "arrive r1 family=1 prompt=9 outputs=1", "quiet", "reset local", "arrive r2 family=1 prompt=5 outputs=1",
    "quiet",
)  # fmt: skip
LEFT_OUT = (
    "arrive r1 prompt=1 outputs=5", "arrive r2 prompt=15 outputs=1", "arrive r3 prompt=1 outputs=5",
    "arrive r4 prompt=1 outputs=5", "quiet",
)  # fmt: skip
ONE_PAST = (
    "arrive r1 prompt=13 outputs=1", "schedule", "work", "schedule", "work", "reset local",
    "arrive r2 prompt=13 outputs=1", "quiet",
)  # fmt: skip
DROPPED = (
    "arrive r1 family=3 prompt=14 outputs=1", "schedule", "work", "arrive r2 family=3 prompt=14 outputs=1",
    "schedule", "drain", "reset local", "schedule",
)  # fmt: skip
UNHASHED = (
    "arrive r1 family=1 prompt=17 outputs=1", "quiet", "arrive r2 family=1 prompt=17 outputs=1", "quiet",
)  # fmt: skip
# Reached rarely, and where a small edit of a release shows: a load beside a local hit with no other block
# free, a chunk that ends inside a block of a dropping group, a window of which the tier has evicted a part.
NONE_FREE = (
    "arrive r1 prompt=9 outputs=1", "schedule", "work", "schedule", "drain", "arrive r1 prompt=8 outputs=1",
    "schedule", "work", "schedule", "arrive r2 prompt=2 outputs=1", "run 0 load", "work", "schedule",
    "drain", "arrive r2 prompt=2 outputs=1", "arrive r1 family=1 prompt=15 outputs=1", "schedule", "work",
    "arrive r2 prompt=9 outputs=1", "quiet",
)  # fmt: skip
ENDS_INSIDE = (
    "arrive r1 prompt=4 outputs=1", "arrive r2 prompt=5 outputs=1", "schedule",
    "arrive r3 prompt=5 outputs=1", "work", "arrive r2 family=r2 prompt=2 outputs=1", "schedule", "work",
    "arrive r4 family=r3 prompt=2 outputs=1", "quiet",
)  # fmt: skip
PART_EVICTED = (
    "arrive r1 prompt=20 outputs=1", "schedule", "work", "schedule", "work",
    "arrive r1 family=r2 prompt=15 outputs=2", "reset local", "schedule", "work", "schedule", "drain",
    "schedule", "work", "schedule", "arrive r1 prompt=16 outputs=1", "quiet",
)  # fmt: skip

CASES: tuple[Case, ...] = (
    Case("attention", "attention", "one attention group, two ranks, offload", True),
    Case("attention-tight", "preempting", "attention and a window, offload, a pool that preempts", True,
         run=NONE_FREE),
    Case("retained-window", "retained-window", "a window with retained history, from the tier", True),
    Case("window-async", "window-async", "attention and a window, async, two stages, drafts", True),
    Case("hybrid", "hybrid-even", "attention and states, sync, one stage", True, TWO),
    Case("hybrid-tight", "hybrid-tight", "the same with a pool that preempts", True, TWO),
    Case("hybrid-async", "hybrid-pp4-async", "attention and states, async, four stages", True, TWO),
    Case("hybrid-lookahead", "hybrid-lookahead", "hashes that look ahead, async, two stages", True, TWO),
    Case("hybrid-uncached", "hybrid-uncached", "no prefix caching, async, three stages", True, TWO),
    Case("hybrid-partial", "hybrid-partial", "hits that end inside a block, async, two stages", True, TWO),
    Case("hybrid-offload", "mamba-offload", "attention and states, offload", True, TWO, runs=60),
    Case("hybrid-async-offload", "hybrid-async-offload", "the same, async, two stages of two", True, TWO),
    Case("hybrid-sync-pp", "hybrid-sync-pp", "the same, sync, three stages; its cadence repaired", True, TWO,
         (CADENCE,)),
    Case("drafts", "drafts", "one attention group with drafts, async, a pool that preempts", True),
    Case("three-kinds-tight", "three-kinds-tight", "a window beside states: a hit takes rounds", True, TWO),
    Case("window-drop", "window-drop", "a window that drops its tail, no offload", True, run=ENDS_INSIDE),
    Case("window-tiny-tier", "window-tiny-tier", "a window, and a host tier that refuses stores", True),
    Case("async-tight", "async-tight", "async, two stages: preemption with steps in flight", True, TWO),
    Case("v1", "v1", "the v1 runner: attention and states, sync", True, TWO),
    Case("v1-offload", "v1-offload", "the v1 runner with offload", True, TWO),
    # Cases of their own.
    Case("v1-async", "v1-async", "the v1 runner, async: accepted counts through host rows (open upstream)",
         limits=TWO, runs=60),
    Case("v1-left-out", "v1-left-out", "the v1 runner: a decode that one step leaves out", run=LEFT_OUT),
    Case("v1-left-out-repaired", "v1-left-out", "the same, repaired", run=LEFT_OUT,
         repairs=("counts_kept_while_left_out",)),
    Case("stages-sync", "stages-sync", "sync, two stages, drafts: a decode goes on without its token (open "
         "upstream)"),
    Case("stages-sync-repaired", "stages-sync", "the same, repaired", repairs=(CADENCE,)),
    Case("short-prompt", "hybrid-even", "a prompt of one token beside a decode"),
    Case("short-prompt-repaired", "hybrid-even", "the same, repaired", repairs=("padded_prompts_decode",)),
    Case("flush-order", "mamba-offload", "flush after zeroing and pre-copy; boundaries repaired",
         limits=TWO, repairs=(OFFER,), runs=260),
    Case("flush-repaired", "mamba-offload", "flush and boundaries repaired", limits=TWO,
         repairs=(FLUSH, OFFER), runs=60, choices=300),  # both requests at full length are rare: long walks
    Case("reused-offer", "reused-offer", "dense retention: a boundary block reused in its own pass",
         limits=TWO, repairs=(DENSE, FLUSH), runs=90),
    Case("reused-offer-repaired", "reused-offer", "repaired", limits=TWO,
         repairs=(DENSE, FLUSH, OFFER), runs=90),
    Case("early-boundary", "hybrid-sync-pp", "dense retention: boundaries offered before their step has run",
         limits=TWO, repairs=(DENSE, CADENCE, FLUSH, OFFER)),
    Case("early-boundary-repaired", "hybrid-sync-pp", "the same, repaired", limits=TWO,
         repairs=(DENSE, CADENCE, FLUSH, OFFER, PUBLISH)),
    Case("mtp-stall", "mtp-stall", "a multi-module drafter's reserve after the aligned split", limits=TWO),
    Case("mtp-stall-repaired", "mtp-stall", "repaired", limits=TWO, repairs=(RESERVE,)),
    Case("late-tail", "late-tail", "a state inside a block published late; the stall repaired", limits=TWO,
         repairs=(CADENCE, RESERVE), runs=60),
    Case("late-tail-repaired", "late-tail", "the same, repaired", limits=TWO,
         repairs=(CADENCE, RESERVE, "tails_not_published_late"), runs=60),
    Case("pool-one-short", "pool-one-short", "the smallest pool that start-up accepts: no room to copy"),
    Case("pool-one-short-repaired", "pool-one-more", "start-up counts the copy", repairs=("copies_counted",)),
    Case("lookup-past-hashes", "lookup-past-hashes", "lookahead hashes without a full-attention group"),
    Case("lookup-repaired", "lookup-past-hashes", "the same, repaired; a resend's boundary, too",
         repairs=("lookup_within_hashes", AHEAD)),
    Case("lookahead-boundary", "lookahead-boundary", "a window kept where a resend has no hash yet",
         run=UNHASHED),
    Case("lookahead-boundary-repaired", "lookahead-boundary", "the same, repaired", repairs=(AHEAD,),
         run=UNHASHED),
    Case("double-reset", "attention", "resets of the host tier", limits=Limits(resets_tier=True)),
    Case("double-reset-repaired", "attention", "the same, repaired", limits=Limits(resets_tier=True),
         repairs=("second_reset_adds",)),
    Case("dense-windows", "window-offload-coarse", "dense retention: a finished request's last segment",
         repairs=(DENSE,)),
    Case("dense-windows-repaired", "window-offload-coarse", "the same, repaired",
         repairs=(DENSE, "stale_windows_rescanned")),
    Case("chunk-hole", "chunk-hole", "chunks of two blocks: one is stored with a block missing", run=HOLE),
    Case("chunk-hole-repaired", "chunk-hole", "the same, repaired",
         repairs=("chunks_without_holes",), run=HOLE),
    Case("window-one-past", "window-one-past", "a window one token past whole chunks: no hit on the host",
         run=ONE_PAST),
    Case("window-one-past-repaired", "window-one-past", "the same, repaired",
         repairs=("window_looked_up_exactly",), run=ONE_PAST),
    Case("dropped-boundary", "dropped-boundary", "windows on the host where no resend resumes: the tail drop",
         run=DROPPED),
    Case("dropped-boundary-repaired", "dropped-boundary", "the same, repaired",
         repairs=("stores_at_dropped_boundary",), run=DROPPED),
    Case("dropped-tiny-tier", "dropped-tiny-tier", "the same in a tier that evicts",
         repairs=("stores_at_dropped_boundary",), run=PART_EVICTED),
    Case("single-group-drop", "single-group-drop", "one group drops two blocks of a prompt of whole blocks"),
    Case("single-group-drop-repaired", "single-group-drop", "the same, repaired",
         repairs=("single_group_looks_past",)),
    Case("split-divisor", "hybrid-pp1", "an attention block smaller than the state block (open upstream)",
         limits=TWO),
    Case("split-repaired", "hybrid-pp1", "the same, repaired", limits=TWO, repairs=("split_by_state_block",)),
    Case("late-rows", "hybrid-pp2-async-even", "late state copies, two stages, no offload", limits=TWO),
    Case("resume-column", "resume-column", "where a resumed request's state is looked for", limits=TWO,
         repairs=("split_by_state_block",)),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def find(name: str) -> Case:
    """What ``--config NAME|FILE`` means here: a case, else a configuration under the limits of none."""
    if name in BY_NAME:
        return BY_NAME[name]
    try:
        config = load(name)
    except ConfigError:
        if name.endswith(".toml") or "/" in name:
            raise
        near = get_close_matches(name, BY_NAME, n=1) or [next(iter(BY_NAME))]
        raise ConfigError(
            f"no case or configuration named {name!r}; `check --list` names the cases, such as {near[0]}"
        ) from None
    return Case(config.name, name, config.description)
