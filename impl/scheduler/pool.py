"""The block pool: reference counts, a free queue in order of reuse, and blocks by prefix key.

Life of a block: free, owned, published under a key, free again but still found by its key, reused.  Blocks
without a key are reused first (last in, first out), blocks under a key last (least recently used). Sources:
`v1/core/block_pool.py::BlockPool`, `v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue`, vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable

from spec.events import Event
from spec.ops import UserId

Key = tuple[int, int, int]
"""(group, tokens, hash of those tokens): equal hashes are equal prefixes."""

Chunk = tuple[Key, int, tuple[int, ...]]
"""A chunk of a transfer: (key, host place, device block by sub-slot, 0 for none)."""


class Block:
    """One page id.  ``before`` and ``after`` link it into the free queue."""

    __slots__ = ("after", "before", "id", "key", "references")

    def __init__(self, number: int) -> None:
        self.id = number
        self.references = 0
        self.key: Key | None = None
        self.before: Block = self
        self.after: Block = self

    def __repr__(self) -> str:
        return f"{self.id}*{self.references}{self.key or ''}"


class FreeQueue:
    """A ring of free blocks around a sentinel: any block leaves in constant time."""

    __slots__ = ("_end", "count")

    def __init__(self) -> None:
        self._end = Block(-1)
        self.count = 0

    def _insert(self, block: Block, before: Block) -> None:
        block.before, block.after = before.before, before
        block.before.after = before.before = block
        self.count += 1

    def append(self, block: Block) -> None:
        """Reused last."""
        self._insert(block, self._end)

    def append_left(self, block: Block) -> None:
        """Reused next."""
        self._insert(block, self._end.after)

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it stands."""
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = block
        self.count -= 1

    def head(self) -> Block:
        """The block to be reused next.  Raises ``IndexError`` if there is none."""
        if not self.count:
            raise IndexError("the pool has no free block")
        return self._end.after

    def ids(self) -> list[int]:
        """In order of reuse."""
        found, block = [], self._end.after
        while block is not self._end:
            found.append(block.id)
            block = block.after
        return found


class BlockPool:
    """All blocks of an engine; block 0 is the null block and belongs to nobody.

    ``log`` takes every decision; ``watchers`` are told of each block that is handed out; ``forgets_key``
    says whether such a block loses its key."""

    def __init__(
        self,
        blocks: int,
        log: Callable[[Event], None],
        forgets_key: Callable[[int], bool] = lambda block: True,
    ) -> None:
        self.blocks = [Block(number) for number in range(blocks)]
        self.free = FreeQueue()
        for block in self.blocks[1:]:
            self.free.append(block)
        self.by_key: dict[Key, dict[int, Block]] = {}
        self.log, self.forgets_key = log, forgets_key
        self.watchers: list[Callable[[Block], None]] = []
        self.handed_out: list[tuple[Block, int]] = []  # (block, group), since the last step
        self.given_back: dict[int, None] = {}  # blocks freed since the last step

    def cached(self, key: Key) -> Block | None:
        """A block under the key."""
        found = self.by_key.get(key)
        return next(iter(found.values())) if found else None

    def allocate(self, uid: UserId, group: int, col: int) -> Block:
        """The next free block, without its old key, becomes a request's column (or is kept beside its table:
        column -1).  Raises ``IndexError`` if none is free."""
        block = self.free.head()
        self.free.remove(block)
        if self.forgets_key(block.id):
            self.evict(block)
        block.references = 1
        self.log(("alloc", uid, group, col, block.id))
        self.handed_out.append((block, group))
        for watch in self.watchers:
            watch(block)
        return block

    def adopt(self, block: Block, uid: UserId, group: int, col: int) -> None:
        """A published block gets one more holder."""
        if not block.references:
            self.free.remove(block)
        block.references += 1
        self.log(("adopt", uid, group, col, block.id))

    def release(self, block: Block, uid: UserId, group: int, col: int) -> None:
        """A holder gives a block up; after the last one it is free."""
        block.references -= 1
        self.log(("drop", uid, group, col, block.id))
        if block.references == 0:
            self.given_back[block.id] = None
            if block.key is None:
                self.free.append_left(block)
            else:
                self.free.append(block)

    def publish(self, block: Block, uid: UserId, key: Key) -> None:
        """The block goes under a key, instead of the one that it had."""
        self._forget(block)
        block.key = key
        self.by_key.setdefault(key, {})[block.id] = block
        self.log(("publish", uid, key[0], block.id, key[1], key[2]))

    def evict(self, block: Block) -> None:
        """The block's key, if any, is forgotten."""
        if block.key is not None:
            self._forget(block)
            self.log(("evict", block.id))

    def evict_all(self) -> None:
        """No prefix is found any more."""
        for found in list(self.by_key.values()):
            for block in list(found.values()):
                self.evict(block)

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            found = self.by_key[block.key]
            del found[block.id]
            if not found:
                del self.by_key[block.key]
            block.key = None
