"""The book: what the scheduler process knows, rebuilt from decisions alone.

Every policy keeps its own structures; the world keeps this one, by applying each decision as it is taken.
It is the *scheduler view*: it holds no ghost, no stream position and no rank's memory, so contracts and the
reference policy may look at all of it.  Ownership lives in the core protocol (``spec.core``); the book adds
order (which free block goes next), tables, tokens and the host tier.

Sources: vLLM ``v1/core/block_pool.py`` (free queue, hash map), ``v1/core/single_type_kv_cache_manager.py``
(``req_to_blocks``), ``v1/request.py``, ``v1/kv_offload/cpu/manager.py`` (chunk status).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from spec.chains import EMPTY, Chains
from spec.config import Config
from spec.core import NULL, Core
from spec.events import Event
from spec.ops import UserId

Key = tuple[int, int, int]  # (group, tokens, prefix of those tokens and of the lookahead)


class Status(StrEnum):
    """Where a request stands with the scheduler."""

    WAITING = "waiting"
    LOADING = "loading"  # blocks held, a load from the host tier in flight
    RUNNING = "running"
    DONE = "done"  # finished or aborted; blocks may still be held for steps in flight


@dataclass(slots=True)
class Request:
    """One incarnation of a request."""

    uid: UserId
    prompt: int  # prompt tokens
    line: list[int]  # line[n]: prefix of the first n known tokens; drafts are never in it
    tokens: list[int]
    cols: list[list[int]]  # per group: logical column -> block id, 0 for null
    status: Status = Status.WAITING
    computed: int = 0  # by the scheduler's count: scheduled tokens included, drafts not yet rejected included
    flying: dict[int, tuple[int, int, int]] = field(
        default_factory=dict
    )  # step -> (c, q, d), not yet processed
    hit: int = 0  # tokens in place at the last admission
    retained: list[int] = field(
        default_factory=list
    )  # blocks held outside the table: sources and results of copies

    def holds(self) -> bool:
        """Whether it holds any block."""
        return bool(self.retained) or any(map(any, self.cols))

    @property
    def known(self) -> int:
        """Verified tokens: the prompt and what outputs have brought."""
        return len(self.tokens)

    @property
    def processed(self) -> int:
        """Computed tokens whose step's output was processed; columns behind them can be judged dead."""
        return self.computed - sum(q for _, q, _ in self.flying.values())


@dataclass(slots=True)
class HostChunk:
    """One chunk of the host tier."""

    place: int
    state: str  # "writing" | "ready"
    readers: int = 0


@dataclass(slots=True)
class Book:
    """All of the above.  ``apply`` takes a decision and answers with the core rule that it broke, if any."""

    config: Config
    chains: Chains
    core: Core
    free: deque[int]
    by_key: dict[Key, list[int]]
    requests: dict[UserId, Request]
    tier: dict[Key, HostChunk]
    step: int = 0

    @classmethod
    def empty(cls, config: Config, chains: Chains) -> Book:
        """The book of a fresh engine: every block but the null block is free, in order."""
        free = deque(range(1, config.pool_blocks))
        return cls(config, chains, Core(config.ranks), free, {}, {}, {})

    def live(self) -> list[Request]:
        """Requests that are not done."""
        return [r for r in self.requests.values() if r.status is not Status.DONE]

    def cached(self, key: Key) -> int:
        """A block under this key, or the null block."""
        blocks = self.by_key.get(key)
        return blocks[0] if blocks else NULL

    # -- applying decisions --------------------------------------------------------------------------------
    def apply(self, event: Event) -> str | None:
        """The decision happens; the name of the core rule it broke, or None."""
        handler = _HANDLERS.get(event[0])
        broken: str | None = handler(self, *event[1:]) if handler else None
        return broken

    def _alloc(self, u: UserId, g: int, col: int, b: int) -> str | None:
        if b in self.free:
            self.free.remove(b)
        self._set(u, g, col, b)
        return self.core.allocate(u, b)

    def _adopt(self, u: UserId, g: int, col: int, b: int) -> str | None:
        if b in self.free:
            self.free.remove(b)
        self._set(u, g, col, b)
        return self.core.adopt(u, b)

    def _set(self, u: UserId, g: int, col: int, b: int) -> None:
        if col < 0:  # a reference outside the table, for a copy-on-write that has not run yet
            self.requests[u].retained.append(b)
            return
        cols = self.requests[u].cols[g]
        cols.extend([NULL] * (col + 1 - len(cols)))
        cols[col] = b

    def _move(self, u: UserId, g: int, col: int, to: int, b: int) -> None:
        self._set(u, g, col, NULL)
        self._set(u, g, to, b)

    def _drop(self, u: UserId, g: int, col: int, b: int) -> str | None:
        request = self.requests[u]
        if col < 0 and b in request.retained:
            request.retained.remove(b)
        elif 0 <= col < len(request.cols[g]) and request.cols[g][col] == b:
            request.cols[g][col] = NULL
        broken = self.core.release(u, b)
        if broken is None and b not in self.core.holders:
            # Unhashed blocks are reused first, hashed ones last (LRU): BlockPool.free_blocks.
            if b in self.core.key:
                self.free.append(b)
            else:
                self.free.appendleft(b)
        return broken

    def _publish(self, u: UserId, g: int, b: int, n: int, prefix: int) -> str | None:
        old = self.core.key.get(b)
        if old is not None:
            self._unkey(b, old)
        key = (g, n, prefix)
        self.by_key.setdefault(key, []).append(b)
        return self.core.publish(u, b, key)

    def _unkey(self, b: int, key: object) -> None:
        blocks = self.by_key[key]  # type: ignore[index]
        blocks.remove(b)
        if not blocks:
            del self.by_key[key]  # type: ignore[arg-type]

    def _evict(self, b: int) -> str | None:
        old = self.core.key.get(b)
        if old is not None:
            self._unkey(b, old)
        return self.core.evict(b)

    def _enqueue(self, u: UserId, tokens: tuple[int, ...]) -> None:
        line = [EMPTY]
        for token in tokens:
            line.append(self.chains.fold(line[-1], token))
        groups = len(self.config.groups)
        self.requests[u] = Request(u, len(tokens), line, list(tokens), [[] for _ in range(groups)])

    def _hit(self, u: UserId, local: int, total: int) -> None:
        request = self.requests[u]
        request.hit = total
        if total > local:
            request.status = Status.LOADING

    def _start(self, u: UserId, computed: int) -> None:
        request = self.requests[u]
        request.status = Status.RUNNING
        request.computed = computed

    def _row(self, u: UserId, c: int, q: int, d: int) -> None:
        request = self.requests[u]
        request.computed = c + q
        request.flying[self.step + 1] = (c, q, d)

    def _preempt(self, u: UserId) -> None:
        request = self.requests[u]
        request.status = Status.WAITING
        request.computed = 0
        request.hit = 0

    def _tokens(self, u: UserId, step: int, new: tuple[int, ...], computed: int) -> None:
        request = self.requests.get(u)
        if request is None:
            return
        request.flying.pop(step, None)
        for token in new:
            request.tokens.append(token)
            request.line.append(self.chains.fold(request.line[-1], token))
        if request.status is Status.RUNNING:
            request.computed = computed

    def _finish(self, u: UserId, why: str) -> None:
        self.requests[u].status = Status.DONE

    def _step(self, step: int) -> str | None:
        self.step = step
        return self.core.begin(step, tuple(u for u, r in self.requests.items() if step in r.flying))

    def _done(self, step: int) -> str | None:
        for request in list(self.requests.values()):
            request.flying.pop(step, None)
        self.forget()
        return self.core.end(step)

    def forget(self) -> None:
        """Requests that are done, hold nothing and fly in no step leave the book."""
        for u, request in list(self.requests.items()):
            if request.status is Status.DONE and not request.flying and not request.holds():
                del self.requests[u]

    def _job(
        self, j: int, way: str, u: UserId, chunks: tuple[tuple[Key, int, tuple[int, ...]], ...]
    ) -> str | None:
        blocks = dict.fromkeys(b for _, _, subs in chunks for b in subs if b)
        if way == "load":
            for key, _, _ in chunks:
                if key in self.tier:
                    self.tier[key].readers += 1
        return self.core.create(j, way, tuple(blocks))

    def _flush(self, j: int) -> str | None:
        return self.core.flush(j)

    def _unfence(self, j: int, r: int) -> str | None:
        return self.core.report(j, r)

    def _tier(self, g: int, n: int, prefix: int, place: int, state: str) -> None:
        key = (g, n, prefix)
        if state == "gone":
            self.tier.pop(key, None)
        elif state == "released":  # a reader is done
            if key in self.tier:
                self.tier[key].readers -= 1
        else:
            self.tier[key] = HostChunk(place, state)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "alloc": Book._alloc,
    "adopt": Book._adopt,
    "move": Book._move,
    "drop": Book._drop,
    "publish": Book._publish,
    "evict": Book._evict,
    "enqueue": Book._enqueue,
    "hit": Book._hit,
    "start": Book._start,
    "row": Book._row,
    "preempt": Book._preempt,
    "tokens": Book._tokens,
    "finish": Book._finish,
    "step": Book._step,
    "done": Book._done,
    "job": Book._job,
    "flush": Book._flush,
    "unfence": Book._unfence,
    "tier": Book._tier,
}
