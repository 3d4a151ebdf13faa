"""The matrix products of `aot.py`: every storage of a weight, at decode and at prefill sizes, and the rows that go into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dspark.kernels.experts import ExpertWeights
from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quantized_rows import InputFormat
from dspark.kernels.triton import fp8, int8, moe, quantize, wna16
from dspark.kernels.wna16 import Wna16Weight

Run = tuple[Callable[[], Any], str]
"""What to record, and its label."""
ROWS = (1, 32, 64, 128, 512)


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
    for kind, block, inputs_as in (
        ("fp8 channels", (1, -1), None),
        ("fp8 blocks", (128, 128), None),
        ("fp8 channels dynamic", (1, -1), "dynamic"),
        ("fp8 blocks dynamic", (128, 128), "dynamic"),
    ):
        yield kind, fp8.make_fp8_linear(fp8_weight(outputs, inputs, block, inputs_as), None, facts)
    yield "w8a8", int8.make_int8_linear(Int8Weight(meta(outputs, inputs, of=torch.int8), meta(outputs, of=float32)), None, facts)


def fp8_weight(outputs: int, inputs: int, block: tuple[int, int], inputs_as: str | None) -> Fp8Weight:
    shape = [-(-length // (length if size == -1 else size)) for size, length in zip(block, (outputs, inputs), strict=True)]
    return Fp8Weight(meta(outputs, inputs, of=torch.float8_e4m3fn), meta(*shape, of=torch.float32), block, inputs_as)


def moe_runs(dtype: torch.dtype, facts: KernelFacts) -> Iterator[Run]:
    """Experts of the size of Qwen3-30B-A3B: hidden 2048, intermediate 768, 8 of 128 for a token."""
    hidden, inner, experts, top_k = 2048, 768, 128, 8

    def weight(kind: str, outputs: int, inputs: int) -> Any:
        if kind == "dense":
            return meta(outputs, inputs, of=dtype)
        if kind == "w4":
            packed, scales = meta(inputs // 8, outputs, of=torch.int32), meta(inputs // 128, outputs, of=torch.float16)
            return Wna16Weight(packed, scales, None, 4, inputs)
        if kind == "w8a8":
            return Int8Weight(meta(outputs, inputs, of=torch.int8), meta(outputs, of=torch.float32))
        return fp8_weight(outputs, inputs, (128, 128), "dynamic")

    for kind in ("dense", "w4", "w8a8", "fp8"):
        stacks = ExpertWeights(experts), ExpertWeights(experts)
        for stack, shape in zip(stacks, ((2 * inner, hidden), (hidden, inner)), strict=True):
            stack.put(0, weight(kind, *shape))
        layer = moe.make_grouped_experts(*stacks, "silu", facts)
        for rows in (1, 64, 2048):
            x, logits = meta(rows, hidden, of=dtype), meta(rows, experts, of=dtype)
            yield partial(layer, x, logits, top_k, True), f"Qwen3-30B-A3B experts {kind} M={rows}"


def _quantizations(name: str, hidden: int, intermediate: int, dtype: torch.dtype) -> Iterator[Run]:
    tokens = 512
    x, weight, gate_up = meta(tokens, hidden, of=dtype), meta(hidden, of=dtype), meta(tokens, 2 * intermediate, of=dtype)
    for inputs in (InputFormat("int8"), InputFormat("fp8"), InputFormat("fp8 static", meta(1, of=torch.float32))):
        label = f"{name} {inputs.kind}"
        yield partial(quantize.quantize_rows, x, inputs), label
        yield partial(quantize.silu_and_mul_quantize, gate_up, inputs), f"{label} silu and mul"
        yield partial(quantize.rms_norm_quantize, x, weight, 1e-5, inputs), label
        yield partial(quantize.add_rms_norm_quantize, x, x, weight, 1e-5, inputs), f"{label} add"
