"""The canonical form of one quantized weight with 16-bit activations."""

from dataclasses import dataclass

import torch

from dspark.kernels.quant_math import dequantize_wna16


@dataclass(frozen=True)
class Wna16Weight:
    """Canonical storage of one quantized linear (see `runtime.spec.quant`), K inputs and N outputs.

    qweight int32 [ceil(K * bits / 32), N]; scales [G, N]; zeros uint8 [G, N] or None when symmetric (zero 2**(bits - 1)).
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    in_features: int

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[1])

    @property
    def group_size(self) -> int:
        return self.in_features // int(self.scales.shape[0])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] that the codes stand for."""
        return dequantize_wna16(self.qweight, self.scales, self.zeros, self.bits, self.in_features, dtype)
