"""How weights are stored: the vocabulary of quantization.

A *scheme* says how the weight of one linear layer is stored; a *QuantConfig* says which scheme each layer has.
Canonical storage of the integer schemes ("wna16", see `kernels.packing`), for a linear of K inputs and N outputs:

    NAME.qweight  int32 [ceil(K * bits / 32), N]  unsigned codes, little-endian bit stream along K
    NAME.scales   float16 (float32 where float16 would be subnormal) [K / group_size, N]
    NAME.zeros    uint8 [K / group_size, N], only when asymmetric; symmetric zero is 2**(bits - 1)

and weight[n, k] = scales[k // group_size, n] * (code[k, n] - zero[k // group_size, n]).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from dspark.runtime.spec.errors import UsageError

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class QuantScheme:
    """Storage of one linear weight. group_size -1 means one group of all K inputs."""

    name: str
    weight_bits: int
    symmetric: bool = True
    group_size: int = -1
    method: str = "rtn"

    def resolved_group_size(self, in_features: int) -> int:
        """Group size in inputs, with -1 resolved."""
        return in_features if self.group_size == -1 else self.group_size


PRESETS: dict[str, QuantScheme] = {
    "w8a16": QuantScheme("w8a16", 8, True),
    "w8a16-asym": QuantScheme("w8a16-asym", 8, False),
    "w4a16": QuantScheme("w4a16", 4, True),
    "w4a16-asym": QuantScheme("w4a16-asym", 4, False),
}


@dataclass(frozen=True)
class QuantConfig:
    """Which layers are quantized and how.

    ignore: glob patterns of module names (without `.weight`) that stay in the model's dtype.
    """

    scheme: QuantScheme
    ignore: tuple[str, ...] = ("lm_head", "model.embed_tokens")

    def scheme_for(self, module_name: str) -> QuantScheme | None:
        """Scheme of a linear module, or None when it stays dense."""
        if any(fnmatchcase(module_name, pattern) for pattern in self.ignore):
            return None
        return self.scheme

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> QuantConfig:
        return cls(QuantScheme(**data["scheme"]), tuple(data.get("ignore", ())))


def preset(name: str) -> QuantScheme:
    """Scheme by its public name. Raises UsageError naming the allowed ones."""
    if name not in PRESETS:
        raise UsageError(f"unknown scheme '{name}', allowed: {', '.join(PRESETS)}", "choose one with --scheme")
    return PRESETS[name]


def default_group_size(input_widths: set[int]) -> int:
    """Largest of GROUP_SIZES that divides every input width; -1 when none does."""
    return next((size for size in GROUP_SIZES if all(width % size == 0 for width in input_widths)), -1)
