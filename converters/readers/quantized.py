"""What the readers of quantized checkpoints share: the config, the plan of quantized modules, integers handed on as they are.

To the mapping a quantized linear looks like a dense one: `tensors` lists NAME.weight [N, K] instead of the tensors that it is stored as,
and `read` gives the dense float32 weight that they stand for. `quantized` says which modules are quantized, and `read_quantized` gives the
engine's storage of one (see `runtime.spec.quant`): the same codes, scales and zero points, bit for bit, in our order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import TensorInfo, majority_dtype, summarize
from dspark.converters.readers.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsReader, read_json_object, read_weight_map
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    import torch

    from dspark.kernels.wna16 import Wna16Weight

QUANTIZE_CONFIGS = ("quantize_config.json", "quant_config.json")
DAMAGED = "the checkpoint is damaged: use another copy"
SMALLEST_GROUP = 16  # of the matrix units of GPUs
_INDEX_ENDING = ".safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors")
_COLUMNS = 1024  # outputs that are unpacked at a time


@dataclass(frozen=True)
class PackedLinear:
    """One quantized module. shape: (N, K). parts: last parts of the names of the tensors that it is read from."""

    scheme: QuantScheme
    shape: tuple[int, int]
    parts: tuple[str, ...]


class QuantizedReader(SafetensorsReader):
    """A checkpoint in which some linears are quantized.

    notes: what the user should know, complete once `tensors` was called. dropped: tensors that are no part of the model, each under a note.
    A subclass plans (`plan_linears`, from headers and small tensors) and reads (`read_weight`).
    """

    def __init__(self, path: Path) -> None:
        self.notes: list[str] = []
        self.dropped: set[str] = set()
        super().__init__(path)

    def plan_linears(self) -> dict[str, PackedLinear]:
        """Module name -> how it is stored. Raises InputError for tensors that do not fit each other, UnsupportedError for other formats."""
        raise NotImplementedError

    def read_weight(self, module: str, linear: PackedLinear) -> Any:
        """The kernels' weight (`parts()`, `dense(dtype)`) of a module of the plan."""
        raise NotImplementedError

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantization config: of config.json, overlaid on a file of its own (older programs wrote only that)."""
        merged: dict[str, Any] = {}
        for name in QUANTIZE_CONFIGS:
            if (self.path / name).is_file():
                merged |= read_json_object(self.path / name)
        inner = self.config().get("quantization_config")
        return merged | (inner if isinstance(inner, dict) else {})

    @cached_property
    def linears(self) -> dict[str, PackedLinear]:
        """The plan."""
        planned = self.plan_linears()
        embeddings = [module for module in planned if module.endswith("embed_tokens")]
        if embeddings:
            what = f"{embeddings[0]} of '{self.path}' is quantized: quantized embeddings are not supported"
            raise UnsupportedError(what, "convert a checkpoint whose embedding is not quantized")
        return planned

    @cached_property
    def _virtual(self) -> dict[str, TensorInfo]:
        consumed = {f"{module}.{leaf}" for module, linear in self.linears.items() for leaf in linear.parts}
        consumed |= self._idle_biases() | self.dropped
        found = {name: info for name, info in self._tensors.items() if name not in consumed}
        packed = {
            f"{module}.weight": TensorInfo(linear.scheme.describe(), linear.shape, packed=True) for module, linear in self.linears.items()
        }
        return {**found, **packed}

    def tensors(self) -> dict[str, TensorInfo]:
        return self._virtual

    def quantized(self) -> dict[str, QuantScheme]:
        """Scheme of every quantized module."""
        return {module: linear.scheme for module, linear in self.linears.items()}

    def read(self, name: str) -> torch.Tensor:
        import torch

        module = name.removesuffix(".weight")
        if module == name or module not in self.linears:
            return super().read(name)
        dense: torch.Tensor = self.read_weight(module, self.linears[module]).dense(torch.float32)
        return dense

    def read_quantized(self, module: str) -> dict[str, torch.Tensor]:
        """The tensors that an engine stores for a quantized module, by the last part of their names.

        Raises InputError when a scale is not finite.
        """
        parts: dict[str, torch.Tensor] = self.read_weight(module, self.linears[module]).parts()
        if not bool(parts["scales"].isfinite().all()):
            raise InputError(f"{module} of '{self.path}' has scales that are not finite", DAMAGED)
        return parts

    def storage_dtype(self) -> str:
        return majority_dtype({name: info for name, info in self._virtual.items() if info.dtype in ("float32", "bfloat16", "float16")})

    def files(self) -> list[Path]:
        return [*super().files(), *(self.path / name for name in QUANTIZE_CONFIGS if (self.path / name).is_file())]

    # ---- for subclasses

    def modules_with(self, leaf: str) -> list[str]:
        """Modules that have a tensor of this last part of a name."""
        return [name.removesuffix(f".{leaf}") for name in self._tensors if name.endswith(f".{leaf}")]

    def info(self, module: str, leaf: str) -> TensorInfo | None:
        """Header of one tensor of a module, None when it is not there."""
        return self._tensors.get(f"{module}.{leaf}")

    def load(self, module: str, leaf: str) -> torch.Tensor:
        """One stored tensor of a module."""
        name = f"{module}.{leaf}"
        if name not in self._tensors:
            raise InputError(f"'{self.path}' has no {name}", DAMAGED)
        return super().read(name)

    def expected_shape(self, module: str) -> tuple[int, int] | None:
        """(N, K) of a module as config.json has it, None for a module that the model does not have."""
        shape = self._expected.get(f"{module}.weight")
        return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else None

    def present(self, module: str, leaves: Iterable[str]) -> tuple[str, ...]:
        """Those of the leaves that the module has."""
        return tuple(leaf for leaf in leaves if f"{module}.{leaf}" in self._tensors)

    def misfit(self, module: str, wanted: str, *leaves: str) -> InputError:
        """The error for tensors of shapes that do not fit: names each with its shape, and what was wanted."""
        shapes = ", ".join(f"{leaf} {list(self._tensors[f'{module}.{leaf}'].shape)}" for leaf in self.present(module, leaves))
        return InputError(f"{module} of '{self.path}': {shapes} do not fit: {wanted}", "check that config and weights belong together")

    @cached_property
    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's tensors, by our names and by those of the family's checkpoints."""
        config = model_config_from_hf(self.config())
        family = FAMILIES[config.family]
        shapes = family.tensors(config)
        return {**shapes, **{family.saved_as(name): shape for name, shape in shapes.items()}}

    def _idle_biases(self) -> set[str]:
        """Biases of zeros where the model has none: old packers wrote one for every module."""
        import torch

        names = [f"{module}.bias" for module in self.linears if f"{module}.bias" in self._tensors]
        spare = [name for name in names if name not in self._expected]
        idle = {name for name in spare if not bool(torch.count_nonzero(super(QuantizedReader, self).read(name)))}
        if idle:
            self.notes.append(f"{len(idle)} biases of zeros that the model does not have are left out")
        return idle

    def _locate(self) -> dict[str, str]:
        """As the parent; or the one weight file or index of another name, which packers choose freely."""
        if (self.path / INDEX_NAME).is_file() or (self.path / SINGLE_NAME).is_file():
            return super()._locate()
        indexes = sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(_INDEX_ENDING))
        if len(indexes) == 1:
            return read_weight_map(self.path, indexes[0])
        files = sorted(entry.name for entry in self.path.glob("*.safetensors"))
        if len(files) > 1 and not indexes and all(_SHARD.search(name) for name in files):
            raise InputError(f"'{self.path}' has shards but no index ({summarize(files, 3)})", "download the missing *.index.json")
        if len(files) != 1 or indexes:
            found = summarize([*indexes, *files], 5)
            raise InputError(f"'{self.path}' has several weight files ({found})", f"keep one, or name it {SINGLE_NAME}")
        return dict.fromkeys(self._open(files[0]).keys(), files[0])


# ---- canonical integers


def trivial_order(g_idx: torch.Tensor, group_size: int) -> bool:
    """Whether a group index says nothing: all zero (old files), negative (never filled), or input k in group k // group_size."""
    import torch

    return bool((g_idx <= 0).all()) or torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group_size)


def order_of_groups(g_idx: torch.Tensor, num_groups: int, group_size: int) -> torch.Tensor | None:
    """The inputs sorted by their groups (int32 [K], stable), or None when a group is out of range or not full.

    A last group may be short where group_size does not divide the inputs: it is the group that was filled last.
    """
    import torch

    if bool(((g_idx < 0) | (g_idx >= num_groups)).any()):
        return None
    counts = torch.bincount(g_idx.long(), minlength=num_groups)
    if bool((counts[:-1] != group_size).any()) or int(counts[-1]) != len(g_idx) - group_size * (num_groups - 1):
        return None
    return torch.argsort(g_idx.long(), stable=True).to(torch.int32)


def whole_groups(in_features: int, group_size: int) -> int:
    """The largest group size that divides inputs and groups alike: the scales of an uneven last group are repeated in smaller groups."""
    return math.gcd(in_features, group_size)


def stored_group_size(in_features: int, bits: int, group_size: int) -> int:
    """`QuantScheme.group_size` for groups of this many inputs: -1 for one group, unless packed rows hold padding."""
    return -1 if group_size == in_features and in_features * bits % 32 == 0 else group_size


def canonical(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    in_features: int,
    group_size: int,
    perm: torch.Tensor | None = None,
) -> Wna16Weight:
    """Canonical storage from packed codes int32 [rows, N] in the order of the inputs, scales and zeros [ceil(K / group_size), N].

    Codes are moved only when perm asks for it.
    """
    import torch

    from dspark.kernels.packing import pack_codes, unpack_codes
    from dspark.kernels.wna16 import Wna16Weight

    if perm is not None:
        order = perm.long()
        chunks = [pack_codes(unpack_codes(part, bits, in_features)[order], bits) for part in qweight.split(_COLUMNS, 1)]
        qweight = torch.cat(chunks, 1)
    size = whole_groups(in_features, group_size)
    if size != group_size:
        source = torch.arange(in_features // size) * size // group_size
        scales, zeros = scales[source], None if zeros is None else zeros[source]
    zeros = None if zeros is None else zeros.to(torch.uint8).contiguous()
    return Wna16Weight(qweight.contiguous(), scales.contiguous(), zeros, bits, in_features, perm)


def wna16_scheme(
    method: str, bits: int, in_features: int, group_size: int, symmetric: bool, act_order: bool = False, name: str | None = None
) -> QuantScheme:
    """The scheme that goes with `canonical` for the same numbers."""
    return QuantScheme(
        name=name or f"w{bits}a16{'' if symmetric else '-asym'}",
        weight_bits=bits,
        symmetric=symmetric,
        group_size=stored_group_size(in_features, bits, whole_groups(in_features, group_size)),
        method=method,
        act_order=act_order,
    )


def split_groups(in_features: int, num_groups: int, configured: int) -> int | None:
    """Inputs of a group: the configured size when it makes this many groups, else the even share, else None."""
    if num_groups == 1:
        return in_features
    if configured > 0 and -(-in_features // configured) == num_groups:
        return configured
    return in_features // num_groups if in_features % num_groups == 0 else None
