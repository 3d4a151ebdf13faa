"""All logits of one prompt: what audits, evaluation and tests look at."""

from __future__ import annotations

import torch

from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.kv.manager import KVCacheManager
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


@torch.inference_mode()
def logits_for(model: Decoder, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
    """Logits float32 [T, V] of every position of one prompt, on the CPU, through the paged cache and the serving kernels.

    chunk: tokens per step (default: all at once); the result must not depend on it. The cache is the one that the model was loaded for.
    """
    config, facts = model.config, model.kernels.facts
    seq = Sequence(Request(0, token_ids, SamplingParams()), 0, 0)
    kv = KVCacheManager(-(-len(token_ids) // facts.block_size), facts.block_size)
    caches = allocate_pool(config, kv.num_blocks, facts.block_size, facts.kv_dtype, facts.device)
    rope = RotaryTables(config, len(token_ids), facts.device)
    parts = []
    while seq.num_uncomputed:
        count = min(chunk or len(token_ids), seq.num_uncomputed)
        kv.extend(seq, seq.num_computed, seq.num_computed + count)
        batch = build_forward_batch(SchedulerOutput([ScheduledSequence(seq, count)]), facts.block_size, facts.device)
        rotations = rope.lookup(batch.attention.positions, batch.rope_lengths)
        rows = torch.arange(count, device=facts.device)
        hidden = model.forward(batch.token_ids, rotations, caches, batch.attention, rows)
        parts.append(model.logits(hidden).float().cpu())
        seq.num_computed += count
    return torch.cat(parts)
