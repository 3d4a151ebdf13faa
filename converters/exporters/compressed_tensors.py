"""compressed-tensors checkpoints, as vLLM, SGLang and transformers read them.

    pack-quantized   weight_packed int32 [N, ceil(K * bits / 32)], weight_scale [N, G], weight_shape int64 [2],
                     asymmetric: weight_zero_point int32 [ceil(N * bits / 32), G], a bit stream along the outputs
    int-quantized    weight int8 [N, K], weight_scale [N, 1]; activations in 8 bits, a scale for each token
    float-quantized  weight float8_e4m3fn [N, K], weight_scale [1], [N, 1], [N, G] or a grid of blocks

Codes count from the middle here (-8 .. 7 for 4 bits), but are stored with the middle added: the engine's own unsigned stream.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from dspark.converters.exporters.base import Exporter
from dspark.converters.exporters.gptq import group_size
from dspark.converters.exporters.source import Linear
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    import torch

METHOD = "compressed-tensors"
WRITTEN_AS = "0.15.0"
"""The oldest release of compressed-tensors that reads everything here alike (4 and 8 bits are packed the same in all)."""
PACKED_BITS = (4, 8)
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
FORMAT_OF_STORAGE = {"wna16": PACKED, "int8": INTEGERS, "fp8": FLOATS}
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedTensorsExporter(Exporter):
    """Codes of 4 or 8 bits, W8A8 and FP8, mixed as the engine has them."""

    format = METHOD

    def check(self) -> None:
        bad: dict[str, str] = {}
        for name, scheme in self.schemes.items():
            if scheme.storage not in FORMAT_OF_STORAGE:
                bad[name] = f"stored as {scheme.describe()}, allowed: {', '.join(FORMAT_OF_STORAGE.values())}"
            elif scheme.storage == "wna16" and scheme.weight_bits not in PACKED_BITS:
                bad[name] = f"{scheme.weight_bits} bits, allowed: {', '.join(map(str, PACKED_BITS))}"
            elif scheme.act_order:
                bad[name] = "its inputs are reordered (act-order), which compressed-tensors reads no more since 0.20"
            elif scheme.storage == "fp8" and not _block_is_expressible(scheme.block):
                bad[name] = f"scales of {scheme.describe()}, allowed: per tensor, per channel, groups of inputs, blocks"
        self.refuse(bad, "type --format gptq or hf")
        self.groups = self._groups()

    def quantization_config(self) -> dict[str, Any]:
        formats = {group["format"] for group in self.groups.values()}
        return {
            "quant_method": METHOD,
            "version": WRITTEN_AS,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "config_groups": self.groups,
            "ignore": self.dense_linears(),
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
        }

    def leaves(self, linear: Linear) -> tuple[str, ...]:
        scheme = self.schemes[linear.name]
        if scheme.storage != "wna16":
            return ("weight", "weight_scale", *(("input_scale",) if scheme.inputs == "static" else ()))
        return ("weight_packed", "weight_scale", "weight_shape", *(() if scheme.symmetric else ("weight_zero_point",)))

    def tensors(self, linear: Linear) -> dict[str, torch.Tensor]:
        scheme = self.schemes[linear.name]
        weight = self.source.weight(linear)
        if scheme.storage == "wna16":
            return self._packed(weight, scheme)
        if scheme.storage == "int8":
            return {"weight": weight.qweight, "weight_scale": self._scales(weight.scales[:, None])}
        scales = self._scales(weight.scales)
        parts = {"weight": weight.qweight, "weight_scale": scales.reshape(1) if scheme.block in (None, (-1, -1)) else scales}
        return parts if weight.input_scale is None else {**parts, "input_scale": weight.input_scale.reshape(1)}

    def _packed(self, weight: Any, scheme: QuantScheme) -> dict[str, torch.Tensor]:
        import torch

        from dspark.converters.layouts import zero_points
        from dspark.kernels.packing import pack_codes

        parts = {
            "weight_packed": weight.qweight.t().contiguous(),
            "weight_scale": self._scales(weight.scales.t()),
            "weight_shape": torch.tensor([weight.out_features, weight.in_features], dtype=torch.int64),
        }
        if not scheme.symmetric:
            parts["weight_zero_point"] = pack_codes(zero_points(weight).t(), weight.bits)
        return parts

    def _scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales in the model's 16-bit dtype, as other programs write them, where that changes none; else as the engine has them."""
        import torch

        dtype = getattr(torch, self.source.model.dtype)
        if dtype == torch.float32:
            return scales.contiguous()
        cast = scales.to(dtype)
        return (cast if torch.equal(cast.double(), scales.double()) else scales).contiguous()

    def _groups(self) -> dict[str, dict[str, Any]]:
        """config_groups: the most common arguments for the class Linear, all others for the layers by name."""
        arguments: dict[str, dict[str, Any]] = {}
        members: dict[str, list[str]] = {}
        for name, scheme in self.schemes.items():
            described = {
                "format": FORMAT_OF_STORAGE[scheme.storage],
                "weights": weight_arguments(scheme, self.source.linears[name].inputs),
                "input_activations": input_arguments(scheme),
                "output_activations": None,
            }
            key = json.dumps(described, sort_keys=True)
            arguments[key] = described
            members.setdefault(key, []).append(name)
        order = [key for key, _ in Counter({key: len(names) for key, names in members.items()}).most_common()]
        return {f"group_{index}": {"targets": members[key] if index else ["Linear"], **arguments[key]} for index, key in enumerate(order)}


def input_arguments(scheme: QuantScheme) -> dict[str, Any] | None:
    """The format's arguments for a layer's inputs, None where they stay as they are."""
    if scheme.storage == "int8" or scheme.inputs == "dynamic":
        return PER_TOKEN if scheme.storage == "int8" else {**PER_TOKEN, "type": "float"}
    if scheme.inputs == "static":
        return {**PER_TOKEN, "type": "float", "strategy": "tensor", "dynamic": False}
    return None


def weight_arguments(scheme: QuantScheme, inputs: int) -> dict[str, Any]:
    """The format's arguments for weights of a scheme; keys that are null are left out, and no key is invented (readers reject those)."""
    arguments: dict[str, Any] = {"num_bits": scheme.weight_bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False}
    if scheme.storage == "fp8":
        return {**arguments, "num_bits": 8, "type": "float", "symmetric": True, **_float_strategy(scheme.block)}
    size = -1 if scheme.storage == "int8" else group_size(scheme.group_size, inputs)
    return arguments | ({"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size})


def _float_strategy(block: tuple[int, int] | None) -> dict[str, Any]:
    outputs, inputs = block or (-1, -1)
    if (outputs, inputs) == (-1, -1):
        return {"strategy": "tensor"}
    if outputs == 1:
        return {"strategy": "channel"} if inputs == -1 else {"strategy": "group", "group_size": inputs}
    return {"strategy": "block", "block_structure": [outputs, inputs]}


def _block_is_expressible(block: tuple[int, int] | None) -> bool:
    outputs, inputs = block or (-1, -1)
    return (outputs, inputs) == (-1, -1) or outputs == 1 or (outputs > 0 and inputs > 0)
