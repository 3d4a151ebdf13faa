"""Mixture of experts on Triton, all experts in one launch a projection: name and signature of `kernels.reference.moe`.

Rows are sorted by expert on the device, and every program finds its expert from the counts there: nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
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
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles
from dspark.kernels.triton.elementwise import gelu_tanh_and_mul, silu_and_mul
from dspark.kernels.triton.fp8 import UNIT, ScaledCodes, decline_fp8_product, swaps
from dspark.kernels.triton.gemm import GATHER, SCATTER, ExpertRows, Product, multiply
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.int8 import int8_kind
from dspark.kernels.triton.quantize import quantize_rows, silu_and_mul_quantize
from dspark.kernels.triton.tuning.book import book_of
from dspark.kernels.triton.tuning.keys import ProductKind
from dspark.kernels.triton.wna16 import packed_kind, packed_operands
from dspark.kernels.wna16 import Wna16Weight

Rows = torch.Tensor | QuantizedRows
COMBINE_BLOCK = 1024
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], Rows]] = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op."""
    return launcher.decline(facts)


def make_grouped_experts(gate_up: ExpertWeights, down: ExpertWeights, activation: str, facts: KernelFacts) -> MoeFn:
    """See `kernels.reference.moe`. Dense weights, wna16 without perm, int8 and fp8. Raises ValueError as the linears of each do."""
    up, into = _GroupedProduct(gate_up, facts, GATHER), _GroupedProduct(down, facts, SCATTER)
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
    """Rows of a mixture of experts times the weights of their experts -> [P, N]. takes: see `input_format`; mode: see `ExpertRows`.

    The tile follows the mean number of an expert's rows; fuller experts take more tiles.
    """

    def __init__(self, weights: ExpertWeights, facts: KernelFacts, mode: int) -> None:
        like, tensors = weights.like, weights.tensors
        self.takes: InputFormat | None = None
        self._num_experts, self._facts, self._mode = weights.num_experts, facts, mode
        self._scales: torch.Tensor | None = None
        self._config: dict[str, Any] = {}
        self._prepare: Callable[[Any], Any] = lambda x: x
        self._out_features, self._in_features = (
            map(int, like.shape) if isinstance(like, torch.Tensor) else (int(like.out_features), int(like.in_features))
        )
        self._own: tuple[Any, ...] = ()
        kind = self._operands(like, tensors, "gather" if mode == GATHER else "scatter")
        self.weight_bytes = self._out_features * self._in_features * kind.weight_bits // 8 * self._num_experts
        self._tiles = book_of(facts).products(kind, self)

    def _operands(self, like: Any, tensors: dict[str, torch.Tensor], rows: str) -> ProductKind:
        """Take the tensors as the kernel takes them; what tiles are looked up by."""
        dtype, experts, deterministic = self._facts.dtype, self._num_experts, self._facts.deterministic
        if isinstance(like, torch.Tensor):
            self._own = (tensors["weight"],)
            name = str(dtype).removeprefix("torch.")
            sizes = self._out_features, self._in_features
            return ProductKind(
                "dense", rows, *sizes, name, dtype.itemsize, 8 * dtype.itemsize, 64, num_experts=experts, fixed=deterministic
            )
        if isinstance(like, Wna16Weight):
            self._own, self._config, depth = packed_operands(like, tensors)
            return packed_kind(like, depth, self._config, dtype, deterministic, experts, rows)
        if isinstance(like, Int8Weight):
            self._own, self._scales, self.takes = (tensors["qweight"],), tensors["scales"].float(), InputFormat("int8")
            return int8_kind(self._out_features, self._in_features, dtype, experts, rows)
        return self._take_fp8(like, tensors, rows)

    def _take_fp8(self, like: Fp8Weight, tensors: dict[str, torch.Tensor], rows: str) -> ProductKind:
        launcher.require(like.inputs != "static", lambda: "experts with static input scales, one each, are not grouped")
        rounded = like.inputs is not None and not self._facts.exact_activations
        native = rounded and decline_fp8_product(self._facts) is None
        codes = ScaledCodes(tensors["qweight"], tensors["scales"], like.block, 1.0 if native else UNIT, 32 if native else 16)
        self._scales, self._config = codes.scales, {"BLOCKS": codes.blocks, "WIDEN": not native}
        self._own = codes.own if native else codes.as_bytes()
        if native:
            self.takes = InputFormat("fp8")
        elif rounded:
            self._prepare = round_tokens_to_fp8
        return codes.kind(self._facts, not native, self._num_experts, rows)

    def _kernel(self) -> Any:
        from dspark.kernels.triton import fp8_kernels, int8_kernels, moe_kernels, wna16_kernels

        if "BITS" in self._config:
            return wna16_kernels.wna16_kernel
        if "WIDEN" in self._config:
            return fp8_kernels.fp8_kernel
        return moe_kernels.dense_kernel if self.takes is None else int8_kernels.int8_kernel

    def __call__(self, x: Rows, rows: ExpertRows) -> torch.Tensor:
        mean = -(-rows.pairs.shape[0] // self._num_experts)
        return self.multiply((self._as_taken(x), rows), self._tiles[mean])

    def _as_taken(self, x: Rows) -> Rows:
        if isinstance(x, QuantizedRows):
            return x
        if self.takes is not None:
            return quantize_rows(x, self.takes)
        return self._prepare(x if x.stride(-1) == 1 else x.contiguous())

    def sample(self, num_rows: int) -> tuple[Rows, ExpertRows]:
        """Random inputs that spread evenly: num_rows for each expert on the average."""
        device, experts = self._own[0].device, self._num_experts
        top_k = min(8, experts)
        tokens = max(num_rows * experts // top_k, 1)
        ids = torch.rand(tokens, experts, device=device).argsort(1)[:, :top_k]
        rows = ExpertRows(self._mode, *sorted_by_expert(ids, experts), top_k)
        x = torch.randn(tokens if self._mode == GATHER else tokens * top_k, self._in_features, device=device).to(self._facts.dtype)
        return self._as_taken(x), rows

    def multiply(self, inputs: tuple[Rows, ExpertRows], tile: GemmTile) -> torch.Tensor:
        """The product with a tile."""
        x, rows = inputs
        values, row_scales = (x.codes, x.scales) if isinstance(x, QuantizedRows) else (x, None)
        out = torch.empty(rows.pairs.shape[0], self._out_features, dtype=x.dtype, device=values.device)
        product = Product(values, out, row_scales, self._scales, experts=rows)
        config = self._config
        if "WIDEN" in config:
            config = {**config, "SWAP": not config["WIDEN"] and swaps(tile, self._facts)}
        multiply(self._kernel(), product, self._own, tile, **config)
        return out
