"""Experts in GGUF files: read one by one from their stacks, under every name that llama.cpp has given them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from case_checkpoints import llama_config, llama_state, token_ids, write_gguf
from gguf_models import split_gguf, write_model_gguf
from tiny_models import make_tiny_model

from dspark.converters.mapping import map_checkpoint
from dspark.converters.pipeline import convert
from dspark.converters.readers.gguf import GgufReader
from dspark.converters.readers.gguf_names import Place
from dspark.converters.readers.gguf_parts import GgufParts
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError, UnsupportedError

PROMPT = token_ids(64)
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe"]


def assert_same_logits(source: Path, model: Any, tmp_path: Path) -> None:
    """The names come from the gguf package, the logits from transformers."""
    convert(source, tmp_path / "engine", dtype="float32", audit=False)
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_for(load_model(tmp_path / "engine", kernels="reference"), PROMPT), want, rtol=1e-4, atol=1e-4)


def round_to(model: Any, block_type: str) -> None:
    """Give a model the values that the blocks hold, so that transformers computes with the dequantized weights."""
    kind = gguf.GGMLQuantizationType[block_type]
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            blocks = gguf.quants.quantize(weight.detach().numpy(), kind)
            weight.data = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())


def one_tensor_an_expert(name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Mixtral files from before April 2024."""
    if "_exps." not in name:
        yield name, array
    for expert, matrix in enumerate(array if "_exps." in name else []):
        yield name.replace("_exps.", f".{expert}."), matrix


def without(dropped: str, inner: Any = one_tensor_an_expert) -> Any:
    def change(name: str, array: Any) -> Iterator[tuple[str, Any]]:
        return ((changed, value) for changed, value in inner(name, array) if changed != dropped)

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_experts(tmp_path: Path, family: str) -> None:
    """An expert begins at a whole number of rows of blocks, not of elements."""
    model = make_tiny_model(family, seed=1)
    round_to(model, "Q8_0")
    write_model_gguf(tmp_path / "m.gguf", model, "Q8_0")
    assert_same_logits(tmp_path / "m.gguf", model, tmp_path)


@pytest.mark.parametrize("block_type", [None, "Q8_0"])
def test_one_tensor_for_each_expert(tmp_path: Path, block_type: str | None) -> None:
    model = make_tiny_model("mixtral", seed=2)
    if block_type:
        round_to(model, block_type)
    write_model_gguf(tmp_path / "m.gguf", model, block_type, change=one_tensor_an_expert)
    assert "blk.2.ffn_down.3.weight" in GgufParts(tmp_path / "m.gguf").tensors
    assert_same_logits(tmp_path / "m.gguf", model, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_split_files(tmp_path: Path, family: str) -> None:
    model = make_tiny_model(family, seed=3)
    write_model_gguf(tmp_path / "m.gguf", model)
    parts = split_gguf(tmp_path / "m.gguf", tmp_path / "split", 3)
    assert_same_logits(parts[1], model, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_audit_passes(tmp_path: Path, family: str) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model(family, seed=4), "Q8_0")
    manifest = convert(tmp_path / "m.gguf", tmp_path / "engine").manifest
    assert manifest.model.family == family and manifest.model.dtype == "bfloat16"
    assert manifest.audit["summary"].startswith("audit passed")


def test_an_expert_is_its_part_of_the_stack(tmp_path: Path) -> None:
    model = make_tiny_model("qwen3_moe", seed=5)
    reader = GgufReader(write_model_gguf(tmp_path / "m.gguf", model))
    stacks = dict(model.named_parameters())
    gate_up, down = (stacks[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    expert = "model.layers.1.mlp.experts.4"
    assert torch.equal(reader.read(f"{expert}.gate_proj.weight"), gate_up[4, :32])
    assert torch.equal(reader.read(f"{expert}.up_proj.weight"), gate_up[4, 32:])
    assert torch.equal(reader.read(f"{expert}.down_proj.weight"), down[4])
    assert reader._places[f"{expert}.down_proj.weight"] == Place("blk.1.ffn_down_exps.weight", (64, 32), 4 * 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_the_file_is_read_once(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that is read twice stands in for another one."""
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model(family), "Q8_0")
    rows: dict[str, list[int]] = {}
    plain = GgufParts.decode_rows

    def decode_rows(self: GgufParts, name: str, first_row: int, num_rows: int) -> Any:
        rows.setdefault(name, []).extend(range(first_row, first_row + num_rows))
        return plain(self, name, first_row, num_rows)

    monkeypatch.setattr(GgufParts, "decode_rows", decode_rows)
    convert(tmp_path / "m.gguf", tmp_path / "engine", audit=False)
    shapes = {name: tensor.shape for name, tensor in GgufParts(tmp_path / "m.gguf").tensors.items()}
    assert {name: sorted(read) for name, read in rows.items()} == {
        name: list(range(int(np.prod(shape[:-1])))) for name, shape in shapes.items()
    }


def test_reading_an_expert_takes_the_memory_of_one(tmp_path: Path) -> None:
    """One of Mixtral 8x7B's stacks takes 8 * 14336 * 4096 * 4 bytes = 1.9 GB in float32."""
    model = make_tiny_model("mixtral", num_local_experts=64, num_hidden_layers=1)
    reader = GgufReader(write_model_gguf(tmp_path / "m.gguf", model, "Q8_0"))
    reader.read("model.norm.weight")  # imports
    one = 160 * 64 * 4
    tracemalloc.start()
    try:
        weight = reader.read("model.layers.0.mlp.experts.63.up_proj.weight")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weight.shape == (160, 64) and one <= peak < 6 * one  # 64 for the stack


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_missing_expert_is_named(tmp_path: Path, part: str) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("mixtral"), change=without(f"blk.1.ffn_{part}.2.weight"))
    with pytest.raises(InputError, match=rf"missing: model\.layers\.1\.mlp\.experts\.2\.{part}_proj\.weight(;|$)"):
        map_checkpoint(GgufReader(tmp_path / "m.gguf"))


def test_a_stack_that_is_too_short_names_the_expert(tmp_path: Path) -> None:
    def shorten(name: str, array: Any) -> Iterator[tuple[str, Any]]:
        yield name, array[:5] if name == "blk.0.ffn_up_exps.weight" else array

    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("qwen3_moe"), change=shorten)
    with pytest.raises(InputError, match=r"missing: model\.layers\.0\.mlp\.experts\.5\.up_proj\.weight(;|$)"):
        map_checkpoint(GgufReader(tmp_path / "m.gguf"))


def test_more_experts_than_the_metadata_says_are_refused(tmp_path: Path) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("qwen3_moe"), expert_count=5)
    with pytest.raises(InputError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.5\."):
        map_checkpoint(GgufReader(tmp_path / "m.gguf"))


def test_an_expert_in_a_stack_and_by_itself_is_refused(tmp_path: Path) -> None:
    def twice(name: str, array: Any) -> Iterator[tuple[str, Any]]:
        yield name, array
        if name == "blk.0.ffn_up_exps.weight":
            yield "blk.0.ffn_up.1.weight", array[1]

    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("mixtral"), change=twice)
    twice_where = r"experts\.1\.up_proj\.weight twice, in blk\.0\.ffn_up_exps\.weight and in blk\.0\.ffn_up\.1\.weight"
    with pytest.raises(InputError, match=twice_where):
        GgufReader(tmp_path / "m.gguf")


@pytest.mark.parametrize("flat", [True, False])
def test_both_forms_of_the_shared_experts_gate(tmp_path: Path, flat: bool) -> None:
    """Hugging Face has [1, hidden]; llama.cpp's converter drops the 1 or keeps it."""

    def change(name: str, array: Any) -> Iterator[tuple[str, Any]]:
        yield name, array[None] if "ffn_gate_inp_shexp" in name and not flat else array

    model = make_tiny_model("qwen2_moe", seed=6)
    write_model_gguf(tmp_path / "m.gguf", model, change=change)
    assert GgufParts(tmp_path / "m.gguf").tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == ((64,) if flat else (1, 64))
    weight = GgufReader(tmp_path / "m.gguf").read("model.layers.0.mlp.shared_expert_gate.weight")
    assert torch.equal(weight, model.model.layers[0].mlp.shared_expert_gate.weight)


def test_what_llama_cpp_fixes(tmp_path: Path) -> None:
    """transformers' defaults leave the shares of Qwen3-MoE as they are, which is wrong for every released model."""
    models = {family: GgufReader(write_model_gguf(tmp_path / f"{family}.gguf", make_tiny_model(family))).config() for family in FAMILIES}
    assert {family: config["norm_topk_prob"] for family, config in models.items()} == {
        "mixtral": True,
        "qwen2_moe": False,
        "qwen3_moe": True,
    }
    model = model_config_from_hf(models["qwen2_moe"])
    assert (model.num_experts, model.experts_per_token, model.moe_intermediate_size) == (6, 3, 32)
    assert (model.shared_expert_intermediate_size, model.qkv_bias, model.sparse_layers) == (96, True, ())
    assert model_config_from_hf(models["mixtral"]).moe_intermediate_size == 160


def test_widths_that_a_file_leaves_out(tmp_path: Path) -> None:
    """The first files of Qwen1.5-MoE: experts of feed_forward_length / experts taken, a shared one of feed_forward_length."""
    model = make_tiny_model("qwen2_moe", seed=7, intermediate_size=96, qkv_bias=False)
    absent = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    write_model_gguf(tmp_path / "m.gguf", model, **absent)
    config = GgufReader(tmp_path / "m.gguf").config()
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"], config["qkv_bias"]) == (32, 96, False)
    assert_same_logits(tmp_path / "m.gguf", model, tmp_path)


@pytest.mark.parametrize(
    ("family", "metadata", "words"),
    [
        ("qwen2_moe", {"expert_weights_norm": True}, "qwen2moe with expert_weights_norm True is not supported"),
        ("qwen3_moe", {"expert_weights_norm": False}, "qwen3moe with expert_weights_norm False"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func 2"),
        ("mixtral", {"expert_weights_scale": 2.5}, r"llama with expert_weights_scale 2\.5"),
        ("qwen3_moe", {"expert_group_count": 4}, "expert_group_count 4"),
        ("qwen3_moe", {"attention.sliding_window": 24}, "sliding_window 24"),
    ],
)
def test_a_router_that_works_otherwise_is_refused(tmp_path: Path, family: str, metadata: dict[str, Any], words: str) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model(family), **metadata)
    with pytest.raises(UnsupportedError, match=words):
        GgufReader(tmp_path / "m.gguf").config()


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    neutral = {"expert_weights_norm": True, "expert_gating_func": 1, "expert_weights_scale": 1.0, "expert_group_count": 1}
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("qwen3_moe"), **neutral)
    assert GgufReader(tmp_path / "m.gguf").config()["norm_topk_prob"] is True


@pytest.mark.parametrize(
    ("family", "metadata", "words"),
    [
        ("qwen3_moe", {"expert_count": None}, r"lacks the metadata key qwen3moe\.expert_count"),
        ("qwen2_moe", {"expert_count": 0}, r"qwen2moe\.expert_count 0, allowed: a positive integer"),
        ("mixtral", {"expert_used_count": None}, r"lacks the metadata key llama\.expert_used_count"),
        ("mixtral", {"expert_used_count": 0}, r"llama\.expert_used_count 0, allowed: a positive integer"),
        ("mixtral", {"expert_used_count": 1.5}, r"llama\.expert_used_count 1\.5, allowed: a positive integer"),
        ("mixtral", {"expert_used_count": 5}, "num_experts_per_tok is 5, the model has 4 experts"),
    ],
)
def test_counts_that_cannot_be(tmp_path: Path, family: str, metadata: dict[str, Any], words: str) -> None:
    """Hugging Face's defaults (60 experts, say) would stand in for an absent count."""
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model(family), **metadata)
    with pytest.raises(InputError, match=words):
        model_config_from_hf(GgufReader(tmp_path / "m.gguf").config())


def test_experts_in_another_architecture_are_refused(tmp_path: Path) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("qwen2"), expert_count=8)
    with pytest.raises(UnsupportedError, match="'qwen2 with experts' is not supported, supported with experts: llama, qwen2moe, qwen3moe"):
        GgufReader(tmp_path / "m.gguf")


def test_no_experts_is_a_llama(tmp_path: Path) -> None:
    config = llama_config()
    write_gguf(tmp_path / "m.gguf", config, llama_state(config), metadata={"llama.expert_count": 0, "llama.expert_used_count": 0})
    assert map_checkpoint(GgufReader(tmp_path / "m.gguf")).config.family == "llama"
