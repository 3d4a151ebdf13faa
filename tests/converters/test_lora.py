"""Merged adapters against PEFT's own logits, and every way in which an adapter must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_logits import by_transformers, relative_error
from lora_cases import CASES, make_case, peft_logits

from dspark.converters.pipeline import convert

CLOSE = 1e-4
TOKENS = list(range(3, 300, 5))


@pytest.mark.parametrize("name", list(CASES))
def test_merged_logits_are_those_of_peft(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    base, adapter = make_case(tmp_path, case)
    result = convert(base, tmp_path / "engine", audit=False, adapters=[(adapter, 1.0)])
    tokens = [token for token in TOKENS if token < (case.rows or 320)] + list(range(320, case.rows or 320))
    got, want = by_transformers(tmp_path / "engine", tokens), peft_logits(base, [(adapter, 1.0)], tokens, case.rows)
    assert relative_error(got, want) < CLOSE
    assert result.manifest.model.tie_word_embeddings is case.tied
    assert result.manifest.model.vocab_size == (case.rows or 320)
    convert(base, tmp_path / "bare", audit=False)
    without = by_transformers(tmp_path / "bare", [token for token in tokens if token < 320])
    width = min(320, case.rows or 320)
    assert relative_error(without[:, :width], want[: len(without), :width]) > 100 * CLOSE, "the adapter changes nothing: the test is empty"
