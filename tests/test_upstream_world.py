"""Released vLLM as a policy of the world: what is observed is what the release holds, recorded verdicts come
again, mutants are found, bad input is one line.

Needs releases in the cache directory (``python -m impl.upstream fetch 0.33.0 0.30.0``); skipped with a reason
otherwise.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from impl.upstream import __main__ as command
from impl.upstream import cases, check, env, matrix
from impl.upstream.cases import BY_NAME, CASES, load
from impl.upstream.child import Child
from impl.upstream.drive import Drawn, Limits, walked
from impl.upstream.env import Unavailable, prepared
from impl.upstream.policy import Release, Upstream
from spec.config import ConfigError
from spec.walk import draw_options
from spec.world import World

Plain = dict[str, Any]


def started(release: str) -> Child:
    """A release's process, or a visible skip that says how to fetch it."""
    try:
        return Child(prepared(release))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def latest() -> Iterator[Release]:
    """The newest known release."""
    with started("0.33.0") as child:
        yield Release(child)


def disagreements(world: World) -> list[str]:
    """How the world's book differs from what the release really holds."""
    policy = world.policy
    assert isinstance(policy, Upstream)
    state: Plain = policy.ask("state")["state"]
    book = world.book
    wrong = []
    for name, groups in state["tables"].items():
        request = book.requests.get(policy.uids[name])
        ours = [list(cols) for cols in request.cols] if request else []
        for group, blocks in enumerate(groups):
            cols = ours[group] + [0] * (len(blocks) - len(ours[group])) if ours else []
            if cols[: len(blocks)] != blocks:
                wrong.append(f"{name} group {group}: {cols} but the release holds {blocks}")
    free = set(state["free"]["order"])
    if set(book.free) != free:
        wrong.append(f"free {sorted(book.free)} but the release says {sorted(free)}")
    keys = {int(block): policy.key(entries[0][0]) for block, entries in state["keys"].items()}
    if keys != book.core.key:
        wrong.append(f"keys {book.core.key} but the release says {keys}")
    tier = {policy.key(name): entry[0] for name, entry in state.get("tier", {}).items()}
    if tier != {key: chunk.place for key, chunk in book.tier.items()}:
        wrong.append(f"host chunks {book.tier} but the release says {tier}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "attention-tight",
        "hybrid-tight",
        "hybrid-async-offload",
        "hybrid-partial",
        "window-async",
        "v1-offload",
    ],
)
def test_decisions_add_up_to_what_the_release_holds(latest: Release, name: str) -> None:
    case = BY_NAME[name]
    config, random = case.load(), Random(name)
    for _ in range(3):
        world = World(config, latest)
        adversary = Drawn(config, random, draw_options(config, random), case.limits)
        for number in range(150):
            choice = adversary.draw(world)
            if choice is not None:
                world.choose(choice)
            if world.verdict:
                break
            if number % 10 == 0:
                assert disagreements(world) == []


@pytest.mark.slow
def test_a_lost_decision_is_noticed(latest: Release) -> None:
    """The comparison above can fail: one decision that is not applied shows."""
    config = load("attention")
    world = World(config, latest)
    for choice in (("arrive", "r1", "0", 9, 2), ("schedule",)):
        assert world.choose(choice)
    assert disagreements(world) == []
    block = next(iter(world.book.core.key))
    world.book.apply(("evict", block))
    assert "keys" in disagreements(world)[0]


@pytest.mark.slow
def test_the_newest_release_gives_the_recorded_verdicts(latest: Release) -> None:
    recorded = matrix.recorded()["0.33.0"]["cases"]
    for case in CASES:
        if not case.default:
            continue
        result = check.run_case(case, latest, reducing=False, known=matrix.known(case))
        assert result.verdict == recorded[case.name]["verdict"], case.name
        again(case, latest, recorded[case.name])


def again(case: cases.Case, release: Release, row: Plain) -> None:
    """Each recorded refutation of the case breaks its rule again."""
    policy = release.changed(*case.repairs) if case.repairs else release
    for rule, found in row["refuted"].items():
        breach = check.breaks_again(case.load(), policy, found["choices"])
        assert breach is not None and breach.rule == rule, (case.name, rule, breach)


@pytest.mark.slow
def test_recorded_refutations_replay_and_their_repairs_survive(latest: Release) -> None:
    recorded = matrix.recorded()["0.33.0"]["cases"]
    for case in CASES:
        again(case, latest, recorded[case.name])
    for name, repairs in REPAIRED_BY.items():
        case = BY_NAME[name]
        policy = latest.changed(*case.repairs, *repairs)
        for found in recorded[name]["refuted"].values():
            assert check.breaks_again(case.load(), policy, found["choices"]) is None, name


#: case -> repairs with which its recorded runs survive
REPAIRED_BY = {
    "stages-sync": ("decode_cadence",),
    "v1-left-out": ("counts_kept_while_left_out",),
    "double-reset": ("second_reset_adds",),
    "dropped-boundary": ("stores_at_dropped_boundary",),
    "window-one-past": ("window_looked_up_exactly",),
    "single-group-drop": ("single_group_looks_past",),
    "short-prompt": ("padded_prompts_decode",),
    "flush-order": ("flush_before_overwriting",),
    "reused-offer": ("offers_still_held",),
    "early-boundary": ("publish_computed_boundaries",),
    "mtp-stall": ("reserve_keeps_progress",),
    "late-tail": ("tails_not_published_late",),
    "lookup-past-hashes": ("lookup_within_hashes",),
    "dense-windows": ("stale_windows_rescanned",),
    "split-divisor": ("split_by_state_block",),
}


@pytest.mark.slow
def test_start_up_that_counts_the_copy_refuses_the_pool(latest: Release) -> None:
    """The repair of ``pool-one-short``: its pool is refused, and one block more is enough."""
    case = BY_NAME["pool-one-short"]
    with pytest.raises(ConfigError, match="pool_blocks is 9, but one request .* needs 10"):
        World(case.load(), latest.changed("copies_counted"))
    run = matrix.recorded()["0.33.0"]["cases"]["pool-one-short"]["refuted"]["everything_drains"]["choices"]
    assert check.breaks_again(load("pool-one-more"), latest.changed("copies_counted"), run) is None


@pytest.mark.slow
def test_whole_chunks_keep_contents_exact(latest: Release) -> None:
    """The repair of ``chunk-hole``: its run survives, and so do fresh walks."""
    case, repaired = BY_NAME["chunk-hole"], latest.changed("chunks_without_holes")
    broken = check.breaks_again(case.load(), latest, case.run)
    assert broken is not None and broken.rule == "window_reads_exact"
    assert check.breaks_again(case.load(), repaired, case.run) is None
    for number in range(60):
        world, _ = walked(case.load(), repaired, 0, number, case.choices, case.limits)
        assert world.verdict is None, number


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An author's working copy: no metadata, no version."""
    try:
        source = prepared("0.33.0").tree.directory
    except Unavailable as error:
        pytest.skip(str(error))
    target = tmp_path_factory.mktemp("checkout")
    shutil.copytree(source / "vllm", target / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    return target


@contextlib.contextmanager
def edited(path: Path, old: str, new: str) -> Iterator[None]:
    """A file with one change, taken back afterwards."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    try:
        yield
    finally:
        path.write_text(text)


@pytest.mark.slow
def test_authors_change_in_a_checkout_is_found(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The change is really the one that runs: the same command holds without it."""
    arguments = ["check", "--vllm", str(checkout), "--config", "window-async", "--runs", "10"]
    manager = checkout / "vllm" / "v1" / "core" / "single_type_kv_cache_manager.py"
    right = "num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens"
    with edited(manager, right, right + " + self.block_size"):
        assert command.main(arguments) == 1
    said = capsys.readouterr().out
    assert "has the signatures of vllm 0.33.0" in said and "window_reads_exact refuted in" in said
    assert command.main(arguments) in (0, 3)
    assert "note:" not in capsys.readouterr().out


@pytest.mark.slow
def test_change_of_a_workers_file_is_said_not_to_be_seen(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = checkout / "vllm" / "v1" / "worker" / "gpu" / "model_runner.py"
    arguments = [
        "check",
        "--vllm",
        str(checkout),
        "--config",
        "window-async",
        "--runs",
        "1",
        "--choices",
        "5",
    ]
    with edited(runner, "class GPUModelRunner", "LATER = 1\n\n\nclass GPUModelRunner"):
        assert command.main(arguments) != 2
    assert "note: vllm/v1/worker/gpu/model_runner.py is not the release's" in capsys.readouterr().out
    with edited(runner, "kv_block_zeroer.zero_block_ids", "kv_block_zeroer.zero_later"):
        assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert "the v2 runner of" in said and "zero_block_ids" in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def touch(self, blocks", "def touch(self, why, blocks", "nearest is 0.33.0, 1 signatures differ"),
        ("class BlockPool:", "class BlockPool(:", "is not Python"),
        ("class BlockPool:", "import nothing_of_that_name\nclass BlockPool:", "cannot be imported"),
    ],
)
def test_checkout_that_cannot_be_driven_is_one_line(
    checkout: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    with edited(checkout / "vllm" / "v1" / "core" / "block_pool.py", old, new):
        assert command.main(["check", "--vllm", str(checkout), "--config", "window-async"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.slow
def test_an_old_release_is_refuted() -> None:
    """0.30.0 admits a hit whose retained history it did not look up."""
    recorded = matrix.recorded()["0.30.0"]["cases"]
    case = BY_NAME["retained-window"]
    with started("0.30.0") as child:
        release = Release(child)
        again(case, release, recorded[case.name])
        result = check.run_case(case, release, reducing=False)
    assert result.verdict == recorded[case.name]["verdict"] == check.REFUTED


def test_the_record_is_complete() -> None:
    """Every case has a recorded verdict for every release, and the history is in it."""
    recorded = matrix.recorded()
    for release in matrix.KNOWN:
        assert set(recorded[release]["cases"]) == set(BY_NAME)
    assert [text for text, _ in matrix.differences(recorded, recorded)] == []


@pytest.mark.slow
def test_missing_witness_leaves_a_case_undetermined(latest: Release) -> None:
    """Two choices reach no external hit: undetermined, not holding."""
    result = check.run_case(BY_NAME["attention"], latest, runs=1, choices=2, reducing=False)
    assert result.verdict == check.UNDETERMINED and "external_hit" in result.missing
    assert check.overall([result]) == (check.UNDETERMINED, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["early_window_free", "key_one_token_early"])
def test_mutant_is_found(latest: Release, mutant: str) -> None:
    assert matrix.mutant_row(latest, mutant, 0, None)["verdict"] == check.REFUTED


@pytest.mark.slow
def test_same_seed_same_verdict(latest: Release) -> None:
    case = BY_NAME["hybrid-sync-pp"]
    first, second = (
        [walked(case.load(), latest, 3, number, 80, case.limits)[1] for number in range(3)] for _ in range(2)
    )
    assert first == second


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(case.name in shown for case in CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--release", "0.29.0"], "0.29.0 is not a known release; known: 0.30.0"),
        (["check", "--config", "nothing"], "no configuration named 'nothing'"),
        (["check", "--vllm", "/nowhere"], "name an unpacked release or a checkout"),
        (["matrix", "--releases", "0.1.0"], "0.1.0 is not a known release"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_release_that_was_not_fetched_is_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    assert command.main(["check", "--release", "0.33.0"]) == 2
    assert "python -m impl.upstream fetch 0.33.0" in capsys.readouterr().err


def test_package_index_that_does_not_answer_is_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for torch' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(env.sys, "executable", "/bin/true")
    building = env._environment().with_name(f".{env._environment().name}.partial")
    (building / "bin").mkdir(parents=True)
    python.rename(building / "bin" / "python")
    assert command.main(["fetch", "0.33.0"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "cannot install torch: No matching distribution" in said[-1] and "package index" in said[-1]
    assert command.main(["fetch", "0.29.0"]) == 2
    assert "0.29.0 is not a known release" in capsys.readouterr().err


def test_journal_goes_on_with_the_same_command_only(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that was made is not made again; another command begins anew; a cut file is no row."""
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    options = Namespace(runs=None, choices=None, seed=0, record=True)
    key = matrix.key_of(options)
    assert key != matrix.key_of(Namespace(runs=None, choices=None, seed=1, record=True))
    made: list[str] = []

    def make(name: str) -> Plain:
        made.append(name)
        return {"verdict": name}

    for _ in range(2):
        journal = matrix.Journal("0.33.0", key).resume()
        assert journal.row("attention", lambda: make("holds"), str) == {"verdict": "holds"}
    assert made == ["holds"] and "from the run before" in capsys.readouterr().out
    assert matrix.Journal("0.33.0", "another").resume().rows == {}
    journal.path.write_text(json.dumps({"key": key, "rows": {}})[:-3])
    assert matrix.Journal("0.33.0", key).resume().rows == {}


def test_limits_keep_the_adversary_within_a_release() -> None:
    """No failures are drawn; without the limit, no reset of the tier."""
    config, random = load("attention"), Random(1)
    weights = dict(Drawn(config, random, draw_options(config, random), Limits()).options.weights)
    assert weights["fail"] == 0


def test_unknown_repair_is_refused() -> None:
    with pytest.raises(ValueError, match="no mutant or repair is called 'magic'"):
        Release(object(), ("magic",))  # type: ignore[arg-type]
