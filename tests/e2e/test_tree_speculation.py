"""Draft trees change no token: every shape, every family and cache, small pools, samples and greedy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import texts, tiny_engine
from kv_engines import calibrated
from scripted_proposer import TREE_KINDS, ScriptedProposer
from speculation_lines import reasons, requests
from tiny_models import FAMILIES

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import RequestOutput
from dspark.runtime.speculation.drafter import Proposer
from dspark.runtime.speculation.ngram_tree import NgramTreeProposer
from dspark.runtime.speculation.speculator import Speculator
from dspark.runtime.speculation.suffix_index import SuffixIndex

Outputs = dict[int, RequestOutput]


def run(engine_dir: Path, proposer: Proposer | None = None, **config: Any) -> tuple[Outputs, dict[str, Any]]:
    """Outputs by request id, and the metrics. All nodes that a proposer offers are verified."""
    settings = EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config})
    engine = Engine.from_directory(engine_dir, settings, load_codec(engine_dir))
    if proposer is not None:
        engine.speculator = engine.scheduler.speculator = Speculator([proposer], proposer.max_tokens)
    for request in requests():
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    engine.kv.check_integrity([])
    assert engine.kv.allocator.num_held == 0
    metrics = engine.metrics()
    engine.close()
    return outputs, metrics


def scripted(kind: str, plain: Outputs, nodes: int) -> ScriptedProposer:
    answers = {(key, c.index): c.token_ids for key, output in plain.items() for c in output.completions}
    return ScriptedProposer(kind, answers, 320, nodes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Path) -> Iterator[Outputs]:
    yield run(llama)[0]


@pytest.mark.parametrize("nodes", [2, 7, 24, 63])
@pytest.mark.parametrize("kind", TREE_KINDS)
def test_every_tree_gives_the_text_of_plain_decoding(llama: Path, plain: Outputs, kind: str, nodes: int) -> None:
    """Nodes see their own path only, and what is accepted lies at its positions in the steps that follow."""
    outputs, metrics = run(llama, scripted(kind, plain, nodes))
    assert texts(outputs) == texts(plain)
    assert reasons(outputs) == reasons(plain)
    assert metrics["speculation"]["accepted_tokens"] > 50


POOLS = ({"kv_cache_memory_bytes": 0}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}, {"enable_prefix_caching": False})


@pytest.mark.parametrize("config", POOLS, ids=lambda config: next(iter(config)))
@pytest.mark.parametrize("kind", ["siblings", "random-tree"])
def test_small_pools_and_budgets_change_nothing(llama: Path, plain: Outputs, kind: str, config: dict[str, Any]) -> None:
    """Preemption between steps, trees cut to what fits, blocks rolled back."""
    if "kv_cache_memory_bytes" in config:
        metrics = run(llama)[1]
        config = {"kv_cache_memory_bytes": metrics["kv_pool_bytes"] // metrics["kv_blocks"] * 9}
    outputs, metrics = run(llama, scripted(kind, plain, 12), **config)
    assert texts(outputs) == texts(plain)
    assert metrics["speculation"]["accepted_tokens"] > 20
    if "kv_cache_memory_bytes" in config:
        assert metrics["preemptions"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_text(family: str, tmp_path: Path) -> None:
    """Windows count positions, not keys; ropes that follow the length take each node's own; experts route each node alone."""
    engine_dir = tiny_engine(tmp_path, family)
    plain = run(engine_dir)[0]
    for kind in ("siblings", "random-tree"):
        assert texts(run(engine_dir, scripted(kind, plain, 14))[0]) == texts(plain)


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_8_bit_caches_move_their_numbers(llama: Path, tmp_path: Path, cache: str) -> None:
    engine_dir = calibrated(llama, tmp_path / cache, cache, [[(11 * i) % 300 + 5 for i in range(200)]])
    plain = run(engine_dir, deterministic=True)[0]
    outputs, metrics = run(engine_dir, scripted("siblings", plain, 12), deterministic=True)
    assert metrics["kv_cache_dtype"] == cache and texts(outputs) == texts(plain)


def test_the_reference_kernels_verify_trees_too(llama: Path) -> None:
    plain = run(llama, kernels="reference")[0]
    assert texts(run(llama, scripted("siblings", plain, 12), kernels="reference")[0]) == texts(plain)


@pytest.mark.parametrize("scheme", [None, "w4a16"])
def test_deterministic_trees_leave_the_bits_of_plain_decoding(scheme: str | None, tmp_path: Path) -> None:
    """In bfloat16 a sum in another order changes texts; a node's sums are those of plain decoding, whatever stands between the keys."""
    engine_dir = tiny_engine(tmp_path, "llama", "bfloat16", scheme, hidden_size=128, head_dim=32, intermediate_size=128)
    plain, metrics = run(engine_dir, deterministic=True)
    assert metrics["kernels"]["paged_attention"] == "cpu"
    for kind in TREE_KINDS:
        assert texts(run(engine_dir, scripted(kind, plain, 15), deterministic=True)[0]) == texts(plain)


@pytest.mark.parametrize("config", [{"num_speculative_tokens": 9}, {"speculative": "auto"}], ids=["fixed", "auto"])
def test_the_flag_makes_trees_of_texts(llama: Path, plain: Outputs, config: dict[str, Any]) -> None:
    outputs, metrics = run(llama, **{"speculative": "ngram", "speculative_tree": True, **config})
    assert texts(outputs) == texts(plain)
    assert metrics["speculation"]["proposers"] == ["ngram-tree"]


def test_trees_of_what_other_lines_said(llama: Path, plain: Outputs) -> None:
    """A memory with every answer twice, once as it will be and once, later, with every third token another: both branches are verified."""
    memory = SuffixIndex()
    for output in plain.values():
        for completion in output.completions:
            memory.extend(completion.token_ids)
            memory.extend((token + (place % 3 == 0)) % 320 for place, token in enumerate(completion.token_ids))
    outputs, metrics = run(llama, NgramTreeProposer(12, memory))
    assert texts(outputs) == texts(plain)
    assert metrics["speculation"]["accepted_tokens"] > 50
