"""The weights of a checked checkpoint as the runtime takes them: dense, one tensor at a time, nothing written."""

from __future__ import annotations

import torch

from dspark.converters.mapping import MappedModel


class MappedWeights:
    """A WeightSource (see `runtime.layers.weights`) over a checkpoint whose tensors are dense.

    dtype: of the run; a tensor is first cast to the engine's dtype, so that a run sees what an engine would hold. Unlike an engine's, a
    tensor may be taken again: a layer is built once to observe it and once more with other weights.
    """

    def __init__(self, model: MappedModel, dtype: torch.dtype, device: str = "cpu") -> None:
        self._model, self._dtype, self._device = model, dtype, device

    def __contains__(self, name: str) -> bool:
        return name in self._model.shapes

    def take(self, name: str) -> torch.Tensor:
        """The tensor in the run's dtype, on its device. Raises InputError as `MappedModel.read_cast`."""
        return self._model.read_cast(name).to(self._device, self._dtype)
