"""What a right answer is, whoever gives it: one contract for each question that a policy is asked.

**Why.** Two right policies part at the first block id or preemption victim, so answers cannot be compared
for equality.  A contract judges one answer on what the asked process knows, and says why it is refused,
or nothing.  It is weaker than the reference: it says which blocks *may* be allocated, not which; what a
hit must be backed by, not how long it is.

**Views.** A :class:`SchedulerView` is the book before the answer and what the scheduler was told before;
a :class:`~spec.rankview.RankView` is what one worker's host process knows.  Neither holds a ghost, the
progress of a stream, or another rank.  Rules of the model that read nothing else are judged on the view
by the very same functions (:data:`SHARED_RULES`), and every guard of the core protocol is asked through
the book.

``allowed(view, question, answer)`` leaves the view alone; :func:`follow` also lets it learn the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from spec.arith import align, coverage
from spec.book import Book, HostChunk, Key, Request, Status
from spec.config import Config, Group, Kind
from spec.core import NULL, Core, Job
from spec.events import Event
from spec.ops import UserId
from spec.policy import Answer, Arrival, Output
from spec.rules import BY_NAME, STATE_RULES

if TYPE_CHECKING:
    from spec.world import World

Question = tuple[Any, ...]
"""(name of the policy's method, its arguments ...), ``worker_program`` excepted: see ``spec.rankview``."""

#: Rules that read only what the scheduler knows, by the decision that they are judged at.
#: ``demand_within_lookup`` and ``load_xor_store`` are left out on purpose: one may be right without them.
SHARED_RULES: dict[str, tuple[str, ...]] = {
    "move": ("relocates_only_exclusive_scratch",),
    "job": ("recurrent_store_by_hand_off", "loads_only_ready_chunks"),
    "hit": ("hit_below_known",),
    "start": ("hit_below_known",),
    "row": ("read_columns_present",),
    "tier": ("host_place_free",),
}

#: What each question may be answered with.
KINDS: dict[str, frozenset[str]] = {
    "on_arrive": frozenset({"enqueue", "evict"}),
    "schedule": frozenset(
        "alloc adopt move drop publish evict copy zero hit defer start row preempt".split()
        + "look job flush tier step".split()
    ),
    "on_output": frozenset("tokens publish evict finish handoff drop job tier flush done".split()),
    "on_report": frozenset("unfence tier publish evict preempt drop".split()),
    "on_abort": frozenset("finish drop evict job tier flush".split()),
    "on_reset": frozenset("evict tier".split()),
}


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A transfer as the scheduler remembers it."""

    job: int
    uid: UserId
    way: str
    chunks: tuple[tuple[Key, int, tuple[int, ...]], ...]
    failed: bool = False
    stale: bool = False  # created before the host tier was cleared


@dataclass(slots=True)
class SchedulerView:
    """What the scheduler process knows: the book, what clients asked for, its transfers.

    It also answers to the names that rules read (``book``, ``config``, ``mamba_groups``) and collects
    what they find."""

    config: Config
    book: Book
    outputs: dict[UserId, int] = field(default_factory=dict)  # tokens that the client asked for
    jobs: dict[int, KnownJob] = field(default_factory=dict)
    filled: dict[UserId, dict[tuple[int, int], int]] = field(
        default_factory=dict
    )  # (group, column) -> tokens adopted or loaded
    sampled_in: dict[UserId, int] = field(default_factory=dict)  # last step that samples for the request
    untold: dict[int, KnownJob] = field(default_factory=dict)  # transfers created since the last step
    # -- of the answer that is being judged
    fresh: dict[int, tuple[UserId, int, int]] = field(default_factory=dict)  # block allocated -> its column
    evicted: dict[int, object] = field(default_factory=dict)  # block -> the key that it carried
    copied: dict[int, int] = field(default_factory=dict)  # block -> block that the step copies it from
    rows: dict[UserId, tuple[int, int, int]] = field(default_factory=dict)
    written: dict[int, UserId] = field(default_factory=dict)  # recurrent blocks published by this step's rows
    crossed: dict[UserId, tuple[int, int]] = field(
        default_factory=dict
    )  # processed tokens before and after an output
    due: tuple[UserId, ...] = ()  # requests whose row this output brings
    found: str | None = None

    @classmethod
    def of(cls, config: Config, book: Book) -> SchedulerView:
        """A view that begins with this book; later answers must all be followed."""
        return cls(config, book)

    @property
    def mamba_groups(self) -> tuple[int, ...]:
        """Indexes of the recurrent groups."""
        return tuple(i for i, g in enumerate(self.config.groups) if g.kind is Kind.MAMBA)

    @property
    def transfers(self) -> dict[int, KnownJob]:
        """Transfers that some rank has not reported."""
        return {j: known for j, known in self.jobs.items() if j in self.book.core.jobs}

    @property
    def tally(self) -> dict[str, list[int]]:
        """Rules count how often they do not apply; a view does not."""
        return {name: [0, 0] for name in BY_NAME}

    def judge(self, name: str, applies: bool, holds: bool, text: Callable[[], str]) -> None:
        """What a rule says to the world, it says to the view."""
        if applies and not holds and self.found is None:
            self.found = f"{name}: {text()}"

    def copy(self) -> SchedulerView:
        """A view that can be changed without this one; configuration and prefixes are shared."""
        return replace(
            self, book=copy_book(self.book), outputs=dict(self.outputs), jobs=dict(self.jobs),
filled={u: dict(columns) for u, columns in self.filled.items()}, sampled_in=dict(self.sampled_in),
untold=dict(self.untold),
            fresh={}, evicted={}, copied={}, rows={}, written={}, crossed={}, found=None,
        )  # fmt: skip

    def begin_answer(self) -> None:
        """Forget what belonged to the last answer."""
        self.fresh, self.evicted, self.copied = {}, {}, {}
        self.rows, self.written, self.crossed, self.found = {}, {}, {}, None


def copy_book(book: Book) -> Book:
    """A book of its own; configuration and interned prefixes are shared."""
    core = book.core
    return Book(
        book.config, book.chains,
        Core(
            core.ranks, {b: dict(h) for b, h in core.holders.items()}, dict(core.key),
            {j: Job(job.way, job.blocks, set(job.waiting)) for j, job in core.jobs.items()},
            {b: dict(jobs) for b, jobs in core.fences.items()}, dict(core.reused), dict(core.slots),
            dict(core.generation), dict(core.steps),
        ),
        book.free.copy(), {k: list(blocks) for k, blocks in book.by_key.items()},
        {
            u: replace(
                r, line=list(r.line), tokens=list(r.tokens), cols=[list(c) for c in r.cols],
                flying=dict(r.flying), retained=list(r.retained),
            )
            for u, r in book.requests.items()
        },
        {k: HostChunk(c.place, c.state, c.readers) for k, c in book.tier.items()}, book.step,
    )  # fmt: skip


def allowed(view: SchedulerView, question: Question, answer: Answer) -> str | None:
    """Why the answer is refused; None if it is right.  The view stays as it is."""
    return follow(view.copy(), question, answer)


def follow(view: SchedulerView, question: Question, answer: Answer) -> str | None:
    """The same, and the view learns the answer (all of it, refused or not)."""
    view.begin_answer()
    reason = None
    if question[0] == "on_output":
        step, requests = question[1].step, view.book.requests
        view.due = tuple(u for u, _ in question[1].tokens if u in requests and step in requests[u].flying)
    if question[0] == "on_arrive":
        arrival: Arrival = question[1]
        view.outputs[arrival.uid] = arrival.outputs
    for event in answer.decisions:
        first = _before(view, question, event)
        rule = _shared(view, event)
        _learn(view, question, event)
        guard = view.book.apply(event)
        after = f"core guard {guard}: {event}" if guard else None
        reason = reason or first or rule or after
    whole = _WHOLE[question[0]](view, question, answer.decisions)
    return reason or whole or _states(view)


def _shared(view: SchedulerView, event: Event) -> str | None:
    """The model's own rules about this decision, where they read nothing but the view."""
    for name in SHARED_RULES.get(event[0], ()):
        judges = BY_NAME[name].judges
        assert judges is not None
        judges(cast("World", view), event)
    found, view.found = view.found, None
    return found


def _states(view: SchedulerView) -> str | None:
    """The model's own rules about states that the book shows, judged once the whole answer has been
    applied."""
    world = cast("World", view)
    for rule in STATE_RULES:
        if rule.holds and "streams" not in rule.parts and (rule.applies is None or rule.applies(world)):
            problem = rule.holds(world)
            if problem:
                return f"{rule.name}: {problem}"
    return None


# -- one decision ----------------------------------------------------------------------------------------
def _before(view: SchedulerView, question: Question, event: Event) -> str | None:
    """Why this decision is refused, before it is applied."""
    kind = event[0]
    if kind not in KINDS[question[0]]:
        return f"{question[0]} is not answered with {kind!r}"
    check = _CHECKS.get(kind)
    return check(view, question, *event[1:]) if check else None


def _learn(view: SchedulerView, question: Question, event: Event) -> None:
    """What the scheduler remembers about this decision beyond the book; called before the book applies it."""
    kind = event[0]
    if kind == "alloc":
        view.fresh[event[4]] = event[1:4]
    elif kind == "adopt":
        _fill(view, event[1], event[2], event[3], view.book.core.key.get(event[4]))
    elif kind == "evict" and event[1] in view.book.core.key:
        view.evicted[event[1]] = view.book.core.key[event[1]]
    elif kind == "copy":
        src, dst, _ = event[1:]
        view.copied[dst] = src
        if dst in view.fresh:
            _fill(view, *view.fresh[dst], view.book.core.key.get(src))
    elif kind == "job":
        job, way, uid, chunks = event[1:]
        view.jobs[job] = view.untold[job] = KnownJob(job, uid, way, chunks)
    elif kind == "unfence":
        _learn_report(view, question, event[1])
    elif kind == "row":
        uid, c, q, d = event[1:]
        request = view.book.requests[uid]
        view.rows[uid] = (c, q, d)
        if c + q >= request.known:
            view.sampled_in[uid] = view.book.step + 1
    elif kind == "publish" and question[0] == "schedule" and event[2] in view.mamba_groups:
        if event[3] not in view.book.requests[event[1]].retained:  # copies run before the forward
            view.written[event[3]] = event[1]
    elif kind in ("preempt", "finish"):
        view.filled.pop(event[1], None)
    elif kind == "tokens":
        request = view.book.requests[event[1]]
        _, q, _ = request.flying.get(event[2], (0, 0, 0))
        after = event[4] - sum(w for step, (_, w, _) in request.flying.items() if step != event[2])
        view.crossed[event[1]] = (request.processed, after)


def _fill(view: SchedulerView, uid: UserId, g: int, col: int, key: object) -> None:
    """A column now holds what a key names."""
    if isinstance(key, tuple) and col >= 0:
        view.filled.setdefault(uid, {})[g, col] = key[1]


def _learn_report(view: SchedulerView, question: Question, job: int) -> None:
    """A report was taken: a failure is remembered, a load that has landed everywhere fills its columns."""
    known, state = view.jobs.get(job), view.book.core.jobs.get(job)
    if known is None or state is None:
        return
    if not question[3]:
        view.jobs[job] = known = replace(known, failed=True)
    if known.way == "load" and not known.failed and len(state.waiting) == 1:
        per = view.config.blocks_per_chunk
        for (g, n, _), _, subs in known.chunks:
            block = view.config.groups[g].block_tokens
            for i, device_block in enumerate(subs):
                if device_block:
                    end = n - (per - 1 - i) * block
                    view.filled.setdefault(known.uid, {})[g, end // block - 1] = end


def _alloc(view: SchedulerView, _: Question, u: UserId, g: int, col: int, b: int) -> str | None:
    request = view.book.requests[u]
    if request.status is Status.DONE:
        return f"{u} is over and gets block {b}"
    if not 0 < b < view.config.pool_blocks:
        return f"block {b} is not one of the pool's"
    return _column_is_empty(request, g, col)


def _column_is_empty(request: Request, g: int, col: int) -> str | None:
    held = request.cols[g][col] if 0 <= col < len(request.cols[g]) else NULL
    return f"column {col} of {request.uid} already holds block {held}" if held else None


def _adopt(view: SchedulerView, _: Question, u: UserId, g: int, col: int, b: int) -> str | None:
    request = view.book.requests[u]
    key = view.book.core.key.get(b)
    if request.status is not Status.WAITING:
        return f"{u} is {request.status} and adopts block {b}"
    named, n, prefix = cast(Key, key) if key else (-1, 0, 0)
    covered, block = n + view.config.hash_lookahead_tokens, view.config.groups[g].block_tokens
    if (
        named != g
        or covered > request.known
        or prefix != request.line[covered]
        or (col >= 0 and -(-n // block) != col + 1)
    ):
        return f"{u} adopts block {b} as column {col}; the block is published as {key}"
    if b in view.written:
        return f"{u} adopts block {b}, whose state {view.written[b]} writes in this very step"
    return _column_is_empty(request, g, col)


def retained_from(config: Config, group: Group, processed: int) -> int:
    """First column of a running request that some step may still read; earlier ones may be given up."""
    block = group.block_tokens
    if group.kind is Kind.WINDOW:
        return coverage.first_retained_column(processed, group.window_tokens, group.extra_tokens, block)
    if group.kind is Kind.CHUNKED:
        return coverage.skipped_tokens_chunked(processed, group.window_tokens) // block
    return align.first_live_column(processed, block) if group.kind is Kind.MAMBA else 0


def _drop(view: SchedulerView, question: Question, u: UserId, g: int, col: int, b: int) -> str | None:
    request = view.book.requests[u]
    if col < 0:  # held for a copy: the copy reads before any later step writes
        return f"{u} gives up block {b} in the step that copies it" if b in view.copied.values() else None
    if request.status is Status.RUNNING:
        first = retained_from(view.config, view.config.groups[g], request.processed)
        return f"{u} gives up column {col}; steps may read from column {first} on" if col >= first else None
    if request.flying:
        return f"{u} gives up block {b} while its steps {list(request.flying)} are in flight"
    loads = [j for j, k in view.jobs.items() if k.uid == u and k.way == "load" and j in view.book.core.jobs]
    return f"{u} gives up block {b}, which load {loads[0]} still writes" if loads else None


def _publish(
    view: SchedulerView, question: Question, u: UserId, g: int, b: int, n: int, prefix: int
) -> str | None:
    request = view.book.requests[u]
    group = view.config.groups[g]
    col = (n - 1) // group.block_tokens
    covered = n + view.config.hash_lookahead_tokens
    if covered > request.known or prefix != request.line[covered]:
        return f"{u} publishes block {b} of group {group.name} under a key that is not its {n}-token prefix"
    if b in request.retained and b in view.fresh:
        return None  # a copy that takes a key along: judged with the whole answer
    if not 0 <= col < len(request.cols[g]) or request.cols[g][col] != b:
        return (
            f"{u} publishes block {b} as its first {n} tokens of group {group.name}, but holds it elsewhere"
        )
    if group.kind is not Kind.MAMBA or question[0] == "on_report":
        return None
    if question[0] == "on_output":
        before, after = view.crossed.get(u, (0, 0))
        good = before < n <= after and n % group.block_tokens == 0
    else:
        c, q, _ = view.rows.get(u, (0, 0, 0))
        good = c + q == n  # known tokens, so no drafts are among them
    return None if good else f"{u} publishes a state of {n} tokens that no step leaves in column {col}"


def _copy(view: SchedulerView, _: Question, src: int, dst: int, g: int) -> str | None:
    if dst not in view.fresh:
        return f"block {dst} is copied over, but was not allocated in this step"
    return None if src else "the null block is copied"


def _zero(view: SchedulerView, _: Question, b: int, g: int) -> str | None:
    return None if b in view.fresh else f"block {b} is zeroed, but was not allocated in this step"


def _hit(view: SchedulerView, _: Question, u: UserId, local: int, total: int) -> str | None:
    status = view.book.requests[u].status
    return None if status is Status.WAITING else f"{u} is {status} and is admitted with a hit"


def _start(view: SchedulerView, _: Question, u: UserId, computed: int) -> str | None:
    request = view.book.requests[u]
    if request.status not in (Status.WAITING, Status.LOADING):
        return f"{u} is {request.status} and starts"
    if request.flying:
        return f"{u} starts over while its steps {list(request.flying)} are in flight"
    filled = view.filled.get(u, {})
    for g, group in enumerate(view.config.groups):
        block, last = group.block_tokens, -(-computed // group.block_tokens)
        first = last - 1 if group.kind is Kind.MAMBA and computed else read_from(group, computed) // block
        if group.kind is Kind.MAMBA and filled.get((g, last - 1), computed) != computed:
            return f"{u} starts at {computed} tokens on a state of {filled[g, last - 1]}, group {group.name}"
        lacking = [
            col for col in range(first, last) if filled.get((g, col), 0) < min(computed, (col + 1) * block)
        ]
        if lacking:
            return (
                f"{u} starts at {computed} tokens; columns {lacking} of group {group.name} were never filled"
            )
    return None


def read_from(group: Group, start: int) -> int:
    """First position that attention reads when it computes from ``start``."""
    if group.kind is Kind.WINDOW:
        return max(0, start - group.window_tokens + 1)
    if group.kind is Kind.CHUNKED:
        return start - start % group.window_tokens
    return 0


def _row(view: SchedulerView, _: Question, u: UserId, c: int, q: int, d: int) -> str | None:
    config, request = view.config, view.book.requests[u]
    step = view.book.step + 1
    if request.status is not Status.RUNNING:
        return f"{u} is {request.status} and computes"
    if u in view.rows:
        return f"{u} has two rows in one step"
    if c != request.computed:
        return f"{u} computes from {c}; {request.computed} tokens are computed or scheduled"
    if not 0 <= d <= min(config.drafts, q - 1):
        return f"{u} computes {q} tokens of which {d} are drafts; {config.drafts} are allowed"
    if c + q - d > request.known:
        if not (config.async_scheduling and q == d + 1):
            return (
                f"{u} computes {c} to {c + q - d} without drafts, but only {request.known} tokens are known"
            )
    elif d and c + q - d < request.known:
        return f"{u} drafts after position {c + q - d}, but {request.known} tokens are known"
    if c + q >= request.known and request.flying and step < view.sampled_in.get(u, -config.pp) + config.pp:
        return (
            f"{u} samples in step {step}; the tokens of step {view.sampled_in[u]} are not at the "
            f"first stage yet"
        )
    used = sum(tokens for _, tokens, _ in view.rows.values()) + q
    if used > config.step_tokens:
        return f"the step computes {used} tokens, more than {config.step_tokens}"
    for g in view.mamba_groups:
        running = align.running_column(c, q, config.groups[g].block_tokens)
        cols = request.cols[g]
        lacking = [col for col in range(running, running + d + 1) if col >= len(cols) or not cols[col]]
        if lacking:
            return f"{u} computes {c} to {c + q}: group {config.groups[g].name} lacks state columns {lacking}"
    return None


def _preempt(view: SchedulerView, question: Question, u: UserId) -> str | None:
    status = view.book.requests[u].status
    if question[0] == "schedule":
        landed = status is Status.LOADING and u not in {
            k.uid for k in view.transfers.values() if k.way == "load"
        }
        good = landed or (status is Status.RUNNING and u not in view.rows)
    else:  # a load failed
        good = status is Status.LOADING
    return None if good else f"{u} is {status} and is preempted"


def _tokens(
    view: SchedulerView, question: Question, u: UserId, step: int, new: tuple[int, ...], computed: int
) -> str | None:
    output: Output = question[1]
    request = view.book.requests[u]
    if step != output.step or step not in request.flying:
        return f"no output of step {step} for {u} is due"
    sampled = dict(output.tokens)[u]
    left = request.prompt + view.outputs[u] - request.known
    kept = () if request.status is Status.DONE else sampled[:left]
    if new != kept:
        return f"{u} is given {new}; the step sampled {sampled} and {left} tokens are still asked for"
    rejected = request.flying[step][2] + 1 - len(sampled) if sampled else 0
    alive = request.status is Status.RUNNING
    want = request.computed - rejected if alive else request.computed
    return None if computed == want else f"{u} has computed {want} tokens after the output, not {computed}"


def _finish(view: SchedulerView, question: Question, u: UserId, why: str) -> str | None:
    request = view.book.requests[u]
    if request.status is Status.DONE:
        return f"{u} finishes twice"
    if question[0] == "on_abort":
        return None if u == question[1] else f"{u} finishes; {question[1]} was aborted"
    if request.known != request.prompt + view.outputs[u]:
        return f"{u} finishes with {request.known - request.prompt} of {view.outputs[u]} tokens"
    return None


def _job(
    view: SchedulerView, question: Question, j: int, way: str, u: UserId,
    chunks: tuple[tuple[Key, int, tuple[int, ...]], ...],
) -> str | None:  # fmt: skip
    if u not in view.book.requests:
        return f"job {j} is for {u}, which is gone"
    config, request = view.config, view.book.requests[u]
    per = config.blocks_per_chunk
    for (g, n, prefix), place, subs in chunks:
        group = config.groups[g]
        what = f"{u} {way}s chunk {(group.name, n)}"
        if (
            n % (per * group.block_tokens)
            or n > request.known
            or prefix != request.line[n]
            or len(subs) != per
        ):
            return f"{what} under a key that is not one of its prefixes"
        entry = view.book.tier.get((g, n, prefix))
        if way == "store":
            if entry is None or entry.place != place or entry.state != "writing":
                return f"{what} at place {place}, which the tier does not hold for it"
            if n > request.computed and group.kind is not Kind.MAMBA:
                return f"{what}, but only {request.computed} tokens are computed"
        for i, block in enumerate(subs):
            col = n // group.block_tokens - per + i
            own = request.cols[g][col] if 0 <= col < len(request.cols[g]) else NULL
            if way == "load":
                if block and (own != block or block not in view.fresh):
                    return f"{what} into block {block}, which is not a fresh column {col}"
            elif group.kind is not Kind.MAMBA and (not block or own != block):
                return f"{what} from block {block}; column {col} is block {own}"
    return None


def _tier(
    view: SchedulerView, question: Question, g: int, n: int, prefix: int, place: int, state: str
) -> str | None:
    key = (g, n, prefix)
    entry = view.book.tier.get(key)
    if state == "writing" and entry is not None:
        return f"chunk {key} is written anew at place {place}; place {entry.place} holds it"
    if state == "ready":
        if question[0] != "on_report":
            return f"chunk {key} becomes ready without a report"
        known = view.jobs.get(question[1])
        done = question[1] not in view.book.core.jobs
        if known is None or known.failed or known.stale or known.way != "store" or not done:
            return f"chunk {key} becomes ready; transfer {question[1]} has not stored it on every rank"
        if entry is None or entry.place != place or all(k != key for k, _, _ in known.chunks):
            return f"chunk {key} becomes ready at place {place}; transfer {question[1]} wrote another"
    elif state == "gone" and question[0] == "schedule" and entry is not None:
        stored = [p for j, k in view.jobs.items() if j in view.book.core.jobs for _, p, _ in k.chunks]
        if entry.place in stored:
            return f"chunk {key} is thrown out of place {entry.place} while a transfer uses it"
    return None


_CHECKS: dict[str, Callable[..., str | None]] = {
    "alloc": _alloc,
    "adopt": _adopt,
    "drop": _drop,
    "publish": _publish,
    "copy": _copy,
    "zero": _zero,
    "hit": _hit,
    "start": _start,
    "row": _row,
    "preempt": _preempt,
    "tokens": _tokens,
    "finish": _finish,
    "job": _job,
    "tier": _tier,
}


# -- the whole answer ------------------------------------------------------------------------------------
def _arrive_whole(view: SchedulerView, question: Question, decisions: list[Event]) -> str | None:
    arrival: Arrival = question[1]
    want = [("enqueue", arrival.uid, arrival.tokens)]
    taken = [event for event in decisions if event[0] != "evict"]
    return None if taken == want else f"an arrival is answered with {want}, not {taken}"


def _schedule_whole(view: SchedulerView, question: Question, decisions: list[Event]) -> str | None:
    steps = [event for event in decisions if event[0] == "step"]
    if len(steps) != 1 or decisions[-1] != steps[0]:
        return "a schedule ends with its one step"
    late = [u for u, (c, q, _) in view.rows.items() if view.book.requests[u].flying.get(steps[0][1]) is None]
    if late:
        return f"step {steps[0][1]} does not carry the row of {late[0]}"
    loads = {event[3] for event in decisions if event[:1] == ("job",) and event[2] == "load"}
    for event in decisions:
        if event[0] == "hit" and (event[3] > event[2]) is not (event[1] in loads):
            return (
                f"{event[1]} is admitted with {event[2]} then {event[3]} tokens; loads are created "
                f"for {sorted(loads)}"
            )
        if event[0] == "hit" and event[1] in loads:
            problem = _lacks_columns(view, event[1], event[3])
            if problem:
                return problem
    batch = [r.uid for r in view.book.requests.values() if r.status is Status.RUNNING]
    if len(batch) > view.config.slots:
        return f"{len(batch)} requests run in {view.config.slots} slots"
    return _keys_follow_copies(view, decisions) or next(
        filter(None, map(partial(_overwrites, view), view.rows)), None
    )


def _lacks_columns(view: SchedulerView, u: UserId, total: int) -> str | None:
    """Whether a hit claims tokens for which the request holds no block that it will read."""
    request = view.book.requests[u]
    computed = min(total, request.known - 1)
    for g, group in enumerate(view.config.groups):
        last = -(-computed // group.block_tokens)
        first = last - 1 if group.kind is Kind.MAMBA else read_from(group, computed) // group.block_tokens
        cols = request.cols[g]
        lacking = [col for col in range(first, last) if col >= len(cols) or not cols[col]]
        if lacking:
            return f"{u} hits {total} tokens and holds no columns {lacking} of group {group.name}"
    return None


def _keys_follow_copies(view: SchedulerView, decisions: list[Event]) -> str | None:
    """A key goes to a copy only if the copied block carried it; nothing is published beyond what is
    scheduled."""
    for event in decisions:
        if event[0] == "publish" and event[3] in view.book.requests[event[1]].retained:
            source = view.copied.get(event[3], NULL)
            if view.evicted.get(source, view.book.core.key.get(source)) != (event[2], event[4], event[5]):
                return f"{event[1]} publishes block {event[3]}, which is no copy of a block under that key"
        elif event[0] == "publish" and event[4] > view.book.requests[event[1]].computed:
            return (
                f"{event[1]} publishes {event[4]} tokens; {view.book.requests[event[1]].computed} are "
                f"scheduled"
            )
    return None


def _overwrites(view: SchedulerView, u: UserId) -> str | None:
    """Whether a row destroys what a key names, or writes where somebody else lives."""
    config, request = view.config, view.book.requests[u]
    c, q, d = view.rows[u]
    for g, group in enumerate(config.groups):
        block = group.block_tokens
        state = group.kind is Kind.MAMBA
        first = align.running_column(c, q, block) if state else c // block
        for col in range(first, first + d + 1 if state else (c + q - 1) // block + 1):
            held = request.cols[g][col] if col < len(request.cols[g]) else NULL
            if not held:
                continue  # judged as a column that is lacking
            key = cast("Key | None", view.book.core.key.get(held))
            others = (r for o, r in view.book.requests.items() if o != u)
            shared = any(held in r.cols[g] for r in others)
            if state and key and key[1] != c + q:
                return f"{u} overwrites block {held}, published as the state of {key[1]} tokens"
            if not state and shared and (key is None or key[1] < min(c + q, (col + 1) * block)):
                return (
                    f"{u} writes past the {key[1] if key else 0} published tokens of block {held}, "
                    f"which others hold"
                )
    return None


def _output_whole(view: SchedulerView, question: Question, decisions: list[Event]) -> str | None:
    output: Output = question[1]
    if [event for event in decisions if event[0] == "done"] != [("done", output.step)]:
        return f"the output of step {output.step} is processed once"
    left_out = [u for u in view.due if u not in view.crossed]
    if left_out:
        return f"the tokens of {left_out[0]} in step {output.step} are left out"
    for uid, _ in output.tokens:
        request = view.book.requests.get(uid)
        if (
            request
            and request.status is not Status.DONE
            and request.known >= request.prompt + view.outputs[uid]
        ):
            return f"{uid} has all its tokens and does not finish"
    return None


def _report_whole(view: SchedulerView, question: Question, decisions: list[Event]) -> str | None:
    reports = [event for event in decisions if event[0] == "unfence"]
    want = [("unfence", question[1], question[2])] if question[1] in view.jobs else []
    if reports != want:
        return f"the report of rank {question[2]} on transfer {question[1]} is taken as {reports}"
    if question[1] not in view.book.core.jobs:
        view.jobs.pop(question[1], None)
    return None


def _abort_whole(view: SchedulerView, question: Question, decisions: list[Event]) -> str | None:
    over = [event for event in decisions if event[0] == "finish"]
    return None if len(over) == 1 else f"{question[1]} was aborted and does not finish"


def _reset_whole(view: SchedulerView, question: Question, decisions: list[Event]) -> str | None:
    if view.book.core.key:
        return f"blocks {sorted(view.book.core.key)} keep their keys over a reset"
    if question[1] == "all":
        if view.book.tier:
            return f"host chunks {sorted(view.book.tier)} stay over a reset of the tier"
        view.jobs = {j: replace(k, stale=True) for j, k in view.jobs.items()}
    return None


_WHOLE: dict[str, Callable[[SchedulerView, Question, list[Event]], str | None]] = {
    "on_arrive": _arrive_whole,
    "schedule": _schedule_whole,
    "on_output": _output_whole,
    "on_report": _report_whole,
    "on_abort": _abort_whole,
    "on_reset": _reset_whole,
}
