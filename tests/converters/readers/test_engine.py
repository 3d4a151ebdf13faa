"""An engine directory as a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, make_tiny_checkpoint

from dspark.converters.pipeline import convert
from dspark.converters.readers.engine import EngineReader
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.manifest import load_manifest


@pytest.mark.parametrize("family", FAMILIES)
def test_converting_an_engine_gives_the_same_engine(tmp_path: Path, family: str) -> None:
    convert(make_tiny_checkpoint(tmp_path / "ckpt", family), tmp_path / "a", audit=False)
    convert(tmp_path / "a", tmp_path / "b", audit=False)
    first, second = load_manifest(tmp_path / "a"), load_manifest(tmp_path / "b")
    assert first.model == second.model and first.tensors == second.tensors and first.files == second.files


def test_a_damaged_engine_is_refused(tmp_path: Path) -> None:
    convert(make_tiny_checkpoint(tmp_path / "ckpt", "llama"), tmp_path / "a", audit=False)
    manifest = json.loads((tmp_path / "a" / "engine.json").read_text())
    name = next(iter(manifest["tensors"]))
    manifest["tensors"][name]["shard"] = "../../elsewhere.safetensors"
    (tmp_path / "a" / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="points outside its directory"):
        EngineReader(tmp_path / "a")


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    convert(make_tiny_checkpoint(tmp_path / "ckpt", "llama"), tmp_path / "a", audit=False)
    (tmp_path / "a" / "weights-00001-of-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"weights-00001-of-00001\.safetensors"):
        EngineReader(tmp_path / "a")


def test_tensors_are_read_as_written(tmp_path: Path) -> None:
    convert(make_tiny_checkpoint(tmp_path / "ckpt", "qwen2", dtype="bfloat16"), tmp_path / "a", audit=False)
    reader = EngineReader(tmp_path / "a")
    assert reader.storage_dtype() == "bfloat16" and reader.read("model.norm.weight").dtype == torch.bfloat16
    assert reader.files()[0].name == "engine.json"
