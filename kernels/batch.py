"""The shape of one step's attention, shared by every attention kernel."""

from dataclasses import dataclass, field
from typing import Any

import torch

MAX_TREE_NODES = 63
"""Draft nodes of one sequence: bits of a positive int64."""


@dataclass
class TreeMask:
    """Draft trees among a step's tokens. The nodes of a tree are the last query tokens of its sequence, in slots behind one another; which
    of them a node sees is not told by order.

    visible  int64 [T]  for a node the nodes on its path, itself among them (bit j: node j of its sequence); 0 for any other token
    start    int32 [S]  key index of a sequence's first node; its context length where it has no tree

    A node sees all keys before `start` and its path; positions are counted along the path. All other tokens are causal.
    """

    visible: torch.Tensor
    start: torch.Tensor


@dataclass
class AttentionBatch:
    """S sequences with T query tokens together. Prefill, decode and verify are one thing: a sequence has n query tokens.

    query_start   int32 [S + 1]  first query token of each sequence, then T
    context_lens  int32 [S]      keys each sequence has after this step's tokens are stored (its queries are the last ones)
    block_tables  int32 [S, max_blocks]  KV block ids, in order of position; entries past the context are arbitrary
    slot_mapping  int64 [T]      block_id * block_size + offset where each token's key and value go
    positions     int64 [T]      position of each token in its sequence
    max_query_len, max_context_len: maxima over the sequences, known on the host
    tree: of a step with draft trees, else None: then position and key index are the same
    prepared: what a kernel makes of all this once for all layers of a model, by a key of its own
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_query_len: int
    max_context_len: int
    tree: TreeMask | None = None
    prepared: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return int(self.slot_mapping.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])
