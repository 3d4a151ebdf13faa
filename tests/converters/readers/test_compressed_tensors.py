"""compressed-tensors checkpoints, module by module: which numbers they are, what is kept, what is refused or noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import State, llama_config, llama_state
from quantized_checkpoints import Integers, compressed_parts, fp8_weight, int8_parts, integers, save_quantized, stream_down

from dspark.converters.detect import open_checkpoint
from dspark.converters.readers.compressed_tensors import CompressedTensorsReader
from dspark.kernels.packing import unpack_codes
from dspark.runtime.spec.errors import InputError, UnsupportedError

MODULE = "model.layers.0.mlp.down_proj"  # 128 outputs, 256 inputs
GENERATOR = torch.Generator().manual_seed(9)
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def quantized(bits: int = 4, group_size: int = 32, symmetric: bool = True, order_seed: int | None = None) -> Integers:
    return integers(torch.randn(128, 256, generator=GENERATOR) * 0.1, bits, group_size, symmetric, order_seed)


def reader(
    tmp_path: Path, parts: State, weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None, **config: Any
) -> CompressedTensorsReader:
    state = {name: tensor.half() for name, tensor in llama_state(llama_config()).items() if name != f"{MODULE}.weight"}
    group = {"targets": ["Linear"], "weights": weights or {"num_bits": 4, "group_size": 32}, "input_activations": activations}
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}, **config}
    source = save_quantized(tmp_path / "ckpt", llama_config(), {**state, **{f"{MODULE}.{leaf}": t for leaf, t in parts.items()}}, described)
    opened = open_checkpoint(source)
    assert isinstance(opened, CompressedTensorsReader)
    return opened


def check(found: CompressedTensorsReader, q: Integers) -> None:
    assert torch.equal(found.read(f"{MODULE}.weight"), q.dense())
    parts = found.read_quantized(MODULE)
    order = parts["perm"].long() if "perm" in parts else torch.arange(256)
    assert torch.equal(unpack_codes(parts["qweight"], q.bits, 256).long(), q.codes[order])
    assert torch.equal(parts["scales"], q.scales)


@pytest.mark.parametrize(
    ("bits", "old_packing", "says_bits"),
    [(bits, old, says) for bits in range(2, 9) for old in (False, True) for says in (True, False) if (bits, old, says) != (7, True, False)],
)
def test_both_packings(tmp_path: Path, bits: int, old_packing: bool, says_bits: bool) -> None:
    """Before 0.17 words of 3, 5, 6 and 7 bits held whole codes; the width tells. 256 / (32 // 5) = 43 words are of 5 bits alone.

    Four codes of 7 bits a word look like 8 bits, which is what a config without num_bits means.
    """
    q = quantized(bits)
    weights = {"group_size": 32, **({"num_bits": bits} if says_bits else {})}
    found = reader(tmp_path, compressed_parts(q, old_packing=old_packing), weights)
    check(found, q)
    if not old_packing:
        assert torch.equal(found.read_quantized(MODULE)["qweight"], stream_down(q.codes, bits))


def test_packed_zero_points_run_along_the_outputs(tmp_path: Path) -> None:
    q = quantized(symmetric=False)
    found = reader(tmp_path, compressed_parts(q, with_zeros=True))
    check(found, q)
    assert torch.equal(found.read_quantized(MODULE)["zeros"].long(), q.zeros)


def test_plain_zero_points_are_signed(tmp_path: Path) -> None:
    q = quantized(symmetric=False)
    parts = {**compressed_parts(q), "weight_zero_point": (q.zeros.t() - 8).to(torch.int8).contiguous()}
    found = reader(tmp_path, parts)
    check(found, q)
    assert torch.equal(found.read_quantized(MODULE)["zeros"].long(), q.zeros)


def test_group_order_and_an_index_that_was_never_filled(tmp_path: Path) -> None:
    q = quantized(order_seed=4)
    found = reader(tmp_path / "a", compressed_parts(q, with_g_idx=True))
    check(found, q)
    assert found.quantized()[MODULE].act_order
    q = quantized()
    found = reader(tmp_path / "b", {**compressed_parts(q), "weight_g_idx": torch.full((256,), -1, dtype=torch.int32)})
    check(found, q)
    assert not found.quantized()[MODULE].act_order


def test_bits_that_contradict_the_width_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="32 words for 256 inputs are 4 bits, the config says 8"):
        reader(tmp_path, compressed_parts(quantized()), {"num_bits": 8}).tensors()


def test_the_most_exact_target_counts(tmp_path: Path) -> None:
    """A module's name before a pattern, a pattern before the class, whatever their order."""
    q = quantized(3)
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8}},
        "group_2": {"targets": [MODULE], "weights": {"num_bits": 3}},
    }
    check(reader(tmp_path, compressed_parts(q), config_groups=groups), q)


@pytest.mark.parametrize("one_scale", [False, True], ids=["channel", "tensor"])
def test_w8a8_keeps_its_bytes(tmp_path: Path, one_scale: bool) -> None:
    q = quantized(8, -1)
    parts = int8_parts(q)
    if one_scale:
        parts["weight_scale"] = torch.tensor([0.25])
    found = reader(tmp_path, parts, {"num_bits": 8, "strategy": "channel"}, TOKENS, format="int-quantized")
    got = found.read_quantized(MODULE)
    assert found.quantized()[MODULE].storage == "int8" and got["qweight"].dtype == torch.int8
    assert torch.equal(got["qweight"], parts["weight"])
    assert torch.equal(got["scales"], parts["weight_scale"].flatten().float().expand(128))
    assert found.notes == []


@pytest.mark.parametrize(
    ("bits", "group_size", "activations"),
    [
        (8, -1, None),
        (8, -1, {**TOKENS, "dynamic": False, "strategy": "tensor"}),
        (8, -1, {**TOKENS, "symmetric": False}),
        (8, 32, TOKENS),
        (4, -1, TOKENS),
    ],
)
def test_what_is_no_w8a8_becomes_codes_with_16_bit_activations(
    tmp_path: Path, bits: int, group_size: int, activations: dict[str, Any] | None
) -> None:
    q = quantized(bits, group_size)
    found = reader(tmp_path, int8_parts(q), {"num_bits": bits, "group_size": group_size}, activations, format="int-quantized")
    check(found, q)
    assert found.quantized()[MODULE].storage == "wna16"
    assert bool(found.notes) == (activations is not None)


def test_asymmetric_int8_weights(tmp_path: Path) -> None:
    q = quantized(8, -1, symmetric=False)
    parts = {**int8_parts(q), "weight_zero_point": (q.zeros.t() - 128).to(torch.int8).contiguous()}
    found = reader(tmp_path, parts, {"num_bits": 8, "symmetric": False}, TOKENS, format="int-quantized")
    check(found, q)
    assert torch.equal(found.read_quantized(MODULE)["zeros"].long(), q.zeros)


def test_codes_beyond_their_bits_are_refused(tmp_path: Path) -> None:
    parts = int8_parts(quantized(4))
    parts["weight"][0, 0] = 8
    with pytest.raises(InputError, match="codes of 4 bits lie between -8 and 7"):
        reader(tmp_path, parts, {"num_bits": 4, "group_size": 32}).read_quantized(MODULE)


def test_activation_and_cache_scales_are_noted(tmp_path: Path) -> None:
    codes, scales, dense = fp8_weight(torch.randn(128, 256, generator=GENERATOR), (-1, -1))
    parts = {"weight": codes, "weight_scale": scales.reshape(1), "input_scale": torch.ones(1)}
    cache = {"num_bits": 8, "type": "float"}
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    found = reader(tmp_path, parts, {"num_bits": 8, "type": "float"}, static, format="float-quantized", kv_cache_scheme=cache)
    assert torch.equal(found.read(f"{MODULE}.weight"), dense)
    assert f"{MODULE}.input_scale" not in found.tensors()
    assert any("8-bit float (static) activations are not used" in note for note in found.notes)
    assert any("8-bit float kv_cache_scheme (0 scales) is not used" in note for note in found.notes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"format": "nvfp4-pack-quantized"},
            "format nvfp4-pack-quantized, supported: dense, pack-quantized, int-quantized, float-quantized",
        ),
        ({"format": "marlin-24"}, "format marlin-24"),
        ({"format": "mixed-precision", "config_groups": {"g": {"targets": ["Linear"], "format": "mxfp4-pack-quantized"}}}, "mxfp4-pack"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "rotated weights"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights \\(sparse-24-bitmask\\)"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        reader(tmp_path, compressed_parts(quantized()), **config).tensors()
