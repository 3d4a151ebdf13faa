"""Engines to export and what came of it. Engines are converted from checkpoints that `quantized_checkpoints` packs by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from case_checkpoints import State
from quantized_checkpoints import Integers, base_model, gptq_parts, integers, linears_only, quantized_state, save_quantized
from safetensors import safe_open

from dspark.converters.pipeline import convert
from dspark.runtime.spec.manifest import load_manifest

Recipe = Callable[[str, torch.Tensor], Integers | None]


def engine_of(directory: Path, recipe: Recipe, version: str = "gptq_v2", seed: int = 41, **config: Any) -> tuple[Path, dict[str, Integers]]:
    """An engine that holds the integers of a recipe, and those integers by module. Bits may differ from layer to layer."""
    described, state = base_model(seed, **config)
    found: dict[str, Integers] = {}

    def pack(module: str, q: Integers) -> State:
        found[module] = q
        return gptq_parts(q, version)

    stored, _ = quantized_state(state, recipe, pack)
    sizes = {module: q.codes.shape[0] // q.scales.shape[0] for module, q in found.items()}
    rules = {f"+:{module.replace('.', chr(92) + '.')}$": {"bits": q.bits, "group_size": sizes[module]} for module, q in found.items()}
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": version, "dynamic": rules}
    source = save_quantized(directory / "source", described, stored, quantization)
    convert(source, directory / "engine", audit=False)
    return directory / "engine", found


def uniform(
    bits: int = 4, group_size: int = 32, symmetric: bool = True, order_seed: int | None = None, skip: tuple[str, ...] = ()
) -> Recipe:
    """All linears of the layers alike, those dense whose names hold one of `skip`."""
    return linears_only(lambda module, weight: integers(weight, bits, group_size, symmetric, order_seed), skip)


def compressed_engine(directory: Path, stored: State, config: dict[str, Any], quantization: dict[str, Any]) -> Path:
    """An engine converted from a compressed-tensors checkpoint."""
    convert(save_quantized(directory / "source", config, stored, quantization), directory / "engine", audit=False)
    return directory / "engine"


def tensors_of(directory: Path) -> State:
    """Every tensor of an exported checkpoint by name."""
    found: State = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


def hashes_of(engine: Path) -> dict[str, Any]:
    """dtype, shape and hash of every tensor of an engine: equal ones are equal bit for bit."""
    return {name: (record.dtype, record.shape, record.xxh3) for name, record in load_manifest(engine).tensors.items()}


def same(got: State, module: str, want: State) -> None:
    """Assert that a module's tensors are those, bit for bit, and that it has no others."""
    found = {name.removeprefix(f"{module}."): tensor for name, tensor in got.items() if name.startswith(f"{module}.")}
    assert sorted(found) == sorted(want)
    for leaf, tensor in want.items():
        assert found[leaf].dtype == tensor.dtype and torch.equal(found[leaf], tensor), leaf
