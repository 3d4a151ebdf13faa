"""The audit passes what is right and says what it did; what it cannot do is said too, never passed over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from case_checkpoints import llama_config, llama_state, save_checkpoint, write_gguf
from tiny_models import FAMILIES, make_tiny_checkpoint, save_tokenizer

from dspark.converters.audit.logits import probe_prompts
from dspark.converters.audit.memory import layered_bytes
from dspark.converters.pipeline import convert, quantize
from dspark.runtime.spec.errors import QualityError
from dspark.runtime.spec.manifest import load_manifest

AVAILABLE = "dspark.runtime.execution.memory.available_bytes"


def source_of(tmp_path: Path, **changes: object) -> Path:
    config = llama_config(**changes)
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_and_the_manifest_says_so(tmp_path: Path, family: str) -> None:
    convert(make_tiny_checkpoint(tmp_path / "ckpt", family), tmp_path / "engine")
    record = load_manifest(tmp_path / "engine").audit
    assert record["logits"]["max_relative_error"] < 1e-4 and max(record["logits"]["prompt_tokens"]) >= 120
    assert record["tokenizer"]["compared_with"] == "AutoTokenizer of the source" and record["tokenizer"]["texts"] == 5
    assert record["tokenizer"]["templates"] == {"summary": "chat template equal", "conversations": 8, "refused_on_both_sides": []}
    assert record["summary"].startswith("audit passed (logits within") and record["summary"].endswith(
        "tokenizer equal, chat template equal)"
    )


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-asym"])
def test_quantized_engines_are_compared_on_their_own_weights(tmp_path: Path, scheme: str) -> None:
    quantize(source_of(tmp_path), tmp_path / "engine", scheme)
    assert load_manifest(tmp_path / "engine").audit["logits"]["max_relative_error"] < 1e-4


def test_a_gguf_file_is_audited(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama_config(), llama_state(llama_config()), "Q8_0")
    convert(tmp_path / "m.gguf", tmp_path / "engine")
    assert load_manifest(tmp_path / "engine").audit["tokenizer"]["compared_with"] == "round trip of each text"


def test_no_template_and_no_tokenizer_are_said_not_failed(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    save_tokenizer(source, chat_template=None)
    convert(source, tmp_path / "a")
    assert load_manifest(tmp_path / "a").audit["tokenizer"]["templates"]["summary"] == "no chat template"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    result = convert(source, tmp_path / "b")
    assert result.manifest.audit["tokenizer"]["summary"] == "no tokenizer"
    assert any("no tokenizer" in note for note in result.notes)


def test_a_model_that_does_not_fit_whole_is_audited_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path, num_hidden_layers=6)
    plain = convert(source, tmp_path / "a").manifest
    monkeypatch.setattr(AVAILABLE, lambda: layered_bytes(plain.model, probe_prompts(tmp_path / "a", plain.model)))
    record = convert(source, tmp_path / "b").manifest.audit
    assert record["summary"].startswith("audit passed layer by layer (logits within")
    assert len(record["logits"]["layer_errors"]) == 6 and max(record["logits"]["layer_errors"]) < 1e-5
    assert record["logits"]["prompt_tokens"] == plain.audit["logits"]["prompt_tokens"]


def test_one_of_which_no_layer_fits_is_recorded_as_not_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures: how much memory would have been enough."""
    monkeypatch.setattr(AVAILABLE, lambda: 1_000_000)
    summary = convert(source_of(tmp_path, num_hidden_layers=6), tmp_path / "engine").manifest.audit["summary"]
    needs = r"not audited: the model in float32 needs 0\.\d+ GB of memory, layer by layer 0\.\d+ GB; 0\.001 GB are free"
    assert re.fullmatch(needs + "; tokenizer equal, chat template equal", summary)


def test_without_the_audit_the_manifest_says_that(tmp_path: Path) -> None:
    convert(source_of(tmp_path), tmp_path / "engine", audit=False)
    assert load_manifest(tmp_path / "engine").audit == {"summary": "not audited: --no-audit"}


def test_a_refusal_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.converters.audit.verdict.MAX_RELATIVE_ERROR", -1.0)
    with pytest.raises(QualityError, match="audit failed: on a prompt of 256 tokens the logits differ") as caught:
        convert(source_of(tmp_path), tmp_path / "engine")
    assert caught.value.exit_code == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]
