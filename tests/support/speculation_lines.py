"""Requests on which speculation could go wrong: every option, shared beginnings, repetitive prompts."""

from __future__ import annotations

import random
from typing import Any

from dspark.runtime.spec.request import Request, RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "n": 2},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 1.0},
    {"min_tokens": 9, "stop_token_ids": (5, 17, 80, 200)},
    {"stop_token_ids": (11, 12, 13, 14), "logit_bias": ((12, 3.0),)},
    {"ignore_eos": True, "max_tokens": 3},
)


def requests() -> list[Request]:
    """Prompts that share beginnings, each with other options; repetitive ones, so that text says something about what follows."""
    dice = random.Random(4)
    shared = [dice.randrange(3, 320) for _ in range(20)]
    made = []
    for i in range(16):
        own = [dice.randrange(3, 320) for _ in range(dice.randint(1, 6))] * 4
        params = SamplingParams(**{"max_tokens": 24, **OPTIONS[i % len(OPTIONS)]})
        made.append(Request(i, (shared if i % 3 else []) + own, params, draw_key=i))
    return made


def reasons(outputs: dict[int, RequestOutput]) -> list[list[str]]:
    return [[c.finish_reason for c in outputs[key].completions] for key in sorted(outputs)]
