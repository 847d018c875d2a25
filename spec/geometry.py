"""What a deployment can reuse: ``python -m spec.geometry CONFIG.toml|NAME|--list [--json FILE]``.

Reads a configuration, checks it, and prints in tokens, blocks and chunks: what hits align to, the smallest
prefix that is ever reused, how many chunks a window takes and what retention for the drafter costs, which
hits can never happen and what would allow them (each confirmed by brute force on a scaled twin), and which
theorems do not apply.  All numbers come from ``spec.arith`` and from the lookup of ``spec.lookup``; they are
those of dense retention, and the report says what the default keeps instead.

Exit codes: 0 everything printed was confirmed; 1 a statement was not; 2 bad usage or configuration; 3 there
were too many pairs of requests to try them all, and no statement failed on those that were tried.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spec import arith, config, gaps, lookup, never, pairs, twins
from spec.config import Config, ConfigError, Group, Kind
from spec.outputs import check_target, set_aside, write_json
from spec.prefix import Prefix, Tier, hit_tokens, horizon_tokens
from spec.usage import JSON_HELP, OneLineParser, command

SAMPLES = (100, 1_000, 4_000, 16_000, 64_000)
"""Shared prefixes, in tokens, for which the report says how much of them is reused."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group's sizes; None where a size has no meaning for its kind, or without offload."""

    name: str
    kind: str
    block_tokens: int
    chunk_tokens: int | None
    window_tokens: int | None
    extra_tokens: int | None
    window_blocks: int | None  # a local hit needs so many blocks in a row
    window_chunks: int | None  # a hit on a chunk boundary needs so many chunks
    window_chunks_inside: int | None  # the most that a hit inside a chunk needs
    extra_chunks: int | None  # of these, chunks that are there for the extra tokens only
    kept_blocks: int | None  # the store keeps so many blocks of each segment ...
    segment_blocks: int | None  # ... of so many


@dataclass(frozen=True, slots=True)
class Sample:
    """Of so many shared tokens, so many are reused; None where a tier is off, or no state is kept at all."""

    shared_tokens: int
    local_tokens: int | None
    local_one_step_tokens: int | None
    offload_tokens: int | None
    offload_one_step_tokens: int | None


@dataclass(frozen=True, slots=True)
class Statement:
    """A never and what brute force said about it."""

    about: never.Never
    confirmation: pairs.Confirmation


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is printed."""

    config: Config
    alignment_tokens: int
    fine_grained: bool
    store_alignment_tokens: int | None
    smallest_local_tokens: int | None
    smallest_offload_tokens: int | None
    groups: tuple[GroupRow, ...]
    samples: tuple[Sample, ...]
    twin: Config
    statements: tuple[Statement, ...]
    loads: pairs.Loads
    gaps: tuple[gaps.Gap, ...]

    @property
    def exhaustive(self) -> bool:
        """Whether every pair of requests of the twin was tried; else a confirmation is a sample's."""
        return pairs.exhaustive(self.twin)

    @property
    def confirmed(self) -> bool:
        """Whether brute force confirmed every statement, and no load went wrong that no gap explains."""
        explained = self.loads.wrong is None or any(gap.number in gaps.LOADS for gap in self.gaps)
        return explained and all(statement.confirmation.holds for statement in self.statements)


def report(deployment: Config) -> Report:
    """Work everything out; the brute force takes seconds at most."""
    twin = twins.scaled(deployment)
    about = pairs.with_remedies(never.nevers(deployment), deployment, twin)
    confirmations = pairs.confirm(never.on_twin(about, twin), twin)
    tiers = [
        tier for tier, on in (("local", deployment.prefix_caching), ("offload", deployment.offload)) if on
    ]
    smallest = {tier: Prefix(deployment, tier).smallest_tokens for tier in tiers}  # type: ignore[arg-type]
    return Report(
        deployment,
        lookup.local_alignment_tokens(deployment),
        lookup.fine_grained(deployment),
        lookup.store_alignment_tokens(deployment) if deployment.offload else None,
        smallest.get("local"),
        smallest.get("offload"),
        tuple(_group_row(deployment, group) for group in deployment.groups),
        tuple(_sample(deployment, shared) for shared in SAMPLES),
        twin,
        tuple(Statement(s, c) for s, c in zip(about, confirmations, strict=True)),
        pairs.check_loads(twin),
        tuple(gaps.gaps(deployment)),
    )


def _group_row(deployment: Config, group: Group) -> GroupRow:
    windowed = group.kind in (Kind.WINDOW, Kind.CHUNKED)
    chunk = lookup.chunk_tokens(deployment, group) if deployment.offload else None
    base = inside = extra = kept = segment = None
    if chunk is not None and group.kind is not Kind.FULL:
        base = lookup.window_chunks(deployment, group)
        inside = max(lookup.window_chunks(deployment, group, hit) for hit in range(1, chunk + 1))
    if chunk is not None and group.kind is Kind.WINDOW:
        extra = base_chunks(group, chunk) - arith.base_window_chunks(group.window_tokens, 0, chunk)
        kept, segment = _kept(deployment, group)
    return GroupRow(
        group.name,
        str(group.kind),
        group.block_tokens,
        chunk,
        group.window_tokens if windowed else None,
        group.extra_tokens if group.kind is Kind.WINDOW else None,
        _window_blocks(deployment, group),
        base,
        inside,
        extra,
        kept,
        segment,
    )


def base_chunks(group: Group, chunk_tokens: int) -> int:
    """Chunks of a window group that a hit on a chunk boundary needs, those for the extra tokens included."""
    return arith.base_window_chunks(group.window_tokens, group.extra_tokens, chunk_tokens)


def _window_blocks(deployment: Config, group: Group) -> int | None:
    if group.kind is Kind.WINDOW:
        need = arith.local_need_blocks(group.window_tokens, group.block_tokens)
        return need + lookup.local_drops(deployment, group)
    if group.kind is Kind.CHUNKED:
        return arith.blocks_of(group.window_tokens, group.block_tokens)
    return 1 if group.kind is Kind.MAMBA else None


def _kept(deployment: Config, group: Group) -> tuple[int | None, int | None]:
    """Blocks that the store keeps of each segment of a window group, and the segment's blocks."""
    align = lookup.store_alignment_tokens(deployment)
    if align is None or align % group.block_tokens:
        return None, None
    segment = arith.floordiv(align, group.block_tokens)
    drop = int(lookup.drops(deployment, group))
    need = arith.store_need_blocks(group.window_tokens, group.extra_tokens, group.block_tokens, drop)
    return (segment if arith.store_keeps_all(need, segment) else need), segment


def _sample(deployment: Config, shared: int) -> Sample:
    """What a prompt reuses that differs after ``shared`` tokens from one twice as long."""

    def reused(tier: Tier, states: lookup.States) -> int:
        left = lookup.left_by(deployment, 2 * shared, 2 * shared, states)
        return hit_tokens(deployment, tier, left, shared, shared + 1)

    local, offload = deployment.prefix_caching, deployment.offload
    mamba = any(group.kind is Kind.MAMBA for group in deployment.groups)
    return Sample(
        shared,
        reused("local", lookup.every_state) if local else None,
        reused("local", lookup.one_state) if local and mamba else None,
        reused("offload", lookup.every_state) if offload else None,
        reused("offload", lookup.one_state) if offload and mamba else None,
    )


# -- printing ------------------------------------------------------------------------------------------------


def render(r: Report) -> str:
    """The report as text."""
    c = r.config
    lines = [f"{c.name}: {c.description}" if c.description else c.name, ""]
    lines += _facts(r) + [""] + _retention_lines(c) + [""]
    lines += _table(*_group_table(r)) + [""] + _sample_lines(r) + [""]
    lines += ["hits that never happen"]
    horizon = horizon_tokens(r.twin)
    bound = f"every pair of requests up to {horizon} tokens, and with any one entry evicted"
    if not r.exhaustive:
        some = len(pairs.lengths(r.twin, horizon))
        bound = f"{some} of the {horizon} lengths of requests up to {horizon} tokens, too many for all"
    lines += [f"  (tried: {bound},", f"  on a twin with {_sizes(r.twin)})"]
    for statement in r.statements:
        lines += _statement_lines(statement)
    lines += ["", "theorems that do not apply"]
    for gap in r.gaps:
        lines += [
            f"  {gap.number} {gap.theorem}",
            f"      condition  {gap.condition}",
            f"      risk       {gap.risk}",
        ]
    if not r.gaps:
        lines += ["  none: every side condition holds"]
    if c.offload:
        lines += ["", "loads", f"  {_loads_line(r.loads)}"]
    if c.source:
        lines += ["", "sources", *(f"  {key}: {text}" for key, text in c.source)]
    return "\n".join(lines) + "\n"


def _sparse(config: Config) -> list[str]:
    """Names of the groups that keep less by default than under dense retention."""
    return [group.name for group in config.groups if group.kind in (Kind.WINDOW, Kind.MAMBA)]


def _retention_lines(config: Config) -> list[str]:
    """What retention the report assumes, and what the default does."""
    sparse = _sparse(config)
    if not sparse:
        return ["retention: dense, whatever prefix_cache_retention_interval is (no window or Mamba group)"]
    return [
        "retention: dense (prefix_cache_retention_interval = None); what is said to be reused holds for it",
        f"  The default is 0: {' and '.join(sparse)} then keep only what ends at a prompt's last aligned",
        "  position or at a junction. A second prompt with a common prefix that ends earlier reuses nothing",
        "  and marks the junction; a third may find it. What never happens does not happen then either.",
    ]


def _facts(r: Report) -> list[str]:
    c = r.config
    rows = [
        ("hit alignment, local", _tokens(r.alignment_tokens), _alignment_why(r)),
        ("hash block", _tokens(c.hash_block_tokens), "unit of prefix hashes"),
        ("smallest reusable prefix, local", _tokens(r.smallest_local_tokens), ""),
    ]
    if not c.prefix_caching:
        rows[2] = ("smallest reusable prefix, local", "none", "prefix_caching is false")
    if c.offload:
        rows += [
            ("smallest reusable prefix, offload", _tokens(r.smallest_offload_tokens), ""),
            ("store alignment", _tokens(r.store_alignment_tokens), "the store keeps what hits on it need"),
        ]
    if c.drafts:
        rows += [
            ("drafts (K)", str(c.drafts), f"{c.draft_modules} draft module(s)"),
            ("drafter reads past the end", _tokens(c.prefill_lookahead_tokens), "prefill lookahead"),
            ("extra tokens retained", _tokens(c.reprefilled_tokens), "per window group"),
        ]
    if any(group.kind is Kind.MAMBA for group in c.groups):
        rows.append(("blocks of a Mamba row", str(2 + c.drafts), "running, the one before, one a draft"))
    width, wide = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [f"{label:{width}}  {value:{wide}}  {why}".rstrip() for label, value, why in rows]


def _alignment_why(r: Report) -> str:
    if r.fine_grained:
        return "a hit may end inside a block, on a hash block"
    return "least common multiple of " + ", ".join(str(g.block_tokens) for g in r.config.groups)


def _tokens(count: int | None) -> str:
    return "none" if count is None else f"{count} token{'' if count == 1 else 's'}"


def _group_table(r: Report) -> tuple[list[str], list[list[str]]]:
    head = ["group", "kind", "block", "window", "extra", "window"]
    units = ["", "", "tokens", "tokens", "tokens", "blocks"]
    if r.config.offload:
        head += ["chunk", "window", "inside", "for extra", "kept of"]
        units += ["tokens", "chunks", "chunks", "chunks", "blocks"]
    rows = [units]
    for g in r.groups:
        cells = [g.name, g.kind, g.block_tokens, g.window_tokens, g.extra_tokens, g.window_blocks]
        if r.config.offload:
            cells += [g.chunk_tokens, g.window_chunks, g.window_chunks_inside, g.extra_chunks]
            cells += [None if g.kept_blocks is None else f"{g.kept_blocks}/{g.segment_blocks}"]
        rows.append(["-" if cell is None else str(cell) for cell in cells])
    return head, rows


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


def _sample_lines(r: Report) -> list[str]:
    mamba = any(group.kind is Kind.MAMBA for group in r.config.groups)
    columns = [("local", "local_tokens"), ("local*", "local_one_step_tokens")]
    columns += (
        [("offload", "offload_tokens"), ("offload*", "offload_one_step_tokens")] if r.config.offload else []
    )
    columns = [c for c in columns if mamba or not c[0].endswith("*")]
    rows = []
    for sample in r.samples:
        values = [getattr(sample, field) for _, field in columns]
        rows.append([str(sample.shared_tokens), *("-" if v is None else str(v) for v in values)])
    title = "tokens reused by a prompt that shares its first tokens with one twice as long"
    title += " (dense retention)" if _sparse(r.config) else ""
    note = ["  (* the first prompt was prefilled in one step; else in steps of one block)"] if mamba else []
    return [title, *note, *_table(["shared", *(c[0] for c in columns)], rows)]


def _sizes(twin: Config) -> str:
    parts = []
    for g in twin.groups:
        window = f", window {g.window_tokens}" if g.window_tokens else ""
        extra = f" + {g.extra_tokens}" if g.extra_tokens else ""
        parts.append(f"{g.name}: block {g.block_tokens}{window}{extra}")
    chunk = [f"{twin.blocks_per_chunk} blocks a chunk"] if twin.offload and twin.blocks_per_chunk > 1 else []
    return "; ".join([*parts, *chunk])


def _statement_lines(s: Statement) -> list[str]:
    c = s.confirmation
    lines = [
        f"  [{s.about.tier}] {s.about.statement}",
        f"      why      {s.about.why}",
        f"      allow    {s.about.remedy}",
    ]
    if c.holds:
        remedy = ", and the remedy allows it" if c.remedy_tried else ""
        verdict = f"{c.cases} pairs, {c.tempted} of them within reach, none{remedy}"
    elif c.broken:
        verdict = f"NOT CONFIRMED: {c.broken[0]} hits {c.broken[1]} tokens in the twin"
    elif not c.tempted:
        verdict = f"NOT CONFIRMED: in none of {c.cases} pairs was such a hit within reach"
    else:
        verdict = "NOT CONFIRMED: the remedy allows no such hit in the twin"
    return [*lines, f"      checked  {verdict}"]


def _loads_line(loads: pairs.Loads) -> str:
    if loads.wrong is None:
        return (
            f"{loads.admitted} hits in the twin: all that their loads name is there, and of the hit's tokens"
        )
    case, hit, problem = loads.wrong
    return f"in the twin, a hit of {hit} tokens ({case}): {problem}"


def as_json(r: Report) -> dict[str, Any]:
    """The report for machines; ``schema`` changes with the meaning of a key."""
    return {
        "schema": "hybrid-kv geometry 1",
        "config": {"name": r.config.name, "description": r.config.description, "toml": config.dump(r.config)},
        "alignment_tokens": r.alignment_tokens,
        "fine_grained": r.fine_grained,
        "hash_block_tokens": r.config.hash_block_tokens,
        "store_alignment_tokens": r.store_alignment_tokens,
        "retention": "dense",
        "sparse_by_default": _sparse(r.config),
        "smallest_local_tokens": r.smallest_local_tokens,
        "smallest_offload_tokens": r.smallest_offload_tokens,
        "groups": [asdict(group) for group in r.groups],
        "samples": [asdict(sample) for sample in r.samples],
        "twin": config.dump(r.twin),
        "horizon_tokens": horizon_tokens(r.twin),
        "exhaustive": r.exhaustive,
        "nevers": [
            {
                "name": s.about.name,
                "tier": s.about.tier,
                "statement": s.about.statement,
                "why": s.about.why,
                "allow": s.about.remedy,
                "confirmed": s.confirmation.holds,
                "pairs": s.confirmation.cases,
                "within_reach": s.confirmation.tempted,
            }
            for s in r.statements
        ],
        "loads": {"admitted": r.loads.admitted, "wrong": r.loads.wrong and r.loads.wrong[2]},
        "gaps": [asdict(gap) for gap in r.gaps],
    }


# -- command line --------------------------------------------------------------------------------------------


def listing() -> str:
    """The shipped configurations, one a line."""
    found = {name: config.named(name).description for name in config.shipped()}
    width = max(map(len, found), default=0)
    return "".join(f"{name:{width}}  {description}\n" for name, description in found.items())


@command("spec.geometry")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned."""
    parser = OneLineParser(
        prog="python -m spec.geometry", description="What a deployment can reuse, and what it never can."
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml|NAME", help="a file, or a name from --list")
    parser.add_argument("--list", action="store_true", help="list the configurations that are shipped")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(arguments)
    try:
        if options.list:
            sys.stdout.write(listing())
            return 0
        if options.config is None:
            raise ConfigError("name a configuration, or ask for --list")
        check_target("--json", options.json)
        started = time.perf_counter()
        result = report(config.find(options.config))
    except ConfigError as error:
        print(f"spec.geometry: {error}", file=sys.stderr)
        return 2
    out = set_aside(options.json)
    sys.stdout.write(render(result))
    print(f"\n{time.perf_counter() - started:.1f} s")
    write_json(options.json, as_json(result), out)
    if not result.confirmed:
        return 1
    return 0 if result.exhaustive else 3


if __name__ == "__main__":
    sys.exit(main())
