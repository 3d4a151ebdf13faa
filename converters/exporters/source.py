"""An engine as an exporter sees it: the tensors of the family's checkpoints, in order, each read when it is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.mapping import EMBEDDING, expected_tensors, fused_names
from dspark.converters.readers.base import summarize
from dspark.converters.readers.safetensors import open_safetensors, read_json_object
from dspark.converters.tokenizer_files import TokenizerBundle, read_bundle
from dspark.converters.writer import hash_file
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.hf_config import hf_config_from_model
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.manifest import MANIFEST_NAME, load_manifest
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    import torch

GENERATION_NAME = "generation_config.json"
AGAIN = "convert the checkpoint again"


@dataclass(frozen=True)
class Linear:
    """One linear layer of the checkpoint to be, K inputs and N outputs.

    name: the checkpoint's module name. parts: the engine's modules that it stacks along its outputs (itself alone, mostly), with the
    outputs and the scheme of each, None for a dense one.
    """

    name: str
    parts: tuple[str, ...]
    outputs_of_parts: tuple[int, ...]
    inputs: int
    schemes: tuple[QuantScheme | None, ...]

    @property
    def outputs(self) -> int:
        return sum(self.outputs_of_parts)

    @property
    def is_dense(self) -> bool:
        return all(scheme is None for scheme in self.schemes)


class EngineSource:
    """An engine directory, opened. Raises InputError when it is damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = load_manifest(path)
        self.model = self.manifest.model
        self.quant = self.manifest.quant
        shards = {record.shard for record in self.manifest.tensors.values()}
        outside = sorted(name for name in shards if Path(name).name != name)
        if outside:
            raise InputError(f"'{self.path / MANIFEST_NAME}' points outside its directory: {summarize(outside)}", AGAIN)
        self._handles = {name: open_safetensors(self.path / name) for name in sorted(shards)}
        self.entries = self._entries()
        self.linears = {entry.name: entry for entry in self.entries if isinstance(entry, Linear)}
        self._check_complete()

    # ---- what there is

    def saved_as(self, name: str) -> str:
        """The name that this family's checkpoints have for a tensor of ours."""
        return FAMILIES[self.model.family].saved_as(name)

    def scheme(self, linear: Linear) -> QuantScheme | None:
        """The scheme of a linear as a whole. Raises UnsupportedError when its parts cannot be stacked as they are."""
        first = linear.schemes[0]
        if len(linear.parts) == 1 or linear.is_dense:
            return first
        schemes = [scheme for scheme in linear.schemes if scheme is not None]
        if first is not None and len(schemes) == len(linear.parts) and self._stacks(linear, schemes):
            if first.storage == "fp8" and first.block is not None and first.block[0] == -1:
                return replace(first, block=(1, first.block[1]))
            return replace(first, symmetric=all(scheme.symmetric for scheme in schemes))
        parts = [
            f"{part.rpartition('.')[2]} {'dense' if scheme is None else scheme.describe()}"
            for part, scheme in zip(linear.parts, linear.schemes, strict=True)
        ]
        what = f"{linear.name} is one layer in checkpoints of this family, but its parts are stored differently ({', '.join(parts)})"
        raise UnsupportedError(what, "quantize them alike, or type --format hf")

    def config(self) -> dict[str, Any]:
        """config.json, in the spelling of transformers 4 where it and 5 differ (5 reads both), with the dtype under both names."""
        config = hf_config_from_model(self.model)
        return {**config, "dtype": config["torch_dtype"]}

    def generation_config(self) -> dict[str, Any] | None:
        path = self.path / GENERATION_NAME
        return read_json_object(path) if path.is_file() else None

    def tokenizer(self) -> TokenizerBundle | None:
        return read_bundle(self.path)

    def lineage(self) -> dict[str, Any]:
        """Which engine this was, and what that was made of."""
        return {
            "engine": self.path.resolve().name,
            "engine_json_xxh3": hash_file(self.path / MANIFEST_NAME),
            "made_of": self.manifest.lineage,
        }

    # ---- tensors

    def read(self, name: str) -> torch.Tensor:
        """One of the engine's tensors, lazily from the memory-mapped file."""
        record = self.manifest.tensors[name]
        tensor: torch.Tensor = self._handles[record.shard].get_tensor(name)
        if tuple(tensor.shape) != record.shape:
            raise InputError(f"tensor '{name}' has shape {list(tensor.shape)}, the manifest says {list(record.shape)}", AGAIN)
        return tensor

    def weight(self, linear: Linear) -> Any:
        """The kernels' weight of a quantized linear, its parts stacked."""
        from dspark.runtime.layers.linear import STACK

        weights = [self._weight(part, scheme) for part, scheme in zip(linear.parts, linear.schemes, strict=True) if scheme is not None]
        return weights[0] if len(weights) == 1 else STACK[linear.schemes[0].storage](weights)  # type: ignore[union-attr]

    def dense(self, linear: Linear) -> torch.Tensor:
        """The weight [N, K] that a linear stands for, in the engine's dtype. Raises InputError when that dtype cannot hold it."""
        import torch

        dtype = getattr(torch, self.model.dtype)
        parts = [
            self.read(f"{part}.weight") if scheme is None else self._weight(part, scheme).dense(dtype)
            for part, scheme in zip(linear.parts, linear.schemes, strict=True)
        ]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not linear.is_dense and not bool(weight.isfinite().all()):
            raise InputError(
                f"{linear.name} has values beyond what {self.model.dtype} holds", "convert the checkpoint with --dtype bfloat16"
            )
        return weight

    def stored_bytes(self, entry: str | Linear) -> int:
        """Bytes that an entry takes in the engine."""
        return sum(self._bytes[name] for name in self._names_of(entry))

    def _weight(self, module: str, scheme: QuantScheme) -> Any:
        from dspark.runtime.layers.linear import build_weight

        return build_weight(module, scheme, {leaf: self.read(f"{module}.{leaf}") for leaf in scheme.leaves()})

    # ---- the plan

    def _entries(self) -> list[str | Linear]:
        """Every tensor of the checkpoint, in order of use: our name, or a linear."""
        shapes = expected_tensors(self.model)
        whole = {part: fused for fused, parts in fused_names(self.model).items() for part in parts}
        stacked = fused_names(self.model)
        entries: list[str | Linear] = []
        done: set[str] = set()
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            if module == name or len(shape) != 2 or name == EMBEDDING:
                entries.append(name)
                continue
            layer = whole.get(module) or self.saved_as(name).removesuffix(".weight")
            if layer in done:
                continue
            done.add(layer)
            parts = stacked.get(layer, (module,))
            outputs = tuple(shapes[f"{part}.weight"][0] for part in parts)
            entries.append(Linear(layer, parts, outputs, shape[1], tuple(self._scheme_of(part) for part in parts)))
        return entries

    def _scheme_of(self, module: str) -> QuantScheme | None:
        return self.quant.scheme_for(module) if self.quant else None

    def _names_of(self, entry: str | Linear) -> Iterator[str]:
        """Names of the engine's tensors that an entry is made of."""
        if isinstance(entry, str):
            yield entry
            return
        for part, scheme in zip(entry.parts, entry.schemes, strict=True):
            yield from [f"{part}.weight"] if scheme is None else [f"{part}.{leaf}" for leaf in scheme.leaves()]

    def _check_complete(self) -> None:
        wanted = {name for entry in self.entries for name in self._names_of(entry)}
        held = set(self.manifest.model_tensors())
        missing, extra = sorted(wanted - held), sorted(held - wanted)
        faults = [f"{what}: {summarize(names, 5)}" for what, names in (("missing", missing), ("unexpected", extra)) if names]
        if faults:
            raise InputError(f"'{self.path}' does not hold the tensors of its model: {'; '.join(faults)}", AGAIN)
        self._bytes = {
            name: replace(self.manifest, tensors={name: record}).weight_bytes() for name, record in self.manifest.tensors.items()
        }

    def _stacks(self, linear: Linear, schemes: list[QuantScheme]) -> bool:
        first = schemes[0]
        if any((s.storage, s.weight_bits, s.group_size, s.act_order, s.block) != _kind(first) for s in schemes):
            return False
        if first.storage == "fp8" and first.block is not None and first.block[0] > 1:
            return all(outputs % first.block[0] == 0 for outputs in linear.outputs_of_parts[:-1])
        if first.act_order:
            orders = [self.read(f"{part}.perm") for part in linear.parts]
            return all(bool((order == orders[0]).all()) for order in orders)
        return True


def _kind(scheme: QuantScheme) -> tuple[Any, ...]:
    return (scheme.storage, scheme.weight_bits, scheme.group_size, scheme.act_order, scheme.block)
