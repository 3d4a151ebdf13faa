"""What transformers, compressed-tensors and gptqmodel make of our exports. Run in their environment, which has no dspark.

    python tests/interop/check_living.py DIR [PART OF A NAME]

For each case: the model as transformers loads it, and the weights that the foreign code unpacks, run densely in float32. The second is the
sharp one: gptqmodel's CPU kernels compute in 16 bits whatever they are asked for, so there the weights are compared as float16.
Exits 1 when a case is beyond its limit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file

SIXTEEN_BITS = 1e-2  # of their kernels
WEIGHTS = 1e-5
Logits = torch.Tensor


def load(directory: Path, method: str, quantization: dict[str, Any]) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if method == "gptq":
        options |= {"quantization_config": transformers.GPTQConfig(bits=quantization["bits"], backend="gptq_torch"), "device_map": "cpu"}
    if method == "awq":
        size = quantization["group_size"]
        options |= {"quantization_config": transformers.AwqConfig(bits=4, group_size=size, backend="torch_awq"), "device_map": "cpu"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def logits(model: Any, tokens: torch.Tensor) -> Logits:
    with torch.inference_mode():
        return model(tokens[None]).logits[0].float()


def dense_model(directory: Path, state: dict[str, torch.Tensor]) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def plain_state(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def kernels_weights(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Every packed layer's weight as its kernel sees it: the product with the identity."""
    state = plain_state(directory)
    for name, module in model.named_modules():
        if f"{name}.qweight" in state:
            identity = torch.eye(module.in_features, dtype=torch.float16)
            with torch.inference_mode():
                weight = module(identity).t().float().clone()
            for leaf in ("qweight", "qzeros", "scales", "g_idx"):
                state.pop(f"{name}.{leaf}", None)
            state[f"{name}.weight"] = weight
    return state


def decompressed(directory: Path, quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every layer as compressed-tensors itself unpacks it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization)
    state = plain_state(directory)
    (scheme,) = config.config_groups.values()
    modules = sorted(name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale"))
    for module in modules:
        parts = {name.removeprefix(f"{module}."): state.pop(name) for name in list(state) if name.startswith(f"{module}.")}
        parts["weight_scale"] = parts["weight_scale"].float()  # it unpacks in the scales' dtype
        unpacked = BaseCompressor.load_from_registry(config.format).decompress(parts, scheme)
        state[f"{module}.weight"] = unpacked["weight"]
    return state


def check(directory: Path, case: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(route, relative error, limit) of one case."""
    reference = load_file(directory.parent / f"{case['directory']}.reference.safetensors")
    tokens = reference["tokens"]

    def error(got: Logits, name: str = "logits") -> float:
        want = reference[name]
        return float((got - want).abs().max() / want.abs().max())

    quantization = json.loads((directory / "config.json").read_text()).get("quantization_config") or {}
    method = quantization.get("quant_method", "")
    found = []
    asymmetric = any(not group["weights"]["symmetric"] for group in quantization.get("config_groups", {}).values())
    if method != "compressed-tensors" or not asymmetric:  # transformers 5.24 cannot load packed zero points: it makes them unpacked
        model = load(directory, method, quantization)
        sixteen = method in ("gptq", "awq")
        name = "logits" if method else "logits_16"  # a dense checkpoint has the engine's dtype, float16 here
        found.append(("as loaded", error(logits(model, tokens), name), SIXTEEN_BITS if sixteen else case["limit"]))
        if sixteen:
            unpacked = dense_model(directory, kernels_weights(model, directory))
            found.append(("its weights", error(logits(unpacked, tokens), "logits_16"), WEIGHTS))
    if method == "compressed-tensors" and case["limit"] < SIXTEEN_BITS:  # dense weights alone do not round activations
        found.append(("its weights", error(logits(dense_model(directory, decompressed(directory, quantization)), tokens)), WEIGHTS))
    return found


def main(directory: Path, part: str) -> int:
    torch.set_num_threads(1)
    cases = [case for case in json.loads((directory / "cases.json").read_text()) if part in case["directory"]]
    failed, lines = 0, []
    for case in cases:
        for route, error, limit in check(directory / case["directory"], case):
            bad = not error <= limit
            failed += bad
            lines.append(f"{'FAILED' if bad else 'ok':6} {case['directory']:32} {route:12} {error:.1e} (limit {limit:g})")
    print("\n".join(lines))
    print(f"{len(lines) - failed} passed, {failed} failed")
    return 1 if failed or not lines else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
