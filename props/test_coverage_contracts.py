"""The contracts that coverage theorems assume, checked on the loops that they stand for.

A theorem cannot execute a scan over data; it assumes the scan's postcondition under a name.  Here each
named postcondition is checked on every small case, and theorems 2, 5 and 7 are run through lookup and store
as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import lcm

import pytest

from spec import arith, lookup
from spec.config import Config, Group, Kind
from spec.prove import coverage
from spec.prove.report import contracts_of

CHECKED = {
    "right-to-left scan": "test_admitted_chunks_were_found_present",
    "prefix scan": "test_admitted_chunks_were_found_present",
    "lookup order": "test_no_longer_candidate_was_passed_over",
    "store rule": "test_stored_chunks_hold_every_kept_block",
    "common-hit fixed point": "test_local_hit_is_the_folded_common_hit",
}


def test_every_contract_of_a_coverage_theorem_is_checked_here() -> None:
    assert {contract.name for contract in contracts_of(coverage.THEOREMS)} == set(CHECKED)
    assert all(callable(globals()[name]) for name in CHECKED.values())


def deployment(*groups: Group, blocks_per_chunk: int = 1, tail_drop: bool = False) -> Config:
    """A configuration with offload; numbers that the scans do not read are left at their defaults."""
    return Config(
        "box",
        groups,
        hash_block_tokens=1,
        offload=True,
        blocks_per_chunk=blocks_per_chunk,
        tail_drop=tail_drop,
    )


def chunk_ends(chunks: range | set[int], chunk: int) -> frozenset[int]:
    """Chunks as the token positions that they reach."""
    return frozenset((index + 1) * chunk for index in chunks)


@dataclass(frozen=True)
class Case:
    """A full and a window group, what is present of each, and a prompt with a local prefix."""

    config: Config
    full_chunks: int
    window_present: frozenset[int]
    tokens: int
    local: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Tokens of a chunk of each group."""
        full, window = self.config.groups
        return lookup.chunk_tokens(self.config, full), lookup.chunk_tokens(self.config, window)

    def hit(self) -> int:
        """Tokens up to which the lookup admits a hit, the local prefix included; 0 for none."""
        full, window = self.chunks
        ends = (
            chunk_ends(range(self.full_chunks), full),
            chunk_ends(set(self.window_present), window),
        )
        found = lookup.offload_hit(self.config, ends, self.tokens, self.local)
        return self.local + found if found else 0

    def window_asked(self, hit: int) -> range:
        """The window chunks that a hit rests on."""
        group, chunk = self.config.groups[1], self.chunks[1]
        first = arith.first_checked_chunk(
            hit, self.local, lookup.window_chunks(self.config, group, hit), chunk
        )
        return range(first, arith.demand_end_chunk(hit, chunk))


def windows() -> Iterator[Group]:
    """Small windowed groups of every kind."""
    for block, window, extra in product((1, 2), (1, 2, 3), (0, 1)):
        yield Group("w", Kind.WINDOW, block, window, extra)
    for block, attention_chunk in product((1, 2), (2, 3)):
        yield Group("c", Kind.CHUNKED, block, attention_chunk)
    yield Group("m", Kind.MAMBA, 2)


def cases() -> Iterator[Case]:
    """Every presence of up to six window chunks, for small sizes."""
    for window, full_block, blocks, tokens in product(windows(), (1, 2), (1, 2), (5, 6)):
        config = deployment(Group("f", Kind.FULL, full_block), window, blocks_per_chunk=blocks)
        full, chunk = lookup.chunk_tokens(config, config.groups[0]), lookup.chunk_tokens(config, window)
        many = tokens // chunk
        locals_ = {0, lcm(full_block, window.block_tokens)}
        for full_chunks, mask, local in product(range(tokens // full + 1), range(2**many), locals_):
            present = frozenset(i for i in range(many) if mask >> i & 1)
            yield Case(config, full_chunks, present, tokens, local)


def test_admitted_chunks_were_found_present() -> None:
    admitted = partial = 0
    for case in cases():
        hit = case.hit()
        if not hit:
            continue
        admitted += 1
        full, chunk = case.chunks
        asked_full = range(arith.lookup_first_chunk_full(case.local, full), arith.demand_end_chunk(hit, full))
        assert all(index < case.full_chunks for index in asked_full), case
        assert set(case.window_asked(hit)) <= case.window_present, case
        partial += len(case.window_present) < case.tokens // chunk
    assert admitted > 1000 and partial > 1000


def test_no_longer_candidate_was_passed_over() -> None:
    shorter = 0
    for case in cases():
        full, chunk = case.chunks
        if case.config.groups[1].kind is Kind.MAMBA:
            continue
        longest = min(case.tokens - 1, case.full_chunks * full, case.tokens // chunk * chunk)
        hit = case.hit()
        for candidate in {longest, *range(chunk, longest, chunk)}:
            # Less than a chunk of either group is not worth a load.
            if candidate > hit and candidate - case.local >= max(full, chunk):
                shorter += 1
                assert not set(case.window_asked(candidate)) <= case.window_present, (case, candidate)
    assert shorter > 1000


# -- the store, with holes -----------------------------------------------------------------------------------


@dataclass
class Producer:
    """A request that prefills in steps and stores as it goes; freed columns are holes in its mirror."""

    window: int
    extra: int
    block: int
    blocks: int
    segment: int
    need: int
    local: int
    refusals: frozenset[int]
    written: dict[int, set[int]] = field(default_factory=dict)
    """Stored chunk -> its columns that were written."""

    def run(self, tokens: int, step_tokens: int) -> None:
        """Prefill `tokens` tokens; the tier refuses the store in the steps listed in `refusals`."""
        columns = tokens // self.block
        present = {c: c >= self.first_kept(self.local) for c in range(columns)}
        next_chunk, computed = 0, self.local
        for step in range(tokens):
            if computed >= tokens:
                break
            for column in range(min(columns, self.first_kept(computed))):
                present[column] = False
            computed = min(tokens, computed + step_tokens)
            storable = computed // (self.block * self.blocks)
            if step in self.refusals:
                continue
            for chunk in range(next_chunk, storable):
                self.store(chunk, present)
            next_chunk = storable
        # A store that was refused to the end is tried once more after the last step, as at the request's end.
        for column in range(min(columns, self.first_kept(tokens))):
            present[column] = False
        for chunk in range(next_chunk, tokens // (self.block * self.blocks)):
            self.store(chunk, present)

    def first_kept(self, computed: int) -> int:
        return arith.first_retained_column(computed, self.window, self.extra, self.block)

    def keeps(self, column: int) -> bool:
        return arith.store_keeps_all(self.need, self.segment) or arith.store_keeps_block(
            column, self.need, self.segment, 0
        )

    def store(self, chunk: int, present: dict[int, bool]) -> None:
        """`.../offloading/scheduler.py::_build_store_jobs`: three reasons to skip a chunk."""
        columns = range(chunk * self.blocks, (chunk + 1) * self.blocks)
        if not present[columns[-1]]:
            return
        if not any(self.keeps(c) for c in columns):
            return
        if any(self.keeps(c) and not present[c] for c in columns):
            return
        self.written[chunk] = {c for c in columns if present[c]}


def producers(need_of: str, windows_: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Iterator[Producer]:
    """Producers of sixteen tokens in blocks of two, for every place of the holes."""
    for window, extra, blocks, segment in product(windows_, (0, 1), (1, 2), (2, 4)):
        need = getattr(arith, need_of)(window, extra, 2, 0)
        for local, step, refused in product((0, 4, 8), (3, 4, 16), ((), (0,), (0, 1, 2), tuple(range(16)))):
            made = Producer(window, extra, 2, blocks, segment, need, local, frozenset(refused))
            made.run(16, step)
            yield made


def test_stored_chunks_hold_every_kept_block() -> None:
    holes = 0
    for made in producers("store_need_blocks"):
        for chunk, written in made.written.items():
            columns = range(chunk * made.blocks, (chunk + 1) * made.blocks)
            assert all(c in written for c in columns if made.keeps(c))
            holes += len(written) < made.blocks
    assert holes > 50


def unwritten(made: Producer, hit: int, local: int = 0) -> set[int]:
    """Columns that a reader at `hit` may read, in chunks that are stored, and that no store wrote."""
    first = arith.demand_first_column(hit, local, made.window, made.extra, made.block)
    read = range(first, arith.blocks_of(hit, made.block))
    return {c for c in read if c not in made.written.get(c // made.blocks, {c})}


def test_a_hit_at_a_multiple_of_f_reads_only_written_blocks() -> None:
    for made in producers("store_need_blocks"):
        full = made.segment * made.block
        for hit, local in product(range(full, 17, full), (0, 4)):
            assert not unwritten(made, hit, local), (made, hit)


def test_the_release_leaves_a_hole_at_the_last_token_and_one_block_more_closes_it() -> None:
    holes = [made for made in producers("store_need_blocks") if unwritten(made, 15)]
    assert any(made.extra == 0 and made.window == 3 and made.blocks == 2 for made in holes)
    assert not [made for made in producers("store_need_blocks_corrected") if unwritten(made, 15)]


# -- theorem 5, end to end -----------------------------------------------------------------------------------


def found(h: int, n: int, f: int, b: int, k: int, W: int, e: int, drop: bool) -> bool:
    """Theorem 5's condition for one window group; F = f*b."""
    t = b * k
    end = arith.demand_end_chunk(h, t)
    need, unkept = (
        arith.store_need_blocks(W, e, b, int(drop)),
        f - arith.store_need_blocks(W, e, b, int(drop)),
    )
    if h < t or (end + drop) * t > n:
        return False
    if arith.store_keeps_all(need, f):
        return True
    first_lost = e == 0 and (W - 1) % t == 0
    if h % (f * b):  # h = n - 1
        return W + e >= 2 and not ((W + e - 1) % t == 0 and unkept >= k)
    if not drop:
        return W + e >= 2 and not (first_lost and h % t == 0 and unkept >= k)
    if h % t:
        return arith.store_keeps_chunk(end, k, need, f, 1)
    return not (first_lost and (unkept >= k or (h == f * b and unkept == k - 1 >= 1)))


@pytest.mark.parametrize("drop", ["", "w", "f", "fw"])
def test_a_stored_prompt_is_found_exactly_where_theorem_5_says(drop: str) -> None:
    hits = losses = unaligned = 0
    sizes = [(b, k, full) for b, k, full in product((1, 2), (1, 2, 3), range(1, 7)) if full * k % b == 0]
    for (b, k, full_block), W, e, n in product(sizes, range(1, 7), range(2), range(2, 25)):
        config = deployment(
            Group("f", Kind.FULL, full_block, drafter="f" in drop),
            Group("w", Kind.WINDOW, b, W, e, drafter="w" in drop),
            blocks_per_chunk=k,
            tail_drop=bool(drop),
        )
        F, t = full_block * k, b * k
        allowed = [m * F for m in range(n // F - ("f" in drop), 0, -1) if m * F < n]
        if n % F == 0 and n % t == 0 and t >= 2 and n > max(F, t) and not drop:
            allowed.insert(0, n - 1)
        expected = next((h for h in allowed if found(h, n, F // b, b, k, W, e, "w" in drop)), 0)
        hit = lookup.offload_hit(config, lookup.left_by(config, n, n).offload, n)
        numbers = (b, k, full_block, W, e, n, hit, expected)
        if hit in allowed:
            assert hit == expected, numbers
        else:  # nothing, or a run that ends inside a segment; theorem 2 says what that risks
            assert hit > expected or hit == expected == 0, numbers
        hits += expected > 0
        unaligned += expected % t > 0
        losses += bool(allowed) and expected != allowed[0]
    assert hits > 500 and losses > 50 and unaligned > 10


# -- common hits ---------------------------------------------------------------------------------------------


def test_local_hit_is_the_folded_common_hit() -> None:
    for first, second, third in product((1, 2, 3), (2, 3, 4), (2, 6)):
        groups = tuple(Group(f"f{i}", Kind.FULL, block) for i, block in enumerate((first, second, third)))
        config = Config("box", groups, hash_block_tokens=1)
        alignment = lookup.local_alignment_tokens(config)
        assert alignment == lcm(first, second, third)
        for tokens, *held in product((1, 7, 13), range(5), range(5), range(5)):
            ends = tuple(
                frozenset((i + 1) * g.block_tokens for i in range(many))
                for g, many in zip(groups, held, strict=True)
            )
            folded = tokens - 1
            for group, many in zip(groups, held, strict=True):
                folded = arith.common_hit(folded, many * group.block_tokens, alignment)
            assert lookup.local_hit(config, ends, tokens) == folded


def test_a_lookup_that_shrinks_between_mamba_boundaries_names_a_later_state() -> None:
    """Theorem 7's witness at a quarter of its size: all present but the window's last chunk."""
    config = deployment(Group("f", Kind.FULL, 4), Group("w", Kind.WINDOW, 1, 1), Group("m", Kind.MAMBA, 4))
    ends = (chunk_ends(range(2), 4), chunk_ends(range(7), 1), chunk_ends(range(2), 4))
    hit = lookup.offload_hit(config, ends, 9)
    assert hit == 7
    problem = lookup.wrong_in_load(config, ends, hit)
    assert problem is not None and "after 8 tokens" in problem
