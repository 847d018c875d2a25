"""Command line of the released-vLLM adapter.

``fetch RELEASE... [--kernels]``  prepare releases in the cache directory
``check --release X | --vllm DIR``  drive one through its cases, a verdict an invariant
``matrix --releases X...``  known history, known defects and mutants against releases
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from impl.upstream import cases, check, worker_order
from impl.upstream.child import Child, Died
from impl.upstream.env import Prepared, Unavailable, fetch, prepared, prepared_tree
from impl.upstream.policy import AdapterError, Release
from impl.upstream.releases import KNOWN, UnknownRelease, package_of, recognise
from spec.config import ConfigError


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    made = argparse.ArgumentParser(prog="python -m impl.upstream")
    commands = made.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="prepare a release of vLLM in the cache directory")
    get.add_argument("release", nargs="+", help=f"one of {', '.join(KNOWN)}")
    get.add_argument("--kernels", action="store_true", help="also Triton, to run a release's own kernels")
    one = commands.add_parser("check", help="a verdict for each invariant")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--release", metavar="X", help=f"one of {', '.join(KNOWN)}")
    which.add_argument("--vllm", metavar="DIR", help="an unpacked release or a checkout")
    one.add_argument("--config", metavar="NAME|FILE", action="append", help="default: the default cases")
    one.add_argument("--list", action="store_true", help="list the cases and stop")
    one.add_argument("--repair", metavar="NAME", action="append", default=[], help="repair this first")
    many = commands.add_parser("matrix", help="rules and faults against releases")
    many.add_argument("--releases", nargs="+", metavar="X", default=list(KNOWN))
    many.add_argument("--default", action="store_true", help="the default cases, no kernels, no mutants")
    many.add_argument("--record", action="store_true", help="write verdicts.json and the documents' table")
    for command in (one, many):
        command.add_argument(
            "--runs", type=positive, metavar="R", help="walks a case (default: the case's own)"
        )
        command.add_argument("--choices", type=positive, metavar="N", help="choices a walk")
        command.add_argument("--seed", type=int, default=0, metavar="S")
        command.add_argument("--json", metavar="FILE")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 2 with one line on stderr where the input, a release or the registry is missing."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "fetch":
            for release in given.release:
                ready = fetch(release, given.kernels)
                print(f"vllm {release} is ready in {ready.tree.directory}")
            return 0
        if find_spec("hypothesis") is None and not getattr(given, "list", False):
            raise Unavailable("Hypothesis is not installed: run `pip install -e '.[dev]'` in the repository")
        if given.json:  # before anything runs
            open(given.json, "a", encoding="utf-8").close()
        if given.command == "check":
            return run_check(given)
        from impl.upstream.matrix import run_matrix

        return run_matrix(given)
    except (Unavailable, UnknownRelease, ConfigError) as error:
        print(f"impl.upstream: {error}", file=sys.stderr)
    except BrokenPipeError:  # whoever read the report has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"impl.upstream: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
    except Died as died:  # in a process of the matrix
        print(f"impl.upstream: {died}", file=sys.stderr)
        return 1
    return 2


def chosen(given: argparse.Namespace, runners: set[str]) -> Prepared:
    """The release or tree that was asked for, and for a tree what of it is simulated."""
    if not given.vllm:
        return prepared(given.release or KNOWN[-1])
    tree = recognise(Path(given.vllm))
    use = prepared_tree(tree)
    print(f"{given.vllm} has the signatures of vllm {tree.release}")
    package = package_of(tree.directory)
    changed = set()
    for runner in sorted(runners):
        try:
            worker_order.verify_runner(package, tree.release, runner)
        except worker_order.Drift as drift:
            raise UnknownRelease(
                f"the {runner} runner of {given.vllm} is not that of vllm {tree.release}, in whose order "
                f"workers are simulated: {drift}; name cases of another runner with --config"
            ) from None
        changed.update(worker_order.changed_files(package, tree.release, runner))
    for path in sorted(changed):
        print(f"note: vllm/{path} is not the release's; workers are simulated, so that change is not seen")
    return use


def run_check(given: argparse.Namespace) -> int:
    """The ``check`` command."""
    if given.list:
        for case in cases.CASES:
            mark = "default" if case.default else "own"
            print(f"{case.name:<25}{mark:<9}{case.config:<24}{case.why}")
        return 0
    todo = [cases.find(name) for name in given.config or []]
    todo = todo or [case for case in cases.CASES if case.default]
    use = chosen(given, {case.load().runner for case in todo})
    print(f"check: vllm {use.tree.release}; {len(todo)} cases; seed {given.seed}", flush=True)
    from impl.upstream.matrix import known

    results = []
    with Child(use) as child:
        try:
            policy = Release(child, tuple(given.repair))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        child.load()
        for case in todo:
            try:
                result = check.run_case(
                    case,
                    policy,
                    runs=given.runs,
                    choices=given.choices,
                    seed=given.seed,
                    known=known(case),
                    say=tell,
                )
            except Died as died:
                print(f"impl.upstream: {case.name}: {died}", file=sys.stderr)
                return 1
            except AdapterError as error:
                print(f"impl.upstream: {case.name}: the adapter cannot follow: {error}", file=sys.stderr)
                return 2
            tell(f"  {case.name}: {result.verdict}")
            results.append(result)
    print("\n".join(check.report(results)))
    verdict, code = check.overall(results)
    if code == 0 and (idle := refused(results)):
        print(f"not given to this release: {', '.join(idle)}")
    print(f"verdict: {verdict} (sampled)")
    write_json(given.json, check.as_json(results, use.tree.release, given.seed))
    return code


def refused(results: list[check.CaseResult]) -> list[str]:
    """Cases whose configuration the release cannot be given."""
    return [result.case for result in results if result.refused]


def tell(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)


def write_json(path: str | None, report: Any) -> None:
    """Write a report for machines, if asked to."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
