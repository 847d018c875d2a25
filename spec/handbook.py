"""The generated parts of the documentation: ``python -m spec.handbook [--check] [--list]``.

A document under ``docs/`` (or the README) is written by hand but for its *parts*: what stands between
``<!-- part: NAME -->`` and ``<!-- end part -->`` is made by the function of that name in :data:`PARTS`.
Without options all parts are written anew; ``--check`` writes nothing and exits 1 if a part is stale.

Exit codes: 0 written, or fresh; 1 stale; 2 bad usage, or a document with a part that nobody makes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from spec import config, core, forward, ops, scenario, script, transfers
from spec.candidates import CANDIDATES, Candidate
from spec.config import Config
from spec.events import CHOICE, SCHEMA, Event
from spec.faults import CATALOGUE
from spec.faults.cases import CASES, Case
from spec.faults.fault import Fault
from spec.faults.hunt import hunt, show_run, stored
from spec.mechanisms import fence
from spec.narrate import who
from spec.ops import Op
from spec.outputs import write_whole
from spec.reduce import replay
from spec.reference import offload, tables
from spec.reference.decisions import Decisions
from spec.reference.scheduler import Reference
from spec.reference.worker import Worker
from spec.rule import Rule
from spec.rules import BY_NAME, RULES
from spec.trace import commit
from spec.usage import OneLineParser, command
from spec.walk import COMPOSED, WITNESSES, Report

ROOT = Path(__file__).parents[1]
PART = re.compile(r"(<!-- part: ([a-z-]+) -->\n)(.*?)(<!-- end part -->)", re.DOTALL)
BLOCK = 2  # the block that docs/one-block.md follows
LAST_LINES = 26  # of a counterexample in the README


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)


def code(names: Sequence[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in names)


def link(source: str) -> str:
    """A source as a reader follows it: web addresses by their number, functions as code."""
    told = []
    for one in source.split("; "):
        repository = re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", one)
        told.append(f"[{repository[1]} {repository[2]}]({one})" if repository else f"`{one}`")
    return ", ".join(told)


def where(thing: object) -> str:
    """``spec/core.py::Core.allocate``: where a function stands."""
    file = Path(inspect.getsourcefile(thing) or "").relative_to(ROOT)  # type: ignore[arg-type]
    return f"`{file}::{thing.__qualname__}`"  # type: ignore[attr-defined]


def sentence(thing: object) -> str:
    """The first paragraph of a docstring, in one line, without its sources."""
    text = inspect.getdoc(thing) or ""
    text = " ".join(text.split("\n\n")[0].split())
    return re.sub(r" \((?:[^()]*(?:https?://|``)[^()]*)\)", "", text).replace("``", "`")


# -- invariants ------------------------------------------------------------------------------------------


def judged(rule: Rule) -> str:
    """When a rule is judged, and on what."""
    if rule.core:
        return f"guard of the core, at {code(rule.core)}"
    if rule.on:
        return f"at {code(rule.on)}"
    if rule.parts:
        return f"on states, when {' or '.join(rule.parts)} changed"
    return "at that moment"


def invariants() -> str:
    """All rules, mechanism by mechanism."""
    parts = []
    for mechanism in dict.fromkeys(rule.mechanism for rule in RULES):
        rows = [
            (f"`{r.name}`", r.kind, r.sentence, r.antecedent, judged(r), link(r.source))
            for r in RULES
            if r.mechanism == mechanism
        ]
        head = ("name", "kind", "what must hold", "it says something when", "judged", "source")
        parts.append(f"\n### {mechanism}\n\n{table(head, rows)}")
    consequences = sum(rule.kind == "consequence" for rule in RULES)
    return (
        f"{len(RULES)} invariants: {consequences} consequences, {len(RULES) - consequences} disciplines.\n"
        + "".join(parts)
    )


def fate(candidate: Candidate) -> str:
    """What became of a candidate, in a word or two."""
    if candidate.rejected:
        return "rejected as it stands"
    kinds = {BY_NAME[name].kind for name in candidate.rules}
    return " and ".join(sorted(kinds)) or ("theorem" if candidate.theorems else "the world")


def covered_by(candidate: Candidate) -> str:
    """What covers it: consequences first, then disciplines, theorems, the world."""
    told = []
    for kind in ("consequence", "discipline"):
        names = [name for name in candidate.rules if BY_NAME[name].kind == kind]
        if names:
            told.append(f"{kind} {code(names)}")
    if candidate.theorems:
        told.append("theorem " + ", ".join(f"*{name}*" for name in candidate.theorems))
    if candidate.world:
        told.append(f"by construction: {candidate.world}")
    return "; ".join(told)


def candidates() -> str:
    """The table of candidates."""
    rows = [
        (c.name, c.says, fate(c), covered_by(c), "; ".join(filter(None, (c.rejected, c.note))))
        for c in CANDIDATES
    ]
    rejected = sum(bool(c.rejected) for c in CANDIDATES)
    safety = sum(c.name.startswith("S") for c in CANDIDATES)
    return (
        f"{len(CANDIDATES)} candidates, {safety} of safety and {len(CANDIDATES) - safety} of progress; "
        f"{rejected} rejected as they stand.\n\n"
        + table(("", "candidate", "fate", "covered by", "why rejected, or what is left open"), rows)
    )


# -- the model -------------------------------------------------------------------------------------------


def core_actions() -> str:
    """What the full machine does in terms of the core."""
    rows = []
    for kind, action in core.CORE_ACTION.items():
        category, _, meaning = SCHEMA[kind]
        names = [rule.name for rule in RULES if kind in rule.core]
        if kind in ("take", "leave"):
            names = ["slot_single_occupant"]
        rows.append((f"`{kind}`", category, meaning, f"`{action}`", code(names) or "-"))
    stutters = [kind for kind, (category, *_) in SCHEMA.items() if category != CHOICE]
    stutters = [kind for kind in stutters if kind not in core.CORE_ACTION]
    return (
        table(("event", "category", "what happens", "core action", "guards"), rows)
        + f"\nEvery other event is a stutter: {code(stutters)}.\n"
    )


def decisions() -> str:
    """Every decision that can be replaced, and the faults that replace it."""
    rows = []
    for field in fields(Decisions):
        default = getattr(Decisions(), field.name)
        said = (
            sentence(default) if callable(default) else f"the order of a worker's step: {', '.join(default)}"
        )
        by = [name for name, fault in CATALOGUE.items() if field.name in fault.change]
        rows.append((f"`{field.name}`", said, code(by) or "-"))
    return table(("decision", "what it says, and the right answer", "faults that replace it"), rows)


def operations() -> str:
    """What worker programs are made of."""
    rows = [
        (f"`{name}`", sentence(thing))
        for name, thing in vars(ops).items()
        if inspect.isclass(thing) and issubclass(thing, Op) and thing is not Op
    ]
    return table(("operation", "what it does"), rows)


def configurations() -> str:
    """The configurations that are walked."""
    rows = []
    for name, path in config.shipped().items():
        one = config.load(path)
        if path.parent.name != "models":
            rows.append((f"`{name}`" + (" (composed)" if name in COMPOSED else ""), one.description))
    return table(("configuration", "what it is for"), rows)


KEY_LINE = re.compile(r"    (\w+): (\w+)(?: = (\S+))?  # (.+)")


def configuration_keys() -> str:
    """Every key of a configuration: the fields of its dataclasses, with the comments beside them."""
    places = {
        field: (f"[{table}]", key) for table, keys in config._TABLES.items() for key, field in keys.items()
    }
    rows = []
    for owner, otherwise in ((Config, ""), (config.Group, "[[group]]")):
        for name, kind, default, meaning in KEY_LINE.findall(inspect.getsource(owner)):
            where, key = places.get(name, (otherwise, name)) if owner is Config else (otherwise, name)
            given = {"": "required", "True": "true", "False": "false"}.get(default, default.replace('"', ""))
            rows.append((where, f"`{key}`", config._TYPE_WORDS[kind], given, meaning))
    return table(("table", "key", "value", "default", "meaning"), sorted(rows, key=lambda row: row[0] != ""))


# -- one block -------------------------------------------------------------------------------------------

#: what happens to a block -> (who decides it, who carries it out)
STATIONS: dict[str, tuple[object, object]] = {
    "alloc": (Reference.allocate, core.Core.allocate),
    "adopt": (Reference.adopt, core.Core.adopt),
    "drop": (tables.free_behind, core.Core.release),
    "publish": (tables.publish_columns, core.Core.publish),
    "evict": (Reference.allocate, core.Core.evict),
    "zero": (Reference.finish_message, Worker.program),
    "zeroed": (Worker.program, ops.Zero.run),
    "job": (offload.store_positional, core.Core.create),
    "flush": (Reference.finish_message, core.Core.flush),
    "unfence": (offload.reported, core.Core.report),
    "cells": (Worker.compute, forward.put_cells),
    "state": (Worker.compute, forward.recur),
    "begin": (Worker.transfers, transfers.begin),
    "end": (Worker.transfers, transfers.end),
    "ready": (offload.settle, fence.ready_exact),
}


class Biography:
    """Everything that happens to one block of a run, in words."""

    def __init__(self, config: Config, block: int) -> None:
        self.config, self.block = config, block
        self.jobs: dict[int, str] = {}  # transfers that name it
        self.keys: set[tuple[int, int, int]] = set()  # chunks that it was stored as

    def group(self, g: int) -> str:
        """Name of a group."""
        return self.config.groups[g].name

    def tell(self, event: Event) -> tuple[str, str] | None:
        """(station, sentence) if the event concerns the block."""
        kind = event[0]
        if kind in ("alloc", "adopt", "drop") and event[4] == self.block:
            verb = {"alloc": "gets it fresh", "adopt": "holds it too: a hit", "drop": "gives it up"}[kind]
            return kind, f"{who(event[1])} {verb}, as `{self.group(event[2])}` column {event[3]}"
        if kind == "publish" and event[3] == self.block:
            return kind, f"it goes under the key of the first {event[4]} tokens, before its bytes exist"
        if kind == "evict" and event[1] == self.block:
            return kind, "its key is forgotten: it is about to be handed out again"
        if kind == "zero" and event[1] == self.block:
            return kind, "the step will zero it first: what it held before may not be read"
        if kind == "job" and any(self.block in subs for _, _, subs in event[4]):
            self.jobs[event[1]] = event[2]
            self.keys.update(key for key, _, subs in event[4] if self.block in subs)
            return kind, f"{event[2]} {event[1]} names it: fenced from now on"
        if kind in ("flush", "begin", "end", "unfence"):
            return self.transfer(event)
        if kind == "write" and event[2] == self.block:
            said = {"zero": "zeroes it", "cells": "writes its cells", "state": "writes a state into it"}
            station = "zeroed" if event[4] == "zero" else event[4]
            return station, f"rank {event[1]} {said[event[4]]}, seen as `{self.group(event[3])}`"
        if kind == "tier" and event[5] == "ready" and event[1:4] in self.keys:
            return "ready", "every rank's copy is checked against the key, and the host chunk is loadable"
        return None

    def transfer(self, event: Event) -> tuple[str, str] | None:
        """What a transfer that names the block does."""
        kind = event[0]
        job = event[1] if kind in ("flush", "unfence") else event[2]
        if job not in self.jobs:
            return None
        name = f"{self.jobs[job]} {job}"
        if kind == "flush":
            return kind, f"the step must wait for {name} before it overwrites anything"
        if kind == "unfence":
            return kind, f"rank {event[2]} reports {name}"
        done = {"begin": "reads it", "end": "has delivered"}[kind]
        return kind, f"rank {event[1]}: {name} {done}"


def one_block() -> str:
    """The run of the scenario ``one-block``, reduced to what happens to one block."""
    story = scenario.load(scenario.shipped()["one-block"])
    made = scenario.choices(story)
    world = replay(story.config, Reference, made, record=True)
    life = Biography(story.config, BLOCK)
    rows: list[tuple[str, str, str]] = []
    choice, count, told = "", 0, 0
    for event in world.events:
        if SCHEMA[event[0]][0] == CHOICE:
            choice, count = script.line(event), count + 1
            continue
        station = life.tell(event)
        if station is None:
            continue
        decided, done = STATIONS[station[0]]
        if station[0] == "drop" and not choice.startswith("schedule"):
            decided = Reference.drop_all
        first = f"{count}. `{choice}`" if count != told else ""
        rows.append((first, station[1], f"{where(decided)}, {where(done)}"))
        told = count
    return table(("choice", f"what happens to block {BLOCK}", "where in the code"), rows)


def one_block_config() -> str:
    """The configuration of that run."""
    return f"```toml\n{config.dump(scenario.load(scenario.shipped()['one-block']).config)}```\n"


# -- reports and faults ----------------------------------------------------------------------------------


def by_case() -> dict[str, list[Fault]]:
    """Which faults show a report."""
    shown: dict[str, list[Fault]] = {}
    for fault in CATALOGUE.values():
        for case in fault.cases:
            shown.setdefault(case, []).append(fault)
    return shown


def how(fault: Fault) -> str:
    """What refutes a fault."""
    by = {
        "decision": "a trace",
        "liveness": "a run that comes to no end",
        "configuration": "a configuration that is refused",
        "not a fault": "nothing: bounds in which it does no harm",
    }
    return by.get(fault.kind, f"theorem *{fault.theorem}*")


def cases_shown() -> str:
    """Reports that the catalogue shows."""
    shown = by_case()
    rows = [
        (link(case.url), case.mechanism, fault.did, f"`{fault.name}`", how(fault))
        for case in CASES
        for fault in shown.get(case.name, ())
    ]
    count = sum(case.name in shown for case in CASES)
    head = ("report", "mechanism", "what was done", "fault", "shown by")
    return f"{count} of {len(CASES)} reports.\n\n{table(head, rows)}"


def cases_missing() -> str:
    """Reports that it cannot show."""
    missing: list[Case] = [case for case in CASES if case.name not in by_case()]
    rows = [(link(case.url), case.mechanism, case.what, case.lacks) for case in missing]
    head = ("report", "mechanism", "what happened", "what the model lacks")
    return f"{len(missing)} of {len(CASES)} reports.\n\n{table(head, rows)}"


def refuted() -> str:
    """One fault of the catalogue, hunted and shrunk: what the README shows."""
    fault = CATALOGUE["row-by-batch-index"]
    run = stored(fault.name)
    if run:
        one, _, choices = run
    else:
        outcome = hunt(fault, states=100, hypothesis=False)  # the reducer's run: no long search
        one, choices = config.named(outcome.config), outcome.choices
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show_run(fault, one, choices)
    lines = [line.rstrip() for line in printed.getvalue().strip().splitlines()]
    head = next(i for i, line in enumerate(lines) if re.match(r"-+  -+  ", line)) + 1
    if len(lines) > head + LAST_LINES:
        lines[head:-LAST_LINES] = ["..."]
    return "```\n$ python -m spec.faults show row-by-batch-index\n...\n" + "\n".join(lines) + "\n```\n"


# -- the walk --------------------------------------------------------------------------------------------


def machine() -> str:
    """Processor, cores and Python of this machine."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return (
        f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )


def walked(report: Report, heading: str, verdict: str) -> str:
    """The table of a walk, for ``python -m spec.walk --markdown FILE``."""
    spent = time.process_time()
    choices = [(f"`{kind}`", SCHEMA[kind][2], f"{count:,}") for kind, count in report.fired.most_common()]
    rules = []
    for rule in RULES:
        no, yes = report.tally[rule.name]
        rules.append((f"`{rule.name}`", rule.antecedent, f"{yes:,}", f"{no:,}"))
    seen = [
        (f"`{name}`", WITNESSES.get(name, "not required"), f"{report.witnesses[name]:,}")
        for name in (*WITNESSES, *sorted(set(report.witnesses) - set(WITNESSES)))
    ]
    return (
        f"`{heading}`\n\n"
        f"On {machine()}, commit {commit() or 'unknown'}: {report.runs:,} runs, {report.choices:,} choices, "
        f"{report.events:,} events in {spent:.0f} s of processor time on one core: "
        f"{report.choices / spent:,.0f} choices and {report.events / spent:,.0f} events a second. "
        f"Verdict: {verdict} (sampled).\n\n"
        "### Choices\n\n" + table(("choice", "meaning", "made"), choices) + "\n### Antecedents\n\n"
        "How often each invariant was asked with a true antecedent, and how often with a false one. Those "
        "that have something to say whenever they are asked have 0 in the last column.\n\n"
        + table(("invariant", "says something when", "true", "false"), rules)
        + "\n### Witnesses\n\n"
        + table(("witness", "what happened", "reached"), seen)
    )


def record(path: str, part: str, words: str) -> None:
    """Put what a command has to say into a document's part.  Raises ``OSError``, ``ValueError``."""
    file = Path(path)
    text = file.read_text(encoding="utf-8")
    parts = [found for found in PART.finditer(text) if found[2] == part]
    if not parts:
        raise ValueError(f"{path}: has no '<!-- part: {part} -->' ... '<!-- end part -->'")
    begin, end = parts[0].span(3)
    write_whole(file, text[:begin] + words + text[end:])


def write_walk(path: str, report: Report, heading: str, verdict: str) -> None:
    """Put the table of a walk into a document's part ``walk``.  Raises ``OSError``, ``ValueError``."""
    record(path, "walk", walked(report, heading, verdict))


#: name of a part -> what makes it
PARTS: dict[str, Callable[[], str]] = {
    "invariants": invariants,
    "candidates": candidates,
    "core-actions": core_actions,
    "decisions": decisions,
    "operations": operations,
    "configuration-keys": configuration_keys,
    "configurations": configurations,
    "one-block": one_block,
    "one-block-config": one_block_config,
    "cases-shown": cases_shown,
    "cases-missing": cases_missing,
    "refuted": refuted,
}


#: parts that a command of its own records
RECORDED = {
    "walk": "python -m spec.walk --markdown docs/walk.md",
    "refine": "python -m impl.refine --all --runs 50 --markdown docs/refine.md",
    "inject": "python -m impl.inject --markdown docs/refine.md",
    "refine-gated": "python -m impl.refine --device cuda --order gated --runs 30 --markdown docs/refine.md",
    "refine-free": "python -m impl.refine --device cuda --order free --runs 30 --markdown docs/refine.md",
    "inject-gated": "python -m impl.inject --device cuda --order gated --markdown docs/refine.md",
    "soak": "python -m impl.soak --all --markdown docs/soak.md",
    "soak-cuda": "python -m impl.soak --all --device cuda --markdown docs/soak.md",
    "matrix": "python -m impl.upstream matrix --record",
}


def documents() -> Iterator[Path]:
    """The documents that have parts."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if "<!-- part: " in path.read_text(encoding="utf-8"):
            yield path


def renewed(text: str) -> str:
    """A document with its parts made anew.  Raises ``ValueError`` for a part that nobody makes."""

    def make(found: re.Match[str]) -> str:
        if found[2] in RECORDED:
            return found[0]
        if found[2] not in PARTS:
            raise ValueError(f"part {found[2]!r} is made by nobody; known: {', '.join(PARTS)}")
        return f"{found[1]}{PARTS[found[2]]()}{found[4]}"

    if text.count("<!-- part: ") != len(PART.findall(text)):
        raise ValueError("a part has no '<!-- end part -->'")
    return PART.sub(make, text)


@command("spec.handbook")
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = OneLineParser(
        prog="python -m spec.handbook", description="Write the generated parts of the documentation."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a part is stale")
    parser.add_argument("--list", action="store_true", help="list the parts and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for name, make in PARTS.items():
            print(f"{name:<20}{sentence(make)}")
        return 0
    if not (ROOT / "README.md").is_file():
        print(f"spec.handbook: {ROOT} is not the repository: run this in a clone", file=sys.stderr)
        return 2
    stale = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        try:
            new = renewed(text)
        except ValueError as error:
            print(f"spec.handbook: {path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        stale += new != text
        state = "fresh" if new == text else "stale" if options.check else "written"
        print(f"{path.relative_to(ROOT)}: {state}")
        if not options.check and new != text:
            write_whole(path, new)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
