"""Gates, marks and comparisons: the kernels by which a harness orders a device and watches it.

Gates and marks lie in pinned host memory, which host and device see alike.  One program each; they are
launched on whatever stream is current.
"""

from __future__ import annotations

import torch

from impl.kernels.jit import tl, triton


@triton.jit(do_not_specialize=["number"])
def wait_kernel(gates, number):
    opened = tl.load(gates + number, volatile=True)
    while opened == 0:
        opened = tl.load(gates + number, volatile=True)


@triton.jit(do_not_specialize=["rounds"])
def linger_kernel(gates, rounds):
    seen = 0
    for _ in range(rounds):
        seen += tl.load(gates, volatile=True)


@triton.jit(do_not_specialize=["word"])
def mark_kernel(counter, order, word):
    at = tl.atomic_add(counter, 1)
    tl.store(order + at, word)


@triton.jit(do_not_specialize=["size"])
def compare_kernel(read, wanted, verdict, size, WORDS: tl.constexpr):
    first = size
    for start in range(0, size, WORDS):
        word = start + tl.arange(0, WORDS)
        mask = word < size
        got = tl.load(read + word, mask=mask, other=0)
        want = tl.load(wanted + word, mask=mask, other=0)
        care = tl.load(wanted + size + word, mask=mask, other=0)
        differs = (care != 0) & (got != want)
        first = tl.minimum(first, tl.min(tl.where(differs, word, size), axis=0))
    found = first < size
    tl.store(verdict, tl.where(found, first, -1))
    tl.store(verdict + 1, tl.load(read + first, mask=found, other=0))


def wait(gates: torch.Tensor, number: int) -> None:
    """Hold the stream until `gates[number]` (int32, pinned) is not 0."""
    wait_kernel[(1,)](gates, number, num_warps=1)


def linger(gates: torch.Tensor, rounds: int) -> None:
    """Hold the stream for as long as `rounds` reads of `gates` (pinned) take: about a microsecond each."""
    linger_kernel[(1,)](gates, rounds, num_warps=1)


def mark(counter: torch.Tensor, order: torch.Tensor, word: int) -> None:
    """Append `word` to `order` (int32, pinned), in the order in which the device gets here."""
    mark_kernel[(1,)](counter, order, word, num_warps=1)


def compare(read: torch.Tensor, wanted: torch.Tensor, verdict: torch.Tensor) -> None:
    """The first word of `read` [n] that differs from `wanted` [:n] where `wanted` [n:] is not 0, all int32.

    `verdict` [2] becomes its index (-1 if there is none) and what was read there."""
    compare_kernel[(1,)](read, wanted, verdict, read.numel(), WORDS=1024, num_warps=4)
