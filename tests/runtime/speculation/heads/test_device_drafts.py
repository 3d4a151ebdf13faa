"""Drafts whose tokens stay on the device till all are drawn are those that the host's loop draws, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_queue import DeferredQueue
from draft_runs import Proposal, Run, requests, run
from fake_recorder import FakeRecorder
from host_sampling import draw_by_the_host

from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.sampling.device import DeviceRows
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation import draft_steps
from dspark.runtime.speculation.draft_model import DraftModel, load_draft_model
from dspark.runtime.speculation.heads import pages
from dspark.runtime.speculation.heads.block import BlockDrafter
from dspark.runtime.speculation.heads.chains import Chains, DeviceChains
from dspark.runtime.speculation.heads.eagle3 import EagleDrafter

KINDS = ["deepspec-rnn", "speculators-dflash", "eagle3-original", "draft-model"]
REJECTION = {"speculative": "ngram", "speculative_sampling": "rejection"}
DRAFTERS: dict[str, Any] = {"deepspec-vanilla": BlockDrafter, "eagle3-original": EagleDrafter, "draft-model": DraftModel}
Build = Callable[..., Callable[..., Any]]


@pytest.fixture
def built(target: Any, stored: Callable[..., Any]) -> Build:
    """(kind, on the device, options) -> what makes the drafter. The draft model is the target itself, less sure of itself than it is."""

    def make(kind: str, there: bool, keep: bool = False) -> Callable[..., Any]:
        def build(model: Any, sampler: Sampler, longest: int) -> Any:
            own = Sampler(sampler.eos_token_ids, device_rows=DeviceRows(sampler.eos_token_ids) if there else None)
            if kind != "draft-model":
                return stored(kind).build(keep_distributions=keep)(model, own, longest)
            return load_draft_model(target.engine, model, load_codec(target.engine), own, longest, 6, keep)

        return build

    return make


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    yield draw_by_the_host(monkeypatch)


def same(here: list[Proposal], there: list[Proposal]) -> None:
    assert len(here) == len(there) > 10
    for one, other in zip(here, there, strict=True):
        assert one.tokens == other.tokens and (one.draft is None) == (other.draft is None)
        if one.draft is None or other.draft is None:
            continue
        assert one.draft.token_ids == other.draft.token_ids
        torch.testing.assert_close(torch.tensor(one.draft.survival), torch.tensor(other.draft.survival), rtol=1e-4, atol=1e-6)
        if one.draft.distributions is not None:
            torch.testing.assert_close(one.draft.distributions, other.draft.distributions, rtol=1e-4, atol=1e-6)


def both(target: Any, build: Build, kind: str, asked: list[Request], keep: bool = False) -> tuple[Run, Run]:
    """Runs with a drafter on the host and on the device. What is verified is the same in both."""
    settings: dict[str, Any] = {"answers": {r.request_id: [[9] * 60] for r in asked}, "kernels": "reference", **(REJECTION if keep else {})}
    here, there = (run(target.engine, asked, build(kind, on_device, keep), **settings) for on_device in (False, True))
    assert here.outputs == there.outputs
    return here, there


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8},
    "cut": {"temperature": 1.1, "top_p": 0.7, "top_k": 50},
    "edited": {"temperature": 0.9, "min_tokens": 9, "stop_token_ids": (4, 9, 70), "logit_bias": ((9, 3.0), (70, 2.0))},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", list(OPTIONS))
def test_drafts_are_those_of_the_hosts_loop(
    target: Any, built: Build, fetched: list[int], monkeypatch: pytest.MonkeyPatch, kind: str, options: str
) -> None:
    """Forbidden tokens and noise are those of the positions, which are known before the tokens are."""
    monkeypatch.setattr("dspark.runtime.speculation.draft_model.LEAST_SURVIVAL", 1e-4)  # chains of several lengths from a random model
    asked = [replace(r, params=replace(r.params, ignore_eos=False)) for r in requests(14, **OPTIONS[options])]
    here, there = both(target, built, kind, asked)
    same(here.speculator.proposals, there.speculator.proposals)
    assert fetched


@pytest.mark.parametrize("kind", ["deepspec-gated", "eagle3-specforge", "draft-model"])
@pytest.mark.parametrize("options", ["cut", "mixed"])
def test_distributions_are_those_of_the_hosts_loop(target: Any, built: Build, fetched: list[int], kind: str, options: str) -> None:
    """The rejection rule is told what each token was drawn from, and greedy lines stand beside drawn ones."""
    asked = requests(12, **OPTIONS["cut"])
    if options == "mixed":
        asked = [replace(r, params=replace(r.params, temperature=r.request_id % 2 * 0.7, min_p=0.02)) for r in asked]
    here, there = both(target, built, kind, asked, keep=True)
    same(here.speculator.proposals, there.speculator.proposals)
    assert any(proposal.draft is not None and proposal.draft.distributions is not None for proposal in there.speculator.proposals)


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_lines_whose_options_look_at_tokens_draft_apart(
    target: Any, built: Build, fetched: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A penalty counts tokens that only the host adds up: the other lines of the step go on without it."""
    drawn: set[tuple[str, float]] = set()
    for cls in (Chains, DeviceChains):
        drafts = cls.drafts

        def noted(self: Any, source: str, drafts: Any = drafts, name: str = cls.__name__) -> Any:
            drawn.update((name, chain.request.params.repetition_penalty) for chain in self._chains)
            return drafts(self, source)

        monkeypatch.setattr(cls, "drafts", noted)
    asked = [replace(r, params=replace(r.params, repetition_penalty=(1.0, 1.3)[r.request_id % 2])) for r in requests(14)]
    here = run(target.engine, asked, built(kind, False), kernels="reference")
    assert drawn == {("Chains", 1.0), ("Chains", 1.3)}
    drawn.clear()
    there = run(target.engine, asked, built(kind, True), kernels="reference")
    assert drawn == {("DeviceChains", 1.0), ("Chains", 1.3)}
    same(here.speculator.proposals, there.speculator.proposals)


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_a_round_waits_once(target: Any, built: Build, fetched: list[int], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """However many tokens it drafts, and however many lines there are: a wait for each token is what a GPU idles in."""
    rounds: list[int] = []
    draft = DRAFTERS[kind].draft

    def counted(self: Any, *args: Any) -> Any:
        before = len(fetched)
        found = draft(self, *args)
        rounds.append(len(fetched) - before)
        return found

    monkeypatch.setattr(DRAFTERS[kind], "draft", counted)
    run(target.engine, requests(40), built(kind, True), kernels="reference")
    assert len(rounds) > 6 and rounds.count(1) > 0.7 * len(rounds), "lines have room for equal drafts till they end"
    assert kind != "draft-model" or max(rounds) == 1, "lines of different room draft together"


def chain_of(token_rows: list[int], limits: list[int], least: float = 0.0) -> tuple[Any, Any]:
    """The same logits drawn by both: row i of depth d has its best token at token_rows[d], NaN throughout for -1."""
    seqs = [Sequence(Request(i, [5, 6], SamplingParams()), 0, i) for i in range(len(limits))]
    here = Chains(Sampler(frozenset()), seqs, limits, False, least)
    there = DeviceChains(DeviceRows(frozenset()), seqs, limits, False, least)
    there.place([torch.from_numpy(array) for array in there.arrays])
    for token in token_rows:
        logits = torch.zeros(len(seqs), 12)
        logits[:, token] = 2.0
        if token < 0:
            logits[0] = torch.nan
        for drawn in (here, there):
            if not drawn.all_closed:
                drawn.draw(logits.clone())
    return here, there


def test_chains_end_where_the_hosts_do(fetched: list[int]) -> None:
    """At their length, where they are not sure enough, and where no token is possible; no such token is fed."""
    for least in (0.0, 0.2):
        for tokens in ([3, 4, 5], [3, -1, 5], [-1, 4, 5]):
            here, there = chain_of(tokens, [3, 2, 1], least)
            assert int(there.newest().min()) >= 0
            assert there.drafts("test") == here.drafts("test")
            assert there.fed[0][1] == max(tokens[0], 11 if tokens[0] < 0 else 0)
    assert len(fetched) == 6


def test_penalties_are_refused_ahead() -> None:
    seq = Sequence(Request(0, [5, 6], SamplingParams(presence_penalty=0.5)), 0, 0)
    with pytest.raises(AssertionError, match="looks at tokens"):
        DeviceChains(DeviceRows(frozenset()), [seq], [2], False)


@pytest.mark.parametrize(
    ("kind", "options", "keep"),
    [
        ("draft-model", "greedy", False),
        ("draft-model", "cut", True),
        ("deepspec-rnn", "drawn", False),
        ("speculators-dflash", "cut", True),
    ],
)
def test_replayed_passes_draft_what_computed_ones_draft(
    target: Any, built: Build, fetched: list[int], monkeypatch: pytest.MonkeyPatch, kind: str, options: str, keep: bool
) -> None:
    """What a draft model catches up with and each further token, and a block of rows, in rounded shapes."""
    monkeypatch.setattr("dspark.runtime.speculation.draft_model.LEAST_SURVIVAL", 1e-4)
    for module in (draft_steps, pages):
        monkeypatch.setattr(module, "waits_for_host", lambda taken, has_experts: None)
    asked = requests(30, **OPTIONS[options])
    settings: dict[str, Any] = {"kernels": "reference", **(REJECTION if keep else {})}
    computed = run(target.engine, asked, built(kind, True, keep), **settings)
    recorder = FakeRecorder()

    def recorded(*args: Any) -> Any:
        drafter = built(kind, True, keep)(*args)
        drafter.record(recorder)
        return drafter

    replayed = run(target.engine, asked, recorded, **settings)
    assert computed.outputs == replayed.outputs
    same(computed.speculator.proposals, replayed.speculator.proposals)
    graphs = replayed.engine.metrics()["draft_graphs"]
    assert graphs["off"] is None and graphs["steps_replayed"] > 15 and graphs["recorded"] < graphs["steps_replayed"]


@pytest.mark.parametrize("kind", ["draft-model", "deepspec-rnn"])
def test_why_a_drafters_passes_are_not_recorded_is_told(target: Any, built: Build, kind: str) -> None:
    got = run(target.engine, requests(6), built(kind, False), kernels="reference", queue=DeferredQueue(), record=FakeRecorder())
    assert got.engine.metrics()["draft_graphs"] == {"off": "the drafter's rope_store_kv is the reference one, which waits for the host"}
