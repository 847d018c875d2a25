"""`python -m spec.prove`: prove the arithmetic, refute the formulas that it replaces, and print the table."""

import argparse
import sys
import time
from pathlib import Path

from spec.outputs import check_target, set_aside, write_json, write_whole
from spec.prove import report
from spec.prove.engine import Outcome, Settings, TheoremResult, prove_all
from spec.prove.solvers import BACKENDS, MissingSolver, solver
from spec.prove.theorems import GROUPS, theorems_of
from spec.usage import JSON_HELP, UNDETERMINED, OneLineParser, command, natural

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
    if options.list:
        for theorem in chosen:
            print(f"{theorem.number:>3}  {theorem.group:<9} {theorem.name}")
        return 0
    check_target("--json", options.json)
    check_target("--markdown", options.markdown)
    try:
        backend = solver(options.solver)
        if options.smt2 is not None:
            options.smt2.mkdir(parents=True, exist_ok=True)
    except MissingSolver as missing:
        print(f"spec.prove: {missing}", file=sys.stderr)
        return 2
    except OSError as problem:
        why = f"{problem.strerror}; name a directory that can be made"
        print(f"spec.prove: --smt2 {options.smt2}: {why}", file=sys.stderr)
        return 2
    out = set_aside(options.json)
    began = time.perf_counter()
    settings = Settings(backend, options.timeout, options.seed, options.smt2)
    told: list[TheoremResult] = []

    def tell(result: TheoremResult) -> None:
        """Print a theorem as soon as it is decided."""
        told.append(result)
        print(report.theorem_text(result), end="\n\n", flush=True)

    stopped = False
    try:
        outcome = prove_all(chosen, settings, tell)
    except KeyboardInterrupt:
        stopped, outcome = True, Outcome(tuple(told), ())
        print(f"stopped: {len(told)} of {len(chosen)} theorems were decided, and lemmas were not tried\n")
    code = report.exit_code(outcome) or (UNDETERMINED if stopped else 0)
    print(report.lemma_text(outcome))
    sys.stdout.write(report.contract_text(outcome))
    print(report.summary(outcome, options.solver, time.perf_counter() - began))
    found = report.as_json(outcome, options.group, options.solver, options.seed)
    write_json(options.json, {**found, "exit_code": code, "stopped": stopped}, out)
    if options.markdown is not None and not stopped:
        write_whole(options.markdown, report.as_markdown(outcome, options.group))
    return code


if __name__ == "__main__":
    sys.exit(main())
