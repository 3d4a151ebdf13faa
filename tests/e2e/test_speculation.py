"""Speculative decoding changes no token: every family, every kind of draft, every option, small pools, samples and greedy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import texts, tiny_engine
from scripted_proposer import KINDS, ScriptedProposer
from speculation_lines import reasons, requests
from tiny_models import FAMILIES

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import RequestOutput
from dspark.runtime.speculation.ngram import NgramProposer
from dspark.runtime.speculation.speculator import Speculator


def run(engine_dir: Path, proposer: Any = None, length: int | None = None, **config: Any) -> dict[int, RequestOutput]:
    engine = Engine.from_directory(
        engine_dir, EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config}), load_codec(engine_dir)
    )
    if proposer is not None:
        engine.speculator = engine.scheduler.speculator = Speculator([proposer], length)
    for request in requests():
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    engine.kv.check_integrity([])
    assert engine.kv.allocator.num_held == 0
    if engine.speculator is not None:
        outputs[-1] = engine.speculator.metrics()  # type: ignore[assignment]
    engine.close()
    return outputs


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Iterator[Path]:
    yield tiny_engine(tmp_path_factory.mktemp("llama"))


def answers_of(outputs: dict[int, RequestOutput]) -> dict[tuple[int, int], list[int]]:
    return {(key, c.index): c.token_ids for key, output in outputs.items() for c in output.completions}


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_gives_the_text_of_plain_decoding(llama: Path, kind: str, length: int) -> None:
    plain = run(llama)
    proposer = ScriptedProposer(kind, answers_of(plain), 320, length)
    outputs = run(llama, proposer, length)
    metrics = outputs.pop(-1)
    assert texts(outputs) == texts(plain)
    assert reasons(outputs) == reasons(plain)
    if kind == "perfect":
        assert metrics["acceptance_rate"] > 0.9  # what lies behind an end of text is not accepted
    if kind == "adversarial":
        assert metrics["accepted_tokens"] == 0 and metrics["draft_tokens"] > 50


POOLS = ({"kv_cache_memory_bytes": 0}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}, {"enable_prefix_caching": False})


@pytest.mark.parametrize("config", POOLS, ids=lambda config: next(iter(config)))
@pytest.mark.parametrize("kind", ["perfect", "near"])
def test_small_pools_and_budgets_change_nothing(llama: Path, kind: str, config: dict[str, Any]) -> None:
    """Preemption between steps, drafts cut to what fits, blocks rolled back."""
    plain = run(llama)
    if "kv_cache_memory_bytes" in config:
        engine = Engine.from_directory(llama, EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20), load_codec(llama))
        config = {"kv_cache_memory_bytes": engine.executor.metrics()["kv_pool_bytes"] // engine.kv.num_blocks * 9}
        engine.close()
    outputs = run(llama, ScriptedProposer(kind, answers_of(plain), 320, 6), 6, **config)
    metrics = outputs.pop(-1)
    assert texts(outputs) == texts(plain)
    assert metrics["accepted_tokens"] > 20
    if "kv_cache_memory_bytes" in config:
        assert sum(output.num_preemptions for output in outputs.values()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_text(family: str, tmp_path: Path) -> None:
    """Windows, soft caps, ropes that follow the length (which no draft may cross), experts."""
    engine_dir = tiny_engine(tmp_path, family)
    plain = run(engine_dir)
    for proposer in (ScriptedProposer("near", answers_of(plain), 320, 4), NgramProposer(4)):
        outputs = run(engine_dir, proposer, 4)
        outputs.pop(-1)
        assert texts(outputs) == texts(plain)


def test_by_itself_the_engine_speculates_and_changes_nothing(llama: Path) -> None:
    plain = run(llama)
    for mode in ("ngram", "auto"):
        outputs = run(llama, speculative=mode)
        metrics = outputs.pop(-1)
        assert texts(outputs) == texts(plain)
        assert metrics["proposers"] == ["ngram"] and metrics["step_cost_ms"]


def test_the_kernels_that_serve_verify_as_the_reference_does(llama: Path) -> None:
    plain = run(llama, kernels="reference")
    outputs = run(llama, ScriptedProposer("near", answers_of(plain), 320, 5), 5, kernels="reference")
    outputs.pop(-1)
    assert texts(outputs) == texts(plain)
