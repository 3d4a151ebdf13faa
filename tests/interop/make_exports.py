"""Tiny engines of every storage, exported in every format, with the logits that they must give. Run with dspark's own Python.

    python tests/interop/make_exports.py DIR

DIR gets a checkpoint for each case, NAME.reference.safetensors (tokens, logits, logits_16: of the weights rounded to float16, which
some programs do) and cases.json, which the checks beside this file read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from exports import compressed_engine, engine_of, uniform
from quantized_checkpoints import base_model, fp8_weight, int8_parts, integers, linears_only, quantized_state
from safetensors.torch import save_file

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert
from dspark.converters.threads import one_torch_thread
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for

TOKENS = [(7 * i) % 317 + 3 for i in range(48)]
EXACT, ROUNDED_ACTIVATIONS = 1e-3, 3e-2
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
PACKED: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    # name -> (bits, group size, symmetric, seed of the order of inputs), formats
    "w4": ((4, 32, True, None), ("hf", "gptq", "awq", "compressed-tensors")),
    "w4-asym": ((4, 32, False, None), ("gptq", "awq", "compressed-tensors")),
    "w4-act-order": ((4, 32, True, 5), ("gptq",)),
    "w8": ((8, 64, True, None), ("gptq", "compressed-tensors")),
    "w8-act-order": ((8, 32, True, 6), ("gptq",)),
}


def compressed(directory: Path, weights: dict[str, Any], format: str, activations: dict[str, Any] | None) -> Path:
    config, state = base_model(71)
    if format == "int-quantized":
        stored, _ = quantized_state(state, linears_only(lambda module, weight: integers(weight, 8, -1)), lambda module, q: int8_parts(q))
    else:
        stored = {name: tensor.half() for name, tensor in state.items()}
        for name in [name for name in state if "_proj" in name]:
            stored[name], stored[f"{name}_scale"], _ = fp8_weight(state[name], (1, -1))
    group = {"targets": ["Linear"], "format": format, "weights": weights, "input_activations": activations, "output_activations": None}
    given = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return compressed_engine(directory, stored, config, given)


def main(directory: Path) -> None:
    cases: list[dict[str, Any]] = []

    def add(name: str, engine: Path, formats: tuple[str, ...], limit: float = EXACT) -> None:
        export(engine, engine.parent / "dense", "hf", force=True)
        convert(engine.parent / "dense", engine.parent / "dense-engine", audit=False, force=True)
        reference = {
            "tokens": torch.tensor(TOKENS),
            "logits": logits_for(load_model(engine, dtype="float32", kernels="reference"), TOKENS).contiguous(),
            "logits_16": logits_for(load_model(engine.parent / "dense-engine", dtype="float32"), TOKENS).contiguous(),
        }
        for format in formats:
            out = f"{name}-{format}"
            export(engine, directory / out, format, force=True)
            save_file(reference, directory / f"{out}.reference.safetensors")
            cases.append({"directory": out, "format": format, "limit": limit})

    for name, ((bits, size, symmetric, order), formats) in PACKED.items():
        add(name, engine_of(directory / "engines" / name, uniform(bits, size, symmetric, order))[0], formats)
    arguments = {"num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False}
    w8a8 = compressed(directory / "engines" / "w8a8", {**arguments, "type": "int"}, "int-quantized", PER_TOKEN)
    add("w8a8", w8a8, ("compressed-tensors",), ROUNDED_ACTIVATIONS)
    fp8 = compressed(directory / "engines" / "fp8", {**arguments, "type": "float"}, "float-quantized", None)
    add("fp8", fp8, ("compressed-tensors",))
    (directory / "cases.json").write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} checkpoints in {directory}")


if __name__ == "__main__":
    with one_torch_thread():
        main(Path(sys.argv[1]))
