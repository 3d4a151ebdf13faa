"""Engines with calibrated scales of the KV cache, made from engines without."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

from dspark.converters.quantizers.kv_cache import DEFAULT_GRANULARITY, DEFAULT_MARGIN, KVObserver, kv_cache_config
from dspark.runtime.execution.layer_walk import LayerWalk, build_walk_layer
from dspark.runtime.execution.loader import EngineWeights, choose_kernels
from dspark.runtime.models.decoder import load_embedding
from dspark.runtime.spec.manifest import TensorRecord, load_manifest

SHARD = "kv-scales.safetensors"


def observe(engine: Path, samples: Sequence[Sequence[int]], kernels: str = "auto") -> list[KVObserver]:
    """What a calibration sees of each layer's keys and values."""
    manifest = load_manifest(engine)
    chosen = choose_kernels(manifest.model, kernels=kernels)
    weights = EngineWeights(engine, manifest, chosen.facts.dtype, "cpu")
    walk = LayerWalk(manifest.model, samples, chosen)
    walk.start(load_embedding(weights))
    observers = []
    for index in range(manifest.model.num_layers):
        built, observer = build_walk_layer(manifest.model, index, manifest.quant, weights, chosen), KVObserver(chosen)
        for batch in walk.batches:
            with torch.inference_mode():
                hidden, cache = walk.normed(built, walk.residual[batch.rows]), walk.cache(batch)
                built.layer.attention(hidden, *batch.rotations[built.layer.rotation], cache, batch.attention)
                observer(cache, batch.attention.slot_mapping)
        walk.advance(built)
        observers.append(observer)
    return observers


def with_scales(
    engine: Path,
    target: Path,
    observers: list[KVObserver],
    dtype: str,
    granularity: str = DEFAULT_GRANULARITY,
    margin: float = DEFAULT_MARGIN,
) -> Path:
    """A copy of an engine (its weights linked) with the scales of these observers."""
    config = kv_cache_config(dtype, granularity, margin, observers[0].num_tokens)
    tensors = {name: tensor for layer, observer in enumerate(observers) for name, tensor in observer.tensors(layer, config).items()}
    shutil.copytree(engine, target, copy_function=lambda source, copy: Path(copy).symlink_to(Path(source).resolve()))
    save_file(tensors, target / SHARD)
    manifest = load_manifest(engine)
    records = {
        name: TensorRecord(SHARD, "float32", tuple(tensor.shape), xxhash.xxh3_128_hexdigest(tensor.numpy()))
        for name, tensor in tensors.items()
    }
    (target / "engine.json").unlink()
    replace(manifest, tensors={**manifest.tensors, **records}, kv_cache=config).save(target)
    return target


def calibrated(engine: Path, target: Path, dtype: str, samples: Sequence[Sequence[int]]) -> Path:
    """The same in one step, with the defaults."""
    return with_scales(engine, target, observe(engine, samples), dtype)
