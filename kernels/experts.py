"""One linear of all experts of a layer as one weight: what products of all experts in one launch read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


class ExpertWeights:
    """Weights of the same kind and shape, their tensors side by side along a new first dimension [E, ...].

    Filled one expert at a time with `put`, so that a layer is held once and not twice while it is loaded.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.tensors: dict[str, torch.Tensor] = {}
        self._template: Any = None

    def put(self, index: int, weight: Any) -> None:
        """Copy one expert's weight (a tensor [N, K] or a quantized weight). Raises ValueError when it is not of the others' kind."""
        parts = {"weight": weight} if isinstance(weight, torch.Tensor) else weight.parts()
        if not self.tensors:
            self.tensors = {
                name: torch.empty(self.num_experts, *part.shape, dtype=part.dtype, device=part.device) for name, part in parts.items()
            }
            self._template = None if isinstance(weight, torch.Tensor) else weight
        shapes = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in self.tensors.items()}
        found = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
        if shapes != found:
            raise ValueError(f"expert {index} has {found}, the first one {shapes}")
        for name, part in parts.items():
            self.tensors[name][index].copy_(part)
        if index == 0 and self._template is not None:
            self._template = self.expert(0)  # lets go of the tensors that were copied

    def expert(self, index: int) -> Any:
        """One expert's weight: views, nothing is copied."""
        views = {name: tensor[index] for name, tensor in self.tensors.items()}
        return views["weight"] if self._template is None else replace(self._template, **views)

    @property
    def like(self) -> Any:
        """The first expert's weight: the kind of all."""
        return self.expert(0)
