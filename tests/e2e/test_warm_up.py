"""What happens before the first line: it is neither counted nor able to hide a failure."""

from pathlib import Path

import pytest
from engine_runs import tiny_engine

from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark_cli.generate import load_engine

CONFIG = EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20)


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("engine"))


def test_warming_up_leaves_no_trace(engine_dir: Path) -> None:
    """Its token in the counters would make metrics of a job depend on something that no line asked for."""
    engine, _ = load_engine(engine_dir, CONFIG)
    metrics = engine.metrics()
    assert engine.num_unfinished == 0
    assert [metrics[key] for key in ("num_steps", "output_tokens", "prompt_tokens", "forward_s", "sampling_s")] == [0] * 5
    assert engine.kv.allocator.num_held == 0


def test_a_renderer_that_cannot_be_loaded_is_an_error_of_the_run(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in a thread of its own it would print a traceback, and the job would go on to fail at its first conversation."""

    def broken(self: TextCodec) -> None:
        raise ImportError("no renderer")

    monkeypatch.setattr(TextCodec, "warm_up", broken)
    with pytest.raises(ImportError, match="no renderer"):
        load_engine(engine_dir, CONFIG)


def test_a_template_that_refuses_the_trial_is_no_error(engine_dir: Path) -> None:
    codec = load_codec(engine_dir)
    codec.chat_template = "{{ raise_exception('not this one') }}"
    codec.warm_up()
