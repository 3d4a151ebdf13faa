"""What every solver gets and gives back, and the table of them.

A solver is a pure function of a weight, the statistics of its inputs and a scheme: the same call gives the same bits, and nothing else is
read. N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.kernels.ops import Fp8Weight, Int8Weight, Wna16Weight
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.quant import QuantScheme

AnyWeight = Wna16Weight | Fp8Weight | Int8Weight
"""Canonical storage of any scheme: all have `dense(dtype)` and `parts()`"""


@dataclass(frozen=True)
class SolverOptions:
    """How codes are chosen. Every solver reads what concerns it.

    clip: search the clipping of each group that loses least (weighted by the Hessian's diagonal where there are statistics); False takes
    each group's whole range. act_order: GPTQ treats the inputs with the largest second moment first. static_groups: groups stay neighbours
    in the original order when act_order permutes; False makes groups of the permuted inputs, and the permutation is stored
    (`stored_scheme`). damp: what is added to the Hessian's diagonal, relative to its mean. block_columns: inputs that GPTQ treats between
    two updates of the rest. min_tokens: with fewer, what needs statistics rounds to nearest instead. gptaq_alpha: strength of GPTAQ's
    correction for the inputs' own error, 0.25 in its paper; None is off; needs statistics with `cross`. legacy: AutoGPTQ's rules instead of
    ours, so that its codes are reproduced one for one: symmetric ranges are mirrored only where there is a negative weight, steps are not
    rounded, weights of inputs that were always zero become zero, and the clipping search is its own.
    """

    clip: bool = True
    act_order: bool = True
    static_groups: bool = True
    damp: float = 0.01
    block_columns: int = 128
    min_tokens: int = 1
    gptaq_alpha: float | None = None
    legacy: bool = False


DEFAULTS = SolverOptions()


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized linear.

    sqnr_db: signal to quantization noise of the weight in decibels, None for a weight without noise. output_sqnr_db: the same of the
    layer's outputs over the calibration tokens, tr(W H W^T) / tr((W - Q) H (W - Q)^T); None without statistics. loss: GPTQ's own account of
    a token's squared error, summed over the outputs, damping included; None for other methods. damp_used: damping that the factorization
    needed; None where there was none. notes: what the user should know, such as "rounded to nearest: no tokens reached this layer".
    """

    weight: AnyWeight
    sqnr_db: float | None
    output_sqnr_db: float | None = None
    loss: float | None = None
    damp_used: float | None = None
    notes: tuple[str, ...] = ()

    def tensors(self, module: str) -> dict[str, torch.Tensor]:
        """The tensors that an engine stores for this linear, by name."""
        return {f"{module}.{leaf}": tensor for leaf, tensor in self.weight.parts().items()}

    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.weight.parts().values())


Quantizer = Callable[[torch.Tensor, QuantScheme, LayerStatistics | None, SolverOptions], QuantizedWeight]
"""(weight float32 [N, K], scheme, statistics, options) -> QuantizedWeight

A pure function. Raises InputError for a weight that is not finite, ValueError for a scheme that does not fit the weight.
"""
METHODS: dict[str, str] = {
    "rtn": "rtn:quantize_rtn",
    "gptq": "gptq:quantize_gptq",
    "awq": "awq:quantize_awq",
    "awq-gptq": "gptq:quantize_gptq",
    "smoothquant": "rtn:quantize_rtn",
    "smoothquant-gptq": "gptq:quantize_gptq",
}
"""Method -> file and function; what scales weights first is not the solver's (see `calibration.scale_layer`).

A method that needs statistics rounds to nearest without them, and says so in the notes."""


def quantizer(method: str) -> Quantizer:
    """The quantizer of a method. Raises UsageError naming the methods there are."""
    if method not in METHODS:
        raise UsageError(f"--method is {method}, allowed: {', '.join(METHODS)}")
    module, _, name = METHODS[method].partition(":")
    found: Any = getattr(import_module(f"dspark.converters.quantizers.{module}"), name)
    return found


def stored_scheme(scheme: QuantScheme, options: SolverOptions) -> QuantScheme:
    """The scheme of what GPTQ stores with these options: with the permutation of the inputs, where its groups follow that."""
    permuted = scheme.storage == "wna16" and scheme.group_size != -1 and options.act_order and not options.static_groups
    return replace(scheme, act_order=permuted)


def stored_names(module: str, scheme: QuantScheme) -> list[str]:
    """Names of the tensors that a quantized linear becomes."""
    return [f"{module}.{leaf}" for leaf in scheme.leaves()]
