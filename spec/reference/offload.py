"""The offload connector's scheduler side: lookup, loads, stores, fences, the host tier.

Sources: vLLM ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` and
``v1/kv_offload/cpu/manager.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.arith import align, coverage
from spec.book import Key, Request, Status
from spec.config import Group, Kind
from spec.policy import PolicyError
from spec.reference.plan import Chunk, JobState
from spec.reference.tables import fresh_columns, publish_columns, publish_states

if TYPE_CHECKING:
    from spec.reference.scheduler import Reference

DEFER = -1


def chunk(ref: Reference, group: Group) -> int:
    """Tokens of one host chunk of the group."""
    return coverage.chunk_tokens(group.block_tokens, ref.config.blocks_per_chunk)


def demanded(ref: Reference, g: int, local: int, total: int) -> range:
    """Chunks that the load of an external hit will name."""
    group, per = ref.config.groups[g], ref.config.blocks_per_chunk
    if not fresh_columns(ref, g, local, total):
        return range(0)
    block = group.block_tokens
    if group.kind is Kind.FULL:
        first = coverage.demand_first_chunk_full(local, block, per)
    elif group.kind is Kind.WINDOW:
        window, extra = group.window_tokens, group.extra_tokens
        first = coverage.demand_first_chunk_window(total, local, window, extra, block, per)
    elif group.kind is Kind.CHUNKED:
        first = coverage.demand_first_chunk_chunked(total, local, group.window_tokens, block, per)
    else:
        first = coverage.demand_first_chunk_mamba(total, block, per)
    return range(first, coverage.demand_end_chunk(total, chunk(ref, group)))


def looked_up(ref: Reference, g: int, local: int, total: int) -> range:
    """Chunks that lookup must find present before the hit is admitted."""
    group, size = ref.config.groups[g], chunk(ref, ref.config.groups[g])
    end = coverage.demand_end_chunk(total, size)
    drop = ref.drops[g]
    if group.kind is Kind.FULL:
        return range(coverage.lookup_first_chunk_full(local, size), end + drop)
    if group.kind in (Kind.WINDOW, Kind.CHUNKED):
        return range(max(0, ref.decide.lookup_first(group, total, local, size)), end + drop)
    return range(end - 1, end)


def external_hit(ref: Reference, request: Request, local: int) -> int:
    """Tokens in place after a load from the host tier; ``local`` if there is nothing to gain; DEFER to ask
    again."""
    config = ref.config
    if ref.plans[request.uid].tried:
        return local
    unit = ref.decide.hit_unit(tuple(chunk(ref, g) for g in config.groups))
    candidates = list(range((request.known - 1) // unit * unit, local, -unit))
    if not ref.mamba_groups and request.known - 1 > local and request.known - 1 not in candidates:
        candidates.insert(0, request.known - 1)
    for total in candidates:
        state = availability(ref, request, local, total)
        if state == "ready":
            if in_flight(ref, request, local, total):
                return DEFER
            return total
        if state == "pending":
            return DEFER
    return local


def availability(ref: Reference, request: Request, local: int, total: int) -> str:
    """Whether every chunk that the hit needs is ``ready``; ``pending`` if some are still being written;
    else ``absent``."""
    pending = False
    for g, group in enumerate(ref.config.groups):
        size = chunk(ref, group)
        for index in looked_up(ref, g, local, total):
            end = (index + 1) * size
            entry = ref.book.tier.get((g, end, request.line[end])) if end <= request.known else None
            if entry is None:
                return "absent"
            pending |= entry.state == "writing" and not ref.decide.pending_is_present(entry.state)
    return "pending" if pending else "ready"


def in_flight(ref: Reference, request: Request, local: int, total: int) -> bool:
    """Whether somebody else is loading a chunk that the hit needs: its blocks will be shared once it has
    landed."""
    for g, group in enumerate(ref.config.groups):
        size = chunk(ref, group)
        chunks = looked_up(ref, g, local, total)
        if group.kind is Kind.WINDOW:
            first = max(0, ref.decide.inflight_first(group, total, local, size))
            chunks = range(first, coverage.demand_end_chunk(total, size))
        for index in chunks:
            end = (index + 1) * size
            if end <= request.known and (g, end, request.line[end]) in ref.loading:
                return True
    return False


def start_load(ref: Reference, request: Request, local: int, total: int) -> None:
    """Allocate what the hit needs and load it on every rank; the request waits for the last report."""
    config = ref.config
    for g in range(len(config.groups)):
        for index in looked_up(ref, g, local, total):
            end = (index + 1) * chunk(ref, config.groups[g])
            ref.do(("look", request.uid, g, index, end, request.line[end]))
    ref.do(("hit", request.uid, local, total))
    chunks: list[Chunk] = []
    for g, group in enumerate(config.groups):
        cols = fresh_columns(ref, g, local, total)
        check_local(ref, request, g, local)
        for col in cols:
            ref.allocate(request, g, col)
        wanted = demanded(ref, g, local, total)
        for index in wanted:
            end = (index + 1 - ref.decide.load_shift(wanted.start)) * chunk(ref, group)
            key = (g, end, request.line[end])
            entry = ref.book.tier.get(key)
            if entry is None or entry.state != "ready":
                held = "absent" if entry is None else entry.state
                raise PolicyError(
                    f"load of {request.uid} admitted at {total} tokens names chunk {index} of group "
                    f"{group.name} (tokens up to {end}), which is {held} in the host tier"
                )
            subs = [0] * config.blocks_per_chunk
            for col in cols:
                if align.chunk_of_column(col, config.blocks_per_chunk) == index:
                    subs[align.subslot(col, config.blocks_per_chunk)] = request.cols[g][col]
            chunks.append((key, entry.place, tuple(subs)))
            ref.loading[key] = None
            ref.recent(key)
    for part in ref.decide.load_parts(tuple(chunks)):
        create(ref, request, "load", part)


def check_local(ref: Reference, request: Request, g: int, local: int) -> None:
    """The columns of the local prefix are taken for local.  Raises :class:`PolicyError` if some are not."""
    counted = local // ref.config.groups[g].block_tokens
    taken = ref.decide.local_columns(tuple(request.cols[g][:counted]), counted)
    if taken != counted:
        raise PolicyError(
            f"load of {request.uid}: group {ref.config.groups[g].name} has {taken} local columns, "
            f"the scheduler counts {counted}"
        )


def create(ref: Reference, request: Request, way: str, chunks: tuple[Chunk, ...]) -> int:
    """A new transfer; it fences its device blocks from now on."""
    job = ref.next_job
    ref.next_job += 1
    ref.jobs[job] = JobState(request.uid, way, chunks, set(range(ref.config.ranks)))
    ref.plans[request.uid].jobs[job] = way
    ref.do(("job", job, way, request.uid, chunks))
    if way == "store":
        blocks = tuple(dict.fromkeys(b for _, _, subs in chunks for b in subs if b))
        for block in ref.decide.fenced_blocks(blocks):
            ref.fences.setdefault(block, {})[job] = None
    (ref.new_loads if way == "load" else ref.new_stores).append(job)
    return job


# -- stores ------------------------------------------------------------------------------------------------
def place_for(ref: Reference, wanted: list[Key]) -> int | None:
    """A host place for one more chunk, evicting the least recently used idle chunk if need be."""
    if ref.places:
        return ref.places.pop()
    for key in ref.recency:
        entry = ref.book.tier.get(key)
        if entry and entry.state == "ready" and ref.decide.evictable(entry.readers) and key not in wanted:
            ref.tier(key, entry.place, "gone")
            del ref.recency[key]
            return entry.place
    return None


def offer(ref: Reference, request: Request, wanted: list[tuple[Key, tuple[int, ...]]]) -> bool:
    """Store chunks that the tier lacks; False if it has no room, in which case nothing is stored."""
    lacking = [(key, subs) for key, subs in wanted if key not in ref.book.tier]
    chunks: list[Chunk] = []
    for key, subs in lacking:
        place = place_for(ref, [k for k, _ in wanted])
        if place is None:
            for got, spot, _ in chunks:
                ref.tier(got, spot, "gone")
                ref.places.append(spot)
            return False
        ref.tier(key, place, "writing")
        chunks.append((key, place, subs))
    if chunks:
        create(ref, request, "store", tuple(chunks))
    return True


def store_positional(ref: Reference, request: Request, eligible: int, *, finished: bool) -> None:
    """Store what is full and new, by column: attention groups only."""
    config, plan = ref.config, ref.plans[request.uid]
    if config.offload_prompt_only:
        eligible = min(eligible, request.prompt)
    for g, group in enumerate(config.groups):
        if not ref.decide.positional_group(group):
            continue
        size, per = chunk(ref, group), config.blocks_per_chunk
        wanted = []
        cols = request.cols[g]
        limit = ref.decide.clipped_columns(group, len(cols), eligible) if finished else len(cols)
        upto = ref.decide.storable_chunks(coverage.full_chunks_of(eligible, size), limit // per)
        for index in range(plan.next_chunk[g], upto):
            subs = tuple(cols[index * per : (index + 1) * per])
            if len(subs) != per:
                raise PolicyError(
                    f"store of {request.uid}: chunk {index} of group {group.name} has {len(subs)} blocks, "
                    f"not {per}"
                )
            if group.kind is Kind.MAMBA:
                mirror = plan.mirror[g]
                last = (index + 1) * per - 1
                source = ref.decide.boundary_block(
                    cols[last], mirror[last] if last < len(mirror) else cols[last]
                )
                subs = (0,) * (per - 1) + (source,)
                if not source:
                    continue
            elif 0 in subs or not store_keeps(ref, g, index, eligible):
                continue
            end = (index + 1) * size
            wanted.append(((g, end, request.line[end]), subs))
        if not wanted or offer(ref, request, wanted):
            plan.next_chunk[g] = max(plan.next_chunk[g], upto)


def store_keeps(ref: Reference, g: int, index: int, eligible: int) -> bool:
    """Whether some admissible hit may read this chunk (``_reachable_store_block_mask``)."""
    group = ref.config.groups[g]
    if group.kind is not Kind.WINDOW:
        return True
    config, block = ref.config, group.block_tokens
    segment = ref.decide.store_segment(ref.store_alignment)
    if segment % block:  # a segment is no whole number of blocks: nothing is left out
        return True
    drops = ref.drops[g]
    need, blocks = ref.decide.store_window(group, drops), segment // block
    if coverage.store_keeps_all(need, blocks):
        return True
    first = index * config.blocks_per_chunk
    end = eligible // block
    return any(
        coverage.store_keeps_block(col, need, blocks, drops)
        or (not drops and coverage.store_keeps_final_block(col, end, need, blocks))
        for col in range(first, first + config.blocks_per_chunk)
    )


def store_boundaries(ref: Reference) -> None:
    """Store recurrent states from exact hand-offs: the block that the core says holds the boundary, if it
    still does."""
    for uid, g, block, n in ref.offers:
        request = ref.book.requests.get(uid)
        if request is None or not ref.config.offload:
            continue
        key = (g, n, request.line[n])
        held = ref.book.core.key.get(block)
        current = held is not None and held[:2] == (g, n)  # type: ignore[index]
        if not ref.decide.hand_off_stands(current):
            continue  # reused before it could be stored
        if n % chunk(ref, ref.config.groups[g]):
            continue
        if ref.config.offload_prompt_only and n > request.prompt:
            continue
        offer(ref, request, [(key, (0,) * (ref.config.blocks_per_chunk - 1) + (block,))])
    ref.offers.clear()


# -- reports ---------------------------------------------------------------------------------------------
def reported(ref: Reference, job: int, rank: int, ok: bool) -> None:
    """One rank's report.  The last one settles the transfer and lifts its fences."""
    state = ref.jobs[job]
    ref.do(("unfence", job, rank))
    if ref.decide.counts_report(rank, ref.config.ranks):
        state.waiting.discard(rank)
    state.failed |= not ok
    waiting = len(state.waiting)
    if ref.decide.fence_done(waiting):
        lift(ref, job)
    if ref.decide.job_done(waiting) or (state.failed and not ref.decide.failure_waits(waiting)):
        settle(ref, job, state)


def lift(ref: Reference, job: int) -> None:
    """A store's fences go, block by block; another store's fence on the same block stays."""
    for block, jobs in list(ref.fences.items()):
        if job in jobs:
            for done in ref.decide.unfences(job, tuple(jobs)):
                del jobs[done]
            if not jobs:
                del ref.fences[block]


def settle(ref: Reference, job: int, state: JobState) -> None:
    """A transfer is done with."""
    del ref.jobs[job]
    lift(ref, job)
    state.uid = ref.decide.reported_life(state.uid, tuple(ref.book.requests))
    plan = ref.plans.get(state.uid)
    if plan:
        plan.jobs.pop(job, None)
    failed = (state.failed and not ref.decide.keeps_failed_store()) or not ref.decide.lists_stored()
    for key, place, _ in state.chunks:
        if state.stale:
            ref.leave_limbo(place)
        elif state.way == "store":
            ref.tier(key, place, "gone" if failed else "ready")
            if failed:
                ref.places.append(place)
            else:
                ref.recent(key)
        elif ref.decide.returns_readers():
            ref.tier(key, place, "released")
    if state.way == "load":
        if not state.failed or ref.decide.clears_loading():
            for key, _, _ in state.chunks:
                ref.loading.pop(key, None)
        loaded(ref, state)


def loaded(ref: Reference, state: JobState) -> None:
    """A load has landed on every rank, or failed on one: the request goes on, or starts over without it."""
    request = ref.book.requests.get(state.uid)
    if request is None:
        return
    plan = ref.plans[request.uid]
    plan.load_failed |= state.failed
    if ref.decide.joins_loads(sum(way == "load" for way in plan.jobs.values())):
        return
    if request.status is Status.DONE:
        if ref.decide.gives_back(plan.allocated):
            ref.drop_all(request)
        return
    if request.uid not in ref.loading_requests:
        return  # it has gone on without this part of its load
    ref.loading_requests.remove(request.uid)
    failed, plan.load_failed = plan.load_failed, False
    if failed and ref.decide.raises_on_failure():
        raise PolicyError(f"a load of {state.uid} failed")
    if failed and not ref.decide.uses_failed_load():
        plan.tried = True
        if ref.decide.recovered_groups(len(ref.config.groups)) == len(ref.config.groups):
            ref.drop_all(request)
        ref.do(("preempt", request.uid))
    else:
        plan.ready = True
        if ref.config.prefix_caching:
            waiting = list(ref.offers)
            for g, group in enumerate(ref.config.groups):
                if group.kind is not Kind.MAMBA:
                    publish_columns(ref, request, g, request.hit)
            publish_states(ref, request, request.hit, now=False)
            ref.offers[:] = waiting  # what was loaded from the tier need not be stored again
    ref.waiting.insert(0, request.uid)
