"""Quantized linear with 16-bit activations on Triton: name and signature of `kernels.reference.linear.make_wna16_linear`."""

from __future__ import annotations

from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton import gemm_tiles
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.gemm import Product, multiply
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.book import book_of
from dspark.kernels.triton.tuning.keys import ProductKind
from dspark.kernels.wna16 import Wna16Weight

BITS = (4, 8)


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op. Bits and group size belong to each weight: `make_wna16_linear` checks them."""
    return launcher.decline(facts)


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> Wna16Linear:
    """The function x [T, K] -> x @ dequantised weight.T + bias [T, N]; float32 accumulation, the weight rounded once to x's dtype.

    The canonical layout (N contiguous, natural order along K) is what the kernel reads: nothing is re-laid.
    Raises ValueError for bits other than 4 and 8 and for a group size that no K step of at least 16 divides.
    """
    return Wna16Linear(weight, bias, facts)


class Wna16Linear:
    """x [T, K] -> [T, N]. See `make_wna16_linear`."""

    def __init__(self, weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> None:
        self._own, self._config, depth = packed_operands(weight, weight.parts())
        self._bias, self._dtype = bias, facts.dtype
        self._perm = None if weight.perm is None else weight.perm.int().contiguous()
        self._out_features, self._in_features = weight.out_features, weight.in_features
        self.weight_bytes = self._in_features * self._out_features * weight.bits // 8
        kind = packed_kind(weight, depth, self._config, facts.dtype, facts.deterministic)
        self._tiles = book_of(facts).products(kind, self)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self._tiles[x.shape[0]])

    def sample(self, num_rows: int) -> torch.Tensor:
        """Random inputs."""
        return torch.randn(num_rows, self._in_features, device=self._own[0].device).to(self._dtype)

    def multiply(self, inputs: torch.Tensor, tile: GemmTile) -> torch.Tensor:
        """The product with a tile."""
        from dspark.kernels.triton.wna16_kernels import wna16_kernel

        x = inputs if inputs.stride(-1) == 1 else inputs.contiguous()
        num_rows, perm = x.shape[0], self._perm
        gathers = perm is not None and num_rows <= gemm_tiles.MAX_SPLIT_ROWS  # few values each, found in the cache; more are gathered once
        if perm is not None and not gathers:
            x = x.index_select(1, perm)
        out = torch.empty(num_rows, self._out_features, dtype=x.dtype, device=x.device)
        multiply(wna16_kernel, Product(x, out, bias=self._bias), self._own, tile, **{**self._config, "HAS_PERM": gathers})
        return out


def packed_kind(
    weight: Wna16Weight, depth: int, options: dict[str, Any], dtype: torch.dtype, deterministic: bool, num_experts: int = 0, rows: str = ""
) -> ProductKind:
    """What tiles of such a weight are looked up by. depth, options: of `packed_operands`; rows: which rows experts have."""
    step = weight.group_size if int(weight.scales.shape[0]) > 1 else 0
    parts = [f"{weight.bits} bits", f"groups of {step or 'all'}"]
    parts += ["zeros"] * options["HAS_ZEROS"] + ["act-order"] * options["HAS_PERM"] + [rows] * bool(rows)
    return ProductKind(
        "wna16",
        ", ".join(parts),
        weight.out_features,
        weight.in_features,
        str(dtype).removeprefix("torch."),
        dtype.itemsize,
        weight.bits,
        depth,
        step,
        num_experts,
        deterministic,
    )


def packed_operands(weight: Wna16Weight, tensors: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """(arguments of the kernel, its options, the largest K step) of a weight's tensors, which may have one more dimension for experts.

    Raises ValueError for bits other than 4 and 8 and for a group size that no K step of at least 16 divides.
    """
    num_groups = int(weight.scales.shape[0])
    depth = gemm_tiles.group_depth(weight.group_size, num_groups)
    launcher.require(weight.bits in BITS, lambda: f"the Triton wna16 kernel has {BITS} bits, not {weight.bits}")
    launcher.require(depth > 0, lambda: f"the Triton wna16 kernel needs a group size that 16 divides, not {weight.group_size}")
    qweight, scales = tensors["qweight"].contiguous(), tensors["scales"].contiguous()
    zeros = tensors["zeros"].contiguous() if "zeros" in tensors else scales  # stand-ins of what is absent are never read
    perm = tensors["perm"].int().contiguous() if "perm" in tensors else qweight
    options = {"BITS": weight.bits, "HAS_ZEROS": "zeros" in tensors, "HAS_PERM": "perm" in tensors}
    return (qweight, scales, zeros, perm, weight.qweight.shape[0], num_groups, weight.group_size), options, depth
