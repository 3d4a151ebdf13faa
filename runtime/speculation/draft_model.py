"""A small model that drafts for a large one, token after token (Leviathan et al. 2023, Chen et al. 2023), drawn with the target's noise."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.kernels.staging import wait_for
from dspark.runtime.execution.forward_batch import ForwardBatch
from dspark.runtime.execution.graphs import Record
from dspark.runtime.execution.loader import load_model
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.kv.pool import allocate_pool, bytes_per_block
from dspark.runtime.layers.rope import RotaryTables, Rotations
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.draft_pages import SlotLedger
from dspark.runtime.speculation.draft_steps import DraftSteps, Run, lay_out, lay_out_ahead
from dspark.runtime.speculation.draft_vocabulary import MAPPED_NAME, DraftVocabulary, build_vocabulary
from dspark.runtime.speculation.heads.chains import Chains, DeviceChains, draws_there

METHOD = "draft-model"
MAX_DRAFT = 10
LEAST_SURVIVAL = 0.2
"""A draft ends with the token at which the draft model is less sure than this that all of it is right."""
CATCH_UP_TOKENS = 512
"""Tokens that one round computes at most for sequences that lack keys, which bounds its memory; the rest waits for later rounds."""
LOOK_AWAY_AFTER = 32
"""After so many steps without a draft new prompts are no longer followed: when drafting does not pay, it is to cost nothing."""


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
        self._steps = DraftSteps(model, vocabulary, RotaryTables(model.config, self.context, facts.device), max_tokens + 1)
        self.bytes_per_block = bytes_per_block(model.config, facts.block_size, facts.kv_dtype)
        self._steps_without = 0

    def allocate(self, num_blocks: int) -> None:
        facts = self.model.kernels.facts
        self._steps.caches = allocate_pool(self.model.config, num_blocks, facts.block_size, facts.kv_dtype, facts.device)
        self._ledger = SlotLedger(num_blocks, facts.block_size)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for k_cache, v_cache in self._steps.caches:
            self.model.kernels.copy_blocks(k_cache, v_cache, source, target)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Nothing: the nodes of a target's tree were never computed here."""

    def count_step(self, copies: Rows[tuple[int, int]]) -> None:
        self._steps_without += 1
        for source, target in copies:
            self._ledger.copy_block(source, target)

    def why_not_recorded(self) -> str | None:
        """Nothing: it has no part in steps that decode and verify."""
        return None

    def record(self, record: Record) -> None:
        self._steps.record(record)

    def metrics(self) -> dict[str, Any]:
        return self._steps.metrics()

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
                runs.append(Run(blocks, start, tokens, int(batch.rope_lengths[end - 1])))
        if runs:
            self._compute(runs, 0)

    @torch.inference_mode()
    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Chains of up to max_tokens; none for a sequence that has more to catch up with, or that is beyond the draft's context.

        Sequences whose options look at tokens draft by themselves, token by token, so that they hold up nobody else.
        """
        self._steps_without = 0
        drafts: list[Draft | None] = [None] * len(sequences)
        there = [draws_there(self._sampler, seq) for seq in sequences]
        for kind, draft in ((True, self._draft_there), (False, self._draft_here)):
            members = [i for i, its in enumerate(there) if its is kind]
            if members:
                for i, made in draft([sequences[i] for i in members], [rooms[i] for i in members]).items():
                    drafts[members[i]] = made
        wait_for(self.model.kernels.facts.device)
        return drafts

    def _draft_here(self, sequences: list[Sequence], rooms: list[int]) -> dict[int, Draft | None]:
        """Drafts by index, every token drawn by the host."""
        ready, runs = self._catch_up(sequences, rooms)
        if not runs:
            return {}
        logits = self._compute(runs, len(ready))
        if not ready:
            return {}
        seqs = [sequences[i] for i in ready]
        chains = Chains(self._sampler, seqs, [self._limit(sequences[i], rooms[i]) for i in ready], self._keep, LEAST_SURVIVAL)
        chains.draw(logits)
        depth = 0
        while rows := chains.open_rows:
            newest = chains.newest_tokens
            steps = [Run(seqs[r].table.blocks, seqs[r].num_tokens + depth, [newest[r]], seqs[r].rope_len) for r in rows]
            chains.draw(self._compute(steps, len(rows)), rows=rows)
            depth += 1
        return dict(zip(ready, chains.drafts(METHOD), strict=True))

    def _draft_there(self, sequences: list[Sequence], rooms: list[int]) -> dict[int, Draft | None]:
        """The same on the device: one copy takes the inputs of all depths there, one brings the tokens of all depths back.

        Sequences with more room come first, so that those which go on to a depth are the first ones. One that is less sure of itself than
        the host would go on with is computed to its limit all the same: what was fed is noted, whether it becomes a draft or not.
        """
        assert self._sampler.device_rows is not None
        ready, runs = self._catch_up(sequences, rooms)
        if not ready:
            if runs:
                self._compute(runs, 0)
            return {}
        limits = [self._limit(sequences[i], rooms[i]) for i in ready]
        order = sorted(range(len(ready)), key=lambda place: -limits[place])
        ready, runs = [ready[place] for place in order], [*(runs[place] for place in order), *runs[len(order) :]]
        limits, seqs = sorted(limits, reverse=True), [sequences[i] for i in ready]
        widths = [sum(limit > depth for limit in limits) for depth in range(limits[0])]
        chains = DeviceChains(self._sampler.device_rows, seqs, limits, self._keep, LEAST_SURVIVAL, widths)
        block_size = self.model.kernels.facts.block_size
        laids = [lay_out(runs, len(ready), block_size), *lay_out_ahead(seqs, widths[1:], block_size)]
        steps, placed = self._steps.place(laids, chains.arrays)
        chains.place(placed)
        for depth, (step, width) in enumerate(zip(steps, widths, strict=True)):
            chains.draw(self._steps.logits(step, chains.newest()[:width] if depth else None))
        self._note(runs)
        drafts = chains.drafts(METHOD)
        for row, seq in enumerate(seqs):
            fed = [drawn[row] for drawn in chains.fed[: limits[row] - 1]]
            self._ledger.write(seq.table.blocks, seq.num_tokens, fed)
        return dict(zip(ready, drafts, strict=True))

    def _limit(self, seq: Sequence, room: int) -> int:
        return min(room, self.max_tokens, self.context - seq.num_tokens + 1)

    def _catch_up(self, sequences: list[Sequence], rooms: list[int]) -> tuple[list[int], list[Run]]:
        """(sequences that can draft, what to compute first): theirs come first, in order, each up to its newest token."""
        ready, runs, partial, budget = [], [], [], CATCH_UP_TOKENS
        for i, (seq, room) in enumerate(zip(sequences, rooms, strict=True)):
            if room < 1 or seq.num_tokens > self.context or budget < 1:
                continue
            start = self._ledger.valid_len(seq)
            tokens = seq.token_ids[start : start + budget]
            run = Run(seq.table.blocks, start, tokens, seq.rope_len)
            budget -= len(tokens)
            if start + len(tokens) == seq.num_tokens:
                ready.append(i)
                seq.drafter_len = seq.num_computed
                runs.append(run)
            else:
                partial.append(run)
        return ready, runs + partial

    def _compute(self, runs: list[Run], num_wanted: int) -> torch.Tensor:
        """Compute the runs' tokens; logits float32 [num_wanted, V] after the last token of the first runs."""
        (step,), _ = self._steps.place([lay_out(runs, num_wanted, self.model.kernels.facts.block_size)])
        logits = self._steps.logits(step)
        self._note(runs)
        return logits

    def _note(self, runs: list[Run]) -> None:
        for run in runs:
            self._ledger.write(run.blocks, run.start, run.tokens)


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
