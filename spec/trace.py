"""Trace files: a run as lines of JSON that can be checked, drawn and shortened.

``python -m spec.trace check FILE [--json FILE]``    replay the choices, recompute the rest, compare, judge
``python -m spec.trace render FILE --format text|mermaid [--all]``    a timeline
``python -m spec.trace shrink FILE -o OUT [--rule NAME]``    fewer choices that break the same invariant
``python -m spec.trace schema``    the table of events, as docs/traces.md has it

The first line is the header: schema version, policy, the whole configuration (as TOML, so that a trace
needs no other file), commit, note. Every other line is one event of :data:`spec.events.SCHEMA` with its
number ``at``.

A run is determined by configuration, policy and choices. So if the policy is known here
(``spec.policies``), every decision and effect is recomputed and compared with what was recorded. If it is
not known, the recorded decisions are applied to a book, one by one, and judged by all invariants that look
at decisions; what the memory held and what was sampled cannot be judged then.

Exit codes: 0 all holds, 1 an invariant broke or the recording differs, 2 bad input, 3 stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec import config as configs
from spec import reduce, render, script
from spec.chains import EMPTY, Chains
from spec.config import Config, ConfigError
from spec.events import (
    CHOICE,
    DECISION,
    EFFECT,
    FIELDS,
    MEANING,
    SCHEMA,
    Event,
    expected,
    from_record,
    to_record,
)
from spec.outputs import check_target, set_aside, write_json, write_whole
from spec.policies import POLICIES, PolicyNameError, resolve
from spec.policy import Answer, Arrival, Output, Program
from spec.rules import BY_NAME
from spec.usage import JSON_HELP, OneLineParser, command, one_line
from spec.world import Client, World

VERSION = 1
HEADER_FIELDS = ("schema", "policy", "config", "commit", "note")


class TraceError(ValueError):
    """A file that is not a trace; the message names the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: what determines a run, the choices excepted, and where it comes from."""

    policy: str
    config: Config
    commit: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A run as recorded."""

    header: Header
    events: tuple[Event, ...]

    @property
    def choices(self) -> tuple[Event, ...]:
        """The adversary's part."""
        return tuple(event for event in self.events if SCHEMA[event[0]][0] == CHOICE)


# -- writing ---------------------------------------------------------------------------------------------


def lines(header: Header, events: Iterable[Event]) -> Iterator[str]:
    """The lines of a trace file, each ending in a newline; equal runs give equal bytes."""
    first = {
        "schema": VERSION, "policy": header.policy, "config": configs.dump(header.config),
        "commit": header.commit, "note": header.note,
    }  # fmt: skip
    yield json.dumps(first, separators=(",", ":")) + "\n"
    for at, event in enumerate(events):
        yield json.dumps({"at": at, **to_record(event)}, separators=(",", ":")) + "\n"


def write(path: str | Path, header: Header, events: Iterable[Event]) -> None:
    """Write a trace file.  Raises ``OutputError``."""
    write_whole(path, "".join(lines(header, events)))


def write_run(
    path: str | Path, config: Config, policy: str, choices: Sequence[Event], *, note: str = ""
) -> World:
    """Replay choices under a named policy and write the run as a trace; the world it ended in.

    Raises ``PolicyNameError`` and ``OutputError``."""
    world = reduce.replay(config, resolve(policy), choices, record=True)
    write(path, Header(policy, config, commit(), note), world.events)
    return world


def commit() -> str | None:
    """The commit of this working tree, with ``+`` if the model's files differ from it; None if unknown."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


# -- reading ---------------------------------------------------------------------------------------------


def read(path: str | Path) -> Trace:
    """Read a trace file.  Raises :class:`TraceError`, one line that begins with the path."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is not UTF-8 text") from None
    try:
        return parse(text)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def parse(text: str) -> Trace:
    """Read a trace from text.  Raises :class:`TraceError` with the line's number and what was expected."""
    numbered = enumerate(text.splitlines(), start=1)
    _, first = next(numbered, (1, ""))
    try:
        header = _header(first)
    except ValueError as error:
        raise TraceError(f"line 1: {error}") from None
    events: list[Event] = []
    for number, line in numbered:
        try:
            record = _object(line)
            at = record.get("at")
            if at != len(events):
                raise ValueError(f"'at' is {at!r}; expected {len(events)}: a line is missing or out of place")
            event = from_record(record)
            if SCHEMA[event[0]][0] == CHOICE and any(type(v) is int and v < 0 for v in event):
                raise ValueError(f"a choice has a negative number: {event!r}; expected numbers from 0 on")
            events.append(event)
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from None
    return Trace(header, tuple(events))


def _object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg} at column {error.colno}); expected one object a line"
        ) from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"{line[:40]!r} is not an object; expected {{...}}")
    return record


def _header(line: str) -> Header:
    record = _object(line) if line.strip() else {}
    version = record.get("schema")
    if version is None:
        raise ValueError(f"no header; expected an object with the fields {', '.join(HEADER_FIELDS)}")
    if version != VERSION or type(version) is not int:
        raise ValueError(f"schema version {version!r}; this is a reader of version {VERSION}")
    for name in HEADER_FIELDS:
        value = record.get(name)
        if name != "schema" and not isinstance(value, str) and not (name == "commit" and value is None):
            raise ValueError(f"header field {name!r} is {value!r}; expected a string")
    surplus = [name for name in record if name not in HEADER_FIELDS]
    if surplus:
        raise ValueError(f"unknown header field {surplus[0]!r}; expected {', '.join(HEADER_FIELDS)}")
    try:
        config = configs.parse(record["config"])
    except ConfigError as error:
        raise ValueError(f"the configuration cannot be served: {error}") from None
    return Header(record["policy"], config, record["commit"], record["note"])


# -- checking --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a trace: at which event, which rule (or ``recording``), and both values."""

    at: int  # event number; its line is two further down
    rule: str
    mark: str  # "consequence" | "discipline" | "recording"
    text: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check; ``findings`` in the order in which they came up, empty if all holds."""

    recomputed: bool  # whether the policy is known and everything was computed again
    judged: int  # invariants whose antecedent was true at least once
    findings: tuple[Finding, ...]


def check(trace: Trace) -> Checked:
    """Recompute the run if the policy is known, else judge the recorded decisions."""
    if trace.header.policy in POLICIES:
        return _recompute(trace)
    return _judge_recorded(trace)


def _recompute(trace: Trace) -> Checked:
    """Make the recorded choices again and compare event by event."""
    world = World(trace.header.config, resolve(trace.header.policy), record=True)
    findings: list[Finding] = []
    compared = 0
    for at, choice in enumerate(trace.events):
        if SCHEMA[choice[0]][0] != CHOICE:
            continue
        problem = _choose(world, choice)
        if problem:
            findings.append(
                Finding(at, "recording", "recording", f"choice {script.line(choice)!r}: {problem}")
            )
            break
        compared = _compare(trace.events, world.events, compared, findings)
        if findings and findings[-1].mark == "recording":
            break
    else:
        if len(world.events) < len(trace.events):
            surplus = trace.events[len(world.events)]
            text = f"recorded {_show(surplus)}, but nothing more happens"
            findings.append(Finding(len(world.events), "recording", "recording", text))
    return Checked(True, sum(applied > 0 for _, applied in world.tally.values()), tuple(findings))


def _choose(world: World, choice: Event) -> str | None:
    """Make a recorded choice; why it could not be made, or None."""
    try:
        if world.choose(choice):
            return None
    except Exception as error:  # a file may hold anything: the reader is told, not shown a traceback
        return f"the replay stopped with {type(error).__name__}: {error}"
    return "the run ended before it" if world.verdict else "it is not possible in this state"


def _compare(
    recorded: Sequence[Event], computed: Sequence[Event], start: int, findings: list[Finding]
) -> int:
    """Compare the events from ``start`` on; broken invariants on the way are findings too."""
    for at in range(start, len(computed)):
        event = computed[at]
        got = recorded[at] if at < len(recorded) else None
        if got != event:
            text = f"recorded {_show(got) if got else 'nothing more'}, computed {_show(event)}"
            findings.append(Finding(at, "recording", "recording", text))
            return at
        if event[0] == "breach":
            findings.append(Finding(at, *event[1:]))
    return len(computed)


def _show(event: Event) -> str:
    return json.dumps(to_record(event), separators=(", ", ": "))


class Silent:
    """A policy that decides nothing: recorded decisions are applied from outside."""

    def __init__(self, config: Config, chains: Chains) -> None:
        """Any configuration will do."""

    def on_arrive(self, arrival: Arrival) -> Answer:
        return Answer()

    def schedule(self) -> Answer:
        return Answer()

    def worker_program(self, rank: int, message: Any) -> Program:
        return []

    def on_output(self, output: Output) -> Answer:
        return Answer()

    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        return Answer()

    def on_abort(self, uid: tuple[str, int]) -> Answer:
        return Answer()

    def on_reset(self, scope: str) -> Answer:
        return Answer()


#: judged at a decision, but by what the ranks' memory holds and what they sampled; or by prefixes that have
#: other numbers in the recording
NEEDS_RANKS = frozenset({"ready_chunk_exact", "output_exact", "hit_is_longest", "finished_is_cached"})


def _judge_recorded(trace: Trace) -> Checked:
    """Apply recorded decisions to a book and judge them."""
    world = World(trace.header.config, Silent, off=NEEDS_RANKS)
    findings: list[Finding] = []
    outputs: dict[str, int] = {}
    for at, event in enumerate(trace.events):
        before = (world.verdict, len(world.disciplines))
        try:
            _apply_recorded(world, event, outputs)
        except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            text = f"{_show(event)} cannot happen here ({type(error).__name__}: {error})"
            findings.append(Finding(at, "recording", "recording", text))
            break
        if event[0] == "breach":
            findings.append(Finding(at, event[1], event[2], f"{event[3]} (as recorded; not recomputed)"))
        for breach in world.disciplines[before[1] :]:
            findings.append(Finding(at, breach.rule, breach.kind, breach.text))
        if world.verdict:
            findings.append(Finding(at, world.verdict.rule, world.verdict.kind, world.verdict.text))
            break
    judged = sum(applied > 0 for name, (_, applied) in world.tally.items() if name not in NEEDS_RANKS)
    return Checked(False, judged, tuple(findings))


def _apply_recorded(world: World, event: Event, outputs: dict[str, int]) -> None:
    """One recorded event happens to the book."""
    kind = event[0]
    category = SCHEMA[kind][0]
    if category == CHOICE:
        world.check_state()
        world.choices += 1
        if kind == "arrive":
            outputs[event[1]] = event[4]
        elif kind == "reset":
            world.caches_reset(event[1])
    elif category == DECISION:
        if kind == "enqueue":
            _, uid, tokens = event
            line = [EMPTY]
            for token in tokens:
                line.append(world.chains.fold(line[-1], token))
            drafts = world.config.drafts
            world.clients[uid] = Client(uid, list(tokens), line, len(tokens), outputs.get(uid[0], 1), drafts)
        world.decide(event)
        if kind == "unfence" and event[1] not in world.book.core.jobs:
            world.transfers.pop(event[1], None)
    elif kind in ("take", "leave") and world.config.runner == "v1":
        return  # the v1 runner moves its rows, and moves are no events: who is in which cannot be followed
    elif kind == "take":
        world.slot_taken(world.ranks[event[1]], event[2], event[3])
    elif kind == "leave":
        world.slot_left(world.ranks[event[1]], event[2])


# -- the command -----------------------------------------------------------------------------------------


def summary(trace: Trace) -> str:
    """Policy, configuration, and how much of everything there is."""
    count = Counter(SCHEMA[event[0]][0] for event in trace.events)
    kinds = Counter(event[0] for event in trace.events)
    header = trace.header
    return (
        f"{render.heading(header.config, header.policy)}\n"
        f"schema {VERSION}, commit {header.commit or 'unknown'}{', ' + header.note if header.note else ''}\n"
        f"{len(trace.events)} events: {count[CHOICE]} choices, {count[DECISION]} decisions, "
        f"{count[EFFECT]} effects; "
        f"{kinds['enqueue']} requests, {kinds['step']} steps, {kinds['job']} transfers\n"
    )


def explain(trace: Trace, finding: Finding) -> str:
    """A finding for people: where, what, both values, and the rule's sentence."""
    at = min(finding.at, len(trace.events))
    before = [event for event in trace.events[: at + 1] if SCHEMA[event[0]][0] == CHOICE]
    choice = f" (choice {len(before)}, {script.line(before[-1])})" if before else ""
    text = f"event {finding.at}, line {finding.at + 2}{choice}: {finding.mark} {finding.rule}: {finding.text}"
    if finding.mark == "recording":
        text = f"event {finding.at}, line {finding.at + 2}{choice}: {finding.text}"
    rule = BY_NAME.get(finding.rule)
    return text + (f"\n  what must hold: {rule.sentence}\n  source: {rule.source}" if rule else "")


def as_json(trace: Trace, checked: Checked) -> dict[str, Any]:
    """The machine-readable outcome of a check."""
    return {
        "verdict": "refuted" if checked.findings else "holds",
        "policy": trace.header.policy,
        "config": trace.header.config.name,
        "recomputed": checked.recomputed,
        "events": len(trace.events),
        "choices": len(trace.choices),
        "findings": [
            {"at": f.at, "line": f.at + 2, "rule": f.rule, "mark": f.mark, "text": f.text}
            for f in checked.findings
        ],
    }


def _check(options: argparse.Namespace) -> int:
    check_target("--json", options.json)
    trace = read(options.file)
    if not trace.events:
        raise TraceError(f"{options.file}: has a header and no event: nothing to check")
    out = set_aside(options.json)
    checked = check(trace)
    sys.stdout.write(summary(trace))
    if checked.recomputed:
        print("policy known: every decision and effect was computed again and compared with the recording")
    else:
        print(
            f"policy {trace.header.policy!r} is not known here: its recorded decisions were judged; "
            "what memory held was not"
        )
    for finding in checked.findings:
        print(explain(trace, finding))
    if not checked.findings:
        print(f"all hold: {checked.judged} of {len(BY_NAME)} invariants had something to say")
    write_json(options.json, as_json(trace, checked), out)
    return 1 if checked.findings else 0


def _render(options: argparse.Namespace) -> int:
    trace = read(options.file)
    draw = render.text if options.format == "text" else render.mermaid
    sys.stdout.write(draw(trace.header.config, trace.header.policy, trace.events, everything=options.all))
    return 0


def schema_table() -> str:
    """The schema as Markdown: one row a kind of event, and what the short field names mean."""
    rows = ["| kind | category | fields | what happens |", "|---|---|---|---|"]
    for kind, (category, names, meaning) in SCHEMA.items():
        shown = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| `{kind}` | {category} | {shown} | {meaning} |")
    rows += ["", "| field | holds | meaning |", "|---|---|---|"]
    used = dict.fromkeys(name for _, names, _ in SCHEMA.values() for name in names)
    for name in used:
        if name in MEANING or name in FIELDS:
            words = expected(name).replace("|", "or")
            rows.append(f"| `{name}` | {words} | {MEANING.get(name, '')} |")
    rows += ["", "Every other field is an integer."]
    return "\n".join(rows) + "\n"


def _schema(options: argparse.Namespace) -> int:
    sys.stdout.write(schema_table())
    return 0


def _shrink(options: argparse.Namespace) -> int:
    check_target("--output", options.output)
    trace = read(options.file)
    header = trace.header
    policy = resolve(header.policy)
    world = reduce.replay(header.config, policy, trace.choices)
    broken = world.verdict or (world.disciplines[0] if world.disciplines else None)
    rule = options.rule or (broken.rule if broken else "")
    if not rule or not reduce.breaks(world, rule):
        what = f"{rule} does not break" if rule else "no invariant breaks"
        raise TraceError(f"{options.file}: nothing to shrink: replayed, {what}")
    choices = reduce.reduce(header.config, policy, trace.choices, rule)
    write_run(options.output, header.config, header.policy, choices, note=f"shrunk to {rule}")
    print(f"{len(trace.choices)} choices -> {len(choices)}, {rule} still breaks; written to {options.output}")
    for choice in choices:
        print("  " + script.line(choice))
    return 0


@command("spec.trace")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned."""
    parser = OneLineParser(prog="python -m spec.trace", description="Check, draw and shorten recorded runs.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("check", help="replay, recompute, compare and judge")
    one.add_argument("--json", metavar="FILE", help=JSON_HELP)
    one.set_defaults(run=_check)
    two = verbs.add_parser("render", help="draw a timeline")
    two.add_argument("--format", choices=("text", "mermaid"), default="text")
    two.add_argument("--all", action="store_true", help="also what every step does anyway")
    two.set_defaults(run=_render)
    three = verbs.add_parser("shrink", help="delete and simplify choices while the same invariant breaks")
    three.add_argument("-o", "--output", metavar="OUT", required=True)
    three.add_argument("--rule", metavar="NAME", help="the invariant to keep broken (default: the verdict's)")
    three.set_defaults(run=_shrink)
    four = verbs.add_parser("schema", help="print the table of events in Markdown")
    four.set_defaults(run=_schema)
    for verb in (one, two, three):
        verb.add_argument("file", metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (TraceError, PolicyNameError) as error:
        print(f"spec.trace: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
