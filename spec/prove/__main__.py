"""`python -m spec.prove`: prove the arithmetic, refute the formulas that it replaces, and print the table."""

import argparse
import json
import sys
import time
from pathlib import Path

from spec.prove import report
from spec.prove.engine import Settings, TheoremResult, prove_all
from spec.prove.solvers import BACKENDS, MissingSolver, solver
from spec.prove.theorems import GROUPS, theorems_of
from spec.usage import OneLineParser

LARGEST_SEED = 2**31 - 1  # what both solvers take

STDOUT = Path("-")

DESCRIPTION = """\
Prove the coverage and alignment theorems for all integers in their domains, and refute the historic and
hypothetical formulas that they exclude.

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


def natural(text: str) -> int:
    """A seed; argparse reports anything else."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {LARGEST_SEED}, got {text}")
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
    made.add_argument("--solver", default="z3", choices=list(BACKENDS), help="default z3")
    made.add_argument(
        "--timeout", type=positive_seconds, default=60.0, metavar="S", help="seconds a theorem (60)"
    )
    made.add_argument("--seed", type=natural, default=0, metavar="S", help="the solver's random seed (0)")
    made.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results for machines ('-': to standard output, and no table)",
    )
    made.add_argument("--smt2", type=Path, metavar="DIR", help="write every obligation for another solver")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as documentation")
    made.add_argument("--list", action="store_true", help="list the theorems and prove nothing")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = parser().parse_args(arguments)
    chosen = theorems_of(options.group)
    if options.list:
        for theorem in chosen:
            print(f"{theorem.number:>3}  {theorem.group:<9} {theorem.name}")
        return 0
    try:
        backend = solver(options.solver)
        if options.smt2 is not None:
            options.smt2.mkdir(parents=True, exist_ok=True)
    except MissingSolver as missing:
        print(missing, file=sys.stderr)
        return 2
    except OSError as problem:
        print(
            f"--smt2 {options.smt2}: {problem.strerror}; name a directory that can be made", file=sys.stderr
        )
        return 2
    began = time.perf_counter()
    to_stdout = options.json == STDOUT
    settings = Settings(backend, options.timeout, options.seed, options.smt2)
    outcome = prove_all(chosen, settings, say_nothing if to_stdout else print_row)
    seconds = time.perf_counter() - began
    if not to_stdout:
        print(report.lemma_text(outcome))
        print(report.contract_text(outcome))
        print(report.summary(outcome, options.solver, seconds))
    for path, text in (
        (
            options.json,
            json.dumps(report.as_json(outcome, options.group, options.solver, options.seed), indent=1) + "\n",
        ),
        (options.markdown, report.as_markdown(outcome, options.group)),
    ):
        if path is None:
            continue
        if path == STDOUT:
            print(text, end="")
            continue
        try:
            path.write_text(text)
        except OSError as problem:
            print(f"{path}: {problem.strerror}; name a file that can be written", file=sys.stderr)
            return 2
    return report.exit_code(outcome)


def say_nothing(result: TheoremResult) -> None:
    """Print nothing: standard output is for JSON."""


def print_row(result: TheoremResult) -> None:
    """Print a theorem as soon as it is decided."""
    print(report.theorem_text(result), end="\n\n", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        # The reader of the table left early (`| head`); nothing remains to be said.
        sys.stderr.close()
        sys.exit(0)
