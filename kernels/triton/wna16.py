"""Quantized linear with 16-bit activations on Triton: name and signature of `kernels.reference.linear.make_wna16_linear`."""

from collections.abc import Callable

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles
from dspark.kernels.wna16 import Wna16Weight

LinearFn = Callable[[torch.Tensor], torch.Tensor]
BITS = (4, 8)
_DETERMINISTIC_TOKENS = 64
"""Deterministic runs take the tile of this many tokens whatever the batch, so that a row's arithmetic never changes."""


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op. Bits and group size belong to each weight: `make_wna16_linear` checks them."""
    return launcher.decline(facts)


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """The function x [T, K] -> x @ dequantised weight.T + bias [T, N]; float32 accumulation, the weight rounded once to x's dtype.

    The canonical layout (N contiguous, natural order along K) is what the kernel reads: nothing is re-laid.
    Raises ValueError for bits other than 4 and 8 and for a group size that no K step of at least 16 divides.
    """
    depth = tiles.group_depth(weight.group_size, int(weight.scales.shape[0]))
    launcher.require(weight.bits in BITS, lambda: f"the Triton wna16 kernel has {BITS} bits, not {weight.bits}")
    launcher.require(depth > 0, lambda: f"the Triton wna16 kernel needs a group size that 16 divides, not {weight.group_size}")
    qweight, scales = weight.qweight.contiguous(), weight.scales.contiguous()
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    out_features, in_features = weight.out_features, weight.in_features
    zeros_or_any = scales if zeros is None else zeros  # never read without HAS_ZEROS

    def linear(x: torch.Tensor) -> torch.Tensor:
        from dspark.kernels.triton.wna16_kernels import wna16_kernel

        x = x if x.stride(-1) == 1 else x.contiguous()
        num_tokens = x.shape[0]
        out = torch.empty(num_tokens, out_features, dtype=x.dtype, device=x.device)
        tile = tiles.wna16_tile(_DETERMINISTIC_TOKENS if facts.deterministic else num_tokens, out_features, depth, x.itemsize)
        launcher.launch(
            wna16_kernel,
            (-(-num_tokens // tile.rows) * -(-out_features // tile.cols),),
            *(x, qweight, scales, zeros_or_any, scales if bias is None else bias, out),
            *(num_tokens, out_features, in_features, qweight.shape[0], weight.group_size),
            *(x.stride(0), qweight.stride(0), scales.stride(0), zeros_or_any.stride(0), out.stride(0)),
            BITS=weight.bits,
            HAS_ZEROS=zeros is not None,
            HAS_BIAS=bias is not None,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.cols,
            BLOCK_K=tile.depth,
            ROW_GROUP=tile.row_group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out

    return linear
