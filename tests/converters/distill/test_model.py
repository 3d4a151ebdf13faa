"""The trained function is the served one, and its objective is the one that is written down."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from draft_checkpoints import MASK, make_draft
from draft_reference import Reference
from tiny_models import make_tiny_model

from dspark.converters.distill.features import TargetVocabulary
from dspark.converters.distill.losses import Rows, expected_lengths, row_terms, sequence_loss, supervised_rows
from dspark.converters.distill.model import TrainableDraft, new_parameters, turned
from dspark.converters.distill.options import DistillOptions
from dspark.converters.distill.shape import choose_taps, draft_config
from dspark.converters.distill.train import rate
from dspark.converters.drafts.checkpoint import read_draft
from dspark.runtime.spec.model_config import ModelConfig, RopeConfig

TARGET = ModelConfig("llama", 320, 64, 160, 8, 4, 2, 16, 1e-6, 256, dtype="float32")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A random published drafter and its straight-line implementation, which the served one is held against as well."""
    made = make_draft(tmp_path_factory.mktemp("draft") / "published", "deepspec-vanilla", own_embedding=False, own_head=False)
    return made.path, Reference(made, make_tiny_model("llama", num_hidden_layers=8))


def trainable(path: Path, embedding: torch.Tensor) -> TrainableDraft:
    draft = read_draft(path, TARGET)
    parameters = {name: draft.read(name).requires_grad_() for name in draft.names}
    return TrainableDraft(draft.config, parameters, lambda ids: embedding[ids], 64)


def test_packed_blocks_are_the_blocks_one_by_one(reference: tuple[Path, Reference]) -> None:
    """The trap: an anchor that sees its own feature, or another block, learns from what it will not have."""
    path, straight = reference
    draft = trainable(path, straight.embedding)
    tokens = torch.randint(4, 320, (40,), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([1, 7, 8, 20, 34])
    features = straight.features(tokens.tolist())
    states = draft.states(features, tokens, anchors)
    for block, anchor in enumerate(anchors.tolist()):
        wanted = straight.block_states(tokens[: anchor + 1].tolist(), draft.config.block_size)
        torch.testing.assert_close(states[block], wanted, rtol=1e-4, atol=1e-4)
    changed = features.clone()
    changed[8:] += 3.0
    again = draft.states(changed, tokens, anchors)
    assert torch.equal(again[:3], states[:3]) and not torch.equal(again[3], states[3])


def test_the_heads_are_the_served_ones(reference: tuple[Path, Reference]) -> None:
    path, straight = reference
    draft = trainable(path, straight.embedding)
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    embedded, bias = draft.markov(torch.tensor([5, 9, 300]))
    scores = draft.confidence(states, embedded)
    for row, previous in enumerate((5, 9, 300)):
        torch.testing.assert_close(bias[row], straight.bias(previous, states[row], torch.zeros(8))[0])
        assert abs(float(scores[row].sigmoid()) - straight.confidence(states[row], previous)) < 1e-5


def test_rows_are_supervised_up_to_the_end_of_the_answer() -> None:
    tokens = torch.tensor([10, 11, 12, 13, 14])
    rows = supervised_rows(tokens, torch.tensor([1, 3]), 3)
    assert rows.source.tolist() == [1, 2, 3, 3]
    assert rows.k.tolist() == [0, 1, 2, 0]
    assert rows.row.tolist() == [0, 1, 2, 3]
    assert rows.previous.tolist() == [11, 12, 13, 13]
    assert rows.label.tolist() == [12, 13, 14, 14]
    torch.testing.assert_close(rows.weight, torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5), 1.0]))
    lengths = expected_lengths(rows, torch.tensor([0.5, 0.5, 0.4, 0.9]), 2, 3)
    torch.testing.assert_close(lengths, torch.tensor([1 + 0.5 + 0.25 + 0.1, 1.9]))


def tiny_case() -> tuple[TrainableDraft, TargetVocabulary, torch.Tensor, torch.Tensor, torch.Tensor, Rows]:
    generator = torch.Generator().manual_seed(3)
    target = ModelConfig("llama", 40, 16, 32, 4, 2, 1, 8, 1e-6, 64, dtype="float32", logits_divisor=2.0, logits_softcap=3.0)
    config = draft_config(target, DistillOptions(layers=1, taps=(0, 2), block_size=3, markov_rank=4), MASK)
    table = torch.randn(40, 16, generator=generator)
    vocabulary = TargetVocabulary(target, table, torch.randn(40, 16, generator=generator))
    parameters = new_parameters(config, 1)
    for parameter in parameters.values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    draft = TrainableDraft(config, parameters, vocabulary.embed, 32)
    tokens = torch.randint(4, 40, (20,), generator=generator)
    anchors = torch.tensor([4, 5, 11, 17])
    features, final = torch.randn(20, 32, generator=generator), torch.randn(20, 16, generator=generator)
    return draft, vocabulary, draft.states(features, tokens, anchors).flatten(0, 1), final, tokens, supervised_rows(tokens, anchors, 3)


def test_the_objective_is_the_published_one() -> None:
    """Row by row from the formulas: 1 - overlap is half the L1 distance, and the confidence's aim is the overlap."""
    draft, vocabulary, states, final, tokens, rows = tiny_case()
    terms = row_terms(draft, vocabulary, states[rows.row], rows, slice(None), final)
    weight = draft.parameters
    for i in range(len(rows)):
        source = int(rows.source[i])
        p = (torch.tanh(vocabulary.head @ final[source] / 2 / 3) * 3).softmax(-1)
        e = weight["markov_head.markov_w1.weight"][tokens[source]]
        q = (vocabulary.head @ states[rows.row[i]] + weight["markov_head.markov_w2.weight"] @ e).softmax(-1)
        overlap = float(torch.minimum(p, q).sum())
        score = float(weight["confidence_head.proj.weight"][0] @ torch.cat([states[rows.row[i]], e]) + weight["confidence_head.proj.bias"])
        assert abs(float(terms.ce[i]) + math.log(float(q[tokens[source + 1]]))) < 1e-4
        assert abs(float(terms.tv[i]) - float((p - q).abs().sum())) < 1e-5
        assert abs(float(terms.overlap[i]) - overlap) < 1e-5
        sure = 1 / (1 + math.exp(-score))
        assert abs(float(terms.confidence[i]) + overlap * math.log(sure) + (1 - overlap) * math.log(1 - sure)) < 1e-4


def test_gradients_in_chunks_are_the_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary is gone through a few rows at a time; the backbone's gradient is then all of theirs."""
    draft, vocabulary, states, final, _, rows = tiny_case()
    names = list(draft.parameters)
    terms = row_terms(draft, vocabulary, states[rows.row], rows, slice(None), final)
    sums = terms.weighted(rows.weight)
    wanted = torch.autograd.grad(0.5 * (0.1 * sums[0] + 0.9 * sums[1] + sums[2]), list(draft.parameters.values()), retain_graph=True)
    monkeypatch.setattr("dspark.converters.distill.losses.VALUES_AT_ONCE", 3 * 40)
    got, overlap = sequence_loss(draft, vocabulary, states, rows, final, 0.5)
    torch.testing.assert_close(got, sums.detach())
    torch.testing.assert_close(overlap, terms.overlap)
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(draft.parameters[name].grad, gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_partial_rotation_leaves_the_rest() -> None:
    x, angle = torch.arange(6.0).view(1, 1, 6), torch.tensor([[0.3, 0.7]])
    out = turned(x, angle.cos(), angle.sin())
    assert out[0, 0, 4:].tolist() == [4.0, 5.0]
    assert math.isclose(float(out[0, 0, 1]), math.cos(0.7) - 3 * math.sin(0.7), abs_tol=1e-6)


def test_the_learning_rate_warms_up_and_comes_down_to_nothing() -> None:
    assert [round(rate(step, 100, 0.04), 4) for step in (0, 1, 3)] == [0.25, 0.5, 1.0]
    assert rate(4, 100, 0.04) == 1.0 and abs(rate(52, 100, 0.04) - 0.5) < 1e-9
    assert rate(99, 100, 0.04) < 0.001 and rate(0, 1, 0.04) == 1.0


def test_taps_are_spread_as_in_published_drafters() -> None:
    assert choose_taps(36, 5) == (1, 9, 17, 25, 33)
    assert choose_taps(30, 3) == (1, 14, 27)
    assert choose_taps(4, 3) == (0, 1, 2) and choose_taps(2, 3) == (-1, 0)


def test_a_rope_that_follows_the_length_becomes_a_plain_one() -> None:
    from dataclasses import replace

    dynamic = replace(TARGET, rope=RopeConfig(theta=5000.0, kind="dynamic", factor=2.0))
    assert draft_config(dynamic, DistillOptions(), MASK).model.rope == RopeConfig(theta=5000.0)
    linear = replace(TARGET, rope=RopeConfig(kind="linear", factor=4.0))
    assert draft_config(linear, DistillOptions(), MASK).model.rope == linear.rope
