"""The compiled loops of the rejection rule (host rows): for each sequence, how much of its draft is kept and which token follows.

The probabilities are those that `draw` draws from, cut and scaled in the same way. Tested against `filters.probabilities`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from dspark.kernels.cpu.simd import bits_float
from dspark.runtime.sampling.draw import _CHUNK, _GAMMA, _MIX_1, _MIX_2, _cut, _uniforms, _weights

LEAST_MASS = 1e-8
"""A residual with less mass is what rounding leaves of two equal distributions: the draw is from the target's then."""


@dataclass
class DraftRows:
    """Drafts of S sequences beside their rows of logits: those of sequence s are first[s] .. first[s] + length[s].

    first, length int64 [S]. tokens int64 [all draft tokens], sequence after sequence; start int64 [S]: where a sequence's begin.
    drawn_from float32 [n, V]: probabilities that tokens were drawn from, the first of sequence s in row source[s] int64 [S]; -1 for a
    draft that is certain of its tokens. is_random bool [S]; temperature float32, top_k int64, top_p and min_p float64 [S].
    acceptance, replacement uint64 [rows]: keys of each row's two streams.
    """

    first: np.ndarray
    length: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    drawn_from: np.ndarray
    source: np.ndarray
    is_random: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    acceptance: np.ndarray
    replacement: np.ndarray


@njit(cache=True, nogil=True, error_model="numpy")
def _probabilities(logits, top, temperature, top_k, top_p, min_p, weights, out):
    """float64 probabilities of a float32 row with the largest logit `top`, dropped tokens at 0. weights: scratch float32 [V]."""
    _weights(logits, top, np.float32(1.0) / temperature, weights)
    least = np.float32(min_p)
    floor = max(least, bits_float(np.uint32(1)))
    extra = np.empty(0, np.int64)
    if 0 < top_k < weights.shape[0] or top_p < 1.0:
        bits, extra = _cut(weights, top_k, top_p)
        floor = max(floor, bits_float(np.uint32(bits)))
    for i in range(out.shape[0]):
        out[i] = np.float64(weights[i]) if weights[i] >= floor else 0.0
    for token in extra:
        if weights[token] >= least:
            out[token] = np.float64(weights[token])
    total = 0.0
    for i in range(out.shape[0]):
        total += out[i]
    for i in range(out.shape[0]):
        out[i] /= total


@njit(cache=True, nogil=True, error_model="numpy")
def _uniform(key):
    """One number in (0, 1) of a key, 53 bits."""
    z = key + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    return (np.float64(z >> np.uint64(11)) + 0.5) * 2.0**-53


@njit(cache=True, nogil=True, error_model="numpy")
def _race(weights, key):
    """A token drawn by weights float64 [V], which need not sum to 1: the smallest E / weight (see `draw`)."""
    best, best_race = -1, np.inf
    uniforms = np.empty(min(_CHUNK, weights.shape[0]), np.float32)
    for start in range(0, weights.shape[0], _CHUNK):
        chunk = weights[start : start + _CHUNK]
        u = uniforms[: chunk.shape[0]]
        _uniforms(key, start, u)
        for i in range(chunk.shape[0]):
            if chunk[i] > 0.0 and u[i] < chunk[i] * best_race:  # E >= u
                race = -np.log1p(-np.float64(u[i])) / chunk[i]
                if race < best_race:
                    best_race, best = race, start + i
    return best


@njit(cache=True, nogil=True, error_model="numpy")
def _residual(probs, token, drawn_from, source):
    """max(0, p - q) in place of p, and its sum. source -1: q is 1 at the token."""
    total = 0.0
    if source < 0:
        probs[token] = 0.0
        for i in range(probs.shape[0]):
            total += probs[i]
    else:
        q = drawn_from[source]
        for i in range(probs.shape[0]):
            probs[i] = max(probs[i] - np.float64(q[i]), 0.0)
            total += probs[i]
    return total


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _reject(
    logits, best, first, length, tokens, start, drawn_from, source, is_random,
    temperature, top_k, top_p, min_p, acceptance, replacement,
):  # fmt: skip
    num_sequences, vocab_size = first.shape[0], logits.shape[1]
    accepted, follows = np.empty(num_sequences, np.int64), np.empty(num_sequences, np.int64)
    for s in prange(num_sequences):
        probs, weights = np.empty(vocab_size, np.float64), np.empty(vocab_size, np.float32)
        kept, follow = 0, -1
        while follow < 0:
            row = first[s] + kept
            top = logits[row, best[row]]
            if not is_random[s]:
                if kept < length[s] and tokens[start[s] + kept] == best[row]:
                    kept += 1
                else:
                    follow = best[row]
                continue
            _probabilities(logits[row], top, temperature[s], top_k[s], top_p[s], min_p[s], weights, probs)
            if kept < length[s]:
                token = tokens[start[s] + kept]
                at = source[s] + kept if source[s] >= 0 else -1
                q = np.float64(drawn_from[at, token]) if at >= 0 else 1.0
                if _uniform(acceptance[row]) * q < probs[token]:
                    kept += 1
                    continue
                if _residual(probs, token, drawn_from, at) <= LEAST_MASS:
                    _probabilities(logits[row], top, temperature[s], top_k[s], top_p[s], min_p[s], weights, probs)
            follow = _race(probs, replacement[row])
        accepted[s], follows[s] = kept, follow
    return accepted, follows


def reject_rows(logits: np.ndarray, best: np.ndarray, drafts: DraftRows) -> tuple[np.ndarray, np.ndarray]:
    """The rejection rule (Leviathan et al. 2023, Chen et al. 2023) on rows float32 [rows, V] as the requests' options left them.

    best int64 [rows]: `argmax_rows`, none of them -1. Returns int64 [S] each: how many draft tokens are kept, and the token after them.
    A token x of a random row is kept when u < p(x) / q(x); the first that is not is replaced by a draw from max(0, p - q); when all are
    kept, the token after them is drawn from p. Greedy rows keep what is the best token.
    """
    d = drafts
    return _reject(
        logits, best, d.first, d.length, d.tokens, d.start, d.drawn_from, d.source, d.is_random,
        d.temperature, d.top_k, d.top_p, d.min_p, d.acceptance, d.replacement,
    )  # fmt: skip
