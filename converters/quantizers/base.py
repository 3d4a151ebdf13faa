"""What every quantizer gives back, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from dspark.kernels.wna16 import Wna16Weight
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.quant import QuantScheme


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized linear. sqnr_db: signal to quantization noise of the weight in decibels, None for a weight without noise."""

    weight: Wna16Weight
    sqnr_db: float | None

    def tensors(self, module: str) -> dict[str, torch.Tensor]:
        """The tensors that an engine stores for this linear, by name."""
        parts = {f"{module}.qweight": self.weight.qweight, f"{module}.scales": self.weight.scales}
        if self.weight.zeros is not None:
            parts[f"{module}.zeros"] = self.weight.zeros
        return parts

    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors("").values())


Quantizer = Callable[[torch.Tensor, QuantScheme], QuantizedWeight]
"""(weight float32 [N, K], scheme) -> QuantizedWeight; a pure function"""
METHODS: dict[str, str] = {"rtn": "rtn:quantize_rtn"}


def quantizer(method: str) -> Quantizer:
    """The quantizer of a method. Raises UsageError naming the methods there are."""
    if method not in METHODS:
        raise UsageError(f"--method is {method}, allowed: {', '.join(METHODS)}")
    module, _, name = METHODS[method].partition(":")
    found: Any = getattr(import_module(f"dspark.converters.quantizers.{module}"), name)
    return found


def stored_names(module: str, scheme: QuantScheme) -> list[str]:
    """Names of the tensors that a quantized linear becomes."""
    return [f"{module}.qweight", f"{module}.scales"] + ([] if scheme.symmetric else [f"{module}.zeros"])
