"""Change each shared formula a little, and see whether a theorem notices: `python -m spec.prove.mutants`.

A theorem that still holds for a wrong formula says too little.  Each core of `spec.arith` is mutated in its
syntax tree: its result is one more or one less (or the opposite, for a predicate), the limit of a comparison
moves by one, a term or an argument of `min` or `max` is dropped, a divisor is swapped for another argument.
The mutant's code replaces the core's in place, so that every caller and every theorem sees it, and a
counterexample among plain integers is looked for in the claims that run the formula; where none is small, the
solver is asked.

A mutant that no theorem refutes *survives*.  A survivor is equal to the formula on its domain (`EQUIVALENT`
says why), or a theorem is missing.  A core that no claim runs is *unused*.

exit codes: 0 no survivor but equivalent ones and nothing unused; 1 otherwise; 2 bad usage; 3 stopped
"""

import ast
import inspect
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from spec.arith.checked import DOMAINS
from spec.outputs import check_target, set_aside, write_json
from spec.prove.engine import Settings, obligation, prove_claim, smallest_counterexample
from spec.prove.solvers import MissingSolver, solver
from spec.prove.theorem import Claim, Theorem
from spec.prove.theorems import theorems_of
from spec.usage import JSON_HELP, OneLineParser, command

SEARCH_BUDGETS = (2_000, 40_000)
"""Assignments tried in each claim: first a few in all claims, then more."""

SOLVER_SECONDS = 10.0

DIVIDERS = frozenset({"floordiv", "floormod", "cdiv", "round_down"})

EQUIVALENT: dict[str, str] = {
    "store_keeps_block: limit +1 in column < shift": (
        "differs only where need >= segment_blocks, and there the mask is not used (store_keeps_all)"
    ),
}
"""Mutants that equal the formula on its domain, by `Mutant.name`, with the reason."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed core: which, how, and its code."""

    function: str
    change: str
    source: str
    code: CodeType

    @property
    def name(self) -> str:
        """What was changed where."""
        return f"{self.function}: {self.change}"


@dataclass(frozen=True, slots=True)
class Fate:
    """What refuted a mutant: theorem, claim and counterexample; all None for a survivor."""

    mutant: Mutant
    theorem: int | None
    claim: str | None
    counterexample: dict[str, int] | None
    seconds: float

    @property
    def survived(self) -> bool:
        """No theorem noticed."""
        return self.theorem is None


def cores() -> dict[str, FunctionType]:
    """Every core by name."""
    found: dict[str, FunctionType] = {}
    for core in DOMAINS:
        assert isinstance(core, FunctionType)
        found[core.__name__] = core
    return found


class _Numbered(ast.NodeTransformer):
    """Applies one change: the `wanted`-th place where `edit` offers a replacement."""

    def __init__(self, edit: Callable[[ast.expr], Iterator[tuple[str, ast.expr]]], wanted: int) -> None:
        self.edit = edit
        self.wanted = wanted
        self.seen = 0
        self.label: str | None = None

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr):
            for label, replacement in self.edit(node):
                if self.seen == self.wanted:
                    self.seen += 1
                    self.label = label
                    return ast.copy_location(replacement, node)
                self.seen += 1
        return self.generic_visit(node)


def _terms(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Drop a term of a sum or an argument of min or max."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield f"drop {ast.unparse(node.right)} in {ast.unparse(node)}", node.left
        kept = node.right if isinstance(node.op, ast.Add) else ast.UnaryOp(ast.USub(), node.right)
        yield f"drop {ast.unparse(node.left)} in {ast.unparse(node)}", kept
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        for dropped in node.args:
            rest = [argument for argument in node.args if argument is not dropped]
            label = f"drop {ast.unparse(dropped)} in {ast.unparse(node)}"
            yield label, rest[0] if len(rest) == 1 else ast.Call(node.func, rest, [])


def _limits(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Move the limit of a comparison by one."""
    if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        for step in (1, -1):
            limit = ast.BinOp(node.comparators[0], ast.Add(), ast.Constant(step))
            yield f"limit {step:+d} in {ast.unparse(node)}", ast.Compare(node.left, node.ops, [limit])


def _divisors(parameters: tuple[str, ...]) -> Callable[[ast.expr], Iterator[tuple[str, ast.expr]]]:
    """Swap a divisor for another argument of the function."""

    def edit(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        divides = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in DIVIDERS
            and len(node.args) == 2
        )
        if divides:
            assert isinstance(node, ast.Call)
            divisor = ast.unparse(node.args[1])
            for other in parameters:
                if other != divisor:
                    swapped = ast.Call(node.func, [node.args[0], ast.Name(other, ast.Load())], [])
                    yield f"divide by {other} in {ast.unparse(node)}", swapped
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
            for other in parameters:
                if other not in (ast.unparse(node.right), ast.unparse(node.left)):
                    yield (
                        f"divide by {other} in {ast.unparse(node)}",
                        ast.BinOp(node.left, node.op, ast.Name(other, ast.Load())),
                    )

    return edit


def compiled(core: FunctionType, tree: ast.FunctionDef) -> CodeType:
    """The code of a changed core, with the core's own globals."""
    tree.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([tree], []))
    namespace: dict[str, Any] = {}
    exec(compile(module, f"<mutant of {core.__name__}>", "exec"), core.__globals__, namespace)
    made = namespace[core.__name__]
    assert isinstance(made, FunctionType)
    return made.__code__


def _tree(core: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(core))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return tree


def is_predicate(core: FunctionType) -> bool:
    """Whether a core returns a truth value."""
    return core.__annotations__.get("return") in (bool, "bool")


def _opposite(value: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), value)


def _added(step: int) -> Callable[[ast.expr], ast.expr]:
    return lambda value: ast.BinOp(value, ast.Add(), ast.Constant(step))


def _changed_returns(core: FunctionType) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every return one more and one less, or the opposite."""
    changes: list[tuple[str, Callable[[ast.expr], ast.expr]]]
    if is_predicate(core):
        changes = [("the opposite", _opposite)]
    else:
        changes = [("result +1", _added(1)), ("result -1", _added(-1))]
    for label, change in changes:
        tree = _tree(core)
        before = ast.unparse(tree)
        returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
        for node in returns:
            assert node.value is not None
            node.value = change(node.value)
        if ast.unparse(tree) != before:
            yield label, tree


def mutants_of(core: FunctionType) -> list[Mutant]:
    """Every mutant of a core, each in one place."""
    made: list[Mutant] = []

    def add(label: str, tree: ast.FunctionDef) -> None:
        made.append(Mutant(core.__name__, label, ast.unparse(tree), compiled(core, tree)))

    for label, tree in _changed_returns(core):
        add(label, tree)
    parameters = tuple(
        p.name for p in inspect.signature(core).parameters.values() if p.annotation not in (bool, "bool")
    )
    for edit in (_terms, _limits, _divisors(parameters)):
        wanted = 0
        while True:
            tree = _tree(core)
            numbered = _Numbered(edit, wanted)
            tree.body = [numbered.visit(statement) for statement in tree.body]
            if numbered.label is None:
                break
            add(numbered.label, tree)
            wanted += 1
    return made


@contextmanager
def in_place(mutant: Mutant) -> Iterator[None]:
    """Run with the mutant's code in the core's place, everywhere."""
    core = cores()[mutant.function]
    original = core.__code__
    core.__code__ = mutant.code
    try:
        yield
    finally:
        core.__code__ = original


def functions_run(claim: Claim) -> frozenset[str]:
    """The cores that a claim runs on some path."""
    codes = {core.__code__: name for name, core in cores().items()}
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            seen.add(codes[frame.f_code])

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        obligation(claim)
    finally:
        sys.setprofile(previous)
    return frozenset(seen)


def claims_by_function(theorems: tuple[Theorem, ...]) -> dict[str, list[tuple[int, Claim]]]:
    """For each core the claims that run it, with their theorem's number; empty for an unused core."""
    found: dict[str, list[tuple[int, Claim]]] = {name: [] for name in cores()}
    for theorem in theorems:
        for claim in theorem.claims:
            for name in functions_run(claim):
                found[name].append((theorem.number, claim))
    return found


def fate_of(mutant: Mutant, claims: list[tuple[int, Claim]], settings: Settings | None) -> Fate:
    """Look for a claim that the mutant breaks: in small integers first, then by the solver if any."""
    began = time.perf_counter()

    def fate(number: int, claim: Claim, point: dict[str, int] | None) -> Fate:
        return Fate(mutant, number, claim.name, point, time.perf_counter() - began)

    with in_place(mutant):
        for budget in SEARCH_BUDGETS:
            for number, claim in claims:
                try:
                    point = smallest_counterexample(claim, budget)
                except ZeroDivisionError:
                    return fate(number, claim, None)  # a divisor that the domain does not keep positive
                if point is not None:
                    return fate(number, claim, point)
        for number, claim in claims if settings is not None else ():
            assert settings is not None
            result = prove_claim(claim, settings, time.perf_counter() + settings.timeout_s, "mutant")
            if result.verdict == "refuted":
                return fate(number, claim, result.counterexample)
    return Fate(mutant, None, None, None, time.perf_counter() - began)


@command("spec.prove.mutants")
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    summary = "Mutate each shared formula and report which mutants no theorem refutes."
    parser = OneLineParser(prog="python -m spec.prove.mutants", description=summary)
    parser.add_argument("function", nargs="*", help="cores to mutate (default: all)")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(arguments)
    known = cores()
    unknown = [name for name in options.function if name not in known]
    if unknown:
        print(f"no core named {unknown[0]}; one of: {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    check_target("--json", options.json)
    try:
        settings = Settings(solver("z3"), SOLVER_SECONDS)
    except MissingSolver as missing:
        print(f"spec.prove.mutants: {missing}", file=sys.stderr)
        return 2
    out = set_aside(options.json)
    chosen = options.function or list(known)
    by_function = claims_by_function(theorems_of("arith"))
    unused = [name for name in chosen if not by_function[name]]
    fates: list[Fate] = []
    for name in chosen:
        for mutant in mutants_of(known[name]):
            equivalent = mutant.name in EQUIVALENT
            fate = fate_of(mutant, by_function[name], None if equivalent else settings)
            fates.append(fate)
            if fate.survived and equivalent:
                print(f"equivalent  {mutant.name}: {EQUIVALENT[mutant.name]}", flush=True)
            elif fate.survived:
                print(f"SURVIVES    {mutant.name}", flush=True)
    wrong = [f for f in fates if f.survived != (f.mutant.name in EQUIVALENT)]
    for fate in wrong:
        if not fate.survived:
            print(f"REFUTED     {fate.mutant.name}, listed as equivalent: at {fate.counterexample}")
    for name in unused:
        print(f"UNUSED      {name}: no claim runs it")
    survivors = sum(f.survived for f in fates)
    print(
        f"functions {len(chosen)}, mutants {len(fates)}, refuted {len(fates) - survivors}, equivalent "
        f"{survivors - sum(f.survived for f in wrong)}, surviving {sum(f.survived for f in wrong)}, "
        f"unused {len(unused)}"
    )
    rows = [
        {
            "mutant": f.mutant.name,
            "source": f.mutant.source,
            "theorem": f.theorem,
            "claim": f.claim,
            "counterexample": f.counterexample,
            "equivalent": EQUIVALENT.get(f.mutant.name),
        }
        for f in fates
    ]
    write_json(options.json, {"schema": 1, "mutants": rows, "unused": unused}, out)
    return 1 if wrong or unused else 0


if __name__ == "__main__":
    sys.exit(main())
