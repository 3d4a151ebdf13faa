"""Sampling on Triton: rows of logits to tokens where the logits are. The caller puts options into arrays (`runtime.sampling.device`)."""

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles

IS_RANDOM, INVERSE, TOP_K, TOP_P, MIN_P, KEY, DRAFT, SOURCE, CHANCE = range(9)
NUM_OPTIONS = 9
TOKEN, IS_KEPT, GAP = range(3)
_EDITS_BLOCK = 256
_ROW_BLOCK = 4096
"""Logits that a program holds at a time: 8 a thread with 16 warps, all that one multiprocessor can have under way."""


def supports(facts: KernelFacts) -> str | None:
    """None, or why these kernels do not draw a run's tokens."""
    return launcher.decline(facts)


def edit_logits(logits: torch.Tensor, edits: torch.Tensor) -> None:
    """Change single logits of float32 rows [rows, V] in place.

    edits int32 [5, n], each (row, token) once: row, token, and as bits of float32 a factor (divides a positive logit, multiplies a negative
    one), what is subtracted then, and what is added last; adding -inf forbids a token whatever its logit is.
    """
    from dspark.kernels.triton.sampling_kernels import edit_kernel

    launcher.require(logits.dtype is torch.float32 and logits.stride(-1) == 1, lambda: f"needs float32 rows, not {logits.dtype}")
    count = edits.shape[1]
    grid = (-(-count // _EDITS_BLOCK),)
    launcher.launch(edit_kernel, grid, logits, edits, count, logits.stride(0), BLOCK=_EDITS_BLOCK, num_warps=4)


def draw_rows(
    logits: torch.Tensor,
    options: torch.Tensor,
    filters: bool,
    drawn_from: torch.Tensor | None = None,
    verify: bool = False,
    gaps: bool = False,
) -> torch.Tensor:
    """A token for each row of logits [rows, V] (any float type) -> int32 [rows, 3]: TOKEN, IS_KEPT, GAP.

    options int64 [rows, NUM_OPTIONS], floating-point numbers by their bits: IS_RANDOM 0 takes the best token, the lowest of equals; INVERSE
    of the temperature (float32), TOP_K, TOP_P (float64) and MIN_P (float32) as `runtime.sampling.filters` means them, KEY of the noise.
    filters: whether any row has top-k or top-p (those passes are left out else).

    With `verify`, also: DRAFT token or -1; SOURCE, the row of drawn_from float32 [n, V] (contiguous) with the probabilities that it was
    drawn from, or -1 for one that is certain; CHANCE, a float64 in (0, 1). IS_KEPT: chance < p(draft) / q(draft), for a greedy row whether
    it is the best token. Where it is not kept, TOKEN is a draw from max(0, p - q) by KEY. A row without a draft draws from p.

    TOKEN is -1 for a row with a NaN or without a finite largest logit. GAP: bits of largest minus second largest logit, float32, if asked.
    """
    from dspark.kernels.triton.sampling_kernels import draw_kernel

    num_rows, vocab = logits.shape
    launcher.require(logits.stride(-1) == 1, lambda: f"needs contiguous rows, strides are {logits.stride()}")
    out = torch.empty(num_rows, 3, dtype=torch.int32, device=logits.device)
    tables = logits if drawn_from is None else drawn_from  # never read without
    launcher.launch(
        draw_kernel,
        (num_rows,),
        *(logits, options, tables, out, vocab, logits.stride(0)),
        FILTER=filters,
        VERIFY=verify,
        GAPS=gaps,
        BLOCK=min(_ROW_BLOCK, tiles.next_power_of_two(vocab)),
        num_warps=16,
    )
    return out
