"""The same with real streams, gates and captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest

try:
    import torch

    from impl import inject, lanes, refine
    from impl.cuda import CACHING, CudaDevice
    from impl.lanes import CudaLanes, Lane, Stuck
    from impl.streams import Place
    from impl.world import BYTES, FORWARD_OVERLAPS_TRANSFER
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "triton"):
        raise
    pytest.skip(f"refinement left out: {missing.name} is not installed", allow_module_level=True)

from spec import config as configs
from spec.walk import COMPOSED
from tests.test_refine import KERNEL_FAULTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs need a CUDA device"),
    pytest.mark.skipif(not CACHING, reason="gates need the caching allocator"),
]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield Place(cuda=True)


def build(place: Place) -> refine.Build:
    return refine.implementation(kernels="triton", device_type=place.devices())


def test_a_held_stream_runs_nothing_until_its_gate_opens(place: Place) -> None:
    lanes = place.lanes
    assert isinstance(lanes, CudaLanes)
    lanes.begin()
    value = torch.zeros(4, dtype=torch.int32, device="cuda")
    held = lanes.launch((0, "main"), lambda: value.fill_(3), (), gated=True)
    lanes.launch((0, "store"), lambda: None, (), gated=False)
    for _ in range(1000):
        marks = list(lanes.marks())
        if marks:
            break
    lanes.stream((0, "store")).synchronize()
    assert [mark.number for mark in [*marks, *lanes.marks()]] == [1, 1] and value.tolist() == [0, 0, 0, 0]
    lanes.open(held)
    lanes.settle()
    assert value.tolist() == [3, 3, 3, 3] and [mark.number for mark in lanes.marks()] == [0, 0]


def test_a_device_that_stands_still_is_told_of(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(place.lanes, CudaLanes)
    place.lanes.begin()
    place.lanes.launch((0, "main"), lambda: None, (), gated=True)
    monkeypatch.setattr(lanes, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(Stuck, match="has not come to rest"):
        place.lanes.settle()
    place.lanes.settle()  # the gate is open now


def test_a_device_that_does_not_wait_is_found_out() -> None:
    """Transfers wait for nothing, while the main streams are slow."""

    class Hasty(CudaLanes):
        def launch(self, lane: Lane, work: Callable[[], None], after: Sequence[int], *, gated: bool) -> int:
            def slowly() -> None:
                self.kernels.linger(self.gates, 1000)
                work()

            main = lane[1] == "main"
            return super().launch(lane, slowly if main else work, after if main else (), gated=gated)

    place, found = Place(cuda=True), []
    place.lanes = Hasty(Random(0))
    for name in ("plain-offload", "composed"):
        run = refine.refine_once(configs.named(name), build(place), 0, 0, 200, make=place.free)
        found += [text for _, text in [refine.failure(run) or ("", "")] if text]
    assert any("has run on the device before" in text for text in found), found


@pytest.mark.parametrize("name", COMPOSED)
def test_gated_makes_the_same_run_as_the_cpu(place: Place, name: str) -> None:
    config = configs.named(name)
    turns = refine.refine_once(config, refine.implementation(), 3, 0, 150)
    gated = refine.refine_once(config, build(place), 3, 0, 150, make=place.gated)
    assert refine.failure(gated) is None and gated.choices == turns.choices
    assert gated.world.bytes_compared == turns.world.bytes_compared > 0
    devices = gated.world.engine.devices
    assert all(isinstance(device, CudaDevice) and device.graphs for device in devices)


@pytest.mark.parametrize("name", COMPOSED)
def test_a_free_run_holds_and_its_order_replays_gated(place: Place, name: str) -> None:
    config = configs.named(name)
    free = refine.refine_once(config, build(place), 4, 0, 150, make=place.free)
    assert refine.failure(free) is None
    again = refine.replay(config, build(place), free.choices, make=place.gated)
    assert refine.failure(again) is None and again.choices == [*free.choices, ("quiet",)]


def test_forwards_overlap_transfers(place: Place) -> None:
    for make in (place.gated, place.free):
        reached = 0
        for number in range(6):
            run = refine.refine_once(configs.named("composed"), build(place), 0, number, 200, make=make)
            reached += run.world.witnesses[FORWARD_OVERLAPS_TRANSFER]
        assert reached


def test_a_flipped_bit_is_found_by_the_compare_kernel(place: Place) -> None:
    world = place.gated(configs.named("plain"), build(place))
    for choice in (("arrive", "r1", "0", 5, 3), ("schedule",), ("work",)):
        assert world.take(choice)
    world.wait_opened()
    memory = world.engine.devices[0].memory
    memory.kv[0][int(memory.source[0][0, 0]), 1, 0] ^= 1 << 20
    torch.cuda.current_stream().synchronize()
    world.come_to_rest()
    world.finish()
    assert world.verdict is not None and world.verdict.rule == BYTES and "position 1 " in world.verdict.text


@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_bytes_alone_catch_the_faults_of_kernels_and_connector(place: Place, name: str) -> None:
    fault, device_type = inject.injectable()[name], place.devices(inject.Swapped)
    options = {"runs": 40, "choices": 200, "seed": 0, "kernels": "triton"}
    found = inject.catch(fault, **options, bytes_alone=True, make=place.gated, device_type=device_type)
    assert found is not None
    repaired = inject.repaired(fault, "triton", device_type)
    run = refine.refine_once(
        configs.named(found.config), repaired, 0, max(found.run, 0), 200, make=place.gated
    )
    assert refine.failure(run) is None
