"""Bit layouts of quantized weights. The only file in the project that shifts bits of weights.

Canonical layout ("wna16"): codes [K, N] become int32 [ceil(K * bits / 32), N], a little-endian bit stream along K: code k occupies
stream bits k*bits .. k*bits+bits-1, and stream bit t is bit t % 32 of word t // 32. For 4 and 8 bits this is GPTQ's own `qweight`.
"""

import numpy as np
import torch


def packed_rows(in_features: int, bits: int) -> int:
    """Rows of the packed matrix for K inputs."""
    return -(-in_features * bits // 32)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [K, N], each below 2**bits -> int32 [ceil(K * bits / 32), N]."""
    values = np.ascontiguousarray(codes.numpy().astype(np.uint64))
    num_words = packed_rows(values.shape[0], bits)
    words = np.zeros((num_words + 1, values.shape[1]), np.uint64)
    lane_period = 32 // np.gcd(32, bits)  # codes after which the pattern of word offsets repeats
    for lane in range(lane_period):
        index = np.arange(lane, values.shape[0], lane_period)
        if index.size == 0:
            continue
        word, offset = index * bits // 32, np.uint64(lane * bits % 32)
        shifted = values[index] << offset
        words[word] |= shifted & np.uint64(0xFFFFFFFF)
        words[word + 1] |= shifted >> np.uint64(32)
    return torch.from_numpy(words[:num_words].astype(np.uint32).view(np.int32))


def unpack_codes(packed: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int32 [ceil(K * bits / 32), N] -> uint8 [K, N]."""
    words = packed.cpu().contiguous().numpy().view(np.uint32).astype(np.uint64)
    words = np.concatenate([words, np.zeros((1, words.shape[1]), np.uint64)])
    first_bit = np.arange(in_features) * bits
    word, offset = first_bit // 32, (first_bit % 32).astype(np.uint64)[:, None]
    pair = words[word] | (words[word + 1] << np.uint64(32))
    return torch.from_numpy(((pair >> offset) & np.uint64(2**bits - 1)).astype(np.uint8)).to(packed.device)
