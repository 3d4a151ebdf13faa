"""Draft tokens drawn one after the other, for several sequences side by side."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from dspark.runtime.sampling.filters import probabilities
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
    """A draft in the making. limit: most tokens. open: whether it can grow."""

    seq: Sequence
    limit: int
    request: Request
    path: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)
    row: DraftedRow = field(init=False)
    open: bool = True

    def __post_init__(self) -> None:
        self.row = DraftedRow(self.seq, self.path)  # it sees the path grow
        self.row.request = self.request


class Chains:
    """One chain for each sequence, of at most `limits` tokens.

    A token is what the target's sampler would draw from the draft's logits in its place: with the same options, and with the same noise,
    so that a draft is a function of its context and good drafts are accepted often. keep_distributions: for the rejection rule the noise
    is another one, and the probabilities that each token was drawn from are kept.
    """

    def __init__(self, sampler: Sampler, sequences: list[Sequence], limits: list[int], keep_distributions: bool) -> None:
        self._sampler, self._keep = sampler, keep_distributions
        self._chains = [_Chain(seq, limit, _request(seq, keep_distributions)) for seq, limit in zip(sequences, limits, strict=True)]

    @property
    def newest(self) -> list[int]:
        """The last token of each chain, the sequence's own newest one before the first."""
        return [chain.path[-1] if chain.path else chain.seq.token_ids[-1] for chain in self._chains]

    def draw(self, logits: torch.Tensor, survival: list[float]) -> None:
        """Lengthen every open chain by a token from its row of logits float32 [S, V] (changed in place)."""
        tokens, processed = self._sampler.sample_drafts(logits, [chain.row for chain in self._chains])
        for i, chain in enumerate(self._chains):
            if not chain.open:
                continue
            if tokens[i] < 0:
                chain.open = False
                continue
            if self._keep:
                chain.distributions.append(_distribution(torch.from_numpy(processed[i]), tokens[i], chain.request))
            chain.path.append(tokens[i])
            chain.survival.append(min(max(survival[i], _LEAST_SURVIVAL), 1.0))
            chain.open = len(chain.path) < chain.limit

    @property
    def all_closed(self) -> bool:
        return not any(chain.open for chain in self._chains)

    def drafts(self, source: str) -> list[Draft | None]:
        """What was drawn, None for a chain without a token."""
        return [
            Draft(tuple(c.path), tuple(c.survival), source, None, torch.stack(c.distributions) if self._keep else None) if c.path else None
            for c in self._chains
        ]


def _request(seq: Sequence, other_stream: bool) -> Request:
    return replace(seq.request, draw_key=seq.request.draw_key ^ _OTHER_STREAM) if other_stream else seq.request


def _distribution(logits: torch.Tensor, token: int, request: Request) -> torch.Tensor:
    """Probabilities float32 [V] that a token was drawn from: all on itself where the best is taken."""
    params = request.params
    if params.is_greedy:
        return torch.zeros_like(logits).index_fill_(0, torch.tensor(token), 1.0)
    return probabilities(logits, params.temperature, params.top_k, params.top_p, params.min_p)
