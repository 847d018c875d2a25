"""The coverage formulas against the functions of the releases they are named after.

Needs a release in the cache directory (``python -m impl.upstream fetch 0.33.0``); skipped with a reason
otherwise.  The release's own functions run in its own environment: mask under dense retention and under the
default, windows, the whole lookup of the offloading connector over every small set of present chunks, the
whole lookup in the pool over random sets of present blocks, and what prompts leave there.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from impl.upstream.env import Unavailable, prepared, variables

COMMON = """
import itertools, json
from dataclasses import replace
from types import SimpleNamespace
import torch
from vllm.config import CacheConfig
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from spec import lookup
from spec.arith import coverage as cov
from spec.config import Config, Group, Kind

def window_spec(block, window, extra):
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window,
        extra_retained_tokens=extra)

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_sliding_window_size_in_chunks as window_size)
except ImportError:
    window_size = offloading.get_sliding_window_size_in_chunks

compared, differing = 0, []
def same(theirs, ours, *where):
    global compared
    compared += 1
    if theirs != ours:
        differing.append((theirs, ours, where))
def report(**more):
    print(json.dumps(dict(compared=compared, differing=differing[:5], **more)))
"""

FORMULAS = """
for b, k, W, e in itertools.product((1, 2, 5), (1, 2, 3), range(1, 9), range(4)):
    t, spec = b * k, window_spec(b, W, e)
    base = BASE(W, e, t)
    same(window_size(spec, t), base, b, k, W, e)
    group = SimpleNamespace(sliding_window_size_in_chunks=base, kv_cache_spec=spec, tokens_per_chunk=t)
    for h in range(3 * t + 2):
        theirs = offloading.GroupOffloadConfig.load_window_size_in_chunks(group, h)
        same(theirs, LOAD(h, W, e, t), "load", h, W, e, t)
    manager = SimpleNamespace(sliding_window=W, extra_retained_tokens=e)
    for n in range(40):
        same(SlidingWindowManager.get_num_skipped_tokens(manager, n), cov.skipped_tokens(n, W, e), n, W, e)
    for A in range(1, 12):
        chunked = ChunkedLocalAttentionSpec(
            block_size=b, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=A)
        same(window_size(chunked, t), cov.chunked_window_chunks(A, t), "chunked", A, t)
        own = SimpleNamespace(attention_chunk_size=A)
        for n in range(40) if (W, e) == (1, 0) else ():
            skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(own, n)
            same(skipped, cov.skipped_tokens_chunked(n, A), "chunked", n, A)
    stored = STORED(spec)
    for f, drop, end in itertools.product((1, 2, 4, 5), (0, 1), (None, 7, 8)):
        mask = SlidingWindowManager.reachable_block_mask(
            0, 12 * k, f * b, stored, bool(drop), retention_interval=None, final_segment_end_block=end)
        need = NEED(W, e, b, drop)
        same(mask is None, cov.store_keeps_all(need, f), "all", b, f, W, e, drop)
        for i, theirs in enumerate(mask or ()):
            final = end is not None and not drop and cov.store_keeps_final_block(i, end, need, f)
            same(theirs, cov.store_keeps_block(i, need, f, drop) or final, i, need, f, drop, end)
        if mask is not None and end is None:
            for c in range(12):
                named = any(mask[c * k : c * k + k])
                same(named, cov.store_keeps_chunk(c, k, need, f, drop), c, k, need, f, drop)
        # The default, 0: the tail before the replay boundary only (shifted by a block in a group that drops).
        boundary = (7 * f + 3) * b // 2
        tail_end = boundary // (f * b) * f + drop
        mask = SlidingWindowManager.reachable_block_mask(
            0, 12 * k, f * b, stored, bool(drop), retention_interval=0, reachable_boundaries=(boundary,))
        same([i for i, kept in enumerate(mask) if kept],
             [i for i in range(12 * k) if tail_end - need <= i < tail_end], "default", need, f, drop)
same(CacheConfig().prefix_cache_retention_interval, 0, "default")
report()
"""

LATEST = """
BASE, LOAD, NEED = cov.base_window_chunks, cov.lookup_window_chunks, cov.store_need_blocks
STORED = lambda s: replace(
    s, sliding_window=s.sliding_window + s.extra_retained_tokens, extra_retained_tokens=0)
"""

V0_30 = """
BASE = lambda W, e, t: cov.base_window_chunks_v0_30(W, t)
LOAD = lambda h, W, e, t: cov.lookup_window_chunks_v0_30(h, W, t)
NEED = lambda W, e, b, drop: cov.store_need_blocks_v0_30(W, b, drop)
STORED = lambda s: s
"""

LOOKUP = """
from vllm.v1.kv_offload.base import LookupResult

class Present:
    \"\"\"A tier in which a chunk's key is (group, tokens it reaches).\"\"\"
    def __init__(self, ends): self.ends = ends
    def lookup(self, key, context):
        return LookupResult.HIT if key[1] in self.ends[key[0]] else LookupResult.MISS

Real = offloading.OffloadingConnectorScheduler
def hit(config, ends, tokens, local=0):
    \"\"\"The release's own lookup over chunks that are present.\"\"\"
    groups, states = [], []
    for i, g in enumerate(config.groups):
        t = lookup.chunk_tokens(config, g)
        spec = window_spec(g.block_tokens, g.window_tokens, g.extra_tokens) if g.kind is Kind.WINDOW else None
        size = None if g.kind is Kind.FULL else lookup.window_chunks(config, g)
        group = SimpleNamespace(
            tokens_per_chunk=t, sliding_window_size_in_chunks=size, kv_cache_spec=spec,
            is_eagle_group=lookup.drops(config, g))
        group.load_window_size_in_chunks = lambda n, own=group: (
            offloading.GroupOffloadConfig.load_window_size_in_chunks(own, n))
        groups.append(group)
        states.append(SimpleNamespace(
            offload_keys=[(i, (c + 1) * t) for c in range(tokens // t)], lookup_hit_end_chunk_idx=0))
    full = [i for i, g in enumerate(groups) if g.sliding_window_size_in_chunks is None]
    windowed = sorted(
        (i for i in range(len(groups)) if i not in full),
        key=lambda i: groups[i].sliding_window_size_in_chunks, reverse=True)
    mamba = [groups[i].tokens_per_chunk for i, g in enumerate(config.groups) if g.kind is Kind.MAMBA]
    me = SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=groups), manager=Present(ends), _chunks_being_loaded=None,
        _sliding_window_groups=tuple(windowed), _lookup_groups=tuple(full) + tuple(windowed),
        _mamba_align_size=mamba[0] if mamba else None,
        _events_tracker=SimpleNamespace(record_lookup=lambda *a: None))
    me._maximal_prefix_lookup = lambda *a: Real._maximal_prefix_lookup(me, *a)
    me._sliding_window_lookup = lambda *a: Real._sliding_window_lookup(me, *a)
    request = SimpleNamespace(
        num_locally_computed_tokens=local, max_load_tokens=None, group_states=states, req_context=None,
        req=SimpleNamespace(num_tokens=tokens, request_id="r"))
    return Real._lookup_complete_chunks(me, request)

def deployment(*groups, blocks=1, drop=False):
    return Config("box", groups, hash_block_tokens=1, offload=True, blocks_per_chunk=blocks, tail_drop=drop)

windows = [Group("w", Kind.WINDOW, b, W, e) for b, W, e in itertools.product((1, 2), (1, 2, 3), (0, 1))]
windows += [Group("m", Kind.MAMBA, 2)]
for window, full_block, blocks, drop in itertools.product(windows, (1, 2, 3), (1, 2), ("", "w", "f", "fw")):
    if drop and window.kind is Kind.MAMBA:
        continue
    config = deployment(
        Group("f", Kind.FULL, full_block, drafter="f" in drop), replace(window, drafter="w" in drop),
        blocks=blocks, drop=bool(drop))
    F, t = (lookup.chunk_tokens(config, g) for g in config.groups)
    for held, mask in itertools.product(range(6 // F + 1), range(2 ** (6 // t))):
        ends = (frozenset((c + 1) * F for c in range(held)),
                frozenset((c + 1) * t for c in range(6 // t) if mask >> c & 1))
        for local in {0, full_block * window.block_tokens}:
            if local < 6:
                same(hit(config, ends, 6, local), lookup.offload_hit(config, ends, 6, local),
                     str(config.groups), blocks, drop, held, mask, local)

# Theorem 5's second witness: a prompt of 256 tokens, stored whole, is looked up again.
two = deployment(Group("f", Kind.FULL, 64), Group("w", Kind.WINDOW, 16, 32, 1))
left = lookup.left_by(two, 256, 256).offload
# Theorem 7's witness: all present but the window's eighth chunk.
three = deployment(Group("f", Kind.FULL, 64), Group("w", Kind.WINDOW, 16, 16), Group("m", Kind.MAMBA, 64))
shrunk = (frozenset((64, 128)), frozenset(range(16, 113, 16)), frozenset((64, 128)))
report(last=hit(two, left, 256), between=hit(three, shrunk, 129))
"""

BOXES = """
import random
from impl.upstream import build

def hashes(config, tokens):
    \"\"\"Stand-ins for block hashes: the tokens that each covers.\"\"\"
    unit = config.hash_block_tokens
    return list(range(unit, tokens - config.hash_lookahead_tokens + 1, unit))

def hit(config, coordinator, ends, tokens):
    \"\"\"The release's own lookup over blocks that are present, known by the tokens they reach.\"\"\"
    coordinator.block_pool.get_cached_block = lambda end, groups: (
        [object() for _ in groups] if all(end in ends[group] for group in groups) else None)
    return coordinator.find_longest_cache_hit(hashes(config, tokens), tokens - 1)[1]

def boxes():
    \"\"\"Configurations of one to three groups, small enough to meet every edge.\"\"\"
    full = [Group("f", Kind.FULL, b) for b in (1, 2, 4)]
    others = [Group("w", Kind.WINDOW, b, W) for b in (1, 2, 4) for W in (1, 2, 4, 6)]
    others += [Group("m", Kind.MAMBA, b) for b in (2, 4)]
    sets = [(f, o) for f in full for o in others] + [(o,) for o in others] + [(f,) for f in full]
    sets += [(full[1], others[2], others[9]), (full[2], others[6], others[13])]
    sets += [(full[0], full[2], others[12]), (full[1], others[13], others[0])]
    sets += [(full[1], Group("c", Kind.CHUNKED, 2, 4)), (others[3], others[8])]
    sets += [(full[1], replace(full[1], name="g"), others[13]), (others[2], replace(others[2], name="v"))]
    for groups in sets:
        least = min(g.block_tokens for g in groups)
        units = {1, least} if len(groups) > 1 else {least}
        for unit, drop in itertools.product(sorted(units), range(2 ** len(groups))):
            chosen = tuple(replace(g, drafter=bool(drop >> i & 1)) for i, g in enumerate(groups))
            if drop and any(g.kind is Kind.CHUNKED or (g.kind is Kind.MAMBA and g.drafter) for g in chosen):
                continue
            drafts = int(bool(drop))
            yield Config("box", chosen, unit, tail_drop=bool(drop), drafts=drafts, draft_modules=drafts,
                         slots=1, pool_blocks=200, request_tokens=32, step_tokens=32)
"""

LOCAL = """
draw = random.Random(0)
hits = 0
for config in boxes():
    coordinator = build.build(config).scheduler.kv_cache_manager.coordinator
    for case in range(200):
        tokens, density = draw.randint(1, 20), draw.choice((0.5, 0.8, 0.95))
        ends = tuple(frozenset(
            e for e in range(config.hash_block_tokens, tokens + 1, config.hash_block_tokens)
            if (e % g.block_tokens == 0 or lookup.fine_grained(config)) and draw.random() < density)
            for g in config.groups)
        theirs, ours = hit(config, coordinator, ends, tokens), lookup.local_hit(config, ends, tokens)
        hits += theirs > 0
        same(theirs, ours, str(config.groups), config.hash_block_tokens, str(ends), tokens)
report(hits=hits)
"""

LEFT = """
from impl.upstream import driver, patches

def left(config, prompt):
    \"\"\"What a prompt leaves in the pool of the release's own scheduler: each group's ends.\"\"\"
    engine = driver.Engine(config)
    engine.arrive("r", list(range(10, 10 + prompt)), 1)
    request = engine.scheduler.requests["r"]
    while "r" in engine.scheduler.requests:
        out = engine.schedule()["out"]
        engine.output(sampled={name: [5] for name in out["samples"]})
    pool, unit = engine.scheduler.kv_cache_manager.coordinator.block_pool, config.hash_block_tokens
    return tuple(
        frozenset((i + 1) * unit for i, key in enumerate(request.block_hashes)
                  if pool.get_cached_block(key, [g]))
        for g in range(len(config.groups)))

for name in PATCHES:
    patches.KNOWN[name]()
hits = 0
for config in boxes():
    block = max((g.block_tokens for g in config.groups if g.kind is Kind.MAMBA), default=2)
    for steps, states in ((32, lookup.one_state), (block, lookup.every_state)):
        config = replace(config, step_tokens=steps)
        for prompt in PROMPTS:
            theirs, ours = left(config, prompt), lookup.left_by(config, prompt, prompt, states).local
            for shared, more in itertools.product(range(1, prompt + 1), (0, 1, 5)):
                see = lambda ends: lookup.local_hit(config, lookup.visible(ends, shared), shared + more)
                hits += see(theirs) > 0
                where = config.hash_block_tokens, steps, prompt, shared, more
                same(see(theirs), see(ours), str(config.groups), *where)
report(hits=hits)
"""


def inside(release: str, *script: str) -> Any:
    """Run a script in a release's environment and return what it reports."""
    try:
        use = prepared(release)
    except Unavailable as error:
        pytest.skip(str(error))
    command = [str(use.python), "-c", "\n".join((COMMON, *script))]
    run = subprocess.run(command, env=variables(use), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("release", "formulas"), [("0.33.0", LATEST), ("0.31.0", LATEST), ("0.30.0", V0_30)])
def test_formulas_are_those_of_the_release(release: str, formulas: str) -> None:
    found = inside(release, formulas, FORMULAS)
    assert found["differing"] == [] and found["compared"] > 90_000


@pytest.mark.slow
def test_the_next_release_refutes_the_formulas_of_the_one_before() -> None:
    """The comparison can fail: 0.31.0's functions differ from 0.30.0's formulas."""
    assert inside("0.31.0", V0_30, FORMULAS)["differing"] != []


@pytest.mark.slow
def test_lookup_is_that_of_the_release_and_shows_the_witnesses() -> None:
    found = inside("0.33.0", LOOKUP)
    assert found["differing"] == [] and found["compared"] > 2_000
    # Theorem 5: of 256 stored tokens 192 are found, not 255.
    assert found["last"] == 192
    # Theorem 7: a hit of 112 tokens, between two states of a Mamba group in chunks of 64.
    assert found["between"] == 112


@pytest.mark.slow
def test_the_lookup_in_the_pool_is_that_of_the_release() -> None:
    found = inside("0.33.0", BOXES, LOCAL)
    assert found["differing"] == [] and found["compared"] > 50_000 and found["hits"] > 20_000


def left_in_pool(*patches: str, prompts: tuple[int, ...]) -> Any:
    """Hits in what prompts of the release leave, against hits in what they leave here; patches are put in."""
    return inside("0.33.0", BOXES, f"PATCHES = {patches}", f"PROMPTS = {prompts}", LEFT)


@pytest.mark.slow
def test_hits_in_what_a_prompt_leaves_are_those_of_the_release_under_dense_retention() -> None:
    """With the split by the recurrent group's own block, as the reference splits (docs/findings.md)."""
    found = left_in_pool("dense_retention", "split_by_state_block", prompts=(3, 5, 8, 13, 16))
    assert found["differing"] == [] and found["compared"] > 50_000 and found["hits"] > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["dense_retention", "split_by_state_block"])
def test_without_either_the_release_leaves_something_else(left_out: str) -> None:
    """The comparison can fail.  By default (retention 0) prompts leave less, and hits are shorter."""
    found = left_in_pool(*({"dense_retention", "split_by_state_block"} - {left_out}), prompts=(13,))
    assert found["differing"] != []
    if left_out == "dense_retention":
        assert all(theirs <= ours for theirs, ours, _ in found["differing"])
