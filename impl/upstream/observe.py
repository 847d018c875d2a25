"""The refinement map: vLLM's live objects, read and never changed, as plain data.

Everything here is a dictionary of JSON values, so that a difference between two observations is one loop.
Nothing else in this package reads the scheduler's private attributes.  Names used throughout:

* a **block** is its id in the pool; the null block is 0;
* a **hash** is a number given on first sight to a prefix: equal numbers mean equal prefixes.  ``Hashes`` says
  once what each stands for: its parent, the tokens covered, the tokens of its last hash block and those that
  it only looks ahead at;
* a **key** is ``"group:hash"``, in the pool's prefix cache and in the offload tier alike.  vLLM builds both
  from the hash of the last hash block covered (``kv_cache_utils.py::BlockHashListWithBlockSize``,
  ``kv_offload/base.py::make_offload_key``), so that equal keys mean equal prefixes in one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Plain = dict[str, Any]
State = dict[str, Plain]

GROUP_BYTES = 4  # width of the group index at the end of a key, in the pool and in the tier


class Hashes:
    """Numbers for prefix hashes, and what each one stands for."""

    def __init__(self, hash_block_tokens: int, lookahead_tokens: int) -> None:
        self._block_tokens = hash_block_tokens
        self._lookahead_tokens = lookahead_tokens
        self._numbers: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}
        self._fresh: Plain = {}
        self._covers: dict[int, int] = {0: 0}  # number -> tokens

    def learn(self, request: Any, known: int) -> int:
        """Name a request's hashes past the first ``known``; returns how many it has."""
        hashes = request.block_hashes
        tokens = request.all_token_ids
        for index in range(known, len(hashes)):
            raw = bytes(hashes[index])
            if raw not in self._numbers:
                number = self._numbers[raw] = len(self._numbers) + 1
                start, end = index * self._block_tokens, (index + 1) * self._block_tokens
                parent = self._numbers[bytes(hashes[index - 1])] if index else 0
                self._covers[number] = end
                self._fresh[str(number)] = {
                    "parent": parent,
                    "tokens": list(tokens[start:end]),
                    "ahead": list(tokens[end : end + self._lookahead_tokens]),
                    "covers": end,
                }
        return len(hashes)

    def key(self, raw: bytes) -> str:
        """``"group:hash"`` for a key of the pool or the tier; hash 0 if no live request has shown it."""
        name = self._names.get(raw)
        if name is None:
            group = int.from_bytes(raw[-GROUP_BYTES:], "big", signed=False)
            number = self._numbers.get(bytes(raw[:-GROUP_BYTES]), 0)
            name = f"{group}:{number}"
            if number:
                self._names[raw] = name
        return name

    def meaning(self, raw: bytes) -> tuple[int | None, int]:
        """Group and covered tokens of a key of the pool or the tier; no group for a hash alone, and 0 tokens
        for bytes that no live request has shown."""
        if raw in self._numbers:
            return None, self._covers[self._numbers[raw]]
        group, number = map(int, self.key(raw).split(":"))
        return group, self._covers[number]

    def take_fresh(self) -> Plain:
        """Hashes named since the last call, by number."""
        fresh, self._fresh = self._fresh, {}
        return fresh


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [0 if block.is_null else block.block_id for block in blocks]


def _pool(pool: Any, key: Callable[[bytes], str]) -> State:
    references: Plain = {}
    keys: Plain = {}
    secondary: Mapping[int, Any] = getattr(pool, "cached_block_hashes_by_block", {})
    for block in pool.blocks:
        number = block.block_id
        if block.ref_cnt and not block.is_null:
            references[str(number)] = block.ref_cnt
        raw = block.block_hash
        extra = secondary.get(number)
        if raw is not None or extra:
            # The key with its covered tokens first, then the others that the block answers to.
            names = [] if raw is None else [[key(raw), block.block_hash_num_tokens]]
            names += [[name, None] for name in sorted(key(other) for other in extra or () if other != raw)]
            keys[str(number)] = names
    return {
        "references": references,
        "keys": keys,
        "free": {"order": _ids(pool.free_block_queue.get_all_free_blocks())},
    }


def _lookup_table(pool: Any, key: Callable[[bytes], str]) -> Plain:
    """Every key of the prefix cache and the blocks it may hand out."""
    table: Plain = {}
    for raw, entry in pool.cached_block_hash_to_block._cache.items():
        blocks = entry.values() if isinstance(entry, dict) else (entry,)
        table[key(raw)] = sorted(block.block_id for block in blocks)
    return table


def _request(request: Any) -> Plain:
    return {
        "status": request.status.name.lower(),
        "prompt": request.num_prompt_tokens,
        "tokens": request.num_tokens,
        "computed": request.num_computed_tokens,
        "in_flight": request.num_in_flight_tokens,
        "placeholders": request.num_output_placeholders,
        "drafts": list(request.spec_token_ids),
        "stale": getattr(request, "num_stale_output_tokens", 0),
        "preemptions": request.num_preemptions,
        "hashes": len(request.block_hashes),
        "next_decode_step": getattr(request, "next_decode_eligible_step", 0),
        "junction": getattr(request, "shared_prefix_boundary", 0),
    }


def _managers(managers: Iterable[Any]) -> State:
    tables: dict[str, list[list[int]]] = {}
    cached: dict[str, list[int]] = {}
    retired: dict[str, Plain] = {}
    managers = list(managers)
    for group, manager in enumerate(managers):
        for name, blocks in manager.req_to_blocks.items():
            tables.setdefault(name, [[] for _ in managers])[group] = _ids(blocks)
        for name, count in manager.num_cached_block.items():
            cached.setdefault(name, [0] * len(managers))[group] = count
        for name, column in getattr(manager, "last_state_block_idx", {}).items():
            retired.setdefault(name, {})[str(group)] = column
    return {
        "tables": {name: groups for name, groups in tables.items() if any(groups)},
        "cached_columns": {name: counts for name, counts in cached.items() if any(counts)},
        "last_state_column": retired,
    }


def _connector(connector: Any, key: Callable[[bytes], str]) -> State:
    jobs: Plain = {}
    for number, job in connector._jobs.items():
        jobs[str(number)] = {
            "request": job.req_id,
            "pending": job.pending_count,
            "store": job.is_store,
            "sync": bool(getattr(job, "is_sync_load", False)),
            "keys": sorted(map(key, job.keys)),
            "fenced": list(job.fenced_block_ids or ()),
            "fenced_at_finish": list(job.deferred_fence_block_ids or ()),
        }
    mirrors: Plain = {}
    for name, status in connector._req_status.items():
        mirrors[name] = {
            "blocks": [list(group.block_ids) for group in status.group_states],
            "next_stored_chunk": [group.next_stored_chunk_idx for group in status.group_states],
            "keys": [len(group.offload_keys) for group in status.group_states],
            "jobs": sorted(status.transfer_jobs),
            "finished": bool(getattr(status, "finished_signaled", False)),
        }
    tier = {
        key(raw): [chunk.chunk_id, chunk.ref_cnt] for raw, chunk in connector.manager._policy.chunks.items()
    }
    return {
        "jobs": jobs,
        "mirrors": mirrors,
        "fences": {
            str(block): sorted(numbers) for block, numbers in connector._block_id_to_pending_jobs.items()
        },
        "tier": tier,
        "loading": dict.fromkeys(map(key, connector._chunks_being_loaded or ()), True),
        "reset_fence": {str(n): c for n, c in getattr(connector, "_reset_fence", {}).items()},
    }


def observe(scheduler: Any, hashes: Hashes) -> State:
    """Everything the scheduler process knows that a rule may mention, as dictionaries of plain data."""
    key = hashes.key
    manager = scheduler.kv_cache_manager
    state = _pool(manager.block_pool, key)
    state["lookup"] = _lookup_table(manager.block_pool, key)
    state.update(_managers(manager.coordinator.single_type_managers))
    state["requests"] = {name: _request(request) for name, request in scheduler.requests.items()}
    holding = getattr(scheduler, "kv_holding_waiting", ())
    skipped = getattr(scheduler, "skipped_waiting", ())
    state["queues"] = {
        "running": [request.request_id for request in scheduler.running],
        "waiting": [
            request.request_id for queue in (holding, skipped, scheduler.waiting) for request in queue
        ],
        "finished": sorted(scheduler.finished_req_ids),
        "loaded": sorted(scheduler.finished_recving_kv_req_ids),
    }
    state["steps"] = {
        "scheduled": getattr(scheduler, "sched_step_seq", 0),
        "processed": getattr(scheduler, "processed_step_seq", 0),
        "calls": scheduler.current_step,
    }
    state["deferred_frees"] = {
        "fifo": [[fence, _ids(blocks)] for fence, blocks in getattr(scheduler, "deferred_frees", ())]
    }
    if scheduler.connector is not None:
        state.update(_connector(scheduler.connector.connector_scheduler, key))
    return state


def difference(before: State, after: State) -> State:
    """What changed: part -> name -> new value, with ``None`` for a name that is gone."""
    changed: State = {}
    for part, now in after.items():
        was = before.get(part, {})
        if was == now:
            continue
        fresh: Plain = {name: value for name, value in now.items() if name not in was or was[name] != value}
        fresh.update((name, None) for name in was if name not in now)
        changed[part] = fresh
    return changed


def apply(state: State, changed: State) -> None:
    """Bring an observation up to date with a :func:`difference`, in place."""
    for part, names in changed.items():
        target = state.setdefault(part, {})
        for name, value in names.items():
            if value is None:
                target.pop(name, None)
            else:
                target[name] = value


def job(metadata: Any, number: int, key: Callable[[Any], str] | None = None) -> Plain:
    """One transfer as the worker receives it: GPU blocks by group and CPU chunks.

    ``blocks`` lists the GPU blocks of each group, ``first_column`` the column of each group's first block:
    the block at column j goes to sub-slot ``j % blocks_per_chunk`` of its chunk
    (``kv_offload/cpu/gpu_worker.py``).
    """
    source, target = metadata.src_spec, metadata.dst_spec
    store = hasattr(source, "group_sizes")
    gpu, cpu = (source, target) if store else (target, source)
    ids = [int(block) for block in gpu.block_ids]
    blocks: list[list[int]] = []
    for size in gpu.group_sizes:
        blocks.append(ids[:size])
        ids = ids[size:]
    return {
        "job": number,
        "request": metadata.req_id,
        "store": store,
        "sync": bool(getattr(metadata, "sync", False)),
        "blocks": blocks,
        "first_column": [int(column) for column in gpu.block_indices],
        "chunks": [int(chunk) for chunk in cpu.block_ids],
    }


def scheduled(output: Any, offers: Mapping[str, Any], samples: list[str]) -> Plain:
    """A ``SchedulerOutput`` as every worker receives it, and the boundary states offered to the connector."""
    cached = output.scheduled_cached_reqs
    resumed = set(cached.resumed_req_ids)
    metadata = output.kv_connector_metadata
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return {
        "new": [
            {
                "request": new.req_id,
                "blocks": [list(group) for group in new.block_ids],
                "computed": new.num_computed_tokens,
                "known": len(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids),
            }
            for new in output.scheduled_new_reqs
        ],
        "cached": [
            {
                "request": name,
                "blocks": None if blocks is None else [list(group) for group in blocks],
                "computed": computed,
                "resumed": name in resumed,
            }
            for name, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ],
        "tokens": dict(output.num_scheduled_tokens),
        "drafts": {name: list(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()},
        "samples": samples,
        "skip_drafts": bool(getattr(output, "skip_drafts", False)),
        "finished": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "zero": list(output.new_block_ids_to_zero or ()),
        "copies": [[copy.src_block_id, copy.dst_block_id] for copy in copies],
        "offers": {name: [list(offer) for offer in entries] for name, entries in offers.items()},
        "loads": [job(entry, number) for number, entry in metadata.load_jobs.items()] if metadata else [],
        "stores": [job(entry, number) for number, entry in metadata.store_jobs.items()] if metadata else [],
        "flush": sorted(metadata.jobs_to_flush or ()) if metadata else [],
    }
