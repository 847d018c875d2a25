"""Hunting a fault: find a run that breaks a consequence, shrink it, and test the repair on it.

Finding and shrinking are separate.  The walker finds (hundreds of times as fast as anything that generates
through Hypothesis), Hypothesis' generation finds by another road, and the reducer shrinks in milliseconds a
replay.  A breadth-first search over the trace's own choices then says whether a shorter run exists, as far as
it got.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from spec import config as configs
from spec import render, script
from spec.chains import Chains
from spec.config import Config
from spec.events import Event
from spec.faults.fault import Fault
from spec.fingerprint import mark
from spec.reduce import reduce, replay
from spec.rules import BY_NAME
from spec.walk import Adversary, PolicyFactory, draw_options, walk_once
from spec.world import Breach, World

TRACES = Path(__file__).parent / "traces"
Choices = tuple[Event, ...]
NEVER_ENDS = ("everything_drains", "nothing_left_when_idle")  # found at the end of a quiet phase
LONGEST_TRACE = 20  # choices
LONGEST_SEARCH_SECONDS = 10.0


@dataclass(slots=True)
class Found:
    """A run that broke a consequence."""

    breach: Breach
    choices: Choices
    runs: int
    seconds: float


@dataclass(slots=True)
class Hunt:
    """The outcome of one fault's hunt, and the expectations that it failed."""

    fault: str
    config: str = ""
    rule: str = ""
    text: str = ""
    disciplines: list[str] = field(default_factory=list)
    choices: Choices = ()
    runs: int = 0
    seconds: float = 0.0  # to find it: the median over the seeds
    by_hypothesis: str = ""
    cycle: Choices = ()  # of a liveness fault: the choices that lead back to where the run stood
    search: str = ""  # what the breadth-first search says
    missed: list[str] = field(default_factory=list)  # not found within the budget: undetermined
    wrong: list[str] = field(default_factory=list)  # an expectation that failed


def find(config: Config, policy: PolicyFactory, *, runs: int, choices: int, seed: int) -> Found | None:
    """Walk until a consequence breaks."""
    began = time.perf_counter()
    for number in range(runs):
        run = walk_once(config, policy, seed, number, choices)
        verdict = run.world.verdict
        if verdict:
            made = tuple(run.choices)
            return Found(verdict, made, number + 1, time.perf_counter() - began)
    return None


def generated(one: Callable[[Random], None], *, examples: int, seed: int) -> None:
    """Call ``one`` with sources of draws that Hypothesis generates: by another road than the walk's.

    Its generation only: what ``one`` raises ends it, and nothing is shrunk, for which the project has its own
    reducer (:mod:`spec.reduce`), nor kept.  Raises ``ModuleNotFoundError`` without Hypothesis."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    @seeded(seed)
    @settings(
        backend=draws(),
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.randoms(use_true_random=False))
    def generate(random: Random) -> None:
        one(random)

    generate()


def draws() -> str:
    """Hypothesis' draws without the constants of local sources: the name of its backend.

    By itself Hypothesis now and then draws a number that stands in the text of some loaded module; then what
    a seed generates changes with every edit of any of them."""
    try:
        from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
    except ImportError:
        return "hypothesis"  # a release before such constants

    class Draws(HypothesisProvider):
        def _maybe_draw_constant(self, *given: Any, **options: Any) -> None:
            return None

    globals()[Draws.__name__] = Draws
    AVAILABLE_PROVIDERS["spec"] = f"{__name__}.{Draws.__name__}"
    return "spec"


class FoundOne(Exception):
    """A run that broke a consequence was generated."""


def find_by_hypothesis(
    config: Config, policy: PolicyFactory, *, examples: int, choices: int, seed: int
) -> str:
    """Let Hypothesis generate the adversary's draws (its generation only: the reducer shrinks)."""
    began = time.perf_counter()
    tried = [0]

    def one(random: Random) -> None:
        tried[0] += 1
        adversary = Adversary(config, random, draw_options(config, random))
        world = World(config, policy)
        for _ in range(2 * choices):
            choice = adversary.draw(world)
            if choice is not None:
                world.choose(choice)
            if world.verdict:
                raise FoundOne
        if not world.verdict and not world.quiet():
            raise FoundOne

    try:
        generated(one, examples=examples, seed=seed)
    except FoundOne:
        return f"found in example {tried[0]}, {time.perf_counter() - began:.1f} s"
    return f"not found in {tried[0]} examples"


def by_another_road(fault: Fault, config: Config, seed: int) -> str:
    """What Hypothesis says; without it the walker's run has to do."""
    try:
        return find_by_hypothesis(config, fault.policy, examples=150, choices=80, seed=seed)
    except ModuleNotFoundError as absent:
        if (absent.name or "").partition(".")[0] != "hypothesis":
            raise
        return "is not installed (pip install -e '.[dev]')"


def removable(config: Config, policy: PolicyFactory, choices: Choices, rule: str) -> list[int]:
    """Positions of choices without which the same rule still breaks."""
    return [
        at
        for at in range(len(choices))
        if broke(replay(config, policy, choices[:at] + choices[at + 1 :]), rule)
    ]


def broke(world: World, rule: str) -> bool:
    """Whether the run ended with this rule broken."""
    return world.verdict is not None and world.verdict.rule == rule


def breadth_first(
    config: Config, policy: PolicyFactory, choices: Choices, rule: str, *, states: int, seconds: float
) -> tuple[str, Choices]:
    """Search all runs over the trace's own choices, shortest first; what it says, and the shortest run
    known."""
    alphabet = tuple(dict.fromkeys(choices))
    chains, seen = Chains(), set[bytes]()
    level: list[Choices] = [()]
    began = time.perf_counter()
    for depth in range(1, len(choices) + 1):
        following: list[Choices] = []
        for run, world in continued(config, policy, chains, level, alphabet):
            if broke(world, rule):
                said = f"breadth-first over its {len(alphabet)} choices: {depth} ({len(seen)} states)"
                return said, run
            if world.verdict:
                continue
            state = mark(world)
            if state not in seen:
                seen.add(state)
                following.append(run)
            if len(seen) >= states or time.perf_counter() - began > seconds:
                said = (
                    f"breadth-first: none of {depth - 1} choices or fewer ({len(seen)} states, then stopped)"
                )
                return said, choices
        level = following
    return f"breadth-first: none of up to {len(choices)} choices ({len(seen)} states)", choices


def continued(
    config: Config, policy: PolicyFactory, chains: Chains, level: Sequence[Choices], alphabet: Choices
) -> Iterator[tuple[Choices, World]]:
    """Every run of the level with every choice that is possible behind it, and the world that it leads to."""
    for prefix in level:
        world: World | None = None
        for choice in alphabet:
            if world is None:
                world = replay(config, policy, prefix, chains=chains)
            if world.choose(choice):  # else nothing has happened
                yield (*prefix, choice), world
                world = None


def hunt(
    fault: Fault,
    *,
    runs: int = 800,
    choices: int = 200,
    seed: int = 0,
    seeds: int = 1,
    states: int = 2000,
    hypothesis: bool = True,
) -> Hunt:
    """Everything that is expected of one fault of the catalogue."""
    outcome = Hunt(fault.name)
    if fault.kind == "configuration":
        return refused(fault, outcome)
    if fault.kind == "formula":
        return by_theorem(fault, outcome)
    if fault.exhausted:
        config_name, depth, lines = fault.exhausted
        said, breach = exhaust(
            configs.named(config_name), fault.policy, tuple(map(script.parse, lines)), depth=depth
        )
        outcome.text = f"{fault.why_harmless}; holds in {said}"
        if breach:
            outcome.wrong.append(f"{said}: {breach.rule}: {breach.text}")
    for name in fault.bites:
        hunt_in(fault, configs.named(name), outcome, runs=runs, choices=choices, seed=seed, seeds=seeds)
        if not outcome.choices:
            continue
        config = configs.named(outcome.config)
        if name == outcome.config:
            outcome.search, outcome.choices = breadth_first(
                config, fault.policy, outcome.choices, outcome.rule, states=states, seconds=15
            )
            if hypothesis:
                outcome.by_hypothesis = by_another_road(fault, config, seed)
    for name in fault.harmless:
        held = find(configs.named(name), fault.policy, runs=max(20, runs // 16), choices=choices, seed=seed)
        if held:
            outcome.wrong.append(f"refuted in {name}, where it should be harmless: {held.breach.rule}")
    return outcome


def hunt_in(
    fault: Fault, config: Config, outcome: Hunt, *, runs: int, choices: int, seed: int, seeds: int
) -> None:
    """Find it in one configuration, shrink it, keep it if it is the shortest so far, and try the repair."""
    found = [find(config, fault.policy, runs=runs, choices=choices, seed=seed + i) for i in range(seeds)]
    hits = [one for one in found if one is not None]
    if 2 * len(hits) <= len(found):
        outcome.missed.append(
            f"not found in {config.name} within {runs} runs (of {seeds} seeds: {len(hits)})"
        )
        return
    short = min(
        (
            reduce(
                config,
                fault.policy,
                one.choices,
                one.breach.rule,
                spelled_out=one.breach.rule not in NEVER_ENDS,
            )
            for one in hits[:2]
        ),
        key=len,
    )
    for again in range(3):  # another run may reduce to a shorter one
        if len(short) <= LONGEST_TRACE:
            break
        other = find(config, fault.policy, runs=runs, choices=choices, seed=seed + 100 + again)
        if other and other.breach.rule == hits[0].breach.rule:
            spelled_out = other.breach.rule not in NEVER_ENDS
            reduced = reduce(config, fault.policy, other.choices, other.breach.rule, spelled_out=spelled_out)
            short = min(short, reduced, key=len)
    world = replay(config, fault.policy, short)
    assert world.verdict is not None
    rule = world.verdict.rule
    if removable(config, fault.policy, short, rule):
        outcome.wrong.append(f"{config.name}: a choice of the shrunk run can be removed")
    repaired = replay(config, fault.repaired, short)
    if repaired.verdict or (short[-1] != ("quiet",) and not repaired.quiet()):
        outcome.wrong.append(f"{config.name}: the repair breaks {repaired.verdict} on the same choices")
    fresh = find(config, fault.repaired, runs=max(20, runs // 25), choices=choices, seed=seed + 1000)
    if fresh:
        outcome.wrong.append(f"{config.name}: the repair breaks {fresh.breach.rule}: {fresh.breach.text}")
    seconds = median(one.seconds for one in hits)
    if seconds > LONGEST_SEARCH_SECONDS:
        outcome.missed.append(
            f"{config.name}: found in {seconds:.1f} s, more than {LONGEST_SEARCH_SECONDS:.0f}"
        )
    if not outcome.choices or len(short) < len(outcome.choices):
        outcome.config, outcome.rule, outcome.text = config.name, rule, world.verdict.text
        outcome.choices, outcome.seconds = short, seconds
        outcome.runs = int(median(one.runs for one in hits))
        outcome.disciplines = [breach.rule for breach in world.disciplines]
        if fault.kind == "liveness" and rule == "everything_drains":
            loop = lasso(config, fault.policy, short)
            outcome.cycle = loop.cycle if loop else ()
            if loop is None:
                outcome.wrong.append(f"{config.name}: it never ends, but no cycle was found")
        if len(short) > LONGEST_TRACE:
            outcome.missed.append(f"{config.name}: {len(short)} choices, more than {LONGEST_TRACE}")
        else:
            outcome.missed = [line for line in outcome.missed if "more than 20" not in line]


def refused(fault: Fault, outcome: Hunt) -> Hunt:
    """A configuration fault: the text must be refused."""
    try:
        configs.parse(fault.refused)
    except configs.ConfigError as error:
        outcome.rule, outcome.text = "refused", str(error)
    else:
        outcome.wrong.append("the configuration was accepted")
    return outcome


def by_theorem(fault: Fault, outcome: Hunt) -> Hunt:
    """A formula fault: its theorem must be proved, and must refute the formula with a witness."""
    try:
        from spec.prove.engine import Settings, prove_theorem
        from spec.prove.solvers import MissingSolver, solver
        from spec.prove.theorems import theorems_of

        backend = solver("z3")
    except (ImportError, MissingSolver) as error:
        outcome.missed.append(f"no solver: {error}")
        return outcome
    theorem = next((one for one in theorems_of("arith") if one.name == fault.theorem), None)
    if theorem is None:
        outcome.wrong.append(f"there is no theorem named {fault.theorem!r}")
        return outcome
    result = prove_theorem(theorem, Settings(backend))
    outcome.rule, outcome.seconds = f"theorem: {theorem.name}", result.seconds
    refuted = [one for one in result.refutes if fault.formula in one.refutation.formula]
    if result.verdict != "proved" or not refuted:
        outcome.wrong.append(
            f"{theorem.name}: {result.verdict}; no refuted formula matches {fault.formula!r}"
        )
    elif any(one.verdict != "refuted" for one in refuted):
        outcome.missed.append(f"{fault.formula}: not refuted")
    else:
        witness = refuted[0].smallest or refuted[0].solver or {}
        outcome.text = f"{refuted[0].refutation.formula}; smallest witness {witness}"
    return outcome


def exhaust(
    config: Config, policy: PolicyFactory, alphabet: Choices, *, depth: int
) -> tuple[str, Breach | None]:
    """Try every run of up to ``depth`` choices over an alphabet, each followed by a quiet phase at the end.

    States that were visited are not visited again; what is said names the bounds and the number of states."""
    chains, seen = Chains(), set[bytes]()
    level: list[Choices] = [()]
    for _ in range(depth):
        following: list[Choices] = []
        for run, world in continued(config, policy, chains, level, alphabet):
            if world.verdict:
                return f"broken after {len(run)} choices", world.verdict
            state = mark(world)
            if state not in seen:
                seen.add(state)
                following.append(run)
        level = following
    for prefix in level:
        world = replay(config, policy, prefix)
        if not world.quiet():
            return f"broken after {len(prefix)} choices and a quiet phase", world.verdict
    return f"all {len(seen)} states within {depth} choices out of {len(alphabet)} in {config.name}", None


# -- lassos --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lasso:
    """A run without progress: after ``prefix``, every ``cycle`` of choices leads back to where it stood."""

    prefix: Choices
    cycle: Choices
    standing: str


def lasso(config: Config, policy: PolicyFactory, choices: Choices, *, rounds: int = 1000) -> Lasso | None:
    """Follow a run that never ends until it stands where it stood; the cycle is replayed to be sure."""
    prefix = tuple(choice for choice in choices if choice != ("quiet",))
    world = replay(config, policy, prefix)
    if world.verdict:
        return None
    tail: list[Event] = []
    seen = {world.standing(): 0}
    for _ in range(rounds):
        for choice in (("schedule",), ("drain",)):
            if world.choose(choice):
                tail.append(choice)
        if world.verdict or world.idle():
            return None
        now = world.standing()
        if now in seen:
            stem, cycle = tail[: seen[now]], tuple(tail[seen[now] :])
            again = replay(config, policy, (*prefix, *stem, *cycle, *cycle, *cycle))
            return Lasso((*prefix, *stem), cycle, now) if again.standing() == now else None
        seen[now] = len(tail)
    return None


# -- stored traces ---------------------------------------------------------------------------------------


def store(outcome: Hunt, folder: Path = TRACES) -> Path:
    """Write a fault's shortest run as a script."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{outcome.fault}.txt"
    lines = [f"# config {outcome.config}", f"# breaks {outcome.rule}", *map(script.line, outcome.choices)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def stored(name: str, folder: Path = TRACES) -> tuple[Config, str, Choices] | None:
    """The stored run of a fault: configuration, rule, choices."""
    path = folder / f"{name}.txt"
    if not path.exists():
        return None
    config = rule = ""
    choices: list[Event] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# config "):
            config = line.removeprefix("# config ")
        elif line.startswith("# breaks "):
            rule = line.removeprefix("# breaks ")
        elif line:
            choices.append(script.parse(line))
    return configs.named(config), rule, tuple(choices)


def check_stored(fault: Fault) -> Iterator[str]:
    """Problems of a stored run: the fault must break its rule on it, the repair must survive it."""
    run = stored(fault.name)
    if run is None:
        yield f"{fault.name}: no stored trace"
        return
    config, rule, choices = run
    world = replay(config, fault.policy, choices)
    if not broke(world, rule):
        yield f"{fault.name}: the stored run does not break {rule}, but {world.verdict}"
    repaired = replay(config, fault.repaired, choices)
    if repaired.verdict or (choices[-1:] != (("quiet",),) and not repaired.quiet()):
        yield f"{fault.name}: the repair breaks {repaired.verdict} on the stored run"


def show_choices(choices: Sequence[Event]) -> str:
    """The choices as a script."""
    return "\n".join("  " + script.line(choice) for choice in choices)


def show_run(fault: Fault, config: Config, choices: Sequence[Any]) -> None:
    """The shrunk run: its choices, the rendered trace, what broke and on the way."""
    world = replay(config, fault.policy, choices, record=True)
    print(f"\n{len(choices)} choices in {config.name}:\n{show_choices(tuple(choices))}\n")
    print(render.text(config, f"fault:{fault.name}", world.events))
    if world.verdict:
        print(
            f"\nbreaks {world.verdict.rule}: {BY_NAME[world.verdict.rule].sentence}\n  {world.verdict.text}"
        )
    for breach in world.disciplines:
        print(f"on the way: {breach.rule}: {breach.text}")
