"""A whole distillation of a draft model: what is learned and stored, that it serves, that a stopped run ends the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_cases import SMALL, Job
from engine_runs import run_requests, texts
from speculation_lines import requests

from dspark.converters.distill.run import DistillResult, distill, is_made_from, lineage_of
from dspark.converters.distill.train import Progress
from dspark.converters.drafts.pairing import prepare_draft
from dspark.runtime.execution.loader import EngineWeights, load_model
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.speculation.draft_model import load_draft_model

OPTIONS = replace(SMALL, kind="draft-model", layers=1, learning_rate=3e-3, epochs=8, extra_temperature=1.0, answers=2)
QUICK = replace(OPTIONS, epochs=2, max_prompts=16, checkpoint_s=0.0)


class Stopped(Exception):
    """Stands in for a kill."""


@pytest.fixture(scope="module")
def done(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillResult]:
    out = tmp_path_factory.mktemp("out") / "draft"
    return out, distill(job.engine, job.prompts, out, OPTIONS)


def test_a_draft_model_learns_what_its_target_writes(done: Any) -> None:
    _, result = done
    assert result.after.mean_length > result.before.mean_length + 0.2
    assert result.training.tau_after > result.training.tau_before
    assert result.after.by_position[0] > 0.7
    assert result.calibration == ([], [])


def test_it_is_an_engine_with_the_targets_embedding_and_head(done: Any, job: Job) -> None:
    out, result = done
    manifest, target = load_manifest(out), load_manifest(job.engine)
    assert manifest.model == replace(target.model, num_layers=1) and manifest.files == target.files
    ours, theirs = (EngineWeights(path, load_manifest(path), torch.float32, "cpu") for path in (out, job.engine))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(ours.take(name), theirs.take(name))
    assert manifest.lineage["layers"] == [0] and manifest.lineage["lines"] == result.lineage["lines"]
    assert lineage_of(out)["training_prompts"] == result.lineage["training_prompts"]
    assert len(result.lineage["training_prompts"]) * 2 == result.lineage["lines"]["training"]  # two answers of each
    assert is_made_from(out, job.engine, job.prompts, OPTIONS)
    assert not is_made_from(out, job.engine, job.prompts, replace(OPTIONS, seed=1))


def test_texts_with_it_are_those_without_and_its_embedding_is_held_once(done: Any, job: Job, tmp_path: Path) -> None:
    out, _ = done
    assert prepare_draft(job.engine, out, tmp_path / "draft")[0] == "draft-model"
    lines = requests()
    plain = run_requests(job.engine, lines)
    for method in ("draft-model", "auto"):
        assert texts(run_requests(job.engine, lines, speculative=method, draft=str(tmp_path / "draft"))) == texts(plain)
    target = load_model(job.engine)
    draft = load_draft_model(out, target, load_codec(job.engine), Sampler(frozenset()), 64)
    assert draft.model.embedding is target.embedding


def test_an_interrupted_run_ends_with_the_same_weights(job: Job, tmp_path: Path) -> None:
    """Both kinds of answers are kept, as are weights and moments."""
    whole = distill(job.engine, job.prompts, tmp_path / "whole", QUICK)

    def stop(progress: Progress) -> None:
        if progress.step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        distill(job.engine, job.prompts, tmp_path / "draft", QUICK, stop)
    steps: list[int] = []
    again = distill(job.engine, job.prompts, tmp_path / "draft", replace(QUICK, resume=True), lambda p: steps.append(p.step))
    assert steps[0] == 3 and steps[-1] == whole.training.steps
    assert load_manifest(tmp_path / "draft").tensors == load_manifest(tmp_path / "whole").tensors
    assert again.lineage == whole.lineage
