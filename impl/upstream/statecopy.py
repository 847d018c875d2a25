"""A release's own state-copy kernels, run by Triton's interpreter on ordinary memory.

The v2 runner's tables (``BlockTables``), hybrid model state and align kernels are built as on one rank, with
small integer states that say where they came from: before anything is copied, position i of block b's
convolution window holds ``100 * b + i`` and its recurrent state holds ``b``, in every byte or half word.
After a copy every block that changed therefore names its source, column and offset included, and a copy of
too few bytes shows.  A wrong address is a segmentation fault, hence a process of its own:

    Child(use, module="impl.upstream.statecopy", environment=with_kernels(use))

Questions: ``new`` (``slots``, ``drafts``, ``block_tokens``, ``cache_block_tokens``, ``blocks``, ``columns``,
``elements`` of a recurrent state and ``element_bytes``, 2 or 4), ``row`` (``slot``, ``blocks``,
``overwrite``), ``add`` (``slot``, ``computed``), ``gather`` (``slots`` of the batch rows), ``mappings``
(``slots``, ``lengths``, ``computed`` of every slot), ``before`` (the same), ``after`` (``slots`` with -1 for
masked rows, ``sampled``, ``computed``), ``memory``, ``relabel``.  Every reply holds ``copied``:
{block: [recurrent source, window]} of the blocks that changed since the last question; a source is a list
where the parts of one state or position came from several.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

from impl.upstream.build import accepted

Plain = dict[str, Any]


def _prepare_modules() -> None:
    """No accelerator means no pinned memory and no unified addressing: device views are the host tensors."""
    import torch
    import vllm.utils.torch_utils as torch_utils

    torch_utils.PIN_MEMORY = False
    from vllm.v1.worker.gpu import buffer_utils

    class Shared:
        def __init__(self, size: Any, dtype: Any) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()

        def uva(self, count: int | None = None) -> Any:
            return self.cpu if count is None else self.cpu[:count]

    buffer_utils.UvaBuffer = Shared
    buffer_utils.NonUvaBuffer = Shared
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.gpu.model_states import mamba_hybrid

    mamba_utils._TEMPORAL_TILES = 1  # one program a state: the interpreter takes milliseconds for each
    # Positions and encoder inputs of a new request are not modelled; the seed of the running column is.
    mamba_hybrid.DefaultModelState.add_request = lambda *_: None


WINDOW = 0x00010001  # a position's label in both halves of its word


def _source(parts: list[int], repeated: int) -> int | list[int]:
    """Where something was copied from; all its words if they are no copy of one thing."""
    label, rest = divmod(parts[0], repeated)
    return label if not rest and len(set(parts)) == 1 else parts


class Rank:
    """One rank's tables, hybrid model state and state memory."""

    def __init__(
        self,
        slots: int,
        drafts: int,
        block_tokens: int,
        cache_block_tokens: int,
        blocks: int = 32,
        columns: int = 16,
        elements: int = 4,
        element_bytes: int = 4,
    ) -> None:
        import torch
        from vllm.v1 import kv_cache_interface as kv
        from vllm.v1.worker import mamba_utils
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

        self.torch = torch
        device = torch.device("cpu")
        width = drafts + 3
        whole = {2: torch.int16, 4: torch.int32}[element_bytes]
        spec = kv.MambaSpec(
            block_size=block_tokens,
            shapes=((width, 2), (elements,)),
            dtypes=(torch.int32, whole),
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )
        group = accepted(kv.KVCacheGroupSpec, layer_names=["layer.0"], kv_cache_spec=spec)
        self.config = kv.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        self.window = torch.zeros((blocks, width, 2), dtype=torch.int32)
        self.state = torch.zeros((blocks, elements), dtype=whole)
        self.repeated = {2: 0x0101, 4: 0x01010101}[element_bytes]
        self.relabel()
        self.tables = accepted(
            BlockTables,
            block_sizes=[block_tokens],
            kernel_block_sizes=[block_tokens],
            max_num_reqs=slots,
            max_num_batched_tokens=64,
            max_num_blocks_per_group=[columns],
            device=device,
        )
        model = object.__new__(MambaHybridModelState)
        self.model = model
        model.max_num_reqs = slots
        model.device = device
        model.cache_config = SimpleNamespace(block_size=cache_block_tokens, mamba_block_size=block_tokens)
        model.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={"layer.0": SimpleNamespace(kv_cache=[self.window, self.state])}
            ),
            num_speculative_tokens=drafts,
        )
        model.recoverssm = None
        model._align_mode = True

        def counts(value: int) -> Any:
            return torch.full((slots,), value, dtype=torch.int32)

        model.num_accepted_tokens_gpu = counts(1)
        model._mamba_state_idx_gpu = counts(0)
        model._mamba_src_col_gpu = counts(-1)
        model._mamba_src_off_gpu = counts(0)
        model._mamba_ctx = None
        model._mamba_group_ids = []
        model._mamba_spec = None
        model._mamba_state_copy_funcs = {
            spec.mamba_type: (mamba_utils.get_conv_copy_spec, mamba_utils.get_temporal_copy_spec)
        }
        if hasattr(model, "initialize_kv_cache"):  # since 0.32; before, the first ``before`` binds the tables
            model.initialize_kv_cache(self.config, self.tables)
        self.gathered: Any = None

    def relabel(self) -> Plain:
        """Every block names itself again."""
        ids = self.torch.arange(len(self.state), dtype=self.torch.int32)
        places = self.torch.arange(self.window.shape[1], dtype=self.torch.int32)
        self.window[:] = WINDOW * (100 * ids[:, None] + places)[:, :, None]
        self.state[:] = self.repeated * ids[:, None]
        self.seen = self._memory()
        return {}

    def _memory(self) -> list[Any]:
        return [
            [_source(state, self.repeated), [_source(place, WINDOW) for place in window]]
            for state, window in zip(self.state.tolist(), self.window.tolist(), strict=True)
        ]

    def copied(self) -> Plain:
        """Blocks that changed since the last look, and what they hold now."""
        now = self._memory()
        changed = {
            str(block): new for block, (old, new) in enumerate(zip(self.seen, now, strict=True)) if old != new
        }
        self.seen = now
        return changed

    def row(self, slot: int, blocks: list[int], overwrite: bool) -> Plain:
        """Stage and apply a table write: ``append_block_ids`` and ``apply_staged_writes``."""
        self.tables.append_block_ids(slot, (list(blocks),), overwrite=overwrite)
        self.tables.apply_staged_writes()
        return {}

    def add(self, slot: int, computed: int) -> Plain:
        """Seed a new request: ``MambaHybridModelState.add_request``; the column that it starts from."""
        self.model.add_request(slot, SimpleNamespace(num_computed_tokens=computed))
        return {"column": int(self.model._mamba_state_idx_gpu[slot])}

    def gather(self, slots: list[int]) -> Plain:
        """Rows of this step's batch, in batch order."""
        mapping = self.torch.tensor(slots, dtype=self.torch.int32)
        computed = self.torch.zeros(self.model.max_num_reqs, dtype=self.torch.int32)
        self.gathered = accepted(
            self.tables.gather_block_tables,
            idx_mapping=mapping,
            num_reqs_padded=len(slots),
            num_computed_tokens=computed,
        )
        return {"rows": [[int(block) for block in row] for row in self.gathered[0]]}

    def mappings(self, slots: list[int], lengths: list[int], computed: list[int]) -> Plain:
        """Slot of each token of a step in the group's cache, and of two tokens of padding."""
        torch = self.torch
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        rows = zip(slots, lengths, strict=True)
        positions = [computed[slot] + place for slot, length in rows for place in range(length)]
        found = self.tables.compute_slot_mappings(
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int64),
            num_tokens_padded=len(positions) + 2,
        )
        return {"mappings": found[0].tolist()}

    def before(self, slots: list[int], lengths: list[int], computed: list[int]) -> Plain:
        """Pre-process and pre-copy of a step; the running columns and accepted counts after it, by slot."""
        torch = self.torch
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        batch = SimpleNamespace(
            num_reqs=len(slots),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
        )
        tokens = torch.tensor(computed, dtype=torch.int32)
        self.model.preprocess_state(batch, self.gathered, self.config, tokens)
        return self._counts()

    def after(self, slots: list[int], sampled: list[int], computed: list[int]) -> Plain:
        """Post-process of a step, possibly a late one; ``computed`` is by slot, as in :meth:`before`."""
        torch = self.torch
        self.model.postprocess_state(
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(sampled, dtype=torch.int32),
            torch.tensor(computed, dtype=torch.int32),
        )
        return self._counts()

    def _counts(self) -> Plain:
        return {
            "columns": [int(column) for column in self.model._mamba_state_idx_gpu],
            "accepted": [int(count) for count in self.model.num_accepted_tokens_gpu],
        }

    def memory(self) -> Plain:
        """Every block: the source of its recurrent state, and its convolution window."""
        return {"memory": self._memory()}


def main() -> None:
    """Answer lines from standard input until it ends."""
    logging.disable(logging.WARNING)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _prepare_modules()
    rank: Rank | None = None
    known = ("row", "add", "gather", "mappings", "before", "after", "memory", "relabel")
    for line in sys.stdin:
        question = json.loads(line)
        ask = question.pop("ask")
        reply: Plain
        if ask == "new":
            rank, reply = Rank(**question), {}
        elif rank is None or ask not in known:
            reply = {"error": f"cannot answer {ask!r}: ask new first, then one of {', '.join(known)}"}
        else:
            reply = getattr(rank, ask)(**question)
            reply["copied"] = rank.copied()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # taking torch down takes seconds


if __name__ == "__main__":
    main()
