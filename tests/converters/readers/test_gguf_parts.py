"""Split GGUF checkpoints: all parts or none, in any order they are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, reference_logits, token_ids, write_gguf
from engine_logits import by_transformers, relative_error
from gguf_models import split_gguf

from dspark.converters.detect import open_checkpoint
from dspark.converters.pipeline import convert
from dspark.converters.readers.gguf import GgufReader
from dspark.converters.readers.gguf_parts import GgufParts, part_paths
from dspark.runtime.spec.errors import InputError

CONFIG = llama_config()
STATE = llama_state(CONFIG, 21)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "whole.gguf", CONFIG, STATE)
    return split_gguf(tmp_path / "whole.gguf", tmp_path / "split", 3)


def test_names_of_parts() -> None:
    assert [path.name for path in part_paths(Path("d/m-00002-of-00003.gguf"))] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert part_paths(Path("d/m.gguf")) == [Path("d/m.gguf")]


def test_any_part_or_the_directory_is_the_whole_model(tmp_path: Path, parts: list[Path]) -> None:
    whole = GgufReader(tmp_path / "whole.gguf")
    for source in (*parts, parts[0].parent):
        reader = open_checkpoint(source)
        assert reader.config() == whole.config() and reader.tensors().keys() == whole.tensors().keys()
        assert reader.files() == parts
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(open_checkpoint(parts[1]).read(name), STATE[name])
    convert(parts[2], tmp_path / "engine", dtype="float32", audit=False)
    want = reference_logits(CONFIG, STATE, token_ids())
    assert relative_error(by_transformers(tmp_path / "engine", token_ids()), want) < 1e-5


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(InputError, match=r"one of 3 parts, missing: m-00002-of-00003\.gguf"):
        GgufParts(parts[0])
    with pytest.raises(InputError, match=r"missing: m-00002-of-00003\.gguf"):
        open_checkpoint(parts[0].parent)


def test_a_part_under_another_name_is_refused(parts: list[Path]) -> None:
    other = parts[0].with_name("model.gguf")
    shutil.copy(parts[0], other)
    with pytest.raises(InputError, match=r"does not end in -0000X-of-00003\.gguf"):
        GgufParts(other)


def test_parts_that_were_mixed_up_are_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(InputError, match=r"part 1 \(from 0\) of 3, its name says 2 of 3"):
        GgufParts(parts[0])


def test_two_models_in_a_directory_are_not_guessed_between(tmp_path: Path, parts: list[Path]) -> None:
    split_gguf(tmp_path / "whole.gguf", parts[0].parent, 3, stem="other")
    with pytest.raises(InputError, match=r"holds 6 \.gguf files"):
        open_checkpoint(parts[0].parent)
