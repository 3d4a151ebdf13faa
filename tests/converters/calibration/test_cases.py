"""Faults that users of other quantizers reported: a finite engine near its source, or one plain sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from case_checkpoints import llama_config, llama_state, reference_logits, save_checkpoint, token_ids
from engine_logits import by_transformers, relative_error
from tiny_models import build_tokenizer

from dspark.converters.calibration.run import CalibratedRun
from dspark.converters.calibration.samples import SampleRequest
from dspark.converters.gate import Gate
from dspark.converters.pipeline import quantize
from dspark.converters.quality.gate import QualityLimits
from dspark.runtime.spec.errors import InputError, QualityError, UsageError

PROMPT = token_ids()
SENTENCES = [
    "the river runs under the bridge and a small boat goes with it",
    "in the morning the baker opens the door and the street smells of bread",
    "seven children count the birds on the roof of the old school",
    "rain falls on the hills and the water finds its way to the sea",
    "a letter came by post and nobody knew the hand that wrote it",
]


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join((json.dumps({"text": t}) if path.suffix == ".jsonl" else t) + "\n" for t in texts))
    return path


@pytest.fixture(scope="module")
def dead_channels(tmp_path_factory):
    """Channel 5 of the residual stream, neuron 7 of each feed-forward block and one row of k_proj are always zero."""
    config = llama_config()
    state = llama_state(config, 20)
    state["model.embed_tokens.weight"][:, 5] = 0
    for layer in range(config["num_hidden_layers"]):
        state[f"model.layers.{layer}.self_attn.o_proj.weight"][5] = 0
        state[f"model.layers.{layer}.mlp.down_proj.weight"][5] = 0
        state[f"model.layers.{layer}.mlp.up_proj.weight"][7] = 0
    state["model.layers.0.self_attn.k_proj.weight"][3] = 0
    source = save_checkpoint(tmp_path_factory.mktemp("dead") / "ckpt", config, state, tokenizer=build_tokenizer(config["vocab_size"]))
    return source, reference_logits(config, state, PROMPT)


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
@pytest.mark.parametrize(
    ("scheme", "method"),
    [("w8a16", "gptq"), ("w8a16", "awq"), ("w8a8", "smoothquant"), ("w8a8", "smoothquant-gptq"), ("fp8", "gptq"), ("w8a16", "rtn")],
)
def test_dead_channels_and_little_text_give_a_finite_engine(dead_channels, tmp_path, scheme: str, method: str, suffix: str) -> None:
    """B20: singular Hessians, columns and rows of zeros: near the source, never a NaN."""
    source, expected = dead_channels
    calibrated = CalibratedRun(SampleRequest(lines(tmp_path / f"calibration.{suffix}", SENTENCES * 4)))
    result = quantize(source, tmp_path / "engine", scheme, method, calibrated=calibrated)
    limit = 0.4 if scheme == "fp8" else 0.1  # four significant bits, and a hundred tokens to fit them to
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), expected) < limit
    if method != "rtn":
        assert any("calibration: only" in note for note in result.notes)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("texts", [[], ["", "   "], ["the"]])
def test_text_that_says_nothing_is_refused_in_a_sentence(dead_channels, tmp_path, texts: list[str], method: str) -> None:
    """B20: empty files, blank lines, one word."""
    for suffix in ("jsonl", "txt"):
        calibrated = CalibratedRun(SampleRequest(lines(tmp_path / f"calibration.{suffix}", texts)))
        with pytest.raises(InputError, match=r"needed: at least 32 tokens"):
            quantize(dead_channels[0], tmp_path / "engine", "w4a16", method, audit=False, calibrated=calibrated)
    assert not (tmp_path / "engine").exists() and not (tmp_path / ".engine.quantize").exists()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_group_that_does_not_divide_is_refused_before_any_calibration(tmp_path, method: str) -> None:
    """B21: with layer and sizes; and the size that the message names works."""
    config = llama_config(hidden_size=160, intermediate_size=224, num_attention_heads=5, num_key_value_heads=5)
    state = llama_state(config, 21)
    source = save_checkpoint(tmp_path / "ckpt", config, state, tokenizer=build_tokenizer(config["vocab_size"]))
    unread = CalibratedRun(SampleRequest(tmp_path / "absent.jsonl"))
    for size in (128, 64):
        with pytest.raises(UsageError, match=rf"group size {size} does not divide .*\(160 inputs\)"):
            quantize(source, tmp_path / "engine", "w4a16", method, size, calibrated=unread)
    calibrated = CalibratedRun(SampleRequest(lines(tmp_path / "calibration.jsonl", SENTENCES)))
    quantize(source, tmp_path / "engine", "w8a16", method, 32, calibrated=calibrated)
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), reference_logits(config, state, PROMPT)) < 0.1


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_result_is_measured_on_what_calibration_did_not_see(dead_channels, tmp_path, monkeypatch, suffix: str) -> None:
    """Where there is enough of it; else on the text itself, with a note."""
    monkeypatch.setattr("dspark.converters.gate.MIN_HELD_OUT_TOKENS", 48)
    text = lines(tmp_path / f"calibration.{suffix}", [" ".join([first, second]) for first in SENTENCES for second in SENTENCES])
    for num_samples, kind in ((6, "held-out"), (200, "prompts" if suffix == "jsonl" else "text")):
        gate = Gate(text, QualityLimits(max_kl=9.0), context_length=32, calibrated_on=True)
        calibrated = CalibratedRun(SampleRequest(text, num_samples, sample_tokens=60))
        result = quantize(dead_channels[0], tmp_path / f"e{num_samples}", "w8a16", "rtn", audit=False, gate=gate, calibrated=calibrated)
        evaluation = result.manifest.quality["evaluation"]
        assert evaluation["kind"] == kind and evaluation["mean_kl"] < 0.1
        assert any("the quantizer was shown" in note for note in evaluation.get("notes", ())) == (kind != "held-out")
        if kind == "held-out":
            assert evaluation["samples"] == 6 and "samples that the quantizer was not shown" in gate.evaluation.lines()[0]


def test_a_bad_setting_is_refused_and_the_remedy_passes(dead_channels, tmp_path) -> None:
    """Two bits with one step per row: exit code 6, nothing published, layers named; what the message says to type then passes."""
    source, _ = dead_channels
    text = lines(tmp_path / "calibration.jsonl", SENTENCES * 4)
    gate = Gate(text, QualityLimits(max_kl=0.05))
    with pytest.raises(QualityError, match=r"mean KL .* nats, --max-kl is 0\.05; largest error of weights: model\.layers\.") as refused:
        quantize(source, tmp_path / "engine", "w2a16", "rtn", -1, audit=False, gate=gate)
    assert refused.value.exit_code == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.jsonl"]
    words = refused.value.hint.replace("'", "").split()
    options = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
    assert set(options) <= {"--scheme", "--group-size", "--method"}, refused.value.hint
    group_size = int(options["--group-size"]) if "--group-size" in options else None
    calibrated = CalibratedRun(SampleRequest(text))
    quantize(source, tmp_path / "engine", options["--scheme"], options.get("--method", "rtn"), group_size, calibrated=calibrated, gate=gate)
    assert gate.evaluation is not None and gate.evaluation.comparison is not None and gate.evaluation.comparison.mean_kl <= 0.05
