"""Device twins of the shared arithmetic: the same function objects, compiled by Triton.

A formula of `spec.arith` is plain Python.  `twin` compiles that very function (its code object, not a
copy of its text): the formulas it calls become their own twins, and `min` and `max` become
element-wise.  Only `floordiv` and `floormod` have a body of their own here, because `//` and `%` round
towards zero in a kernel: with a plain `//`, `(n - 1) // bs` at n = 0 is 0 instead of -1 and a fresh
request loses its marker.

Without a CUDA device the kernels run in Triton's interpreter on CPU tensors, which this module switches
on before Triton is imported; set TRITON_INTERPRET yourself to decide otherwise.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import torch

from spec.arith import division

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402  (reads TRITON_INTERPRET)
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: E402

__all__ = ["DEVICE", "INTERPRETED", "gdc_launch_dependents", "gdc_wait", "tl", "triton", "twin"]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in the interpreter (CPU tensors) rather than on a CUDA device."""

DEVICE: str = "cpu" if INTERPRETED else "cuda"
"""The device whose tensors the kernels of this process take."""


@triton.jit
def _floordiv(x, divisor):  # type: ignore[no-untyped-def]
    quotient = x // divisor  # towards zero
    return tl.where(x - quotient * divisor < 0, quotient - 1, quotient)


@triton.jit
def _floormod(x, divisor):  # type: ignore[no-untyped-def]
    remainder = x - (x // divisor) * divisor
    return tl.where(remainder < 0, remainder + divisor, remainder)


@triton.jit
def _minimum(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b)


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


_TWINS: dict[Callable[..., Any], Any] = {
    division.floordiv: _floordiv,
    division.floormod: _floormod,
    min: _minimum,
    max: _maximum,
}


def twin(core: Callable[..., Any]) -> Any:
    """The Triton device function of a formula: for scalars and, if it has no branch, for tensors.

    Raises TypeError for anything but a plain Python function, and for one that reads a global that is
    neither a formula nor `min` or `max`.
    """
    if core in _TWINS:
        return _TWINS[core]
    if not isinstance(core, types.FunctionType):
        raise TypeError(f"twin takes a formula's core, a plain function, got {core!r}")
    scope: dict[str, Any] = {"__name__": core.__module__, "tl": tl}
    for name in core.__code__.co_names:
        value = core.__globals__.get(name, {"min": min, "max": max}.get(name))
        if value is None or not callable(value):
            raise TypeError(f"{core.__name__} reads {name}, which is no formula: it cannot run in a kernel")
        scope[name] = twin(value)
    _TWINS[core] = triton.jit(types.FunctionType(core.__code__, scope, core.__name__))
    return _TWINS[core]
