"""Linear layers on CPU: oneDNN with weights re-laid once, and torch's packed integer products for few rows.

Which of the forms of a quantized weight runs is decided by the number of rows, on measured break-evens (docs/benchmarks.md).
"""

from __future__ import annotations

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.packing import unpack_codes
from dspark.kernels.reference.linear import LinearFn
from dspark.kernels.wna16 import Wna16Weight

DETERMINISTIC_ROWS = 64
"""Rows of every product in deterministic runs. A library picks its kernel, and with it the order of additions, by the number of rows;
products of one fixed shape give every row the same bits whatever stands beside it."""

PACKED_MAX_ROWS = 4
"""Up to so many rows torch's packed int4 and int8 products beat a dense product of the same weight."""

INT4_GROUPS = (32, 64, 128, 256)


def supports(op: str, facts: KernelFacts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is made for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    return None


def make_dense_linear(weight: torch.Tensor, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ weight [N, K].T + bias. bfloat16 weights are re-laid for oneDNN; the caller's tensor may be freed."""
    product = _onednn_product(weight, bias) if _has_onednn_bf16(weight) else _plain_product(weight, bias)
    return _in_fixed_tiles(product) if facts.deterministic else product


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """Few rows: torch's packed integer product, where it has one for this storage. More rows: the dense form, kept (weight_shadow) or made
    anew for each call."""
    if facts.deterministic:
        dense = make_dense_linear(weight.dense(facts.dtype), bias, facts)
        return dense
    packed = _packed_product(weight, bias, facts.dtype)
    if facts.weight_shadow:
        wide = make_dense_linear(weight.dense(facts.dtype), bias, facts)
    else:
        expand = _expander(weight, facts.dtype)
        wide = lambda x: torch.nn.functional.linear(x, expand(), bias)  # noqa: E731
    if packed is None:
        return wide
    return lambda x: packed(x) if x.shape[0] <= PACKED_MAX_ROWS else wide(x)


def _has_onednn_bf16(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _onednn_product(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    """The weight in oneDNN's own blocked layout: at one row twice as fast as the plain one, at 64 rows by a tenth to a third."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), DETERMINISTIC_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default
    out_features = weight.shape[0]

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, out_features)
        return run(x, blocked, bias, "none", [], "")

    return product


def _in_fixed_tiles(product: LinearFn) -> LinearFn:
    """Run a product on tiles of DETERMINISTIC_ROWS rows, the last one filled up with zeros."""

    def tiled(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % DETERMINISTIC_ROWS
        filled = torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x
        tiles = [product(tile) for tile in filled.split(DETERMINISTIC_ROWS)] if num_rows else [product(x)]
        return tiles[0][:num_rows] if len(tiles) == 1 else torch.cat(tiles)[:num_rows]

    return tiled


def _packed_product(weight: Wna16Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> LinearFn | None:
    """torch's int4 (groups of INT4_GROUPS) or int8 (one symmetric group) product, or None when it has none for this storage."""
    num_inputs, num_outputs = weight.in_features, weight.out_features
    if dtype != torch.bfloat16:
        return None
    if weight.bits == 4 and num_outputs % 16 == 0:
        group, scales, zeros = _int4_groups(weight)
        if group is None:
            return None
        codes = unpack_codes(weight.qweight, 4, num_inputs).t().to(torch.int32).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # torch computes (code - 8) * scale + offset
        table = torch.stack([scales, (8.0 - zeros) * scales], -1).to(dtype).contiguous()

        def int4_product(x: torch.Tensor) -> torch.Tensor:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, table)
            return y if bias is None else y + bias

        return int4_product
    if weight.bits == 8 and weight.zeros is None and weight.scales.shape[0] == 1 and num_outputs % 16 == 0 and num_inputs % 32 == 0:
        signed = (unpack_codes(weight.qweight, 8, num_inputs).to(torch.int16) - 128).to(torch.int8).t().contiguous()
        scale = weight.scales[0].to(dtype)

        def int8_product(x: torch.Tensor) -> torch.Tensor:
            y = torch._weight_int8pack_mm(x, signed, scale)
            return y if bias is None else y + bias

        return int8_product
    return None


def _int4_groups(weight: Wna16Weight) -> tuple[int | None, torch.Tensor, torch.Tensor]:
    """Group size that torch's int4 product takes (larger groups are cut, their scales repeated), scales and zeros float32 [G, N]."""
    scales = weight.scales.float()
    zeros = weight.zeros.float() if weight.zeros is not None else torch.full_like(scales, 8.0)
    if weight.group_size in INT4_GROUPS:
        return weight.group_size, scales, zeros
    for group in reversed(INT4_GROUPS):
        if weight.group_size % group == 0:
            repeat = weight.group_size // group
            return group, scales.repeat_interleave(repeat, 0), zeros.repeat_interleave(repeat, 0)
    return None, scales, zeros


def _expander(weight: Wna16Weight, dtype: torch.dtype):
    """A function that makes the dense weight [N, K] anew from codes kept as uint8 (4 bits: packed)."""
    return lambda: weight.dense(dtype)
