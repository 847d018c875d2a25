"""What a fault is: one decision or order of the reference policy, replaced by what code in the field did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spec.chains import Chains
from spec.config import Config
from spec.faults.tamper import Tamper
from spec.reference import Decisions, Reference
from spec.walk import PolicyFactory

DECISION, FORMULA, CONFIGURATION, LIVENESS, HARMLESS = (
    "decision",
    "formula",
    "configuration",
    "liveness",
    "not a fault",
)
"""How a fault is refuted: by a trace; by a theorem's witness; by a configuration that is refused; by a run
that never ends; or not at all, with the bounds within which that was found."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the catalogue.

    ``change`` replaces fields of :class:`~spec.reference.decisions.Decisions`; ``base`` are the replacements
    that make the design it was found in, and that its repaired twin keeps.  ``bites`` and ``harmless`` are
    names of configurations: in the first it must be refuted, in the second it must not.
    """

    name: str
    mechanism: str
    kind: str
    did: str  # what the code did
    repair: str  # what upstream does instead, and where
    source: tuple[str, ...]  # public reports, and the upstream function
    change: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    design: str = "v2 async"  # the base design, in words
    bites: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    why_harmless: str = ""
    exhausted: tuple[str, int, tuple[str, ...]] | None = (
        None  # configuration, choices, alphabet: all runs hold
    )
    cases: tuple[str, ...] = ()  # public case names
    theorem: str = ""  # for a formula: the theorem whose witness refutes it
    formula: str = ""  # part of the name under which that theorem lists the formula
    tamper: Tamper | None = None  # an edit of answers or programs, where no decision expresses the fault
    refused: str = ""  # for a configuration: TOML text that must be refused

    @property
    def policy(self) -> PolicyFactory:
        """The reference policy with the fault in it."""
        policy = deciding(replace(Decisions(), **{**self.base, **self.change}))
        return self.tamper(policy) if self.tamper else policy

    @property
    def repaired(self) -> PolicyFactory:
        """The same design without the fault."""
        return deciding(replace(Decisions(), **self.base))


def deciding(decide: Decisions) -> PolicyFactory:
    """The reference policy with another table of decisions."""

    def build(config: Config, chains: Chains) -> Reference:
        return Reference(config, chains, decide)

    return build
