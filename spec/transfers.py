"""Transfers between a rank's pages and its host chunks: copies that begin, tear, deliver or fail.

A copy takes a snapshot of its source when it begins, and its target is torn from then on.  When it ends it
delivers, unless source or target was given other bytes meanwhile: then the target stays torn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.chains import GARBAGE, TORN
from spec.memory import torn

if TYPE_CHECKING:
    from spec.world import Rank, Transfer, World


def begin(world: World, job: int, rank: Rank) -> None:
    """Snapshot the source, tear the target."""
    transfer = world.transfers[job]
    memory = rank.memory
    world.emit(("begin", rank.index, job, transfer.way))
    copies = []
    for key, place, subs in transfer.chunks:
        group = key[0]
        blank_page = torn(memory.width[group], group)
        for sub, block in enumerate(subs):
            if not block:
                continue
            spot = (place, sub)
            if transfer.way == "store":
                copies.append((block, spot, memory.page(block)))
                memory.host[spot] = blank_page
                memory.host_by[spot] = job
                world.witness(
                    "store_reads_reallocated_source", world.handed_out[block] != transfer.handed_out[block]
                )
            else:
                copies.append((block, spot, memory.host.get(spot, (group, (GARBAGE,) * memory.width[group]))))
                memory.put_page(block, blank_page)
                memory.torn_by[block] = job
    transfer.snapshots[rank.index] = copies


def end(world: World, job: int, rank: Rank) -> None:
    """Deliver the snapshot wherever source and target are still what they were."""
    transfer = world.transfers[job]
    memory = rank.memory
    lost = 0
    for block, spot, page in transfer.snapshots.pop(rank.index):
        if transfer.way == "store":
            whole = memory.page(block) == page and memory.host_by.get(spot) == job
            if memory.host_by.get(spot) == job:
                del memory.host_by[spot]
                if whole:
                    memory.host[spot] = page
        else:
            still = memory.torn_by.get(block) == job and all(cell == TORN for cell in memory.cells[block])
            unchanged = memory.host.get(spot, page) == page
            whole = still and unchanged
            if memory.torn_by.get(block) == job:
                del memory.torn_by[block]
            if whole:
                memory.put_page(block, page)
        lost += not whole
    rank.ended[job] = None
    world.witness("load_lands_after_abort", transfer.way == "load" and world.clients[transfer.uid].aborted)
    world.emit(("end", rank.index, job, transfer.way, lost))


def spoil(world: World, transfer: Transfer, rank: Rank) -> None:
    """What a failed transfer was to bring is not there: its targets hold torn bytes."""
    memory = rank.memory
    for key, place, subs in transfer.chunks:
        page = torn(memory.width[key[0]], key[0])
        for sub, block in enumerate(subs):
            if block and transfer.way == "load":
                memory.put_page(block, page)
            elif block and world.stored.get(place, (None,))[0] == key:
                memory.host[place, sub] = page


def crosses(world: World, transfer: Transfer, rank: int) -> bool:
    """Whether this report and another rank's report of another transfer have overtaken one another."""
    for other in world.transfers.values():
        if other.job != transfer.job and rank not in other.reported:
            if any(r in other.reported and r not in transfer.reported for r in range(len(world.ranks))):
                return True
    return False
