"""What tuning brings: a few shapes of Llama-3-8B by their reasoned, their shipped and their tuned tile. Keeps nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gpu_timings
import torch
from gpu_timings import BLOCK_SIZE, Record, Shapes

from dspark.kernels.dispatch import implementation
from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.choices import text
from dspark.kernels.triton.tuning.clock import Clock, CudaClock
from dspark.kernels.triton.tuning.limits import CARDS, this_gpu
from dspark.kernels.triton.tuning.subjects import AttentionUse, Load, attention_subject, product_subject
from dspark.kernels.triton.tuning.tables import table_for
from dspark.kernels.triton.tuning.tuner import Subject, tune

BUDGET_S = 15.0
"""For one shape, compilation included: two dozen tiles."""


class WallClock:
    """Seconds of the host, once: for a dry run."""

    def now(self) -> float:
        return time.monotonic()

    def seconds(self, run: Callable[[int], Any], sets: int, num_bytes: int) -> float:
        started = time.perf_counter()
        run(0)
        return time.perf_counter() - started

    def check(self) -> None:
        pass


def tuning_runs(shapes: Shapes, device: str) -> list[tuple[str, Callable[[], tuple[str, list[Record]]]]]:
    """(name, check), what matters most first."""
    outputs, inputs = shapes.linears[-1]
    found = [
        (f"{scheme}_{rows}x{inputs}_to_{outputs}", partial(_product_check, shapes, device, scheme, rows, outputs, inputs))
        for scheme, rows in (("w4a16", shapes.rows[0]), ("w4a16", shapes.drawn_rows[-1]), ("w8a8", shapes.drawn_rows[-1]))
    ]
    sequences, queries, context = shapes.attention[min(1, len(shapes.attention) - 1)]
    found.append((f"attention_{sequences}x{queries}_in_{context}", partial(_attention_check, shapes, device, sequences, queries, context)))
    return list(dict(found).items())


def _book(device: str) -> TileBook:
    """Of the device, without a cache: what earlier runs measured must not stand in for what is measured here."""
    limits = this_gpu() if device == "cuda" else CARDS["h100"]
    return TileBook(limits, table_for(limits))


def _product_check(shapes: Shapes, device: str, scheme: str, rows: int, outputs: int, inputs: int) -> tuple[str, list[Record]]:
    book = _book(device)
    op, weight = gpu_timings.quantized_weight(shapes, device, scheme, outputs, inputs)
    facts = KernelFacts(device, shapes.dtype, 64, 1, 1, BLOCK_SIZE, interpreted=device == "cpu", tiles=book)
    linear = implementation("triton", op)(weight, None, facts)
    ((kind, owners),) = book.owners().items()
    reasoned = product_subject(TileBook(book.limits), kind, owners, rows)
    del linear
    return _compare(reasoned, product_subject(book, kind, owners, rows), book, device)


def _attention_check(shapes: Shapes, device: str, sequences: int, queries: int, context: int) -> tuple[str, list[Record]]:
    book = _book(device)
    heads, kv_heads, dim = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    facts = KernelFacts(device, shapes.dtype, dim, heads, kv_heads, BLOCK_SIZE, interpreted=device == "cpu")
    step = AttentionUse(dim**-0.5, None, 0.0), sequences, queries, context, Load(sequences, sequences * queries, context), device
    return _compare(attention_subject(TileBook(book.limits), facts, *step), attention_subject(book, facts, *step), book, device)


def _compare(reasoned: Subject, subject: Subject, book: TileBook, device: str) -> tuple[str, list[Record]]:
    """Tune, then all three once more. Raises where the tuner could not measure, or declined tiles as wrong."""
    assert book.limits is not None
    clock: Clock = CudaClock(book.limits.cache_bytes) if device == "cuda" else WallClock()
    if device == "cpu":
        subject = replace(subject, candidates=lambda around: reasoned.candidates(around)[:2])
    with torch.inference_mode():
        report = tune([subject], book, clock, BUDGET_S if device == "cuda" else 120.0, lambda entries: None)
        if report.failed or report.stopped:
            raise AssertionError(f"{report.failed or report.stopped}")
        if not report.finished:
            return f"not finished within {BUDGET_S:g} s", []
        entry = report.finished[subject.key]
        wrong = {tile: reason for tile, reason in entry.declined.items() if reason.startswith("gives ")}
        assert not wrong, f"other results: {wrong}"
        bench = subject.prepare()

        def seconds(choice: Any) -> float:
            return clock.seconds(lambda turn: bench.run(choice, turn), bench.sets, bench.num_bytes)

        chosen = {"reasoned": reasoned.untuned, "shipped": subject.untuned, "tuned": entry.choice}
        times = {name: seconds(choice) for name, choice in chosen.items()}
    figures = ", ".join(f"{name} {value * 1e6:.1f} us" for name, value in times.items())
    ratio = f"{times['reasoned'] / times['tuned']:.2f}x"
    return f"{figures} ({ratio}: {text(entry.choice)}), {entry.tried} tried, {len(entry.declined)} declined", []
