"""Faults that users of other converters reported: the right answer or a plain refusal, never a wrong engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from case_checkpoints import (
    ROPE_REFERENCES,
    ROPE_SPELLINGS,
    cast,
    llama_config,
    llama_state,
    reference_logits,
    save_checkpoint,
    token_ids,
    write_gguf,
)
from engine_logits import by_transformers, relative_error
from safetensors.torch import save_file
from tiny_models import build_tokenizer

from dspark.converters.pipeline import Result, convert
from dspark.runtime.spec.errors import InputError

CLOSE = 1e-5
WRONG = 1e-2
PROMPT = token_ids()


def run(source: Path, engine: Path, **options: object) -> Result:
    return convert(source, engine, audit=False, **options)  # type: ignore[arg-type]


def test_missing_shard_is_named_and_leaves_no_engine(tmp_path: Path) -> None:
    """B01: an interrupted download must not become an engine with made-up weights."""
    config = llama_config()
    source = save_checkpoint(tmp_path / "ckpt", config, llama_state(config, 1), shards=4)
    (source / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00003-of-00004\.safetensors"):
        run(source, tmp_path / "engine")
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_stray_weight_files_beside_the_index_change_nothing(tmp_path: Path) -> None:
    """B02: the index decides, not a glob."""
    config = llama_config()
    state = llama_state(config, 2)
    source = save_checkpoint(tmp_path / "ckpt", config, state, shards=2)
    save_file(llama_state(config, 999), source / "consolidated.safetensors")
    save_file(llama_state(config, 998), source / "model.safetensors")
    run(source, tmp_path / "engine")
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), reference_logits(config, state, PROMPT)) < CLOSE


@pytest.mark.parametrize("with_copy", [True, False])
def test_tied_model_with_or_without_a_copy_of_the_head(tmp_path: Path, with_copy: bool) -> None:
    """B03: a redundant lm_head.weight is accepted and not stored twice."""
    config = llama_config(tie_word_embeddings=True)
    state = llama_state(config, 3)
    state["model.embed_tokens.weight"] *= 0.3
    saved = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()} if with_copy else state
    result = run(save_checkpoint(tmp_path / "ckpt", config, saved), tmp_path / "engine")
    assert "lm_head.weight" not in result.manifest.tensors and result.manifest.model.tie_word_embeddings
    assert any("the copy in lm_head.weight is not stored again" in note for note in result.manifest.notes) is with_copy
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), reference_logits(config, state, PROMPT)) < CLOSE


def test_untied_head_is_the_saved_one(tmp_path: Path) -> None:
    """B04: with the embedding as head every text collapses into repeats."""
    config = llama_config()
    state = llama_state(config, 4)
    run(save_checkpoint(tmp_path / "ckpt", config, state), tmp_path / "engine")
    got = by_transformers(tmp_path / "engine", PROMPT)
    trap = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    assert relative_error(got, reference_logits(config, state, PROMPT)) < CLOSE
    assert relative_error(got, reference_logits(config, trap, PROMPT)) > WRONG


def test_tie_flag_with_another_head_uses_the_saved_head_and_says_so(tmp_path: Path) -> None:
    """B05: a merged adapter left the flag true; tying in silence is the bug."""
    config = llama_config()
    state = llama_state(config, 5)
    source = save_checkpoint(tmp_path / "ckpt", {**config, "tie_word_embeddings": True}, state)
    result = run(source, tmp_path / "engine")
    assert result.manifest.model.tie_word_embeddings is False
    assert any("tie_word_embeddings" in note for note in result.manifest.notes)
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), reference_logits(config, state, PROMPT)) < CLOSE


def test_leftover_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    """B06: old savers wrote inv_freq per layer."""
    config = llama_config()
    state = llama_state(config, 6)
    frequencies = 1.0 / (10000 ** (torch.arange(0, 32, 2).float() / 32))
    full = {**state, "model.rotary_emb.inv_freq": frequencies.clone()}
    for layer in range(2):
        full[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
        full[f"model.layers.{layer}.self_attn.rotary_emb.cos_cached"] = torch.zeros(1, 1, 8, 32)
    result = run(save_checkpoint(tmp_path / "ckpt", config, full), tmp_path / "engine")
    assert set(result.manifest.tensors) == set(state)


def test_tokenizer_larger_than_the_embedding_is_noted_with_both_numbers(tmp_path: Path) -> None:
    """B07: four added tokens without rows: convert goes on and says 324 against 320."""
    config = llama_config()
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(["<|tool|>", "<|call|>"])
    tokenizer.add_tokens(["zyxxy", "qwvbn"])
    result = run(save_checkpoint(tmp_path / "ckpt", config, llama_state(config, 7), tokenizer=tokenizer), tmp_path / "engine")
    (note,) = result.manifest.notes
    assert "324" in note and "320" in note


@pytest.mark.parametrize("spelling", list(ROPE_SPELLINGS))
def test_rope_spellings_mean_the_same(tmp_path: Path, spelling: str) -> None:
    """B08: `type`, `rope_type`, null, and the table of transformers 5; never silently unscaled."""
    changes, reference = ROPE_SPELLINGS[spelling]
    state = llama_state(llama_config(), 8)
    run(save_checkpoint(tmp_path / "ckpt", llama_config(**changes), state), tmp_path / "engine")
    want = reference_logits(llama_config(**ROPE_SPELLINGS[ROPE_REFERENCES[reference]][0]), state, PROMPT)
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), want) < CLOSE
    if reference != "none":
        assert relative_error(want, reference_logits(llama_config(), state, PROMPT)) > WRONG


def test_attention_bias_is_kept(tmp_path: Path) -> None:
    """B09: dropping the four biases gives another model."""
    config = llama_config(attention_bias=True)
    state = llama_state(config, 9)
    run(save_checkpoint(tmp_path / "ckpt", config, state), tmp_path / "engine")
    got = by_transformers(tmp_path / "engine", PROMPT)
    bare = {name: tensor for name, tensor in state.items() if not name.endswith("bias")}
    assert relative_error(got, reference_logits(config, state, PROMPT)) < CLOSE
    assert relative_error(got, reference_logits(llama_config(), bare, PROMPT)) > WRONG


@pytest.mark.parametrize(
    ("changes", "stored", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "__drop__", "dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "__drop__"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": None}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "mixed", "bfloat16"),
        ({"torch_dtype": "float16"}, "float32", "float16"),
        ({"torch_dtype": "float32"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16", "bfloat16"),
    ],
)
def test_dtype_keys_and_their_lies(tmp_path: Path, changes: dict, stored: str, dtype: str) -> None:
    """B10: `dtype` or `torch_dtype`, else the tensors' own; an engine is never wider than its checkpoint on a label's word."""
    config = llama_config(**changes)
    rounded = cast(llama_state(llama_config(), 10), "bfloat16")
    state = rounded
    if stored == "mixed":
        state = {name: tensor.float() if "norm" in name else tensor for name, tensor in rounded.items()}
    elif stored == "float32":
        state = cast(rounded, "float32")
    result = run(save_checkpoint(tmp_path / "ckpt", config, state), tmp_path / "engine")
    assert result.manifest.model.dtype == dtype
    assert result.manifest.weight_bytes() == sum(tensor.numel() * 2 for tensor in state.values())
    want = reference_logits(llama_config(), cast(rounded, "float32"), PROMPT)
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), want) < 1e-2


@pytest.mark.parametrize("block_type", [None, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_gguf_rows_of_q_and_k_are_put_back(tmp_path: Path, block_type: str | None) -> None:
    """B12: early tokens look fine with permuted rows, a long prompt does not."""
    config = llama_config()
    state = llama_state(config, 12)
    effective = write_gguf(tmp_path / "model.gguf", config, state, block_type)
    run(tmp_path / "model.gguf", tmp_path / "engine", dtype="float32")
    want = reference_logits(config, effective, token_ids(120))
    assert relative_error(by_transformers(tmp_path / "engine", token_ids(120)), want) < CLOSE


def test_gguf_directory_with_one_file_is_read(tmp_path: Path) -> None:
    config = llama_config()
    (tmp_path / "ckpt").mkdir()
    write_gguf(tmp_path / "ckpt" / "model.gguf", config, llama_state(config, 12))
    assert run(tmp_path / "ckpt", tmp_path / "engine").manifest.lineage["format"] == "gguf"
    shutil.copy(tmp_path / "ckpt" / "model.gguf", tmp_path / "ckpt" / "other.gguf")
    with pytest.raises(InputError, match=r"2 \.gguf files"):
        run(tmp_path / "ckpt", tmp_path / "engine2")
