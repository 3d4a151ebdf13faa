"""A mixture of experts in whole runs: which experts a step uses depends on the batch, a request's text does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import run_requests, texts, tiny_engine

from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def make_requests(count: int = 10) -> list[Request]:
    """Prompts of 1 to 37 tokens, greedy and drawn; a shared beginning among them."""
    g = torch.Generator().manual_seed(3)
    common = torch.randint(3, 320, (20,), generator=g).tolist()
    requests = []
    for i in range(count):
        own = torch.randint(3, 320, (1 + 4 * (i % 5),), generator=g).tolist()
        params = SamplingParams(max_tokens=20, temperature=[0.0, 0.9][i % 2], ignore_eos=True)
        requests.append(Request(i, common + own if i % 3 == 0 else own, params, draw_key=1000 + i))
    return requests


@pytest.fixture(
    scope="module",
    params=[
        ("mixtral", "float32", None),
        ("qwen2_moe", "float32", None),
        ("mixtral", "bfloat16", None),
        ("qwen2_moe-mixed", "bfloat16", None),
        ("qwen3_moe", "bfloat16", "w4a16"),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def engine_and_settings(request, tmp_path_factory) -> tuple[Path, dict]:
    family, dtype, scheme = request.param
    return tiny_engine(tmp_path_factory.mktemp("engine"), family, dtype, scheme), {"deterministic": dtype != "float32"}


def test_text_does_not_depend_on_the_batch(engine_and_settings) -> None:
    engine, settings = engine_and_settings
    alone = texts(run_requests(engine, make_requests(), max_num_seqs=1, **settings))
    assert texts(run_requests(engine, make_requests(), max_num_seqs=8, **settings)) == alone
    assert texts(run_requests(engine, make_requests()[::-1], max_num_seqs=8, max_num_batched_tokens=16, **settings)) == alone


def test_deterministic_logits_are_the_same_bits_in_chunks_of_any_size(engine_and_settings) -> None:
    """A token's experts compute it beside whichever other tokens took them: sums, shares and rounding must not notice."""
    engine, _ = engine_and_settings
    model = load_model(engine, deterministic=True)
    prompt = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(7)).tolist()
    whole = logits_for(model, prompt)
    for chunk in (1, 7, 33):
        assert torch.equal(logits_for(model, prompt, chunk), whole)
