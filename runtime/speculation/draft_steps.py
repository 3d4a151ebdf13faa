"""The steps of a draft model: laid out on the host, uploaded in one copy, and computed as they come or by recordings."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.kernels.staging import stage
from dspark.runtime.execution.forward_batch import ForwardBatch, Laid, batch_of, block_tables
from dspark.runtime.execution.graphs import Bucket, Record, StepGraphs, waits_for_host
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models.decoder import Decoder, KVCaches
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft_vocabulary import DraftVocabulary


@dataclass
class Run:
    """Tokens of one sequence to compute: from position `start` on, in the target's ids."""

    blocks: list[int]
    start: int
    tokens: Rows[int]
    rope_len: int


@dataclass
class PlacedStep:
    """A step whose inputs are on the device: by their names, or packed for its bucket."""

    laid: Laid
    there: dict[str, torch.Tensor]
    bucket: Bucket | None


class DraftSteps:
    """caches: the model's own layers behind the target's block ids. longest_run: tokens of a sequence up to which a step may be recorded:
    what one round of drafting and verifying leaves to catch up with."""

    def __init__(self, model: Decoder, vocabulary: DraftVocabulary, rope: RotaryTables, longest_run: int) -> None:
        self._model, self._vocabulary, self._rope, self._longest_run = model, vocabulary, rope, longest_run
        self.caches: KVCaches = []
        self.graphs: StepGraphs | None = None
        self.no_graphs: str | None = None

    def record(self, record: Record) -> None:
        """Replay steps from recordings from now on, where the kernels allow it (else `no_graphs` says why not)."""
        kernels = self._model.kernels
        taken = {op: selection.taken for op, selection in kernels.selections.items()}
        waits = waits_for_host(taken, self._model.config.num_experts > 0)
        self.no_graphs = None if waits is None else f"the drafter's {waits}"
        if waits is None:
            facts = kernels.facts
            self.graphs = StepGraphs(self._compute, record, facts.block_size, facts.device, self._rope.longest_plain)

    def metrics(self) -> dict[str, Any]:
        """Counters of the recordings, JSON-ready; why there are none where some were wanted."""
        if self.graphs is not None:
            return {"draft_graphs": self.graphs.metrics()}
        return {"draft_graphs": {"off": self.no_graphs}} if self.no_graphs is not None else {}

    def place(self, laids: list[Laid], others: Rows[np.ndarray] = ()) -> tuple[list[PlacedStep], list[torch.Tensor]]:
        """Bring the inputs of steps that follow each other to the device, and other arrays with them: one copy."""
        buckets = [self._bucket(laid) for laid in laids]
        arrays: list[np.ndarray] = []
        for laid, bucket in zip(laids, buckets, strict=True):
            own = laid.arrays.values() if bucket is None or self.graphs is None else [self.graphs.packed(bucket, laid)]
            arrays += own
        there = iter(stage([*arrays, *others], self._model.kernels.facts.device))
        steps = []
        for laid, bucket in zip(laids, buckets, strict=True):
            names = list(laid.arrays) if bucket is None else ["packed"]
            steps.append(PlacedStep(laid, {name: next(there) for name in names}, bucket))
        return steps, list(there)

    def logits(self, step: PlacedStep, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step: float32 [rows, V] over the target's vocabulary, of the tokens it wants logits of. token_ids int64 [T], the
        target's: instead of those that it was laid out with. What is returned may be written to, and lasts until the next step."""
        laid = step.laid
        if step.bucket is not None and self.graphs is not None:
            return self._vocabulary.widen(self.graphs.run_packed(step.bucket, laid, step.there["packed"], token_ids))
        there = step.there if token_ids is None else {**step.there, "token_ids": token_ids}
        computed = self._compute(batch_of(there, laid.max_query_len, laid.max_context_len, laid.longest))
        return self._vocabulary.widen(computed) if computed.shape[0] else computed

    def _bucket(self, laid: Laid) -> Bucket | None:
        if self.graphs is None or laid.max_query_len > self._longest_run or not laid.arrays["sample_rows"].shape[0]:
            return None
        return self.graphs.bucket_for(laid)

    def _compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [rows, draft vocabulary] (what is recorded)."""
        rotations = self._rope.lookup(batch.attention.positions, batch.rope_lengths, batch.longest)
        rows = batch.sample_rows
        hidden = self._model.forward(self._vocabulary.feed(batch.token_ids), rotations, self.caches, batch.attention, rows)
        if rows.shape == batch.token_ids.shape:
            hidden = hidden[rows]  # so many that all were left, in the order of the tokens
        return self._model.logits(hidden) if rows.shape[0] else hidden


def lay_out(runs: list[Run], num_wanted: int, block_size: int) -> Laid:
    """Runs one after the other; the logits after the last token of the first num_wanted ones are wanted."""
    counts = np.asarray([len(run.tokens) for run in runs], np.int64)
    starts = np.asarray([run.start for run in runs], np.int64)
    query_start = np.zeros(len(runs) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    tables = block_tables([run.blocks for run in runs], starts + counts, block_size)
    owner = np.repeat(np.arange(len(runs)), counts)
    positions = np.arange(int(query_start[-1])) - query_start[owner] + starts[owner]
    token_ids = np.asarray([token for run in runs for token in run.tokens], np.int64)
    lengths = np.asarray([run.rope_len for run in runs], np.int64)[owner]
    wanted = query_start[1 : num_wanted + 1].astype(np.int64) - 1
    return _laid(token_ids, wanted, query_start, tables, owner, positions, lengths, block_size)


def lay_out_ahead(sequences: list[Sequence], widths: list[int], block_size: int) -> list[Laid]:
    """A step for each of `widths`: the first so many sequences compute one more token each, the first of them the one at the position
    behind their newest. The tokens themselves are known when a step is computed."""
    if not widths:
        return []
    first = np.asarray([seq.num_tokens for seq in sequences], np.int64)
    rope_lens = np.asarray([seq.rope_len for seq in sequences], np.int64)
    depth_of = np.asarray([sum(width > row for width in widths) for row in range(len(sequences))], np.int64)
    tables = block_tables([seq.table.blocks for seq in sequences], first + depth_of, block_size)
    laids = []
    for depth, width in enumerate(widths):
        owner, positions = np.arange(width), first[:width] + depth
        used = -(-(int(positions.max()) + 1) // block_size)
        query_start = np.arange(width + 1, dtype=np.int32)
        tokens = np.zeros(width, np.int64)
        laids.append(_laid(tokens, owner, query_start, tables[:width, :used], owner, positions, rope_lens[:width], block_size))
    return laids


def _laid(
    token_ids: np.ndarray,
    sample_rows: np.ndarray,
    query_start: np.ndarray,
    tables: np.ndarray,
    owner: np.ndarray,
    positions: np.ndarray,
    rope_lens: np.ndarray,
    block_size: int,
) -> Laid:
    rope_lengths = np.maximum(rope_lens, positions + 1)
    context_lens = positions[query_start[1:] - 1] + 1
    arrays = {
        "token_ids": token_ids,
        "rope_lengths": rope_lengths,
        "sample_rows": sample_rows,
        "query_start": query_start,
        "context_lens": context_lens.astype(np.int32),
        "block_tables": np.ascontiguousarray(tables),
        "slot_mapping": tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        "positions": positions,
    }
    return Laid(arrays, [], int(np.diff(query_start).max()), int(context_lens.max()), int(rope_lengths.max()))
