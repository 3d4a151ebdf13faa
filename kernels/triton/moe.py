"""Mixture of experts on Triton, all experts in one launch a projection: name and signature of `kernels.reference.moe`.

Rows are sorted by expert on the device, and every program finds its expert from the counts there: nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dspark.kernels.experts import ExpertWeights
from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quant_math import round_tokens_to_fp8
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows
from dspark.kernels.reference.moe import MoeFn, route
from dspark.kernels.triton import gemm_tiles, tiles
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.elementwise import gelu_tanh_and_mul, silu_and_mul
from dspark.kernels.triton.fp8 import UNIT, ScaledCodes, decline_fp8_product, swaps
from dspark.kernels.triton.gemm import GATHER, SCATTER, ExpertRows, Product, multiply
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.quantize import quantize_rows, silu_and_mul_quantize
from dspark.kernels.triton.wna16 import packed_operands
from dspark.kernels.wna16 import Wna16Weight

Rows = torch.Tensor | QuantizedRows
COMBINE_BLOCK = 1024
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], Rows]] = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op."""
    return launcher.decline(facts)


def make_grouped_experts(gate_up: ExpertWeights, down: ExpertWeights, activation: str, facts: KernelFacts) -> MoeFn:
    """See `kernels.reference.moe`. Dense weights, wna16 without perm, int8 and fp8. Raises ValueError as the linears of each do."""
    up, into = _GroupedProduct(gate_up, facts), _GroupedProduct(down, facts)
    num_experts, act = gate_up.num_experts, _ACTIVATIONS[activation]
    if activation == "silu" and into.takes is not None:
        act = partial(silu_and_mul_quantize, inputs=into.takes)

    def experts(x: torch.Tensor, router_logits: torch.Tensor, top_k: int, renormalize: bool) -> torch.Tensor:
        shares, ids = route(router_logits, top_k, renormalize)
        pairs, starts = sorted_by_expert(ids, num_experts)
        hidden = up(x, ExpertRows(GATHER, pairs, starts, top_k))
        return combine(into(act(hidden), ExpertRows(SCATTER, pairs, starts, top_k)), shares)

    return experts


def sorted_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [T, top_k] -> (pairs int32 [T * top_k] token * top_k + choice, by expert and then by token; starts int32 [E + 1])."""
    taken, pairs = ids.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device)
    return pairs.int(), torch.searchsorted(taken, bounds).int()


def combine(results: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """results [T * top_k, H], shares float32 [T, top_k] -> the share-weighted sums [T, H], in float32, rounded once."""
    from dspark.kernels.triton.moe_kernels import combine_kernel

    (num_tokens, top_k), width = shares.shape, results.shape[1]
    shares = shares if shares.stride(1) == 1 else shares.contiguous()
    out = torch.empty(num_tokens, width, dtype=results.dtype, device=results.device)
    block = min(COMBINE_BLOCK, tiles.next_power_of_two(width))
    args = results, shares, out, width, top_k, shares.stride(0)
    launcher.launch(combine_kernel, (num_tokens, -(-width // block)), *args, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return out


class _GroupedProduct:
    """Rows of a mixture of experts times the weights of their experts -> [P, N]. takes: see `input_format`."""

    def __init__(self, weights: ExpertWeights, facts: KernelFacts) -> None:
        like, tensors = weights.like, weights.tensors
        self.takes: InputFormat | None = None
        self._num_experts, self._facts = weights.num_experts, facts
        self._scales: torch.Tensor | None = None
        self._config: dict[str, Any] = {}
        self._prepare: Callable[[Any], Any] = lambda x: x
        self.out_features = int(like.shape[0] if isinstance(like, torch.Tensor) else like.out_features)
        self._depth = 64
        if isinstance(like, torch.Tensor):
            self._own: tuple[Any, ...] = (tensors["weight"],)
        elif isinstance(like, Wna16Weight):
            self._own, self._config, self._depth = packed_operands(like, tensors)
        elif isinstance(like, Int8Weight):
            self._own, self._scales, self.takes, self._depth = (tensors["qweight"],), tensors["scales"].float(), InputFormat("int8"), 128
        else:
            self._take_fp8(like, tensors)

    def _take_fp8(self, like: Fp8Weight, tensors: dict[str, torch.Tensor]) -> None:
        launcher.require(like.inputs != "static", lambda: "experts with static input scales, one each, are not grouped")
        rounded = like.inputs is not None and not self._facts.exact_activations
        native = rounded and decline_fp8_product(self._facts) is None
        codes = ScaledCodes(tensors["qweight"], tensors["scales"], like.block, 1.0 if native else UNIT, 32 if native else 16)
        self._scales, self._config = codes.scales, {"BLOCKS": codes.blocks, "WIDEN": not native}
        self._own, self._depth = codes.own if native else codes.as_bytes(), codes.depth if native else min(codes.depth, 64)
        if native:
            self.takes = InputFormat("fp8")
        elif rounded:
            self._prepare = round_tokens_to_fp8

    def _kernel(self) -> Any:
        from dspark.kernels.triton import fp8_kernels, int8_kernels, moe_kernels, wna16_kernels

        if "BITS" in self._config:
            return wna16_kernels.wna16_kernel
        if "WIDEN" in self._config:
            return fp8_kernels.fp8_kernel
        return moe_kernels.dense_kernel if self.takes is None else int8_kernels.int8_kernel

    def _tile(self, num_pairs: int, itemsize: int) -> GemmTile:
        """By the mean number of an expert's rows; fuller experts take more tiles."""
        mean = -(-num_pairs // self._num_experts)
        deterministic = self._facts.deterministic
        if self.takes is not None:
            return replace(gemm_tiles.bytes_tile(mean, self.out_features, 0, self._depth, deterministic), splits=1)
        return replace(gemm_tiles.wna16_tile(mean, self.out_features, 0, self._depth, itemsize, deterministic), splits=1)

    def __call__(self, x: Rows, rows: ExpertRows) -> torch.Tensor:
        if self.takes is not None and isinstance(x, torch.Tensor):
            x = quantize_rows(x, self.takes)
        if isinstance(x, QuantizedRows):
            values, row_scales, dtype = x.codes, x.scales, x.dtype
        else:
            values = self._prepare(x if x.stride(-1) == 1 else x.contiguous())
            row_scales, dtype = None, x.dtype
        num_pairs = rows.pairs.shape[0]
        out = torch.empty(num_pairs, self.out_features, dtype=dtype, device=values.device)
        product = Product(values, out, row_scales, self._scales, experts=rows)
        tile, config = self._tile(num_pairs, values.itemsize), self._config
        if "WIDEN" in config:
            config = {**config, "SWAP": not config["WIDEN"] and swaps(tile, self._facts)}
        multiply(self._kernel(), product, self._own, tile, **config)
        return out
