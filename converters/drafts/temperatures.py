"""Temperatures for a published head that brings none: what its confidence is divided by, fitted on a job's own lines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dspark.converters.distill.calibrate import errors_by_position, fit_temperatures
from dspark.converters.distill.data import MIN_ANSWER_TOKENS, AnsweredLine, answer
from dspark.converters.distill.features import collect
from dspark.converters.writer import sync
from dspark.runtime.execution.loader import load_model, resolve_device
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.replay import KnownAnswer, replay_stored
from dspark.runtime.speculation.heads.stored import DRAFT_NAME, load_stored

MOST_FEATURE_BYTES = 1 << 30
"""Lines are looked at until the target's states of their tokens take so much."""


def lacks_temperatures(draft_dir: Path) -> bool:
    """Whether a prepared draft is a head with a confidence of which nobody has said what it is worth."""
    if not (draft_dir / DRAFT_NAME).is_file():
        return False
    config = load_stored(draft_dir).config
    return config.confidence and not config.temperatures


def add_temperatures(
    engine_dir: Path, draft_dir: Path, requests: Sequence[Request], device: str = "auto", threads: int | None = None
) -> str | None:
    """Let the target answer the requests, run the stored head beside the answers, fit its temperatures and write them into draft.json.

    Returns what was found in words, None where no answer is long enough to learn from. Raises InputError as loading does.
    """
    manifest, codec, stored = load_manifest(engine_dir), load_codec(engine_dir), load_stored(draft_dir)
    asked = [replace(request, params=replace(request.params, n=1)) for request in requests]
    answered = answer(engine_dir, asked, codec, device, None, threads)
    lines = _fitting([line for line in answered if len(line.tokens) - line.prompt_len >= MIN_ANSWER_TOKENS], stored.config)
    if not lines:
        return None
    where = resolve_device(device)
    features, _ = collect(engine_dir, manifest, [line.tokens for line in lines], stored.config.taps, where, _allocate)
    target = load_model(engine_dir, device=where)
    dtype = target.kernels.facts.dtype
    answers = [
        KnownAnswer(line.request, line.tokens, features.tapped[features.rows(index)].to(where, dtype)) for index, line in enumerate(lines)
    ]
    rounds = replay_stored(draft_dir, target, answers)
    survival, accepted = [entry.survival for entry in rounds], [entry.accepted for entry in rounds]
    count = stored.config.drafts_per_block
    fitted = fit_temperatures(survival, accepted, count)
    _write(draft_dir, replace(stored.config, temperatures=fitted))
    before, after = (errors_by_position(survival, accepted, temperatures, count) for temperatures in ((), fitted))
    shown = " ".join(f"{temperature:.2f}" for temperature in fitted)
    errors = f"mean calibration error {sum(before) / count:.3f}, with them {sum(after) / count:.3f}"
    return f"temperatures of the confidence, fitted on {len(rounds)} rounds: {shown}; {errors}"


def _fitting(lines: list[AnsweredLine], config: DraftConfig) -> list[AnsweredLine]:
    """The first lines, as far as the memory for their states reaches."""
    left = MOST_FEATURE_BYTES // (2 * (len(config.taps) + 1) * config.target_hidden_size)
    found: list[AnsweredLine] = []
    for line in lines:
        left -= len(line.tokens)
        if found and left < 0:
            break
        found.append(line)
    return found


def _allocate(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


def _write(draft_dir: Path, config: DraftConfig) -> None:
    """Replace draft.json in one rename."""
    stored = replace(load_stored(draft_dir), config=config)
    temporary = draft_dir / f".{DRAFT_NAME}.part-{os.getpid()}"
    temporary.write_text(json.dumps(stored.to_json(), indent=1) + "\n", encoding="utf-8")
    sync(temporary)
    temporary.replace(draft_dir / DRAFT_NAME)
