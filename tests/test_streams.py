"""Operations on lanes of their own, gated and free: emulated on the CPU, and what the commands say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

try:
    import torch

    from impl import inject, refine, streams
    from impl.lanes import HostLanes, Stuck
    from impl.streams import Place
    from impl.world import BYTES, FORWARD_OVERLAPS_TRANSFER, Words
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "triton"):
        raise
    pytest.skip(f"refinement left out: {missing.name} is not installed", allow_module_level=True)

from spec import config as configs
from spec.walk import COMPOSED

torch.set_num_threads(1)


# -- lanes -------------------------------------------------------------------------------------------------


def test_a_closed_gate_holds_what_is_behind_it() -> None:
    lanes, seen = HostLanes(Random(0)), []
    first = lanes.launch((0, "main"), lambda: seen.append("first"), (), gated=True)
    lanes.launch((0, "main"), lambda: seen.append("second"), (), gated=False)
    lanes.launch((0, "store"), lambda: seen.append("other"), (), gated=False)
    lanes.settle()
    assert seen == ["other"]
    lanes.open(first)
    lanes.settle()
    assert seen == ["other", "first", "second"]
    assert [(mark.number, mark.ended) for mark in lanes.marks()] == [
        (2, False), (2, True), (0, False), (0, True), (1, False), (1, True),
    ]  # fmt: skip


def test_what_waits_for_others_runs_after_them_whatever_is_drawn() -> None:
    for seed in range(20):
        lanes, seen = HostLanes(Random(seed)), []
        one = lanes.launch((0, "main"), lambda seen=seen: seen.append(1), (), gated=False)
        lanes.launch((0, "store"), lambda seen=seen: seen.append(2), (one,), gated=False)
        lanes.launch((1, "main"), lambda seen=seen: seen.append(3), (), gated=False)
        lanes.settle()
        assert seen.index(1) < seen.index(2) and len(seen) == 3


def test_a_watched_difference_is_told_with_its_place() -> None:
    lanes = HostLanes()
    read = torch.tensor([7, 8, 9, 10], dtype=torch.int32)
    lanes.watch(
        (0, "main"),
        read,
        [Words(1, [8, 9], lambda n: f"near {n}"), Words([3, 0], [10, 6], lambda n: f"far {n}")],
    )
    assert list(lanes.collect()) == ["far 1: holds 0x00000007, should hold 0x00000006"]
    assert list(lanes.collect()) == []


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSED)
def test_gated_makes_the_same_run_as_turns(name: str) -> None:
    """The same choices give the same events and compare the same words: only where they run differs."""
    config, place = configs.named(name), Place(cuda=False)
    turns = refine.refine_once(config, refine.implementation(), 3, 0, 150)
    gated = refine.refine_once(config, refine.implementation(), 3, 0, 150, make=place.gated)
    assert refine.failure(gated) is None and gated.choices == turns.choices
    assert gated.world.bytes_compared == turns.world.bytes_compared > 0
    assert gated.world.count == turns.world.count


@pytest.mark.parametrize("name", COMPOSED)
def test_a_free_run_leaves_choices_that_replay_gated(name: str) -> None:
    config = configs.named(name)
    for seed in range(2):
        place = Place(cuda=False, seed=seed)
        free = refine.refine_once(config, refine.implementation(), seed, 0, 120, make=place.free)
        assert refine.failure(free) is None and free.world.bytes_compared
        assert not any(choice[0] in ("work", "drain") for choice in free.choices)
        again = refine.replay(config, refine.implementation(), free.choices, make=place.gated)
        assert refine.failure(again) is None
        assert again.choices == [*free.choices, ("quiet",)]


def test_a_forward_overlaps_a_transfer_in_both_orders() -> None:
    place, reached = Place(cuda=False), {"gated": 0, "free": 0}
    for number in range(6):
        for order, make in (("gated", place.gated), ("free", place.free)):
            run = refine.refine_once(
                configs.named("composed"), refine.implementation(), 0, number, 200, make=make
            )
            reached[order] += run.world.witnesses[FORWARD_OVERLAPS_TRANSFER]
    assert min(reached.values()) > 0, reached


def test_every_shipped_configuration_runs_free() -> None:
    place = Place(cuda=False, seed=5)
    for name in configs.shipped():
        run = refine.refine_once(configs.named(name), refine.implementation(), 5, 0, 60, make=place.free)
        assert refine.failure(run) is None, name


# -- sensitivity -------------------------------------------------------------------------------------------

FAULTS = [
    "precopy-row-by-batch-index", "row-by-batch-index", "rotating-table-pool", "padding-is-the-last-slot",
    "late-row-not-masked", "store-does-not-wait", "flush-after-zeroing", "counts-into-mutable-rows",
]  # fmt: skip


@pytest.mark.parametrize("order", ["gated", "free"])
@pytest.mark.parametrize("name", FAULTS)
def test_bytes_alone_catch_faults_on_lanes_and_not_their_repair(name: str, order: str) -> None:
    fault, place = inject.injectable()[name], Place(cuda=False, seed=1)
    make = place.gated if order == "gated" else place.free

    def outcome(build: refine.Build, number: int, name: str) -> tuple[str, str] | None:
        run = refine.refine_once(
            configs.named(name), build, 0, number, 200, judged=False, off=inject.SILENT, make=make
        )
        return refine.failure(run)

    cases = [(number, name) for number in range(40) for name in fault.bites]
    found = next((case for case in cases if outcome(inject.faulty(fault), *case)), None)
    assert found is not None
    assert outcome(inject.repaired(fault), *found) is None


def test_a_flipped_bit_is_found_when_everything_has_come_to_rest() -> None:
    world = Place(cuda=False).gated(configs.named("plain"), refine.implementation())
    for choice in (("arrive", "r1", "0", 5, 3), ("schedule",), ("work",)):
        assert world.take(choice)
    memory = world.engine.devices[0].memory
    memory.kv[0][int(memory.source[0][0, 0]), 1, 0] ^= 1 << 20
    world.come_to_rest()
    world.finish()
    assert world.verdict is not None and world.verdict.rule == BYTES and "position 1 " in world.verdict.text


def test_a_device_that_does_not_wait_is_found_out() -> None:
    """Lanes on which transfers wait for nothing run some before the ghost may."""

    class Hasty(HostLanes):
        def launch(
            self, lane: tuple[int, str], work: Callable[[], None], after: Sequence[int], *, gated: bool
        ) -> int:
            return super().launch(lane, work, after if lane[1] == "main" else (), gated=gated)

    place, found = Place(cuda=False), []
    for number in range(6):
        place.lanes = Hasty(Random(number))
        for name in ("plain-offload", "composed"):
            run = refine.refine_once(
                configs.named(name), refine.implementation(), 0, number, 200, make=place.free
            )
            found += [text for _, text in [refine.failure(run) or ("", "")] if text]
    assert any("has run on the device before" in text for text in found), found


def test_a_device_that_stands_still_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asleep(HostLanes):
        def open(self, number: int) -> None:
            self.gates[number] = False

    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.01)
    place = Place(cuda=False)
    place.lanes = Asleep(Random(0))
    world = place.gated(configs.named("plain"), refine.implementation())
    assert world.take(("arrive", "r1", "0", 5, 3)) and world.take(("schedule",))
    with pytest.raises(Stuck, match=r"operation 0 \(\w+\) is not over within"):
        world.take(("work",))


# -- the command -------------------------------------------------------------------------------------------


def test_a_free_run_is_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, report = tmp_path / "free.jsonl", tmp_path / "report.json"
    words = ["--config", "hybrid-pp2", "--order", "free", "--runs", "2", "--choices", "40"]
    assert refine.main([*words, "--record", str(trace), "--json", str(report)]) == 0
    assert "2 of 2 runs replayed gated: the same choices, and they hold" in capsys.readouterr().out
    made = json.loads(report.read_text())
    assert made["replayed"] == 2 and made["order"] == "free" and made["witnesses"]
    for order in ("turns", "gated"):
        assert refine.main(["--order", order, "--replay", str(trace)]) == 0
        assert "verdict: holds (sampled: 1 runs)" in capsys.readouterr().out


def test_a_replay_that_cannot_make_its_choices_is_a_failure() -> None:
    place = Place(cuda=False)
    run = refine.refine_once(configs.named("plain"), refine.implementation(), 0, 0, 40, make=place.free)
    spoiled = replace(run, choices=[("run", 0, "store", 1), *run.choices])
    report = refine.Report()
    refine.repeat(spoiled, refine.implementation(), report, place.gated)
    assert report.failed is not None and not report.replayed
    assert "was possible when it ran free only" in (refine.failure(report.failed) or ("", ""))[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--order", "sideways"], "--order must be turns, gated or free, got 'sideways'"),
        (["--replay", "no-such-file"], "no-such-file: cannot be read"),
        (["--record", "no/such/folder/x"], "--record"),
    ],
)
def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert refine.main(words) == 2
    streams = capsys.readouterr()
    assert said in streams.err and streams.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("module", [refine, inject])
def test_no_cuda_device_is_one_line(capsys: pytest.CaptureFixture[str], module: Any) -> None:
    assert module.main(["--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err
