"""Hypothesis' draws without the constants of local sources.

By itself Hypothesis now and then draws a number that stands somewhere in the source text of the modules that
are loaded.  Then what a seed generates changes with every edit of any of them.
"""

from __future__ import annotations

from typing import Any

from hypothesis.internal.conjecture.providers import HypothesisProvider


class Draws(HypothesisProvider):
    """The same draws whatever modules are loaded."""

    def _maybe_draw_constant(self, *given: Any, **options: Any) -> None:
        return None
