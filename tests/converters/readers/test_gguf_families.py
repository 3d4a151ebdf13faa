"""Every GGUF architecture against the transformers model that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checkpoints import token_ids
from gguf_models import ARCHITECTURE_OF, write_model_gguf
from source_tree import ROOT
from tiny_models import make_tiny_model

from dspark.converters.pipeline import convert
from dspark.converters.readers.gguf import GgufReader
from dspark.converters.readers.gguf_families import _ROWS, ARCHITECTURES
from dspark.converters.readers.gguf_file import SUPPORTED_TYPES
from dspark.converters.readers.gguf_metadata import Metadata
from dspark.converters.readers.gguf_tokenizer import PRE_TOKENIZERS
from dspark.converters.readers.torch_bin import WRAPPERS
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError, UnsupportedError

PROMPT = token_ids(160)  # past the windows and the original contexts of the tiny models
# name of a tiny model -> what GGUF cannot say otherwise
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-linear": {},
    "llama-yarn": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "granite": {"mlp_bias": False},
    "smollm3": {},
    "olmo2": {},
    "phi3": {},
    "phi3-partial": {},
    "phi3-longrope": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
    "gemma3-linear": {"query_pre_attn_scalar": 16},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
}


def converted_logits(source: Path, engine: Path) -> torch.Tensor:
    convert(source, engine, dtype="float32", audit=False)
    return logits_for(load_model(engine, kernels="reference"), PROMPT)


@torch.inference_mode()
def wanted_logits(model: Any) -> torch.Tensor:
    return model(torch.tensor([PROMPT])).logits[0].float()


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """A wrong row order, norm offset, window or scale shows here: the names come from the gguf package, the logits from transformers."""
    model = make_tiny_model(name, seed=3, **MODELS[name])
    write_model_gguf(tmp_path / "m.gguf", model)
    torch.testing.assert_close(converted_logits(tmp_path / "m.gguf", tmp_path / "engine"), wanted_logits(model), rtol=1e-4, atol=1e-4)


def test_every_row_is_of_a_family_and_tested() -> None:
    assert ARCHITECTURES == _ROWS
    assert all(FAMILIES[row.family].architecture == row.hugging_face for row in _ROWS.values())
    families = {name.split("-")[0] for name in MODELS}
    assert set(_ROWS) <= {ARCHITECTURE_OF.get(family, family) for family in families}


def test_llama3_scaling_comes_back_from_its_divisors(tmp_path: Path) -> None:
    """llama.cpp keeps no settings of it but what each frequency is divided by."""
    model = make_tiny_model("llama-llama3", seed=4)
    plain = 10000.0 ** -(np.arange(8) / 8)
    divisors = plain / model.model.rotary_emb.inv_freq.numpy()
    write_model_gguf(tmp_path / "m.gguf", model, divisors=divisors)
    rope = model_config_from_hf(GgufReader(tmp_path / "m.gguf").config()).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 8.0, 64)
    torch.testing.assert_close(converted_logits(tmp_path / "m.gguf", tmp_path / "engine"), wanted_logits(model), rtol=1e-4, atol=1e-4)


def test_other_divisors_are_kept_as_they_are(tmp_path: Path) -> None:
    model = make_tiny_model("llama", seed=5)
    divisors = np.array([1.0, 1.5, 1.25, 3.0, 2.0, 5.0, 4.0, 6.0], np.float32)
    write_model_gguf(tmp_path / "m.gguf", model, divisors=divisors)
    assert model_config_from_hf(GgufReader(tmp_path / "m.gguf").config()).rope.long_factor == tuple(divisors.tolist())
    model.model.rotary_emb.inv_freq /= torch.from_numpy(divisors)
    torch.testing.assert_close(converted_logits(tmp_path / "m.gguf", tmp_path / "engine"), wanted_logits(model), rtol=1e-4, atol=1e-4)


def test_divisors_of_one_change_nothing(tmp_path: Path) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("llama"), divisors=np.ones(8))
    assert GgufReader(tmp_path / "m.gguf").config()["rope_scaling"] is None


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("qwen2", {"attention.sliding_window": 24}, "qwen2 with attention.sliding_window 24"),
        ("olmo2", {"attention.sliding_window": 24}, "olmo2 with attention.sliding_window 24"),
        ("gemma2", {"attention.sliding_window_pattern": 3}, "sliding_window_pattern 3 is not supported"),
        ("llama-linear", {"rope.scaling.alpha": 2.0}, "rope.scaling.alpha 2.0"),
        ("llama-yarn", {"rope.scaling.yarn_attn_factor": 2.0}, "rope.scaling.yarn_attn_factor 2.0"),
    ],
)
def test_what_a_row_cannot_say_is_refused(tmp_path: Path, name: str, metadata: dict[str, Any], words: str) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model(name), **metadata)
    with pytest.raises(UnsupportedError, match=words):
        GgufReader(tmp_path / "m.gguf").config()


def test_divisors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    write_model_gguf(tmp_path / "m.gguf", make_tiny_model("llama-linear"), divisors=np.full(8, 2.0))
    with pytest.raises(UnsupportedError, match=r"both rope_freqs\.weight and rope scaling 'linear'"):
        GgufReader(tmp_path / "m.gguf").config()


@pytest.mark.parametrize(("arch", "layers", "hidden", "heads", "scale"), [("gemma2", 46, 4608, 32, 144), ("gemma3", 62, 5376, 32, 168)])
def test_gemma_27b_has_its_own_score_scale(arch: str, layers: int, hidden: int, heads: int, scale: int) -> None:
    values = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": hidden,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.key_length": 128,
        f"{arch}.attention.sliding_window": 1024,
        f"{arch}.rope.freq_base": 1e6,
    }
    row = ARCHITECTURES[arch]
    assert row.extra(Metadata(values, Path("m.gguf")))["query_pre_attn_scalar"] == scale
    values[f"{arch}.block_count"] = layers - 1
    assert row.extra(Metadata(values, Path("m.gguf")))["query_pre_attn_scalar"] == 128


def test_a_missing_multiplier_is_named() -> None:
    """Without it the model would run and give other logits."""
    metadata = Metadata({"general.architecture": "granite", "granite.embedding_scale": 12.0}, Path("m.gguf"))
    with pytest.raises(InputError, match=r"lacks the metadata key granite\.residual_scale"):
        ARCHITECTURES["granite"].extra(metadata)


def test_the_document_names_what_is_read() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    names = [*ARCHITECTURES, *PRE_TOKENIZERS, *WRAPPERS]
    assert [name for name in names if f"`{name}`" not in text] == []
    types = text[text.index("### Block types") :].split("`")[1].split()
    assert sorted(types) == sorted(SUPPORTED_TYPES)
