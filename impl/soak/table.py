"""Where each fault is looked for, what counts as noticed, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from impl.inject import injectable
from impl.soak.runs import ITSELF, Task
from impl.soak.service import Outcome, together
from spec import handbook

CLEAR, PART = 4.0, 0.95  # a figure is lower if it is so by these standard errors, and below this part

LOOKED_FOR: dict[str, tuple[str, int]] = {
    "late-row-not-masked": ("churn", 4),
    "generation-of-one-bit": ("churn", 12),
    "abort-frees-load-targets": ("churn", 1),
    "reserve-undoes-the-split": ("pp4-sync", 1),
    "positional-store-of-states": ("pp4-sync", 1),
    "boundary-published-before-its-step": ("pp4-sync", 1),
    "zero-accepted": ("pp4-sync", 1),
    "counts-into-mutable-rows": ("v1", 1),
    "no-reset-for-a-new-life": ("v1", 1),
    "tail-not-copied-away": ("tails", 1),
    "tail-shared-by-its-hit": ("tails", 1),
    "fence-dropped-early": ("starved", 1),
    "no-fence": ("tier", 1),
    "visible-after-one-rank": ("tier", 1),
    "store-does-not-wait": ("tier", 1),
    "first-failure-frees": ("tier", 2),
    "blocks-reused-under-a-step": ("tier", 1),
    "preemption-does-not-flush": ("tier", 1),
    "loaded-requests-hold-on": ("starved", 1),
    "evicts-under-a-reader": ("tier", 1),
    "readers-never-return": ("tier", 1),
    "failed-load-is-served": ("tier", 1),
    "failed-store-keeps-its-key": ("tier", 1),
    "failed-load-is-an-assertion": ("tier", 1),
    "failed-load-stays-listed": ("starved", 1),
    "reset-reuses-places": ("tier", 2),
    "own-hit-evicted": ("tier", 1),
    "last-token-stored": ("tier", 1),
    "load-overtakes-a-step": ("fences", 1),
    "report-by-client-name": ("churn", 1),
    "output-by-client-name": ("churn", 1),
    "output-lost-after-preemption": ("tier", 1),
    "window-matched-before-the-drop": ("drop", 1),
    "prefix-published-ahead": ("tier", 1),
    "stored-chunk-never-listed": ("tier", 1),
    "abort-stores-without-blocks": ("tier", 1),
    "sources-from-the-front": ("tier", 1),
    "key-survives-reuse": ("tier", 1),
    "unregistered-blocks-kept": ("churn", 1),
    "faster-of-two-loads": ("tier", 1),
    "preempts-in-vain": ("tier", 1),
    "handed-off-block-reused": ("fences", 1),
    "oldest-store-flushed-only": ("fences", 1),
    "fence-released-twice": ("fences", 2),
    "whole-path-released": ("tails", 1),
    "hit-aligned-to-attention-only": ("pp4-sync", 1),
    "lookup-without-extra": ("window", 1),
    "store-mask-without-extra": ("window", 4),
    "store-mask-of-another-unit": ("window", 8),
    "retained-without-extra": ("pp4-sync", 2),
    "hit-of-one-group-for-all": ("window", 1),
    "freed-from-the-mirror": ("window", 1),
    "window-freed-on-optimistic-count": ("drop", 1),
    "store-mask-without-drop": ("drop", 1),
    "drop-applied-again": ("drop", 1),
}
"""Where a fault is looked for if not in the main load, and in how many times the usual requests: its own
geometry, or what it takes to happen, is not in the main load."""

UNSEEN: dict[str, str] = {
    "zero-accepted": "the forward keeps its offset within the row: a count of zero reads what one reads",
    "attention-not-clipped": "nobody here reads the table that is handed over at the end of a request",
    "preempted-table-handed-over": "nobody here reads the table that is handed over at the end of a request",
    "states-clipped-too": "nobody here reads the table that is handed over at the end of a request",
    "window-of-an-unknown-kind": "no load has chunked attention",
    "split-below-last-checkpoint": "no load drops the tail of a hit beside recurrent groups",
}
"""Faults that no load here shows, and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a fault, or a reference of its load."""

    name: str  # "reference", or the fault
    did: str
    whole: Outcome
    without: Outcome  # the reference of the same load and design
    symptoms: tuple[str, ...]  # beside requests that differ
    complete: bool  # all of its runs, and of the reference's

    @property
    def shows(self) -> bool:
        """Whether the fault was noticed."""
        return bool(self.whole.differing or self.symptoms) and not self.whole.error.startswith(ITSELF)


def lower(runs: Sequence[Outcome], reference: Sequence[Outcome], figure: Callable[[Outcome], float]) -> bool:
    """Whether a figure of a fault's runs is lower than the reference's, beyond what chance does (negated:
    higher).

    The spread is that of the reference's runs; below three of them, or with runs cut short, nothing is
    said."""
    before, after = [figure(one) for one in reference], [figure(one) for one in runs]
    if len(before) < 3:
        return False
    error: float = statistics.stdev(before) * (1 / len(before) + 1 / len(after)) ** 0.5
    was, now = statistics.mean(before), statistics.mean(after)
    return bool(was - now > max(CLEAR * error, (1 - PART) * abs(was)))


def symptoms(runs: Sequence[Outcome], reference: Sequence[Outcome]) -> tuple[str, ...]:
    """What users or operators notice, beside other outputs."""
    whole, without = together(runs), together(reference)
    found = []
    if whole.error:
        found.append(f"engine error: {whole.error}")
    if whole.stuck:
        found.append(f"{whole.stuck} requests stuck")
    if whole.misled_drafts:
        found.append(f"the drafter read wrong history {whole.misled_drafts} times")
    if whole.held_blocks:
        found.append(f"{whole.held_blocks} blocks still held at the end")
    if whole.open_transfers:
        found.append(f"{whole.open_transfers} transfers or chunks still open at the end")
    if not (whole.error or whole.stuck or whole.stopped):
        if lower(runs, reference, lambda one: one.acceptance):
            found.append("shorter acceptance")
        if lower(runs, reference, lambda one: one.cached):
            found.append(f"prompt tokens in place {without.cached:.0%} -> {whole.cached:.0%}")
        if lower(runs, reference, lambda one: one.loaded):
            found.append(f"loaded a prompt token {without.loaded:.2f} -> {whole.loaded:.2f}")
        if lower(runs, reference, lambda one: -one.begun):
            found.append(f"a request is begun {without.begun:.1f} -> {whole.begun:.1f} times")
    return tuple(found)


def rows_of(tasks: Sequence[Task], found: dict[Task, Outcome]) -> list[Row]:
    """The table: references first, faults in the catalogue's order."""
    known, rows = injectable(), []
    groups: dict[tuple[str, str, str], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.load, task.fault, task.design), []).append(task)
    done = {key: [found[t] for t in group if t in found] for key, group in groups.items()}
    for (load, fault, design), runs in done.items():
        if not runs:
            continue
        beside = load, "", fault if fault and known[fault].base else design
        reference = done.get(beside, [])
        planned = len(groups[load, fault, design]) + len(groups.get(beside, ()))
        complete = len(runs) + len(reference) == planned and not any(r.stopped for r in (*runs, *reference))
        name, did = fault or "reference", known[fault].did if fault else ""
        if design:
            name, did = "reference", f"the base design of `{design}`: {known[design].design}"
        without = together(reference) if reference else Outcome(load, 0)
        rows.append(Row(name, did, together(runs), without, symptoms(runs, reference or runs), complete))
    return rows


def noticed(row: Row) -> str:
    """What was noticed beside other outputs, or why nothing was."""
    if row.name == "reference" or row.shows:
        return "; ".join(row.symptoms)
    if not row.complete:
        return "stopped before it was seen"
    return f"not seen: {UNSEEN.get(row.name, 'not in so many requests')}"


def line(row: Row) -> str:
    """One printed line."""
    one = row.whole
    length = f"{one.acceptance:.2f}"
    if row.name != "reference":
        length = f"{row.without.acceptance:.2f} -> {length}"
    return (
        f"{row.name:<36}{one.load:<10}{one.served:>7}{one.share:>9.1%}  {length:<14}"
        f"{one.seconds:>6.0f} s  {noticed(row)[:100]}{'' if row.complete else '  (stopped)'}"
    )


def markdown(rows: Sequence[Row], command: str, where: str, seconds: float, verdict: str) -> str:
    """The part of the document that a run records."""
    shown = sum(row.shows for row in rows if row.name != "reference")
    faults = sum(row.name != "reference" for row in rows)
    table = []
    for row in rows:
        one, reference = row.whole, row.name == "reference"
        table.append((
            "reference" if reference else f"`{row.name}`", row.did, one.load, f"{one.served:,}",
            f"{one.share:.1%}" if one.served else "-",
            f"{one.acceptance:.2f}" if reference else f"{row.without.acceptance:.2f} -> {one.acceptance:.2f}",
            noticed(row)[:160],
        ))  # fmt: skip
    served = sum(row.whole.served for row in rows)
    return (
        f"`{command}`\n\n"
        f"On {where}: {served:,} requests served in {seconds:.0f} s, "
        f"{shown} of {faults} faults show. Verdict: {verdict} (sampled).\n\n"
        + handbook.table(
            ("fault", "what it did", "load", "requests", "differing", "acceptance length", "other symptoms"),
            table,
        )
    )


def verdict_of(rows: Sequence[Row], stopped: bool) -> tuple[str, int]:
    """In words, and the exit code."""
    if any(not row.whole.clean for row in rows if row.name == "reference"):
        return "refuted: the reference is not clean", 1
    if any(row.whole.error.startswith(ITSELF) for row in rows):
        return f"undetermined: {ITSELF}", 3
    if stopped or any(not row.complete for row in rows):
        return "undetermined: stopped before the end", 3
    unseen = [r.name for r in rows if r.name != "reference" and not r.shows and r.name not in UNSEEN]
    if unseen:
        return f"undetermined: {', '.join(unseen)} not seen", 3
    tried = [r for r in rows if r.name != "reference"]
    if not any(row.shows for row in tried):
        named = (
            f"of the faults tried, no load can show any: {', '.join(dict.fromkeys(r.name for r in tried))}"
        )
        return f"holds: the reference is clean ({named if tried else 'no fault was tried'})", 0
    return "holds: the reference is clean, every fault tried that a load can show does", 0
