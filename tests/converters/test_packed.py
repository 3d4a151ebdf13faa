"""Quantized checkpoints on their way into an engine: fused modules, what the commands say, what the manifest keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_checkpoints import token_ids
from engine_logits import by_transformers, relative_error
from quantized_checkpoints import Integers, base_model, gptq_parts, integers, linears_only, quantized_state, save_quantized
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_checkpoint

from dspark.converters.audit import dense_state
from dspark.converters.packed import rows_of
from dspark.converters.pipeline import convert
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.errors import UnsupportedError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.quant import QuantScheme
from dspark_cli.app import run

PROMPT = token_ids(48)


def test_fused_modules_are_split_along_their_outputs(tmp_path: Path) -> None:
    """Phi-3: qkv_proj and gate_up_proj are quantized as one, act-order included; the engine has the parts, bit for bit."""
    source = make_tiny_checkpoint(tmp_path / "ckpt", "phi3")
    state = load_file(source / "model.safetensors")
    recipe = linears_only(lambda module, weight: integers(weight, 4, 32, False, order_seed=1))

    def quantize(module: str, weight: torch.Tensor) -> Integers | None:
        fused = module.endswith(("qkv_proj", "gate_up_proj"))
        return integers(weight, 4, 32, False, order_seed=2) if fused else recipe(module, weight)

    stored, dense = quantized_state(state, quantize, lambda module, q: gptq_parts(q))
    assert any(name.endswith("qkv_proj.g_idx") for name in stored)
    save_file(stored, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    (source / "config.json").write_text(json.dumps(config))

    result = convert(source, tmp_path / "engine", dtype="float32", audit=False)
    got = dense_state(tmp_path / "engine", result.manifest)
    qkv = torch.cat([got[f"model.layers.0.self_attn.{letter}_proj.weight"] for letter in "qkv"])
    assert torch.equal(qkv, dense["model.layers.0.self_attn.qkv_proj.weight"])
    want = by_transformers(tmp_path / "engine", PROMPT)
    assert relative_error(logits_for(load_model(tmp_path / "engine", dtype="float32"), PROMPT), want) < 1e-3


def test_rows_of_fp8_blocks() -> None:
    """A part may begin where a block begins; a scale of the tensor goes with every part."""
    parts = {"qweight": torch.arange(12.0)[:, None].to(torch.float8_e4m3fn), "scales": torch.arange(3.0)[:, None]}
    scheme = QuantScheme("fp8", 8, storage="fp8", block=(4, 128))
    second = rows_of("k_proj", scheme, parts, 4, 6)
    assert second["qweight"].flatten().float().tolist() == [4, 5, 6, 7, 8, 9] and second["scales"].flatten().tolist() == [1, 2]
    with pytest.raises(UnsupportedError, match="k_proj starts inside a block of 4 outputs"):
        rows_of("k_proj", scheme, parts, 6, 4)
    whole = {**parts, "scales": torch.tensor([[7.0]])}
    assert rows_of("k_proj", QuantScheme("fp8", 8, storage="fp8", block=(-1, -1)), whole, 6, 4)["scales"].tolist() == [[7.0]]
    eight = {"qweight": torch.arange(12, dtype=torch.int8)[:, None], "scales": torch.arange(12.0)}
    assert rows_of("k_proj", QuantScheme("w8a8", 8, storage="int8"), eight, 6, 2)["scales"].tolist() == [6, 7]


def test_the_manifest_keeps_the_table_and_inspect_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, state = base_model(50)
    recipe = linears_only(lambda module, weight: integers(weight, 8 if "down_proj" in module else 4), skip=("o_proj",))
    stored, _ = quantized_state(state, recipe, lambda module, q: gptq_parts(q))
    described = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": {".*down_proj": {"bits": 8}}}
    source = save_quantized(tmp_path / "ckpt", config, stored, described)
    words = "mixed: w4a16 group 32 (10 layers), w8a16 group 32 (2 layers)"
    assert run(["inspect", str(source), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["scheme"]) == ("gptq", words)

    assert run(["convert", str(source), str(tmp_path / "engine"), "--no-audit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == words
    assert run(["inspect", str(tmp_path / "engine"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["scheme"], facts["method"]) == (words, "gptq")
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.quant.scheme_for("model.layers.0.self_attn.o_proj") is None
    assert len(manifest.quant.modules) == 12
    assert manifest.weight_bytes() == sum(path.stat().st_size for path in (tmp_path / "engine").glob("*.safetensors")) - header_bytes(
        tmp_path / "engine"
    )


def header_bytes(engine: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in engine.glob("*.safetensors"))
