"""A draft model in training: at every token of a line it is drawn to the target's own distribution there.

The loss is a sum of KL(target || draft), cross entropy with the token that was written, and total variation, weighted as DistillOptions
says. The prompt's tokens count too, with a smaller weight: the target has a distribution there as well.

Letters: T tokens, H width, V vocabulary, R places.
"""

from __future__ import annotations

import torch

from dspark.converters.distill.data import DistillData
from dspark.converters.distill.features import Features, TargetVocabulary
from dspark.converters.distill.learner import Parameters
from dspark.converters.distill.losses import VALUES_AT_ONCE
from dspark.converters.distill.options import DistillOptions
from dspark.converters.distill.small_model import TrainableDecoder
from dspark.runtime.spec.model_config import ModelConfig

TERMS = ("ce", "kl", "tv")


class ModelLearner:
    """See `Learner`. parameters: of `first_parameters`. Lines and features in the order of data.lines."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        data: DistillData,
        features: Features,
        vocabulary: TargetVocabulary,
        options: DistillOptions,
    ) -> None:
        self.parameters = parameters
        self._data, self._features, self._vocabulary, self._options = data, features, vocabulary, options
        self._device = vocabulary.embedding.device
        self._decoder = TrainableDecoder(config, parameters, vocabulary.embed, max(len(line.tokens) for line in data.lines))
        self._factors = torch.tensor([options.ce_weight, options.kl_weight, options.tv_weight], device=self._device)

    def add_gradients(self, lines: list[int], stream: int) -> float:
        weights = [self._weights(index) for index in lines]
        total = sum(float(weight.sum()) for weight in weights)
        sums = torch.zeros(len(TERMS), device=self._device)
        for index, weight in zip(lines, weights, strict=True):
            states = self._decoder.states(self._tokens(index))
            sums += self._line(index, states, weight, 1 / total)[0]
        return float((self._factors * sums).sum()) / total

    @torch.no_grad()
    def held_out(self) -> tuple[float, dict[str, float]]:
        """tau of chains of block_size tokens from every place of an answer: with the token that was written as what is accepted where the
        answer is greedy, with the distributions' overlap where it is drawn."""
        lengths, sums, total = [], torch.zeros(len(TERMS), device=self._device), 0.0
        for index in range(len(self._data.training), len(self._data.lines)):
            weight = self._weights(index)
            line = self._data.lines[index]
            found, accepted, overlap = self._line(index, self._decoder.states(self._tokens(index)), weight)
            chances = accepted if line.request.params.is_greedy else overlap
            lengths.append(chain_lengths(chances[line.prompt_len - 1 :], self._options.block_size))
            sums, total = sums + found, total + float(weight.sum())
        terms = dict(zip(TERMS, (sums / total).tolist(), strict=True))
        terms["loss"] = float((self._factors * sums).sum()) / total
        return float(torch.cat(lengths).mean()), terms

    def _weights(self, index: int) -> torch.Tensor:
        """Of each place of a line that has a token behind it [T - 1]."""
        line = self._data.lines[index]
        weight = torch.ones(len(line.tokens) - 1, device=self._device)
        weight[: line.prompt_len - 1] = self._options.prompt_weight
        return weight

    def _line(
        self, index: int, states: torch.Tensor, weight: torch.Tensor, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weighted sums of the terms [3]; of each place whether the draft's best token is the one that follows, and how much the two
        distributions overlap [T - 1]. scale: with it the gradient of scale times the loss is added. A few rows of the vocabulary at a
        time, as in `losses.sequence_loss`."""
        tokens = self._tokens(index)
        final = self._features.final[self._features.rows(index)].to(self._device)
        leaf = states.detach().requires_grad_(scale is not None)
        sums, accepted, overlaps = torch.zeros(len(TERMS), device=self._device), [], []
        chunk = max(1, VALUES_AT_ONCE // self._vocabulary.head.shape[0])
        for start in range(0, len(weight), chunk):
            at = slice(start, min(start + chunk, len(weight)))
            with torch.no_grad():
                target = self._vocabulary.target_probabilities(final[at])
            log_q = self._vocabulary.logits(leaf[at]).log_softmax(-1)
            label = tokens[1:][at]
            ce = -log_q.gather(1, label[:, None])[:, 0]
            kl = torch.special.xlogy(target, target).sum(-1) - (target * log_q).sum(-1)
            tv = (log_q.exp() - target).abs().sum(-1) if self._options.tv_weight or scale is None else torch.zeros_like(ce)
            terms = torch.stack([(weight[at] * term).sum() for term in (ce, kl, tv)])
            if scale is not None:
                (scale * (self._factors * terms).sum()).backward()  # type: ignore[no-untyped-call]
            sums += terms.detach()
            accepted.append((log_q.argmax(-1) == label).float())
            overlaps.append((1 - 0.5 * tv.detach()).clamp(0, 1))
        if scale is not None:
            states.backward(leaf.grad)  # type: ignore[no-untyped-call]
        return sums, torch.cat(accepted), torch.cat(overlaps)

    def _tokens(self, index: int) -> torch.Tensor:
        return torch.tensor(self._data.lines[index].tokens, device=self._device)


def chain_lengths(chances: torch.Tensor, depth: int) -> torch.Tensor:
    """chances [R]: that the draft's token at each place is accepted -> tokens that a chain of up to `depth` from each place brings [R]."""
    padded = torch.cat([chances, chances.new_zeros(depth - 1)])
    return 1 + padded.unfold(0, depth, 1).cumprod(-1).sum(-1)
