"""What an adapter is, in words and numbers, from its configuration and its headers: `dspark inspect ADAPTER`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dspark.converters.lora.adapter import Adapter, read_adapter_config, unsupported_reason
from dspark.converters.lora.keys import Patch, sort_roles
from dspark.converters.tokenizer_files import has_tokenizer_files


def describe_adapter(path: Path) -> dict[str, Any]:
    """Facts about an adapter directory, also about one that cannot be merged (`not_supported` says why). Raises InputError when damaged."""
    raw = read_adapter_config(path)
    reason = unsupported_reason(raw)
    facts: dict[str, Any] = {
        "format": "LoRA adapter" if reason is None else "adapter",
        "peft_type": raw.get("peft_type"),
        "base_model": raw.get("base_model_name_or_path"),
    }
    if reason is not None:
        files = [file for file in sorted(path.glob("adapter_model.*")) if file.is_file()]
        return {**facts, "not_supported": f"the adapter {reason}", "file_bytes": sum(file.stat().st_size for file in files)}
    adapter = Adapter(path)
    config, shapes = adapter.config, adapter.shapes()
    patches, unknown = sort_roles(adapter)
    adapted = [patch for patch in patches.values() if patch.has("A", "embedding_A")]
    return {
        **facts,
        "variant": _variant(adapter),
        "rank": _spread([config.rank_of(patch.module) for patch in adapted]) or config.rank,
        "alpha": _short(config.alpha),
        "scale": _spread([_short(config.scaling(patch.module)) for patch in adapted]),
        "targets": sorted({patch.module.rpartition(".")[2] for patch in adapted}),
        "layers_adapted": len(adapted),
        "saved_whole": _saved(patches),
        "trained_tokens": sum(shapes[patch.keys["tokens"]][0] for patch in patches.values() if patch.has("tokens")) or None,
        "vocabulary": _rows(patches, shapes),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "file_bytes": sum(file.stat().st_size for file in adapter.files()),
        "tokenizer": has_tokenizer_files(path) or None,
        "unknown_tensors": unknown or None,
    }


def _variant(adapter: Adapter) -> str:
    names = [name for name, on in (("rank-stabilised", adapter.config.rslora), ("DoRA", adapter.config.dora)) if on]
    return " ".join(names) or "plain"


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 6)


def _spread(values: list[Any]) -> Any:
    """The one value, or "low to high" where layers differ."""
    different = sorted(set(values))
    if len(different) > 1:
        return f"{different[0]:g} to {different[-1]:g}"
    return different[0] if different else None


def _saved(patches: dict[str, Patch]) -> list[str]:
    """Last parts of the names of layers that the adapter holds whole, biases marked."""
    weights = {patch.module.rpartition(".")[2] for patch in patches.values() if patch.has("saved.weight")}
    biases = {f"{patch.module.rpartition('.')[2]} (bias)" for patch in patches.values() if patch.has("saved.bias", "base.bias")}
    return sorted(weights | biases)


def _rows(patches: dict[str, Patch], shapes: dict[str, tuple[int, ...]]) -> int | None:
    """Rows of the embedding that the adapter carries, or None."""
    key = next((patch.replacement("weight") for patch in patches.values() if patch.module.endswith("embed_tokens")), None)
    return shapes[key][0] if key is not None else None
