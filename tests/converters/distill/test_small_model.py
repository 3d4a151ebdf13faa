"""A draft model made of its target's layers: the numbers it starts from, its differentiable form, its loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distill_cases import LAYERS, SMALL, Job
from engine_logits import relative_error
from engine_runs import tiny_engine
from tiny_models import FAMILIES

from dspark.converters.audit import reference_model
from dspark.converters.distill.data import AnsweredLine, DistillData
from dspark.converters.distill.features import collect
from dspark.converters.distill.model_learner import ModelLearner, chain_lengths
from dspark.converters.distill.options import DistillOptions
from dspark.converters.distill.small_model import TrainableDecoder, choose_layers, first_parameters, small_config, trained_names
from dspark.runtime.spec.errors import UnsupportedError, UsageError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

TOKENS = [*range(3, 60), 5, 9, 200, 318]
MODEL = replace(SMALL, kind="draft-model")


def allocate(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


@pytest.mark.parametrize("family", [family for family in FAMILIES if "moe" not in family and family != "mixtral"])
def test_all_of_a_targets_layers_are_the_target(family: str, tmp_path: Path) -> None:
    """Windows, caps, norms, biases, ropes: with every layer kept its final states are those that the runtime computes."""
    engine = tiny_engine(tmp_path, family)
    manifest = load_manifest(engine)
    config, kept = small_config(manifest.model, replace(MODEL, layers=manifest.model.num_layers))
    assert config == manifest.model and kept == tuple(range(config.num_layers))
    features, vocabulary = collect(engine, manifest, [TOKENS], (), "cpu", allocate)
    decoder = TrainableDecoder(config, first_parameters(engine, manifest, config, kept, "cpu"), vocabulary.embed, len(TOKENS))
    states = decoder.states(torch.tensor(TOKENS))
    assert relative_error(states.detach(), features.final) < 2e-5
    states.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters.values())


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_a_quantized_targets_layers_are_those_that_are_served(scheme: str, tmp_path: Path) -> None:
    """Codes times steps, as transformers' model has them; the biases of a module come over unchanged."""
    engine = tiny_engine(tmp_path, "llama-bias", scheme=scheme, hidden_size=128, intermediate_size=256, head_dim=32)
    manifest = load_manifest(engine)
    config, kept = small_config(manifest.model, replace(MODEL, kept_layers=(1,)))
    parts = first_parameters(engine, manifest, config, kept, "cpu")
    wanted = dict(reference_model(engine, manifest).named_parameters())
    assert list(parts) == trained_names(config)
    for name, tensor in parts.items():
        assert relative_error(tensor.detach(), wanted[name.replace("layers.0.", "layers.1.")].detach()) < 1e-6


def test_layers_are_chosen_from_both_ends() -> None:
    assert choose_layers(30, 1) == (0,)
    assert choose_layers(30, 2) == (0, 29)
    assert choose_layers(30, 4) == (0, 1, 15, 29)
    assert choose_layers(30, 6) == (0, 1, 2, 11, 20, 29)
    for count in range(1, 9):
        chosen = choose_layers(8, count)
        assert len(set(chosen)) == count and sorted(chosen) == list(chosen) and chosen[-1] <= 7


def test_a_draft_model_that_cannot_be_is_refused(job: Job, tmp_path: Path) -> None:
    model = load_manifest(job.engine).model
    for layers in (0, LAYERS + 1):
        with pytest.raises(UsageError, match=f"of {layers} layers"):
            small_config(model, replace(MODEL, layers=layers))
    for kept in ((1, 0), (0, LAYERS), (-1, 2), (0, 0)):
        with pytest.raises(UsageError, match="to start from"):
            small_config(model, replace(MODEL, kept_layers=kept))
    with pytest.raises(UnsupportedError, match="experts"):
        small_config(replace(model, num_experts=4, family="qwen3_moe"), MODEL)
    windows = replace(model, sliding_window=8, sliding_layers=(True, False, True, False))
    assert small_config(windows, replace(MODEL, kept_layers=(1, 2)))[0].sliding_layers == (False, True)


def test_a_chain_brings_what_its_chances_multiply_to() -> None:
    found = chain_lengths(torch.tensor([1.0, 0.5, 0.0, 1.0]), 3)
    assert found.tolist() == [1 + 1 + 0.5 + 0, 1 + 0.5 + 0, 1, 1 + 1]  # nothing is behind the last place
    assert chain_lengths(torch.tensor([0.25]), 5).tolist() == [1.25]


def learner(job: Job, options: DistillOptions, greedy: bool = True) -> ModelLearner:
    """One line to learn from, another that is held out, both of random tokens."""
    dice = torch.Generator().manual_seed(5)
    params = SamplingParams(temperature=0.0 if greedy else 1.0)
    lines = [
        AnsweredLine(Request(i, tokens[:9], params), tokens)
        for i, tokens in enumerate(torch.randint(3, 300, (2, 30), generator=dice).tolist())
    ]
    data = DistillData(lines[:1], lines[1:], "")
    manifest = load_manifest(job.engine)
    features, vocabulary = collect(job.engine, manifest, [line.tokens for line in data.lines], (), "cpu", allocate)
    config, kept = small_config(manifest.model, options)
    parameters = first_parameters(job.engine, manifest, config, kept, "cpu")
    return ModelLearner(config, parameters, data, features, vocabulary, options)


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.3, 0.2, 0.5)])
def test_the_gradient_is_that_of_the_loss_as_it_is_written(job: Job, weights: tuple[float, float, float]) -> None:
    """Against one pass of autograd over all rows of the vocabulary at once, prompt and answer apart."""
    ce_weight, kl_weight, tv_weight = weights
    options = replace(MODEL, layers=2, ce_weight=ce_weight, kl_weight=kl_weight, tv_weight=tv_weight, prompt_weight=0.25)
    made = learner(job, options)
    loss = made.add_gradients([0], 0)
    tokens = torch.tensor(made._data.training[0].tokens)
    states = made._decoder.states(tokens)[:-1]
    target = made._vocabulary.target_probabilities(made._features.final[made._features.rows(0)][:-1])
    draft = made._vocabulary.logits(states).softmax(-1)
    weight = torch.tensor([0.25] * 8 + [1.0] * 21)
    kl = (target * (target.clamp(min=1e-30).log() - draft.log())).sum(-1)
    ce, tv = -draft[torch.arange(29), tokens[1:]].log(), (draft - target).abs().sum(-1)
    wanted = (weight * (ce_weight * ce + kl_weight * kl + tv_weight * tv)).sum() / weight.sum()
    assert loss == pytest.approx(wanted.item(), rel=1e-4)
    names = list(made.parameters)
    gradients = torch.autograd.grad(wanted, [made.parameters[name] for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        grad = made.parameters[name].grad
        assert grad is not None and relative_error(grad, gradient) < 1e-3


def test_tau_of_the_whole_target_is_all_of_a_chain(job: Job) -> None:
    """Nothing is lost between the target and a draft that keeps every layer; random answers are not what greedy drafts propose."""
    tau, terms = learner(job, replace(MODEL, layers=LAYERS), greedy=False).held_out()
    full = chain_lengths(torch.ones(21), MODEL.block_size).mean()
    assert tau == pytest.approx(float(full), rel=1e-4) and terms["kl"] == pytest.approx(0, abs=1e-5)
    assert learner(job, replace(MODEL, layers=LAYERS), greedy=True).held_out()[0] < 1.3
