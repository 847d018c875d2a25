"""The state machine that drives a world: one rule a kind of choice, with roles as arguments.

Hypothesis picks rules and arguments; the world says whether the choice is possible now.  After every
choice the verdict must still be open; at the end the adversary goes quiet and everything has to come to
rest.  A failure is reduced by the project's own reducer, drawn, and printed with the scenario that
replays it, so Hypothesis' shrinker is left out (see :data:`FINDING`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar, TypeVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from props.report import REPORT
from spec.config import Config, find
from spec.policies import resolve
from spec.scenario import counterexample
from spec.world import STREAMS, Choice, World

T = TypeVar("T")

#: How machines are run.  How many examples is the profile's to say.
FINDING = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], stateful_step_count=60)

NAMES = ("r1", "r2", "r3", "r4")
FAMILIES = st.sampled_from(["0", "0", "1", "2", "3", "r1", "r2"])
WAYS = st.sampled_from(["store", "load"])
PICK = st.integers(0, 59)  # which of the things that can play a role: see ``role``


settled = cache(find)  # read once: a run must not change under Hypothesis' feet


def role(players: Sequence[T], pick: int) -> T:
    """One of those that can play a role now; the choice then names it."""
    return players[pick % len(players)]


class Engine(RuleBasedStateMachine):
    """One engine under one policy.  Subclasses name the configurations."""

    configs: ClassVar[tuple[str, ...]] = ()
    policy: ClassVar[str] = "reference"

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.made: list[Choice] = []
        self.config: Config | None = None

    @initialize(pick=st.integers(0, 719))
    def begin(self, pick: int) -> None:
        """One of the machine's configurations."""
        self.config = settled(self.configs[pick % len(self.configs)])
        self.world = World(self.config, resolve(self.policy))

    # -- choices -------------------------------------------------------------------------------------------
    def choose(self, *choice: object) -> None:
        """Make a choice if it is possible, and look at the verdict."""
        assert self.world is not None
        if self.world.choose(choice):
            self.made.append(choice)
        self.judge()

    def judge(self) -> None:
        """No consequence and no discipline may have broken."""
        assert self.world is not None and self.config is not None
        broken = self.world.verdict or next(iter(self.world.disciplines), None)
        if broken:
            shown = counterexample(self.config, self.policy, self.made, broken.rule)
            raise AssertionError(f"{broken.rule} ({broken.kind}): {broken.text}\n\n{shown}")

    def can(self, *choice: object) -> bool:
        """Whether the world allows a choice now."""
        return self.world is not None and self.world.enabled(choice)

    def live(self) -> list[str]:
        """Clients whose request is not over."""
        return [name for name in NAMES if self.world is not None and self.world.live(name)]

    def in_transfer(self, *ways: str) -> list[str]:
        """Live clients of which a transfer (of these directions) is in flight."""
        transfers = self.world.transfers.values() if self.world else ()
        flying = {t.uid[0] for t in transfers if not ways or t.way in ways}
        return [name for name in self.live() if name in flying]

    def ready(self) -> list[tuple[int, str]]:
        """Streams whose head can run."""
        world = self.world
        return [
            (rank.index, stream)
            for rank in (world.ranks if world else ())
            for stream in STREAMS
            if world is not None and world.head_blocked(rank.index, stream) is None
        ]

    def transferring(self) -> list[tuple[int, str]]:
        """Streams of transfers whose head can run."""
        return [(rank, stream) for rank, stream in self.ready() if stream in ("store", "load")]

    def ended(self, *ways: str) -> list[tuple[str, str, int]]:
        """Transfers (of these directions) that have ended on a rank and were not reported: client, direction,
        rank."""
        world = self.world
        return [
            (transfer.uid[0], transfer.way, rank.index)
            for transfer in (world.transfers.values() if world else ())
            for rank in (world.ranks if world else ())
            if transfer.job in rank.ended and rank.index not in transfer.reported
            if not ways or transfer.way in ways
        ]

    @rule(name=st.sampled_from(NAMES), family=FAMILIES, prompt=st.integers(1, 40), outputs=st.integers(1, 8))
    def arrive(self, name: str, family: str, prompt: int, outputs: int) -> None:
        """A client sends a request."""
        assert self.config is not None
        outputs = min(outputs, self.config.request_tokens - 1)
        self.choose("arrive", name, family, 1 + prompt % (self.config.request_tokens - outputs), outputs)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, drafts=st.integers(0, 7))
    def accept(self, pick: int, drafts: int) -> None:
        """From now on so many drafts of a live request are right."""
        assert self.config is not None
        self.choose("accept", role(self.live(), pick), drafts % (self.config.drafts + 1))

    @precondition(lambda self: self.live())
    @rule(pick=PICK, soon=st.booleans())
    def abort(self, pick: int, soon: bool) -> None:
        """The client of a live request goes away (half the time: more often, little would ever finish)."""
        if soon:
            self.choose("abort", role(self.live(), pick))

    @precondition(lambda self: self.in_transfer())
    @rule(pick=PICK, way=WAYS)
    def abort_in_transfer(self, pick: int, way: str) -> None:
        """A client goes away while a transfer of its request is in flight."""
        self.choose("abort", role(self.in_transfer(way) or self.in_transfer(), pick))

    @rule(scope=st.sampled_from(["local", "all"]), rarely=st.integers(0, 7))
    def reset(self, scope: str, rarely: int) -> None:
        """Caches are cleared, rarely: otherwise there would be no hits."""
        if not rarely:
            self.choose("reset", scope)

    @precondition(lambda self: self.config is not None and self.config.offload)
    @rule(name=st.sampled_from(NAMES), family=FAMILIES, outputs=st.integers(1, 4))
    def ask_again(self, name: str, family: str, outputs: int) -> None:
        """The local cache is cleared, and the longest prompt of a family comes: what was stored is loaded."""
        assert self.config is not None
        self.choose("reset", "local")
        self.choose("arrive", name, family, self.config.request_tokens - outputs, outputs)

    @rule(first=st.sampled_from(NAMES), again=st.sampled_from(NAMES), outputs=st.integers(1, 4))
    def serve_twice(self, first: str, again: str, outputs: int) -> None:
        """A prompt is served to its end, and comes again."""
        assert self.config is not None
        for name in (first, again):
            self.choose("arrive", name, "0", self.config.request_tokens - outputs, outputs)
            self.choose("quiet")

    @precondition(lambda self: self.can("schedule"))
    @rule(steps=st.integers(1, 3))
    def schedule(self, steps: int) -> None:
        """The engine schedules, as often as its queue has room."""
        for _ in range(steps):
            self.choose("schedule")

    @precondition(lambda self: self.can("output"))
    @rule()
    def output(self) -> None:
        """The oldest step's tokens are processed."""
        self.choose("output")

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, ops=st.integers(0, 3))
    def run(self, pick: int, ops: int) -> None:
        """A stream that can advance does: by some operations, or until it blocks (0)."""
        self.choose("run", *role(self.ready(), pick), ops)

    @rule()
    def run_main(self) -> None:
        """Every rank's main stream runs until it blocks."""
        assert self.world is not None
        for rank in range(len(self.world.ranks)):
            self.choose("run", rank, "main", 0)

    @precondition(lambda self: self.transferring())
    @rule(pick=PICK, ops=st.integers(0, 2))
    def run_transfer(self, pick: int, ops: int) -> None:
        """A stream of transfers that can advance does, ahead of whatever the main streams have to do."""
        self.choose("run", *role(self.transferring(), pick), ops)

    @precondition(lambda self: self.ended())
    @rule(pick=PICK, way=WAYS)
    def report(self, pick: int, way: str) -> None:
        """A rank reports a transfer that has ended there, of one direction if there is any."""
        self.choose("report", *role(self.ended(way) or self.ended(), pick))

    @precondition(lambda self: self.ended())
    @rule(pick=PICK, way=WAYS)
    def fail(self, pick: int, way: str) -> None:
        """A rank reports such a transfer as failed."""
        self.choose("fail", *role(self.ended(way) or self.ended(), pick))

    @rule(rounds=st.integers(1, 4))
    def drain(self, rounds: int) -> None:
        """Everything in flight completes, and the engine goes on for some steps."""
        for _ in range(rounds):
            self.choose("drain")
            self.choose("schedule")

    @rule()
    def work(self) -> None:
        """The engine works for one round without interference."""
        self.choose("work")

    def teardown(self) -> None:
        """The adversary goes quiet: everything drains and nothing is left."""
        if self.world is None:
            return
        if self.world.verdict is None and not self.world.disciplines:
            self.choose("quiet")
        if type(self).policy == "reference":
            REPORT.add(type(self).__name__, self.world)
