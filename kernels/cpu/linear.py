"""Linear layers on CPU: own panels, oneDNN with weights re-laid once where the CPU has matrix tiles (AMX) for bfloat16, and products
computed from the codes for few rows.

Which of the forms of a quantized weight runs is decided by the number of rows, on measured break-evens (docs/benchmarks.md).
"""

from __future__ import annotations

from functools import partial

import torch

from dspark.kernels.cpu.avx2_blocks import has_wide_floats
from dspark.kernels.cpu.blocks import has_bf16_tiles
from dspark.kernels.cpu.panels import code_panels, dense_panels, dense_product_for, product_for, refuses_codes
from dspark.kernels.cpu.rows import rounded_rows, with_room
from dspark.kernels.cpu.wna16 import PanelWeight
from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.reference.linear import DETERMINISTIC_ROWS, LinearFn, gathering_inputs, in_fixed_tiles, rounding_inputs
from dspark.kernels.wna16 import Wna16Weight

PACKED_MAX_ROWS = 4
"""Up to so many rows a product computed from the codes in float32 beats a dense product of the same weight."""
SHADOW_ROWS = 32
"""From more rows on, the 16-bit copy of a quantized weight is multiplied, where there is one."""


def supports(op: str, facts: KernelFacts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is made for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    return None


def make_dense_linear(weight: torch.Tensor, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ weight [N, K].T + bias. bfloat16 weights are re-laid; the caller's tensor may be freed."""
    own = dense_product_for(weight.dtype)
    if own is not None and (facts.deterministic or not _library_is_faster(weight.dtype)):
        return dense_panels(weight, bias, own)
    return in_fixed_tiles(library_product(weight, bias)) if facts.deterministic else library_product(weight, bias)


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """A product whose weight is widened block by block in the cache; where this CPU cannot, see `_float_codes_linear`.

    With weight_shadow, many rows take a dense copy.
    """
    if weight.perm is not None:
        return gathering_inputs(make_wna16_linear(weight.without_perm(), bias, facts), weight)
    own = product_for(facts.dtype)
    if own is None or refuses_codes(weight):
        return _float_codes_linear(weight, bias, facts)
    panels = code_panels(weight, bias, own, few_rows=not facts.deterministic)
    if not facts.weight_shadow or facts.deterministic:
        return panels
    dense = make_dense_linear(weight.dense(facts.dtype), bias, facts)
    return lambda x: panels(x) if x.shape[0] <= SHADOW_ROWS else dense(x)


def _float_codes_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """Few rows: computed from the codes in float32. More rows: a dense product, its weight kept (weight_shadow) or made anew each time."""
    refused = PanelWeight.refuses(weight)
    widens = facts.dtype == torch.bfloat16 and has_wide_floats() and not _has_onednn_bf16(facts.dtype)
    if refused or (facts.deterministic and not widens):
        return make_dense_linear(weight.dense(facts.dtype), bias, facts)
    panels = PanelWeight(weight)
    if widens and (facts.deterministic or not facts.weight_shadow):
        return partial(_widened_product, panels, bias, facts.deterministic)
    dense = make_dense_linear(weight.dense(facts.dtype), bias, facts) if facts.weight_shadow else None

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= PACKED_MAX_ROWS:
            y = panels.product(x)
            return y if bias is None else y + bias
        if dense:
            return dense(x)
        transposed = panels.transposed(x.dtype)
        return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)

    return product


def _widened_product(panels: PanelWeight, bias: torch.Tensor | None, deterministic: bool, x: torch.Tensor) -> torch.Tensor:
    """Few rows: computed from the codes in float32, whose sums are others, so not in deterministic runs. More rows: block by block."""
    few = x.shape[0] <= PACKED_MAX_ROWS and not deterministic
    y = panels.product(x) if few else panels.widened_product(x)
    return y if bias is None else y + bias


def make_fp8_linear(weight: Fp8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """A dense product: the weight is expanded at load (twice its bytes in bfloat16, four times in float32), since no CPU instruction here
    reads FP8."""
    return rounding_inputs(make_dense_linear(weight.dense(facts.dtype), bias, facts), weight, facts)


def library_product(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    """oneDNN's, or torch's where that has none."""
    return _onednn_product(weight, bias) if _has_onednn_bf16(weight.dtype) else _plain_product(weight, bias)


def _library_is_faster(dtype: torch.dtype) -> bool:
    """With matrix tiles. With dot products alone own panels are ahead at any number of rows, most where the weights come from memory: they
    ask for the next block while they compute (`benchmarks/products.py --cold`)."""
    return _has_onednn_bf16(dtype) and has_bf16_tiles()


def _has_onednn_bf16(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _onednn_product(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    """The weight in oneDNN's own blocked layout: at one row twice as fast as the plain one, at 64 rows by a tenth to a third."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), DETERMINISTIC_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default
    out_features = weight.shape[0]

    def product(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, out_features)
        rounded = rounded_rows(num_rows)
        if rounded == num_rows:
            return run(x, blocked, bias, "none", [], "")
        return run(with_room(x, rounded), blocked, bias, "none", [], "")[:num_rows]

    return product
