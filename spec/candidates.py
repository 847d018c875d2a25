"""Sixty-two properties that one could demand of such an engine, and what became of each.

The candidates (``S1`` to ``S50`` of safety, ``P1`` to ``P12`` of progress) were collected from released code
and from reports before the invariants were chosen.  Each is covered by invariants of ``spec.rules``, proved
by a theorem under ``spec/prove`` (named, not imported), true in this world by construction, or rejected.
*Rejected* means: not demanded as it stands, because right code may do otherwise, or because it names a means
and not an end; the harm that it was meant to prevent is covered by the invariants named beside it.
``python -m spec.handbook`` writes the table into ``docs/invariants.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate and its fate; at least one of the last four fields says something."""

    name: str
    says: str
    rules: tuple[str, ...] = ()  # names in spec.rules.BY_NAME
    theorems: tuple[str, ...] = ()  # names of theorems under spec/prove
    world: str = ""  # why it cannot be otherwise in this world
    rejected: str = ""  # why it is not demanded as it stands
    note: str = ""  # what is left open


READS = ("attention_reads_exact", "window_reads_exact", "state_reads_exact")

CANDIDATES = (
    # -- ownership ---------------------------------------------------------------------------------------
    Candidate(
        "S1",
        "Nobody owns, publishes, transfers or writes the null block.",
        rules=("null_block_unowned", "padded_rows_write_null"),
        world="the null page swallows what is written to it, and reading it yields garbage",
    ),
    Candidate(
        "S2",
        "A block's reference count is the number of columns and retained references that name it.",
        rules=("references_match_tables",),
    ),
    Candidate(
        "S3",
        "A block is in the free queue exactly when nobody refers to it.",
        rules=("free_queue_is_unheld",),
    ),
    Candidate(
        "S4",
        "A block without a key belongs to one column of one request.",
        rules=("no_double_owner", "adopt_only_published", "references_match_tables"),
        rejected=(
            "false after a cache reset that does not wait for running requests (the "
            "model's does not, 0.33.0 refuses it): blocks that two requests share lose "
            "their keys and stay shared; it is demanded where sharing begins, at "
            "allocation and at adoption"
        ),
    ),
    Candidate(
        "S5",
        "What is under a full block's key is never written again while the key stands.",
        rules=(*READS, "ready_chunk_exact"),
        rejected=(
            "writing the same bytes again, or cells behind the prefix that a key "
            "names (a tail published inside an attention block), harms nobody; "
            "whoever reads other bytes than the key names is noticed"
        ),
    ),
    Candidate(
        "S6",
        "A key leads only to blocks that carry it, and eviction removes it everywhere.",
        rules=("key_names_its_column", "evict_before_reuse"),
        world="the map from keys to blocks and the blocks' own keys are changed by one decision",
        note="the model knows one key a block at a time",
    ),
    Candidate(
        "S7",
        "A block that the pool hands out carries no key.",
        rules=("evict_before_reuse", *READS),
    ),
    Candidate(
        "S8",
        "In one admission no group's allocation takes a block that another group has just hit.",
        rules=("no_double_owner", "adopt_only_published", *READS),
    ),
    # -- hits --------------------------------------------------------------------------------------------
    Candidate(
        "S9",
        "A hit is a multiple of the alignment and leaves one token to compute.",
        rules=("hit_below_known",),
        theorems=("common hit",),
        rejected=(
            "the multiple: a hit may end inside a block where hashes are finer, or "
            "at the last known token but one where it comes from the host tier"
        ),
    ),
    Candidate(
        "S10",
        "A hit is served by every group, each with all that it will read.",
        rules=(*READS, "read_columns_present"),
        theorems=("common hit", "block coverage"),
    ),
    Candidate(
        "S11",
        "Columns are freed by processed tokens only.",
        rules=("window_reads_exact", "state_reads_exact"),
        theorems=("freed columns",),
        rejected=(
            "any basis is right that no step in flight reads behind; with nothing in flight the two are equal"
        ),
    ),
    Candidate(
        "S12",
        "Every position that a scheduled query reads lies in a column that holds a block.",
        rules=("read_columns_present", "attention_reads_exact", "window_reads_exact"),
        theorems=("freed columns",),
    ),
    # -- recurrent states --------------------------------------------------------------------------------
    Candidate(
        "S13",
        (
            "A published boundary holds the state after exactly its tokens, on every rank, "
            "whenever it is read."
        ),
        rules=("state_reads_exact", "ready_chunk_exact", "recurrent_store_by_hand_off"),
        theorems=("registration", "fold"),
    ),
    Candidate(
        "S14",
        "No published boundary depends on a rejected draft.",
        rules=("state_reads_exact", "ready_chunk_exact"),
        theorems=("registration", "fold"),
    ),
    Candidate(
        "S15",
        "Only a block that one request holds once, under no key, is relocated.",
        rules=("relocates_only_exclusive_scratch", "state_reads_exact"),
    ),
    Candidate(
        "S16",
        ("Relocation and nulling leave alone every column that a step in flight, or the next one, uses."),
        rules=("state_reads_exact",),
        theorems=("columns of a step", "post-process copy"),
    ),
    Candidate(
        "S17",
        "The copy before a forward starts from the last running column, at an offset of at most K.",
        rules=("accepted_offset_in_range", "state_reads_exact"),
        theorems=("columns of a step",),
    ),
    Candidate(
        "S18",
        "The state at the accepted offset is the one after the computed tokens.",
        rules=("state_reads_exact", "forward_position_exact"),
        theorems=("fold",),
    ),
    Candidate(
        "S19",
        "The accepted count is set back to one at a fixed list of moments.",
        rules=("accepted_offset_in_range", "accepted_count_belongs", "state_reads_exact"),
        rejected=("the list is one implementation's; what counts is from which state a forward goes on"),
    ),
    Candidate(
        "S20",
        "At admission with n tokens the seed column holds the state after n tokens.",
        rules=("state_reads_exact",),
        theorems=("seed column",),
    ),
    Candidate(
        "S21",
        "Columns of a recurrent group are computed with that group's own block.",
        rules=("state_reads_exact",),
        theorems=("seed column", "aligned split"),
        rejected=("with equal blocks any of them will do; the theorems say for which divisors columns agree"),
    ),
    Candidate(
        "S22",
        ("A prefill chunk that is not the last ends on a recurrent boundary, or the next one stops at it."),
        rules=("state_reads_exact", "resend_is_hit"),
        theorems=("aligned split",),
        rejected=(
            "a block that no step can hold is crossed in pieces, and a chunk may end "
            "at a tail checkpoint; a wrong cut shows as a wrong state under a key, "
            "or as a hit that is lost"
        ),
    ),
    Candidate(
        "S23",
        "Nobody is scheduled on a recurrent block that was published in the same step.",
        rules=("state_reads_exact",),
        rejected="an engine may order the two requests within the step instead",
    ),
    # -- late kernels ------------------------------------------------------------------------------------
    Candidate(
        "S24",
        "A kernel that runs after its own step finds rows by slot.",
        rules=("late_kernel_reads_slot_rows", "state_reads_exact"),
    ),
    Candidate(
        "S25",
        "Until its post-processing a slot's row is only appended to, or the late row is masked.",
        rules=("late_row_still_occupied", "slot_single_occupant", "state_reads_exact"),
    ),
    Candidate(
        "S26",
        "Every sampled row of a step is post-processed once, unless its request has left.",
        rules=("forward_position_exact", "state_reads_exact"),
        rejected=(
            "twice is harmless where nothing was rejected and no boundary crossed; "
            "otherwise the next forward starts from a wrong position or state"
        ),
    ),
    Candidate(
        "S27",
        "A state copy for a request writes only blocks that are still that request's.",
        rules=("late_row_still_occupied", *READS, "ready_chunk_exact"),
        rejected=(
            "a write to a block that is handed out and not yet filled is overwritten before anybody reads it"
        ),
    ),
    Candidate(
        "S28",
        "Padded rows resolve to the null block.",
        rules=("padded_rows_write_null", *READS),
    ),
    Candidate(
        "S29",
        "A boundary is not readable or storable on a rank before that rank has saved it.",
        rules=("state_reads_exact", "ready_chunk_exact"),
    ),
    Candidate(
        "S30",
        "A row's accepted count is its own request's of the last step, or one for a new life.",
        rules=("accepted_count_belongs", "state_reads_exact"),
    ),
    # -- offload -----------------------------------------------------------------------------------------
    Candidate(
        "S31",
        "A load names only chunks that the admitting lookup saw.",
        rules=("demand_within_lookup", "loads_only_ready_chunks", "policy_raises_no_error"),
        theorems=("chunk coverage",),
    ),
    Candidate(
        "S32",
        "The chunks that a hit demands are among those that its producer's mask keeps.",
        rules=("resend_is_hit", "ready_chunk_exact"),
        theorems=("block coverage", "store and lookup agree"),
    ),
    Candidate(
        "S33",
        "A chunk under load is not loaded by a second transfer.",
        theorems=("in-flight loads",),
        rejected=(
            "two loads of one chunk into two blocks are right and wasteful; the "
            "theorem shows that the released check sees every such chunk"
        ),
    ),
    Candidate(
        "S34",
        "Every fresh block below an external hit is the target of a load.",
        rules=READS,
        theorems=("chunk coverage",),
    ),
    Candidate(
        "S35",
        "A request has either one load or only stores in flight.",
        rules=("load_xor_store",),
        note="synchronous loads, the exception upstream, are not modelled",
    ),
    Candidate(
        "S36",
        "When a store reads its source, the block still holds what the key names.",
        rules=("ready_chunk_exact",),
    ),
    Candidate(
        "S37",
        "From creation to last report, handing out a source block flushes the store first.",
        rules=("reuse_flushes_fence", "ready_chunk_exact"),
        world=("in the core protocol a fence begins with the transfer and goes with its last report"),
    ),
    Candidate(
        "S38",
        ("A store built on a block that was handed out earlier in the same step is refused or flushed."),
        rules=("ready_chunk_exact", "recurrent_store_by_hand_off"),
        rejected=("a fresh block of the same request is a right source; another's shows in the stored bytes"),
    ),
    Candidate(
        "S39",
        "On each worker flushed stores end before anything touches their sources.",
        rules=("ready_chunk_exact",),
        rejected=(
            "only writes that change what is still to be read do harm; the order of "
            "a program is judged by the bytes that are stored"
        ),
    ),
    Candidate(
        "S40",
        "A copied block table that a store reads is current wherever it is read.",
        rules=("ready_chunk_exact", "recurrent_store_by_hand_off", "handed_table_serves"),
        rejected="an implementation need not keep a copy",
    ),
    Candidate(
        "S41",
        "Recurrent groups are never stored by position.",
        rules=("recurrent_store_by_hand_off", "ready_chunk_exact"),
    ),
    Candidate(
        "S42",
        "The block of column j lands in sub-slot j mod k of chunk j // k, holes or not.",
        rules=("ready_chunk_exact", *READS),
        theorems=("sub-slots",),
    ),
    Candidate(
        "S43",
        ("No transfer is reported more often than it has ranks; late reports after a reset are ignored."),
        rules=("report_once_per_rank",),
    ),
    Candidate(
        "S44",
        "No load reads a chunk that is being written, and no store writes one that is being read.",
        rules=("loads_only_ready_chunks", "ready_chunk_exact", *READS),
    ),
    Candidate(
        "S45",
        "A chunk that is pinned, or that the store at hand names, is not evicted.",
        rules=(*READS, "host_place_free"),
        rejected=(
            "the second half: evicting a chunk of one's own store loses reuse and "
            "nothing else, and reuse is demanded only while nothing was evicted"
        ),
    ),
    Candidate(
        "S46",
        "The host tier's counters add up: evictable, being written, free.",
        rules=("host_place_free", "nothing_left_when_idle"),
        rejected="counters are an implementation's own; the model derives them from the chunks",
        note="a place that leaks without its key is not seen",
    ),
    Candidate(
        "S47",
        "A chunk becomes loadable only when every rank has reported its part.",
        rules=("ready_chunk_exact",),
    ),
    Candidate(
        "S48",
        "A failed store leaves no key and no place behind.",
        rules=("ready_chunk_exact", "nothing_left_when_idle"),
        note="a place that leaks without its key is not seen, see S46",
    ),
    Candidate(
        "S49",
        "After a reset no transfer from before it writes a host place that is used again.",
        rules=("host_place_free", "ready_chunk_exact", *READS),
        note="0.33.0 clears the tier at once and flushes what is in flight: right, against the discipline",
    ),
    Candidate(
        "S50",
        "A finished or preempted request's blocks wait for its last scheduled step to be processed.",
        rules=(*READS, "ready_chunk_exact"),
        rejected=(
            "stream order is enough while every writer is on the main stream; it is "
            "needed for transfers that no stream orders"
        ),
    ),
    # -- progress ----------------------------------------------------------------------------------------
    Candidate(
        "P1",
        "A request that fits into the pool alone is scheduled in the end.",
        rules=("everything_drains",),
    ),
    Candidate(
        "P2",
        "An unfinished prefill with a recurrent block of budget left gets tokens from the split.",
        rules=("everything_drains",),
        theorems=("aligned split",),
    ),
    Candidate(
        "P3",
        "A lookup that is put off is answered once transfers complete.",
        rules=("everything_drains",),
    ),
    Candidate(
        "P4",
        "A request whose load has landed everywhere is admitted or let go.",
        rules=("everything_drains",),
    ),
    Candidate(
        "P5",
        "Every transfer is reported by every rank in the end, and its fences go.",
        rules=("everything_drains", "nothing_left_when_idle"),
        world=("a transfer that was submitted ends, and its rank reports it or reports its failure"),
    ),
    Candidate(
        "P6",
        "Waiting for a flush does not wait for the step that waits.",
        rules=("wait_graph_acyclic",),
    ),
    Candidate(
        "P7",
        ("Without requests the engine goes on until transfers and deferred frees are settled, then stops."),
        rules=("everything_drains", "nothing_left_when_idle"),
    ),
    Candidate(
        "P8",
        ("A stored prompt is found again by an identical cold request, as far as the drop rule allows."),
        rules=("resend_is_hit",),
        theorems=("store and lookup agree", "tail drop"),
    ),
    Candidate(
        "P9",
        "Every sampled row reaches every earlier stage, or is masked because its slot was freed.",
        rules=("forward_position_exact", "input_tokens_exact", "state_reads_exact"),
    ),
    Candidate(
        "P10",
        "A chunk that the tier had no room for is offered again or given up, never skipped.",
        rules=("resend_is_hit",),
        rejected="skipping loses reuse only when the tier was full, where reuse is not demanded",
    ),
    Candidate(
        "P11",
        "The iterations of a lookup end.",
        rules=("policy_raises_no_error",),
        theorems=("common hit",),
        world=(
            "the reference's lookup is one pass over finitely many candidates; that "
            "the released iteration ends at the same hit is a contract of the "
            "theorem, checked by brute force"
        ),
        note="a policy that loops inside one answer hangs the walk instead of failing it",
    ),
    Candidate(
        "P12",
        "A preempted request is admitted again once its transfers are settled and blocks are free.",
        rules=("everything_drains",),
    ),
)
