"""Faults of recurrent rows: divisors, boundaries, positional stores, mirrors, copies of tails."""

from __future__ import annotations

from spec.arith import align
from spec.arith.align import stop_inside
from spec.arith.division import round_down
from spec.config import Config, Group
from spec.faults.fault import DECISION, HARMLESS, LIVENESS, Fault
from spec.reference.decisions import V2_ORDER

ONE_CAT = "https://github.com/1CatAI/1Cat-vLLM/pull/249"


def smallest_block(config: Config, block: int) -> int:
    """The smallest block of all groups, as ``cache_config.block_size`` is at run time."""
    return min(group.block_tokens for group in config.groups)


def plain_reserve(known: int, computed: int, scheduled: int, block: int, lookahead: int) -> int:
    """The reserve of the releases, which knows nothing of blocks."""
    return align.lookahead_reserve(known, computed, scheduled, lookahead)


def every_group(group: Group) -> bool:
    """Recurrent groups too."""
    return True


def flush_after_zero() -> tuple[str, ...]:
    """The v2 step of vLLM 0.33.0: the flush waits only after zeroing, copy-on-write and pre-copy."""
    names = [name for name in V2_ORDER if name != "flush"]
    names.insert(names.index("forward"), "flush")
    return tuple(names)


def split_below_last(
    start: int, scheduled: int, prefill_end: int, block: int, step_tokens: int, last: int, tail: int
) -> int:
    """Ends on a boundary below the last checkpoint, and at it; past it wherever the budget ends."""
    end = start + scheduled
    if end < last:
        end = max(start, round_down(end, block))
    return (end if start >= prefill_end else stop_inside(start, end, last)) - start


FAULTS = (
    Fault(
        "seed-divides-by-smallest-block", "align_divisor", DECISION,
        "At admission the state column is (n - 1) // smallest block of all groups.",
        "the recurrent group's own block (MambaHybridModelState.add_request, from 0.32.0)",
        ("https://github.com/vllm-project/vllm/issues/53142",
         "https://github.com/vllm-project/vllm/pull/55507"),
        {"seed_divisor": smallest_block}, bites=("hybrid-pp1", "hybrid-pp2-async"), harmless=("hybrid-even",),
        why_harmless="all groups have one block size", cases=("vllm-53142", "vllm-55600"),
    ),
    Fault(
        "split-divides-by-smallest-block", "align_divisor", DECISION,
        "Prefill chunks are cut at multiples of the smallest block, so "
        "a chunk ends inside a recurrent block.",
        "open upstream: Scheduler._mamba_block_aligned_split",
        ("https://github.com/vllm-project/vllm/pull/54076",),
        {"split_divisor": smallest_block}, bites=("hybrid-odd",), harmless=("hybrid-even",),
        why_harmless="all groups have one block size", cases=("vllm-54076",),
    ),
    Fault(
        "split-below-last-checkpoint", "align_divisor", DECISION,
        "Prefill chunks end on boundaries only up to the last checkpoint, which the tail drop takes back by "
        "a block.  Past it a chunk may end inside a block, and the next one puts that column under the key "
        "of the boundary that it crosses.",
        "on boundaries on either side of it (Scheduler._mamba_block_aligned_split)",
        ("https://github.com/vllm-project/vllm/pull/51113",
         "https://github.com/vllm-project/vllm/issues/43559"),
        {"prefill_split": split_below_last}, bites=("tail-drop", "tail-drop-states"),
        harmless=("hybrid-pp1",),
        why_harmless="nothing is dropped: no boundary lies past the last checkpoint", cases=("vllm-51113",),
    ),
    Fault(
        "reserve-undoes-the-split", "align_divisor", LIVENESS,
        "The drafter's lookahead is reserved after the split: the chunk ends inside a block, from where the "
        "split stops at the boundary and the reserve takes all of it away again, for ever.",
        "no release: Scheduler._reserve_prefill_lookahead after _mamba_block_aligned_split",
        ("v1/core/sched/scheduler.py::Scheduler._reserve_prefill_lookahead",),
        {"reserve": plain_reserve},
        bites=("starved-split",), harmless=("hybrid-pp1",),
        why_harmless="one MTP module reads one token ahead",
        theorem="aligned split",
    ),
    Fault(
        "positional-store-of-states", "mtp_alias", DECISION,
        "Recurrent columns are stored by position, like attention, from the table as it stands.",
        "stored from exact hand-offs only (_build_aligned_boundary_store_jobs)", (ONE_CAT,),
        {"positional_group": every_group}, bites=("composed", "composed-pp4"), cases=("1cat-vllm-249",),
    ),
    Fault(
        "boundary-from-mirror", "mtp_alias", DECISION,
        "The block of a boundary is looked up in a copy of the table "
        "that only appends, scratch aliases included.",
        "the core names the block (take_boundary_state_offloads)",
        ("https://github.com/vllm-project/vllm/pull/51358", "https://github.com/LMCache/LMCache/pull/5004"),
        {"positional_group": every_group, "boundary_block": lambda table, mirror: mirror},
        bites=("mamba-offload", "composed-tight"), cases=("vllm-51358", "lmcache-5004"),
    ),
    Fault(
        "state-hit-in-the-same-step", "hit_lookup", DECISION,
        "A request may go on from a recurrent state that another one publishes in the same step.",
        "the admission waits one step (MambaManager.cached_blocks_this_step)",
        ("https://github.com/vllm-project/vllm/pull/29387",),
        {"same_step_hit": lambda now: True}, bites=("hybrid-pp1", "hybrid-pp2-async"), cases=("vllm-29387",),
    ),
    Fault(
        "boundary-published-before-its-step", "pp_delay", DECISION,
        "A boundary at a decode step's first token is published and offered "
        "to the store when the step is scheduled; an "
        "earlier stage moves the state to its column only pp steps later.",
        "no release; async scheduling is late enough by itself, sync with stages is not",
        ("v1/core/kv_cache_manager.py::KVCacheManager.allocate_slots",),
        {"publishes_unrun_boundary": lambda: True}, design="v2 sync", bites=("composed-sync", "hybrid-pp3"),
        harmless=("hybrid-pp1", "mamba-offload"),
        why_harmless="one stage: post-processing is over when the step is",
    ),
    Fault(
        "drop-ignored-by-states", "hit_lookup", HARMLESS,
        "When its peers drop the tail of a hit, the recurrent group does not.",
        "disputed upstream; kept by design", ("https://github.com/vllm-project/vllm/pull/48375",),
        {"mamba_drops": lambda: 0}, base={"mamba_drops": lambda: 1},
        harmless=("tail-drop", "tail-drop-states"),
        why_harmless="a published boundary holds exactly its verified tokens",
        exhausted=(
            "tail-drop-tiny", 9,
            ("arrive r1 prompt=3 outputs=4", "arrive r2 family=r1 prompt=1 outputs=2", "accept r1 drafts=0",
             "schedule", "work", "drain", "abort r1"),
        ),
        cases=("vllm-48375",),
    ),
    Fault(
        "tail-not-copied-away", "mtp_alias", DECISION,
        "A state published inside a block is left where its owner's next step overwrites it.",
        "copied, and the key moves to the copy (MambaManager._cache_partial_tail_block)",
        ("v1/core/single_type_kv_cache_manager.py::MambaManager",),
        {"copies_tail": lambda block: False}, bites=("partial-tails", "hybrid-pp1"),
    ),
    Fault(
        "tail-shared-by-its-hit", "ownership", DECISION,
        "A request that hits a prefix ending inside a block writes on in that very block.",
        "copy-on-write (SchedulerOutput.kv_cache_block_copies)",
        ("v1/core/kv_cache_manager.py::take_kv_cache_block_copies",),
        {"copies_adopted_tail": lambda block: False}, bites=("partial-tails", "hybrid-pp1"),
    ),
    Fault(
        "hit-covers-the-last-token", "align_divisor", DECISION,
        "A hit may cover all known tokens: the state already contains the token that is computed again.",
        "at most known tokens - 1 (get_computed_blocks)",
        ("https://github.com/vllm-project/vllm/pull/44599",),
        {"longest_hit": lambda known: known}, bites=("hybrid-pp1",), cases=("vllm-44599",),
    ),
    Fault(
        "flush-after-zeroing", "fence", DECISION,
        "The step zeroes fresh blocks and copies states before it waits for the stores that still read them.",
        "no release: the v1 runner flushes first, the v2 runner of 0.33.0 does not",
        ("v1/worker/gpu/model_runner.py::execute_model",),
        {"v2_order": flush_after_zero()}, bites=("mamba-offload", "composed-tight"),
        harmless=("plain-offload",),
        why_harmless="nothing is zeroed or copied without recurrent layers",
    ),
    Fault(
        "hit-column-relocated", "mtp_alias", DECISION,
        "The last columns of a row that a hit has made are taken for scratch and relocated: the cached state "
        "is overwritten.",
        "only rows that a step has grown have scratch (MambaManager._allocated_block_reqs)",
        ("v1/core/single_type_kv_cache_manager.py::MambaManager.allocate_new_blocks",),
        {"relocates": lambda allocated: True}, bites=("hybrid-pp1", "hybrid-even"), harmless=("no-caching",),
        why_harmless="no hits",
    ),
    Fault(
        "handed-off-block-reused", "mtp_alias", DECISION,
        "A boundary's block is stored as it was offered, though the block has been handed out again since.",
        "stored only while it is under that key (take_boundary_state_offloads)",
        (".../offloading/scheduler.py::_build_aligned_boundary_store_jobs",),
        {"hand_off_stands": lambda current: True}, bites=("state-fences",), harmless=("plain-offload",),
        why_harmless="no state group",
    ),
)  # fmt: skip
