"""Operands of operations: a value fixed when the operation was enqueued, or one that is read when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec.world import Rank

#: a request incarnation: the client's name for it, and which use of that name it is, counted from 1
UserId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Deref:
    """A table row that is read when the operation executes: row ``row`` of the tables named ``buffer``."""

    buffer: str
    row: int


@dataclass(frozen=True, slots=True)
class Imm:
    """A table row fixed when the operation was enqueued: one tuple of block ids a group."""

    rows: tuple[tuple[int, ...], ...]


TableRow = Deref | Imm


def table_row(rank: Rank, operand: TableRow, group: int) -> list[int] | tuple[int, ...]:
    """The block ids that the operand stands for now."""
    if isinstance(operand, Imm):
        return operand.rows[group]
    return rank.memory.tables[operand.buffer][group][operand.row]


def column(row: list[int] | tuple[int, ...], col: int) -> int:
    """A block id by column; a kernel that leaves its row reads somebody else's memory, here the null
    block."""
    return row[col] if 0 <= col < len(row) else 0
