"""Calibrated quantization of whole tiny models: better than rounding, independent of the file's order, resumable, refusing what is bad."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_logits import by_transformers
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_checkpoint, save_tokenizer

from dspark.converters.calibration.driver import WalkOptions
from dspark.converters.calibration.run import CalibratedRun
from dspark.converters.calibration.samples import SampleRequest
from dspark.converters.pipeline import quantize
from dspark.converters.quantizers.base import SolverOptions
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.manifest import MANIFEST_NAME, load_manifest

PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    """Lines of unequal lengths."""
    path = tmp_path_factory.mktemp("calibration") / "lines.jsonl"
    dice = random.Random(0)
    path.write_text(
        "".join(json.dumps({"prompt": [dice.randrange(3, 320) for _ in range(dice.randint(5, 120))]}) + "\n" for _ in range(40))
    )
    return path


def checkpoint_of(tmp_path: Path, family: str = "llama", **changes: object) -> Path:
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint", family, **changes)
    save_tokenizer(checkpoint)
    return checkpoint


def run_of(calibration: Path, **options: object) -> CalibratedRun:
    return CalibratedRun(SampleRequest(calibration), **options)  # type: ignore[arg-type]


def bytes_of(engine: Path) -> dict[str, str]:
    return {name: record.xxh3 for name, record in load_manifest(engine).tensors.items()}


def distance(engine: Path, dense: Path) -> float:
    """Mean squared error of the logits, relative."""
    got, want = logits_for(load_model(engine), PROMPT), logits_for(load_model(dense), PROMPT)
    return float((got - want).square().mean() / want.square().mean())


@pytest.mark.parametrize("method", ["gptq", "awq", "awq-gptq"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "qwen3_moe", "phi3", "olmo2"])
def test_a_calibrated_engine_is_audited_and_near_its_source(family: str, method: str, tmp_path, calibration) -> None:
    """The audit holds the engine against transformers on the same (scaled, quantized) weights; the source is not far."""
    from dspark.converters.pipeline import convert

    checkpoint = checkpoint_of(tmp_path, family)
    convert(checkpoint, tmp_path / "dense", audit=False)
    result = quantize(checkpoint, tmp_path / "engine", "w4a16", method, 32, calibrated=run_of(calibration))
    assert result.manifest.audit["summary"].startswith("audit passed")
    quantize(checkpoint, tmp_path / "rounded", "w4a16", "rtn", 32, audit=False)
    assert distance(tmp_path / "engine", tmp_path / "dense") < 1.5 * distance(tmp_path / "rounded", tmp_path / "dense")
    layers = result.manifest.quality["layers"]
    assert layers and all("output_sqnr_db" in entry or entry.get("notes") for entry in layers.values())
    assert result.manifest.quality["calibration"]["samples"] == 40
    assert not (tmp_path / ".engine.quantize").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq-gptq", "smoothquant", "smoothquant-gptq"])
def test_the_order_of_the_lines_changes_no_bit(method: str, tmp_path, calibration) -> None:
    checkpoint = checkpoint_of(tmp_path)
    lines = calibration.read_text().splitlines(keepends=True)
    for name, order in (("a", lines), ("b", lines[::-1]), ("c", lines[17:] + lines[:17])):
        (tmp_path / f"{name}.jsonl").write_text("".join(order))
        scheme = "w8a8" if "smoothquant" in method else "w4a16"
        quantize(checkpoint, tmp_path / name, scheme, method, audit=False, calibrated=run_of(tmp_path / f"{name}.jsonl"))
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")


@pytest.mark.parametrize("method", ["gptq", "awq", "awq-gptq"])
def test_an_interrupted_run_is_resumed_to_the_same_bytes(method: str, tmp_path, calibration) -> None:
    class Stop(Exception):
        pass

    def stop_after_the_first(done: int, total: int, words: str) -> None:
        raise Stop

    checkpoint = checkpoint_of(tmp_path, num_hidden_layers=3)
    quantize(checkpoint, tmp_path / "undisturbed", "w4a16", method, audit=False, calibrated=run_of(calibration))
    with pytest.raises(Stop):
        quantize(
            checkpoint, tmp_path / "engine", "w4a16", method, audit=False, calibrated=run_of(calibration, progress=stop_after_the_first)
        )
    assert not (tmp_path / "engine").exists() and (tmp_path / ".engine.quantize" / "layer-00000.json").is_file()
    seen: list[int] = []
    resumed = run_of(calibration, resume=True, progress=lambda done, total, words: seen.append(done))
    result = quantize(checkpoint, tmp_path / "engine", "w4a16", method, audit=False, calibrated=resumed)
    assert "1 layers were taken over from an interrupted run" in result.manifest.notes
    assert bytes_of(tmp_path / "engine") == bytes_of(tmp_path / "undisturbed")
    assert not (tmp_path / ".engine.quantize").exists()


def test_scales_and_gptq_together_lose_less_than_either(tmp_path, calibration) -> None:
    """Outlying channels, which scales are for, in inputs that hang together, which GPTQ is for: by the outputs that calibration saw."""
    checkpoint = checkpoint_of(tmp_path, num_hidden_layers=1)
    state = load_file(checkpoint / "model.safetensors")
    for name in ("input_layernorm", "post_attention_layernorm"):
        state[f"model.layers.0.{name}.weight"][::8] *= 12
    save_file(state, checkpoint / "model.safetensors", metadata={"format": "pt"})
    noise = {}
    for method in ("rtn", "gptq", "awq", "awq-gptq"):
        result = quantize(checkpoint, tmp_path / method, "w3a16", method, 32, audit=False, calibrated=run_of(calibration))
        entries = [entry for module, entry in result.manifest.quality["layers"].items() if module != "lm_head"]
        noise[method] = sum(10 ** (-entry["output_sqnr_db"] / 10) for entry in entries)
        assert any("scaling" in entry for entry in entries) == ("awq" in method)
    assert noise["awq-gptq"] < 0.97 * min(noise["gptq"], noise["awq"]) and noise["rtn"] > noise["gptq"]


def test_rounding_looks_at_the_text_that_it_is_given(tmp_path, calibration) -> None:
    checkpoint = checkpoint_of(tmp_path)
    blind = quantize(checkpoint, tmp_path / "blind", "w3a16", "rtn", 32, audit=False)
    seen = quantize(checkpoint, tmp_path / "seen", "w3a16", "rtn", 32, audit=False, calibrated=run_of(calibration))
    assert bytes_of(tmp_path / "blind") != bytes_of(tmp_path / "seen")
    assert seen.manifest.quality["calibration"]["samples"] == 40 and "calibration" not in blind.manifest.quality
    assert all("output_sqnr_db" in entry for entry in seen.manifest.quality["layers"].values())


def test_lines_without_an_answer_get_the_models_own(tmp_path, calibration) -> None:
    """The same answers from a checkpoint and from its engine, and other statistics than without them."""
    from dspark.converters.pipeline import convert

    checkpoint = checkpoint_of(tmp_path)
    convert(checkpoint, tmp_path / "dense", audit=False)
    request = SampleRequest(calibration, sample_tokens=150, self_generate=True)
    for source, name in ((checkpoint, "a"), (tmp_path / "dense", "b")):
        result = quantize(source, tmp_path / name, "w4a16", "gptq", audit=False, calibrated=CalibratedRun(request))
        assert "calibration: 40 samples got the model's own answers" in result.manifest.notes
        assert result.manifest.quality["calibration"]["tokens"] > 40 * 100
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "checkpoint", "dense"]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("scheme", "method"), [("w8a16", "rtn"), ("w4a16", "gptq"), ("w4a16", "awq")])
def test_an_8_bit_cache_is_calibrated_for_what_the_engine_computes(scheme: str, method: str, dtype: str, tmp_path, calibration) -> None:
    """AWQ moves factors into the values after they were seen; the scales must follow, so that the cache changes the logits little."""
    checkpoint = checkpoint_of(tmp_path)
    quantize(checkpoint, tmp_path / "engine", scheme, method, calibrated=run_of(calibration), kv_cache_dtype=dtype)
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.kv_cache is not None and manifest.kv_cache.dtype == dtype and manifest.kv_cache.num_tokens > 1000
    plain = logits_for(load_model(tmp_path / "engine"), PROMPT)
    cached = logits_for(load_model(tmp_path / "engine", kv_cache_dtype="auto"), PROMPT)
    error = float((plain - cached).square().mean() / plain.square().mean())
    assert 0 < error < (2e-4 if dtype == "int8" else 2e-3)


@pytest.mark.parametrize("target", [3.0, 4.5, 6.0])
def test_bits_are_spent_within_the_target_and_where_they_tell(target: float, tmp_path, calibration) -> None:
    """The size holds, groups stay together, and the mix beats what the same size gives when every layer has the same bits."""
    from dspark.converters.pipeline import convert

    checkpoint = checkpoint_of(tmp_path, num_hidden_layers=3)
    result = quantize(checkpoint, tmp_path / "engine", "w4a16", "gptq", 32, calibrated=run_of(calibration), target_bpw=target)
    modules = load_manifest(tmp_path / "engine").quant.modules
    weights = sum(
        r.shape[1] * 32 // modules[n[:-8]].weight_bits * r.shape[0] for n, r in result.manifest.tensors.items() if n.endswith("qweight")
    )
    assert 0.85 * target < 8 * result.manifest.quality["quantized_bytes"] / weights <= target
    for layer in range(3):
        attention = {modules[f"model.layers.{layer}.self_attn.{part}_proj"].weight_bits for part in "qkv"}
        assert len(attention) == 1, "q, k and v can no longer run as one"
    convert(checkpoint, tmp_path / "dense", audit=False)
    if target == 6.0:
        quantize(checkpoint, tmp_path / "even", "w4a16", "gptq", 32, audit=False, calibrated=run_of(calibration))
        assert distance(tmp_path / "engine", tmp_path / "dense") < distance(tmp_path / "even", tmp_path / "dense")


def test_a_target_below_the_coarsest_choice_is_refused(tmp_path, calibration) -> None:
    with pytest.raises(UsageError, match=r"--target-bpw is 2, the smallest is 2\.\d+ bits per weight"):
        quantize(checkpoint_of(tmp_path), tmp_path / "engine", "w4a16", "gptq", 32, calibrated=run_of(calibration), target_bpw=2.0)


def test_other_settings_are_not_resumed_and_named(tmp_path, calibration) -> None:
    checkpoint = checkpoint_of(tmp_path)

    def stop(done: int, total: int, words: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(checkpoint, tmp_path / "engine", "w4a16", "gptq", audit=False, calibrated=run_of(calibration, progress=stop))
    with pytest.raises(UsageError, match=r"--resume: the interrupted run had other settings: quantization \(then .*, now"):
        quantize(checkpoint, tmp_path / "engine", "w8a16", "gptq", audit=False, calibrated=run_of(calibration, resume=True))
    quantize(checkpoint, tmp_path / "engine", "w8a16", "gptq", audit=False, calibrated=run_of(calibration))
    assert (tmp_path / "engine" / MANIFEST_NAME).is_file()


def test_the_correction_for_the_inputs_error_changes_codes_and_resumes(tmp_path, calibration) -> None:
    """GPTAQ compares with the stream of the model as it is, which a resumed run has to rebuild."""

    def stop(done: int, total: int, words: str) -> None:
        raise KeyboardInterrupt

    checkpoint = checkpoint_of(tmp_path, num_hidden_layers=3)
    options = {"solver": SolverOptions(gptaq_alpha=0.25), "audit": False}
    quantize(checkpoint, tmp_path / "plain", "w4a16", "gptq", audit=False, calibrated=run_of(calibration))
    quantize(checkpoint, tmp_path / "undisturbed", "w4a16", "gptq", calibrated=run_of(calibration), **options)
    assert bytes_of(tmp_path / "plain") != bytes_of(tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        quantize(checkpoint, tmp_path / "engine", "w4a16", "gptq", calibrated=run_of(calibration, progress=stop), **options)
    quantize(checkpoint, tmp_path / "engine", "w4a16", "gptq", calibrated=run_of(calibration, resume=True), **options)
    assert bytes_of(tmp_path / "engine") == bytes_of(tmp_path / "undisturbed")


def test_activations_on_disk_give_the_same_bytes(tmp_path, calibration) -> None:
    checkpoint = checkpoint_of(tmp_path)
    quantize(checkpoint, tmp_path / "memory", "w4a16", "gptq", audit=False, calibrated=run_of(calibration))
    quantize(checkpoint, tmp_path / "disk", "w4a16", "gptq", audit=False, calibrated=run_of(calibration, walk=WalkOptions(on_disk=True)))
    assert bytes_of(tmp_path / "memory") == bytes_of(tmp_path / "disk")


def test_a_killed_command_continues_with_resume(tmp_path, calibration) -> None:
    """kill -9 from outside, in the middle of the layers, then the same command with --resume: the undisturbed run's bytes."""
    checkpoint = checkpoint_of(tmp_path, num_hidden_layers=6)
    options = ["--scheme", "w4a16", "--method", "gptq", "--calibration", str(calibration), "--no-audit", "--quiet"]

    def command(engine: str, *more: str) -> list[str]:
        return [str(Path(sys.executable).with_name("dspark")), "quantize", str(checkpoint), str(tmp_path / engine), *options, *more]

    subprocess.run(command("undisturbed"), check=True, timeout=300)
    process = subprocess.Popen(command("engine"))
    deadline = time.monotonic() + 240
    while not (tmp_path / ".engine.quantize" / "layer-00001.json").is_file():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "engine").exists()
    subprocess.run(command("engine", "--resume"), check=True, timeout=300)
    assert bytes_of(tmp_path / "engine") == bytes_of(tmp_path / "undisturbed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "engine", "undisturbed"]


def test_the_engine_gives_the_logits_of_its_dense_twin(tmp_path, calibration) -> None:
    checkpoint = checkpoint_of(tmp_path)
    quantize(checkpoint, tmp_path / "engine", "w3a16-asym", "gptq", 32, calibrated=run_of(calibration))
    ours = logits_for(load_model(tmp_path / "engine"), PROMPT)
    torch.testing.assert_close(ours, by_transformers(tmp_path / "engine", PROMPT), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("inputs", ["dynamic", "static"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_float8_inputs_are_rounded_and_change_little(scheme: str, inputs: str, tmp_path, calibration) -> None:
    """The audit compares weights, so it passes; what serves rounds its inputs, by a scale that calibration saw or by each token's own."""
    checkpoint = checkpoint_of(tmp_path)
    quantize(checkpoint, tmp_path / "plain", scheme, audit=False)
    quantize(checkpoint, tmp_path / "engine", scheme, calibrated=run_of(calibration), fp8_inputs=inputs)
    names = load_manifest(tmp_path / "engine").tensors
    assert ("model.layers.0.mlp.down_proj.input_scale" in names) == (inputs == "static")
    exact, rounded = logits_for(load_model(tmp_path / "plain"), PROMPT), logits_for(load_model(tmp_path / "engine"), PROMPT)
    assert 0 < float((exact - rounded).square().mean() / exact.square().mean()) < 0.01


def test_static_inputs_need_text_and_float8(tmp_path, calibration) -> None:
    checkpoint = checkpoint_of(tmp_path)
    with pytest.raises(UsageError, match="--fp8-inputs static looks at text"):
        quantize(checkpoint, tmp_path / "engine", "fp8", fp8_inputs="static")
    with pytest.raises(UsageError, match="--fp8-inputs is dynamic, but w8a8 has no float8 weights"):
        quantize(checkpoint, tmp_path / "engine", "w8a8", fp8_inputs="dynamic")
