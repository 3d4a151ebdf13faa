"""The compiled inner loops of the sampler (host rows). Each is tested against `filters.probabilities` and `rng.exponential_noise`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit, prange

from dspark.runtime.sampling.rng import GAMMA, MIX_1, MIX_2, U_MAX

if TYPE_CHECKING:
    from dspark.runtime.sampling.sampler import DrawOptions

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_U_MAX = np.float32(U_MAX)
_CHUNK = 1024


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def argmax_rows(logits):
    """float32 [rows, V] -> int64 [rows]: the largest, the lowest id among equals. NaN never wins."""
    num_rows, vocab_size = logits.shape
    best = np.zeros(num_rows, np.int64)
    for row in prange(num_rows):
        values = logits[row]
        top = np.float32(-np.inf)
        for start in range(0, vocab_size, _CHUNK):
            stop = min(start + _CHUNK, vocab_size)
            chunk_top = np.float32(-np.inf)
            for v in range(start, stop):
                chunk_top = max(chunk_top, values[v])
            if chunk_top > top:
                top = chunk_top
                for v in range(start, stop):
                    if values[v] == top:
                        best[row] = v
                        break
    return best


@njit(cache=True, nogil=True, error_model="numpy")
def top2_gaps(logits, tokens):
    """Largest minus second largest logit of each row: float32 [rows]."""
    gaps = np.empty(logits.shape[0], np.float32)
    for row in range(logits.shape[0]):
        second = np.float32(-np.inf)
        for v in range(logits.shape[1]):
            if v != tokens[row]:
                second = max(second, logits[row, v])
        gaps[row] = logits[row, tokens[row]] - second
    return gaps


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _uniform(key, token):
    """The number u in (0, 1) of one token (see rng)."""
    z = key + np.uint64(token + 1) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    return min(np.float32((np.float64(z >> np.uint64(32)) + 0.5) * 2.0**-32), _U_MAX)


@njit(cache=True, nogil=True, error_model="numpy")
def _candidates(probs, top_k, top_p):
    """Token ids that top-k and top-p keep, from likely to unlikely, equal ones by id.

    Only tokens above a falling threshold are sorted: the threshold falls until enough of them are there.
    """
    vocab_size = probs.shape[0]
    wanted = top_k if 0 < top_k < vocab_size else vocab_size
    total = 0.0
    threshold = np.float32(0.0)
    for v in range(vocab_size):
        threshold = max(threshold, probs[v])
    while True:
        threshold = threshold / np.float32(16.0) if threshold > np.float32(1e-30) else np.float32(0.0)
        count = 0
        mass = 0.0
        for v in range(vocab_size):
            if probs[v] >= threshold:
                count += 1
                mass += probs[v]
        # with top-k the mass is relative to the k best, which is at most the mass of these
        if count >= wanted or (wanted == vocab_size and mass >= top_p * 1.0001) or threshold == 0.0:
            break
    ids = np.empty(count, np.int64)
    i = 0
    for v in range(vocab_size):
        if probs[v] >= threshold:
            ids[i] = v
            i += 1
    ids = ids[np.argsort(-probs[ids], kind="mergesort")]
    ids = ids[: min(count, wanted)]
    if top_p < 1.0:
        if wanted == vocab_size:
            for v in range(vocab_size):
                total += probs[v]
        else:
            for j in range(ids.shape[0]):
                total += probs[ids[j]]
        before = 0.0
        keep = 0
        for j in range(ids.shape[0]):
            if before >= top_p * total:
                break
            before += probs[ids[j]]
            keep += 1
        ids = ids[:keep]
    return ids


@njit(cache=True, nogil=True, error_model="numpy")
def _draw_row(logits, temperature, top_k, top_p, min_p, key):
    """One token of a float32 row [V]."""
    vocab_size = logits.shape[0]
    top = np.float32(-np.inf)
    for v in range(vocab_size):
        top = max(top, logits[v])
    inverse = np.float32(1.0) / temperature
    probs = np.empty(vocab_size, np.float32)
    total = 0.0
    for v in range(vocab_size):
        probs[v] = np.exp((logits[v] - top) * inverse)
    for v in range(vocab_size):
        total += probs[v]
    scale = np.float32(1.0 / total)
    for v in range(vocab_size):
        probs[v] *= scale
    floor = np.float32(min_p) * scale if min_p > 0.0 else np.float32(0.0)
    best = -1
    best_race = np.float32(np.inf)
    if (0 < top_k < vocab_size) or top_p < 1.0:
        ids = _candidates(probs, top_k, top_p)
        for j in range(ids.shape[0]):
            v = ids[j]
            p = probs[v]
            if p >= floor and p > 0.0:
                race = -np.log1p(-_uniform(key, v)) / p
                if race < best_race or (race == best_race and v < best):
                    best_race, best = race, v
        return best
    uniform = np.empty(_CHUNK, np.float32)
    for start in range(0, vocab_size, _CHUNK):
        stop = min(start + _CHUNK, vocab_size)
        for v in range(start, stop):
            uniform[v - start] = _uniform(key, v)
        for v in range(start, stop):
            p = probs[v]
            # E >= u, so a token with u >= p * best cannot win: the logarithm is taken for a few tokens only
            if p >= floor and p > 0.0 and (best < 0 or uniform[v - start] < p * best_race):
                race = -np.log1p(-uniform[v - start]) / p
                if race < best_race:
                    best_race, best = race, v
    return best


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _draw(logits, rows, temperature, top_k, top_p, min_p, keys):
    tokens = np.empty(rows.shape[0], np.int64)
    for i in prange(rows.shape[0]):
        tokens[i] = _draw_row(logits[rows[i]], temperature[i], top_k[i], top_p[i], min_p[i], keys[i])
    return tokens


def draw_rows(logits: np.ndarray, options: DrawOptions) -> np.ndarray:
    """A token for each random row: int64, in the order of options.rows."""
    return _draw(logits, options.rows, options.temperature, options.top_k, options.top_p, options.min_p, options.keys)
