"""Which format a path holds: a table, and the content decides (a config that says otherwise is a label, and labels lie)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dspark.converters.readers.base import CheckpointReader
from dspark.converters.readers.gguf_file import MAGIC as GGUF_MAGIC
from dspark.converters.readers.gguf_parts import part_paths
from dspark.converters.readers.pickle_names import pickled_weights
from dspark.converters.readers.safetensors import INDEX_NAME, SINGLE_NAME
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.manifest import MANIFEST_NAME


@dataclass(frozen=True)
class SourceFacts:
    """What detection may look at: names in the directory, tensor names (headers only) and the config, each empty when absent."""

    path: Path
    names: frozenset[str]
    tensors: frozenset[str]
    config: dict[str, Any]

    def has_tensor(self, *endings: str) -> bool:
        return any(name.endswith(endings) for name in self.tensors)

    def method(self) -> str:
        quantization = self.config.get("quantization_config") or {}
        return str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""


@dataclass(frozen=True)
class Format:
    """reader: "module:Class" below dspark.converters.readers, or None for a format that is recognised but not read yet."""

    name: str
    matches: Callable[[SourceFacts], bool]
    reader: str | None = None
    hint: str = "convert the unquantized checkpoint instead"


def _is_gguf(facts: SourceFacts) -> bool:
    if not facts.path.is_file():
        return False
    with facts.path.open("rb") as file:
        return file.read(4) == GGUF_MAGIC


def _is_packed_as(layout: str) -> Callable[[SourceFacts], bool]:
    """Modules have `qweight`, in a layout that the shapes tell apart (GPTQ and AWQ share the names)."""

    def matches(facts: SourceFacts) -> bool:
        from dspark.converters.readers.layouts import packed_layout

        return facts.has_tensor(".qweight") and packed_layout(facts.path) == layout

    return matches


def _is_fp8(facts: SourceFacts) -> bool:
    return facts.has_tensor(".weight_scale_inv") or ("fp8" in facts.method() and facts.has_tensor(".weight_scale"))


def _is_compressed_tensors(facts: SourceFacts) -> bool:
    return facts.has_tensor(".weight_packed", ".weight_scale") or facts.method() == "compressed-tensors"


FORMATS: tuple[Format, ...] = (
    Format("engine", lambda f: MANIFEST_NAME in f.names, "engine:EngineReader"),
    Format("gguf", _is_gguf, "gguf:GgufReader"),
    Format("LoRA adapter", lambda f: "adapter_config.json" in f.names, None, "name its base model as SOURCE and type --lora DIR"),
    Format("Marlin", lambda f: _is_packed_as("marlin")(f) or (f.has_tensor(".B") and f.has_tensor(".s"))),
    Format("gptq", _is_packed_as("gptq"), "gptq:GptqReader"),
    Format("awq", lambda f: f.has_tensor(".qweight"), "awq:AwqReader"),
    Format("fp8", _is_fp8, "fp8:Fp8Reader"),
    Format("bitsandbytes", lambda f: f.has_tensor(".absmax", ".quant_map") or f.method() == "bitsandbytes"),
    Format("compressed-tensors", _is_compressed_tensors, "compressed_tensors:CompressedTensorsReader"),
    Format("quantized", lambda f: bool(f.method())),
    Format("safetensors", lambda f: bool(f.names & {SINGLE_NAME, INDEX_NAME}), "safetensors:SafetensorsReader"),
    Format("pytorch", lambda f: bool(pickled_weights(f.names)), "torch_bin:TorchBinReader"),
)
READABLE = (
    "a Hugging Face directory with safetensors or PyTorch weights (GPTQ, AWQ, compressed-tensors and FP8 among them), a .gguf file, "
    "an engine directory"
)


def open_checkpoint(source: str | Path) -> CheckpointReader:
    """The reader of a checkpoint.

    Raises InputError for a path that holds no model, UnsupportedError for a format that is not read (naming it and what is).
    """
    path = Path(source)
    if not path.exists():
        hint = "give a local path; download a model first with: hf download NAME --local-dir DIR"
        raise InputError(f"'{source}' does not exist", hint)
    if path.is_dir():
        path = _only_gguf(path) or path
    facts = _facts(path)
    format = next((f for f in FORMATS if f.matches(facts)), None)
    if format is None:
        raise InputError(f"'{source}' is no checkpoint that dspark knows", _hint_for(path, facts))
    if format.reader is None:
        raise UnsupportedError(f"'{source}' is a checkpoint of format {format.name}, which is not supported yet", format.hint)
    module, _, name = format.reader.partition(":")
    reader: CheckpointReader = getattr(import_module(f"dspark.converters.readers.{module}"), name)(path)
    return reader


def _only_gguf(directory: Path) -> Path | None:
    """The .gguf file of a directory that holds no other weights, or its first part. Raises InputError when there are several models."""
    if any((directory / name).is_file() for name in (MANIFEST_NAME, SINGLE_NAME, INDEX_NAME)):
        return None
    found = sorted(directory.glob("*.gguf"))
    if len(found) > 1 and not set(found) <= set(part_paths(found[0])):
        raise InputError(f"'{directory}' holds {len(found)} .gguf files", f"name one, such as {found[0]}")
    return found[0] if found else None


def _facts(path: Path) -> SourceFacts:
    if not path.is_dir():
        names = frozenset() if path.suffix == ".safetensors" else frozenset({path.name})  # weights alone are no checkpoint
        return SourceFacts(path, names, frozenset(), {})
    names = frozenset(entry.name for entry in path.iterdir())
    return SourceFacts(path, names, _tensor_names(path, names), _config(path / "config.json"))


def _tensor_names(path: Path, names: frozenset[str]) -> frozenset[str]:
    """Tensor names from the index or the headers; a file that cannot be read has none here, its reader says what is wrong with it."""
    from dspark.converters.readers.safetensors import open_safetensors

    try:
        if INDEX_NAME in names:
            return frozenset(json.loads((path / INDEX_NAME).read_text(encoding="utf-8")).get("weight_map", {}))
        shards = [SINGLE_NAME] if SINGLE_NAME in names else sorted(name for name in names if name.endswith(".safetensors"))
        return frozenset(key for shard in shards for key in open_safetensors(path / shard).keys())  # noqa: SIM118 - no mapping
    except (InputError, OSError, ValueError, AttributeError):
        return frozenset()


def _config(path: Path) -> dict[str, Any]:
    """The config for detection only: one that cannot be read counts as empty here and is refused by its reader."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _hint_for(path: Path, facts: SourceFacts) -> str:
    if path.is_file() and path.suffix == ".safetensors":
        return f"give the directory with its config.json: {path.parent}"
    loose = sorted(name for name in facts.names if name.endswith(".safetensors"))
    if loose:
        return f"weights must be named {SINGLE_NAME} or listed in {INDEX_NAME} (found {', '.join(loose[:3])})"
    return f"supported: {READABLE}"
