"""GPTQ out: the words are those of hand-packed modules, and what our reader makes of them is the engine again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exports import engine_of, hashes_of, same, tensors_of, uniform
from quantized_checkpoints import gptq_parts, integers

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert
from dspark.runtime.spec.errors import UnsupportedError

UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "order_seed"),
    [
        (4, 32, True, None),
        (4, 64, False, None),
        (4, 32, True, 3),
        (4, 32, False, 5),
        (8, -1, True, None),
        (8, 128, False, None),
        (3, 32, True, None),
        (3, 64, False, 7),
        (2, 32, True, None),
        (2, 16, False, None),
    ],
)
def test_words_and_round_trip(tmp_path: Path, bits: int, group_size: int, symmetric: bool, order_seed: int | None) -> None:
    engine, found = engine_of(tmp_path, uniform(bits, group_size, symmetric, order_seed))
    result = export(engine, tmp_path / "out", "gptq")
    version = "gptq" if symmetric else "gptq_v2"
    stored = tensors_of(tmp_path / "out")
    for module, q in found.items():
        same(stored, module, gptq_parts(q, version))
    assert result.quantized == len(found) == 14 and result.notes == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    expected = {"bits": bits, "group_size": group_size, "sym": symmetric, "checkpoint_format": version, "format": version}
    assert expected.items() <= config.items() and "dynamic" not in config
    assert config["desc_act"] is (order_seed is not None) and config["lm_head"] is False
    convert(tmp_path / "out", tmp_path / "again", audit=False)
    assert hashes_of(tmp_path / "again") == hashes_of(engine)


@pytest.mark.parametrize(("bits", "v1", "v2"), [(2, "55555555", "AAAAAAAA"), (4, "77777777", "88888888"), (8, "7F7F7F7F", "80808080")])
def test_symmetric_zero_points_are_one_less_in_v1(tmp_path: Path, bits: int, v1: str, v2: str) -> None:
    """What programs tell the versions apart by. A symmetric layer beside an asymmetric one gets v2, since the label holds for all."""
    engine, _ = engine_of(tmp_path / "a", uniform(bits))
    export(engine, tmp_path / "v1", "gptq")
    assert {f"{int(word) & 0xFFFFFFFF:08X}" for word in tensors_of(tmp_path / "v1")[f"{UP}.qzeros"].flatten()} == {v1}
    engine, _ = engine_of(tmp_path / "b", lambda module, weight: uniform(bits, symmetric=module == UP)(module, weight))
    export(engine, tmp_path / "v2", "gptq")
    assert {f"{int(word) & 0xFFFFFFFF:08X}" for word in tensors_of(tmp_path / "v2")[f"{UP}.qzeros"].flatten()} == {v2}


def test_mixed_layers_and_the_head_are_told_by_rule(tmp_path: Path) -> None:
    """down_proj in 8 bits, one layer dense, the head quantized."""

    def recipe(module: str, weight: torch.Tensor):
        if "embed" in module or module == UP:
            return None
        return integers(weight, 8 if module.endswith("down_proj") else 4, 64 if module.endswith("down_proj") else 32)

    engine, found = engine_of(tmp_path, recipe)
    result = export(engine, tmp_path / "out", "gptq")
    config = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert config["lm_head"] is True and "lm_head" in found
    assert config["dynamic"] == {
        r"-:model\.layers\.1\.mlp\.up_proj$": {},
        r"+:model\.layers\.0\.mlp\.down_proj$": {"bits": 8, "group_size": 64},
        r"+:model\.layers\.1\.mlp\.down_proj$": {"bits": 8, "group_size": 64},
    }
    assert any("3 layers" in note and "'dynamic'" in note for note in result.notes)
    convert(tmp_path / "out", tmp_path / "again", audit=False)
    assert hashes_of(tmp_path / "again") == hashes_of(engine)


@pytest.mark.parametrize(
    ("bits", "group_size", "config", "words"),
    [
        (5, 32, {}, "5 bits, allowed: 2, 3, 4, 8"),
        (4, 48, {"hidden_size": 192, "intermediate_size": 384, "head_dim": 48}, "groups of 48 inputs, allowed: -1, 16, 32,"),
        (4, 32, {"intermediate_size": 168}, "inputs and 168 outputs, allowed: multiples of 32"),
    ],
)
def test_what_cannot_be_said_is_refused_by_layer(tmp_path: Path, bits: int, group_size: int, config: dict[str, int], words: str) -> None:
    skip = ("down_proj",) if config else ()
    engine, _ = engine_of(tmp_path, uniform(bits, group_size, skip=skip), **config)
    with pytest.raises(UnsupportedError, match="cannot be written as gptq") as caught:
        export(engine, tmp_path / "out", "gptq")
    assert words in caught.value.message and "model.layers.0." in caught.value.message and "more" in caught.value.message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["engine", "source"]
