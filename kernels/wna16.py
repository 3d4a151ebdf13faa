"""The canonical form of one quantized weight with 16-bit activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dspark.kernels.packing import pack_codes, unpack_codes
from dspark.kernels.quant_math import dequantize_wna16

LANES = (4, 8)
"""Code widths that kernels read."""


@dataclass(frozen=True)
class Wna16Weight:
    """Canonical storage of one quantized linear (see `runtime.spec.quant`), K inputs and N outputs.

    qweight int32 [ceil(K * bits / 32), N]; scales [G, N]; zeros uint8 [G, N] or None when symmetric (zero 2**(bits - 1)); perm int32 [K] or
    None: stored row j belongs to input perm[j]. What a kernel gets has LANES bits (`Kernels.wna16_linear` sees to it).
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    in_features: int
    perm: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[1])

    @property
    def group_size(self) -> int:
        return self.in_features // int(self.scales.shape[0])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] that the codes stand for, in the order of the inputs."""
        stored = dequantize_wna16(self.qweight, self.scales, self.zeros, self.bits, self.in_features, dtype)
        if self.perm is None:
            return stored
        return torch.empty_like(stored).index_copy_(1, self.perm.long(), stored)

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors that an engine stores, by the last part of their names."""
        found = {"qweight": self.qweight, "scales": self.scales, "zeros": self.zeros, "perm": self.perm}
        return {leaf: tensor for leaf, tensor in found.items() if tensor is not None}

    def without_perm(self) -> Wna16Weight:
        """The weight in stored order, for inputs that the caller has permuted."""
        return replace(self, perm=None)

    def in_lanes(self) -> Wna16Weight:
        """The same numbers in codes of 4 or 8 bits.

        A symmetric code moves up by the distance of the two zeros, so that the weight stays symmetric.
        """
        lanes = next(width for width in LANES if self.bits <= width)
        if lanes == self.bits:
            return self
        codes = unpack_codes(self.qweight, self.bits, self.in_features)
        if self.zeros is None:
            codes = codes + (2 ** (lanes - 1) - 2 ** (self.bits - 1))
        return replace(self, qweight=pack_codes(codes.cpu(), lanes).to(self.qweight.device), bits=lanes)
