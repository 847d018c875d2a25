"""Checked formulas: every core has its wrapper, bad arguments get one clear line, cores stay simple."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from spec import arith
from spec.arith import align, coverage, division
from spec.arith.checked import DOMAINS, NATURAL, ArithError, Checked, checked, domain

WRAPPERS = {name: value for name, value in vars(arith).items() if isinstance(value, Checked)}


def test_every_core_is_exported_by_its_name() -> None:
    cores = {core.__name__: core for core in DOMAINS if core.__module__.startswith("spec.arith.")}
    assert {name: wrapper.core for name, wrapper in WRAPPERS.items()} == cores
    assert set(WRAPPERS) < set(arith.__all__)
    for module in (division, coverage, align):
        defined = {
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        }
        assert defined <= set(cores), module.__name__


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arith.cdiv(5, 0), "cdiv: divisor must be at least 1, got 0"),
        (lambda: arith.cdiv(x=5, divisor=-3), "cdiv: divisor must be at least 1, got -3"),
        (lambda: arith.floordiv(5.0, 2), "floordiv: x must be an integer, got 5.0"),  # type: ignore[arg-type]
        (lambda: arith.floordiv(True, 2), "floordiv: x must be an integer, got True"),
        (
            lambda: arith.lookup_window_chunks(64, -1, 0, 16),
            "lookup_window_chunks: window must be at least 1, got -1",
        ),
        (lambda: arith.base_window_chunks(32, 0, 0), "base_window_chunks: chunk must be at least 1, got 0"),
        (
            lambda: arith.store_keeps_chunk(0, 1, 5, 4, 0),
            "store_keeps_chunk: need must be at most segment_blocks (4), got 5",
        ),
        (lambda: arith.tail_drop(1, 5), "tail_drop: drops must be at most 1, got 5"),
        (lambda: arith.store_keeps_block(0, 1, 4, 2), "store_keeps_block: shift must be at most 1, got 2"),
        (
            lambda: arith.demand_first_chunk_mamba(0, 16, 1),
            "demand_first_chunk_mamba: hit must be at least 1, got 0",
        ),
    ],
)
def test_a_bad_argument_is_named_in_one_line(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ArithError) as raised:
        call()
    assert str(raised.value) == message and isinstance(raised.value, ValueError)
    assert (raised.value.function, raised.value.argument) == tuple(message.split(" must")[0].split(": "))


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_each_wrapper_refuses_each_argument_outside_its_limits(name: str) -> None:
    wrapper = WRAPPERS[name]
    limits = DOMAINS[wrapper.core]
    flags = {
        p.name for p in inspect.signature(wrapper.core).parameters.values() if p.annotation in (bool, "bool")
    }
    valid = {n: False if n in flags else max(limit.least or 0, 1) for n, limit in limits.items()}
    for argument, limit in limits.items():
        wrong = 1 if argument in flags else "1"
        with pytest.raises(ArithError, match=rf"^{name}: {argument} must be "):
            wrapper(**{**valid, argument: wrong})
        if limit.least is not None:
            with pytest.raises(ArithError, match=rf"^{name}: {argument} must be at least {limit.least}, got"):
                wrapper(**{**valid, argument: limit.least - 1})
        if limit.most is not None:
            with pytest.raises(ArithError, match=rf"^{name}: {argument} must be at most {limit.most}, got"):
                wrapper(**{**valid, argument: limit.most + 1})


def test_what_is_one_or_none_is_a_flag_everywhere() -> None:
    """No count passes for a flag: `drops` and `shift` are 0 or 1 wherever a formula takes them."""
    flags = {
        (core.__name__, argument): (limit.least, limit.most)
        for core, limits in DOMAINS.items()
        for argument, limit in limits.items()
        if argument in ("drops", "shift")
    }
    assert set(flags.values()) == {(0, 1)} and len(flags) == 7


def test_a_wrapper_returns_what_its_core_returns_and_keeps_its_docstring() -> None:
    assert arith.cdiv(7, 2) == division.cdiv(7, 2) == 4
    assert arith.cdiv.core is division.cdiv and arith.cdiv.__doc__ == division.cdiv.__doc__
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        arith.cdiv(7)  # type: ignore[call-arg]


def test_a_domain_names_arguments_that_exist() -> None:
    with pytest.raises(TypeError, match="has no argument named"):
        domain(nothing=NATURAL)(division.cdiv)
    with pytest.raises(TypeError, match="declares no domain"):
        checked(lambda x: x)


ALLOWED = (
    ast.Return, ast.If, ast.Assign, ast.IfExp, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call,
    ast.Name, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.USub, ast.Not, ast.And, ast.Or, ast.operator,
    ast.cmpop, ast.expr_context,
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_a_core_uses_only_what_solver_and_kernel_can_run(name: str) -> None:
    core = WRAPPERS[name].core
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(core))).body
    assert isinstance(tree, ast.FunctionDef) and not tree.args.defaults and not tree.args.kwonlyargs
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    for node in (node for statement in body for node in ast.walk(statement)):
        assert isinstance(node, ALLOWED), ast.dump(node)
        if isinstance(node, ast.Compare):
            assert len(node.ops) == 1, "a chained comparison"
        if isinstance(node, ast.BinOp) and core not in (division.floordiv, division.floormod):
            assert not isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Div), (
                "divides other than through floordiv"
            )
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name) and not node.keywords
            assert node.func.id in {*WRAPPERS, "min", "max"}
