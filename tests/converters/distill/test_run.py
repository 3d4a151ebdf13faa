"""A whole distillation: what is learned, what is stored, that the budget holds and that an interrupted run ends the same."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_cases import LAYERS, SMALL, Job
from draft_runs import requests, run

from dspark.converters.distill.features import collect
from dspark.converters.distill.run import DistillResult, distill
from dspark.converters.distill.train import Progress
from dspark.converters.writer import hash_file
from dspark.runtime.execution.loader import load_model
from dspark.runtime.spec.errors import InputError, LockedError, UsageError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.speculation.heads.load import load_drafter
from dspark.runtime.speculation.heads.replay import KnownAnswer, replay_stored
from dspark.runtime.speculation.heads.stored import DRAFT_NAME, WEIGHTS_NAME, load_stored

QUICK = replace(SMALL, epochs=2, max_prompts=16, checkpoint_s=0.0)
"""Nothing is learned in so few steps, but everything is done."""


class Stopped(Exception):
    """Stands in for a kill."""


@pytest.fixture(scope="module")
def done(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillResult, list[Progress]]:
    out, seen = tmp_path_factory.mktemp("out") / "draft", []
    result = distill(job.engine, job.prompts, out, SMALL, seen.append)
    return out, result, seen


@pytest.fixture(scope="module")
def quick(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillResult]:
    out = tmp_path_factory.mktemp("out") / "draft"
    return out, distill(job.engine, job.prompts, out, QUICK)


def test_a_drafter_learns_what_its_target_writes(done: Any) -> None:
    """Measured twice: expected by the losses' own figure, and counted with the drafter as it is served."""
    _, result, seen = done
    assert [progress.step for progress in seen] == list(range(1, result.training.steps + 1))
    losses = [progress.loss for progress in seen]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert result.training.tau_after > result.training.tau_before + 0.6
    assert result.after.mean_length > result.before.mean_length + 0.6
    assert result.after.by_position[0] > 0.6
    assert result.after.rounds < result.before.rounds


def test_the_stored_draft_says_what_it_was_made_from(done: Any, job: Job) -> None:
    out, result, _ = done
    assert sorted(path.name for path in out.iterdir()) == sorted([DRAFT_NAME, WEIGHTS_NAME])
    assert not out.with_name(f".{out.name}.distill").exists()
    stored = load_stored(out)
    lineage = stored.lineage
    assert lineage == json.loads(json.dumps(result.lineage))
    assert not stored.config.own_embedding and not stored.config.own_head
    assert len(stored.config.temperatures) == stored.config.block_size
    assert lineage["target_manifest_xxh3"] == hash_file(job.engine / "engine.json")
    assert lineage["held_out"] == {"before": result.before.to_json(), "after": result.after.to_json()}
    assert lineage["lines"]["training"] + lineage["lines"]["held_out"] == 48
    assert lineage["steps"] == result.training.steps and lineage["history"][-1]["loss"] < lineage["history"][1]["loss"]
    assert str(job.engine.parent) not in json.dumps(lineage)


def test_texts_with_the_distilled_drafter_are_those_without(done: Any, job: Job) -> None:
    """And it drafts: rounds in which all tokens are accepted among them."""
    out, _, _ = done
    asked = requests(max_tokens=24)
    plain = run(job.engine, asked).outputs
    got = run(job.engine, asked, lambda model, sampler, max_len: load_drafter(out, model, sampler, max_len))
    assert got.outputs == plain
    assert max(got.speculator.accepted) == SMALL.block_size
    assert sum(got.speculator.accepted) / len(got.speculator.accepted) > 0.5


def test_the_measured_acceptance_is_that_of_generation(done: Any, job: Job) -> None:
    """Round for round: nothing that only training knows may reach the drafter. Near an answer's end generation drafts less."""
    out, _, _ = done
    asked = requests(max_tokens=40)[1]
    build = lambda model, sampler, max_len: load_drafter(out, model, sampler, max_len)  # noqa: E731
    got = run(job.engine, [asked], build)
    tokens = [*asked.prompt_token_ids, *got.outputs[asked.request_id][0]]
    taps = load_stored(out).config.taps
    features, _ = collect(job.engine, load_manifest(job.engine), [tokens], taps, "cpu", lambda r, c, dtype: torch.empty(r, c, dtype=dtype))
    rounds = replay_stored(out, load_model(job.engine), [KnownAnswer(asked, tokens, features.tapped)])
    assert sum(entry.committed for entry in rounds) == 39
    whole = [p for p in got.speculator.proposals if p.room >= SMALL.block_size]
    assert len(whole) >= 5
    assert [entry.accepted for entry in rounds][: len(whole) - 1] == got.speculator.accepted[: len(whole) - 1]


def test_an_interrupted_run_ends_with_the_same_weights(quick: Any, job: Job, tmp_path: Path) -> None:
    """Answers, order of lines, anchors, moments and schedule go on as they would have."""
    out, result = quick

    def stop(progress: Progress) -> None:
        if progress.step == 4:
            raise Stopped

    with pytest.raises(Stopped):
        distill(job.engine, job.prompts, tmp_path / "draft", QUICK, stop)
    steps: list[int] = []
    again = distill(job.engine, job.prompts, tmp_path / "draft", replace(QUICK, resume=True), lambda p: steps.append(p.step))
    assert steps[0] == 4  # the checkpoint is of step 3
    assert result.training.steps == steps[-1] > 4
    assert (tmp_path / "draft" / WEIGHTS_NAME).read_bytes() == (out / WEIGHTS_NAME).read_bytes()
    assert again.training.history == result.training.history
    assert again.lineage == result.lineage


def test_a_run_of_other_settings_is_not_resumed(job: Job, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        distill(job.engine, job.prompts, tmp_path / "draft", QUICK, stop)
    with pytest.raises(UsageError, match="other settings: learning_rate"):
        distill(job.engine, job.prompts, tmp_path / "draft", replace(QUICK, resume=True, learning_rate=1e-4))


def test_the_budget_ends_a_long_training(job: Job, tmp_path: Path) -> None:
    """Five hours of epochs; a loaded machine makes the run longer, so only its order is held against the budget."""
    began = time.monotonic()
    result = distill(job.engine, job.prompts, tmp_path / "draft", replace(QUICK, epochs=1_000_000, budget_s=4.0))
    assert result.training.stopped in ("steps", "budget")
    assert 1 <= result.training.steps < 1_000_000
    assert load_stored(tmp_path / "draft").lineage["steps"] == result.training.steps
    assert time.monotonic() - began < 600


def test_what_cannot_be_distilled_is_said(job: Job, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        distill(job.engine, tmp_path / "absent.jsonl", tmp_path / "draft", SMALL)
    (tmp_path / "one.jsonl").write_text('{"prompt": "the river runs"}\n{"prompt": "the river runs"}\n{"prompt": 3}\n', encoding="utf-8")
    with pytest.raises(InputError, match="has 1 usable prompts, needed: at least 2; line 3"):
        distill(job.engine, tmp_path / "one.jsonl", tmp_path / "draft", SMALL)
    with pytest.raises(UsageError, match=rf"layer, {LAYERS - 1}, is never a feature"):
        distill(job.engine, job.prompts, tmp_path / "draft", replace(SMALL, taps=(0, LAYERS - 1)))
    with pytest.raises(UsageError, match="block_size 0"):
        distill(job.engine, job.prompts, tmp_path / "draft", replace(SMALL, block_size=0))
    (tmp_path / "draft").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        distill(job.engine, job.prompts, tmp_path / "draft", SMALL)


def test_two_runs_do_not_work_on_one_place(job: Job, tmp_path: Path) -> None:
    def second(progress: Progress) -> None:
        with pytest.raises(LockedError, match="another run"):
            distill(job.engine, job.prompts, tmp_path / "draft", QUICK)
        raise Stopped

    with pytest.raises(Stopped):
        distill(job.engine, job.prompts, tmp_path / "draft", QUICK, second)


def test_features_in_a_file_are_the_same(quick: Any, job: Job, tmp_path: Path) -> None:
    out, _ = quick
    distill(job.engine, job.prompts, tmp_path / "draft", replace(QUICK, memory_bytes=0))
    assert (tmp_path / "draft" / WEIGHTS_NAME).read_bytes() == (out / WEIGHTS_NAME).read_bytes()
