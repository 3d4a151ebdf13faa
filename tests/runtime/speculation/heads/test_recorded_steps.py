"""With a drafter too, replayed steps give the logits of computed ones, and leave the same in the drafter's layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_queue import DeferredQueue
from draft_runs import requests, run
from fake_recorder import FakeRecorder
from step_rig import BLOCK, CHAIN, TREE, Rig, decodes

from dspark.runtime.execution.forward_batch import lay_out
from dspark.runtime.execution.graphs import why_not
from dspark.runtime.execution.loader import load_model
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.draft_model import load_draft_model

KINDS = ["deepspec-vanilla", "zlab-dflash", "eagle3-original", "eagle3-specforge", "draft-model"]


@pytest.fixture
def built(target: Any, stored: Callable[..., Any]) -> Callable[[str], Callable[..., Any]]:
    """kind -> what makes the drafter. The draft model is the target itself."""

    def make(kind: str) -> Callable[..., Any]:
        if kind != "draft-model":
            return stored(kind).build()
        codec = load_codec(target.engine)
        return lambda model, sampler, longest: load_draft_model(target.engine, model, codec, sampler, longest, 4)

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "drafts", "shape"), [(3, {}, (4, 4, 1)), (3, {1: CHAIN}, (4, 8, 4)), (3, {0: TREE, 2: CHAIN}, (4, 16, 8))]
)
@torch.inference_mode()
def test_a_replayed_step_leaves_in_a_drafters_layers_what_a_computed_one_leaves(
    target: Any, built: Callable[[str], Callable[..., Any]], kind: str, count: int, drafts: dict[int, Draft], shape: tuple
) -> None:
    """An added token of EAGLE-3's went to the last slot of the pool, whose index is that of a negative one."""
    rig = Rig(target.engine, built(kind))
    rig.check_replays(lambda shift: decodes(count, drafts, shift), shape)
    assert rig.recorder.num_replayed == 2


@torch.inference_mode()
def test_a_step_without_the_drafter_has_a_recording_of_its_own(target: Any, built: Callable[[str], Callable[..., Any]]) -> None:
    """A pairing measures plain decoding and drafting with one executor: a recording of the one would leave the drafter without context."""
    rig, plan = Rig(target.engine, built("eagle3-original")), decodes(3)
    graphs, laid = rig.runner.graphs, lay_out(decodes(3), BLOCK)
    assert graphs is not None
    rig.runner.drafter = None
    plain = [graphs.meet(plan, laid, rig.runner.drafter is not None) for _ in range(2)][1]
    assert plain is not None
    before = rig.kept()
    graphs.run(plain, laid)
    assert torch.equal(rig.kept()[-1], before[-1]), "there is no drafter"
    rig.runner.drafter = rig.drafter
    found = [graphs.meet(plan, laid, rig.runner.drafter is not None) for _ in range(2)]
    assert found[0] is None and found[1] not in (None, plain)
    graphs.run(found[1], laid)
    assert not torch.equal(rig.kept()[-1], before[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_answers_are_those_of_steps_that_are_computed(
    target: Any, built: Callable[[str], Callable[..., Any]], kind: str
) -> None:
    """Over whole jobs, in which drafts are accepted, some in part, some not."""
    asked = requests(40)
    plain = run(target.engine, asked, kernels="reference").outputs
    runs = [
        run(target.engine, asked, built(kind), answers=plain, kernels="reference", queue=DeferredQueue(), record=record)
        for record in (None, FakeRecorder())
    ]
    computed, replayed = (got.speculator.proposals for got in runs)
    assert [got.outputs for got in runs] == [plain] * 2
    assert [(p.tokens, p.draft and p.draft.token_ids) for p in replayed] == [(p.tokens, p.draft and p.draft.token_ids) for p in computed]
    assert sum(p.draft is not None for p in replayed) > 10
    metrics = runs[1].engine.metrics()["cuda_graphs"]
    assert metrics["off"] is None and metrics["steps_replayed"] > 5


@torch.inference_mode()
def test_a_draft_model_counts_steps_that_are_replayed(target: Any, built: Callable[[str], Callable[..., Any]]) -> None:
    """It follows prompts for so many steps without a draft only; counted at the recording, they would be followed for ever."""
    rig, plan = Rig(target.engine, built("draft-model")), decodes(3)
    for _ in range(5):
        rig.runner._work(plan, lay_out(plan, BLOCK))()
    assert rig.recorder.num_replayed == 4
    assert rig.drafter._steps_without == 5


def test_a_drafter_that_stores_by_other_kernels_is_named(target: Any, built: Callable[[str], Callable[..., Any]]) -> None:
    taken = dict.fromkeys(("rope_store_kv", "paged_attention"), "triton")
    model = load_model(target.engine, kernels="reference")
    drafter = built("deepspec-vanilla")(model, Sampler(frozenset()), 64)
    assert why_not("auto", "cuda", taken, False, drafter) == "the drafter's rope_store_kv is the reference one, which waits for the host"
    kernels = drafter._pages.kernels
    kernels.selections["rope_store_kv"] = replace(kernels.selections["rope_store_kv"], taken="triton")
    assert "paged_attention" in str(why_not("auto", "cuda", taken, False, drafter))
    kernels.selections["paged_attention"] = replace(kernels.selections["paged_attention"], taken="triton")
    assert why_not("auto", "cuda", taken, False, drafter) is None
    assert why_not("auto", "cuda", taken, False, built("draft-model")(model, Sampler(frozenset()), 64)) is None
