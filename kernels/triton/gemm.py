"""One launch of a matrix product, or two where K is split: what the linears of every storage and the mixture of experts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles
from dspark.kernels.triton.gemm_tiles import GemmTile

SUM_BLOCK = 512
GATHER, SCATTER = 1, 2


@dataclass(frozen=True)
class ExpertRows:
    """Rows of a mixture of experts, sorted by expert; see `gemm_kernels`. pairs int32 [P]; starts int32 [E + 1], the last one P.

    mode: GATHER takes rows of the tokens and writes sorted ones, SCATTER takes sorted ones and writes rows in the order of the pairs.
    """

    mode: int
    pairs: torch.Tensor
    starts: torch.Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        return int(self.starts.shape[0]) - 1


@dataclass(frozen=True)
class Product:
    """out [M, N] = x [rows, K] @ weight.T, times float32 scales of rows and outputs where given, plus bias. What a kernel has besides (the
    weight) it gets on its own. sums: dtype of what splits of K leave."""

    x: torch.Tensor
    out: torch.Tensor
    row_scales: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    experts: ExpertRows | None = None
    sums: torch.dtype = torch.float32


def multiply(kernel: Any, product: Product, own: tuple[Any, ...], tile: GemmTile, **config: Any) -> None:
    """Launch a product's kernel. `own`: its arguments after those that all kernels have.

    Splits of K write their sums side by side and a second launch adds them in their order: the same result every time, no atomics.
    """
    x, out, experts = product.x, product.out, product.experts
    num_rows, out_features = out.shape
    none = out  # a pointer that is never read
    scaled = {"ROW_SCALES": product.row_scales is not None, "COL_SCALES": product.scales is not None}
    finish = [none if tensor is None else tensor for tensor in (product.row_scales, product.scales, product.bias)]
    if experts is None:
        row_tiles = -(-num_rows // tile.rows)
        where: tuple[Any, ...] = (none, none, num_rows, out_features, x.shape[1], row_tiles, 1, 1)
    else:
        launcher.require(tile.splits == 1, lambda: "products of experts are not split")
        row_tiles = num_rows // tile.rows + min(num_rows, experts.num_experts)  # no more, however the rows fall
        counts = num_rows, out_features, x.shape[1], row_tiles, experts.num_experts, experts.top_k
        where = experts.pairs, experts.starts, *counts
    target = out if tile.splits == 1 else torch.empty(tile.splits, num_rows, out_features, dtype=product.sums, device=out.device)
    launcher.launch(
        kernel,
        (row_tiles * -(-out_features // tile.cols), tile.splits),
        *(x, *finish, target, *where, x.stride(0), out.stride(0), *own),
        **config,
        **scaled,
        HAS_BIAS=product.bias is not None,
        SPLITS=tile.splits,
        ROWS=0 if experts is None else experts.mode,
        EXPERTS=1 if experts is None else tiles.next_power_of_two(experts.num_experts),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.cols,
        BLOCK_K=tile.depth,
        ROW_GROUP=tile.row_group,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    if tile.splits > 1:
        from dspark.kernels.triton.gemm_kernels import sum_splits_kernel

        launcher.launch(
            sum_splits_kernel,
            (num_rows, -(-out_features // SUM_BLOCK)),
            *(target, *finish, out, num_rows, out_features, out.stride(0)),
            **scaled,
            HAS_BIAS=product.bias is not None,
            SPLITS=tile.splits,
            BLOCK_N=SUM_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
