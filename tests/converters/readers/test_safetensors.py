"""Hugging Face directories: what the reader accepts, and the one line for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint

from dspark.converters.readers.safetensors import INDEX_NAME, SafetensorsReader
from dspark.runtime.spec.errors import InputError


def sharded(tmp_path: Path) -> Path:
    config = llama_config()
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config), shards=3)


def edit_index(directory: Path, change: dict[str, str]) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"].update(change)
    (directory / INDEX_NAME).write_text(json.dumps(index))


def test_reads_every_tensor_of_all_shards(tmp_path: Path) -> None:
    config = llama_config()
    state = llama_state(config)
    reader = SafetensorsReader(save_checkpoint(tmp_path / "ckpt", config, state, shards=3))
    assert {name: info.shape for name, info in reader.tensors().items()} == {name: tuple(t.shape) for name, t in state.items()}
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in state.items())
    assert reader.storage_dtype() == "float32"
    assert {path.name for path in reader.files()} >= {"config.json", INDEX_NAME, "model-00001-of-00003.safetensors"}


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b.safetensors"])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    directory = sharded(tmp_path)
    (tmp_path / "evil.safetensors").write_bytes((directory / "model-00001-of-00003.safetensors").read_bytes())
    edit_index(directory, {"model.norm.weight": name})
    with pytest.raises(InputError, match="points outside its directory"):
        SafetensorsReader(directory)


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    directory = sharded(tmp_path)
    for index in (1, 3):
        (directory / f"model-0000{index}-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00001-of-00003\.safetensors, model-00003-of-00003\.safetensors"):
        SafetensorsReader(directory)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    directory = sharded(tmp_path)
    edit_index(directory, {"model.norm.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(InputError, match=r"model\.norm\.weight \(not in model-00001-of-00003\.safetensors\)"):
        SafetensorsReader(directory)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    directory = sharded(tmp_path)
    (directory / INDEX_NAME).write_text(content)
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json"):
        SafetensorsReader(directory)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_shard_cut_off_is_refused_by_name(tmp_path: Path, size: int) -> None:
    directory = sharded(tmp_path)
    shard = directory / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(InputError, match=r"model-00002-of-00003\.safetensors' is damaged"):
        SafetensorsReader(directory)


def test_a_git_lfs_pointer_is_called_so(tmp_path: Path) -> None:
    directory = sharded(tmp_path)
    (directory / "model-00002-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match="Git LFS pointer"):
        SafetensorsReader(directory)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    directory = sharded(tmp_path)
    (directory / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json' cannot be read"):
        SafetensorsReader(directory).config()


def test_no_tokenizer_is_no_fault(tmp_path: Path) -> None:
    directory = sharded(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert SafetensorsReader(directory).tokenizer() is None
