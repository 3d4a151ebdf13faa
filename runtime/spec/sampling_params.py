"""What a request asks of the sampler. Field metadata is the one source of the flags, the JSONL keys and the docs table."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields
from typing import Any

from dspark.runtime.spec.errors import RequestError

SEED_MAX = 2**64 - 1


def option(default: Any, help: str, kind: str, low: float | None = None, high: float | None = None, low_open: bool = False) -> Any:
    """A sampling field. kind: int, float, bool, strings, ints, bias. low/high: inclusive bounds (low exclusive with low_open)."""
    return field(default=default, metadata={"help": help, "kind": kind, "low": low, "high": high, "low_open": low_open})


@dataclass(frozen=True)
class SamplingParams:
    """One request's decoding options. None for `max_tokens` means: up to the context length."""

    max_tokens: int | None = option(512, "most tokens to generate", "int", 1)
    min_tokens: int = option(0, "tokens to generate before an end of text or stop token may be chosen", "int", 0)
    temperature: float = option(0.0, "0 is greedy", "float", 0.0)
    top_k: int = option(0, "keep the k most likely tokens; 0 or -1 keeps all", "int", -1)
    top_p: float = option(1.0, "keep the smallest set of tokens with this probability together", "float", 0.0, 1.0, True)
    min_p: float = option(0.0, "drop tokens less likely than this fraction of the most likely one", "float", 0.0, 1.0)
    n: int = option(1, "number of answers", "int", 1, 128)
    seed: int | None = option(
        None, "the request's own random stream; without it the stream follows from the job seed and the line", "int", 0, SEED_MAX
    )
    stop: tuple[str, ...] = option((), "texts that end the answer (not part of it)", "strings")
    stop_token_ids: tuple[int, ...] = option((), "token ids that end the answer", "ints")
    include_stop_str_in_output: bool = option(False, "keep the stop text in the answer", "bool")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text", "bool")
    presence_penalty: float = option(0.0, "subtracted once from tokens already generated", "float", -2.0, 2.0)
    frequency_penalty: float = option(0.0, "subtracted per occurrence from tokens already generated", "float", -2.0, 2.0)
    repetition_penalty: float = option(
        1.0, "divides (multiplies, when negative) the logits of tokens of prompt and answer", "float", 0.0, None, True
    )
    logit_bias: tuple[tuple[int, float], ...] = option((), "token id to number added to its logit", "bias")
    ignore_eos: bool = option(False, "go on after an end-of-text token", "bool")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


FIELDS = {f.name: f for f in fields(SamplingParams)}


def parse_option(name: str, value: Any) -> Any:
    """A JSON or TOML value as the field's own type. Raises RequestError naming the field, the value and what is allowed."""
    meta = FIELDS[name].metadata
    return _PARSERS[meta["kind"]](name, value, meta)


def _fail(name: str, value: Any, allowed: str) -> RequestError:
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return RequestError(f"{name} is {shown}, allowed: {allowed}", "invalid_value", name)


def _bounds(meta: Any, what: str) -> str:
    low, high = meta["low"], meta["high"]
    parts = [what]
    if low is not None:
        parts.append(f"{'above' if meta['low_open'] else 'from'} {low:g}")
    if high is not None:
        parts.append(f"to {high:g}" if high < 1e15 else f"to {high}")
    return " ".join(parts)


def _number(name: str, value: Any, meta: Any, what: str) -> Any:
    low, high = meta["low"], meta["high"]
    if (
        not math.isfinite(value)
        or (low is not None and (value < low or (meta["low_open"] and value == low)))
        or (high is not None and value > high)
    ):
        raise _fail(name, value, _bounds(meta, what))
    return value


def _parse_int(name: str, value: Any, meta: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(name, value, _bounds(meta, "an integer"))
    return int(_number(name, value, meta, "an integer"))


def _parse_float(name: str, value: Any, meta: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _fail(name, value, _bounds(meta, "a number"))
    return float(_number(name, value, meta, "a number"))


def _parse_bool(name: str, value: Any, meta: Any) -> bool:
    if not isinstance(value, bool):
        raise _fail(name, value, "true or false")
    return value


def _parse_strings(name: str, value: Any, meta: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise _fail(name, value, "a text or a list of texts")
    if any(v == "" for v in values):
        raise _fail(name, value, "texts that are not empty")
    return tuple(values)


def _parse_ints(name: str, value: Any, meta: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
        raise _fail(name, value, "a list of token ids")
    return tuple(value)


def _parse_bias(name: str, value: Any, meta: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(value, (list, tuple)):  # already parsed
        value = {str(k): v for k, v in value}
    allowed = 'an object of token id to number from -100 to 100, such as {"11": -100}'
    if not isinstance(value, dict):
        raise _fail(name, value, allowed)
    pairs = []
    for key, bias in value.items():
        if not str(key).isdecimal() or isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise _fail(name, {key: bias}, allowed)
        pairs.append((int(key), float(bias)))
    return tuple(sorted(pairs))


_PARSERS = {
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "strings": _parse_strings,
    "ints": _parse_ints,
    "bias": _parse_bias,
}


def did_you_mean(name: str, known: list[str]) -> str:
    """A suffix such as " (did you mean 'top_p'?)", or the empty string."""
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean '{near[0]}'?)" if near else ""
