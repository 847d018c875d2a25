"""The implementation on real bytes: the model's closed form, memory, runs that hold, and faults that are
caught."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

try:
    import torch

    from impl import inject, refine
    from impl.decisions import MODEL_ONLY, Decisions
    from impl.device import Device, Kernels, Transfer, kernels_named
    from impl.kernels.layout import Layout
    from impl.memory import POISON, Memory, page_bytes
    from impl.model import CELL_WORDS, INNER, LANES, MASK, TAPS, Truth, embed, layers_of, mix, signed
    from impl.scheduler.cache import CacheManager
    from impl.scheduler.output import ScheduledRow, SchedulerOutput
    from impl.scheduler.pool import BlockPool
    from impl.scheduler.request import Request
    from impl.scheduler.scheduler import Scheduler
    from impl.scheduler.tier import ABSENT, READY, WRITING, HostTier
    from impl.streams import Place
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "triton"):
        raise
    pytest.skip(f"refinement left out: {missing.name} is not installed", allow_module_level=True)

from spec import config as configs
from spec.chains import EMPTY, Chains
from spec.config import Config, Group, Kind
from spec.faults import CATALOGUE, Fault
from spec.faults.fault import DECISION
from spec.faults.tamper import editing, enqueuing
from spec.ops import HostCounts, HostRows, PreProcess
from spec.policy import Arrival
from spec.reference import Decisions as ReferenceDecisions
from spec.reference import Reference
from spec.walk import COMPOSED, walk_once
from spec.world import World

ROOT = Path(__file__).parents[1]
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the model ---------------------------------------------------------------------------------------------


def plainly(config: Config, tokens: list[int]) -> list[list[dict[str, Any]]]:
    """Every layer of every stage over one token sequence, by the definition: sums over all that is
    attended."""
    result = []
    xs = [embed(token, i) for i, token in enumerate(tokens)]
    for stage in range(config.pp):
        layers: list[dict[str, Any]] = []
        for layer in layers_of(config, stage):
            outs, cells, states, inputs = [], [], [], []
            state = [0] * LANES
            for i, x in enumerate(xs):
                if layer.group.kind is Kind.MAMBA:
                    inputs.append([(x * f + s) & MASK for f, s in layer.inputs])
                    for lane in range(LANES):
                        seen = sum(
                            layer.taps[lane][k][d] * inputs[i - k][d]
                            for k in range(TAPS)
                            for d in range(INNER)
                            if i >= k
                        )
                        state[lane] = (layer.decay[lane] * state[lane] + seen) & MASK
                    states.append(list(state))
                    hashed = sum(o * s for o, s in zip(layer.out, state, strict=True))
                else:
                    cells.append([(x * f + s) & MASK for f, s in layer.cell])
                    first = 0
                    if layer.group.kind is Kind.WINDOW:
                        first = max(0, i - layer.group.window_tokens + 1)
                    elif layer.group.kind is Kind.CHUNKED:
                        first = i // layer.group.window_tokens * layer.group.window_tokens
                    hashed = sum(
                        pow(layer.step, i - j, 1 << 32)
                        * sum(w * c for w, c in zip(layer.word, cells[j], strict=True))
                        for j in range(first, i + 1)
                    )
                outs.append(mix((x * layer.through + hashed) & MASK))
            layers.append({"cells": cells, "states": states, "inputs": inputs})
            xs = outs
        layers.append({"out": xs})
        result.append(layers)
    return result


@pytest.mark.parametrize("name", ["composed", "chunked-local", "hybrid-pp4-async"])
def test_the_closed_form_is_the_model_by_definition(name: str) -> None:
    config, chains = configs.named(name), Chains()
    tokens = [(7 * i * i + 3) % 23 - 5 for i in range(21)]
    line = [EMPTY]
    for token in tokens:
        line.append(chains.fold(line[-1], token))
    truth, want = Truth(config, chains), plainly(config, tokens)
    for stage in range(config.pp):
        for g, group in enumerate(config.groups):
            for n in range(1, len(tokens) + 1):
                kept, layer = truth.kept(stage, g, line[n]), want[stage][g]
                if group.kind is Kind.MAMBA:
                    assert kept.state == tuple(map(signed, layer["states"][n - 1]))
                    past = [layer["inputs"][m] if m >= 0 else [0] * INNER for m in range(n - TAPS + 1, n)]
                    assert truth.window(stage, g, line[n]) == [tuple(map(signed, one)) for one in past]
                else:
                    assert kept.cell == tuple(map(signed, layer["cells"][n - 1]))
        out = [signed(word) for word in want[stage][-1]["out"]]
        assert [truth.output(stage, prefix) for prefix in line[1:]] == out


def test_any_word_of_any_attended_position_changes_the_output() -> None:
    """A hash that forgot a position, or did not see the order, would let corruption pass."""
    config, chains = configs.named("plain"), Chains()
    base = plainly(config, list(range(8)))[0][-1]["out"][-1]
    swapped = plainly(config, [0, 1, 2, 4, 3, 5, 6, 7])[0][-1]["out"][-1]
    changed = {plainly(config, [*range(i), 99, *range(i + 1, 8)])[0][-1]["out"][-1] for i in range(8)}
    assert len(changed | {base, swapped}) == 10
    assert chains.length(EMPTY) == 0


# -- memory ------------------------------------------------------------------------------------------------


def test_all_groups_view_one_page_buffer() -> None:
    config = configs.named("composed")
    memory = Memory(config, 0, torch.device("cpu"))
    size = page_bytes(config)
    assert (
        4 * memory.stride_words > size >= max(view.shape[1] * CELL_WORDS * 4 for view in memory.kv.values())
    )
    memory.words[5] = torch.arange(memory.stride_words, dtype=torch.int32)
    for kv in memory.kv.values():
        assert kv[5].reshape(-1).tolist() == list(range(kv.shape[1] * CELL_WORDS))
    states = memory.states[2]
    assert states.window[5, 0].tolist() == [0, 1] and states.window[5, 1].tolist() == [2, 3]
    behind = states.window[5].numel()
    assert states.temporal[5].tolist() == list(range(behind, behind + LANES))
    assert not memory.words[[4, 6]].any()


def test_stages_keep_windows_in_both_layouts() -> None:
    config = configs.named("composed")
    layouts = [Memory(config, stage, torch.device("cpu")).states[2].views[0].layout for stage in (0, 1)]
    assert layouts == [Layout.CONV_TOKEN_FIRST, Layout.CONV_CHANNEL_FIRST]
    memory = Memory(config, 1, torch.device("cpu"))
    memory.states[2].window[3, 1, 0] = 7  # token 1, word 0: behind word 0 of every token before it
    assert memory.words[3, 1] == 7


class NoFeed:
    """Nothing reaches these devices from outside."""

    def tokens(self, step: int) -> list[list[int]]:
        raise AssertionError

    def results(self, step: int) -> list[tuple[int, int]]:
        raise AssertionError


def test_a_transfer_is_torn_between_its_halves() -> None:
    config = configs.named("plain-offload")
    device = Device(config, 0, kernels_named("torch"), NoFeed(), {})
    memory = device.memory
    memory.words[4] = 0x11111111
    device.transfers[1] = Transfer(1, "store", ((4, 2, 0),))
    device.copy_half(1, 0)
    memory.words[4] = 0x22222222
    device.copy_half(1, 1)
    copied = memory.chunks[2, 0].tolist()
    assert set(copied[: memory.half_bytes]) == {0x11} and set(copied[memory.half_bytes :]) == {0x22}


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_store_and_a_load_bring_the_page_back(kernels: str) -> None:
    config = configs.named("composed")
    device = Device(config, 0, kernels_named(kernels), NoFeed(), {})
    memory = device.memory
    memory.words.random_(-1000, 1000)
    before = memory.pages.clone()
    device.transfers[1] = Transfer(1, "store", ((4, 2, 1), (9, 3, 0)))
    device.transfers[2] = Transfer(2, "load", ((5, 2, 1), (4, 3, 0)))
    for job, half in ((1, 0), (1, 1), (2, 0), (2, 1)):
        device.copy_half(job, half)
    assert torch.equal(memory.pages[5], before[4]) and torch.equal(memory.pages[4], before[9])
    untouched = [b for b in range(config.pool_blocks) if b not in (4, 5)]
    assert torch.equal(memory.pages[untouched], before[untouched])


def test_poison_fills_whole_pages_and_no_others() -> None:
    memory = Memory(configs.named("plain"), 0, torch.device("cpu"))
    memory.poison([2])
    assert (memory.words[2] == POISON).all() and not memory.words[[0, 1, 3]].any()


def test_debug_mode_poisons_what_holds_nothing_and_only_that() -> None:
    """The drafter's lookahead block is handed out, and no layer has written it yet."""
    config = configs.named("plain-drafts")
    worlds = [refine.RealWorld(config, refine.implementation(poison=poison)) for poison in (False, True)]
    for world in worlds:
        for choice in (("arrive", "r1", "0", 4, 3), ("schedule",), ("work",)):
            assert world.choose(choice)
    clean, poisoned = (world.engine.devices[0].memory.words for world in worlds)
    changed = (clean != poisoned).any(1).nonzero().reshape(-1).tolist()
    block = int(worlds[1].engine.devices[0].memory.source[0][0, 4 // config.groups[0].block_tokens])
    assert changed and (poisoned[block][: 2 * CELL_WORDS] == POISON).all()
    assert not any(world.verdict for world in worlds)


def test_transfers_on_real_threads() -> None:
    """One smoke test without the deterministic executor: stores and loads on threads of their own,
    forwards beside."""
    config = configs.named("plain-offload")
    device = Device(config, 0, kernels_named("torch"), NoFeed(), {})
    memory = device.memory
    memory.words.random_(-1000, 1000)
    before = memory.pages.clone()
    device.transfers = {j: Transfer(j, "store", ((j, j - 1, 0),)) for j in range(1, 6)}
    errors: list[BaseException] = []

    def copy(job: int) -> None:
        try:
            device.copy_half(job, 0)
            device.copy_half(job, 1)
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            errors.append(error)

    threads = [threading.Thread(target=copy, args=(job,)) for job in device.transfers]
    for thread in threads:
        thread.start()
    for block in range(8, config.pool_blocks):
        memory.poison([block])
    for thread in threads:
        thread.join(timeout=20)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert all(torch.equal(memory.chunks[j - 1, 0], before[j]) for j in device.transfers)


# -- the scheduler's structures ----------------------------------------------------------------------------


def test_the_pool_reuses_blocks_without_a_key_first() -> None:
    log: list[Any] = []
    pool = BlockPool(5, log.append)
    one, two = (pool.allocate(("r1", 1), 0, col) for col in (0, 1))
    pool.publish(one, ("r1", 1), (0, 4, 7))
    pool.release(one, ("r1", 1), 0, 0)
    pool.release(two, ("r1", 1), 0, 1)
    assert pool.free.ids() == [2, 3, 4, 1] and pool.cached((0, 4, 7)) is one
    pool.adopt(one, ("r2", 1), 0, 0)
    assert pool.free.ids() == [2, 3, 4]
    pool.release(one, ("r2", 1), 0, 0)
    for _ in range(4):
        pool.allocate(("r3", 1), 0, 0)
    assert pool.cached((0, 4, 7)) is None and ("evict", 1) in log
    with pytest.raises(IndexError):
        pool.allocate(("r3", 1), 0, 9)


def test_blocks_come_back_when_all_their_holders_leave() -> None:
    cache = CacheManager(configs.named("plain"), Decisions(), lambda event: None)
    one, two = (Request.new((name, 1), (1, 2), [0, 1, 2], 1, 1) for name in ("r1", "r2"))
    for col in (0, 1):
        one.put(0, col, cache.pool.allocate(one.uid, 0, col))
    shared = one.block(0, 0)
    assert shared is not None
    cache.pool.adopt(shared, two.uid, 0, 0)
    two.put(0, 0, shared)
    two.retained.append((1, 0, cache.pool.allocate(two.uid, 0, -1)))
    assert [cache.returning_blocks(who) for who in ([], [one], [two], [one, two])] == [0, 1, 1, 3]


def test_the_tier_evicts_the_oldest_chunk_that_nobody_reads_or_needs() -> None:
    log: list[Any] = []
    tier = HostTier(2, Decisions(), log.append)
    a, b, c = (0, 4, 1), (0, 4, 2), (0, 4, 3)
    assert tier.prepare_store([a, b]) == {a: 0, b: 1} and tier.state(a) == WRITING
    assert tier.prepare_store([c]) is None  # nothing is ready yet
    with pytest.raises(KeyError):
        tier.prepare_load(a)
    tier.complete_store(a, True)
    tier.complete_store(b, True)
    place = tier.prepare_load(a)  # and used last
    assert tier.prepare_store([b, c]) is None  # a is read, b is wanted itself
    assert tier.prepare_store([c]) == {c: 1} and tier.state(b) == ABSENT
    tier.complete_load(a, place)
    tier.complete_store(c, False)
    assert (tier.state(a), tier.state(c), tier.places) == (READY, ABSENT, [1])


def test_a_chunk_that_was_loaded_is_the_last_to_be_evicted() -> None:
    tier = HostTier(2, Decisions(), [].append)
    a, b, c = (0, 4, 1), (0, 4, 2), (0, 4, 3)
    tier.prepare_store([a, b])
    tier.complete_store(a, True)
    tier.complete_store(b, True)
    tier.complete_load(a, tier.prepare_load(a))
    assert tier.prepare_store([c]) == {c: 1}
    assert (tier.state(a), tier.state(b)) == (READY, ABSENT)


def test_the_store_keeps_windows_by_the_chunks_of_full_groups_alone() -> None:
    """Full blocks of 16 and a window of 3 tokens in blocks of 4: the end of every 16 tokens is kept, whatever
    the blocks of another window; counted by that one's too, it would be the end of every 32."""
    config = Config(
        "two windows",
        (
            Group("full", Kind.FULL, 16),
            Group("near", Kind.WINDOW, 4, window_tokens=3),
            Group("far", Kind.WINDOW, 32, window_tokens=20),
        ),
        hash_block_tokens=4,
        offload=True,
        pool_blocks=80,
        tier_chunks=60,
        slots=1,
        step_tokens=80,
        request_tokens=80,
    )
    for world in (World(config, Reference), refine.RealWorld(config, refine.implementation())):
        assert world.choose(("arrive", "r1", "0", 70, 2)) and world.quiet()
        ends = sorted(tokens for group, tokens, _ in world.book.tier if group == 1)
        assert ends == [16, 32, 48, 64, 68]  # and the last full block, where the prompt ends


def test_the_tail_of_a_resumed_request_is_its_prompts() -> None:
    """As in 0.33.0: in 5 prompt tokens the last boundary of hash blocks of 2 is 4, also when 9 are known."""
    config = replace(configs.named("partial-tails"), drafts=0, draft_modules=0)
    chains = Chains()
    scheduler, reference = Scheduler(config, chains, Decisions()), Reference(config, chains)
    uid, tokens = ("r1", 1), (1, 2, 3, 4, 5)
    for policy in (scheduler, reference):
        policy.on_arrive(Arrival(uid, tokens, 9))
    mine, theirs = scheduler.requests[uid], reference.book.requests[uid]
    for _ in range(2):
        assert scheduler.cache.tail_position(mine) == reference.tail_position(theirs) == 4
        for token in (7, 7, 7, 7):  # what outputs bring
            mine.tokens.append(token)
            theirs.tokens.append(token)
        assert mine.known == theirs.known > 8


def test_a_new_v1_row_starts_from_one_where_the_swaps_have_put_it() -> None:
    config = configs.named("v1-async")
    build = refine.implementation()
    worker = refine.RealWorld(config, build).engine.workers[0]
    old, new = ("r1", 1), ("r2", 1)
    table = tuple((1,) for _ in config.groups)
    worker.program(SchedulerOutput(1, fresh=[(old, 0, table)], rows=[ScheduledRow(old, 0, 0, 4, False)]))
    worker.program(SchedulerOutput(2))
    worker.program(SchedulerOutput(3))  # the last step computed nothing
    rows = [ScheduledRow(old, 4, 4, 2, True), ScheduledRow(new, 0, 0, 1, False)]
    program = worker.program(SchedulerOutput(4, fresh=[(new, 0, table)], rows=rows))
    assert worker.slot == {new: 0, old: 1}
    assert [op.fresh for _, op in program if isinstance(op, HostRows)] == [(0,)]
    assert [op.previous for _, op in program if isinstance(op, HostCounts)] == [((0, -1),)]


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(configs.shipped()))
def test_every_shipped_configuration_refines(name: str) -> None:
    run = refine.refine_once(configs.named(name), refine.implementation(poison=True), 7, 0, 120)
    assert refine.failure(run) is None
    assert run.world.bytes_compared > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_configurations_refine(name: str) -> None:
    report = refine.refine([configs.named(name)], refine.implementation(), runs=4, choices=200, seed=11)
    assert report.failed is None and report.classes["schedule", "same"] > 100
    assert not any(kind == "wrong" for _, kind in report.classes)


@pytest.mark.slow
def test_twenty_runs_with_interpreted_kernels() -> None:
    names = ("composed", "composed-v1", "hybrid-pp2-async", "partial-tails", "window-offload")
    report = refine.refine(
        [configs.named(name) for name in names],
        refine.implementation(kernels="triton"),
        runs=4,
        choices=50,
        seed=3,
    )
    assert report.failed is None and report.runs == 20


def served(
    config: Config, choices: list[tuple[Any, ...]]
) -> tuple[refine.RealWorld, dict[str, dict[int, int]]]:
    """The world after these choices, and every request's real outputs by position."""
    world = refine.RealWorld(config, refine.implementation(poison=True))
    for choice in choices:
        assert world.choose(choice), choice
    assert world.verdict is None and not refine.refusals(world)
    return world, {f"{uid[0]}.{uid[1]}": words for uid, words in world.outputs.items()}


def crossing(drafts: int, pp: int, asynchronous: bool, runner: str = "v2") -> Config:
    """Full attention, a window and recurrent states, with offload."""
    config = replace(
        configs.named("composed"),
        name="x", drafts=drafts, draft_modules=min(drafts, 2), pp=pp, async_scheduling=asynchronous,
        runner=runner, blocks_per_chunk=1, pool_blocks=90, tier_chunks=40, request_tokens=32, step_tokens=12,
    )  # fmt: skip
    blocks = {Kind.FULL: 2, Kind.WINDOW: 4, Kind.MAMBA: 8}
    groups = tuple(
        replace(
            group,
            block_tokens=blocks[group.kind],
            extra_tokens=config.reprefilled_tokens if group.kind is Kind.WINDOW else 0,
        )
        for group in config.groups
    )
    return configs.check(replace(config, groups=groups))


SERVINGS = [
    (drafts, pp, asynchronous, runner)
    for drafts in range(5)
    for pp in (1, 2, 3, 4)
    for asynchronous in (False, True)
    for runner in ("v2", "v1")
    if not (runner == "v1" and asynchronous and pp > 1)
]


@pytest.mark.parametrize(("drafts", "pp", "asynchronous", "runner"), SERVINGS)
def test_cold_warm_restored_and_follow_up_runs_give_the_same_bytes(
    drafts: int, pp: int, asynchronous: bool, runner: str
) -> None:
    config = crossing(drafts, pp, asynchronous, runner)
    ask = ("arrive", "r1", "0", 17, 6)
    again = ("arrive", "r2", "0", 17, 6)
    _, cold = served(config, [ask, ("quiet",)])
    wrong, rejected = served(config, [ask, ("accept", "r1", 0), ("quiet",)])
    local, rehit = served(config, [ask, ("quiet",), again, ("quiet",)])
    external, restored = served(config, [ask, ("quiet",), ("reset", "local"), again, ("quiet",)])
    follow, turn = served(config, [ask, ("quiet",), ("arrive", "r2", "r1", 3, 4), ("quiet",)])
    assert external.witnesses["external_hit"] and not local.witnesses["external_hit"]
    assert min(rehit["r2.1"]) == min(restored["r2.1"]) >= 8  # what was not computed again was found
    verified = range(17 + 6 - 1)
    assert all(rejected["r1.1"][n] == cold["r1.1"][n] for n in verified)
    for other in (rehit["r2.1"], restored["r2.1"], turn["r2.1"]):
        assert all(other[n] == cold["r1.1"][n] for n in verified if n in other)
    assert min(turn["r2.1"]) >= 16 and max(turn["r2.1"]) >= 17 + 6 + 3
    assert wrong.bytes_compared and follow.bytes_compared


@pytest.mark.parametrize("name", ["composed-tight", "composed", "composed-v1"])
def test_outputs_survive_preemption_aborts_and_a_same_id_request(name: str) -> None:
    config = configs.named(name)
    lone = {}
    for client, family in (("r1", "0"), ("r2", "1"), ("r3", "2")):
        _, lone[client] = served(config, [("arrive", client, family, 9, 8), ("quiet",)])
    busy = [
        ("arrive", "r1", "0", 9, 8), ("schedule",), ("work",), ("arrive", "r2", "1", 9, 8), ("schedule",),
        ("work",), ("abort", "r1"), ("arrive", "r1", "0", 9, 8), ("arrive", "r3", "2", 9, 8), ("schedule",),
        ("work",), ("accept", "r2", 0), ("quiet",),
    ]  # fmt: skip
    world, words = served(config, busy)
    if name == "composed-tight":
        assert world.witnesses["preempted"]
    for client, life in (("r1", 2), ("r2", 1), ("r3", 1)):
        mine, alone = words[f"{client}.{life}"], lone[client][f"{client}.1"]
        assert mine and all(mine[n] == alone[n] for n in range(9 + 8 - 1) if n in mine)


@pytest.mark.parametrize(("pool_blocks", "number"), [(14, 44), (16, 88)])
def test_a_private_copy_does_not_evict_another_groups_tail(pool_blocks: int, number: int) -> None:
    """Found by refinement, in the reference as well: the block for one group's copy was another's cached
    tail."""
    config = replace(configs.named("partial-tails"), pool_blocks=pool_blocks)
    run = refine.refine_once(config, refine.implementation(), 0, number, 200)
    assert refine.failure(run) is None
    world = walk_once(config, Reference, 0, number, 200).world
    assert not world.verdict and not world.disciplines


# -- sensitivity -------------------------------------------------------------------------------------------

KERNEL_FAULTS = [
    "precopy-row-by-batch-index", "row-by-batch-index", "table-bound-at-capture",
    "context-bound-by-profiling", "context-bound-by-capture", "rotating-table-pool",
    "captured-tables-never-refreshed", "state-indices-through-slots", "padding-is-the-last-slot",
    "padded-rows-not-cleared", "late-row-not-masked", "post-process-after-forward",
    "stages-on-optimistic-counts", "new-ids-from-position-zero", "seed-divides-by-smallest-block",
    "counts-into-mutable-rows", "no-reset-for-a-new-life", "flush-after-zeroing", "store-does-not-wait",
    "failed-load-is-served", "last-token-stored",
]  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_bytes_alone_catch_the_faults_of_kernels_and_connector(name: str) -> None:
    fault = inject.injectable()[name]
    assert inject.catch(fault, runs=40, choices=200, seed=0, bytes_alone=True) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", list(inject.injectable()))
def test_every_fault_is_caught_and_its_repair_is_not(name: str) -> None:
    fault = inject.injectable()[name]
    found = inject.catch(fault, runs=60, choices=200, seed=0)
    assert found is not None and not found.twin
    config, number = configs.named(found.config), max(found.run, 0)
    make = inject.followed(fault, refine.RealWorld)
    run = refine.refine_once(config, inject.repaired(fault), 0, number, 200, make=make)
    assert refine.failure(run) is None


def test_the_implementation_has_every_decision_of_the_reference() -> None:
    mine, reference = ({one.name: one for one in fields(table)} for table in (Decisions, ReferenceDecisions))
    assert set(mine) | MODEL_ONLY == set(reference) and not MODEL_ONLY & set(mine)
    decided = {name for name, fault in CATALOGUE.items() if fault.change or fault.tamper}
    decided -= {name for name in decided if MODEL_ONLY & set(CATALOGUE[name].change)}
    assert decided - set(inject.injectable()) == {"drop-ignored-by-states"}  # which is no fault


def test_every_decision_is_asked() -> None:
    """In some run; ``boundary_block`` only by a design that stores states by column."""
    asked: set[str] = {"boundary_block"}

    def noting(name: str, decide: Any) -> Any:
        def noted(*given: Any) -> Any:
            asked.add(name)
            return decide(*given)

        return noted

    plain = {one.name: getattr(Decisions(), one.name) for one in fields(Decisions)}
    calls = {name: decide for name, decide in plain.items() if callable(decide)}
    build = refine.implementation(Decisions(**{name: noting(name, one) for name, one in calls.items()}))
    names = ("composed-v1", "window-offload", "hybrid-pp2-async", "composed-pp4")
    for number, name in product(range(8), names):
        if set(calls) != asked:
            run = refine.refine_once(configs.named(name), build, 0, number, 200, judged=False)
            assert refine.failure(run) is None
    assert set(calls) == asked


@pytest.mark.parametrize(
    "tamper",
    [
        editing("drop", lambda book, event: []),  # a leak
        enqueuing(lambda rank, program: [one for one in program if not isinstance(one[1], PreProcess)]),
    ],
    ids=["drops-forgotten", "no-pre-processing"],
)
def test_edits_of_answers_and_programs_are_faults_too(tamper: Any) -> None:
    fault = Fault("edited", "none", DECISION, "", "", (), tamper=tamper, bites=("hybrid-pp1",))
    for make in (refine.RealWorld, Place(cuda=False, seed=1).gated):
        found = inject.catch(fault, runs=5, choices=100, seed=0, make=make)
        assert found is not None and not found.twin


def test_a_catch_that_is_not_the_faults_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = inject.injectable()["new-ids-from-position-zero"]
    monkeypatch.setattr(inject, "repaired", inject.faulty)
    found = inject.catch(fault, runs=5, choices=200, seed=0)
    assert found is not None and found.twin.startswith(found.rule)
    assert inject.main(["--fault", "new-ids-from-position-zero", "--runs", "5"]) == 1


def test_a_swapped_device_without_a_fault_is_right() -> None:
    build = refine.implementation(device_type=inject.Swapped)
    for name in ("composed", "hybrid-pp2-async", "composed-v1"):
        assert refine.failure(refine.refine_once(configs.named(name), build, 5, 0, 150)) is None


def test_a_mismatch_is_reduced_and_says_where() -> None:
    def off_by_one(*given: Any) -> Any:
        align = kernels_named("torch").align(*given)
        copy = align.precopy
        align.precopy = lambda: None if align.before else copy()
        return align

    broken = replace(kernels_named("torch"), align=off_by_one)

    def build(config: Config, chains: Chains, feed: Any) -> Any:
        from impl.engine import Engine

        return Engine(config, chains, feed, kernels=broken)

    report = refine.refine([configs.named("hybrid-pp1")], build, runs=5, choices=200, seed=0)
    assert report.failed is not None
    text = "\n".join(refine.show_failure(report.failed, build))
    assert refine.BYTES in text and "should hold 0x" in text
    assert re.search(r"temporal state, block \d+, word 0 \(byte \d+ of the pages\): holds 0x", text)
    assert int(re.search(r"reduced to (\d+) choices", text)[1]) <= 4  # type: ignore[index]


def test_one_flipped_bit_is_found_with_its_address() -> None:
    world = refine.RealWorld(configs.named("plain"), refine.implementation())
    for choice in (("arrive", "r1", "0", 5, 3), ("schedule",), ("work",)):
        assert world.choose(choice)
    memory = world.engine.devices[0].memory
    block = int(memory.source[0][0, 0])
    memory.kv[0][block, 1, 0] ^= 1 << 20
    world.choose(("quiet",))
    assert world.verdict is not None and world.verdict.rule == refine.BYTES
    byte = 4 * (block * memory.stride_words + CELL_WORDS)
    assert f"position 1 (column 0, block {block}, cell 1, byte {byte} of the pages)" in world.verdict.text


def test_shipped_modules_know_nothing_of_the_answers() -> None:
    """Only vocabulary, arithmetic and the world; harnesses are the exception."""
    allowed = {"arith", "chains", "config", "events", "ops", "policy", "world"}
    harnesses = {"refine.py", "inject.py", "world.py", "streams.py", "lanes.py", "cuda.py", "options.py"}
    paths = [*(ROOT / "impl").glob("*.py"), *(ROOT / "impl" / "scheduler").glob("*.py")]
    seen = set()
    for path in paths:
        if path.name in harnesses:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spec"):
                names = [node.module] if node.module != "spec" else [f"spec.{a.name}" for a in node.names]
                seen |= {(path.name, name.split(".")[1]) for name in names if name}
    assert seen and not {one for one in seen if one[1] not in allowed}


# -- the command -------------------------------------------------------------------------------------------


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_command_reports_and_writes_json(tmp_path: Path) -> None:
    done = command("impl.refine", "--config", "hybrid-pp1", "--runs", "2", "--choices", "60", "--json",
                   str(tmp_path / "report.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "verdict: holds (sampled: 2 runs)" in done.stdout and "choices/s" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "holds" and report["runs"] == 2 and report["bytes_compared"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--config", "no-such"), "no configuration named 'no-such'"),
        (("--runs", "0"), "--runs must be at least 1, got 0"),
        (("--device", "abacus"), "--device must be"),
        (("--kernels", "numpy"), "--kernels must be torch or triton"),
    ],
)
def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert refine.main(list(words)) == 2
    streams = capsys.readouterr()
    assert said in streams.err and streams.err.count("\n") == 1 and not streams.out


@pytest.mark.parametrize("module", ["refine", "inject"])
def test_without_torch_the_command_says_what_to_install(module: str) -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        f"sys.argv = ['{module}']; runpy.run_module('impl.{module}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "torch is not installed: pip install -e '.[kernels]'" in done.stderr


def test_a_bad_configuration_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'name = "x"\n[cache]\nhash_block_tokens = 3\n[[group]]\nname = "a"\nkind = "full"\nblock_tokens = 4\n'
    )
    assert refine.main(["--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_documented_plug_works() -> None:
    """The snippet of docs/refine.md, run as it stands, prints what is shown (wrapped there)."""
    text = (ROOT / "docs" / "refine.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert snippet is not None and 10 <= snippet[1].count("\n") <= 25
    done = subprocess.run(
        [sys.executable, "-c", snippet[1]], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == snippet[2].split()


def test_kernels_is_data() -> None:
    assert isinstance(kernels_named("torch"), Kernels) and kernels_named("triton").name == "triton"
