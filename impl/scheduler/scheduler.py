"""The scheduler: requests, steps, and what every worker is told.

The order of work in a step is vLLM's (`v1/core/sched/scheduler.py::Scheduler.schedule`, 0.33.0): running
requests first, then waiting ones unless somebody was preempted, then the connector's part.
"""

from __future__ import annotations

from impl.decisions import Decisions
from impl.scheduler.cache import CacheManager
from impl.scheduler.offload import DEFER, Job, OffloadScheduler
from impl.scheduler.output import ScheduledRow, SchedulerOutput
from impl.scheduler.request import Request, Status
from spec.arith import align
from spec.chains import EMPTY, Chains
from spec.config import Config
from spec.events import Event
from spec.ops import UserId
from spec.policy import Answer, Arrival, Output, PolicyError


class Scheduler:
    """Answers every question but the workers'.  ``hashes`` gives equal numbers to equal token prefixes."""

    def __init__(self, config: Config, hashes: Chains, decide: Decisions | None = None) -> None:
        self.config, self.hashes = config, hashes
        self.decide = decide or Decisions()
        self.decisions: list[Event] = []
        self.cache = CacheManager(config, self.decide, self.log)
        self.requests: dict[UserId, Request] = {}
        self.offload = OffloadScheduler(config, self.decide, self.cache, self.requests, self.log)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.left: list[UserId] = []  # to be told: finished and preempted
        self.accepted: list[tuple[UserId, int]] = []
        self.step = 0

    def log(self, event: Event) -> None:
        """A decision was taken."""
        self.decisions.append(event)

    def answer(self, message: SchedulerOutput | None = None) -> Answer:
        """The decisions since the question was asked."""
        decisions, self.decisions = self.decisions, []
        return Answer(decisions, message)

    # -- requests ------------------------------------------------------------------------------------------
    def on_arrive(self, arrival: Arrival) -> Answer:
        """The request waits."""
        hashes = [EMPTY]
        for token in arrival.tokens:
            hashes.append(self.hashes.fold(hashes[-1], token))
        groups = len(self.config.groups)
        request = Request.new(arrival.uid, arrival.tokens, hashes, arrival.outputs, groups)
        self.requests[arrival.uid] = request
        self.log(("enqueue", arrival.uid, arrival.tokens))
        self.waiting.append(request)
        return self.answer()

    def on_abort(self, uid: UserId) -> Answer:
        """The request ends here."""
        self.finish(self.requests[uid], "abort")
        return self.answer()

    def on_reset(self, scope: str) -> Answer:
        """No prefix is found any more, blocks in use included; ``all`` clears the host tier as well."""
        self.cache.pool.evict_all()
        self.cache.boundaries.clear()
        if scope == "all":
            self.offload.reset()
        return self.answer()

    def on_output(self, output: Output) -> Answer:
        """Verified tokens: counts become true, boundaries are published, finished requests let go."""
        for member, new in output.tokens:
            uid = self.decide.output_life(member, tuple(self.requests))
            request = self.requests.get(uid)
            if request is None or (uid == member and output.step not in request.flying):
                continue
            _, _, drafts = request.flying.pop(output.step, (0, 0, 0))
            alive = request.status is Status.RUNNING
            kept = new[: request.longest - request.known] if request.status is not Status.DONE else ()
            if new:
                kept = kept if self.decide.delivers(request.since) else ()
                request.since += bool(request.since)
            if alive and new:
                request.computed = self.decide.settled_count(request.computed, drafts + 1 - len(new))
                self.accepted.append((uid, len(new)))
            for token in kept:
                request.tokens.append(token)
                request.hashes.append(self.hashes.fold(request.hashes[-1], token))
            self.log(("tokens", uid, output.step, kept, request.computed))
            if alive and new:
                self.cache.publish_states(request, request.processed, now=False)
            if request.status is not Status.DONE and request.known >= request.longest:
                self.finish(request, "length")
        self.log(("done", output.step))
        for request in self.requests.values():
            self.cache.release_copies(request, output.step)
        self.release_idle()
        return self.answer()

    def finish(self, request: Request, why: str) -> None:
        """A request is over: what it has computed is stored, its blocks go when nothing in flight uses
        them."""
        loading = request.status is Status.LOADING and not request.landed
        running = request.status is Status.RUNNING
        request.status = Status.DONE
        self.log(("finish", request.uid, why))
        for queue in (self.waiting, self.running, self.loading):
            if request in queue:
                queue.remove(request)
        if request.in_batch:
            self.left.append(request.uid)
        if self.config.offload and self.decide.final_stores(why, running):
            eligible = self.decide.store_limit(request.known, request.prompt, True)
            self.offload.store_full(request, min(eligible, request.known), finished=True)
        if self.config.offload and why == "length" and self.decide.hands_over(running):
            self.hand_over(request)
        if loading and self.decide.abort_waits_for_load():
            return
        if not self.decide.frees_wait_for_steps(request):
            self.give_back(request)

    def give_back(self, request: Request) -> None:
        """The blocks of a request that is over or preempted."""
        if request.status is not Status.DONE or self.decide.gives_back(request.grown):
            self.cache.release_all(request, self.step)

    def hand_over(self, request: Request) -> None:
        """A finished request's table is handed to the connector."""
        for manager in self.cache.groups:
            ids = request.ids(manager.index)
            length = self.decide.clipped_columns(manager.group, len(ids), request.computed)
            self.log(("handoff", request.uid, manager.index, tuple(ids[:length])))

    def release_idle(self) -> None:
        """Blocks of requests that are over or preempted go back once none of their steps is in flight."""
        for request in list(self.requests.values()):
            idle = request.status in (Status.DONE, Status.WAITING)
            if idle and request.holds and not request.flying:
                if not (request.status is Status.DONE and request.loads_left):
                    self.give_back(request)
            if request.over and not request.jobs:
                del self.requests[request.uid]

    # -- transfers -----------------------------------------------------------------------------------------
    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        """A rank is done with its part of a transfer."""
        if job in self.offload.jobs:
            over = self.offload.report(job, rank, ok)
            if over is not None and over.way == "load":
                self.loaded(over)
        return self.answer()

    def loaded(self, job: Job) -> None:
        """A transfer that loads a request has landed on every rank, or failed on one."""
        request = job.request
        if request in self.loading:
            request.load_failed |= job.failed
        if self.decide.joins_loads(request.loads_left):
            return
        if request.status is Status.DONE:
            self.give_back(request)
        if request not in self.loading:
            return  # it is over, or has gone on already
        self.loading.remove(request)
        failed, request.load_failed = request.load_failed, False
        if failed and self.decide.raises_on_failure():
            raise PolicyError(f"a load of {request.uid} failed")
        if failed and not self.decide.uses_failed_load():
            request.tried = True
            groups = self.decide.recovered_groups(len(self.cache.groups))
            self.cache.release_all(request, self.step, groups)
            request.status, request.computed, request.hit = Status.WAITING, 0, 0
            self.log(("preempt", request.uid))
        else:
            request.landed = True
            self.cache.publish_attention(request, request.hit)
            waiting, self.cache.boundaries = self.cache.boundaries, []
            self.cache.publish_states(request, request.hit, now=False)
            self.cache.boundaries = waiting  # what came from the tier is there already
        self.waiting.insert(0, request)

    # -- a step --------------------------------------------------------------------------------------------
    def schedule(self) -> Answer:
        """One step."""
        message = SchedulerOutput(self.step + 1)
        self.cache.cached_now.clear()
        budget = self.config.step_tokens
        preempted = False
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # preempted by one before it
            q, drafts, decode = self.next_tokens(request, request.computed, budget, message.step)
            if q < 1:
                continue
            self.cache.free_behind(request)
            while not self.cache.fits(request, request.computed, q):
                if self.decide.waits_for_returns(self.lacking_blocks(request, q), self.returning_blocks()):
                    preempted = True  # nobody is admitted to what comes back
                    break
                victim = self.running[-1]
                if victim is request and self.start_over_last_loaded(request):
                    continue
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                self.run_row(message, request, request.computed, q, drafts, decode=decode)
                budget -= q
        for request in [] if preempted else list(self.waiting):
            if budget < 1 or len(self.running) >= self.config.slots:
                break
            budget -= self.admit(message, request, budget)
        self.close(message)
        return self.answer(message)

    def next_tokens(self, request: Request, c: int, budget: int, step: int) -> tuple[int, int, bool]:
        """(query tokens, drafts among them, decode) from position ``c``; 0 tokens for not now."""
        known = request.known
        if c < max(request.prompt, known - 1):
            return self.prefill_tokens(request, c, min(known - c, budget)), 0, False
        if self.config.async_scheduling:
            # The tokens of its last sampled step reach the first stage pp steps later.
            if request.flying and not self.decide.runs_ahead(step, request.sampled_in, self.config.pp):
                return 0, 0, True
            known = max(known, c + 1)
        elif request.flying:
            return 0, 0, True
        if c >= request.longest - 1 or budget < 1:
            return 0, 0, True
        drafts = max(0, min(self.config.drafts, request.longest - known - 1, budget - 1))
        return 1 + drafts, drafts, True

    def prefill_tokens(self, request: Request, c: int, q: int) -> int:
        """Tokens of a prefill chunk, cut so that recurrent states are left at boundaries."""
        if not self.cache.recurrent or q < 1:
            return q
        config, drops = self.config, any(self.cache.drops)
        block = self.decide.split_divisor(config, self.cache.state_block)
        last = align.checkpoint_position(request.known, block, drops, config.hash_lookahead_tokens)
        prefill_end = max(request.prompt, request.known - 1)
        tail = self.cache.tail_position(request) if self.cache.partial else 0
        cut = self.decide.prefill_split(c, q, prefill_end, block, config.step_tokens, last, tail)
        return self.decide.reserve(request.known, c, cut, block, config.prefill_lookahead_tokens)

    def run_row(
        self, message: SchedulerOutput, request: Request, c: int, q: int, drafts: int, *, decode: bool
    ) -> None:
        """The request is in this step."""
        cache, step = self.cache, message.step
        processed = request.processed if request.in_batch else c
        spare = cache.pool.free.count - cache.growth_blocks(request, c, q)
        message.copies += cache.copy_tail_away(request, step, spare)
        cache.grow(request, c, q)
        self.log(("row", request.uid, c, q, drafts))
        request.computed = c + q
        request.flying[step] = (c, q, drafts)
        if c + q >= request.known or (decode and self.config.async_scheduling):
            request.sampled_in = step
        cache.publish_attention(request, self.decide.publish_limit(self.config, c, q, request.known))
        if not decode or self.decide.publishes_unrun_boundary():
            cache.publish_states(request, min(c + q, request.known), now=True)
        if not decode:
            cache.publish_tail(request, c + q)
        message.rows.append(ScheduledRow(request.uid, c, processed, q, decode))
        self.tell(message, request, c)

    def tell(self, message: SchedulerOutput, request: Request, c: int) -> None:
        """Workers learn of new columns; a request that enters the batch sends its whole rows."""
        tables = [request.ids(g) for g in range(len(request.tables))]
        if not request.in_batch:
            request.in_batch = True
            message.fresh.append((request.uid, c, tuple(map(tuple, tables))))
            new = tables
        else:
            new = [table[told:] for table, told in zip(tables, request.told, strict=True)]
            if any(new):
                message.appended.append((request.uid, tuple(map(tuple, new))))
        request.told = [len(table) for table in tables]
        for mirror, ids in zip(request.mirror, new, strict=True):
            mirror.extend(ids)

    def preempt(self, request: Request) -> None:
        """The request gives everything up and starts over later; its stores are flushed before reuse."""
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.left.append(request.uid)
        request.in_batch, request.since = False, 1
        request.status, request.computed, request.hit = Status.WAITING, 0, 0
        self.log(("preempt", request.uid))
        for job, way in request.jobs.items():
            if self.decide.flushes_preempted(way):
                self.offload.must_flush[job] = None
        if not self.decide.frees_wait_for_steps(request):
            self.give_back(request)

    def lacking_blocks(self, request: Request, q: int) -> int:
        """Blocks that the request's next ``q`` tokens need and the pool has not."""
        return self.cache.growth_blocks(request, request.computed, q) - self.cache.pool.free.count

    def returning_blocks(self) -> int:
        """Blocks of requests that are over or preempted, and only wait for their steps in flight."""
        leaving = [
            r for r in self.requests.values() if r.flying and r.status in (Status.DONE, Status.WAITING)
        ]
        return self.cache.returning_blocks(leaving)

    def start_over_last_loaded(self, request: Request) -> bool:
        """Requests whose load has landed hold blocks while they wait, and may keep everybody from going
        on: the last of them gives its blocks up.  Whether there was one beside ``request``."""
        landed = [other for other in self.waiting if other is not request and other.landed]
        if not self.decide.loaded_give_way():
            return False
        if landed:
            last = landed[-1]
            last.status, last.computed, last.hit = Status.WAITING, 0, 0
            self.log(("preempt", last.uid))
            self.cache.release_all(last, self.step)
        return bool(landed)

    # -- admission -----------------------------------------------------------------------------------------
    def admit(self, message: SchedulerOutput, request: Request, budget: int) -> int:
        """Try to admit a waiting request; tokens of the step that it uses."""
        uid = request.uid
        if request.flying or (not request.landed and request.holds):
            return self.defer(uid, "steps in flight")
        if self.decide.readmit_waits(len(request.jobs)):
            return self.defer(uid, "transfers in flight")
        if request.landed:
            q, _, _ = self.next_tokens(request, request.hit, budget, message.step)
            while not self.running and not self.cache.fits(request, request.hit, q):
                if not self.start_over_last_loaded(request):
                    break
            return self.start(message, request, request.hit, budget)
        hit = self.cache.local_hit(request)
        if hit is None:
            return self.defer(uid, "state cached in this step")
        total = self.offload.external_hit(request, hit.tokens) if self.config.offload else hit.tokens
        if total == DEFER:
            return self.defer(uid, "chunks in flight")
        q = 0
        if total == hit.tokens:
            q, _, _ = self.next_tokens(request, total, budget, message.step)
            if q < 1:
                return 0
        if self.cache.admission_blocks(request, hit, total, q) > self.cache.pool.free.count:
            return 0
        first = self.decide.touches_hit_first()
        if first:
            self.cache.adopt(request, hit, total)
        request.published = [hit.tokens // manager.block for manager in self.cache.groups]
        message.copies += self.cache.copy_inside(request, hit, message.step)
        request.hit = total
        if total > hit.tokens:
            request.status = Status.LOADING
            self.waiting.remove(request)
            self.loading.append(request)
            self.offload.start_load(request, hit.tokens, total)
        if not first:
            self.cache.adopt(request, hit, total)
        if total > hit.tokens:
            return 0
        self.log(("hit", uid, hit.tokens, total))
        return self.start(message, request, total, budget)

    def defer(self, uid: UserId, why: str) -> int:
        """Admission is put off; no tokens."""
        self.log(("defer", uid, why))
        return 0

    def start(self, message: SchedulerOutput, request: Request, c: int, budget: int) -> int:
        """The request runs from ``c``; tokens of the step that it uses."""
        q, drafts, decode = self.next_tokens(request, c, budget, message.step)
        if q < 1 or not self.cache.fits(request, c, q):
            return 0
        request.landed = False
        self.waiting.remove(request)
        self.running.append(request)
        request.status, request.computed = Status.RUNNING, c
        self.log(("start", request.uid, c))
        self.run_row(message, request, c, q, drafts, decode=decode)
        return q

    # -- the end of a step ---------------------------------------------------------------------------------
    def close(self, message: SchedulerOutput) -> None:
        """The connector's part, and everything that workers must be told."""
        offload, pool = self.offload, self.cache.pool
        if self.config.offload:
            offload.store_boundaries()
            for row in message.rows:
                request = self.requests[row.uid]
                if request.status is Status.RUNNING:
                    offload.store_full(request, min(row.computed + row.tokens, request.known))
        else:
            self.cache.boundaries.clear()
        message.flush = [job for job in offload.must_flush if job in offload.jobs]
        for job in message.flush:
            self.log(("flush", job))
        offload.must_flush.clear()
        message.stores = [offload.jobs[j].transfer(j) for j in offload.new_stores if j in offload.jobs]
        message.loads = [offload.jobs[j].transfer(j) for j in offload.new_loads]
        offload.new_stores, offload.new_loads = [], []
        message.left, self.left = self.left, []
        message.accepted, self.accepted = self.accepted, []
        targets = {block for load in message.loads for block, _, _ in load.pages}
        fresh = [(block.id, g) for block, g in pool.handed_out if block.id not in targets]
        if self.cache.recurrent:
            recurrent = {manager.index for manager in self.cache.recurrent}
            message.zero = [(block, g) for block, g in fresh if g not in recurrent]
            for block, g in message.zero:
                self.log(("zero", block, g))
        message.holds_nothing = self.unowned([block for block, _ in fresh])
        pool.handed_out.clear()
        self.log(("step", message.step))
        self.step = message.step

    def unowned(self, fresh: list[int]) -> list[int]:
        """Blocks that hold nothing anybody may read: handed out in this step, or freed without key or
        fence."""
        blocks, fences = self.cache.pool.blocks, self.offload.fences
        freed = [
            b
            for b in self.cache.pool.given_back
            if not blocks[b].references and blocks[b].key is None and b not in fences
        ]
        self.cache.pool.given_back.clear()
        return list(dict.fromkeys([*fresh, *freed]))
