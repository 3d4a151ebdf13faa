"""The engine's tokenizer files and chat template against transformers' tokenizer of the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.converters.audit.template import check_chats
from dspark.converters.audit.verdict import refusal
from dspark.converters.readers.base import CheckpointReader

PROBE_TEXTS = (
    "The river runs under the old stone bridge.",
    "def add(a, b):\n    return a + b  # 1 + 2 = 3\n\n1. First\n\n2. Second",
    "  two  spaces,\ttabs\r\nand 1234567 digits 3.14",
    "naïve café, Größe, 東京, Привет, שלום, 🙂👍🏽",
    '{"key": [1, -2.5e3, null], \'quoted\': "it\'s"}',
)


def audit_tokenizer(directory: Path, reader: CheckpointReader) -> dict[str, Any]:
    """The record of the probe texts and conversations. Raises QualityError naming the first that differs."""
    from dspark.converters.tokenizer_files import load_transformers_tokenizer
    from dspark.runtime.jobs.tokenizer import load_codec

    if not (directory / "tokenizer.json").is_file():
        return {"summary": "no tokenizer"}
    codec = load_codec(directory)
    source = reader.reference_tokenizer()
    for text in PROBE_TEXTS:
        _check_text(codec, source, text)
    checked = "AutoTokenizer of the source" if source is not None else "round trip of each text"
    templates = check_chats(codec, source if source is not None else load_transformers_tokenizer(directory))
    summary = f"tokenizer equal, {templates['summary']}"
    return {"texts": len(PROBE_TEXTS), "compared_with": checked, "templates": templates, "summary": summary}


def _check_text(codec: Any, source: Any, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    if source is None:
        pairs = [("text", codec.decode(ids, skip_special_tokens=False), text)]
    else:
        expected = source.encode(text, add_special_tokens=False)
        pairs = [
            ("ids", ids, expected),
            ("ids with special tokens", codec.encode(text, add_special_tokens=True), source.encode(text)),
            ("text", codec.decode(ids, skip_special_tokens=True), _decode(source, expected)),
        ]
    for what, got, want in pairs:
        if got != want:
            raise refusal(f"the tokenizer gives other {what} for {text[:30]!r}: {str(got)[:60]} instead of {str(want)[:60]}")


def _decode(source: Any, ids: list[int]) -> str:
    return str(source.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
