"""Inside the child process: what the release's managers decide, as decisions of ``spec.events``, in order.

The managers' methods are wrapped; what they do and return stays untouched.  A block table is compared before
and after each outermost call on a manager, so that every change of a column is seen with its request, group
and column; what the block pool handed out, touched and took back during the call says which kind of change it
was.  Keys are seen where a block gets or loses its hash.  Blocks that leave a table without being freed
(frees that wait for steps in flight, sources of copies) are remembered until they are.

Lines here name requests by their id and keys by their raw bytes; :mod:`impl.upstream.policy` renames both.

A copy-on-write block has two references of one request: its column and the copy that has not run.  The world
counts columns only, so the first of the two that goes is not reported; the last one is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Line = list[Any]


class Call:
    """The outermost call on a manager that is under way."""

    __slots__ = ("fresh", "freed", "group", "moved", "request", "touched")

    def __init__(self, request: str, group: int) -> None:
        self.request, self.group = request, group
        self.fresh: list[int] = []
        self.freed: list[int] = []
        self.touched: list[int] = []
        self.moved: set[int] = set()  # fresh blocks that were reported already


class Listener:
    """The lines since the last question, and the references that no table shows."""

    def __init__(self) -> None:
        self.on = False
        self.lines: list[Line] = []
        self.forget()

    def forget(self) -> None:
        """A new scheduler: nothing is held."""
        self.lines = []
        self.call: Call | None = None
        self.publisher = ""  # request whose blocks get keys now
        self.looking = ""  # request that asks the tier now
        self.popped: dict[int, list[tuple[str, int, int]]] = {}  # left a table, not freed yet
        self.outside: dict[int, list[tuple[str, int]]] = {}  # held for a copy, outside of every table
        self.extra: dict[int, int] = {}  # references that are not reported

    def take(self) -> list[Line]:
        """The lines since the last call."""
        lines, self.lines = self.lines, []
        return lines

    # -- the pool --------------------------------------------------------------------------------------------
    def freed(self, blocks: list[int]) -> None:
        """References go back to the pool."""
        if self.call is not None:
            self.call.freed.extend(blocks)
            return
        for block in blocks:
            if self.extra.get(block):
                self.extra[block] -= 1
            elif self.outside.get(block):
                request, group = self.outside[block].pop(0)
                self.lines.append(["drop", request, group, -1, block])
            elif self.popped.get(block):
                self.lines.append(["drop", *self.popped[block].pop(0), block])
            else:
                self.lines.append(["unknown_free", block])

    def compare(self, call: Call, before: list[int], after: list[int]) -> None:
        """The decisions between two states of one block table."""
        request, group, lines = call.request, call.group, self.lines
        fresh = set(call.fresh) - call.moved
        now = {block: col for col, block in enumerate(after) if block}
        drops: dict[int, list[int]] = {}
        for col, block in enumerate(before):
            if not block or (col < len(after) and after[col] == block):
                continue
            if block in now and block not in call.freed:
                lines.append(["move", request, group, col, now[block], block])
            elif block in call.freed:
                drops.setdefault(block, []).append(col)
            elif col < len(after) and after[col] in fresh:
                # The column of a hit that ends inside its block: a private copy takes its place.
                copy = after[col]
                lines += [["adopt", request, group, -1, block], ["drop", request, group, col, block]]
                lines += [["alloc", request, group, col, copy], ["copy", block, copy, group]]
                self.outside.setdefault(block, []).append((request, group))
                self.extra[copy] = self.extra.get(copy, 0) + 1
                call.moved.add(copy)
            else:
                self.popped.setdefault(block, []).append((request, group, col))
        for block in call.freed:
            if drops.get(block):
                lines.append(["drop", request, group, drops[block].pop(0), block])
        held = set(before) | call.moved
        for col, block in enumerate(after):
            if not block or (col < len(before) and before[col] == block):
                continue
            if block in fresh - call.moved:
                lines.append(["alloc", request, group, col, block])
            elif block not in held:
                lines.append(["adopt", request, group, col, block])


LISTENER = Listener()

# Methods that change a block table, with the request's id as first argument.
TABLE_METHODS = (
    "add_local_computed_blocks",
    "allocate_external_computed_blocks",
    "allocate_new_blocks",
    "remove_skipped_blocks",
    "pop_blocks_for_free",
)


def _wrap(owner: type, name: str, made: Callable[[Any], Any]) -> None:
    if name in owner.__dict__:
        setattr(owner, name, made(owner.__dict__[name]))


def _ids(blocks: Any) -> list[int]:
    return [0 if block.is_null else block.block_id for block in blocks]


def install() -> None:
    """Wrap the methods; once a process, before any scheduler is made."""
    _tables()
    _pool()
    _requests()
    _tier()


def _tables() -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    def watched(original: Any) -> Any:
        def method(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
            if not LISTENER.on or LISTENER.call is not None:
                return original(self, request_id, *args, **kwargs)
            before = _ids(self.req_to_blocks.get(request_id, ()))
            call = LISTENER.call = Call(request_id, self.kv_cache_group_id)
            try:
                return original(self, request_id, *args, **kwargs)
            finally:
                LISTENER.call = None
                after = _ids(self.req_to_blocks.get(request_id, ()))
                if before != after:
                    LISTENER.compare(call, before, after)

        return method

    for kind in vars(managers).values():
        if isinstance(kind, type) and issubclass(kind, managers.SingleTypeKVCacheManager):
            for name in TABLE_METHODS:
                _wrap(kind, name, watched)


def _pool() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    def new_blocks(original: Any) -> Any:
        def method(self: Any, count: int) -> Any:
            blocks = original(self, count)
            if LISTENER.call is not None:
                LISTENER.call.fresh.extend(block.block_id for block in blocks)
            return blocks

        return method

    def free_blocks(original: Any) -> Any:
        def method(self: Any, blocks: Any) -> Any:
            blocks = list(blocks)
            if LISTENER.on:
                LISTENER.freed([block.block_id for block in blocks if not block.is_null])
            return original(self, blocks)

        return method

    def set_hash(original: Any) -> Any:
        def method(self: Any, block_hash: Any, num_tokens: int | None = None) -> Any:
            result = original(self, block_hash, num_tokens)
            if LISTENER.on:
                LISTENER.lines.append(["publish", LISTENER.publisher, self.block_id, bytes(block_hash)])
            return result

        return method

    def reset_hash(original: Any) -> Any:
        def method(self: Any) -> Any:
            if LISTENER.on and self.block_hash is not None:
                LISTENER.lines.append(["evict", self.block_id])
            return original(self)

        return method

    def publishes(original: Any) -> Any:
        def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            LISTENER.publisher = request.request_id
            return original(self, request, *args, **kwargs)

        return method

    def moves(original: Any) -> Any:
        def method(self: Any, src_block: Any, dst_block: Any) -> Any:
            call, source, copy = LISTENER.call, src_block.block_id, dst_block.block_id
            if call is not None:
                # The owner goes on in its block; the copy takes the keys along.
                LISTENER.lines.append(["alloc", call.request, call.group, -1, copy])
                LISTENER.lines.append(["copy", source, copy, call.group])
                call.moved.add(copy)
                LISTENER.publisher = call.request
                LISTENER.outside.setdefault(copy, []).append((call.request, call.group))
                LISTENER.extra[source] = LISTENER.extra.get(source, 0) + 1
            return original(self, src_block, dst_block)

        return method

    _wrap(BlockPool, "get_new_blocks", new_blocks)
    _wrap(BlockPool, "free_blocks", free_blocks)
    _wrap(KVCacheBlock, "set_block_hash", set_hash)
    _wrap(KVCacheBlock, "reset_hash", reset_hash)
    _wrap(BlockPool, "cache_full_blocks", publishes)
    _wrap(BlockPool, "cache_partial_block", publishes)
    _wrap(BlockPool, "move_block_hashes", moves)


def _requests() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    def allocate(original: Any) -> Any:
        def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            admitted = request.num_computed_tokens == 0 and kwargs.get("new_computed_blocks") is not None
            result = original(self, request, *args, **kwargs)
            if LISTENER.on and admitted and result is not None:
                local = kwargs.get("num_new_computed_tokens", 0)
                total = local + kwargs.get("num_external_computed_tokens", 0)
                LISTENER.lines.append(["hit", request.request_id, local, total])
            return result

        return method

    def preempt(original: Any) -> Any:
        def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENER.on:
                LISTENER.lines.append(["preempt", request.request_id])
            return original(self, request, *args, **kwargs)

        return method

    def finish(original: Any) -> Any:
        def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if LISTENER.on:
                why = "abort" if request.status == RequestStatus.FINISHED_ABORTED else "length"
                LISTENER.lines.append(["finish", request.request_id, why])
            return original(self, request, *args, **kwargs)

        return method

    def handed(original: Any) -> Any:
        def method(self: Any, request_id: str, num_computed_tokens: int) -> Any:
            groups = original(self, request_id, num_computed_tokens)
            if LISTENER.on:
                for group, blocks in enumerate(groups):
                    LISTENER.lines.append(["handoff", request_id, group, list(blocks)])
            return groups

        return method

    _wrap(KVCacheManager, "allocate_slots", allocate)
    _wrap(KVCacheManager, "get_block_ids_for_computed_tokens", handed)
    _wrap(Scheduler, "_preempt_request", preempt)
    _wrap(Scheduler, "_free_request", finish)


def _tier() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    def matched(original: Any) -> Any:
        def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            LISTENER.looking = request.request_id
            return original(self, request, *args, **kwargs)

        return method

    def lookup(original: Any) -> Any:
        def method(self: Any, key: bytes, *args: Any) -> Any:
            result = original(self, key, *args)
            if LISTENER.on and (result is True or getattr(result, "name", "") == "HIT"):
                LISTENER.lines.append(["look", LISTENER.looking, bytes(key)])
            return result

        return method

    def prepare_store(original: Any) -> Any:
        def method(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            places = {bytes(key): chunk.chunk_id for key, chunk in self._policy.chunks.items()}
            result = original(self, keys, *args, **kwargs)
            if LISTENER.on and result is not None:
                for key in result.evicted_keys:
                    LISTENER.lines.append(["tier", bytes(key), places[bytes(key)], "gone"])
                for key in result.keys_to_store:
                    place = self._policy.chunks[key].chunk_id
                    LISTENER.lines.append(["tier", bytes(key), place, "writing"])
            return result

        return method

    def complete_store(original: Any) -> Any:
        def method(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            keys = list(keys)
            before = {key: self._policy.get(key) for key in keys}
            writing = {key: chunk for key, chunk in before.items() if chunk and not chunk.is_ready}
            result = original(self, keys, *args, **kwargs)
            if LISTENER.on:
                for key, chunk in writing.items():
                    state = "ready" if self._policy.get(key) is chunk else "gone"
                    LISTENER.lines.append(["tier", bytes(key), chunk.chunk_id, state])
            return result

        return method

    def complete_load(original: Any) -> Any:
        def method(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            keys = list(keys)
            result = original(self, keys, *args, **kwargs)
            if LISTENER.on:
                for key in keys:
                    chunk = self._policy.get(key)
                    LISTENER.lines.append(["tier", bytes(key), chunk.chunk_id, "released"])
            return result

        return method

    def reset(original: Any) -> Any:
        def method(self: Any) -> Any:
            if LISTENER.on:
                for key, chunk in self._policy.chunks.items():
                    LISTENER.lines.append(["tier", bytes(key), chunk.chunk_id, "gone"])
            return original(self)

        return method

    _wrap(OffloadingConnectorScheduler, "get_num_new_matched_tokens", matched)
    _wrap(CPUOffloadingManager, "lookup", lookup)
    _wrap(CPUOffloadingManager, "prepare_store", prepare_store)
    _wrap(CPUOffloadingManager, "complete_store", complete_store)
    _wrap(CPUOffloadingManager, "complete_load", complete_load)
    _wrap(CPUOffloadingManager, "reset_cache", reset)
