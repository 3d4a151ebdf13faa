"""A quantized output head: declared in the manifest, beside an embedding that stays as it is, the same whichever road wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint
from engine_logits import relative_error
from safetensors.torch import load_file
from tiny_models import make_tiny_checkpoint, save_tokenizer

from dspark.converters.calibration.run import CalibratedRun
from dspark.converters.calibration.samples import SampleRequest
from dspark.converters.pipeline import quantize
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.manifest import EngineManifest, load_manifest

PROMPT = list(range(3, 43))


def source_of(tmp_path: Path, tied: bool) -> Path:
    config = llama_config(tie_word_embeddings=tied)
    state = llama_state(config, 1)
    if tied:
        state.pop("lm_head.weight", None)
    return save_checkpoint(tmp_path / "ckpt", config, state)


def schemes_of(manifest: EngineManifest) -> dict[str, str]:
    assert manifest.quant is not None
    return {module: scheme.name for module in ("lm_head", "model.layers.0.mlp.down_proj") if (scheme := manifest.quant.scheme_for(module))}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("scheme", "head"), [("w8a8", "w8a8"), ("w4a16", "w8a16")])
def test_head_is_stored_beside_the_embedding(tmp_path: Path, tied: bool, scheme: str, head: str) -> None:
    """The head of a tied model is the embedding: rounding that too would change what every layer reads."""
    source = source_of(tmp_path, tied)
    quantize(source, tmp_path / "engine", scheme, head_scheme=head)  # the audit compares with transformers
    manifest = load_manifest(tmp_path / "engine")
    assert schemes_of(manifest) == {"lm_head": head, "model.layers.0.mlp.down_proj": scheme}
    assert not manifest.model.tie_word_embeddings and "lm_head" in manifest.quality["layers"]
    stored = load_file(tmp_path / "engine" / "weights-00001-of-00001.safetensors")
    given = load_file(source / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], given["model.embed_tokens.weight"])
    assert "lm_head.qweight" in stored and "lm_head.weight" not in stored
    quantize(source, tmp_path / "dense", scheme)
    assert load_manifest(tmp_path / "dense").model.tie_word_embeddings == tied
    got, want = (logits_for(load_model(tmp_path / name), PROMPT) for name in ("engine", "dense"))
    assert 0 < relative_error(got, want) < 0.02


def test_calibrated_methods_round_the_head(tmp_path: Path) -> None:
    """What a calibrated run does not walk through is stored all the same, and says that it was only rounded."""
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint", "llama", tie_word_embeddings=True)
    save_tokenizer(checkpoint)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": list(range(3, 40 + n))}) + "\n" for n in range(8)))
    run = CalibratedRun(SampleRequest(lines))
    quantize(checkpoint, tmp_path / "engine", "w4a16", "gptq", 32, calibrated=run, head_scheme="w8a16")
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.quant is not None and manifest.quant.modules is not None
    assert manifest.quant.modules["lm_head"].method == "rtn" and manifest.quant.modules["model.layers.0.mlp.down_proj"].method == "gptq"
    assert logits_for(load_model(tmp_path / "engine"), PROMPT).isfinite().all()
