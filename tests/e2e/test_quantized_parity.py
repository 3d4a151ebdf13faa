"""Engines of few bits against transformers on the same weights, dequantized to float32: the same greedy tokens, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run_requests, tiny_engine
from sample_model import needs_sample_model, prompt_ids, prompt_lines, sample_engine
from tiny_models import FAMILIES

from dspark.converters.audit import reference_model
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

TIE = 1e-4
"""Gap between the two largest logits under which float32 rounding decides."""


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int, eos: frozenset[int]) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt])
    ends = {"eos_token_id": sorted(eos), "pad_token_id": min(eos)}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **ends)[
        0, len(prompt) :
    ].tolist()


def check(engine: Path, prompts: list[list[int]], max_tokens: int) -> None:
    """Token for token; an answer may leave the reference's only where two logits tie."""
    manifest = load_manifest(engine)
    model, eos = reference_model(engine, manifest), frozenset(manifest.model.eos_token_ids)
    requests = [Request(i, prompt, SamplingParams(max_tokens=max_tokens)) for i, prompt in enumerate(prompts)]
    outputs = run_requests(engine, requests, record_gaps=True)
    ties = 0
    for i, prompt in enumerate(prompts):
        got, want = outputs[i].completions[0].token_ids, greedy(model, prompt, max_tokens, eos)
        gap = outputs[i].min_top2_gap
        assert got == want or (gap is not None and gap < TIE), (prompt, got, want, gap)
        ties += got != want
    assert ties <= len(prompts) // 8


@pytest.mark.parametrize(("family", "scheme"), [*((family, "w4a16") for family in FAMILIES), ("llama", "w8a16"), ("llama", "w4a16-asym")])
def test_tiny_engines_say_what_their_dequantized_weights_say(family: str, scheme: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (1, 7, 16, 33, 50, 5, 18, 29)]
    check(tiny_engine(tmp_path, family, scheme=scheme), prompts, 12)


@pytest.mark.slow
@needs_sample_model
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_the_sample_model_says_what_its_dequantized_weights_say(scheme: str) -> None:
    check(sample_engine("float32", scheme), [prompt_ids(line) for line in prompt_lines(8, 24)], 24)
