"""Released vLLM as a policy of the world: what is observed is what the release holds, recorded verdicts come
again, mutants are found, bad input is one line.

Needs releases in the cache directory (``python -m impl.upstream fetch 0.33.0 0.30.0``); skipped with a reason
otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from impl.upstream import __main__ as command
from impl.upstream import (
    cases,
    check,
    driver,
    edits,
    env,
    kernels,
    matrix,
    observe,
    record,
    releases,
    worker_order,
)
from impl.upstream.cases import BY_NAME, CASES, load
from impl.upstream.child import Child
from impl.upstream.drive import Drawn, Limits, walked
from impl.upstream.env import Unavailable, prepared
from impl.upstream.policy import Release, Upstream
from spec.config import ConfigError
from spec.policy import PolicyError
from spec.walk import draw_options
from spec.world import World

Plain = dict[str, Any]
ROOT = Path(__file__).parents[1]


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
    recorded = record.recorded()["0.33.0"]["cases"]
    for case in CASES:
        if not case.default:
            continue
        result = check.run_case(case, latest, reducing=False, known=record.known(case, "0.33.0"))
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
    recorded = record.recorded()["0.33.0"]["cases"]
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
    run = record.recorded()["0.33.0"]["cases"]["pool-one-short"]["refuted"]["everything_drains"]["choices"]
    assert check.breaks_again(load("pool-one-more"), latest.changed("copies_counted"), run) is None


def test_pool_and_connector_retain_alike(latest: Release) -> None:
    """As every engine makes them: the default is 0, and the option sets both."""
    for patches, tokens in (((), 0), (("dense_retention",), None)):
        told = latest.child.new(load("chunk-hole"), patches)["geometry"]
        assert (told["retention_tokens"], told["connector_retention_tokens"]) == (tokens, tokens)


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
    assert "check: vllm 0.33.0; 1 case;" in said and "1 cases" not in said
    one = "vllm/v1/core/single_type_kv_cache_manager.py::SlidingWindowManager.get_num_skipped_tokens:"
    assert re.search(f"^edited: {one}", said, re.M)
    assert re.search(f"^edited, and called in this run: {one}", said, re.M)
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
    package = checkout / "vllm"
    for path in ("v1/kv_offload/cpu/gpu_worker.py", "v1/worker/gpu/states.py"):  # of no program's chain
        with edited(package / path, "import torch", "import torch\n\nLATER = 1"):
            assert worker_order.changed_files(package, "0.33.0") == [path]
    assert worker_order.changed_files(package, "0.33.0") == []
    with edited(runner, "kv_block_zeroer.zero_block_ids", "kv_block_zeroer.zero_later"):
        assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert "the v2 runner of" in said and "zero_block_ids" in said and said.count("\n") == 1


@pytest.mark.slow
def test_kernels_of_a_checkout_are_judged(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The author's kernel is the one that runs: what it should copy at a boundary is not copied."""
    try:
        env.with_kernels(prepared("0.33.0"))
    except Unavailable as error:
        pytest.skip(str(error))
    path = checkout / "vllm" / "v1" / "worker" / "mamba_utils.py"
    arguments = ["check", "--vllm", str(checkout)]
    for name in kernels.BY_NAME:
        arguments += ["--config", name]
    right = "needs_copy = aligned_new_computed >= num_tokens_running_state"
    with edited(path, right, right.replace(">=", ">")):
        assert command.main(arguments) == 1
    said = capsys.readouterr().out
    assert (
        "mamba_utils.py is not the release's; what it changes in the simulated workers is not run; its"
        in said
    )
    assert (
        "kernel-steps: refuted by the tree's own kernels" in said
        and "is not written, should get state" in said
    )
    assert "edited: vllm/v1/worker/mamba_utils.py::postprocess_mamba_fused_kernel:" in said
    assert "kernel-late-rows: holds, as recorded" in said
    assert "1 not as recorded" in said


def test_kernels_without_triton_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    use = env.Prepared(releases.Tree("0.33.0", tmp_path, None), Path(sys.executable), tmp_path)
    assert command.interpreted(use, kernels.SCENARIOS, named=False) == []
    said = capsys.readouterr().out
    assert said.startswith("note: the kernels of this tree are not run: Triton was not fetched: run `python")
    assert said.count("\n") == 1
    with pytest.raises(Unavailable, match="fetch 0.33.0 --kernels"):
        command.interpreted(use, kernels.SCENARIOS, named=True)


class Labelled:
    """A stand-in for the process of kernels: requests are accepted, nothing is ever copied."""

    def __call__(self, ask: str, **given: Any) -> Plain:
        match ask:
            case "add":
                return {"column": (given["computed"] - 1) // 4}
            case "gather":
                return {"rows": [self.rows[slot] for slot in given["slots"]]}
            case "row":
                held = [] if given["overwrite"] else self.rows[given["slot"]]
                self.rows[given["slot"]] = held + given["blocks"]
        return {"mappings": []}

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}


def test_kernels_that_do_something_else_are_refuted() -> None:
    """The first thing that is not as the plain rules say ends a scenario, with both values."""
    verdict, seen = kernels.whole_steps(Labelled())
    assert verdict == "refuted" and seen.startswith(
        "blocks of 4, 2 drafts, step 1, slot mappings: [], should be ["
    )
    assert kernels.resume_column(lambda ask, **given: {"column": 3}) == ("refuted", "starts from column 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def touch(self, blocks", "def touch(self, why, blocks", "nearest is 0.33.0, 1 signature differs"),
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


def test_what_the_adapter_cannot_follow_in_a_tree_is_one_line(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a release it is a defect of this package, with its traceback."""

    def broken(*given: Any, **named: Any) -> None:
        raise KeyError("r1#1")

    monkeypatch.setattr(check, "run_case", broken)
    idle = Namespace(load=lambda: None, ask=lambda ask, **given: {"called": [], "idle": []})
    monkeypatch.setattr(command, "Child", lambda use: contextlib.nullcontext(idle))
    arguments = ["check", "--vllm", str(checkout), "--config", "attention"]
    with edited(
        checkout / "vllm" / "v1" / "core" / "block_pool.py", "block.ref_cnt += 1", "block.ref_cnt += 2"
    ):
        assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said == "impl.upstream: attention: the adapter cannot follow this tree: KeyError: 'r1#1'\n"
    with pytest.raises(KeyError):
        command.main(arguments)


def test_a_job_whose_chunks_and_blocks_disagree_is_the_policys_error() -> None:
    """The released worker asserts the same; a job that agrees is taken apart into its chunks."""
    policy = object.__new__(Upstream)
    policy.config = replace(load("attention"), blocks_per_chunk=2)
    policy.keys = {"0:1": (0, 8, 1), "0:2": (0, 16, 2)}
    job = {"job": 3, "keys": ["0:1", "0:2"], "chunks": [4, 5], "blocks": [[7, 8, 9]], "first_column": [1]}
    assert policy.chunks(job) == (((0, 8, 1), 4, (0, 7)), ((0, 16, 2), 5, (8, 9)))
    for change in ({"first_column": [0], "blocks": [[7, 8]]}, {"keys": ["0:1"], "chunks": [4]}):
        with pytest.raises(PolicyError, match="on workers: job 3 names . host chunks, its blocks fill"):
            policy.chunks(job | change)


# -- beside the record ---------------------------------------------------------------------------------------


def row(verdict: str = "holds", *refuted: str, refused: str = "", stopped: bool = False) -> Plain:
    """A case's outcome."""
    broken = {rule: {"choices": ["quiet"], "survives": ["offers_still_held"]} for rule in refuted}
    return {"verdict": verdict, "refused": refused, "refuted": broken, "stopped": stopped}


@pytest.mark.parametrize(
    ("before", "now", "edited", "text", "same", "code"),
    [
        (row(), row(), False, "holds, as recorded", True, 0),
        (row("undetermined"), row("undetermined"), False, "undetermined, as recorded", True, 0),
        (row("refuted", "a"), row("refuted", "a"), False, "a refuted, as recorded, docs/findings", True, 0),
        (row(), row("refuted", "a"), True, "a refuted; not recorded", False, 1),
        (row("refuted", "a"), row(), False, "the recorded run no longer breaks a", False, 1),
        (row("refuted", "a"), row(), True, "the recorded run no longer breaks a", False, 0),
        (row(), row("undetermined"), True, "undetermined, recorded is holds", False, 3),
        (row("undetermined"), row(), False, "holds, recorded is undetermined", False, 0),
        (row("undetermined", refused="no"), row("undetermined", refused="no"), False,
         "not given to this release, as recorded", True, 0),
        (row(), row("undetermined", refused="no"), False, "not given to this release, recorded is", False, 3),
        (None, row("refuted", "a"), False, "a refuted; no record of this case", False, 1),
        (None, row(), False, "holds; no record of this case", False, 0),
        (row("refuted", "a"), row("undetermined", stopped=True), False, "stopped before", False, 3),
    ],
)  # fmt: skip
def test_outcome_beside_the_record(
    before: Plain | None, now: Plain, edited: bool, text: str, same: bool, code: int
) -> None:
    stored: Plain = {"0.33.0": {"cases": {"reused-offer": before} if before else {}}}
    remarks = record.compared(stored, "0.33.0", "reused-offer", now, edited=edited)
    assert [remark.text[: len(text)] for remark in remarks] == [text]
    assert (remarks[0].same, remarks[0].code) == (same, code)


@pytest.mark.parametrize(
    ("before", "now", "edited", "text", "code"),
    [
        ("holds", "holds", True, "holds, as recorded", 0),
        ("refuted", "refuted", True, "refuted, as recorded, docs/upstream.md", 0),
        ("holds", "refuted", True, "refuted, recorded is holds", 1),
        ("refuted", "holds", True, "holds, recorded is refuted", 0),
        ("refuted", "holds", False, "holds, recorded is refuted", 1),
        ("holds", "undetermined", True, "undetermined, recorded is holds", 3),
        (None, "refuted", True, "refuted, no record of this scenario", 1),
        (None, "holds", False, "holds, no record of this scenario", 0),
    ],
)
def test_kernels_beside_the_record(before: str | None, now: str, edited: bool, text: str, code: int) -> None:
    stored: Plain = {"0.33.0": {"kernels": {"kernel-steps": {"verdict": before}} if before else {}}}
    remark = record.kernel_compared(stored, "0.33.0", "kernel-steps", now, edited=edited)
    assert (remark.text, remark.code, remark.same) == (text, code, before == now)


def test_a_new_rule_is_seen_beside_a_recorded_one() -> None:
    """In ``matrix`` too: its comparison is the same."""
    stored: Plain = {"0.33.0": {"cases": {"reused-offer": row("refuted", "a")}}}
    now = row("refuted", "a", "b")
    remarks = record.compared(stored, "0.33.0", "reused-offer", now)
    assert [(remark.rule, remark.code) for remark in remarks] == [("a", 0), ("b", 1)]
    made: Plain = {"0.33.0": {"cases": {"reused-offer": now}, "kernels": {}, "mutants": {}}}
    assert list(matrix.differences(made, stored)) == [("0.33.0 reused-offer: b refuted; not recorded", 1)]


def test_a_further_rule_of_an_older_release_is_no_failure_of_an_edited_copy() -> None:
    """A case that it holds must still hold, and the newest release is judged by every rule."""
    for release, before, edited, code in (
        ("0.30.0", row("refuted", "a"), True, 0),
        ("0.30.0", row("refuted", "a"), False, 1),
        ("0.30.0", row(), True, 1),
        ("0.33.0", row("refuted", "a"), True, 1),
    ):
        stored: Plain = {release: {"cases": {"reused-offer": before}}}
        after = row("refuted", "a", "b")
        remark = record.compared(stored, release, "reused-offer", after, edited=edited)[-1]
        assert (remark.rule, remark.same, remark.code) == ("b", False, code)
    made: Plain = {"0.30.0": {"cases": {"reused-offer": after}, "kernels": {}, "mutants": {}}}
    stored = {"0.30.0": {"cases": {"reused-offer": row("refuted", "a")}}}
    assert any(": b refuted" in text for text, _ in matrix.differences(made, stored))


def test_a_releases_own_recorded_runs_are_tried_whatever_their_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run may have been reduced below its case's shortest prompt; other releases are not given it."""
    case = BY_NAME["hybrid-async-offload"]

    def rows(prompt: int) -> Plain:
        run = {"choices": [f"arrive r1 prompt={prompt} outputs=1", "quiet"]}
        return {"cases": {case.name: {"refuted": {"state_reads_exact": run}}}}

    stored = {"0.30.0": rows(1), "0.33.0": rows(case.limits.shortest_prompt)}
    monkeypatch.setattr(record, "recorded", lambda: stored)
    prompts = {
        release: [c[3] for run in record.known(case, release) for c in run if c[0] == "arrive"]
        for release in stored
    }
    assert prompts == {"0.30.0": [1, 2], "0.33.0": [2]}


def test_a_recorded_refutation_is_explained_where_its_repair_is() -> None:
    stored = record.recorded()
    offer = "docs/findings.md#a-boundary-reused-in-the-pass-that-offers-it"
    assert record.place(stored, "0.33.0", "reused-offer", "ready_chunk_exact") == offer
    assert record.place(stored, "0.30.0", "hybrid", "state_reads_exact") == "docs/upstream.md"
    for case, found in stored["0.33.0"]["cases"].items():  # findings.md is about this release
        for rule in found["refuted"]:
            assert record.place(stored, "0.33.0", case, rule) != "docs/upstream.md", case


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid-offload", "hybrid-async-offload", "hybrid-sync-pp"])
def test_recorded_repairs_are_those_with_which_the_run_survives(latest: Release, name: str) -> None:
    """The default cases': the repair that names the finding removes it, any other does not."""
    case, stored = BY_NAME[name], record.recorded()
    for rule, found in stored["0.33.0"]["cases"][name]["refuted"].items():
        for repair in ("offers_still_held", "flush_before_overwriting", "publish_computed_boundaries"):
            policy = latest.changed(*case.repairs, repair)
            broken = check.breaks_again(case.load(), policy, found["choices"])
            assert (broken is None) == (repair in found["survives"]), (name, rule, repair)


@pytest.mark.slow
def test_untouched_release_is_as_recorded(
    latest: Release, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded refutations are no failure, and are drawn only if the case is named; without the record, or
    with one that lacks the rule, they are failures."""
    monkeypatch.setattr(cases, "CASES", (replace(BY_NAME["short-prompt"], default=True),))
    assert command.main(["check", "--runs", "2"]) == 0
    said = capsys.readouterr().out
    finding = "docs/findings.md#a-one-token-prompt-beside-a-decode"
    assert f"short-prompt: state_reads_exact refuted, as recorded, {finding}" in said
    assert "--config short-prompt --repair padded_prompts_decode" in said
    assert "verdict: refuted, as recorded" in said and "both values" not in said
    assert command.main(["check", "--runs", "2", "--config", "short-prompt"]) == 0
    assert "both values" in capsys.readouterr().out
    named = ["check", "--runs", "2", "--config", "stages-sync"]
    assert command.main([*named, "--repair", "offers_still_held"]) == 1
    assert "no record of this case" in capsys.readouterr().out
    stored = record.recorded()
    stored["0.33.0"]["cases"]["stages-sync"]["refuted"].pop("input_tokens_exact")
    monkeypatch.setattr(record, "recorded", lambda: stored)
    assert command.main(named) == 1
    said = capsys.readouterr().out
    assert "input_tokens_exact refuted; not recorded" in said and "1 not as recorded" in said


@pytest.mark.slow
def test_author_sees_only_what_is_new(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded refutation is one line, the author's own is drawn; a repair of the author's is said."""
    monkeypatch.setattr(
        cases, "CASES", (replace(BY_NAME["short-prompt"], default=True), BY_NAME["window-async"])
    )
    monkeypatch.setattr(kernels, "SCENARIOS", ())
    manager = checkout / "vllm" / "v1" / "core" / "single_type_kv_cache_manager.py"
    right = "num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens"
    arguments = ["check", "--vllm", str(checkout), "--runs", "10"]
    with edited(manager, right, right + " + self.block_size"):
        assert command.main(arguments) == 1
    said = capsys.readouterr().out
    assert "short-prompt: state_reads_exact refuted, as recorded" in said
    assert "window-async: window_reads_exact refuted; not recorded" in said
    assert re.findall("consequence (.*) refuted in", said) == ["window_reads_exact"]
    monkeypatch.setattr(cases, "CASES", (replace(BY_NAME["double-reset"], default=True),))
    offload = checkout / releases._OFFLOAD.replace("distributed", "vllm/distributed") / "scheduler.py"
    right = "assert not self._current_batch_jobs_to_flush"
    with edited(offload, right, "pass"):
        code = command.main([*arguments, "--choices", "20"])
    said = capsys.readouterr().out
    assert "the recorded run no longer breaks policy_raises_no_error (docs/findings.md#two-resets" in said
    assert code != 1


@pytest.mark.slow
def test_functions_of_a_refutation_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    started("0.33.0").close()
    seen = []
    for number in ("1", "2"):
        target = tmp_path / f"{number}.json"
        arguments = ["check", "--config", "short-prompt", "--runs", "1", "--json", str(target)]
        subprocess.run(
            [sys.executable, "-m", "impl.upstream", *arguments],
            env={**os.environ, "PYTHONHASHSEED": number},
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        found = json.loads(target.read_text())["cases"]["short-prompt"]["refuted"]["state_reads_exact"]
        assert any(line.startswith("PostProcess: ") for line in found["functions"])
        seen.append(found["functions"])
    assert seen[0] == seen[1]


# -- stopped, and files --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopped_check_keeps_what_was_found(tmp_path: Path) -> None:
    """Ctrl-C, sent as a terminal does: to the process group."""
    started("0.33.0").close()
    target = tmp_path / "report.json"
    arguments = ["check", "--config", "stages-sync", "--config", "attention", "--json", str(target)]
    with subprocess.Popen(
        [sys.executable, "-m", "impl.upstream", *arguments, "--runs", "300"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in background jobs
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("  stages-sync: refuted"):
                break
        time.sleep(2)  # 300 runs of the next case take longer
        os.killpg(process.pid, signal.SIGINT)
        said, complaint = process.communicate(timeout=60)
    assert process.returncode == 3, complaint
    assert complaint == "impl.upstream: stopped; 2 of 2 cases were begun\n"
    assert "stages-sync: input_tokens_exact refuted, as recorded" in said
    assert "attention: stopped before all its runs" in said
    report = json.loads(target.read_text())
    assert report["stopped"] and "input_tokens_exact" in report["cases"]["stages-sync"]["refuted"]
    assert 0 < report["cases"]["attention"]["runs"] < 300


def test_stopped_fetch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is installed is kept, and the next fetch goes on from there."""
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    installed: list[str] = []

    def install(python: Path, arguments: list[str], what: str) -> None:
        if installed:
            raise KeyboardInterrupt
        installed.append(what)

    made = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(env.subprocess, "run", lambda *given, **named: made)
    monkeypatch.setattr(env, "_install_torch", lambda python: python.parent.mkdir(parents=True))
    monkeypatch.setattr(env, "_pip", install)
    assert command.main(["fetch", "0.33.0"]) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "impl.upstream: stopped; the same command goes on with what is missing"
    assert "Traceback" not in "".join(said)
    building = env._environment().with_name(f".{env._environment().name}.partial")
    assert sorted(path.name for path in building.glob(".stage-*")) == [".stage-0", ".stage-1"]


def test_edited_functions_are_those_that_do_something_else() -> None:
    """Comments, docstrings and lines aside; methods by their class, other statements by class or module."""
    before = edits.parts(
        ast.parse("""a = 1
class C(B):
    x = 2
    def f(self):
        "old"
        return 1
    def g(self):
        def h(): return 1
def k(): pass
""")
    )
    after = edits.parts(
        ast.parse(""""new"
a = 1

class C(B):
    x = 3
    def f(self):
        # why
        return 1
    def g(self):
        def h(): return 2
    def new(self): pass
def k(): pass
""")
    )
    changed = [name for name, (_, text) in after.items() if before.get(name, (0, ""))[1] != text]
    assert sorted(changed) == ["C", "C.g", "C.new"]
    assert after["C.g"][0] == 9


def test_keys_in_a_message_are_named() -> None:
    """By group and covered tokens; bytes that stand for nothing known as a few digits."""
    hashes = observe.Hashes(4, 0)
    hashes.learn(Namespace(block_hashes=[b"\\'1", b"22"], all_token_ids=list(range(9))), 0)
    engine = Namespace(hashes=hashes, config=load("hybrid-even"), learn=lambda: None)
    key = b"\\'1" + (1).to_bytes(observe.GROUP_BYTES, "big")
    for message, text in (
        (f"Chunk {key!r} not found", "Chunk of group mamba up to 4 tokens not found"),
        (f"{b'22'!r}", "up to 8 tokens"),
        (f"no {bytes(range(20))!r} here", "no 0x000102030405... here"),
        (f"no {b'x'!r} here, nor 'b'", "no 0x78 here, nor 'b'"),
    ):
        assert driver.Engine.readable(engine, message) == text  # type: ignore[arg-type]


def test_shortest_prompt_is_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    shutil.copy(cases.FOLDER / "window-drop.toml", file)
    for more, shortest in (([], 1), (["--shortest-prompt", "2"], 2)):
        given = command.parser().parse_args(["check", "--config", str(file), *more])
        todo, scenarios = command.asked(given, "0.33.0")
        assert [case.limits.shortest_prompt for case in todo] == [shortest] and not scenarios


@pytest.mark.parametrize(
    ("option", "message"),
    [("--vllm", "--vllm is empty: name an unp"), ("--release", "vllm '' is not a known")],
)
def test_an_empty_name_is_one_line(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", option, ""]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_bad_input_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new.json"
    for arguments in (["--config", "nothing"], ["--release", "0.29.0"]):
        assert command.main(["check", *arguments, "--json", str(target)]) == 2
        assert list(tmp_path.iterdir()) == []
    target.write_text("before")
    assert command.main(["check", "--config", "nothing", "--json", str(target)]) == 2
    assert target.read_text() == "before"
    capsys.readouterr()
    assert command.main(["check", "--json", str(tmp_path / "missing" / "new.json")]) == 2
    said = capsys.readouterr().err
    assert "its folder does not exist" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--help"], 0, "usage: python -m impl.upstream.worker_order"),
        (["0.1"], 2, "0.1 is no directory and no known release; known: 0.30.0"),
        (["--record", "."], 2, "--record takes a release"),
        ([], 2, "the following arguments are required"),
    ],
)
def test_worker_order_explains_itself(
    arguments: list[str], code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert worker_order.main(arguments) == code
    said = capsys.readouterr()
    assert shown in (said.err if code else said.out)
    assert not code or said.err.count("\n") == 1


def test_findings_and_their_cases_are_in_the_document() -> None:
    """Headings that ``check`` names exist; each row's repair is that of its finding, and its case is refuted
    and holds when repaired."""
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("## ")
    }
    assert headings >= {*record.FINDINGS.values(), *record.UNREPAIRED.values()}
    rows = re.findall(r"^\| \[.*\]\(#(.*)\) \|.*\| `(\w+)` \| `--config ([\w-]+)` \|$", text, re.M)
    assert len(rows) == len(record.FINDINGS) - 2  # two are open upstream
    stored = record.recorded()["0.33.0"]["cases"]
    for heading, repair, name in rows:
        assert record.FINDINGS[repair] == heading
        repaired = {"flush-order": "flush-repaired", "lookup-past-hashes": "lookup-repaired"}
        assert stored[name]["verdict"] == check.REFUTED
        assert stored[repaired.get(name, f"{name}-repaired")]["verdict"] == check.HOLDS
    assert "for the third: `flush-repaired`" in text and rows[2][2] == "flush-order"


def test_repair_that_older_releases_do_not_take_is_said_so() -> None:
    text = " ".join((ROOT / "docs" / "upstream.md").read_text(encoding="utf-8").split())
    assert "`chunk-hole-repaired` is refuted in 0.30.0: the repair does not help there" in text
    for release, rows in record.recorded().items():
        want = check.REFUTED if release == "0.30.0" else check.HOLDS
        assert rows["cases"]["chunk-hole-repaired"]["verdict"] == want


@pytest.mark.slow
def test_an_old_release_is_refuted() -> None:
    """0.30.0 admits a hit whose retained history it did not look up."""
    recorded = record.recorded()["0.30.0"]["cases"]
    case = BY_NAME["retained-window"]
    with started("0.30.0") as child:
        release = Release(child)
        again(case, release, recorded[case.name])
        result = check.run_case(case, release, reducing=False)
    assert result.verdict == recorded[case.name]["verdict"] == check.REFUTED


def test_the_record_is_complete() -> None:
    """Every case has a recorded verdict for every release, and the history is in it."""
    recorded = record.recorded()
    for release in matrix.KNOWN:
        assert set(recorded[release]["cases"]) == set(BY_NAME)
    assert [text for text, _ in matrix.differences(recorded, recorded)] == []


@pytest.mark.slow
def test_missing_witness_leaves_a_case_undetermined(latest: Release) -> None:
    """Two choices reach no external hit: undetermined, not holding."""
    result = check.run_case(BY_NAME["attention"], latest, runs=1, choices=2, reducing=False)
    assert result.verdict == check.UNDETERMINED and "external_hit" in result.missing
    assert check.overall([result]) == check.UNDETERMINED
    remarks = record.compared(record.recorded(), "0.33.0", "attention", check.plain(result))
    assert [remark.text for remark in remarks] == ["undetermined, recorded is holds"]
    assert check.exit_code([result], remarks) == 3


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
    shown = capsys.readouterr().out.splitlines()
    listed = [*CASES, *kernels.SCENARIOS]
    assert [line.split()[0] for line in shown] == [one.name for one in listed]
    assert len({line.rindex(one.why) for line, one in zip(shown, listed, strict=True)}) == 1


def test_result_table_has_room_for_the_longest_name() -> None:
    name = max(BY_NAME, key=len)
    lines = list(check.report([check.CaseResult(name, "x")]))
    assert any(line.split()[:2] == [name, check.HOLDS] for line in lines)


def test_unknown_case_names_its_neighbour_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "--config", "flush-odrer"]) == 2
    said = capsys.readouterr().err
    assert "such as flush-order" in said and " ... " not in said


def test_rules_that_no_case_reaches_are_not_exercised() -> None:
    """Not *undetermined*: that is a case in which something permitted did not happen, and exit code 3."""
    result = check.CaseResult("a", "x")
    shown = "\n".join(check.report([result]))
    assert "not exercised by these cases: no_double_owner" in shown and "undetermined" not in shown
    result.tally["no_double_owner"] = [0, 1]
    assert check.rule_verdicts([result])["no_double_owner"] == (check.HOLDS, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--release", "0.29.0"], "0.29.0 is not a known release; known: 0.30.0"),
        (["check", "--config", "flush-odrer"], "no case or configuration named 'flush-odrer'"),
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
