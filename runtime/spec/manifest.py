"""The engine directory's manifest, `engine.json`: the only thing the runtime reads to know a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.kv_cache import KVCacheConfig, is_scale
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

SCHEMA_VERSION = "1.0"
MANIFEST_NAME = "engine.json"
SHARD_PATTERN = "weights-{index:05d}-of-{total:05d}.safetensors"


@dataclass(frozen=True)
class TensorRecord:
    """Where one tensor lies. xxh3: hex xxh3_128 of its bytes in row-major order."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


@dataclass(frozen=True)
class EngineManifest:
    """Everything about an engine but the numbers themselves.

    kv_cache: what its 8-bit cache was calibrated for, None without such scales. lineage: source path name, format, files with hashes, tool
    versions. audit and quality: results, or why there are none.
    created: build time, whole seconds since 1970 (UTC). files: the directory's other files with their xxh3_128.
    """

    model: ModelConfig
    tensors: dict[str, TensorRecord]
    quant: QuantConfig | None = None
    kv_cache: KVCacheConfig | None = None
    lineage: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    created: int = 0
    schema_version: str = SCHEMA_VERSION

    def model_tensors(self) -> dict[str, TensorRecord]:
        """The tensors of the model itself: all but the scales of the KV cache."""
        return {name: record for name, record in self.tensors.items() if not is_scale(name)}

    def weight_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        width = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}
        total = 0
        for record in self.tensors.values():
            count = 1
            for extent in record.shape:
                count *= extent
            total += count * width[record.dtype]
        return total

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["model"] = self.model.to_json()
        data["quant"] = self.quant.to_json() if self.quant else None
        return data

    def save(self, directory: Path) -> None:
        """Write engine.json (the directory's last file: without it nothing loads)."""
        (directory / MANIFEST_NAME).write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_manifest(directory: str | Path) -> EngineManifest:
    """Read engine.json. Raises InputError when it is absent, damaged or of a newer major schema."""
    path = Path(directory) / MANIFEST_NAME
    if not path.is_file():
        what = "is no directory" if not Path(directory).is_dir() else f"has no {MANIFEST_NAME}"
        raise InputError(f"'{directory}' {what}, so it is no engine", f"make one with: dspark convert CHECKPOINT {directory}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = str(data["schema_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", "convert the checkpoint again") from error
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise InputError(
            f"'{path}' has schema {version}, this dspark reads {SCHEMA_VERSION.split('.')[0]}.x",
            "install a dspark that reads it, or convert again",
        )
    try:
        return EngineManifest(
            model=ModelConfig.from_json(data["model"]),
            tensors={name: TensorRecord(r["shard"], r["dtype"], tuple(r["shape"]), r["xxh3"]) for name, r in data["tensors"].items()},
            quant=QuantConfig.from_json(data["quant"]) if data.get("quant") else None,
            kv_cache=KVCacheConfig(**data["kv_cache"]) if data.get("kv_cache") else None,
            lineage=data.get("lineage", {}),
            audit=data.get("audit", {}),
            quality=data.get("quality", {}),
            notes=tuple(data.get("notes", ())),
            files=data.get("files", {}),
            created=int(data.get("created", 0)),
            schema_version=version,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", "convert the checkpoint again") from error
