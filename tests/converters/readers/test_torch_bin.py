"""PyTorch pickles: read without running anything, unwrapped where that is unambiguous, refused by name where it is not."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import (
    Canary,
    llama_config,
    llama_state,
    reference_logits,
    save_checkpoint,
    save_pickles,
    token_ids,
    trainer_checkpoint,
)
from engine_logits import by_transformers, relative_error

from dspark.converters.detect import open_checkpoint
from dspark.converters.pipeline import convert
from dspark.converters.readers.torch_bin import TorchBinReader, load_state
from dspark.runtime.spec.errors import InputError, UnsupportedError

CLOSE = 1e-5
PROMPT = token_ids()
CONFIG = llama_config()
STATE = llama_state(CONFIG, 11)


def same_model(source: Path, engine: Path) -> bool:
    convert(source, engine, audit=False)
    return relative_error(by_transformers(engine, PROMPT), reference_logits(CONFIG, STATE, PROMPT)) < CLOSE


def test_plain(tmp_path: Path) -> None:
    """B11."""
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE)
    assert same_model(source, tmp_path / "engine")
    assert open_checkpoint(source).format == "pytorch"
    assert same_model(source / "pytorch_model.bin", tmp_path / "engine2")  # the file itself, beside its config


def test_sharded(tmp_path: Path) -> None:
    """B11: the index decides; another pickle in the directory changes nothing."""
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE, shards=3)
    torch.save(llama_state(CONFIG, 999), source / "pytorch_model.bin")
    assert same_model(source, tmp_path / "engine")
    names = [path.name for path in open_checkpoint(source).files()]
    assert "pytorch_model.bin.index.json" in names and "pytorch_model-00002-of-00003.bin" in names and "pytorch_model.bin" not in names


@pytest.mark.parametrize(
    "content",
    [
        trainer_checkpoint(STATE),
        {"state_dict": {f"model.{name}": tensor for name, tensor in STATE.items()}, "global_step": 5, "hyper_parameters": {"lr": 0.1}},
        {"model_state_dict": OrderedDict(STATE)},
        {f"_orig_mod.module.{name}": tensor for name, tensor in STATE.items()},
        {"module": {"state_dict": STATE}, "lr_scheduler": None},
        {name: torch.nn.Parameter(tensor) for name, tensor in STATE.items()},
    ],
    ids=["trainer", "lightning", "model_state_dict", "compiled", "nested", "parameters"],
)
def test_trainer_checkpoints_are_unwrapped(tmp_path: Path, content: Any) -> None:
    """B11: other loaders take such a file for a model without any known weight and draw all of them at random."""
    assert same_model(save_pickles(tmp_path / "ckpt", CONFIG, content), tmp_path / "engine")


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ({"model": STATE, "ema": {k: v + 1 for k, v in STATE.items()}}, UnsupportedError, r"more than one entry \(model, ema\)"),
        ({"teacher": STATE}, UnsupportedError, r"no weights under one of state_dict.*it holds teacher \(dict of 21\)"),
        ({"epoch": 3, "loss": 0.5}, UnsupportedError, r"no weights.*epoch \(int\), loss \(float\)"),
        ([STATE], UnsupportedError, "holds list, a state dict is needed"),
        ({**STATE, "epoch": 3}, UnsupportedError, r"more than weights: epoch \(int\)"),
        ({**STATE, "idx": STATE["lm_head.weight"].to_sparse()}, UnsupportedError, r"idx \(sparse tensor"),
        (
            {**{f"module.{k}": v for k, v in STATE.items() if k != "lm_head.weight"}, "lm_head.weight": STATE["lm_head.weight"]},
            InputError,
            r"prefix 'module\.' before some tensors and not before lm_head\.weight",
        ),
        ({**STATE, **{f"module.{k}": v for k, v in STATE.items()}}, InputError, "more than one model"),
        (
            {f"q.{part}": torch.zeros(2, 2) for part in ("qweight", "scales")},
            UnsupportedError,
            r"quantized weights in a pickle \(q\.qweight",
        ),
        ({f"other.{k}": v for k, v in STATE.items()}, InputError, r"missing: .*unexpected: other\."),
    ],
    ids=["two models", "unknown wrapper", "no weights", "list", "extra object", "sparse", "half a prefix", "twice", "quantized", "prefix"],
)
def test_what_is_not_plain_is_refused_by_name(tmp_path: Path, content: Any, error: type[Exception], words: str) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, content)
    with pytest.raises(error, match=words):
        convert(source, tmp_path / "engine", audit=False)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_pickle_runs(tmp_path: Path, legacy: bool) -> None:
    """B11: the refusal names the function that the file asked for."""
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE)
    content = {**STATE, "note": Canary(tmp_path / "CANARY")}
    torch.save(content, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsupportedError, match=r"objects that are no tensors: \w+\.mkdir") as caught:
        convert(source, tmp_path / "engine", audit=False)
    assert "save_pretrained" in caught.value.hint
    assert not (tmp_path / "CANARY").exists()


def test_a_bare_pickle_does_not_run_either(tmp_path: Path) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE)
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "CANARY")))
    with pytest.raises((InputError, UnsupportedError)):
        open_checkpoint(source)
    assert not (tmp_path / "CANARY").exists()


def test_the_form_before_zip_is_read(tmp_path: Path) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE)
    torch.save(STATE, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same_model(source, tmp_path / "engine")


def test_tensors_are_views_of_a_memory_map(tmp_path: Path) -> None:
    """A checkpoint larger than the memory is read tensor by tensor: the file's pages, not copies."""
    torch.save({"big": torch.ones(4, 1 << 20)}, tmp_path / "m.bin")
    before = anonymous_bytes()
    weight = load_state(tmp_path / "m.bin")["big"]
    assert float(weight.sum()) == 4 << 20
    assert anonymous_bytes() - before < 8 << 20


def anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_shared_storage_and_odd_strides(tmp_path: Path) -> None:
    """A tied head is one storage under two names; a slice and a transposed view keep their values."""
    config = llama_config(tie_word_embeddings=True)
    state = llama_state(config, 3)
    name = "model.layers.0.self_attn.o_proj.weight"
    full = {**state, "lm_head.weight": state["model.embed_tokens.weight"], name: state[name].T.contiguous().T}
    assert not full[name].is_contiguous()
    result = convert(save_pickles(tmp_path / "ckpt", config, full), tmp_path / "engine", audit=False)
    assert "lm_head.weight" not in result.manifest.tensors
    read = TorchBinReader(tmp_path / "ckpt").read(name)
    assert read.is_contiguous() and torch.equal(read, state[name])
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), reference_logits(config, state, PROMPT)) < CLOSE


def test_dtype_is_the_tensors_own(tmp_path: Path) -> None:
    config = llama_config(torch_dtype="__drop__")
    source = save_pickles(tmp_path / "ckpt", config, {name: tensor.bfloat16() for name, tensor in STATE.items()})
    assert convert(source, tmp_path / "engine", audit=False).manifest.model.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["../weights.bin", "/etc/passwd", "sub/weights.bin", ".."])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE, shards=2)
    torch.save(STATE, tmp_path / "weights.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(STATE, name)}))
    with pytest.raises(InputError, match="points outside its directory"):
        open_checkpoint(source)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE, shards=2)
    index = source / "pytorch_model.bin.index.json"
    described = json.loads(index.read_text())
    described["weight_map"]["model.ghost.weight"] = "pytorch_model-00001-of-00002.bin"
    index.write_text(json.dumps(described))
    with pytest.raises(InputError, match=r"model\.ghost\.weight \(not in pytorch_model-00001-of-00002\.bin\)"):
        open_checkpoint(source)
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(InputError, match=r"lacks pytorch_model-00002-of-00002\.bin"):
        open_checkpoint(source)


@pytest.mark.parametrize("keep", [0, 3, 5000, 100_000])
def test_a_file_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE)
    path = source / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        open_checkpoint(source)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE)
    (source / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(InputError, match="Git LFS pointer"):
        open_checkpoint(source)


def test_trainer_state_is_not_taken_for_weights(tmp_path: Path) -> None:
    """A training directory has optimizer.pt and the like beside the model; two models are not guessed between."""
    source = save_pickles(tmp_path / "ckpt", CONFIG, STATE, name="step-100.pt")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "scaler.pt"):
        torch.save({}, source / name)
    assert same_model(source, tmp_path / "engine")
    torch.save(STATE, source / "step-200.pt")
    with pytest.raises(InputError, match=r"2 pickles.*step-100\.pt, step-200\.pt"):
        open_checkpoint(source)


def test_safetensors_win_over_a_pickle_beside_them(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "ckpt", CONFIG, STATE)
    torch.save({"note": Canary(tmp_path / "CANARY")}, source / "pytorch_model.bin")
    assert open_checkpoint(source).format == "safetensors"
    result = convert(source, tmp_path / "engine", audit=False)
    assert [note for note in result.manifest.notes if "not read: pytorch_model.bin" in note]
    assert not (tmp_path / "CANARY").exists()
