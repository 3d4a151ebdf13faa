"""A published head without temperatures gets some when it is paired: fitted beside the target's own answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_checkpoints import TARGET_LAYERS, make_draft
from engine_runs import tiny_engine
from speculation_lines import requests

from dspark.converters.distill.calibrate import MIN_ROUNDS
from dspark.converters.drafts.pairing import prepare_draft
from dspark.converters.drafts.temperatures import add_temperatures, lacks_temperatures
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.heads.stored import load_stored


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("target"), num_hidden_layers=TARGET_LAYERS)


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "speculators-shifted"])
def test_a_random_heads_sureness_is_turned_down(kind: str, engine: Path, tmp_path: Path) -> None:
    """It is right by accident only: divided by its temperatures its estimates are nearer to that."""
    make_draft(tmp_path / "published", kind)
    prepare_draft(engine, tmp_path / "published", tmp_path / "draft")
    assert lacks_temperatures(tmp_path / "draft")
    before = load_stored(tmp_path / "draft")
    note = add_temperatures(engine, tmp_path / "draft", requests(), "cpu")
    after = load_stored(tmp_path / "draft")
    assert note is not None and "temperatures of the confidence, fitted on" in note
    assert int(note.split("fitted on ")[1].split()[0]) > MIN_ROUNDS
    assert len(after.config.temperatures) == after.config.drafts_per_block and after.config.temperatures[0] != 1.0
    first, second = (float(part.split()[0].rstrip(",;")) for part in (note.split("error ")[1], note.split("with them ")[1]))
    assert second < first
    assert after.tensors == before.tensors and after.packaging == before.packaging
    assert not lacks_temperatures(tmp_path / "draft")
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == ["draft.json", "draft.safetensors"]


def test_heads_without_confidence_and_draft_models_have_nothing_to_fit(engine: Path, tmp_path: Path) -> None:
    make_draft(tmp_path / "published", "deepspec-dflash")
    prepare_draft(engine, tmp_path / "published", tmp_path / "draft")
    assert not lacks_temperatures(tmp_path / "draft")
    assert not lacks_temperatures(engine)


def test_answers_of_one_token_say_nothing(engine: Path, tmp_path: Path) -> None:
    make_draft(tmp_path / "published", "deepspec-vanilla")
    prepare_draft(engine, tmp_path / "published", tmp_path / "draft")
    asked = [Request(0, [5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0))]
    assert add_temperatures(engine, tmp_path / "draft", asked, "cpu") is None
    assert lacks_temperatures(tmp_path / "draft")
