"""The export as a whole: refused before it writes, published at once, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exports import engine_of, hashes_of, tensors_of, uniform
from quantized_checkpoints import integers
from tiny_models import make_tiny_checkpoint

from dspark.converters.exporters import base
from dspark.converters.exporters.base import export
from dspark.converters.exporters.source import EngineSource
from dspark.converters.pipeline import convert, quantize
from dspark.runtime.spec.errors import InputError, UnsupportedError, UsageError
from dspark_cli.app import run
from dspark_cli.export import FORMATS


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    convert(make_tiny_checkpoint(folder / "source", "llama"), folder / "engine", audit=False)
    return folder / "engine"


def test_the_command_offers_the_formats_there_are() -> None:
    assert tuple(base.FORMATS) == FORMATS
    assert [base.exporter_for(name).format for name in FORMATS] == list(FORMATS)
    with pytest.raises(UsageError, match="--format is gguf, allowed: hf, gptq, awq, compressed-tensors"):
        base.exporter_for("gguf")


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_a_dense_engine_has_nothing_to_pack(dense: Path, tmp_path: Path, format: str) -> None:
    with pytest.raises(UnsupportedError, match="is not quantized") as caught:
        export(dense, tmp_path / "out", format)
    assert "dspark quantize" in caught.value.hint and not list(tmp_path.iterdir())


def test_only_exports_are_replaced_and_only_by_force(dense: Path, tmp_path: Path) -> None:
    export(dense, tmp_path / "out", "hf")
    with pytest.raises(UsageError, match=r"exported checkpoint .* exists"):
        export(dense, tmp_path / "out", "hf")
    export(dense, tmp_path / "out", "hf", force=True)
    with pytest.raises(UsageError, match="is no exported checkpoint, so it is not replaced"):
        export(dense, dense, "hf", force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_failure_in_the_middle_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    def fail(done: int, total: int, name: str) -> None:
        assert 0 < done <= total
        raise InputError("enough")

    with pytest.raises(InputError, match="enough"):
        export(dense, tmp_path / "out", "hf", progress=fail)
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
from dspark.converters.exporters.base import export
def slowly(done, total, name):
    print(done, flush=True)
    time.sleep(60)
export(sys.argv[1], sys.argv[2], "hf", progress=slowly)
"""


def test_a_killed_export_leaves_no_directory_that_loads(dense: Path, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-P", "-c", KILLED, str(dense), str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and not (left[0] / "config.json").exists()
    export(dense, tmp_path / "out", "hf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_damaged_engine_is_refused_before_anything_is_written(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    for path in dense.iterdir():
        (tmp_path / "engine" / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((dense / "engine.json").read_text())
    del manifest["tensors"]["model.norm.weight"]
    (tmp_path / "engine" / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"does not hold the tensors of its model: missing: model\.norm\.weight"):
        export(tmp_path / "engine", tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_fused_projections_are_stacked_in_every_format(tmp_path: Path) -> None:
    """Phi-3 checkpoints hold q, k and v as one, gate and up as another; the engine holds each on its own."""
    quantize(make_tiny_checkpoint(tmp_path / "source", "phi3-partial"), tmp_path / "engine", "w4a16", group_size=32, audit=False)
    for format, leaf in (("gptq", "qweight"), ("awq", "qweight"), ("compressed-tensors", "weight_packed")):
        export(tmp_path / "engine", tmp_path / format, format)
        names = tensors_of(tmp_path / format)
        assert f"model.layers.0.self_attn.qkv_proj.{leaf}" in names and f"model.layers.0.mlp.gate_up_proj.{leaf}" in names
        assert not [name for name in names if "q_proj" in name]
        convert(tmp_path / format, tmp_path / f"{format}-again", audit=False)
        assert hashes_of(tmp_path / f"{format}-again") == hashes_of(tmp_path / "engine"), format


def test_parts_that_are_stored_differently_cannot_be_stacked(tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "source", "phi3-partial")
    quantize(source, tmp_path / "engine", "w4a16", group_size=32, ignore=("*.k_proj",), audit=False)
    with pytest.raises(UnsupportedError, match=r"qkv_proj is one layer .* \(q_proj w4a16 group 32, k_proj dense, v_proj w4a16 group 32\)"):
        export(tmp_path / "engine", tmp_path / "out", "gptq")
    export(tmp_path / "engine", tmp_path / "out", "hf")


def test_scales_that_float16_rounds_are_noted_and_never_zero(tmp_path: Path) -> None:
    """A scale below float16's smallest number becomes that number: programs divide by it."""

    def recipe(module: str, weight: torch.Tensor):
        return integers(weight) if module.endswith("up_proj") else None

    engine, _ = engine_of(tmp_path, recipe)
    source = EngineSource(engine)
    exporter = base.exporter_for("gptq")(source)
    scales = torch.tensor([[1e-9, -1e-9, 0.0, 0.1]])
    half = exporter.half_scales(scales)
    assert half.dtype == torch.float16 and half[0, :3].tolist() == [2.0**-24, -(2.0**-24), 0.0]
    assert half[0, 3] == scales[0, 3].half()


def test_the_command(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(dense), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: --format is missing; type --format with one of hf, gptq, awq, compressed-tensors\n"
    assert run(["export", str(dense), str(tmp_path / "out"), "--format", "hf", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "hf" and document["quantized_layers"] == 0 and document["weight_bytes"] > 0
    engine, _ = engine_of(tmp_path, uniform(8))
    assert run(["export", str(engine), str(tmp_path / "awq"), "--format", "awq"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "8 bits, allowed: 4; type --format gptq, compressed-tensors or hf" in error
