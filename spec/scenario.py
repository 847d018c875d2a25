"""Scenario files: a run as a short script with the expected narration below it.

``python -m spec.scenario [FILES] [--list] [--show] [--rewrite] [--record FOLDER]``

A file (``spec/scenarios/*.txt``) begins with what it shows, then says what runs: ``config NAME`` (or
``config <<``, TOML, ``>>``), ``policy NAME``, and for a scenario that must go wrong ``expect RULE``. Then
come blocks::

    arrive r1 prompt=9 outputs=2
    schedule
    ----
    r1 finds no prefix cached
    ...

Above the line: choices as ``spec.script`` reads them, or questions (:data:`QUESTIONS`). Below it: what
happened, up to the next blank line. ``--show`` prints all of it. ``--rewrite`` writes the narration anew:
commit only what you can explain. Exit codes: 0 all files as written, 1 a narration, a verdict or clients'
tokens (``same``) differ, 2 bad input, 3 stopped.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spec import config as configs
from spec import ops, reduce, render, script, trace
from spec.config import Config, ConfigError
from spec.events import STREAMS, Event
from spec.narrate import BREACH, Line, Narrator, several, span, who
from spec.outputs import check_folder, check_target, write_whole
from spec.policies import PolicyNameError, resolve
from spec.rules import BY_NAME
from spec.usage import OneLineParser, command, one_line
from spec.world import World

FOLDER = Path(__file__).parent / "scenarios"
QUESTIONS = {
    "serve": "schedule and drain until these requests are over",
    "outputs": "what each client was given",
    "same": "these clients were given the same tokens (the scenario fails if not)",
    "blocks": "who holds which block, and what is under a key",
    "host": "what the host tier holds",
    "streams": "what each rank still has to do, and what it waits for",
}
SERVE_ROUNDS = 60
HOLDS = "holds"
"""What a scenario expects that breaks no invariant."""


class ScenarioError(ValueError):
    """A scenario that cannot be read or run; the message names file, line and remedy."""


@dataclass(slots=True)
class Block:
    """Script lines and the narration that is expected of them."""

    number: int  # line of the first one
    script: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scenario:
    """A file, in the order of its parts: plain lines (comments, settings, blanks) and blocks."""

    title: str
    config: Config
    policy: str
    expect: str  # a rule, or HOLDS
    parts: list[str | Block]


def shipped() -> dict[str, Path]:
    """The scenarios of the repository: name -> file."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.txt"))}


def listing() -> str:
    """One line a shipped scenario: name, the rule that breaks, what it shows."""
    loaded = {name: load(path) for name, path in shipped().items()}
    return "".join(f"{name:<30} {one.expect:<21} {one.title}\n" for name, one in loaded.items())


# -- reading ---------------------------------------------------------------------------------------------


def load(path: str | Path) -> Scenario:
    """Read one file.  Raises :class:`ScenarioError`."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{path}: is not UTF-8 text") from None
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None


def parse(text: str) -> Scenario:
    """Read a scenario.  Raises :class:`ScenarioError` with the line's number."""
    settings: dict[str, str] = {}
    parts: list[str | Block] = []
    toml: list[str] | None = None
    opened = 0  # line of 'config <<'
    block: Block | None = None
    below = False
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.partition(" ")
        if toml is not None:
            parts.append(line)
            if line == ">>":
                settings["toml"], toml = "\n".join(toml), None
            else:
                toml.append(line)
        elif block is None and word in ("config", "policy", "expect"):
            settings[word] = rest.strip()
            if word == "config" and rest.strip() == "<<":
                toml, opened = [], number
            parts.append(line)
        elif below:
            assert block is not None
            if line:
                block.expected.append(line)
            else:
                block, below = None, False
                parts.append(line)
        elif block is None and (not line or line.startswith("#")):
            parts.append(line)
        elif line == "----":
            if block is None:
                raise ScenarioError(f"line {number}: '----' without choices above it")
            below = True
        elif not line:
            raise ScenarioError(
                f"line {number}: expected '----' below the choices of line {block.number if block else 0}"
            )
        else:
            if block is None:
                block = Block(number)
                parts.append(block)
            block.script.append(line)
    if toml is not None:
        raise ScenarioError(f"line {opened}: 'config <<' without a line '>>' that ends it")
    if block is not None and not below:
        raise ScenarioError(f"line {block.number}: choices without '----' and narration below them")
    return _settled(settings, parts)


def _settled(settings: dict[str, str], parts: list[str | Block]) -> Scenario:
    if "config" not in settings:
        raise ScenarioError("no configuration; write 'config NAME', or 'config <<', TOML lines and '>>'")
    policy, expect = settings.get("policy", "reference"), settings.get("expect", HOLDS)
    try:
        config = configs.parse(settings["toml"]) if "toml" in settings else configs.find(settings["config"])
        resolve(policy)
    except (ConfigError, PolicyNameError) as error:
        raise ScenarioError(str(error)) from None
    if expect != HOLDS and expect not in BY_NAME:
        near = difflib.get_close_matches(expect, [HOLDS, *BY_NAME], 1)
        meant = f"; did you mean {near[0]}?" if near else "; docs/invariants.md has all"
        raise ScenarioError(f"expect {expect}: neither {HOLDS} nor the name of an invariant{meant}")
    first = next((part for part in parts if isinstance(part, str) and part.startswith("#")), "#")
    title = first.lstrip("# ").strip()
    return Scenario(title, config, policy, expect, parts)


# -- running ---------------------------------------------------------------------------------------------


class Stage:
    """A scenario as it runs: the world, and the narrator that follows it."""

    def __init__(self, config: Config, policy: str) -> None:
        self.world = World(config, resolve(policy), record=True)
        self.narrator = Narrator(config)
        self.told = 0
        self.made: list[Event] = []
        self.failed: list[str] = []  # what ``same`` found to differ

    def act(self, line: str) -> Iterator[str]:
        """What one script line does, in words.  Raises ``ValueError`` if it cannot be read."""
        word, *names = line.split()
        if word in QUESTIONS:
            yield from getattr(self, "_" + word)(names)
            return
        choice = script.parse(line)
        if not self.choose(choice):
            yield f"not possible: {'the run is over' if self.world.verdict else line}"
        yield from self.news()

    def choose(self, choice: Event) -> bool:
        """Make a choice and remember it."""
        made = self.world.choose(choice)
        if made:
            self.made.append(choice)
        return made

    def news(self) -> Iterator[str]:
        """The narration of what has happened since the last call."""
        events = self.world.events[self.told :]
        self.told += len(events)
        for line in self.narrator.tell(events):
            if not line.minor:
                yield spoken(line)

    def over(self, name: str) -> bool:
        """Whether the client has no live request."""
        return self.world.live(name) is None

    # -- questions ---------------------------------------------------------------------------------------
    def _serve(self, names: list[str]) -> Iterator[str]:
        for _ in range(SERVE_ROUNDS):
            if self.world.verdict or all(map(self.over, names)):
                return
            self.choose(("schedule",))
            yield from self.news()
            self.choose(("drain",))
            yield from self.news()
        yield f"not over after {SERVE_ROUNDS} rounds: {' '.join(n for n in names if not self.over(n))}"

    def outputs_of(self, name: str) -> tuple[int, ...]:
        """The tokens that a client was given for its last request."""
        client = self.world.clients.get((name, self.world.lives[name]))
        if client is None:
            raise ValueError(f"no client {name!r} has arrived")
        return tuple(client.tokens[client.prompt :][: client.outputs])

    def _outputs(self, names: list[str]) -> Iterator[str]:
        for name in names or list(self.world.lives):
            yield f"{name} was given {' '.join(map(str, self.outputs_of(name))) or 'nothing'}"

    def _same(self, names: list[str]) -> Iterator[str]:
        if len(names) < 2:
            raise ValueError("'same' compares clients; name at least two, as in: same r1 r2")
        given = {name: self.outputs_of(name) for name in names}
        if len(set(given.values())) == 1:
            yield f"{', '.join(names)} were given the same: {' '.join(map(str, given[names[0]]))}"
            return
        each = "; ".join(
            f"{name} {' '.join(map(str, tokens)) or 'nothing'}" for name, tokens in given.items()
        )
        self.failed.append(f"outputs differ: {each}")
        yield self.failed[-1]

    def _blocks(self, names: list[str]) -> Iterator[str]:
        core = self.world.book.core
        for uid, request in self.world.book.requests.items():
            for group, cols in zip(self.world.config.groups, request.cols, strict=True):
                if any(cols):
                    yield f"{who(uid)} {group.name}: {' '.join(str(b) if b else '-' for b in cols)}"
        if core.fences:
            yield f"fenced {several('block', sorted(core.fences))}"
        keyed = sorted(b for b in core.key if b not in core.holders)
        yield f"{len(self.world.book.free)} free" + (f", of which cached: {span(keyed)}" if keyed else "")

    def _host(self, names: list[str]) -> Iterator[str]:
        for g, group in enumerate(self.world.config.groups):
            chunks = [f"{key[1]} {entry.state}" for key, entry in self.world.book.tier.items() if key[0] == g]
            yield f"host {group.name}: {', '.join(chunks) or 'nothing'}"

    def _streams(self, names: list[str]) -> Iterator[str]:
        idle = True
        for rank in self.world.ranks:
            for stream in STREAMS:
                todo = [told for op in rank.streams[stream] if (told := task(op))]
                if not rank.streams[stream]:
                    continue
                idle = False
                blocked = self.world.head_blocked(rank.index, stream)
                wait = f" (waits for {blocked})" if blocked else ""
                yield f"rank {rank.index} {stream}: {', '.join(todo) or 'tables'}{wait}"
        if idle:
            yield "nothing left to run"


def task(op: ops.Op) -> str:
    """One enqueued operation in a few words; empty for what every step does anyway."""
    if isinstance(op, (ops.Forward, ops.Sample, ops.Draft, ops.CopyCounts, ops.HostCounts)):
        return f"{type(op).__name__.lower()} {op.step}"
    if isinstance(op, ops.PostProcess):
        masked = sum(slot < 0 for _, slot, _ in op.rows)
        return f"post-process {op.step}" + (f" ({masked} rows masked)" if masked else "")
    if isinstance(op, (ops.Begin, ops.End, ops.Wait)):
        return f"{type(op).__name__.lower()} {op.job}"
    if isinstance(op, ops.Take):
        return f"{who(op.uid)} into slot {op.slot}"
    if isinstance(op, ops.Leave):
        return f"slot {op.slot} left"
    return ""


def spoken(line: Line) -> str:
    """A line of the narrator as a scenario prints it."""
    if line.lane == BREACH:
        return f"BREACH of {line.text}"
    return f"{line.lane}: {line.text}" if line.lane.startswith("rank") else line.text


def run(scenario: Scenario) -> tuple[str, list[str]]:
    """The file as it should read, and what went otherwise than the scenario expects.

    Raises :class:`ScenarioError` for a line that cannot be read.
    """
    stage = Stage(scenario.config, scenario.policy)
    out: list[str] = []
    wrong: list[str] = []
    for part in scenario.parts:
        if isinstance(part, str):
            out.append(part)
            continue
        out += [*part.script, "----"]
        said: list[str] = []
        for number, line in enumerate(part.script, start=part.number):
            if line.startswith("#"):
                continue
            try:
                said += stage.act(line)
            except ValueError as error:
                raise ScenarioError(f"line {number}: {error}") from None
            wrong += [f"line {number}: {text}" for text in stage.failed]
            stage.failed.clear()
        out += said or ["nothing to tell"]
    verdict = stage.world.verdict.rule if stage.world.verdict else HOLDS
    if verdict != scenario.expect:
        wrong.append(f"expected {scenario.expect}, found {verdict}")
    if scenario.expect == HOLDS and stage.world.disciplines:
        wrong.append(f"disciplines broke: {', '.join(b.rule for b in stage.world.disciplines)}")
    return "\n".join(out) + "\n", wrong


def record(scenario: Scenario, path: Path) -> None:
    """Write the scenario's run as a trace file.  Raises ``OutputError``."""
    trace.write_run(path, scenario.config, scenario.policy, choices(scenario), note=scenario.title)


def choices(scenario: Scenario) -> list[Event]:
    """The choices that the scenario makes, for replaying it elsewhere."""
    stage = Stage(scenario.config, scenario.policy)
    for part in scenario.parts:
        for line in part.script if isinstance(part, Block) else ():
            if not line.startswith("#"):
                list(stage.act(line))
    return stage.made


def as_scenario(config: Config, policy: str, made: Sequence[Event], expect: str, title: str) -> str:
    """A run as the text of a scenario file: what a failing test prints and what is kept as a regression test.

    The run must be possible as it stands, as the reducer's are.  Raises ``PolicyNameError``.
    """
    settings = ["config <<", *configs.dump(config).splitlines(), ">>", f"policy {policy}"]
    if expect != HOLDS:
        settings.append(f"expect {expect}")
    body: list[str] = []
    for choice in made:
        body += [script.line(choice), "----", ""]
    text, _ = run(parse("\n".join([f"# {title}", *settings, "", *body])))
    return text


def counterexample(config: Config, policy: str, made: Sequence[Event], rule: str) -> str:
    """For a failing test: the run reduced and drawn, and the scenario file that replays it."""
    least = reduce.reduce(config, resolve(policy), made, rule)
    world = reduce.replay(config, resolve(policy), least, record=True)
    kept = as_scenario(config, policy, least, rule, f"{rule} breaks; reduced from {len(made)} choices")
    return (
        f"{render.text(config, policy, world.events)}\n"
        f"To replay it, save what follows as FILE.txt and run: python -m spec.scenario FILE.txt\n\n{kept}"
    )


# -- the command -----------------------------------------------------------------------------------------


def verify(path: Path, *, rewrite: bool, show: bool = False) -> bool:
    """Run one file and say how it went, with ``show`` in full; whether all is as written."""
    scenario = load(path)
    try:
        text, wrong = run(scenario)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None
    if show:
        sys.stdout.write(text + "\n")
    written = path.read_text(encoding="utf-8")
    if rewrite and text != written:
        write_whole(path, text)
        print(f"{path.stem}: rewritten")
    elif text != written:
        diff = difflib.unified_diff(
            written.splitlines(),
            text.splitlines(),
            f"{path.name} as written",
            f"{path.name} as run",
            lineterm="",
        )
        print(f"{path.stem}: the narration differs (--rewrite accepts it)\n" + "\n".join(diff))
    else:
        print(f"{path.stem}: ok")
    for problem in wrong:
        print(f"{path.stem}: {problem}")
    return not wrong and (rewrite or text == written)


@command("spec.scenario")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned."""
    parser = OneLineParser(
        prog="python -m spec.scenario",
        description="Run scenarios and compare what happens with what is written.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="files, or names from --list (default: all)")
    parser.add_argument("--list", action="store_true", help="list the scenarios that are shipped")
    parser.add_argument("--show", action="store_true", help="print the narration of each run")
    parser.add_argument("--rewrite", action="store_true", help="write the narration anew")
    parser.add_argument("--record", metavar="FOLDER", help="also write each run as a trace file into FOLDER")
    options = parser.parse_args(arguments)
    try:
        known = shipped()
        if options.list:
            sys.stdout.write(listing())
            return 0
        paths = [known.get(name, Path(name)) for name in options.files] or list(known.values())
        check_folder("--record", options.record)
        for path in paths if options.rewrite else ():
            check_target("--rewrite", path)
        for path in paths:  # what cannot be read is refused before anything runs
            load(path)
        good = [verify(path, rewrite=options.rewrite, show=options.show) for path in paths]
        for path in paths if options.record else ():
            record(load(path), Path(options.record) / f"{path.stem}.trace")
    except ScenarioError as error:
        print(f"spec.scenario: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{sum(good)} of {len(good)} as written")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
