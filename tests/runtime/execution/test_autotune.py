"""What a run tunes, in which order, and that a failure of it is a line in the metrics. With real kernels: test_tuning_interpreter.py."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import tiny_engine

from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton.int8 import int8_kind
from dspark.kernels.triton.tuning import subjects
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.keys import ProductKind
from dspark.kernels.triton.tuning.limits import CARDS
from dspark.kernels.triton.tuning.subjects import AttentionUse, Load, rows_by_value, steps_by_value, subjects_of
from dspark.kernels.triton.tuning.tables import table_for
from dspark.runtime.execution import autotune as module
from dspark.runtime.execution import loader
from dspark.runtime.execution.autotune import autotune, tile_metrics
from dspark.runtime.execution.loader import choose_kernels, load_model
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.manifest import load_manifest

LOAD = Load(64, 512, 4096)
USE = AttentionUse(0.125, None, 0.0)


class Product:
    def __init__(self, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(tiny_engine(tmp_path_factory.mktemp("engine")))


def tunable(model: Decoder, **facts: object) -> Decoder:
    """The model as if it ran on a GPU."""
    kernels = choose_kernels(model.config)
    kernels.facts = replace(model.kernels.facts, tiles=TileBook(CARDS["h100"], table_for(CARDS["h100"])), **facts)  # type: ignore[arg-type]
    for op in ("paged_attention", "make_wna16_linear"):
        kernels.selections[op] = replace(kernels.selections[op], taken="triton")
    return replace(model, kernels=kernels)


def test_nothing_is_tuned_unless_asked_or_where_there_is_nothing(model: Decoder) -> None:
    assert autotune(model, LOAD, 0.0).metrics() == {"off": "--autotune is 0"}
    assert autotune(model, LOAD, 9.0).metrics() == {"off": "tiles are those of GPU kernels, the device is cpu"}
    other = tunable(model)
    for op, selection in other.kernels.selections.items():
        other.kernels.selections[op] = replace(selection, taken="reference")
    assert autotune(other, LOAD, 9.0).metrics() == {"off": "no operation of this run takes a Triton kernel"}


def test_a_failure_is_a_line_in_the_metrics(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the driver is unhappy\nsecond line")

    monkeypatch.setattr(module, "subjects_of", fail)
    done = autotune(tunable(model), LOAD, 9.0)
    assert done.metrics() == {"off": "tuning failed: RuntimeError: the driver is unhappy"}
    metrics = tile_metrics(TileBook(CARDS["h100"], table_for(CARDS["h100"])), done)
    assert metrics["shipped_table"] == {"name": "H100, H200", "measured": False} and metrics["autotune"] == done.metrics()


def test_a_gpu_run_takes_the_tiles_that_are_known_for_it(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    book = TileBook(CARDS["a100"])
    monkeypatch.setattr(loader, "known_tiles", lambda: book)
    monkeypatch.setattr("dspark.kernels.triton.launch.capability", lambda facts: (8, 0))
    assert choose_kernels(model.config, device="cuda").facts.tiles is book
    assert choose_kernels(model.config, device="cuda", kernels="reference").facts.tiles is None
    assert choose_kernels(model.config).facts.tiles is None


def test_decoding_of_all_sequences_comes_first_then_prompts_then_one_sequence() -> None:
    assert rows_by_value(LOAD)[:3] == [64, 512, 1] and sorted(rows_by_value(LOAD)) == [1, 8, 16, 32, 64, 128, 256, 512]
    assert rows_by_value(Load(1, 16, 100)) == [1, 16, 8]
    steps = steps_by_value(LOAD)
    assert steps[:4] == [(64, 1, 2048), (64, 512, 2048), (1, 1, 2048), (1, 512, 2048)] and len(steps) == len(set(steps))
    assert {step[2] for step in steps} == {512, 2048, 4096} and max(step[0] for step in steps) == 64
    assert all(queries <= context for _, queries, context in steps_by_value(Load(3, 16, 20)))


def test_products_take_turns_with_attention_heavy_ones_first() -> None:
    book = TileBook(CARDS["h100"], table_for(CARDS["h100"]))
    small, large = (ProductKind("wna16", "4 bits", outputs, 4096, "bfloat16", 2, 4, 64, 128) for outputs in (4096, 28672))
    owners = [Product(10), Product(100)]
    for kind, owner in zip((small, large), owners, strict=True):
        book.products(kind, owner)  # type: ignore[arg-type]
    facts = KernelFacts("cuda", torch.bfloat16, 128, 32, 8, 16, tiles=book)
    keys = [subject.key for subject in subjects_of(book, facts, [USE], LOAD, "cuda")]
    assert "28672x4096 rows 64" in keys[0] and "4096x4096 rows 64" in keys[1]
    assert keys[2].endswith("sequences 64 queries 1 context 2048") and "rows 512" in keys[3] and len(keys) == len(set(keys))
    assert subjects_of(TileBook(), facts, [USE], LOAD, "cuda") == []


def test_deterministic_runs_tune_exact_sums_alone() -> None:
    book = TileBook(CARDS["h100"])
    fixed = ProductKind("wna16", "4 bits", 4096, 4096, "bfloat16", 2, 4, 64, 128, fixed=True)
    owners = [Product(1), Product(1)]
    for kind, owner in zip((fixed, int8_kind(4096, 4096, torch.bfloat16)), owners, strict=True):
        book.products(kind, owner)  # type: ignore[arg-type]
    facts = KernelFacts("cuda", torch.bfloat16, 128, 32, 8, 16, deterministic=True, tiles=book)
    found = subjects_of(book, facts, [USE], LOAD, "cuda")
    assert found and all(subject.exact and subject.key.startswith("int8") for subject in found)


def test_pages_that_do_not_fit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_page_bytes", lambda device: 1 << 20)
    facts = KernelFacts("cpu", torch.float16, 128, 32, 8, 16)
    subject = subjects.attention_subject(TileBook(CARDS["h100"]), facts, USE, 64, 1, 4096, LOAD, "cpu")
    with pytest.raises(MemoryError, match="more than may be taken"):
        subject.prepare()


def test_the_flag_has_bounds_and_changes_no_result(tmp_path: Path) -> None:
    """A job that was begun without it goes on with it."""
    with pytest.raises(UsageError, match="--autotune is -1"):
        EngineConfig(autotune=-1)
    from dspark.runtime.jobs.fingerprint import job_fingerprint
    from dspark.runtime.spec.sampling_params import SamplingParams

    engine = tiny_engine(tmp_path)
    name = load_manifest(engine).model.family
    prints = [job_fingerprint(engine, name, SamplingParams(), EngineConfig(autotune=seconds)) for seconds in (0, 60)]
    assert prints[0] == prints[1]
