"""Run as a script with TRITON_INTERPRET=1: the tuner on real kernels of tiny shapes; one JSON line a check.

python tuning_checks.py [NAME ...]      all checks without a name
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fake_clock import FakeClock
from gemm_cases import fp8_linear_args, int8_linear_args
from gpu_models import MODELS, RandomWeights, scheme_named
from kernel_cases import wna16_linear_args
from tolerances import tolerance
from triton_interpreter import report_all

from dspark.kernels.facts import KernelFacts
from dspark.kernels.reference import linear as reference
from dspark.kernels.triton.fp8 import make_fp8_linear
from dspark.kernels.triton.int8 import make_int8_linear
from dspark.kernels.triton.tuning.limits import CARDS
from dspark.kernels.triton.tuning.machine import known_tiles
from dspark.kernels.triton.tuning.subjects import AttentionUse, Load, attention_subject, product_subject
from dspark.kernels.triton.tuning.tuner import Bench, Subject, tune
from dspark.kernels.triton.wna16 import make_wna16_linear
from dspark.runtime.execution.autotune import autotune
from dspark.runtime.execution.loader import choose_kernels
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.decoder import Decoder, build_decoder
from dspark.runtime.spec.quant import QuantConfig

F32 = torch.float32
H100 = CARDS["h100"]
MAKES = {
    "wna16": (make_wna16_linear, reference.make_wna16_linear, lambda: wna16_linear_args(F32, 1, 3, 128, 40, 4, False, 64)),
    "int8": (make_int8_linear, reference.make_int8_linear, lambda: int8_linear_args(F32, 1, 3, 200, 72)),
    "fp8": (make_fp8_linear, reference.make_fp8_linear, lambda: fp8_linear_args(F32, 1, 3, 256, 72, inputs="dynamic")),
    "fp8_widened": (make_fp8_linear, reference.make_fp8_linear, lambda: fp8_linear_args(F32, 1, 3, 128, 72, (64, 64))),
}


def shorter(subject: Subject) -> Subject:
    """With one each of the candidates that the interpreter can tell apart (not by warps or stages), around the untuned tile alone."""

    def seen(choice: Any) -> tuple[int, ...]:
        tile = getattr(choice, "tile", choice)
        return tuple(getattr(of, name, 0) for of in (choice, tile) for name in ("rows", "cols", "depth", "keys", "splits", "split_keys"))

    found = {seen(choice): choice for choice in subject.candidates(subject.untuned)}
    found.pop(seen(subject.untuned), None)
    return replace(subject, candidates=lambda around: list(found.values()) if around == subject.untuned else [])


def noting(subject: Subject, clock: FakeClock) -> Bench:
    """What a subject prepares; the clock is told what runs."""
    bench = subject.prepare()

    def run(choice: Any, turn: int) -> torch.Tensor:
        clock.last = choice
        return bench.run(choice, turn)

    return replace(bench, run=run)


def every_candidate_gives_the_same(name: str) -> None:
    """None is declined; the one that a clock calls fastest is taken by the linear, which stays right."""
    make, make_reference, args = MAKES[name]
    weight, bias, x = args()
    with tempfile.TemporaryDirectory() as folder:
        book = known_tiles(H100, Path(folder))
        facts = KernelFacts("cpu", F32, 64, 4, 2, 16, interpreted=True, tiles=book)
        linear = make(weight, bias, facts)
        ((kind, owners),) = book.owners().items()
        untuned = book.untuned_product(kind, 3)[0]
        clock = FakeClock()
        subject = shorter(product_subject(book, kind, owners, 3))
        wanted = subject.candidates(untuned)[-1]
        subject = replace(subject, prepare=partial(noting, subject, clock))
        clock.cost = lambda tile: 0.5 if tile == wanted else 1.0
        report = tune([subject], book, clock, 1e9, lambda entries: None)
        entry = report.finished[subject.key]
        assert entry.declined == {} and entry.tried >= 5, entry
        assert linear._tiles[3] == wanted == entry.choice and wanted != untuned
    rtol, atol = tolerance(f"make_{name.split('_')[0]}_linear", F32)
    torch.testing.assert_close(linear(x), make_reference(weight, bias, facts)(x), rtol=rtol, atol=atol)


def every_attention_candidate_gives_the_same() -> None:
    """Of decoding with a shared context, and of a chunk beside it with an 8-bit cache."""
    for cache_dtype, step in ((None, (1, 1, 600)), (torch.int8, (2, 20, 70))):
        facts = KernelFacts("cpu", torch.float16, 32, 4, 2, 16, interpreted=True, cache_dtype=cache_dtype)
        book = known_tiles(H100, Path("/nonexistent"))
        subject = attention_subject(book, facts, AttentionUse(32**-0.5, None, 0.0), *step, Load(2, 40, 600), "cpu")
        report = tune([shorter(subject)], book, FakeClock(), 1e9, lambda entries: None)
        assert report.failed == {} and report.num_faster == 0
        assert all(entry.declined == {} and entry.tried >= 2 for entry in report.finished.values()) and report.finished


def tiny_model(scheme_name: str, folder: str, **facts: bool) -> Decoder:
    config = MODELS["tiny"]
    scheme = scheme_named(scheme_name, config)
    assert scheme is not None
    quant = QuantConfig(scheme, ignore=("lm_head", "model.embed_tokens"))
    tiles = known_tiles(H100, Path(folder))
    kernels = choose_kernels(config, kernels="triton", interpreted=True, tiles=tiles, **facts)
    return build_decoder(config, quant, RandomWeights(FAMILIES[config.family].tensors(config), quant, F32, "cpu"), kernels)


def a_model_is_tuned_as_far_as_time_allows() -> None:
    """Products and attention take turns; what is finished is found by the next run, which goes on."""
    load = Load(2, 4, 40)
    with tempfile.TemporaryDirectory() as folder:
        done = autotune(tiny_model("w4a16", folder), load, 30.0, clock=FakeClock()).report
        assert done is not None and done.left > 0 and done.failed == {} and done.cache_problem is None, done
        assert len(done.finished) == 1
        model = tiny_model("w4a16", folder)
        book = model.kernels.facts.tiles
        assert book is not None and book.tuned.keys() == done.finished.keys()
        more = autotune(model, load, 30.0, clock=FakeClock()).report
        assert more is not None and more.known == len(done.finished) and not more.finished.keys() & done.finished.keys()
        assert set(known_tiles(H100, Path(folder)).tuned) == {*done.finished, *more.finished}


def deterministic_runs_tune_exact_sums_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        nothing = autotune(tiny_model("w4a16", folder, deterministic=True), Load(1, 1, 40), 50.0, clock=FakeClock()).report
        assert nothing is not None and nothing.finished == {} and nothing.left == 0
        some = autotune(tiny_model("w8a8", folder, deterministic=True), Load(1, 1, 40), 30.0, clock=FakeClock()).report
        assert some is not None and some.finished and all(key.startswith("int8 ") for key in some.finished)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"product-{name}": partial(every_candidate_gives_the_same, name) for name in MAKES},
    "attention": every_attention_candidate_gives_the_same,
    "model": a_model_is_tuned_as_far_as_time_allows,
    "deterministic": deterministic_runs_tune_exact_sums_alone,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    report_all({name: CHECKS[name] for name in sys.argv[1:] or CHECKS})
