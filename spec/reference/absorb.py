"""Following another policy: the reference's own memory, brought up to date from others' decisions.

The book follows by applying each decision.  Everything else that the reference scheduler remembers
(queues, what was published and stored, transfers and their fences, host places) is a function of the
decisions too, and is derived here.  Afterwards the reference can be asked the next question on exactly
the state that the other policy has made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spec.book import Key, Request, Status
from spec.config import Kind
from spec.core import NULL
from spec.events import Event
from spec.ops import UserId
from spec.policy import Arrival, Output
from spec.reference import offload
from spec.reference.plan import JobState, Message, Plan, RowMessage

if TYPE_CHECKING:
    from spec.reference.scheduler import Reference

Question = tuple[Any, ...]


def absorb(ref: Reference, question: Question, decisions: list[Event]) -> Message | None:
    """Follow an answer to a question.  For ``schedule``, the message that the reference would send with
    it."""
    kind = question[0]
    message = Message(ref.book.step + 1) if kind == "schedule" else None
    if kind == "on_arrive":
        arrival: Arrival = question[1]
        groups = len(ref.config.groups)
        ref.plans[arrival.uid] = Plan(
            arrival.outputs, [0] * groups, [[] for _ in range(groups)], [0] * groups
        )
        ref.waiting.append(arrival.uid)
    elif kind == "schedule":
        ref.cached_now.clear()
    elif kind == "on_reset":
        _reset(ref, question[1])
    for event in decisions:
        handler = _BEFORE.get(event[0])
        if handler:
            handler(ref, question, message, *event[1:])
        ref.book.apply(event)
        if event[0] == "unfence":
            _settled(ref, event[1])
        elif event[0] == "tokens":
            _verified(ref, event[1])
    _settle_requests(ref)
    if message is not None:
        stored = {key for event in decisions if event[0] == "job" for key, _, _ in event[4]}
        _send(ref, message, stored | set(ref.book.tier))
    elif kind == "on_output":
        ref.book.forget()
        for uid in [u for u in ref.plans if u not in ref.book.requests and not ref.plans[u].jobs]:
            if uid not in ref.leaving:
                del ref.plans[uid]
    return message


def _verified(ref: Reference, uid: UserId) -> None:
    """After an output: states of the boundaries that verified tokens have crossed have been offered."""
    request = ref.book.requests.get(uid)
    if request is not None and request.status is Status.RUNNING:
        _published(ref, request, request.processed, {Kind.MAMBA})


def _reset(ref: Reference, scope: str) -> None:
    """Transfers from before a reset of the tier keep their host places until they are done."""
    ref.offers.clear()
    if scope == "all":
        ref.limbo.update(Counter(p for job in ref.jobs.values() if not job.stale for _, p, _ in job.chunks))
        for job in ref.jobs.values():
            job.stale = True


def _settle_requests(ref: Reference) -> None:
    """Requests that have given everything up begin anew."""
    for request in ref.book.requests.values():
        if request.status in (Status.WAITING, Status.DONE) and not request.holds():
            for cols in request.cols:
                cols.clear()
            ref.reset_plan(request)


def _offered(ref: Reference, request: Request, eligible: int, present: set[Key]) -> None:
    """Full chunks of attention groups that the tier had, or was given, need not be offered again."""
    plan, per = ref.plans[request.uid], ref.config.blocks_per_chunk
    for g, group in enumerate(ref.config.groups):
        if group.kind is Kind.MAMBA or not ref.config.offload:
            continue
        cols, size = request.cols[g], per * group.block_tokens
        for index in range(plan.next_chunk[g], min(eligible // size, len(cols) // per)):
            lacks = 0 in cols[index * per : (index + 1) * per] or not offload.store_keeps(
                ref, g, index, eligible
            )
            if not lacks and (g, (index + 1) * size, request.line[(index + 1) * size]) not in present:
                break
            plan.next_chunk[g] = index + 1


def _send(ref: Reference, message: Message, present: set[Key]) -> None:
    """The message of the step that was absorbed."""
    for row in message.rows:
        request = ref.book.requests[row.uid]
        ref.tell_columns(message, request, row.computed)
        eligible = min(row.computed + row.tokens, request.known)
        _offered(
            ref,
            request,
            min(eligible, request.prompt) if ref.config.offload_prompt_only else eligible,
            present,
        )
    message.stores, ref.new_stores = ref.new_stores, []
    message.loads, ref.new_loads = ref.new_loads, []
    message.left, ref.leaving = ref.leaving, []
    message.accepted, ref.accepted = ref.accepted, []
    ref.offers.clear()
    ref.fresh_blocks.clear()
    ref.must_flush.clear()


def _alloc(
    ref: Reference, question: Question, message: Message | None, u: UserId, g: int, col: int, b: int
) -> None:
    ref.fresh_blocks.append((b, g))
    if col < 0:
        ref.plans[u].retained.append((ref.book.step + 1, g, b))


def _adopt(
    ref: Reference, question: Question, message: Message | None, u: UserId, g: int, col: int, b: int
) -> None:
    if col < 0:
        ref.plans[u].retained.append((ref.book.step + 1, g, b))


def _drop(
    ref: Reference, question: Question, message: Message | None, u: UserId, g: int, col: int, b: int
) -> None:
    if col < 0:
        entry = next(e for e in ref.plans[u].retained if e[1:] == (g, b))
        ref.plans[u].retained.remove(entry)


def _publish(
    ref: Reference,
    question: Question,
    message: Message | None,
    u: UserId,
    g: int,
    b: int,
    n: int,
    prefix: int,
) -> None:
    plan, group = ref.plans[u], ref.config.groups[g]
    if b in ref.book.requests[u].retained:  # a tail's key goes to its copy
        plan.tail = None
        return
    if n % group.block_tokens:
        tail = plan.tail[1] if plan.tail and plan.tail[0] == n else {}
        plan.tail = n, tail | {g: b}
        ref.cached_now[b] = None
    elif group.kind is not Kind.MAMBA:
        plan.published[g] = max(plan.published[g], n // group.block_tokens)
    elif question[0] != "on_report":
        ref.offers.append((u, g, b, n))
        if message is not None:
            ref.cached_now[b] = None


def _hit(
    ref: Reference, question: Question, message: Message | None, u: UserId, local: int, total: int
) -> None:
    plan = ref.plans[u]
    for g, group in enumerate(ref.config.groups):
        plan.published[g] = local // group.block_tokens
    if total > local:
        ref.waiting.remove(u)
        ref.loading_requests.append(u)


def _start(ref: Reference, question: Question, message: Message | None, u: UserId, computed: int) -> None:
    ref.plans[u].ready = False
    ref.waiting.remove(u)
    ref.running.append(u)


def _row(
    ref: Reference, question: Question, message: Message | None, u: UserId, c: int, q: int, d: int
) -> None:
    assert message is not None
    request, plan = ref.book.requests[u], ref.plans[u]
    decode = c >= max(request.prompt, request.known - 1)
    if c + q >= request.known or (decode and ref.config.async_scheduling):
        plan.sampled_in = message.step
    message.rows.append(RowMessage(u, c, request.processed if plan.in_batch else c, q, decode))
    if plan.tail and plan.tail[0] <= c:
        plan.tail = None
    plan.allocated = True
    kinds = set(Kind) - {Kind.MAMBA} if decode else set(Kind)
    _published(ref, request, min(c + q, request.known), kinds)


def _published(ref: Reference, request: Request, upto: int, kinds: set[Kind]) -> None:
    """Columns below ``upto`` tokens have been offered for publishing, whether or not they were published."""
    plan = ref.plans[request.uid]
    covered = min(upto, request.known - ref.config.hash_lookahead_tokens)
    for g, group in enumerate(ref.config.groups):
        if group.kind in kinds:
            plan.published[g] = max(plan.published[g], covered // group.block_tokens)


def _preempt(ref: Reference, question: Question, message: Message | None, u: UserId) -> None:
    plan = ref.plans[u]
    if u in ref.waiting:  # its load has landed, and it gives way before it runs
        plan.ready = False
        return
    if u in ref.loading_requests:  # its load has failed
        ref.loading_requests.remove(u)
        plan.tried = True
    else:
        ref.running.remove(u)
        ref.leaving.append(u)
        plan.in_batch = False
    ref.waiting.insert(0, u)


def _finish(ref: Reference, question: Question, message: Message | None, u: UserId, why: str) -> None:
    for queue in (ref.waiting, ref.running, ref.loading_requests):
        if u in queue:
            queue.remove(u)
    if ref.plans[u].in_batch:
        ref.leaving.append(u)


def _tokens(
    ref: Reference,
    question: Question,
    message: Message | None,
    u: UserId,
    step: int,
    new: tuple[int, ...],
    computed: int,
) -> None:
    output: Output = question[1]
    sampled = dict(output.tokens).get(u, ())
    request = ref.book.requests.get(u)
    if sampled and request is not None and request.status is Status.RUNNING:
        ref.accepted.append((u, len(sampled)))


def _job(
    ref: Reference, question: Question, message: Message | None, j: int, way: str, u: UserId, chunks: Any
) -> None:
    ref.next_job = max(ref.next_job, j + 1)
    ref.jobs[j] = JobState(u, way, chunks, set(range(ref.config.ranks)))
    ref.plans[u].jobs[j] = way
    (ref.new_loads if way == "load" else ref.new_stores).append(j)
    for (g, n, prefix), _, subs in chunks:
        if way == "load":
            ref.loading[g, n, prefix] = None
            ref.recent((g, n, prefix))
            continue
        if ref.config.groups[g].kind is not Kind.MAMBA:
            done = n // (ref.config.groups[g].block_tokens * ref.config.blocks_per_chunk)
            ref.plans[u].next_chunk[g] = max(ref.plans[u].next_chunk[g], done)
        for block in subs:
            if block != NULL:
                ref.fences.setdefault(block, {})[j] = None


def _flush(ref: Reference, question: Question, message: Message | None, j: int) -> None:
    if message is not None:
        message.flush.append(j)


def _unfence(ref: Reference, question: Question, message: Message | None, j: int, r: int) -> None:
    if j in ref.jobs:
        ref.jobs[j].waiting.discard(r)
        ref.jobs[j].failed |= not question[3]


def _settled(ref: Reference, j: int) -> None:
    """After a report: the last one ends the transfer."""
    state = ref.jobs.get(j)
    if state is None or state.waiting:
        return
    del ref.jobs[j]
    for block in [b for b, jobs in ref.fences.items() if j in jobs]:
        del ref.fences[block][j]
        if not ref.fences[block]:
            del ref.fences[block]
    plan = ref.plans.get(state.uid)
    if plan:
        plan.jobs.pop(j, None)
    for _, place, _ in state.chunks:
        if state.stale:
            ref.leave_limbo(place)
    if state.way == "load":
        for key, _, _ in state.chunks:
            ref.loading.pop(key, None)
        request = ref.book.requests.get(state.uid)
        if request and plan and request.status is Status.LOADING and not state.failed:
            ref.loading_requests.remove(state.uid)
            plan.ready = True
            for g, group in enumerate(ref.config.groups):
                plan.published[g] = max(plan.published[g], request.hit // group.block_tokens)
            ref.waiting.insert(0, state.uid)


def _tier(
    ref: Reference,
    question: Question,
    message: Message | None,
    g: int,
    n: int,
    prefix: int,
    place: int,
    state: str,
) -> None:
    key = (g, n, prefix)
    if state == "writing" and place in ref.places:
        ref.places.remove(place)
    elif state == "ready":
        ref.recent(key)
    elif state == "gone":
        ref.recency.pop(key, None)
        if place not in ref.limbo and place not in ref.places:
            ref.places.append(place)


def _zero(ref: Reference, question: Question, message: Message | None, b: int, g: int) -> None:
    assert message is not None
    message.zero.append((b, g))


def _copy(ref: Reference, question: Question, message: Message | None, src: int, dst: int, g: int) -> None:
    assert message is not None
    message.copies.append((src, dst, g))


_BEFORE: dict[str, Callable[..., None]] = {
    "alloc": _alloc,
    "adopt": _adopt,
    "drop": _drop,
    "publish": _publish,
    "hit": _hit,
    "start": _start,
    "row": _row,
    "preempt": _preempt,
    "finish": _finish,
    "tokens": _tokens,
    "job": _job,
    "flush": _flush,
    "unfence": _unfence,
    "tier": _tier,
    "zero": _zero,
    "copy": _copy,
}
