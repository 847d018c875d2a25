"""Policies by name: what ``--policy`` and a trace's header mean."""

from __future__ import annotations

from collections.abc import Callable

from spec.arith import coverage
from spec.chains import Chains
from spec.config import Config, Group
from spec.ops import Deref
from spec.policy import Policy
from spec.reference import Decisions, Reference

PolicyFactory = Callable[[Config, Chains], Policy]


class PolicyNameError(ValueError):
    """No policy of that name; the message lists the known ones."""


def deciding(decide: Decisions) -> PolicyFactory:
    """The reference policy with another table of decisions."""
    return lambda config, chains: Reference(config, chains, decide)


def _lookup_without_extra(group: Group, hit: int, local: int, chunk: int) -> int:
    window = coverage.lookup_window_chunks_v0_30(hit, group.window_tokens, chunk)
    return coverage.first_checked_chunk(hit, local, window, chunk)


#: name -> factory; ``fault:NAME`` is the reference with one decision replaced by what code in the field did
POLICIES: dict[str, PolicyFactory] = {
    "reference": Reference,
    # https://github.com/vllm-project/vllm/issues/54173: late copies find their row by batch index, ...
    "fault:row-by-batch-index": deciding(Decisions(post_row=lambda index, slot: Deref("source", index))),
    # ... or in the gathered tables, which hold another batch by then
    "fault:table-bound-at-capture": deciding(
        Decisions(post_row=lambda index, slot: Deref("gathered", index))
    ),
    # https://github.com/vllm-project/vllm/issues/56701: lookup counts the window, not what a drafter re-reads
    "fault:lookup-without-extra": deciding(Decisions(lookup_first=_lookup_without_extra)),
    # The first rank's report lifts the fences, although other ranks still read the blocks.
    "fault:fence-dropped-early": deciding(Decisions(fence_done=lambda waiting: True)),
    # The first rank's report settles the transfer, although other ranks have not copied.
    "fault:visible-after-one-rank": deciding(Decisions(job_done=lambda waiting: True)),
}


def register(name: str, factory: PolicyFactory) -> None:
    """Make a policy known by name.  Raises ``ValueError`` if the name is taken."""
    if name in POLICIES:
        raise ValueError(f"a policy named {name!r} is registered already")
    POLICIES[name] = factory


def resolve(name: str) -> PolicyFactory:
    """The factory of a named policy.  Raises :class:`PolicyNameError`."""
    if name not in POLICIES:
        raise PolicyNameError(f"no policy named {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]
