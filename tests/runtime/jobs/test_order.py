"""The order of work, and the loop that follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_engine import ByteCodec, StandinEngine

from dspark.runtime.jobs import order as order_module
from dspark.runtime.jobs import runner as runner_module
from dspark.runtime.jobs.index import LINE, FixedFile
from dspark.runtime.jobs.lines import LineError
from dspark.runtime.jobs.metrics import Histogram, RunMetrics
from dspark.runtime.jobs.order import WorkFeed, work_order
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.runner import Answering, Runner
from dspark.runtime.jobs.scan import scan_input
from dspark.runtime.jobs.store import ResultStore
from dspark.runtime.spec.sampling_params import SamplingParams


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.text("ab", max_size=300), st.integers(0, 50)), max_size=30))
def test_work_order_is_a_permutation(items: list[tuple[str, int]]) -> None:
    order = work_order([text for text, _ in items], [cost for _, cost in items])
    assert sorted(order) == list(range(len(items)))


def test_shared_beginnings_are_adjacent_and_the_costliest_group_is_first() -> None:
    a, b = "A" * 1000, "B" * 1000
    texts = [a + "1", "short", b + "1", a + "2", "long answer", b + "2"]
    costs = [10, 1, 30, 20, 500, 5]
    order = work_order(texts, costs)
    assert [texts[i][:1] + texts[i][-1:] for i in order] == ["lr", "B1", "B2", "A2", "A1", "st"]


def test_nested_beginnings_stay_together() -> None:
    """Groups within groups: two systems prompts, each with two documents."""
    texts = [f"{s * 300}{d * 1000}{q}" for q in range(3) for s in "xy" for d in "mn"]
    order = [texts[i] for i in work_order(texts, list(range(len(texts))))]
    seen: list[str] = []
    for text in order:
        head = text[:1] + text[400:401]
        if not seen or seen[-1] != head:
            seen.append(head)
    assert len(seen) == 4 and [head[0] for head in seen] in (["x", "x", "y", "y"], ["y", "y", "x", "x"])


class Silent:
    """A reporter that counts."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.errors: list[LineError] = []

    def finished(self, count: int, metrics: RunMetrics) -> None:
        self.num_finished += count

    def failed(self, error: LineError) -> None:
        self.errors.append(error)


def prepared(tmp_path: Path, lines: list[Any]) -> tuple[Path, FixedFile, ResultStore]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    index = FixedFile(tmp_path / "lines.bin", LINE, create=True)
    scan_input(path, index)
    (tmp_path / "j").mkdir()
    store = ResultStore(tmp_path / "j", tmp_path / "out.jsonl", None)
    store.load(index, False)
    return path, index, store


def run(engine: StandinEngine, path: Path, index: FixedFile, store: ResultStore, reporter: Silent, **how: Any) -> str | None:
    builder = PromptBuilder(ByteCodec(), SamplingParams(max_tokens=8), engine.max_model_len, engine.vocab_size)  # type: ignore[arg-type]
    runner = Runner(engine, builder, store, Answering(1, "m"), RunMetrics(), reporter, how.pop("stop", lambda: None), **how)
    return runner.run(iter(WorkFeed(path, index, store.slots, 8)))


def test_the_engine_is_kept_filled_but_not_flooded(tmp_path: Path) -> None:
    lines = [{"prompt": f"question {i}"} for i in range(300)]
    path, index, store = prepared(tmp_path, lines)
    engine, reporter = StandinEngine(max_num_seqs=4), Silent()
    assert run(engine, path, index, store, reporter) is None
    assert engine.most_waiting == 4 * runner_module.QUEUE_FACTOR
    assert reporter.num_finished == store.counts.ok == 300
    store.publish(lambda: False)
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["custom_id"] for record in out] == [f"line-{i + 1}" for i in range(300)]


def test_the_queue_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "QUEUE_BYTES", 1000)
    path, index, store = prepared(tmp_path, [{"prompt": "x" * 600 + str(i)} for i in range(20)])
    engine = StandinEngine(max_num_seqs=8)
    assert run(engine, path, index, store, Silent()) is None
    assert engine.most_waiting == 2 and store.counts.ok == 20


def test_windows_are_fed_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "WINDOW_LINES", 10)
    path, index, store = prepared(tmp_path, [{"prompt": f"{i}", "max_tokens": 1 + i % 7} for i in range(35)])
    ats = [work.key.at for work in WorkFeed(path, index, store.slots, 8)]
    assert [sorted(ats[i : i + 10]) for i in range(0, 35, 10)] == [list(range(i, min(i + 10, 35))) for i in range(0, 35, 10)]
    assert ats[0] == 6  # the longest answer of its window


def test_a_long_row_of_bad_lines_is_written_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BUILDS_PER_STEP", 10)
    path, index, store = prepared(tmp_path, ["bad line"] * 25 + [{"prompt": "good"}])
    reporter = Silent()
    calls: list[int] = []

    def stop() -> str | None:
        calls.append(store.journal.size)
        return None

    assert run(StandinEngine(), path, index, store, reporter, stop=stop) is None
    assert len(reporter.errors) == 25 and len(calls) >= 2 and calls[0] > 0


def test_errors_of_template_and_engine_are_records_too(tmp_path: Path) -> None:
    lines = [
        {"custom_id": "t", "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]},
        {"custom_id": "e", "prompt": "TOO BIG"},
        {"custom_id": "l", "prompt": "x" * 5000},
        {"custom_id": "g", "prompt": "fine"},
    ]
    path, index, store = prepared(tmp_path, lines)
    reporter = Silent()
    run(StandinEngine(), path, index, store, reporter)
    store.publish(lambda: False)
    out = {record["custom_id"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert [out[name]["error"]["code"] for name in "tel"] == ["template_refused", "kv_pool_too_small", "prompt_too_long"]
    assert out["g"]["error"] is None and len(reporter.errors) == 3


def test_what_was_finished_before_a_failure_is_kept(tmp_path: Path) -> None:
    path, index, store = prepared(tmp_path, [{"prompt": f"{i}"} for i in range(50)])
    engine = StandinEngine(max_num_seqs=2, fail_at_step=9)
    with pytest.raises(RuntimeError, match="told to fail"):
        run(engine, path, index, store, Silent())
    again = ResultStore(tmp_path / "j", tmp_path / "out.jsonl", None)
    again.load(index, False)
    assert again.counts.resumed == store.counts.ok > 0


def test_percentiles_are_right_to_a_hundredth() -> None:
    histogram = Histogram()
    for i in range(1, 1001):
        histogram.add(i / 1000)
    summary = histogram.summary()
    assert summary["max"] == 1.0
    for percent in (50, 90, 99):
        assert summary[f"p{percent}"] == pytest.approx(percent / 100, rel=0.011)
    assert Histogram().summary() == {"p50": None, "p90": None, "p99": None, "max": None}
