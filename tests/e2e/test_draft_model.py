"""A draft model changes no token: whatever it is, greedy and drawn, in small pools, with shared beginnings and several answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import texts, tiny_engine
from speculation_lines import reasons, requests

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request, RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams

Outputs = dict[int, RequestOutput]


def answer(engine_dir: Path, lines: list[Request] | None = None, **config: Any) -> tuple[Outputs, dict[str, Any]]:
    """(outputs, speculation's metrics)."""
    settings = EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config})
    engine = Engine.from_directory(engine_dir, settings, load_codec(engine_dir))
    for request in requests() if lines is None else lines:
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    engine.kv.check_integrity([])
    assert engine.kv.allocator.num_held == 0
    metrics = engine.metrics()["speculation"]
    engine.close()
    return outputs, metrics or {}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Path]:
    yield tiny_engine(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory) -> dict[str, Path]:
    from dspark.converters.pipeline import quantize

    root = tmp_path_factory.mktemp("drafts")
    quantize(target, root / "quantized", "w8a16", audit=False)
    return {
        "itself": target,
        "stranger": tiny_engine(root / "stranger", "qwen2", num_hidden_layers=1),
        "quantized": root / "quantized",
        "one-layer": tiny_engine(root / "one-layer", num_hidden_layers=1),
    }


@pytest.mark.parametrize("name", ["itself", "stranger", "quantized", "one-layer"])
@pytest.mark.parametrize("length", [1, 4])
def test_every_draft_model_gives_the_text_of_plain_decoding(target: Path, drafts: dict[str, Path], name: str, length: int) -> None:
    plain, _ = answer(target)
    outputs, metrics = answer(target, speculative="draft-model", draft=str(drafts[name]), num_speculative_tokens=length)
    assert texts(outputs) == texts(plain) and reasons(outputs) == reasons(plain)
    assert metrics["proposers"] == ["draft-model"] and metrics["draft_tokens"] > 50
    if name == "itself":
        assert metrics["acceptance_rate"] > 0.95  # what lies behind an end of text is not accepted


@pytest.mark.parametrize("config", [{"kv_blocks": 9}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}, {"enable_prefix_caching": False}])
def test_small_pools_and_budgets_change_nothing_and_cost_no_acceptance(target: Path, config: dict[str, Any]) -> None:
    """Preemption, prompts in chunks, blocks found again: what the draft's layers hold there is computed anew or known to be right."""
    plain, _ = answer(target)
    if "kv_blocks" in config:
        config = {"kv_cache_memory_bytes": _block_bytes(target) * config["kv_blocks"]}
    outputs, metrics = answer(target, speculative="draft-model", draft=str(target), num_speculative_tokens=4, **config)
    assert texts(outputs) == texts(plain)
    assert metrics["acceptance_rate"] > 0.95
    if "kv_cache_memory_bytes" in config:
        assert sum(output.num_preemptions for output in outputs.values()) > 0


def _block_bytes(target: Path) -> int:
    settings = EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20, speculative="draft-model", draft=str(target))
    engine = Engine.from_directory(target, settings, load_codec(target))
    bytes_ = engine.executor.metrics()["kv_pool_bytes"] // engine.kv.num_blocks
    engine.close()
    assert bytes_ == 2 * (2 * 2 * 2 * 16 * 16 * 4)  # the target's layers and as many of the draft's: K and V, 2 layers, 2 heads
    return bytes_


def test_answers_of_one_prompt_share_what_the_draft_computed(target: Path) -> None:
    """n answers fork the prompt's blocks, copied on write; each of them drafts from its own copy."""
    lines = [Request(i, list(range(5 + i, 45 + i)), SamplingParams(max_tokens=20, n=3, temperature=0.9), draw_key=i) for i in range(3)]
    plain, _ = answer(target, lines)
    outputs, metrics = answer(target, lines, speculative="draft-model", draft=str(target), num_speculative_tokens=5)
    assert texts(outputs) == texts(plain)
    assert metrics["acceptance_rate"] > 0.95


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-dynamic", "gemma2", "qwen3_moe"])
def test_families_keep_their_text(family: str, tmp_path: Path) -> None:
    """Ropes that follow the length (which no draft may cross), windows, soft caps, experts; each drafted by itself."""
    engine_dir = tiny_engine(tmp_path, family)
    lines = [Request(i, list(range(3 + i, 48 + 2 * i)), SamplingParams(max_tokens=24, ignore_eos=True), draw_key=i) for i in range(4)]
    plain, _ = answer(engine_dir, lines)
    outputs, metrics = answer(engine_dir, lines, speculative="draft-model", draft=str(engine_dir), num_speculative_tokens=4)
    assert texts(outputs) == texts(plain)
    assert metrics["acceptance_rate"] > (0.6 if family == "llama-dynamic" else 0.95)


def test_auto_takes_ngrams_and_the_draft_and_changes_nothing(target: Path) -> None:
    plain, _ = answer(target)
    outputs, metrics = answer(target, speculative="auto", draft=str(target))
    assert texts(outputs) == texts(plain)
    assert metrics["proposers"] == ["ngram", "draft-model"]
