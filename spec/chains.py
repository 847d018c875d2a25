"""Token prefixes as integers: what a block's bytes *are*, and what a prefix key *names*.

A causal layer's bytes for position ``i`` depend on tokens ``0..i`` and on nothing else, and a recurrent state
after ``n`` tokens depends on tokens ``0..n-1``.  So one integer per distinct token prefix is a complete
ghost of both: equal prefixes, equal bytes.  The same integers serve as prefix hashes ("hash equality is
prefix equality", an assumption every engine makes; vLLM: ``v1/core/kv_cache_utils.py::hash_block_tokens``).

The model that is served is a function too: :meth:`Chains.next_token` gives the one right next token of a
prefix, so two requests with one prefix produce one continuation, and a follow-up turn can hit what the
first turn produced.
"""

from __future__ import annotations

EMPTY = 0  # the prefix of no tokens
GARBAGE = -1  # bytes nobody vouches for: never written, of another view, or of a padded row
TORN = -2  # bytes of a copy that has begun and not ended, or ended on a changed source or target
ZERO = -3  # zeroed bytes


class Chains:
    """Interned token prefixes.  ``fold`` appends a token; ``prefixes`` lists all prefixes of a prefix."""

    __slots__ = ("_child", "_last", "_line", "_parent")

    def __init__(self) -> None:
        self._child: dict[tuple[int, int], int] = {}
        self._parent: list[int] = [EMPTY]
        self._last: list[int] = [0]
        self._line: dict[int, tuple[int, ...]] = {EMPTY: (EMPTY,)}

    def fold(self, prefix: int, token: int) -> int:
        """The prefix that follows ``prefix`` with ``token`` appended; folding into garbage stays garbage."""
        if prefix < 0:
            return GARBAGE
        edge = (prefix, token)
        child = self._child.get(edge)
        if child is None:
            child = len(self._parent)
            self._child[edge] = child
            self._parent.append(prefix)
            self._last.append(token)
        return child

    def prefixes(self, prefix: int) -> tuple[int, ...]:
        """``prefixes(p)[n]`` is the prefix of ``p``'s first ``n`` tokens; the last entry is ``p`` itself."""
        line = self._line.get(prefix)
        if line is None:
            back = [prefix]
            while back[-1] not in self._line:
                back.append(self._parent[back[-1]])
            line = self._line[back.pop()] + tuple(reversed(back))
            self._line[prefix] = line
        return line

    def length(self, prefix: int) -> int:
        """Tokens in ``prefix``."""
        return len(self.prefixes(prefix)) - 1

    def token(self, prefix: int) -> int:
        """The last token of ``prefix``."""
        return self._last[prefix]

    def next_token(self, prefix: int) -> int:
        """The served model's token after ``prefix``: any fixed function will do, one that varies is best."""
        return 1000 + (self._last[prefix] * 7 + self.length(prefix) * 3) % 11

    def name(self, content: int | tuple[int, ...]) -> str:
        """How a trace prints one cell: its tokens count and identity, or what is wrong with it."""
        if isinstance(content, tuple):
            return f"a window of {len(content)} states"
        if content == GARBAGE:
            return "garbage"
        if content == TORN:
            return "torn"
        if content == ZERO:
            return "zero"
        return f"{self.length(content)}tok#{content}"
