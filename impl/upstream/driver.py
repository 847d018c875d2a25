"""Inside the child process: answers questions about one scheduler, one JSON line each way.

Questions (``ask``), and what a reply holds beside ``changed`` (what :func:`observe.difference` says),
``hashes`` (prefixes named for the first time); a scheduler made with ``narrate`` answers with ``decisions``
(the lines of :mod:`impl.upstream.listen`, keys by name) in place of ``changed``, which costs less:

============ ===================================== ===================================================
``ask``      takes                                 answers
============ ===================================== ===================================================
``load``     -                                     ``at``: the file of the package that is imported
``new``      ``config``: the fields of a Config;   ``geometry``; ``state`` in place of ``changed``
             ``patches``: names in ``patches``;
             ``narrate``: a boolean
``arrive``   ``request``, ``tokens``,              ``busy`` if the scheduler still holds that id
             ``output_tokens``
``schedule`` -                                     ``step``: its number; ``out``: observe.scheduled
``output``   ``sampled`` {request: tokens},        ``step``: the oldest one in flight; ``emitted``
             ``drafts`` {request: tokens},         {request: tokens}; ``finished`` {request: reason};
             ``reports`` {rank: jobs}, ``failed``  ``computed`` {request: tokens}
``propose``  ``drafts`` {request: tokens}          -: drafts of the last step, before the next ``schedule``
``report``   ``reports``, ``failed``               -: an output without a step
``abort``    ``request``                           -
``reset``    ``running``, ``tier``: booleans       ``done``; ``raised``: its message if it refused
``state``    -                                     ``state``
``pending``  -                                     ``requests``, ``work``: would an engine go on stepping?
``fork``     ``name``                              -: keep a copy of everything under a name
``back``     ``name``                              -: continue from such a copy, which stays
``watch``    ``functions``: [path, name] pairs     ``called``: functions called since the last time;
                                                   ``idle``: watched ones that never were
============ ===================================== ===================================================

Any exception inside vLLM is an answer, ``crash``, with the innermost place in vLLM's own tree; the scheduler
is then half updated and only ``new`` and ``back`` are answered.  A question that makes no sense is answered
with ``error``.

Order of the engine (``v1/engine/core.py::EngineCore.step_with_batch_queue``): outputs are processed in the
order of their steps; at most ``concurrent_steps`` are in flight.  The caller keeps to that; ``schedule``
refuses one more.
"""

from __future__ import annotations

import ast
import copy
import logging
import os
import re
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from impl.upstream import observe, patches
from impl.upstream.listen import LISTENER, install
from impl.upstream.watch import Watch
from impl.upstream.watch import __file__ as WATCH
from spec.config import Config, ConfigError, Group, Kind

Plain = dict[str, Any]
BYTES = re.compile(r"""b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*\"""")  # as repr writes them


class Misuse(Exception):
    """A question that cannot be asked now."""


class Engine:
    """One scheduler, its steps in flight, and what was last seen of it."""

    def __init__(self, config: Config, narrate: bool = False) -> None:
        from impl.upstream.build import build

        LISTENER.on = False
        built = build(config)
        LISTENER.forget()
        LISTENER.on = self.narrate = narrate
        self.config = config
        self.scheduler = built.scheduler
        self.hasher = built.hash_block
        self.aggregator = built.aggregator
        self.geometry = built.geometry
        self.hashes = observe.Hashes(
            built.geometry["hash_block_tokens"], built.geometry["hash_lookahead_tokens"]
        )
        self.in_flight: deque[tuple[int, Any]] = deque()
        self.steps = 0
        self.loads: dict[int, str] = {}  # asynchronous load -> request, until the last rank reported it
        self.arrived: Counter[int] = Counter()  # asynchronous load -> ranks that have reported it
        self.named: dict[str, tuple[Any, int]] = {}  # live requests and how many of their hashes have names
        self.seen: observe.State = {}

    def learn(self) -> None:
        """Name the prefixes that live requests have shown since the last time."""
        for name, (request, known) in list(self.named.items()):
            count = self.hashes.learn(request, known)
            if self.scheduler.requests.get(name) is request:
                self.named[name] = (request, count)
            else:
                del self.named[name]

    def look(self) -> Plain:
        """What changed since the last look."""
        self.learn()
        reply: Plain = {}
        if self.narrate:
            reply["decisions"] = [
                [self.hashes.key(item) if isinstance(item, bytes) else item for item in line]
                for line in LISTENER.take()
            ]
        else:
            state = observe.observe(self.scheduler, self.hashes)
            reply["changed"] = observe.difference(self.seen, state)
            self.seen = state
        if fresh := self.hashes.take_fresh():
            reply["hashes"] = fresh
        return reply

    def readable(self, message: str) -> str:
        """A message with the keys in it named by their group and prefix; other bytes as a few hex digits."""

        def named(found: re.Match[str]) -> str:
            raw = ast.literal_eval(found[0])
            group, covers = self.hashes.meaning(raw)
            if not covers or (group is not None and group >= len(self.config.groups)):
                return f"0x{raw.hex()[:12]}{'...' if len(raw) > 6 else ''}"
            of = "" if group is None else f"of group {self.config.groups[group].name} "
            return f"{of}up to {covers} tokens"

        self.learn()
        return BYTES.sub(named, message)

    # ---- questions
    # ------------------------------------------------------------------------------------------

    def arrive(self, request: str, tokens: list[int], output_tokens: int) -> Plain:
        """Enqueue a request: ``Scheduler.add_request``."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        if not tokens or output_tokens < 1 or len(tokens) + output_tokens > self.config.request_tokens:
            raise Misuse(
                f"{len(tokens)} prompt and {output_tokens} output tokens do not fit in request_tokens = "
                f"{self.config.request_tokens}"
            )
        if self.scheduler.requests.get(request) is not None:
            # add_request asserts "duplicate request id"; front ends make ids unique among live requests.
            return {"busy": True}
        made = Request(
            request_id=request,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(made)
        self.named[request] = (made, 0)
        return {}

    def schedule(self) -> Plain:
        """One ``Scheduler.schedule`` call; its output goes to the back of the steps in flight."""
        if len(self.in_flight) >= self.geometry["concurrent_steps"]:
            raise Misuse(
                f"{len(self.in_flight)} steps are in flight, the engine keeps no more: output one first"
            )
        manager = self.scheduler.kv_cache_manager
        offers: Plain = {}
        take = manager.take_boundary_state_offloads

        def taken() -> Any:
            result = take()
            offers.update(result)
            return result

        manager.take_boundary_state_offloads = taken
        try:
            out = self.scheduler.schedule()
        finally:
            del manager.take_boundary_state_offloads
        self.steps += 1
        self.in_flight.append((self.steps, out))
        requests = self.scheduler.requests
        samples = [name for name in out.num_scheduled_tokens if not requests[name].is_prefill_chunk]
        plain = observe.scheduled(out, offers, samples)
        # Drafts of a request that joins in this step are padding, -1 on the worker too: none is accepted.
        joins = {entry["request"] for entry in plain["new"]}
        joins.update(entry["request"] for entry in plain["cached"] if entry["resumed"])
        plain["padded"] = sorted(joins & set(plain["drafts"]))
        if plain["loads"] or plain["stores"]:
            connector = self.scheduler.connector.connector_scheduler
            held = connector.manager._policy.chunks
            self.learn()
            for entry in plain["loads"] + plain["stores"]:
                keys = {held[key].chunk_id: key for key in connector._jobs[entry["job"]].keys}
                entry["keys"] = [self.hashes.key(bytes(keys[place])) for place in entry["chunks"]]
        for load in plain["loads"]:
            if not load["sync"]:
                self.loads[load["job"]] = load["request"]
        return {"step": self.steps, "out": plain}

    def _reports(self, reports: dict[str, list[int]], failed: list[str]) -> list[Any]:
        """What each rank's connector reports (``OffloadingConnectorWorker.get_finished``)."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        outputs: list[Any] = [None] * self.config.ranks
        for rank, jobs in reports.items():
            if not 0 <= int(rank) < self.config.ranks:
                raise Misuse(f"rank {rank} of {self.config.ranks}")
            loaded = {self.loads[number] for number in jobs if number in self.loads}
            self.arrived.update(number for number in jobs if number in self.loads)
            outputs[int(rank)] = KVConnectorOutput(
                finished_recving=loaded or None,
                failed_recving=set(failed) & loaded,
                kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1)),
            )
        for number in [job for job, ranks in self.arrived.items() if ranks == self.config.ranks]:
            del self.loads[number], self.arrived[number]
        return outputs

    def _runner_output(
        self,
        names: list[str],
        sampled: dict[str, list[int]],
        reports: dict[str, list[int]],
        failed: list[str],
    ) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        def made(connector_output: Any, tokens: bool) -> Any:
            return ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[list(sampled.get(name, ())) for name in names] if tokens else [],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=connector_output,
            )

        if self.aggregator is None:
            if reports:
                raise Misuse("there is no offload, hence no job to report")
            return made(None, True)
        per_rank = [made(out, rank == 0) for rank, out in enumerate(self._reports(reports, failed))]
        return self.aggregator.aggregate(per_rank, output_rank=0)

    def _process(self, out: Any, runner_output: Any) -> Plain:
        emitted: Plain = {}
        finished: Plain = {}
        for outputs in self.scheduler.update_from_output(out, runner_output).values():
            for entry in outputs.outputs:
                emitted[entry.request_id] = list(entry.new_token_ids)
                if entry.finish_reason is not None:
                    finished[entry.request_id] = str(entry.finish_reason)
        return {"emitted": emitted, "finished": finished}

    def output(
        self,
        sampled: dict[str, list[int]] | None = None,
        drafts: dict[str, list[int]] | None = None,
        reports: dict[str, list[int]] | None = None,
        failed: list[str] | None = None,
    ) -> Plain:
        """Process the oldest step in flight: ``update_from_output``, then the drafts for the next step.

        ``sampled`` holds, for each request that samples, its accepted drafts and one more token.
        ``drafts`` are handed over afterwards, as ``propose`` does: right with one stage only.
        """
        if not self.in_flight:
            raise Misuse("no step is in flight")
        step, out = self.in_flight.popleft()
        sampled = sampled or {}
        strange = sorted(set(sampled) - set(out.num_scheduled_tokens))
        if strange:
            raise Misuse(f"step {step} did not schedule {', '.join(strange)}")
        names = list(out.num_scheduled_tokens)
        live = {name: self.scheduler.requests[name] for name in names if name in self.scheduler.requests}
        reply = self._process(out, self._runner_output(names, sampled, reports or {}, failed or []))
        if drafts:
            self.propose(drafts)
        computed = {name: request.num_computed_tokens for name, request in live.items()}
        return {"step": step, **reply, "computed": computed}

    def propose(self, drafts: dict[str, list[int]]) -> Plain:
        """Drafts reach the synchronous scheduler (``EngineCore.post_step``); an asynchronous one makes
        placeholders itself.
        """
        if not self.config.async_scheduling:
            from vllm.v1.outputs import DraftTokenIds

            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
            )
        return {}

    def report(self, reports: dict[str, list[int]], failed: list[str] | None = None) -> Plain:
        """Reports that ride on an output without requests (``no_forward`` steps)."""
        from vllm.v1.core.sched.output import SchedulerOutput

        self._process(SchedulerOutput.make_empty(), self._runner_output([], {}, reports, failed or []))
        return {}

    def abort(self, request: str) -> Plain:
        """The client went away: ``finish_requests(FINISHED_ABORTED)``."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
        return {}

    def reset(self, running: bool = False, tier: bool = False) -> Plain:
        """``reset_prefix_cache``, optionally preempting what runs and clearing the tier.

        It raises by design, with every request preempted and nothing half updated, when blocks of preempted
        requests are still held (by a load, or by the deferred free of a step in flight): answered as
        ``raised``.
        """
        try:
            done = self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=tier)
        except RuntimeError as error:
            if not str(error).startswith("Failed to reset KV cache"):
                raise
            return {"done": False, "raised": str(error)}
        return {"done": bool(done)}

    def pending(self) -> Plain:
        """Would the engine core call ``schedule`` again?"""
        return {"requests": bool(self.scheduler.requests), "work": bool(self.scheduler.has_requests())}

    def state(self) -> Plain:
        """Everything observed, afresh."""
        return {"state": observe.observe(self.scheduler, self.hashes)}


QUESTIONS = ("arrive", "schedule", "output", "propose", "report", "abort", "reset", "state", "pending")


def config_from_plain(fields: Plain) -> Config:
    """The inverse of ``dataclasses.asdict`` for a ``Config``."""
    plain = dict(fields)
    plain["groups"] = tuple(Group(**{**group, "kind": Kind(group["kind"])}) for group in plain["groups"])
    plain["source"] = tuple(tuple(line) for line in plain.get("source", ()))
    return Config(**plain)


def crash_of(error: BaseException) -> Plain | None:
    """The verdict for an exception that came out of vLLM; ``None`` if this package raised it."""
    import vllm

    tree = os.path.dirname(os.path.abspath(vllm.__file__))
    here = os.path.dirname(os.path.abspath(__file__))
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[-1].filename == WATCH:  # called with other arguments than it takes
        frames.pop()
    inside = [frame for frame in frames if frame.filename.startswith(tree + os.sep)]
    if not inside or frames[-1].filename.startswith(here + os.sep):
        return None
    places = [f"vllm{frame.filename[len(tree) :]}::{frame.name}:{frame.lineno}" for frame in inside]
    return {"type": type(error).__name__, "message": str(error), "at": places[-1], "stack": places}


class Server:
    """Holds the engine that is being asked, and the copies put aside."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.crashed = False
        self.forks: dict[str, Engine] = {}
        self.undo: list[patches.Undo] = []
        self.watch = Watch()

    def answer(self, question: Plain) -> Plain:
        """One question, one reply; never raises for what vLLM does."""
        ask = question.get("ask")
        arguments = {name: value for name, value in question.items() if name != "ask"}
        try:
            match ask:
                case "load":
                    return self._load()
                case "watch":
                    return self._watch(arguments["functions"])
                case "new":
                    self.engine, self.crashed = None, False
                    self._patch(arguments.get("patches", ()))
                    narrate = bool(arguments.get("narrate", False))
                    engine = Engine(config_from_plain(arguments["config"]), narrate)
                    self.engine = engine
                    return {"geometry": engine.geometry, "state": engine.look().get("changed", {})}
                case "back":
                    if arguments["name"] not in self.forks:
                        raise Misuse(f"no copy is called {arguments['name']}")
                    self.engine, self.crashed = copy.deepcopy(self.forks[arguments["name"]]), False
                    return {}
            if self.engine is None or self.crashed:
                raise Misuse("there is no scheduler, or it crashed: ask new or back")
            if ask == "fork":
                self.forks[arguments["name"]] = copy.deepcopy(self.engine)
                return {}
            if ask not in QUESTIONS:
                known = ", ".join(("load", "watch", "new", "back", "fork", *QUESTIONS))
                raise Misuse(f"unknown question {ask!r}; known: {known}")
            reply: Plain = getattr(self.engine, ask)(**arguments)
            if ask in ("state", "pending"):
                return reply
            return reply | self.engine.look()
        except (Misuse, ConfigError) as error:
            return {"error": str(error)}
        except (TypeError, KeyError, ValueError) as error:
            crash = crash_of(error)
            if crash is None:
                return {"error": f"{type(error).__name__}: {error}"}
            return self._crashed(crash)
        except Exception as error:
            crash = crash_of(error)
            if crash is None:
                raise
            return self._crashed(crash)

    def _load(self) -> Plain:
        """Import what a scheduler is made of: a tree that cannot be imported says so before anything runs."""
        try:
            import vllm
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler  # noqa: F401
            from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: F401
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"at": os.path.abspath(vllm.__file__)}

    def _watch(self, functions: Iterable[Iterable[str]]) -> Plain:
        """What was called, and watch these, too."""
        called = self.watch.take()
        self.watch.add((path, name) for path, name in functions)
        return {"called": called, "idle": sorted(self.watch.known - self.watch.ever)}

    def _patch(self, names: Iterable[str]) -> None:
        """Take the last scheduler's patches back and apply this one's."""
        while self.undo:
            self.undo.pop()()
        for name in names:
            if name not in patches.KNOWN:
                raise Misuse(f"unknown patch {name!r}; known: {', '.join(sorted(patches.KNOWN))}")
            self.undo.append(patches.KNOWN[name]())

    def _crashed(self, crash: Plain) -> Plain:
        self.crashed = True
        if self.engine is not None:
            crash["message"] = self.engine.readable(crash["message"])
        LISTENER.take()
        return {"crash": crash}


def main() -> None:
    """Answer lines from standard input until it ends.  vLLM logs to standard output, hence a private copy of
    it.
    """
    import msgspec

    logging.disable(logging.WARNING)  # before vLLM is imported: its own setting is not enough
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    install()
    server = Server()
    encode = msgspec.json.Encoder().encode
    decode = msgspec.json.Decoder().decode
    for line in sys.stdin.buffer:
        replies.write(encode(server.answer(decode(line))) + b"\n")
        replies.flush()
    os._exit(0)  # taking torch down takes seconds


if __name__ == "__main__":
    main()
