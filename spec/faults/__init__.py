"""The catalogue of faults: every decision that corrupted a hybrid cache in the field, refuted and repaired.

One module a mechanism.  ``CATALOGUE`` maps names to entries; ``python -m spec.faults`` lists, shows and
hunts them.
"""

from __future__ import annotations

from spec.faults import accepted, alias, coverage, delay, fence, lookup, ownership, tier
from spec.faults.fault import Fault

CATALOGUE: dict[str, Fault] = {
    fault.name: fault
    for module in (delay, alias, accepted, fence, tier, ownership, coverage, lookup)
    for fault in module.FAULTS
}

__all__ = ["CATALOGUE", "Fault"]
