"""What a drafter reads of its target: the residual stream after a layer, as transformers has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_logits import relative_error
from tiny_models import FAMILIES, make_tiny_checkpoint, make_tiny_model

from dspark.converters.pipeline import convert
from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.execution.loader import load_model
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_raw_outputs_of_the_layers(family: str, tmp_path: Path) -> None:
    """A tap off by one, one before the residual is added, or one after a norm is accepted a little less: it looks like tuning."""
    convert(make_tiny_checkpoint(tmp_path / "checkpoint", family), tmp_path / "engine", audit=False)
    model, tokens = load_model(tmp_path / "engine"), torch.randint(3, 320, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    seq = Sequence(Request(0, tokens, SamplingParams()), 0, 0)
    seq.table.blocks.extend(range(2))
    batch = build_forward_batch(SchedulerOutput([ScheduledSequence(seq, len(tokens))]), 16, "cpu")
    rotations = RotaryTables(model.config, 64).lookup(batch.attention.positions, batch.rope_lengths)
    taps = tuple(range(-1, model.config.num_layers - 1))
    with torch.inference_mode():
        caches = allocate_pool(model.config, 2, 16, torch.float32, "cpu")
        run = (batch.token_ids, rotations, caches, batch.attention, batch.sample_rows)
        hidden, features = model.forward_tapped(*run, taps)
        untapped = model.forward(*run)
        states = make_tiny_model(family)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert features is not None and torch.equal(hidden, untapped)
    assert features.shape == (30, len(taps) * model.config.hidden_size)
    for part, tap in zip(features.chunk(len(taps), 1), taps, strict=True):
        assert relative_error(part, states[tap + 1][0]) < 1e-4


def test_the_last_layer_is_no_tap(tmp_path: Path) -> None:
    """Only the rows that draw a token go through it, and transformers' last state is another thing: it is normed."""
    convert(make_tiny_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "engine", audit=False)
    model = load_model(tmp_path / "engine")
    with pytest.raises(AssertionError, match="no tap"):
        model.forward_tapped(*[None] * 5, (model.config.num_layers - 1,))  # type: ignore[arg-type]
