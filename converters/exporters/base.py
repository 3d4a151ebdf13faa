"""`dspark export`: check everything, then write tensor by tensor, then put the whole directory in place.

A format is one file with a subclass of `Exporter`. Constructing it is the check: what the format cannot express is refused there, naming
the layers, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.exporters.source import GENERATION_NAME, EngineSource, Linear
from dspark.converters.readers.base import summarize
from dspark.converters.readers.safetensors import INDEX_NAME, SINGLE_NAME
from dspark.converters.threads import one_torch_thread
from dspark.converters.tokenizer_files import CONFIG_NAME as TOKENIZER_CONFIG
from dspark.converters.writer import ShardedWriter
from dspark.runtime.spec.errors import UnsupportedError, UsageError
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int, str], None]
"""(bytes of the engine done, bytes in all, name of the tensor just written)"""
FORMATS: dict[str, str] = {
    "hf": "hf:HfExporter",
    "gptq": "gptq:GptqExporter",
    "awq": "awq:AwqExporter",
    "compressed-tensors": "compressed_tensors:CompressedTensorsExporter",
}
EXPORT_BYTES = 5 * 10**9
SHARDS = "model-{index:05d}-of-{total:05d}.safetensors"
MARKER = "dspark_export.json"
TOOLS = ("dspark", "torch", "safetensors")


@dataclass(frozen=True)
class Exported:
    """What an export made. num_bytes: of all tensors. quantized: number of layers that are. notes: what the user should know."""

    directory: Path
    num_bytes: int
    quantized: int
    notes: tuple[str, ...]


class Exporter:
    """One format. notes: what the user should know. Raises UnsupportedError for an engine that the format cannot express."""

    format = ""
    quantizes = True

    def __init__(self, source: EngineSource) -> None:
        self.source = source
        self.notes: list[str] = []
        self.schemes: dict[str, QuantScheme] = {}
        if self.quantizes:
            found = {name: source.scheme(linear) for name, linear in source.linears.items()}
            self.schemes = {name: scheme for name, scheme in found.items() if scheme is not None}
            if not self.schemes:
                hint = f"type --format hf, or quantize it first: dspark quantize {source.path} OTHER --scheme w4a16"
                raise UnsupportedError(f"'{source.path}' is not quantized, so there is nothing to write as {self.format}", hint)
        self.check()

    def check(self) -> None:
        """Refuse what cannot be expressed, and fix everything that the config will say."""

    def quantization_config(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json, None for a dense checkpoint."""
        return None

    def files(self) -> dict[str, dict[str, Any]]:
        """Further JSON files by name."""
        return {}

    def leaves(self, linear: Linear) -> tuple[str, ...]:
        """Last parts of the names of the tensors that a quantized linear becomes."""
        raise NotImplementedError

    def tensors(self, linear: Linear) -> dict[str, torch.Tensor]:
        """These tensors."""
        raise NotImplementedError

    # ---- for subclasses

    def refuse(self, bad: dict[str, str], hint: str) -> None:
        """Raise UnsupportedError when `bad` (layer -> what is wrong with it) is not empty; layers with the same fault are told together."""
        if not bad:
            return
        by_fault: dict[str, list[str]] = {}
        for name, fault in bad.items():
            by_fault.setdefault(fault, []).append(name)
        told = "; ".join(f"{summarize(names, 3)}: {fault}" for fault, names in by_fault.items())
        raise UnsupportedError(f"'{self.source.path}' cannot be written as {self.format}: {told}", hint)

    def refuse_storage(self, allowed: tuple[str, ...] = ("wna16",)) -> None:
        """Refuse layers of other storages."""
        bad = {
            name: f"stored as {scheme.describe()}, this format has integer codes with 16-bit activations only"
            for name, scheme in self.schemes.items()
            if scheme.storage not in allowed
        }
        self.refuse(bad, "type --format compressed-tensors or hf")

    def half_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales as float16; one that is too small for it becomes the smallest there is, since a scale of zero divides by zero later."""
        import torch

        half = scales.to(torch.float16)
        smallest = 2.0**-24
        return torch.where((half == 0) & (scales != 0), torch.full_like(half, smallest).copysign(scales.to(half.dtype)), half)

    def check_half_scales(self) -> None:
        """Refuse scales beyond float16, and note how many layers have scales that it rounds."""
        import torch

        beyond: dict[str, str] = {}
        rounded = 0
        for name in self.schemes:
            linear = self.source.linears[name]
            records = [self.source.manifest.tensors[f"{part}.scales"] for part in linear.parts]
            if all(record.dtype == "float16" for record in records):
                continue
            scales = torch.cat([self.source.read(f"{part}.scales").float() for part in linear.parts], 1)
            half = self.half_scales(scales)
            if not bool(half.isfinite().all()):
                beyond[name] = f"scales up to {float(scales.abs().max()):g}, float16 holds up to 65504"
            rounded += int(bool((half.float() != scales).any()))
        self.refuse(beyond, "type --format compressed-tensors or hf")
        if rounded:
            self.notes.append(f"scales of {rounded} layers are rounded to float16, the format's own type")

    def dense_linears(self) -> list[str]:
        """Linears that stay dense; the output head among them also where it shares the embedding."""
        return [
            *(name for name in self.source.linears if name not in self.schemes),
            *(() if "lm_head" in self.source.linears else ("lm_head",)),
        ]


class CheckpointWriter(ShardedWriter):
    """Writes a Hugging Face directory; `dspark_export.json` says that dspark made it."""

    marker = MARKER
    noun = "exported checkpoint"
    num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        super().add(name, tensor)
        self.num_bytes += tensor.nbytes

    def finish(self, config: dict[str, Any], record: dict[str, Any]) -> None:
        """Name the shards, write the index of more than one, config.json and the record."""
        self.name_shards(SHARDS)
        shards = sorted({record.shard for record in self.tensors.values()})
        if len(shards) == 1:
            (self.directory / shards[0]).rename(self.directory / SINGLE_NAME)
        else:
            placed = {name: entry.shard for name, entry in self.tensors.items()}
            self.add_json(INDEX_NAME, {"metadata": {"total_size": self.num_bytes}, "weight_map": placed})
        self.add_json("config.json", config)
        self.add_json(MARKER, record)


def export(
    engine: str | Path, out: str | Path, format: str, force: bool = False, progress: Progress | None = None, shard_bytes: int = EXPORT_BYTES
) -> Exported:
    """Write an engine as a checkpoint of another format.

    Raises InputError for what is no engine, UsageError for an unknown format or a target that may not be written, UnsupportedError for
    an engine that the format cannot express; in every case nothing is left behind.
    """
    exporter_type = exporter_for(format)
    source = EngineSource(engine)
    exporter = exporter_type(source)
    with CheckpointWriter(out, names_of(exporter), force, shard_bytes) as writer:
        with one_torch_thread():
            _write_tensors(exporter, writer, progress)
        notes = [*exporter.notes, *_write_tokenizer(source, writer)]
        if source.manifest.kv_cache is not None:
            notes.append("the scales of the KV cache are not exported")
        generation = source.generation_config()
        if generation is not None:
            writer.add_json(GENERATION_NAME, generation)
        for name, value in exporter.files().items():
            writer.add_json(name, value)
        quantization = exporter.quantization_config()
        config = source.config() | ({"quantization_config": quantization} if quantization is not None else {})
        tools = {name: version(name) for name in TOOLS}
        writer.finish(config, {"format": format, **source.lineage(), "tools": tools, "notes": notes})
        writer.publish()
    return Exported(writer.target, writer.num_bytes, len(exporter.schemes), tuple(notes))


def exporter_for(format: str) -> type[Exporter]:
    """The exporter of a format. Raises UsageError naming the formats there are."""
    if format not in FORMATS:
        raise UsageError(f"--format is {format}, allowed: {', '.join(FORMATS)}")
    module, _, name = FORMATS[format].partition(":")
    found: type[Exporter] = getattr(import_module(f"dspark.converters.exporters.{module}"), name)
    return found


def names_of(exporter: Exporter) -> list[str]:
    """Name of every tensor of the checkpoint, in order."""
    names: list[str] = []
    for entry in exporter.source.entries:
        if isinstance(entry, str):
            names.append(exporter.source.saved_as(entry))
        elif entry.name in exporter.schemes:
            names += [f"{entry.name}.{leaf}" for leaf in exporter.leaves(entry)]
        else:
            names.append(f"{entry.name}.weight")
    return names


def _tensors(exporter: Exporter, entry: str | Linear) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(entry, str):
        yield exporter.source.saved_as(entry), exporter.source.read(entry)
    elif entry.name in exporter.schemes:
        parts = exporter.tensors(entry)
        if set(parts) != set(exporter.leaves(entry)):
            raise AssertionError(f"{entry.name}: {sorted(parts)} is not what was announced, {exporter.leaves(entry)}")
        yield from ((f"{entry.name}.{leaf}", tensor) for leaf, tensor in parts.items())
    else:
        yield f"{entry.name}.weight", exporter.source.dense(entry)


def _write_tensors(exporter: Exporter, writer: CheckpointWriter, progress: Progress | None) -> None:
    source = exporter.source
    total, done = source.manifest.weight_bytes(), 0
    for entry in source.entries:
        for name, tensor in _tensors(exporter, entry):
            writer.add(name, tensor)
        done += source.stored_bytes(entry)
        if progress is not None:
            progress(done, total, entry if isinstance(entry, str) else entry.name)


def _write_tokenizer(source: EngineSource, writer: CheckpointWriter) -> list[str]:
    """Write the tokenizer and return what to say of it. The chat template also goes where programs from before its own file look."""
    bundle = source.tokenizer()
    if bundle is None:
        return ["the engine has no tokenizer, so neither has the checkpoint"]
    writer.add_tokenizer(bundle)
    if bundle.chat_template is not None:
        writer.add_json(TOKENIZER_CONFIG, {**bundle.config, "chat_template": bundle.chat_template})
    return []
