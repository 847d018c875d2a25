"""A tiny real model, exact in integers: what every page holds after every prefix is known in closed form.

The story.  A refinement test wants real bytes, real layers that read what they attend to, and an oracle
that no table, count or kernel has touched.  So each cache group is one layer of a model of 32-bit integers:

* a *recurrent* layer keeps a convolution window (the last inputs) and a temporal state, a linear recurrence
  of several lanes;
* an *attention* layer (full, window or chunked) writes two words a position and reads a hash over every
  attended position: the words, weighted by powers of an odd number, so that a wrong, missing or misplaced
  word changes it;
* the layers are stacked, and pipeline stages follow one another: what a layer reads decides what the next
  one writes, so that one wrong byte spoils every output after it.

:class:`Layers` runs the model on a worker's memory.  :class:`Truth` gives the same numbers from token
prefixes alone, one step of arithmetic a prefix and layer, because every hash above is a recurrence over
prefixes. Acceptance is not the model's affair: drafts and how many of them are right come from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec.chains import EMPTY, Chains
from spec.config import Config, Group, Kind

MASK = 0xFFFFFFFF
CELL_WORDS = 2  # words that attention keeps a position
TAPS = 3  # inputs that a convolution sees, the current one included
INNER = 2  # words of one input
LANES = 3  # words of a temporal state


def constant(*where: int) -> int:
    """A fixed odd 32-bit number for a place in the model."""
    value = 0x9E3779B9
    for part in where:
        value = (value ^ (part + 0x7F4A7C15)) * 0x2C1B3C6D & MASK
        value ^= value >> 15
    return value | 1


def signed(word: int) -> int:
    """A 32-bit word as memory shows it."""
    return ((word + 0x80000000) & MASK) - 0x80000000


def mix(word: int) -> int:
    """A bijection of 32-bit words, between layers."""
    return (word ^ (word >> 16)) * 0x45D9F3B & MASK


def embed(token: int, position: int) -> int:
    """What enters the first layer of the first stage."""
    return mix((token * 0x10001 + position * 0x9E3779B1) & MASK)


@dataclass(frozen=True, slots=True)
class Layer:
    """One cache group's layer on one pipeline stage: its fixed numbers."""

    group: Group
    cell: tuple[tuple[int, int], ...]  # attention words: factor and shift of the layer's input
    word: tuple[int, ...]  # weight of each word in the hash of a position
    step: int  # weight of one position's distance
    inputs: tuple[tuple[int, int], ...]  # recurrent inputs: factor and shift
    taps: tuple[tuple[tuple[int, ...], ...], ...]  # [lane][distance][input word]
    decay: tuple[int, ...]  # [lane]
    out: tuple[int, ...]  # [lane]: weight of a lane in what the layer hands on
    through: int  # weight of the layer's input in what it hands on

    @classmethod
    def of(cls, group: Group, stage: int, index: int) -> Layer:
        """The layer of group number ``index`` on a stage."""

        def pick(*where: int) -> int:
            return constant(stage, index, *where)

        return cls(
            group,
            tuple((pick(1, i), pick(2, i)) for i in range(CELL_WORDS)),
            tuple(pick(3, i) for i in range(CELL_WORDS)),
            pick(4),
            tuple((pick(5, i), pick(6, i)) for i in range(INNER)),
            tuple(
                tuple(tuple(pick(7, lane, k, i) for i in range(INNER)) for k in range(TAPS))
                for lane in range(LANES)
            ),
            tuple(pick(8, lane) for lane in range(LANES)),
            tuple(pick(9, lane) for lane in range(LANES)),
            pick(10),
        )


def layers_of(config: Config, stage: int) -> tuple[Layer, ...]:
    """A stage's layers, in the order in which they run."""
    return tuple(Layer.of(group, stage, index) for index, group in enumerate(config.groups))


def first_attended(group: Group, position: int) -> int:
    """The first position that a query at ``position`` reads."""
    if group.kind is Kind.WINDOW:
        return max(0, position - group.window_tokens + 1)
    return position - position % group.window_tokens if group.kind is Kind.CHUNKED else 0


# -- the closed form ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """What one layer keeps of one prefix's last token, and what it hands on."""

    cell: tuple[int, ...]  # attention: the words of the position
    hashed: int  # attention: the hash over everything attended from there
    inputs: tuple[int, ...]  # recurrent: the position's input words
    state: tuple[int, ...]  # recurrent: the temporal state after the position


NOTHING = Kept((), 0, (0,) * INNER, (0,) * LANES)


class Truth:
    """What pages and outputs should hold, from prefixes alone.  ``chains`` says which tokens a prefix has."""

    def __init__(self, config: Config, chains: Chains) -> None:
        self.chains = chains
        self.stages = [layers_of(config, stage) for stage in range(config.pp)]
        # Per stage, prefix by prefix: what each layer keeps, and what the stage hands on.
        self._kept: list[dict[int, tuple[Kept, ...]]] = [
            {EMPTY: (NOTHING,) * len(config.groups)} for _ in range(config.pp)
        ]
        self._out: list[dict[int, int]] = [{} for _ in range(config.pp)]

    def kept(self, stage: int, group: int, prefix: int) -> Kept:
        """What the group's layer keeps of the prefix's last token on a stage."""
        known = self._kept[stage].get(prefix)
        return (known or self._extend(stage, prefix))[group]

    def output(self, stage: int, prefix: int) -> int:
        """What the stage hands on for the prefix's last token (the last stage: the model's output)."""
        if prefix not in self._out[stage]:
            self._extend(stage, prefix)
        return signed(self._out[stage][prefix])

    def cells(self, stage: int, group: int, prefixes: Sequence[int]) -> list[tuple[int, ...]]:
        """Attention words of consecutive positions, each named by the prefix that ends there."""
        return [self.kept(stage, group, prefix).cell for prefix in prefixes]

    def state(self, stage: int, group: int, prefix: int) -> tuple[int, ...]:
        """The temporal state after the prefix."""
        return self.kept(stage, group, prefix).state

    def window(self, stage: int, group: int, prefix: int) -> list[tuple[int, ...]]:
        """The convolution state after the prefix: the inputs of its last ``TAPS - 1`` positions."""
        line = self.chains.prefixes(prefix)
        last = [line[max(len(line) - 1 - back, 0)] for back in range(TAPS - 2, -1, -1)]
        return [self.kept(stage, group, one).inputs for one in last]

    def _extend(self, stage: int, prefix: int) -> tuple[Kept, ...]:
        line = self.chains.prefixes(prefix)
        known = self._kept[stage]
        first = next(n for n in range(len(line) - 1, -1, -1) if line[n] in known)
        for n in range(first + 1, len(line)):
            x = self._out[stage - 1].get(line[n]) if stage else embed(self.chains.token(line[n]), n - 1)
            if x is None:
                self._extend(stage - 1, line[n])
                x = self._out[stage - 1][line[n]]
            kept = []
            for group, layer in enumerate(self.stages[stage]):
                one, x = self._layer(layer, known, group, line, n, x)
                kept.append(one)
            known[line[n]] = tuple(kept)
            self._out[stage][line[n]] = x
        return known[prefix]

    def _layer(
        self,
        layer: Layer,
        known: dict[int, tuple[Kept, ...]],
        group: int,
        line: Sequence[int],
        n: int,
        x: int,
    ) -> tuple[Kept, int]:
        """One layer at position ``n - 1``: what it keeps, what it hands on."""
        before = known[line[n - 1]][group]
        if layer.group.kind is Kind.MAMBA:
            inputs = tuple((x * factor + shift) & MASK for factor, shift in layer.inputs)
            past = [inputs, *(known[line[n - k]][group].inputs if n - k > 0 else (0,) * INNER
                              for k in range(1, TAPS))]  # fmt: skip
            state = []
            for lane in range(LANES):
                seen = sum(
                    weight * word
                    for weights, words in zip(layer.taps[lane], past, strict=True)
                    for weight, word in zip(weights, words, strict=True)
                )
                state.append((layer.decay[lane] * before.state[lane] + seen) & MASK)
            hashed = sum(weight * word for weight, word in zip(layer.out, state, strict=True))
            kept = Kept((), 0, tuple(map(signed, inputs)), tuple(map(signed, state)))
        else:
            cell = [(x * factor + shift) & MASK for factor, shift in layer.cell]
            position, window = n - 1, layer.group.window_tokens
            hashed = before.hashed * layer.step + _weigh(layer, cell)
            if layer.group.kind is Kind.WINDOW and position >= window:
                gone = _weigh(layer, known[line[n - window]][group].cell)
                hashed -= gone * pow(layer.step, window, 1 << 32)
            if layer.group.kind is Kind.CHUNKED and position % window == 0:
                hashed = _weigh(layer, cell)
            hashed &= MASK
            kept = Kept(tuple(map(signed, cell)), hashed, (), ())
        return kept, mix((x * layer.through + hashed) & MASK)


def _weigh(layer: Layer, cell: Sequence[int]) -> int:
    return sum(weight * word for weight, word in zip(layer.word, cell, strict=True)) & MASK


# -- the model on memory -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows as the layers take them: all on the device, every shape given by the padding alone.

    Nothing here is known to the host, so that the layers can be captured in a graph and replayed."""

    lengths: torch.Tensor  # int64 [rows]: query tokens; 0 for a padded row
    decode: torch.Tensor  # bool [rows]: one state a query token, instead of the chunk's last
    starts: torch.Tensor  # int64 [rows]: positions of the first query tokens
    offsets: torch.Tensor  # int64 [rows]: how far past the running column the state to go on from lies
    rows: torch.Tensor  # int64 [tokens]: batch row of each token; one past the last for a padded token
    within: torch.Tensor  # int64 [tokens]: number of the token in its row
    positions: torch.Tensor  # int64 [tokens]


class Reads:
    """What the layers read in a step, for whoever watches: one flat tensor, and where each part lies.

    Parts, by group: ``cells`` [rows, positions, words] through the rows' tables; ``state`` [rows, lanes] and
    ``window`` [rows, TAPS - 1, inner] of the state to go on from; and ``output`` [tokens] under group -1."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int], torch.Tensor] = {}

    def flat(self) -> torch.Tensor:
        """All parts, one behind the other, int32."""
        parts = [part.reshape(-1) for part in self.parts.values()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)

    def places(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Per part: its first word in the flat tensor, and the words of each of its rows."""
        found, at = {}, 0
        for key, part in self.parts.items():
            found[key] = (at, part[0].numel() if part.numel() else 0)
            at += part.numel()
        return found


def _low(value: torch.Tensor) -> torch.Tensor:
    return value & MASK


class Layers:
    """A stage's layers on a device; numbers are 32-bit words in int64, stored as int32."""

    def __init__(self, config: Config, stage: int, device: torch.device) -> None:
        self.layers = layers_of(config, stage)
        longest = max(config.request_tokens, 2 * config.step_tokens) + 2 * config.drafts + 64

        def tensor(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.powers = [tensor([pow(layer.step, n, 1 << 32) for n in range(longest)]) for layer in self.layers]
        self.cell = [tensor(layer.cell) for layer in self.layers]
        self.word = [tensor(layer.word) for layer in self.layers]
        self.inputs = [tensor(layer.inputs) for layer in self.layers]
        self.taps = [tensor(layer.taps) for layer in self.layers]
        self.out = [tensor(layer.out) for layer in self.layers]
        # decays[lane, n]: the lane's decay to the power n
        self.decays = [
            tensor([[pow(d, n, 1 << 32) for n in range(longest)] for d in layer.decay])
            for layer in self.layers
        ]

    def attend(
        self, g: int, x: torch.Tensor, batch: Batch, kv: torch.Tensor, table: torch.Tensor, reads: Reads
    ) -> torch.Tensor:
        """Write the step's cells through the rows' tables, then read everything attended.

        ``kv`` [blocks, tokens a block, words] is the group's view of all pages, ``table`` [rows, columns].
        Padded tokens, and positions past the row's end, are written to the null block."""
        layer, block, (rows, columns) = self.layers[g], kv.shape[1], table.shape
        cells = _low(x[:, None] * self.cell[g][:, 0] + self.cell[g][:, 1])
        row, column = batch.rows.clamp(max=rows - 1), batch.positions // block
        there = (batch.rows < rows) & (column >= 0) & (column < columns)
        pages = table[row, column.clamp(0, columns - 1)].long() * there
        kv[pages, batch.positions % block] = cells.int()
        seen = kv[table.long()].reshape(rows, -1, CELL_WORDS)
        reads.parts["cells", g] = seen
        words = _low((_low(seen.long()) * self.word[g]).sum(2))
        distance = batch.positions[:, None] - torch.arange(words.shape[1], device=x.device)
        attended = distance >= 0
        if layer.group.kind is Kind.WINDOW:
            attended &= distance < layer.group.window_tokens
        elif layer.group.kind is Kind.CHUNKED:
            attended &= distance <= (batch.positions % layer.group.window_tokens)[:, None]
        weights = self.powers[g][distance.clamp(0, self.powers[g].shape[0] - 1)] * attended
        return self.hand_on(g, x, _low((_low(weights * words[row])).sum(1)))

    def recur(
        self,
        g: int,
        x: torch.Tensor,
        batch: Batch,
        window: torch.Tensor,
        temporal: torch.Tensor,
        columns: torch.Tensor,
        reads: Reads,
        longest: int,
    ) -> torch.Tensor:
        """Go on from each row's state at its accepted offset, and leave the new states.

        ``window`` [blocks, w, inner] and ``temporal`` [blocks, lanes] are views of all pages;
        ``columns`` [rows, 1 + K] are the blocks of the running and the scratch columns; no row has more
        than ``longest`` tokens."""
        rows = batch.lengths.shape[0]
        index = torch.arange(rows, device=x.device)
        fresh = (batch.starts == 0)[:, None]
        state = temporal[columns[index, batch.offsets].long()]
        near = batch.offsets[:, None] + torch.arange(TAPS - 1, device=x.device)
        past = window[columns[:, :1].long(), near]
        reads.parts["state", g], reads.parts["window", g] = state, past
        state = _low(state.long()).masked_fill(fresh, 0)
        past = _low(past.long()).masked_fill(fresh[:, :, None], 0)
        new = _low(x[:, None] * self.inputs[g][:, 0] + self.inputs[g][:, 1])
        # One row more than the batch has, where padded tokens go.
        line = torch.zeros((rows + 1, TAPS - 1 + longest, INNER), dtype=torch.int64, device=x.device)
        line[:rows, : TAPS - 1] = past
        line[batch.rows, TAPS - 1 + batch.within] = new
        near_inputs = line.unfold(1, TAPS, 1).flip(3)  # [rows + 1, query, inner, distance]
        seen = _low(
            (near_inputs[:, :, None] * self.taps[g].transpose(1, 2)).sum((3, 4))
        )  # [rows + 1, query, lane]
        gap = torch.arange(longest, device=x.device)
        gap = gap[:, None] - gap  # from an earlier query token (second) to a later one (first)
        decay = self.decays[g][:, gap.clamp(min=0)] * (gap >= 0)
        states = (decay * seen.transpose(1, 2)[:, :, None]).sum(3).transpose(1, 2)
        states[:rows] += self.decays[g][:, 1 : longest + 1].T * state[:, None]
        states = _low(states)
        self._leave(batch, line, states, window, temporal, columns)
        return self.hand_on(g, x, _low((states[batch.rows, batch.within] * self.out[g]).sum(1)))

    def _leave(
        self,
        batch: Batch,
        line: torch.Tensor,
        states: torch.Tensor,
        window: torch.Tensor,
        temporal: torch.Tensor,
        columns: torch.Tensor,
    ) -> None:
        """Write the rows' new states; padded rows write to whatever their first column names.

        What a row does not write goes to the null block."""
        tokens, decode = batch.lengths[:, None], batch.decode[:, None]
        real = tokens > 0
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        entry = torch.arange(window.shape[1], device=tokens.device)
        block = columns[:, :1].long() * real
        first = torch.where(decode, torch.ones_like(tokens), tokens)  # of the inputs that stay
        kept = torch.where(decode, TAPS - 2 + tokens, torch.full_like(tokens, TAPS - 1))
        inputs = line[row, (first + entry).clamp(max=line.shape[1] - 1)].int()
        inputs = torch.where((entry < kept)[:, :, None], inputs, window[block, entry])
        window[block, entry] = inputs
        draft = torch.arange(columns.shape[1], device=tokens.device)
        written = real & torch.where(decode, draft < tokens, draft == 0)
        query = torch.where(decode, draft, tokens - 1).clamp(0, states.shape[1] - 1)
        temporal[columns.long() * written] = states[row, query].int()
        padded = columns[:, 0].long() * ~real[:, 0]
        window.index_fill_(0, padded, -1)
        temporal.index_fill_(0, padded, -1)

    def hand_on(self, g: int, x: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
        """What the next layer gets."""
        value = _low(x * self.layers[g].through + hashed)
        return _low((value ^ (value >> 16)) * 0x45D9F3B)


def embedded(tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What enters the first layer: one word for every query token; ``tokens`` int64 [tokens]."""
    value = _low(tokens * 0x10001 + batch.positions * 0x9E3779B1)
    return _low((value ^ (value >> 16)) * 0x45D9F3B)
