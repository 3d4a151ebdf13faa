"""Random inputs for linears of 8-bit numbers and for quantized rows, on the shapes where kernels break; see `kernel_cases`."""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases import EPS, Args, Case, wna16_linear_args

from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quantized_rows import InputFormat


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _bias(g: torch.Generator, out_features: int, dtype: torch.dtype, bias: bool) -> torch.Tensor | None:
    return torch.randn(out_features, generator=g).to(dtype) if bias else None


def int8_linear_args(dtype: torch.dtype, seed: int, num_tokens: int, in_features: int, out_features: int, bias: bool = False) -> Args:
    """(Int8Weight, bias [N] or None, x [T, K]); the second token is zeros where there is one."""
    g = _generator(seed)
    codes = torch.randint(-128, 128, (out_features, in_features), generator=g, dtype=torch.int8)
    scales = (0.5 + torch.rand(out_features, generator=g)) / 64 * in_features**-0.5
    x = torch.randn(num_tokens, in_features, generator=g).to(dtype)
    x[1:2] = 0
    return Int8Weight(codes, scales), _bias(g, out_features, dtype, bias), x


def fp8_linear_args(
    dtype: torch.dtype,
    seed: int,
    num_tokens: int,
    in_features: int,
    out_features: int,
    block: tuple[int, int] = (1, -1),
    inputs: str | None = None,
    bias: bool = False,
) -> Args:
    """(Fp8Weight, bias [N] or None, x [T, K])"""
    g = _generator(seed)
    codes = (32 * torch.randn(out_features, in_features, generator=g)).clamp(-448, 448).to(torch.float8_e4m3fn)
    extents = [length if size == -1 else size for size, length in zip(block, (out_features, in_features), strict=True)]
    shape = [-(-length // extent) for extent, length in zip(extents, (out_features, in_features), strict=True)]
    scales = (0.5 + torch.rand(*shape, generator=g)) / 32 * in_features**-0.5
    input_scale = torch.tensor(0.007) if inputs == "static" else None
    x = torch.randn(num_tokens, in_features, generator=g).to(dtype)
    x[1:2] = 0
    return Fp8Weight(codes, scales, block, inputs, input_scale), _bias(g, out_features, dtype, bias), x


def act_order_args(dtype: torch.dtype, seed: int, in_features: int, **shape: Any) -> Args:
    """(Wna16Weight with a perm, bias, x)"""
    import dataclasses

    weight, bias, x = wna16_linear_args(dtype, seed, in_features=in_features, **shape)
    return dataclasses.replace(weight, perm=torch.randperm(in_features, generator=_generator(seed + 1)).int()), bias, x


def _format(kind: str) -> InputFormat:
    return InputFormat(kind, torch.tensor(0.01) if kind == "fp8 static" else None)


def rms_norm_quantize_args(dtype: torch.dtype, seed: int, num_tokens: int, hidden: int, kind: str) -> Args:
    """(x [T, H], weight [H], eps, format); the second token is zeros where there is one."""
    g = _generator(seed)
    x, weight = torch.randn(num_tokens, hidden, generator=g).to(dtype), (1 + 0.1 * torch.randn(hidden, generator=g)).to(dtype)
    x[1:2] = 0
    return x, weight, EPS, _format(kind)


def add_rms_norm_quantize_args(dtype: torch.dtype, seed: int, num_tokens: int, hidden: int, kind: str) -> Args:
    """(x [T, H], residual [T, H], weight [H], eps, format)"""
    x, weight, eps, inputs = rms_norm_quantize_args(dtype, seed, num_tokens, hidden, kind)
    return x, torch.randn(num_tokens, hidden, generator=_generator(seed + 1)).to(dtype), weight, eps, inputs


def silu_and_mul_quantize_args(dtype: torch.dtype, seed: int, num_tokens: int, intermediate: int, kind: str) -> Args:
    """(gate_up [T, 2 * I], format)"""
    return 2 * torch.randn(num_tokens, 2 * intermediate, generator=_generator(seed)).to(dtype), _format(kind)


_MAKERS = {
    "make_int8_linear": int8_linear_args,
    "make_fp8_linear": fp8_linear_args,
    "make_wna16_linear": act_order_args,
    "rms_norm_quantize": rms_norm_quantize_args,
    "add_rms_norm_quantize": add_rms_norm_quantize_args,
    "silu_and_mul_quantize": silu_and_mul_quantize_args,
}
_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "make_int8_linear": {
        "empty": {"num_tokens": 0, "in_features": 64, "out_features": 32},
        "one_token": {"num_tokens": 1, "in_features": 576, "out_features": 192},
        "odd_bias": {"num_tokens": 5, "in_features": 70, "out_features": 33, "bias": True},
        "split": {"num_tokens": 17, "in_features": 2080, "out_features": 72, "bias": True},
        "rows_40": {"num_tokens": 40, "in_features": 192, "out_features": 80},
        "many": {"num_tokens": 140, "in_features": 100, "out_features": 150, "bias": True},
    },
    "make_fp8_linear": {
        "empty": {"num_tokens": 0, "in_features": 64, "out_features": 32},
        "channel_one_token": {"num_tokens": 1, "in_features": 576, "out_features": 192},
        "tensor_bias": {"num_tokens": 5, "in_features": 70, "out_features": 33, "block": (-1, -1), "bias": True},
        "blocks": {"num_tokens": 3, "in_features": 300, "out_features": 150, "block": (128, 128)},
        "blocks_split": {"num_tokens": 20, "in_features": 2048, "out_features": 64, "block": (32, 16), "bias": True},
        "rows_of_blocks": {"num_tokens": 70, "in_features": 96, "out_features": 50, "block": (32, -1)},
        "dynamic": {"num_tokens": 2, "in_features": 576, "out_features": 192, "inputs": "dynamic"},
        "dynamic_split": {"num_tokens": 18, "in_features": 2100, "out_features": 40, "inputs": "dynamic", "bias": True},
        "dynamic_blocks": {"num_tokens": 40, "in_features": 300, "out_features": 150, "block": (128, 128), "inputs": "dynamic"},
        "dynamic_tensor_many": {"num_tokens": 140, "in_features": 100, "out_features": 150, "block": (-1, -1), "inputs": "dynamic"},
        "static": {"num_tokens": 6, "in_features": 130, "out_features": 40, "inputs": "static", "bias": True},
    },
    "make_wna16_linear": {
        "act_order": {"num_tokens": 3, "in_features": 128, "out_features": 48, "symmetric": False},
        "act_order_split": {"num_tokens": 20, "in_features": 2048, "out_features": 40, "bias": True},
        "act_order_many": {"num_tokens": 40, "in_features": 192, "out_features": 48, "bits": 8},
    },
}
for _op in ("rms_norm_quantize", "add_rms_norm_quantize"):
    _SHAPES[_op] = {
        f"{kind.replace(' ', '_')}_{tokens}x{hidden}": {"num_tokens": tokens, "hidden": hidden, "kind": kind}
        for kind in ("int8", "fp8", "fp8 static")
        for tokens, hidden in ((0, 64), (3, 576), (2, 67))
    }
_SHAPES["silu_and_mul_quantize"] = {
    f"{kind.replace(' ', '_')}_{tokens}x{width}": {"num_tokens": tokens, "intermediate": width, "kind": kind}
    for kind in ("int8", "fp8", "fp8 static")
    for tokens, width in ((0, 64), (3, 77), (1, 5000))
}
_LARGE: list[tuple[str, str, dict[str, Any]]] = [
    (op, f"{name}_{rows}", {"num_tokens": rows, "in_features": 4096, "out_features": 1024, **shape})
    for rows in (1, 32, 64, 300)
    for op, name, shape in (
        ("make_int8_linear", "llama", {}),
        ("make_fp8_linear", "llama_channels", {}),
        ("make_fp8_linear", "llama_dynamic", {"inputs": "dynamic"}),
        ("make_fp8_linear", "llama_blocks_dynamic", {"inputs": "dynamic", "block": (128, 128)}),
        ("make_wna16_linear", "llama_act_order", {"group_size": 128}),
    )
]
LARGE_GEMM_CASES: list[Case] = [Case(op, name, _MAKERS[op], shape) for op, name, shape in _LARGE]
"""Shapes at which every launch configuration is met, splits of K among them."""
GEMM_CASES: dict[str, list[Case]] = {
    op: [Case(op, name, _MAKERS[op], shape) for name, shape in shapes.items()] for op, shapes in _SHAPES.items()
}
