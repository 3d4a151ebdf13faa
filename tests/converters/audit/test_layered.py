"""Layer by layer the audit computes what it computes whole, names the layer that is wrong, and holds no more than a layer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint
from peak_memory import needs_proc, peak_anon_bytes
from tiny_models import FAMILIES, make_tiny_checkpoint, save_tokenizer

from dspark.converters.audit import layered
from dspark.converters.audit.logits import _engine_logits, _reference_logits, audit_logits, probe_prompts
from dspark.converters.audit.memory import layered_bytes, whole_bytes
from dspark.converters.pipeline import convert, quantize
from dspark.runtime.execution.loader import EngineWeights
from dspark.runtime.spec.errors import QualityError
from dspark.runtime.spec.manifest import EngineManifest


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_compute_what_they_compute_whole(tmp_path: Path, family: str) -> None:
    """Masks and ropes that differ from layer to layer, factors on embedding and logits, fused and stacked weights."""
    engine, manifest, prompts = engine_of(make_tiny_checkpoint(tmp_path / "ckpt", family), tmp_path)
    with torch.inference_mode():
        theirs, ours = layered.ReferenceLayers(engine, manifest, prompts), layered.EngineLayers(engine, manifest, prompts)
        theirs.start()
        ours.start()
        for index in range(manifest.model.num_layers):
            theirs.advance(index)
            ours.advance(index)
        head = ours.head()
        ours.check_all_taken()
        assert all(parameter.is_meta for parameter in theirs._model.model.layers.parameters())
        got = ours.walk.logits(head, slice(0, ours.walk.num_tokens))
        torch.testing.assert_close(torch.cat(theirs.logits()), torch.cat(_reference_logits(engine, manifest, prompts)), **CLOSE)
        torch.testing.assert_close(got, torch.cat(_engine_logits(engine, prompts)), **CLOSE)


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(("scheme", "head_scheme"), [(None, None), ("w8a16", None), ("w4a16-asym", "w8a16")])
def test_what_does_not_fit_whole_is_compared_layer_by_layer(tmp_path: Path, scheme: str | None, head_scheme: str | None) -> None:
    """free_bytes decides: the same numbers, from the same prompts; a byte less than a layer's need and there is no comparison."""
    engine, manifest, prompts = engine_of(deep_llama(tmp_path), tmp_path, scheme, head_scheme)
    enough = layered_bytes(manifest.model, prompts)
    assert enough < whole_bytes(manifest.model, prompts)
    whole, by_layer = audit_logits(engine, manifest), audit_logits(engine, manifest, enough)
    assert "layer_errors" not in whole and len(by_layer.pop("layer_errors")) == 5
    assert by_layer.pop("max_relative_error") == pytest.approx(whole.pop("max_relative_error"), abs=1e-5)
    assert by_layer == whole
    assert audit_logits(engine, manifest, enough - 1)["summary"].startswith("not audited")


@pytest.mark.parametrize(
    ("damaged", "named"),
    [
        ("model.embed_tokens.weight", "the embedding"),
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0"),
        ("model.layers.3.mlp.down_proj.weight", "model.layers.3"),
        ("model.layers.4.input_layernorm.weight", "model.layers.4"),
        ("model.norm.weight", "the final norm or the head"),
        ("lm_head.weight", "the final norm or the head"),
    ],
)
def test_a_damaged_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, named: str) -> None:
    """A gain of 2 % on one matrix grows from layer to layer behind it; the first one is the one to look at."""
    engine, manifest, prompts = engine_of(deep_llama(tmp_path), tmp_path)
    genuine = EngineWeights.take

    def take(self: EngineWeights, name: str) -> torch.Tensor:
        weight = genuine(self, name)
        return weight * 1.02 if name == damaged else weight

    monkeypatch.setattr(EngineWeights, "take", take)
    with pytest.raises(QualityError, match="the logits differ from transformers by") as caught:
        audit_logits(engine, manifest, layered_bytes(manifest.model, prompts))
    assert f"they part in {named} (" in str(caught.value) and caught.value.exit_code == 6


def test_a_damaged_expert_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers stacks the experts of a layer, we do not. A NaN runs through all that comes behind."""
    engine, manifest, prompts = engine_of(make_tiny_checkpoint(tmp_path / "ckpt", "mixtral"), tmp_path)
    genuine = EngineWeights.take
    damaged = "model.layers.1.mlp.experts.2.up_proj.weight"
    monkeypatch.setattr(EngineWeights, "take", lambda self, name: genuine(self, name) * (float("nan") if name == damaged else 1.0))
    with pytest.raises(QualityError, match=r"they part in model\.layers\.1 \("):
        audit_logits(engine, manifest, layered_bytes(manifest.model, prompts))


def test_a_layer_whose_tensors_are_not_those_of_the_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, manifest, prompts = engine_of(deep_llama(tmp_path), tmp_path)
    genuine = layered.DenseWeights.state

    def state(self: Any, prefix: str = "") -> dict[str, torch.Tensor]:
        found = genuine(self, prefix)
        return {name: tensor for name, tensor in found.items() if not name.endswith("2.mlp.up_proj.weight")}

    monkeypatch.setattr(layered.DenseWeights, "state", state)
    with pytest.raises(QualityError, match=r"tensors missing \(\['mlp.up_proj.weight'\]\)"):
        audit_logits(engine, manifest, layered_bytes(manifest.model, prompts))


def test_where_a_difference_begins() -> None:
    """The largest growth, not the largest difference; what comes behind a NaN says nothing."""
    nan = float("nan")
    assert layered.where_it_begins([("a", 0.0), ("b", 1e-7), ("c", 2e-4), ("d", 0.1)]).startswith("d (relative difference 0.0002 before")
    assert layered.where_it_begins([("a", 0.0), ("b", 2e-3), ("c", 0.4), ("d", 0.5)]).startswith(
        "b (relative difference 0 before it, 0.002"
    )
    assert layered.where_it_begins([("a", 1e-7), ("b", nan), ("c", nan)]).startswith("b (")
    assert layered.where_it_begins([("a", nan), ("b", 0.1)]).startswith("a (")


def engine_of(
    source: Path, tmp_path: Path, scheme: str | None = None, head_scheme: str | None = None
) -> tuple[Path, EngineManifest, list[list[int]]]:
    """An engine that was not audited, and the audit's prompts."""
    engine = tmp_path / "engine"
    if scheme is None:
        manifest = convert(source, engine, audit=False).manifest
    else:
        manifest = quantize(source, engine, scheme, audit=False, head_scheme=head_scheme).manifest
    return engine, manifest, probe_prompts(engine, manifest.model)


def deep_llama(tmp_path: Path) -> Path:
    config = llama_config(num_hidden_layers=5)
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config))


LAYERS, HIDDEN, INNER, VOCAB = 24, 1024, 4096, 32000
WHOLE_AT_LEAST, LAYERED_AT_MOST = 1_500_000_000, 700_000_000
AUDIT = """
import sys
from pathlib import Path
from dspark.converters.audit.logits import audit_logits, probe_prompts
from dspark.converters.audit.memory import layered_bytes, whole_bytes
from dspark.runtime.spec.manifest import load_manifest
engine = Path(sys.argv[1])
manifest = load_manifest(engine)
needs = {"whole": whole_bytes, "layered": layered_bytes}[sys.argv[2]]
record = audit_logits(engine, manifest, needs(manifest.model, probe_prompts(engine, manifest.model)))
assert ("layer_errors" in record) == (sys.argv[2] == "layered") and record["max_relative_error"] < 1e-4, record
"""


def write_random_checkpoint(directory: Path) -> int:
    """A Llama of 0.4e9 random parameters in bfloat16, all layers alike. Returns its bytes in float32."""
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (256, HIDDEN), "self_attn.v_proj": (256, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return (1 + 0.1 * noise if len(shape) == 1 else 0.03 * noise).to(torch.bfloat16)

    layer = {name: draw(*shape) for name, shape in shapes.items()}
    state = {f"model.layers.{i}.{name}.weight": tensor for i in range(LAYERS) for name, tensor in layer.items()}
    state |= {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    directory.mkdir()
    torch.save(state, directory / "pytorch_model.bin")  # a pickle may hold one tensor under many names
    config = llama_config(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER, vocab_size=VOCAB, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, torch_dtype="bfloat16", max_position_embeddings=4096,
    )  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_tokenizer(directory)
    return 4 * sum(tensor.numel() for tensor in state.values())


@pytest.mark.slow
@needs_proc
def test_the_memory_is_a_layers(tmp_path: Path) -> None:
    """In anonymous memory, the libraries' 0.3 GB among it: the whole model takes what the layered audit must never need."""
    size = write_random_checkpoint(tmp_path / "ckpt")
    assert size > 1.4e9
    engine = tmp_path / "engine"
    convert(tmp_path / "ckpt", engine, audit=False)
    peaks = {mode: peak_anon_bytes([sys.executable, "-P", "-c", AUDIT, str(engine), mode]) for mode in ("layered", "whole")}
    print({mode: f"{peak / 1e9:.2f} GB" for mode, peak in peaks.items()})
    assert peaks["layered"] < LAYERED_AT_MOST and peaks["whole"] > WHOLE_AT_LEAST, peaks
