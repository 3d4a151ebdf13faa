"""A small model that drafts for a large one, token after token (Leviathan et al. 2023, Chen et al. 2023), drawn with the target's noise."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from dspark.kernels.ops import AttentionBatch
from dspark.runtime.execution.forward_batch import ForwardBatch
from dspark.runtime.execution.loader import load_model
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.kv.pool import allocate_pool, bytes_per_block
from dspark.runtime.layers.rope import RotaryTables, Rotations
from dspark.runtime.models.decoder import Decoder, KVCaches
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.draft_pages import SlotLedger
from dspark.runtime.speculation.draft_vocabulary import MAPPED_NAME, DraftVocabulary, build_vocabulary
from dspark.runtime.speculation.heads.chains import Chains

METHOD = "draft-model"
MAX_DRAFT = 10
LEAST_SURVIVAL = 0.2
"""A draft ends with the token at which the draft model is less sure than this that all of it is right."""
CATCH_UP_TOKENS = 512
"""Tokens that one round computes at most for sequences that lack keys, which bounds its memory; the rest waits for later rounds."""
LOOK_AWAY_AFTER = 32
"""After so many steps without a draft new prompts are no longer followed: when drafting does not pay, it is to cost nothing."""


@dataclass
class _Run:
    """Tokens of one sequence to compute: from position `start` on, in the target's ids."""

    blocks: list[int]
    start: int
    tokens: Rows[int]
    rope_len: int


class DraftModel:
    """See `Drafter`. max_model_len: longest sequence in tokens; beyond the draft's own context there are no drafts.

    Its keys and values are the same function of a beginning as the target's, so what it needs is found in shared, copied and old blocks
    (see SlotLedger). Prompts are computed along with the target's; what the target then gains is caught up with when a draft is wanted.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Decoder, vocabulary: DraftVocabulary, sampler: Sampler, max_model_len: int, max_tokens: int, keep_distributions: bool
    ) -> None:
        self.model, self.vocabulary, self.max_tokens = model, vocabulary, max_tokens
        self._sampler, self._keep = sampler, keep_distributions
        facts = model.kernels.facts
        self.context = min(model.config.context_length, max_model_len)
        self._rope = RotaryTables(model.config, self.context, facts.device)
        self.bytes_per_block = bytes_per_block(model.config, facts.block_size, facts.kv_dtype)
        self._caches: KVCaches = []
        self._steps_without = 0

    def allocate(self, num_blocks: int) -> None:
        facts = self.model.kernels.facts
        self._caches = allocate_pool(self.model.config, num_blocks, facts.block_size, facts.kv_dtype, facts.device)
        self._ledger = SlotLedger(num_blocks, facts.block_size)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for k_cache, v_cache in self._caches:
            self.model.kernels.copy_blocks(k_cache, v_cache, source, target)
        self._ledger.copy_blocks(source.cpu().numpy(), target.cpu().numpy())

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Nothing: the nodes of a target's tree were never computed here."""

    def count_step(self) -> None:
        self._steps_without += 1

    def why_not_recorded(self) -> str | None:
        """Nothing: it has no part in steps that decode and verify."""
        return None

    def absorb(self, batch: ForwardBatch, rotations: Rotations, features: torch.Tensor | None) -> None:
        """Compute the step's prompt tokens, as far as what lies before them is known. Single tokens and drafts wait for `draft`."""
        if self._steps_without > LOOK_AWAY_AFTER or batch.sample_rows.shape[0] == batch.token_ids.shape[0]:
            return
        attention = batch.attention
        starts = attention.query_start.tolist()
        rows = np.searchsorted(batch.sample_rows.cpu().numpy(), starts)  # how many logits each sequence wants: a prompt one at most
        context_lens = attention.context_lens.tolist()
        runs = []
        for i, (first, end) in enumerate(pairwise(starts)):
            if end - first == 1 or rows[i + 1] - rows[i] == end - first:
                continue
            start = context_lens[i] - (end - first)
            count = min(end - first, self.context - start)
            blocks = attention.block_tables[i].tolist()
            if count > 0 and self._ledger.knows(blocks, start - 1):
                tokens = batch.token_ids[first : first + count].tolist()
                runs.append(_Run(blocks, start, tokens, int(batch.rope_lengths[end - 1])))
        if runs:
            self._forward(runs, [])

    @torch.inference_mode()
    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Chains of up to max_tokens; none for a sequence that has more to catch up with, or that is beyond the draft's context."""
        self._steps_without = 0
        ready, runs = self._catch_up(sequences, rooms)
        drafts: list[Draft | None] = [None] * len(sequences)
        if not runs:
            return drafts
        logits = self._forward(runs, list(range(len(ready))))
        if not ready:
            return drafts
        seqs = [sequences[i] for i in ready]
        for seq in seqs:
            seq.drafter_len = seq.num_computed
        limits = [min(rooms[i], self.max_tokens, self.context - sequences[i].num_tokens + 1) for i in ready]
        chains = Chains(self._sampler, seqs, limits, self._keep, LEAST_SURVIVAL)
        chains.draw(self.vocabulary.widen(logits))
        depth = 0
        while rows := chains.open_rows:
            newest = chains.newest
            steps = [_Run(seqs[r].table.blocks, seqs[r].num_tokens + depth, [newest[r]], seqs[r].rope_len) for r in rows]
            chains.draw(self.vocabulary.widen(self._forward(steps, list(range(len(rows))))), rows=rows)
            depth += 1
        for i, draft in zip(ready, chains.drafts(METHOD), strict=True):
            drafts[i] = draft
        return drafts

    def _catch_up(self, sequences: list[Sequence], rooms: list[int]) -> tuple[list[int], list[_Run]]:
        """(sequences that can draft, what to compute first): theirs come first, in order, each up to its newest token."""
        ready, runs, partial, budget = [], [], [], CATCH_UP_TOKENS
        for i, (seq, room) in enumerate(zip(sequences, rooms, strict=True)):
            if room < 1 or seq.num_tokens > self.context or budget < 1:
                continue
            start = self._ledger.valid_len(seq)
            tokens = seq.token_ids[start : start + budget]
            run = _Run(seq.table.blocks, start, tokens, seq.rope_len)
            budget -= len(tokens)
            if start + len(tokens) == seq.num_tokens:
                ready.append(i)
                runs.append(run)
            else:
                partial.append(run)
        return ready, runs + partial

    def _forward(self, runs: list[_Run], wanted: list[int]) -> torch.Tensor:
        """Compute the runs' tokens; logits [len(wanted), V] after the last token of the runs `wanted` (the first ones, in order)."""
        facts = self.model.kernels.facts
        token_ids, lengths, attention = lay_out(runs, facts.block_size, facts.device)
        rotations = self._rope.lookup(attention.positions, lengths)
        rows = attention.query_start[1:][wanted].long() - 1
        hidden = self.model.forward(self.vocabulary.feed(token_ids), rotations, self._caches, attention, rows)
        for run in runs:
            self._ledger.write(run.blocks, run.start, run.tokens)
        return self.model.logits(hidden) if wanted else hidden


def lay_out(runs: list[_Run], block_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Token ids int64 [T], rope lengths int64 [T] and the batch of runs, one after the other."""
    counts = np.asarray([len(run.tokens) for run in runs], np.int64)
    starts = np.asarray([run.start for run in runs], np.int64)
    query_start = np.zeros(len(runs) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    used = -(-(starts + counts) // block_size)
    tables = np.zeros((len(runs), int(used.max())), np.int32)
    for i, run in enumerate(runs):
        tables[i, : used[i]] = run.blocks[: used[i]]
    owner = np.repeat(np.arange(len(runs)), counts)
    positions = np.arange(int(query_start[-1])) - query_start[owner] + starts[owner]
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    token_ids = np.asarray([token for run in runs for token in run.tokens], np.int64)
    lengths = np.maximum(np.asarray([run.rope_len for run in runs], np.int64)[owner], positions + 1)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    context_lens = (starts + counts).astype(np.int32)
    batch = AttentionBatch(
        query_start=put(query_start),
        context_lens=put(context_lens),
        block_tables=put(tables),
        slot_mapping=put(slots),
        positions=put(positions),
        max_query_len=int(counts.max()),
        max_context_len=int(context_lens.max()),
    )
    return put(token_ids), put(lengths), batch


def load_draft_model(
    directory: str | Path,
    target: Decoder,
    target_codec: TextCodec,
    sampler: Sampler,
    max_model_len: int,
    max_tokens: int | None = None,
    keep_distributions: bool = False,
) -> DraftModel:
    """Load an engine as the draft of a target, on its device and for its block size, in the draft's own dtype. Not allocated yet.

    An embedding that is the target's, as in a draft model that was made of it, is held once.
    Raises InputError when the directory is no engine, or its vocabulary is another one and was not paired as such.
    """
    facts = target.kernels.facts
    model = load_model(
        directory,
        device=facts.device,
        kernels=target.kernels.choice,
        block_size=facts.block_size,
        interpreted=facts.interpreted,
        kv_cache_dtype="model",
    )
    sizes = target.config.vocab_size, model.config.vocab_size
    is_mapped = (Path(directory) / MAPPED_NAME).is_file()
    vocabulary = build_vocabulary(target_codec, load_codec(directory), *sizes, facts.device, is_mapped)
    _share_vocabulary(model, target)
    return DraftModel(model, vocabulary, sampler, max_model_len, max_tokens or MAX_DRAFT, keep_distributions)


def _share_vocabulary(model: Decoder, target: Decoder) -> None:
    """Let a model use the target's embedding where it has the very same one, and its head where both are tied to it."""
    own, theirs = model.embedding, target.embedding
    if own.shape != theirs.shape or own.dtype != theirs.dtype or not torch.equal(own, theirs):
        return
    model.embedding = theirs
    if model.config.tie_word_embeddings and target.config.tie_word_embeddings:
        model.head.projection = target.head.projection
