"""The vocabulary of a run: choices, decisions and effects.

A run is determined by (configuration, policy, choices).

* **choices** are the adversary's: what arrives, how many drafts agree, which stream advances, which rank
  reports.  They name things by names that the adversary picked (``r1``) or by role (*the oldest unreported
  store of* ``r1``), never by counters, so that a run with choices deleted keeps its meaning.
* **decisions** are the policy's: each answer is a list of them, in the order in which they were taken.
* **effects** are the world's: what an operation did to memory when it ran.

An event is a tuple ``(kind, field, ...)``; :data:`SCHEMA` gives the category and the field names of each
kind, and :data:`FIELDS` what a field holds, for the trace file, the renderer and the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Event = tuple[Any, ...]

CHOICE, DECISION, EFFECT = "choice", "decision", "effect"

#: kind -> (category, field names, one line of meaning)
SCHEMA: dict[str, tuple[str, tuple[str, ...], str]] = {
    # -- choices ---------------------------------------------------------------------------------------
    "arrive": (
        CHOICE,
        ("name", "family", "prompt", "outputs"),
        "a client sends a request, under no live name",
    ),
    "accept": (CHOICE, ("name", "drafts"), "from now on this many leading drafts of the request are right"),
    "abort": (CHOICE, ("name",), "the client goes away"),
    "reset": (CHOICE, ("scope",), "prefix caches are cleared; 'local' keeps the host tier"),
    "schedule": (CHOICE, (), "the engine asks for the next step and hands it to every rank"),
    "output": (CHOICE, (), "the engine processes the oldest step's sampled tokens"),
    "run": (CHOICE, ("rank", "stream", "ops"), "a stream executes its next operations (0: until it blocks)"),
    "report": (CHOICE, ("name", "way", "rank"), "a rank reports its oldest finished, unreported transfer"),
    "fail": (CHOICE, ("name", "way", "rank"), "a rank reports that transfer as failed"),
    "work": (CHOICE, (), "ranks compute until they block, outputs are processed; transfers and reports wait"),
    "drain": (CHOICE, (), "everything in flight completes; nothing is scheduled"),
    "quiet": (CHOICE, (), "drains and schedules until nothing is left, or breaks a rule"),
    # -- decisions: ownership --------------------------------------------------------------------------
    "alloc": (DECISION, ("u", "g", "col", "b"), "a free block becomes the request's column"),
    "adopt": (DECISION, ("u", "g", "col", "b"), "a published block becomes the request's column (a hit)"),
    "move": (DECISION, ("u", "g", "col", "to", "b"), "a scratch block is relocated; its old column is null"),
    "drop": (DECISION, ("u", "g", "col", "b"), "the request gives its column up"),
    "publish": (DECISION, ("u", "g", "b", "n", "prefix"), "the block goes under the n-token prefix's key"),
    "evict": (DECISION, ("b",), "the block's key is forgotten"),
    "copy": (DECISION, ("src", "dst", "g"), "copy-on-write: src goes to dst before the step's forward"),
    "zero": (DECISION, ("b", "g"), "the step zeroes a fresh block before its forward"),
    # -- decisions: requests and steps -----------------------------------------------------------------
    "enqueue": (DECISION, ("u", "tokens"), "the request waits"),
    "hit": (DECISION, ("u", "local", "total"), "admission found this many tokens, locally and in all"),
    "defer": (DECISION, ("u", "why"), "admission is put off to a later step"),
    "start": (DECISION, ("u", "computed"), "the request runs, this many tokens being in place"),
    "row": (DECISION, ("u", "c", "q", "d"), "the step computes q tokens from position c, d of them drafts"),
    "preempt": (DECISION, ("u",), "the request goes back to waiting and starts over"),
    "tokens": (DECISION, ("u", "step", "new", "computed"), "an output is processed"),
    "finish": (DECISION, ("u", "why"), "the request has all its tokens, or was aborted"),
    "step": (DECISION, ("step",), "the step is handed to the ranks"),
    "done": (DECISION, ("step",), "the step's output has been processed"),
    # -- decisions: offload ----------------------------------------------------------------------------
    "look": (DECISION, ("u", "g", "chunk", "n", "prefix"), "lookup saw this chunk present"),
    "job": (DECISION, ("j", "way", "u", "chunks"), "a transfer is created; it fences its device blocks"),
    "flush": (DECISION, ("j",), "the step waits for this store before it overwrites"),
    "unfence": (DECISION, ("j", "r"), "a rank's report was taken; the last one clears the fences"),
    "handoff": (DECISION, ("u", "g", "blocks"), "a finished request's block table goes to the connector"),
    "tier": (
        DECISION,
        ("g", "n", "prefix", "place", "state"),
        "a host chunk: writing, ready, released by a reader, gone",
    ),
    # -- effects ---------------------------------------------------------------------------------------
    "take": (EFFECT, ("r", "s", "u"), "a request enters a batch slot"),
    "leave": (EFFECT, ("r", "s"), "a request leaves its batch slot"),
    "exec": (EFFECT, ("r", "stream", "op"), "an operation ran"),
    "write": (EFFECT, ("r", "b", "g", "what"), "bytes were written"),
    "read": (EFFECT, ("r", "u", "g", "upto"), "a forward read the request's history"),
    "begin": (EFFECT, ("r", "j", "way"), "a transfer took its snapshot; its targets are torn"),
    "end": (EFFECT, ("r", "j", "way", "torn"), "a transfer delivered"),
    "sample": (EFFECT, ("u", "step", "accepted"), "the last stage verified this many tokens"),
    "breach": (EFFECT, ("rule", "mark", "text"), "an invariant broke: a consequence or a discipline"),
}


WAYS = ("store", "load")
STREAMS = ("main", "store", "load", "counts")


def _integer(value: Any) -> bool:
    return type(value) is int  # not isinstance: true is not a number here


def _integers(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_integer, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _user(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _text(value[0]) and _integer(value[1])


def _chunks(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(chunk, tuple)
        and len(chunk) == 3
        and _integers(chunk[0])
        and len(chunk[0]) == 3
        and _integer(chunk[1])
        and _integers(chunk[2])
        for chunk in value
    )


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in words), " or ".join(repr(word) for word in words)


_NAME = (_text, "a string")
_USER = (_user, "a request incarnation [name, lives]")
_TOKENS = (_integers, "a list of integers")
_NUMBER = (_integer, "an integer")

#: field name -> (test, what is expected); every other field is an integer
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": _NAME,
    "family": _NAME,
    "scope": _one_of("local", "all"),
    "stream": _one_of(*STREAMS),
    "way": _one_of(*WAYS),
    "u": _USER,
    "tokens": _TOKENS,
    "new": _TOKENS,
    "blocks": _TOKENS,
    "chunks": (_chunks, "a list of chunks [[group, tokens, prefix], place, [block, ...]]"),
    "why": _NAME,
    "state": _one_of("writing", "ready", "released", "gone"),
    "op": _NAME,
    "what": _NAME,
    "rule": _NAME,
    "mark": _one_of("consequence", "discipline"),
    "text": _NAME,
}


#: short field names, for the documentation of the trace file
MEANING = {
    "u": "a request incarnation: the client's name, and how often it has been used",
    "g": "index of a cache group",
    "col": "logical column of a request's block table; negative: a reference outside the table",
    "b": "block id, 0 the null block",
    "n": "tokens that end there",
    "prefix": "number of a token prefix; equal prefixes, equal numbers",
    "c": "position of the first token computed",
    "q": "query tokens, drafts included",
    "d": "drafts among them",
    "j": "number of a transfer",
    "r": "rank of a worker",
    "s": "batch slot",
    "ops": "operations to run, 0: until the stream blocks",
    "family": "which tokens: a shared prefix `0` to `3`, or a client's name to continue its conversation",
    "place": "host chunk",
    "torn": "pages that were not delivered because source or target changed meanwhile",
    "upto": "tokens read",
}


def expected(field: str) -> str:
    """What a field of that name holds, in words."""
    return FIELDS.get(field, _NUMBER)[1]


def to_record(event: Event) -> dict[str, Any]:
    """One trace line's fields: kind first, then the fields by name."""
    kind = event[0]
    return {"kind": kind, **dict(zip(SCHEMA[kind][1], event[1:], strict=True))}


class NotADecision(Exception):
    """What a policy answered is none of the vocabulary's decisions; the message says what is expected.

    No ``ValueError``, so that it does not pass for an error of a policy."""


def check_decision(event: Any) -> None:
    """Raises :class:`NotADecision` unless this is a decision of :data:`SCHEMA` with its fields."""
    if not isinstance(event, tuple) or not event:
        raise NotADecision(f"a decision must be a tuple (kind, field, ...), got {event!r}")
    kind, names = event[0], SCHEMA[event[0]][1] if isinstance(event[0], str) and event[0] in SCHEMA else ()
    if not isinstance(kind, str) or kind not in SCHEMA or SCHEMA[kind][0] != DECISION:
        known = ", ".join(one for one, (category, *_) in SCHEMA.items() if category == DECISION)
        raise NotADecision(f"there is no decision {kind!r} in {event!r}; there are {known}")
    if len(event) - 1 != len(names):
        raise NotADecision(f"decision {event!r} must have the fields {', '.join(names)}")
    for name, value in zip(names, event[1:], strict=True):
        test, words = FIELDS.get(name, _NUMBER)
        if not test(value):
            words = words.replace("a list", "a tuple").translate(str.maketrans("[]", "()"))
            raise NotADecision(f"field {name!r} of decision {event!r} must be {words}, got {value!r}")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def from_record(record: dict[str, Any]) -> Event:
    """The event of a trace line.  Raises ``ValueError`` naming what was expected."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in SCHEMA:
        raise ValueError(f"unknown kind {kind!r}; expected one of {', '.join(SCHEMA)}")
    names = SCHEMA[kind][1]
    missing = [name for name in names if name not in record]
    surplus = [name for name in record if name not in (*names, "kind", "at")]
    if missing or surplus:
        wrong = f"lacks {missing[0]!r}" if missing else f"has an unknown field {surplus[0]!r}"
        raise ValueError(f"{kind!r} {wrong}; expected the fields {', '.join(names) or '(none)'}")
    event = (kind, *(_tuples(record[name]) for name in names))
    for name, value in zip(names, event[1:], strict=True):
        test, words = FIELDS.get(name, _NUMBER)
        if not test(value):
            raise ValueError(f"field {name!r} of {kind!r} is {record[name]!r}; expected {words}")
    return event
