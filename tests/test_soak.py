"""Soak: a sound engine serves what greedy decoding gives; a fault shows; a stop keeps what was found."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

try:
    import torch

    from impl import options
    from impl.inject import injectable
    from impl.soak import runs, table
    from impl.soak.__main__ import main, planned
    from impl.soak.runs import Task, load_named, load_names, serve
    from impl.soak.service import Oracle, Outcome, Stop, own_fault, together, token_of
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "triton"):
        raise
    pytest.skip(f"soak left out: {missing.name} is not installed", allow_module_level=True)

from spec.chains import EMPTY

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task(fault: str = "", load: str = "", requests: int = 40, **changes: Any) -> Task:
    place = load or table.LOOKED_FOR.get(fault, (runs.MAIN_LOAD, 1))[0]
    return replace(Task(place, 0, fault, "", requests, 0, "cpu", "torch"), **changes)


def figures(outcome: Outcome) -> dict[str, Any]:
    """All that a task determines."""
    return {name: value for name, value in asdict(outcome).items() if name != "seconds"}


# -- a sound engine ----------------------------------------------------------------------------------------


def test_clients_of_a_sound_engine_get_what_greedy_decoding_gives() -> None:
    seen = serve(task(requests=60))
    assert seen.clean and seen.served + seen.aborted == seen.arrived == 60
    assert seen.served > 40 and 3.5 < seen.acceptance < 5
    # The load is not an easy one: hits, loads from the host tier, preemptions, clients that go away.
    assert min(seen.cached_tokens, seen.loaded_tokens, seen.preempted, seen.aborted) > 0


@pytest.mark.parametrize("load", load_names())
def test_every_load_can_be_served(load: str) -> None:
    seen = serve(task(load=load, requests=12))
    assert seen.clean and seen.served + seen.aborted == 12


def test_a_seed_determines_a_run() -> None:
    one = figures(serve(task(requests=12)))
    runs.oracle.cache_clear()
    assert figures(serve(task(requests=12))) == one
    assert figures(serve(task(requests=12, seed=1))) != one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("load", "fault"), [("pp4", ""), ("v1", ""), ("", "no-fence")])
def test_a_device_gives_the_same_figures(load: str, fault: str) -> None:
    on_device = task(fault, load=load, device="cuda", kernels="triton")
    assert figures(serve(on_device)) == figures(serve(task(fault, load=load)))


def test_the_reference_output_is_the_closed_forms() -> None:
    """Greedy decoding by hand: one token at a time, from the model's word for the prefix alone."""
    oracle = Oracle(load_named("pp4"))
    prefix = oracle.chains.fold(oracle.chains.fold(EMPTY, 7), 9)
    want, at = [], prefix
    for _ in range(5):
        want.append(token_of(oracle.truth.output(3, at)))
        at = oracle.chains.fold(at, want[-1])
    assert oracle.continuation(prefix, 5) == want and len(set(want)) == 5


# -- faults show -------------------------------------------------------------------------------------------


def test_a_row_by_batch_index_gives_other_outputs_and_shorter_acceptance() -> None:
    sound, broken = serve(task(load="pp4", requests=30)), serve(task("row-by-batch-index", requests=30))
    assert broken.differing > 3 and not broken.error
    assert broken.acceptance < sound.acceptance - 0.5


def test_reports_that_are_dropped_leave_requests_stuck() -> None:
    seen = serve(task("stage-reports-dropped", load="pp4"))
    assert seen.stuck and not seen.differing and not seen.error


def test_an_assertion_of_the_engine_ends_the_load_and_is_told() -> None:
    seen = serve(task("pending-counts-as-present", load="pp4"))
    assert seen.error.startswith("PolicyError: load of") and seen.arrived < 40


@pytest.mark.parametrize(
    ("fault", "left"), [("report-by-client-name", True), ("unregistered-blocks-kept", False)]
)
def test_what_clients_that_go_away_leave_behind_is_told(fault: str, left: bool) -> None:
    seen = serve(task(fault, requests=40))
    assert seen.held_blocks and bool(seen.open_transfers) is left
    assert not (seen.differing or seen.stuck or seen.error)
    assert serve(task(load="churn", requests=40)).clean


def test_a_store_that_is_not_flushed_reaches_other_requests() -> None:
    sound = serve(task(load="fences", requests=40))
    broken = serve(task("oldest-store-flushed-only", requests=40))
    assert sound.clean and broken.differing > 1 and not broken.error


def test_every_fault_has_a_load_and_a_place_in_the_plan() -> None:
    known, names = injectable(), load_names()
    assert set(table.LOOKED_FOR) | set(table.UNSEEN) <= set(known)
    assert all(len(reason.split()) > 3 for reason in table.UNSEEN.values())
    assert {load for load, _ in table.LOOKED_FOR.values()} <= set(names) and names[0] == runs.MAIN_LOAD
    for one in names:
        assert load_named(one).name == one
    plan = planned(options.soak().parse_args(["--all", "--requests", "5"]), list(known))
    assert {t.fault for t in plan} == {"", *known} and len(plan) == len(set(plan))
    based = [name for name, fault in known.items() if fault.base]
    assert {t.design for t in plan} == {"", *based} and based


# -- what counts as noticed --------------------------------------------------------------------------------


def outcome(acceptance: float = 4.0, cached: float = 0.5, **more: Any) -> Outcome:
    given = {"served": 100, "drafted_steps": 1000, "prompt_tokens": 1000} | more
    given = {"run": 0, "drafted_tokens": int(1000 * acceptance), "cached_tokens": int(1000 * cached)} | given
    return Outcome("pp4", **given)


def test_a_figure_is_noticed_only_beyond_the_references_spread() -> None:
    reference = [outcome(4.0 + 0.02 * i, 0.5 + 0.01 * i) for i in (-1, 0, 1, 0)]
    assert table.symptoms([outcome(3.98)], reference) == ()
    assert table.symptoms([outcome(3.5)], reference) == ("shorter acceptance",)
    assert table.symptoms([outcome(4.0, 0.3)], reference) == ("prompt tokens in place 50% -> 30%",)
    assert table.symptoms([outcome(3.5)], reference[:2]) == ()  # of two runs no spread is known
    told = ("a request is begun 1.0 -> 2.0 times",)
    assert table.symptoms([outcome(preempted=100)], reference) == told
    assert table.symptoms([outcome(preempted=4)], reference) == ()
    assert table.symptoms([outcome(stuck=2, held_blocks=0)], reference) == ("2 requests stuck",)


def test_a_base_design_is_held_against_itself_and_its_fault_against_it() -> None:
    plan = planned(options.soak().parse_args(["--fault", "faster-of-two-loads"]), ["faster-of-two-loads"])
    found = {t: outcome(cached=0.3 if t.design or t.fault else 0.5, run=t.run) for t in plan}
    usual, design, fault = table.rows_of(plan, found)
    assert usual.without.cached == 0.5 and design.without.cached == fault.without.cached == 0.3
    assert usual.symptoms == design.symptoms == fault.symptoms == () and fault.complete


def test_what_is_told_of_a_row() -> None:
    sound, ruined = outcome(), outcome(differing=3)

    def told(name: str, whole: Outcome, *symptoms: str, complete: bool = True) -> str:
        return table.noticed(table.Row(name, "", whole, sound, symptoms, complete))

    assert told("reference", sound) == told("no-fence", ruined) == ""
    assert told("no-fence", sound, "3 requests stuck", complete=False) == "3 requests stuck"
    assert told("no-fence", sound) == "not seen: not in so many requests"
    assert told("zero-accepted", sound) == f"not seen: {table.UNSEEN['zero-accepted']}"
    assert told("zero-accepted", sound, complete=False) == "stopped before it was seen"


def test_verdicts() -> None:
    sound, ruined = outcome(), outcome(differing=3)

    def row(name: str, whole: Outcome, complete: bool = True) -> table.Row:
        return table.Row(name, "", whole, sound, (), complete)

    assert table.verdict_of([row("reference", sound), row("no-fence", ruined)], False)[1] == 0
    assert table.verdict_of([row("reference", ruined), row("no-fence", sound)], True)[1] == 1
    assert table.verdict_of([row("reference", outcome(error="x")), row("no-fence", ruined)], False)[1] == 1
    assert table.verdict_of([row("reference", sound), row("no-fence", sound)], False)[1] == 3
    assert table.verdict_of([row("reference", sound), row("zero-accepted", sound)], False)[1] == 0
    assert table.verdict_of([row("reference", sound), row("no-fence", ruined, False)], False)[1] == 3
    alone, unseen, one = [row("reference", sound)], row("zero-accepted", sound), row("no-fence", ruined)
    assert table.verdict_of(alone, False) == ("holds: the reference is clean (no fault was tried)", 0)
    assert table.verdict_of([*alone, unseen], False)[0].endswith("no load can show any: zero-accepted)")
    assert table.verdict_of([*alone, unseen, one], False)[0].endswith(
        "every fault tried that a load can show does"
    )
    assert together([sound, ruined]).differing == 3 and together([sound, ruined]).served == 200


def test_an_error_of_the_harness_does_not_pass_for_the_engines() -> None:
    seen = serve(task(requests=5))
    assert not seen.error
    broken = runs.Load(load_named("pp4"), runs.engine_of(task()), Oracle(load_named("pp4")), runs.Random(0))
    del broken.world.clients
    with pytest.raises(AttributeError):
        broken.run(5)
    try:
        raise LookupError("somebody else's")
    except LookupError as error:
        assert not own_fault(error)


# -- processes ---------------------------------------------------------------------------------------------


def serves_or_dies(task: Task, stop: Stop) -> Outcome:
    if task.run == 1:
        os._exit(1)
    if task.run == 2:
        raise ValueError("no such thing")
    return Outcome(task.load, task.run, served=os.getpid())


def serves_and_ends_late(task: Task, stop: Stop) -> Outcome:
    def end() -> None:
        began = time.monotonic()
        while not Path(task.load).exists() and time.monotonic() - began < 60:
            time.sleep(0.02)

    atexit.register(end)
    return Outcome(task.load, task.run, task.fault, served=os.getpid(), error="an index past a table")


def test_a_process_that_dies_costs_its_own_run_only() -> None:
    tasks = [task(run=run) for run in range(6)]
    seen = {t.run: one for t, one in runs.in_processes(tasks, 2, threading.Event(), serves_or_dies)}
    assert sorted(seen) == list(range(6))
    assert seen[1].error == "the soak itself failed: its process ended"
    assert seen[2].error == "the soak itself failed: ValueError('no such thing')"
    rest = [seen[run] for run in (0, 3, 4, 5)]
    assert not any(one.error for one in rest) and len({one.served for one in rest}) <= 3


def serves_with_an_error(task: Task, stop: Stop) -> Outcome:
    return Outcome(task.load, task.run, served=os.getpid(), error="" if task.run % 3 else "an exception")


@pytest.mark.parametrize(("device", "processes"), [("cpu", 1), ("cuda", 3)])
def test_after_an_error_a_cuda_process_is_left(device: str, processes: int) -> None:
    tasks = [task("no-fence", run=run, device=device) for run in range(7)]
    seen = [one for _, one in runs.in_processes(tasks, 1, threading.Event(), serves_with_an_error)]
    assert len(seen) == 7 and len({one.served for one in seen}) == processes


def test_nobody_waits_for_a_process_to_end(tmp_path: Path) -> None:
    """On CUDA an error is its process's last, and to give back a context takes seconds."""
    sign = tmp_path / "all were told"
    tasks = [task("no-fence", load=str(sign), run=run, device="cuda") for run in range(3)]
    began, told = time.monotonic(), set[int]()
    for _, one in runs.in_processes(tasks, 1, threading.Event(), serves_and_ends_late):
        told.add(one.served)
        if len(told) == 3:
            sign.touch()
    assert len(told) == 3 and time.monotonic() - began < 60


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("<!-- part: soak -->\nold\n<!-- end part -->\n")
    words = ["--requests", "6", "--fault", "new-ids-from-position-zero", "--markdown", str(page)]
    assert main([*words, "--json", str(file)]) == 0, capsys.readouterr().out
    told = json.loads(file.read_text())
    assert [row["name"] for row in told["rows"]] == ["reference", "new-ids-from-position-zero"]
    assert told["rows"][0]["differing"] == 0 and told["rows"][1]["share_differing"] > 0.5
    assert "| `new-ids-from-position-zero` | New block ids" in page.read_text()
    assert "\nold\n" not in page.read_text() and "1 of 1 faults show" in page.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fault", "nonsense"], "no fault named 'nonsense'; --list shows all"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["--kernels", "c"], "--kernels must be torch or triton, got 'c'"),
        (["--load", "nonsense"], "no load 'nonsense'; there are pp4,"),
        (["--json", "/nowhere/at/all.json"], "its folder does not exist"),
        (["--markdown", "/nowhere/page.md"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and not said.out


def test_a_missing_device_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install() -> None:
    code = (
        "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('impl.soak', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "torch is not installed: pip install" in done.stderr


def interrupted(tmp_path: Path, jobs: str, sign: str) -> tuple[str, Any]:
    """What a command prints and leaves when Ctrl-C goes to its group of processes once a sign is printed."""
    file = tmp_path / "found.json"
    words = ["--requests", "5", "--runs", "1000", "--jobs", jobs, "--json", str(file)]
    running = subprocess.Popen(
        [sys.executable, "-m", "impl.soak", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    for told in running.stdout:
        if sign in told:
            break
    time.sleep(0.3)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 3 and not err, err
    assert "stopped: what was found so far is kept" in out and "undetermined: stopped" in out
    return out, json.loads(file.read_text())


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_stop_keeps_what_was_found(jobs: str, tmp_path: Path) -> None:
    _, found = interrupted(tmp_path, jobs, " of 10000 runs")
    row = found["rows"][0]
    assert row["served"] > 0 and row["differing"] == 0 and not row["complete"]


def test_a_stop_while_processes_start_is_a_stop(tmp_path: Path) -> None:
    out, found = interrupted(tmp_path, "2", "acceptance")
    assert not any(row["error"] for row in found["rows"]) and "Traceback" not in out
