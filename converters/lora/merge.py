"""The arithmetic of a merge, in float32.

    plain, rslora   W' = W + s B A                          s = alpha / r, or alpha / sqrt(r)
    embedding       W' = W + s (B A)^T
    DoRA            W' = m / |W + s B A| * (W + s B A)      norms of the output rows; of an embedding, of its columns
    tokens          W'[ids] = rows
    saved           W' = the saved tensor

Several adapters: each change W' - W is multiplied by the adapter's weight and added in the order given. A change is taken against the base
itself, so the order matters to rounding only; but DoRA, like PEFT, rescales the sum that it finds (by the norms of the base with its own
matrices), so there the order counts. Rows of new tokens, which the base does not have, are the adapter's own, whatever its weight.
"""

from __future__ import annotations

import torch

from dspark.converters.lora.keys import Patch

_COMPARE_ROWS = 4096


def merge(base: torch.Tensor, patches: list[Patch], leaf: str, rows: int) -> torch.Tensor:
    """A layer's `leaf` after all adapters, float32 [rows, ...]. base: as the checkpoint has it; it is not written to."""
    original = base.to(torch.float32)
    if len(patches) == 1 and patches[0].adapter.weight == 1:
        alone = adapt(original, patches[0], leaf)
        factor = dora_factor(alone, patches[0], leaf)
        return alone if factor is None else alone.mul_(factor)
    total = original[:rows].clone()
    for patch in patches:
        result = adapt(original, patch, leaf)
        factor = dora_factor(result, patch, leaf)
        both = min(rows, original.shape[0], result.shape[0])
        change = result[:both].sub_(original[:both])
        if factor is not None:
            factor = factor[:both] if factor.shape[0] > 1 else factor
            change.add_(total[:both]).mul_(factor).sub_(total[:both])
        total[:both].add_(change, alpha=patch.adapter.weight)
        if result.shape[0] > total.shape[0]:
            total = torch.cat((total, result[total.shape[0] :] if factor is None else result[total.shape[0] :] * factor[-1:]))
    return total


def adapt(base: torch.Tensor, patch: Patch, leaf: str) -> torch.Tensor:
    """The layer's `leaf` as this adapter alone makes it, magnitudes apart: a new float32 tensor. base: float32."""
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
    if patch.has("embedding_A"):
        # contiguous, so that a head that is tied to this embedding gets bit for bit the same product
        weight.addmm_(read(keys["embedding_A"]).t().contiguous(), read(keys["embedding_B"]).t().contiguous(), alpha=scaling)
    return weight


def dora_factor(adapted: torch.Tensor, patch: Patch, leaf: str) -> torch.Tensor | None:
    """Magnitude over norm, [rows, 1] or for an embedding [1, columns]; None without DoRA. What is all zero stays so."""
    if leaf != "weight" or not patch.has("magnitude"):
        return None
    dim = 1 if patch.has("A") else 0
    norms = torch.linalg.norm(adapted, dim=dim)
    return torch.where(norms > 0, patch.adapter.read(patch.keys["magnitude"]) / norms, 0.0).unsqueeze(dim)


def equal_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two matrices hold the same numbers, whatever their dtypes; a few rows at a time."""
    if first.shape != second.shape:
        return False
    rows = range(0, first.shape[0], _COMPARE_ROWS)
    return all(torch.equal(first[row : row + _COMPARE_ROWS].float(), second[row : row + _COMPARE_ROWS].float()) for row in rows)
