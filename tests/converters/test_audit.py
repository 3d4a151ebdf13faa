"""The audit passes what is right, and refuses each kind of fault with nothing published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint, write_gguf
from tiny_models import CHAT_TEMPLATE, FAMILIES, make_tiny_checkpoint, save_tokenizer

import dspark.converters.audit as audit
from dspark.converters.pipeline import convert, quantize
from dspark.runtime.spec.errors import QualityError
from dspark.runtime.spec.manifest import load_manifest


def source_of(tmp_path: Path) -> Path:
    config = llama_config()
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_and_the_manifest_says_so(tmp_path: Path, family: str) -> None:
    convert(make_tiny_checkpoint(tmp_path / "ckpt", family), tmp_path / "engine")
    record = load_manifest(tmp_path / "engine").audit
    assert record["logits"]["max_relative_error"] < 1e-4 and max(record["logits"]["prompt_tokens"]) >= 120
    assert (
        record["tokenizer"]["compared_with"] == "AutoTokenizer of the source" and record["tokenizer"]["templates"] == "chat template equal"
    )
    assert record["summary"].startswith("audit passed")


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-asym"])
def test_quantized_engines_are_compared_on_their_own_weights(tmp_path: Path, scheme: str) -> None:
    quantize(source_of(tmp_path), tmp_path / "engine", scheme)
    assert load_manifest(tmp_path / "engine").audit["logits"]["max_relative_error"] < 1e-4


def test_a_gguf_file_is_audited(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama_config(), llama_state(llama_config()), "Q8_0")
    convert(tmp_path / "m.gguf", tmp_path / "engine")
    assert load_manifest(tmp_path / "engine").audit["tokenizer"]["compared_with"] == "round trip of each text"


@pytest.mark.parametrize("fault", ["scale", "one_row", "nan"])
def test_logits_that_differ_are_refused_and_nothing_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """One of the two sides computes something else: a gain of 0.3 %, one wrong embedding row, a NaN."""
    genuine = audit._engine_logits

    def faulty(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
        logits = genuine(directory, prompts)
        if fault == "scale":
            return [row * 1.003 for row in logits]
        logits[0][70 if fault == "one_row" else 0] = float("nan") if fault == "nan" else 0.0
        return logits

    monkeypatch.setattr(audit, "_engine_logits", faulty)
    with pytest.raises(QualityError, match="the logits differ from transformers by") as caught:
        convert(source_of(tmp_path), tmp_path / "engine")
    assert caught.value.exit_code == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_wrong_weight_in_the_engine_is_seen(tmp_path: Path) -> None:
    """The reference is built before the engine's tensors change: this is the comparison itself, end to end, on a real difference."""
    convert(source_of(tmp_path), tmp_path / "engine", audit=False)
    manifest = load_manifest(tmp_path / "engine")
    prompts = audit.probe_prompts(tmp_path / "engine", manifest.model)
    with torch.inference_mode():
        want = audit._reference_logits(tmp_path / "engine", manifest, prompts)
    config = llama_config()
    state = llama_state(config)
    state["model.layers.1.self_attn.k_proj.weight"] = state["model.layers.1.self_attn.k_proj.weight"].roll(1, 0)
    convert(save_checkpoint(tmp_path / "other", config, state), tmp_path / "engine2", audit=False)
    got = audit._engine_logits(tmp_path / "engine2", prompts)
    assert float((got[0] - want[0]).abs().max() / want[0].abs().max()) > 100 * audit.MAX_RELATIVE_ERROR


def test_a_tokenizer_with_other_ids_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.converters import tokenizer_files

    genuine = tokenizer_files.TokenizerBundle.write

    def drops_a_merge(self: tokenizer_files.TokenizerBundle, directory: Path) -> list[str]:
        names = genuine(self, directory)
        described = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        described["model"]["merges"] = described["model"]["merges"][5:]
        (directory / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
        return names

    monkeypatch.setattr(tokenizer_files.TokenizerBundle, "write", drops_a_merge)
    with pytest.raises(QualityError, match="the tokenizer gives other ids"):
        convert(source_of(tmp_path), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_another_chat_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.converters import tokenizer_files

    genuine = tokenizer_files.TokenizerBundle.write

    def edits_the_template(self: tokenizer_files.TokenizerBundle, directory: Path) -> list[str]:
        names = genuine(self, directory)
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("\n", ""), encoding="utf-8")
        return names

    monkeypatch.setattr(tokenizer_files.TokenizerBundle, "write", edits_the_template)
    with pytest.raises(QualityError, match="the chat template gives"):
        convert(source_of(tmp_path), tmp_path / "engine")


def test_no_template_and_no_tokenizer_are_said_not_failed(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    save_tokenizer(source, chat_template=None)
    convert(source, tmp_path / "a")
    assert load_manifest(tmp_path / "a").audit["tokenizer"]["templates"] == "no chat template"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    result = convert(source, tmp_path / "b")
    assert result.manifest.audit["tokenizer"]["summary"] == "no tokenizer"
    assert any("no tokenizer" in note for note in result.notes)


def test_a_model_too_large_for_the_memory_is_recorded_as_not_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    convert(source_of(tmp_path), tmp_path / "engine")
    assert load_manifest(tmp_path / "engine").audit["summary"].startswith("not audited: the model in float32 needs")


def test_without_the_audit_the_manifest_says_that(tmp_path: Path) -> None:
    convert(source_of(tmp_path), tmp_path / "engine", audit=False)
    assert load_manifest(tmp_path / "engine").audit == {"summary": "not audited: --no-audit"}
