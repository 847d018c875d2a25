"""From a claim to a verdict.

1. The hypotheses are shown satisfiable by an instance that Python evaluates (an empty domain proves
anything). 2. The claim is run symbolically.  Each path contributes: conditions and hypotheses hold, and the
claim does not,
   or a divisor is not positive.  The disjunction of these goes to the solver with every product of symbols as
   one opaque unknown, next to the instances of proved lemmas.  Unsatisfiable: proved, since forgetting what a
   product means only makes a counterexample easier to find.
3. Otherwise plain integers are tried in order of their sum, and then the solver with real products.  A
   counterexample counts only after Python has run it.
4. Neither: undetermined.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from spec.prove import lemmas
from spec.prove.solvers import Solver
from spec.prove.symbolic import (
    FALSE,
    TRUE,
    Context,
    Formula,
    Int,
    Monomial,
    Poly,
    TooManyPaths,
    Truth,
    Undefined,
    conjunction,
    disjunction,
    formula_of,
    monomial_name,
    negate,
    products_of,
    show_poly,
    smt_formula,
)
from spec.prove.theorem import Claim, Lemma, Refutation, Symbol, Theorem, Values, apply, parameters

Verdict = Literal["proved", "refuted", "undetermined"]

SEARCH_BUDGET = 300_000
"""Assignments tried when a smallest counterexample is sought; a count, so that results do not depend on the
machine.
"""

FIRST_TRY_S = 2.0
"""How long the solver may think about real products before plain integers are tried."""


@dataclass(frozen=True, slots=True)
class Obligation:
    """A claim's failure as a formula over atoms, with the facts that may be used against it."""

    claim: Claim
    atoms: tuple[str, ...]
    facts: tuple[Formula, ...]
    failure: Formula
    products: tuple[Monomial, ...]
    lemmas: tuple[Lemma, ...]
    paths: int
    notes: tuple[str, ...]

    def script(self, real_products: bool) -> str:
        """SMT-LIB 2 text that is unsatisfiable iff the claim holds (given the lemmas, when products are
        opaque).
        """
        lines = [f"; {self.claim.name}: unsat means that the claim holds"]
        lines += [f"; {note}" for note in self.notes]
        lines.append(f"(set-logic {'QF_NIA' if real_products and self.products else 'QF_LIA'})")
        lines += [f"(declare-const {atom} Int)" for atom in self.atoms]
        for monomial in self.products:
            name = monomial_name(monomial)
            if real_products:
                lines.append(f"(define-fun {name} () Int (* {' '.join(monomial)}))")
            else:
                lines.append(f"(declare-const {name} Int)")
        lines += [f"(assert {smt_formula(fact)})" for fact in self.facts]
        lines.append(f"(assert {smt_formula(self.failure)})")
        return "\n".join(lines) + "\n"


def _domain(symbols: tuple[Symbol, ...], values: Values) -> list[Truth]:
    return [values[s.name] >= s.least for s in symbols if s.least is not None]


def obligation(claim: Claim, fixed: dict[str, int] | None = None) -> Obligation:
    """Run a claim symbolically; symbols named in `fixed` are plain numbers."""
    context = Context()
    fixed = fixed or {}
    values: Values = {
        s.name: fixed[s.name] if s.name in fixed else context.symbol(s.name) for s in claim.symbols
    }
    domain = [formula_of(t) for t in _domain(claim.symbols, values)]
    used: dict[str, Lemma] = {}
    failures: list[Formula] = []
    # An instance of a lemma holds on every path (`Lemma.__call__` refuses one that forks), so it is stated
    # once, not on the path whose hints named it.
    instances: dict[Formula, None] = {}

    def run() -> Formula:
        try:
            return claimed()
        except Undefined:
            return FALSE

    def claimed() -> Formula:
        for part in domain:
            if part != TRUE:
                context.assume(part)
        for hypothesis in claim.hypotheses:
            premise = formula_of(apply(hypothesis.holds, values))
            if premise == FALSE:
                return TRUE
            if premise != TRUE:
                context.assume(premise)
        conclusion = formula_of(apply(claim.holds, values))
        for use in apply(claim.hints, values):
            if used.setdefault(use.lemma.name, use.lemma) is not use.lemma:
                raise RuntimeError(f"two lemmas are named {use.lemma.name}")
            instances[formula_of(use.instance)] = None
        return conclusion

    paths = context.explore(run)
    for path in paths:
        failures.append(conjunction(*dict.fromkeys((*path.conditions, negate(path.result)))))
        for assumed, divisor in path.obligations:
            positive = formula_of(Int(context, divisor) >= 1)
            if positive in path.conditions[:assumed]:
                continue  # stated as it stands by the path, most often by a symbol's domain
            failures.append(conjunction(*path.conditions[:assumed], negate(positive)))

    facts = [*domain, *instances]
    notes = []
    for division in context.divisions.values():
        q = Int(context, (((division.atom,), 1),))
        c = Int(context, division.divisor)
        remainder = Int(context, division.dividend) - q * c
        euclid = conjunction(formula_of(remainder >= 0), formula_of(remainder < c))
        facts.append(disjunction(negate(formula_of(c >= 1)), euclid))
        notes.append(
            f"{division.atom} = floor(({show_poly(division.dividend)}) / ({show_poly(division.divisor)}))"
        )
    failure = disjunction(*dict.fromkeys(failures)) if failures else FALSE
    for lemma, found in (
        (lemmas.monotone, _monotone_instances(context)),
        (lemmas.nonnegative, _scaled_comparisons(context, (*facts, failure))),
    ):
        if found and claim not in (lemmas.monotone.claim, lemmas.nonnegative.claim):
            facts += found
            used[lemma.name] = lemma

    products: set[Monomial] = set()
    for formula in (*facts, failure):
        products_of(formula, products)
    return Obligation(
        claim,
        tuple(context.atoms),
        tuple(f for f in facts if f != TRUE),
        failure,
        tuple(sorted(products)),
        tuple(used.values()),
        len(paths),
        tuple(notes),
    )


def _symbolic_divisors(context: Context) -> dict[Poly, list[Int]]:
    """The divisors that are not numbers, each with its quotients."""
    found: dict[Poly, list[Int]] = {}
    for division in context.divisions.values():
        if any(monomial for monomial, _ in division.divisor):
            found.setdefault(division.divisor, []).append(Int(context, (((division.atom,), 1),)))
    return found


def _monotone_instances(context: Context) -> list[Formula]:
    """`monotone` for zero and each pair of quotients that share a divisor, and for the factors of a
    divisor.
    """
    facts: list[Formula] = []

    def state(u: Int, v: Int, c: Int) -> None:
        guards = negate(formula_of(c >= 1)), negate(formula_of(u < v))
        facts.append(disjunction(*guards, formula_of(u * c + c <= v * c)))

    for divisor, quotients in _symbolic_divisors(context).items():
        ends = [context.int(0), *quotients]
        for u in ends:
            for v in ends:
                if u is not v:
                    state(u, v, Int(context, divisor))
        factors = divisor[0][0] if len(divisor) == 1 else ()
        for size in range(1, len(factors)):
            rest = Int(context, ((factors[:size], 1),))
            state(context.int(0), Int(context, (((factors[size],), 1),)), rest)
    return list(dict.fromkeys(facts))


def _scaled_comparisons(context: Context, formulas: tuple[Formula, ...]) -> list[Formula]:
    """`nonnegative` for each comparison between quotients of one divisor, times that divisor."""
    compared: dict[Poly, None] = {}

    def collect(formula: Formula) -> None:
        if formula[0] in ("ge", "eq"):
            value = Int(context, formula[1])
            compared[value.poly] = None
            compared[(-value if formula[0] == "eq" else -value - 1).poly] = None
        else:
            for part in formula[1:]:
                collect(part)

    for formula in formulas:
        collect(formula)
    facts = []
    for divisor, quotients in _symbolic_divisors(context).items():
        names = {q.poly[0][0] for q in quotients}
        c = Int(context, divisor)
        for poly in compared:
            if any(m in names for m, _ in poly) and all(len(m) < 2 for m, _ in poly):
                value = Int(context, poly)
                guards = negate(formula_of(c >= 1)), negate(formula_of(value >= 0))
                facts.append(disjunction(*guards, formula_of(value * c >= 0)))
    return list(dict.fromkeys(facts))


# plain integers -------------------------------------------------------------------------------------------


def holds_at(claim: Claim, values: dict[str, int]) -> tuple[bool, bool]:
    """(domain and hypotheses hold, claim holds) at a point, by running Python."""
    admitted = all(bool(t) for t in _domain(claim.symbols, values)) and all(
        bool(apply(h.holds, values)) for h in claim.hypotheses
    )
    return admitted, admitted and bool(apply(claim.holds, values))


def _candidates(symbol: Symbol, cost: int) -> tuple[int, ...]:
    if symbol.least is not None:
        return (symbol.least + cost,)
    return (cost,) if cost == 0 else (cost, -cost)


class BudgetExhausted(RuntimeError):
    """The search tried as many assignments as it may."""


@dataclass(slots=True)
class Search:
    """Points of a claim's domain in order of their sum above the least values, hypotheses pruned early."""

    claim: Claim
    budget: int
    deadline: float = float("inf")
    tried: int = 0
    _checks: list[list[Callable[..., Truth]]] = field(default_factory=list)
    _names: dict[Callable[..., Truth], tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [s.name for s in self.claim.symbols]
        self._checks = [[] for _ in names]
        for hypothesis in self.claim.hypotheses:
            wanted = parameters(hypothesis.holds)
            self._names[hypothesis.holds] = wanted
            last = max((names.index(n) for n in wanted), default=0)
            self._checks[last].append(hypothesis.holds)

    def _extend(self, values: dict[str, int], depth: int, left: int) -> Iterator[dict[str, int]]:
        symbols = self.claim.symbols
        if depth == len(symbols):
            yield values
            return
        costs = (left,) if depth == len(symbols) - 1 else range(left + 1)
        for cost in costs:
            for value in _candidates(symbols[depth], cost):
                self.tried += 1
                if self.tried > self.budget or (
                    self.tried % 256 == 0 and time.perf_counter() > self.deadline
                ):
                    raise BudgetExhausted
                values[symbols[depth].name] = value
                if all(bool(c(**{n: values[n] for n in self._names[c]})) for c in self._checks[depth]):
                    yield from self._extend(values, depth + 1, left - cost)

    def points(self) -> Iterator[dict[str, int]]:
        """Every admitted point, smallest sum first, then lexicographic; raises BudgetExhausted at the end."""
        total = 0
        while True:
            yield from self._extend({}, 0, total)
            total += 1


def smallest_counterexample(
    claim: Claim, budget: int, deadline: float = float("inf")
) -> dict[str, int] | None:
    """The admitted point of least sum (then least in the order of the symbols) where the claim fails."""
    names = parameters(claim.holds)
    try:
        for values in Search(claim, budget, deadline).points():
            if not bool(claim.holds(**{n: values[n] for n in names})):
                return dict(values)
    except BudgetExhausted:
        return None
    return None


def instance_of(claim: Claim, budget: int = SEARCH_BUDGET) -> dict[str, int] | None:
    """The smallest point that satisfies domain and hypotheses."""
    try:
        return dict(next(Search(claim, budget).points()))
    except BudgetExhausted:
        return None


# verdicts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The verdict on one claim."""

    claim: Claim
    verdict: Verdict
    seconds: float
    lemmas: tuple[Lemma, ...] = ()
    paths: int = 0
    products: Literal["opaque", "real"] | None = None
    """How the deciding script saw products of symbols."""
    instance: dict[str, int] | None = None
    counterexample: dict[str, int] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RefutationResult:
    """The verdict on a formula that a theorem refutes: smallest, reported and the solver's own
    counterexample.
    """

    refutation: Refutation
    verdict: Verdict
    seconds: float
    smallest: dict[str, int] | None = None
    solver: dict[str, int] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TheoremResult:
    """One row: the theorem, its verdict, and those of its claims and refutations."""

    theorem: Theorem
    verdict: Verdict
    seconds: float
    claims: tuple[ClaimResult, ...]
    refutes: tuple[RefutationResult, ...]

    @property
    def lemmas(self) -> tuple[str, ...]:
        """The lemmas that the proofs used, in order of first use."""
        return tuple(dict.fromkeys(lemma.name for result in self.claims for lemma in result.lemmas))


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: the solver, its seed, the limit of a theorem in seconds, and where scripts go."""

    solver: Solver
    timeout_s: float = 60.0
    seed: int = 0
    smt2: Path | None = None


def _write(settings: Settings, name: str, status: str, script: str) -> None:
    if settings.smt2 is None:
        return
    text = f"(set-info :status {status})\n{script}(check-sat)\n"
    safe = "".join(ch if ch.isalnum() else "_" for ch in name)[:60].strip("_")
    (settings.smt2 / f"{safe}.smt2").write_text(text)


def _model_point(claim: Claim, model: dict[str, int], fixed: dict[str, int]) -> dict[str, int]:
    # A symbol that the solver left out of its model may take any value; its least will do.
    return {s.name: fixed.get(s.name, model.get(s.name, s.least or 0)) for s in claim.symbols}


def prove_claim(claim: Claim, settings: Settings, deadline: float, label: str) -> ClaimResult:
    """Prove or refute one claim before the deadline."""
    began = time.perf_counter()

    def result(verdict: Verdict, **extra: object) -> ClaimResult:
        found = ClaimResult(claim, verdict, time.perf_counter() - began)
        return replace(found, **extra)  # type: ignore[arg-type]

    if began >= deadline:
        return result("undetermined", reason="out of time")
    instance = instance_of(claim)
    if instance is None:
        return result("undetermined", reason="no instance of the hypotheses was found")
    try:
        owed = obligation(claim)
    except TooManyPaths as many:
        return result("undetermined", instance=instance, reason=str(many))
    common = {"lemmas": owed.lemmas, "paths": owed.paths, "instance": instance}
    left = deadline - time.perf_counter()
    if left <= 0:
        return result("undetermined", reason="out of time", **common)
    answer = settings.solver.check(owed.script(real_products=False), left, settings.seed)
    if answer.status == "unsat":
        _write(settings, label, "unsat", owed.script(real_products=True))
        return result("proved", products="opaque", **common)
    point, exact, why = None, not owed.products, ""
    for limit_s in (FIRST_TRY_S, settings.timeout_s):
        left = min(limit_s, deadline - time.perf_counter())
        if owed.products and left > 0:
            answer = settings.solver.check(owed.script(real_products=True), left, settings.seed)
            exact = True
        if answer.status == "unsat":
            _write(settings, label, "unsat", owed.script(real_products=True))
            return result("proved", products="real", **common)
        point = smallest_counterexample(claim, SEARCH_BUDGET, deadline)
        if point is not None or answer.status == "sat":
            break
    if point is None and answer.status == "sat":
        candidate = _model_point(claim, answer.model, {})
        admitted, holds = holds_at(claim, candidate)
        if admitted and not holds:
            point = candidate
        elif admitted and exact:
            why = ", but Python runs the claim there and it holds (is a divisor negative?)"
    _write(settings, label, "unknown" if point is None else "sat", owed.script(real_products=True))
    if point is not None:
        return result("refuted", counterexample=point, **common)
    reason = f"{settings.solver.name} answered {answer.status}{why}"
    return result("undetermined", reason=reason, **common)


def refute(refutation: Refutation, settings: Settings, deadline: float, label: str) -> RefutationResult:
    """Refute a formula three times: at the reported witness, at the smallest, and by the solver."""
    began = time.perf_counter()
    claim = refutation.claim

    def result(verdict: Verdict, **extra: object) -> RefutationResult:
        found = RefutationResult(refutation, verdict, time.perf_counter() - began)
        return replace(found, **extra)  # type: ignore[arg-type]

    if began >= deadline:
        return result("undetermined", reason="out of time")
    admitted, holds = holds_at(claim, refutation.witness)
    if not admitted or holds:
        why = "the claim holds there" if admitted else "it is outside the domain"
        return result("undetermined", reason=f"the reported witness does not refute: {why}")
    smallest = smallest_counterexample(claim, SEARCH_BUDGET, deadline) or dict(refutation.witness)
    fixed = {name: smallest[name] for name in refutation.pin}
    owed = obligation(claim, fixed)
    left = deadline - time.perf_counter()
    if left <= 0:
        return result("undetermined", smallest=smallest, reason="out of time")
    script = owed.script(real_products=True)
    answer = settings.solver.check(script, left, settings.seed)
    if answer.status != "sat":
        return result(
            "undetermined", smallest=smallest, reason=f"{settings.solver.name} answered {answer.status}"
        )
    point = _model_point(claim, answer.model, fixed)
    admitted, holds = holds_at(claim, point)
    if not admitted or holds:
        return result(
            "undetermined",
            smallest=smallest,
            reason=f"{settings.solver.name} gave a model that Python rejects",
        )
    _write(settings, label, "sat", script)
    return result("refuted", smallest=smallest, solver=point)


def prove_theorem(theorem: Theorem, settings: Settings) -> TheoremResult:
    """Prove every claim of a theorem and refute every formula it names, within one time limit."""
    began = time.perf_counter()
    deadline = began + settings.timeout_s
    claims = tuple(
        prove_claim(claim, settings, deadline, f"{theorem.number:02d} claim {index:02d} {claim.name}")
        for index, claim in enumerate(theorem.claims, 1)
    )
    refutes = tuple(
        refute(refutation, settings, deadline, f"{theorem.number:02d} refutes {index} {refutation.formula}")
        for index, refutation in enumerate(theorem.refutes, 1)
    )
    verdicts = {result.verdict for result in claims}
    verdict: Verdict = (
        "refuted" if "refuted" in verdicts else "undetermined" if "undetermined" in verdicts else "proved"
    )
    return TheoremResult(theorem, verdict, time.perf_counter() - began, claims, refutes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run: theorems, and the lemmas that their proofs used."""

    theorems: tuple[TheoremResult, ...]
    lemmas: tuple[ClaimResult, ...]


def prove_all(
    theorems: tuple[Theorem, ...],
    settings: Settings,
    on_result: Callable[[TheoremResult], None] = lambda result: None,
) -> Outcome:
    """Prove theorems, then every lemma that a proof used; `on_result` hears of each theorem at once."""
    results = []
    for theorem in theorems:
        results.append(prove_theorem(theorem, settings))
        on_result(results[-1])
    proved: dict[str, ClaimResult] = {}

    def prove_lemma(lemma: Lemma, users: tuple[str, ...]) -> None:
        if lemma.name in users:
            raise RuntimeError(f"lemma {lemma.name} is used in its own proof: {' <- '.join(users)}")
        if lemma.name in proved:
            if proved[lemma.name].claim is not lemma.claim:
                raise RuntimeError(f"two lemmas are named {lemma.name}")
            return
        for needed in obligation(lemma.claim).lemmas:
            prove_lemma(needed, (*users, lemma.name))
        deadline = time.perf_counter() + settings.timeout_s
        proved[lemma.name] = prove_claim(lemma.claim, settings, deadline, f"lemma {lemma.name}")

    for result in results:
        for claim in result.claims:
            for lemma in claim.lemmas:
                prove_lemma(lemma, ())
    return Outcome(tuple(results), tuple(proved.values()))
