"""The refusals of the two contracts, read off their source, and right answers to spoil."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from spec.config import named
from spec.contracts import SHARED_RULES
from spec.events import Event
from spec.faults.hunt import stored
from spec.reference import Decisions, Reference
from spec.rules import STATE_RULES
from tests.test_evidence_contracts import Samples, samples, watched

# -- the refusals that there are ---------------------------------------------------------------------------

RULE = "{}: {}"  # what a rule of the model says, behind its name
NO_REFUSALS = {"{} {}s chunk {}", "load {}"}  # pieces of refusals: who does what
#: The book keeps the free queue: whatever spoils it was refused as an allocation, a hit or a release before.
NEVER_FIRST = {"free_queue_is_unheld"}


def shape(text: ast.expr) -> str:
    """A text as it stands in the source, ``{}`` for every value in it; empty if it is none."""
    if isinstance(text, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in text.values)
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


def texts(module: ModuleType) -> list[str]:
    """Every refusal of a module: its texts with values in them, and those without that are returned or given
    to ``refuse``."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    found: list[ast.expr] = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Return) and node.value is not None:
            given = [node.value]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refuse"
        ):
            given = list(node.args)
        for one in given:
            ends = [one.body, one.orelse] if isinstance(one, ast.IfExp) else [one]
            found += [end for end in ends if isinstance(end, ast.Constant)]
    return [text for text in map(shape, found) if text and text not in NO_REFUSALS]


def refusals(module: ModuleType) -> list[str]:
    """All that a module can answer with; a rule of the model is a refusal by its name."""
    shared = {name for names in SHARED_RULES.values() for name in names}
    states = {rule.name for rule in STATE_RULES if "streams" not in rule.parts}
    found = texts(module)
    rules = sorted(shared | states - NEVER_FIRST) if RULE in found else []
    return [text for text in found if text != RULE] + [f"{name}: {{}}" for name in rules]


def said_by(reason: str | None, refusals: list[str]) -> list[str]:
    """The refusals that can have said this."""
    shapes = {text: ".*".join(map(re.escape, text.split("{}"))) for text in refusals}
    return [text for text, one in shapes.items() if reason and re.fullmatch(one, reason, flags=re.DOTALL)]


# -- where right answers come from -------------------------------------------------------------------------

SERVE = (("schedule",), ("drain",)) * 6
FORGET = ("reset", "local")


def sent(name: str, prompt: int) -> Event:
    return ("arrive", name, "0", prompt, 2)


#: prompts that come back from the host tier: whole, behind a hit on the device, aborted, failed, outlived
LOADS: tuple[Event, ...] = (
    sent("r1", 17), *SERVE,
    FORGET, sent("r2", 12), ("schedule",), sent("r1", 5), ("schedule",), ("drain",), *SERVE,
    sent("r3", 17), ("schedule",), ("schedule",), ("abort", "r3"), ("work",), ("drain",), *SERVE,
    FORGET, sent("r1", 16), ("schedule",), sent("r2", 17), ("schedule",), ("drain",), *SERVE,
    FORGET, sent("r1", 17), ("schedule",), ("run", 0, "main", 0), ("run", 0, "load", 0),
    ("fail", "r1", "load", 0), ("drain",), *SERVE,
    FORGET, sent("r1", 17), ("schedule",), ("reset", "all"), ("drain",), *SERVE,
)  # fmt: skip


@cache
def loading(name: str) -> Samples:
    """Right answers of those choices."""
    kept: Samples = ([], [])
    world = watched(named(name), kept)
    for choice in LOADS:
        world.choose(choice)
    assert world.quiet() and world.witnesses["external_hit"], name
    return kept


@cache
def of_a_fault(name: str, **wrong: Any) -> Samples:
    """Answers, with one decision wrong or none, along the stored run of a fault."""
    kept: Samples = ([], [])
    run = stored(name)
    assert run is not None
    config, _, choices = run
    world = watched(config, kept, lambda c, chains: Reference(c, chains, replace(Decisions(), **wrong)))
    for choice in choices:
        world.choose(choice)
    return kept


WALKED = (
    "composed",
    "chunked-local",
    "composed-v1",
    "composed-tight",
    "composed-sync",
    "partial-tails",
    "hybrid-pp2-async",
)
LOADED = ("plain-offload", "composed", "mamba-offload")
SOURCES = [
    *(partial(loading, name) for name in LOADED),
    *(partial(samples, name) for name in WALKED),
    partial(of_a_fault, "own-hit-evicted"),
    # orders that are wrong: nothing else gives a load blocks that a step in flight uses
    partial(of_a_fault, "blocks-reused-under-a-step", frees_wait_for_steps=lambda request: False),
]
