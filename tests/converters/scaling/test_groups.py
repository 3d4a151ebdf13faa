"""Which modules read what: every group of every family, by moving random factors and comparing the logits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_models import FAMILIES as VARIANTS
from tiny_models import make_tiny_model

from dspark.converters.mapping import expected_tensors, linear_modules
from dspark.converters.scaling.fold import fold_group
from dspark.converters.scaling.groups import (
    KINDS,
    NORM_MLP,
    NORM_QKV,
    UP_DOWN,
    VALUE_OUT,
    ScalingGroup,
    awq_groups,
    scaling_groups,
    smoothquant_groups,
)
from dspark.kernels.ops import KernelFacts, Kernels
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.decoder import build_decoder
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.model_config import ModelConfig

PROMPT = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(8)).tolist()


class Tensors(dict):
    """A WeightSource of tensors by name."""

    def take(self, name: str) -> torch.Tensor:
        return self[name].clone()


@cache
def config_of(variant: str) -> ModelConfig:
    return model_config_from_hf(make_tiny_model(variant).config.to_dict())


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """Weights, norms and biases that all matter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = Tensors()
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = noise * 0.1 + (0.0 if config.norm_offset else 1.0)
        else:
            embedding = 0.15 if config.tie_word_embeddings else 1.0
            tensors[name] = noise * (0.4 if name.endswith(".bias") else embedding if "embed" in name else 0.15)
    return tensors


def random_scales(group: ScalingGroup, generator: torch.Generator) -> torch.Tensor:
    return group.legal_scales(torch.exp(torch.randn(group.channels, generator=generator) * 0.5))


@torch.inference_mode()
def logits(config: ModelConfig, tensors: Tensors) -> torch.Tensor:
    facts = KernelFacts("cpu", torch.float32, config.head_dim, config.num_heads, config.num_kv_heads, 16)
    return logits_for(build_decoder(config, None, tensors, Kernels(facts, "reference")), PROMPT)


def fold_all(config: ModelConfig, tensors: Tensors, kinds: tuple[str, ...] = KINDS) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    folded = Tensors(tensors)
    for layer in range(config.num_layers):
        for group in scaling_groups(config, layer):
            if group.kind in kinds:
                folded.update(fold_group(folded, group, random_scales(group, generator)))
    return folded


@pytest.mark.parametrize("variant", VARIANTS)
def test_moving_every_factor_leaves_the_logits(variant: str) -> None:
    """A reader that a group lacks gets inputs that nobody corrects: a wrong model without any error."""
    config = config_of(variant)
    tensors = random_tensors(config)
    folded = fold_all(config, tensors)
    changed = [name for name in tensors if not torch.equal(tensors[name], folded[name])]
    assert len(changed) >= 4 * config.num_layers
    torch.testing.assert_close(logits(config, folded), logits(config, tensors), rtol=1e-4, atol=1e-5)


def test_every_family_is_tried() -> None:
    assert {config_of(variant).family for variant in VARIANTS} == set(FAMILIES)


@pytest.mark.parametrize("variant", ["llama-bias", "gemma2", "qwen2_moe", "phi3"])
def test_a_reader_that_is_left_out_is_seen_in_the_logits(variant: str) -> None:
    """The comparison above can fail: without any one of its linears, each group changes the logits."""
    config = config_of(variant)
    tensors = random_tensors(config)
    before = logits(config, tensors)
    for group in scaling_groups(config, 0):
        scales = random_scales(group, torch.Generator().manual_seed(2))
        for linear in group.linears[:6]:
            changed = fold_group(tensors, group, scales)
            del changed[f"{linear}.weight"]
            after = logits(config, Tensors(tensors | changed))
            assert float((after - before).abs().max()) > 1e-3, (group.kind, linear)


@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_know_their_widths(variant: str) -> None:
    config = config_of(variant)
    modules, tensors = linear_modules(config), expected_tensors(config)
    for layer in range(config.num_layers):
        for group in scaling_groups(config, layer):
            assert {modules[linear][1] for linear in group.linears} == {group.channels}
            assert group.observed in group.linears
            (outputs, *_) = tensors[f"{group.previous}.weight"]
            assert outputs * group.repeats == group.channels


def shown(config: ModelConfig, layer: int = 0) -> list[tuple[str, str, tuple[str, ...]]]:
    prefix = f"model.layers.{layer}."
    cut = [replace(g, linears=tuple(linear.removeprefix(prefix) for linear in g.linears)) for g in scaling_groups(config, layer)]
    return [(g.kind, g.previous.removeprefix(prefix), g.linears) for g in cut]


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (VALUE_OUT, "self_attn.v_proj", ("self_attn.o_proj",))
PLAIN = (UP_DOWN, "mlp.up_proj", ("mlp.down_proj",))
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def test_groups_by_hand() -> None:
    assert shown(config_of("phi3")) == [
        (NORM_QKV, "input_layernorm", QKV),
        ATTENTION,
        (NORM_MLP, "post_attention_layernorm", GATE_UP),
        PLAIN,
    ]
    assert shown(config_of("gemma2"))[2] == (NORM_MLP, "pre_feedforward_layernorm", GATE_UP)
    assert shown(config_of("olmo2")) == [ATTENTION, PLAIN]


def test_groups_of_experts_by_hand() -> None:
    """Router, shared expert and its gate read the norm too; every expert has its own down projection."""
    config = replace(config_of("qwen2_moe"), num_experts=2)
    gated = [f"mlp.{block}.{part}_proj" for block in ("shared_expert", "experts.0", "experts.1") for part in ("gate", "up")]
    assert shown(config)[2:] == [
        (NORM_MLP, "post_attention_layernorm", ("mlp.gate", "mlp.shared_expert_gate", *gated)),
        (UP_DOWN, "mlp.shared_expert.up_proj", ("mlp.shared_expert.down_proj",)),
        (UP_DOWN, "mlp.experts.0.up_proj", ("mlp.experts.0.down_proj",)),
        (UP_DOWN, "mlp.experts.1.up_proj", ("mlp.experts.1.down_proj",)),
    ]
    assert scaling_groups(config, 0)[2].observed == "model.layers.0.mlp.gate"


def test_a_plain_layer_of_a_sparse_model_has_plain_groups() -> None:
    config = config_of("qwen3_moe-mixed")
    assert [config.has_experts(layer) for layer in range(3)] == [True, False, True]
    assert shown(config, 1)[2:] == [(NORM_MLP, "post_attention_layernorm", GATE_UP), PLAIN]


def test_which_groups_each_method_takes() -> None:
    """Gemma 3 norms each head of q and k: llm-compressor #2522 measured that scaling their inputs by AWQ loses."""
    assert [group.kind for group in awq_groups(config_of("gemma3"), 0)] == [VALUE_OUT, NORM_MLP, UP_DOWN]
    assert [group.kind for group in awq_groups(config_of("gemma2"), 0)] == list(KINDS)
    assert [group.kind for group in smoothquant_groups(config_of("llama"), 1)] == list(KINDS)
    assert [group.kind for group in smoothquant_groups(config_of("olmo2"), 0)] == [VALUE_OUT, UP_DOWN]


def test_heads_that_share_values_get_their_mean() -> None:
    """Two heads of values of width 2, three query heads on each."""
    group = ScalingGroup(VALUE_OUT, "v", ("o",), "o", 12, repeats=3, head_dim=2)
    legal = group.legal_scales(torch.tensor([1.0, 10, 2, 20, 3, 30, 4, 40, 5, 50, 9, 60]))
    assert legal.tolist() == [2, 20, 2, 20, 2, 20, 6, 50, 6, 50, 6, 50]
    assert group.previous_scales(legal).tolist() == [2, 20, 6, 50]
    several = torch.rand(3, 12)
    assert torch.equal(group.legal_scales(several)[1], group.legal_scales(several[1]))
