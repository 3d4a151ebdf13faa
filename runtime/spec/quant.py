"""How weights are stored: the vocabulary of quantization.

A *scheme* says how the weight of one linear layer is stored; a *QuantConfig* says which scheme each layer has.
Canonical storage of a linear NAME of K inputs and N outputs, by the scheme's `storage`:

"wna16": integer codes of 2 to 8 bits, activations as they are (see `kernels.packing`)

    NAME.qweight  int32 [ceil(K * bits / 32), N]  unsigned codes, little-endian bit stream along K
    NAME.scales   float16, bfloat16 or float32 [G, N]; G groups of group_size inputs each
    NAME.zeros    uint8 [G, N], only when asymmetric; symmetric zero is 2**(bits - 1)
    NAME.perm     int32 [K], only with act_order: stored row j belongs to input perm[j]

    weight[n, perm[j]] = scales[j // group_size, n] * (code[j, n] - zero[j // group_size, n])

"fp8": float8 (e4m3) numbers with a scale for each block of the scheme's `block` = (outputs, inputs), -1 meaning all of them, so that
(-1, -1) is one scale for the tensor, (1, -1) one for each output and (128, 128) the fine-grained form. Activations as they are, or rounded
to such numbers too (the scheme's `inputs`): "dynamic", each token with a scale of its own, or "static", all with one that was calibrated.

    NAME.qweight      float8_e4m3fn [N, K]
    NAME.scales       float32 [ceil(N / block outputs), ceil(K / block inputs)]
    NAME.input_scale  float32 [], only with static inputs

    weight[n, k] = qweight[n, k] * scales[n // block outputs, k // block inputs]

"int8": 8-bit integers with a scale for each output, and activations quantized to 8 bits too, each token with its own scale

    NAME.qweight  int8 [N, K]
    NAME.scales   float32 [N]

    y[t, n] = scales[n] * s[t] * sum over k of qweight[n, k] * round(x[t, k] / s[t]);  s[t] = max |x[t]| / 127.5
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from dspark.runtime.spec.errors import UsageError

GROUP_SIZES = (128, 64, 32)
STORAGES = ("wna16", "fp8", "int8")


@dataclass(frozen=True)
class QuantScheme:
    """Storage of one linear weight.

    group_size (wna16): inputs that share a scale; -1 means one group of all K inputs, which then fill whole words (K * bits % 32 == 0).
    method: which algorithm or checkpoint format the codes come from. act_order (wna16): there is a permutation of the inputs.
    block (fp8): outputs and inputs that share a scale. inputs (fp8): "dynamic" or "static" where activations are rounded too.
    """

    name: str
    weight_bits: int
    symmetric: bool = True
    group_size: int = -1
    method: str = "rtn"
    storage: str = "wna16"
    act_order: bool = False
    block: tuple[int, int] | None = None
    inputs: str | None = None

    def resolved_group_size(self, in_features: int) -> int:
        """Group size in inputs, with -1 resolved."""
        return in_features if self.group_size == -1 else self.group_size

    def leaves(self) -> tuple[str, ...]:
        """Last parts of the names of the tensors that a linear is stored as."""
        if self.storage != "wna16":
            return ("qweight", "scales", *(("input_scale",) if self.inputs == "static" else ()))
        return ("qweight", "scales", *(() if self.symmetric else ("zeros",)), *(("perm",) if self.act_order else ()))

    def describe(self) -> str:
        """In words, such as "w4a16 group 64" or "fp8 blocks of 128 x 128"."""
        if self.storage == "fp8":
            grain = {(-1, -1): "per tensor", (1, -1): "per channel"}
            outputs, inputs = self.block or (-1, -1)
            suffix = f", {self.inputs} inputs" if self.inputs else ""
            return f"{self.name} {grain.get((outputs, inputs), f'blocks of {outputs} x {inputs}')}{suffix}"
        grouped = "per channel" if self.group_size == -1 or self.storage == "int8" else f"group {self.group_size}"
        return f"{self.name} {grouped}{' act-order' if self.act_order else ''}"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> QuantScheme:
        """Inverse of `asdict` after JSON, which knows no tuples. Raises TypeError for unknown keys and an unknown storage."""
        scheme = cls(**{**data, "block": tuple(data["block"]) if data.get("block") else None})
        if scheme.storage not in STORAGES:
            raise TypeError(f"storage '{scheme.storage}' is unknown, known: {', '.join(STORAGES)}")
        return scheme


def _presets() -> dict[str, QuantScheme]:
    integers = [
        QuantScheme(f"w{bits}a16{suffix}", bits, symmetric) for bits in (8, 4, 3, 2) for suffix, symmetric in (("", True), ("-asym", False))
    ]
    eights = [
        QuantScheme("w8a8", 8, storage="int8"),
        QuantScheme("fp8", 8, storage="fp8", block=(1, -1)),
        QuantScheme("fp8-block", 8, storage="fp8", block=(128, 128)),
    ]
    return {scheme.name: scheme for scheme in (*integers, *eights)}


PRESETS: dict[str, QuantScheme] = _presets()
"""Public name -> scheme, before group size and method are decided."""


@dataclass(frozen=True)
class QuantConfig:
    """Which layers are quantized and how.

    Either by rule: every linear has `scheme` but those whose names match an `ignore` pattern (a glob over module names without `.weight`).
    Or by table, when `modules` is given (checkpoints that others quantized): a module has the scheme that stands there, and one that does
    not stand there is dense; `scheme` is then the most common one and `ignore` says nothing.
    """

    scheme: QuantScheme
    ignore: tuple[str, ...] = ("lm_head", "model.embed_tokens")
    modules: dict[str, QuantScheme] | None = None

    @classmethod
    def of_modules(cls, modules: dict[str, QuantScheme]) -> QuantConfig:
        """The config of an explicit, non-empty table."""
        return cls(Counter(modules.values()).most_common(1)[0][0], (), dict(modules))

    def scheme_for(self, module_name: str) -> QuantScheme | None:
        """Scheme of a linear module, or None when it stays dense."""
        if self.modules is not None:
            return self.modules.get(module_name)
        if any(fnmatchcase(module_name, pattern) for pattern in self.ignore):
            return None
        return self.scheme

    def schemes(self) -> list[QuantScheme]:
        """Every scheme in use, the most common one first."""
        return [self.scheme] if self.modules is None else [scheme for scheme, _ in Counter(self.modules.values()).most_common()]

    def describe(self) -> str:
        """In words; a mixed model names each scheme with its number of layers."""
        schemes = self.schemes()
        if len(schemes) == 1 or self.modules is None:
            return schemes[0].describe()
        counts = Counter(scheme.describe() for scheme in self.modules.values())  # schemes that differ only in what need not be said are one
        if len(counts) == 1:
            return schemes[0].describe()
        return "mixed: " + ", ".join(f"{words} ({count} {'layer' if count == 1 else 'layers'})" for words, count in counts.most_common())

    def to_json(self) -> dict[str, Any]:
        """JSON value; a table is written as a list of schemes and each module's index in it."""
        data: dict[str, Any] = {"scheme": asdict(self.scheme), "ignore": list(self.ignore)}
        if self.modules is not None:
            schemes = self.schemes()
            data["schemes"] = [asdict(scheme) for scheme in schemes]
            data["modules"] = {module: schemes.index(scheme) for module, scheme in self.modules.items()}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> QuantConfig:
        """Inverse of `to_json`; a manifest without a table is a rule. Raises KeyError or TypeError for a damaged one."""
        scheme = QuantScheme.from_json(data["scheme"])
        if data.get("modules") is None:
            return cls(scheme, tuple(data.get("ignore", ())))
        schemes = [QuantScheme.from_json(entry) for entry in data["schemes"]]
        try:
            modules = {module: schemes[index] for module, index in data["modules"].items()}
        except IndexError as error:
            raise KeyError("a module's scheme is not in the list") from error
        return cls(scheme, tuple(data.get("ignore", ())), modules)


def preset(name: str) -> QuantScheme:
    """Scheme by its public name. Raises UsageError naming the allowed ones."""
    if name not in PRESETS:
        raise UsageError(f"unknown scheme '{name}', allowed: {', '.join(PRESETS)}", "choose one with --scheme")
    return PRESETS[name]


def default_group_size(input_widths: set[int]) -> int:
    """Largest of GROUP_SIZES that divides every input width; -1 when none does."""
    return next((size for size in GROUP_SIZES if all(width % size == 0 for width in input_widths)), -1)
