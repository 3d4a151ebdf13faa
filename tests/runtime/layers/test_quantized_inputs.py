"""Norm and activation quantize what the next linear takes as codes; kernels without such linears see nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks import write_tiny_engine

from dspark.kernels.dispatch import Selection
from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import InputFormat, Int8Weight, Kernels, QuantizedRows, Rows, input_format
from dspark.kernels.reference.linear import scaled_sums
from dspark.kernels.reference.quantize import quantize_rows
from dspark.runtime.execution.loader import EngineWeights, choose_kernels, load_manifest
from dspark.runtime.layers.mlp import load_gated_mlp
from dspark.runtime.layers.norm import ResidualStep
from dspark.runtime.models.decoder import build_decoder
from dspark.runtime.spec.quant import PRESETS, QuantConfig

INT8 = InputFormat("int8")
FACTS = KernelFacts("cpu", torch.float32, head_dim=16, num_heads=4, num_kv_heads=2, block_size=16)


class TakesCodes:
    """A linear of 8-bit integers that takes quantized rows, and counts them."""

    takes = INT8
    made: list[TakesCodes]

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> None:
        self.weight, self.bias, self.coded = weight, bias, 0
        TakesCodes.made.append(self)

    def __call__(self, x: Rows) -> torch.Tensor:
        self.coded += isinstance(x, QuantizedRows)
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, INT8)
        sums = torch.mm(rows.codes.double(), self.weight.qweight.double().t())
        return scaled_sums(sums, rows.scales[:, None], self.weight.scales, self.bias, rows.dtype)


def taking(kernels: Kernels) -> Kernels:
    TakesCodes.made = []
    kernels.selections["make_int8_linear"] = Selection("make_int8_linear", "test", TakesCodes)
    return kernels


class Tensors(dict[str, torch.Tensor]):
    def take(self, name: str) -> torch.Tensor:
        return self.pop(name)


def test_a_block_between_two_norms_is_the_same_to_the_last_bit() -> None:
    g = torch.Generator().manual_seed(4)
    found = {}
    for leaf, outputs, inputs in (("gate_proj", 48, 64), ("up_proj", 48, 64), ("down_proj", 64, 48)):
        found[f"mlp.{leaf}.qweight"] = torch.randint(-128, 128, (outputs, inputs), generator=g, dtype=torch.int8)
        found[f"mlp.{leaf}.scales"] = torch.rand(outputs, generator=g) / 99
    x, residual, norm = (torch.randn(*shape, generator=g) for shape in ((5, 64), (5, 64), (64,)))
    results = []
    for kernels in (Kernels(FACTS, "reference"), taking(Kernels(FACTS, "reference"))):
        block = load_gated_mlp("mlp", "silu", QuantConfig(PRESETS["w8a8"]), Tensors(found), kernels)
        step = ResidualStep(None, 1.0, norm, 1e-5, kernels, input_format(block))
        hidden, stream = step(x.clone(), residual.clone())
        results.append((block(hidden), stream))
    assert [linear.coded for linear in TakesCodes.made] == [1, 1], "gate and up as one, and down"
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_other_activations_leave_it_to_the_linear(activation: str) -> None:
    found = {}
    for leaf, outputs, inputs in (("gate_proj", 48, 64), ("up_proj", 48, 64), ("down_proj", 64, 48)):
        found |= {f"mlp.{leaf}.qweight": torch.ones(outputs, inputs, dtype=torch.int8), f"mlp.{leaf}.scales": torch.ones(outputs)}
    block = load_gated_mlp("mlp", activation, QuantConfig(PRESETS["w8a8"]), Tensors(found), taking(Kernels(FACTS, "reference")))
    assert block(torch.randn(3, 64)).shape == (3, 64)
    assert [linear.coded for linear in TakesCodes.made] == [0, activation == "silu"]


def decoder(directory: Path, fused: bool) -> Any:
    manifest = load_manifest(directory)
    kernels = choose_kernels(manifest.model, "float32", "cpu", "reference")
    weights = EngineWeights(directory, manifest, torch.float32, "cpu")
    return build_decoder(manifest.model, manifest.quant, weights, taking(kernels) if fused else kernels)


def test_every_norm_of_a_decoder_knows_its_reader(tmp_path: Path) -> None:
    """The last one feeds the head, which takes numbers; without linears that take codes no norm makes any."""
    directory = write_tiny_engine(tmp_path, "llama", "float32", "w8a8", {})
    built = decoder(directory, fused=True)
    assert [layer.after_attention.inputs for layer in built.layers] == [INT8] * len(built.layers)
    assert [layer.after_mlp.inputs for layer in built.layers] == [INT8] * (len(built.layers) - 1) + [None]
    stream = torch.randn(3, built.config.hidden_size)
    assert isinstance(built._first_input(stream), QuantizedRows)
    plain = decoder(directory, fused=False)
    assert all(step.inputs is None for layer in plain.layers for step in (layer.after_attention, layer.after_mlp))
    assert isinstance(plain._first_input(stream), torch.Tensor)
