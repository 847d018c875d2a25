"""Mutating a shared formula breaks the model too, not only a theorem.

The policies and the world call the same function objects that are proved.  Here each is replaced by itself
plus one, minus one, or negated, everywhere at once; the stored runs of the fault catalogue and a few walks
must then break a consequence of the *reference* policy, in at least one direction (a formula that is merely
stricter than needed is right).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest

from spec import config as configs
from spec.arith import align, coverage, division
from spec.events import Event
from spec.faults import CATALOGUE
from spec.faults.hunt import stored
from spec.reduce import replay
from spec.reference import Reference
from spec.walk import walk_once

MODULES = (align, coverage, division)
FORMULAS: dict[str, Callable[..., Any]] = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
WALKS = (
    "composed", "partial-tails", "restore-small", "chunked-local", "hybrid-odd", "starved-split", "tail-drop",
    "window-offload-coarse", "composed-sync", "hash-lookahead",
)  # fmt: skip

#: formulas that no run here feels, and why; theorems and brute force stand for them
NOT_IN_THE_MODEL = {
    "boundaries_crossed": "counts boundaries; the model publishes column by column",
    "last_state_column": "bookkeeping of the release's allocator; the model's rows end where columns end",
    "pads_column": "the release fills null columns one by one; the book extends the row",
    "frees_last_state": "the release frees one column earlier; the model frees behind the first live column",
    "junction_stop": "shared-prefix junctions are not modelled",
    "landing_position": "the model's transfers name every sub-slot",
    "byte_offset": "pages have no addresses here; a kernel test mutates it",
    "span_blocks": "an admission cap, which the model does not need",
    "span_bound": "an admission cap, which the model does not need",
    "pending_blocks_bound": "an assertion of the release on its own load",
    "local_need_blocks": "the model asks for columns by position; spec.lookup scans for runs",
    "base_window_chunks_v0_30": "a release's formula",
    "lookup_window_chunks_v0_30": "a release's formula",
    "in_flight_first_chunk": "loading a chunk twice is wasteful, not wrong",
    "store_need_blocks": "a release's formula; the model keeps the corrected one",
    "store_need_blocks_v0_30": "a release's formula",
    "store_keeps_chunk": "the model asks block by block",
    "store_keeps_all": "saves asking: a mask that is not used keeps more, not less",
    "store_keeps_final_block": "a hit in a final segment needs a full chunk that the prompt does not fill",
    "chunked_window_chunks": "one chunk less is felt only when exactly that chunk is missing from the tier",
    "lookup_candidate": "the model tries hits from the longest down; spec.lookup follows the release",
    "shrink_hit": "as above",
    "worth_loading": "as above",
    "tail_drop": "as above",
    "query_end_chunk": "as above",
    "common_hit": "as above",
    "mamba_state_tokens": "as above",
}


@contextmanager
def mutated(function: Callable[..., Any], instead: Callable[..., Any]) -> Iterator[None]:
    """Every name in ``spec`` that means the function means the mutant."""
    places = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key == "spec" or key.startswith("spec.")
        for name, value in list(vars(module).items())
        if value is function
    ]
    assert places
    for module, name in places:
        setattr(module, name, instead)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, function)


def mutants(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if inspect.signature(function).return_annotation in (bool, "bool"):
        yield lambda *args: not function(*args)
    else:
        yield lambda *args: function(*args) + 1
        yield lambda *args: function(*args) - 1


def resends() -> Iterator[tuple[configs.Config, tuple[Event, ...]]]:
    """A prompt of every length, served, forgotten by the pool and sent again: the tier must serve it."""
    fine = configs.Group(
        "chunked", configs.Kind.CHUNKED, 1, 4
    )  # blocks of one token: off by one is off by a block
    full = configs.Group("full", configs.Kind.FULL, 1)
    small = configs.Config(
        "fine", (full, fine), 1, offload=True, pool_blocks=40, tier_chunks=60, request_tokens=12
    )
    names = ("window-offload-coarse", "tail-drop-coarse", "window-offload", "chunked-local")
    for config in (small, *map(configs.named, names)):
        for prompt in range(2, config.request_tokens):
            serve = (("schedule",), ("drain",)) * 4
            sent = ("arrive", "r1", "0", prompt, 1)
            yield config, (sent, *serve, ("reset", "local"), sent, *serve)


RESENDS = list(resends())
STORED = [run for fault in CATALOGUE.values() if (run := stored(fault.name))]


def broken() -> str | None:
    """The consequence that the reference breaks on the stored runs or a few walks."""
    try:
        for config, _, choices in STORED:
            world = replay(config, Reference, choices)
            if world.verdict or not world.quiet():
                return str(world.verdict)
        for config, choices in RESENDS:
            world = replay(config, Reference, choices)
            if world.verdict:
                return str(world.verdict)
        for number in range(8):
            for name in WALKS:
                world = walk_once(configs.named(name), Reference, 7, number, 100).world
                if world.verdict:
                    return str(world.verdict)
    except (IndexError, KeyError, AssertionError, ValueError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"  # the reference itself falls over the wrong number
    return None


def test_unmutated_reference_holds() -> None:
    assert broken() is None


def test_every_formula_is_accounted_for() -> None:
    assert set(NOT_IN_THE_MODEL) <= set(FORMULAS)


@cache
def asked() -> frozenset[str]:
    """The excused formulas that the runs call at all."""
    names: set[str] = set()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            names.add(name)
            return function(*args)

        return call

    with ExitStack() as stack:
        for name in NOT_IN_THE_MODEL:
            stack.enter_context(mutated(FORMULAS[name], noting(name, FORMULAS[name])))
        assert broken() is None
    return frozenset(names)


@pytest.mark.parametrize("name", NOT_IN_THE_MODEL)
def test_an_excused_formula_is_not_felt(name: str) -> None:
    if name in asked():
        for instead in mutants(FORMULAS[name]):
            with mutated(FORMULAS[name], instead):
                assert broken() is None


@pytest.mark.parametrize("name", [name for name in FORMULAS if name not in NOT_IN_THE_MODEL])
def test_a_mutated_formula_breaks_the_model(name: str) -> None:
    function = FORMULAS[name]
    for instead in mutants(function):
        with mutated(function, instead):
            if broken() is not None:
                return
    pytest.fail(f"no mutant of {name} breaks a run of the reference")
