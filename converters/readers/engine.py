"""An engine directory as a checkpoint: what `dspark quantize ENGINE` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import TensorInfo, majority_dtype, summarize
from dspark.converters.readers.safetensors import open_safetensors, read_json_object
from dspark.converters.tokenizer_files import TokenizerBundle, load_transformers_tokenizer, read_bundle
from dspark.runtime.models.hf_config import hf_config_from_model
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.manifest import MANIFEST_NAME, load_manifest

if TYPE_CHECKING:
    import torch


class EngineReader:
    """An engine that `dspark convert` wrote. Raises InputError when it is damaged or already quantized."""

    format = "engine"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = load_manifest(path)
        if self.manifest.quant is not None:
            scheme = self.manifest.quant.scheme.name
            raise InputError(f"'{path}' is already quantized ({scheme})", "start from the engine or checkpoint that it was made of")
        shards = {record.shard for record in self.manifest.tensors.values()}
        outside = sorted(name for name in shards if Path(name).name != name)
        if outside:
            raise InputError(f"'{path / MANIFEST_NAME}' points outside its directory: {summarize(outside)}", "convert the checkpoint again")
        self._handles = {name: open_safetensors(path / name) for name in sorted(shards)}

    def config(self) -> dict[str, Any]:
        return hf_config_from_model(self.manifest.model)

    def generation_config(self) -> dict[str, Any] | None:
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.is_file() else None

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(record.dtype, record.shape) for name, record in self.manifest.model_tensors().items()}

    def kv_cache(self) -> KVCacheConfig | None:
        """The 8-bit KV cache that the engine is calibrated for."""
        return self.manifest.kv_cache

    def kv_scale(self, name: str) -> torch.Tensor:
        """One of its scales, float32 [num_kv_heads, head_dim]."""
        return self.read(name)

    def read(self, name: str) -> torch.Tensor:
        return self._handles[self.manifest.tensors[name].shard].get_tensor(name)

    def storage_dtype(self) -> str:
        return majority_dtype(self.tensors())

    def tokenizer(self) -> TokenizerBundle | None:
        return read_bundle(self.path)

    def reference_tokenizer(self) -> Any:
        return load_transformers_tokenizer(self.path) if read_bundle(self.path) else None

    def files(self) -> list[Path]:
        return [self.path / MANIFEST_NAME, *(self.path / name for name in sorted(self._handles))]

    def lineage(self) -> dict[str, Any]:
        """What this engine itself was made of."""
        return json.loads(json.dumps(self.manifest.lineage))
