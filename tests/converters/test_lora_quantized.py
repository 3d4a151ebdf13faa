"""Adapters on quantized bases: merged in float32, quantized again or kept dense, and what that loses said in numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import State, llama_config, save_checkpoint, token_ids
from engine_logits import by_transformers, relative_error
from lora_cases import make_adapter, peft_logits
from quantized_checkpoints import (
    awq_gemm_parts,
    base_model,
    fp8_weight,
    gptq_parts,
    int8_parts,
    integers,
    linears_only,
    quantized_state,
    save_quantized,
    skewed,
)
from safetensors.torch import load_file

from dspark.converters.lora.quantized import requantize
from dspark.converters.pipeline import Result, convert
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.quant import QuantScheme

PROMPT = token_ids(64)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq", "desc_act": False}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
            "output_activations": None,
        }
    },
}


def gptq(directory: Path, state: State, config: dict[str, Any]) -> State:
    stored, dense = quantized_state(state, linears_only(lambda module, weight: integers(weight, 4, 32)), lambda module, q: gptq_parts(q))
    save_quantized(directory, config, stored, GPTQ)
    return dense


def gptq_act_order(directory: Path, state: State, config: dict[str, Any]) -> State:
    recipe = linears_only(lambda module, weight: integers(weight, 4, 32, False, order_seed=3))
    stored, dense = quantized_state(state, recipe, lambda module, q: gptq_parts(q, "gptq_v2"))
    save_quantized(directory, config, stored, {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2", "desc_act": True})
    return dense


def gptq_3_bits(directory: Path, state: State, config: dict[str, Any]) -> State:
    stored, dense = quantized_state(state, linears_only(lambda module, weight: integers(weight, 3, 32)), lambda module, q: gptq_parts(q))
    save_quantized(directory, config, stored, {**GPTQ, "bits": 3})
    return dense


def awq(directory: Path, state: State, config: dict[str, Any]) -> State:
    recipe = linears_only(lambda module, weight: integers(weight, 4, 32, False))
    stored, dense = quantized_state(skewed(state), recipe, lambda module, q: awq_gemm_parts(q))
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    save_quantized(directory, config, stored, quantization)
    return dense


def w8a8(directory: Path, state: State, config: dict[str, Any]) -> State:
    stored, dense = quantized_state(state, linears_only(lambda module, weight: integers(weight, 8, -1)), lambda module, q: int8_parts(q))
    save_quantized(directory, config, stored, INT8)
    return dense


def fp8(directory: Path, state: State, config: dict[str, Any]) -> State:
    stored: State = {}
    dense: State = {}
    for name, tensor in state.items():
        if "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"], dense[name] = fp8_weight(tensor, (128, 128))
        else:
            stored[name] = tensor.half()
            dense[name] = stored[name].float()
    save_quantized(directory, config, stored, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    return dense


Writer = Callable[[Path, State, dict[str, Any]], State]
# format -> (writer, bounds after quantizing again: distance of the logits, mean SQNR of the adapted layers in dB). The random weights of
# the small model multiply the noise of a few bits far more than trained ones do; the base without adapter is at a distance of 0.7 to 0.95.
FORMATS: dict[str, tuple[Writer, float, float]] = {
    "gptq": (gptq, 0.4, 20),
    "gptq-act-order": (gptq_act_order, 0.4, 20),
    "gptq-3-bits": (gptq_3_bits, 0.75, 13),
    "awq": (awq, 0.35, 22),
    "w8a8": (w8a8, 0.05, 42),
    "fp8": (fp8, 0.15, 30),
}


class Case:
    """A quantized base, the adapter trained on it, PEFT's logits for both, and those of the base alone."""

    def __init__(self, directory: Path, write: Writer) -> None:
        config, self.state = base_model(17)
        self.base = directory / "base"
        dense = write(self.base, self.state, config)
        self.twin = save_checkpoint(directory / "twin", llama_config(), dense)  # what the integers stand for, as PEFT sees the base
        self.full = save_checkpoint(directory / "full", llama_config(), self.state)
        self.adapter = make_adapter(directory / "adapter", self.twin)
        self.want = peft_logits(self.twin, [(self.adapter, 1.0)], PROMPT)
        self.directory = directory

    def merge(self, name: str = "engine", **options: Any) -> Result:
        return convert(self.base, self.directory / name, audit=False, dtype="float32", adapters=[(self.adapter, 1.0)], **options)

    def distance(self, name: str = "engine") -> float:
        got = by_transformers(self.directory / name, PROMPT)
        return float((got - self.want).norm() / self.want.norm())


@pytest.mark.parametrize("format", list(FORMATS))
def test_adapters_reach_every_quantized_format(tmp_path: Path, format: str) -> None:
    """B17: merges into quantized bases were refused, or commented out, and the base was shipped as the adapted model."""
    write, bound, decibels = FORMATS[format]
    case = Case(tmp_path, write)
    exact = case.merge("exact", requantize=False)
    assert relative_error(by_transformers(tmp_path / "exact", PROMPT), case.want) < 1e-3
    again = case.merge()
    convert(case.base, tmp_path / "bare", audit=False, dtype="float32")
    assert case.distance() < bound and case.distance("bare") > 0.7 and case.distance() < 0.75 * case.distance("bare")
    assert set(again.manifest.quant.modules) == {f"model.layers.{i}.{part}" for i in range(2) for part in PARTS}
    assert set(exact.manifest.quant.modules) == {name for name in again.manifest.quant.modules if not name.endswith(ADAPTED)}
    quality = again.manifest.quality
    assert len(quality["layers"]) == 6 and quality["worst_layer"].endswith(ADAPTED) and quality["mean_sqnr_db"] > decibels
    assert any("6 adapted layers of the quantized base are quantized again" in note for note in again.notes)
    assert any("6 adapted layers of the quantized base are kept dense" in note for note in exact.notes)


PARTS = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
ADAPTED = ("q_proj", "v_proj", "down_proj")


def test_layers_without_adapter_keep_their_integers_and_the_others_their_scheme(tmp_path: Path) -> None:
    case = Case(tmp_path, gptq)
    again = case.merge()
    bare = convert(case.base, tmp_path / "bare", audit=False, dtype="float32")
    ours, theirs = (load_file(next((tmp_path / name).glob("weights-*"))) for name in ("engine", "bare"))
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        if name.split(".")[-2] not in ADAPTED:
            assert torch.equal(ours[name], tensor), name
        else:
            assert ours[name].shape == tensor.shape and ours[name].dtype == tensor.dtype
    assert again.manifest.quant.describe() == bare.manifest.quant.describe() == "w4a16 group 32"


def test_the_loss_is_measured_against_the_full_precision_base(tmp_path: Path) -> None:
    case = Case(tmp_path, gptq)
    result = case.merge(lora_base=case.full)
    quality = result.manifest.quality
    assert 0.01 < quality["mean_error_before"] < quality["mean_error_after"] < 0.3
    assert all(entry["error_before"] < entry["error_after"] for entry in quality["layers"].values())
    exact = case.merge("other", lora_base=case.twin).manifest.quality
    assert exact["mean_error_before"] < 1e-6, "merging into what the integers stand for loses nothing before quantizing"


def test_flags_for_quantized_bases_are_refused_elsewhere(tmp_path: Path) -> None:
    case = Case(tmp_path, gptq)
    with pytest.raises(UsageError, match=r"--no-requantize .* the base is not quantized"):
        convert(case.full, tmp_path / "engine", adapters=[(case.adapter, 1.0)], requantize=False)
    with pytest.raises(UsageError, match=r"--lora-base .* there is no --lora"):
        convert(case.base, tmp_path / "engine", lora_base=case.full)
    assert not (tmp_path / "engine").exists()


def test_requantized_storage_by_hand() -> None:
    weight = torch.tensor([[127.0, -63.5, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-2.54, 0.02, 0.03, 2.54]])
    int8 = requantize(weight, QuantScheme("w8a8", 8, storage="int8"))
    assert int8.qweight.tolist() == [[127, -64, 1, 0], [0, 0, 0, 0], [-127, 1, 2, 127]]
    assert torch.equal(int8.dense(torch.float32)[1], torch.zeros(4))
    blocks = requantize(torch.tensor([[448.0, 1.0, 4.48], [0.5, -896.0, 0.0]]), QuantScheme("fp8", 8, storage="fp8", block=(1, 2)))
    assert blocks.scales.tolist() == [[1.0, pytest.approx(0.01)], [2.0, pytest.approx(0.0, abs=1e-37)]]
    assert blocks.qweight.float().tolist() == [[448.0, 1.0, 448.0], [0.25, -448.0, 0.0]]
    whole = requantize(torch.tensor([[1.0, -2.0]]), QuantScheme("fp8", 8, storage="fp8"))
    assert list(whole.scales.shape) == [1, 1] and whole.dense(torch.float32).tolist() == [[1.0, -2.0]]
