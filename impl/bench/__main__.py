"""`python -m impl.bench --device cuda [--vllm DIR] [--json FILE]`: the speed table, as Markdown.

Every figure is a median over replays of a CUDA graph of several launches; inputs rotate past the cache;
every copy is compared with torch before it is timed.  Exit code 1 if a copy was wrong, 2 for bad usage
or no device.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spec.outputs import check_target, set_aside, write_json
from spec.usage import JSON_HELP, OneLineParser, command

USAGE, WRONG = 2, 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; a figure that does not apply is None."""

    case: str
    unit: str
    naive: float | None
    upstream: float | None
    floor: float | None
    here: float
    again: float  # the same measurement, repeated
    reach: float
    at_most: bool  # `reach` is an upper bound
    note: str = ""

    @property
    def reached(self) -> bool:
        """Whether both measurements reach the goal."""
        if self.at_most:
            return max(self.here, self.again) <= self.reach
        return min(self.here, self.again) >= self.reach

    def markdown(self) -> str:
        """The line in Markdown."""

        def number(value: float | None) -> str:
            if value is None:
                return ""
            return (
                f"{value:.2f}"
                if self.unit == "us" and value < 10
                else f"{value:.{1 if self.unit == 'us' else 3}f}"
            )

        goal = f"{'<=' if self.at_most else '>='} {self.reach:g}"
        cells = (self.case, self.unit, number(self.naive), number(self.upstream), number(self.floor),
                 number(self.here), goal, "yes" if self.reached else "no", self.note)  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEAD = """| case | unit | naive | upstream | floor | here | to reach | reached | note |
|---|---|---:|---:|---:|---:|---:|---|---|"""


class WrongCopy(Exception):
    """A kernel's result differs from torch's; the message names the case."""


def _no_device() -> str | None:
    try:
        import torch
        import triton  # noqa: F401
    except ModuleNotFoundError as missing:
        return f"{missing.name} is not installed: pip install '.[kernels]'"
    if not torch.cuda.is_available():
        return "no CUDA device is available: run this on a machine that has one"
    return None


def roof_gb_s() -> float:
    """Bytes read plus written a second by one large copy on the device."""
    import torch

    from impl.bench import timing

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / timing.eager_us(lambda: target.copy_(source)) / 1e3


def state_rows(upstream: Any, roof: float, warps: int | None, say: Callable[[str], None]) -> Iterator[Row]:
    """No crossing, one, one in sixteen, all, and a whole decode step."""
    import torch

    from impl.bench import floor, timing, workload
    from impl.kernels.align import multiprocessors

    device = "cuda"
    programs = multiprocessors(torch.device(device))
    decided = torch.zeros(1, dtype=torch.int32, device=device)
    empty = timing.replayed_us([lambda: floor.launch_nothing(decided)] * 64)
    Size = workload.Size
    sizes = (Size(8, 36), Size(64, 36), Size(256, 12), Size(512, 144, 65536, conv=False))
    for size in sizes:
        torch.cuda.empty_cache()
        work = workload.build(size, device, 1)
        name = f"{size.requests} x {size.states}"
        say(name)
        quiet = workload.variant(work, [], 0, warps)
        step = workload.decode_step(work, quiet)

        def twice(launches: list[Callable[[], object]]) -> tuple[float, float]:
            return timing.replayed_us(launches), timing.replayed_us(launches)

        theirs = None
        if upstream:
            theirs = timing.replayed_us([upstream.precopy(work, quiet)] * 8)
        yield Row(f"no crossing, {name}: pre-copy", "us", None, theirs, empty,
                  *twice([quiet.align.precopy] * 64), 2.5, True)  # fmt: skip
        if upstream:
            theirs = timing.replayed_us([upstream.postprocess(work, quiet)] * 8)
        step()
        yield Row(f"no crossing, {name}: post-copy", "us", None, theirs, empty,
                  *twice([quiet.align.postcopy] * 64), 2.5, True,
                  "upstream's decides as well; here that is in the step")  # fmt: skip
        if size.requests == 64:
            if upstream:
                both = (upstream.precopy(work, quiet), upstream.postprocess(work, quiet))
                theirs = 2 * timing.replayed_us([*both] * 4)
            yield Row(f"decode step, {name}: all align work", "us", None, theirs, 4 * empty,
                      *twice([step] * 16), 8.0, True, "upstream: the two copies alone")  # fmt: skip
        if not size.conv:
            continue
        shares = {"all crossing": (size.requests, 2, 0.95)}
        if size.requests >= 64:
            shares = {"1 of 16 crossing": (size.requests // 16, 6, 0.92), **shares}
        if size.requests == 256:
            shares = {"one crossing": (1, 16, 0.75), **shares}
        for share, (crossing, rotated, goal) in shares.items():
            chosen = []
            for turn in range(rotated):
                spread = [
                    (turn * 13 + 5 + i * (size.requests // crossing)) % size.requests for i in range(crossing)
                ]
                chosen.append(workload.variant(work, spread, turn, warps))
            check(work, chosen[0], f"{share}, {name}")
            moved = sum(workload.copied_bytes(work, one) for one in chosen) / rotated
            pieces = [floor.piece_list(work, one) for one in chosen]
            ticket = torch.zeros(1, dtype=torch.int32, device=device)

            def of_roof(launches: list[Callable[[], object]], moved: float = moved) -> float:
                return moved / timing.replayed_us(launches) / 1e3 / roof

            def stripped(one: torch.Tensor, ticket: torch.Tensor = ticket) -> Callable[[], object]:
                return lambda: floor.copy_pieces(one, ticket, programs)

            launches: list[Callable[[], object]] = [one.align.precopy for one in chosen]
            yield Row(
                f"{share}, {name}", "of roof",
                of_roof([workload.naive_copies(work, one) for one in chosen[:2]]),
                of_roof([upstream.precopy(work, one) for one in chosen]) if upstream else None,
                of_roof([stripped(one) for one in pieces]), of_roof(launches), of_roof(launches), goal, False,
                f"{moved / roof / 1e3:.1f} us at the roof",
            )  # fmt: skip
        del work, quiet, step


def check(work: Any, chosen: Any, case: str) -> None:
    """Compare a variant's copies with torch's; raises WrongCopy."""
    import torch

    from impl.bench import workload

    numbers = workload.sample_of_states(work)
    expected = workload.expect_copies(work, chosen, numbers)
    chosen.align.precopy()
    for number, tensor in zip(numbers, expected, strict=True):
        if not torch.equal(work.bound.states[number].tensor, tensor):
            raise WrongCopy(f"{case}: state {number} differs from torch's copy")


HOST_PAGES = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20)
HOST_BYTES = 256 << 20


def host_rows(upstream: Any, say: Callable[[str], None]) -> Iterator[Row]:
    """Scattered copies to and from pinned chunks, and what they cost a matrix product beside them."""
    import torch

    from impl.bench import timing
    from impl.kernels import pages
    from impl.kernels.layout import PagedChunks

    host = torch.empty(HOST_BYTES, dtype=torch.uint8).pin_memory()
    host.random_()
    memory = torch.empty(HOST_BYTES, dtype=torch.uint8, device="cuda").random_()
    pinned_copies: dict[bool, Callable[[], object]] = {
        True: lambda: host.copy_(memory, non_blocking=True),
        False: lambda: memory.copy_(host, non_blocking=True),
    }
    rates = [HOST_BYTES / timing.eager_us(pinned_copies[to_host]) / 1e3 for to_host in (True, False)]
    say(f"one pinned copy: {rates[0]:.1f} GB/s to host, {rates[1]:.1f} GB/s to device")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    products = timing.graph_of([lambda: torch.mm(left, right, out=product)] * 4)
    timing.busy_us(None, 1.0, products, 6000.0)
    roughly = timing.busy_us(None, 1.0, products, 6000.0)

    def cost(launch: Callable[[], object], us: float) -> float:
        alone = timing.busy_us(None, 1.0, products, roughly)
        return timing.busy_us(launch, us, products, roughly) / alone - 1

    held = timing.eager_us(lambda: torch.cuda._sleep(10_000_000), 3)
    held_cost = cost(lambda: torch.cuda._sleep(10_000_000), held)  # one multiprocessor held, nothing copied
    for size in HOST_PAGES:
        count = HOST_BYTES // size
        say(f"pages of {size >> 10} KiB")
        paged = PagedChunks(memory.view(count, size), host.view(count, 1, size))
        order = [torch.randperm(count), torch.randperm(count), torch.zeros(count, dtype=torch.int64)]
        jobs = torch.stack(order, 1).to(torch.int32)
        listed = jobs.tolist()
        jobs = jobs.cuda()
        for to_host in (True, False):
            name = f"{size >> 10} KiB {'to host' if to_host else 'to device'}"
            (host if to_host else memory).random_()

            def copy(jobs: torch.Tensor = jobs, to_host: bool = to_host, paged: PagedChunks = paged) -> None:
                pages.copy_blocks(paged, jobs, to_host)

            def loop(
                listed: list[list[int]] = listed, to_host: bool = to_host, paged: PagedChunks = paged
            ) -> None:
                for block, chunk, subslot in listed:
                    page, place = paged.pages[block], paged.chunks[chunk, subslot]
                    (place if to_host else page).copy_(page if to_host else place, non_blocking=True)

            copy()
            torch.cuda.synchronize()
            kept = host.view(count, size)[order[1]]
            if not torch.equal(kept, memory.view(count, size)[order[0].cuda()].cpu()):
                raise WrongCopy(f"{name}: the copied pages differ")

            whole = timing.eager_us(pinned_copies[to_host])  # again for every case: the bus is shared

            def of_pinned(us: float, whole: float = whole) -> float:
                return whole / us

            theirs = theirs_us = None
            if upstream:
                swap = upstream.swap_blocks(paged, jobs, to_host, 12)
                theirs_us = timing.replayed_us([swap], 5)
                theirs = of_pinned(theirs_us)
            here = [timing.replayed_us([copy], 5) for _ in range(2)]
            yield Row(f"host copy, {name}", "of pinned", of_pinned(timing.eager_us(loop, 1)), theirs, 1.0,
                      of_pinned(here[0]), of_pinned(here[1]), 0.94 if to_host else 0.92, False)  # fmt: skip

            theirs_cost = cost(swap, theirs_us) if upstream and theirs_us else None
            slowed = (cost(copy, here[0]), cost(copy, here[0]))
            goal = max(0.05, (theirs_cost or 0) / 2)
            yield Row(
                f"product beside it, {name}",
                "slowed by",
                None,
                theirs_cost,
                held_cost,
                slowed[0],
                slowed[1],
                round(goal, 3),
                True,
            )


@command("impl.bench")
def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = OneLineParser(prog="python -m impl.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda"], default="cuda")
    parser.add_argument("--vllm", metavar="DIR", type=Path, help="directory with upstream's two kernel files")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    parser.add_argument("--warps", type=int, choices=[4, 8, 16, 32], help="width of the copy kernel")
    parser.add_argument("--only", choices=["states", "host"], help="only this half")
    parser.add_argument("--commit", help="commit to print, where git is not available")
    given = parser.parse_args(arguments)
    check_target("--json", given.json)
    problem = _no_device()
    if problem:
        print(f"impl.bench: {problem}", file=sys.stderr)
        return USAGE
    import torch
    import triton

    from impl.bench import upstream as upstream_files

    upstream = None
    if given.vllm:
        try:
            upstream = upstream_files.load(given.vllm)
        except (upstream_files.UpstreamError, OSError) as problem_with_files:
            print(f"impl.bench: {problem_with_files}", file=sys.stderr)
            return USAGE
    out = set_aside(given.json)
    roof = roof_gb_s()

    def say(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    commit = (
        given.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{machine}; commit {commit or 'unknown'}; roof {roof:.0f} GB/s (one large copy, read + written)\n")
    print(HEAD, flush=True)
    rows = []
    try:
        if given.only != "host":
            for row in state_rows(upstream, roof, given.warps, say):
                rows.append(row)
                print(row.markdown(), flush=True)
        torch.cuda.empty_cache()
        if given.only != "states":
            for row in host_rows(upstream, say):
                rows.append(row)
                print(row.markdown(), flush=True)
    except WrongCopy as wrong:
        print(f"impl.bench: {wrong}", file=sys.stderr)
        return WRONG
    repeats = [
        abs(row.here - row.again) / abs(row.here) for row in rows if row.unit != "slowed by" and row.here
    ]
    print(f"\nLargest difference between a figure and its repetition: {max(repeats):.1%}.")
    figures = {"machine": machine, "commit": commit, "roof_gb_s": roof, "rows": [asdict(r) for r in rows]}
    write_json(given.json, figures, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
