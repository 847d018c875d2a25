"""The offload connector's scheduler side: lookup, loads, stores, fences, reports.

A store reads device blocks some time after it was decided.  Its fence says which; when one of them is
handed out again, the step flushes the store before anything overwrites.  A chunk is loadable once every
rank has stored it. Sources: `distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`, vLLM 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm

from impl.decisions import Decisions
from impl.device import Transfer
from impl.scheduler.cache import CacheManager
from impl.scheduler.managers import FullManager
from impl.scheduler.pool import Block, Chunk, Key
from impl.scheduler.request import Request
from impl.scheduler.tier import ABSENT, READY, WRITING, HostTier
from spec.arith import align, coverage
from spec.config import Config, Kind
from spec.events import Event
from spec.ops import UserId
from spec.policy import PolicyError

DEFER = -1


@dataclass(slots=True)
class Job:
    """A transfer until the last report."""

    request: Request
    way: str
    chunks: tuple[Chunk, ...]
    waiting: set[int]
    failed: bool = False
    stale: bool = False  # from before a reset of the tier

    def transfer(self, number: int) -> Transfer:
        """What the workers are told."""
        pages = tuple(
            (block, place, sub) for _, place, subs in self.chunks for sub, block in enumerate(subs) if block
        )
        return Transfer(number, self.way, pages)


class OffloadScheduler:
    """Transfers of all requests, and the host tier."""

    def __init__(
        self,
        config: Config,
        decide: Decisions,
        cache: CacheManager,
        requests: dict[UserId, Request],
        log: Callable[[Event], None],
    ) -> None:
        self.config, self.decide, self.cache, self.log = config, decide, cache, log
        self.requests = requests  # the scheduler's
        self.per = config.blocks_per_chunk
        self.tier = HostTier(config.tier_chunks, decide, log)
        self.jobs: dict[int, Job] = {}
        self.next_job = 1
        self.loading: dict[Key, None] = {}
        self.fences: dict[int, dict[int, None]] = {}  # block -> stores that read it
        self.must_flush: dict[int, None] = {}
        self.new_stores: list[int] = []
        self.new_loads: list[int] = []
        full = [m for m in cache.groups if m.group.kind is Kind.FULL] or cache.groups
        self.segment = lcm(*(self.size(m) for m in full))
        self.unit = decide.hit_unit(tuple(self.size(manager) for manager in cache.groups))
        cache.pool.watchers.append(self.handed_out)

    def size(self, manager: FullManager) -> int:
        """Tokens of one of the group's chunks."""
        return coverage.chunk_tokens(manager.block, self.per)

    def handed_out(self, block: Block) -> None:
        """Stores that still read a block must be over before its new owner writes."""
        fencing = tuple(self.fences.get(block.id, ()))
        self.must_flush.update(dict.fromkeys(self.decide.flushed_jobs(fencing)))

    # -- lookup --------------------------------------------------------------------------------------------
    def checked(self, manager: FullManager, local: int, total: int) -> range:
        """Chunks that must be present for a hit of ``total`` tokens."""
        size, group = self.size(manager), manager.group
        end = coverage.demand_end_chunk(total, size)
        if group.kind is Kind.MAMBA:
            return range(end - 1, end)
        if group.kind is Kind.FULL:
            first = coverage.lookup_first_chunk_full(local, size)
        else:
            first = self.decide.lookup_first(group, total, local, size)
        return range(max(0, first), end + manager.drops)

    def demanded(self, manager: FullManager, local: int, total: int) -> range:
        """Chunks that the load will name."""
        columns = manager.fresh_columns(local, total)
        if not columns:
            return range(0)
        first = align.chunk_of_column(columns[0], self.per)
        return range(first, coverage.demand_end_chunk(total, self.size(manager)))

    def key(self, manager: FullManager, request: Request, chunk: int) -> Key | None:
        """The key of a chunk; None while its tokens are unknown."""
        end = (chunk + 1) * self.size(manager)
        return (manager.index, end, request.hashes[end]) if end <= request.known else None

    def external_hit(self, request: Request, local: int) -> int:
        """Tokens in place after a load; ``local`` if there is nothing to gain, DEFER to ask again."""
        last = request.known - 1
        if request.tried:
            return local
        candidates = list(range(last // self.unit * self.unit, local, -self.unit))
        if not self.cache.recurrent and last > local and last not in candidates:
            candidates.insert(0, last)
        for total in candidates:
            state = self.availability(request, local, total)
            if state == WRITING or (state == READY and self.is_loading(request, local, total)):
                return DEFER
            if state == READY:
                return total
        return local

    def availability(self, request: Request, local: int, total: int) -> str:
        """Whether every chunk that the hit needs is ready, or some are absent or still being written."""
        answer = READY
        for manager in self.cache.groups:
            for chunk in self.checked(manager, local, total):
                key = self.key(manager, request, chunk)
                state = self.tier.state(key) if key else ABSENT
                if state == ABSENT:
                    return ABSENT
                if state == WRITING and not self.decide.pending_is_present(state):
                    answer = WRITING
        return answer

    def is_loading(self, request: Request, local: int, total: int) -> bool:
        """Whether somebody else loads a chunk that the hit needs: its blocks can be shared when it has
        landed."""
        for manager in self.cache.groups:
            chunks, size = self.checked(manager, local, total), self.size(manager)
            if manager.group.kind is Kind.WINDOW:
                first = max(0, self.decide.inflight_first(manager.group, total, local, size))
                chunks = range(first, coverage.demand_end_chunk(total, size))
            if any(self.key(manager, request, chunk) in self.loading for chunk in chunks):
                return True
        return False

    # -- loads ---------------------------------------------------------------------------------------------
    def start_load(self, request: Request, local: int, total: int) -> None:
        """Allocate what the hit needs and load it on every rank."""
        for manager in self.cache.groups:
            for chunk in self.checked(manager, local, total):
                key = self.key(manager, request, chunk)
                assert key is not None
                self.log(("look", request.uid, manager.index, chunk, key[1], key[2]))
        self.log(("hit", request.uid, local, total))
        chunks: list[Chunk] = []
        for manager in self.cache.groups:
            g = manager.index
            columns = manager.fresh_columns(local, total)
            self.check_local(request, manager, local)
            for col in columns:
                request.put(g, col, self.cache.pool.allocate(request.uid, g, col))
            demanded = self.demanded(manager, local, total)
            for chunk in demanded:
                key = self.key(manager, request, chunk - self.decide.load_shift(demanded.start))
                if key is None or self.tier.state(key) != READY:
                    raise PolicyError(
                        f"load of {request.uid} admitted at {total} tokens names chunk {chunk} of group "
                        f"{manager.group.name}, which is not ready in the host tier"
                    )
                place = self.tier.prepare_load(key)
                first = chunk * self.per
                ids = request.ids(g)
                subs = tuple(ids[first + i] if first + i in columns else 0 for i in range(self.per))
                chunks.append((key, place, subs))
                self.loading[key] = None
        for part in self.decide.load_parts(tuple(chunks)):
            self.create(request, "load", part)

    def check_local(self, request: Request, manager: FullManager, local: int) -> None:
        """The load begins behind the local prefix.  Raises :class:`PolicyError` if the row has another one
        than the scheduler has counted."""
        counted = local // manager.block
        found = self.decide.local_columns(tuple(request.ids(manager.index)[:counted]), counted)
        if found != counted:
            raise PolicyError(
                f"load of {request.uid}: {found} columns of group {manager.group.name} are local, "
                f"not {counted}"
            )

    def create(self, request: Request, way: str, chunks: tuple[Chunk, ...]) -> None:
        """A new transfer; a store's fences stand from now on."""
        job = self.next_job
        self.next_job += 1
        self.jobs[job] = Job(request, way, chunks, set(range(self.config.ranks)))
        request.jobs[job] = way
        self.log(("job", job, way, request.uid, chunks))
        if way == "load":
            self.new_loads.append(job)
            return
        self.new_stores.append(job)
        blocks = tuple(dict.fromkeys(b for _, _, subs in chunks for b in subs if b))
        for block in self.decide.fenced_blocks(blocks):
            self.fences.setdefault(block, {})[job] = None

    # -- stores --------------------------------------------------------------------------------------------
    def offer(self, request: Request, wanted: dict[Key, tuple[int, ...]]) -> bool:
        """Store the chunks that the tier lacks; False, and nothing is stored, if it has no room."""
        places = self.tier.prepare_store(list(wanted))
        if places is None:
            return False
        if places:
            self.create(request, "store", tuple((key, place, wanted[key]) for key, place in places.items()))
        return True

    def store_full(self, request: Request, eligible: int, *, finished: bool = False) -> None:
        """Store chunks that have become full, by column; recurrent rows move, so never theirs."""
        if self.config.offload_prompt_only:
            eligible = min(eligible, request.prompt)
        for manager in self.cache.groups:
            if not self.decide.positional_group(manager.group):
                continue
            g, ids = manager.index, request.ids(manager.index)
            length = self.decide.clipped_columns(manager.group, len(ids), eligible) if finished else len(ids)
            full = coverage.full_chunks_of(eligible, self.size(manager))
            upto = self.decide.storable_chunks(full, length // self.per)
            wanted = dict(
                self.full_chunks(request, manager, ids, range(request.next_chunk[g], upto), eligible)
            )
            if not wanted or self.offer(request, wanted):
                request.next_chunk[g] = max(request.next_chunk[g], upto)

    def full_chunks(
        self, request: Request, manager: FullManager, ids: list[int], chunks: range, eligible: int
    ) -> Iterator[tuple[Key, tuple[int, ...]]]:
        """Of these chunks, those that the store keeps, with their blocks."""
        for chunk in chunks:
            key = self.key(manager, request, chunk)
            assert key is not None
            subs = tuple(ids[chunk * self.per : (chunk + 1) * self.per])
            if len(subs) < self.per:
                raise PolicyError(
                    f"store of {request.uid}: chunk {chunk} of group {manager.group.name} lacks blocks"
                )
            if manager.group.kind is Kind.MAMBA:
                last = (chunk + 1) * self.per - 1
                mirror = request.mirror[manager.index]
                block = self.decide.boundary_block(
                    ids[last], mirror[last] if last < len(mirror) else ids[last]
                )
                if block:
                    yield key, (0,) * (self.per - 1) + (block,)
            elif 0 not in subs and self.keeps(manager, chunk, eligible):
                yield key, subs

    def keeps(self, manager: FullManager, chunk: int, eligible: int) -> bool:
        """Whether some admissible hit may read the chunk; only windows leave any out."""
        block, drops = manager.block, manager.drops
        segment = self.decide.store_segment(self.segment)
        if manager.group.kind is not Kind.WINDOW or segment % block:
            return True
        need, blocks = self.decide.store_window(manager.group, drops), segment // block
        if coverage.store_keeps_all(need, blocks):
            return True
        return any(
            coverage.store_keeps_block(col, need, blocks, drops)
            or (not drops and coverage.store_keeps_final_block(col, eligible // block, need, blocks))
            for col in range(chunk * self.per, (chunk + 1) * self.per)
        )

    def store_boundaries(self) -> None:
        """Store recurrent states that were handed over, if their block still carries the boundary's key."""
        for boundary in self.cache.boundaries:
            request, manager = boundary.request, self.cache.groups[boundary.group]
            key = boundary.block.key
            if request.over:
                continue  # nobody is left to answer for the transfer
            current = key is not None and key[:2] == (boundary.group, boundary.tokens)
            if not self.decide.hand_off_stands(current):
                continue  # reused before it could be stored
            if boundary.tokens % self.size(manager):
                continue
            if self.config.offload_prompt_only and boundary.tokens > request.prompt:
                continue
            whole = (boundary.group, boundary.tokens, request.hashes[boundary.tokens])
            self.offer(request, {whole: (0,) * (self.per - 1) + (boundary.block.id,)})
        self.cache.boundaries.clear()

    # -- reports -------------------------------------------------------------------------------------------
    def report(self, number: int, rank: int, ok: bool) -> Job | None:
        """One rank's report; the transfer, once it is over."""
        job = self.jobs[number]
        self.log(("unfence", number, rank))
        if self.decide.counts_report(rank, self.config.ranks):
            job.waiting.discard(rank)
        job.failed |= not ok
        waiting = len(job.waiting)
        if self.decide.fence_done(waiting):
            self.lift(number)
        over = self.decide.job_done(waiting) or (job.failed and not self.decide.failure_waits(waiting))
        return self.settle(number) if over else None

    def lift(self, job: int) -> None:
        """A store's fences go; another store's fence on the same block stays."""
        for block, jobs in list(self.fences.items()):
            if job in jobs:
                for done in self.decide.unfences(job, tuple(jobs)):
                    del jobs[done]
                if not jobs:
                    del self.fences[block]

    def settle(self, number: int) -> Job:
        """A transfer is over."""
        job = self.jobs.pop(number)
        self.lift(number)
        life = self.decide.reported_life(job.request.uid, tuple(self.requests))
        job.request = self.requests.get(life, job.request)
        job.request.jobs.pop(number, None)
        for key, place, _ in job.chunks:
            if job.stale:
                self.tier.leave_limbo(place)
            elif job.way == "store":
                self.tier.complete_store(key, not job.failed or self.decide.keeps_failed_store())
            else:
                self.tier.complete_load(key, place)
            if job.way == "load" and (not job.failed or self.decide.clears_loading()):
                self.loading.pop(key, None)
        return job

    def reset(self) -> None:
        """Forget the tier; transfers in flight count for nothing any more."""
        used = Counter(p for job in self.jobs.values() if not job.stale for _, p, _ in job.chunks)
        for job in self.jobs.values():
            job.stale = True
        self.tier.reset(used)
