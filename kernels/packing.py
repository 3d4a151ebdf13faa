"""Bit layouts of quantized weights. The only file in the project that shifts bits of weights.

Canonical layout ("wna16"): codes [K, N] become int32 [ceil(K * bits / 32), N], a little-endian bit stream along K: code k occupies
stream bits k*bits .. k*bits+bits-1, and stream bit t is bit t % 32 of word t // 32. For 4 and 8 bits this is GPTQ's own `qweight`.
"""

import math

import numpy as np
import torch


def packed_rows(in_features: int, bits: int) -> int:
    """Rows of the packed matrix for K inputs."""
    return -(-in_features * bits // 32)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [K, N], each below 2**bits -> int32 [ceil(K * bits / 32), N]."""
    values = codes.numpy()
    num_words = packed_rows(values.shape[0], bits)
    words = np.zeros((num_words + 1, values.shape[1]), np.uint32)
    for lane in range(_lane_period(bits)):
        rows = slice(lane, None, _lane_period(bits))
        lane_codes = values[rows].astype(np.uint32)
        first, following, offset = _words_of_lane(lane, bits, lane_codes.shape[0])
        words[first] |= lane_codes << np.uint32(offset)
        if offset + bits > 32:
            words[following] |= lane_codes >> np.uint32(32 - offset)
    return torch.from_numpy(words[:num_words].view(np.int32))


def unpack_codes(packed: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int32 [ceil(K * bits / 32), N] -> uint8 [K, N]. Needs little more room than the result."""
    words = packed.cpu().contiguous().numpy().view(np.uint32)
    codes = np.empty((in_features, words.shape[1]), np.uint8)
    mask = np.uint32(2**bits - 1)
    for lane in range(_lane_period(bits)):
        rows = slice(lane, None, _lane_period(bits))
        first, following, offset = _words_of_lane(lane, bits, codes[rows].shape[0])
        lane_codes = words[first] >> np.uint32(offset)
        if offset + bits > 32:
            lane_codes |= words[following] << np.uint32(32 - offset)
        codes[rows] = lane_codes & mask
    return torch.from_numpy(codes).to(packed.device)


def _lane_period(bits: int) -> int:
    """Codes after which the pattern of offsets in words repeats."""
    return 32 // math.gcd(32, bits)


def _words_of_lane(lane: int, bits: int, count: int) -> tuple[slice, slice, int]:
    """Words in which the `count` codes of a lane begin, the words after those, and the bit at which the codes begin."""
    first, offset = divmod(lane * bits, 32)
    step = _lane_period(bits) * bits // 32
    return slice(first, first + step * count, step), slice(first + 1, first + 1 + step * count, step), offset


# ---- layouts of other programs ---------------------------------------------------------------------------------------------------

AWQ_LANES = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ "gemm": lane i of a word holds column 8 * c + AWQ_LANES[i] of its eight."""
_AWQ_LANE_OF_COLUMN = tuple(AWQ_LANES.index(column) for column in range(8))
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""GPTQ "planar": widths of the planes that each run of 32 codes is split into, the lowest bits first."""
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def unpack_columns(packed: torch.Tensor, bits: int, num_columns: int) -> torch.Tensor:
    """A bit stream along the last dimension: int32 [R, ceil(C * bits / 32)] -> uint8 [R, C]."""
    return unpack_codes(packed.t(), bits, num_columns).t()


def add_one_to_lanes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of 2-, 4- or 8-bit lanes plus one in every lane, carries included: undoes a writer that subtracted one from whole words."""
    words = packed.contiguous().numpy().view(np.uint32)
    return torch.from_numpy((words + np.uint32(_ONES[bits])).view(np.int32))


def unpack_awq_columns(packed: torch.Tensor) -> torch.Tensor:
    """AWQ "gemm": int32 [R, C / 8] -> uint8 [R, C], the lanes put back into the order of the columns."""
    words = packed.contiguous().numpy().view(np.uint32)
    codes = np.empty((words.shape[0], words.shape[1] * 8), np.uint8)
    for lane, column in enumerate(AWQ_LANES):
        codes[:, column::8] = (words >> np.uint32(4 * lane)) & np.uint32(15)
    return torch.from_numpy(codes)


def unpack_awq_fast(packed: torch.Tensor) -> torch.Tensor:
    """AWQ "gemv_fast", which is llm-awq's layout: int16 [N / 4, K] -> uint8 [N, K].

    Each int16 holds four consecutive codes, low bits first, of a run that walks a block of four outputs and 64 inputs row by row. Inputs
    are permuted twice: within 32, (4, 4, 2) with the first two axes swapped; within each eight of the result, AWQ_LANES.
    """
    quarter, inputs = packed.shape
    words = packed.contiguous().numpy().view(np.uint16)
    codes = np.stack([(words >> np.uint16(4 * lane)) & np.uint16(15) for lane in range(4)], -1).astype(np.uint8)  # [N / 4, K, 4]
    rows = codes.reshape(quarter, inputs // 64, 4, 64).transpose(0, 2, 1, 3).reshape(quarter * 4, inputs // 8, 8)
    rows = rows[:, :, list(_AWQ_LANE_OF_COLUMN)].reshape(quarter * 4, inputs // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    return torch.from_numpy(np.ascontiguousarray(rows.reshape(quarter * 4, inputs)))


def unpack_whole_lanes(packed: torch.Tensor, bits: int, num_columns: int) -> torch.Tensor:
    """int32 [R, ceil(C / (32 // bits))] with 32 // bits codes in each word and the bits left over unused -> uint8 [R, C]."""
    per_word = 32 // bits
    words = packed.contiguous().numpy().view(np.uint32)
    shifts = (np.arange(per_word) * bits).astype(np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    return torch.from_numpy(np.ascontiguousarray(codes.reshape(words.shape[0], -1)[:, :num_columns].astype(np.uint8)))


def unpack_planes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQ "planar" along the first dimension: int32 [K * bits / 32, N] -> uint8 [K, N], K a multiple of 32.

    Each run of 32 codes is `bits` rows of words: the planes of PLANES, in each of width w the row i holding codes i * 32 / w and following.
    """
    words = packed.contiguous().numpy().view(np.uint32)
    blocks = words.reshape(-1, bits, words.shape[1])  # [K / 32, rows, N]
    codes = np.zeros((blocks.shape[0], 32, words.shape[1]), np.uint32)
    row = low = 0
    for width in PLANES[bits]:
        shifts = (np.arange(32 // width) * width).astype(np.uint32)
        plane = (blocks[:, row : row + width, None, :] >> shifts[:, None]) & np.uint32(2**width - 1)  # [K / 32, width, 32 / width, N]
        codes |= plane.reshape(codes.shape) << np.uint32(low)
        row, low = row + width, low + width
    return torch.from_numpy(codes.reshape(-1, words.shape[1]).astype(np.uint8))
