"""`python -m spec.prove`: prove the arithmetic, refute the formulas that it replaces, and print the table."""

import argparse
import sys
import time
from pathlib import Path
from typing import TextIO

from spec.outputs import OutputError, check_target, set_aside, write_json, write_whole
from spec.ownfile import OwnFileError
from spec.prove import own, report
from spec.prove.engine import Outcome, Settings, TheoremResult, prove_all
from spec.prove.solvers import BACKENDS, MissingSolver, solver
from spec.prove.theorem import Theorem
from spec.prove.theorems import GROUPS, theorems_of
from spec.usage import BAD_INPUT, JSON_HELP, UNDETERMINED, OneLineParser, command, natural, one_line

DESCRIPTION = """\
Prove the coverage and alignment theorems for all integers in their domains, and refute the historic and
hypothetical formulas that they exclude.  With --file, judge formulas of your own: functions with the names
and parameters of shared ones (spec/arith/), by every claim that runs them.

exit codes: 0 everything as expected; 1 a theorem or lemma refuted; 3 undetermined, an expected refutation
that was not found included; 2 bad usage or a missing solver"""


def positive_seconds(text: str) -> float:
    """A limit in seconds; argparse reports anything else."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = OneLineParser(
        prog="python -m spec.prove",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "group", nargs="?", default="arith", choices=[*GROUPS, "arith"], help="arith (default) is all groups"
    )
    made.add_argument(
        "--file",
        metavar="FILE",
        help="a Python file with formulas of your own, to be judged in place of ours",
    )
    made.add_argument("--solver", default="z3", choices=list(BACKENDS), help="default z3")
    made.add_argument(
        "--timeout", type=positive_seconds, default=60.0, metavar="S", help="seconds a theorem (60)"
    )
    made.add_argument("--seed", type=natural, default=0, metavar="S", help="the solver's random seed (0)")
    made.add_argument("--json", metavar="FILE", help=JSON_HELP)
    made.add_argument("--smt2", type=_folder, metavar="DIR", help="write every obligation for another solver")
    made.add_argument("--markdown", metavar="FILE", help="write the table as documentation")
    made.add_argument("--list", action="store_true", help="list the theorems and prove nothing")
    return made


def _folder(text: str) -> Path:
    """The value of ``--smt2``; an empty one would be the folder that one happens to be in."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name; name a directory")
    return Path(text)


@command("spec.prove")
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = parser().parse_args(arguments)
    chosen = theorems_of(options.group)
    formulas: tuple[own.Formula, ...] = ()
    check_target("--json", options.json)
    check_target("--markdown", options.markdown)
    out = set_aside(options.json)
    try:
        if options.file is not None:
            if options.markdown is not None:
                raise OwnFileError("--markdown writes the shipped theorems: leave out --file")
            formulas = own.load(options.file)
            chosen = own.concerned(options.file, options.group, chosen, formulas)
        if options.list:
            for theorem in chosen:
                print(f"{theorem.number:>3}  {theorem.group:<9} {theorem.name}")
            return 0
        backend = solver(options.solver)
        _make(options.smt2)
        settings = Settings(backend, options.timeout, options.seed, options.smt2)
        return prove(chosen, formulas, settings, options, out)
    except (MissingSolver, OwnFileError) as problem:
        print(f"spec.prove: {one_line(problem)}", file=sys.stderr)
        return BAD_INPUT


def _make(folder: Path | None) -> None:
    """Make the folder of ``--smt2``.  Raises :class:`OutputError`."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        why = f"{problem.strerror}; name a directory that can be made"
        raise OutputError(f"--smt2 {folder}: {why}") from None


def prove(
    chosen: tuple[Theorem, ...],
    formulas: tuple[own.Formula, ...],
    settings: Settings,
    options: argparse.Namespace,
    out: TextIO,
) -> int:
    """Prove theorems with formulas of somebody's own in place, if any, and report; returns the exit code.

    Raises :class:`OwnFileError`."""
    began = time.perf_counter()
    told: list[TheoremResult] = []
    compared: list[own.Compared] = []

    def tell(result: TheoremResult) -> None:
        """Print a theorem as soon as it is decided."""
        told.append(result)
        print(report.theorem_text(result), end="\n\n", flush=True)

    stopped = False
    try:
        for one in formulas:
            compared.append(own.compared(one, settings))
            print(compared[-1].text(options.file), end="\n\n", flush=True)
        with own.in_their_places(formulas):
            outcome = prove_all(chosen, settings, tell)
            if formulas:
                own.tried(options.file, outcome.theorems)
    except KeyboardInterrupt:
        stopped, outcome = True, Outcome(tuple(told), ())
        print(f"stopped: {len(told)} of {len(chosen)} theorems were decided, and lemmas were not tried\n")
    code = report.exit_code(outcome) or (UNDETERMINED if stopped else 0)
    print(report.lemma_text(outcome))
    sys.stdout.write(report.contract_text(outcome))
    judged = {theorem.number for theorem in chosen}
    left_out = [one.number for one in theorems_of(options.group) if one.number not in judged]
    if formulas:
        print(own.verdicts(told, left_out))
    print(report.summary(outcome, options.solver, time.perf_counter() - began))
    found = report.as_json(outcome, options.group, options.solver, options.seed)
    found |= {"exit_code": code, "stopped": stopped}
    if options.file is not None:
        found |= {"file": options.file, "formulas": [one.as_json() for one in compared], "left_out": left_out}
    write_json(options.json, found, out)
    if options.markdown is not None and not stopped:
        write_whole(options.markdown, report.as_markdown(outcome, options.group))
    return code


if __name__ == "__main__":
    sys.exit(main())
