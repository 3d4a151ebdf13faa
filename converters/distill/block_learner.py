"""A block drafter in training: blocks behind drawn anchors of each line, the published objective."""

from __future__ import annotations

import torch

from dspark.converters.distill.data import DistillData
from dspark.converters.distill.features import Features, TargetVocabulary
from dspark.converters.distill.learner import seeded
from dspark.converters.distill.losses import CE_WEIGHT, CONFIDENCE_WEIGHT, TV_WEIGHT, expected_lengths, sequence_loss, supervised_rows
from dspark.converters.distill.model import TrainableDraft, new_parameters
from dspark.converters.distill.options import DistillOptions
from dspark.runtime.speculation.heads.config import DraftConfig

_HELD_OUT_STREAM = 1 << 40


class BlockLearner:
    """See `Learner`. lines and features in the order of data.lines."""

    def __init__(
        self, config: DraftConfig, data: DistillData, features: Features, vocabulary: TargetVocabulary, options: DistillOptions
    ) -> None:
        self._config, self._data, self._features, self._vocabulary, self._options = config, data, features, vocabulary, options
        self._device = vocabulary.embedding.device
        self.parameters = new_parameters(config, options.seed, str(self._device))
        longest = max(len(line.tokens) for line in data.lines)
        self._draft = TrainableDraft(config, self.parameters, vocabulary.embed, longest)

    def add_gradients(self, lines: list[int], stream: int) -> float:
        anchors = [self._anchors(index, stream + place) for place, index in enumerate(lines)]
        rows = [supervised_rows(self._tokens(i), at, self._config.block_size) for i, at in zip(lines, anchors, strict=True)]
        weight = sum(float(entry.weight.sum()) for entry in rows)
        sums = torch.zeros(3, device=self._device)
        for index, at, entry in zip(lines, anchors, rows, strict=True):
            states = self._states(index, at)
            sums += sequence_loss(self._draft, self._vocabulary, states, entry, self._final(index), 1 / weight)[0]
        ce, tv, confidence = (sums / weight).tolist()
        return float(CE_WEIGHT * ce + TV_WEIGHT * tv + CONFIDENCE_WEIGHT * confidence)

    @torch.no_grad()
    def held_out(self) -> tuple[float, dict[str, float]]:
        """At the same anchors each time; tau at temperature 1."""
        first = len(self._data.training)
        lengths, sums, weight = [], torch.zeros(3, device=self._device), 0.0
        for index in range(first, len(self._data.lines)):
            anchors = self._anchors(index, _HELD_OUT_STREAM + index)
            rows = supervised_rows(self._tokens(index), anchors, self._config.block_size)
            states = self._states(index, anchors)
            found, overlap = sequence_loss(self._draft, self._vocabulary, states, rows, self._final(index))
            lengths.append(expected_lengths(rows, overlap, len(anchors), self._config.block_size))
            sums, weight = sums + found, weight + float(rows.weight.sum())
        ce, tv, confidence = (sums / weight).tolist()
        terms = {"ce": ce, "tv": tv, "confidence": confidence, "loss": CE_WEIGHT * ce + TV_WEIGHT * tv + CONFIDENCE_WEIGHT * confidence}
        return float(torch.cat(lengths).mean()), terms

    def _anchors(self, index: int, stream: int) -> torch.Tensor:
        """Places of the answer that a draft starts behind, without repetition, ascending."""
        line = self._data.lines[index]
        possible = torch.arange(line.prompt_len, len(line.tokens) - 1)
        picked = torch.randperm(len(possible), generator=seeded(self._options.seed, stream, 1))[: self._options.anchors]
        return possible[picked].sort().values.to(self._device)

    def _states(self, index: int, anchors: torch.Tensor) -> torch.Tensor:
        tapped = self._features.tapped[self._features.rows(index)].to(self._device)
        return self._draft.states(tapped, self._tokens(index), anchors).flatten(0, 1)

    def _tokens(self, index: int) -> torch.Tensor:
        return torch.tensor(self._data.lines[index].tokens, device=self._device)

    def _final(self, index: int) -> torch.Tensor:
        return self._features.final[self._features.rows(index)].to(self._device)
