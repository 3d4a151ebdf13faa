"""Perplexity of a model, and how far one model's next-token distributions are from another's.

A model is walked layer by layer, so that neither has to fit the memory whole; the heads are then taken over stretches of rows, so that the
logits [T, V] never exist at once. Of every scored token four numbers are kept.

    nll   -log p(next token), in nats; perplexity is exp of its mean
    kl    KL(baseline || candidate) of the whole distribution, in nats
    agree whether both models' likeliest token is the same

T: tokens of all samples, H: width of the residual stream, V: vocabulary, N: scored tokens, that is all but the first of each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dspark.kernels.ops import Kernels
from dspark.runtime.execution.layer_walk import LayerWalk, build_walk_layer
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.models.decoder import Head, build_head, load_embedding
from dspark.runtime.spec.errors import QualityError, UsageError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

CHUNK_BYTES = 32 << 20
"""Bytes of one stretch's logits in float32; a comparison holds a few arrays of this size."""

LARGEST_EXPONENT = 700.0
"""exp of more is no float64."""

Samples = Sequence[Sequence[int]]
Progress = Callable[[int, int], None]
"""(done, in all): layers of `final_states`, scored tokens of `score` and `compare`."""


@dataclass(frozen=True)
class FinalStates:
    """A model's residual stream after its last layer [T, H], in the order of the samples, and the head that makes logits of it."""

    states: torch.Tensor
    head: Head

    @property
    def vocab_size(self) -> int:
        return self.head.config.vocab_size

    def log_probs(self, rows: torch.Tensor, who: str) -> torch.Tensor:
        """Log-probabilities float32 [rows, V] after the tokens `rows` (int64). Raises QualityError when they are not finite."""
        log_probs = torch.log_softmax(self.head(self.states[rows]).float(), -1)
        if not bool(log_probs.isfinite().all()):
            hint = "type --dtype bfloat16 or --dtype float32 if it runs in float16; otherwise its weights are damaged"
            raise QualityError(f"the logits of the {who} are not finite", hint)
        return log_probs


@dataclass(frozen=True)
class Scores:
    """One model on some samples. num_tokens: N. mean_nll in nats."""

    num_tokens: int
    mean_nll: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll) if self.mean_nll < LARGEST_EXPONENT else math.inf


@dataclass(frozen=True)
class Comparison:
    """A candidate against its baseline on the same samples.

    KL in nats: mean, exact 99th percentile (linear between ranks) and largest over the scored tokens. top1_agreement: 0 to 1.
    Standard errors are over samples, whose tokens depend on each other, and None for fewer than two. log_ratio_se: of the logarithm of the
    perplexities' ratio, paired: it is that of the samples' differences, in which their own difficulty has no part.
    """

    baseline: Scores
    candidate: Scores
    mean_kl: float
    mean_kl_se: float | None
    p99_kl: float
    max_kl: float
    top1_agreement: float
    log_ratio_se: float | None

    @property
    def ppl_increase(self) -> float:
        """How much larger the candidate's perplexity is, in percent of the baseline's."""
        difference = self.candidate.mean_nll - self.baseline.mean_nll
        return 100.0 * math.expm1(difference) if difference < LARGEST_EXPONENT else math.inf

    @property
    def ppl_increase_se(self) -> float | None:
        """Standard error of `ppl_increase`, in the same percent."""
        return None if self.log_ratio_se is None else (100.0 + self.ppl_increase) * self.log_ratio_se


def final_states(
    config: ModelConfig,
    quant: QuantConfig | None,
    weights: WeightSource,
    kernels: Kernels,
    samples: Samples,
    progress: Progress | None = None,
) -> FinalStates:
    """Take the samples through all layers, each built and dropped in turn. Holds [T, H] in the run's dtype beside one layer."""
    walk = LayerWalk(config, samples, kernels)
    embedding = load_embedding(weights)
    walk.start(embedding)
    for index in range(config.num_layers):
        walk.advance(build_walk_layer(config, index, quant, weights, kernels))
        if progress is not None:
            progress(index + 1, config.num_layers)
    return FinalStates(walk.residual, build_head(config, embedding, quant, weights, kernels))


@torch.inference_mode()
def score(model: FinalStates, samples: Samples, progress: Progress | None = None) -> Scores:
    """Perplexity alone. Raises QualityError when the logits are not finite."""
    scored = ScoredTokens(samples, model.states.device)
    nll = torch.empty(len(scored), dtype=torch.float64)
    for part in scored.parts(model.vocab_size):
        nll[part] = _nll(model.log_probs(scored.rows[part], "model"), scored.targets[part])
        if progress is not None:
            progress(part.stop, len(scored))
    return Scores(len(scored), float(nll.mean()))


@torch.inference_mode()
def compare(baseline: FinalStates, candidate: FinalStates, samples: Samples, progress: Progress | None = None) -> Comparison:
    """Both models' `final_states` of the same samples, token by token.

    Raises UsageError for vocabularies of different sizes, QualityError when logits are not finite.
    """
    if baseline.vocab_size != candidate.vocab_size:
        what = f"the baseline has a vocabulary of {baseline.vocab_size} tokens, the engine of {candidate.vocab_size}"
        raise UsageError(what, "compare engines of the same model")
    scored = ScoredTokens(samples, baseline.states.device)
    base_nll, nll, kl, agree = (torch.empty(len(scored), dtype=torch.float64) for _ in range(4))
    for part in scored.parts(baseline.vocab_size):
        rows, targets = scored.rows[part], scored.targets[part]
        log_base, log_probs = baseline.log_probs(rows, "baseline"), candidate.log_probs(rows, "engine")
        base_nll[part], nll[part] = _nll(log_base, targets), _nll(log_probs, targets)
        agree[part] = (log_base.argmax(-1) == log_probs.argmax(-1)).double().cpu()
        kl[part] = torch.sub(log_base, log_probs, out=log_probs).mul_(log_base.exp_()).sum(-1).clamp_(min=0.0).double().cpu()
        if progress is not None:
            progress(part.stop, len(scored))
    return Comparison(
        baseline=Scores(len(scored), float(base_nll.mean())),
        candidate=Scores(len(scored), float(nll.mean())),
        mean_kl=float(kl.mean()),
        mean_kl_se=scored.standard_error(kl),
        p99_kl=percentile(kl, 0.99),
        max_kl=float(kl.max()),
        top1_agreement=float(agree.mean()),
        log_ratio_se=scored.standard_error(nll - base_nll),
    )


class ScoredTokens:
    """Which tokens of the samples are scored: all but the first of each. rows int64 [N]: the tokens before them; targets int64 [N]."""

    def __init__(self, samples: Samples, device: torch.device | str = "cpu") -> None:
        rows: list[int] = []
        targets: list[int] = []
        start = 0
        for sample in samples:
            rows += range(start, start + len(sample) - 1)
            targets += sample[1:]
            start += len(sample)
        if not rows:
            raise ValueError("nothing to score: every sample has one token")
        self.rows, self.targets = torch.tensor(rows, device=device), torch.tensor(targets, device=device)
        self.counts = [len(sample) - 1 for sample in samples if len(sample) > 1]

    def __len__(self) -> int:
        return self.rows.shape[0]

    def parts(self, vocab_size: int) -> Iterator[slice]:
        """Stretches of scored tokens whose logits fit CHUNK_BYTES."""
        size = max(1, CHUNK_BYTES // (4 * vocab_size))
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def standard_error(self, values: torch.Tensor) -> float | None:
        """Of the mean of values float64 [N], with samples as clusters: for equal lengths that of the samples' means. None below two."""
        if len(self.counts) < 2:
            return None
        sums = torch.stack([part.sum() for part in values.split(self.counts)])
        residuals = sums - values.mean() * torch.tensor(self.counts, dtype=torch.float64)
        number = len(self.counts)
        return math.sqrt(number / (number - 1) * float(residuals.square().sum())) / len(self)


def percentile(values: torch.Tensor, share: float) -> float:
    """The value below which `share` of them lie, linear between the two nearest ranks (as numpy's default)."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def _nll(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """float64 [rows] on the CPU."""
    return -log_probs.gather(1, targets[:, None])[:, 0].double().cpu()
