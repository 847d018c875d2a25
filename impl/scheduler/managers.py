"""One table manager a group kind: what a hit needs, what a step needs, what may be freed.

Sources: `v1/core/single_type_kv_cache_manager.py`, vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from impl.decisions import Decisions
from impl.scheduler.pool import Block, BlockPool, Key
from impl.scheduler.request import Request
from spec.arith import align, coverage
from spec.config import Config, Group, Kind

Found = list[tuple[int, Block]]
"""Columns of a hit, with their blocks."""


@dataclass(slots=True)
class FullManager:
    """Full attention: every past token; also what the managers of the other kinds build on."""

    config: Config
    index: int
    pool: BlockPool
    decide: Decisions
    drops: int = 0  # units matched past a hit and given back

    @property
    def group(self) -> Group:
        """The group's numbers."""
        return self.config.groups[self.index]

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.group.block_tokens

    def key(self, request: Request, tokens: int) -> Key | None:
        """The key of the first ``tokens`` tokens; None while tokens that the hash covers are unknown."""
        covered = tokens + self.config.hash_lookahead_tokens
        return (self.index, tokens, request.hashes[covered]) if covered <= request.known else None

    def first_kept(self, tokens: int) -> int:
        """First column that is not null once this many tokens are in place."""
        return 0

    def needed_from(self, hit: int) -> int:
        """First column that a local hit must find cached."""
        return 0

    def serve(self, request: Request, hit: int) -> tuple[Found, Block | None] | None:
        """The blocks with which the group serves a hit, its dropped tail looked up but left out; and the
        block in which the hit ends, if it ends inside one.  None if something is missing."""
        found: Found = []
        whole = hit // self.block
        inside = None
        if hit % self.block:
            inside = self._cached(request, hit)
            if inside is None:
                return None
        for col in range(self.needed_from(hit), whole + self.drops):
            block = self._cached(request, (col + 1) * self.block)
            if block is None:
                return None
            if col < whole:
                found.append((col, block))
        return found, inside

    def _cached(self, request: Request, tokens: int) -> Block | None:
        key = self.key(request, tokens)
        return self.pool.cached(key) if key else None

    def longest(self, request: Request, limit: int, unit: int) -> int:
        """The longest hit, a multiple of ``unit`` up to ``limit``, that the group can serve alone."""
        for hit in range(limit // unit * unit, 0, -unit):
            if self.serve(request, hit) is not None:
                return hit
        return 0

    def fresh_columns(self, local: int, total: int) -> range:
        """Columns that an external hit must allocate and load."""
        if total == local:
            return range(0)
        first = max(coverage.first_fresh_column(local, self.block), self.first_kept(total))
        return range(first, coverage.blocks_of(total, self.block))

    def columns_upto(self, request: Request, c: int, q: int) -> int:
        """Columns that a row must have for a step; a drafter writes ahead of the step's tokens."""
        ahead = min(c + q + self.config.drafts, request.longest)
        return coverage.blocks_of(max(ahead, c + q), self.block)

    def growth(self, request: Request, c: int, q: int) -> tuple[list[tuple[int, int]], list[int]]:
        """What a row needs for a step: scratch moves (from, to), and columns to allocate."""
        first = max(len(request.tables[self.index]), c // self.block)  # nothing is written before it
        return [], list(range(first, self.columns_upto(request, c, q)))

    def blocks_for(self, length: int, c: int, q: int, request: Request) -> int:
        """Fresh blocks that the first step of an admission takes, ``length`` columns being there."""
        return self.columns_upto(request, c, q) - max(length, c // self.block)

    def behind(self, request: Request, tokens: int) -> list[int]:
        """Columns that no step will read once ``tokens`` tokens are processed, last first."""
        table, found = request.tables[self.index], []
        for col in range(min(self.first_kept(tokens), len(table)) - 1, -1, -1):
            if table[col] is None:
                break  # everything before a null column is null already
            found.append(col)
        return found


@dataclass(slots=True)
class WindowManager(FullManager):
    """Sliding window: the last tokens, and those that a drafter of several modules re-reads."""

    def first_kept(self, tokens: int) -> int:
        """Behind the window and the retained tokens."""
        return self.decide.retained_column(self.group, tokens)

    def needed_from(self, hit: int) -> int:
        """The window alone: a drafter re-reads nothing before the hit."""
        return self.decide.hit_first(self.group, hit, self.drops)


@dataclass(slots=True)
class ChunkedManager(FullManager):
    """Chunked-local attention: the tokens of the current attention chunk."""

    def first_kept(self, tokens: int) -> int:
        """Behind the attention chunk."""
        return coverage.skipped_tokens_chunked(tokens, self.group.window_tokens) // self.block

    def needed_from(self, hit: int) -> int:
        """The attention chunk."""
        return self.decide.hit_first(self.group, hit, self.drops)


@dataclass(slots=True)
class MambaManager(FullManager):
    """Recurrent state in align mode: a running column, scratch columns for drafts, states at boundaries."""

    def first_kept(self, tokens: int) -> int:
        """The column of the last token's state."""
        return align.first_live_column(tokens, self.block)

    def needed_from(self, hit: int) -> int:
        """One state: that of the boundary (nothing but the inner state when the hit ends inside a block)."""
        return hit // self.block - 1 if hit % self.block == 0 else hit // self.block + self.drops

    def growth(self, request: Request, c: int, q: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Scratch blocks left behind by the running column move to the end of the row."""
        drafts, length = self.config.drafts, len(request.tables[self.index])
        required = align.required_columns(c, q, self.block, drafts)
        if required <= length:
            return [], []
        running = required - drafts - 1
        place, moves = max(length, running), []
        for col in range(max(length - drafts, 0), length) if self.decide.relocates(request.grown) else ():
            if align.relocates_column(col, length, running, drafts) and request.tables[self.index][col]:
                moves.append((col, place))
                place += 1
        return moves, list(range(place, required))

    def blocks_for(self, length: int, c: int, q: int, request: Request) -> int:
        """The running column and K scratch columns."""
        running = align.running_column(c, q, self.block)
        return running + self.config.drafts + 1 - max(length, running)

    def behind(self, request: Request, tokens: int) -> list[int]:
        """Prefill leaves null columns in between."""
        table = request.tables[self.index]
        return [col for col in range(min(self.first_kept(tokens), len(table)) - 1, -1, -1) if table[col]]


MANAGERS = {
    Kind.FULL: FullManager,
    Kind.WINDOW: WindowManager,
    Kind.CHUNKED: ChunkedManager,
    Kind.MAMBA: MambaManager,
}
