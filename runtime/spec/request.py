"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.runtime.spec.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    request_id: unique within the engine. prompt_token_ids: never empty. draw_key: 128-bit integer that the request's random
    stream depends on, and nothing else (sample index and position are mixed in by the sampler).
    priority: lower is admitted first; ties are served in the order of `add`.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    draw_key: int = 0
    priority: int = 0


@dataclass
class Completion:
    """One answer. finish_reason: "stop" (end of text or a stop condition) or "length"."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A finished request, all its answers in index order.

    num_drafted, num_accepted: draft tokens that were verified for its answers, and those kept.
    num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache. The times are seconds on the monotonic clock.
    """

    request_id: int
    num_prompt_tokens: int
    completions: list[Completion]
    num_cached_tokens: int = 0
    added_at_s: float = 0.0
    first_token_at_s: float = 0.0
    finished_at_s: float = 0.0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    min_top2_gap: float | None = field(default=None)
