"""The matrix products of `aot.py`: every storage of a weight, at decode and at prefill sizes, and the rows that go into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quantized_rows import InputFormat
from dspark.kernels.triton import int8, quantize, wna16
from dspark.kernels.wna16 import Wna16Weight

Run = tuple[Callable[[], Any], str]
"""What to record, and its label."""
ROWS = (1, 32, 64, 512)


def meta(*shape: int, of: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=of, device="meta")


def gemm_runs(name: str, hidden: int, intermediate: int, dtype: torch.dtype, facts: KernelFacts) -> Iterator[Run]:
    """Products of a model with its gate and up projection (few rows fill a GPU) and its down projection (they are split)."""
    yield from _quantizations(name, hidden, intermediate, dtype)
    for label, outputs, inputs in (("up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
        for kind, linear in _linears(label, outputs, inputs, facts):
            for rows in ROWS:
                yield partial(linear, meta(rows, inputs, of=dtype)), f"{name} {label} {kind} M={rows}"


def _linears(label: str, outputs: int, inputs: int, facts: KernelFacts) -> Iterator[tuple[str, Callable[..., Any]]]:
    float32 = torch.float32
    for bits, symmetric, act_order in ((4, True, False), (4, False, False), (8, True, False), (4, True, True)):
        group = next(size for size in (128, 64, 32) if inputs % size == 0)
        zeros = None if symmetric else meta(inputs // group, outputs, of=torch.uint8)
        packed, scales = meta(inputs * bits // 32, outputs, of=torch.int32), meta(inputs // group, outputs, of=torch.float16)
        perm = meta(inputs, of=torch.int32) if act_order else None
        kind = f"w{bits}{'' if symmetric else ' asym'} g{group}{' act-order' if act_order else ''}"
        yield kind, wna16.make_wna16_linear(Wna16Weight(packed, scales, zeros, bits, inputs, perm), None, facts)
    yield "w8a8", int8.make_int8_linear(Int8Weight(meta(outputs, inputs, of=torch.int8), meta(outputs, of=float32)), None, facts)


def _quantizations(name: str, hidden: int, intermediate: int, dtype: torch.dtype) -> Iterator[Run]:
    tokens = 512
    x, weight, gate_up = meta(tokens, hidden, of=dtype), meta(hidden, of=dtype), meta(tokens, 2 * intermediate, of=dtype)
    for inputs in (InputFormat("int8"), InputFormat("fp8"), InputFormat("fp8 static", meta(1, of=torch.float32))):
        label = f"{name} {inputs.kind}"
        yield partial(quantize.quantize_rows, x, inputs), label
        yield partial(quantize.silu_and_mul_quantize, gate_up, inputs), f"{label} silu and mul"
        yield partial(quantize.rms_norm_quantize, x, weight, 1e-5, inputs), label
        yield partial(quantize.add_rms_norm_quantize, x, x, weight, 1e-5, inputs), f"{label} add"
