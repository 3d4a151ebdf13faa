"""Schemes and configs of quantization: by rule, by table, and through JSON."""

from __future__ import annotations

import json

import pytest

from dspark.runtime.spec.quant import PRESETS, QuantConfig, QuantScheme

W4 = QuantScheme("w4a16", 4, True, 32, "gptq", act_order=True)
W8 = QuantScheme("w8a16", 8, True, -1, "gptq")
FP8 = QuantScheme("fp8", 8, True, -1, "fp8", storage="fp8", block=(128, 128))


def through_json(config: QuantConfig) -> QuantConfig:
    return QuantConfig.from_json(json.loads(json.dumps(config.to_json())))


def test_a_table_names_every_quantized_module() -> None:
    config = QuantConfig.of_modules({"a": W4, "b": W4, "c": W8, "lm_head": FP8})
    assert (config.scheme_for("a"), config.scheme_for("c"), config.scheme_for("lm_head")) == (W4, W8, FP8)
    assert config.scheme_for("d") is None
    assert config.scheme == W4
    assert through_json(config) == config
    assert config.describe() == "mixed: w4a16 group 32 act-order (2 layers), w8a16 per channel (1 layer), fp8 blocks of 128 x 128 (1 layer)"


def test_a_manifest_without_table_is_a_rule() -> None:
    """What earlier versions wrote: no modules, no storage, no act_order."""
    old = {"scheme": {"name": "w4a16", "weight_bits": 4, "symmetric": True, "group_size": 64, "method": "rtn"}, "ignore": ["lm_head"]}
    config = QuantConfig.from_json(old)
    assert config.scheme_for("model.layers.0.mlp.up_proj") == QuantScheme("w4a16", 4, True, 64)
    assert config.scheme_for("lm_head") is None
    assert through_json(config) == config
    assert config.describe() == "w4a16 group 64"


@pytest.mark.parametrize(
    "change", [{"storage": "gguf"}, {"unknown": 1}, {"weight_bits": None, "modules": 1}], ids=["storage", "key", "another key"]
)
def test_a_damaged_scheme_is_an_error(change: dict) -> None:
    data = QuantConfig(W4).to_json()
    data["scheme"] |= change
    with pytest.raises(TypeError):
        QuantConfig.from_json(data)


def test_a_damaged_table_is_an_error() -> None:
    data = QuantConfig.of_modules({"a": W4}).to_json()
    data["modules"]["a"] = 7
    with pytest.raises(KeyError):
        QuantConfig.from_json(data)


def test_tensors_of_a_scheme() -> None:
    assert W4.leaves() == ("qweight", "scales", "perm")
    assert QuantScheme("w4a16-asym", 4, False).leaves() == ("qweight", "scales", "zeros")
    assert FP8.leaves() == QuantScheme("w8a8", 8, storage="int8").leaves() == ("qweight", "scales")


def test_presets_say_in_their_names_what_they_store() -> None:
    assert [name for name in PRESETS if name.startswith("w")] == [
        *(f"w{bits}a16{suffix}" for bits in (8, 4, 3, 2) for suffix in ("", "-asym")),
        "w8a8",
    ]
    for name, scheme in PRESETS.items():
        assert scheme.name == name and not scheme.act_order and scheme.method == "rtn"
        assert scheme.storage == ("fp8" if name.startswith("fp8") else "int8" if name == "w8a8" else "wna16")
        assert scheme.symmetric != name.endswith("-asym") and scheme.weight_bits == (8 if name.startswith("fp8") else int(name[1]))
    assert PRESETS["fp8"].describe() == "fp8 per channel" and PRESETS["fp8-block"].describe() == "fp8-block blocks of 128 x 128"


def test_words_for_schemes() -> None:
    assert QuantScheme("w8a8", 8, storage="int8").describe() == "w8a8 per channel"
    assert QuantScheme("fp8", 8, storage="fp8", block=(-1, -1)).describe() == "fp8 per tensor"
    assert QuantScheme("fp8", 8, storage="fp8", block=(1, -1)).describe() == "fp8 per channel"
