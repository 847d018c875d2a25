"""The core protocol: who owns which block, on ids alone.  Twelve actions; read it in five minutes.

**Story.**  One pool of blocks serves every cache group.  A request *allocates* blocks, *publishes* full
ones under prefix keys, and other requests *adopt* published ones.  A block that nobody holds is free; if it
still carries a key it can be adopted until an allocation *evicts* the key.  A store reads blocks long after
it was decided: it *fences* them from creation to the last rank's report.  The fence never stops the
allocator; it obliges the step that reuses the block to *flush* the store first.  A worker keeps per-request
state in batch *slots*; kernels of a step may run many steps later, when the slot already belongs to someone
else, so each occupancy has a *generation*.

Each action is a guard, then an effect.  A guard that fails names the rule that it enforces and leaves the
state to the effect all the same: the full machine asks the core about what a policy *did*, and what was
done was done. No token arithmetic lives here.  The full machine maps every decision to one of these actions
or to nothing (:data:`CORE_ACTION`), and asks on every walked step.

Sources: vLLM ``v1/core/block_pool.py::BlockPool``; ``.../kv_connector/v1/offloading/scheduler.py`` (fences,
flushes); ``v1/worker/gpu/states.py::RequestState`` (slots).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

NULL = 0  # the null block pads skipped columns; nobody owns it


@dataclass(slots=True)
class Job:
    """A transfer between device blocks and host chunks, until the last rank has reported."""

    way: str  # "store" | "load"
    blocks: tuple[int, ...]  # device side, deduplicated: one physical block may sit under two columns
    waiting: set[int]  # ranks that have not reported


@dataclass(slots=True)
class Core:
    """The state: flat maps over ids.  ``free`` is derived: a block is free when it has no holders."""

    ranks: int
    holders: dict[int, dict[object, int]] = field(default_factory=dict)  # block -> owner -> references
    key: dict[int, object] = field(default_factory=dict)  # block -> published key
    jobs: dict[int, Job] = field(default_factory=dict)
    fences: dict[int, dict[int, None]] = field(default_factory=dict)  # block -> jobs, in creation order
    reused: dict[int, None] = field(
        default_factory=dict
    )  # fenced stores whose block was handed out this step
    slots: dict[int, tuple[object, int]] = field(default_factory=dict)  # slot -> (owner, generation)
    generation: dict[int, int] = field(default_factory=dict)  # slot -> occupancies so far
    steps: dict[int, tuple[object, ...]] = field(default_factory=dict)  # step in flight -> owners of its rows

    # -- the pool ------------------------------------------------------------------------------------------
    def allocate(self, owner: object, block: int) -> str | None:
        """A free, keyless block gets its first reference.  Fenced stores on it must be flushed this step."""
        broken = None
        if block == NULL:
            broken = "null_block_unowned"
        elif self.holders.get(block):
            broken = "no_double_owner"
        elif block in self.key:
            broken = "evict_before_reuse"
        self.holders.setdefault(block, {})[owner] = self.holders.get(block, {}).get(owner, 0) + 1
        for job in self.fences.get(block, ()):
            if self.jobs[job].way == "store":
                self.reused[job] = None
        return broken

    def adopt(self, owner: object, block: int) -> str | None:
        """A published block gets one more reference (``BlockPool.touch``)."""
        broken = None if block in self.key else "adopt_only_published"
        self.holders.setdefault(block, {})[owner] = self.holders.get(block, {}).get(owner, 0) + 1
        return broken

    def release(self, owner: object, block: int) -> str | None:
        """One reference less; the block is free when none is left."""
        held = self.holders.get(block, {})
        if held.get(owner, 0) < 1:
            return "release_only_held"
        held[owner] -= 1
        if not held[owner]:
            del held[owner]
        if not held:
            del self.holders[block]
        return None

    def publish(self, owner: object, block: int, key: object) -> str | None:
        """The block goes under a key, before its bytes exist: whoever reads it must come later in stream
        order."""
        broken = None if owner in self.holders.get(block, {}) else "publish_only_held"
        if block == NULL:
            broken = "null_block_unowned"
        self.key[block] = key
        return broken

    def evict(self, block: int) -> str | None:
        """The key is forgotten; references stay."""
        self.key.pop(block, None)
        return None

    # -- transfers -----------------------------------------------------------------------------------------
    def create(self, job: int, way: str, blocks: tuple[int, ...]) -> str | None:
        """A transfer is decided; its device blocks are fenced until the last report."""
        broken = "null_block_unowned" if NULL in blocks else None
        if job in self.jobs:
            broken = "job_ids_unique"
        self.jobs[job] = Job(way, blocks, set(range(self.ranks)))
        for block in blocks:
            self.fences.setdefault(block, {})[job] = None
        return broken

    def report(self, job: int, rank: int) -> str | None:
        """One rank is done.  The last report, and only that, lifts the fences."""
        if job not in self.jobs or rank not in self.jobs[job].waiting:
            return "report_once_per_rank"
        self.jobs[job].waiting.discard(rank)
        if not self.jobs[job].waiting:
            for block in self.jobs.pop(job).blocks:
                del self.fences[block][job]
                if not self.fences[block]:
                    del self.fences[block]
            self.reused.pop(job, None)
        return None

    def flush(self, job: int) -> str | None:
        """The step being built waits for this store before it overwrites anything."""
        self.reused.pop(job, None)
        return None if job in self.jobs else "flush_only_pending"

    # -- slots and steps -----------------------------------------------------------------------------------
    def take(self, owner: object, slot: int) -> str | None:
        """A request enters a batch slot; the slot's generation names this occupancy."""
        broken = "slot_single_occupant" if slot in self.slots else None
        self.generation[slot] = self.generation.get(slot, 0) + 1
        self.slots[slot] = (owner, self.generation[slot])
        return broken

    def leave(self, slot: int) -> str | None:
        """The request leaves its slot; anything late that still names the occupancy must be masked."""
        return None if self.slots.pop(slot, None) else "slot_single_occupant"

    def begin(self, step: int, owners: tuple[object, ...]) -> str | None:
        """A step goes to the ranks.  Every reused fenced store must have been flushed by now."""
        unflushed = bool(self.reused)
        self.reused.clear()
        self.steps[step] = owners
        return "reuse_flushes_fence" if unflushed else None

    def end(self, step: int) -> str | None:
        """The step's output is processed; steps end in the order in which they began."""
        oldest = next(iter(self.steps), None)
        self.steps.pop(step, None)
        return None if step == oldest else "steps_end_in_order"

    # -- for exploration -----------------------------------------------------------------------------------
    def frozen(self) -> tuple[object, ...]:
        """A hashable picture of the whole state."""
        return (
            tuple(sorted((b, tuple(sorted(h.items(), key=repr))) for b, h in self.holders.items())),
            tuple(sorted(self.key.items(), key=repr)),
            tuple(
                sorted((j, job.way, job.blocks, tuple(sorted(job.waiting))) for j, job in self.jobs.items())
            ),
            tuple(sorted(self.reused)),
            tuple(sorted(self.slots.items(), key=repr)),
            tuple(sorted(self.generation.items())),
            tuple(self.steps.items()),
        )


#: decision kind -> core action; every other decision and every effect is a stutter
CORE_ACTION: dict[str, str] = {
    "alloc": "allocate",
    "adopt": "adopt",
    "drop": "release",
    "publish": "publish",
    "evict": "evict",
    "job": "create",
    "unfence": "report",
    "flush": "flush",
    "step": "begin",
    "done": "end",
    "take": "take",
    "leave": "leave",
}


def free_blocks(core: Core, pool: int) -> Iterator[int]:
    """Block ids that nobody holds, the null block excepted."""
    return (block for block in range(1, pool) if not core.holders.get(block))
