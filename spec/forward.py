"""The forward: what a step's tokens are, what each layer reads and writes, and what verification makes of it.

Attention layers write the step's cells and then read their history; recurrent layers go on from one state.
Here reads are judged: each must see exactly what the client's verified tokens and the step's own drafts say,
whatever tables, counts and fences brought it there.  The operations of :mod:`spec.ops` that a policy enqueues
(``Forward``, ``Sample``, ``Draft``) do what is written here when the adversary lets them run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.arith import align
from spec.chains import GARBAGE
from spec.config import Kind
from spec.memory import CONV, TEMPORAL
from spec.operands import UserId, column, table_row

if TYPE_CHECKING:
    from spec.ops import BatchRow, Draft, Forward
    from spec.world import Rank, StepRun, World

STRANGE = -(1 << 40)  # a draft that was proposed behind other tokens: no true prefix has it


def blocked(world: World, op: Forward, rank: Rank) -> str | None:
    """A stage needs the stage before it; the first stage needs the tokens of its rows."""
    run = world.steps[op.step]
    if rank.stage:
        for before in world.ranks:
            if before.stage == rank.stage - 1 and before.index not in run.forwards:
                return f"forward of step {op.step} on rank {before.index}"
        return None
    if not run.lines:
        for row in op.rows:
            if world.clients[row.uid].pending:
                return f"tokens of step {world.clients[row.uid].pending}"
    return None


def prepare(world: World, run: StepRun) -> None:
    """Fix the step's tokens: verified ones, then drafts, of which the client's count are right."""
    for row in run.rows:
        client = world.clients[row.uid]
        start, known = client.computed, len(client.tokens)
        line = list(client.line[: start + row.tokens + 1])
        drafts = start + row.tokens - known
        agree = 0 if row.padded else client.agree
        run.right[row.uid] = max(0, min(drafts, agree))
        for i in range(drafts):
            token = world.chains.next_token(line[-1]) if i < agree else -(run.step * 64 + i + 1)
            line.append(world.chains.fold(line[-1], token))
        run.lines[row.uid] = line
        run.starts[row.uid] = start
        if known > client.given and drafts >= 0:
            run.fed[row.uid] = client.line[known]
        if drafts >= 0:
            client.pending = run.step
        else:
            client.computed = start + row.tokens


def compute(world: World, op: Forward, rank: Rank) -> None:
    """The model runs on one rank.  Attention layers write the step's cells before they read, row by row
    of one layer; recurrent layers read their initial state before they write."""
    run = world.steps[op.step]
    if not run.lines:
        world.prepare(run)
    run.forwards.add(rank.index)
    rank.forwarded = op.step
    memory = rank.memory
    tables = memory.tables[op.tables]
    for row in op.rows:
        start, found = run.starts[row.uid], memory.computed[row.slot]
        world.judge(
            "forward_position_exact",
            True,
            start == found,
            lambda row=row, start=start, found=found: (  # type: ignore[misc]
                f"rank {rank.index} computes {row.uid} from position {found}, should be {start}"
            ),
        )
    lines = {row.uid: fed_line(world, run, rank, row) for row in op.rows}
    if world.verdict:
        return
    for g, group in enumerate(world.config.groups):
        if group.kind is Kind.MAMBA:
            recur(world, op, rank, run, g, lines)
        else:
            block = group.block_tokens
            for index, row in enumerate(op.rows):
                start = run.starts[row.uid]
                put_cells(world, rank, g, tables[g][index], lines[row.uid], start, start + row.tokens, block)
            for index, row in enumerate(op.rows):
                start = run.starts[row.uid]
                first = 0
                if group.kind is Kind.WINDOW:
                    first = max(0, start - group.window_tokens + 1)
                elif group.kind is Kind.CHUNKED:
                    first = start - start % group.window_tokens
                rule = "attention_reads_exact" if group.kind is Kind.FULL else "window_reads_exact"
                line, upto = run.lines[row.uid], start + row.tokens
                read_cells(world, rule, rank, g, tables[g][index], line, first, upto, row.uid)
    for row in op.rows:
        memory.computed[row.slot] += row.tokens


def fed_line(world: World, run: StepRun, rank: Rank, row: BatchRow) -> list[int]:
    """The prefixes that a row's tokens make on this rank: the step's own, if the slot is fed with what was
    sampled and drafted last; else, from the first wrong token on, prefixes that the step does not have."""
    line, head = run.lines[row.uid], run.fed.get(row.uid)
    if head is None:  # prompt tokens come from the host
        world.tally["input_tokens_exact"][0] += 1
        return line
    chains, last, drafted = world.chains, rank.memory.last[row.slot], rank.memory.drafted[row.slot]
    known = chains.length(head)
    if len(line) == known + 1 or row.padded:
        drafted = head  # no drafts, or none that anybody proposed
    token = chains.token(last)
    world.judge(
        "input_tokens_exact",
        True,
        drafted == head and token == chains.token(head),
        lambda: (
            f"rank {rank.index} feeds {row.uid} the last token of {chains.name(last)} and drafts behind "
            f"{chains.name(drafted)}, should be those of {chains.name(head)}"
        ),
    )
    if drafted == head and token == chains.token(head):
        return line
    made = line[:known]
    for at in range(known, len(line)):
        made.append(chains.fold(made[-1], token))
        token = chains.token(line[at + 1]) if drafted == head and at + 1 < len(line) else STRANGE - at
    return made


def put_cells(
    world: World, rank: Rank, g: int, table: list[int], line: list[int], start: int, upto: int, block: int
) -> None:
    """Attention writes positions ``start`` to ``upto - 1`` through the row's table."""
    memory = rank.memory
    while start < upto:
        col, first = divmod(start, block)
        stop = min(upto, (col + 1) * block)
        page = column(table, col)
        memory.put_run(page, g, first, tuple(line[start + 1 : stop + 1]))
        world.wrote(rank, page, g, "cells")
        start = stop


def read_cells(
    world: World,
    rule: str,
    rank: Rank,
    g: int,
    table: list[int],
    line: list[int],
    first: int,
    upto: int,
    uid: UserId,
) -> None:
    """Attention reads positions ``first`` to ``upto - 1``: each cell must hold the prefix that ends
    there."""
    memory, block = rank.memory, world.config.groups[g].block_tokens
    world.emit(("read", rank.index, uid, g, upto))
    world.tally[rule][1] += 1
    at = first
    while at < upto:
        col, cell = divmod(at, block)
        stop = min(upto, (col + 1) * block)
        page = column(table, col)
        if memory.view[page] != g or memory.cells[page][cell : cell + stop - at] != line[at + 1 : stop + 1]:
            found = memory.run(page, g, cell, cell + stop - at)
            for i, value in enumerate(found):
                if value != line[at + 1 + i]:
                    world.broken(
                        rule,
                        f"rank {rank.index}, {uid}, group {world.config.groups[g].name}, "
                        f"position {at + i} (column {col}, block {page}): "
                        f"holds {world.chains.name(value)}, "
                        f"should hold {world.chains.name(line[at + 1 + i])}",
                    )
                    return
        at = stop


def recur(
    world: World, op: Forward, rank: Rank, run: StepRun, g: int, lines: dict[UserId, list[int]]
) -> None:
    """A recurrent group: initial state from the running column at the accepted offset, then the new
    states."""
    memory, block = rank.memory, world.mamba_block
    for index, row in enumerate(op.rows):
        start = run.starts[row.uid]
        table = table_row(rank, op.index[index], g)
        first = align.aligned_first_column(start + row.tokens, block)
        if start:
            offset = memory.accepted[row.slot] - 1
            world.judge(
                "accepted_offset_in_range",
                True,
                0 <= offset <= world.config.drafts,
                lambda row=row, offset=offset: f"{row.uid} goes on from offset {offset}",  # type: ignore[misc]
            )
            want = run.lines[row.uid][start]
            got = (
                memory.temporal(column(table, first + offset), g),
                memory.conv(column(table, first), g, offset),
            )
            world.judge(
                "state_reads_exact",
                True,
                got == (want, want),
                lambda row=row, got=got, want=want, table=table, first=first, offset=offset: (  # type: ignore[misc]
                    f"rank {rank.index}, {row.uid}, group {world.config.groups[g].name}, "
                    f"column {first} + {offset} (block {column(table, first + offset)}): "
                    f"holds {world.chains.name(got[0])}"
                    f" and window {world.chains.name(got[1])}, should hold {world.chains.name(want)}"
                ),
            )
            world.emit(("read", rank.index, row.uid, g, start))
        else:
            world.tally["state_reads_exact"][0] += 1
    for index, row in enumerate(op.rows):
        start, line = run.starts[row.uid], lines[row.uid]
        table = table_row(rank, op.index[index], g)
        first = align.aligned_first_column(start + row.tokens, block)
        states = (
            tuple(line[start + 1 : start + row.tokens + 1]) if row.decode else (line[start + row.tokens],)
        )
        memory.put(column(table, first), g, CONV, states)
        for i, state in enumerate(states):
            page = column(table, align.scratch_column(first, i))
            memory.put(page, g, TEMPORAL, state)
            world.wrote(rank, page, g, "state")
    for operand in op.index[len(op.rows) :]:  # padded rows of a captured graph write too: to the null block
        page = column(table_row(rank, operand, g), 0)
        memory.put(page, g, CONV, GARBAGE)
        memory.put(page, g, TEMPORAL, GARBAGE)
        world.judge(
            "padded_rows_write_null",
            True,
            not page,
            lambda page=page: f"rank {rank.index}: a padded row writes block {page}",  # type: ignore[misc]
        )


def sample(world: World, step: int) -> None:
    """The last stage verifies: accepted drafts and one token more become verified tokens."""
    run = world.steps[step]
    if run.sampled:
        return
    run.sampled = True
    for index, row in enumerate(run.rows):
        client, line, start = world.clients[row.uid], run.lines[row.uid], run.starts[row.uid]
        drafts = start + row.tokens - len(client.tokens)
        if drafts < 0:
            run.results.append((0, 0))
            continue
        right = run.right[row.uid]
        fresh = []
        for _ in range(right + 1):
            token = world.chains.next_token(client.line[-1])
            client.tokens.append(token)
            client.line.append(world.chains.fold(client.line[-1], token))
            fresh.append(token)
        client.computed = start + row.tokens - (drafts - right)
        client.pending = 0
        run.new[row.uid] = tuple(fresh)
        run.heads[index] = client.line[-1]
        # The accepted count is that of verified tokens: right drafts and the sampled one.  For a prompt's
        # last chunk it is 1, however many tokens the chunk has.
        run.results.append((right + 1, drafts - right))
        world.emit(("sample", row.uid, step, right + 1))
        assert client.line[client.computed] == line[client.computed]


def draft(world: World, op: Draft, rank: Rank) -> None:
    """A multi-module drafter re-reads the window of the last ``extra`` tokens after a rejection."""
    run = world.steps[op.step]
    for g, group in enumerate(world.config.groups):
        if not group.extra_tokens:
            continue
        for index, row in enumerate(op.rows):
            _, rejected = run.results[index]
            client = world.clients[row.uid]
            request = world.book.requests.get(row.uid)
            world.tally["drafter_reads_exact"][0] += not rejected
            if not rejected or request is None:
                continue
            after = run.starts[row.uid] + row.tokens - rejected
            again = max(after - group.extra_tokens, request.hit)
            first = max(0, again - group.window_tokens + 1)
            table = rank.memory.tables[op.tables][g][index]
            read_cells(world, "drafter_reads_exact", rank, g, table, client.line, first, after, row.uid)
