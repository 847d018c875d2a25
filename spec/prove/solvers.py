"""z3 and cvc5 behind one small interface: an SMT-LIB 2 script in, a status and a model out.

Both solvers read the same text, the one that `--smt2` writes, so a file that is checked elsewhere is the
obligation that was checked here.
"""

import math
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Status = Literal["sat", "unsat", "unknown"]

INSTALL_HINT = {"z3": "pip install -e .", "cvc5": "pip install -e '.[dev]'"}

INTERRUPT_S = 0.05
"""Seconds until z3 is asked again to stop."""


class MissingSolver(RuntimeError):
    """A solver that is not installed; the message is the line that installs it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver said; the model maps declared integer names to values and is empty unless sat."""

    status: Status
    model: dict[str, int]
    seconds: float


class Solver(Protocol):
    """A solver that decides whether a script's assertions can hold together."""

    name: str

    def check(self, script: str, timeout_s: float, seed: int) -> Answer:
        """Decide a script (declarations and assertions, without check-sat) within a time limit."""


def _milliseconds(timeout_s: float) -> int:
    return max(1, math.ceil(timeout_s * 1000))


class Z3:
    """The z3 backend."""

    name = "z3"

    def __init__(self) -> None:
        try:
            import z3
        except ImportError as error:
            raise MissingSolver(f"z3 is not installed; install it with: {INSTALL_HINT['z3']}") from error
        self._z3: Any = z3

    def check(self, script: str, timeout_s: float, seed: int) -> Answer:
        """See `Solver.check`.

        In a thread of its own, and Ctrl-C is not z3's to take: Python would not hear of it, and where it does
        while z3's objects are made or deleted, they are left half made.
        """
        contexts: list[Any] = []
        answers: list[Answer | BaseException] = []

        def work() -> None:
            try:
                # A context of its own: names and learnt facts of one obligation never reach another.
                contexts.append(self._z3.Context())
                answers.append(self._decide(contexts[0], script, timeout_s, seed))
            except BaseException as error:  # raised again by whoever waits
                answers.append(error)

        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
            thread.join()
        except KeyboardInterrupt:
            while thread.is_alive():
                for context in contexts:
                    context.interrupt()
                thread.join(INTERRUPT_S)
            raise
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]

    def _decide(self, context: Any, script: str, timeout_s: float, seed: int) -> Answer:
        z3 = self._z3
        began = time.perf_counter()
        solver = z3.SolverFor("QF_NIA", ctx=context) if "QF_NIA" in script else z3.SimpleSolver(ctx=context)
        solver.set("timeout", _milliseconds(timeout_s))
        solver.set("random_seed", seed)
        solver.set("ctrl_c", False)
        solver.from_string(script)
        result = solver.check()
        status: Status = "sat" if result == z3.sat else "unsat" if result == z3.unsat else "unknown"
        model: dict[str, int] = {}
        if status == "sat":
            found = solver.model()
            for declaration in found.decls():
                if declaration.arity() == 0:
                    value = found.eval(declaration(), model_completion=True)
                    if z3.is_int_value(value):
                        model[declaration.name()] = value.as_long()
        return Answer(status, model, time.perf_counter() - began)


class Cvc5:
    """The cvc5 backend."""

    name = "cvc5"

    def __init__(self) -> None:
        try:
            import cvc5
        except ImportError as error:
            raise MissingSolver(f"cvc5 is not installed; install it with: {INSTALL_HINT['cvc5']}") from error
        self._cvc5: Any = cvc5

    def check(self, script: str, timeout_s: float, seed: int) -> Answer:
        """See `Solver.check`."""
        cvc5 = self._cvc5
        began = time.perf_counter()
        solver = cvc5.Solver(cvc5.TermManager())
        solver.setOption("produce-models", "true")
        solver.setOption("tlimit-per", str(_milliseconds(timeout_s)))
        solver.setOption("seed", str(seed))
        solver.setOption("sat-random-seed", str(seed))
        parser = cvc5.InputParser(solver)
        parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, script, "obligation")
        symbols = parser.getSymbolManager()
        while not (command := parser.nextCommand()).isNull():
            command.invoke(solver, symbols)
        result = solver.checkSat()
        status: Status = "sat" if result.isSat() else "unsat" if result.isUnsat() else "unknown"
        model: dict[str, int] = {}
        if status == "sat":
            for term in symbols.getDeclaredTerms():
                model[term.getSymbol()] = int(solver.getValue(term).getIntegerValue())
        return Answer(status, model, time.perf_counter() - began)


BACKENDS: dict[str, type[Z3] | type[Cvc5]] = {"z3": Z3, "cvc5": Cvc5}


def solver(name: str) -> Solver:
    """The backend of that name; raises MissingSolver with the line that installs it."""
    return BACKENDS[name]()
