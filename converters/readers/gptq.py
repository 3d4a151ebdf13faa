"""GPTQ checkpoints (AutoGPTQ, GPTQModel, optimum): 2 to 8 bits, codes packed along the inputs, zero points along the outputs.

A module has qweight int32 [ceil(K * bits / 32), N], qzeros int32 [G, ceil(N * bits / 32)], scales [G, N] and perhaps g_idx int32 [K], the
group of each input. weight[n, k] = scales[g, n] * (code[k, n] - zero[g, n]) with g = g_idx[k].

Zero points come in two encodings: v1 ("gptq") stores zero - 1, v2 ("gptq_v2") zero itself. Labels are wrong often enough that the content
decides where it can: a module whose stored values are all the same is symmetric, and its value says which encoding it is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import summarize
from dspark.converters.readers.quantized import (
    SMALLEST_GROUP,
    PackedLinear,
    QuantizedReader,
    canonical,
    order_of_groups,
    split_groups,
    trivial_order,
    whole_groups,
    wna16_scheme,
)
from dspark.runtime.spec.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from dspark.kernels.wna16 import Wna16Weight

BITS = (2, 3, 4, 5, 6, 7, 8)
V1, V2, PLANAR = "gptq", "gptq_v2", "gptq_p"
LEAVES = ("qweight", "qzeros", "scales", "g_idx")
_SKIP = "-:"
_OVERRIDE = "+:"


class GptqReader(QuantizedReader):
    """A GPTQ checkpoint. Raises UnsupportedError for weights that were re-packed for one kernel (Marlin, BitBLAS, ...)."""

    format = "gptq"

    def plan_linears(self) -> dict[str, PackedLinear]:
        label = self.label()
        if label not in (V1, V2, PLANAR):
            what = f"'{self.path}' is packed for the kernel '{label}'; of GPTQ the formats {V1}, {V2} and {PLANAR} are supported"
            raise UnsupportedError(what, "convert the checkpoint that it was made of")
        self._wrapped: dict[str, int] = {}
        self._relabelled: list[str] = []
        plan = {module: self._plan(module) for module in self.modules_with("qweight")}
        if self._relabelled:
            self.notes.append(
                f"zero points of {len(self._relabelled)} layers are stored otherwise than checkpoint_format '{label}' says: the content is "
                "followed"
            )
        if self._wrapped:
            self.notes.append(
                f"{sum(self._wrapped.values())} zero points of {len(self._wrapped)} layers are stored as -1, read as zero 0; some packers "
                "damaged the values beside those: if answers are poor, use a gptq_v2 checkpoint"
            )
        return plan

    def read_weight(self, module: str, linear: PackedLinear) -> Wna16Weight:
        outputs, inputs = linear.shape
        bits = linear.scheme.weight_bits
        scales = self.load(module, "scales")
        zeros = None if linear.scheme.symmetric else self._zeros(module, bits, outputs)
        group = self._group_size(module, inputs, int(scales.shape[0]))
        perm = self._order(module, inputs, int(scales.shape[0]), group) if linear.scheme.act_order else None
        return canonical(self._qweight(module, bits), scales, zeros, bits, inputs, group, perm)

    def label(self) -> str:
        """The config's word for the format, v1 when it has none."""
        config = self.quantization
        if config.get("is_marlin_format") or config.get("quant_method") == "marlin":
            return "marlin"
        return str(config.get("checkpoint_format") or config.get("format") or V1).lower()

    def settings(self, module: str) -> dict[str, Any]:
        """The config as it holds for one module: the first positive rule of `dynamic` that matches the start of its name overrides.

        Rules that leave a module dense ("-:") need no looking at: a module that has codes was quantized.
        """
        config = dict(self.quantization)
        config.setdefault("bits", config.get("w_bit"))
        config.setdefault("group_size", config.get("q_group_size"))
        for pattern, overrides in (config.get("dynamic") or {}).items():
            if pattern.startswith(_SKIP) or not isinstance(overrides, dict):
                continue
            try:
                matches = re.match(pattern.removeprefix(_OVERRIDE), module)
            except re.error as error:
                raise InputError(
                    f"'{self.path}' has a rule {pattern!r} in 'dynamic' that is no pattern ({error})", "repair its config"
                ) from error
            if matches:
                return {**config, **overrides}
        return config

    def _plan(self, module: str) -> PackedLinear:
        qweight, scales = self.info(module, "qweight"), self.info(module, "scales")
        if qweight is None or scales is None or qweight.dtype != "I32" or len(qweight.shape) != 2 or len(scales.shape) != 2:
            raise self.misfit(module, "GPTQ has qweight int32 and scales, two dimensions each", *LEAVES)
        rows, outputs = qweight.shape
        num_groups = scales.shape[0]
        if scales.shape[1] != outputs:
            raise self.misfit(module, "GPTQ has as many columns of qweight as of scales", *LEAVES)
        inputs, bits = self._inputs_and_bits(module, rows)
        group = self._group_size(module, inputs, num_groups)
        symmetric = self._zeros(module, bits, outputs) is None
        act_order = self._order(module, inputs, num_groups, group) is not None
        scheme = wna16_scheme("gptq", bits, inputs, group, symmetric, act_order)
        return PackedLinear(scheme, (outputs, inputs), self.present(module, LEAVES))

    def _inputs_and_bits(self, module: str, rows: int) -> tuple[int, int]:
        """K and bits: K from g_idx, else from config.json, else from rows and bits; bits must be what the config says, where it does."""
        from dspark.kernels.packing import packed_rows

        g_idx, expected = self.info(module, "g_idx"), self.expected_shape(module)
        said = self.settings(module).get("bits")
        inputs = g_idx.shape[0] if g_idx is not None else expected[1] if expected else rows * 32 // int(said or 4)
        fitting = [bits for bits in BITS if packed_rows(inputs, bits) == rows]
        if said is None and len(fitting) == 1:
            return inputs, fitting[0]
        if said not in fitting:
            found = summarize([str(bits) for bits in fitting]) or "no whole number of"
            wanted = f"{rows} rows for {inputs} inputs are {found} bits, the config says {said}"
            raise self.misfit(module, wanted, *LEAVES)
        return inputs, int(said)

    def _group_size(self, module: str, inputs: int, num_groups: int) -> int:
        configured = self.settings(module).get("group_size")
        size = split_groups(inputs, num_groups, int(configured or -1))
        if size is None or whole_groups(inputs, size) < SMALLEST_GROUP:
            raise self.misfit(module, f"{num_groups} groups of {configured} inputs do not make {inputs}", *LEAVES)
        return size

    def _order(self, module: str, inputs: int, num_groups: int, group_size: int) -> torch.Tensor | None:
        """The permutation that makes groups contiguous, or None when they are. Never decided by the config's desc_act."""
        if num_groups == 1 or self.info(module, "g_idx") is None:
            return None
        g_idx = self.load(module, "g_idx")
        if trivial_order(g_idx, group_size):
            return None
        order = order_of_groups(g_idx, num_groups, group_size)
        if order is None:
            what = f"{module}.g_idx of '{self.path}' does not put {group_size} of {inputs} inputs into each of {num_groups} groups"
            raise UnsupportedError(what, "quantize the model again with desc_act false or static_groups true")
        return order

    def _qweight(self, module: str, bits: int) -> torch.Tensor:
        """Codes as one bit stream along the inputs; only the planar form differs from that, for 3, 5, 6 and 7 bits."""
        packed = self.load(module, "qweight")
        if self.label() != PLANAR or bits in (2, 4, 8):
            return packed
        from dspark.kernels.packing import pack_codes, unpack_planes

        if packed.shape[0] % bits:
            raise self.misfit(module, f"the planar form has whole runs of 32 inputs, {bits} rows each", *LEAVES)
        return pack_codes(unpack_planes(packed, bits), bits)

    def _zeros(self, module: str, bits: int, outputs: int) -> torch.Tensor | None:
        """Zero points uint8 [G, N], or None when all are the middle one.

        Raises InputError when the config says symmetric and the values differ.
        """
        from dspark.kernels.packing import add_one_to_lanes, packed_rows, unpack_columns, unpack_planes

        info, scales = self.info(module, "qzeros"), self.info(module, "scales")
        assert scales is not None
        if info is None:
            return None
        if info.dtype != "I32" or info.shape != (scales.shape[0], packed_rows(outputs, bits)):
            raise self.misfit(module, f"qzeros must be int32 {[scales.shape[0], packed_rows(outputs, bits)]}", *LEAVES)
        packed, middle, label = self.load(module, "qzeros"), 2 ** (bits - 1), self.label()
        if label == PLANAR and bits not in (2, 4, 8):
            stored = unpack_planes(packed.t().contiguous(), bits).t()[:, :outputs]
        else:
            stored = unpack_columns(packed, bits, outputs)
        first, symmetric = int(stored[0, 0]), self.settings(module).get("sym")
        lies = (first == middle - 1) != (label == V1)
        constant = first in (middle - 1, middle) and bool((stored == first).all())
        if constant and not (lies and symmetric is False):  # symmetric: the value says which encoding it is
            if lies:
                self._relabelled.append(module)
            return None
        if symmetric is True:
            what = f"{module}.qzeros of '{self.path}' holds other values than {middle - 1} and {middle}, but the config says sym"
            raise InputError(what, "set sym to false in its quantization config if that is what it is")
        if label != V1:
            return stored
        if bits in (2, 4, 8) and self._subtracts_whole_words():
            return unpack_columns(add_one_to_lanes(packed, bits), bits, outputs)
        wrapped = int((stored == 2**bits - 1).sum())
        if wrapped:
            self._wrapped[module] = wrapped
        return (stored.int() + 1) % 2**bits

    def _subtracts_whole_words(self) -> bool:
        """GPTQModel makes v1 zero points by subtracting 0x1111... from whole words, so that a zero point 0 borrows from the next."""
        meta = self.quantization.get("meta")
        return "gptqmodel" in str(meta.get("quantizer", "") if isinstance(meta, dict) else "").lower()
