"""The alignment theorems, 11 to 19, in order: where recurrent state lives, how prefill is cut, where chunks
and bytes land.

A statement of the form "for all sizes A iff B" is two claims: A under B, and outside B a counterexample
whose numbers are given as formulas of the sizes (so that it exists for every size outside).
"""

from spec.prove import columns, fold, places, split
from spec.prove.theorem import Theorem

THEOREMS: tuple[Theorem, ...] = (
    columns.THEOREM_11,
    columns.THEOREM_12,
    columns.THEOREM_13,
    columns.THEOREM_14,
    fold.THEOREM_15,
    fold.THEOREM_16,
    split.THEOREM_17,
    places.THEOREM_18,
    places.THEOREM_19,
)
