"""Draft tokens drawn one after the other, for several sequences side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from dspark.runtime.sampling.filters import probabilities, usable_temperature
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.verify import DraftedRow

_OTHER_STREAM = 0x5D1C7A3B9E0F4826A4B8D3F1C6E97052
"""Mixed into a request's draw key for drafts that must not know the target's noise (128 bits, arbitrary)."""
_LEAST_SURVIVAL = 1e-6


@dataclass
class _Chain:
    """A draft in the making. limit: most tokens. survives: product of the survivals. open: whether it can grow."""

    seq: Sequence
    limit: int
    request: Request
    path: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)
    row: DraftedRow = field(init=False)
    survives: float = 1.0
    open: bool = True

    def __post_init__(self) -> None:
        self.row = DraftedRow(self.seq, self.path)  # it sees the path grow
        self.row.request = self.request


class Chains:
    """One chain for each sequence, of at most `limits` tokens.

    A token is what the target's sampler would draw from the draft's logits in its place: with the same options, and with the same noise,
    so that a draft is a function of its context and good drafts are accepted often. keep_distributions: for the rejection rule the noise
    is another one, and the probabilities that each token was drawn from are kept. least: a chain ends with the token at which the estimate
    that all of it is accepted falls below this.
    """

    def __init__(
        self, sampler: Sampler, sequences: list[Sequence], limits: list[int], keep_distributions: bool, least: float = 0.0
    ) -> None:
        self._sampler, self._keep, self._least = sampler, keep_distributions, least
        self._chains = [_Chain(seq, limit, _request(seq, keep_distributions)) for seq, limit in zip(sequences, limits, strict=True)]

    @property
    def newest(self) -> list[int]:
        """The last token of each chain, the sequence's own newest one before the first."""
        return [chain.path[-1] if chain.path else chain.seq.token_ids[-1] for chain in self._chains]

    @property
    def open_rows(self) -> list[int]:
        """The chains that can grow."""
        return [row for row, chain in enumerate(self._chains) if chain.open]

    def draw(self, logits: torch.Tensor, survival: list[float] | None = None, rows: list[int] | None = None) -> None:
        """Lengthen every open chain by a token from its row of logits float32 [S, V] (changed in place). survival: None takes the
        probability of the draft's best token. rows: the chains that the logits are of, in their order; None for all."""
        chains = self._chains if rows is None else [self._chains[row] for row in rows]
        tokens, processed = self._sampler.sample_drafts(logits, [chain.row for chain in chains])
        if survival is None:
            survival = peaks(processed, [chain.request for chain in chains])
        for i, chain in enumerate(chains):
            if not chain.open:
                continue
            if tokens[i] < 0:
                chain.open = False
                continue
            if self._keep:
                chain.distributions.append(_distribution(processed[i], tokens[i], chain.request))
            chain.path.append(tokens[i])
            chain.survival.append(min(max(survival[i], _LEAST_SURVIVAL), 1.0))
            chain.survives *= chain.survival[-1]
            chain.open = len(chain.path) < chain.limit and chain.survives >= self._least

    @property
    def all_closed(self) -> bool:
        return not any(chain.open for chain in self._chains)

    def drafts(self, source: str) -> list[Draft | None]:
        """What was drawn, None for a chain without a token."""
        return [
            Draft(tuple(c.path), tuple(c.survival), source, None, torch.stack(c.distributions) if self._keep else None) if c.path else None
            for c in self._chains
        ]


def peaks(wide: torch.Tensor, requests: list[Request]) -> list[float]:
    """Probability of the best token of each row float32 [S, V], at the request's temperature: how sure a draft is of itself."""
    temperatures = [1.0 if request.params.is_greedy else usable_temperature(request.params.temperature) for request in requests]
    if any(temperature != 1.0 for temperature in temperatures):
        wide = wide / torch.tensor(temperatures, device=wide.device)[:, None]
    sure = (wide.amax(-1) - wide.logsumexp(-1)).exp()
    return [value if math.isfinite(value) else 0.0 for value in sure.tolist()]


def _request(seq: Sequence, other_stream: bool) -> Request:
    """The request whose noise a draft is drawn with. In a stream apart it is new for each draft: were it by position alone, a token that is
    drafted again would be known from the draft before, and with it what was decided in between."""
    if not other_stream:
        return seq.request
    return replace(seq.request, draw_key=seq.request.draw_key ^ _OTHER_STREAM ^ seq.num_tokens << 64)


def _distribution(logits: torch.Tensor, token: int, request: Request) -> torch.Tensor:
    """Probabilities float32 [V] that a token was drawn from: all on itself where the best is taken."""
    params = request.params
    if params.is_greedy:
        return torch.zeros_like(logits).index_fill_(0, torch.tensor(token, device=logits.device), 1.0)
    return probabilities(logits, params.temperature, params.top_k, params.top_p, params.min_p)
