"""GPTQ as the papers write it, slow and with as little cleverness as possible: NumPy, one input at a time, no factorization, no blocks.

Optimal brain quantization (Frantar and Alistarh 2022) with a fixed order: the inverse Hessian of the inputs that are left is kept, and an
input that is done is eliminated from it. GPTQ's Cholesky factor holds the same rows, each over its diagonal element. W [N, K].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
SNAPSHOT = 128  # inputs after which AutoGPTQ writes its corrections back, so that a group that starts sees them


@dataclass
class Setting:
    bits: int = 4
    group_size: int = 32  # -1: all inputs
    symmetric: bool = True
    act_order: bool = False
    static_groups: bool = False
    damp: float = 0.01
    search: bool = False


@dataclass
class Answer:
    """codes [N, K] and values [N, K] in the order of the inputs, steps and zeros [N, G], group of each input [K]."""

    codes: Array
    values: Array
    steps: Array
    zeros: Array
    group: Array


def find_params(x: Array, bits: int, symmetric: bool, search: bool = False) -> tuple[Array, Array]:
    """AutoGPTQ's step and zero [N] for rows [N, g]."""
    kind = x.dtype.type
    levels = kind(2**bits - 1)
    low = np.minimum(x.min(1), 0)
    high = np.maximum(x.max(1), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = np.where(low < 0, -high, low)  # a group without negative values keeps its lower end at zero
    nothing = (low == 0) & (high == 0)
    low[nothing], high[nothing] = -1, 1

    def at(share):
        step = (share * high - share * low) / levels
        zero = np.full_like(step, 2 ** (bits - 1)) if symmetric else np.round(-share * low / step)
        return step, zero

    step, zero = at(kind(1))
    if not search:
        return step, zero
    least = np.full(len(x), np.inf)
    for percent in range(100, 20, -1):
        tried, tried_zero = at(kind(percent / 100))
        off = np.abs(nearest(x, tried[:, None], tried_zero[:, None], bits)[1] - x) ** kind(2.4)
        better = off.sum(1) < least
        least[better], step[better], zero[better] = off.sum(1)[better], tried[better], tried_zero[better]
    return step, zero


def nearest(x: Array, step: Array, zero: Array, bits: int) -> tuple[Array, Array]:
    """Codes and what they stand for."""
    codes = np.clip(np.round(x / step) + zero, 0, 2**bits - 1)
    return codes, step * (codes - zero)


def gptq(weight: Array, hessian: Array, setting: Setting) -> Answer:
    """All arithmetic is done in the weight's dtype."""
    weight, hessian = weight.copy(), hessian.astype(weight.dtype)
    inputs = weight.shape[1]
    size = inputs if setting.group_size == -1 else setting.group_size
    num_groups = inputs // size
    params: dict[int, tuple[Array, Array]] = {}
    if setting.group_size == -1:
        params[0] = find_params(weight, setting.bits, setting.symmetric, setting.search)
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    if setting.group_size != -1 and setting.static_groups:
        for g in range(num_groups):
            params[g] = find_params(weight[:, g * size : (g + 1) * size], setting.bits, setting.symmetric, setting.search)
    order = np.argsort(-np.diag(hessian), kind="stable") if setting.act_order else np.arange(inputs)
    group = (np.arange(inputs) if setting.static_groups or setting.group_size == -1 else np.argsort(order)) // size
    inverse = np.linalg.inv(hessian + setting.damp * np.diag(hessian).mean() * np.eye(inputs, dtype=weight.dtype))
    codes, values = np.zeros(weight.shape, np.int64), np.zeros_like(weight)
    for done, i in enumerate(order):
        if done % SNAPSHOT == 0:
            written = weight.copy()
        if group[i] not in params:
            members = order[done : done + size]
            params[group[i]] = find_params(written[:, members], setting.bits, setting.symmetric, setting.search)
        codes[:, i], values[:, i] = nearest(weight[:, i], *params[group[i]], setting.bits)
        left = order[done + 1 :]
        error = (weight[:, i] - values[:, i]) / inverse[i, i]
        weight[:, left] -= np.outer(error, inverse[i, left])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    steps, zeros = (np.stack([params[g][part] for g in range(num_groups)], 1) for part in (0, 1))
    return Answer(codes, values, steps, zeros, group)


def gptaq(weight: Array, hessian: Array, cross: Array, bits: int, size: int, alpha: float, damp: float = 0.01, block: int = 128) -> Array:
    """What GPTAQ's codes stand for [N, K]: symmetric, act-order, static groups (the published implementation's recurrence).

    Inside a block an input pulls the later ones by its weight before rounding, across blocks by the rounded one.
    """
    inputs = weight.shape[1]
    params = [find_params(weight[:, k : k + size], bits, True) for k in range(0, inputs, size)]
    order = np.argsort(-np.diag(hessian), kind="stable")
    damped = hessian[np.ix_(order, order)] + damp * np.diag(hessian).mean() * np.eye(inputs)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    pull = alpha * np.triu(cross[np.ix_(order, order)] @ upper.T, 1) @ upper
    left = weight[:, order].copy()
    rounded = np.zeros_like(left)
    for i in range(inputs):
        end = (i // block + 1) * block
        original = left[:, i].copy()
        rounded[:, i] = nearest(original, *params[order[i] // size], bits)[1]
        error = (original - rounded[:, i]) / upper[i, i]
        left[:, i + 1 :] -= np.outer(error, upper[i, i + 1 :])
        left[:, i + 1 : end] += np.outer(original, pull[i, i + 1 : end])
        left[:, end:] += np.outer(rounded[:, i], pull[i, end:])
    values = np.zeros_like(rounded)
    values[:, order] = rounded
    return values
