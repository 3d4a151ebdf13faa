"""A tokenizer that gives other ids or texts than the source's, and another chat template, are refused end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from case_checkpoints import llama_config, llama_state, save_checkpoint, write_gguf
from tiny_models import CHAT_TEMPLATE

from dspark.converters.pipeline import convert
from dspark.converters.tokenizer_files import TokenizerBundle
from dspark.runtime.spec.errors import QualityError


def source_of(tmp_path: Path) -> Path:
    config = llama_config()
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config))


def write_then(change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tokenizer is changed once it is written."""
    genuine = TokenizerBundle.write

    def write(self: TokenizerBundle, directory: Path) -> list[str]:
        names = genuine(self, directory)
        change(directory)
        return names

    monkeypatch.setattr(TokenizerBundle, "write", write)


def edit_tokenizer(directory: Path, edit: Callable[[dict], None]) -> None:
    described = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    edit(described)
    (directory / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")


def test_a_tokenizer_with_other_ids_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_merges(described: dict) -> None:
        described["model"]["merges"] = described["model"]["merges"][5:]

    write_then(lambda directory: edit_tokenizer(directory, drop_merges), monkeypatch)
    with pytest.raises(QualityError, match="the tokenizer gives other ids for"):
        convert(source_of(tmp_path), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_one_that_adds_other_special_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of the text alone are equal: a BOS that comes or goes is seen only when it is asked for."""
    bos = {"<|bos|>": {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}}
    single = [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]

    def add_bos(described: dict) -> None:
        described["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": bos}

    write_then(lambda directory: edit_tokenizer(directory, add_bos), monkeypatch)
    with pytest.raises(QualityError, match="the tokenizer gives other ids with special tokens"):
        convert(source_of(tmp_path), tmp_path / "engine")


def test_without_transformers_word_the_texts_must_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token round trip, where transformers reads a format's tokenizer wrongly and cannot be the judge."""

    def decode_with_a_gap(described: dict) -> None:
        described["decoder"] = {
            "type": "Sequence",
            "decoders": [described["decoder"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        }

    write_gguf(tmp_path / "m.gguf", llama_config(), llama_state(llama_config()), "F32")
    convert(tmp_path / "m.gguf", tmp_path / "engine")
    write_then(lambda directory: edit_tokenizer(directory, decode_with_a_gap), monkeypatch)
    with pytest.raises(QualityError, match=r"the tokenizer gives other text for '  two  spaces"):
        convert(tmp_path / "m.gguf", tmp_path / "engine2")


def test_another_chat_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = CHAT_TEMPLATE.replace("\n", "")
    write_then(lambda directory: (directory / "chat_template.jinja").write_text(other, encoding="utf-8"), monkeypatch)
    with pytest.raises(QualityError, match=r"the chat template gives .*for a question"):
        convert(source_of(tmp_path), tmp_path / "engine")
