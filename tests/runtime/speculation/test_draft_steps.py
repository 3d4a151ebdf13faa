"""A draft model's steps: what is replayed is what is computed, whichever tokens' logits are wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import tiny_engine
from fake_recorder import FakeRecorder

from dspark.runtime.execution.loader import load_model
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation import draft_steps
from dspark.runtime.speculation.draft_steps import DraftSteps, Run, lay_out, lay_out_ahead
from dspark.runtime.speculation.draft_vocabulary import DraftVocabulary

BLOCK, NUM_BLOCKS = 16, 24


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("draft-steps"))


def steps_of(engine_dir: Path, longest_run: int = 5) -> DraftSteps:
    model = load_model(engine_dir, kernels="reference")
    steps = DraftSteps(model, DraftVocabulary(model.config.vocab_size, None, None), RotaryTables(model.config, 256), longest_run)
    steps.caches = allocate_pool(model.config, NUM_BLOCKS, BLOCK, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(1)
    for cache in [cache for pair in steps.caches for cache in pair]:
        cache.normal_(generator=generator)
    return steps


def runs(counts: list[int], shift: int = 0) -> list[Run]:
    return [Run([2 * i, 2 * i + 1], 13 + i, [(5 * i + j + shift) % 300 for j in range(count)], 9) for i, count in enumerate(counts)]


def stored(steps: DraftSteps) -> list[torch.Tensor]:
    return [cache.clone() for pair in steps.caches for cache in pair]


@pytest.mark.parametrize(
    ("counts", "num_wanted"), [([1, 1, 1], 3), ([2, 1, 3, 1], 4), ([2, 1, 1, 1, 2], 5), ([3, 1, 4], 2), ([1], 1), ([1, 1, 1, 1, 5], 3)]
)
@torch.inference_mode()
def test_a_replayed_step_is_a_computed_one(engine_dir: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int], num_wanted: int) -> None:
    """Five of seven tokens are as many as all once both are rounded: the rows of others were taken."""
    monkeypatch.setattr(draft_steps, "waits_for_host", lambda taken, has_experts: None)
    plain, recorded = steps_of(engine_dir), steps_of(engine_dir)
    recorder = FakeRecorder()
    recorded.record(recorder)
    for shift in (0, 4, 9):
        found = []
        for steps in (plain, recorded):
            (step,), _ = steps.place([lay_out(runs(counts, shift), num_wanted, BLOCK)])
            found.append(steps.logits(step).clone())
        assert found[0].shape[0] == num_wanted
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
        for one, other in zip(stored(plain), stored(recorded), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert recorder.num_replayed == 2 and plain.metrics() == {}


@torch.inference_mode()
def test_steps_behind_each_other_take_their_tokens_when_they_are_known(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that end earlier are the last ones; two steps of one shape in one copy have places that are filled in turn."""
    monkeypatch.setattr(draft_steps, "waits_for_host", lambda taken, has_experts: None)
    sequences = []
    for i, length in enumerate((14, 30, 15)):  # the third one's second token lies in its next block
        seq = Sequence(Request(i, list(range(3, 3 + length)), SamplingParams()), 0, i)
        seq.table.blocks = [3 * i, 3 * i + 1, 3 * i + 2]
        sequences.append(seq)
    widths, drawn = [3, 3, 1], [torch.tensor(tokens) for tokens in ([4, 5, 6], [7, 8, 9], [10])]
    plain, recorded = steps_of(engine_dir), steps_of(engine_dir)
    recorded.record(FakeRecorder())
    for _ in range(2):
        placed, others = recorded.place(lay_out_ahead(sequences, widths, BLOCK), [np.arange(3)])
        assert others[0].tolist() == [0, 1, 2]
        for depth, (step, tokens) in enumerate(zip(placed, drawn, strict=True)):
            found = recorded.logits(step, tokens).clone()
            own = [Run(s.table.blocks, s.num_tokens + depth, [int(t)], s.rope_len) for s, t in zip(sequences, tokens, strict=False)]
            (alone,), _ = plain.place([lay_out(own, len(own), BLOCK)])
            torch.testing.assert_close(found, plain.logits(alone), rtol=1e-4, atol=1e-4)
    assert recorded.graphs is not None and recorded.graphs.recordings.num_replayed >= 4
    assert lay_out_ahead(sequences, [], BLOCK) == []


def test_long_prompts_are_computed_as_they_come(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a step that nobody wants logits of; else why nothing is recorded is told."""
    steps = steps_of(engine_dir)
    steps.record(FakeRecorder())
    assert steps.metrics() == {"draft_graphs": {"off": "the drafter's rope_store_kv is the reference one, which waits for the host"}}
    monkeypatch.setattr(draft_steps, "waits_for_host", lambda taken, has_experts: None)
    steps.record(FakeRecorder())
    for counts, num_wanted in (([6, 1], 2), ([1, 1], 0)):
        for _ in range(3):
            (step,), _ = steps.place([lay_out(runs(counts), num_wanted, BLOCK)])
            assert step.bucket is None and steps.logits(step).shape[0] == num_wanted
