"""Sensitivity: the catalogue's faults, put into the implementation from outside, and whether each is
caught.

``python -m impl.inject [--fault NAME|--list] [--device cpu|cuda] [--order turns|gated|free]
[--kernels torch|triton] [--runs R] [--choices N] [--seed S] [--json FILE]``

The shipped modules hold no fault switch.  A fault is another decision function or another order of a step
(``spec.faults`` says which), an edit of what the engine answers (:class:`Edited`), or other arrays:
:class:`Swapped` binds the kernels to tables whose rows it fills from wherever an operation's operands say, so
that a row taken by batch index, a rotated buffer or a stale table reaches the kernels as it reached them in
the field.  Each fault is looked for twice: by everything (contracts, ghost, bytes), and by bytes alone, with
every rule of the model switched off.  Without it, the choices that catch it must hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from impl import options

try:
    import torch
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    options.without_torch("impl.inject", options.inject())

from impl import refine
from impl.decisions import Decisions
from impl.device import Device, Feed
from impl.engine import Engine
from impl.kernels.layout import GatherTables
from impl.refine import BYTES, Build, MakeWorld, RealWorld, implementation
from spec import config as configs
from spec import handbook
from spec.chains import Chains
from spec.config import Config, ConfigError
from spec.faults import CATALOGUE, Fault, hunt
from spec.faults.fault import HARMLESS
from spec.faults.tamper import Tamper
from spec.lockstep import Lockstep
from spec.ops import Deref, Forward, Gather, Imm, PostProcess, PreProcess, SetRow, TableRow
from spec.outputs import check_part, check_target, set_aside, write_json
from spec.rules import BY_NAME
from spec.trace import commit
from spec.usage import command
from spec.world import Choice

MODEL_RUNS = 20  # of the model's walk, for each of the implementation's
SILENT = frozenset(BY_NAME) - {"policy_raises_no_error"}
"""Rules that are off when bytes are to find a fault alone."""


class Swapped(Device):
    """A device whose kernels see the tables that operands name, instead of those that were bound at the
    start."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        memory = self.memory
        self.other = tuple(torch.zeros_like(table) for table in memory.gathered)  # the pool's second buffer
        own = memory.gather_tables()
        rotated = GatherTables(
            memory.source,
            self.other,
            own.num_blocks,
            own.block_tokens,
            own.window_tokens,
            own.extra_tokens,
        )
        self.gather_other = self.kernels.gather(rotated)
        self.buffers = {"source": memory.source, "gathered": memory.gathered, "gathered.1": self.other}
        bound = memory.recurrent()
        if bound is not None:
            self.seen = tuple(torch.zeros_like(table) for table in bound.source_tables)
            self.rows = tuple(torch.zeros_like(table) for table in bound.input_tables)
            swapped = replace(bound, source_tables=self.seen, input_tables=self.rows)
            self.align = self.kernels.align(swapped, memory.slots)

    def restart(self, feed: Any, wire: Any) -> None:
        """The tables that are shown, too."""
        super().restart(feed, wire)
        for table in (*self.other, *(self.seen if self.align else ()), *(self.rows if self.align else ())):
            table.zero_()

    def show(self, tables: tuple[torch.Tensor, ...], row: int, operand: TableRow) -> None:
        """Fill a row of the tables that the kernels are bound to."""
        for table, g in zip(tables, self.memory.mamba, strict=True):
            if isinstance(operand, Imm):
                table[row].zero_()
                table[row, : len(operand.rows[g])] = self.tensor(operand.rows[g])
            else:
                assert isinstance(operand, Deref)
                table[row] = self.buffers[operand.buffer][g][operand.row]

    def set_row(self, op: SetRow) -> None:
        """What stands in the host's memory when the copy runs, where the host rewrites it."""
        blocks = op.blocks
        if not isinstance(blocks, list):
            super().set_row(op)
            return
        length, memory = len(blocks), self.memory
        sent = self.late(op, lambda: [*blocks, *[0] * length][:length], length)
        memory.source[op.group][op.row, op.first : op.first + length] = sent.int()
        memory.num_blocks[op.group, op.row].fill_(op.first + length)

    def gather_rows(self, op: Gather) -> None:
        """Into the buffer that the operation names, and no further than its padding."""
        self.gather._dirty_rows = self.gather_other._dirty_rows = (
            0  # the kernel would clear old rows by itself
        )
        if op.buffer == "gathered":
            super().gather_rows(op)
            return
        padding = [-1] * (op.padded - len(op.slots))
        self.gather_other(self.tensor([*op.slots, *padding]), self.memory.computed)

    def pre_process(self, op: PreProcess) -> None:
        """Through the rows that the operands name."""
        for operand, slot, _ in op.rows if self.align else ():
            self.show(self.seen, slot, operand)
        super().pre_process(op)

    def post_process(self, op: PostProcess) -> None:
        """Through the rows that the operands name; with the floor that the operation names."""
        for _, slot, operand in op.rows if self.align else ():
            if slot >= 0:
                self.show(self.seen, slot, operand)
        super().post_process(op)
        for i, (_, slot, _) in enumerate(op.rows):
            if slot >= 0:
                accepted = self.memory.slots.accepted[slot : slot + 1]
                accepted.masked_fill_(self.sampled[i : i + 1] == 0, op.floor)

    def results(self, op: PostProcess) -> tuple[torch.Tensor, torch.Tensor]:
        """Remembered, for rows that have sampled nothing."""
        self.sampled, rejected = super().results(op)
        return self.sampled, rejected

    def show_index(self, op: Forward) -> None:
        """The rows that the operands name."""
        for i, operand in enumerate(op.index if self.align else ()):
            self.show(self.rows, i, operand)

    def state_columns(self, sequence: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """A captured graph's padded rows have a length, too."""
        return super().state_columns(torch.where(lengths > 0, sequence, torch.ones_like(sequence)), lengths)


class Edited:
    """An engine whose answers and programs are edited on their way to the world: what is asked goes through
    the fault's edits, memory and devices are the engine's own."""

    def __init__(self, engine: Engine, tamper: Tamper, config: Config, chains: Chains) -> None:
        self.devices = engine.devices
        self.policy = tamper(lambda *_: engine)(config, chains)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def injectable() -> dict[str, Fault]:
    """Faults that replace decisions which the implementation has, or edit answers and programs."""
    known = {field.name for field in fields(Decisions)}
    return {
        name: fault
        for name, fault in CATALOGUE.items()
        if (fault.change or fault.tamper)
        and set(fault.change) | set(fault.base) <= known
        and fault.kind != HARMLESS
    }


def faulty(fault: Fault, kernels: str = "torch", device_type: Callable[..., Device] = Swapped) -> Build:
    """The implementation with the fault in it."""
    decide, tamper = replace(Decisions(), **{**fault.base, **fault.change}), fault.tamper
    build = implementation(decide, kernels=kernels, device_type=device_type)
    if tamper is None:
        return build

    def edited(config: Config, chains: Chains, feed: Feed) -> Any:
        return Edited(build(config, chains, feed), tamper, config, chains)

    return edited


def repaired(fault: Fault, kernels: str = "torch", device_type: Callable[..., Device] = Swapped) -> Build:
    """The same design without it."""
    return implementation(replace(Decisions(), **fault.base), kernels=kernels, device_type=device_type)


def followed(fault: Fault, make: MakeWorld) -> MakeWorld:
    """Worlds in which the reference follows only a fault that was found in its own design; contracts judge
    every design."""

    def made(config: Config, build: Build, **options: Any) -> RealWorld:
        world = make(config, build, **options)
        policy: object = world.policy
        if fault.base and isinstance(policy, Lockstep):
            policy.lost = "the reference has another design"
        return world

    return made


@dataclass(frozen=True, slots=True)
class Catch:
    """Where a fault was caught first; ``twin``: what broke on the same choices without the fault, if
    anything."""

    config: str
    run: int
    choices: int
    rule: str
    text: str
    twin: str


def resends(config: Config) -> Iterator[tuple[Choice, ...]]:
    """For every length of a prompt: it is served, the device forgets it, and it is sent again."""
    for prompt in range(1, config.request_tokens):
        first, again = (("arrive", name, "0", prompt, 1) for name in ("r1", "r2"))
        yield first, ("quiet",), ("reset", "local"), again


def catch(
    fault: Fault, *, runs: int, choices: int, seed: int, kernels: str = "torch", bytes_alone: bool = False,
    make: MakeWorld = RealWorld, device_type: Callable[..., Device] = Swapped,
) -> Catch | None:  # fmt: skip
    """The first run, in the configurations where the fault bites, that catches it: the catalogue's
    stored run of it, if any (run -1), then resends (run -2), then walks, then a run that the model's own
    walk finds, being much faster (run -3).  The choices that catch it are made once more, without it."""
    build, twin = faulty(fault, kernels, device_type), repaired(fault, kernels, device_type)
    judged, off = not bytes_alone, SILENT if bytes_alone else frozenset()
    make = followed(fault, make)

    def caught(run: refine.Run, number: int) -> Catch | None:
        broken = refine.failure(run)
        if not broken:
            return None
        again = refine.replay(run.config, twin, run.choices, judged=judged, off=off, make=make)
        left = ": ".join(refine.failure(again) or ())
        return Catch(run.config.name, number, len(run.choices), *broken, left)

    def replayed(config: Config, script: Sequence[Choice], number: int) -> Catch | None:
        return caught(refine.replay(config, build, script, judged=judged, off=off, make=make), number)

    known = hunt.stored(fault.name)
    found = replayed(known[0], known[2], -1) if known else None
    todo = [configs.find(name) for name in fault.bites]
    for config in todo if not found and not bytes_alone else ():
        for script in resends(config):
            found = found or replayed(config, script, -2)
    for number in range(0 if found else runs):
        for config in todo:
            run = refine.refine_once(config, build, seed, number, choices, judged=judged, off=off, make=make)
            found = found or caught(run, number)
        if found:
            break
    for config in todo if not found and not bytes_alone else ():
        model = hunt.find(config, fault.policy, runs=MODEL_RUNS * runs, choices=choices, seed=seed)
        found = found or (replayed(config, model.choices, -3) if model else None)
    return found


def rows(args: argparse.Namespace, chosen: dict[str, Fault]) -> Iterator[dict[str, Any]]:
    """One row a fault: who catches it."""
    make, _, device_type = refine.worlds(args, Swapped)
    options = {
        "runs": args.runs, "choices": args.choices, "seed": args.seed, "kernels": args.kernels,
        "make": make, "device_type": device_type,
    }  # fmt: skip
    for name, fault in chosen.items():
        one = catch(fault, **options)
        alone = catch(fault, **options, bytes_alone=True)
        by_bytes = alone.rule if alone else ""
        yield {
            "fault": name, "mechanism": fault.mechanism, "caught by": one.rule if one else "",
            "in": one.config if one else "", "run": one.run if one else None, "text": one.text if one else "",
            "bytes alone": {BYTES: "bytes", "": ""}.get(by_bytes, "it raises an error"),
            "repaired": "; ".join(filter(None, (each.twin for each in (one, alone) if each))) or "holds",
        }  # fmt: skip


def part(args: argparse.Namespace) -> str:
    """The document's part that a run records."""
    return "inject" if args.order == "turns" else f"inject-{args.order}"


def checked(args: argparse.Namespace) -> dict[str, Fault]:
    """The faults that are asked for; fills in what was not said.  Raises ``ConfigError``, ``OutputError``."""
    known = injectable()
    for name in args.fault or ():
        if name not in known:
            raise ConfigError(f"no fault named {name!r}; --list shows all")
    if (args.runs is not None and args.runs < 1) or args.choices < 1:
        raise ConfigError("--runs and --choices must be at least 1")
    refine.place(args)
    args.runs = args.runs or options.INJECT_RUNS[args.device]
    check_target("--json", args.json)
    check_part("--markdown", args.markdown, part(args))
    return {name: known[name] for name in args.fault or known}


@command("impl.inject")
def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = options.inject().parse_args(argv)
    if args.list:
        print("\n".join(f"{name:<36}{fault.did}" for name, fault in injectable().items()))
        return 0
    try:
        chosen = checked(args)
    except ConfigError as error:
        print(f"impl.inject: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    out = set_aside(args.json)
    found, stopped = [], False
    print(f"{'fault':<36}{'caught by':<30}{'bytes alone':<20}in")
    try:
        for row in rows(args, chosen):
            found.append(row)
            caught = row["caught by"] or "NOT FOUND"
            print(f"{row['fault']:<36}{caught:<30}{row['bytes alone'] or '-':<20}{row['in']}", flush=True)
            if row["repaired"] != "holds":
                print(f"    without the fault it breaks too: {row['repaired']}", flush=True)
    except KeyboardInterrupt:
        stopped = True
        print(f"stopped after {len(found)} of {len(chosen)} faults: what was found so far is kept")
    both = [row["fault"] for row in found if row["repaired"] != "holds"]
    missed = [row["fault"] for row in found if not row["caught by"]]
    print(
        f"\n{len(found) - len(missed)} of {len(found)} faults caught, "
        f"{args.runs} runs x {args.choices} choices at most; without it the same choices hold for "
        f"{len(found) - len(missed) - len(both)}"
    )
    report = {
        "seed": args.seed, "runs": args.runs, "choices": args.choices, "faults": found, "stopped": stopped
    }  # fmt: skip
    write_json(args.json, report, out)
    if args.markdown and not stopped:
        given = "".join(f" {word}" for word in (argv if argv is not None else sys.argv[1:]))
        handbook.record(args.markdown, part(args), markdown(args, found, f"python -m impl.inject{given}"))
    return 1 if both else 3 if missed or stopped else 0


def markdown(args: argparse.Namespace, found: list[dict[str, Any]], heading: str) -> str:
    """The part of the documentation that this command records."""
    table = [
        (f"`{row['fault']}`", row["caught by"] or "not found", row["bytes alone"] or "-", row["in"])
        for row in found
    ]
    caught = sum(bool(row["caught by"]) for row in found)
    return (
        f"`{heading}`\n\n"
        f"On {refine.machine()}, commit {args.commit or commit() or 'unknown'}: "
        f"{caught} of {len(found)} faults caught; at most {args.runs} runs of "
        f"{args.choices} choices each.\n\n"
        + handbook.table(("fault", "caught by", "bytes alone", "in"), table)
    )


if __name__ == "__main__":
    sys.exit(main())
