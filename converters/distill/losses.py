"""The objective: cross entropy, total variation to the target's distribution, and the confidence head's own loss.

Source: arXiv 2607.05147 (section 4) and the values of its reference code. Row k of a block weighs exp(-k / 4).

Letters: R rows, H width, V vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dspark.converters.distill.features import TargetVocabulary
from dspark.converters.distill.model import TrainableDraft

CE_WEIGHT, TV_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY = 4.0
VALUES_AT_ONCE = 1 << 24
"""Logits held at a time (float32: 64 MiB, a few times over)."""


@dataclass(frozen=True)
class Rows:
    """Supervised rows of one sequence, by position. row: index among the blocks' rows (block * G + k); k: place in its block; previous,
    label: the tokens before and in the predicted place; source: position whose final state gives the target's distribution for it."""

    row: torch.Tensor
    k: torch.Tensor
    previous: torch.Tensor
    label: torch.Tensor
    source: torch.Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def weight(self) -> torch.Tensor:
        return torch.exp(-self.k.float() / DECAY)

    def chunks(self, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, len(self), size))


@dataclass(frozen=True)
class Terms:
    """Of each row [R]: the three losses, and how much of both distributions overlaps, which is the chance that a draw is accepted."""

    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    overlap: torch.Tensor

    def weighted(self, weight: torch.Tensor) -> torch.Tensor:
        """The three sums over rows [3]."""
        return torch.stack([(weight * term).sum() for term in (self.ce, self.tv, self.confidence)])


def supervised_rows(tokens: torch.Tensor, anchors: torch.Tensor, block_size: int) -> Rows:
    """Rows of blocks after anchors int64 [A] whose label exists: an answer goes on to the sequence's end. Rows of one position stand
    together, so that its distribution is computed once."""
    places = torch.arange(block_size, device=anchors.device)
    source = (anchors[:, None] + places).flatten()
    k = places.repeat(len(anchors))
    row = torch.arange(len(source), device=anchors.device)
    kept = source + 1 < len(tokens)
    source, k, row = source[kept], k[kept], row[kept]
    order = torch.argsort(source, stable=True)
    source, k, row = source[order], k[order], row[order]
    return Rows(row, k, tokens[source], tokens[source + 1], source)


def row_terms(
    draft: TrainableDraft, vocabulary: TargetVocabulary, states: torch.Tensor, rows: Rows, at: slice, final: torch.Tensor
) -> Terms:
    """The terms of rows `at`. states [R, H] of these rows; final [T, H] of the sequence."""
    with torch.no_grad():
        positions, place = rows.source[at].unique_consecutive(return_inverse=True)
        target = vocabulary.target_probabilities(final[positions])[place]
    embedded, bias = draft.markov(rows.previous[at])
    log_q = (states @ vocabulary.head.T + bias).log_softmax(-1)
    ce = -log_q.gather(1, rows.label[at, None])[:, 0]
    tv = (log_q.exp() - target).abs().sum(-1)
    overlap = (1 - 0.5 * tv.detach()).clamp(0, 1)
    confidence = binary_cross_entropy_with_logits(draft.confidence(states, embedded), overlap, reduction="none")
    return Terms(ce, tv, confidence, overlap)


def sequence_loss(
    draft: TrainableDraft,
    vocabulary: TargetVocabulary,
    states: torch.Tensor,
    rows: Rows,
    final: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sums of the three losses [3], and the overlap of each row [R]. states [A * G, H] of all rows of the blocks.

    scale: with it the gradient of scale times the objective is added to the parameters'. The vocabulary is wide: each chunk of rows is done
    with, gradient and all, before the next, and the backbone is gone back through once at the end.
    """
    leaf = states.detach().requires_grad_(scale is not None)
    chunk = max(1, VALUES_AT_ONCE // vocabulary.head.shape[0])
    factors = torch.tensor([CE_WEIGHT, TV_WEIGHT, CONFIDENCE_WEIGHT], device=states.device)
    sums, overlaps, weight = torch.zeros(3, device=states.device), [], rows.weight
    for at in rows.chunks(chunk):
        terms = row_terms(draft, vocabulary, leaf[rows.row[at]], rows, at, final)
        found = terms.weighted(weight[at])
        if scale is not None:
            (scale * (found * factors).sum()).backward()  # type: ignore[no-untyped-call]
        sums += found.detach()
        overlaps.append(terms.overlap)
    if scale is not None:
        states.backward(leaf.grad)  # type: ignore[no-untyped-call]
    return sums, torch.cat(overlaps)


def expected_lengths(rows: Rows, overlap: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """Tokens that each block is expected to bring at temperature 1 [A]: 1 + sum over k of the product of the overlaps up to k."""
    table = torch.zeros(num_blocks * block_size, device=overlap.device)
    table[rows.row] = overlap
    return 1 + table.view(num_blocks, block_size).cumprod(-1).sum(-1)
