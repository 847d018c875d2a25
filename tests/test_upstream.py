"""Released vLLM behind the adapter: shapes build and step, what is observed is consistent, crashes are
verdicts.

Needs a release in the cache directory (``python -m impl.upstream fetch 0.33.0``); skipped with a reason
otherwise.  The client below keeps to the physics that every caller must keep to: outputs in the order of
their steps; the drafts of a step reach a synchronous scheduler before it schedules the next one; a transfer
is reported at the earliest by the step that submits it (a store is submitted one step after it was built);
flushed jobs are reported by the step that flushes them; padding drafts are never accepted.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from impl.upstream import kernels, observe, releases, worker_order
from impl.upstream.child import Child, Died
from impl.upstream.env import Prepared, Unavailable, prepared, prepared_tree, with_kernels
from impl.upstream.patches import MUTANTS
from impl.upstream.releases import KNOWN, UnknownRelease, recognise
from spec.config import Config, ConfigError, Group, Kind

Plain = dict[str, Any]

FULL = Group("full", Kind.FULL, 4)
MAMBA = Group("mamba", Kind.MAMBA, 4)
WIDE_MAMBA = Group("mamba", Kind.MAMBA, 8)
WINDOW = Group("window", Kind.WINDOW, 4, window_tokens=8)
RETAINING = Group("window", Kind.WINDOW, 4, window_tokens=8, extra_tokens=3)
CHUNKED = Group("chunked", Kind.CHUNKED, 4, window_tokens=8)
HYBRID = (FULL, MAMBA)


def shape(name: str, *groups: Group, **fields: Any) -> Config:
    """A small configuration whose pool is small enough to preempt."""
    small = {"hash_block_tokens": 4, "pool_blocks": 40, "request_tokens": 64, "step_tokens": 16}
    return Config(name=name, groups=groups, **{**small, **fields})


MTP = {"drafts": 2, "draft_modules": 1, "tail_drop": True}

# The retained-history restore at a quarter of its published size: a hit of 64 tokens, blocks of 16, a window
# of 32 and 3 retained tokens become 16, 4, 8 and 3.
RESTORE = shape(
    "restore 16/4/8/3",
    FULL,
    RETAINING,
    drafts=4,
    draft_modules=2,
    tail_drop=True,
    offload=True,
    request_tokens=40,
    tier_chunks=64,
)

SHAPES = (
    shape("full, offload", FULL, offload=True, pool_blocks=24),
    shape("window, offload, two blocks a chunk", FULL, WINDOW, offload=True, blocks_per_chunk=2),
    shape("chunked, offload", FULL, CHUNKED, offload=True),
    shape("hybrid, drafts, offload", *HYBRID, **MTP, offload=True),
    shape("hybrid, drafts, offload of prompts", *HYBRID, **MTP, offload=True, offload_prompt_only=True),
    shape("hybrid, wide state block, offload", FULL, WIDE_MAMBA, **MTP, offload=True),
    shape("hybrid, wide state block, v1", FULL, WIDE_MAMBA, **MTP, runner="v1"),
    shape("hybrid, async, pp 3", *HYBRID, **MTP, pp=3, async_scheduling=True),
    shape("hybrid, sync, pp 4, offload", *HYBRID, **MTP, pp=4, offload=True),
    shape(
        "hybrid, async, pp 2, tp 2, offload", *HYBRID, **MTP, pp=2, tp=2, async_scheduling=True, offload=True
    ),
    shape("hybrid, v1, async", *HYBRID, **MTP, async_scheduling=True, runner="v1"),
    shape("three groups, n-gram", FULL, WINDOW, MAMBA, drafts=3, offload=True),
    RESTORE,
)
LOOKAHEAD = shape(
    "hybrid, lookahead hashes, async, pp 2",
    *HYBRID,
    drafts=2,
    draft_modules=1,
    hash_lookahead_tokens=1,
    pp=2,
    async_scheduling=True,
)


def release_or_skip(release: str) -> Prepared:
    """A fetched release, or a visible skip that says how to fetch it."""
    try:
        return prepared(release)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def latest() -> Iterator[Child]:
    """The newest known release; one process for the module, a fresh scheduler for each test."""
    with Child(release_or_skip("0.33.0")) as child:
        yield child


class Crashed(Exception):
    """vLLM raised; the argument is the verdict."""


class Client:
    """A random client and honest workers; keeps its own copy of the state from the differences alone."""

    def __init__(self, child: Child, config: Config, seed: int, patches: tuple[str, ...] = ()) -> None:
        self.child = child
        self.config = config
        self.random = random.Random(seed)
        opened = child.new(config, patches)
        self.geometry: Plain = opened["geometry"]
        self.state: observe.State = opened["state"]
        self.hashes: Plain = {}
        self.live: set[str] = set()
        self.arrivals = 0
        self.in_flight: list[Plain] = []
        self.processed = 0
        self.unreported: dict[int, set[int]] = {}  # job -> ranks that have not reported it
        self.submitted: dict[int, int] = {}  # job -> the step that submits it
        self.proposed: dict[str, list[int]] = {}  # drafts of the last step, until the next one
        self.seen: Counter[str] = Counter()
        self.prompts = [[self.random.randrange(3, 9) for _ in range(64)] for _ in range(3)]

    def ask(self, ask: str, **arguments: Any) -> Plain:
        reply = self.child.ask(ask, **arguments)
        if "crash" in reply:
            raise Crashed(reply["crash"])
        assert "error" not in reply, reply
        observe.apply(self.state, reply.get("changed", {}))
        self.hashes.update(reply.get("hashes", {}))
        return reply

    def arrive(self) -> None:
        self.arrivals += 1
        name = f"r{self.arrivals}"
        length = self.random.randrange(3, self.config.request_tokens - 4)
        room = self.config.request_tokens - length
        self.ask(
            "arrive",
            request=name,
            tokens=self.random.choice(self.prompts)[:length],
            output_tokens=self.random.randrange(1, min(12, room) + 1),
        )
        self.live.add(name)

    def schedule(self) -> None:
        if self.proposed:
            self.ask("propose", drafts=self.proposed)
        reply = self.ask("schedule")
        out = reply["out"] | {"step": reply["step"]}
        drafting = self.config.drafts and not self.config.async_scheduling and not out["skip_drafts"]
        self.proposed = {name: [7] * self.config.drafts for name in out["tokens"]} if drafting else {}
        self.in_flight.append(out)
        for job in out["loads"] + out["stores"]:
            self.unreported[job["job"]] = set(range(self.geometry["ranks"]))
            self.submitted[job["job"]] = out["step"] + (1 if job["store"] else 0)
            self.seen["store" if job["store"] else "load"] += 1
        self.seen["preempted"] += len(out["preempted"])
        self.seen["flushed"] += len(out["flush"])
        self.seen["offered"] += len(out["offers"])
        self.seen["steps"] += 1

    def output(self) -> None:
        out = self.in_flight.pop(0)
        self.processed = out["step"]
        sampled = {}
        for name in out["samples"]:
            most = 0 if name in out["padded"] else len(out["drafts"].get(name, ()))
            accepted = self.random.randrange(most + 1)
            self.seen["accepted"] += accepted
            sampled[name] = [self.random.randrange(3, 9) for _ in range(accepted + 1)]
        reports: dict[str, list[int]] = {}
        for job, ranks in sorted(self.unreported.items()):
            due = self.submitted[job] <= out["step"]
            for rank in sorted(ranks):
                if job in out["flush"] or (due and self.random.random() < 0.5):
                    reports.setdefault(str(rank), []).append(job)
                    ranks.discard(rank)
        self.unreported = {job: ranks for job, ranks in self.unreported.items() if ranks}
        finished = self.ask("output", sampled=sampled, reports=reports)["finished"]
        self.live -= set(finished)
        self.seen["finished"] += len(finished)

    def step(self) -> None:
        """One random choice."""
        choice = self.random.random()
        if len(self.live) < 5 and choice < 0.25:
            self.arrive()
        elif choice < 0.28 and self.live:
            name = self.random.choice(sorted(self.live))
            self.ask("abort", request=name)
            self.live.discard(name)
        elif choice < 0.30:
            self.seen["reset"] += self.ask("reset")["done"]
        elif len(self.in_flight) < self.geometry["concurrent_steps"]:
            self.schedule()
        else:
            self.output()

    def drain(self) -> None:
        """No more arrivals: everything must finish, every block come back, every job be reported."""
        for _ in range(2000):
            while len(self.in_flight) >= self.geometry["concurrent_steps"]:
                self.output()
            if not self.ask("pending")["work"]:
                break
            self.schedule()
        else:
            raise AssertionError(f"work is left after 2000 quiet steps: {self.state['queues']}")
        while self.in_flight:
            self.output()
        assert self.state.get("references", {}) == {}
        assert self.state.get("fences", {}) == {}
        assert self.state.get("jobs", {}) == {}
        assert all(count == 0 for _, count in self.state.get("tier", {}).values())
        assert sorted(self.state["free"]["order"]) == list(range(1, self.config.pool_blocks))


def inconsistencies(state: observe.State, pool_blocks: int) -> list[str]:
    """What no correct scheduler shows, by the plainest of rules (the world has the real ones)."""
    wrong = []
    references = {int(block): count for block, count in state.get("references", {}).items()}
    held: Counter[int] = Counter()
    owners: dict[int, list[str]] = {}
    for name, groups in state.get("tables", {}).items():
        for group, blocks in enumerate(groups):
            for block in blocks:
                if block:
                    held[block] += 1
                    owners.setdefault(block, []).append(f"{name}/{group}")
    for _, blocks in state["deferred_frees"]["fifo"]:
        held.update(block for block in blocks if block)
    if dict(held) != references:
        wrong.append(f"references {references}, but tables and deferred frees hold {dict(held)}")
    free = state["free"]["order"]
    if len(set(free)) != len(free) or set(free) != set(range(1, pool_blocks)) - set(references):
        wrong.append(f"free order {free} is not the blocks without a reference")
    keys = state.get("keys", {})
    for block, names in owners.items():
        if len(names) > 1 and str(block) not in keys:
            wrong.append(f"block {block} has no key but several owners: {names}")
    listed = {(key, int(block)) for block, entries in keys.items() for key, _ in entries}
    mapped = {(key, block) for key, blocks in state.get("lookup", {}).items() for block in blocks}
    if listed != mapped:
        wrong.append(f"keys on blocks and in the lookup table differ by {sorted(listed ^ mapped)}")
    if unknown := [key for key, _ in listed if key.endswith(":0")]:
        wrong.append(f"keys without a known prefix: {unknown}")
    chunks = [chunk for chunk, _ in state.get("tier", {}).values()]
    if len(set(chunks)) != len(chunks):
        wrong.append(f"two keys share a chunk: {state['tier']}")
    for block, jobs in state.get("fences", {}).items():
        if missing := [job for job in jobs if str(job) not in state["jobs"]]:
            wrong.append(f"block {block} is fenced by jobs {missing} that do not exist")
    return wrong


def walk(child: Child, config: Config, seed: int, choices: int) -> Client:
    """A checked walk; a copy-on-write copy may hold references of its own for one step."""
    sync_stages = config.pp > 1 and config.drafts and not config.async_scheduling
    client = Client(child, config, seed, ("decode_cadence",) if sync_stages else ())
    for number in range(choices):
        client.step()
        if not client.geometry["partial_hits"]:
            wrong = inconsistencies(client.state, config.pool_blocks)
            assert not wrong, f"{config.name}, seed {seed}, choice {number}: {wrong[0]}"
    fresh = client.ask("state")["state"]
    assert {part: names for part, names in fresh.items() if names} == {
        part: names for part, names in client.state.items() if names
    }, "the differences do not add up to the state"
    client.drain()
    return client


# ---- releases and environment: no vLLM needed
# ---------------------------------------------------------------


def test_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownRelease, match="0.29.0 is not a known release; known: 0.30.0, .*0.33.0"):
        prepared("0.29.0")


def test_release_that_was_not_fetched_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    with pytest.raises(Unavailable, match="python -m impl.upstream fetch 0.33.0"):
        prepared("0.33.0")


def test_directory_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownRelease, match="name an unpacked release or a checkout"):
        recognise(tmp_path)


def test_signatures_tell_the_known_releases_apart() -> None:
    known = releases.recorded()
    assert sorted(known) == sorted(KNOWN)
    assert len({tuple(sorted(digests.items())) for digests in known.values()}) == len(KNOWN)


def copied_tree(release: str, target: Path) -> Path:
    """A checkout-like copy of the files that are read to recognise a release: no dist-info, no version."""
    source = release_or_skip(release).tree.directory / "vllm"
    for path in releases.READ:
        (target / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target / "vllm" / path)
    return target


def test_checkout_with_changed_bodies_is_recognised(tmp_path: Path) -> None:
    tree = copied_tree("0.33.0", tmp_path)
    pool = tree / "vllm" / "v1" / "core" / "block_pool.py"
    pool.write_text(pool.read_text().replace("block.ref_cnt += 1", "block.ref_cnt += 2"))
    assert recognise(tree).release == "0.33.0"


def test_checkout_with_a_changed_signature_is_refused_by_name(tmp_path: Path) -> None:
    tree = copied_tree("0.33.0", tmp_path)
    pool = tree / "vllm" / "v1" / "core" / "block_pool.py"
    pool.write_text(pool.read_text().replace("def touch(self, blocks", "def touch(self, why, blocks"))
    with pytest.raises(UnknownRelease, match=r"nearest is 0.33.0, 1 signature differs, .*BlockPool.touch"):
        recognise(tree)


@pytest.mark.parametrize("release", KNOWN)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_worker_order_is_that_of_the_source(release: str, runner: str) -> None:
    package = release_or_skip(release).tree.directory / "vllm"
    for last_rank in (True, False):
        for forward in (True, False):
            for speculation in (True, False):
                operations = worker_order.program(
                    release, runner, last_rank=last_rank, forward=forward, speculation=speculation
                )
                worker_order.verify(package, operations)
    facts = worker_order.facts(release, runner)
    for where in facts.where.values():
        path, _, function = where.partition("::")
        if function:
            worker_order._function(package, path, function)


def test_worker_order_refuses_another_order() -> None:
    package = release_or_skip("0.33.0").tree.directory / "vllm"
    operations = list(worker_order.program("0.33.0", "v2"))
    names = [operation.does for operation in operations]
    zero, flush = names.index(worker_order.Does.ZERO), names.index(worker_order.Does.FLUSH)
    operations.insert(zero, operations.pop(flush))
    with pytest.raises(worker_order.Drift, match="zero stands at"):
        worker_order.verify(package, operations)


def test_worker_order_of_another_release_is_not_this_one() -> None:
    package = release_or_skip("0.33.0").tree.directory / "vllm"
    with pytest.raises(worker_order.Drift):
        worker_order.verify(package, worker_order.program("0.32.0", "v2"))


def test_flush_comes_before_overwriting_in_v1_and_after_it_in_v2() -> None:
    def places(runner: str) -> dict[worker_order.Does, int]:
        operations = worker_order.program("0.33.0", runner)
        return {operation.does: index for index, operation in enumerate(operations)}

    does = worker_order.Does
    for overwrite in (does.ZERO, does.COPY_BLOCKS, does.PRECOPY):
        assert places("v1")[does.FLUSH] < places("v1")[overwrite]
        assert places("v2")[does.FLUSH] > places("v2")[overwrite]


# ---- the newest release
# -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("config", [*SHAPES, LOOKAHEAD], ids=lambda config: config.name)
def test_shape_walks_without_crash_and_drains(latest: Child, config: Config) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += walk(latest, config, seed, choices=250).seen
    assert seen["finished"]
    if config.offload:
        assert seen["store"] and seen["load"] and seen["flushed"]
    if config.drafts:
        assert seen["accepted"]
    if any(group.kind is Kind.MAMBA for group in config.groups):
        assert seen["offered"]


@pytest.mark.slow
def test_small_pool_preempts(latest: Child) -> None:
    config = shape("small pool", *HYBRID, **MTP, offload=True, pool_blocks=28, request_tokens=40)
    seen: Counter[str] = Counter()
    for seed in range(6):
        seen += walk(latest, config, seed, choices=250).seen
    assert seen["preempted"]


@pytest.mark.slow
def test_same_seed_same_run(latest: Child) -> None:
    first = walk(latest, SHAPES[3], 7, choices=200)
    again = walk(latest, SHAPES[3], 7, choices=200)
    assert first.seen == again.seen and first.state == again.state


@pytest.mark.slow
def test_fork_goes_back(latest: Child) -> None:
    client = Client(latest, SHAPES[3], 3)
    for _ in range(80):
        client.step()
    before = client.ask("state")["state"]
    client.ask("fork", name="here")
    for _ in range(40):
        client.step()
    assert client.ask("state")["state"] != before
    client.child.ask("back", name="here")
    assert client.child.ask("state")["state"] == before


@pytest.mark.slow
def test_questions_that_make_no_sense_are_answered_with_an_error(latest: Child) -> None:
    latest.new(SHAPES[0])
    assert latest.ask("output")["error"] == "no step is in flight"
    assert "unknown question 'sing'" in latest.ask("sing")["error"]
    assert "do not fit" in latest.ask("arrive", request="r", tokens=[3] * 64, output_tokens=1)["error"]
    assert "concurrent" not in latest.ask("schedule").get("error", "")
    assert "output one first" in latest.ask("schedule")["error"]
    assert "did not schedule r9" in latest.ask("output", sampled={"r9": [1]})["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": (FULL, RETAINING)}, "extra_tokens is 3, but vLLM retains 0"),
        ({"groups": HYBRID, "hash_block_tokens": 2, "tail_drop": True}, "need a drafter"),
        ({"groups": HYBRID, "drafts": 2, "draft_modules": 1, "hash_lookahead_tokens": 2}, "reads 1 tokens"),
        ({"groups": HYBRID, "runner": "v1", "async_scheduling": True, "pp": 2}, "use pp = 1"),
        ({"groups": (FULL,), "hash_block_tokens": 2}, "hash_block_tokens is 2, but vLLM resolves 4"),
    ],
)
def test_inconsistent_configuration_is_refused(latest: Child, fields: Plain, message: str) -> None:
    groups = fields.pop("groups")
    with pytest.raises(ConfigError, match=message):
        latest.new(shape("clash", *groups, **fields))


@pytest.mark.slow
def test_exception_inside_vllm_is_a_verdict_with_its_place(latest: Child) -> None:
    """Two resets of the tier with a job in flight and no step between them: an assertion of 0.33.0."""
    latest.new(SHAPES[0])
    latest.ask("arrive", request="r1", tokens=list(range(3, 11)), output_tokens=2)
    assert latest.ask("schedule")["out"]["stores"]
    assert "crash" not in latest.ask("reset", tier=True)
    crash = latest.ask("reset", tier=True)["crash"]
    assert crash["type"] == "AssertionError"
    assert "offloading/scheduler.py::reset_cache:" in crash["at"]
    assert "it crashed" in latest.ask("schedule")["error"]
    assert "geometry" in latest.new(SHAPES[0])


def stalled_prefill(child: Child, patches: tuple[str, ...]) -> list[int]:
    """Tokens a step of a prompt of 9 beside a decode of 4 tokens, in steps of at most 8; until it is
    finished.
    """
    config = shape("stall", *HYBRID, drafts=3, draft_modules=2, hash_lookahead_tokens=3, step_tokens=8)
    child.new(config, patches)
    child.ask("arrive", request="r1", tokens=[3, 4], output_tokens=8)
    tokens = []
    for number in range(20):
        if number == 1:
            child.ask("arrive", request="r2", tokens=list(range(3, 12)), output_tokens=2)
        out = child.ask("schedule")["out"]
        tokens.append(out["tokens"].get("r2", 0))
        samples = {name: [5] for name in out["samples"]}
        reply = child.ask("output", sampled=samples, drafts={name: [6, 6, 6] for name in samples})
        if "r2" in reply["finished"]:
            break
    return tokens


@pytest.mark.slow
def test_prefill_that_is_never_scheduled_again(latest: Child) -> None:
    """The reserve for the drafter moves a chunk's end into a state block and then takes the rest for ever."""
    assert stalled_prefill(latest, ())[:5] == [0, 4, 2, 0, 0]
    assert not any(stalled_prefill(latest, ())[5:])
    assert stalled_prefill(latest, ("reserve_keeps_progress",))[:5] == [0, 4, 2, 2, 1]


@pytest.mark.slow
def test_lookup_past_the_hashes(latest: Child) -> None:
    """Without full attention a first prompt of 9 tokens looks up a block whose hash cannot exist yet."""
    window = Group("window", Kind.WINDOW, 8, window_tokens=8, extra_tokens=1)
    config = shape("lookup", window, hash_block_tokens=8, drafts=2, draft_modules=2, hash_lookahead_tokens=2)
    prompt = list(range(3, 12))
    latest.new(config)
    latest.ask("arrive", request="r1", tokens=prompt, output_tokens=2)
    crash = latest.ask("schedule")["crash"]
    assert crash["type"] == "IndexError" and "find_longest_cache_hit" in crash["at"]
    latest.new(config, ["lookup_within_hashes"])
    latest.ask("arrive", request="r1", tokens=prompt, output_tokens=2)
    assert latest.ask("schedule")["out"]["tokens"] == {"r1": 9}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutant_changes_what_is_decided(latest: Child, mutant: str) -> None:
    """Each mutant bites: the same choices lead to another state (the checker must say that it is a wrong
    one).
    """
    config = shape("mutant", FULL, WINDOW, drafts=2, draft_modules=1, offload=True, pool_blocks=48)

    def last_state(patches: tuple[str, ...]) -> observe.State | str:
        client = Client(latest, config, 1, patches)
        try:
            for _ in range(200):
                client.step()
        except Crashed as crashed:
            return str(crashed)
        return client.state

    assert last_state(()) == last_state(())
    assert last_state((mutant,)) != last_state(())


@pytest.mark.slow
def test_steps_a_second(latest: Child, capsys: pytest.CaptureFixture[str]) -> None:
    """At least 300 observed scheduler steps a second through the pipe, client and JSON included."""
    for config in (SHAPES[3], SHAPES[7]):
        walk(latest, config, 0, choices=100)
        steps, start = 0, time.perf_counter()
        for seed in range(4):
            client = Client(latest, config, seed)
            for _ in range(400):
                client.step()
            steps += client.seen["steps"]
        rate = steps / (time.perf_counter() - start)
        with capsys.disabled():
            print(f"\n{config.name}: {rate:.0f} scheduler steps a second")
        assert rate > 100, "far below the 300 a second that are asked for, even on a busy machine"


@pytest.mark.slow
def test_child_that_dies_is_reported(tmp_path: Path) -> None:
    use = release_or_skip("0.33.0")
    broken = Prepared(use.tree, Path("/bin/false"), use.cache)
    with Child(broken) as child, pytest.raises(Died, match="ended with exit status 1"):
        child.ask("pending")


# ---- older releases, and a checkout
# -------------------------------------------------------------------------


@pytest.mark.slow
def test_restore_of_retained_history_asserts_in_0_30() -> None:
    with Child(release_or_skip("0.30.0")) as child:
        for seed in range(20):
            client = Client(child, RESTORE, seed)
            try:
                for _ in range(150):
                    client.step()
            except Crashed as crashed:
                crash = crashed.args[0]
                assert crash["type"] == "AssertionError"
                assert "kv_offload/cpu/manager.py::prepare_load" in crash["at"]
                return
    pytest.fail("no restore asserted in 20 walks; vLLM 0.30.0 demands a chunk it did not look up")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.31.0", "0.32.0"])
def test_restore_of_retained_history_holds_later(release: str) -> None:
    with Child(release_or_skip(release)) as child:
        for seed in range(10):
            assert walk(child, RESTORE, seed, choices=150).seen["load"]


@pytest.fixture(params=KNOWN)
def state_copies(request: pytest.FixtureRequest) -> Iterator[Child]:
    """A release's own tables and state-copy kernels, in Triton's interpreter."""
    use = release_or_skip(request.param)
    try:
        environment = with_kernels(use)
    except Unavailable as error:
        pytest.skip(str(error))
    with Child(use, module="impl.upstream.statecopy", environment=environment) as child:
        yield child


@pytest.mark.slow
def test_late_copies_and_resume_column(state_copies: Child) -> None:
    """Three requests decode; before their post-process runs, two of them are gathered again in another order.

    Blocks of 4 tokens, two drafts.  After 6 tokens three more are scheduled: running column 2, scratch
    columns 3 and 4.  Slot 2 accepts 3, reaching 9 tokens: the boundary at 8 lies one past the 7 tokens of the
    running column's own state, so column 1 must become what column 3 holds.  The others stay below their
    boundary.
    """
    ask = state_copies.ask
    rows = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]]
    ask("new", slots=3, drafts=2, block_tokens=4, cache_block_tokens=2)
    resumed = ask("add", slot=0, computed=8)["column"]
    for slot, row in enumerate(rows):
        ask("row", slot=slot, blocks=row, overwrite=True)
        assert ask("add", slot=slot, computed=0)["column"] == -1
    order = [2, 0, 1]
    ask("gather", slots=order)
    assert ask("before", slots=order, lengths=[6, 6, 6], computed=[0, 0, 0])["copied"] == {}
    ask("after", slots=order, sampled=[1, 1, 1], computed=[6, 6, 6])
    ask("gather", slots=order)
    moved = ask("before", slots=order, lengths=[3, 3, 3], computed=[6, 6, 6])
    assert moved["columns"] == [2, 2, 2]
    assert {block: held[0] for block, held in moved["copied"].items()} == {"3": 2, "13": 12, "23": 22}
    ask("gather", slots=[1, 2])
    late = ask("after", slots=order, sampled=[3, 1, 1], computed=[7, 7, 9])
    written = {block: held[0] for block, held in late["copied"].items()}
    facts = worker_order.facts(state_copies.release, "v2")
    if facts.copies_by == "slot":
        assert written == {"22": 24} and resumed == 1
    else:  # the first batch row now belongs to slot 1: its block is overwritten with its own scratch state
        assert written == {"12": 14} and resumed == 3
    verdict, seen = kernels.whole_steps(ask)
    assert verdict == "holds" and int(seen.split()[2]) > 20, seen


@pytest.mark.slow
def test_checkout_without_metadata_runs(tmp_path: Path) -> None:
    source = release_or_skip("0.33.0").tree.directory
    (tmp_path / "vllm").symlink_to(source / "vllm")
    use = prepared_tree(recognise(tmp_path))
    assert use.tree.version is None or use.tree.version == "0.33.0"
    with Child(use) as child:
        assert walk(child, SHAPES[0], 0, choices=60).seen["steps"]
