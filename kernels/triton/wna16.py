"""Quantized linear with 16-bit activations on Triton: name and signature of `kernels.reference.linear.make_wna16_linear`."""

from collections.abc import Callable
from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton import gemm_tiles
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.gemm import Product, multiply
from dspark.kernels.wna16 import Wna16Weight

LinearFn = Callable[[torch.Tensor], torch.Tensor]
BITS = (4, 8)


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op. Bits and group size belong to each weight: `make_wna16_linear` checks them."""
    return launcher.decline(facts)


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """The function x [T, K] -> x @ dequantised weight.T + bias [T, N]; float32 accumulation, the weight rounded once to x's dtype.

    The canonical layout (N contiguous, natural order along K) is what the kernel reads: nothing is re-laid.
    Raises ValueError for bits other than 4 and 8 and for a group size that no K step of at least 16 divides.
    """
    own, config, depth = packed_operands(weight, weight.parts())
    perm = None if weight.perm is None else weight.perm.int().contiguous()
    out_features, in_features = weight.out_features, weight.in_features

    def linear(x: torch.Tensor) -> torch.Tensor:
        from dspark.kernels.triton.wna16_kernels import wna16_kernel

        x = x if x.stride(-1) == 1 else x.contiguous()
        num_rows = x.shape[0]
        gathers = perm is not None and num_rows <= gemm_tiles.MAX_SPLIT_ROWS  # few values each, found in the cache; more are gathered once
        if perm is not None and not gathers:
            x = x.index_select(1, perm)
        out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
        tile = gemm_tiles.wna16_tile(num_rows, out_features, in_features, depth, x.itemsize, facts.deterministic)
        multiply(wna16_kernel, Product(x, out, bias=bias), own, tile, **{**config, "HAS_PERM": gathers})
        return out

    return linear


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
