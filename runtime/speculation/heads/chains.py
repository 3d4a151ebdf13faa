"""Draft tokens drawn one after the other, for several sequences side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from dspark.runtime.sampling.device import DeviceRows, sureness
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

    def take(self, token: int, survival: float, least: float) -> bool:
        """Grow by a token, -1 for none; whether it has."""
        if token < 0:
            self.open = False
            return False
        self.path.append(token)
        self.survival.append(min(max(survival if math.isfinite(survival) else 0.0, _LEAST_SURVIVAL), 1.0))
        self.survives *= self.survival[-1]
        self.open = len(self.path) < self.limit and self.survives >= least
        return True


class DraftChains(Protocol):
    """One chain for each sequence, of at most `limits` tokens, drawn depth by depth.

    A token is what the target's sampler would draw from the draft's logits in its place: with the same options, and with the same noise,
    so that a draft is a function of its context and good drafts are accepted often. keep_distributions: for the rejection rule the noise
    is another one, and the probabilities that each token was drawn from are kept. least: a chain ends with the token at which the estimate
    that all of it is accepted falls below this.
    """

    arrays: list[np.ndarray]
    """What must be on the device before the first draw, uploaded with the drafter's own; `place` is given it there."""

    def place(self, there: list[torch.Tensor]) -> None:
        """Take `arrays`, on the device."""

    def draw(self, logits: torch.Tensor, survival: torch.Tensor | list[float] | None = None) -> None:
        """Lengthen every open chain by a token from its row of logits float32 [S, V] (changed in place). survival: an estimate for each
        row; None takes the probability of the draft's best token."""

    def newest(self) -> torch.Tensor:
        """What is fed next, int64 [S]: the token of each row of the last draw, where that was drawn from."""

    @property
    def all_closed(self) -> bool:
        """Whether the host knows that no chain can grow."""

    def drafts(self, source: str) -> list[Draft | None]:
        """What was drawn, None for a chain without a token."""


class Chains:
    """See `DraftChains`: every token comes to the host before the next one is drawn."""

    def __init__(
        self, sampler: Sampler, sequences: list[Sequence], limits: list[int], keep_distributions: bool, least: float = 0.0
    ) -> None:
        self.arrays: list[np.ndarray] = []
        self._sampler, self._keep, self._least = sampler, keep_distributions, least
        self._chains = _chains(sequences, limits, keep_distributions)
        self._device = torch.device("cpu")

    def place(self, there: list[torch.Tensor]) -> None:
        pass

    @property
    def newest_tokens(self) -> list[int]:
        """The last token of each chain, the sequence's own newest one before the first."""
        return [chain.path[-1] if chain.path else chain.seq.token_ids[-1] for chain in self._chains]

    def newest(self) -> torch.Tensor:
        return torch.tensor(self.newest_tokens, dtype=torch.int64, device=self._device)

    @property
    def open_rows(self) -> list[int]:
        """The chains that can grow."""
        return [row for row, chain in enumerate(self._chains) if chain.open]

    @property
    def all_closed(self) -> bool:
        return not any(chain.open for chain in self._chains)

    def draw(self, logits: torch.Tensor, survival: torch.Tensor | list[float] | None = None, rows: list[int] | None = None) -> None:
        """See `DraftChains.draw`. rows: the chains that the logits are of, in their order; None for all."""
        chains = self._chains if rows is None else [self._chains[row] for row in rows]
        self._device = logits.device
        tokens, processed = self._sampler.sample_drafts(logits, [chain.row for chain in chains])
        if survival is None:
            survival = sureness(processed, _temperatures([chain.request for chain in chains], processed.device))
        estimates = survival.tolist() if isinstance(survival, torch.Tensor) else survival
        for i, chain in enumerate(chains):
            if chain.open and chain.take(tokens[i], estimates[i], self._least) and self._keep:
                chain.distributions.append(_distribution(processed[i], tokens[i], chain.request))

    def drafts(self, source: str) -> list[Draft | None]:
        return [_draft(chain, source, torch.stack(chain.distributions) if self._keep and chain.path else None) for chain in self._chains]


class DeviceChains:
    """See `DraftChains`: the token drawn at a depth is fed to the next one on the device, and all come to the host in one copy.

    So the host does not see a chain end and has all depths computed; what lies behind the end is cut off when it is known. No option may
    look at tokens (`DeviceRows.draws_alone`). widths: sequences that are drawn for at each depth, the first ones; default all of them.
    """

    def __init__(
        self,
        device_rows: DeviceRows,
        sequences: list[Sequence],
        limits: list[int],
        keep_distributions: bool,
        least: float = 0.0,
        widths: list[int] | None = None,
    ) -> None:
        self.widths = [len(sequences)] * max(limits) if widths is None else widths
        self._chains = _chains(sequences, limits, keep_distributions)
        self._draws = device_rows.ahead([chain.row for chain in self._chains], self.widths, keep_distributions)
        self.arrays = self._draws.arrays
        self._least = least
        self._newest: torch.Tensor | None = None
        self._on_device: list[torch.Tensor] = []
        self._on_host: list[list[float]] = []
        self.fed: list[list[int]] = []

    def place(self, there: list[torch.Tensor]) -> None:
        self._draws.place(there)

    def newest(self) -> torch.Tensor:
        assert self._newest is not None
        return self._newest

    all_closed = False

    def draw(self, logits: torch.Tensor, survival: torch.Tensor | list[float] | None = None) -> None:
        self._newest, processed = self._draws.draw(logits)
        survival = self._draws.sureness(processed) if survival is None else survival
        if isinstance(survival, torch.Tensor):
            self._on_device.append(survival)
        else:
            self._on_host.append(survival)

    def drafts(self, source: str) -> list[Draft | None]:
        """Waits for all draws. `fed` has, from then on, the token of each row that the next depth was fed with, for each depth."""
        tokens, survivals = self._draws.fetch(self._on_device)
        for drawn, estimates in zip(tokens, survivals or self._on_host, strict=True):
            for chain, token, survival in zip(self._chains, drawn, estimates, strict=False):
                if chain.open:
                    chain.take(token, survival, self._least)
        self.fed = [[max(token, 0) for token in drawn] for drawn in tokens]
        spreads = self._draws.spreads
        return [
            _draft(chain, source, None if spreads is None else spreads[row, : len(chain.path)]) for row, chain in enumerate(self._chains)
        ]


def chains_for(sampler: Sampler, sequences: list[Sequence], limits: list[int], keep_distributions: bool) -> DraftChains:
    """On the device where it draws and all rows let it. Rows that do not are kept apart from others by who calls this (`draws_there`)."""
    if all(draws_there(sampler, seq) for seq in sequences):
        assert sampler.device_rows is not None
        return DeviceChains(sampler.device_rows, sequences, limits, keep_distributions)
    return Chains(sampler, sequences, limits, keep_distributions)


def draws_there(sampler: Sampler, seq: Sequence) -> bool:
    """Whether a sequence's drafts are drawn on the device without the host. Penalties count tokens: such a sequence's go step by step."""
    return sampler.device_rows is not None and sampler.device_rows.draws_alone(seq)


def _chains(sequences: list[Sequence], limits: list[int], apart: bool) -> list[_Chain]:
    return [_Chain(seq, limit, _request(seq, apart)) for seq, limit in zip(sequences, limits, strict=True)]


def _draft(chain: _Chain, source: str, distributions: torch.Tensor | None) -> Draft | None:
    return Draft(tuple(chain.path), tuple(chain.survival), source, None, distributions) if chain.path else None


def _temperatures(requests: list[Request], device: torch.device) -> torch.Tensor | None:
    """float32 [n, 1], None where all are 1."""
    found = [1.0 if request.params.is_greedy else usable_temperature(request.params.temperature) for request in requests]
    return torch.tensor(found, device=device)[:, None] if any(temperature != 1.0 for temperature in found) else None


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
