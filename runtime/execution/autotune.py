"""A loaded model's tiles, measured before a run lays out its KV cache. See `kernels.triton.tuning`."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.clock import Clock, CudaClock
from dspark.kernels.triton.tuning.machine import keep
from dspark.kernels.triton.tuning.subjects import AttentionUse, Load, subjects_of
from dspark.kernels.triton.tuning.tuner import TuneReport, reason_of, tune
from dspark.runtime.models.decoder import Decoder


@dataclass(frozen=True)
class Autotune:
    """What came of it: a report, or the reason why nothing was measured."""

    report: TuneReport | None = None
    off: str | None = None

    def metrics(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"off": self.off} if self.report is None else self.report.metrics()


def why_not(model: Decoder) -> str | None:
    """Why a model has no tiles to tune here, or None."""
    facts = model.kernels.facts
    if facts.tiles is None or facts.tiles.limits is None:
        return f"tiles are those of GPU kernels, the device is {facts.device}" if facts.device != "cuda" else "no tiles were asked for"
    if not any(selection.taken == "triton" for selection in model.kernels.selections.values()):
        return "no operation of this run takes a Triton kernel"
    return None


def autotune(model: Decoder, load: Load, budget_s: float, again: bool = False, clock: Clock | None = None) -> Autotune:
    """Measure tiles for what a run of this load will launch, within so many seconds; the model takes those that are faster, and the cache
    keeps them for later runs. clock: default the GPU's.

    Raises nothing: whatever fails, tiles stay as they were, and the reason is in the report.
    """
    if budget_s <= 0:
        return Autotune(off="--autotune is 0")
    if (reason := why_not(model)) is not None:
        return Autotune(off=reason)
    book = model.kernels.facts.tiles
    assert book is not None and book.limits is not None
    device = model.embedding.device.type
    try:
        with torch.inference_mode():
            subjects = subjects_of(book, model.kernels.facts, attention_uses(model), load, device)
            clock = CudaClock(book.limits.cache_bytes) if clock is None else clock
            report = tune(subjects, book, clock, budget_s, partial(keep, book), again)
    except Exception as error:
        return Autotune(off=f"tuning failed: {reason_of(error)}")
    finally:
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return Autotune(report)


def attention_uses(model: Decoder) -> list[AttentionUse]:
    """What different layers ask of Triton's attention; none where another implementation takes it."""
    if model.kernels.selections["paged_attention"].taken != "triton":
        return []
    asked = (AttentionUse(layer.attention.scale, layer.attention.window, layer.attention.softcap) for layer in model.layers)
    return list(dict.fromkeys(asked))


def tile_metrics(book: TileBook | None, tuned: Autotune) -> dict[str, Any]:
    """Where the tiles of a run come from, and what was measured for it."""
    return {**({} if book is None else book.metrics()), "autotune": tuned.metrics()}
