"""Policies by name: what ``--policy`` and a trace's header mean.

``reference`` is the reference policy; ``fault:NAME`` is an entry of the catalogue of faults, and
``repaired:NAME`` its twin: the same design without the fault. Others are registered by whoever has them.
"""

from __future__ import annotations

from collections.abc import Callable

from spec.chains import Chains
from spec.config import Config
from spec.faults import CATALOGUE
from spec.policy import Policy
from spec.reference import Reference

PolicyFactory = Callable[[Config, Chains], Policy]


class PolicyNameError(ValueError):
    """No policy of that name; the message says which there are."""


#: name -> factory
POLICIES: dict[str, PolicyFactory] = {
    "reference": Reference,
    **{f"fault:{name}": fault.policy for name, fault in CATALOGUE.items() if fault.change},
    **{f"repaired:{name}": fault.repaired for name, fault in CATALOGUE.items() if fault.change},
}


def register(name: str, factory: PolicyFactory) -> None:
    """Make a policy known by name.  Raises ``ValueError`` if the name is taken."""
    if name in POLICIES:
        raise ValueError(f"a policy named {name!r} is registered already")
    POLICIES[name] = factory


def resolve(name: str) -> PolicyFactory:
    """The factory of a named policy.  Raises :class:`PolicyNameError`."""
    if name not in POLICIES:
        others = [known for known in POLICIES if not known.startswith(("fault:", "repaired:"))]
        choice = f"{', '.join(others)}, and fault:NAME or repaired:NAME (python -m spec.faults list)"
        raise PolicyNameError(f"no policy named {name!r}; known: {choice}")
    return POLICIES[name]
