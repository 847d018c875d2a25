"""The reference policy: right answers to every question, as small code."""

from spec.reference.decisions import Decisions
from spec.reference.scheduler import Reference

__all__ = ["Decisions", "Reference"]
