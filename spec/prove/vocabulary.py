"""The symbols of the coverage theorems, and what several of them share.

n prompt or known tokens, h hit, p local prefix, W window, e extra retained tokens, b block, k blocks a
chunk, t = b*k tokens a chunk, F = f*b full-attention chunk, M Mamba chunk, A attention chunk of
chunked-local attention, j a chunk, i a column.  All are integers of any size; none is bounded above.  A
claim that uses a letter for something else says so with `meant`.
"""

from dataclasses import replace

from spec.prove import lemmas
from spec.prove.theorem import Contract, Hypothesis, LemmaUse, Symbol

n = Symbol("n", 1, "tokens of the prompt")
h = Symbol("h", 1, "hit tokens")
p = Symbol("p", 0, "tokens of the local prefix")
W = Symbol("W", 1, "window tokens")
e = Symbol("e", 0, "extra retained tokens")
b = Symbol("b", 1, "tokens a block")
k = Symbol("k", 1, "blocks a chunk")
t = Symbol("t", 1, "tokens a chunk")
F = Symbol("F", 1, "tokens of a full-attention chunk")
f = Symbol("f", 1, "blocks of this group in a full-attention chunk")
m = Symbol("m", 1, "full-attention chunks in the hit")
M = Symbol("M", 1, "tokens of a Mamba chunk")
A = Symbol("A", 1, "tokens of an attention chunk")
g = Symbol("g", 1, "chunks in the hit")
w = Symbol("w", 0, "whole chunks in the window before the current token")
j = Symbol("j", 0, "a chunk")
i = Symbol("i", 0, "a column")
d = Symbol("d", 0, "1 for a group that drops its tail, else 0")
s = Symbol("s", 0, "first token of a range")
T = Symbol("T", 1, "tokens of a range")
x = Symbol("x", None, "an integer")
c = Symbol("c", 1, "a divisor")


def meant(symbol: Symbol, meaning: str) -> Symbol:
    """The symbol, with what it counts in one claim."""
    return replace(symbol, meaning=meaning)


def chunks_text(first: int, end: int) -> str:
    """A range of chunks for people, the end exclusive."""
    if end <= first:
        return "no chunk"
    return f"chunk {first}" if end == first + 1 else f"chunks {first} to {end - 1}"


def pairs(c: int, *values: int) -> tuple[LemmaUse, ...]:
    """The order and equality of each two values, carried over to their products with c."""
    uses = []
    for index, u in enumerate(values):
        for v in values[index + 1 :]:
            uses += [lemmas.monotone(u, v, c), lemmas.monotone(v, u, c), lemmas.congruent(u, v, c)]
    return tuple(uses)


SCAN = Contract(
    "right-to-left scan",
    "a windowed group is admitted at h only if the chunks from first_checked_chunk(h, ...) to the chunk "
    "of the last hit token were all found present",
)
PREFIX = Contract(
    "prefix scan", "a full-attention group is admitted at h only if every chunk of its slice was present"
)
DENSE = (
    "Dense retention is prefix_cache_retention_interval = None: the mask keeps the blocks before every "
    "multiple of F. The default of 0.30.0 to 0.33.0 is 0: then it keeps, of a sliding-window group, only "
    "those before the last multiple of F below the prompt's length, and before a junction, where the "
    "request's own lookup found a prefix that some group had and another had not; a number adds those before "
    "each multiple of that number."
)
"""The remark of theorems about the mask."""
HIT = Hypothesis("p < h", lambda p, h: p < h)
