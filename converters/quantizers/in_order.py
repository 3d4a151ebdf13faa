"""The order in which GPTQ treats inputs: block after block, what each block is off by taken out of all that follow.

Inside a block the choice of codes does the same input by input (`loops`). K inputs, R outputs, B inputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.converters.quantizers.factor import HessianFactor
from dspark.converters.quantizers.measure import energy

Choose = Callable[[int, int], torch.Tensor]
"""(start, stop) of a block -> errors [B, R], each over its diagonal element of U; its weights then are what was chosen for them"""


def solve_in_order(weight: torch.Tensor, factor: HessianFactor, block_columns: int, choose: Choose) -> float:
    """Make of weight [K, R], in the order of treatment, what `choose` chooses. Half the sum of squared errors over U's diagonal."""
    loss = 0.0
    for start in range(0, len(weight), block_columns):
        stop = min(start + block_columns, len(weight))
        errors = choose(start, stop)
        loss += energy(errors) / 2
        if stop < len(weight):
            weight[stop:].addmm_(factor.upper[start:stop, stop:].t(), errors, alpha=-1)
            if factor.pull is not None:
                weight[stop:].addmm_(factor.pull[start:stop, stop:].t(), weight[start:stop])
    return loss
