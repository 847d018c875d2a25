"""Events in words: one sentence for what a reviewer wants to know, none for what every step does anyway.

A :class:`Narrator` reads events in order and yields :class:`Line` s, each in a *lane*: ``requests``,
``blocks``, ``transfers``, ``rank 0``, ``rank 1``, ..., or ``breach``. Neighbouring events that say the same
of several blocks become one sentence. Lines that are ``minor`` (table updates, gathers, zeroing, empty
steps) are for whoever asks for everything. The scenario files and the timelines are written with it, so it
must be stable: it looks at events alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from spec import script
from spec.config import Config
from spec.events import CHOICE, EFFECT, SCHEMA, Event
from spec.ops import UserId

REQUESTS, BLOCKS, TRANSFERS, BREACH = "requests", "blocks", "transfers", "breach"


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence in a lane."""

    lane: str
    text: str
    minor: bool = False


def who(uid: UserId) -> str:
    """A request incarnation: ``r1``, and ``r1 (life 2)`` when the id came back."""
    name, life = uid
    return name if life == 1 else f"{name} (life {life})"


def span(numbers: Sequence[int]) -> str:
    """Numbers with consecutive ones drawn together: ``3 5..9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else " ".join(map(str, r)) for r in runs)


def several(word: str, numbers: Sequence[int]) -> str:
    """``block 3``, ``blocks 3 4``, ``blocks 3..7``."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {span(numbers)}"


#: kinds whose neighbours are told together, and the fields that must agree
TOGETHER: dict[str, tuple[int, ...]] = {
    "alloc": (1, 2), "adopt": (1, 2), "drop": (1, 2), "publish": (1, 2), "look": (1, 2), "tier": (1, 5),
    "unfence": (1,), "evict": (), "zero": (), "copy": (), "row": (),
}  # fmt: skip


@dataclass(slots=True)
class Narrator:
    """Reads a run from its first event on."""

    config: Config
    rows: dict[int, list[Event]] = field(
        default_factory=dict
    )  # step -> its rows; 0: the step being scheduled
    computed: list[int] = field(default_factory=list)  # steps with rows, in order
    forwards: dict[int, int] = field(default_factory=dict)  # rank -> forwards so far
    jobs: dict[int, tuple[str, UserId, int]] = field(
        default_factory=dict
    )  # job -> way, whose, ranks to report

    def tell(self, events: Iterable[Event]) -> Iterator[Line]:
        """The lines of some events; calls continue one another."""
        for group in grouped(events):
            kind = group[0][0]
            if kind == "exec" and group[0][3] == "Begin":
                yield from self.transfers(group)
            elif kind == "exec":
                yield from self.operation(group)
            elif SCHEMA[kind][0] == CHOICE:
                yield Line(REQUESTS, script.line(group[0]), minor=True)
            else:
                yield from getattr(self, "_" + kind, _plain)(group)

    def group(self, g: int) -> str:
        """A cache group's name."""
        return self.config.groups[g].name if 0 <= g < len(self.config.groups) else f"group {g}"

    # -- ownership -------------------------------------------------------------------------------------
    def _columns(self, group: list[Event]) -> str:
        # A negative column is a reference outside the table: the other side of a copy-on-write.
        columns = "copy" if group[0][3] < 0 else span([e[3] for e in group])
        return f"{who(group[0][1])} {self.group(group[0][2])}[{columns}]"

    def _alloc(self, group: list[Event]) -> Iterator[Line]:
        yield Line(BLOCKS, f"{self._columns(group)} = fresh {several('block', [e[4] for e in group])}")

    def _adopt(self, group: list[Event]) -> Iterator[Line]:
        yield Line(BLOCKS, f"{self._columns(group)} = cached {several('block', [e[4] for e in group])}")

    def _drop(self, group: list[Event]) -> Iterator[Line]:
        group = sorted(group, key=lambda event: event[3])
        yield Line(BLOCKS, f"{self._columns(group)} gives up {several('block', [e[4] for e in group])}")

    def _move(self, group: list[Event]) -> Iterator[Line]:
        for _, uid, g, col, to, block in group:
            yield Line(BLOCKS, f"{who(uid)} {self.group(g)}[{col}] -> [{to}]: block {block} is relocated")

    def _publish(self, group: list[Event]) -> Iterator[Line]:
        tokens = ", ".join(str(e[4]) for e in group)
        blocks = several("block", [e[3] for e in group])
        yield Line(BLOCKS, f"{self.group(group[0][2])} {blocks} published as the prefix of {tokens} tokens")

    def _evict(self, group: list[Event]) -> Iterator[Line]:
        verb = "lose their keys" if len(group) > 1 else "loses its key"
        yield Line(BLOCKS, f"{several('block', [e[1] for e in group])} {verb}")

    def _copy(self, group: list[Event]) -> Iterator[Line]:
        for _, src, dst, g in group:
            yield Line(BLOCKS, f"{self.group(g)} block {src} is copied to {dst} on write")

    def _zero(self, group: list[Event]) -> Iterator[Line]:
        yield Line(BLOCKS, f"{several('block', [e[1] for e in group])} to be zeroed", minor=True)

    # -- requests and steps ----------------------------------------------------------------------------
    def _enqueue(self, group: list[Event]) -> Iterator[Line]:
        _, uid, tokens = group[0]
        yield Line(REQUESTS, f"{who(uid)} waits with {len(tokens)} token{'s' * (len(tokens) > 1)}")

    def _hit(self, group: list[Event]) -> Iterator[Line]:
        _, uid, local, total = group[0]
        if total > local:
            text = f"hits {total} tokens: {local} in the pool, {total - local} from the host"
        else:
            text = f"hits {local} tokens in the pool" if local else "finds no prefix cached"
        yield Line(REQUESTS, f"{who(uid)} {text}")

    def _defer(self, group: list[Event]) -> Iterator[Line]:
        yield Line(REQUESTS, f"{who(group[0][1])} is put off: {group[0][2]}")

    def _start(self, group: list[Event]) -> Iterator[Line]:
        yield Line(REQUESTS, f"{who(group[0][1])} runs from token {group[0][2]}")

    def _row(self, group: list[Event]) -> Iterator[Line]:
        self.rows.setdefault(0, []).extend(group)
        yield from ()

    def _step(self, group: list[Event]) -> Iterator[Line]:
        step, rows = group[0][1], self.rows.pop(0, [])
        if not rows:
            yield Line(REQUESTS, f"step {step} computes nothing", minor=True)
            return
        self.rows[step] = rows
        self.computed.append(step)
        yield Line(REQUESTS, f"step {step} computes {', '.join(map(_row_text, rows))}")

    def _preempt(self, group: list[Event]) -> Iterator[Line]:
        yield Line(REQUESTS, f"{who(group[0][1])} is preempted and starts over")

    def _tokens(self, group: list[Event]) -> Iterator[Line]:
        for _, uid, step, new, computed in group:
            got = f"gets {' '.join(map(str, new))}, {computed} computed" if new else "gets nothing"
            yield Line(REQUESTS, f"{who(uid)} {got} (step {step})", minor=not new)

    def _finish(self, group: list[Event]) -> Iterator[Line]:
        how = {"length": "has all its tokens", "abort": "is aborted"}.get(group[0][2], f"ends: {group[0][2]}")
        yield Line(REQUESTS, f"{who(group[0][1])} {how}")

    def _done(self, group: list[Event]) -> Iterator[Line]:
        yield Line(REQUESTS, f"step {group[0][1]} is processed", minor=True)

    def _handoff(self, group: list[Event]) -> Iterator[Line]:
        for _, uid, g, blocks in group:
            yield Line(
                BLOCKS, f"{who(uid)} hands its {self.group(g)} table to the connector: {span(blocks)}", True
            )

    # -- offload ---------------------------------------------------------------------------------------
    def _look(self, group: list[Event]) -> Iterator[Line]:
        chunks = several("chunk", [e[3] for e in group])
        yield Line(TRANSFERS, f"lookup for {who(group[0][1])}: {self.group(group[0][2])} {chunks} present")

    def _job(self, group: list[Event]) -> Iterator[Line]:
        for _, job, way, uid, chunks in group:
            self.jobs[job] = (way, uid, self.config.ranks)
            preposition = "from" if way == "store" else "into"
            parts: dict[int, tuple[list[int], list[int]]] = {}
            for key, _, subs in chunks:
                ends, blocks = parts.setdefault(key[0], ([], []))
                ends.append(key[1])
                blocks += [block for block in subs if block]
            told = [
                f"{self.group(g)} up to {', '.join(map(str, ends))} {preposition} {several('block', blocks)}"
                for g, (ends, blocks) in parts.items()
            ]
            yield Line(TRANSFERS, f"{self.job(job)} for {who(uid)}: {'; '.join(told)}")

    def job(self, job: int) -> str:
        """A transfer by direction and number."""
        return f"{self.jobs[job][0]} {job}" if job in self.jobs else f"transfer {job}"

    def _flush(self, group: list[Event]) -> Iterator[Line]:
        for _, job in group:
            yield Line(TRANSFERS, f"the step waits for {self.job(job)} before it overwrites")

    def _unfence(self, group: list[Event]) -> Iterator[Line]:
        job, ranks = group[0][1], [e[2] for e in group]
        everyone = len(ranks) == self.config.ranks > 1
        text = f"{'all ranks' if everyone else several('rank', ranks)} reported {self.job(job)}"
        if job in self.jobs:
            way, uid, left = self.jobs[job]
            left -= len(group)
            self.jobs[job] = (way, uid, left)
            text += "" if left else ", fences lifted"
        yield Line(TRANSFERS, text)

    def _tier(self, group: list[Event]) -> Iterator[Line]:
        _, g, _, _, _, state = group[0]
        tokens = ", ".join(str(e[2]) for e in group)
        words = {
            "ready": "can be loaded",
            "gone": "is gone",
            "writing": "is being written",
            "released": "was read",
        }
        minor = state in ("writing", "released")
        yield Line(TRANSFERS, f"host: {self.group(g)} up to {tokens} {words.get(state, state)}", minor=minor)

    # -- what ranks do ---------------------------------------------------------------------------------
    def transfers(self, group: list[Event]) -> Iterator[Line]:
        """Transfers that begin one after the other on one stream; those that end at once share a line."""
        lane = f"rank {group[0][1]}"
        whole: list[str] = []
        for at, event in enumerate(group):
            if event[0] != "begin":
                continue
            end = next((e for e in group[at + 1 : at + 3] if e[0] == "end" and e[2] == event[2]), None)
            if end and not end[4]:
                whole.append(self.job(event[2]))
                continue
            if whole:
                yield Line(lane, f"copies {', '.join(whole)}")
                whole = []
            yield Line(lane, f"{self.job(event[2])} begins")
            if end:
                yield Line(lane, f"{self.job(event[2])} ends, {end[4]} pages torn")
        if whole:
            yield Line(lane, f"copies {', '.join(whole)}")

    def operation(self, group: list[Event]) -> Iterator[Line]:
        """One executed operation with the effects that follow it."""
        rank, stream, name = int(group[0][1]), str(group[0][2]), str(group[0][3])
        lane = f"rank {rank}"
        effects = group[1:]
        told = False
        if name == "Forward":
            yield Line(lane, f"forward of step {self.forward_step(rank)} writes {self.written(effects)}")
            told = True
        elif name == "Draft":
            yield Line(lane, "the drafter re-reads its history" if effects else "drafter", minor=not effects)
            told = True
        for event in effects:
            for line in self.effect(lane, name, event):
                told = True
                yield line
        writes = [e for e in effects if e[0] == "write"]
        if writes and name != "Forward":
            what = {
                "zero": "zeroes", "copy": "copies pages to", "precopy": "carries states on to",
                "boundary": "puts boundary states into",
            }.get(writes[0][4], f"{name} writes")  # fmt: skip
            yield Line(lane, f"{what} {self.written(writes)}", minor=name == "Zero")
        elif not told:
            words = {
                "Wait": "has waited for a flushed store",
                "CopyCounts": "accepted counts land on the host",
            }
            where = "" if stream == "main" else f" on {stream}"
            yield Line(lane, words.get(name) or name + where, minor=name not in words)

    def effect(self, lane: str, name: str, event: Event) -> Iterator[Line]:
        """Effects that are sentences of their own."""
        kind = event[0]
        if kind == "take":
            yield Line(lane, f"{who(event[3])} takes slot {event[2]}")
        elif kind == "leave":
            yield Line(lane, f"slot {event[2]} is left")
        elif kind == "begin":
            yield Line(lane, f"{self.job(event[2])} begins")
        elif kind == "end":
            torn = f", {event[4]} pages torn" if event[4] else ""
            yield Line(lane, f"{self.job(event[2])} ends{torn}")
        elif kind == "sample":
            yield Line(
                lane, f"step {event[2]} verifies {event[3]} token{'s' * (event[3] > 1)} of {who(event[1])}"
            )
        elif kind == "read" and name == "Draft":
            yield Line(lane, f"reads {self.group(event[3])} of {who(event[2])} up to {event[4]}", minor=True)
        elif kind == "breach":
            yield from self._breach([event])

    def forward_step(self, rank: int) -> str:
        """The step of the rank's next forward: one for each step that computes something, in order."""
        number = self.forwards.get(rank, 0)
        self.forwards[rank] = number + 1
        return str(self.computed[number]) if number < len(self.computed) else "?"

    def written(self, effects: Iterable[Event]) -> str:
        """Blocks written, by group."""
        blocks: dict[int, dict[int, None]] = {}
        for event in effects:
            if event[0] == "write":
                blocks.setdefault(event[3], {})[event[2]] = None
        return ", ".join(f"{self.group(g)} {span(list(found))}" for g, found in blocks.items()) or "nothing"

    def _breach(self, group: list[Event]) -> Iterator[Line]:
        for _, rule, mark, text in group:
            yield Line(BREACH, f"{mark} {rule}: {text}")


def _row_text(row: Event) -> str:
    _, uid, c, q, drafts = row
    tokens = f"token {c}" if q == 1 else f"tokens {c}..{c + q - 1}"
    return f"{who(uid)} {tokens}" + (f" ({drafts} drafts)" if drafts > 1 else " (1 draft)" if drafts else "")


def _plain(group: list[Event]) -> Iterator[Line]:
    for event in group:
        yield Line(
            f"rank {event[1]}" if SCHEMA[event[0]][1][:1] == ("r",) else BLOCKS,
            " ".join(map(str, event)),
            True,
        )


def grouped(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Neighbours told together: an operation with its effects; decisions that differ in the block only."""
    group: list[Event] = []
    for event in events:
        if group and _belongs(group, event):
            group.append(event)
            continue
        if group:
            yield group
        group = [event]
    if group:
        yield group


def _belongs(group: list[Event], event: Event) -> bool:
    first, kind = group[0], str(event[0])
    if first[0] == "exec":
        if kind == "exec" and first[3] == "Begin" and event[:3] == first[:3]:
            return bool(event[3] == ("Begin" if group[-1][0] == "end" else "End"))
        return SCHEMA[kind][0] == EFFECT and kind != "exec" and (kind != "breach" or first[3] != "Begin")
    if kind != first[0] or kind not in TOGETHER:
        return False
    if kind in ("alloc", "adopt", "drop") and (first[3] < 0) != (event[3] < 0):
        return False
    return all(first[i] == event[i] for i in TOGETHER[kind])


def by_choice(events: Sequence[Event]) -> Iterator[tuple[int, Event | None, list[Event]]]:
    """Events split at choices: (number of the first event, the choice or None, what followed it)."""
    at = 0
    choice: Event | None = None
    rest: list[Event] = []
    for number, event in enumerate(events):
        if SCHEMA[event[0]][0] == CHOICE:
            if choice is not None or rest:
                yield at, choice, rest
            at, choice, rest = number, event, []
        else:
            rest.append(event)
    if choice is not None or rest:
        yield at, choice, rest
