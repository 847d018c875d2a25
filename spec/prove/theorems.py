"""All theorems, by group."""

from spec.prove import align, coverage
from spec.prove.theorem import Theorem

GROUPS: dict[str, tuple[Theorem, ...]] = {"coverage": coverage.THEOREMS, "align": align.THEOREMS}


def theorems_of(group: str) -> tuple[Theorem, ...]:
    """The theorems of one group, or of all for `arith`; raises KeyError for an unknown group."""
    if group == "arith":
        return tuple(theorem for theorems in GROUPS.values() for theorem in theorems)
    return GROUPS[group]
