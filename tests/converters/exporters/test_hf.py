"""Dense checkpoints out: transformers' own loader gives the engine's logits, for every family and from every storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_logits import relative_error
from exports import compressed_engine, engine_of, hashes_of, uniform
from quantized_checkpoints import base_model, fp8_weight
from tiny_models import CHAT_TEMPLATE, FAMILIES, PROMPTS, VOCAB_SIZE, make_tiny_checkpoint

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for

PROMPT = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(60)]
CLOSE = 1e-5


def ours(engine: Path) -> torch.Tensor:
    return logits_for(load_model(engine, dtype="float32", kernels="reference", exact_activations=True), PROMPT)


def theirs(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_family(tmp_path: Path, family: str) -> None:
    """Config, names (fused projections among them) and values; and read by us it is the engine again."""
    convert(make_tiny_checkpoint(tmp_path / "source", family), tmp_path / "engine", audit=False)
    result = export(tmp_path / "engine", tmp_path / "out", "hf")
    assert result.notes == () and result.quantized == 0
    assert relative_error(theirs(tmp_path / "out"), ours(tmp_path / "engine")) < CLOSE
    convert(tmp_path / "out", tmp_path / "again", audit=False)
    assert hashes_of(tmp_path / "again") == hashes_of(tmp_path / "engine")


def test_what_a_directory_has(tmp_path: Path) -> None:
    """The dtype in both spellings, the rope of transformers 4, tokenizer, template (in both places), generation defaults, lineage."""
    source = make_tiny_checkpoint(tmp_path / "source", "llama-llama3", dtype="bfloat16")
    (source / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    convert(source, tmp_path / "engine", audit=False)
    export(tmp_path / "engine", tmp_path / "out", "hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and "quantization_config" not in config
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"]["rope_type"] == "llama3"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.5, "do_sample": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(PROMPTS[0]).input_ids == transformers.AutoTokenizer.from_pretrained(source)(PROMPTS[0]).input_ids
    assert tokenizer.chat_template == CHAT_TEMPLATE == json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"]
    record = json.loads((tmp_path / "out" / "dspark_export.json").read_text())
    assert (record["format"], record["engine"], record["made_of"]["source"]) == ("hf", "engine", "source")


@pytest.mark.parametrize(("bits", "order_seed"), [(4, None), (3, 5)])
def test_quantized_engines_are_written_dense_and_say_so(tmp_path: Path, bits: int, order_seed: int | None) -> None:
    engine, _ = engine_of(tmp_path, uniform(bits, 32, False, order_seed))
    result = export(engine, tmp_path / "out", "hf")
    assert len(result.notes) == 1 and "14 quantized layers" in result.notes[0] and "dequantized" in result.notes[0]
    want = ours(engine)
    assert relative_error(theirs(tmp_path / "out"), want) < 2e-3  # rounded to float16 once
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_fp8_is_written_dense(tmp_path: Path) -> None:
    config, state = base_model(61)
    stored: dict[str, Any] = {}
    for name, tensor in state.items():
        stored[name] = tensor.half()
        if "_proj" in name:
            stored[name], stored[f"{name}_scale"], _ = fp8_weight(tensor, (1, -1))
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": weights, "input_activations": None, "output_activations": None}
    given = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    engine = compressed_engine(tmp_path, stored, config, given)
    export(engine, tmp_path / "out", "hf")
    assert relative_error(theirs(tmp_path / "out"), ours(engine)) < 2e-3  # rounded to float16 once


def test_shards_have_an_index(tmp_path: Path) -> None:
    convert(make_tiny_checkpoint(tmp_path / "source", "llama"), tmp_path / "engine", audit=False)
    result = export(tmp_path / "engine", tmp_path / "out", "hf", shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (
        len(shards) > 2
        and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        and set(index["weight_map"].values()) == set(shards)
    )
    assert index["metadata"]["total_size"] == result.num_bytes
    assert relative_error(theirs(tmp_path / "out"), ours(tmp_path / "engine")) < CLOSE
