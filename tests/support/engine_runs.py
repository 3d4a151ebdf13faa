"""Engines made on the spot, and whole runs over them in one call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny_models import make_tiny_checkpoint

from dspark.converters.pipeline import convert, quantize
from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request, RequestOutput


def tiny_engine(directory: Path, family: str = "llama", dtype: str = "float32", scheme: str | None = None, **overrides: Any) -> Path:
    """Checkpoint and engine of a tiny random model under `directory`; returns the engine's path."""
    checkpoint = make_tiny_checkpoint(directory / "checkpoint", family, **overrides)
    convert(checkpoint, directory / "engine", dtype=dtype, audit=False)
    if scheme is None:
        return directory / "engine"
    quantize(directory / "engine", directory / f"engine-{scheme}", scheme, audit=False)
    return directory / f"engine-{scheme}"


def run_requests(engine_dir: Path, requests: Iterable[Request], record_gaps: bool = False, **config: Any) -> dict[int, RequestOutput]:
    """Answer all requests; outputs by request id. The engine's book-keeping is checked at the end."""
    settings = {"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config}
    engine = Engine.from_directory(engine_dir, EngineConfig(**settings), load_codec(engine_dir), record_gaps=record_gaps)
    for request in requests:
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    engine.kv.check_integrity([])
    assert engine.kv.allocator.num_held == 0
    engine.close()
    return outputs


def texts(outputs: dict[int, RequestOutput]) -> dict[int, list[list[int]]]:
    """Token ids of every answer, by request id."""
    return {key: [c.token_ids for c in output.completions] for key, output in sorted(outputs.items())}
