"""The prover: verdicts that can fail, counterexamples to the letter, exit codes, scripts for others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spec.arith import coverage as cov
from spec.arith.division import cdiv, floordiv, floormod
from spec.prove import __main__ as command
from spec.prove import engine, lemmas, mutants, report, solvers, theorems
from spec.prove.symbolic import Context, Forked, Int, TooManyPaths, Undefined, both, either, iff, implies
from spec.prove.theorem import Claim, Hypothesis, Lemma, Refutation, Symbol, Theorem

ROOT = Path(__file__).parents[1]
SOLVERS = ("z3", "cvc5")

x = Symbol("x", None, "an integer")
y = Symbol("y", None, "an integer")
c = Symbol("c", 1, "a divisor")
b = Symbol("b", 1, "a block")
k = Symbol("k", 1, "blocks a chunk")


def decide(claim: Claim, solver: str = "z3", seconds: float = 10.0) -> engine.ClaimResult:
    settings = engine.Settings(solvers.solver(solver), seconds)
    return engine.prove_claim(claim, settings, time.perf_counter() + seconds, "test")


def theorem_of(*claims: Claim, refutes: tuple[Refutation, ...] = ()) -> Theorem:
    return Theorem(99, "a test", "coverage", "as claimed", claims, refutes)


# -- symbolic integers ---------------------------------------------------------------------------------------


def test_formulas_run_symbolically_by_forking() -> None:
    context = Context()
    a, d = context.symbol("a"), context.symbol("d")
    paths = context.explore(lambda: max(0, min(a, d)))
    assert sorted(repr(path.result) for path in paths) == ["0", "0", "a", "d"]


def test_a_decided_comparison_does_not_fork_again() -> None:
    context = Context()
    a = context.symbol("a")
    paths = context.explore(lambda: (a >= 3 and a >= 2, not a < 3))
    assert len(paths) == 2


def test_one_quotient_for_each_pair_of_operands() -> None:
    context = Context()
    n, t = context.symbol("n"), context.symbol("t")
    padding = floormod(-n, t)
    assert repr(cdiv(n, t) * t - n) == repr(padding)
    assert len(context.divisions) == 1


def test_a_divisor_that_is_negative_by_its_signs_is_turned() -> None:
    """As vLLM writes it: -(a // -b)."""
    assert decide(Claim("ceiling", (x, c), lambda x, c: -(x // -c) == cdiv(x, c))).verdict == "proved"
    assert decide(Claim("remainder", (x, c), lambda x, c: -c < x % -c <= 0)).verdict == "proved"
    assert decide(Claim("floor", (x, c), lambda x, c: x // -3 == -(x // 3))).verdict == "refuted"
    mixed = decide(Claim("either sign", (x, c), lambda x, c: (x // (c - 5)) * (c - 5) == x, (
        Hypothesis("x = 0", lambda x: x == 0), Hypothesis("c = 4", lambda c: c == 4))))  # fmt: skip
    assert mixed.verdict == "undetermined" and mixed.reason.endswith("it holds (is a divisor negative?)")


def test_a_loop_that_a_symbol_ends_is_refused_while_it_runs() -> None:
    def count(x: Int) -> int:
        while x > 0:
            x = x - 1
        return 0

    context = Context(max_paths=50)
    n = context.symbol("n")
    with pytest.raises(TooManyPaths):
        context.explore(lambda: count(n))
    many = decide(Claim("counted", (x,), lambda x: count(x) == 0))
    assert many.verdict == "undetermined" and many.reason == "more than 4096 paths"


def test_a_path_without_a_value_fails_unless_nothing_takes_it() -> None:
    def least(x: Int, limit: int) -> Int:
        if x < limit:
            raise Undefined
        return x

    assert decide(Claim("taken", (c,), lambda c: least(c * c, 1) >= 1)).verdict == "proved"
    with pytest.raises(Undefined):  # Python runs the counterexample
        decide(Claim("taken", (c,), lambda c: least(c, 2) >= 1))


def test_a_loop_over_data_is_refused() -> None:
    context = Context()
    with pytest.raises(TypeError, match="contract"):
        range(context.symbol("n"))  # type: ignore[call-overload]


def test_too_many_paths_is_an_error() -> None:
    context = Context(max_paths=8)
    symbols = [context.symbol(f"s{i}") for i in range(5)]
    with pytest.raises(TooManyPaths):
        context.explore(lambda: sum(max(0, s) for s in symbols))


def test_connectives_agree_on_plain_truth_values() -> None:
    for p in (False, True):
        for q in (False, True):
            assert both(p, q) is (p and q) and either(p, q) is (p or q)
            assert implies(p, q) is (not p or q) and iff(p, q) is (p == q)


# -- verdicts ------------------------------------------------------------------------------------------------

FALSE_CLAIMS = [
    Claim("never", (x,), lambda x: x != x),
    Claim("floor is ceiling", (x, c), lambda x, c: floordiv(x, c) == cdiv(x, c)),
    Claim("a block past", (x, b, k), lambda x, b, k: floordiv(floordiv(x, b), k) < floordiv(x, b * k)),
    Claim("product", (x, y), lambda x, y: x * y >= 0),
    Claim("far away", (x,), lambda x: x != 1_000_003),
]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("claim", FALSE_CLAIMS, ids=lambda claim: claim.name)
def test_a_false_claim_is_refuted_by_a_point_that_python_confirms(claim: Claim, solver: str) -> None:
    result = decide(claim, solver)
    assert result.verdict == "refuted" and result.counterexample is not None
    assert engine.holds_at(claim, result.counterexample) == (True, False)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_divisor_that_may_be_zero_proves_nothing(solver: str) -> None:
    """With Euclid assumed at c <= 0 the first claim, and any other, would follow."""
    d = Symbol("d", None, "a divisor without a domain")
    claim = Claim("remainder", (x, d), lambda x, d: floormod(x, d) >= 0)
    owed = engine.obligation(claim)
    answer = solvers.solver(solver).check(owed.script(real_products=True), 10, 0)
    assert answer.status == "sat" and answer.model["d"] <= 0
    positive = replace(claim, hypotheses=(Hypothesis("d >= 1", lambda d: d >= 1),))
    assert decide(positive, solver).verdict == "proved"


def test_contradictory_hypotheses_prove_nothing() -> None:
    claim = Claim("anything", (x,), lambda x: x == x + 1, (Hypothesis("x < x", lambda x: x < x),))
    result = decide(claim)
    assert (result.verdict, result.reason) == ("undetermined", "no instance of the hypotheses was found")


def test_out_of_time_is_undetermined() -> None:
    result = engine.prove_claim(FALSE_CLAIMS[0], engine.Settings(solvers.solver("z3")), 0.0, "test")
    assert (result.verdict, result.reason) == ("undetermined", "out of time")


def test_a_false_lemma_is_found_out() -> None:
    wrong = Lemma(Claim("wrong", (x, c), lambda x, c: x // c == x))
    claim = Claim("by a wrong lemma", (x, c), lambda x, c: x // c == x, (), lambda x, c: (wrong(x, c),))
    outcome = engine.prove_all((theorem_of(claim),), engine.Settings(solvers.solver("z3"), 10))
    assert [(r.claim.name, r.verdict) for r in outcome.lemmas][-1] == ("wrong", "refuted")
    assert report.exit_code(outcome) == 1


def test_a_lemma_cannot_support_itself() -> None:
    circular: list[Lemma] = []
    claim = Claim("circle", (x, c), lambda x, c: x // c == x, (), lambda x, c: (circular[0](x, c),))
    circular.append(Lemma(claim))
    user = Claim("user", (x, c), lambda x, c: x // c == x, (), lambda x, c: (circular[0](x, c),))
    with pytest.raises(RuntimeError, match="used in its own proof"):
        engine.prove_all((theorem_of(user),), engine.Settings(solvers.solver("z3"), 10))


UPPER_BOUND = Lemma(Claim("upper bound", (x, y), lambda x, y: max(y, x) >= x))
SPLIT_PREMISE = Lemma(
    Claim("split premise", (x, y), lambda x, y: y >= x, (Hypothesis("y >= x", lambda x, y: min(x, y) == x),))
)


@pytest.mark.parametrize("lemma", [UPPER_BOUND, SPLIT_PREMISE], ids=lambda lemma: lemma.name)
@pytest.mark.parametrize("decided", [False, True], ids=["open", "decided"])
def test_a_lemma_that_forks_is_refused(lemma: Lemma, decided: bool) -> None:
    """The instance of one path, stated on all of them, proves what is false: here y >= x, by max(y, x) >= x.

    Where the path has already decided the comparison nothing forks any more, and the instance is as partial.
    """
    assert decide(lemma.claim).verdict == "proved"
    hints = (lambda x, y: (min(x, y), lemma(x, y))[1:]) if decided else (lambda x, y: (lemma(x, y),))
    with pytest.raises(Forked, match=f"lemma {lemma.name} asks for a truth value"):
        decide(Claim("false", (x, y), lambda x, y: y >= x, (), hints))


def test_a_lemmas_arguments_may_come_from_a_path_that_forked() -> None:
    claim = Claim(
        "quotient of the greater",
        (x, y, c),
        lambda x, y, c: x // c <= max(x, y) // c,
        (),
        lambda x, y, c: (lemmas.ordered(x, max(x, y), c),),
    )
    assert decide(claim).verdict == "proved"


def test_a_formula_that_is_right_is_not_refuted() -> None:
    claim = Claim("true", (x, c), lambda x, c: cdiv(x, c) >= floordiv(x, c))
    refutation = Refutation("a right one", "hypothetical", claim, {"x": 1, "c": 2}, lambda x, c: "")
    outcome = engine.prove_all(
        (theorem_of(claim, refutes=(refutation,)),), engine.Settings(solvers.solver("z3"), 10)
    )
    assert outcome.theorems[0].verdict == "proved"
    assert (
        outcome.theorems[0].refutes[0].reason == "the reported witness does not refute: the claim holds there"
    )
    assert report.exit_code(outcome) == 3


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "lemma", [v for v in vars(lemmas).values() if isinstance(v, Lemma)], ids=lambda lemma: lemma.name
)
def test_every_lemma_is_proved(lemma: Lemma, solver: str) -> None:
    assert decide(lemma.claim, solver).verdict == "proved"


# -- the theorems --------------------------------------------------------------------------------------------


def test_theorems_have_the_issue_numbers_and_distinct_names() -> None:
    assert [t.number for t in theorems.theorems_of("coverage")] == list(range(11))
    assert [t.number for t in theorems.theorems_of("align")] == list(range(11, 20))
    for theorem in theorems.theorems_of("arith"):
        assert theorem.claims and theorem.refutes, theorem.number
        names = [claim.name for claim in theorem.claims] + [r.formula for r in theorem.refutes]
        assert len(set(names)) == len(names), theorem.number


def test_smallest_counterexample_is_the_smallest() -> None:
    claim = Claim(
        "span",
        (Symbol("s", 0, ""), Symbol("T", 1, ""), b),
        lambda s, T, b: cov.span_blocks(s, T, b) <= cdiv(T, b),
    )
    assert engine.smallest_counterexample(claim, 10_000) == {"s": 1, "T": 2, "b": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, dict[str, object], Path, str]]:
    """`arith` with each solver: exit code, JSON, the folder of scripts, and the Markdown page."""
    made = {}
    for solver in SOLVERS:
        folder = tmp_path_factory.mktemp(solver)
        files = {"json": folder / "run.json", "markdown": folder / "run.md", "smt2": folder / "smt2"}
        options = [f"--{name}={path}" for name, path in files.items()]
        code = command.main(["arith", "--solver", solver, *options])
        made[solver] = (
            code,
            json.loads(files["json"].read_text()),
            files["smt2"],
            files["markdown"].read_text(),
        )
    return made


def outcome_of(data: dict[str, object]) -> object:
    """A run without what may differ between solvers: times and the solver's own counterexamples."""
    dropped = {"seconds", "solver", "solver_counterexample", "products"}

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {key: strip(v) for key, v in value.items() if key not in dropped}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(data)


@pytest.mark.slow
def test_both_solvers_prove_everything_and_agree(
    runs: dict[str, tuple[int, dict[str, object], Path, str]],
) -> None:
    assert [runs[solver][0] for solver in SOLVERS] == [0, 0]
    assert outcome_of(runs["z3"][1]) == outcome_of(runs["cvc5"][1])


def test_every_letter_of_a_claim_is_told_with_its_own_meaning() -> None:
    for theorem in theorems.theorems_of("arith"):
        told = report.letters(theorem).split("; ")
        for claim in theorem.claims:
            domain = report.domain_text(claim, report.meanings(theorem))
            for symbol in claim.symbols:
                once = f"{symbol.name}: {symbol.meaning}" in told
                here = f"{symbol.domain} ({symbol.meaning})" in domain
                assert symbol.meaning and once != here, (theorem.number, claim.name, symbol.name)


def test_a_letter_with_two_meanings_is_told_in_each_claim() -> None:
    chunks, blocks = Symbol("x", 1, "chunks"), Symbol("x", 1, "blocks")
    theorem = theorem_of(TRUE, *(Claim("", (s, b), lambda x, b: x * b >= x) for s in (chunks, blocks)))
    assert report.letters(theorem) == "x: as each claim says; c: a divisor; b: a block"
    told = [report.domain_text(claim, report.meanings(theorem)) for claim in theorem.claims]
    assert told == ["x any (an integer), c >= 1", "x >= 1 (chunks), b >= 1", "x >= 1 (blocks), b >= 1"]


def test_every_claim_of_a_theorem_is_about_a_shared_formula() -> None:
    """A claim that runs no formula says something about letters only, whatever the theorem makes of it."""
    for theorem in theorems.theorems_of("arith"):
        for claim in theorem.claims:
            assert mutants.functions_run(claim), (theorem.number, claim.name)
    assert not mutants.functions_run(Claim("bare", (x, y), lambda x, y: x >= y))


@pytest.mark.slow
def test_json_says_what_was_decided(runs: dict[str, tuple[int, dict[str, object], Path, str]]) -> None:
    data = runs["z3"][1]
    assert data["schema"] == 1 and data["exit_code"] == 0 and data["group"] == "arith"
    rows = data["theorems"]
    assert isinstance(rows, list) and len(rows) == 20
    coverage = rows[1]
    assert coverage["verdict"] == "proved" and coverage["contracts"] == ["right-to-left scan", "prefix scan"]
    window = next(claim for claim in coverage["claims"] if claim["name"] == "sliding window")
    assert window["symbols"]["e"] == {"least": 0, "meaning": "extra retained tokens"}
    assert window["hypotheses_hold_at"] == {"h": 1, "p": 0, "W": 1, "e": 0, "b": 1, "k": 2, "j": 0}
    for row in rows:
        assert all(claim["verdict"] == "proved" and claim["hypotheses_hold_at"] for claim in row["claims"])
        assert all(refuted["verdict"] == "refuted" for refuted in row["refutes"])


@pytest.mark.slow
def test_the_release_witness_is_reported_to_the_letter(
    runs: dict[str, tuple[int, dict[str, object], Path, str]],
) -> None:
    rows = runs["z3"][1]["theorems"]
    assert isinstance(rows, list)
    found = next(r for r in rows[1]["refutes"] if r["formula"].startswith("0.30.0"))
    assert found["reported"] == {"h": 64, "p": 0, "W": 32, "e": 3, "b": 16, "k": 1, "j": 1}
    assert found["reported_text"] == (
        "hit 64, chunk 16, window 32, extra 3, local 0: restores chunks 1 to 3, "
        "0.30.0 looked up chunks 2 to 3; chunk 1 missing"
    )
    assert found["smallest"] == {"h": 2, "p": 0, "W": 1, "e": 2, "b": 1, "k": 1, "j": 0}


def check_file(path: Path, solver: solvers.Solver) -> tuple[str, str]:
    """(what the file says its status is, what a solver says)."""
    text = path.read_text()
    status = re.search(r"\(set-info :status (\w+)\)", text)
    assert status is not None and text.endswith("(check-sat)\n")
    # cvc5 would compare its answer with the status and stop; here the comparison is ours.
    script = text.removesuffix("(check-sat)\n").replace(status[0] + "\n", "")
    return status[1], solver.check(script, 60, 1).status


@pytest.mark.slow
@pytest.mark.parametrize(("made_by", "checked_by", "every"), [("z3", "cvc5", 1), ("cvc5", "z3", 4)])
def test_scripts_are_confirmed_by_the_other_solver(
    runs: dict[str, tuple[int, dict[str, object], Path, str]], made_by: str, checked_by: str, every: int
) -> None:
    files = sorted(runs[made_by][2].glob("*.smt2"))
    claims = sum(len(t.claims) for t in theorems.theorems_of("arith"))
    refutations = sum(len(t.refutes) for t in theorems.theorems_of("arith"))
    used = runs[made_by][1]["lemmas"]
    assert isinstance(used, list) and len(files) == claims + refutations + len(used)
    solver = solvers.solver(checked_by)
    said = {path.name: check_file(path, solver) for path in files[::every]}
    assert {name: pair for name, pair in said.items() if pair[0] != pair[1]} == {}
    assert {pair[0] for pair in said.values()} == {"sat", "unsat"}


def test_a_refuted_claim_leaves_a_satisfiable_script(tmp_path: Path) -> None:
    settings = engine.Settings(solvers.solver("z3"), 10, smt2=tmp_path)
    assert engine.prove_claim(FALSE_CLAIMS[2], settings, time.perf_counter() + 10, "one").verdict == "refuted"
    (path,) = tmp_path.glob("*.smt2")
    assert check_file(path, solvers.solver("cvc5")) == ("sat", "sat")


def test_a_script_with_its_last_assertion_dropped_is_satisfiable(tmp_path: Path) -> None:
    settings = engine.Settings(solvers.solver("z3"), 10, smt2=tmp_path)
    claim = next(
        claim for claim in theorems.theorems_of("coverage")[1].claims if claim.name == "sliding window"
    )
    engine.prove_claim(claim, settings, time.perf_counter() + 10, "one")
    (path,) = tmp_path.glob("*.smt2")
    lines = path.read_text().splitlines()
    assert lines[-2].startswith("(assert") and lines[-1] == "(check-sat)"
    path.write_text("\n".join([*lines[:-2], lines[-1]]) + "\n")
    assert check_file(path, solvers.solver("cvc5")) == ("unsat", "sat")


def without_times(text: str) -> str:
    return re.sub(r"\d+\.\d\d \|", "- |", text)


@pytest.mark.slow
def test_the_documented_table_is_fresh(runs: dict[str, tuple[int, dict[str, object], Path, str]]) -> None:
    documented = (ROOT / "docs" / "theorems.md").read_text()
    fresh = runs["z3"][3]
    assert without_times(documented) == without_times(fresh), (
        "run: python -m spec.prove arith --markdown docs/theorems.md"
    )
    assert without_times(fresh) == without_times(runs["cvc5"][3])


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spec.prove", "--list"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[1] == "  1  coverage  chunk coverage"
    assert len(done.stdout.splitlines()) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["--solver", "yices"], "invalid choice: 'yices'"),
        (["--timeout", "0"], "must be a positive number of seconds, got 0"),
        (["--timeout", "soon"], "must be a positive number of seconds, got soon"),
        (["--seed", "-1"], "must be a whole number from 0 to 2147483647, got -1"),
        (["--seed", "99999999999"], "must be a whole number from 0 to 2147483647, got 99999999999"),
        (["--seed", "x"], "must be a whole number from 0 to 2147483647, got x"),
    ],
)
def test_bad_usage_exits_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_missing_solver_exits_2_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cvc5", None)
    assert command.main(["coverage", "--solver", "cvc5"]) == 2
    missing = "spec.prove: cvc5 is not installed; install it with: pip install -e '.[dev]'\n"
    assert capsys.readouterr().err == missing


def test_a_folder_that_cannot_be_made_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(["coverage", "--smt2", str(tmp_path / "file" / "inside")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("spec.prove: --smt2 ") and "name a directory that can be made" in err
    with pytest.raises(SystemExit, match="2"):
        command.main(["coverage", "--smt2", ""])
    assert "--smt2: an empty name; name a directory" in capsys.readouterr().err


def test_contracts_are_headed_only_where_there_are_some() -> None:
    def text_of(group: str) -> str:
        told = tuple(engine.TheoremResult(t, "proved", 0, (), ()) for t in theorems.theorems_of(group))
        return report.contract_text(engine.Outcome(told, ()))

    assert text_of("align") == "" and text_of("coverage").startswith("Contracts (assumed here")


@pytest.fixture
def proving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the command prove other theorems."""

    def use(*chosen: Theorem) -> None:
        monkeypatch.setattr(command, "theorems_of", lambda group: chosen)

    return use


TRUE = Claim("true", (x, c), lambda x, c: cdiv(x, c) >= floordiv(x, c))


def test_exit_codes(proving: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    proving(theorem_of(TRUE))
    assert command.main([]) == 0
    assert "theorems 1/1 proved" in capsys.readouterr().out
    proving(theorem_of(TRUE, FALSE_CLAIMS[1]))
    assert command.main([]) == 1
    assert "REFUTED: floor is ceiling [x any, c >= 1]; false at x = 1, c = 2" in capsys.readouterr().out
    proving(theorem_of(TRUE))
    assert command.main(["--timeout", "0.000001"]) == 3
    assert "UNDETERMINED: true [x any, c >= 1]; out of time" in capsys.readouterr().out
    unknown = Claim("vacuous", (x,), lambda x: x == x, (Hypothesis("x < x", lambda x: x < x),))
    proving(theorem_of(unknown, FALSE_CLAIMS[1]))
    assert command.main([]) == 1  # a refutation outweighs what is undetermined


def test_json_to_standard_output_is_json_alone(
    proving: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    proving(theorem_of(TRUE))
    assert command.main(["--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0


def test_results_that_cannot_be_written_exit_2(
    proving: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proving(theorem_of(TRUE))
    assert command.main(["--json", str(tmp_path / "no" / "run.json")]) == 2
    assert "its folder does not exist; make it first" in capsys.readouterr().err


def test_ctrl_c_while_a_solver_decides_reaches_python() -> None:
    """A script that takes z3 far longer than the limit of this test."""
    cubes = "(+ (* x x x) (* y y y) (* z z z))"
    script = f"(declare-const x Int)(declare-const y Int)(declare-const z Int)(assert (= {cubes} 114))"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever runs the tests has set
    signaller = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began = time.perf_counter()
    try:
        signaller.start()
        with pytest.raises(KeyboardInterrupt):
            solvers.solver("z3").check(script, 60.0, 0)
        signaller.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - began < 20


# -- mutants -------------------------------------------------------------------------------------------------


def test_mutants_change_a_formula_in_one_place() -> None:
    names = [mutant.name for mutant in mutants.mutants_of(mutants.cores()["span_blocks"])]
    assert "span_blocks: result +1" in names
    assert "span_blocks: drop tokens in start + tokens" in names
    assert "span_blocks: divide by start in floordiv(start, block)" in names
    assert len(set(names)) == len(names) > 8


def test_a_mutant_is_seen_by_every_caller_and_then_gone() -> None:
    (more,) = (m for m in mutants.mutants_of(mutants.cores()["floordiv"]) if m.change == "result +1")
    with mutants.in_place(more):
        assert cov.span_blocks(0, 4, 4) != 1 or cdiv(4, 4) == 0
        assert floordiv(4, 4) == 2
    assert floordiv(4, 4) == 1


def test_a_formula_without_a_theorem_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "theorems_of", lambda group: (theorem_of(TRUE),))
    assert mutants.main(["span_blocks", "cdiv"]) == 1
    printed = capsys.readouterr().out
    assert "UNUSED      span_blocks: no claim runs it" in printed
    assert "SURVIVES    cdiv: result +1" in printed and "result -1" in printed.replace("SURVIVES", "")


def test_an_unknown_function_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["nothing"]) == 2
    assert capsys.readouterr().err.startswith("no core named nothing; one of: ")


@pytest.mark.slow
def test_every_mutant_of_every_formula_refutes_a_theorem(capsys: pytest.CaptureFixture[str]) -> None:
    code = mutants.main([])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.splitlines()[-1].endswith("surviving 0, unused 0")
