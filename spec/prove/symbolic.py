"""Symbolic integers that run plain Python formulas.

A formula that divides, compares and branches cannot be given solver terms directly: `min`, `if` and `//`
want real numbers and real truth values.  Here an `Int` is a polynomial over named atoms, a comparison gives
a `Bool`, and a `Bool` that Python asks for its truth value *forks* the run: `explore` runs the function
once for every consistent sequence of answers and returns one path each, with the conditions that the path
assumed.

Division is Euclid's: `x // c` is a fresh atom q with 0 <= x - q*c < c, and `x % c` is x - q*c over the
*same* q, one q for each pair (x, c) up to normal form.  So `-(-n // c)` and `(-n) % c` share a quotient,
which is what makes proofs about padding short.  The definition is stated under the guard c > 0, and c > 0
itself is an obligation of the path that divided: assuming it would prove anything.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

Monomial = tuple[str, ...]
"""Sorted atom names, with repetition; the empty tuple is the constant 1."""

Poly = tuple[tuple[Monomial, int], ...]
"""Sorted (monomial, coefficient) pairs without zero coefficients."""

Formula = tuple[Any, ...]
"""("ge", poly) for poly >= 0, ("eq", poly) for poly = 0, ("not", f), ("and", ...), ("or", ...); ("and",) is
true.
"""

TRUE: Formula = ("and",)
FALSE: Formula = ("or",)


def _poly(terms: dict[Monomial, int]) -> Poly:
    return tuple(sorted((m, c) for m, c in terms.items() if c))


def constant_of(poly: Poly) -> int:
    """The coefficient of the empty monomial."""
    return poly[0][1] if poly and poly[0][0] == () else 0


def _shape(poly: Poly) -> tuple[Poly, int]:
    """The polynomial without its constant, and the constant."""
    if poly and poly[0][0] == ():
        return poly[1:], poly[0][1]
    return poly, 0


class Int:
    """A symbolic integer: a polynomial with integer coefficients over the atoms of one `Context`."""

    __slots__ = ("context", "poly")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, context: "Context", poly: Poly) -> None:
        self.context = context
        self.poly = poly

    def _combine(self, other: "Int | int", sign: int) -> "Int":
        terms = dict(self.poly)
        for monomial, coefficient in self.context.int(other).poly:
            terms[monomial] = terms.get(monomial, 0) + sign * coefficient
        return Int(self.context, _poly(terms))

    def __add__(self, other: "Int | int") -> "Int":
        return self._combine(other, 1)

    __radd__ = __add__

    def __sub__(self, other: "Int | int") -> "Int":
        return self._combine(other, -1)

    def __rsub__(self, other: "Int | int") -> "Int":
        return (-self)._combine(other, 1)

    def __neg__(self) -> "Int":
        return Int(self.context, tuple((m, -c) for m, c in self.poly))

    def __pos__(self) -> "Int":
        return self

    def __mul__(self, other: "Int | int") -> "Int":
        terms: dict[Monomial, int] = {}
        for left, a in self.poly:
            for right, b in self.context.int(other).poly:
                monomial = tuple(sorted(left + right))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return Int(self.context, _poly(terms))

    __rmul__ = __mul__

    def __floordiv__(self, other: "Int | int") -> "Int":
        return self.context.quotient(self.poly, self.context.int(other).poly)

    def __rfloordiv__(self, other: int) -> "Int":
        return self.context.quotient(self.context.int(other).poly, self.poly)

    def __mod__(self, other: "Int | int") -> "Int":
        return self - (self // other) * other

    def __rmod__(self, other: int) -> "Int":
        return other - (other // self) * self

    def __ge__(self, other: "Int | int") -> "Bool":
        return self.context.ge(self - other)

    def __le__(self, other: "Int | int") -> "Bool":
        return self.context.ge(-(self - other))

    def __gt__(self, other: "Int | int") -> "Bool":
        return self.context.ge(self - other - 1)

    def __lt__(self, other: "Int | int") -> "Bool":
        return self.context.ge(-(self - other) - 1)

    def __eq__(self, other: "Int | int") -> "Bool":  # type: ignore[override]
        return self.context.eq(self - other)

    def __ne__(self, other: "Int | int") -> "Bool":  # type: ignore[override]
        return self.context.eq(self - other).negated()

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __abs__(self) -> "Int":
        return self if self >= 0 else -self

    def __index__(self) -> NoReturn:
        raise TypeError("a symbolic integer has no value; a loop over data needs a named contract")

    def __repr__(self) -> str:
        return show_poly(self.poly)


class Bool:
    """A symbolic truth value; asking for its truth (`if`, `and`, `or`, `not`, `min`, `max`) forks the run."""

    __slots__ = ("context", "formula")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, context: "Context", formula: Formula) -> None:
        self.context = context
        self.formula = formula

    def __bool__(self) -> bool:
        return self.context.decide(self.formula)

    def __repr__(self) -> str:
        return "a symbolic truth value"

    def negated(self) -> "Bool":
        return Bool(self.context, negate(self.formula))

    def __invert__(self) -> "Bool":
        return self.negated()

    def __and__(self, other: "Bool | bool") -> "Bool":
        return Bool(self.context, conjunction(self.formula, formula_of(other)))

    __rand__ = __and__

    def __or__(self, other: "Bool | bool") -> "Bool":
        return Bool(self.context, disjunction(self.formula, formula_of(other)))

    __ror__ = __or__

    def __eq__(self, other: object) -> "Bool":  # type: ignore[override]
        if not isinstance(other, Bool | bool):
            return NotImplemented
        a, b = self.formula, formula_of(other)
        return Bool(self.context, conjunction(disjunction(negate(a), b), disjunction(negate(b), a)))

    def __ne__(self, other: object) -> "Bool":  # type: ignore[override]
        same = self.__eq__(other)
        return NotImplemented if same is NotImplemented else same.negated()


Truth = Bool | bool


def formula_of(truth: Truth) -> Formula:
    """The formula of a truth value, symbolic or plain."""
    if isinstance(truth, Bool):
        return truth.formula
    if not isinstance(truth, bool):
        raise TypeError(f"expected a truth value, got {truth!r}")
    return TRUE if truth else FALSE


def negate(formula: Formula) -> Formula:
    """The negation, pushed through one level where that is free."""
    if formula == TRUE:
        return FALSE
    if formula == FALSE:
        return TRUE
    if formula[0] == "not":
        inner: Formula = formula[1]
        return inner
    if formula[0] == "ge":  # not (p >= 0)  <=>  -p - 1 >= 0, over the integers
        terms = {m: -c for m, c in formula[1]}
        terms[()] = terms.get((), 0) - 1
        return ("ge", _poly(terms))
    return ("not", formula)


def conjunction(*parts: Formula) -> Formula:
    """The conjunction, flat, without trivial parts."""
    flat: list[Formula] = []
    for part in parts:
        if part == FALSE:
            return FALSE
        if part[0] == "and":
            flat.extend(part[1:])
        else:
            flat.append(part)
    return flat[0] if len(flat) == 1 else ("and", *flat)


def disjunction(*parts: Formula) -> Formula:
    """The disjunction, flat, without trivial parts."""
    flat: list[Formula] = []
    for part in parts:
        if part == TRUE:
            return TRUE
        if part[0] == "or":
            flat.extend(part[1:])
        else:
            flat.append(part)
    return flat[0] if len(flat) == 1 else ("or", *flat)


@dataclass(frozen=True, slots=True)
class Division:
    """A quotient atom with its operands."""

    atom: str
    dividend: Poly
    divisor: Poly


@dataclass(frozen=True, slots=True)
class Path:
    """One run of a function: what it assumed, which divisors it owes to be positive, and what it returned."""

    conditions: tuple[Formula, ...]
    obligations: tuple[tuple[int, Poly], ...]
    """(number of conditions assumed when dividing, divisor)."""
    result: Any


class TooManyPaths(RuntimeError):
    """A function forked more often than `Context.max_paths`."""


class Forked(RuntimeError):
    """What is to be stated on every path asked for a truth value, so it would hold on one path only."""


class Undefined(RuntimeError):
    """A formula has no value on this path: what is claimed there fails, unless nothing takes the path."""


@dataclass(slots=True)
class Context:
    """The atoms of one obligation, the divisions made over them, and the path that is being run."""

    max_paths: int = 4096
    atoms: list[str] = field(default_factory=list)
    divisions: dict[tuple[Poly, Poly], Division] = field(default_factory=dict)
    _prefix: tuple[bool, ...] = ()
    _taken: list[bool] = field(default_factory=list)
    _pending: list[tuple[bool, ...]] = field(default_factory=list)
    _conditions: list[Formula] = field(default_factory=list)
    _lower: dict[Poly, int] = field(default_factory=dict)
    _known: dict[Formula, bool] = field(default_factory=dict)
    _obligations: list[tuple[int, Poly]] = field(default_factory=list)
    _unforked: str | None = None

    def symbol(self, name: str) -> Int:
        """A new atom."""
        if name in self.atoms:
            raise ValueError(f"two atoms named {name}")
        self.atoms.append(name)
        return Int(self, (((name,), 1),))

    def int(self, value: "Int | int") -> Int:
        """A symbolic integer of either kind of integer."""
        if isinstance(value, Int):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"a symbolic integer meets {value!r}")
        return Int(self, (((), value),) if value else ())

    # comparisons ------------------------------------------------------------------------------------------

    def ge(self, value: Int) -> Bool:
        """value >= 0."""
        shape, constant = _shape(value.poly)
        if not shape:
            return Bool(self, TRUE if constant >= 0 else FALSE)
        return Bool(self, ("ge", value.poly))

    def eq(self, value: Int) -> Bool:
        """value = 0."""
        shape, constant = _shape(value.poly)
        if not shape:
            return Bool(self, TRUE if constant == 0 else FALSE)
        poly = value.poly if value.poly[-1][1] > 0 else (-value).poly
        return Bool(self, ("eq", poly))

    # division ---------------------------------------------------------------------------------------------

    def quotient(self, dividend: Poly, divisor: Poly) -> Int:
        """The floor quotient, one atom for each pair of operands; records the obligation divisor > 0.

        Where the divisor is negative by its signs alone, as in `-(x // -c)`, both operands are negated."""
        if divisor and all(coefficient < 0 for _, coefficient in divisor):
            dividend, divisor = ((-Int(self, poly)).poly for poly in (dividend, divisor))
        shape, constant = _shape(divisor)
        if not shape:
            if constant <= 0:
                raise ZeroDivisionError(f"a divisor of {constant}")
            if not _shape(dividend)[0]:
                return self.int(constant_of(dividend) // constant)
            if constant == 1:
                return Int(self, dividend)
        else:
            self._obligations.append((len(self._conditions), divisor))
        if not dividend:
            return self.int(0)
        found = self.divisions.get((dividend, divisor))
        if found is None:
            found = Division(f"div{len(self.divisions) + 1}", dividend, divisor)
            self.divisions[dividend, divisor] = found
            self.atoms.append(found.atom)
        return Int(self, (((found.atom,), 1),))

    # forking ----------------------------------------------------------------------------------------------

    def _implied(self, formula: Formula) -> bool | None:
        """What the path already decided, by the formula itself or by a bound on the same polynomial."""
        if formula == TRUE:
            return True
        if formula == FALSE:
            return False
        known = self._known.get(formula)
        if known is not None or formula[0] != "ge":
            return known
        shape, constant = _shape(formula[1])
        least = self._lower.get(shape)
        if least is not None and least + constant >= 0:
            return True
        opposite = tuple((m, -c) for m, c in shape)
        least = self._lower.get(opposite)
        if least is not None and least - constant >= 1:  # -shape >= least > constant, so shape + constant < 0
            return False
        return None

    def _learn(self, formula: Formula) -> None:
        self._known[formula] = True
        self._known[negate(formula)] = False
        if formula[0] == "ge":
            shape, constant = _shape(formula[1])
            self._lower[shape] = max(self._lower.get(shape, -constant), -constant)
        if formula[0] == "and":
            for part in formula[1:]:
                self._learn(part)

    def assume(self, formula: Formula) -> None:
        """Add a condition that later forks of this run may rely on."""
        self._conditions.append(formula)
        self._learn(formula)

    def decide(self, formula: Formula) -> bool:
        """The truth of a formula on this path; forks where the path has not decided it.

        Raises Forked inside `unforked`, also where the path has decided it: the answer is this path's.
        """
        if self._unforked is not None and formula not in (TRUE, FALSE):
            raise Forked(
                f"{self._unforked} asks for a truth value (if, and, or, not, min, max), so what it states "
                "holds on one path only; state it by both, either, implies and comparisons"
            )
        implied = self._implied(formula)
        if implied is not None:
            return implied
        position = len(self._taken)
        if position < len(self._prefix):
            answer = self._prefix[position]
        else:
            if len(self._pending) >= self.max_paths:  # now, not when this path ends: a loop may never end
                raise TooManyPaths(f"more than {self.max_paths} paths")
            answer = True
            self._pending.append((*self._taken, False))
        self._taken.append(answer)
        self.assume(formula if answer else negate(formula))
        return answer

    @contextmanager
    def unforked(self, what: str) -> Iterator[None]:
        """Within it nothing may fork: what is evaluated is one formula, the same on every path."""
        before, self._unforked = self._unforked, what
        try:
            yield
        finally:
            self._unforked = before

    def explore(self, function: Callable[[], Any]) -> list[Path]:
        """Every path of a function of no arguments over this context's integers."""
        paths: list[Path] = []
        self._pending = [()]
        while self._pending:
            self._prefix = self._pending.pop()
            self._taken = []
            self._conditions = []
            self._obligations = []
            self._lower = {}
            self._known = {}
            result = function()
            paths.append(Path(tuple(self._conditions), tuple(self._obligations), result))
            if len(paths) > self.max_paths:
                raise TooManyPaths(f"more than {self.max_paths} paths")
        return paths


# truth values that do not fork, for statements ------------------------------------------------------------


def both(*parts: Truth) -> Truth:
    """Conjunction without forking; plain when every part is plain."""
    symbolic = [p for p in parts if isinstance(p, Bool)]
    if not symbolic:
        return all(parts)
    return Bool(symbolic[0].context, conjunction(*(formula_of(p) for p in parts)))


def either(*parts: Truth) -> Truth:
    """Disjunction without forking."""
    symbolic = [p for p in parts if isinstance(p, Bool)]
    if not symbolic:
        return any(parts)
    return Bool(symbolic[0].context, disjunction(*(formula_of(p) for p in parts)))


def negation(part: Truth) -> Truth:
    """Negation without forking."""
    return part.negated() if isinstance(part, Bool) else not part


def implies(premise: Truth, conclusion: Truth) -> Truth:
    """Implication without forking."""
    return either(negation(premise), conclusion)


def iff(left: Truth, right: Truth) -> Truth:
    """Equivalence without forking."""
    return both(implies(left, right), implies(right, left))


# printing -------------------------------------------------------------------------------------------------


def show_poly(poly: Poly) -> str:
    """A polynomial for people."""
    if not poly:
        return "0"
    text = ""
    for monomial, coefficient in sorted(poly, key=lambda term: (-len(term[0]), term[0])):
        sign = "-" if coefficient < 0 else "+" if text else ""
        factors = "*".join(monomial)
        size = abs(coefficient)
        body = factors if factors and size == 1 else f"{size}*{factors}" if factors else str(size)
        text += f" {sign} {body}" if text else f"{sign}{body}"
    return text


def monomial_name(monomial: Monomial) -> str:
    """The SMT-LIB name of a monomial; a product is one name, defined or declared by the script."""
    return monomial[0] if len(monomial) == 1 else "|" + "*".join(monomial) + "|"


def _smt_int(value: int) -> str:
    return str(value) if value >= 0 else f"(- {-value})"


def smt_poly(poly: Poly) -> str:
    """An SMT-LIB term of a polynomial."""
    parts = []
    for monomial, coefficient in poly:
        if not monomial:
            parts.append(_smt_int(coefficient))
        elif coefficient == 1:
            parts.append(monomial_name(monomial))
        else:
            parts.append(f"(* {_smt_int(coefficient)} {monomial_name(monomial)})")
    if not parts:
        return "0"
    return parts[0] if len(parts) == 1 else f"(+ {' '.join(parts)})"


def smt_formula(formula: Formula) -> str:
    """An SMT-LIB term of a formula."""
    kind = formula[0]
    if kind == "ge":
        return f"(>= {smt_poly(formula[1])} 0)"
    if kind == "eq":
        return f"(= {smt_poly(formula[1])} 0)"
    if kind == "not":
        return f"(not {smt_formula(formula[1])})"
    if formula == TRUE:
        return "true"
    if formula == FALSE:
        return "false"
    return f"({kind} {' '.join(smt_formula(part) for part in formula[1:])})"


def products_of(formula: Formula, found: set[Monomial]) -> None:
    """Collect the monomials of two or more factors."""
    if formula[0] in ("ge", "eq"):
        found.update(m for m, _ in formula[1] if len(m) > 1)
    else:
        for part in formula[1:]:
            products_of(part, found)
