"""The cache manager: all groups over one pool: hits common to all, growth, freeing, keys, private copies.

Sources: `v1/core/kv_cache_coordinator.py::HybridKVCacheCoordinator`, `v1/core/kv_cache_manager.py`, vLLM
0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from impl.decisions import Decisions
from impl.scheduler.managers import MANAGERS, Found, FullManager
from impl.scheduler.pool import Block, BlockPool
from impl.scheduler.request import Request
from spec.arith import align
from spec.config import Config, Kind
from spec.events import Event


@dataclass(slots=True)
class LocalHit:
    """A prefix that every group can serve."""

    tokens: int
    columns: list[Found]  # per group
    inside: dict[int, Block] = field(default_factory=dict)  # group -> block in which the hit ends


@dataclass(frozen=True, slots=True)
class Boundary:
    """A recurrent state that may be stored: block and tokens, handed over exactly."""

    request: Request
    group: int
    block: Block
    tokens: int


class CacheManager:
    """Tables of all groups, and what is published in them."""

    def __init__(self, config: Config, decide: Decisions, log: Callable[[Event], None]) -> None:
        self.config, self.decide, self.log = config, decide, log
        self.pool = BlockPool(config.pool_blocks, log, decide.forgets_key)
        dropping = config.dropping_groups()
        self.groups: list[FullManager] = []
        for index, group in enumerate(config.groups):
            drops = int(group in dropping)
            if group.kind is Kind.MAMBA:
                drops *= decide.mamba_drops()
            self.groups.append(MANAGERS[group.kind](config, index, self.pool, decide, drops))
        self.recurrent = [m for m in self.groups if m.group.kind is Kind.MAMBA]
        self.attention = [m for m in self.groups if m.group.kind is not Kind.MAMBA]
        self.state_block = self.recurrent[0].block if self.recurrent else 0
        self.drops = [manager.drops for manager in self.groups]
        self.partial = config.partial_hits and config.prefix_caching and not config.offload
        units = tuple(manager.block for manager in self.groups)
        self.unit = config.hash_block_tokens if self.partial else decide.hit_unit(units)
        self.cached_now: dict[int, None] = {}  # states published by the step being scheduled
        self.boundaries: list[Boundary] = []  # to be offered to the store

    # -- hits ----------------------------------------------------------------------------------------------
    def local_hit(self, request: Request) -> LocalHit | None:
        """The longest prefix that every group can serve; None to ask again next step.

        Each group in turn shrinks the candidate to the longest hit of its own, until all agree.  What
        all of them can serve is never skipped, so the fixed point is the longest common hit."""
        nothing = LocalHit(0, [[] for _ in self.groups])
        if not self.config.prefix_caching:
            return nothing
        asked = [m for m in self.groups if self.decide.group_must_serve(m.group)]
        candidate = self.decide.longest_hit(request.known)
        agreed = 0
        while candidate and agreed < len(asked):
            for manager in asked:
                longest = manager.longest(request, candidate, self.unit)
                agreed = agreed + 1 if longest == candidate else 1
                candidate = longest
                if not candidate or agreed >= len(asked):
                    break
        if not candidate:
            return nothing
        hit = LocalHit(candidate, [[] for _ in self.groups])
        for manager in asked:
            served = manager.serve(request, candidate)
            assert served is not None
            hit.columns[manager.index], inside = served
            if inside is not None:
                hit.inside[manager.index] = inside
        states = [block for m in self.recurrent for _, block in hit.columns[m.index]]
        if not all(
            self.decide.same_step_hit(block.id in self.cached_now)
            for block in [*states, *hit.inside.values()]
        ):
            return None
        hit.tokens = self.decide.dropped_hit(candidate, self.unit, max(self.drops))
        return hit

    def adopt(self, request: Request, hit: LocalHit, total: int) -> None:
        """Hold the columns of a hit that will still be read once ``total`` tokens are in place."""
        for manager, found in zip(self.groups, hit.columns, strict=True):
            for col, block in found:
                if col >= manager.first_kept(total):
                    self.pool.adopt(block, request.uid, manager.index, col)
                    request.put(manager.index, col, block)

    def copy_inside(self, request: Request, hit: LocalHit, step: int) -> list[tuple[int, int, int]]:
        """Private copies of the blocks in which a hit ends: the request will write there."""
        copies = []
        for (
            g,
            block,
        ) in hit.inside.items():  # all are held before a copy is allocated, which might evict one
            if self.decide.copies_adopted_tail(block.id):
                self.pool.adopt(block, request.uid, g, -1)
                request.retained.append((step, g, block))
            else:
                col = hit.tokens // self.groups[g].block
                self.pool.adopt(block, request.uid, g, col)
                request.put(g, col, block)
        for g, block in hit.inside.items():
            if self.decide.copies_adopted_tail(block.id):
                col = hit.tokens // self.groups[g].block
                copy = self.pool.allocate(request.uid, g, col)
                request.put(g, col, copy)
                copies.append(self.copy(block, copy, g))
        return copies

    def copy(self, source: Block, target: Block, group: int) -> tuple[int, int, int]:
        """The step copies a page before its forward."""
        self.log(("copy", source.id, target.id, group))
        return source.id, target.id, group

    def admission_blocks(self, request: Request, hit: LocalHit, total: int, q: int) -> int:
        """Blocks that an admission takes off the free queue; cached ones that nobody holds are taken too.

        ``q``: tokens of the first step; 0 if the request only loads."""
        taken = sum(1 + (not block.references) for block in hit.inside.values())
        for manager, found in zip(self.groups, hit.columns, strict=True):
            first = manager.first_kept(total)
            taken += sum(col >= first and not block.references for col, block in found)
            taken += len(manager.fresh_columns(hit.tokens, total))
            if q:
                length = found[-1][0] + 1 if found else 0
                if manager.index in hit.inside:
                    length = hit.tokens // manager.block + 1
                taken += manager.blocks_for(length, total, q, request)
        return taken

    # -- columns -------------------------------------------------------------------------------------------
    def growth_blocks(self, request: Request, c: int, q: int) -> int:
        """Fresh blocks that a step needs."""
        return sum(len(manager.growth(request, c, q)[1]) for manager in self.groups)

    def fits(self, request: Request, c: int, q: int) -> bool:
        """Whether the pool has them."""
        return self.growth_blocks(request, c, q) <= self.pool.free.count

    def grow(self, request: Request, c: int, q: int) -> None:
        """Every column that the step will write."""
        for manager in self.groups:
            g = manager.index
            moves, fresh = manager.growth(request, c, q)
            for col, to in moves:
                block = request.block(g, col)
                assert block is not None
                self.log(("move", request.uid, g, col, to, block.id))
                request.tables[g][col] = None
                request.put(g, to, block)
            for col in fresh:
                request.put(g, col, self.pool.allocate(request.uid, g, col))
        request.grown = True

    def free_behind(self, request: Request) -> None:
        """Give up columns that no step will read again."""
        basis = self.decide.free_basis(request)
        for manager in self.groups:
            for col in manager.behind(request, basis):
                self._release(request, manager.index, col)

    def _release(self, request: Request, group: int, col: int) -> None:
        block = request.block(group, col)
        assert block is not None
        request.tables[group][col] = None
        self.pool.release(block, request.uid, group, col)

    def returning_blocks(self, requests: Iterable[Request]) -> int:
        """Blocks that nobody but these requests holds."""
        holds = Counter(block.id for request in requests for block in request.blocks())
        return sum(self.pool.blocks[block].references == count for block, count in holds.items())

    def release_all(self, request: Request, step: int, groups: int | None = None) -> None:
        """Give up everything, or all of the first ``groups`` groups; tails first, so that a prefix's tail is
        reused before its head."""
        for g in range(len(self.groups) if groups is None else groups):
            held = self.decide.release_list(request.ids(g), request.mirror[g])
            for col in range(len(held) - 1, -1, -1):
                if held[col]:
                    self.pool.release(self.pool.blocks[held[col]], request.uid, g, col)
            request.tables[g].clear()
        self.release_copies(request, step)
        request.start_over(keeps_mirror=self.decide.keeps_mirror())

    def release_copies(self, request: Request, step: int) -> None:
        """Blocks retained for copies of steps up to this one go back; a copied-away tail stays under its
        key."""
        for entry in [e for e in request.retained if e[0] <= step]:
            request.retained.remove(entry)
            _, g, block = entry
            self.pool.release(block, request.uid, g, -1)
            for col in range(self.decide.released_with_copy(len(request.tables[g]))):
                if request.block(g, col):
                    self._release(request, g, col)

    # -- keys ----------------------------------------------------------------------------------------------
    def publish_attention(self, request: Request, upto: int) -> None:
        """Full attention blocks below ``upto`` tokens go under their keys, before the step that fills
        them runs."""
        for manager in self.attention if self.config.prefix_caching else ():
            g, size = manager.index, manager.block
            while (request.published[g] + 1) * size <= upto:
                col = request.published[g]
                key = manager.key(request, (col + 1) * size)
                if key is None:
                    break
                block = request.block(g, col)
                if block and (block.key is None or block.key[1] < key[1]):
                    self.pool.publish(block, request.uid, key)
                request.published[g] += 1

    def publish_states(self, request: Request, upto: int, *, now: bool) -> None:
        """Recurrent columns below ``upto`` tokens go under their keys, and are offered to the store.

        ``now``: the step being scheduled writes them, so that no reader of the same step may adopt them."""
        for manager in self.recurrent if self.config.prefix_caching else ():
            g, size = manager.index, manager.block
            while (request.published[g] + 1) * size <= upto:
                col = request.published[g]
                key = manager.key(request, (col + 1) * size)
                if key is None:
                    break
                request.published[g] += 1
                block = request.block(g, col)
                if block is None or block.key is not None:
                    continue
                self.pool.publish(block, request.uid, key)
                if now:
                    self.cached_now[block.id] = None
                self.boundaries.append(Boundary(request, g, block, key[1]))

    def tail_position(self, request: Request) -> int:
        """The last hash boundary from which a later request with this prompt can go on."""
        config = self.config
        return align.checkpoint_position(
            request.prompt, config.hash_block_tokens, any(self.drops), config.hash_lookahead_tokens
        )

    def publish_tail(self, request: Request, tokens: int) -> None:
        """Blocks in which a prompt's last hash boundary lies go under the key of a prefix that ends
        inside them."""
        if not self.partial or tokens != self.tail_position(request):
            return
        inside: dict[int, Block] = {}
        for manager in self.groups:
            block = request.block(manager.index, tokens // manager.block) if tokens % manager.block else None
            key = manager.key(request, tokens)
            if block and key and block.key is None:
                self.pool.publish(block, request.uid, key)
                self.cached_now[block.id] = None
                inside[manager.index] = block
        if inside:
            request.tail = tokens, inside

    def copy_tail_away(self, request: Request, step: int, spare: int) -> list[tuple[int, int, int]]:
        """Before its next step overwrites a state published inside a block, the state gets a block of
        its own, which takes the key along; without a ``spare`` block the key is forgotten."""
        tail, request.tail = request.tail, None
        copies = []
        for g, block in (tail[1] if tail else {}).items():
            key = block.key
            if self.groups[g] not in self.recurrent or key is None or tail is None or key[:2] != (g, tail[0]):
                continue
            if not self.decide.copies_tail(block.id):
                continue
            if spare < 1:
                self.pool.evict(block)
                continue
            spare -= 1
            copy = self.pool.allocate(request.uid, g, -1)
            self.pool.evict(block)
            self.pool.publish(copy, request.uid, key)
            copies.append(self.copy(block, copy, g))
            request.retained.append((step, g, copy))
        return copies
