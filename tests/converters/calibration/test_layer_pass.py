"""What a pass shows of each linear's inputs is what transformers' modules read."""

import pytest
import torch
from tiny_models import FAMILIES, make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from dspark.converters.calibration.layer_pass import STAGES, LayerPass
from dspark.converters.detect import open_checkpoint
from dspark.converters.mapped_weights import MappedWeights
from dspark.converters.mapping import map_checkpoint
from dspark.runtime.execution.layer_walk import LayerWalk, build_walk_layer
from dspark.runtime.execution.loader import choose_kernels

LENGTHS = (40, 7, 90, 1)
FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}
"""Modules that transformers fuses -> the first of ours, which reads the same input."""


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]


def by_transformers(checkpoint) -> dict[str, torch.Tensor]:
    """Module name -> its inputs over all samples, from hooks on every Linear of the layers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    seen: dict[str, list[torch.Tensor]] = {}

    def hook(name: str):
        return lambda module, args: seen.setdefault(name, []).append(args[0].detach().reshape(-1, args[0].shape[-1]))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers."):
            head, _, leaf = name.rpartition(".")
            module.register_forward_pre_hook(hook(f"{head}.{FUSED.get(leaf, leaf)}"))
    with torch.inference_mode():
        for sample in samples():
            model(torch.tensor([sample]))
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_sees_what_it_sees_in_transformers(family: str, tmp_path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint", family)
    expected = by_transformers(checkpoint)
    model = map_checkpoint(open_checkpoint(checkpoint), "float32")
    kernels = choose_kernels(model.config, "float32")
    walk = LayerWalk(model.config, samples(), kernels, batch_tokens=64)
    weights = MappedWeights(model, torch.float32)
    walk.start(weights.take("model.embed_tokens.weight"))
    compared = set()
    for index in range(model.config.num_layers):
        layer_pass = LayerPass(walk, build_walk_layer(model.config, index, None, weights, kernels), torch.empty)
        for stage in STAGES:
            seen: dict[tuple[str, ...], list[torch.Tensor]] = {}
            for batch in layer_pass.inputs(stage):
                for slot, x in batch:
                    seen.setdefault(slot.modules, []).append(x)
            for modules, parts in seen.items():
                if modules[0] in expected:  # experts are no Linear modules in transformers 5
                    compared.add(modules[0])
                    got, want = torch.cat(parts), expected[modules[0]]
                    torch.testing.assert_close(got.T @ got, want.T @ want, rtol=2e-3, atol=2e-3)
        layer_pass.finish()
    assert compared == set(expected) - {name for name in expected if name.endswith(("k_proj", "v_proj", "up_proj"))}


def test_passes_in_turns_leave_gradients_on(tmp_path) -> None:
    """Two generators that yielded from within inference mode left it on for the rest of the process."""
    model = map_checkpoint(open_checkpoint(make_tiny_checkpoint(tmp_path / "checkpoint", "llama")), "float32")
    kernels = choose_kernels(model.config, "float32")
    weights = MappedWeights(model, torch.float32)
    walks = [LayerWalk(model.config, samples(), kernels, batch_tokens=64) for _ in range(2)]
    for walk in walks:
        walk.start(weights.take("model.embed_tokens.weight"))
    passes = [LayerPass(walk, build_walk_layer(model.config, 0, None, weights, kernels), torch.empty) for walk in walks]
    for _ in zip(*(layer_pass.inputs(STAGES[0]) for layer_pass in passes), strict=True):
        assert not torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_the_stream_after_a_pass_is_that_of_the_walk(tmp_path) -> None:
    """To the bit: an interrupted run is continued on it."""
    model = map_checkpoint(open_checkpoint(make_tiny_checkpoint(tmp_path / "checkpoint", "qwen3_moe")), "float32")
    kernels = choose_kernels(model.config, "float32")
    weights = MappedWeights(model, torch.float32)
    streams = []
    for passes in (True, False):
        walk = LayerWalk(model.config, samples(), kernels, batch_tokens=64)
        walk.start(weights.take("model.embed_tokens.weight"))
        for index in range(model.config.num_layers):
            built = build_walk_layer(model.config, index, None, weights, kernels)
            if not passes:
                walk.advance(built)
                continue
            layer_pass = LayerPass(walk, built, torch.empty)
            for stage in STAGES:
                for _ in layer_pass.inputs(stage):
                    pass
            layer_pass.finish()
        streams.append(walk.residual.clone())
    assert torch.equal(*streams)
