"""The one line from a checkpoint to an engine: reader -> mapping -> [quantizer] -> writer, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.detect import open_checkpoint
from dspark.converters.mapping import MappedModel, map_checkpoint
from dspark.converters.writer import EngineWriter, check_target, hash_file
from dspark.runtime.spec.manifest import EngineManifest

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int, str], None]
"""(tensors done, tensors in all, name of the tensor just written)"""
TOOLS = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


@dataclass
class Result:
    """What a conversion made. manifest: as written."""

    engine: Path
    manifest: EngineManifest
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    engine_dir: str | Path,
    dtype: str = "auto",
    audit: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Convert any checkpoint to an engine directory.

    Raises InputError or UnsupportedError for a checkpoint that cannot be used, UsageError for a target that may not be written,
    QualityError when the audit refuses; in every case nothing is left behind.
    """
    check_target(Path(engine_dir), force)
    model = map_checkpoint(open_checkpoint(source), dtype)
    return _write(model, engine_dir, audit, force, progress, dense_tensors(model), list(model.shapes))


def dense_tensors(model: MappedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model in the engine's dtype."""
    for name in model.shapes:
        yield name, model.read_cast(name)


def _write(
    model: MappedModel,
    engine_dir: str | Path,
    audit: bool,
    force: bool,
    progress: Progress | None,
    tensors: Iterator[tuple[str, torch.Tensor]],
    names: list[str],
) -> Result:
    reader = model.reader
    notes = list(model.notes)
    bundle = reader.tokenizer()
    notes += tokenizer_notes(model, bundle)
    with EngineWriter(engine_dir, names, force) as writer:
        for done, (name, tensor) in enumerate(tensors, 1):
            writer.add(name, tensor)
            if progress is not None:
                progress(done, len(names), name)
        if bundle is not None:
            writer.add_tokenizer(bundle)
        generation = reader.generation_config()
        if generation is not None:
            writer.add_json("generation_config.json", generation)
        manifest = writer.finish(model.config, None, lineage(model), notes=tuple(notes))
        writer.publish()
    return Result(writer.target, manifest, notes)


def tokenizer_notes(model: MappedModel, bundle: Any) -> list[str]:
    """What the user should know of the tokenizer: that there is none, or that it has tokens which the model cannot read."""
    if bundle is None:
        return ["the checkpoint has no tokenizer: only prompts given as token ids can be served"]
    notes = list(bundle.notes)
    size = bundle.size()
    if size > model.config.vocab_size:
        notes.append(
            f"the tokenizer has {size} tokens, the embedding {model.config.vocab_size} rows: a prompt with one of the other "
            f"{size - model.config.vocab_size} cannot be served"
        )
    return notes


def lineage(model: MappedModel) -> dict[str, Any]:
    """Where an engine comes from: source name and format, its files with sizes and hashes, the versions of the tools."""
    reader = model.reader
    files = {path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path)} for path in reader.files()}
    record: dict[str, Any] = {"source": Path(reader.path).resolve().name, "format": reader.format, "files": files}
    record["tools"] = {name: version(name) for name in TOOLS}
    earlier = getattr(reader, "lineage", None)
    if earlier is not None:
        record["made_of"] = earlier()
    return record
