"""N-grams before a drafting head: both draft, and no text changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from engine_runs import run_requests, texts
from speculation_lines import requests

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.speculation.choice import Choice
from dspark.runtime.speculation.pairing import Pairing


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "eagle3-original"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_ngrams_and_a_head_together_change_no_text(
    target: Any, stored: Callable[..., Any], kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the rejection rule drafts with and without distributions stand in one step; greedy answers are the same there too. A clock of
    equal ticks decides who is asked."""
    draft, ticks = stored(kind).directory, count()
    monkeypatch.setattr("dspark.runtime.engine.time.process_time", lambda: next(ticks) / 1000)
    lines = [request for request in requests() if rule == "coupled" or request.params.is_greedy]
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20, speculative="auto", draft=str(draft), speculative_sampling=rule)
    engine = Engine.from_directory(target.engine, config, load_codec(target.engine))
    method = "eagle3" if "eagle" in kind else "dspark"
    costs = Pairing(f"ngram+{method}", None, engine.executor.machine, step_cost_ms={"1": 1.0, "64": 1.01})
    run = engine.again(Choice(f"ngram+{method}", draft, costs))
    for request in lines:
        run.add(request)
    outputs = {output.request_id: output for output in run.drain()}
    metrics = run.metrics()["speculation"]
    engine.close()
    assert texts(outputs) == texts(run_requests(target.engine, lines))
    assert metrics["proposers"] == ["ngram", method]
    assert {source.split("-")[0] for source in metrics["acceptance"]} >= {method}
