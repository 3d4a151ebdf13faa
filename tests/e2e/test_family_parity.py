"""Every family, in float32, against transformers on tiny random checkpoints: converted, loaded, run through the paged cache."""

from pathlib import Path

import pytest
import torch
from engine_runs import run_requests, texts
from tiny_models import FAMILIES, make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from dspark.converters.pipeline import convert
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

LONG = 200


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def engine_and_reference(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint = make_tiny_checkpoint(directory / "checkpoint", request.param)
    convert(checkpoint, directory / "engine", audit=False)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return directory / "engine", reference


@torch.inference_mode()
def reference_logits(model, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("length", [1, 5, 16, 17, LONG])
def test_logits_equal_transformers(engine_and_reference, kernels: str, length: int) -> None:
    """Within 1e-4, short and long: a wrong rope scaling or window shows on long prompts only."""
    engine, reference = engine_and_reference
    prompt = random_prompt(length, length)
    ours = logits_for(load_model(engine, kernels=kernels), prompt)
    torch.testing.assert_close(ours, reference_logits(reference, prompt), rtol=1e-4, atol=1e-4)


def test_logits_do_not_depend_on_chunks(engine_and_reference) -> None:
    """Chunked prefill: keys of one chunk are read by the next ones from the pages."""
    engine, _ = engine_and_reference
    model = load_model(engine)
    prompt = random_prompt(90)
    whole = logits_for(model, prompt)
    for chunk in (1, 7, 16, 33):
        torch.testing.assert_close(logits_for(model, prompt, chunk), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_logits_stay_near_float32(engine_and_reference, dtype: str) -> None:
    """Every op of a family takes 16 bit rows (with norm factors in float32, for some), and none loses more than the rounding."""
    engine, reference = engine_and_reference
    prompt = random_prompt(40)
    want = reference_logits(reference, prompt)
    ours = logits_for(load_model(engine, dtype=dtype), prompt)
    error = (ours - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
    assert error < (0.06 if dtype == "bfloat16" else 0.01)


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(engine_and_reference) -> None:
    """Answers that grow past the sliding window (24) and past the first context of longrope (64, where all keys change), in one batch with
    two that stay below and one that begins beyond."""
    engine, reference = engine_and_reference
    prompts = {i: random_prompt(length, 100 + i) for i, length in enumerate((3, 21, 50, 64, 70))}
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Request(i, prompt, params) for i, prompt in prompts.items()]
    ours = texts(run_requests(engine, requests, max_num_seqs=8, max_num_batched_tokens=48))
    for i, prompt in prompts.items():
        ids = torch.tensor([prompt])
        rotary = reference.model.rotary_emb
        reference.model.rotary_emb = type(rotary)(config=reference.config)  # dynamic rope remembers the longest text it has seen
        theirs = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert ours[i] == [theirs[0, len(prompt) :].tolist()]


def test_family_is_read_from_a_path_with_spaces(engine_and_reference, tmp_path: Path) -> None:
    engine, _ = engine_and_reference
    moved = tmp_path / "an engine"
    moved.symlink_to(engine)
    assert load_model(moved).config.num_layers >= 2
