"""AWQ checkpoints of version "gemm", the one that every program reads.

    qweight int32 [K, N / 8]   4-bit codes, eight outputs to a word in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros  int32 [G, N / 8]   zero points, packed the same way
    scales  float16 [G, N]

The packing has a zero point everywhere: symmetric weights get 8. One group size holds for the whole checkpoint, and layers that stay dense
are listed in `modules_to_not_convert`, whose entries match any part of a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark.converters.exporters.base import Exporter
from dspark.converters.exporters.gptq import group_sizes
from dspark.converters.exporters.source import Linear

if TYPE_CHECKING:
    import torch

BITS = 4
PER_WORD = 8


class AwqExporter(Exporter):
    """Integer codes of 4 bits in groups of one size."""

    format = "awq"

    def check(self) -> None:
        self.refuse_storage()
        hint = "type --format gptq, compressed-tensors or hf"
        bad: dict[str, str] = {}
        for name, scheme in self.schemes.items():
            linear = self.source.linears[name]
            if scheme.weight_bits != BITS:
                bad[name] = f"{scheme.weight_bits} bits, allowed: {BITS}"
            elif scheme.act_order:
                bad[name] = "its inputs are reordered (act-order), which this format cannot say"
            elif linear.outputs % PER_WORD:
                bad[name] = f"{linear.outputs} outputs, allowed: multiples of {PER_WORD}"
            elif name == "lm_head":
                bad[name] = "this format has no quantized head"
        self.refuse(bad, hint)
        sizes, usual = group_sizes(self)
        self.refuse({name: f"group size {size}, that of most is {usual}" for name, size in sizes.items() if size != usual}, hint)
        self.group_size = usual
        self.dense = self.dense_linears()
        self.refuse(
            {
                entry: f"stays dense, but its name is part of {name}, which is quantized"
                for entry in self.dense
                for name in self.schemes
                if entry in name
            },
            hint,
        )
        self.check_half_scales()

    def quantization_config(self) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": BITS,
            "group_size": self.group_size,
            "zero_point": True,
            "modules_to_not_convert": self.dense,
        }

    def leaves(self, linear: Linear) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales")

    def tensors(self, linear: Linear) -> dict[str, torch.Tensor]:
        from dspark.converters.layouts import pack_awq_columns, packed_by_columns, zero_points

        weight = self.source.weight(linear)
        return {
            "qweight": packed_by_columns(weight, pack_awq_columns),
            "qzeros": pack_awq_columns(zero_points(weight)),
            "scales": self.half_scales(weight.scales),
        }
