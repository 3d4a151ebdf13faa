"""The rejection rule through the whole engine: greedy answers are plain decoding's, drawn ones are the same when drawn again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import texts, tiny_engine
from scripted_proposer import ScriptedProposer
from speculation_lines import reasons, requests

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.fingerprint import differences, job_fingerprint
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.drafter import Proposer
from dspark.runtime.speculation.speculator import Speculator

GREEDY = {request.request_id for request in requests() if request.params.is_greedy}


def run(engine_dir: Path, proposer: Proposer | None = None, **config: Any) -> tuple[dict[int, RequestOutput], dict[str, Any]]:
    settings = EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config})
    engine = Engine.from_directory(engine_dir, settings, load_codec(engine_dir))
    if proposer is not None:
        engine.speculator = engine.scheduler.speculator = Speculator([proposer], proposer.max_tokens)
    for request in requests():
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    engine.kv.check_integrity([])
    metrics = engine.metrics()
    engine.close()
    return outputs, metrics


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Path) -> Iterator[dict[int, RequestOutput]]:
    yield run(llama)[0]


def greedy(outputs: dict[int, RequestOutput]) -> dict[int, Any]:
    return {key: value for key, value in texts(outputs).items() if key in GREEDY}


REJECTION = {"speculative": "ngram", "num_speculative_tokens": 4, "speculative_sampling": "rejection"}


@pytest.mark.parametrize("kind", ["perfect", "near", "adversarial"])
def test_greedy_answers_are_those_of_plain_decoding(llama: Path, plain: dict[int, RequestOutput], kind: str) -> None:
    answers = {(key, c.index): c.token_ids for key, output in plain.items() for c in output.completions}
    outputs, metrics = run(llama, ScriptedProposer(kind, answers, 320, 4), **REJECTION)
    assert greedy(outputs) == greedy(plain) and len(greedy(plain)) > 4
    assert {key: reasons({key: outputs[key]}) for key in GREEDY} == {key: reasons({key: plain[key]}) for key in GREEDY}
    assert texts(outputs) != texts(plain), "drawn answers are other ones"
    if kind == "perfect":
        assert metrics["speculation"]["accepted_tokens"] > 50


def test_the_same_drafts_give_the_same_answers(llama: Path, plain: dict[int, RequestOutput]) -> None:
    """Drafts of a fixed length: nothing is left to the clock."""
    answers = {(key, c.index): c.token_ids for key, output in plain.items() for c in output.completions}
    (first, metrics), (again, _) = (run(llama, ScriptedProposer("near", answers, 320, 4), **REJECTION) for _ in range(2))
    assert metrics["speculation"]["draft_tokens"] > 50
    assert texts(first) == texts(again)


def test_a_resumed_job_does_not_change_the_rule(llama: Path) -> None:
    settings = [job_fingerprint(llama, "m", SamplingParams(), EngineConfig(**config)) for config in ({"speculative": "ngram"}, REJECTION)]
    assert "speculative-sampling" not in settings[0], "jobs begun before there was a choice go on"
    assert differences(*settings) == 'speculative-sampling unset, now "rejection"'
