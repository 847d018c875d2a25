"""Timelines: a run drawn so that a reviewer sees in a minute what happened and where it went wrong.

Time runs downwards, one row a choice of the adversary. Lanes run side by side: requests, blocks as they
change hands, transfers, and one lane a rank (its streams together, in the order in which they ran). What
every step does anyway is left out, choices without visible effect are counted, and of a long run the
beginning is summed up: ``everything`` shows all of it. A broken invariant stands across all lanes, with its
sentence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spec import script
from spec.config import Config
from spec.events import Event
from spec.narrate import BLOCKS, BREACH, REQUESTS, TRANSFERS, Line, Narrator, by_choice
from spec.rules import BY_NAME

LONG_RUN = 40  # choices; of a longer run only the last ones are shown, unless everything is asked for
WIDTH = 150  # characters of a text timeline
NARROWEST = 18  # characters of a lane


@dataclass(frozen=True, slots=True)
class Row:
    """One choice, or several that are summed up, with what each lane shows."""

    label: str
    choice: str
    lines: tuple[Line, ...] = ()


@dataclass(slots=True)
class _Counted:
    """Choices that are not shown one by one."""

    first: int = 0
    choices: list[str] = field(default_factory=list)

    def add(self, number: int, choice: str) -> None:
        """One more."""
        self.first = self.first or number
        self.choices.append(choice)

    def row(self) -> Row:
        """The one row that stands for all of them."""
        kinds = dict.fromkeys(text.split()[0] for text in self.choices)
        last = self.first + len(self.choices) - 1
        label = f"{self.first}-{last}" if last > self.first else str(self.first)
        text = self.choices[0] if last == self.first else f"({', '.join(kinds)})"
        return Row(label, text)


def rows(config: Config, events: Sequence[Event], *, everything: bool = False) -> Iterator[Row]:
    """The timeline's rows, in order."""
    narrator = Narrator(config)
    parts = list(by_choice(events))
    hidden = 0 if everything or len(parts) <= LONG_RUN else len(parts) - LONG_RUN
    counted = _Counted()
    for number, (_, choice, rest) in enumerate(parts, start=1):
        text = script.line(choice) if choice else "(before any choice)"
        for part, some in enumerate(by_step(rest)):
            lines = tuple(line for line in narrator.tell(some) if everything or not line.minor)
            shown = lines if number > hidden else tuple(line for line in lines if line.lane == BREACH)
            if not shown and not everything:
                if not part:
                    counted.add(number, text)
                continue
            if counted.choices:
                yield counted.row()
                counted = _Counted()
            yield Row(str(number), text if not part else "...", shown)
    if counted.choices:
        yield counted.row()


def by_step(events: list[Event]) -> Iterator[list[Event]]:
    """One choice may schedule many steps (``quiet``): a row for each of them."""
    first, handed_over = 0, False
    for at, event in enumerate(events):
        if handed_over and event[0] != "breach":  # a rule that the step itself broke stays with it
            yield events[first:at]
            first, handed_over = at, False
        handed_over = handed_over or event[0] == "step"
    yield events[first:]


def heading(config: Config, policy: str) -> str:
    """What runs here, in one line."""
    groups = ", ".join(
        f"{g.name} ({g.kind} {g.block_tokens}"
        + (f", window {g.window_tokens}" if g.window_tokens else "")
        + (f" + {g.extra_tokens}" if g.extra_tokens else "")
        + ")"
        for g in config.groups
    )
    mode = "async" if config.async_scheduling else "sync"
    parts = [f"pp {config.pp}", f"tp {config.tp}", mode, f"runner {config.runner}", f"K {config.drafts}"]
    if config.offload:
        parts.append("offload")
    return f"{config.name}: {groups}; {', '.join(parts)}; policy {policy}"


# -- text ------------------------------------------------------------------------------------------------


def text(config: Config, policy: str, events: Sequence[Event], *, everything: bool = False) -> str:
    """The timeline as a table of plain text."""
    table = list(rows(config, events, everything=everything))
    used = {line.lane for row in table for line in row.lines}
    ranks = [f"rank {rank}" for rank in range(config.ranks)]
    lanes = [lane for lane in (REQUESTS, BLOCKS, TRANSFERS, *ranks) if lane in used]
    label = max((len(row.label) for row in table), default=1)
    choice = min(26, max((len(row.choice) for row in table), default=6))
    left = WIDTH - label - choice - 2
    width = max(NARROWEST, left // max(1, len(lanes)) - 2)
    widths = [label, choice, *(width for _ in lanes)]
    out = [heading(config, policy), ""]
    out += _cells(["#", "choice", *lanes], widths)
    out.append("  ".join("-" * w for w in widths))
    for row in table:
        cells = ["\n".join(line.text for line in row.lines if line.lane == lane) for lane in lanes]
        out += _cells([row.label, row.choice, *cells], widths)
        for line in row.lines:
            if line.lane == BREACH:
                out += _banner(line, sum(widths) + 2 * len(widths) - 2)
    if not any(line.lane == BREACH for row in table for line in row.lines):
        out += ["", "no invariant broke"]
    return "\n".join(line.rstrip() for line in out) + "\n"


def _cells(cells: list[str], widths: list[int]) -> list[str]:
    columns = []
    for cell, width in zip(cells, widths, strict=True):
        wrapped = []
        for paragraph in cell.split("\n"):
            wrapped += textwrap.wrap(paragraph, width, subsequent_indent="  ") or [""]
        columns.append(wrapped)
    height = max(map(len, columns))
    lines = []
    for at in range(height):
        parts = [
            (column[at] if at < len(column) else "").ljust(width)
            for column, width in zip(columns, widths, strict=True)
        ]
        lines.append("  ".join(parts))
    return lines


def _banner(line: Line, width: int) -> list[str]:
    rule = BY_NAME.get(line.text.split()[1].rstrip(":"))
    body = [line.text]
    if rule:
        body.append(f"what must hold: {rule.sentence}")
    wrapped = [part for entry in body for part in textwrap.wrap(entry, width - 4, subsequent_indent="  ")]
    return ["!" * width, *(f"! {part}" for part in wrapped), "!" * width]


# -- mermaid ---------------------------------------------------------------------------------------------


def mermaid(config: Config, policy: str, events: Sequence[Event], *, everything: bool = False) -> str:
    """The timeline as a Mermaid sequence diagram, which code hosts draw."""
    out = ["sequenceDiagram", f"    title {_safe(heading(config, policy))}"]
    out += ["    participant C as clients", "    participant S as scheduler and blocks"]
    out += [f"    participant R{rank} as rank {rank}" for rank in range(config.ranks)]
    if config.offload:
        out.append("    participant H as transfers")
    for row in rows(config, events, everything=everything):
        kind = row.choice.split()[0].strip("(,)")
        source, target = "C" if kind in ("arrive", "accept", "abort", "reset") else "S", "S"
        words = row.choice.split()
        if kind == "run":
            target = f"R{words[1]}"
        elif kind in ("report", "fail"):
            source, target = f"R{words[3]}", "S"
        out.append(f"    {source}->>{target}: {_safe(row.label + '. ' + row.choice)}")
        out += _notes(row.lines, config)
    return "\n".join(out) + "\n"


def _notes(lines: Sequence[Line], config: Config) -> Iterator[str]:
    """Neighbouring lines of one lane in one note."""
    places = {REQUESTS: "S", BLOCKS: "S", TRANSFERS: "H" if config.offload else "S"}
    at = 0
    while at < len(lines):
        lane = lines[at].lane
        place = places.get(lane, f"R{lane.removeprefix('rank ')}")
        if lane == BREACH:
            last = f"R{config.ranks - 1}"
            yield "    rect rgb(255, 200, 200)"
            yield f"    Note over C,{last}: {_safe(lines[at].text)}"
            yield "    end"
            at += 1
            continue
        texts = []
        while (
            at < len(lines)
            and lines[at].lane != BREACH
            and places.get(lines[at].lane, lines[at].lane) == places.get(lane, lane)
        ):
            texts.append(_safe(lines[at].text))
            at += 1
        yield f"    Note over {place}: {'<br/>'.join(texts)}"


def _safe(words: str) -> str:
    """Mermaid ends a statement at ``;`` and begins an entity at ``#``."""
    return words.replace("#", "#35;").replace(";", ",").replace("#35,", "#35;")
