"""Command line of the released-vLLM adapter.

``fetch RELEASE... [--kernels]``  prepare releases in the cache directory
``check --release X | --vllm DIR``  drive one through its cases, each outcome beside the recorded one
``matrix --releases X...``  known history, known defects and mutants against releases
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from impl.upstream import cases, check, kernels, record, worker_order
from impl.upstream.child import Child, Died
from impl.upstream.edits import Function, edited
from impl.upstream.env import Prepared, Unavailable, fetch, prepared, prepared_tree
from impl.upstream.policy import AdapterError, Release
from impl.upstream.releases import KNOWN, UnknownRelease, counted, package_of, recognise
from spec.config import ConfigError
from spec.outputs import check_target, set_aside, write_json
from spec.usage import JSON_HELP, OneLineParser, command, natural


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    made = OneLineParser(prog="python -m impl.upstream")
    commands = made.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="prepare a release of vLLM in the cache directory")
    get.add_argument("release", nargs="+", help=f"one of {', '.join(KNOWN)}")
    get.add_argument("--kernels", action="store_true", help="also Triton, to run a release's own kernels")
    one = commands.add_parser("check", help="drive one release or tree, beside the record of its release")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--release", metavar="X", help=f"one of {', '.join(KNOWN)}")
    which.add_argument("--vllm", metavar="DIR", help="an unpacked release or a checkout")
    one.add_argument("--config", metavar="NAME|FILE", action="append", help="default: the default cases")
    one.add_argument("--list", action="store_true", help="list the cases and stop")
    one.add_argument("--shortest-prompt", type=positive, metavar="N",
                     help="draw no prompt of fewer tokens (default: the case's own, else 1)")  # fmt: skip
    one.add_argument("--repair", metavar="NAME", action="append", default=[],
                     help="repair this first, and compare with no record")  # fmt: skip
    many = commands.add_parser("matrix", help="rules and faults against releases")
    many.add_argument("--releases", nargs="+", metavar="X", default=list(KNOWN))
    many.add_argument("--default", action="store_true", help="the default cases, no kernels, no mutants")
    many.add_argument("--record", action="store_true", help="write verdicts.json and the documents' table")
    for both in (one, many):
        both.add_argument("--runs", type=positive, metavar="R", help="walks a case (default: the case's own)")
        both.add_argument("--choices", type=positive, metavar="N", help="choices a walk")
        both.add_argument("--seed", type=natural, default=0, metavar="S")
        both.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return made


@command("impl.upstream")
def main(arguments: list[str] | None = None) -> int:
    """Run one command; 2 with one line on stderr where the input, a release or the registry is missing."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "fetch":
            return run_fetch(given)
        if find_spec("hypothesis") is None and not getattr(given, "list", False):
            raise Unavailable("Hypothesis is not installed: run `pip install -e '.[dev]'` in the repository")
        check_target("--json", given.json)
        if given.command == "check":
            return run_check(given)
        from impl.upstream.matrix import run_matrix

        return run_matrix(given)
    except (Unavailable, UnknownRelease, ConfigError) as error:
        print(f"impl.upstream: {error}", file=sys.stderr)
    except Died as died:  # in a process of the matrix
        print(f"impl.upstream: {died}", file=sys.stderr)
        return 1
    return 2


def run_fetch(given: argparse.Namespace) -> int:
    """The ``fetch`` command; a stopped one keeps what was installed."""
    for release in given.release:
        try:
            ready = fetch(release, given.kernels)
        except KeyboardInterrupt:
            print("impl.upstream: stopped; the same command goes on with what is missing", file=sys.stderr)
            return 3
        print(f"vllm {release} is ready in {ready.tree.directory}")
    return 0


def chosen(given: argparse.Namespace) -> Prepared:
    """The release or tree that was asked for."""
    if given.vllm is None:
        return prepared(KNOWN[-1] if given.release is None else given.release)
    if not given.vllm:
        raise UnknownRelease("--vllm is empty: name an unpacked release or a checkout")
    return prepared_tree(recognise(Path(given.vllm)))


def simulated(given: argparse.Namespace, use: Prepared, runners: set[str], kernels_run: bool) -> None:
    """Tell what of a tree is simulated; refuse a runner of another order."""
    release = use.tree.release
    print(f"{given.vllm} has the signatures of vllm {release}")
    package = package_of(use.tree.directory)
    for runner in sorted(runners):
        try:
            worker_order.verify_runner(package, release, runner)
        except worker_order.Drift as drift:
            raise UnknownRelease(
                f"the {runner} runner of {given.vllm} is not that of vllm {release}, in whose order "
                f"workers are simulated: {drift}; name cases of another runner with --config"
            ) from None
    for path in worker_order.changed_files(package, release):
        apart = "; its state-copy kernels are, by themselves" if kernels_run and path in kernels.FILES else ""
        here = f"vllm/{path} is not the release's; what it changes in the simulated workers is not run"
        print(f"note: {here}{apart}")


def edits_of(use: Prepared) -> list[Function]:
    """The functions of a checkout that are not its release's, told; those of workers are told by file."""
    try:
        found = edited(use.tree.directory, use.tree.release)
    except Unavailable as error:
        print(f"note: which functions were edited is not known: {error}")
        return []
    driven = [one for one in found if not one.path.startswith(worker_order.SIMULATED)]
    for one in driven[:EDITS_SHOWN]:
        print(f"edited: {one}")
    if len(driven) > EDITS_SHOWN:
        print(f"edited: {len(driven) - EDITS_SHOWN} more")
    return driven


EDITS_SHOWN = 12
#: what an edit may lead this package's own code to, where it takes a release's word for something
UNFORESEEN = (LookupError, ValueError, TypeError, AttributeError, AssertionError, StopIteration, RuntimeError)


def interpreted(use: Prepared, scenarios: Sequence[kernels.Scenario], named: bool) -> list[kernels.Row]:
    """The outcomes of kernel scenarios; none, and a note, where Triton was not fetched and none was named."""
    found: list[kernels.Row] = []
    try:
        for row in kernels.rows(use, scenarios):
            tell(f"  {row.name}: {row.verdict}")
            found.append(row)
    except Unavailable as error:
        if named:
            raise
        tell(f"note: the kernels of this tree are not run: {error}")
    return found


def asked(given: argparse.Namespace, release: str) -> tuple[list[cases.Case], tuple[kernels.Scenario, ...]]:
    """The cases and kernel scenarios that a check is about: those that were named, else the default cases.

    Of a tree also every case that its release is recorded to hold in (other shapes, most of them with a known
    defect repaired), and all scenarios.
    """
    if not given.config:
        tree = given.vllm is not None
        held = record.holding(record.recorded(), release) if tree else ()
        todo = [case for case in cases.CASES if case.default or case.name in held]
        scenarios: tuple[kernels.Scenario, ...] = kernels.SCENARIOS if tree else ()
    else:
        todo = [cases.find(name) for name in given.config if name not in kernels.BY_NAME]
        scenarios = tuple(scenario for scenario in kernels.SCENARIOS if scenario.name in given.config)
    if given.shortest_prompt:
        todo = [replace(c, limits=replace(c.limits, shortest_prompt=given.shortest_prompt)) for c in todo]
    return todo, scenarios


def listed() -> None:
    """Print all cases and kernel scenarios."""
    wide = 2 + max(map(len, cases.BY_NAME))
    configs = 2 + max(len(case.config) for case in cases.CASES)
    for case in cases.CASES:
        mark = "default" if case.default else "own"
        print(f"{case.name:<{wide}}{mark:<9}{case.config:<{configs}}{case.why}")
    for scenario in kernels.SCENARIOS:
        print(f"{scenario.name:<{wide}}{'of trees':<9}{'-':<{configs}}{scenario.why}")


def run_check(given: argparse.Namespace) -> int:
    """The ``check`` command: 0 if every outcome is the recorded one or holds, 1 for a refutation that is not
    recorded."""
    if given.list:
        listed()
        return 0
    out = set_aside(given.json)
    use = chosen(given)
    release, of_tree = use.tree.release, given.vllm is not None
    todo, scenarios = asked(given, release)
    if of_tree:
        simulated(given, use, {case.load().runner for case in todo}, bool(scenarios))
    edits = edits_of(use) if of_tree else []
    recorded = {} if given.repair else record.recorded()
    count = counted(len(todo) + len(scenarios), "case", "cases")
    print(f"check: vllm {release}; {count}; seed {given.seed}", flush=True)
    results: list[check.CaseResult] = []
    rows: list[kernels.Row] = []
    remarks: list[record.Remark] = []
    ended, code = "", 0  # why it ended before all cases
    idle: list[list[str]] = []
    with Child(use) as child:
        try:
            policy = Release(child, tuple(given.repair))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            if todo:
                child.load()
                child.ask("watch", functions=[[one.path, one.name] for one in edits])
            for case in todo:
                result = check.run_case(
                    case,
                    policy,
                    runs=given.runs,
                    choices=given.choices,
                    seed=given.seed,
                    known=record.known(case, release),
                    say=tell,
                )
                found = record.compared(recorded, release, case.name, check.plain(result), edited=of_tree)
                beside = ", as recorded" if all(one.same for one in found) else ""
                tell(f"  {case.name}: {result.verdict}{beside}")
                results.append(result)
                remarks += found
                if result.stopped:
                    raise KeyboardInterrupt
            if edits and todo:
                child.ask("watch", functions=[])
                idle = child.ask("watch", functions=[])["idle"]
            rows = interpreted(use, scenarios, bool(given.config))
        except KeyboardInterrupt:
            begun = f"{len(results)} of {counted(len(todo), 'case was', 'cases were')}"
            ended, code = f"stopped; {begun} begun", 3
        except Died as died:
            ended, code = f"{case.name}: {died}", 1
        except AdapterError as error:
            ended, code = f"{case.name}: the adapter cannot follow: {error}", 2
        except UNFORESEEN as error:
            if not edits:
                raise
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            ended, code = f"{case.name}: the adapter cannot follow this tree: {said}", 2
    for row in rows:
        remarks.append(record.kernel_compared(recorded, release, row.name, row.verdict, edited=of_tree))
    recorded_ones = {(one.case, one.rule) for one in remarks if one.same and one.rule}
    print("\n".join(check.report(results, recorded_ones if not given.config else (), rows)))
    print()
    for remark in remarks:
        print(f"{remark.case}: {remark.text}")
    for one in edits:
        if [one.path, one.name] in idle:
            print(f"note: edited, but called in none of these cases: {one}")
    hints(recorded, release, recorded_ones)
    verdict = check.overall(results, rows)
    kept = record.names(recorded, release)
    same = [remark.same for remark in remarks if remark.case in kept or remark.code == 1]
    if same:
        verdict += ", as recorded" if all(same) else f", {same.count(False)} not as recorded"
    print(f"verdict: {verdict} (sampled)")
    write_json(given.json, check.as_json(results, remarks, release, given.seed, bool(ended), rows), out)
    if ended:
        print(f"impl.upstream: {ended}", file=sys.stderr)
    codes = {code, check.exit_code(results, remarks)} if code != 2 else {2}
    return next(one for one in (2, 1, 3, 0) if one in codes)


def hints(recorded: record.Plain, release: str, recorded_ones: set[tuple[str, str]]) -> None:
    """How to look past the recorded refutations that a repair removes."""
    past: dict[str, dict[str, None]] = {}
    for case, rule in sorted(recorded_ones):
        if names := record.repairs_of(recorded, release, case, rule):
            past.setdefault(case, {})[names[0]] = None
    if past:
        print("note: a recorded refutation can hide another one of its rule; to look past it:")
    for case, repairs in past.items():
        print(f"  --config {case} " + " ".join(f"--repair {name}" for name in repairs))


def tell(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
