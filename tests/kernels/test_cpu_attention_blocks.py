"""The inner loops of attention on CPU, each against NumPy."""

import numpy as np
import pytest
from numba import njit

from dspark.kernels.cpu.attention_blocks import add_values, scores_16_keys, softmax
from dspark.kernels.cpu.llvm import address

BLOCK, HEAD = 16, 80
"""80: several of the widest pieces and some that are left over."""


@njit
def _softmax(scores, offset, length, begin, end):
    softmax(scores, offset, length, begin, end)


@njit
def _scores(num_rows, q, keys, out):
    scores_16_keys(num_rows, q, 0, HEAD, keys, 0, BLOCK, HEAD, out, 0, BLOCK, address(keys), address(keys))


@njit
def _values(num_rows, probs, values, num_keys, out):
    add_values(num_rows, probs, 0, BLOCK, values, 0, HEAD, num_keys, HEAD, out, 0, HEAD, address(values))


def drawn(cache_dtype: type, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored numbers and what they stand for."""
    rng = np.random.default_rng(1)
    if cache_dtype is np.int8:
        codes = rng.integers(-127, 128, size).astype(np.int8)
        return codes, codes.astype(np.float32)
    numbers = rng.standard_normal(size).astype(np.float32)
    if cache_dtype is np.uint16:
        codes = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return codes, (codes.astype(np.uint32) << 16).view(np.float32)
    return numbers, numbers


@pytest.mark.parametrize(
    "begin, end, length", [(0, 1, 1), (0, 16, 16), (0, 17, 17), (3, 4, 20), (5, 150, 150), (16, 33, 160), (47, 48, 64)]
)
def test_softmax_is_numpys_and_zeroes_the_rest(begin: int, end: int, length: int) -> None:
    scores = np.random.default_rng(0).standard_normal(200).astype(np.float32) * 20
    wanted = np.zeros(length)
    seen = scores[7 + begin : 7 + end].astype(np.float64)
    wanted[begin:end] = np.exp(seen - seen.max()) / np.exp(seen - seen.max()).sum()
    before = scores.copy()
    _softmax(scores, 7, length, begin, end)
    np.testing.assert_allclose(scores[7 : 7 + length], wanted, rtol=2e-6, atol=1e-30)
    assert (scores[7 : 7 + begin] == 0).all() and (scores[7 + end : 7 + length] == 0).all()
    filled = -(-length // 16) * 16
    assert (scores[:7] == before[:7]).all() and (scores[7 + filled :] == before[7 + filled :]).all()


def test_softmax_does_not_depend_on_what_else_a_row_holds() -> None:
    """The same keys in a longer row, behind whole vectors that are not seen, or beside garbage: the same bits."""
    seen = np.random.default_rng(2).standard_normal(45).astype(np.float32) * 5
    rows = []
    for before, length, rubbish in ((0, 45, 0.0), (0, 160, np.nan), (32, 96, 1e30), (64, 200, np.inf)):
        row = np.full(224, rubbish, np.float32)
        row[before + 3 : before + 48] = seen
        _softmax(row, 0, max(length, before + 48), before + 3, before + 48)
        rows.append(row[before + 3 : before + 48])
    assert all((row == rows[0]).all() for row in rows)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 40])
def test_softmax_of_what_is_no_number_is_none(spoilt: float, place: int) -> None:
    """A broken weight must show in the result, not vanish in it."""
    row = np.zeros(48, np.float32)
    row[place] = spoilt
    _softmax(row, 0, 48, 0, 41)
    assert np.isnan(row[:41]).all()


def test_softmax_of_far_apart_scores_keeps_zeros_and_one() -> None:
    row = np.array([0.0, -86.0, -88.0, -1e30, -np.inf] + [0.0] * 11, np.float32)
    _softmax(row, 0, 5, 0, 5)
    assert row[0] == 1 and 0 < row[1] < 1e-37 and (row[2:5] == 0).all()


@pytest.mark.parametrize("cache_dtype", [np.float32, np.uint16, np.int8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_scores_and_values_are_plain_products(cache_dtype: type, num_rows: int) -> None:
    rng = np.random.default_rng(3)
    stored, numbers = drawn(cache_dtype, BLOCK * HEAD)
    q = rng.standard_normal(num_rows * HEAD).astype(np.float32)
    out = np.full(num_rows * BLOCK, np.nan, np.float32)
    _scores(num_rows, q, stored, out)
    wanted = q.reshape(num_rows, HEAD).astype(np.float64) @ numbers.reshape(HEAD, BLOCK)
    np.testing.assert_allclose(out.reshape(num_rows, BLOCK), wanted, rtol=1e-5, atol=1e-5 * np.abs(numbers).max())
    probs = rng.random(num_rows * BLOCK).astype(np.float32)
    for num_keys in (1, 15, 16):
        sums = np.ones(num_rows * HEAD, np.float32)
        _values(num_rows, probs, stored, num_keys, sums)
        wanted = 1 + probs.reshape(num_rows, BLOCK)[:, :num_keys].astype(np.float64) @ numbers.reshape(BLOCK, HEAD)[:num_keys]
        np.testing.assert_allclose(sums.reshape(num_rows, HEAD), wanted, rtol=1e-5, atol=1e-5 * np.abs(numbers).max())
