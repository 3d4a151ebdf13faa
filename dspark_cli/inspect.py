"""`dspark inspect`: what a checkpoint or an engine is, from headers only."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import typer

from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.manifest import MANIFEST_NAME, EngineManifest, load_manifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig
from dspark.runtime.speculation.choice import HEADS_NAME
from dspark.runtime.speculation.pairing import load_pairing
from dspark_cli.console import Console
from dspark_cli.convert import describe_scheme
from dspark_cli.inspect_text import lines
from dspark_cli.memory_need import kv_bytes_per_token, memory_need
from dspark_cli.options import add_command, argument

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class InspectOptions:
    """Flags of `dspark inspect`."""

    path: Path = argument("engine directory, draft, LoRA adapter, or a checkpoint that convert reads")


def inspect(console: Console, options: InspectOptions) -> int:
    """What PATH is: format, family, size, scheme, memory need."""
    if (options.path / MANIFEST_NAME).is_file():
        facts = engine_facts(options.path)
    elif (options.path / HEADS_NAME).is_file():
        facts = draft_facts(options.path)
    elif (options.path / ADAPTER_CONFIG).is_file():
        facts = adapter_facts(options.path)
    else:
        facts = checkpoint_facts(options.path)
    console.document({"path": str(options.path), **facts})
    for line in lines(facts):
        console.data(line)
    return 0


def engine_facts(path: Path) -> dict[str, Any]:
    """An engine in numbers, from its manifest; of its files only that they are there."""
    manifest = load_manifest(path)
    quality = {key: value for key, value in manifest.quality.items() if key != "layers"}
    shards = {record.shard for record in manifest.tensors.values()}
    return {
        "format": "engine",
        **model_facts(manifest.model, manifest.quant, manifest.kv_cache),
        "scheme": describe_scheme(manifest.quant),
        "method": manifest.quant.scheme.method if manifest.quant else None,
        "ignored_layers": list(manifest.quant.ignore) if manifest.quant else None,
        "kv_cache": manifest.kv_cache.describe() if manifest.kv_cache else None,
        "weight_bytes": manifest.weight_bytes(),
        "tokenizer": _tokenizer_words(manifest),
        "missing_files": sorted(name for name in {*shards, *manifest.files} if not (path / name).is_file()),
        "source": f"{manifest.lineage.get('source', 'unknown')} ({manifest.lineage.get('format', 'unknown')})",
        "adapters": [f"{adapter['source']} x{adapter['weight']:g}" for adapter in manifest.lineage.get("adapters", ())],
        "lineage": manifest.lineage,
        "created": datetime.fromtimestamp(manifest.created, UTC).strftime("%Y-%m-%d %H:%M UTC") if manifest.created else None,
        "audit": manifest.audit.get("summary", "not audited"),
        "audit_record": manifest.audit,
        "quality": quality or None,
        "pairing": pairing_facts(path),
        "notes": list(manifest.notes),
        "schema_version": manifest.schema_version,
    }


def pairing_facts(path: Path) -> dict[str, Any] | None:
    """What `dspark pair` stored: the method, the draft it needs, what was measured and where."""
    pairing = load_pairing(path)
    if pairing is None:
        return None
    return {"draft_is_there": pairing.draft is None or (path / pairing.draft).is_dir(), **asdict(pairing)}


def draft_facts(path: Path) -> dict[str, Any]:
    """A stored drafting head in numbers: what it is for, what it reads, what it was made from."""
    from dspark.runtime.speculation.heads.stored import WEIGHTS_NAME, load_stored

    stored = load_stored(path)
    config, model = stored.config, stored.config.model
    return {
        "format": "draft",
        "draft_method": config.method,
        "packaging": stored.packaging,
        "parameters": sum(prod(record.shape) for record in stored.tensors.values()),
        "layers": model.num_layers,
        "shape": f"hidden {model.hidden_size}, inner {model.intermediate_size}, {_heads_words(model)}",
        "draft_vocabulary": config.draft_vocab_size,
        "target": f"{config.target_num_layers} layers, hidden {config.target_hidden_size}, vocabulary {model.vocab_size}",
        "reads_layers": list(config.taps),
        "draft_tokens": config.drafts_per_block or config.trained_steps,
        "uses_of_target": [name for name, own in (("embedding", config.own_embedding), ("output head", config.own_head)) if not own],
        "markov_head": f"{config.markov}, rank {config.markov_rank}" if config.markov else None,
        "confidence_head": config.confidence,
        "temperatures": list(config.temperatures),
        "mask_token_id": config.mask_token_id,
        "lineage": stored.lineage,
        "files": _sizes([file for file in (path / HEADS_NAME, path / WEIGHTS_NAME) if file.is_file()]),
        "missing_files": [] if (path / WEIGHTS_NAME).is_file() else [WEIGHTS_NAME],
    }


def _heads_words(model: ModelConfig) -> str:
    return f"{model.num_heads} heads, {model.num_kv_heads} key/value heads, head size {model.head_dim}"


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """A checkpoint in numbers, from its headers; faults that convert would find are found here too."""
    from dspark.converters.detect import open_checkpoint
    from dspark.converters.mapping import map_checkpoint
    from dspark.converters.packed import packed_config

    reader = open_checkpoint(path)
    mapped = map_checkpoint(reader)
    types = Counter(info.dtype for info in reader.tensors().values())
    quant, files = packed_config(mapped), _sizes(reader.files())
    return {
        "format": reader.format,
        **model_facts(mapped.config, quant),
        "scheme": describe_scheme(quant),
        "tensor_types": ", ".join(f"{count} {name}" for name, count in types.most_common()),
        "file_bytes": sum(entry["bytes"] for entry in files.values()),
        "files": files,
        "notes": [*getattr(reader, "notes", ()), *mapped.notes],
    }


def adapter_facts(path: Path) -> dict[str, Any]:
    """An adapter in numbers: what it is, what it was trained on, which layers it changes; one that cannot be merged says why."""
    from dspark.converters.lora.describe import describe_adapter

    return {**describe_adapter(path), "files": _sizes(sorted(file for file in path.iterdir() if file.is_file()))}


def model_facts(config: ModelConfig, quant: QuantConfig | None, kv_cache: KVCacheConfig | None = None) -> dict[str, Any]:
    """Family, shape and memory need. kv_bytes_per_token: keys and values of one token in every layer, in the dtype of a run."""
    from dspark.converters.mapping import parameter_count

    need = memory_need(config, quant, kv_cache)
    return {
        "family": config.family,
        "parameters": parameter_count(config),
        "layers": config.num_layers,
        "shape": f"hidden {config.hidden_size}, inner {config.intermediate_size}, {_heads_words(config)}, vocabulary {config.vocab_size}",
        "experts": _experts_words(config),
        "context": config.context_length,
        "rope": config.rope.kind if config.rope.kind == "default" else f"{config.rope.kind} x{config.rope.factor:g}",
        "sliding_window": config.sliding_window,
        "sliding_layers": sum(config.window_of_layer(layer) is not None for layer in range(config.num_layers)),
        "tied_head": config.tie_word_embeddings,
        "dtype": config.dtype,
        "kv_bytes_per_token": kv_bytes_per_token(config, need.kv_dtype),
        "memory": need.document(),
    }


def _experts_words(config: ModelConfig) -> str | None:
    if not config.num_experts:
        return None
    layers = sum(map(config.has_experts, range(config.num_layers)))
    shared = f", one of {config.shared_expert_intermediate_size} for all" if config.shared_expert_intermediate_size else ""
    each = f"{config.num_experts} experts of {config.moe_intermediate_size}, {config.experts_per_token} for a token{shared}"
    return f"{each}, in {layers} of {config.num_layers} layers"


def _tokenizer_words(manifest: EngineManifest) -> str:
    if "tokenizer.json" not in manifest.files:
        return "none: prompts are token ids"
    return "with a chat template" if "chat_template.jinja" in manifest.files else "without a chat template: prompts are raw text"


def _sizes(files: list[Path]) -> dict[str, dict[str, int]]:
    return {file.name: {"bytes": file.stat().st_size} for file in files}


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, inspect, InspectOptions)
