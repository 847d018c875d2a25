"""What the repository records of the known releases (``verdicts.json``), and whether an outcome is the
recorded one.

``matrix`` and ``check`` compare with it alike (:func:`compared`).  A recorded refutation is explained in
``docs/findings.md`` where a repair tells which finding it is: the recorded run survives with that repair
alone, in the release in question and in the newest one, which the findings are about.  All others are in the
table of ``docs/upstream.md``: mostly defects of older releases that were repaired upstream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impl.upstream.cases import Case
from impl.upstream.drive import Choices
from impl.upstream.releases import KNOWN
from spec import script

Plain = dict[str, Any]

VERDICTS = Path(__file__).with_name("verdicts.json")
HOLDS, REFUTED, UNDETERMINED = "holds", "refuted", "undetermined"
KERNEL = "kernel"  # stands for the rule in a remark about a kernel scenario

#: repair -> the finding that it repairs, a heading of docs/findings.md
FINDINGS = {
    "chunks_without_holes": "a-chunk-with-a-hole",
    "offers_still_held": "a-boundary-reused-in-the-pass-that-offers-it",
    "flush_before_overwriting": "the-v2-runner-flushes-after-it-overwrites",
    "publish_computed_boundaries": "a-boundary-offered-before-its-step-has-run",
    "padded_prompts_decode": "a-one-token-prompt-beside-a-decode",
    "reserve_keeps_progress": "a-prefill-that-never-goes-on",
    "counts_kept_while_left_out": "a-decode-that-one-step-leaves-out",
    "copies_counted": "the-smallest-pool-that-start-up-accepts",
    "lookup_within_hashes": "a-look-up-past-the-hashes",
    "tails_not_published_late": "a-tail-published-late",
    "second_reset_adds": "two-resets-of-the-tier",
    "stale_windows_rescanned": "a-finished-requests-last-segment",
    "stores_at_dropped_boundary": "windows-kept-where-no-resend-resumes",
    "window_looked_up_exactly": "a-window-one-token-past-whole-chunks",
    "single_group_looks_past": "one-group-drops-two-blocks",
    "boundaries_within_hashes": "a-window-kept-where-a-resend-has-no-hash",
    "decode_cadence": "open-upstream-and-found-again",
    "split_by_state_block": "open-upstream-and-found-again",
}
#: case that breaks in the newest release and has no repair -> its heading
UNREPAIRED = {"v1-async": "open-upstream-and-found-again"}


def recorded() -> Plain:
    """The verdicts that the repository records; empty before the first record."""
    if not VERDICTS.exists():
        return {}
    stored: Plain = json.loads(VERDICTS.read_text(encoding="utf-8"))
    return stored


def known(case: Case, release: str) -> list[Choices]:
    """The recorded runs of a case, tried before new ones: the release's own, and those of others within the
    case's limits (a run may have been reduced beyond them)."""
    record = recorded()
    own = (of_case(record, release, case.name) or {"refuted": {}})["refuted"].values()
    runs = [tuple(script.parse(line) for line in found["choices"]) for found in own]
    return [*runs, *(run for run in runs_of(case, record) if run not in runs)]


def runs_of(case: Case, made: Plain) -> list[Choices]:
    """The runs that refute a case in some release, within the case's limits."""
    runs = {
        tuple(found["choices"]): None
        for rows in made.values()
        for found in rows["cases"].get(case.name, {"refuted": {}})["refuted"].values()
    }
    told = [tuple(script.parse(line) for line in run) for run in runs]
    return [run for run in told if all(c[0] != "arrive" or c[3] >= case.limits.shortest_prompt for c in run)]


def of_case(record: Plain, release: str, case: str) -> Plain | None:
    """The recorded row of a case, if there is one."""
    row: Plain | None = record.get(release, {}).get("cases", {}).get(case)
    return row


def names(record: Plain, release: str) -> set[str]:
    """The cases and kernel scenarios that have a record."""
    rows = record.get(release, {})
    return {*rows.get("cases", {}), *rows.get("kernels", {})}


def holding(record: Plain, release: str) -> set[str]:
    """The cases that hold in a release."""
    return {name for name, row in record.get(release, {}).get("cases", {}).items() if row["verdict"] == HOLDS}


def repairs_of(record: Plain, release: str, case: str, rule: str) -> tuple[str, ...]:
    """The repairs with any one of which the recorded run of a refutation survives."""
    row = of_case(record, release, case) or {"refuted": {}}
    return tuple(row["refuted"].get(rule, {}).get("survives", ()))


def place(record: Plain, release: str, case: str, rule: str) -> str:
    """Where a recorded refutation is explained."""
    here = repairs_of(record, release, case, rule)
    headings = [FINDINGS[one] for one in repairs_of(record, KNOWN[-1], case, rule) if one in here]
    if release == KNOWN[-1] and case in UNREPAIRED:
        headings.append(UNREPAIRED[case])
    return " or ".join(f"docs/findings.md#{name}" for name in dict.fromkeys(headings)) or "docs/upstream.md"


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing about a case's outcome, beside the record."""

    case: str
    text: str
    same: bool = False  # as recorded
    code: int = 0  # exit code that it calls for where an outcome like the recorded one is expected
    rule: str = ""  # that is refuted now


def compared(record: Plain, release: str, case: str, row: Plain, *, edited: bool = False) -> list[Remark]:
    """A case's outcome beside the recorded one; never empty.

    What is refuted and not recorded calls for 1, what is undetermined and recorded otherwise for 3.  A
    recorded refutation that is not found again calls for 1 in the release itself, for the record and this
    package then disagree, and for nothing in an ``edited`` copy of it: that may be a repair.  An edit may
    also lead runs onto another defect of an older release, where several were repaired since: in a case that
    is recorded as refuted there a further rule is told, and calls for nothing.
    """
    return list(_compared(record, release, case, row, edited))


def kernel_compared(record: Plain, release: str, name: str, verdict: str, *, edited: bool = False) -> Remark:
    """A kernel scenario's outcome beside the recorded one, by the rules of :func:`compared`; one that has no
    record should hold."""
    row = record.get(release, {}).get("kernels", {}).get(name)
    before = row["verdict"] if row else None
    if verdict == before:
        where = ", docs/upstream.md" if verdict == REFUTED else ""
        return Remark(
            name, f"{verdict}, as recorded{where}", same=True, rule=KERNEL if verdict == REFUTED else ""
        )
    beside = f"recorded is {before}" if before else "no record of this scenario"
    if verdict == HOLDS:
        return Remark(name, f"holds, {beside}", code=0 if edited or not before else 1)
    return Remark(name, f"{verdict}, {beside}", code=1 if verdict == REFUTED else 3)


def _compared(record: Plain, release: str, case: str, row: Plain, edited: bool) -> Iterator[Remark]:
    before = of_case(record, release, case)
    broken = list(row["refuted"])
    was = [] if before is None else list(before["refuted"])
    for rule in broken:
        if rule in was:
            where = place(record, release, case, rule)
            yield Remark(case, f"{rule} refuted, as recorded, {where}", same=True, rule=rule)
        else:
            beside = "no record of this case" if before is None else "not recorded"
            further = edited and bool(was) and release != KNOWN[-1]
            yield Remark(case, f"{rule} refuted; {beside}", code=0 if further else 1, rule=rule)
    if row.get("stopped"):
        yield Remark(case, "stopped before all its runs", code=3)
        return
    gone = [rule for rule in was if rule not in broken]
    for rule in gone:
        text = f"the recorded run no longer breaks {rule} ({place(record, release, case, rule)})"
        yield Remark(case, text, code=0 if edited else 1)
    if broken:
        return
    now = _said(row)
    if before is None:
        yield Remark(
            case,
            f"{now}; no record of this case",
            code=3 if row["verdict"] == UNDETERMINED and not row["refused"] else 0,
        )
    elif now == _said(before):
        yield Remark(case, f"{now}, as recorded", same=True)
    elif not gone or row["verdict"] == UNDETERMINED:
        code = 3 if row["verdict"] == UNDETERMINED else 0
        yield Remark(case, f"{now}, recorded is {_said(before)}", code=code)


def _said(row: Plain) -> str:
    return "not given to this release" if row["refused"] else str(row["verdict"])
