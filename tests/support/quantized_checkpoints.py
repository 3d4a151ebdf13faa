"""Quantized checkpoints as other programs write them, packed here by hand: one loop per layout, independent of the readers.

Every writer takes dense weights and returns the stored tensors together with the weights that they stand for (float32), which transformers
then runs. Codes, scales and zero points come from `integers`; a layout only moves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case_checkpoints import State, llama_config, llama_state, save_checkpoint

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Integers:
    """A quantized weight, nothing packed: codes [K, N], zeros [G, N] (int64), scales float16 [G, N], group of each input int64 [K]."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor
    bits: int

    def dense(self) -> torch.Tensor:
        """The weight [N, K]."""
        group = self.g_idx
        return ((self.codes - self.zeros[group]).float() * self.scales.float()[group]).t().contiguous()


def integers(weight: torch.Tensor, bits: int = 4, group_size: int = 32, symmetric: bool = True, order_seed: int | None = None) -> Integers:
    """Round a weight [N, K] to nearest; group_size -1: one group. order_seed: inputs are spread over the groups at random (act-order)."""
    inputs = weight.shape[1]
    size = inputs if group_size == -1 else group_size
    g_idx = torch.arange(inputs) // size
    if order_seed is not None:
        g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(order_seed))]
    top = 2**bits - 1
    codes = torch.zeros(weight.shape[1], weight.shape[0], dtype=torch.int64)
    zeros, scales = [], []
    for group in range(int(g_idx.max()) + 1):
        part = weight[:, g_idx == group].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).clamp(min=1e-5).half().float()
        zero = torch.full_like(scale, 2.0 ** (bits - 1)) if symmetric else (-low / scale).round().clamp(0, top)
        codes[g_idx == group] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top).t().long()
        zeros.append(zero.long())
        scales.append(scale.half())
    return Integers(codes, torch.stack(zeros), torch.stack(scales), g_idx, bits)


# ---- bits


def bit_stream(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, C] -> int32 [R, ceil(C * bits / 32)]: a little-endian bit stream along each row, written one bit at a time."""
    rows, columns = values.shape
    words = np.zeros((rows, math.ceil(columns * bits / 32)), np.uint32)
    codes = values.numpy()
    for column in range(columns):
        for bit in range(bits):
            position = column * bits + bit
            words[:, position // 32] |= ((codes[:, column] >> bit) & 1).astype(np.uint32) << np.uint32(position % 32)
    return torch.from_numpy(words.view(np.int32))


def stream_down(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The same along the first dimension: [K, N] -> int32 [ceil(K * bits / 32), N]."""
    return bit_stream(values.t(), bits).t().contiguous()


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """AWQ gemm: [R, C] -> int32 [R, C / 8], lane i holding column AWQ_COLUMNS[i] of eight."""
    order = [8 * word + column for word in range(values.shape[1] // 8) for column in AWQ_COLUMNS]
    return bit_stream(values[:, order], 4)


def awq_fast_words(codes: torch.Tensor) -> torch.Tensor:
    """AWQ gemv_fast: codes [N, K] -> int16 [N / 4, K], one block of 4 outputs x 64 inputs at a time."""
    outputs, inputs = codes.shape
    within_32 = [8 * row + 2 * column + pair for column in range(4) for row in range(4) for pair in range(2)]
    order = [32 * block + within_32[i] for block in range(inputs // 32) for i in range(32)]
    order = [order[8 * eight + column] for eight in range(inputs // 8) for column in AWQ_COLUMNS]
    shuffled = codes[:, order].numpy()
    words = np.zeros((outputs // 4, inputs), np.uint16)
    for quarter in range(outputs // 4):
        for block in range(inputs // 64):
            run = shuffled[4 * quarter : 4 * quarter + 4, 64 * block : 64 * block + 64].reshape(-1)
            for i, code in enumerate(run):
                words[quarter, 64 * block + i // 4] |= np.uint16(int(code) << (4 * (i % 4)))
    return torch.from_numpy(words.view(np.int16))


# ---- formats: (module's integers) -> its tensors by the last part of their names


def gptq_parts(q: Integers, version: str = "gptq", with_g_idx: bool = True) -> State:
    """version: "gptq" stores zero points less one, modulo 2**bits; "gptq_v2" as they are."""
    zeros = (q.zeros - 1) % 2**q.bits if version == "gptq" else q.zeros
    parts = {"qweight": stream_down(q.codes, q.bits), "qzeros": bit_stream(zeros, q.bits), "scales": q.scales}
    return parts | ({"g_idx": q.g_idx.to(torch.int32)} if with_g_idx else {})


def awq_gemm_parts(q: Integers) -> State:
    return {"qweight": awq_words(q.codes), "qzeros": awq_words(q.zeros), "scales": q.scales}


def _padded(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """[G, N] with G padded by zeros to whole words: of 8 groups, pairs of them for groups of 64, fours for 32."""
    multiple = {128: 1, 64: 2, 32: 4}[group_size]
    words = math.ceil(math.ceil(values.shape[0] / 8) / multiple) * multiple
    return torch.cat([values, values.new_zeros(words * 8 - values.shape[0], values.shape[1])])


def awq_gemv_parts(q: Integers) -> State:
    size = q.codes.shape[0] // q.scales.shape[0]
    return {
        "qweight": bit_stream(q.codes.t(), 4),
        "qzeros": bit_stream(_padded(q.zeros, size).t(), 4),
        "scales": _padded(q.scales, size).t().contiguous(),
    }


def awq_fast_parts(q: Integers, name: str = "qzeros") -> State:
    """name: "qzeros" (AutoAWQ) or "scaled_zeros" (llm-awq)."""
    size = q.codes.shape[0] // q.scales.shape[0]
    products = -(q.scales.float() * q.zeros.float()).half()
    return {"qweight": awq_fast_words(q.codes.t()), name: _padded(products, size), "scales": _padded(q.scales, size)}


def compressed_parts(q: Integers, with_zeros: bool = False, old_packing: bool = False, with_g_idx: bool = False) -> State:
    """pack-quantized; old_packing: 32 // bits codes a word, as before compressed-tensors 0.17."""
    rows = q.codes.t()
    parts: State = {
        "weight_packed": whole_lanes(rows, q.bits) if old_packing else bit_stream(rows, q.bits),
        "weight_scale": q.scales.t().contiguous(),
        "weight_shape": torch.tensor(rows.shape, dtype=torch.int64),
    }
    if with_zeros:
        parts["weight_zero_point"] = stream_down(q.zeros.t(), q.bits)
    return parts | ({"weight_g_idx": q.g_idx.to(torch.int32)} if with_g_idx else {})


def whole_lanes(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, C] -> int32 [R, ceil(C / (32 // bits))], whole codes in each word."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], math.ceil(values.shape[1] / per_word)), np.uint32)
    for column in range(values.shape[1]):
        words[:, column // per_word] |= values[:, column].numpy().astype(np.uint32) << np.uint32(bits * (column % per_word))
    return torch.from_numpy(words.view(np.int32))


def int8_parts(q: Integers) -> State:
    """int-quantized: signed codes as they are."""
    return {"weight": (q.codes.t() - 2 ** (q.bits - 1)).to(torch.int8).contiguous(), "weight_scale": q.scales.t().contiguous()}


def fp8_weight(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(float8 [N, K], float32 scales of blocks, the weight that they stand for); block -1: all."""
    rows, columns = (size if size != -1 else extent for size, extent in zip(block, weight.shape, strict=True))
    grid = (math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
    scales, codes, dense = torch.zeros(grid), torch.zeros(weight.shape), torch.zeros(weight.shape)
    for i in range(grid[0]):
        for j in range(grid[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            dense[place] = codes[place] * scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales, dense


# ---- whole checkpoints


def skewed(state: State) -> State:
    """The state with the linears of every column shifted by another amount: no two zero points are alike."""
    return {
        name: tensor + torch.linspace(-0.2, 0.2, tensor.shape[0])[:, None] if _is_linear(name) else tensor for name, tensor in state.items()
    }


def quantized_state(
    state: State, quantize: Callable[[str, torch.Tensor], Integers | None], pack: Callable[[str, Integers], State]
) -> tuple[State, State]:
    """(stored tensors, dense float32 weights) of a model. quantize: (module, weight) -> its integers, or None to keep it in float16."""
    stored: State = {}
    dense: State = {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        q = quantize(module, tensor) if name.endswith(".weight") and tensor.dim() == 2 else None
        if q is None:
            stored[name] = tensor.half()
            dense[name] = stored[name].float()
        else:
            stored |= {f"{module}.{leaf}": part for leaf, part in pack(module, q).items()}
            dense[name] = q.dense()
    return stored, dense


def linears_only(
    quantize: Callable[[str, torch.Tensor], Integers], skip: tuple[str, ...] = ()
) -> Callable[[str, torch.Tensor], Integers | None]:
    """Quantize the layers' linears but those whose names hold one of `skip`."""
    return lambda module, weight: None if not _is_linear(module) or any(part in module for part in skip) else quantize(module, weight)


def _is_linear(name: str) -> bool:
    return any(part in name for part in LINEARS)


def base_model(seed: int, **changes: Any) -> tuple[dict[str, Any], State]:
    """Config and random weights of the small Llama."""
    config = llama_config(torch_dtype="float16", **changes)
    return config, llama_state(config, seed)


def save_quantized(directory: Path, config: dict[str, Any], stored: State, quantization: dict[str, Any] | None) -> Path:
    """Write a checkpoint with its quantization_config."""
    described = config if quantization is None else {**config, "quantization_config": quantization}
    return save_checkpoint(directory, described, stored)
