"""The shape of one step's attention, shared by every attention kernel."""

from dataclasses import dataclass

import torch


@dataclass
class AttentionBatch:
    """S sequences with T query tokens together. Prefill, decode and verify are one thing: a sequence has n query tokens.

    query_start   int32 [S + 1]  first query token of each sequence, then T
    context_lens  int32 [S]      keys each sequence has after this step's tokens are stored (its queries are the last ones)
    block_tables  int32 [S, max_blocks]  KV block ids, in order of position; entries past the context are arbitrary
    slot_mapping  int64 [T]      block_id * block_size + offset where each token's key and value go
    positions     int64 [T]      position of each token in its sequence
    max_query_len, max_context_len: maxima over the sequences, known on the host
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_query_len: int
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return int(self.slot_mapping.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])
