"""Checkpoints with experts that other programs quantized: each expert's integers are kept under its own name, routers are dense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_logits import relative_error
from quantized_checkpoints import gptq_parts, integers, linears_only, quantized_state, save_quantized
from safetensors.torch import load_file
from tiny_models import make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from dspark.converters.pipeline import convert
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.manifest import load_manifest

PROMPT = list(range(3, 60))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_gptq_of_experts(tmp_path: Path, family: str) -> None:
    """Without g_idx the inputs of a layer are config.json's, which must be found under Mixtral's own names too."""
    source = make_tiny_checkpoint(tmp_path / "source", family, dtype="float16", intermediate_size=96)
    state, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    every = linears_only(lambda module, weight: integers(weight.float()))

    def recipe(module: str, weight: torch.Tensor):
        return integers(weight.float()) if module.endswith((".w1", ".w2", ".w3")) else every(module, weight)

    stored, dense = quantized_state(state, recipe, lambda module, q: gptq_parts(q, with_g_idx=False))
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    packed = save_quantized(tmp_path / "packed", config, stored, quantization)
    plain = save_quantized(tmp_path / "plain", config, dense, None)
    convert(packed, tmp_path / "engine", dtype="float32")
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.audit["summary"].startswith("audit passed")
    module = "model.layers.1.mlp.experts.2.down_proj"
    assert manifest.quant is not None and manifest.quant.scheme_for(module) is not None
    assert manifest.quant.scheme_for("model.layers.1.mlp.gate") is None and f"{module}.qweight" in manifest.tensors
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    assert relative_error(logits_for(load_model(tmp_path / "engine"), PROMPT), want) < 1e-4
