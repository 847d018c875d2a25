"""Kernels of the reference implementation, each with a plain torch twin.

- `layout`: what is bound once (tables, states, slot memory, pages and chunks), refused in one line if
  it does not fit; no Triton needed.
- `reference`: the plain twins, in torch: `Align`, `Gather`, `zero_blocks`, `copy_blocks`.
- `align`: `Align` in Triton: pre-process, pre-copy, aligned state indices, accepted counts, post-process.
- `pages`: `Gather`, `zero_blocks` and `copy_blocks` in Triton.
- `jit`: the shared arithmetic as device functions; the choice between a CUDA device and the interpreter.

The two `Align` take the same arguments and have the same methods, so that a harness chooses the module and
nothing else:

    bound = Recurrent(block_tokens, drafts, source_tables, input_tables, states)
    memory = SlotMemory.empty(slots, device)
    memory.admit(slot, computed_tokens, block_tokens)          # a request enters a slot
    side = align.Align(bound, memory)                          # or reference.Align(bound, memory)
    side.preprocess(idx_mapping, query_start, computed)        # before a forward
    side.aligned_state_indices(sequence_tokens)
    side.precopy()
    side.postprocess(idx_mapping, sampled, computed_after)     # after sampling, or late

`before_forward` is the first three in two launches, `postprocess` is `decide` and `postcopy`.
"""
