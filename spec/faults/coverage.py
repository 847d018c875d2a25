"""Faults of coverage: what lookup checks, what the store keeps, what is handed over."""

from __future__ import annotations

from spec.arith import coverage
from spec.config import Group, Kind
from spec.faults.fault import CONFIGURATION, DECISION, FORMULA, Fault
from spec.policy import PolicyError
from spec.reference import decisions

REPORT = "https://github.com/vllm-project/vllm/issues/56701"
REPAIR = "https://github.com/vllm-project/vllm/pull/56709"


def lookup_without_extra(group: Group, hit: int, local: int, chunk: int) -> int:
    """The lookup of 0.30.0: the window, not the tokens that the drafter re-reads."""
    window = coverage.lookup_window_chunks_v0_30(hit, group.window_tokens, chunk)
    return coverage.first_checked_chunk(hit, local, window, chunk)


def store_without_extra(group: Group, drops: int) -> int:
    """The store mask of 0.30.0."""
    return coverage.store_need_blocks_v0_30(group.window_tokens, group.block_tokens, drops)


def store_without_drop(group: Group, drops: int) -> int:
    """A writer that keeps the window, where a reader that drops its tail needs one block more."""
    return coverage.store_need_blocks_corrected(
        group.window_tokens, group.extra_tokens, group.block_tokens, 0
    )


def knows_no_chunks(group: Group, hit: int, local: int, chunk: int) -> int:
    """A helper that was written before chunked-local attention.  Raises :class:`PolicyError` for it."""
    if group.kind is Kind.CHUNKED:
        raise PolicyError(f"load window of group {group.name}: unknown kind {group.kind}")
    return decisions.lookup_first(group, hit, local, chunk)


FAULTS = (
    Fault(
        "lookup-without-extra", "coverage", DECISION,
        "Lookup checks the window's chunks; the restore also names those of the extra retained tokens.",
        "the extra tokens are counted (load_window_size_in_chunks, from 0.31.0)", (REPORT, REPAIR),
        {"lookup_first": lookup_without_extra}, bites=("restore-small",),
        harmless=("mamba-offload",), why_harmless="no window", cases=("vllm-56709",),
        theorem="chunk coverage", formula="0.30.0: lookup window",
    ),
    Fault(
        "inflight-check-without-extra", "coverage", FORMULA,
        "The check against loads in flight leaves the extra tokens' chunks out.",
        "counted from 0.31.0 on", (REPAIR,),
        theorem="in-flight loads", formula="0.30.0: in-flight check",
    ),
    Fault(
        "store-mask-without-extra", "coverage", DECISION,
        "The store keeps a window before each boundary, not the extra tokens: no hit is ever complete.",
        "the mask's window is W + e (from 0.31.0)", (REPAIR,),
        {"store_window": store_without_extra}, bites=("window-offload-coarse",), harmless=("window-offload",),
        why_harmless="segments are so short that every block is kept",
        theorem="store and lookup agree", formula="every multiple of F",
    ),
    Fault(
        "store-mask-without-drop", "coverage", DECISION,
        "The writer keeps w blocks a segment, the reader of a dropping group needs w + 1.",
        "one block more for a group that drops", ("https://github.com/Anemll/Anemll/issues/57",),
        {"store_window": store_without_drop}, bites=("tail-drop-coarse",), harmless=("window-offload",),
        why_harmless="nothing is dropped", cases=("anemll-57", "vllm-49069"),
    ),
    Fault(
        "store-mask-of-another-unit", "coverage", DECISION,
        "The mask's segments are twice as long as the unit that hits are aligned to.",
        "one alignment for both", ("https://github.com/vllm-project/vllm-ascend/pull/11383",),
        {"store_segment": lambda alignment: 2 * alignment}, bites=("window-offload-coarse",),
        harmless=("plain-offload",), why_harmless="no window", cases=("vllm-ascend-11383",),
    ),
    Fault(
        "retained-without-extra", "coverage", DECISION,
        "Columns that only the drafter re-reads are freed with the window.",
        "extra_retained_tokens", (REPORT,),
        {"retained_column": lambda group,
         n: coverage.first_retained_column(n, group.window_tokens, 0, group.block_tokens)},
        bites=("window-offload", "composed"), harmless=("tail-drop",),
        why_harmless="one MTP module re-reads nothing",
    ),
    Fault(
        "base-window-widened", "coverage", FORMULA,
        "One more chunk is asked for whenever anything is retained, needed or not.",
        "the larger of two rounded windows (get_sliding_window_size_in_chunks)", (REPAIR,),
        theorem="base window", formula="each extra token costs a chunk",
    ),
    Fault(
        "span-without-plus-one", "coverage", FORMULA,
        "A window of n tokens is taken to touch at most ceil(n / block) blocks.",
        "+ 1 for an unaligned start", ("https://github.com/vllm-project/vllm/issues/48959",),
        cases=("vllm-48959",),
        theorem="span of an unaligned range", formula="without the + 1",
    ),
    Fault(
        "offsets-in-32-bits", "overflow", FORMULA,
        "A block id times its stride is computed in 32 bits.",
        "64 bits", ("https://github.com/vllm-project/vllm/issues/50427",),
        cases=("vllm-50427", "qwen38-27b-rtx3090-86", "tokenspeed-501"),
        theorem="byte offsets", formula="32 bits",
    ),
    Fault(
        "attention-not-clipped", "coverage", DECISION,
        "The table of a finished request is handed over with the drafter's lookahead blocks in it.",
        "clipped at the computed frontier (get_block_ids_for_computed_tokens)",
        ("https://github.com/1CatAI/1Cat-vLLM/pull/249",),
        {"clipped_columns": lambda group, columns, computed: columns},
        bites=("mamba-offload", "plain-drafts"),
        harmless=("plain-offload",), why_harmless="no lookahead blocks without a drafter",
    ),
    Fault(
        "states-clipped-too", "coverage", DECISION,
        "State groups are clipped at the computed frontier as well: the "
        "scratch column with the final state is lost.",
        "only attention is clipped", ("https://github.com/1CatAI/1Cat-vLLM/pull/249",),
        {"clipped_columns": lambda group, columns,
         computed: min(columns, coverage.blocks_of(computed, group.block_tokens))},
        bites=("mamba-offload",), harmless=("plain-offload",), why_harmless="no state group",
    ),
    Fault(
        "last-token-stored", "coverage", DECISION,
        "A finished request stores all its known tokens; the last one was sampled and never computed.",
        "max(prompt, known - 1)", (".../offloading/scheduler.py (eligible tokens of a finished request)",),
        {"store_limit": lambda known, prompt, finished: known}, bites=("plain-offload", "mamba-offload"),
    ),
    Fault(
        "hash-unit-clashes", "align_divisor", CONFIGURATION,
        "The hash block is taken from a field that other code changed, and divides no group's block.",
        "refused", ("https://github.com/vllm-project/vllm/issues/43093",), cases=("vllm-43093", "vllm-52804"),
        refused=(
            'name = "x"\n[cache]\nhash_block_tokens = 3\n'
            '[[group]]\nname = "full"\nkind = "full"\nblock_tokens = 4\n'
        ),
    ),
    Fault(
        "step-crosses-two-boundaries", "align_divisor", CONFIGURATION,
        "More drafts than a recurrent block has tokens: one step could cross two boundaries.",
        "refused: K + 1 <= block", ("v1/core/single_type_kv_cache_manager.py::MambaManager",),
        refused=(
            'name = "x"\n[cache]\nhash_block_tokens = 4\n[speculation]\ndrafts = 4\ndraft_modules = 1\n'
            '[[group]]\nname = "mamba"\nkind = "mamba"\nblock_tokens = 4\n'
        ),
    ),
    Fault(
        "window-of-an-unknown-kind", "coverage", DECISION,
        "The helper for load windows knows sliding windows, states and full attention; chunked-local "
        "attention is an assertion.",
        "total over the kinds of groups", ("https://github.com/vllm-project/vllm/issues/51150",),
        {"lookup_first": knows_no_chunks}, bites=("chunked-local",), harmless=("window-offload",),
        why_harmless="no chunked group", cases=("vllm-51150",),
    ),
    Fault(
        "preempted-table-handed-over", "preemption", DECISION,
        "A request that was preempted in its last step finishes with that step's output and hands its table "
        "over: nothing of what it computed is in it.",
        "such a request hands nothing over, or is computed again",
        ("https://github.com/vllm-project/vllm/pull/48141",),
        {"hands_over": lambda running: True}, bites=("composed-tight",), harmless=("plain-offload",),
        why_harmless="a pool for all: nobody is preempted", cases=("vllm-48141",),
    ),
)  # fmt: skip
