"""A server on real memory, its clients, and what they get: no ghost, no rule.

The streams are those of :class:`spec.world.World`: what is blocked, late and in flight there is so here.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import torch

from impl.device import Device, Feed
from impl.engine import Engine
from impl.model import CELL_WORDS, MASK, Truth, first_attended
from spec.chains import EMPTY, Chains
from spec.config import Config
from spec.events import Event
from spec.ops import CopyCounts, Draft, End, Forward, Sample, UserId
from spec.policy import Arrival, Policy
from spec.world import STREAMS, Client, Rank, Reply, StepRun, Transfer, World

CLIENTS = 8  # requests that live at a time
VOCABULARY = 32_000
HIT_CHANCE = 0.9  # of one draft
HEADS_TOKENS = (8, 13, 20, 32)  # shared prefixes
RESENT, CONTINUED = (
    0.25,
    0.4,
)  # of arrivals: a recent prompt once more; the client's last answer and some more
RESET = 0.06  # of arrivals: caches are cleared just before
FAILED = 0.02  # of the reports of transfers
LONGEST_STALL = {"main": 6, "store": 50, "load": 50, "counts": 10}  # rounds
PROMPTS_KEPT = 40  # of which one may be sent again
STUCK_ROUNDS = 1_500  # without the end of any request; one takes some twenty to a hundred


class Stop(Protocol):
    """What says that somebody wants the command to end: an event of threads or of processes."""

    def is_set(self) -> bool:
        """Whether somebody does."""
        ...

    def set(self) -> None:
        """Somebody does."""
        ...


def token_of(word: int) -> int:
    """The token that an output word stands for."""
    return (word & MASK) % VOCABULARY


class Oracle:
    """Greedy decoding by the closed form."""

    def __init__(self, config: Config) -> None:
        self.chains = Chains()
        self.truth = Truth(config, self.chains)
        self.stage = config.pp - 1
        self.next: dict[int, int] = {}

    def next_token(self, prefix: int) -> int:
        """The true model's token after a prefix, whatever the prefix."""
        if prefix not in self.next:
            self.next[prefix] = token_of(self.truth.output(self.stage, prefix))
        return self.next[prefix]

    def continuation(self, prefix: int, tokens: int) -> list[int]:
        """What greedy decoding gives."""
        found: list[int] = []
        while len(found) < tokens:
            found.append(self.next_token(prefix))
            prefix = self.chains.fold(prefix, found[-1])
        return found


@dataclass(slots=True)
class Outcome:
    """What a load was like for its clients."""

    load: str
    run: int
    fault: str = ""  # "": the reference
    arrived: int = 0
    served: int = 0  # to their last token
    differing: int = 0  # of them, those that did not get what greedy decoding gives
    aborted: int = 0
    drafted_steps: int = 0  # decode steps with all K drafts
    drafted_tokens: int = 0  # verified in them
    prompt_tokens: int = 0  # of served requests
    cached_tokens: int = 0  # of them, those in place when the request first ran
    loaded_tokens: int = 0  # brought back from the host tier
    misled_drafts: int = 0  # rows of which a drafter of several modules re-read wrong history
    preempted: int = 0
    steps: int = 0
    stuck: int = 0  # requests that were still waiting when nothing ended any more
    held_blocks: int = 0  # by an engine without requests
    open_transfers: int = 0  # that such an engine still waits for
    error: str = ""  # an exception ended the load
    stopped: bool = False  # by hand
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Of served requests, those with another output."""
        return self.differing / max(1, self.served)

    @property
    def acceptance(self) -> float:
        """Mean tokens of a decode step with all its drafts; 0 if there was none."""
        return self.drafted_tokens / max(1, self.drafted_steps)

    @property
    def cached(self) -> float:
        """Of prompt tokens, those that were in place already."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def loaded(self) -> float:
        """Tokens brought back from the host tier, a prompt token."""
        return self.loaded_tokens / max(1, self.prompt_tokens)

    @property
    def begun(self) -> float:
        """How often a request is begun: once, and once more for each preemption."""
        return 1 + self.preempted / max(1, self.served)

    @property
    def clean(self) -> bool:
        """Whether nobody noticed anything."""
        left = self.stuck or self.held_blocks or self.open_transfers
        return not (self.differing or self.error or self.misled_drafts or left)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Several runs as one: counts are added, the first error stands for all."""
    whole = replace(outcomes[0])
    for one in outcomes[1:]:
        for name in Outcome.__slots__:
            old, new = getattr(whole, name), getattr(one, name)
            if name == "run" or isinstance(old, str) and old:
                continue
            setattr(whole, name, old or new if isinstance(old, (str, bool)) else old + new)
    return whole


Build = Callable[[Config, Chains, Feed], tuple[Engine, Policy]]
"""An engine, and who answers for it: itself, or itself with edited answers."""


class Service(World):
    """A world with streams and clients, real memory, and neither ghost nor rule.

    Also the feed of every worker: what a step's query tokens are, and how many were verified."""

    def __init__(self, config: Config, build: Build, oracle: Oracle, random: Random) -> None:
        self.engine: Engine
        self.oracle, self.random = oracle, random

        def policy(config: Config, _: Chains) -> Policy:
            self.engine, answers = build(config, oracle.chains, self)
            return answers

        super().__init__(config, policy)
        self.chains = oracle.chains
        self.drafts: dict[int, dict[UserId, int]] = {}  # step -> drafts of its rows
        self.scheduled: dict[UserId, int] = {}  # the same, of the step being scheduled
        self.over: dict[UserId, str] = {}  # requests that have ended, and why
        self.resumed: dict[UserId, int] = {}  # tokens that it found in place when it last started
        self.misled: set[UserId] = set()  # whose drafter read something wrong
        self.seen = Outcome("", 0)

    # -- the feed ------------------------------------------------------------------------------------------
    def tokens(self, step: int) -> list[list[int]]:
        """Token ids of a step's query tokens, row by row."""
        run = self.steps[step]
        return [run.lines[row.uid] for row in run.rows]

    def results(self, step: int) -> list[tuple[int, int]]:
        """Verified tokens and rejected drafts of a step's rows."""
        return self.steps[step].results

    # -- the policy's answers, without book or rules -------------------------------------------------------
    def guard(self, question: Callable[[], Reply]) -> Reply | None:
        """An error is an error."""
        return question()

    def decide(self, decision: Event) -> None:
        """What clients and streams must know of a decision."""
        kind = decision[0]
        if kind == "job":
            job, way, uid, chunks = decision[1:]
            self.transfers[job] = Transfer(job, way, uid, chunks, {})
            if way == "store":
                self.stored.update({place: (key, subs) for key, place, subs in chunks})
        elif kind == "start":
            client = self.clients[decision[1]]
            client.computed = self.resumed[client.uid] = decision[2]
            if client.began_at < 0:
                client.began_at = decision[2]
        elif kind == "hit":
            self.seen.loaded_tokens += decision[3] - decision[2]
        elif kind == "row":
            self.scheduled[decision[1]] = decision[4]
        elif kind == "step":
            self.book.step = decision[1]
            self.drafts[decision[1]], self.scheduled = self.scheduled, {}
        elif kind == "preempt":
            self.seen.preempted += 1
        elif kind == "finish":
            self.over[decision[1]] = decision[2]

    def alive(self) -> bool:
        """Whether any request is not over."""
        return any(uid not in self.over for uid in self.clients)

    def output_due(self) -> bool:
        """Whether the engine loop processes an output now."""
        if not self.queue or not self.steps[self.queue[0]].sampled:
            return False
        return len(self.queue) == self.depth or not self.alive()

    def prune(self) -> None:
        """Forget steps that nothing late can name."""
        super().prune()
        for step in [one for one in self.drafts if one not in self.steps]:
            del self.drafts[step]

    # -- real memory instead of ghosts ---------------------------------------------------------------------
    def step_stream(self, rank: Rank, stream: str) -> None:
        """The head of a stream executes."""
        op = rank.streams[stream].popleft()
        device = self.engine.devices[rank.index]
        if isinstance(op, Forward):
            run = self.steps[op.step]
            if not run.lines:
                self.prepare(run)
            run.forwards.add(rank.index)
            rank.forwarded = op.step
        device.execute(op)
        if isinstance(op, Sample):
            self.verify(self.steps[op.step], device)
        elif isinstance(op, Draft):
            self.check_drafter(op, rank, device)
        elif isinstance(op, End):
            rank.ended[op.job] = None
        elif isinstance(op, CopyCounts):
            rank.landed[op.step] = None
        rank.executed += stream == "main"

    def spoil(self, transfer: Transfer, rank: Rank) -> None:
        """A failed transfer leaves rubbish."""
        memory = self.engine.devices[rank.index].memory
        if memory.device.type == "cuda":
            torch.cuda.synchronize()  # what was copied to the host has arrived before it is spoiled there
        for key, place, subs in transfer.chunks:
            for sub, block in enumerate(subs):
                if block and transfer.way == "load":
                    memory.poison([block])
                elif block and self.stored.get(place, (None,))[0] == key:
                    memory.chunks[place, sub] = 0x5A

    def prepare(self, run: StepRun) -> None:
        """Fix the step's tokens: verified ones, then drafts.  ``lines`` are query tokens here."""
        for row in run.rows:
            client, drafts = self.clients[row.uid], self.drafts[run.step][row.uid]
            start, given = client.computed, row.tokens - drafts
            tokens = client.tokens[start : start + given]
            tokens += [0] * (given - len(tokens))  # what a buffer holds where no token is known
            run.lines[row.uid] = tokens + self.proposed(
                row.uid, min(start + given, len(client.tokens)), drafts
            )
            run.starts[row.uid] = start
            if start + given >= len(client.tokens):
                client.pending = run.step
            else:
                client.computed = start + row.tokens

    def proposed(self, uid: UserId, known: int, drafts: int) -> list[int]:
        """Drafts after the first ``known`` tokens: true ones until the first miss, which ends all chances."""
        prefix, found = self.clients[uid].line[known], list[int]()
        while len(found) < drafts and uid not in self.misled and self.random.random() < HIT_CHANCE:
            found.append(self.oracle.next_token(prefix))
            prefix = self.chains.fold(prefix, found[-1])
        if len(found) < drafts:
            found.append((self.oracle.next_token(prefix) + 1) % VOCABULARY)
        return found + [0] * (drafts - len(found))

    def verify(self, run: StepRun, device: Device) -> None:
        """Tokens come out of the last stage's words: drafts that equal them, and one more."""
        if run.sampled:
            return
        assert device.output is not None
        run.sampled = True
        words, at = device.output.cpu().tolist(), 0
        for row in run.rows:
            client, tokens, drafts = self.clients[row.uid], run.lines[row.uid], self.drafts[run.step][row.uid]
            out, at = words[at : at + row.tokens], at + row.tokens
            first = row.tokens - drafts - 1  # of the words, the one after the last token that is no draft
            if run.starts[row.uid] + first + 1 < len(client.tokens):
                run.results.append((0, 0))
                continue
            fresh = [token_of(out[first])]
            while len(fresh) <= drafts and tokens[first + len(fresh)] == fresh[-1]:
                fresh.append(token_of(out[first + len(fresh)]))
            for token in fresh:
                client.tokens.append(token)
                client.line.append(self.chains.fold(client.line[-1], token))
            client.computed = run.starts[row.uid] + first + len(fresh)
            client.pending = 0
            run.new[row.uid] = tuple(fresh)
            run.results.append((len(fresh), drafts + 1 - len(fresh)))
            if drafts == self.config.drafts and row.uid not in self.over:
                self.seen.drafted_steps += 1
                self.seen.drafted_tokens += len(fresh)

    def check_drafter(self, op: Draft, rank: Rank, device: Device) -> None:
        """A drafter of several modules that re-reads wrong history proposes what is wrong.

        It computes nothing here, so this is where its bytes are held against the closed form."""
        run, read = self.steps[op.step], None
        self.misled.clear()
        for (_, g), (at, size) in device.places.items():
            group = self.config.groups[g]
            for i, row in enumerate(op.rows):
                client, (_, rejected) = self.clients[row.uid], run.results[i]
                if not rejected:
                    continue
                read = device.read.tolist() if read is None else read
                after = run.starts[row.uid] + row.tokens - rejected
                first = first_attended(group, max(after - group.extra_tokens, self.resumed[row.uid]))
                cells = self.oracle.truth.cells(rank.stage, g, client.line[first + 1 : after + 1])
                want, here = [word for cell in cells for word in cell], at + i * size + CELL_WORDS * first
                if read[here : here + len(want)] != want:
                    self.misled.add(row.uid)
                    self.seen.misled_drafts += 1


@dataclass(frozen=True, slots=True)
class Habits:
    """What clients and links of a load do."""

    aborted: float = 0.08  # of arrivals: the client goes away before it has its answer
    patience_rounds: int = 30  # at most, of those
    outages: float = 0.0  # chance, a round, that all of them lose their connections
    outage_rounds: int = 5  # in each of which half of the requests are aborted
    stalled: float = 0.02  # a stream's chance, in a round, to stand still for some rounds
    stalled_transfers: float = 0.02  # the same of a store's or a load's
    reported: float = 0.5  # chance, a round, that a rank's report of what has ended there arrives


HABITS = {
    "churn": Habits(aborted=0.3, patience_rounds=8, outages=0.008),
    "tier": Habits(stalled_transfers=0.06),
    "starved": Habits(stalled_transfers=0.06),
    "fences": Habits(stalled=0.05, stalled_transfers=0.05, reported=0.3),
}
"""By load; the others' clients have usual ones."""


class Load:
    """Clients that send, wait, go away and come back, in an order that a seed gives."""

    def __init__(self, config: Config, build: Build, oracle: Oracle, random: Random) -> None:
        self.config, self.random, self.oracle = config, random, oracle
        self.habits = HABITS.get(config.name, Habits())
        self.world = Service(config, build, oracle, random)
        self.names = [f"client{i}" for i in range(CLIENTS)]
        self.live: dict[str, UserId] = {}
        self.said: dict[str, list[int]] = {}  # a client's last request with its answer
        self.leaves: dict[UserId, int] = {}  # round in which its client goes away
        self.sent: list[list[int]] = []  # the latest prompts
        self.heads = [[random.randrange(VOCABULARY) for _ in range(n)] for n in HEADS_TOKENS]
        self.stalled: dict[tuple[int, str], int] = {}  # the last round in which the stream stands still
        self.rounds = self.ended_at = self.outage = 0

    def run(self, requests: int, stop: Stop | None = None) -> Outcome:
        """Serve so many requests; what was seen.  An error of the engine ends it."""
        seen, began = self.world.seen, time.perf_counter()
        try:
            while not self.settled(requests):
                if stop is not None and stop.is_set():
                    seen.stopped = True
                    break
                if self.rounds - self.ended_at > STUCK_ROUNDS:
                    break
                self.round(requests)
        except Exception as error:
            if own_fault(error):
                raise
            seen.error = " ".join(f"{type(error).__name__}: {error}".split())
        if not (seen.error or seen.stopped):
            self.look_around()
        seen.steps, seen.seconds = self.world.book.step, time.perf_counter() - began
        return seen

    def settled(self, requests: int) -> bool:
        """Whether all requests have come and gone, and nothing is in flight."""
        world = self.world
        return (
            world.seen.arrived >= requests
            and not (self.live or world.queue or world.transfers)
            and not any(any(rank.streams.values()) for rank in world.ranks)
        )

    def look_around(self) -> None:
        """What is left when nothing happens any more."""
        scheduler, seen = self.world.engine.scheduler, self.world.seen
        seen.stuck = len(self.live)
        if not seen.stuck:
            seen.held_blocks = sum(block.references > 0 for block in scheduler.cache.pool.blocks[1:])
            owed = sum(len(request.jobs) for request in scheduler.requests.values())
            seen.open_transfers = max(len(scheduler.offload.jobs), owed)
            seen.open_transfers += sum(
                not entry.ready or entry.readers > 0 for entry in scheduler.offload.tier.entries.values()
            )

    def round(self, requests: int) -> None:
        """Clients act, the engine schedules if it may, every stream goes some way, some reports arrive."""
        world, random = self.world, self.random
        self.rounds += 1
        if self.habits.outages and random.random() < self.habits.outages:
            self.outage = self.rounds + self.habits.outage_rounds
        for name in self.names:
            uid = self.live.get(name)
            if uid is not None and uid not in world.over and self.goes_away(uid):
                world.ask(lambda uid=uid: world.policy.on_abort(uid))  # type: ignore[misc]
            if uid in world.over:
                self.served(name, uid)
            if name not in self.live and world.seen.arrived < requests:
                self.arrive(name)
        if len(world.queue) < world.depth and (self.live or world.transfers):
            world._schedule()
        ready = [(r, s) for r, rank in enumerate(world.ranks) for s in STREAMS if rank.streams[s]]
        random.shuffle(ready)
        for rank, stream in ready:
            slow = self.habits.stalled_transfers if stream in ("store", "load") else self.habits.stalled
            if random.random() < slow:
                self.stalled[rank, stream] = self.rounds + random.randint(1, LONGEST_STALL[stream])
            if self.stalled.get((rank, stream), 0) < self.rounds:  # mostly it runs until it blocks
                world._run(rank, stream, 0 if random.random() < 0.7 else random.randint(1, 6))
        for transfer in list(world.transfers.values()):
            for one in world.ranks:
                if (
                    transfer.job in one.ended
                    and one.index not in transfer.reported
                    and random.random() < self.habits.reported
                ):
                    world.report(transfer, one.index, ok=random.random() >= FAILED)
        if world.output_due():
            world._output()

    def goes_away(self, uid: UserId) -> bool:
        """Whether the request's client leaves in this round."""
        if self.rounds < self.outage:
            return self.random.random() < 0.5
        return self.leaves.get(uid, 0) == self.rounds

    def served(self, name: str, uid: UserId) -> None:
        """A request is over: its tokens are compared."""
        world, client = self.world, self.world.clients[uid]
        seen, end = world.seen, client.prompt + client.outputs
        self.ended_at = self.rounds
        del self.live[name]
        named = {row.uid for run in world.steps.values() for row in run.rows}
        for old in [one for one in world.clients if one[0] == name and one != uid and one not in named]:
            del world.clients[old], world.over[old]
        if world.over[uid] != "length":
            seen.aborted += 1
            return
        seen.served += 1
        seen.differing += client.tokens[client.prompt : end] != self.oracle.continuation(
            client.line[client.prompt], client.outputs
        )
        seen.prompt_tokens += client.prompt
        seen.cached_tokens += max(0, client.began_at)
        self.said[name] = client.tokens[:end]

    def arrive(self, name: str) -> None:
        """A client sends a request."""
        world, random, tokens = self.world, self.random, self.prompt(name)
        if random.random() < RESET:
            scope = random.choice(("local", "all"))
            world.ask(lambda: world.policy.on_reset(scope))
        outputs = random.randint(4, min(24, self.config.request_tokens - len(tokens)))
        world.lives[name] += 1
        uid = self.live[name] = (name, world.lives[name])
        line = [EMPTY]
        for token in tokens:
            line.append(world.chains.fold(line[-1], token))
        world.clients[uid] = Client(uid, list(tokens), line, len(tokens), outputs, 0)
        world.seen.arrived += 1
        world.ask(lambda: world.policy.on_arrive(Arrival(uid, tuple(tokens), outputs)))
        if random.random() < self.habits.aborted:
            self.leaves[uid] = self.rounds + random.randint(1, self.habits.patience_rounds)

    def prompt(self, name: str) -> list[int]:
        """A recent prompt, the next turn of a conversation, or a shared prefix with a new question."""
        random, roll = self.random, self.random.random()
        longest = self.config.request_tokens - 8
        last = self.said.get(name, [])
        if roll < RESENT and self.sent:
            return random.choice(self.sent)
        if roll < RESENT + CONTINUED and last and len(last) + 6 <= longest:
            head, more = last, random.randint(1, 6)
        else:
            head, more = random.choice(self.heads), random.randint(1, 20)
        tokens = head + [random.randrange(VOCABULARY) for _ in range(more)]
        self.sent = [*self.sent[1 - PROMPTS_KEPT :], tokens]
        return tokens


def own_fault(error: Exception) -> bool:
    """Whether an error is this module's own, not the engine's: then it must not pass for a finding."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename == __file__ and not isinstance(error, RuntimeError)
