"""The model's own greedy answers to its calibration prompts: what it will really compute on, by the serving engine itself."""

from __future__ import annotations

from pathlib import Path

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def greedy_answers(engine_dir: Path, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """Each prompt (shorter than limit tokens) with its answer, up to the end of text or limit tokens together."""
    engine = Engine.from_directory(engine_dir, EngineConfig(), load_codec(engine_dir))
    try:
        for index, prompt in enumerate(prompts):
            engine.add(Request(index, prompt, SamplingParams(max_tokens=limit - len(prompt))))
        answers = {output.request_id: output.completions[0].token_ids for output in engine.drain()}
    finally:
        engine.close()
    return [prompt + answers[index] for index, prompt in enumerate(prompts)]
