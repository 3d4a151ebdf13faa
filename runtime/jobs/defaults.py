"""The sampling defaults in force: flag or configuration file, else the engine's generation_config.json, else greedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.runtime.spec.errors import InputError, RequestError
from dspark.runtime.spec.sampling_params import SamplingParams, parse_option

GENERATION_CONFIG = "generation_config.json"
ALWAYS = ("repetition_penalty",)
WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def engine_defaults(engine_dir: Path) -> dict[str, Any]:
    """Sampling values of the engine. Without `do_sample` it is greedy, whatever temperature the file names.

    Raises InputError when the file is damaged or holds a value that is not allowed.
    """
    path = engine_dir / GENERATION_CONFIG
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names = [*ALWAYS, *WHEN_SAMPLING] if data.get("do_sample") else list(ALWAYS)
        values = {name: parse_option(name, data[name]) for name in names if data.get(name) is not None}
        if data.get("do_sample"):
            values.setdefault("temperature", 1.0)
        return values
    except (ValueError, AttributeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", "convert the checkpoint again") from error
    except RequestError as error:
        raise InputError(f"'{path}': {error.message}", "correct the file") from error


def defaults_in_force(given: dict[str, Any], engine_dir: Path) -> SamplingParams:
    """What a line that says nothing gets. given: values of flags and configuration file."""
    return SamplingParams(**{**engine_defaults(engine_dir), **given})


def describe(defaults: SamplingParams) -> str:
    """The defaults in one line: what differs from plain greedy decoding, and always max_tokens."""
    plain = SamplingParams()
    words = ["greedy"] if defaults.is_greedy else []
    for name, value in vars(defaults).items():
        if name == "max_tokens" or value != getattr(plain, name):
            words.append(f"{name} {'to the context' if value is None else value}")
    return ", ".join(words)
