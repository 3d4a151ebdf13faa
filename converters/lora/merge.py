"""The arithmetic of a merge, in float32.

    plain, rslora   W' = W + s B A                          s = alpha / r, or alpha / sqrt(r)
    embedding       W' = W + s (B A)^T
    DoRA            W' = m / |W + s B A| * (W + s B A)      norms of the output rows; of an embedding, of its columns
    tokens          W'[ids] = rows
    saved           W' = the saved tensor

Several adapters: each change W' - W is taken against the base itself, multiplied by the adapter's weight and added in the order given, so
the order matters to rounding only. Rows of new tokens, which the base does not have, are the adapter's own, whatever its weight.
"""

from __future__ import annotations

import torch

from dspark.converters.lora.keys import Patch

_COMPARE_ROWS = 4096


def merge(base: torch.Tensor, patches: list[Patch], leaf: str, rows: int) -> torch.Tensor:
    """A layer's `leaf` after all adapters, float32 [rows, ...]. base: as the checkpoint has it; it is not written to."""
    original = base.to(torch.float32)
    if len(patches) == 1 and patches[0].adapter.weight == 1:
        return apply_patch(original, patches[0], leaf)
    total = original[:rows].clone()
    for patch in patches:
        result = apply_patch(original, patch, leaf)
        both = min(rows, original.shape[0], result.shape[0])
        total[:both].add_(result[:both].sub_(original[:both]), alpha=patch.adapter.weight)
        if result.shape[0] > total.shape[0]:
            total = torch.cat((total, result[total.shape[0] :]))
    return total


def apply_patch(base: torch.Tensor, patch: Patch, leaf: str) -> torch.Tensor:
    """The layer's `leaf` as this adapter alone makes it, a new float32 tensor. base: float32."""
    read, keys = patch.adapter.read, patch.keys
    replaced = patch.replacement(leaf)
    weight = read(replaced).clone() if replaced is not None else base.clone()
    scaling = patch.adapter.config.scaling(patch.module)
    if leaf == "bias":
        return weight.add_(read(keys["B.bias"]), alpha=scaling) if patch.has("B.bias") else weight
    if patch.has("tokens"):
        ids = patch.adapter.config.tokens_of(patch.module) or ()
        weight[list(ids)] = read(keys["tokens"])
    if patch.has("A"):
        weight.addmm_(read(keys["B"]), read(keys["A"]), alpha=scaling)
        return _set_norms(weight, read(keys["magnitude"]), dim=1) if patch.has("magnitude") else weight
    if patch.has("embedding_A"):
        # contiguous, so that a head that is tied to this embedding gets bit for bit the same product
        weight.addmm_(read(keys["embedding_A"]).t().contiguous(), read(keys["embedding_B"]).t().contiguous(), alpha=scaling)
        return _set_norms(weight, read(keys["magnitude"]), dim=0) if patch.has("magnitude") else weight
    return weight


def _set_norms(weight: torch.Tensor, magnitude: torch.Tensor, dim: int) -> torch.Tensor:
    """Scale in place so that the norms along `dim` are the magnitudes; what is all zero stays so."""
    norms = torch.linalg.norm(weight, dim=dim)
    factor = torch.where(norms > 0, magnitude / norms, 0.0)
    return weight.mul_(factor.unsqueeze(dim))


def equal_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two matrices hold the same numbers, whatever their dtypes; a few rows at a time."""
    if first.shape != second.shape:
        return False
    rows = range(0, first.shape[0], _COMPARE_ROWS)
    return all(torch.equal(first[row : row + _COMPARE_ROWS].float(), second[row : row + _COMPARE_ROWS].float()) for row in rows)
