"""GPTQ checkpoints, module by module: what the content decides, what is refused, and that integers are handed on as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import State, llama_config, llama_state
from quantized_checkpoints import Integers, bit_stream, gptq_parts, integers, save_quantized, stream_down
from safetensors.torch import save_file

from dspark.converters.detect import open_checkpoint
from dspark.converters.mapping import map_checkpoint
from dspark.converters.readers.gptq import GptqReader
from dspark.converters.readers.quantized import order_of_groups, trivial_order, whole_groups
from dspark.kernels.packing import unpack_codes
from dspark.runtime.spec.errors import InputError, UnsupportedError

MODULE = "model.layers.0.mlp.down_proj"  # 128 outputs, 256 inputs
GENERATOR = torch.Generator().manual_seed(7)


def quantized(bits: int = 4, group_size: int = 32, symmetric: bool = True, order_seed: int | None = None) -> Integers:
    return integers(torch.randn(128, 256, generator=GENERATOR) * 0.1, bits, group_size, symmetric, order_seed)


def reader(tmp_path: Path, parts: State, **config: Any) -> GptqReader:
    """A checkpoint in which MODULE alone is quantized."""
    state = {name: tensor.half() for name, tensor in llama_state(llama_config()).items() if name != f"{MODULE}.weight"}
    described = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **config}
    source = save_quantized(tmp_path / "ckpt", llama_config(), {**state, **{f"{MODULE}.{leaf}": t for leaf, t in parts.items()}}, described)
    opened = open_checkpoint(source)
    assert isinstance(opened, GptqReader)
    return opened


def check(found: GptqReader, q: Integers) -> None:
    """Same numbers, and where nothing moves the same words."""
    assert torch.equal(found.read(f"{MODULE}.weight"), q.dense())
    parts = found.read_quantized(MODULE)
    order = parts["perm"].long() if "perm" in parts else torch.arange(256)
    assert torch.equal(unpack_codes(parts["qweight"], q.bits, 256).long(), q.codes[order])
    assert torch.equal(parts["scales"], q.scales)
    if "zeros" in parts:
        assert torch.equal(parts["zeros"].long(), q.zeros)
    if "perm" not in parts:
        assert torch.equal(parts["qweight"], stream_down(q.codes, q.bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_kept(tmp_path: Path, bits: int, version: str, symmetric: bool) -> None:
    q = quantized(bits, symmetric=symmetric)
    found = reader(tmp_path, gptq_parts(q, version), bits=bits, checkpoint_format=version)
    check(found, q)
    assert found.quantized()[MODULE].symmetric == symmetric
    assert list(found.quantized()) == [MODULE]


@pytest.mark.parametrize(("stored", "label"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2"), ("gptq_v2", None), ("gptq", None)])
def test_a_label_that_lies_is_found_out(tmp_path: Path, stored: str, label: str | None) -> None:
    """Symmetric zero points say themselves how they are stored: 7 is 8 less one."""
    q = quantized()
    found = reader(tmp_path, gptq_parts(q, stored), sym=True, **({"checkpoint_format": label} if label else {}))
    check(found, q)
    assert any("the content is followed" in note for note in found.notes) == (stored != (label or "gptq"))


def test_the_label_counts_where_the_config_says_asymmetric(tmp_path: Path) -> None:
    """Zero points that all happen to be 7 are 7 in a v2 file."""
    q = quantized(symmetric=False)
    q.zeros[:] = 7
    found = reader(tmp_path, gptq_parts(q, "gptq_v2"), checkpoint_format="gptq_v2")
    check(found, q)
    assert not found.quantized()[MODULE].symmetric and found.notes == []


def test_symmetric_zero_points_that_differ_are_refused(tmp_path: Path) -> None:
    found = reader(tmp_path, gptq_parts(quantized(symmetric=False)), sym=True)
    with pytest.raises(InputError, match=f"{MODULE}.qzeros.* holds other values than 7 and 8, but the config says sym"):
        found.tensors()


def test_a_missing_sym_goes_by_the_content(tmp_path: Path) -> None:
    q = quantized(symmetric=False)
    found = reader(tmp_path, gptq_parts(q), sym=None)
    check(found, q)


def test_zero_points_of_zero(tmp_path: Path) -> None:
    """v1 stores 0 - 1: 15 in its own lane, or with a borrow from the lanes above where whole words were subtracted."""
    q = quantized(symmetric=False)
    q.zeros[0, :8] = torch.arange(8)
    plain = gptq_parts(q)
    assert int(plain["qzeros"][0, 0]) == 0x6543210F
    found = reader(tmp_path / "a", plain)
    check(found, q)
    assert any("stored as -1, read as zero 0" in note for note in found.notes)

    words = bit_stream(q.zeros, 4).numpy().view("uint32") - 0x11111111
    borrowed = {**plain, "qzeros": torch.from_numpy(words.view("int32"))}
    assert int(borrowed["qzeros"][0, 0]) == 0x654320FF
    check(reader(tmp_path / "b", borrowed, meta={"quantizer": ["gptqmodel:7.6.0"]}), q)


@pytest.mark.parametrize("g_idx", ["absent", "zero", "trivial"])
def test_indexes_that_say_nothing(tmp_path: Path, g_idx: str) -> None:
    """Old files have none, or zeros; desc_act in the config is no evidence."""
    q = quantized(symmetric=False)
    parts = gptq_parts(q, with_g_idx=g_idx != "absent")
    if g_idx == "zero":
        parts["g_idx"] = torch.zeros(256, dtype=torch.int32)
    found = reader(tmp_path, parts, desc_act=True)
    check(found, q)
    assert not found.quantized()[MODULE].act_order


@pytest.mark.parametrize("bits", [3, 4])
def test_act_order_moves_codes_and_nothing_else(tmp_path: Path, bits: int) -> None:
    q = quantized(bits, symmetric=False, order_seed=3)
    found = reader(tmp_path, gptq_parts(q), bits=bits, desc_act=False)
    check(found, q)
    assert found.quantized()[MODULE].act_order


def test_order_of_groups_by_hand() -> None:
    """diag(H) = 1 8 2 7 3 6 4 5 in groups of four: inputs 1, 3, 5, 7 are the first group."""
    g_idx = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.int32)
    assert order_of_groups(g_idx, 2, 4).tolist() == [1, 3, 5, 7, 0, 2, 4, 6]
    assert order_of_groups(torch.tensor([0, 1, 0, 0]), 2, 3).tolist() == [0, 2, 3, 1]  # a short last group
    assert order_of_groups(torch.tensor([0, 1, 1, 0, 0, 0]), 2, 3) is None
    assert order_of_groups(torch.tensor([0, 1, 2, 0]), 2, 2) is None
    assert trivial_order(torch.tensor([0, 0, 1, 1]), 2) and not trivial_order(torch.tensor([1, 0, 1, 0]), 2)
    assert whole_groups(192, 128) == 64


def test_groups_that_are_not_full_are_refused(tmp_path: Path) -> None:
    parts = gptq_parts(quantized(order_seed=3))
    parts["g_idx"][parts["g_idx"] == 1] = 2
    with pytest.raises(UnsupportedError, match=f"{MODULE}.g_idx.* does not put 32 of 256 inputs into each of 8 groups"):
        reader(tmp_path, parts).tensors()


def test_a_short_last_group(tmp_path: Path) -> None:
    """256 inputs in groups of 96: two full ones and 64; the engine repeats scales in groups of 32."""
    q = quantized(group_size=96, symmetric=False)
    found = reader(tmp_path, gptq_parts(q), group_size=96)
    assert torch.equal(found.read(f"{MODULE}.weight"), q.dense())
    assert found.quantized()[MODULE].group_size == 32 and found.read_quantized(MODULE)["scales"].shape == (8, 128)


def test_planar_three_bits(tmp_path: Path) -> None:
    q = quantized(3, symmetric=False)

    def planes(codes: torch.Tensor) -> torch.Tensor:
        """[R, C] -> int32 [R, C * 3 / 32]: per 32 codes two words of low bits, one of top bits."""
        runs = codes.reshape(codes.shape[0], -1, 32)
        low = torch.stack([bit_stream(run & 3, 2) for run in runs.unbind(1)], 1)
        top = torch.stack([bit_stream(run >> 2, 1) for run in runs.unbind(1)], 1)
        return torch.cat([low, top], -1).flatten(1).contiguous()

    parts = {**gptq_parts(q, "gptq_v2"), "qweight": planes(q.codes.t()).t().contiguous(), "qzeros": planes(q.zeros)}
    check(reader(tmp_path, parts, bits=3, checkpoint_format="gptq_p"), q)


def test_rules_of_dynamic(tmp_path: Path) -> None:
    """The first positive rule that matches the start of the name; "-:" rules and later ones change nothing here."""
    q = quantized(8, 64)
    rules = {"-:.*gate": {}, ".*gate": {"bits": 3}, "+:model\\.layers\\.0\\.mlp\\.down": {"bits": 8, "group_size": 64}, ".*": {"bits": 2}}
    check(reader(tmp_path, gptq_parts(q), dynamic=rules), q)


def test_bits_that_contradict_the_content_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"32 rows for 256 inputs are 4 bits, the config says 8"):
        reader(tmp_path, gptq_parts(quantized()), bits=8).tensors()


def test_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    parts = gptq_parts(quantized())
    with pytest.raises(InputError, match=rf"{MODULE} of .*qzeros \[8, 15\].* qzeros must be int32 \[8, 16\]"):
        reader(tmp_path, {**parts, "qzeros": parts["qzeros"][:, :15].contiguous()}).tensors()


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    parts = gptq_parts(quantized())
    parts["scales"][0, 0] = float("nan")
    with pytest.raises(InputError, match="scales that are not finite"):
        reader(tmp_path, parts).read_quantized(MODULE)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """Old packers wrote one for every module; one that holds numbers is an error of the mapping."""
    parts = {**gptq_parts(quantized()), "bias": torch.zeros(128)}
    found = reader(tmp_path / "a", parts)
    map_checkpoint(found)
    assert any("biases of zeros" in note for note in found.notes)
    with pytest.raises(InputError, match=rf"unexpected: {MODULE}.bias"):
        map_checkpoint(reader(tmp_path / "b", {**parts, "bias": torch.ones(128)}))


def test_a_file_of_another_name_and_a_config_of_its_own(tmp_path: Path) -> None:
    """AutoGPTQ: gptq_model-4bit-32g.safetensors beside quantize_config.json, nothing in config.json."""
    q = quantized(symmetric=False)
    source = reader(tmp_path, gptq_parts(q)).path
    (source / "model.safetensors").rename(source / "gptq_model-4bit-32g.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (source / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(source)
    assert isinstance(found, GptqReader)
    check(found, q)
    assert {path.name for path in found.files()} >= {"gptq_model-4bit-32g.safetensors", "quantize_config.json"}
    save_file({"x": torch.zeros(1)}, source / "other.safetensors")
    with pytest.raises(InputError, match="several weight files"):
        GptqReader(source)


def test_a_quantized_embedding_is_refused(tmp_path: Path) -> None:
    parts = {"qweight": torch.zeros(16, 320, dtype=torch.int32), "scales": torch.ones(4, 320, dtype=torch.float16)}
    source = reader(tmp_path, gptq_parts(quantized())).path
    save_file({f"model.embed_tokens.{leaf}": part for leaf, part in parts.items()}, source / "model.safetensors")
    with pytest.raises(UnsupportedError, match="quantized embeddings are not supported"):
        GptqReader(source).tensors()
