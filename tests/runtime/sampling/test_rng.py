"""Position-keyed random numbers, against SplitMix64 in plain Python integers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
import xxhash

from dspark.runtime.sampling import draw
from dspark.runtime.sampling.rng import U_MAX, exponential_noise, row_key

WORD = 2**64
KEYS = [0, 1, 1234567, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]


def splitmix64(seed: int, count: int) -> list[int]:
    """The generator as published: state += golden gamma, then the finalizer."""
    outputs, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
        outputs.append(z ^ (z >> 31))
    return outputs


def uniforms(key: int, count: int) -> np.ndarray:
    upper = np.array([z >> 32 for z in splitmix64(key, count)], np.float64)
    return np.minimum(((upper + 0.5) * 2.0**-32).astype(np.float32), np.float32(U_MAX))


def compiled_uniforms(key: int, start: int, count: int) -> np.ndarray:
    out = np.empty(count, np.float32)
    draw._uniforms(np.uint64(key), start, out)
    return out


def test_plain_python_form_gives_the_published_numbers() -> None:
    """The first outputs for seed 1234567, as every implementation of SplitMix64 lists them."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("key", KEYS)
def test_torch_compiled_and_plain_forms_agree_bit_for_bit(key: int) -> None:
    """A draft on the GPU must meet the very noise that the host draws with."""
    expected = uniforms(key, 5000)
    compiled = compiled_uniforms(key, 0, 5000)
    assert (compiled.view(np.int32) == expected.view(np.int32)).all()
    from_torch = exponential_noise([key], 5000)[0]
    assert torch.equal(from_torch, -torch.log1p(-torch.from_numpy(expected)))


@pytest.mark.parametrize("start", [0, 1, 1023, 1024, 4999])
def test_a_token_has_its_number_wherever_the_loop_starts(start: int) -> None:
    assert (compiled_uniforms(99, start, 7) == uniforms(99, start + 7)[start:]).all()


def test_noise_is_finite_and_positive_at_the_ends_of_the_range() -> None:
    """u = 0 would win every race and u = 1 has no logarithm: the ends must not be reached, in float32 either."""
    lowest, highest = np.float32(0.5 * 2.0**-32), np.float32(min(np.float32((2**32 - 0.5) * 2.0**-32), np.float32(U_MAX)))
    assert lowest > 0 and highest < 1
    noise = -torch.log1p(-torch.tensor([lowest, highest]))
    assert (noise > 0).all() and torch.isfinite(noise).all()


def test_noise_follows_the_exponential_law() -> None:
    """Mean 1, variance 1, and the share of values below the quartiles."""
    noise = exponential_noise([row_key(7, 0, position) for position in range(40)], 5000).double().flatten()
    assert abs(noise.mean().item() - 1) < 5 / math.sqrt(noise.numel())
    assert abs(noise.var().item() - 1) < 15 / math.sqrt(noise.numel())
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        below = (noise < -math.log1p(-share)).double().mean().item()
        assert abs(below - share) < 5 * math.sqrt(share * (1 - share) / noise.numel())


def test_row_keys_are_the_hash_of_all_four_words() -> None:
    """Known layout: little-endian low and high half of the draw key, sample index, position."""
    key = (5 << 64) + 3
    assert row_key(key, 2, 9) == xxhash.xxh3_64_intdigest(struct.pack("<QQQQ", 3, 5, 2, 9))


def test_row_keys_differ_by_request_sample_and_position() -> None:
    """Equal keys would give two answers of one request (n > 1), or two positions, the same luck."""
    draw_keys = [0, 1, 2**64, 2**128 - 1]
    keys = {row_key(draw_key, index, position) for draw_key in draw_keys for index in range(16) for position in range(64)}
    assert len(keys) == len(draw_keys) * 16 * 64
