"""Checkpoints that gptqmodel and compressed-tensors quantize, for dspark to convert. Run in their environment, which has no dspark.

    python tests/interop/write_living.py DIR

DIR/foreign gets a checkpoint NAME for each case and NAME.reference.safetensors: tokens, logits as transformers and the writer's own code
compute them, and `weight.MODULE`, each quantized layer's weight as that code unpacks it (float16: gptqmodel's kernels compute in 16 bits).
FP8 activations, which dspark leaves in 16 bits and says so, are not rounded for the reference either.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import transformers
from check_living import decompressed, dense_model, load, logits, plain_state
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, disable_quantization
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import save_file
from tiny_models import VOCAB_SIZE, make_tiny_checkpoint, save_tokenizer

TOKENS = torch.tensor([(7 * i) % 317 + 3 for i in range(48)])
GPTQ: dict[str, dict[str, Any]] = {
    "gptq-w4": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "gptq-w4-desc-act": {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
    "gptq-w4-asym": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "gptq-w4-asym-v2": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "format": "gptq_v2"},
    "gptq-w8": {"bits": 8, "group_size": 64, "sym": True, "desc_act": False},
    "gptq-w8-desc-act": {"bits": 8, "group_size": 32, "sym": True, "desc_act": True},
}
CHANNEL = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
PER_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {  # name -> format, weights, activations
    "ct-w4a16": ("pack-quantized", {**GROUPS, "symmetric": True}, None),
    "ct-w4a16-asym": ("pack-quantized", {**GROUPS, "symmetric": False}, None),
    "ct-w8a8": ("int-quantized", {**CHANNEL, "type": "int"}, {**PER_TOKEN, "type": "int"}),
    "ct-fp8": ("float-quantized", {**CHANNEL, "type": "float"}, None),
    "ct-fp8-dynamic": ("float-quantized", {**CHANNEL, "type": "float"}, {**PER_TOKEN, "type": "float"}),
}


def by_gptqmodel(dense: Path, out: Path, settings: dict[str, Any]) -> None:
    """GPTQ itself, on random tokens. Raises RuntimeError when the order of the inputs is not what was asked for."""
    model = GPTQModel.load(str(dense), QuantizeConfig(**settings, device="cpu"))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB_SIZE, (1, 64), generator=generator) for _ in range(16)]
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    model.save(str(out))
    orders = [tensor for name, tensor in plain_state(out).items() if name.endswith(".g_idx")]
    if any(bool((order.diff() < 0).any()) != settings["desc_act"] for order in orders):
        raise RuntimeError(f"{out.name}: gptqmodel wrote another order of inputs than desc_act={settings['desc_act']} means")


def by_compressed_tensors(dense: Path, out: Path, format: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> None:
    """Rounded to the nearest code, with the scales that compressed-tensors computes of each row's or group's extremes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = QuantizationConfig.model_validate({"format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]})
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        rows = module.weight.data.unflatten(1, (-1, scheme.weights.group_size or module.weight.shape[1]))
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))


def describe(out: Path) -> int:
    """Write what the foreign code makes of a checkpoint; how many layers it holds quantized."""
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = quantization.get("config_groups", {}).values() or [{}]
    if group and not group["weights"]["symmetric"]:  # transformers 5.24 cannot load packed zero points
        model = dense_model(out, decompressed(out, quantization))
    else:
        model = load(out, quantization["quant_method"], quantization)
    if (group.get("input_activations") or {}).get("type") == "float":
        model.apply(disable_quantization)
    reference = {"tokens": TOKENS, "logits": logits(model, TOKENS).contiguous()}
    stored = plain_state(out)
    for name, module in model.named_modules():
        if f"{name}.qweight" in stored:  # the product with the identity is the weight as the kernel sees it
            with torch.inference_mode():
                reference[f"weight.{name}"] = module(torch.eye(module.in_features, dtype=torch.float16)).t().half().contiguous()
        elif f"{name}.weight_scale" in stored:
            reference[f"weight.{name}"] = module.weight.detach().half().contiguous()
    save_file(reference, out.parent / f"{out.name}.reference.safetensors")
    return len(reference) - 2


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    foreign = directory.resolve() / "foreign"
    foreign.mkdir(parents=True, exist_ok=True)
    os.chdir(foreign)  # gptqmodel writes logs/ where it is called
    dense = make_tiny_checkpoint(foreign / "sources" / "llama", "llama-wide", seed=3, dtype="float16")
    for name, settings in GPTQ.items():
        by_gptqmodel(dense, foreign / name, settings)
    for name, described in COMPRESSED.items():
        by_compressed_tensors(dense, foreign / name, *described)
        save_tokenizer(foreign / name, unk_token=None)
    for name in [*GPTQ, *COMPRESSED]:
        print(f"wrote {name}: {describe(foreign / name)} layers quantized")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
