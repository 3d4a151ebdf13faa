"""The files of a draft in an engine: `draft.json` and `draft.safetensors`, the same for every packaging it was published in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from dspark.runtime.spec.errors import InputError
from dspark.runtime.speculation.heads.config import DraftConfig

DRAFT_NAME = "draft.json"
WEIGHTS_NAME = "draft.safetensors"
SCHEMA_VERSION = "1.0"
_AGAIN = "pair the engine with the draft again"


@dataclass(frozen=True)
class StoredTensor:
    """xxh3: hex xxh3_128 of its bytes in row-major order."""

    shape: tuple[int, ...]
    xxh3: str


@dataclass(frozen=True)
class StoredDraft:
    """draft.json. packaging: what the draft was published as; lineage: what it was made from, JSON-ready. Both are for the record."""

    config: DraftConfig
    tensors: dict[str, StoredTensor]
    packaging: str = ""
    lineage: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        tensors = {name: {"shape": list(record.shape), "xxh3": record.xxh3} for name, record in self.tensors.items()}
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "packaging": self.packaging, "config": self.config.to_json()}
        if self.lineage:
            data["lineage"] = self.lineage
        return {**data, "tensors": tensors}


def load_stored(directory: Path) -> StoredDraft:
    """Read draft.json. Raises InputError when it is absent, damaged or of a newer major schema."""
    path = directory / DRAFT_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = str(data["schema_version"])
        if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
            hint = "install a dspark that reads it, or pair the engine again"
            raise InputError(f"'{path}' has schema {version}, this dspark reads {SCHEMA_VERSION.split('.')[0]}.x", hint)
        tensors = {name: StoredTensor(tuple(record["shape"]), record["xxh3"]) for name, record in data["tensors"].items()}
        return StoredDraft(DraftConfig.from_json(data["config"]), tensors, str(data.get("packaging", "")), dict(data.get("lineage", {})))
    except FileNotFoundError as error:
        raise InputError(f"'{directory}' has no {DRAFT_NAME}, so it holds no draft", _AGAIN) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", _AGAIN) from error


class DraftWeights:
    """The WeightSource of a stored draft, each tensor held against its hash. Every one is taken once."""

    def __init__(self, directory: Path, stored: StoredDraft, dtype: torch.dtype, device: str) -> None:
        self._path, self._records, self._dtype, self._device = directory / WEIGHTS_NAME, stored.tensors, dtype, device
        self._left = set(stored.tensors)
        try:
            self._file = safe_open(self._path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"'{self._path}' is missing or damaged ({error})", _AGAIN) from error

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def take(self, name: str) -> torch.Tensor:
        """Floating-point tensors in the run's dtype, on its device. Raises InputError for one that is absent or not what was written."""
        record = self._records.get(name)
        if record is None or name not in self._left:
            raise InputError(f"the draft has no tensor '{name}' (left)", _AGAIN)
        self._left.discard(name)
        try:
            tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"'{self._path}' has no tensor '{name}' ({error})", _AGAIN) from error
        digest = xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy())
        if tuple(tensor.shape) != record.shape or digest != record.xxh3:
            raise InputError(f"tensor '{name}' in '{self._path}' is not what was written", _AGAIN)
        return (tensor.to(self._dtype) if tensor.is_floating_point() else tensor).to(self._device)

    def check_all_taken(self) -> None:
        """Raise InputError naming the tensors that nothing asked for."""
        if self._left:
            raise InputError(f"{len(self._left)} tensors of the draft are not used: {', '.join(sorted(self._left)[:5])}", _AGAIN)
