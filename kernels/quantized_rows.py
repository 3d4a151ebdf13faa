"""Inputs of a linear as 8-bit codes: made once by the op before it, instead of by every linear that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("int8", "fp8", "fp8 static")


@dataclass(frozen=True)
class InputFormat:
    """What a linear makes of its inputs.

    kind: "int8" (see `quant_math.quantize_tokens`), "fp8" (float8 e4m3, a scale for each token) or "fp8 static" (`scale`, float32 [], for
    all).
    """

    kind: str
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class QuantizedRows:
    """Tokens [T, K] as codes times scales. codes: int8 or float8_e4m3fn [T, K], contiguous. scales: float32 [T], NaN where a token is not
    finite. dtype: of the numbers that the codes were made from, and of what a linear makes of them."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


def input_format(linear: Any) -> InputFormat | None:
    """The format in which a linear takes `QuantizedRows` besides plain tensors, None where it takes only those. It says so by an attribute
    `takes`."""
    return getattr(linear, "takes", None)
