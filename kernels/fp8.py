"""The canonical form of one weight of 8-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.quant_math import dequantize_blocks


@dataclass(frozen=True)
class Fp8Weight:
    """Canonical storage of one linear (see `runtime.spec.quant`), K inputs and N outputs.

    qweight float8_e4m3fn [N, K]; scales float32, one for each block of `block` = (outputs, inputs), -1 meaning all of them.
    inputs: "dynamic" or "static" where the inputs are rounded to float8 too, None where they are taken as they are. input_scale: float32,
    of static ones.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    inputs: str | None = None
    input_scale: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.qweight.shape[1])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K]."""
        return dequantize_blocks(self.qweight, self.scales, self.block, dtype)

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors that an engine stores, by the last part of their names."""
        known = {"qweight": self.qweight, "scales": self.scales}
        return known if self.input_scale is None else {**known, "input_scale": self.input_scale}
