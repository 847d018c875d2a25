"""Released vLLM as one more policy of the world.

The questions go to the real scheduler in the child process; its decisions are those that
:mod:`impl.upstream.listen` saw, with requests, keys and prefixes renamed to the world's.  What the workers do
comes from :mod:`impl.upstream.workers`.

Reports travel with a step's output: a rank collects what has ended when its step gets there
(``spec.ops.Collect``), and the scheduler counts it when that step's output is processed.  Only then is the
fence lifted here (``unfence``).  A request id comes back with a number behind it, as the front end makes ids
unique (``v1/engine/input_processor.py::assign_request_id``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from impl.upstream import patches, workers
from impl.upstream.child import Child
from impl.upstream.workers import V1, V2, Message, Row, Worker
from spec.book import Key
from spec.chains import EMPTY, Chains
from spec.config import Config, ConfigError
from spec.events import Event
from spec.ops import UserId
from spec.policy import Answer, Arrival, Output, PolicyError, Program

Plain = dict[str, Any]
DRAFT = 7  # the id of a drafted token: which drafts are right is the world's choice, not the scheduler's


class AdapterError(Exception):
    """The adapter and the release disagree: a defect of this package, never a verdict."""


class Release:
    """One release in its process, as a maker of policies; policies of one process are used one at a time."""

    def __init__(self, child: Child, changes: tuple[str, ...] = ()) -> None:
        unknown = sorted(set(changes) - set(patches.KNOWN) - set(workers.REPAIRS))
        if unknown:
            raise ValueError(f"no mutant or repair is called {unknown[0]!r}")
        self.child = child
        self.changes = changes
        self.steps = 0  # scheduler steps asked so far

    def __call__(self, config: Config, chains: Chains) -> Upstream:
        """A fresh scheduler as a policy."""
        return Upstream(self, config, chains)

    def changed(self, *changes: str) -> Release:
        """The same process with mutants or repairs put in."""
        return Release(self.child, (*self.changes, *changes))


class Upstream:
    """The policy."""

    def __init__(self, release: Release, config: Config, chains: Chains) -> None:
        self.release, self.config, self.chains = release, config, chains
        inside = [name for name in release.changes if name in patches.KNOWN]
        opened = release.child.new(config, inside, narrate=True)
        self.geometry: Plain = opened["geometry"]
        if self.geometry["partial_hits"] and config.offload:
            raise ConfigError(
                f"hash_block_tokens = {config.hash_block_tokens} makes hits that end inside a block; with "
                f"offload enabled = true the world has no host chunks for them"
            )
        self.uids: dict[str, UserId] = {}
        self.longest: dict[UserId, int] = {}
        self.bases: dict[int, tuple[int, int]] = {0: (0, EMPTY)}  # hash -> tokens covered, their prefix
        self.keys: dict[str, Key] = {}
        self.prefixes: dict[int, int] = {}  # hash -> prefix, lookahead included
        self.group_of: dict[int, int] = {}  # block -> group it was last handed out to
        self.reports: dict[int, list[tuple[int, int]]] = {}  # step that carries it -> (job, rank)
        self.proposed: dict[str, list[int]] = {}  # drafts of the last step, not handed over yet
        divisor = self.geometry["split_divisor_tokens"]
        kind = {"v1": V1, "v2": V2}[config.runner]
        self.workers: list[Worker] = [
            kind(release.child.release, config, divisor, rank, release.changes)
            for rank in range(config.ranks)
        ]

    # -- questions -------------------------------------------------------------------------------------------
    def on_arrive(self, arrival: Arrival) -> Answer:
        """``Scheduler.add_request``."""
        name = self.name(arrival.uid)
        self.uids[name] = arrival.uid
        self.longest[arrival.uid] = len(arrival.tokens) + arrival.outputs
        reply = self.ask("arrive", request=name, tokens=list(arrival.tokens), output_tokens=arrival.outputs)
        return Answer([("enqueue", arrival.uid, arrival.tokens), *self.decisions(reply)])

    def on_abort(self, uid: UserId) -> Answer:
        """``Scheduler.finish_requests``."""
        return Answer(list(self.decisions(self.ask("abort", request=self.name(uid)))))

    def on_reset(self, scope: str) -> Answer:
        """``Scheduler.reset_prefix_cache``; nothing happens while blocks are in use."""
        return Answer(list(self.decisions(self.ask("reset", tier=scope == "all"))))

    def on_report(self, job: int, rank: int, ok: bool) -> Answer:
        """A rank has collected a transfer; its step's output will carry that."""
        if not ok:
            raise AdapterError("released workers assert that a transfer succeeds: no failures here")
        self.reports.setdefault(self.workers[rank].collected + 1, []).append((job, rank))
        return Answer()

    def schedule(self) -> Answer:
        """``Scheduler.schedule``."""
        self.release.steps += 1
        if self.proposed:
            self.ask("propose", drafts=self.proposed)
        reply = self.ask("schedule")
        out, step = reply["out"], reply["step"]
        # The engine takes the drafts of a step before it schedules the next one, also while the step's output
        # is under way (``v1/engine/core.py::EngineCore.post_step``, after ``step_with_batch_queue``).
        drafting = self.config.drafts and not self.config.async_scheduling and not out["skip_drafts"]
        self.proposed = {name: [DRAFT] * self.config.drafts for name in out["tokens"]} if drafting else {}
        made = list(self.decisions(reply))
        for job in out["loads"] + out["stores"]:
            made.append(("job", job["job"], "store" if job["store"] else "load", self.uids[job["request"]],
                         self.chunks(job)))  # fmt: skip
        made += [("flush", job) for job in out["flush"]]
        message = self.message(step, out)
        made += [("start", uid, computed) for uid, computed, *_ in message.fresh]
        made += [("row", row.uid, row.computed, row.tokens, row.drafts) for row in message.rows]
        made += [("zero", block, group) for block, group in message.zero]
        made.append(("step", step))
        return Answer(made, message)

    def on_output(self, output: Output) -> Answer:
        """``Scheduler.update_from_output``, with the reports that came along."""
        made: list[Event] = []
        reports: dict[str, list[int]] = {}
        for step in sorted(self.reports):
            if step <= output.step:
                for job, rank in self.reports.pop(step):
                    reports.setdefault(str(rank), []).append(job)
                    made.append(("unfence", job, rank))
        sampled = {self.name(uid): list(tokens) for uid, tokens in output.tokens if tokens}
        reply = self.ask("output", sampled=sampled, reports=reports)
        if reply["step"] != output.step:
            raise AdapterError(f"output of step {output.step} was taken for that of step {reply['step']}")
        for uid, _ in output.tokens:
            name = self.name(uid)
            new, computed = tuple(reply["emitted"].get(name, ())), reply["computed"].get(name, 0)
            made.append(("tokens", uid, output.step, new, computed))
        return Answer([*made, *self.decisions(reply), ("done", output.step)])

    def worker_program(self, rank: int, message: Any) -> Program:
        """The rank's step in the release's order."""
        return self.workers[rank].program(message)

    # -- renaming --------------------------------------------------------------------------------------------
    def ask(self, ask: str, **arguments: Any) -> Plain:
        """One question; an exception inside the release is this policy's error."""
        reply = self.release.child.ask(ask, **arguments)
        if "crash" in reply:
            crash = reply["crash"]
            said = f": {crash['message']}" if crash["message"] else ""
            raise PolicyError(f"{crash['type']}{said} at {crash['at']}")
        if "error" in reply:
            raise AdapterError(f"{ask}: {reply['error']}")
        return reply

    def name(self, uid: UserId) -> str:
        """The id that the release sees."""
        return f"{uid[0]}#{uid[1]}"

    def key(self, name: str) -> Key:
        """A prefix key of the world for a key of the pool or the tier."""
        found = self.keys.get(name)
        if found is None:
            group, number = map(int, name.split(":"))
            if number not in self.prefixes:
                raise AdapterError(f"key {name} stands for no known prefix")
            found = self.keys[name] = (group, self.bases[number][0], self.prefixes[number])
        return found

    def learn(self, hashes: Plain) -> None:
        """Prefixes that were named for the first time."""
        for number, entry in hashes.items():
            prefix = self.bases[entry["parent"]][1]
            for token in entry["tokens"]:
                prefix = self.chains.fold(prefix, token)
            self.bases[int(number)] = (entry["covers"], prefix)
            for token in entry["ahead"]:
                prefix = self.chains.fold(prefix, token)
            self.prefixes[int(number)] = prefix

    def decisions(self, reply: Plain) -> Iterator[Event]:
        """The listener's lines in the world's words."""
        self.learn(reply.get("hashes", {}))
        for kind, *rest in reply["decisions"]:
            if kind == "publish":
                name, block, key = rest
                group, n, prefix = self.key(key)
                yield "publish", self.uids[name], group, block, n, prefix
            elif kind == "look":
                group, n, prefix = self.key(rest[1])
                size = self.config.groups[group].block_tokens * self.config.blocks_per_chunk
                yield "look", self.uids[rest[0]], group, n // size - 1, n, prefix
            elif kind == "tier":
                yield "tier", *self.key(rest[0]), rest[1], rest[2]
            elif kind in ("evict", "copy"):
                yield kind, *rest
            elif kind == "unknown_free":
                raise AdapterError(f"block {rest[0]} is freed, but nobody was seen to hold it")
            else:
                if kind == "alloc":
                    self.group_of[rest[3]] = rest[1]
                elif kind == "handoff":
                    rest[2] = tuple(rest[2])
                yield kind, self.uids[rest[0]], *rest[1:]

    def chunks(self, job: Plain) -> tuple[tuple[Key, int, tuple[int, ...]], ...]:
        """The chunks of a transfer: key, place, and the device block at each sub-slot.

        Blocks of a group fill its chunks from the sub-slot of its first column on, one after the other; the
        worker asserts that they fill as many as the job names (``kv_offload/cpu/gpu_worker.py``)."""
        per, made = self.config.blocks_per_chunk, []
        columns = zip(job["blocks"], job["first_column"], strict=True)
        filled = sum(-(-(first % per + len(blocks)) // per) for blocks, first in columns if blocks)
        if filled != len(job["chunks"]):
            raise PolicyError(
                f"AssertionError on workers: job {job['job']} names {len(job['chunks'])} host chunks, its "
                f"blocks fill {filled}"
            )
        places = iter(zip(job["keys"], job["chunks"], strict=True))
        for blocks, first in zip(job["blocks"], job["first_column"], strict=True):
            if not blocks:
                continue
            at = first % per
            padded = [0] * at + blocks
            padded += [0] * (-len(padded) % per)
            for start in range(0, len(padded), per):
                name, place = next(places)
                made.append((self.key(name), place, tuple(padded[start : start + per])))
        return tuple(made)

    def message(self, step: int, out: Plain) -> Message:
        """What the workers receive."""
        message = Message(step)
        message.left = [self.uids[name] for name in sorted([*out["finished"], *out["preempted"]])]
        computed: dict[str, int] = {}
        for new in out["new"]:
            uid = self.uids[new["request"]]
            table = tuple(tuple(blocks) for blocks in new["blocks"])
            message.fresh.append((uid, new["computed"], new["known"], self.longest[uid], table))
            computed[new["request"]] = new["computed"]
        for old in out["cached"]:
            computed[old["request"]] = old["computed"]
            if old["resumed"]:  # v1: as a cached request with its whole table
                uid = self.uids[old["request"]]
                table = tuple(tuple(blocks) for blocks in old["blocks"])
                message.fresh.append((uid, old["computed"], 0, self.longest[uid], table))
                continue
            if old["blocks"] is not None:
                table = tuple(tuple(blocks) for blocks in old["blocks"])
                message.appended.append((self.uids[old["request"]], table))
        for name, tokens in out["tokens"].items():
            drafts = len(out["drafts"].get(name, ()))
            padded = name in out["padded"]
            message.rows.append(Row(self.uids[name], computed[name], tokens, drafts, padded))
        message.zero = [(block, self.group_of[block]) for block in out["zero"]]
        message.copies = [(src, dst, self.group_of[dst]) for src, dst in out["copies"]]
        message.flush, message.stores = out["flush"], [job["job"] for job in out["stores"]]
        message.loads = [(job["job"], job["sync"]) for job in out["loads"]]
        return message
