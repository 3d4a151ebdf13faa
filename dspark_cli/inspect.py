"""`dspark inspect`: what a checkpoint or an engine is, from headers only."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dspark.runtime.spec.manifest import MANIFEST_NAME, EngineManifest, load_manifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark_cli.console import Console
from dspark_cli.convert import describe_scheme
from dspark_cli.options import add_command, argument

ADAPTER_CONFIG = "adapter_config.json"
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class InspectOptions:
    """Flags of `dspark inspect`."""

    path: Path = argument("engine directory, LoRA adapter, or a checkpoint that convert reads")


def inspect(console: Console, options: InspectOptions) -> int:
    """What PATH is: format, family, size, scheme, memory need."""
    if (options.path / MANIFEST_NAME).is_file():
        facts = engine_facts(load_manifest(options.path))
    elif (options.path / ADAPTER_CONFIG).is_file():
        facts = adapter_facts(options.path)
    else:
        facts = checkpoint_facts(options.path)
    console.document({"path": str(options.path), **facts})
    for key, value in facts.items():
        if value not in (None, [], {}):
            console.data(f"{key.replace('_', ' '):<22} {_shown(value)}")
    return 0


def engine_facts(manifest: EngineManifest) -> dict[str, Any]:
    """An engine in numbers, from its manifest alone."""
    quality = {key: value for key, value in manifest.quality.items() if key != "layers"}
    return {
        "format": "engine",
        **model_facts(manifest.model),
        "scheme": describe_scheme(manifest.quant),
        "method": manifest.quant.scheme.method if manifest.quant else None,
        "ignored_layers": list(manifest.quant.ignore) if manifest.quant else None,
        "kv_cache": manifest.kv_cache.describe() if manifest.kv_cache else None,
        "weight_bytes": manifest.weight_bytes(),
        "source": f"{manifest.lineage.get('source', 'unknown')} ({manifest.lineage.get('format', 'unknown')})",
        "adapters": [f"{adapter['source']} x{adapter['weight']:g}" for adapter in manifest.lineage.get("adapters", ())],
        "audit": manifest.audit.get("summary", "not audited"),
        "quality": quality or None,
        "notes": list(manifest.notes),
        "schema_version": manifest.schema_version,
    }


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """A checkpoint in numbers, from its headers; faults that convert would find are found here too."""
    from dspark.converters.detect import open_checkpoint
    from dspark.converters.mapping import map_checkpoint
    from dspark.converters.packed import packed_config

    reader = open_checkpoint(path)
    mapped = map_checkpoint(reader)
    types = Counter(info.dtype for info in reader.tensors().values())
    return {
        "format": reader.format,
        **model_facts(mapped.config),
        "scheme": describe_scheme(packed_config(mapped)),
        "tensor_types": ", ".join(f"{count} {name}" for name, count in types.most_common()),
        "file_bytes": sum(file.stat().st_size for file in reader.files()),
        "notes": [*getattr(reader, "notes", ()), *mapped.notes],
    }


def adapter_facts(path: Path) -> dict[str, Any]:
    """An adapter in numbers: what it is, what it was trained on, which layers it changes; one that cannot be merged says why."""
    from dspark.converters.lora.describe import describe_adapter

    return describe_adapter(path)


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """Family, shape and memory need. kv_bytes_per_token: keys and values of one token in every layer, in the model's dtype."""
    from dspark.converters.mapping import parameter_count

    heads = f"{config.num_heads} heads, {config.num_kv_heads} key/value heads, head size {config.head_dim}"
    return {
        "family": config.family,
        "parameters": parameter_count(config),
        "layers": config.num_layers,
        "shape": f"hidden {config.hidden_size}, inner {config.intermediate_size}, {heads}, vocabulary {config.vocab_size}",
        "context": config.context_length,
        "rope": config.rope.kind if config.rope.kind == "default" else f"{config.rope.kind} x{config.rope.factor:g}",
        "sliding_window": config.sliding_window,
        "tied_head": config.tie_word_embeddings,
        "dtype": config.dtype,
        "kv_bytes_per_token": 2 * config.num_layers * config.num_kv_heads * config.head_dim * _WIDTH[config.dtype],
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, inspect, InspectOptions)
