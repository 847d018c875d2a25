"""``python -m impl.upstream matrix``: cases, kernels and mutants against releases, each cell from runs.

Known history must come out by itself (:data:`HISTORY`).  Every case is compared with what the repository
records (:mod:`impl.upstream.record`), whose runs are tried first; ``--record`` looks for everything afresh
and writes the record, with every reduced run, and the table into the documents.  ``--default`` keeps to the
default cases, without kernels and mutants: what every change is checked with.

Releases run side by side, a process for each processor.  What a stopped run has found stays in the cache
directory and the same command goes on from there (:class:`Journal`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from impl.upstream import cases, check, kernels
from impl.upstream.cases import Case
from impl.upstream.child import Child
from impl.upstream.drive import walked
from impl.upstream.env import Unavailable, cache_directory, prepared
from impl.upstream.patches import MUTANTS
from impl.upstream.policy import AdapterError, Release
from impl.upstream.record import (
    FINDINGS,
    HOLDS,
    REFUTED,
    UNDETERMINED,
    VERDICTS,
    compared,
    known,
    recorded,
    runs_of,
)
from impl.upstream.releases import KNOWN, counted, require_known
from spec import script
from spec.config import ConfigError
from spec.outputs import set_aside, write_json, write_whole
from spec.reduce import replay
from spec.world import Choice

DOCUMENT = Path(__file__).parents[2] / "docs" / "upstream.md"
BEGIN, END = "<!-- part: matrix -->", "<!-- end part -->"

#: case -> releases that must refute it; in all others of HISTORY_KNOWN it must hold
HISTORY = {
    "retained-window": ("0.30.0",),
    "late-rows": ("0.30.0", "0.31.0"),
    "resume-column": ("0.30.0", "0.31.0"),
    "split-divisor": KNOWN,
}
#: case -> a discipline that must be broken on the way of its refutation: the cause
CAUSE = {"late-rows": "late_kernel_reads_slot_rows"}
#: mutant -> case in which it bites
BITES = {"early_window_free": "window-async", "lost_touch": "attention", "key_one_token_early": "drafts"}
MUTANT_RUNS = 200


def kernel_rows(release: str) -> dict[str, tuple[str, str]]:
    """The release's own state-copy kernels in Triton's interpreter: row -> (verdict, what was seen)."""
    try:
        return {row.name: (row.verdict, row.seen) for row in kernels.rows(prepared(release))}
    except Unavailable as error:
        return dict.fromkeys(kernels.BY_NAME, (UNDETERMINED, str(error)))


def mutant_row(release: Release, mutant: str, seed: int, choices: int | None) -> dict[str, Any]:
    """Walk until the mutant is found; the reduced run."""
    case = cases.BY_NAME[BITES[mutant]]
    policy, config = release.changed(mutant), case.load()
    for number in range(MUTANT_RUNS):
        world, made = walked(config, policy, seed, number, choices or case.choices, case.limits)
        if world.verdict:
            found = check.Refutation(world.verdict.rule, world.verdict.text, made, ())
            short = check.reduced(config, policy, found)
            return {
                "case": case.name,
                "verdict": REFUTED,
                "runs": number + 1,
                "rule": short.rule,
                "text": short.text,
                "choices": check.lines(short.choices),
            }
    return {"case": case.name, "verdict": UNDETERMINED, "runs": MUTANT_RUNS}


@dataclass(slots=True)
class Journal:
    """What a run of the matrix has found of one release so far, kept on disk after every row.

    It is continued only by the same command on the same code (``key``); a finished matrix deletes it.
    """

    release: str
    key: str
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Its file."""
        return cache_directory() / "matrix" / f"{self.release}.json"

    def resume(self) -> Journal:
        """With the rows of an earlier run of the same key, if there was one."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self
        if stored.get("key") == self.key:
            self.rows = stored["rows"]
        return self

    def row(self, name: str, make: Callable[[], dict[str, Any]], shown: Callable[[Any], str]) -> Any:
        """A row, made unless it is there already, and a line of progress."""
        began, took = time.perf_counter(), "from the run before"
        if name not in self.rows:
            self.rows[name] = make()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".partial")
            unfinished.write_text(json.dumps({"key": self.key, "rows": self.rows}), encoding="utf-8")
            unfinished.replace(self.path)
            took = f"{time.perf_counter() - began:.0f} s"
        print(f"  {self.release} {name}: {shown(self.rows[name])} ({took})", flush=True)
        return self.rows[name]


def key_of(given: argparse.Namespace) -> str:
    """What a journal's rows depend on: the options, and every source file of the model and this package."""
    digest = hashlib.sha256(repr((given.runs, given.choices, given.seed, given.record)).encode())
    for folder in (Path(__file__).parent, Path(__file__).parents[2] / "spec"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def run_release(given: argparse.Namespace, release: str) -> dict[str, Any]:
    """All rows of one release."""
    journal = Journal(release, key_of(given)).resume()

    def run_case(case: Case) -> dict[str, Any]:
        told = () if given.record else known(case, release)
        options = {"runs": given.runs, "choices": given.choices, "seed": given.seed, "known": told}
        return check.plain(check.run_case(case, policy, **options))

    made: dict[str, Any] = {"cases": {}, "kernels": {}, "mutants": {}}
    with Child(prepared(release)) as child:
        policy = Release(child)
        for case in cases.CASES:
            if case.default or not given.default:
                made["cases"][case.name] = journal.row(case.name, partial(run_case, case), cell)
        for mutant in MUTANTS if release == max(given.releases) and not given.default else ():
            make = partial(mutant_row, policy, mutant, given.seed, given.choices)
            made["mutants"][mutant] = journal.row(mutant, make, lambda row: str(row["verdict"]))
    if not given.default:
        rows = journal.row("kernels", lambda: kernel_rows(release), lambda rows: f"{len(rows)} scenarios")
        made["kernels"] = {name: {"verdict": verdict, "seen": seen} for name, (verdict, seen) in rows.items()}
    return made


def leave_signals() -> None:
    """In a process of the pool: an interrupt is for the parent, which ends the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_releases(given: argparse.Namespace) -> dict[str, Any]:
    """All rows of all releases, side by side."""
    jobs = min(len(given.releases), os.cpu_count() or 1)
    with multiprocessing.get_context("fork").Pool(jobs, leave_signals) as pool:
        asked = {release: pool.apply_async(run_release, (given, release)) for release in given.releases}
        return {release: rows.get() for release, rows in asked.items()}


def exchange(made: dict[str, Any]) -> None:
    """Try what one release's search found on every other: a record then holds what a comparison will find."""
    for release, rows in made.items():
        with Child(prepared(release)) as child:
            for name, row in rows["cases"].items():
                case = cases.BY_NAME[name]
                if row["refused"]:
                    continue
                policy = Release(child).changed(*case.repairs)
                for run in runs_of(case, made):
                    world = replay(case.load(), policy, run)
                    broken = world.verdict
                    if broken is None or broken.rule in row["refuted"]:
                        continue
                    found = check.Refutation(
                        broken.rule, broken.text, run, tuple(breach.rule for breach in world.disciplines)
                    )
                    row["refuted"][broken.rule] = check.refutation(found)
                    row["verdict"] = REFUTED
                    print(f"  {release} {name}: {cell(row)} (by another release's run)", flush=True)


def survivors(made: dict[str, Any]) -> None:
    """Note beside every refutation the repairs with any one of which its run survives: they name the finding.

    A configuration that a repair refuses counts as survived; a release that a repair does not fit does not.
    """
    for release, rows in made.items():
        with Child(prepared(release)) as child:
            for name, row in rows["cases"].items():
                case = cases.BY_NAME[name]
                for rule, found in row["refuted"].items():
                    run = [script.parse(line) for line in found["choices"]]
                    found["survives"] = [
                        repair
                        for repair in FINDINGS
                        if repair not in case.repairs
                        and survives(case, Release(child).changed(*case.repairs, repair), run, rule)
                    ]


def survives(case: Case, policy: Release, run: Sequence[Choice], rule: str) -> bool:
    """Whether a run breaks the rule no more."""
    try:
        broken = replay(case.load(), policy, run).verdict
    except ConfigError:
        return True
    except AdapterError:
        return False
    return broken is None or broken.rule != rule


def cell(row: dict[str, Any]) -> str:
    """One cell: the verdict, and what refuted it in how many choices."""
    if row.get("refused"):
        return "not given"
    broken = [f"`{rule}` in {len(found['choices'])}" for rule, found in row.get("refuted", {}).items()]
    return f"refuted: {', '.join(broken)}" if broken else str(row["verdict"])


# -- expectations --------------------------------------------------------------------------------------------


def differences(made: dict[str, Any], recorded: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """What is not as expected, with its exit code: history first, then the record."""
    for release, rows in made.items():
        for name, refuted in HISTORY.items():
            row = rows["cases"].get(name)
            if row is None:
                continue
            want = REFUTED if release in refuted else HOLDS
            if row["verdict"] != want:
                yield f"{release} {name}: {row['verdict']}, history says {want}", code(row["verdict"])
            elif want == REFUTED and name in CAUSE:
                causes = [found["disciplines"] for found in row["refuted"].values()]
                if not any(CAUSE[name] in disciplines for disciplines in causes):
                    yield f"{release} {name}: refuted, but not by {CAUSE[name]}", 1
        for scenario in kernels.SCENARIOS:
            verdict = rows["kernels"].get(scenario.name, {}).get("verdict")
            want = REFUTED if release in HISTORY.get(scenario.history, ()) else HOLDS
            if verdict not in (None, want):
                yield f"{release} {scenario.name}: {verdict}, history says {want}", code(verdict)
        for mutant, row in rows["mutants"].items():
            if row["verdict"] != REFUTED:
                yield f"{release} with {mutant}: not found in {row['runs']} runs", 3
        for name, row in rows["cases"].items():
            for remark in compared(recorded, release, name, row) if recorded else ():
                if not remark.same:
                    yield f"{release} {name}: {remark.text}", remark.code or 1


def code(verdict: str) -> int:
    """Exit code of an unexpected verdict."""
    return 3 if verdict == UNDETERMINED else 1


def table(made: dict[str, Any]) -> Iterator[str]:
    """The matrix as Markdown."""
    releases = list(made)
    yield "| case | configuration | " + " | ".join(releases) + " |"
    yield "|---|---|" + "---|" * len(releases)
    for case in cases.CASES:
        if all(case.name in made[release]["cases"] for release in releases):
            marks = "".join(f", {name} repaired" for name in case.repairs)
            cells = [cell(made[release]["cases"][case.name]) for release in releases]
            yield f"| {case.name}: {case.why} | `{case.config}`{marks} | " + " | ".join(cells) + " |"
    for name in kernels.BY_NAME:
        rows = [made[release]["kernels"].get(name) for release in releases]
        if any(rows):
            cells = [f"{row['verdict']}: {row['seen']}" if row else "" for row in rows]
            yield f"| {name}: the release's own kernels, interpreted | | " + " | ".join(cells) + " |"
    for mutant in MUTANTS:
        rows = [made[release]["mutants"].get(mutant) for release in releases]
        if any(rows):
            found = [
                f"found in run {row['runs']}: `{row['rule']}`" if row and "rule" in row else ""
                for row in rows
            ]
            cells = [text or ("not found" if row else "") for text, row in zip(found, rows, strict=True)]
            yield f"| mutant {mutant} | `{BITES[mutant]}` | " + " | ".join(cells) + " |"


def write_document(made: dict[str, Any], command: str) -> None:
    """Put the table into the document's part ``matrix``.  Raises ``ValueError`` if it has none."""
    text = DOCUMENT.read_text(encoding="utf-8")
    first, last = text.find(BEGIN), text.find(END)
    if first < 0 or last < first:
        raise ValueError(f"{DOCUMENT} has no part {BEGIN} ... {END}")
    body = "\n".join(["", f"Made by `{command}`.", "", *table(made), ""])
    write_whole(DOCUMENT, text[: first + len(BEGIN)] + body + text[last:])


def run_matrix(given: argparse.Namespace) -> int:
    """The ``matrix`` command; the exit code.  Raises :class:`Unavailable` before anything runs."""
    out = set_aside(given.json)
    if given.record and given.default:
        raise Unavailable("--record writes the whole matrix: leave --default out")
    for release in given.releases:
        require_known(release)
        prepared(release)
    todo = [case for case in cases.CASES if case.default or not given.default]
    print(
        f"matrix: vllm {', '.join(given.releases)}; {counted(len(todo), 'case', 'cases')}; seed {given.seed}",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made = run_releases(given)
        if given.record:
            exchange(made)
            survivors(made)
    except KeyboardInterrupt:
        print("impl.upstream: stopped; the same command goes on from here", file=sys.stderr)
        return 3
    before = {} if given.record else recorded()
    print()
    print("\n".join(table(made)))
    found = list(differences(made, before))
    for text, _ in found:
        print(f"not as expected: {text}")
    write_json(given.json, made, out)
    if given.record:
        write_whole(VERDICTS, json.dumps(recorded() | made, indent=1) + "\n")
        write_document(recorded(), "python -m impl.upstream matrix --record")
    for release in given.releases:
        Journal(release, "").path.unlink(missing_ok=True)
    codes = {exit_code for _, exit_code in found}
    if not found:
        print("all as expected")
    return 1 if 1 in codes else 3 if codes else 0
