"""compressed-tensors out: words of hand-packed modules, W8A8 and FP8 as they are, and what our reader makes of them is the engine again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import Recipe, compressed_engine, engine_of, hashes_of, same, tensors_of, uniform
from quantized_checkpoints import base_model, compressed_parts, fp8_weight, int8_parts, integers, linears_only, quantized_state

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert
from dspark.runtime.spec.errors import UnsupportedError

TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def quantization_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def reads_back(out: Path, engine: Path) -> None:
    convert(out, engine.parent / "again", audit=False)
    assert hashes_of(engine.parent / "again") == hashes_of(engine)


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"),
    [(4, 32, True), (4, 64, False), (8, -1, True), (8, 32, False)],
)
def test_packed_words_and_round_trip(tmp_path: Path, bits: int, group_size: int, symmetric: bool) -> None:
    engine, found = engine_of(tmp_path, uniform(bits, group_size, symmetric))
    export(engine, tmp_path / "out", "compressed-tensors")
    stored = tensors_of(tmp_path / "out")
    for module, q in found.items():
        same(stored, module, compressed_parts(q, not symmetric))
    config = quantization_of(tmp_path / "out")
    assert (config["format"], config["quantization_status"], config["ignore"]) == ("pack-quantized", "compressed", ["lm_head"])
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "format": "pack-quantized", "weights": weights, "input_activations": None, "output_activations": None}
    assert config["config_groups"] == {"group_0": group}
    reads_back(tmp_path / "out", engine)


def test_codes_count_from_the_middle(tmp_path: Path) -> None:
    """-8 .. -1 are stored as 0x76543210 and 0 .. 7 as 0xFEDCBA98: the code with 8 added, along the inputs."""
    engine, found = engine_of(tmp_path, uniform())
    export(engine, tmp_path / "out", "compressed-tensors")
    module = "model.layers.0.mlp.down_proj"
    word = int(tensors_of(tmp_path / "out")[f"{module}.weight_packed"][3, 1]) & 0xFFFFFFFF
    signed = (found[module].codes[8:16, 3] - 8).tolist()
    assert word == sum((code + 8) << (4 * lane) for lane, code in enumerate(signed))


def test_w8a8_is_written_as_it_is(tmp_path: Path) -> None:
    config, state = base_model(51)
    stored, _ = quantized_state(state, linears_only(lambda module, weight: integers(weight, 8, -1)), lambda module, q: int8_parts(q))
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "format": "int-quantized", "weights": weights, "input_activations": TOKENS, "output_activations": None}
    given = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    engine = compressed_engine(tmp_path, stored, config, given)
    export(engine, tmp_path / "out", "compressed-tensors")
    assert given.items() <= quantization_of(tmp_path / "out").items()
    written = tensors_of(tmp_path / "out")
    assert sorted(written) == sorted(stored)
    for name, tensor in stored.items():  # scales are in the checkpoint's float16 again
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    reads_back(tmp_path / "out", engine)


@pytest.mark.parametrize(
    ("block", "strategy"),
    [
        ((-1, -1), {"strategy": "tensor"}),
        ((1, -1), {"strategy": "channel"}),
        ((128, 128), {"strategy": "block", "block_structure": [128, 128]}),
    ],
    ids=["tensor", "channel", "block"],
)
def test_fp8_is_written_as_it_is(tmp_path: Path, block: tuple[int, int], strategy: dict[str, Any]) -> None:
    config, state = base_model(52)
    stored = {}
    for name, tensor in state.items():
        stored[name] = tensor.half()
        if "_proj" in name:
            stored[name], scales, _ = fp8_weight(tensor, block)
            stored[f"{name}_scale"] = scales.reshape(1) if block == (-1, -1) else scales
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **strategy}
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": weights, "input_activations": None, "output_activations": None}
    given = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    engine = compressed_engine(tmp_path, stored, config, given)
    export(engine, tmp_path / "out", "compressed-tensors")
    assert given.items() <= quantization_of(tmp_path / "out").items()
    written = tensors_of(tmp_path / "out")
    for name, tensor in stored.items():
        assert torch.equal(written[name].float(), tensor.float()), name
    reads_back(tmp_path / "out", engine)


def test_mixed_layers_are_groups_of_their_own(tmp_path: Path) -> None:
    """The most common arguments hold for the class, others by name, which wins over the class in every reader."""

    def recipe(module: str, weight: torch.Tensor):
        return uniform(8 if module.endswith("down_proj") else 4, 32, skip=("layers.0.self_attn.o_proj",))(module, weight)

    engine, _ = engine_of(tmp_path, recipe)
    export(engine, tmp_path / "out", "compressed-tensors")
    config = quantization_of(tmp_path / "out")
    assert [group["targets"] for group in config["config_groups"].values()] == [
        ["Linear"],
        ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
    ]
    assert config["ignore"] == ["model.layers.0.self_attn.o_proj", "lm_head"]
    reads_back(tmp_path / "out", engine)


@pytest.mark.parametrize(
    ("recipe", "words"), [(uniform(3), "3 bits, allowed: 4, 8"), (uniform(order_seed=2), r"its inputs are reordered \(act-order\)")]
)
def test_what_cannot_be_said_is_refused_by_layer(tmp_path: Path, recipe: Recipe, words: str) -> None:
    """A group index (actorder "group") is a ValidationError in compressed-tensors 0.20."""
    engine, _ = engine_of(tmp_path, recipe)
    with pytest.raises(UnsupportedError, match=rf"model.layers.0.self_attn.q_proj, .* more: {words}"):
        export(engine, tmp_path / "out", "compressed-tensors")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["engine", "source"]
