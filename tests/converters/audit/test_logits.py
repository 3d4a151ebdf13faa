"""Logits that differ are refused, however small a part of them does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint

from dspark.converters.audit import logits as audit
from dspark.converters.audit.verdict import MAX_RELATIVE_ERROR, LogitDifference
from dspark.converters.pipeline import convert
from dspark.runtime.spec.errors import QualityError
from dspark.runtime.spec.manifest import load_manifest


def source_of(tmp_path: Path) -> Path:
    config = llama_config()
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config))


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
    with pytest.raises(QualityError, match="the logits differ from transformers by"):
        convert(source_of(tmp_path), tmp_path / "engine")
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
    assert float((got[0] - want[0]).abs().max() / want[0].abs().max()) > 100 * MAX_RELATIVE_ERROR


def test_a_difference_adds_up_over_stretches_of_rows() -> None:
    """The largest difference and the largest logit may stand in different stretches; a NaN in any of them stays."""
    want = torch.tensor([[1.0, 2.0, -3.0], [0.5, 8.0, 0.0], [1.0, 0.0, 0.0]])
    got = want + torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    whole, parts, broken = LogitDifference(), LogitDifference(), LogitDifference()
    whole.add(got, want)
    for row in range(3):
        parts.add(got[row : row + 1], want[row : row + 1])
        broken.add(got[row : row + 1] * (float("nan") if row == 1 else 1), want[row : row + 1])
    assert whole.relative_error == parts.relative_error == 0.25
    assert whole.argmax_agreement == parts.argmax_agreement == 1.0
    assert broken.relative_error != broken.relative_error
    other = LogitDifference()
    other.add(want.flip(-1), want)
    assert other.argmax_agreement == pytest.approx(2 / 3)
