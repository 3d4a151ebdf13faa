"""Layers of experts from an engine's tensors: when their weights are put side by side, and that this is the same function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Kernels
from dspark.runtime.layers.moe import load_moe, ungroupable
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import PRESETS, QuantConfig, QuantScheme

HIDDEN, INNER, EXPERTS = 64, 32, 4
NAME = "model.layers.0.mlp"
W4 = replace(PRESETS["w4a16"], group_size=32)
FP8, BLOCKS = PRESETS["fp8"], replace(PRESETS["fp8"], block=(16, 32))


class Tensors:
    """A WeightSource over a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def take(self, name: str) -> torch.Tensor:
        return self.tensors.pop(name)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


def kernels(groups: bool, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if groups:
        monkeypatch.setattr(Kernels, "groups_experts", True)
    return Kernels(KernelFacts("cpu", torch.float32, 16, 4, 2, 16), "reference")


def model() -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        experts_per_token=2,
        rms_norm_eps=1e-6,
        max_position=64,
        moe_intermediate_size=INNER,
    )


def tensors(scheme: QuantScheme | None) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    found = {f"{NAME}.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=g)}
    for expert in range(EXPERTS):
        for leaf, outputs, inputs in (("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            module = f"{NAME}.experts.{expert}.{leaf}"
            weight = torch.randn(outputs, inputs, generator=g) / 8
            if scheme is None:
                found[f"{module}.weight"] = weight
            elif scheme.storage == "fp8":
                rows, columns = (outputs if size == -1 else size for size in scheme.block or (-1, -1))
                grid = -(-outputs // (1 if scheme.block == (1, -1) else rows)), 1 if scheme.block == (1, -1) else -(-inputs // columns)
                found |= {f"{module}.qweight": weight.to(torch.float8_e4m3fn), f"{module}.scales": torch.rand(*grid, generator=g)}
            elif scheme.storage == "int8":
                found |= {f"{module}.qweight": (99 * weight).to(torch.int8), f"{module}.scales": torch.rand(outputs, generator=g) / 99}
            else:
                words = torch.randint(-(2**31), 2**31, (inputs // 8, outputs), generator=g).to(torch.int32)
                found |= {f"{module}.qweight": words, f"{module}.scales": torch.rand(inputs // 32, outputs, generator=g).half() / 32}
    return found


def quantized(scheme: QuantScheme | None) -> QuantConfig | None:
    return None if scheme is None else QuantConfig(scheme, ("*.mlp.gate",))


@pytest.mark.parametrize("scheme", [None, W4, FP8, BLOCKS, PRESETS["w8a8"]], ids=lambda scheme: scheme.describe() if scheme else "dense")
def test_grouped_experts_are_the_same_function(scheme: QuantScheme | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms on the reference: to the last bit, and every tensor is taken."""
    x, quant = torch.randn(7, HIDDEN), quantized(scheme)
    alone = load_moe(NAME, model(), quant, Tensors(tensors(scheme)), kernels(False, monkeypatch), group=True)
    assert alone.grouped is None and len(alone.experts) == EXPERTS, "these kernels have no grouped form"
    source = Tensors(tensors(scheme))
    together = load_moe(NAME, model(), quant, source, kernels(True, monkeypatch), group=True)
    assert together.grouped is not None and together.experts == [] and source.tensors == {}
    assert torch.equal(together(x), alone(x))


def test_a_layer_walk_wants_single_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = load_moe(NAME, model(), None, Tensors(tensors(None)), kernels(True, monkeypatch))
    assert layer.grouped is None and len(layer.experts) == EXPERTS


@pytest.mark.parametrize(
    ("quant", "biased", "reason"),
    [
        (None, "", None),
        (quantized(W4), "", None),
        (None, f"{NAME}.experts.3.up_proj.bias", "they have biases"),
        (QuantConfig(W4, (f"{NAME}.experts.1.*",)), "", "their schemes differ"),
        (quantized(replace(W4, act_order=True)), "", "each has an order of inputs of its own"),
        (quantized(replace(FP8, inputs="static")), "", "each has an input scale of its own"),
        (quantized(replace(FP8, block=(128, 128))), "", "a block of scales would span gate and up projection"),
    ],
)
def test_what_cannot_be_grouped(quant: QuantConfig | None, biased: str, reason: str | None) -> None:
    experts = [f"{NAME}.experts.{index}" for index in range(EXPERTS)]
    assert ungroupable(experts, model(), quant, Tensors({biased: torch.zeros(1)})) == reason
