"""Hugging Face safetensors checkpoints: one `model.safetensors`, or shards that `model.safetensors.index.json` names.

The index decides: other weight files in the directory are not looked at, since a leftover file of another model has the same tensor names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import TensorInfo, majority_dtype, summarize
from dspark.converters.readers.pickle_names import pickled_weights
from dspark.converters.tokenizer_files import TokenizerBundle, bundle_from_transformers, has_tokenizer_files, load_transformers_tokenizer
from dspark.runtime.spec.errors import InputError

if TYPE_CHECKING:
    import torch

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LFS_MAGIC = b"version https://git-lfs"


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises InputError naming the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror})", "check the checkpoint directory") from error
    except ValueError as error:
        raise InputError(f"'{path}' is no valid JSON ({error})", "download the checkpoint again") from error
    if not isinstance(value, dict):
        raise InputError(f"'{path}' holds {type(value).__name__}, a JSON object is needed", "download the checkpoint again")
    return value


def read_weight_map(directory: Path, index_name: str) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint's index. Raises InputError for files that are absent or outside the directory."""
    index_path = directory / index_name
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise InputError(f"'{index_path}' has no weight_map of tensor names to files", "download the checkpoint again")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name or name in ("", ".", "..") or "\\" in name]
    if outside:
        raise InputError(f"'{index_path}' points outside its directory: {summarize(outside)}", "use one from a source you trust")
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise InputError(f"'{directory}' lacks {summarize(absent)}, named by {index_name}", "download the missing files")
    return dict(weight_map)


def check_not_lfs_pointer(path: Path) -> None:
    """Raise InputError when a file is a Git LFS pointer, or cannot be read."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_MAGIC)) == _LFS_MAGIC
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror or error})", "check the checkpoint directory") from error
    if is_pointer:
        raise InputError(f"'{path}' is a Git LFS pointer, not the weights", "run: git lfs pull")


class SafetensorsReader:
    """A directory with config.json and safetensors weights. notes: what the user should know of it."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handles: dict[str, Any] = {}
        self._file_of = self._locate()
        self._tensors = self._read_headers()
        pickles = pickled_weights(frozenset(entry.name for entry in path.iterdir()))
        self.notes = [f"not read: {summarize(pickles, 3)} (pickles beside the safetensors files)"] if pickles else []

    def config(self) -> dict[str, Any]:
        return read_json_object(self.path / "config.json")

    def generation_config(self) -> dict[str, Any] | None:
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.is_file() else None

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        return self._open(self._file_of[name]).get_tensor(name)

    def storage_dtype(self) -> str:
        return majority_dtype(self._tensors)

    def tokenizer(self) -> TokenizerBundle | None:
        tokenizer = self.reference_tokenizer()
        return bundle_from_transformers(tokenizer) if tokenizer is not None else None

    def reference_tokenizer(self) -> Any:
        return load_transformers_tokenizer(self.path) if has_tokenizer_files(self.path) else None

    def files(self) -> list[Path]:
        weights = [self.path / name for name in sorted(set(self._file_of.values()))]
        side = [self.path / name for name in (*SIDE_FILES, INDEX_NAME) if (self.path / name).is_file()]
        return side + weights

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name. Files named by an index must lie in the directory itself."""
        index_path = self.path / INDEX_NAME
        if not index_path.is_file():
            return dict.fromkeys(self._open(SINGLE_NAME).keys(), SINGLE_NAME)
        return read_weight_map(self.path, INDEX_NAME)

    def _read_headers(self) -> dict[str, TensorInfo]:
        lost, found = [], {}
        keys = {name: set(self._open(name).keys()) for name in set(self._file_of.values())}
        for tensor, name in self._file_of.items():
            if tensor not in keys[name]:
                lost.append(f"{tensor} (not in {name})")
                continue
            view = self._open(name).get_slice(tensor)
            dtype = view.get_dtype()
            found[tensor] = TensorInfo(_DTYPES.get(dtype, dtype), tuple(view.get_shape()))
        if lost:
            raise InputError(f"{INDEX_NAME} of '{self.path}' names tensors that are not there: {summarize(lost)}", "download it again")
        return found

    def _open(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = open_safetensors(self.path / name)
        return self._handles[name]


def open_safetensors(path: Path) -> Any:
    """Memory-map one safetensors file. Raises InputError naming the file when it is absent, damaged or a Git LFS pointer."""
    from safetensors import SafetensorError, safe_open

    check_not_lfs_pointer(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, ValueError) as error:
        raise InputError(f"'{path}' is damaged or not complete ({error})", "download it again") from error
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror or error})", "check the checkpoint directory") from error
