"""Prompts of a job and the target's own answers to them, apart in lines to learn from and lines to measure on.

A drafter is trained on what its target writes: other people's answers to the same prompts teach it worse (arXiv 2607.05147, section 4).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from dspark.converters.calibration.samples import job_line
from dspark.converters.distill.options import DistillOptions
from dspark.converters.readers.base import summarize
from dspark.runtime.engine import Engine
from dspark.runtime.jobs.lines import is_blank
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError, RequestError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

MIN_ANSWER_TOKENS = 2
"""A block needs an anchor in the answer and a token behind it."""
MIN_LINES = 2
_WAVE = 32
"""Prompts that are answered together when time is short: whole waves, so that short answers are not preferred."""


@dataclass(frozen=True)
class AnsweredLine:
    """request: as the engine was asked. tokens: prompt and answer."""

    request: Request
    tokens: list[int]

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass(frozen=True)
class DistillData:
    """training, held_out: in an order that only contents decide. prompts_digest: hex xxh3_128 of all prompts that were asked."""

    training: list[AnsweredLine]
    held_out: list[AnsweredLine]
    prompts_digest: str
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[AnsweredLine]:
        """All of them, the held-out ones last."""
        return [*self.training, *self.held_out]

    @property
    def digest(self) -> str:
        """Hex xxh3_128 of all lines and of which are held out."""
        parts = [b"%d\0" % len(self.training), *(_key(line.tokens).to_bytes(16, "little") for line in self.lines)]
        return xxhash.xxh3_128_hexdigest(b"".join(parts))


def read_prompts(path: Path, codec: TextCodec, config: ModelConfig, options: DistillOptions, notes: list[str]) -> list[Request]:
    """The lines of a batch file as requests for one answer each, in an order and choice that only contents decide. An answer that a line
    has already is left out: the target gives its own.

    Raises InputError when the file cannot be read or has fewer than MIN_LINES usable lines.
    """
    limit = min(options.sample_tokens, config.context_length)
    defaults = SamplingParams(max_tokens=None, temperature=options.temperature)
    builder = PromptBuilder(codec, defaults, limit, config.vocab_size, options.seed)
    found: dict[int, Request] = {}
    refused: list[str] = []
    for number, raw in _lines(path):
        try:
            line, _ = job_line(raw, number)
            if line.messages is not None and line.messages[-1].get("role") == "assistant":
                line = replace(line, messages=line.messages[:-1], add_generation_prompt=True)
            request = builder.build(line, 0)
        except RequestError as error:
            refused.append(f"line {number} ({error.message})")
            continue
        params = replace(request.params, n=1)
        found.setdefault(_key(request.prompt_token_ids), replace(request, params=params))
    if refused:
        notes.append(f"distill: {len(refused)} lines cannot be used: {summarize(refused, 3)}")
    chosen = [found[key] for key in sorted(found)][: options.max_prompts]
    if len(chosen) < MIN_LINES:
        message = f"prompts file '{path}' has {len(chosen)} usable prompts, needed: at least {MIN_LINES}"
        raise InputError(message + (f"; {summarize(refused, 3)}" if refused else ""), "give it more lines in the batch format")
    return [replace(request, request_id=index) for index, request in enumerate(chosen)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not is_blank(raw, number):
                    yield number, raw.rstrip(b"\r\n")
    except OSError as error:
        raise InputError(f"prompts file '{path}' cannot be read ({error.strerror})", "check the path") from error


def answer(
    engine_dir: Path, requests: Sequence[Request], codec: TextCodec, device: str, deadline_s: float | None, threads: int | None = None
) -> list[AnsweredLine]:
    """The target's answers, by the serving engine. deadline_s: on the monotonic clock; prompts of later waves then go unanswered, those of
    the first are answered in any case."""
    engine = Engine.from_directory(engine_dir, EngineConfig(device=device, threads=threads), codec)
    lines: list[AnsweredLine] = []
    wave = len(requests) if deadline_s is None else _WAVE
    try:
        for start in range(0, len(requests), wave):
            if start and deadline_s is not None and time.monotonic() > deadline_s:
                break
            asked = {request.request_id: request for request in requests[start : start + wave]}
            for request in asked.values():
                engine.add(request)
            for output in engine.drain():
                request = asked[output.request_id]
                lines.append(AnsweredLine(request, [*request.prompt_token_ids, *output.completions[0].token_ids]))
    finally:
        engine.close()
    return sorted(lines, key=lambda line: line.request.request_id)


def split(lines: Sequence[AnsweredLine], prompts_digest: str, options: DistillOptions, notes: list[str]) -> DistillData:
    """Apart by the prompt's hash, so that a line is on the same side in every file that has it. Raises InputError for too few answers."""
    usable = [line for line in lines if len(line.tokens) - line.prompt_len >= MIN_ANSWER_TOKENS]
    if short := len(lines) - len(usable):
        notes.append(f"distill: {short} answers are shorter than {MIN_ANSWER_TOKENS} tokens and are left out")
    if len(usable) < MIN_LINES:
        raise InputError(f"{len(usable)} answers can be learned from, needed: at least {MIN_LINES}", "give it more prompts")
    ranked = sorted(usable, key=_side)
    count = sum(_side(line) < options.held_out_share * 2**128 for line in ranked)
    count = min(max(count, 1), len(ranked) - 1)
    return DistillData(ranked[count:], ranked[: min(count, options.max_held_out)], prompts_digest, tuple(notes))


def extra_requests(lines: Sequence[AnsweredLine], options: DistillOptions, num_prompts: int) -> list[Request]:
    """Requests for the answers after the first of each line, drawn. num_prompts: of the job, whose numbers are taken."""
    made = []
    for turn in range(1, options.answers):
        for line in lines:
            request = line.request
            params = replace(request.params, temperature=options.extra_temperature)
            number = turn * num_prompts + request.request_id
            made.append(replace(request, request_id=number, draw_key=request.draw_key ^ turn << 96, params=params))
    return made


def prompt_digest(tokens: Sequence[int]) -> str:
    """16 hex digits by which a prompt is known again."""
    return f"{_key(tokens):032x}"[:16]


def prompts_digest(requests: Sequence[Request]) -> str:
    """Hex xxh3_128 of the prompts in their order."""
    return xxhash.xxh3_128_hexdigest(b"".join(_key(request.prompt_token_ids).to_bytes(16, "little") for request in requests))


def save_answers(path: Path, plan: dict[str, Any], lines: Sequence[AnsweredLine]) -> None:
    """Keep the answers, by the number of their request, for a resumed run. plan: what they were made from."""
    draft = path.with_suffix(".part")
    answers = {str(line.request.request_id): line.tokens[line.prompt_len :] for line in lines}
    draft.write_text(json.dumps({"plan": plan, "answers": answers}), encoding="utf-8")
    draft.rename(path)


def load_answers(path: Path, plan: dict[str, Any], requests: Sequence[Request]) -> list[AnsweredLine] | None:
    """The kept answers, None when there are none for this plan."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["plan"] != json.loads(json.dumps(plan)):
        return None
    answers: dict[str, list[int]] = kept["answers"]
    lines = [AnsweredLine(r, [*r.prompt_token_ids, *answers[str(r.request_id)]]) for r in requests if str(r.request_id) in answers]
    return sorted(lines, key=lambda line: line.request.request_id)


def _side(line: AnsweredLine) -> int:
    """Another hash than the one by which prompts are chosen: the first of those would all be held out."""
    return xxhash.xxh3_128_intdigest(b"held out" + _key(line.request.prompt_token_ids).to_bytes(16, "little"))


def _key(tokens: Sequence[int]) -> int:
    return xxhash.xxh3_128_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens))
