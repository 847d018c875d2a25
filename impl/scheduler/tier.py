"""The host tier: chunks by key, being written, ready, or read; least recently used goes first.

Sources: `v1/kv_offload/cpu/manager.py::CPUOffloadingManager`, `v1/kv_offload/cpu/policies/lru.py`, vLLM
0.33.0.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from impl.decisions import Decisions
from impl.scheduler.pool import Key
from spec.events import Event

ABSENT, WRITING, READY = "absent", "writing", "ready"


@dataclass(slots=True)
class Entry:
    """A chunk of the tier."""

    place: int
    ready: bool = False
    readers: int = 0


class HostTier:
    """All chunks, in order of use."""

    def __init__(self, chunks: int, decide: Decisions, log: Callable[[Event], None]) -> None:
        self.decide, self.log = decide, log
        self.entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self.places = list(range(chunks - 1, -1, -1))
        self.limbo: Counter[int] = Counter()  # places that transfers from before a reset still use

    def state(self, key: Key) -> str:
        """Whether the chunk is absent, being written, or ready."""
        entry = self.entries.get(key)
        return ABSENT if entry is None else READY if entry.ready else WRITING

    def _log(self, key: Key, place: int, state: str) -> None:
        self.log(("tier", *key, place, state))

    def prepare_store(self, keys: Sequence[Key]) -> dict[Key, int] | None:
        """Places for those chunks that are not here yet; None, and nothing changed, if there is no room."""
        lacking = [key for key in keys if key not in self.entries]
        short = len(lacking) - len(self.places)
        victims = [
            key
            for key, entry in self.entries.items()
            if entry.ready and self.decide.evictable(entry.readers) and key not in keys
        ]
        if short > len(victims):
            return None
        for key in victims[: max(short, 0)]:
            self._remove(key)
        places = {}
        for key in lacking:
            places[key] = self.places.pop()
            self.entries[key] = Entry(places[key])
            self._log(key, places[key], WRITING)
        return places

    def _remove(self, key: Key, *, keeps_place: bool = False) -> None:
        entry = self.entries.pop(key)
        self._log(key, entry.place, "gone")
        if not keeps_place:
            self.places.append(entry.place)

    def complete_store(self, key: Key, ok: bool) -> None:
        """A store of the chunk is over, on every rank.  Raises ``KeyError`` for a chunk that is not here."""
        entry = self.entries[key]
        if not ok or not self.decide.lists_stored():
            self._remove(key)
            return
        entry.ready = True
        self._log(key, entry.place, READY)
        self.entries.move_to_end(key)

    def prepare_load(self, key: Key) -> int:
        """Pin a ready chunk; its place.  Raises ``KeyError`` if it is not ready."""
        entry = self.entries.get(key)
        if entry is None or not entry.ready:
            raise KeyError(key)
        entry.readers += 1
        self.entries.move_to_end(key)
        return entry.place

    def complete_load(self, key: Key, place: int) -> None:
        """A reader is done."""
        if self.decide.returns_readers():
            if key in self.entries:
                self.entries[key].readers -= 1
            self._log(key, place, "released")

    def reset(self, used: Counter[int]) -> None:
        """Forget every chunk.  Places that transfers in flight use (``used``: how many each) come back
        later."""
        for key, entry in list(self.entries.items()):
            if not self.decide.reset_reaches(self.state(key)):
                continue
            held = bool(used[entry.place]) and self.decide.reset_keeps_places()
            self._remove(key, keeps_place=held)
            if held:
                self.limbo[entry.place] = used[entry.place]

    def leave_limbo(self, place: int) -> None:
        """A transfer from before a reset is done with a place."""
        if place in self.limbo:
            self.limbo[place] -= 1
            if not self.limbo[place]:
                del self.limbo[place]
                self.places.append(place)
