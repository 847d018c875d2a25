"""What the property machines have done together: actions that fired, antecedents that were true.

A property that is never put to the test holds for the wrong reason.  So a full run of the machines ends
with this report and fails if an action never fired, or if a rule's antecedent was never true; a run of
some machines only reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spec.events import CHOICE, SCHEMA
from spec.rules import BY_NAME
from spec.world import World

ACTIONS = tuple(kind for kind, (category, _, _) in SCHEMA.items() if category == CHOICE)


@dataclass
class Report:
    """Counts over all examples of all machines."""

    machines: Counter[str] = field(default_factory=Counter)  # machine -> examples
    fired: Counter[str] = field(default_factory=Counter)  # choice -> times made
    false: Counter[str] = field(default_factory=Counter)  # rule -> times its antecedent was false
    true: Counter[str] = field(default_factory=Counter)
    witnesses: Counter[str] = field(default_factory=Counter)

    def add(self, machine: str, world: World) -> None:
        """One example has ended."""
        self.machines[machine] += 1
        self.fired.update(world.fired)
        self.witnesses.update(world.witnesses)
        for rule, (false, true) in world.tally.items():
            self.false[rule] += false
            self.true[rule] += true

    def dump(self) -> dict[str, dict[str, int]]:
        """As plain data: what one process tells another."""
        return {name: dict(counts) for name, counts in vars(self).items()}

    def merge(self, data: Mapping[str, Mapping[str, int]]) -> None:
        """Add another process's counts."""
        for name, counts in data.items():
            getattr(self, name).update(counts)

    def silent(self) -> list[str]:
        """Actions and antecedents that never were."""
        actions = [f"action {kind} never fired" for kind in ACTIONS if not self.fired[kind]]
        return actions + [f"antecedent of {rule} was never true" for rule in BY_NAME if not self.true[rule]]

    def lines(self) -> Iterator[str]:
        """The report, one line an action and a rule."""
        yield f"{sum(self.machines.values())} examples of {len(self.machines)} machines"
        yield "actions: " + ", ".join(f"{kind} {self.fired[kind]}" for kind in ACTIONS)
        yield f"{'rule':34} {'mechanism':15} {'antecedent false':>17} {'true':>8}"
        for name, rule in BY_NAME.items():
            yield f"{name:34} {rule.mechanism:15} {self.false[name]:17} {self.true[name]:8}"
        yield "witnesses: " + (", ".join(f"{k} {n}" for k, n in sorted(self.witnesses.items())) or "none")


REPORT = Report()


def as_data(value: Any) -> dict[str, dict[str, int]]:
    """A worker's report as it arrives, or nothing."""
    return value if isinstance(value, dict) else {}
