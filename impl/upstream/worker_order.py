"""The order of operations in one worker step, as data, for every release and runner.

A worker's step is a fixed sequence of calls.  Which block holds whose bytes when a copy reads it is decided
by that sequence: a flush that waits after the zeroing of the block it protects protects nothing.  Each
operation below is fixed by a *chain* of calls, from the runner's entry down to the call that does it;
:func:`verify` finds the chain in a source tree and checks that the operations come in the stated order, so
that the list cannot drift from the code.

    python -m impl.upstream.worker_order RELEASE|DIR [--runner v1|v2]     print the programs with their lines
    python -m impl.upstream.worker_order --record RELEASE                 record the digests of its files

The workers are simulated by that list, so a change to their files is not run: :func:`changed_files` says
which files of a tree are not those of the release.

Two streams matter.  Everything is enqueued on the main stream unless it says otherwise; a transfer runs on a
stream of its own, which waits for what the main stream holds at submission and for the previous transfer in
its direction (``v1/kv_offload/cpu/gpu_worker.py``), and for which nothing on the main stream waits, save by
:attr:`Does.FLUSH`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import product
from pathlib import Path

from impl.upstream.releases import KNOWN, Tree, UnknownRelease, package_of, recognise
from spec.outputs import write_whole
from spec.usage import OneLineParser, command


class Does(StrEnum):
    """What an operation does; the world's programs are made of these."""

    # Late half of an earlier step, on a rank that is not the last (v2).
    # take the entry of step S - pp; rows of reused or non-sampling slots become -1; wait for it
    RING_POP = "ring_pop"
    LATE_ADVANCE = "late_advance"  # computed tokens -= rejected; sampled and draft tokens written, by slot
    LATE_POSTPROCESS = (
        "late_postprocess"  # accepted counts, then boundary states copied, for that step's rows
    )
    # Bookkeeping on the host.
    FINISH = "finish"  # finished and preempted requests leave; slots (v2) or rows (v1) become free
    LEAVE_BATCH = "leave_batch"  # v1: running requests that this step does not schedule leave the batch
    ADD = "add"  # new (v2: also resumed) requests take a slot or row
    SEED = "seed"  # accepted count := 1; v2: running column := (computed - 1) // divisor
    WRITE_ROW = "write_row"  # the whole table row of a new request
    APPEND_ROW = "append_row"  # new blocks at the end of a running request's row
    CONDENSE = "condense"  # v1: the last rows move into the gaps
    REORDER = "reorder"  # v1: the attention backend may swap rows
    # Memory before the forward pass.
    SUBMIT_STORES = (
        "submit_stores"  # queued stores of step S - 1, and new ones that are flushed, start to read
    )
    FLUSH = "flush"  # the host waits until the jobs to flush have been read
    ZERO = "zero"  # newly allocated attention blocks
    COPY_BLOCKS = "copy_blocks"  # copy-on-write copies of whole blocks
    APPLY_ROWS = "apply_rows"  # staged table writes reach the device
    COMMIT_ROWS = "commit_rows"  # v1: host rows are copied to the device tables
    ACCEPTED_SYNC = "accepted_sync"  # v1: wait for the accepted counts of the previous step, remap rows
    GATHER = "gather"  # rows of this step's batch, in batch order, into the input tables
    SLOTS = "slots"  # slot mappings from the rows
    ADVANCE_COLUMN = "advance_column"  # running column of this step; source column and offset of the pre-copy
    PRECOPY = "precopy"  # running state moves to its new column
    STAGE_POSTPROCESS = "stage_postprocess"  # v1: the post-process's operands are fixed now
    STATE_INDICES = "state_indices"  # running and scratch blocks per row, from the input tables
    METADATA = "metadata"  # attention metadata binds the tables
    SYNC_LOADS = "sync_loads"  # loads that this step's forward reads: submitted and waited for
    FORWARD = "forward"
    # After it.
    LOADS = "loads"  # the other loads start to write
    COLLECT = "collect"  # finished transfers are reported with this step's output
    QUEUE_STORES = "queue_stores"  # this step's stores wait for step S + 1
    SAMPLE = "sample"
    BROADCAST = "broadcast"  # sampled and rejected counts to the other ranks, on a stream of its own
    RECEIVE = "receive"  # ring entry of this step
    ADVANCE_OPTIMISTIC = "advance_optimistic"  # computed tokens += scheduled, rejected drafts included
    RESET_ACCEPTED = "reset_accepted"  # accepted := 1 for the whole batch, if not every row needs a sample
    OUTPUT_COPY = "output_copy"  # sampled tokens to the host, on the copy stream
    ADVANCE = "advance"  # computed tokens += scheduled - rejected, by slot
    POSTPROCESS = "postprocess"  # accepted counts, then boundary states copied
    ACCEPTED_COPY = "accepted_copy"  # v1: accepted counts start towards the host, into the batch's own rows
    DRAFT = "draft"  # the drafter writes its cache at the lookahead slots
    BROADCAST_DRAFTS = "broadcast_drafts"


# Where a call stands: path under the package, "Class.method" or function, and the callee as written, from the
# right ("model_state.prepare_attn" is not "self.prepare_attn").  "#n" after it is the n-th such call, from 0.
Call = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program and the chain of calls that fixes its place."""

    does: Does
    chain: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the order alone does not say."""

    copies_by: str  # "slot" | "batch_row": which row of the tables the late copies read, and by which index
    copies_bind: str  # "source_tables" | "input_tables": the tables whose pointer the copy context holds
    bound_at: str  # "initialize" | "first_preprocess"
    resume_divisor: str  # "mamba_block" | "cache_block": what the seed of the running column divides by
    accepted_from: (
        str  # "device_slot" | "host_row": where the pre-copy and the forward find the accepted count
    )
    zero_draft_rows_use_offset: (
        bool  # does a decode row without drafts read its state at the accepted offset?
    )
    postprocess_on_non_last_ranks: bool
    row_dropped_when_unscheduled: bool  # v1: a running request left out of a step comes back with count 1
    window_rows_nulled: bool  # input tables show null below the window of the first scheduled position
    queue_fixed_by: str  # the connector hook in which stores are queued
    where: Mapping[str, str]  # field -> path::function that decides it


_RUNNER = "v1/worker/gpu/model_runner.py"
_OLD = "v1/worker/gpu_model_runner.py"
_CONNECTOR = "v1/worker/gpu/kv_connector.py"
_MIXIN = "v1/worker/kv_connector_model_runner_mixin.py"
_OFFLOAD = "distributed/kv_transfer/kv_connector/v1/offloading/worker.py"
_OFFLOAD_TOP = "distributed/kv_transfer/kv_connector/v1/offloading_connector.py"
_HYBRID = "v1/worker/gpu/model_states/mamba_hybrid.py"
_STATES = "v1/worker/mamba_utils.py"
_RING = "v1/worker/gpu/pp_utils.py"

_E = (_RUNNER, "GPUModelRunner.execute_model")
_S = (_RUNNER, "GPUModelRunner.sample_tokens")
_E1 = (_OLD, "GPUModelRunner.execute_model")
_S1 = (_OLD, "GPUModelRunner.sample_tokens")


def _family(release: str) -> str:
    """Releases whose workers are alike: up to 0.31, 0.32, 0.33."""
    return "0.31" if release in ("0.30.0", "0.31.0") else release.rpartition(".")[0]


def _hooks() -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Chains under ``kv_connector.pre_forward`` of the v2 runner: submission, then the wait."""
    preempt: tuple[Call, ...] = (
        (_CONNECTOR, "ActiveKVConnector.pre_forward", "kv_connector.handle_preemptions"),
        (_OFFLOAD_TOP, "OffloadingConnector.handle_preemptions", "connector_worker.handle_preemptions"),
    )
    worker = "OffloadingConnectorWorker.handle_preemptions"
    return (*preempt, (_OFFLOAD, worker, "worker.submit_store")), (
        *preempt,
        (_OFFLOAD, worker, "worker.wait"),
    )


def _v2_before(release: str, last_rank: bool) -> list[Operation]:
    late: list[Operation] = []
    if not last_rank:
        pop = (*_E, "self.update_pp_decode_requests")
        inside = (_RUNNER, "GPUModelRunner.update_pp_decode_requests")
        update = (_RUNNER, "GPUModelRunner.postprocess_sampled")
        late = [
            Operation(Does.RING_POP, (pop, (*inside, "pp_handler.get_prev_sampled_outputs"))),
            Operation(
                Does.LATE_ADVANCE, (pop, (*inside, "self.postprocess_sampled"), (*update, "post_update"))
            ),
            Operation(
                Does.LATE_POSTPROCESS,
                (
                    pop,
                    (*inside, "self.postprocess_sampled"),
                    (*update, "model_state.postprocess_state"),
                    (_HYBRID, "MambaHybridModelState.postprocess_state", "run_fused_postprocess_align"),
                ),
            ),
        ]
    add = ((*_E, "self.add_requests"), (_RUNNER, "GPUModelRunner.add_requests"))
    grow = ((*_E, "self.update_requests"), (_RUNNER, "GPUModelRunner.update_requests"))
    return [
        *late,
        Operation(
            Does.FINISH,
            (
                (*_E, "self.finish_requests"),
                (_RUNNER, "GPUModelRunner.finish_requests", "self._remove_request"),
            ),
        ),
        Operation(Does.ADD, (add[0], (*add[1], "req_states.add_request"))),
        Operation(
            Does.SEED,
            (
                add[0],
                (*add[1], "model_state.add_request"),
                (_HYBRID, "MambaHybridModelState.add_request", "fill_#1"),
            ),
        ),
        Operation(Does.WRITE_ROW, (add[0], (*add[1], "block_tables.append_block_ids"))),
        Operation(
            Does.APPEND_ROW,
            # Up to 0.31 the first such call is for HiSparse tables, which are not modelled.
            (
                grow[0],
                (*grow[1], "block_tables.append_block_ids" + ("#1" if _family(release) == "0.31" else "")),
            ),
        ),
        Operation(Does.ZERO, (grow[0], (*grow[1], "kv_block_zeroer.zero_block_ids"))),
        Operation(Does.COPY_BLOCKS, (grow[0], (*grow[1], "copy_kv_cache_blocks_inplace"))),
        Operation(Does.APPLY_ROWS, ((*_E, "block_tables.apply_staged_writes"),)),
    ]


def _v2(release: str, last_rank: bool, forward: bool, speculation: bool) -> list[Operation]:
    submit, wait = _hooks()
    before = _v2_before(release, last_rank)
    start = (_CONNECTOR, "ActiveKVConnector.post_forward", "self._start_load_kv")
    collect = (_CONNECTOR, "ActiveKVConnector.post_forward", "kv_connector.get_transfer_results")
    save = (_CONNECTOR, "ActiveKVConnector.post_forward", "kv_connector.wait_for_save")
    loads = (
        (_CONNECTOR, "ActiveKVConnector._start_load_kv", "kv_connector.start_load_kv#1"),
        (_OFFLOAD_TOP, "OffloadingConnector.start_load_kv", "connector_worker.start_kv_transfers"),
        (_OFFLOAD, "OffloadingConnectorWorker.start_kv_transfers", "worker.submit_load"),
    )

    def transfers(*outer: Call) -> list[Operation]:
        return [
            Operation(Does.LOADS, (*outer, start, *loads)),
            Operation(Does.QUEUE_STORES, (*outer, collect if _queues_in_get_finished(release) else save)),
            Operation(Does.COLLECT, (*outer, collect)),
        ]

    if not forward:
        empty = (*_E, "kv_connector.no_forward#0")
        inside = (_CONNECTOR, "ActiveKVConnector.no_forward")
        return [
            *before,
            Operation(Does.SUBMIT_STORES, (empty, (*inside, "self.pre_forward"), *submit)),
            Operation(Does.FLUSH, (empty, (*inside, "self.pre_forward"), *wait)),
            *transfers(empty, (*inside, "self.post_forward")),
        ]
    hooks = (*_E, "kv_connector.pre_forward#1")
    gather = (_RUNNER, "GPUModelRunner.prepare_attn")
    move = (_HYBRID, "MambaHybridModelState.preprocess_state")
    bind = (_HYBRID, "MambaHybridModelState.prepare_attn")
    middle = [
        Operation(Does.GATHER, ((*_E, "self.prepare_attn"), (*gather, "block_tables.gather_block_tables"))),
        Operation(Does.SLOTS, ((*_E, "self.prepare_attn"), (*gather, "block_tables.compute_slot_mappings"))),
        Operation(
            Does.ADVANCE_COLUMN,
            ((*_E, "model_state.preprocess_state"), (*move, "preprocess_mamba_align_fused_kernel")),
        ),
        Operation(Does.PRECOPY, ((*_E, "model_state.preprocess_state"), (*move, "ctx.run_fused_precopy"))),
        Operation(
            Does.STATE_INDICES,
            ((*_E, "model_state.prepare_attn"), (*bind, "compute_aligned_state_indices")),
        ),
        Operation(Does.METADATA, ((*_E, "model_state.prepare_attn"), (*bind, "build_attn_metadata"))),
        Operation(Does.SUBMIT_STORES, (hooks, *submit)),
        Operation(Does.FLUSH, (hooks, *wait)),
        Operation(
            Does.SYNC_LOADS,
            (hooks, (_CONNECTOR, "ActiveKVConnector.pre_forward", "self._start_load_kv"), *loads),
        ),
        Operation(Does.FORWARD, ((*_E, "self.model"),)),
    ]
    if not last_rank:
        return [
            *before,
            *middle,
            Operation(Does.RECEIVE, ((*_S, "pp_handler.receive"),)),
            Operation(Does.ADVANCE_OPTIMISTIC, ((*_S, "self.postprocess_num_computed_tokens"),)),
            Operation(
                Does.RESET_ACCEPTED,
                (
                    (*_S, "model_state.postprocess_state"),
                    (_HYBRID, "MambaHybridModelState.postprocess_state", "_fill_num_accepted_kernel"),
                ),
            ),
            *transfers((*_S, "kv_connector.post_forward#0")),
        ]
    update = (_RUNNER, "GPUModelRunner.postprocess_sampled")
    sampled = [
        Operation(Does.SAMPLE, ((*_S, "self.sample"),)),
        Operation(Does.BROADCAST, ((*_S, "pp_handler.broadcast"),)),
        Operation(Does.OUTPUT_COPY, ((*_S, "AsyncOutput"),)),
    ]
    updated = [
        Operation(Does.ADVANCE, ((*_S, "self.postprocess_sampled"), (*update, "post_update"))),
        Operation(
            Does.POSTPROCESS,
            (
                (*_S, "self.postprocess_sampled"),
                (*update, "model_state.postprocess_state"),
                (_HYBRID, "MambaHybridModelState.postprocess_state", "run_fused_postprocess_align"),
            ),
        ),
    ]
    if speculation:
        updated += [
            Operation(Does.DRAFT, ((*_S, "speculator.propose"),)),
            Operation(Does.BROADCAST_DRAFTS, ((*_S, "pp_handler.broadcast_drafts"),)),
        ]
    moved = transfers((*_S, "kv_connector.post_forward#1"))
    if _family(release) != "0.33":
        return [*before, *middle, *sampled, *updated, *moved]
    # Since 0.33 loads start and reports are collected before the post-process; with a drafter, stores are
    # queued when it has run.
    if not speculation:
        return [*before, *middle, *sampled, *moved, *updated]
    queue = Operation(
        Does.QUEUE_STORES,
        (
            (*_S, "kv_connector.finalize_step"),
            (_CONNECTOR, "ActiveKVConnector.finalize_step", "kv_connector.wait_for_save"),
        ),
    )
    return [*before, *middle, *sampled, moved[0], moved[2], *updated, queue]


def _v1(release: str, last_rank: bool, forward: bool, speculation: bool) -> list[Operation]:
    preempt: tuple[Call, ...] = (
        (*_E1, "get_kv_transfer_group().handle_preemptions"),
        (_OFFLOAD_TOP, "OffloadingConnector.handle_preemptions", "connector_worker.handle_preemptions"),
    )
    worker = (_OFFLOAD, "OffloadingConnectorWorker.handle_preemptions")
    update = (*_E1, "self._update_states")
    inside = (_OLD, "GPUModelRunner._update_states")
    hooks = (_MIXIN, "KVConnectorModelRunnerMixin._get_kv_connector_output")
    load: tuple[Call, ...] = (
        (_OFFLOAD_TOP, "OffloadingConnector.start_load_kv", "connector_worker.start_kv_transfers"),
        (_OFFLOAD, "OffloadingConnectorWorker.start_kv_transfers", "worker.submit_load"),
    )
    collect = (*hooks, "kv_connector.get_transfer_results")
    early = _queues_in_get_finished(release)

    def transfers(*outer: Call, queue: bool) -> list[Operation]:
        save = collect if early else (*hooks, "kv_connector.wait_for_save")
        return [
            Operation(Does.LOADS, (*outer, (*hooks, "kv_connector.start_load_kv#1"), *load)),
            *([Operation(Does.QUEUE_STORES, (*outer, save))] if queue else []),
            Operation(Does.COLLECT, (*outer, collect)),
        ]

    before = [
        Operation(Does.SUBMIT_STORES, (*preempt, (*worker, "worker.submit_store"))),
        Operation(Does.FLUSH, (*preempt, (*worker, "worker.wait"))),
        Operation(Does.FINISH, (update, (*inside, "input_batch.remove_request#0"))),
        Operation(Does.ZERO, (update, (*inside, "self._zero_block_ids"))),
        Operation(Does.COPY_BLOCKS, (update, (*inside, "copy_kv_cache_blocks_inplace"))),
        Operation(Does.LEAVE_BATCH, (update, (*inside, "input_batch.remove_request#1"))),
        Operation(Does.APPEND_ROW, (update, (*inside, "block_table.append_row"))),
        Operation(Does.ADD, (update, (*inside, "input_batch.add_request"))),
        Operation(Does.CONDENSE, (update, (*inside, "input_batch.condense"))),
        Operation(Does.REORDER, (update, (*inside, "self._may_reorder_batch"))),
    ]
    if not forward:
        made = "KVConnectorModelRunnerMixin.kv_connector_no_forward"
        return [
            *before,
            *transfers(
                (*_E1, "self.kv_connector_no_forward"),
                (_MIXIN, made, "KVConnectorModelRunnerMixin._get_kv_connector_output"),
                queue=True,
            ),
        ]
    prepare = (*_E1, "self._prepare_inputs")
    ready = (_OLD, "GPUModelRunner._prepare_inputs")
    # The context manager around the forward: written before it, left (loads, queue, reports) after it.
    around: tuple[Call, ...] = (
        (*_E1, "self.maybe_get_kv_connector_output"),
        (
            _MIXIN,
            "KVConnectorModelRunnerMixin.maybe_get_kv_connector_output",
            "KVConnectorModelRunnerMixin._get_kv_connector_output",
        ),
    )
    middle = [
        Operation(Does.COMMIT_ROWS, (prepare, (*ready, "block_table.commit_block_table"))),
        Operation(Does.ACCEPTED_SYNC, (prepare, (*ready, "num_accepted_tokens_event.synchronize"))),
        Operation(
            Does.PRECOPY,
            ((*_E1, "mamba_utils.preprocess_mamba"), (_STATES, "preprocess_mamba", "ctx.run_fused_precopy")),
        ),
        Operation(Does.STAGE_POSTPROCESS, ((*_E1, "mamba_utils.stage_postprocess_inputs_to_gpu"),)),
        Operation(Does.SLOTS, ((*_E1, "self._get_slot_mappings"),)),
        Operation(Does.METADATA, ((*_E1, "self._build_attention_metadata"),)),
        Operation(Does.SYNC_LOADS, (*around, (*hooks, "kv_connector.start_load_kv#0"), *load)),
        Operation(Does.FORWARD, ((*_E1, "self._model_forward"),)),
        # With speculation the queueing is left to finalize_kv_connector, save where get_finished does it.
        *transfers(*around, queue=early or not speculation),
    ]
    if not last_rank:
        # It returns its intermediate tensors here: no sampling, no post-process, the counts stay as they are,
        # and with speculation nothing queues this step's stores (sample_tokens returns before
        # finalize_kv_connector).
        return [*before, *middle]
    state = (*_S1, "self._update_states_after_model_execute")
    states = (
        _OLD,
        "GPUModelRunner._update_states_after_model_execute",
        "mamba_utils.postprocess_mamba_align_gpu",
    )
    after = [Operation(Does.SAMPLE, ((*_S1, "self._sample"),))]
    if speculation:
        # Without it the post-process returns at once: every boundary is reached by a prefill chunk or one
        # token.
        after += [
            Operation(
                Does.POSTPROCESS,
                (state, states, (_STATES, "postprocess_mamba_align_gpu", "ctx.run_fused_postprocess")),
            ),
            Operation(Does.ACCEPTED_COPY, (state, states, (_STATES, "postprocess_mamba_align_gpu", "copy_"))),
            Operation(Does.DRAFT, ((*_S1, "self.propose_draft_token_ids"),)),
        ]
        if not early:
            final = (
                _MIXIN,
                "KVConnectorModelRunnerMixin.finalize_kv_connector",
                "kv_connector.wait_for_save",
            )
            after.append(Operation(Does.QUEUE_STORES, ((*_S1, "self.finalize_kv_connector"), final)))
    return [*before, *middle, *after]


def _queues_in_get_finished(release: str) -> bool:
    """0.30 queues stores in ``get_finished``, which also runs in steps without a forward; later
    ``wait_for_save``.
    """
    return release == "0.30.0"


def program(
    release: str, runner: str, *, last_rank: bool = True, forward: bool = True, speculation: bool = True
) -> tuple[Operation, ...]:
    """The operations of one worker step, in the order in which the worker enqueues them.

    ``forward`` is false for a step that schedules nothing.  Operations whose occasion does not arise (no
    boundary crossed, nothing to flush, no synchronous load) do nothing.  Synchronous and asynchronous
    scheduling run the same program: they differ in when the scheduler is asked and outputs are processed, and
    (v1) in how ACCEPTED_SYNC maps rows.
    """
    made = {"v1": _v1, "v2": _v2}[runner]
    return tuple(made(release, last_rank, forward, speculation))


def facts(release: str, runner: str) -> Facts:
    """The choices of a release that its order does not show."""
    late_rows = _family(release) == "0.31"
    if runner == "v1":
        return Facts(
            copies_by="batch_row",
            copies_bind="input_tables",  # v1 has one set of tables, rows in batch order
            bound_at="first_preprocess",
            resume_divisor="mamba_block",
            accepted_from="host_row",
            zero_draft_rows_use_offset=not late_rows,
            postprocess_on_non_last_ranks=False,
            row_dropped_when_unscheduled=True,
            window_rows_nulled=False,
            queue_fixed_by="get_finished" if _queues_in_get_finished(release) else "wait_for_save",
            where={
                "copies_by": f"{_STATES}::MambaSpecDecodeGPUContext.run_fused_postprocess",
                "bound_at": f"{_STATES}::preprocess_mamba",
                "resume_divisor": f"{_STATES}::preprocess_mamba",
                "accepted_from": f"{_OLD}::GPUModelRunner._prepare_inputs",
                "zero_draft_rows_use_offset": f"{_OLD}::GPUModelRunner._prepare_inputs",
                "postprocess_on_non_last_ranks": f"{_OLD}::GPUModelRunner.sample_tokens",
                "row_dropped_when_unscheduled": f"{_OLD}::GPUModelRunner._update_states",
                "queue_fixed_by": _OFFLOAD_TOP,
            },
        )
    return Facts(
        copies_by="batch_row" if late_rows else "slot",
        copies_bind="input_tables" if late_rows else "source_tables",
        bound_at="first_preprocess" if late_rows else "initialize",
        resume_divisor="cache_block" if late_rows else "mamba_block",
        accepted_from="device_slot",
        zero_draft_rows_use_offset=not late_rows,
        postprocess_on_non_last_ranks=True,
        row_dropped_when_unscheduled=False,
        window_rows_nulled=_family(release) == "0.33",
        queue_fixed_by="get_finished" if _queues_in_get_finished(release) else "wait_for_save",
        where={
            "copies_by": f"{_STATES}::postprocess_mamba_fused_kernel",
            "copies_bind": f"{_HYBRID}::MambaHybridModelState."
            + ("_ensure_align_ctx" if late_rows else "initialize_kv_cache"),
            "bound_at": f"{_HYBRID}::MambaHybridModelState."
            + ("_ensure_align_ctx" if late_rows else "initialize_kv_cache"),
            "resume_divisor": f"{_HYBRID}::MambaHybridModelState.add_request",
            "accepted_from": f"{_HYBRID}::MambaHybridModelState.prepare_attn",
            "zero_draft_rows_use_offset": f"{_HYBRID}::MambaHybridModelState.prepare_attn",
            "postprocess_on_non_last_ranks": f"{_RING}::PPHandler.get_prev_sampled_outputs",
            "window_rows_nulled": "v1/worker/gpu/block_table.py::BlockTables.gather_block_tables",
            "queue_fixed_by": _OFFLOAD_TOP,
        },
    )


class Drift(Exception):
    """A source tree does not have a call, or not in the order, that a program states."""


@lru_cache(maxsize=64)
def _parsed(path: Path, changed_ns: int) -> ast.Module:
    return ast.parse(path.read_text())


def _module(path: Path) -> ast.Module:
    return _parsed(path, path.stat().st_mtime_ns)


def _function(package: Path, path: str, name: str) -> ast.AST:
    node: ast.AST = _module(package / path)
    for part in name.split("."):
        found = next(
            (
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
            ),
            None,
        )
        if found is None:
            raise Drift(f"{path} has no {name}")
        node = found
    return node


def _callee(call: ast.Call) -> str:
    target = call.func
    if isinstance(target, ast.Subscript):  # a Triton launch: kernel[grid](...)
        target = target.value
    return ast.unparse(target)


def locate(package: Path, call: Call) -> int:
    """The line of a call in a source tree; :class:`Drift` if it is not there."""
    path, function, name = call
    wanted, _, number = name.partition("#")
    lines = [
        node.lineno
        for node in ast.walk(_function(package, path, function))
        if isinstance(node, ast.Call) and (_callee(node) == wanted or _callee(node).endswith("." + wanted))
    ]
    lines.sort()
    index = int(number or 0)
    if index >= len(lines):
        raise Drift(f"{path}::{function} has no call {name}")
    return lines[index]


# Lines within one function follow the order of execution, save for these: a context manager is written before
# what it surrounds, and its second half runs after; loads start in a finally clause.
_LEFT_LATER = frozenset({"self.maybe_get_kv_connector_output"})


def lines(package: Path, operation: Operation) -> tuple[int, ...]:
    """The line of each call of an operation's chain."""
    return tuple(locate(package, call) for call in operation.chain)


def verify(package: Path, operations: Iterable[Operation]) -> None:
    """Check that every call exists and that the operations stand in the stated order, else :class:`Drift`."""
    previous: tuple[Operation, tuple[int, ...]] | None = None
    for operation in operations:
        found = lines(package, operation)
        if operation.chain[0][2] in _LEFT_LATER:
            continue
        if previous is not None:
            before, place = previous
            same = operation.chain[0][:2] == before.chain[0][:2]
            if same and found < place:
                raise Drift(
                    f"{operation.does} stands at {operation.chain[0][0]}:{found[0]}, before {before.does} at "
                    f"{place[0]}"
                )
        previous = operation, found


FILES = Path(__file__).with_name("worker_files.json")


def programs(release: str, runner: str) -> Iterator[list[Operation]]:
    """The programs of a runner: each kind of rank, with and without a forward, with and without drafts."""
    for last_rank, forward, speculation in product((True, False), repeat=3):
        yield list(program(release, runner, last_rank=last_rank, forward=forward, speculation=speculation))


def verify_runner(package: Path, release: str, runner: str) -> None:
    """:func:`verify` for all programs of a runner."""
    for operations in programs(release, runner):
        verify(package, operations)


SIMULATED = (
    "v1/worker",
    "v1/attention/backends",
    "v1/kv_offload/cpu/gpu_worker.py",
    "v1/kv_offload/cpu/swap_blocks_triton.py",
    "v1/kv_offload/cpu/shared_offload_region.py",
    "distributed/kv_transfer/kv_connector/v1/offloading/worker.py",
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
    "model_executor/layers/mamba",
)
"""What runs on workers, whatever programs cite of it.  A check executes nothing of it but the scheduler's
half of ``offloading_connector.py``, which hands questions on."""


def file_digests(package: Path) -> dict[str, str]:
    """A digest of each file that runs on workers; blank lines and comments do not count."""
    found = (
        path
        for place in SIMULATED
        for path in ([package / place] if place.endswith(".py") else sorted((package / place).rglob("*.py")))
    )
    result = {}
    for path in found:
        source = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        code = [line.strip() for line in source.splitlines()]
        text = "\n".join(line for line in code if line and not line.startswith("#"))
        result[path.relative_to(package).as_posix()] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return result


def changed_files(package: Path, release: str) -> list[str]:
    """Files that run on workers and are not the release's: changed, new or gone."""
    recorded = json.loads(FILES.read_text(encoding="utf-8"))[release]
    have = file_digests(package)
    return sorted(path for path in recorded.keys() | have.keys() if recorded.get(path) != have.get(path))


def record(release: str, package: Path) -> None:
    """Record (or replace) the digests of a release's files."""
    known = json.loads(FILES.read_text(encoding="utf-8")) if FILES.exists() else {}
    known[release] = file_digests(package)
    write_whole(FILES, json.dumps(known, indent=1, sort_keys=True) + "\n")


def parser() -> OneLineParser:
    """The options of this module's command line."""
    about = (__doc__ or "").split("\n\n")[0]
    made = OneLineParser(prog="python -m impl.upstream.worker_order", description=about)
    made.add_argument("source", metavar="RELEASE|DIR", help=f"{', '.join(KNOWN)}, or an unpacked release")
    made.add_argument("--runner", choices=("v1", "v2"), help="default: both")
    made.add_argument("--record", action="store_true", help="record the digests of a release's files")
    return made


def tree_of(source: str) -> Tree:
    """A fetched release or a directory; :class:`UnknownRelease` or :class:`Unavailable` if it is neither."""
    from impl.upstream.env import prepared

    if source in KNOWN:
        return prepared(source).tree
    if not Path(source).is_dir():
        raise UnknownRelease(f"{source} is no directory and no known release; known: {', '.join(KNOWN)}")
    return recognise(Path(source))


@command("impl.upstream.worker_order")
def main(arguments: list[str]) -> int:
    """Command line of this module; see its docstring."""
    from impl.upstream.env import Unavailable

    options = parser()
    given = options.parse_args(arguments)
    if given.record and given.source not in KNOWN:
        options.error(f"--record takes a release, one of {', '.join(KNOWN)}")
    runners = (given.runner,) if given.runner else ("v2", "v1")
    try:
        tree = tree_of(given.source)
    except (Unavailable, UnknownRelease) as error:
        print(f"impl.upstream.worker_order: {error}", file=sys.stderr)
        return 2
    if given.record:
        record(tree.release, package_of(tree.directory))
        return 0
    package = package_of(tree.directory)
    for runner in runners:
        for last_rank, forward, speculation in product((True, False), repeat=3):
            operations = program(
                tree.release, runner, last_rank=last_rank, forward=forward, speculation=speculation
            )
            try:
                verify(package, operations)
            except Drift as drift:
                print(f"the worker of {given.source} is not that of {tree.release}: {drift}", file=sys.stderr)
                return 1
            rank = "last rank" if last_rank else "other ranks"
            drafts = "with drafts" if speculation else "without drafts"
            step = "a step" if forward else "an empty step"
            print(f"vllm {tree.release}, runner {runner}, {rank}, {step}, {drafts}")
            for operation in operations:
                path, function, name = operation.chain[-1]
                line = lines(package, operation)[-1]
                print(f"  {operation.does:18} {path}:{line}  {function}: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
