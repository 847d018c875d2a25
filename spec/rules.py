"""All invariants, one table.  Each lives in the module of its mechanism, beside the story that explains
it."""

from __future__ import annotations

from spec.mechanisms import accepted, alias, coverage, delay, fence, lookup, ownership, progress
from spec.rule import Rule

RULES: tuple[Rule, ...] = (
    *ownership.RULES,
    *alias.RULES,
    *fence.RULES,
    *delay.RULES,
    *accepted.RULES,
    *lookup.RULES,
    *coverage.RULES,
    *progress.RULES,
)
BY_NAME: dict[str, Rule] = {rule.name: rule for rule in RULES}
STATE_RULES: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.holds)
BY_DECISION: dict[str, tuple[Rule, ...]] = {
    kind: tuple(rule for rule in RULES if kind in rule.on)
    for kind in sorted({k for rule in RULES for k in rule.on})
}
CORE_RULES: dict[str, tuple[str, ...]] = {
    kind: tuple(rule.name for rule in RULES if kind in rule.core)
    for kind in sorted({k for rule in RULES for k in rule.core})
}

__all__ = ["BY_DECISION", "BY_NAME", "CORE_RULES", "RULES", "STATE_RULES", "Rule"]
