"""Nothing is lost or used twice between a checkpoint and a loaded engine, and the manifest says what went in."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint
from tiny_models import FAMILIES, make_tiny_checkpoint, make_tiny_model

from dspark.converters.detect import open_checkpoint
from dspark.converters.mapping import MappedModel, map_checkpoint
from dspark.converters.pipeline import TOOLS, convert
from dspark.converters.writer import hash_file
from dspark.runtime.execution.loader import EngineWeights
from dspark.runtime.spec.errors import InputError


def uses_of(model: MappedModel) -> dict[str, torch.Tensor]:
    """For each tensor of the checkpoint how often each of its rows goes into the engine, [experts, rows]."""
    uses = {}
    for name, info in model.reader.tensors().items():
        uses[name] = torch.zeros(info.shape[0], info.shape[1]) if len(info.shape) == 3 else torch.zeros(1, info.shape[0])
    for name in model.shapes:
        part = model.parts.get(name)
        if part is None:
            uses[name] += 1
        else:
            uses[part.source][part.expert or 0, part.first_row : part.first_row + part.num_rows] += 1
    return uses


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_checkpoint_is_used_exactly_once(tmp_path: Path, family: str) -> None:
    """Fused projections are split without a row lost, shared or read from the wrong place."""
    for name, uses in uses_of(map_checkpoint(open_checkpoint(make_tiny_checkpoint(tmp_path, family)))).items():
        assert bool((uses == 1).all()), name


def test_so_is_every_row_of_every_stacked_expert(tmp_path: Path) -> None:
    make_tiny_model("qwen2_moe-mixed").save_pretrained(tmp_path, save_original_format=False)
    uses = uses_of(map_checkpoint(open_checkpoint(tmp_path)))
    assert any(rows.shape[0] > 1 for rows in uses.values())
    assert all(bool((rows == 1).all()) for rows in uses.values())


def test_a_loaded_engine_takes_every_tensor_once(tmp_path: Path) -> None:
    """A tensor that no layer asks for, or two do, means that the model is not the one that was converted."""
    config = llama_config()
    manifest = convert(save_checkpoint(tmp_path / "ckpt", config, llama_state(config)), tmp_path / "engine", audit=False).manifest
    weights = EngineWeights(tmp_path / "engine", manifest, torch.float32, "cpu")
    for name in list(manifest.tensors)[:-2]:
        weights.take(name)
    with pytest.raises(InputError, match=r"2 tensors of the engine are not used: lm_head\.weight, model\.norm\.weight"):
        weights.check_all_taken()
    with pytest.raises(InputError, match=r"'model\.embed_tokens\.weight' is used twice"):
        weights.take("model.embed_tokens.weight")
    with pytest.raises(InputError, match=r"has no tensor 'model\.extra'"):
        weights.take("model.extra")


def test_the_manifest_names_the_source_its_files_and_the_tools(tmp_path: Path) -> None:
    config = llama_config()
    source = save_checkpoint(tmp_path / "my-model", config, llama_state(config), shards=2)
    lineage = convert(source, tmp_path / "engine", audit=False).manifest.lineage
    assert (lineage["source"], lineage["format"]) == ("my-model", "safetensors")
    assert lineage["files"] == {
        path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path)} for path in source.iterdir() if path.name in lineage["files"]
    }
    weights = {"model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert {"config.json", "tokenizer.json", *weights} <= set(lineage["files"])
    assert lineage["tools"] == {name: version(name) for name in TOOLS}
