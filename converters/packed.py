"""Checkpoints that come quantized: what the engine stores for them. Integers are handed on, nothing is quantized again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dspark.converters.mapping import MappedModel
from dspark.converters.readers.base import summarize
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

if TYPE_CHECKING:
    import torch


@runtime_checkable
class PackedSource(Protocol):
    """What a reader of quantized checkpoints offers beyond `CheckpointReader`."""

    def quantized(self) -> dict[str, QuantScheme]:
        """Scheme of every quantized module, by the checkpoint's names."""

    def read_quantized(self, module: str) -> dict[str, torch.Tensor]:
        """The engine's tensors of one of them, by the last part of their names."""


def packed_modules(model: MappedModel) -> dict[str, QuantScheme]:
    """Our module name -> scheme of every module that comes quantized."""
    reader: Any = model.reader
    if not isinstance(reader, PackedSource):
        return {}
    source = reader.quantized()
    found = {}
    for name in model.shapes:
        module = name.removesuffix(".weight")
        if module != name and (scheme := source.get(_origin(model, name))) is not None:
            found[module] = scheme
    return found


def packed_config(model: MappedModel) -> QuantConfig | None:
    """The engine's quantization, None for a dense checkpoint."""
    modules = packed_modules(model)
    return QuantConfig.of_modules(modules) if modules else None


def refuse_packed(model: MappedModel) -> None:
    """Raise InputError when a checkpoint is quantized already: quantizing twice adds the errors of both."""
    config = packed_config(model)
    if config is not None:
        what = f"'{model.reader.path}' is already quantized ({model.reader.format}: {config.describe()})"
        raise InputError(what, "start from the checkpoint that it was made of, or keep its integers with: dspark convert")


def engine_names(model: MappedModel) -> list[str]:
    """Name of every tensor that the engine will hold."""
    modules = packed_modules(model)
    names: list[str] = []
    for name in model.shapes:
        scheme = modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        names += [name] if scheme is None else [f"{name.removesuffix('.weight')}.{leaf}" for leaf in scheme.leaves()]
    return names


def engine_tensors(model: MappedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the engine: dense ones in its dtype, those of quantized modules as they are."""
    modules = packed_modules(model)
    for name in model.shapes:
        module = name.removesuffix(".weight")
        if module == name or module not in modules:
            yield name, model.read_cast(name)
            continue
        reader: Any = model.reader
        parts = reader.read_quantized(_origin(model, name))
        part = model.parts.get(name)
        if part is not None:
            parts = rows_of(module, modules[module], parts, part.first_row, part.num_rows)
        if set(parts) != set(modules[module].leaves()):
            raise AssertionError(f"{module}: {summarize(sorted(parts))} is not what scheme {modules[module]} stores")
        for leaf, tensor in parts.items():
            yield f"{module}.{leaf}", tensor


def rows_of(module: str, scheme: QuantScheme, parts: dict[str, torch.Tensor], first: int, count: int) -> dict[str, torch.Tensor]:
    """Some outputs of a module that the checkpoint holds fused. Raises UnsupportedError when an FP8 block spans the border."""
    if scheme.storage == "wna16":
        return {leaf: tensor if leaf == "perm" else tensor[:, first : first + count].contiguous() for leaf, tensor in parts.items()}
    weight, scales = parts["qweight"][first : first + count], parts["scales"]
    if scheme.storage == "int8":
        return {"qweight": weight, "scales": scales[first : first + count]}
    rows = scheme.block[0] if scheme.block else -1
    if rows > 0:
        if first % rows:
            what = f"{module} starts inside a block of {rows} outputs of a fused FP8 weight, which cannot be split"
            raise UnsupportedError(what, "convert the unquantized checkpoint")
        scales = scales[first // rows : -(-(first + count) // rows)]
    return {"qweight": weight, "scales": scales.contiguous()}


def _origin(model: MappedModel, name: str) -> str:
    """The checkpoint's module that holds one of our weights."""
    part = model.parts.get(name)
    return (part.source if part is not None else name).removesuffix(".weight")
