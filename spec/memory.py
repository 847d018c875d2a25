"""Ghost memory: what every page, host chunk and worker buffer of a rank really holds.

**Story.**  All groups draw blocks from one pool, and a block's bytes are one page: attention cells, or a
convolution window and a temporal state, seen through whichever group's layers address it.  Nothing in the
page says whose it is; the block id alone does.  So a page here is a *view* (the group that wrote last) and
that group's cells; writing through another view destroys what was there, as it does in the unified layout.

* full, window and chunked groups: one cell a token position; a cell holds the prefix (see ``spec.chains``)
  that ends with that position's token.
* Mamba groups: cell 0 is the convolution window, a tuple whose entry ``i`` is the state after query token
  ``i`` of the step that wrote it (a kernel reads it shifted); cell 1 is the temporal state, one prefix.

A copy between device and host takes time.  It *begins* (snapshot of the source; the target is torn) and
*ends* (delivers, unless source or target has meanwhile been given other bytes: then the target stays torn).
"""

from __future__ import annotations

from spec.chains import EMPTY, GARBAGE, TORN
from spec.config import Config, Kind

Cell = int | tuple[int, ...]
Page = tuple[int, tuple[Cell, ...]]  # (view, cells)

CONV, TEMPORAL = 0, 1
NOBODY = -1  # the view of a page that was never written


class Memory:
    """One rank's pages, host chunks and buffers.  The null page swallows writes and yields garbage."""

    __slots__ = (
        "accepted", "cells", "computed", "counts", "drafted", "host", "host_by", "last", "state", "tables",
        "torn_by", "view", "width",
    )  # fmt: skip

    def __init__(self, config: Config, columns: tuple[int, ...]) -> None:
        self.width = tuple(2 if g.kind is Kind.MAMBA else g.block_tokens for g in config.groups)
        self.view = [NOBODY] * config.pool_blocks
        self.cells: list[list[Cell]] = [[GARBAGE] for _ in range(config.pool_blocks)]
        self.host: dict[tuple[int, int], Page] = {}  # (host chunk place, sub-slot) -> page
        self.torn_by: dict[int, int] = {}  # page -> load that has begun and not ended on it
        self.host_by: dict[
            tuple[int, int], int
        ] = {}  # host sub-slot -> store that has begun and not ended on it
        slots = config.slots
        # Per-slot source tables outlive a step; gathered tables are rewritten by every step in batch order.
        self.tables = {
            name: [[[0] * width for _ in range(slots)] for width in columns]
            for name in ("source", "gathered", "gathered.1")
        }
        self.accepted = [1] * slots  # accepted tokens of the slot's last step
        self.state = [-1] * slots  # running column of the slot's last step
        self.computed = [0] * slots  # tokens computed, by the device's own count
        # What a decode row is fed with: the last sampled token of the slot and the drafts behind it, each as
        # the prefix that ends with that token.
        self.last = [EMPTY] * slots
        self.drafted = [EMPTY] * slots
        # Host buffers of the v1 runner: accepted counts by batch row, and the snapshot a step's copy lands
        # in.
        self.counts: dict[str, list[int]] = {"rows": [1] * slots, "own": [1] * slots}

    def page(self, block: int) -> Page:
        """The page's view and bytes as they are now."""
        return self.view[block], tuple(self.cells[block])

    def put_page(self, block: int, page: Page) -> None:
        """Overwrite a whole page."""
        if block:
            self.view[block] = page[0]
            self.cells[block] = list(page[1])

    def put(self, block: int, group: int, cell: int, value: Cell) -> None:
        """Write one cell through a group's view."""
        if block:
            if self.view[block] != group:
                self.view[block] = group
                self.cells[block] = [GARBAGE] * self.width[group]
            self.cells[block][cell] = value

    def put_run(self, block: int, group: int, first: int, values: tuple[int, ...]) -> None:
        """Write consecutive attention cells through a group's view."""
        if block:
            if self.view[block] != group:
                self.view[block] = group
                self.cells[block] = [GARBAGE] * self.width[group]
            self.cells[block][first : first + len(values)] = values

    def fill(self, block: int, group: int, value: int) -> None:
        """Every cell of the page gets one value: zeroes, or torn bytes."""
        if block:
            self.view[block] = group
            self.cells[block] = [value] * self.width[group]

    def run(self, block: int, group: int, first: int, upto: int) -> tuple[Cell, ...]:
        """Consecutive attention cells as a group's layers read them."""
        if self.view[block] != group:
            return (GARBAGE,) * (upto - first)
        return tuple(self.cells[block][first:upto])

    def temporal(self, block: int, group: int) -> Cell:
        """The temporal state as a Mamba group's layers read it."""
        return self.cells[block][TEMPORAL] if self.view[block] == group else GARBAGE

    def conv(self, block: int, group: int, offset: int) -> Cell:
        """The convolution state after query token ``offset`` of the step that wrote the window."""
        if self.view[block] != group:
            return GARBAGE
        window = self.cells[block][CONV]
        return window[offset] if isinstance(window, tuple) and offset < len(window) else GARBAGE

    def copy_state(self, group: int, conv_from: int, temporal_from: int, bias: int, to: int) -> None:
        """What a state-copy kernel does to one request: the window shifted by ``bias``, the temporal state
        whole."""
        window = self.cells[conv_from][CONV] if self.view[conv_from] == group else GARBAGE
        shifted: Cell = window[bias:] if isinstance(window, tuple) else window
        temporal = self.temporal(temporal_from, group)
        self.put(to, group, CONV, shifted if shifted != () else GARBAGE)
        self.put(to, group, TEMPORAL, temporal)


def torn(page_width: int, group: int) -> Page:
    """The page of a copy that has begun and not delivered."""
    return group, (TORN,) * page_width
