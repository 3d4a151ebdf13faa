"""The compiled inner loops of the sampler (host rows). Each is tested against `filters.probabilities` and `rng.exponential_noise`.

What makes them vectorise: slices with loops from 0, maxima and counts over the integers that float32 bit patterns are, sums in float64
that may be reordered by the compiler (but not by anything at run time: a row's result depends on that row alone).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from dspark.kernels.cpu.simd import bits_float, exp_approx, float_bits, widen
from dspark.runtime.sampling.rng import GAMMA, MIX_1, MIX_2, U_MAX

if TYPE_CHECKING:
    from dspark.runtime.sampling.sampler import DrawOptions

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_U_MAX = np.float32(U_MAX)
_CHUNK = 1024
_INFINITY_BITS = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ONE_BITS = np.int32(0x3F800000)
_ENOUGH = 128  # tokens around a cut that are sorted rather than told apart by one more pass


@njit
def _top(values):
    """The largest of a float32 slice (-inf of none), and whether it holds a NaN."""
    best = np.int32(-0x7F800001)
    largest = np.int32(0)
    for i in range(values.shape[0]):
        bits = np.int32(float_bits(values[i]))
        magnitude = bits & _MAGNITUDE
        largest = max(largest, magnitude)
        best = max(best, bits ^ ((bits >> np.int32(31)) & _MAGNITUDE))  # ordered as the floats are
    return bits_float(np.uint32(best ^ ((best >> np.int32(31)) & _MAGNITUDE))), largest > _INFINITY_BITS


@njit
def _top_bf16(values):
    """The same of bfloat16 numbers, seen as uint16."""
    best = np.int16(-0x7F81)
    largest = np.int16(0)
    for i in range(values.shape[0]):
        bits = np.int16(values[i])
        magnitude = np.int16(bits & np.int16(0x7FFF))
        largest = max(largest, magnitude)
        best = max(best, np.int16(bits ^ np.int16(np.int16(bits >> np.int16(15)) & np.int16(0x7FFF))))
    back = np.uint16(best ^ np.int16(np.int16(best >> np.int16(15)) & np.int16(0x7FFF)))
    return bits_float(np.uint32(back) << np.uint32(16)), largest > np.int16(0x7F80)


def top_of(values):
    """`_top` of what a slice holds. Compiled code only."""
    raise NotImplementedError


@overload(top_of)
def _top_of(values):
    if values.dtype == types.uint16:
        return lambda values: _top_bf16(values)
    return lambda values: _top(values)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def argmax_rows(logits):
    """float32 (or bfloat16 as uint16) [rows, V] -> int64 [rows]: the largest, the lowest id among equals; -1 where it is not finite or a
    NaN is in the row."""
    num_rows, vocab_size = logits.shape
    tokens = np.empty(num_rows, np.int64)
    for row in prange(num_rows):
        values = logits[row]
        top, top_start, is_bad = np.float32(-np.inf), 0, False
        for start in range(0, vocab_size, _CHUNK):
            chunk_top, has_nan = top_of(values[start : start + _CHUNK])
            is_bad |= has_nan
            if chunk_top > top:
                top, top_start = chunk_top, start
        tokens[row] = -1
        if not is_bad and np.isfinite(top):
            chunk = values[top_start : top_start + _CHUNK]
            for i in range(chunk.shape[0]):
                if widen(chunk[i]) == top:
                    tokens[row] = top_start + i
                    break
    return tokens


@njit(cache=True, nogil=True, error_model="numpy")
def top2_gaps(logits, tokens):
    """Largest minus second largest logit of each row: float32 [rows]."""
    gaps = np.empty(logits.shape[0], np.float32)
    for row in range(logits.shape[0]):
        values, token = logits[row], tokens[row]
        gaps[row] = values[token] - max(_top(values[:token])[0], _top(values[token + 1 :])[0])
    return gaps


@njit
def _uniforms(key, start, out):
    """The numbers u in (0, 1) of the tokens from `start` on (see rng)."""
    base = key + np.uint64(start + 1) * _GAMMA
    for i in range(out.shape[0]):
        z = base + np.uint64(i) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z = z ^ (z >> np.uint64(31))
        out[i] = min(np.float32((np.float64(np.uint32(z >> np.uint64(32))) + 0.5) * 2.0**-32), _U_MAX)


@njit
def _weights(logits, top, inverse, out):
    """e ** ((logit - top) / temperature): probabilities but for their sum; the top token has exactly 1."""
    for i in range(out.shape[0]):
        out[i] = exp_approx((logits[i] - top) * inverse)


@njit
def _count_from(weights, bits):
    """How many weights have at least this bit pattern (the order of positive floats is that of their bits)."""
    count = np.int32(0)
    for i in range(weights.shape[0]):
        count += np.int32(np.int32(float_bits(weights[i])) >= bits)
    return np.int64(count)


@njit(fastmath={"reassoc"})
def _mass_from(weights, bits):
    """Sum of the weights that have at least this bit pattern."""
    least = bits_float(np.uint32(bits))
    total = 0.0
    for i in range(weights.shape[0]):
        total += np.float64(weights[i] if weights[i] >= least else np.float32(0.0))
    return total


@njit
def _between(weights, low, high, count):
    """The `count` token ids whose weights have bit patterns low .. high - 1, from likely to unlikely, equal ones by id."""
    ids = np.empty(count, np.int64)
    n = 0
    for start in range(0, weights.shape[0], _CHUNK):
        chunk = weights[start : start + _CHUNK]
        if _count_from(chunk, low) == 0:
            continue
        for i in range(chunk.shape[0]):
            bits = np.int32(float_bits(chunk[i]))
            if low <= bits < high:
                ids[n] = start + i
                n += 1
    if high - low == 1:
        return ids  # all equal
    return ids[np.argsort(-weights[ids], kind="mergesort")]


@njit
def _keep_mass(weights, ids, before, target):
    """How many of the ids are kept when a token is dropped once those before it have the target mass."""
    for j in range(ids.shape[0]):
        if before >= target:
            return j
        before += weights[ids[j]]
    return ids.shape[0]


@njit(cache=True, nogil=True, error_model="numpy")
def _cut(weights, top_k, top_p):
    """What top-k and then top-p keep: all weights from a bit pattern on, and these ids below it.

    The cut is bracketed between two bit patterns by bisection; only what lies between them is sorted.
    """
    least, extra = np.int32(1), np.empty(0, np.int64)
    if 0 < top_k < weights.shape[0]:
        low, high = np.int32(1), _ONE_BITS + np.int32(1)
        count_low, count_high = _count_from(weights, low), np.int64(0)
        if count_low > top_k:
            while high - low > 1 and count_low - count_high > _ENOUGH:
                middle = low + (high - low) // np.int32(2)
                count = _count_from(weights, middle)
                if count >= top_k:
                    low, count_low = middle, count
                else:
                    high, count_high = middle, count
            least, extra = high, _between(weights, low, high, count_low - count_high)[: top_k - count_high]
    if top_p < 1.0:
        mass = _mass_from(weights, least)
        total = mass
        for j in range(extra.shape[0]):
            total += weights[extra[j]]
        target = max(top_p * total, 1e-300)
        if mass < target:
            return least, extra[: _keep_mass(weights, extra, mass, target)]
        low, high = least, _ONE_BITS + np.int32(1)
        while high - low > 1:
            middle = low + (high - low) // np.int32(2)
            mass = _mass_from(weights, middle)
            if mass >= target:
                low = middle
            else:
                high = middle
            if high - low < 1 << 22 and _count_from(weights, low) - _count_from(weights, high) <= _ENOUGH:
                break
        extra = _between(weights, low, high, _count_from(weights, low) - _count_from(weights, high))
        least, extra = high, extra[: _keep_mass(weights, extra, _mass_from(weights, high), target)]
    return least, extra


@njit
def _num_candidates(uniforms, weights, floor, best_race):
    """How many tokens may win the race. E >= u, so a token with u >= weight * best cannot."""
    count = np.int32(0)
    for i in range(uniforms.shape[0]):
        count += np.int32((weights[i] >= floor) & (uniforms[i] < weights[i] * best_race))
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def _draw_row(logits, top, temperature, top_k, top_p, min_p, key):
    """One token of a float32 row [V] with the largest logit `top`."""
    vocab_size = logits.shape[0]
    weights = np.empty(vocab_size, np.float32)
    _weights(logits, top, np.float32(1.0) / temperature, weights)
    min_weight = np.float32(min_p)
    floor = max(min_weight, bits_float(np.uint32(1)))
    extra = np.empty(0, np.int64)
    if 0 < top_k < vocab_size or top_p < 1.0:
        least, extra = _cut(weights, top_k, top_p)
        floor = max(floor, bits_float(np.uint32(least)))
    best = -1
    best_race = np.float32(np.inf)
    uniforms = np.empty(_CHUNK, np.float32)
    for start in range(0, vocab_size, _CHUNK):
        chunk = weights[start : start + _CHUNK]
        u = uniforms[: chunk.shape[0]]
        _uniforms(key, start, u)
        if _num_candidates(u, chunk, floor, best_race) == 0:
            continue
        for i in range(chunk.shape[0]):
            if chunk[i] >= floor and u[i] < chunk[i] * best_race:
                race = -np.log1p(-u[i]) / chunk[i]
                if race < best_race:
                    best_race, best = race, start + i
    for token in extra:
        if weights[token] >= min_weight:
            _uniforms(key, token, uniforms[:1])
            race = -np.log1p(-uniforms[0]) / weights[token]
            if race < best_race or (race == best_race and token < best):
                best_race, best = race, int(token)
    return best


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _draw(logits, rows, tops, temperature, top_k, top_p, min_p, keys):
    tokens = np.empty(rows.shape[0], np.int64)
    for i in prange(rows.shape[0]):
        tokens[i] = _draw_row(logits[rows[i]], logits[rows[i], tops[i]], temperature[i], top_k[i], top_p[i], min_p[i], keys[i])
    return tokens


def draw_rows(logits: np.ndarray, best: np.ndarray, options: DrawOptions) -> np.ndarray:
    """A token for each random row: int64, in the order of options.rows. best: `argmax_rows` of all rows; none of them is -1 here."""
    return _draw(logits, options.rows, best[options.rows], options.temperature, options.top_k, options.top_p, options.min_p, options.keys)
