"""What must hold of the heads whatever their weights are: the conformance list of the method, and how they meet requests and engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_checkpoints import HIDDEN, MASK, Tensors, make_draft
from draft_reference import Reference, norm
from draft_runs import compare, requests, run

from dspark.converters.drafts.checkpoint import read_draft
from dspark.converters.drafts.store import store_draft
from dspark.converters.pipeline import convert, quantize
from dspark.runtime.execution.loader import load_model
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.heads.attention import folded_rows
from dspark.runtime.speculation.heads.chains import Chains
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.load import load_drafter
from dspark.runtime.speculation.heads.stored import DRAFT_NAME

Stored = Callable[..., Any]


def blind(tensors: Tensors) -> Tensors:
    """Layers that add nothing: a row's state is a function of its own token."""
    return {name: torch.zeros_like(t) if name.endswith(("o_proj.weight", "down_proj.weight")) else t for name, t in tensors.items()}


def bigrams(tensors: Tensors) -> Tensors:
    """A Markov head that forces token (v + 1) mod 8 after v."""
    w1, w2 = torch.zeros(320, 8), torch.zeros(320, 8)
    w1[torch.arange(320), (torch.arange(320) + 1) % 8] = 1.0
    w2[torch.arange(8), torch.arange(8)] = 1e3
    return {**tensors, "markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}


@pytest.mark.parametrize(("kind", "anchor_row"), [("deepspec-dflash", True), ("zlab-dflash", False)])
def test_the_first_draft_comes_of_the_anchor_where_rows_look_ahead(kind: str, anchor_row: bool, target: Any, stored: Stored) -> None:
    """The wrong row layout drafts a hundredth as well, with no error."""
    draft = stored(kind, change_tensors=blind)
    reference = Reference(draft.made, target.model)

    def best(token: int) -> int:
        state = norm(reference.embedding[token], reference.weight("norm"))
        return int(reference.ids[(reference.head @ state).argmax()])

    got = run(target.engine, requests(), draft.build())
    for proposal in got.speculator.proposals:
        tokens = list(proposal.draft.token_ids)
        assert tokens[0] == best(proposal.tokens[-1] if anchor_row else MASK)
        assert set(tokens[1:]) <= {best(MASK)}


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "speculators-shifted"])
def test_a_markov_head_can_force_a_bigram(kind: str, target: Any, stored: Stored) -> None:
    """The token before the first draft token is the anchor, and each one is drawn before the next row's bias is known."""
    draft = stored(kind, change_tensors=bigrams)
    got = run(target.engine, requests(), draft.build())
    for proposal in got.speculator.proposals:
        before = proposal.tokens[-1]
        for token in proposal.draft.token_ids:
            assert token == (before + 1) % 8
            before = token


def test_the_options_of_a_request_hold_for_its_drafts(target: Any, stored: Stored) -> None:
    """A draft that ignores them is drawn from something that the target never draws from."""
    draft = stored("deepspec-vanilla")
    forced = run(target.engine, requests(logit_bias=((9, 100.0),)), draft.build())
    assert all(set(proposal.draft.token_ids) == {9} for proposal in forced.speculator.proposals)
    assert set(forced.speculator.accepted) >= {draft.made.truth.block}
    asked = requests(repetition_penalty=1e6)
    fresh = run(target.engine, asked, draft.build())
    assert fresh.outputs == run(target.engine, asked).outputs
    for proposal in fresh.speculator.proposals:
        seen = set(proposal.tokens)
        for token in proposal.draft.token_ids:
            assert token not in seen
            seen.add(token)


def test_a_draft_ends_where_none_of_its_tokens_is_possible() -> None:
    """A part of a vocabulary, or arithmetic that overflowed: no token, and no error, since a draft decides nothing."""
    sequences = [Sequence(Request(i, [5, 6], SamplingParams()), 0, i) for i in range(2)]
    chains = Chains(Sampler(frozenset()), sequences, [3, 1], keep_distributions=False)
    row = torch.zeros(2, 10)
    row[:, 4] = 1.0
    chains.draw(row.clone(), [0.5, 2.0])
    assert chains.newest().tolist() == [4, 4] and not chains.all_closed
    row[0] = torch.nan
    chains.draw(row.clone(), [0.5, 0.5])
    assert chains.all_closed
    first, second = chains.drafts("test")
    assert first is not None and second is not None
    assert (first.token_ids, second.token_ids) == ((4,), (4,)) and second.survival == (1.0,)
    empty = Chains(Sampler(frozenset()), sequences[:1], [2], keep_distributions=True)
    empty.draw(torch.full((1, 10), -torch.inf), [0.5])
    assert empty.drafts("test") == [None]


def test_estimates_are_divided_by_their_temperatures(target: Any, stored: Stored) -> None:
    """Sequential temperature scaling: one number for each draft position, 1 where there is none."""
    draft = stored("deepspec-vanilla")
    plain, scaled = (run(target.engine, requests(), draft.build(temperatures=t)).speculator.proposals for t in ((), (0.5, 3.0)))
    compared = 0
    for one, other in zip(plain, scaled, strict=True):
        if len(one.draft) < 3:
            continue
        temperatures = torch.tensor([0.5, 3.0, *[1.0] * (len(one.draft) - 2)])
        wanted = torch.sigmoid(torch.logit(torch.tensor(one.draft.survival), eps=1e-7) / temperatures)
        torch.testing.assert_close(torch.tensor(other.draft.survival), wanted, rtol=1e-3, atol=1e-5)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("kind", ["deepspec-rnn", "eagle3-original"])
def test_answers_end_where_they_end_without_drafts(kind: str, target: Any, stored: Stored) -> None:
    """A stop token inside an accepted draft, and a length that ends inside one."""
    draft = stored(kind)
    plain = run(target.engine, requests(max_tokens=30)).outputs
    stops = (plain[0][0][5], plain[2][0][17])
    asked = [replace(r, params=replace(r.params, stop_token_ids=stops, max_tokens=27 + r.request_id)) for r in requests(max_tokens=30)]
    got = run(target.engine, asked, draft.build(), answers=plain)
    assert got.outputs == run(target.engine, asked).outputs
    assert max(got.speculator.accepted) > 2


def test_a_longest_sequence_ends_inside_a_block(target: Any, stored: Stored) -> None:
    """No row stands past the longest sequence, where there is neither a page nor a rotation."""
    for kind in ("deepspec-vanilla", "zlab-dflash", "eagle3-deepspec"):
        asked = [replace(r, params=SamplingParams(max_tokens=None, ignore_eos=True)) for r in requests()]
        plain = run(target.engine, asked, max_model_len=64).outputs
        assert run(target.engine, asked, stored(kind).build(), answers=plain, max_model_len=64).outputs == plain


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"enable_prefix_caching": False}, {"kernels": "reference", "block_size": 8}])
def test_drafts_are_the_same_under_other_settings(settings: dict[str, Any], target: Any, stored: Stored) -> None:
    for kind in ("deepspec-vanilla", "eagle3-specforge"):
        draft = stored(kind)
        compare(run(target.engine, requests(), draft.build(), **settings).speculator.proposals, Reference(draft.made, target.model))


def test_a_quantized_target_lends_its_head_through_its_own_function(target: Any, stored: Stored, tmp_path: Path) -> None:
    """Others multiplied with the packed numbers themselves. The draft is never quantized with its target."""
    quantize(target.engine, tmp_path / "w8", "w8a16", audit=False)
    draft = stored("zlab-dflash")
    plain = run(tmp_path / "w8", requests()).outputs
    got = run(tmp_path / "w8", requests(), draft.build(keep_distributions=True), answers=plain)
    assert got.outputs == plain
    assert all(proposal.draft is not None for proposal in got.speculator.proposals)
    config = load_drafter(draft.directory, load_model(tmp_path / "w8"), Sampler(frozenset()), 64).config
    assert not config.own_head


@pytest.mark.parametrize("kind", ["deepspec-gated", "speculators-dflash", "eagle3-speculators"])
def test_heads_run_in_bfloat16(kind: str, target: Any, stored: Stored, tmp_path: Path) -> None:
    """Probabilities within rounding of the float32 ones."""
    convert(target.engine, tmp_path / "bf16", dtype="bfloat16", audit=False)
    draft = stored(kind)
    got = run(tmp_path / "bf16", requests(12, temperature=1.0), draft.build(keep_distributions=True))
    reference = Reference(draft.made, target.model)
    for proposal in got.speculator.proposals[:10]:
        made = proposal.draft
        wanted = reference.draft(proposal.tokens, len(made), proposal.request, 0, made.token_ids)
        assert float((made.distributions - torch.stack(wanted.distributions)).abs().sum(-1).mean()) < 0.4


def test_a_copy_of_the_targets_embedding_is_let_go(target: Any, tmp_path: Path) -> None:
    """It is most of a small draft's bytes; one that differs is kept, as some targets' drafts have another."""
    model = load_model(target.engine)
    base = target.model.get_input_embeddings().weight.detach()
    for same, embedding in ((True, base), (False, base + 1)):
        folder = tmp_path / str(same)
        made = make_draft(folder / "published", "deepspec-vanilla", change_tensors=partial(with_embedding, embedding=embedding))
        (folder / "draft").mkdir()
        store_draft(read_draft(made.path, model.config), folder / "draft", "float32")
        drafter = load_drafter(folder / "draft", model, Sampler(frozenset()), 64)
        assert (drafter._vocabulary.embedding is model.embedding) == same


def with_embedding(tensors: Tensors, embedding: torch.Tensor) -> Tensors:
    return {**tensors, "embed_tokens.weight": embedding}


def test_a_draft_of_another_target_is_refused(target: Any, stored: Stored, tmp_path: Path) -> None:
    draft = stored("deepspec-vanilla")
    data = json.loads((draft.directory / DRAFT_NAME).read_text())
    data["config"]["target_num_layers"] = 30
    (tmp_path / DRAFT_NAME).write_text(json.dumps(data))
    with pytest.raises(InputError, match="made for a target of 30 layers, 64 wide, 320 tokens, this has 8 layers"):
        load_drafter(tmp_path, load_model(target.engine), Sampler(frozenset()), 64)
    with pytest.raises(InputError, match="holds no draft"):
        load_drafter(tmp_path / "nowhere", load_model(target.engine), Sampler(frozenset()), 64)


def test_a_configuration_goes_to_json_and_back(target: Any) -> None:
    model = load_manifest(target.engine).model
    config = DraftConfig("dspark", model, (-1, 3), HIDDEN, 8, 320, block_size=7, mask_token_id=3, temperatures=(0.5, 2.0))
    assert DraftConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(TypeError, match="unknown draft keys"):
        DraftConfig.from_json({**config.to_json(), "depth": 3})


def test_rows_are_folded_into_as_many_heads_as_a_call_takes() -> None:
    shapes = ((7, 4), (7, 8), (7, 10), (16, 4), (16, 8), (15, 8), (1, 128))
    assert [folded_rows(rows, group) for rows, group in shapes] == [7, 7, 1, 16, 8, 5, 1]
