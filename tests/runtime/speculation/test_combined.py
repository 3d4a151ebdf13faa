"""N-grams before a drafter: who is asked, that neither changes a text, and what an earlier run's figures are good for."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_runs import texts, tiny_engine
from speculation_lines import reasons, requests

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request, RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.acceptance import MOST_PRELOADED, Acceptance
from dspark.runtime.speculation.choice import Choice
from dspark.runtime.speculation.confidence import Confidence
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.draft import Draft, Verified
from dspark.runtime.speculation.drafter_proposer import DrafterProposer
from dspark.runtime.speculation.pairing import Machine, Pairing
from dspark.runtime.speculation.speculator import PROBE_EVERY, Speculator


class OneSource:
    """Always the same draft."""

    name, max_tokens = "text", 4

    def __init__(self, length: int) -> None:
        self.draft = Draft((7,) * length, (), "text-3") if length else None

    def propose(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        return [self.draft] * len(sequences)

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass


def drafter(cost: StepCost, asked: list[int], chance: float) -> DrafterProposer:
    """A model whose drafts of four tokens take no time and are as sure as `chance`."""

    def ask(sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        asked.append(len(sequences))
        return [Draft((8,) * min(4, room), (chance,) * min(4, room), "draft-model") for room in rooms]

    made = DrafterProposer("draft-model", 4, ask, cost, lambda: 0.0)
    made.preload({"draft-model": {"by_position": [chance] * 4, "tried": [1000] * 4}}, {})
    return made


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request(i, [1, 2, 3], SamplingParams()), 0, i) for i in range(count)]


def sources(text: OneSource, text_rate: float, model_rate: float, steps: int = 2 * PROBE_EVERY) -> list[str]:
    """Of each step that drafts: whose draft a line got. Verifying costs nothing."""
    cost, asked = StepCost({1: 1.0, 64: 1.0}), list[int]()
    known = {"text-3": {"by_position": [text_rate] * 4, "tried": [1000] * 4}}
    speculator = Speculator([text, drafter(cost, asked, model_rate)], cost=cost, acceptance=known)
    found = []
    for _ in range(steps):
        (draft,) = speculator.propose(sequences(1), [4], 1, 1)
        if draft is not None:
            found.append(draft.source)
    return found


def test_the_source_that_promises_more_is_taken() -> None:
    assert set(sources(OneSource(4), 0.9, 0.6)) == {"text-3"}
    weak = sources(OneSource(4), 0.1, 0.6)
    assert weak.count("text-3") == len(weak) // PROBE_EVERY  # tried now and then, or it could never be seen to get better
    assert set(weak) == {"text-3", "draft-model"}
    assert set(sources(OneSource(0), 0.9, 0.6)) == {"draft-model"}
    assert set(sources(OneSource(1), 0.9, 0.9)) >= {"draft-model"}  # a sure token is less than four rather sure ones


def test_a_drafter_that_does_not_pay_outdoes_nothing() -> None:
    cost, asked = StepCost({1: 1.0, 2: 2.0, 64: 64.0}), list[int]()
    model = drafter(cost, asked, 0.9)
    model.preload({}, {"draft_ms_per_token": {"1": 0.001}})
    assert model.promise(1) == 0.0  # each token costs as much as one decoded plainly
    speculator = Speculator([OneSource(4), model], fixed=2, cost=cost)
    (draft,) = speculator.propose(sequences(1), [4], 1, 1)
    assert draft is not None and draft.source == "text-3" and not asked


def test_figures_of_an_earlier_run_are_where_a_run_begins() -> None:
    record = {"ngram-8": {"by_position": [0.9, 0.5], "tried": [5000, 40]}}
    acceptance = Acceptance(record)
    rates = acceptance.survival("ngram-8", 3)
    assert abs(rates[0] - 0.9) < 0.02 and abs(rates[1] - 0.5) < 0.03 and abs(rates[2] - rates[1]) < 1e-9
    assert acceptance.record()["ngram-8"]["tried"] == [int(MOST_PRELOADED), 40]  # a thousand lines ago is not a thousand times as true
    for _ in range(400):
        acceptance.learn(Draft((1,), (), "ngram-8"), Verified([2]))
    assert acceptance.survival("ngram-8", 1)[0] < 0.2
    seen = Confidence()
    for i in range(100):
        verified = Verified([1, 2], None, (0,)) if i % 4 else Verified([2])
        seen.learn("draft-model", (0.95,), Draft((1,), (0.95,), "draft-model"), verified)
    again = Confidence()
    again.preload(seen.record())
    assert abs(again.survival("draft-model", (0.95,))[0] - 0.75) < 0.03


def test_times_of_drafting_are_taken_over_on_the_same_machine_only() -> None:
    machine = Machine("a processor, 2 cores", "cpu", 2, "float32")
    pairing = Pairing("draft-model", "draft", machine, drafter={"confidence": {}, "draft_ms_per_token": {"1": 2.0}})
    assert pairing.drafter_on(machine) == pairing.drafter
    assert pairing.drafter_on(Machine("a processor, 2 cores", "cpu", 4, "float32")) == {"confidence": {}}
    asked: list[int] = []
    made = drafter(StepCost({1: 1.0, 64: 1.0}), asked, 0.9)
    made.preload({}, pairing.drafter)
    assert made.metrics()["draft_ms_per_token"] == {"1": 2.0}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("target"))


def answer(engine_dir: Path, choice: Choice | None, **config: Any) -> tuple[dict[int, RequestOutput], dict[str, Any]]:
    """(outputs, speculation's metrics); float32, on lines with every option, greedy and drawn."""
    loaded = {"speculative": "auto", "draft": str(choice.draft)} if choice is not None else {}
    settings = EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **loaded, **config})
    engine = Engine.from_directory(engine_dir, settings, load_codec(engine_dir))
    run = engine if choice is None else engine.again(choice)
    for request in requests():
        run.add(request)
    outputs = {output.request_id: output for output in run.drain()}
    run.kv.check_integrity([])
    metrics = run.metrics()["speculation"]
    engine.close()
    return outputs, metrics or {}


@pytest.mark.parametrize("pool", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}], ids=["roomy", "small"])
@pytest.mark.parametrize("layers", [1, 2])
def test_ngrams_and_a_draft_model_together_change_no_text(
    target: Path, layers: int, pool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy lines are token-identical, drawn ones too: the draft's layers catch up with what n-grams brought. Every step and every round
    of drafting takes as long as any other, so that who is asked does not depend on the machine."""
    plain, _ = answer(target, None)
    ticks = count()
    monkeypatch.setattr("dspark.runtime.engine.time.process_time", lambda: next(ticks) / 1000)
    draft = target if layers == 2 else tiny_engine(tmp_path, num_hidden_layers=1)
    costs = Pairing("ngram+draft-model", None, machine_of(target), step_cost_ms={"1": 1.0, "64": 1.01})
    outputs, metrics = answer(target, Choice("ngram+draft-model", draft, costs), **pool)
    assert texts(outputs) == texts(plain) and reasons(outputs) == reasons(plain)
    assert metrics["proposers"] == ["ngram", "draft-model"]
    sources = {source.split("-")[0] for source in metrics["acceptance"]}
    assert "draft" in sources
    if layers == 1:  # a draft that is the target itself outdoes all text
        assert sources & {"ngram", "memory"}


def machine_of(engine_dir: Path) -> Machine:
    engine = Engine.from_directory(engine_dir, EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20), load_codec(engine_dir))
    machine = engine.executor.machine
    engine.close()
    return machine
