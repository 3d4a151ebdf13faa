"""Options that change a row's logits before temperature: each a pure function on one row, applied only when it is active."""

from __future__ import annotations

import numpy as np

from dspark.runtime.spec.sampling_params import SamplingParams


def repetition_penalty(logits: np.ndarray, seen: np.ndarray, penalty: float) -> None:
    """Divide the positive and multiply the negative logits of the seen ids (prompt and answer), in place (Keskar et al. 2019, CTRL)."""
    values = logits[seen]
    factor = usable_penalty(penalty)
    logits[seen] = np.where(values > 0, values / factor, values * factor)


def usable_penalty(penalty: float) -> np.float32:
    """A repetition penalty as float32. Beyond these bounds logits become infinite and the row has no distribution."""
    return np.float32(min(max(penalty, 1e-30), 1e30))


def occurrence_penalties(logits: np.ndarray, generated: np.ndarray, presence: float, frequency: float) -> None:
    """Subtract presence once and frequency per occurrence from tokens already generated, in place (the OpenAI meaning)."""
    tokens, counts = np.unique(generated, return_counts=True)
    logits[tokens] -= np.float32(presence) + counts.astype(np.float32) * np.float32(frequency)


def add_bias(logits: np.ndarray, bias: tuple[tuple[int, float], ...]) -> None:
    """Add each token's bias, in place."""
    for token, value in bias:
        logits[token] += np.float32(value)


def forbid(logits: np.ndarray, token_ids: list[int]) -> None:
    """Make tokens impossible, in place."""
    logits[token_ids] = -np.inf


def forbidden_ids(params: SamplingParams, num_output: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens that end an answer, where min_tokens does not let it end yet."""
    if num_output >= params.min_tokens:
        return []
    return sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids)))


def changes_logits(params: SamplingParams, num_output: int) -> bool:
    """Whether any function of this file acts on a request's next row."""
    return (
        params.repetition_penalty != 1.0
        or ((params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and num_output > 0)
        or bool(params.logit_bias)
        or num_output < params.min_tokens
    )


def process_row(logits: np.ndarray, params: SamplingParams, token_ids: list[int], prompt_len: int, eos_token_ids: frozenset[int]) -> None:
    """Apply a request's options to its float32 row [V], in place, in the order: repetition, presence and frequency, bias, min_tokens.

    token_ids: prompt and answer up to the row's position.
    """
    num_output = len(token_ids) - prompt_len
    if params.repetition_penalty != 1.0:
        repetition_penalty(logits, np.unique(np.asarray(token_ids)), params.repetition_penalty)
    if num_output and (params.presence_penalty or params.frequency_penalty):
        occurrence_penalties(logits, np.asarray(token_ids[prompt_len:]), params.presence_penalty, params.frequency_penalty)
    if params.logit_bias:
        add_bias(logits, params.logit_bias)
    forbid(logits, forbidden_ids(params, num_output, eos_token_ids))
