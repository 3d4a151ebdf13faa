"""The canonical form of one weight of 8-bit integers whose inputs are quantized to 8 bits too (W8A8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Int8Weight:
    """Canonical storage of one linear (see `runtime.spec.quant`), K inputs and N outputs: qweight int8 [N, K], scales float32 [N]."""

    qweight: torch.Tensor
    scales: torch.Tensor

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.qweight.shape[1])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K]; a product with it has inputs that are not quantized."""
        return (self.qweight.float() * self.scales.float()[:, None]).to(dtype)

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors that an engine stores, by the last part of their names."""
        return {"qweight": self.qweight, "scales": self.scales}
