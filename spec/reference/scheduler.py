"""The reference policy: a small hybrid scheduler with prefix caching, speculation, pipeline stages and
offload.

It answers the questions of ``spec.policy`` from its own book, which it changes by the same decisions that
it reports. The order of work inside ``schedule`` is vLLM's
(``v1/core/sched/scheduler.py::Scheduler.schedule``): running requests first, then waiting ones unless
somebody was preempted, then the connector's metadata.
"""

from __future__ import annotations

from collections import Counter
from math import lcm
from typing import Any

from spec.arith import align, coverage
from spec.arith.division import floordiv
from spec.book import Book, Key, Request, Status
from spec.chains import Chains
from spec.config import Config, Kind
from spec.events import Event
from spec.ops import UserId
from spec.policy import Answer, Arrival, Output, Program
from spec.reference import offload, tables
from spec.reference.absorb import absorb
from spec.reference.decisions import Decisions
from spec.reference.plan import JobState, Message, Plan, RowMessage
from spec.reference.worker import Worker


class Reference:
    """The reference policy.  ``decide`` is its table of decisions; a fault is another table."""

    def __init__(self, config: Config, chains: Chains, decide: Decisions | None = None) -> None:
        self.config = config
        self.decide = decide or Decisions()
        self.book = Book.empty(config, chains)
        self.mamba_groups = [i for i, g in enumerate(config.groups) if g.kind is Kind.MAMBA]
        dropping = config.dropping_groups()
        self.drops = [
            int(g in dropping) * (self.decide.mamba_drops() if g.kind is Kind.MAMBA else 1)
            for g in config.groups
        ]
        self.partial_hits = config.partial_hits and config.prefix_caching and not config.offload
        self.mamba_block = config.groups[self.mamba_groups[0]].block_tokens if self.mamba_groups else 0
        full = [g for g in config.groups if g.kind is Kind.FULL] or list(config.groups)
        self.store_alignment = lcm(*(g.block_tokens * config.blocks_per_chunk for g in full))
        self.plans: dict[UserId, Plan] = {}
        self.running: list[UserId] = []
        self.waiting: list[UserId] = []
        self.loading_requests: list[UserId] = []
        self.leaving: list[UserId] = []  # to be told to the ranks: finished and preempted
        self.jobs: dict[int, JobState] = {}
        self.next_job = 1
        self.loading: dict[Key, None] = {}  # keys under load
        self.fences: dict[int, dict[int, None]] = {}  # block -> stores that read it
        self.must_flush: dict[int, None] = {}  # stores whose source was handed out in this step
        self.limbo: dict[
            int, int
        ] = {}  # host places that transfers from before a reset still use, and how many
        self.places = list(range(config.tier_chunks - 1, -1, -1))
        self.recency: dict[Key, None] = {}
        self.offers: list[tuple[UserId, int, int, int]] = []  # recurrent boundaries to be stored
        self.cached_now: dict[int, None] = {}  # recurrent blocks published in this step
        self.new_stores: list[int] = []
        self.new_loads: list[int] = []
        self.fresh_blocks: list[tuple[int, int]] = []  # (block, group) allocated in this step
        self.accepted: list[tuple[UserId, int]] = []
        self.out: list[Event] = []
        self.workers = [Worker(config, self.decide, rank) for rank in range(config.ranks)]

    # -- recording -----------------------------------------------------------------------------------------
    def do(self, event: Event) -> None:
        """Take a decision: report it, and apply it to the own book."""
        self.out.append(event)
        self.book.apply(event)

    def answer(self, message: Any = None) -> Answer:
        """The decisions taken since the question was asked."""
        decisions, self.out = self.out, []
        return Answer(decisions, message)

    def absorb(self, question: tuple[Any, ...], decisions: list[Event]) -> Message | None:
        """Follow another policy's answer to a question; for ``schedule``, the message that goes with it."""
        return absorb(self, question, decisions)

    def allocate(self, request: Request, g: int, col: int) -> int:
        """The next free block becomes a column; a key it still carries is evicted, fenced stores on it are
        flushed."""
        block = self.book.free[0]
        if block in self.book.core.key and self.decide.forgets_key(block):
            self.do(("evict", block))
        self.do(("alloc", request.uid, g, col, block))
        self.fresh_blocks.append((block, g))
        self.must_flush.update(dict.fromkeys(self.decide.flushed_jobs(tuple(self.fences.get(block, ())))))
        return block

    def tier(self, key: Key, place: int, state: str) -> None:
        """Change the state of a host chunk."""
        self.do(("tier", key[0], key[1], key[2], place, state))

    def recent(self, key: Key) -> None:
        """The chunk was used just now."""
        self.recency.pop(key, None)
        self.recency[key] = None

    def leave_limbo(self, place: int) -> None:
        """A transfer from before a reset is done with a host place."""
        if place in self.limbo:
            self.limbo[place] -= 1
            if not self.limbo[place]:
                del self.limbo[place]
                self.places.append(place)

    # -- questions -----------------------------------------------------------------------------------------
    def on_arrive(self, arrival: Arrival) -> Answer:
        """The request waits."""
        groups = len(self.config.groups)
        self.plans[arrival.uid] = Plan(
            arrival.outputs, [0] * groups, [[] for _ in range(groups)], [0] * groups
        )
        self.do(("enqueue", arrival.uid, arrival.tokens))
        self.waiting.append(arrival.uid)
        return self.answer()

    def on_abort(self, uid: UserId) -> Answer:
        """The request ends here; a load in flight keeps its blocks until it has landed."""
        self.finish(self.book.requests[uid], "abort")
        return self.answer()

    def on_reset(self, scope: str) -> Answer:
        """Forget cached prefixes, with ``all`` those of the host tier too.  Host places that transfers in
        flight still use are handed out again when the last of them is done.

        Stronger than vLLM, which refuses while blocks are in use (``BlockPool.reset_prefix_cache``): here
        blocks in use lose their keys as well."""
        for block in list(self.book.core.key):
            self.do(("evict", block))
        self.offers.clear()
        if scope == "all":
            flying = Counter(p for job in self.jobs.values() if not job.stale for _, p, _ in job.chunks)
            for job in self.jobs.values():
                job.stale = True
            for key, entry in list(self.book.tier.items()):
                if not self.decide.reset_reaches(entry.state):
                    continue
                self.tier(key, entry.place, "gone")
                self.recency.pop(key, None)
                if flying[entry.place] and self.decide.reset_keeps_places():
                    self.limbo[entry.place] = flying[entry.place]
                else:
                    self.places.append(entry.place)
        return self.answer()

    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        """A rank is done with its part of a transfer."""
        if job in self.jobs:
            offload.reported(self, job, rank, ok)
        return self.answer()

    def on_output(self, output: Output) -> Answer:
        """Verified tokens arrive: counts become true, boundaries are published, finished requests let go."""
        for member, new in output.tokens:
            uid = self.decide.output_life(member, tuple(self.book.requests))
            request = self.book.requests.get(uid)
            if request is None or (uid == member and output.step not in request.flying):
                continue
            _, _, drafts = request.flying.get(output.step, (0, 0, 0))
            plan = self.plans[uid]
            alive = request.status is Status.RUNNING
            left = request.prompt + plan.outputs - request.known
            kept = new[:left] if request.status is not Status.DONE else ()
            if new:
                kept = kept if self.decide.delivers(plan.since) else ()
                plan.since += bool(plan.since)
            rejected = drafts + 1 - len(new) if new else 0
            computed = request.computed
            if alive:
                computed = self.decide.settled_count(computed, rejected)
            self.do(("tokens", uid, output.step, kept, computed))
            if new and alive:
                self.accepted.append((uid, len(new)))
            if alive and new:
                tables.publish_states(self, request, request.processed, now=False)
            if request.status is not Status.DONE and request.known >= request.prompt + plan.outputs:
                self.finish(request, "length")
        self.do(("done", output.step))
        for request in list(self.book.requests.values()):
            self.release_copies(request, output.step)
        self.release_due()
        return self.answer()

    def finish(self, request: Request, why: str) -> None:
        """A request is over.  What it has computed is stored; its blocks go back when no step in flight
        uses them."""
        uid, plan = request.uid, self.plans[request.uid]
        loading = request.status is Status.LOADING and not plan.ready
        running = request.status is Status.RUNNING
        self.do(("finish", uid, why))
        for queue in (self.waiting, self.running):
            if uid in queue:
                queue.remove(uid)
        if plan.in_batch:
            self.leaving.append(uid)
        if self.config.offload and self.decide.final_stores(why, running):
            eligible = self.decide.store_limit(request.known, request.prompt, True)
            offload.store_positional(self, request, min(eligible, request.known), finished=True)
        if self.config.offload and why == "length" and self.decide.hands_over(running):
            for g, group in enumerate(self.config.groups):
                clip = self.decide.clipped_columns(group, len(request.cols[g]), request.computed)
                self.do(("handoff", uid, g, tuple(request.cols[g][:clip])))
        if loading:
            self.loading_requests.remove(uid)
        if loading and self.decide.abort_waits_for_load():
            return
        if not self.decide.frees_wait_for_steps(request) and self.decide.gives_back(plan.allocated):
            self.drop_all(request)

    def release_copies(self, request: Request, step: int) -> None:
        """Blocks retained for copies of steps up to ``step`` go back: a copied-away tail stays under its
        key."""
        plan = self.plans[request.uid]
        for entry in [e for e in plan.retained if e[0] <= step]:
            plan.retained.remove(entry)
            _, g, copied = entry
            self.do(("drop", request.uid, g, -1, copied))
            cols = request.cols[g]
            for col, block in enumerate(cols[: self.decide.released_with_copy(len(cols))]):
                if block:
                    self.do(("drop", request.uid, g, col, block))

    def drop_all(self, request: Request) -> None:
        """Give up every column, last first, so that a prefix's tail is reused before its head."""
        mirror = self.plans[request.uid].mirror
        for g, cols in enumerate(request.cols):
            blocks = self.decide.release_list(list(cols), mirror[g])
            for col in range(len(blocks) - 1, -1, -1):
                if blocks[col]:
                    self.do(("drop", request.uid, g, col, blocks[col]))
            cols.clear()
        self.release_copies(request, self.book.step)
        self.reset_plan(request)

    def reset_plan(self, request: Request) -> None:
        """The next admission starts from nothing."""
        plan = self.plans[request.uid]
        groups = len(self.config.groups)
        plan.published, plan.next_chunk = [0] * groups, [0] * groups
        if not self.decide.keeps_mirror():
            plan.mirror = [[] for _ in range(groups)]
        plan.ready = plan.allocated = False
        plan.tail = None

    def release_due(self) -> None:
        """Blocks of requests that are over, and whose steps have all been processed, go back to the pool."""
        for request in list(self.book.requests.values()):
            idle = request.status is Status.DONE or (
                request.status is Status.WAITING and request.uid in self.plans
            )
            plan = self.plans[request.uid]
            if idle and not plan.ready and not request.flying and request.holds():
                over = request.status is Status.DONE
                if over and any(way == "load" for way in plan.jobs.values()):
                    continue
                if not over or self.decide.gives_back(plan.allocated):
                    self.drop_all(request)
        self.book.forget()
        for uid in [u for u in self.plans if u not in self.book.requests and not self.plans[u].jobs]:
            if uid not in self.leaving:
                del self.plans[uid]

    # -- the step ------------------------------------------------------------------------------------------
    def schedule(self) -> Answer:
        """One step."""
        message = Message(self.book.step + 1)
        self.cached_now.clear()
        budget = self.config.step_tokens
        preempted = False
        for uid in list(self.running):
            request = self.book.requests[uid]
            if request.status is not Status.RUNNING:
                continue
            q, drafts, decode = self.next_tokens(request, request.computed, budget, message.step)
            if q < 1:
                continue
            tables.free_behind(self, request)
            while not self.fits(request, request.computed, q):
                lacking = self.needed(request, request.computed, q) - len(self.book.free)
                if self.decide.waits_for_returns(lacking, self.returning()):
                    preempted = True  # nobody is admitted to what will come back
                    break
                victim = self.book.requests[self.running[-1]]
                if victim is request and self.start_over_last_loaded(request):
                    continue
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                self.run_row(message, request, request.computed, q, drafts, decode=decode)
                budget -= q
        if not preempted:
            for uid in list(self.waiting):
                if budget < 1 or len(self.running) >= self.config.slots:
                    break
                budget -= self.admit(message, self.book.requests[uid], budget)
        self.finish_message(message)
        return self.answer(message)

    def next_tokens(self, request: Request, c: int, budget: int, step: int) -> tuple[int, int, bool]:
        """(query tokens, drafts among them, decode) that the request may compute from ``c``; 0 tokens for
        not now."""
        plan = self.plans[request.uid]
        longest = request.prompt + plan.outputs
        known = request.known
        prefill_end = max(request.prompt, known - 1)
        if c < prefill_end:
            return self.prefill_tokens(request, c, min(known - c, budget)), 0, False
        if self.config.async_scheduling:
            if request.flying and not self.decide.runs_ahead(step, plan.sampled_in, self.config.pp):
                return 0, 0, True
            known = max(known, c + 1)
        elif request.flying:
            return 0, 0, True
        drafts = max(0, min(self.config.drafts, longest - known - 1, budget - 1))
        if c >= longest - 1 or budget < 1:
            return 0, 0, True
        return 1 + drafts, drafts, True

    def prefill_tokens(self, request: Request, c: int, q: int) -> int:
        """Tokens of a prefill chunk: cut so that recurrent states are left at boundaries."""
        if not self.mamba_groups or q < 1:
            return q
        block = self.decide.split_divisor(self.config, self.mamba_block)
        last = align.checkpoint_position(
            request.known, block, any(self.drops), self.config.hash_lookahead_tokens
        )
        prefill_end = max(request.prompt, request.known - 1)
        tail = self.tail_position(request) if self.partial_hits else 0
        cut = self.decide.prefill_split(c, q, prefill_end, block, self.config.step_tokens, last, tail)
        return self.decide.reserve(request.known, c, cut, block, self.config.prefill_lookahead_tokens)

    def tail_position(self, request: Request) -> int:
        """The last hash boundary of the prompt: a later request with this prompt can go on from there.

        Of the prompt also where a resumed request has more known tokens, unlike the checkpoint in blocks
        (``Scheduler._mamba_block_aligned_split``: ``num_prompt_tokens`` here, ``num_tokens`` there)."""
        lookahead = self.config.hash_lookahead_tokens
        return align.checkpoint_position(
            request.prompt, self.config.hash_block_tokens, any(self.drops), lookahead
        )

    def fits(self, request: Request, c: int, q: int) -> bool:
        """Whether the pool has the blocks for this step."""
        return self.needed(request, c, q) <= len(self.book.free)

    def needed(self, request: Request, c: int, q: int) -> int:
        """Fresh blocks that the step needs."""
        return sum(len(tables.new_columns(self, request, g, c, q)[1]) for g in range(len(self.config.groups)))

    def returning(self) -> int:
        """Blocks that come back by themselves: whoever holds them is over or preempted, and waits for steps
        in flight."""
        leaving = {
            uid
            for uid, request in self.book.requests.items()
            if request.flying
            and (
                request.status is Status.DONE
                or (request.status is Status.WAITING and not self.plans[uid].ready)
            )
        }
        return sum(leaving.issuperset(holders) for holders in self.book.core.holders.values())

    def run_row(
        self, message: Message, request: Request, c: int, q: int, drafts: int, *, decode: bool
    ) -> None:
        """The request is in this step."""
        plan = self.plans[request.uid]
        processed = request.processed if plan.in_batch else c
        spare = len(self.book.free) - self.needed(request, c, q)
        message.copies += tables.copy_tail_away(self, request, message.step, spare)
        tables.grow(self, request, c, q)
        self.do(("row", request.uid, c, q, drafts))
        if c + q >= request.known:
            plan.sampled_in = message.step
        if decode and self.config.async_scheduling:
            plan.sampled_in = message.step
        tables.publish_attention(self, request, c, q)
        if not decode or self.decide.publishes_unrun_boundary():
            tables.publish_states(self, request, min(c + q, request.known), now=True)
        if not decode:
            tables.publish_tail(self, request, c + q)
        message.rows.append(RowMessage(request.uid, c, processed, q, decode))
        self.tell_columns(message, request, c)

    def tell_columns(self, message: Message, request: Request, c: int) -> None:
        """The ranks learn of new columns; a request that enters the batch sends its whole row."""
        plan = self.plans[request.uid]
        if not plan.in_batch:
            plan.in_batch = True
            plan.told = [len(cols) for cols in request.cols]
            plan.mirror = [kept + cols for kept, cols in zip(plan.mirror, request.cols, strict=True)]
            message.fresh.append((request.uid, c, tuple(tuple(cols) for cols in request.cols)))
            return
        appended = []
        for g, cols in enumerate(request.cols):
            new = tuple(cols[plan.told[g] :])
            plan.told[g] += len(new)
            plan.mirror[g].extend(new)
            appended.append(new)
        if any(appended):
            message.appended.append((request.uid, tuple(appended)))

    def preempt(self, request: Request) -> None:
        """The request gives everything up and starts over later; its stores are flushed before its blocks
        are reused."""
        uid, plan = request.uid, self.plans[request.uid]
        self.running.remove(uid)
        self.waiting.insert(0, uid)
        self.leaving.append(uid)
        plan.in_batch = False
        plan.since = 1
        self.do(("preempt", uid))
        for job, way in plan.jobs.items():
            if self.decide.flushes_preempted(way):
                self.do(("flush", job))
        if not self.decide.frees_wait_for_steps(request):
            self.drop_all(request)

    def admit(self, message: Message, request: Request, budget: int) -> int:
        """Try to admit a waiting request; tokens of the step that it uses."""
        uid, plan = request.uid, self.plans[request.uid]
        if request.flying or (not plan.ready and request.holds()):
            self.do(("defer", uid, "steps in flight"))
            return 0
        if self.decide.readmit_waits(len(plan.jobs)):
            self.do(("defer", uid, "transfers in flight"))
            return 0
        if plan.ready:
            self.make_way(request, budget, message.step)
            return self.start(message, request, request.hit, budget)
        found = tables.local_hit(self, request)
        if found is None:
            self.do(("defer", uid, "state cached in this step"))
            return 0
        local, blocks, tail = found
        total = offload.external_hit(self, request, local) if self.config.offload else local
        if total == offload.DEFER:
            self.do(("defer", uid, "chunks in flight"))
            return 0
        if not self.room_for(request, local, total, blocks, tail, budget, message.step):
            return 0
        for g, pairs in enumerate(blocks):
            if self.decide.touches_hit_first():
                self.adopt(request, g, pairs, total)
            plan.published[g] = local // self.config.groups[g].block_tokens
        for g, col, block in tail:
            if self.decide.copies_adopted_tail(block):
                self.do(("adopt", uid, g, -1, block))
                plan.retained.append((message.step, g, block))
            else:
                self.do(("adopt", uid, g, col, block))
        for g, col, block in tail:  # after all are held: a copy's block might be another group's tail
            if self.decide.copies_adopted_tail(block):
                copy = self.allocate(request, g, col)
                self.do(("copy", block, copy, g))
                message.copies.append((block, copy, g))
        if total > local:
            self.waiting.remove(uid)
            self.loading_requests.append(uid)
            offload.start_load(self, request, local, total)
            if not self.decide.touches_hit_first():
                for g, pairs in enumerate(blocks):
                    self.adopt(request, g, pairs, total)
            return 0
        if not self.decide.touches_hit_first():
            for g, pairs in enumerate(blocks):
                self.adopt(request, g, pairs, total)
        self.do(("hit", uid, local, total))
        return self.start(message, request, total, budget)

    def make_way(self, request: Request, budget: int, step: int) -> None:
        """When nothing runs that could free blocks, loaded requests that wait behind this one start over."""
        q, _, _ = self.next_tokens(request, request.hit, budget, step)
        while not self.running and not self.fits(request, request.hit, q):
            if not self.start_over_last_loaded(request):
                return

    def start_over_last_loaded(self, request: Request) -> bool:
        """Loaded requests hold blocks while they wait to run, and could keep everybody from going on, one
        another included: the last of them gives its blocks up.  Whether there was one beside ``request``."""
        loaded = [uid for uid in self.waiting if uid != request.uid and self.plans[uid].ready]
        if not self.decide.loaded_give_way():
            return False
        if loaded:
            last = self.book.requests[loaded[-1]]
            self.do(("preempt", last.uid))
            self.drop_all(last)
        return bool(loaded)

    def adopt(self, request: Request, g: int, pairs: list[tuple[int, int]], total: int) -> None:
        """The columns of a hit that will still be read are held (``BlockPool.touch``)."""
        for col, block in pairs:
            if col >= tables.first_kept_column(self, self.config.groups[g], total):
                self.do(("adopt", request.uid, g, col, block))

    def room_for(
        self,
        request: Request,
        local: int,
        total: int,
        blocks: tables.Hit,
        tail: tables.Tail,
        budget: int,
        step: int,
    ) -> bool:
        """Whether admission fits: cached blocks that nobody holds leave the free queue too."""
        taken = 0
        for g, pairs in enumerate(blocks):
            first = tables.first_kept_column(self, self.config.groups[g], total)
            taken += sum(1 for col, b in pairs if col >= first and b not in self.book.core.holders)
            taken += len(tables.fresh_columns(self, g, local, total))
        taken += sum(1 for _, _, b in tail if b not in self.book.core.holders) + len(tail)
        if total == local:
            q, _, _ = self.next_tokens(request, total, budget, step)
            if q < 1:
                return False
            lengths = [max((col + 1 for col, _ in pairs), default=0) for pairs in blocks]
            for g, col, _ in tail:
                lengths[g] = col + 1
            for g, group in enumerate(self.config.groups):
                if group.kind is Kind.MAMBA:
                    running = align.running_column(total, q, group.block_tokens)
                    taken += running + self.config.drafts + 1 - max(lengths[g], running)
                else:
                    upto = min(
                        total + q + tables.lookahead_tokens(self.config),
                        request.prompt + self.plans[request.uid].outputs,
                    )
                    held = max(lengths[g], floordiv(total, group.block_tokens))
                    taken += coverage.blocks_of(max(upto, total + q), group.block_tokens) - held
        return taken <= len(self.book.free)

    def start(self, message: Message, request: Request, c: int, budget: int) -> int:
        """The request runs from ``c``."""
        uid, plan = request.uid, self.plans[request.uid]
        q, drafts, decode = self.next_tokens(request, c, budget, message.step)
        if q < 1 or not self.fits(request, c, q):
            return 0
        plan.ready = False
        self.waiting.remove(uid)
        self.running.append(uid)
        self.do(("start", uid, c))
        self.run_row(message, request, c, q, drafts, decode=decode)
        return q

    def finish_message(self, message: Message) -> None:
        """The connector's part, and everything the ranks must be told."""
        if self.config.offload:
            offload.store_boundaries(self)
            for row in message.rows:
                request = self.book.requests[row.uid]
                if request.status is Status.RUNNING:
                    offload.store_positional(
                        self, request, min(row.computed + row.tokens, request.known), finished=False
                    )
        else:
            self.offers.clear()
        for job in self.must_flush:
            if job in self.jobs:
                self.do(("flush", job))
        self.must_flush.clear()
        message.flush = [event[1] for event in self.out if event[0] == "flush"]
        message.stores, self.new_stores = self.new_stores, []
        message.loads, self.new_loads = self.new_loads, []
        message.left, self.leaving = self.leaving, []
        message.accepted, self.accepted = self.accepted, []
        if self.mamba_groups:
            loading = {b for job in message.loads for _, _, subs in self.jobs[job].chunks for b in subs}
            attention = [
                (b, g) for b, g in self.fresh_blocks if g not in self.mamba_groups and b not in loading
            ]
            message.zero = attention
            for block, g in attention:
                self.do(("zero", block, g))
        self.fresh_blocks.clear()
        self.do(("step", message.step))

    def worker_program(self, rank: int, message: Any) -> Program:
        """The rank's operations for this step."""
        return self.workers[rank].program(message)
