"""GPTQ checkpoints, as GPTQModel, transformers, vLLM and SGLang read them (and AutoGPTQ, where zero points are symmetric).

    qweight int32 [K * bits / 32, N]   codes, a bit stream along the inputs: the engine's own, in the order of the inputs
    qzeros  int32 [G, N * bits / 32]   zero points, a bit stream along the outputs: less one in v1 ("gptq"), as they are in v2 ("gptq_v2")
    scales  float16 [G, N]
    g_idx   int32 [K]                  group of each input

v1 cannot say a zero point of 0 so that all programs read the same, so it is written only where all are the middle one, and v2 elsewhere.
Layers that differ from the rest, and linears that stay dense, are named in `dynamic` (GPTQModel's rules by pattern).
"""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dspark.converters.exporters.base import Exporter
from dspark.converters.exporters.source import Linear

if TYPE_CHECKING:
    import torch

BITS = (2, 3, 4, 8)
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
MULTIPLE = 32
V1, V2 = "gptq", "gptq_v2"
QUANTIZE_CONFIG = "quantize_config.json"
Settings = tuple[int, int, bool]
"""(bits, group size, symmetric)"""


class GptqExporter(Exporter):
    """Integer codes of 2, 3, 4 or 8 bits."""

    format = "gptq"

    def check(self) -> None:
        self.refuse_storage()
        bad: dict[str, str] = {}
        for name, scheme in self.schemes.items():
            linear = self.source.linears[name]
            size = group_size(scheme.group_size, linear.inputs)
            if scheme.weight_bits not in BITS:
                bad[name] = f"{scheme.weight_bits} bits, allowed: {', '.join(map(str, BITS))}"
            elif size not in GROUP_SIZES:
                bad[name] = f"groups of {size} inputs, allowed: {', '.join(map(str, GROUP_SIZES))}"
            elif linear.inputs % MULTIPLE or linear.outputs % MULTIPLE:
                bad[name] = f"{linear.inputs} inputs and {linear.outputs} outputs, allowed: multiples of {MULTIPLE}"
        self.refuse(bad, "quantize again so that every layer fits, or type --format hf")
        self.check_half_scales()
        self.settings = self._settings()
        self.version = V1 if all(symmetric for _, _, symmetric in self.settings.values()) else V2
        self.act_order = any(scheme.act_order for scheme in self.schemes.values())
        self.common = Counter(self.settings.values()).most_common(1)[0][0]
        self.dynamic = self._rules()
        if self.dynamic:
            self.notes.append(
                f"{len(self.dynamic)} layers that are dense or stored otherwise than most are named in 'dynamic', which GPTQModel, vLLM "
                "and SGLang read and AutoGPTQ does not"
            )

    def quantization_config(self) -> dict[str, Any]:
        bits, size, symmetric = self.common
        methods = Counter(scheme.method for scheme in self.schemes.values())
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "checkpoint_format": self.version,
            "format": self.version,
            "bits": bits,
            "group_size": size,
            "sym": symmetric,
            "desc_act": self.act_order,
            "lm_head": "lm_head" in self.schemes,
            "pack_dtype": "int32",
        }
        if self.dynamic:
            config["dynamic"] = self.dynamic
        return config | {
            "meta": {"quantizer": [f"dspark:{version('dspark')}"], "codes_from": [method for method, _ in methods.most_common()]}
        }

    def files(self) -> dict[str, dict[str, Any]]:
        return {QUANTIZE_CONFIG: self.quantization_config()}

    def leaves(self, linear: Linear) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", "g_idx")

    def tensors(self, linear: Linear) -> dict[str, torch.Tensor]:
        from dspark.converters.layouts import group_index, natural_qweight, pack_columns, zero_points

        weight = self.source.weight(linear)
        zeros = zero_points(weight)
        stored = zeros - 1 if self.version == V1 else zeros  # v1 is written for symmetric weights only, whose zero is never 0
        return {
            "qweight": natural_qweight(weight),
            "qzeros": pack_columns(stored, weight.bits),
            "scales": self.half_scales(weight.scales),
            "g_idx": group_index(weight),
        }

    def _settings(self) -> dict[str, Settings]:
        sizes, _ = group_sizes(self)
        return {name: (scheme.weight_bits, sizes[name], scheme.symmetric) for name, scheme in self.schemes.items()}

    def _rules(self) -> dict[str, dict[str, Any]]:
        """Pattern -> what differs from the common settings; "-:" for linears that stay dense. The head has a key of its own."""
        rules: dict[str, dict[str, Any]] = {f"-:{exact_pattern(name)}": {} for name in self.dense_linears() if name != "lm_head"}
        for name, settings in self.settings.items():
            pairs = zip(("bits", "group_size", "sym"), settings, self.common, strict=True)
            if other := {key: value for key, value, usual in pairs if value != usual}:
                rules[f"+:{exact_pattern(name)}"] = other
        return rules


def group_size(stored: int, inputs: int) -> int:
    """The format's word for an engine's group size: -1 for one group of all inputs."""
    return -1 if stored in (-1, inputs) else stored


def group_sizes(exporter: Exporter) -> tuple[dict[str, int], int]:
    """Group size of every layer, and the one that most have. One group of all inputs passes for a group of that many where others are."""
    inputs = {name: exporter.source.linears[name].inputs for name in exporter.schemes}
    sizes = {name: group_size(scheme.group_size, inputs[name]) for name, scheme in exporter.schemes.items()}

    def fits(name: str, size: int) -> bool:
        return sizes[name] == size or (sizes[name] == -1 and inputs[name] == size)

    usual = max(dict.fromkeys(sizes.values()), key=lambda size: sum(fits(name, size) for name in sizes))
    return {name: usual if fits(name, usual) else size for name, size in sizes.items()}, usual


def exact_pattern(module: str) -> str:
    """A regular expression that matches one module name, from its start."""
    return re.escape(module) + "$"
