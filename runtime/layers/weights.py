"""Where a model's tensors come from."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Tensors by canonical name. Every one is taken exactly once; what is left over is an error of the loader."""

    def take(self, name: str) -> torch.Tensor:
        """The tensor, floating-point ones in the run's dtype and on its device. Raises InputError when there is no such tensor."""

    def __contains__(self, name: str) -> bool: ...
