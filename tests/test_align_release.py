"""Chunk ends predicted by the alignment formulas, against the scheduler of a release.

Needs a release in the cache directory (``python -m impl.upstream fetch 0.33.0``); skipped with a reason
otherwise.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from impl.upstream.child import Child
from impl.upstream.env import Prepared, Unavailable, prepared, variables
from spec import arith
from spec.config import Config, Group, Kind

BLOCK = 8
DRAFTS = 3
HYBRID = Config(
    name="full + Mamba in blocks of 8",
    groups=(Group("full", Kind.FULL, BLOCK), Group("mamba", Kind.MAMBA, BLOCK)),
    hash_block_tokens=BLOCK,
    pool_blocks=60,
    request_tokens=64,
)
ONE_MODULE = replace(HYBRID, drafts=DRAFTS, draft_modules=1, tail_drop=True)
THREE_MODULES = replace(HYBRID, drafts=DRAFTS, draft_modules=DRAFTS, tail_drop=True)


@pytest.fixture(scope="module")
def latest() -> Prepared:
    """The newest known release."""
    try:
        return prepared("0.33.0")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def release(latest: Prepared) -> Iterator[Child]:
    """One process of it for the module."""
    with Child(latest) as child:
        yield child


def predicted(config: Config, prompt: int) -> list[int]:
    """The chunks that the formulas give a prompt that has the budget for itself; 0 where they never go on."""
    ahead = 0 if not config.drafts else config.drafts if config.draft_modules > 1 else 1
    last = arith.checkpoint_position(prompt, BLOCK, config.tail_drop, config.hash_lookahead_tokens)
    computed, chunks = 0, []
    while computed < prompt:
        asked = min(config.step_tokens, prompt - computed)
        split = arith.aligned_split(computed, asked, prompt, BLOCK, config.step_tokens, last, 0, 0, False)
        chunk = arith.lookahead_reserve(prompt, computed, split, ahead)
        chunks.append(chunk)
        if chunk == 0:
            break
        computed += chunk
    return chunks


def scheduled(child: Child, config: Config, prompt: int, quiet_steps: int) -> list[int]:
    """The chunks that the release schedules; 0 once it schedules nothing in so many steps."""
    child.new(config)
    child.ask("arrive", request="r", tokens=list(range(3, 3 + prompt)), output_tokens=1)
    chunks: list[int] = []
    quiet = 0
    while sum(chunks) < prompt and quiet < quiet_steps:
        out = child.ask("schedule")["out"]
        if chunk := out["tokens"].get("r", 0):
            chunks.append(chunk)
        else:
            quiet += 1
        child.ask("output", sampled={name: [5] for name in out["samples"]})
    return [*chunks, 0] if quiet else chunks


@pytest.mark.slow
@pytest.mark.parametrize("config", [HYBRID, ONE_MODULE, THREE_MODULES], ids=["no drafts", "1 module", "3"])
@pytest.mark.parametrize("step_tokens", [4, 8, 12, 16])
def test_chunks_are_the_predicted_ones(release: Child, config: Config, step_tokens: int) -> None:
    served = replace(config, step_tokens=step_tokens)
    for prompt in range(1, 34):
        assert scheduled(release, served, prompt, 3) == predicted(served, prompt), prompt


@pytest.mark.slow
def test_a_prompt_is_stranded_beside_two_decoding_requests(release: Child) -> None:
    """Theorem 17's witness in the release: with two requests decoding, 8 of 16 tokens of budget are left;
    the third prompt's chunk ends 2 tokens below a boundary, and it is not scheduled again even when it is
    alone."""
    release.new(replace(THREE_MODULES, step_tokens=16))
    for name, first in (("a", 20), ("b", 40)):
        release.ask("arrive", request=name, tokens=list(range(first, first + 8)), output_tokens=8)
    got: list[int] = []
    alone = 0
    for step in range(40):
        if step == 2:
            release.ask("arrive", request="r", tokens=list(range(100, 125)), output_tokens=1)
        out = release.ask("schedule")["out"]
        if step >= 2:
            got.append(out["tokens"].get("r", 0))
        alone += not out["tokens"]
        answers = {name: [5] for name in out["samples"]}
        release.ask("output", sampled=answers, drafts={name: [6] * DRAFTS for name in answers})
    assert got[:3] == [8, 8, 6]
    assert set(got[3:]) == {0}
    assert alone > 20
    assert arith.lookahead_reserve(25, 22, arith.aligned_split(22, 3, 25, BLOCK, 16, 16, 0, 0, False), 3) == 0
    assert arith.aligned_reserve(25, 16, 8, BLOCK, 3) == 8


# Runs inside the release: the adapter's engine, once with a backend that saves a state from inside a chunk,
# and once with an offload tier; both with dense retention (the default keeps, of states and of window blocks,
# only those before a prompt's last boundary and a junction, so that no block in between goes under a key).
INSIDE = """
import json
from dataclasses import replace
from impl.upstream import build, driver
from spec.config import Config, Group, Kind

plain = build._spec

def spec_of(group, config):
    spec = plain(group, config)
    if group.kind is Kind.MAMBA and config.name == "exports":
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    return spec

build._spec = spec_of
plain_config = build._vllm_config

def dense(config):
    made = plain_config(config)
    made.cache_config.prefix_cache_retention_interval = None
    return made

build._vllm_config = dense
groups = (Group("full", Kind.FULL, 8), Group("mamba", Kind.MAMBA, 8))

def serve(engine, name, tokens):
    engine.arrive(name, tokens, 1)
    scheduler = engine.scheduler
    steps = []
    while name in scheduler.requests:
        out = engine.schedule()["out"]
        row = scheduler.kv_cache_manager.coordinator.single_type_managers[1].req_to_blocks[name]
        steps.append({
            "computed": scheduler.requests[name].num_computed_tokens,
            "tokens": out["tokens"].get(name, 0),
            "copies": out["copies"],
            "row": [block.block_id for block in row],
            "named": [block.block_hash_num_tokens if block.block_hash else 0 for block in row],
        })
        engine.output(sampled={sampler: [5] for sampler in out["samples"]})
    return steps

shared = list(range(3, 19))
served = [shared[:12] + [50, 51], shared + list(range(100, 134)), shared + [60, 61, 62]]
found = {}
for backend in ("exports", "plain"):
    config = Config(backend, groups, 4, pool_blocks=80, request_tokens=64, step_tokens=64)
    engine = driver.Engine(config)
    found[backend] = [serve(engine, name, tokens) for name, tokens in zip("abc", served)]

groups = (Group("full", Kind.FULL, 8), Group("window", Kind.WINDOW, 4, window_tokens=5))
config = Config("tier of 4 chunks", groups, 4, offload=True, blocks_per_chunk=2, tier_chunks=4,
                pool_blocks=20, request_tokens=44, step_tokens=40)
engine = driver.Engine(config)
engine.arrive("x", list(range(3, 35)), 8)
found["stores"] = []
reports = {}
for step in range(3):
    if step == 1:
        engine.arrive("r", list(range(103, 135)), 8)
    out = engine.schedule()["out"]
    tracked = engine.scheduler.connector.connector_scheduler._req_status.get("r")
    columns = tracked.group_states[1].block_ids if tracked else []
    found["stores"].append([out["stores"], list(columns)])
    engine.output(sampled={name: [5] for name in out["samples"]}, reports=reports)
    reports = {"0": [job["job"] for job in out["stores"]]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def inside(latest: Prepared) -> Any:
    """For each backend three prompts one after the other: 14 tokens; 50 that share 12 with it; 19 that share
    16 with the second.  And the store jobs of three steps of two prompts in a tier that holds one of them."""
    command = [str(latest.python), "-c", INSIDE]
    run = subprocess.run(command, env=variables(latest), capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_chunk_that_exports_passes_the_boundary_of_its_first_block(inside: Any) -> None:
    """Theorem 17's other witness in the release, with dense retention: the second prompt resumes after 12
    tokens, inside a block of 8, and its one chunk ends at 50.  Column 1 is named for 16 tokens, but holds the
    copy of the state after 12: the chunk writes its export's column and its running column only.  The third
    prompt then starts from it."""
    _, (second,), (third, *_) = inside["exports"]
    start, end = second["computed"] - second["tokens"], second["computed"]
    assert (start, end) == (12, 50)
    assert arith.aligned_split(12, 38, 50, BLOCK, 64, 0, 0, 0, True) == 38
    written = {
        arith.running_column(start, end - start, BLOCK),
        arith.running_column(start, end - start, BLOCK) - 1,
    }
    assert written == {5, 6}
    stale = second["row"][1]
    assert second["named"][1] == 16
    assert stale in [target for _, target in second["copies"]]
    assert third["computed"] - third["tokens"] == 16
    assert third["row"][1] == stale


@pytest.mark.slow
def test_without_the_export_the_chunk_stops_there(inside: Any) -> None:
    _, (second, *_), (third, *_) = inside["plain"]
    assert (second["computed"] - second["tokens"], second["computed"]) == (12, 16)
    assert arith.running_column(12, 4, BLOCK) == 1
    assert second["named"][1] == 16
    assert third["row"][1] == second["row"][1]


@pytest.mark.slow
def test_a_block_lands_in_another_sub_slot_after_a_hole(inside: Any) -> None:
    """Theorem 18's witness in the release.  The tier is full when the prompt is to be stored, so the store is
    tried again one step later; by then the window has moved on, and columns 4 and 6 were given away.  The job
    lists columns 2, 3 and 7 under first column 2, and leaves out one whole chunk (columns 4 and 5) and one
    block of the next: column 7 belongs in sub-slot 1 of its chunk and lands in sub-slot 0."""
    (first, _), (refused, _), (retried, columns) = inside["stores"]
    assert [job["request"] for job in first] == ["x"]
    assert refused == []
    (job,) = retried
    assert job["request"] == "r"
    listed, first_column = job["blocks"][1], job["first_column"][1]
    assert [columns.index(block) for block in listed] == [2, 3, 7]
    assert [column for column in range(8) if columns[column] == 0] == [4, 6]
    holes, unstored, per_chunk = 7 - first_column - 2, 1, 2
    assert holes != unstored * per_chunk
    assert arith.landing_position(first_column, 2, per_chunk) == 2
    assert arith.subslot(2, per_chunk) == 0
    assert arith.subslot(7, per_chunk) == 1


# Runs inside the release: its split, asked for every start of a request that has known tokens beside its
# prompt, with a prefix shared up to a junction, in a scheduler whose hashes are finer than its blocks or not.
SPLIT = """
import json
from dataclasses import replace
from impl.upstream import driver
from spec.config import Config, Group, Kind

groups = (Group("full", Kind.FULL, 8), Group("mamba", Kind.MAMBA, 8))
found = []
for hash_block in (8, 4):
    for drop in (False, True):
        speculation = {"drafts": 1, "draft_modules": 1, "tail_drop": True} if drop else {}
        config = Config("split", groups, hash_block, pool_blocks=60, request_tokens=64, step_tokens=20,
                        **speculation)
        engine = driver.Engine(config)
        scheduler = engine.scheduler
        assert not scheduler.mamba_shared_prefix_checkpoint
        assert scheduler.mamba_partial_cache_hit == (hash_block < 8)
        for prompt in (5, 8, 14, 22, 30):
            for outputs in (0, 1, 9):
                name = f"{hash_block}-{drop}-{prompt}-{outputs}"
                engine.arrive(name, list(range(3, 3 + prompt)), 12)
                request = scheduler.requests[name]
                if outputs:
                    request.append_output_token_ids([5] * outputs)
                for start in range(0, request.num_tokens):
                    request.num_computed_tokens = start
                    for junction in (0, 6, 8, 13, 16, 20):
                        request.shared_prefix_boundary = junction
                        for asked in (1, 4, 11, 20):
                            asked = min(asked, request.num_tokens - start)
                            got = [scheduler._mamba_block_aligned_split(request, asked)]
                            scheduler.mamba_shared_prefix_checkpoint = True  # the option, and what it needs
                            got.append(scheduler._mamba_block_aligned_split(request, asked))
                            scheduler.mamba_shared_prefix_checkpoint = False
                            found.append([hash_block, drop, prompt, outputs, start, junction, asked, *got])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def splits(latest: Prepared) -> list[list[int]]:
    """What the release's split answers; the last column with ``enable_mamba_shared_prefix_checkpoint``."""
    command = [str(latest.python), "-c", SPLIT]
    run = subprocess.run(command, env=variables(latest), capture_output=True, text=True, check=True)
    asked: list[list[int]] = json.loads(run.stdout.splitlines()[-1])
    return asked


def split_of(row: list[int], *, tail_of_known: bool = False) -> int:
    """The formulas' answer to a row of ``splits``."""
    hash_block, drop, prompt, outputs, start, junction, asked = row[:7]
    known = prompt + outputs
    last = arith.checkpoint_position(known, BLOCK, bool(drop), 0)
    tail = arith.checkpoint_position(known if tail_of_known else prompt, hash_block, bool(drop), 0)
    end = max(prompt, known - 1)
    return arith.aligned_split(
        start, asked, end, BLOCK, 20, last, tail if hash_block < BLOCK else 0, junction, False
    )


@pytest.mark.slow
def test_the_split_is_the_predicted_one_with_tails_junctions_and_resumed_requests(
    splits: list[list[int]],
) -> None:
    assert len(splits) > 10_000
    wrong = [(row, split_of(row)) for row in splits if row[7] != split_of(row)]
    assert not wrong, wrong[:5]
    without = [
        arith.aligned_split(r[4], r[6], max(r[2], r[2] + r[3] - 1), BLOCK, 20, 0, 0, 0, False) for r in splits
    ]
    assert sum(row[7] != plain for row, plain in zip(splits, without, strict=True)) > 100
    resumed = [row for row in splits if row[7] != split_of(row, tail_of_known=True)]
    assert resumed and all(row[3] for row in resumed), "the tail is the prompt's, also in resumed requests"


@pytest.mark.slow
def test_the_option_of_the_shared_prefix_checkpoint_is_not_modelled(splits: list[list[int]]) -> None:
    """With it, and hashes finer than blocks, 0.33.0 stops at the junction itself, not a whole number of
    blocks behind the chunk's start, if the junction lies in the prompt."""
    other = [row for row in splits if row[8] != row[7]]
    assert other
    for row in other:
        start, junction = row[4], row[5]
        assert start < junction <= row[2]
        assert row[8] == min(split_of([*row[:5], 0, row[6]]), junction - start)
