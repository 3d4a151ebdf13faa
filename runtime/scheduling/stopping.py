"""When an answer ends."""

from __future__ import annotations

from typing import Protocol

from dspark.runtime.scheduling.sequence import Sequence


class Stopper(Protocol):
    """Watches the text of an answer for stop strings."""

    def append(self, token_id: int) -> str | None:
        """Take one token; the stop string that now ends the answer, or None."""


def check_stop(seq: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> None:
    """Set finish_reason (and stop_reason) when the token just appended ends the answer.

    In order: end of text (unless ignored), stop token ids, stop strings, max_tokens, context length. Before min_tokens the first two
    cannot be drawn (the sampler masks them); stop strings count from min_tokens on.
    """
    params = seq.request.params
    token = seq.token_ids[-1]
    num_tokens = len(seq.token_ids)  # without those that steps in flight are still to draw
    num_output = num_tokens - seq.prompt_len
    enough = num_output >= params.min_tokens
    matched = seq.stopper.append(token) if seq.stopper is not None else None  # type: ignore[attr-defined]
    if enough and token in eos_token_ids and not params.ignore_eos:
        seq.finish_reason = "stop"
    elif enough and token in params.stop_token_ids:
        seq.finish_reason, seq.stop_reason = "stop", token
    elif enough and matched is not None:
        seq.finish_reason, seq.stop_reason = "stop", matched
    elif (params.max_tokens is not None and num_output >= params.max_tokens) or num_tokens >= max_model_len:
        seq.finish_reason = "length"
