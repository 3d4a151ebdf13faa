"""From the plan's ints to the model's inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dspark.kernels.ops import AttentionBatch
from dspark.runtime.scheduling.plan import SchedulerOutput


@dataclass
class ForwardBatch:
    """token_ids int64 [T].

    rope_lengths int64 [T]: length of each token's sequence as dynamic rope and longrope count it: Sequence.rope_len (the prompt's),
    then position + 1. sample_rows int64 [rows]: tokens whose logits are wanted, in the order of SchedulerOutput.sampling: a sequence's
    newest token, then those of its draft.
    """

    token_ids: torch.Tensor
    rope_lengths: torch.Tensor
    sample_rows: torch.Tensor
    attention: AttentionBatch


def build_forward_batch(plan: SchedulerOutput, block_size: int, device: str) -> ForwardBatch:
    """Lay the scheduled tokens out, sequence after sequence."""
    items = plan.scheduled
    counts = np.asarray([item.num_query_tokens for item in items], np.int64)
    computed = np.asarray([item.seq.num_computed for item in items], np.int64)
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_lens = computed + counts
    max_blocks = int(-(-context_lens.max() // block_size))
    tables = np.zeros((len(items), max_blocks), np.int32)
    token_ids = np.empty(int(query_start[-1]), np.int64)
    for i, item in enumerate(items):
        seq = item.seq
        used = -(-int(context_lens[i]) // block_size)
        tables[i, :used] = seq.table.blocks[:used]
        start = seq.num_computed
        if item.num_tokens == 1:
            token_ids[query_start[i]] = seq.token_ids[start]
        else:
            token_ids[query_start[i] : query_start[i] + item.num_tokens] = seq.token_ids[start : start + item.num_tokens]
        if item.draft:
            token_ids[query_start[i] + item.num_tokens : query_start[i + 1]] = item.draft.token_ids
    owner = np.repeat(np.arange(len(items)), counts)
    positions = np.arange(token_ids.shape[0]) - query_start[owner] + computed[owner]
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    rope_lens = np.asarray([item.seq.rope_len for item in items], np.int64)
    ends = [np.arange(query_start[i] + item.num_tokens - 1, query_start[i + 1]) for i, item in enumerate(items) if item.samples]
    sample_rows = np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        token_ids=put(token_ids),
        rope_lengths=put(np.maximum(rope_lens[owner], positions + 1)),
        sample_rows=put(sample_rows),
        attention=AttentionBatch(
            query_start=put(query_start),
            context_lens=put(context_lens.astype(np.int32)),
            block_tables=put(tables),
            slot_mapping=put(slots),
            positions=put(positions),
            max_query_len=int(counts.max()),
            max_context_len=int(context_lens.max()),
        ),
    )
