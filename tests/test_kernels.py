"""Every kernel against its plain torch twin, on CPU in Triton's interpreter or on a CUDA device.

A case is drawn from a seed, built twice, run once by each side, and all memory of both is compared byte by
byte, guard bands around every tensor included.  Memory that nobody should touch is random, so an unwritten
output or a stray write shows.  `test_comparison_sees_*` show that the comparison can fail.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

try:
    import torch

    from impl.kernels import align, pages, reference
    from impl.kernels.jit import DEVICE, INTERPRETED, tl, triton, twin
    from impl.kernels.layout import (
        BindingError,
        GatherTables,
        Layout,
        PagedChunks,
        Recurrent,
        SlotMemory,
        StateView,
        tile_records,
    )  # fmt: skip
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "triton"):
        raise
    pytest.skip(f"kernels left out: {missing.name} is not installed", allow_module_level=True)

from spec.arith import align as formulas
from spec.arith import coverage, division

RUNS = int(os.environ.get("KERNEL_FUZZ_RUNS", "4" if INTERPRETED else "60"))
# The interpreter converts one-element arrays in a way that newer numpy frowns upon.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GUARD = 64  # elements before and after every tensor


class Arena:
    """Tensors inside random memory; two arenas of one seed hold the same bytes at the same places."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bytes = torch.Generator().manual_seed(seed)
        self.whole: dict[str, torch.Tensor] = {}

    def noise(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = False
    ) -> torch.Tensor:
        """A tensor of random bytes between guard bands."""
        width = torch.empty(0, dtype=dtype).element_size()
        length = GUARD * 2 + int(torch.tensor(shape).prod())
        noise = torch.randint(0, 256, (length * width,), generator=self.bytes, dtype=torch.uint8)
        if pinned:
            whole = noise.pin_memory() if DEVICE == "cuda" else noise
        else:
            whole = noise.to(DEVICE)
        self.whole[name] = whole
        return whole.view(dtype)[GUARD : length - GUARD].view(shape)

    def ints(self, name: str, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of these values between guard bands."""
        plain = torch.tensor(values, dtype=dtype)
        tensor = self.noise(name, tuple(plain.shape), dtype)
        tensor.copy_(plain)
        return tensor

    def differences(self, other: Arena) -> list[str]:
        """Names of tensors whose memory, guard bands included, differs; with the first byte."""
        found = []
        for name, mine in self.whole.items():
            unequal = (mine.cpu() != other.whole[name].cpu()).nonzero()
            if len(unequal):
                found.append(f"{name} at byte {int(unequal[0])} of {mine.numel()}, {len(unequal)} bytes")
        return found


@dataclass(frozen=True)
class Model:
    """States to copy: each (group, layout, dtype, tokens, inner, padding after the block in elements)."""

    name: str
    states: tuple[tuple[int, Layout, torch.dtype, int, int, int], ...]
    groups: int = 1
    block_tokens: int = 4
    drafts: int = 2
    tile_bytes: int | None = 256
    warps: int | None = 4
    programs: int | None = None
    blocks: int = 200
    row_pad: int = 0  # elements after each channel of a channel-first state


TEMPORAL, SD, DS = Layout.TEMPORAL, Layout.CONV_TOKEN_FIRST, Layout.CONV_CHANNEL_FIRST
MODELS = (
    Model(
        "aligned",
        ((0, TEMPORAL, torch.float32, 0, 200, 24), (0, SD, torch.bfloat16, 5, 80, 48),
         (0, TEMPORAL, torch.float32, 0, 64, 0)),
    ),
    Model(
        "channel-first",
        ((0, TEMPORAL, torch.bfloat16, 0, 120, 8), (0, DS, torch.bfloat16, 5, 21, 4),
         (0, DS, torch.float32, 3, 9, 0)),
        row_pad=3, block_tokens=16, drafts=1, programs=3,
    ),
    Model(
        "odd bytes",
        ((0, TEMPORAL, torch.uint8, 0, 77, 6), (0, SD, torch.uint8, 4, 13, 3),
         (0, DS, torch.uint8, 4, 13, 5)),
        tile_bytes=128, block_tokens=3, drafts=3,
    ),
    Model(
        "wide elements, two groups",
        ((0, TEMPORAL, torch.int64, 0, 33, 2), (1, DS, torch.complex128, 3, 5, 1),
         (1, SD, torch.int64, 3, 9, 3), (0, SD, torch.complex128, 2, 4, 0)),
        groups=2, drafts=4, programs=5,
    ),
    Model(
        "halves and words",
        ((0, TEMPORAL, torch.int16, 0, 41, 2), (1, TEMPORAL, torch.int32, 0, 23, 1),
         (0, SD, torch.int16, 7, 6, 1), (1, SD, torch.int32, 3, 7, 2), (2, DS, torch.float64, 6, 3, 2)),
        groups=3, block_tokens=8, drafts=5, programs=1,
    ),
    Model(
        "as shipped",  # grid, tiles and warps as they are tuned
        ((0, TEMPORAL, torch.float32, 0, 70_000, 12), (0, SD, torch.bfloat16, 5, 2056, 8)),
        block_tokens=16, drafts=2, tile_bytes=None, warps=None, blocks=70,
    ),
)  # fmt: skip
ROWS, SLOTS, COLUMNS = 6, 9, 14


@dataclass
class Case:
    """One side's memory of a drawn case."""

    arena: Arena
    bound: Recurrent
    memory: SlotMemory
    arguments: dict[str, torch.Tensor] = field(default_factory=dict)


def build(model: Model, seed: int) -> Case:
    """Tables of distinct blocks, some columns of a row naming the same block or the null block."""
    arena = Arena(seed)
    rng = arena.random
    names = list(range(1, model.blocks))
    rng.shuffle(names)
    sources, inputs = [], []
    for group in range(model.groups):
        rows = []
        for _ in range(SLOTS):
            row = [names.pop() for _ in range(7)]
            rows.append(
                [rng.choice(row) for _ in range(COLUMNS)] if rng.random() < 0.3 else (row * 2)[:COLUMNS]
            )
        source = arena.noise(f"source table {group}", (SLOTS, COLUMNS + group), torch.int32)[:, :COLUMNS]
        source.copy_(torch.tensor(rows, dtype=torch.int32))
        sources.append(source)
        inputs.append(arena.noise(f"input table {group}", (ROWS, COLUMNS + 1), torch.int32)[:, :COLUMNS])
    states = []
    for number, (group, layout, dtype, tokens, inner, padding) in enumerate(model.states):
        channel = tokens + model.row_pad
        size = {TEMPORAL: inner, SD: tokens * inner, DS: channel * inner}[layout]
        memory = arena.noise(f"state {number}", (model.blocks, size + padding), dtype)
        if layout is TEMPORAL:
            view = memory[:, :size]
        elif layout is SD:
            view = memory[:, :size].unflatten(1, (tokens, inner))
        else:
            view = memory[:, :size].unflatten(1, (inner, channel))[:, :, :tokens]
        states.append(StateView(view, layout, group))
    slots = {name: arena.ints(name, values, torch.int32) for name, values in draw_slots(model, rng).items()}
    bound = Recurrent(model.block_tokens, model.drafts, tuple(sources), tuple(inputs), tuple(states))
    case = Case(arena, bound, SlotMemory(**slots))
    draw_rows(case, model)
    return case


def draw_slots(model: Model, rng: random.Random) -> dict[str, list[int]]:
    """Slot memory in any combination that a kernel may meet, fresh slots included."""
    last = COLUMNS - 1 - model.drafts
    return {
        "columns": [rng.choice([-1, *range(last + 1)]) for _ in range(SLOTS)],
        "accepted": [rng.randint(0, model.drafts + 1) for _ in range(SLOTS)],
    }


def draw_rows(case: Case, model: Model) -> None:
    """A batch: a permuted, partial row map with masked and padded rows, and each row's inputs."""
    arena, rng = case.arena, case.arena.random
    rows = rng.randint(0, ROWS)
    slots = rng.sample(range(SLOTS), rows)
    mapping = [slot if rng.random() < 0.8 else -1 for slot in slots]
    mapping += [-1] * rng.randint(0, ROWS - rows)
    block, last = model.block_tokens, COLUMNS - 1 - model.drafts
    tokens = torch.int64 if rng.random() < 0.5 else torch.int32
    scheduled = [rng.choice([1, model.drafts + 1, rng.randint(1, 2 * block)]) for _ in mapping]
    starts = [sum(scheduled[:row]) for row in range(len(mapping) + 1)]
    case.arguments = {
        "idx_mapping": arena.ints("idx_mapping", mapping, torch.int32),
        "query_start": arena.ints("query_start", starts, torch.int32),
        "before": arena.ints("before", [rng.randint(0, (last - 1) * block) for _ in range(SLOTS)], tokens),
        "after": arena.ints("after", [rng.randint(0, (last - 1) * block) for _ in range(SLOTS)], tokens),
        "sampled": arena.ints("sampled", [rng.randint(0, model.drafts + 1) for _ in mapping], torch.int32),
        "sequence": arena.ints(
            "sequence",
            [0 if slot < 0 else rng.randint(0, COLUMNS * block) for slot in mapping], torch.int32,
        ),
    }  # fmt: skip


def both(
    model: Model, seed: int, run: Callable[[align.Align | reference.Align, Case], None],
    spoil: Callable[[Case], None] | None = None,
) -> list[str]:  # fmt: skip
    """Run a case on both sides; the differences of all memory.  `spoil` changes the kernels' side first."""
    plain, fast = build(model, seed), build(model, seed)
    if spoil is not None:
        spoil(fast)
    run(reference.Align(plain.bound, plain.memory), plain)
    kernels = align.Align(
        fast.bound, fast.memory, programs=model.programs, tile_bytes=model.tile_bytes, warps=model.warps
    )
    kernels.state_indices.fill_(-7)
    run(kernels, fast)
    return plain.arena.differences(fast.arena)


def run_preprocess(side: align.Align | reference.Align, case: Case) -> None:
    side.preprocess(*(case.arguments[name] for name in ("idx_mapping", "query_start", "before")))


def run_precopy(side: align.Align | reference.Align, case: Case) -> None:
    run_preprocess(side, case)
    side.precopy()


def run_postprocess(side: align.Align | reference.Align, case: Case) -> None:
    case.memory.columns.clamp_(min=0)
    side.postprocess(*(case.arguments[name] for name in ("idx_mapping", "sampled", "after")))


def run_scatter(side: align.Align | reference.Align, case: Case) -> None:
    side.scatter_accepted(case.arguments["idx_mapping"], case.arguments["sampled"])


def run_indices(side: align.Align | reference.Align, case: Case) -> None:
    case.arena.whole["indices"] = side.aligned_state_indices(case.arguments["sequence"]).clone().reshape(-1)


def run_step(side: align.Align | reference.Align, case: Case) -> None:
    given = case.arguments
    indices = side.before_forward(
        given["idx_mapping"], given["query_start"], given["before"], given["sequence"]
    )
    case.arena.whole["indices"] = indices.clone().reshape(-1)
    case.memory.columns.clamp_(min=0)
    side.postprocess(given["idx_mapping"], given["sampled"], given["after"])


KERNELS = {
    "preprocess": run_preprocess,
    "precopy": run_precopy,
    "postprocess": run_postprocess,
    "scatter": run_scatter,
    "indices": run_indices,
    "step": run_step,
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_reference(kernel: str, model: Model) -> None:
    for seed in range(RUNS if model.tile_bytes else max(RUNS // 3, 1)):
        assert both(model, seed, KERNELS[kernel]) == [], f"seed {seed}"


# --- the comparison can fail --------------------------------------------------------------------------------


def rows_for_slots(case: Case) -> None:
    mapping = case.arguments["idx_mapping"]
    live = mapping >= 0
    mapping[live] = torch.arange(len(mapping), dtype=torch.int32, device=mapping.device)[live]


def offset_by_one(case: Case) -> None:
    case.memory.accepted.copy_((case.memory.accepted - 1).clamp(min=0))
    case.arguments["sampled"].copy_((case.arguments["sampled"] - 1).clamp(min=1))


def unmask(case: Case) -> None:
    case.arguments["idx_mapping"].clamp_(min=0)


def gathered_tables(case: Case) -> None:
    table = case.bound.source_tables[0]
    table.copy_(table.roll(1, 0))


SPOILS = {
    "batch row used as slot": (rows_for_slots, ("preprocess", "precopy", "postprocess", "scatter")),
    "offset one short": (offset_by_one, ("precopy", "postprocess")),
    "masked row not masked": (unmask, ("preprocess", "precopy", "postprocess", "scatter")),
    "another request's table row": (gathered_tables, ("precopy", "postprocess")),
}


@pytest.mark.parametrize("name", SPOILS)
def test_comparison_sees_a_wrong_operand(name: str) -> None:
    spoil, kernels = SPOILS[name]
    for kernel in kernels:
        changed = ("idx_mapping", "sampled", "source table 0")
        seen = [
            difference
            for seed in range(4)
            for difference in both(MODELS[0], seed, KERNELS[kernel], spoil)
            if not difference.startswith(changed)
        ]
        assert seen, f"{kernel} with {name} went unnoticed"


def test_comparison_sees_a_stray_write_into_a_guard_band() -> None:
    def stray(side: align.Align | reference.Align, case: Case) -> None:
        if isinstance(side, align.Align):
            case.arena.whole["state 0"][-1] ^= 1

    assert both(MODELS[0], 0, stray)


# --- the shared arithmetic, jitted --------------------------------------------------------------------------

TWO_ARGUMENTS = {
    "floordiv": (division.floordiv, False),
    "floormod": (division.floormod, False),
    "cdiv": (division.cdiv, False),
    "round_down": (division.round_down, False),
    "seed_column": (formulas.seed_column, False),
    "aligned_first_column": (formulas.aligned_first_column, False),
    "destination_column": (formulas.destination_column, False),
    "running_column": (formulas.running_column, True),
    "boundary_reached": (formulas.boundary_reached, True),
    "boundary_offset": (formulas.boundary_offset, True),
}
"""Formulas (x, block), or with True (x, y, block)."""


@triton.jit
def box_kernel(
    x_ptr, y_ptr, out, CORE: tl.constexpr, BLOCK: tl.constexpr, THREE: tl.constexpr, N: tl.constexpr
):
    lane = tl.arange(0, N)
    x, y = tl.load(x_ptr + lane), tl.load(y_ptr + lane)
    if THREE:
        tl.store(out + lane, CORE(x, y, BLOCK).to(tl.int32))
    else:
        tl.store(out + lane, CORE(x, BLOCK).to(tl.int32))


@pytest.mark.parametrize("name", TWO_ARGUMENTS)
def test_jitted_formula_equals_python_over_a_box(name: str) -> None:
    core, three = TWO_ARGUMENTS[name]
    points = [(x, y) for x in range(-13, 30) for y in range(6)][:256]
    x = torch.tensor([p[0] for p in points], dtype=torch.int32, device=DEVICE)
    y = torch.tensor([p[1] for p in points], dtype=torch.int32, device=DEVICE)
    for block in (1, 3, 4, 16):
        out = torch.full((256,), -99, dtype=torch.int32, device=DEVICE)
        box_kernel[(1,)](x, y, out, twin(core), block, three, 256)
        expected = [int(core(a, b, block) if three else core(a, block)) for a, b in points]
        assert out[: len(points)].tolist() == expected, block


@triton.jit
def plain_floordiv(x, divisor):
    return x // divisor


def test_truncating_division_fails_the_box() -> None:
    """In a kernel `//` rounds towards zero, so that a fresh request's marker would be lost."""
    x = torch.arange(-8, 8, dtype=torch.int32, device=DEVICE)
    out = torch.full((16,), -99, dtype=torch.int32, device=DEVICE)
    box_kernel[(1,)](x, x, out, plain_floordiv, 4, False, 16)
    wrong = [a for a, b in zip(x.tolist(), out.tolist(), strict=True) if b != division.floordiv(a, 4)]
    assert wrong == [-7, -6, -5, -3, -2, -1]


def test_a_twin_compiles_the_very_function() -> None:
    for core in (formulas.running_column, formulas.boundary_reached, coverage.first_retained_column):
        assert twin(core).fn.__code__ is core.__code__
    with pytest.raises(TypeError, match="reads DOMAINS, which is no formula"):
        twin(reads_a_dictionary)


def reads_a_dictionary(x: int) -> int:
    return x + DOMAINS[x]


DOMAINS: dict[int, int] = {}


# --- gather, zeroing, host copies ---------------------------------------------------------------------------


def build_gather(seed: int) -> tuple[Arena, GatherTables]:
    arena = Arena(seed)
    rng = arena.random
    widths, groups = (5, 11, 8), 3
    sources, inputs = [], []
    for group, width in enumerate(widths):
        sources.append(arena.noise(f"source {group}", (SLOTS, width + group), torch.int32)[:, :width])
        inputs.append(arena.noise(f"input {group}", (ROWS, width + 2), torch.int32)[:, :width])
    counts = [[rng.randint(0, width) for _ in range(SLOTS)] for width in widths]
    num_blocks = arena.ints("num_blocks", counts, torch.int32)
    return arena, GatherTables(
        tuple(sources), tuple(inputs), num_blocks, (16, 4, 4)[:groups], (0, 8, 6), (0, 3, 0)
    )


def test_gather_equals_reference_over_batches_that_shrink_and_grow() -> None:
    for seed in range(3 * RUNS):
        (plain, bound), (fast, fast_bound) = build_gather(seed), build_gather(seed)
        sides = (
            (plain, reference.Gather(bound)),
            (fast, pages.Gather(fast_bound, programs=1 + seed % 5, columns=4)),
        )
        for step in range(3):
            rng = random.Random(100 * seed + step)
            rows = rng.randint(0, ROWS)
            mapping = [slot if rng.random() < 0.8 else -1 for slot in rng.sample(range(SLOTS), rows)]
            computed = [rng.randint(0, 50) for _ in range(SLOTS)]
            for arena, gather in sides:
                gather(
                    arena.ints(f"mapping {step}", mapping, torch.int32),
                    arena.ints(f"computed {step}", computed, torch.int64),
                )
            assert plain.differences(fast) == [], f"seed {seed} step {step}"


@pytest.mark.parametrize("size, padding", [(64, 0), (1000, 24), (96, 32), (77, 3), (12, 4), (6, 0)])
def test_zero_blocks_equals_reference(size: int, padding: int) -> None:
    for seed in range(RUNS):
        arenas = [Arena(seed), Arena(seed)]
        for number, arena in enumerate(arenas):
            blocks = arena.noise("pages", (20, size + padding), torch.uint8)[:, :size]
            ids = arena.random.sample(range(-1, 20), arena.random.randint(0, 20))
            named = arena.ints("ids", ids, torch.int32)
            if number:
                pages.zero_blocks(blocks, named, programs=1 + seed % 4, piece_bytes=128)
            else:
                reference.zero_blocks(blocks, named)
        assert arenas[0].differences(arenas[1]) == [], f"seed {seed}"


@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to device"])
@pytest.mark.parametrize("size, padding", [(64, 0), (1000, 24), (96, 32), (77, 3), (12, 4), (2, 2)])
def test_copy_blocks_equals_reference(size: int, padding: int, to_host: bool) -> None:
    for seed in range(RUNS):
        arenas = [Arena(seed), Arena(seed)]
        for number, arena in enumerate(arenas):
            rng = arena.random
            device_pages = arena.noise("pages", (24, size + padding), torch.uint8)[:, :size]
            chunks = arena.noise("chunks", (9, 3, size + padding), torch.uint8, pinned=True)[:, :, :size]
            count = rng.randint(0, 20)
            blocks = [block if rng.random() < 0.9 else -1 for block in rng.sample(range(24), count)]
            places = rng.sample([(chunk, sub) for chunk in range(9) for sub in range(3)], count)
            jobs = [[block, *place] for block, place in zip(blocks, places, strict=True)]
            listed = arena.ints("jobs", jobs, torch.int32) if jobs else torch.empty((0, 3), dtype=torch.int32)
            memory = PagedChunks(device_pages, chunks)
            if number:
                how = {} if seed % 3 == 0 else {"programs": 1 + seed % 4, "piece_bytes": 256, "warps": 4}
                pages.copy_blocks(memory, listed, to_host, **how)
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
            else:
                reference.copy_blocks(memory, listed, to_host)
        assert arenas[0].differences(arenas[1]) == [], f"seed {seed}"


# --- bytes past 2 GiB, refusals -----------------------------------------------------------------------------


def test_byte_offsets_are_64_bit() -> None:
    """Block 5 of pages 700 MB apart; on CPU the memory in between is never touched, hence never there."""
    stride, blocks = 700_000_016, 6
    memory = torch.empty(stride * blocks, dtype=torch.uint8, device=DEVICE)
    state = memory.as_strided((blocks, 96), (stride, 1))
    for block in range(blocks):
        state[block] = block
    table = torch.tensor([[1, 5, 4]], dtype=torch.int32, device=DEVICE)
    bound = Recurrent(4, 0, (table,), (table,), (StateView(state, TEMPORAL),))
    slots = SlotMemory.empty(1, DEVICE)
    slots.admit(0, 12, 4)
    side = align.Align(bound, slots, programs=1, tile_bytes=128)
    row = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    side.decide(row, row + 1, row + 8)  # from column 2, block 4, to column 1, block 5
    side.postcopy()
    assert [int(state[block, 95]) for block in range(blocks)] == [0, 1, 2, 3, 4, 4]


def test_bindings_are_refused_in_one_line() -> None:
    table = torch.zeros((2, 3), dtype=torch.int32)
    state = torch.zeros((4, 6, 2))
    with pytest.raises(BindingError, match="contiguous within a block"):
        StateView(state[:, :, :1], Layout.TEMPORAL)
    with pytest.raises(BindingError, match="channel-first"):
        StateView(state.transpose(1, 2), Layout.CONV_CHANNEL_FIRST)
    with pytest.raises(BindingError, match="a state names group 1 of 1"):
        Recurrent(4, 0, (table,), (table,), (StateView(state, Layout.TEMPORAL, 1),))
    with pytest.raises(BindingError, match="is int32"):
        Recurrent(4, 0, (table.long(),), (table,), ())
    with pytest.raises(BindingError, match="tile_bytes must be a power of two, at least 16 x 8"):
        bound = Recurrent(4, 0, (table,), (table,), (StateView(torch.zeros((4, 7, 2)), SD),))
        align.Align(bound, SlotMemory.empty(2, "cpu"), programs=1, tile_bytes=64)


def test_models_cover_every_path_of_the_copy_kernel() -> None:
    seen = 0
    for model in MODELS:
        states = build(model, 0).bound.states
        seen |= align._paths(tile_records(states, align.shape_of(states, model.tile_bytes or 65536)))
    assert seen == 32 + 16 + 8 + 4 + 2 + 1
