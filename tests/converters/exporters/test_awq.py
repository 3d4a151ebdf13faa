"""AWQ out, version gemm: the words are those of hand-packed modules, and what our reader makes of them is the engine again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exports import engine_of, hashes_of, same, tensors_of, uniform
from quantized_checkpoints import awq_gemm_parts, integers

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert
from dspark.runtime.spec.errors import UnsupportedError


@pytest.mark.parametrize(("group_size", "symmetric"), [(32, False), (64, True), (-1, False), (128, False)])
def test_words_and_round_trip(tmp_path: Path, group_size: int, symmetric: bool) -> None:
    """Every layer has zero points, 8 where it is symmetric. A group of 128 is all of a narrow layer and half of a wide one."""
    engine, found = engine_of(tmp_path, uniform(4, group_size, symmetric, skip=("layers.1.mlp.down_proj",)))
    export(engine, tmp_path / "out", "awq")
    stored = tensors_of(tmp_path / "out")
    for module, q in found.items():
        same(stored, module, awq_gemm_parts(q))
    if symmetric:
        assert {int(word) & 0xFFFFFFFF for word in stored["model.layers.0.mlp.up_proj.qzeros"].flatten()} == {0x88888888}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    dense = ["model.layers.1.mlp.down_proj", "lm_head"]
    expected = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size, "zero_point": True}
    assert config == {**expected, "modules_to_not_convert": dense}
    convert(tmp_path / "out", tmp_path / "again", audit=False)
    assert hashes_of(tmp_path / "again") == hashes_of(engine)


def head_too(module: str, weight: torch.Tensor):
    return None if "embed" in module else integers(weight)


def two_sizes(module: str, weight: torch.Tensor):
    return uniform(4, 64 if module.endswith("o_proj") else 32)(module, weight)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (uniform(8), "8 bits, allowed: 4"),
        (uniform(order_seed=1), "reordered (act-order)"),
        (head_too, "lm_head: this format has no quantized head"),
        (two_sizes, "layers.1.self_attn.o_proj: group size 64, that of most is 32"),
    ],
    ids=["bits", "act-order", "head", "group sizes"],
)
def test_what_cannot_be_said_is_refused_by_layer(tmp_path: Path, recipe, words: str) -> None:
    engine, _ = engine_of(tmp_path, recipe)
    with pytest.raises(UnsupportedError, match="cannot be written as awq") as caught:
        export(engine, tmp_path / "out", "awq")
    assert words in caught.value.message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["engine", "source"]


def test_outputs_that_fill_no_word_are_refused(tmp_path: Path) -> None:
    engine, _ = engine_of(tmp_path, lambda module, w: integers(w) if module.endswith("up_proj") else None, intermediate_size=164)
    with pytest.raises(UnsupportedError, match="164 outputs, allowed: multiples of 8"):
        export(engine, tmp_path / "out", "awq")
