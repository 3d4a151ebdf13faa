"""What a training trains: a draft's parameters, with the objective's gradients and a look at the held-out lines."""

from __future__ import annotations

from typing import Protocol

import torch
import xxhash

Parameters = dict[str, torch.Tensor]
"""Float32 leaves by the name that they are stored under."""


class Learner(Protocol):
    """A kind of draft in training. parameters: what is trained."""

    parameters: Parameters

    def add_gradients(self, lines: list[int], stream: int) -> float:
        """Add the objective's gradients over these lines (indices of data.lines) to the parameters'; returns the loss. stream: number of
        the step's first line among all lines of all steps, which decides what is drawn at random."""

    def held_out(self) -> tuple[float, dict[str, float]]:
        """tau (tokens that a round is expected to bring on the held-out lines, larger is better) and their mean losses by name,
        "loss" the sum that is trained on."""


def seeded(seed: int, *parts: int) -> torch.Generator:
    """A generator that follows from the numbers alone."""
    words = b"".join(part.to_bytes(8, "little") for part in (seed, *parts))
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(words) >> 1)
