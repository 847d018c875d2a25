"""Options of the commands that run on torch, apart from it: ``--help`` and bad usage do without."""

from __future__ import annotations

import sys
from typing import NoReturn

from spec.usage import BAD_INPUT, JSON_HELP, OneLineParser, natural

RUNS, CHOICES = 20, 200
INJECT_RUNS = {"cpu": 60, "cuda": 20}  # on a CUDA device what eight minutes permit
REQUESTS = 300  # of a soak's run
JOBS = 15  # of a soak on a CUDA device, at most


def without_torch(name: str, parser: OneLineParser) -> NoReturn:
    """How a command ends where torch is missing: as its options say, else in one line."""
    parser.parse_args()
    print(f"{name}: torch is not installed: pip install -e '.[kernels]'", file=sys.stderr)
    sys.exit(BAD_INPUT)


def refine() -> OneLineParser:
    """The options of ``impl.refine``."""
    one = OneLineParser(
        prog="python -m impl.refine",
        description="The implementation drives a world on real bytes, and all that anyone reads is compared.",
    )
    one.add_argument(
        "--config", metavar="NAME|FILE", action="append", help="default: the composed configurations"
    )
    one.add_argument("--all", action="store_true", help="every shipped configuration")
    one.add_argument("--list", action="store_true", help="list the shipped configurations and stop")
    one.add_argument("--device", default="cpu", metavar="cpu|cuda")
    one.add_argument("--order", metavar="turns|gated|free", help="default: turns, on a CUDA device gated")
    one.add_argument("--kernels", metavar="torch|triton", help="default: torch, on a CUDA device triton")
    one.add_argument("--poison", action="store_true", help="blocks that hold nothing are filled with rubbish")
    one.add_argument("--runs", type=int, metavar="R", help=f"runs a configuration (default {RUNS})")
    one.add_argument("--choices", type=int, metavar="N", help=f"choices a run (default {CHOICES})")
    one.add_argument("--seed", type=natural, default=0, metavar="S")
    one.add_argument("--replay", metavar="FILE", help="make the choices of this trace, and no others")
    one.add_argument("--record", metavar="FILE", help="write the run that broke, else the last, as a trace")
    one.add_argument("--json", metavar="FILE", help=JSON_HELP)
    one.add_argument("--markdown", metavar="FILE", help="write the tables into the document's part 'refine'")
    one.add_argument("--commit", metavar="ID", help="commit to print, where git is not available")
    return one


def inject() -> OneLineParser:
    """The options of ``impl.inject``."""
    made = OneLineParser(prog="python -m impl.inject", description="Whether each fault of the catalogue, put "
                         "into the implementation from outside, is caught.")  # fmt: skip
    made.add_argument("--fault", metavar="NAME", action="append", help="default: all of them")
    made.add_argument("--list", action="store_true", help="list the faults that can be put in, and stop")
    made.add_argument("--device", default="cpu", metavar="cpu|cuda")
    made.add_argument("--order", metavar="turns|gated|free", help="as for impl.refine")
    made.add_argument("--kernels", metavar="torch|triton")
    made.add_argument(
        "--runs", type=int, metavar="R",
        help=f"at most (default {INJECT_RUNS['cpu']}, on a CUDA device {INJECT_RUNS['cuda']})",
    )  # fmt: skip
    made.add_argument("--choices", type=int, default=CHOICES, metavar="N")
    made.add_argument("--seed", type=natural, default=0, metavar="S")
    made.add_argument("--json", metavar="FILE", help=JSON_HELP)
    made.add_argument("--markdown", metavar="FILE", help="write the table into the document's part 'inject'")
    made.add_argument("--commit", metavar="ID", help="commit to print, where git is not available")
    return made


def soak() -> OneLineParser:
    """The options of ``impl.soak``."""
    given = OneLineParser(
        prog="python -m impl.soak",
        description="Soak: what each fault of the catalogue does to a server's users, with nobody watching.",
    )
    which = given.add_mutually_exclusive_group()
    which.add_argument("--fault", metavar="NAME", action="append", help="this one; may be given again")
    which.add_argument("--all", action="store_true", help="all faults; default: the reference alone")
    which.add_argument("--list", action="store_true", help="list loads and faults, and stop")
    given.add_argument("--device", default="cpu", metavar="cpu|cuda")
    given.add_argument("--kernels", metavar="torch|triton", help="default: torch, on a CUDA device triton")
    given.add_argument("--load", metavar="NAME", help="put the faults into this load, whatever theirs is")
    given.add_argument(
        "--requests", type=int, default=REQUESTS, metavar="N", help=f"of a run (default {REQUESTS})"
    )
    given.add_argument(
        "--runs", type=int, default=1, metavar="R",
        help="of a fault (default 1; some have 4 for each); a load's reference has 4 or 10 for each",
    )  # fmt: skip
    given.add_argument("--seed", type=natural, default=0, metavar="S")
    given.add_argument(
        "--jobs", type=int, metavar="J", help=f"processes (default: 1 on a CPU, {JOBS} at most on CUDA)"
    )
    given.add_argument("--json", metavar="FILE", help=JSON_HELP)
    given.add_argument(
        "--markdown", metavar="FILE", help="write the table into the document's part 'soak', or 'soak-cuda'"
    )
    given.add_argument("--commit", metavar="ID", help="commit to print, where git is not available")
    return given
