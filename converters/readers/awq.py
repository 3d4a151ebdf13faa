"""AWQ checkpoints (AutoAWQ, llm-awq, GPTQModel), 4 bits, in the three layouts that they are written in; each module's shapes say which.

    gemm        qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N]; the eight columns of a word in another order
    gemv        qweight int32 [N, K / 8], qzeros int32 [N, Z], scales [N, 8 * Z]; in order, padded beyond G
    gemv_fast   qweight int16 [N / 4, K], qzeros or scaled_zeros float16 [Z, N] = -scale * zero, scales [Z, N]; also llm-awq's

weight[n, k] = scale * (code - zero). Modules of `modules_to_not_convert` are plain weights and found as such: the list is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.converters.readers.base import TensorInfo
from dspark.converters.readers.quantized import SMALLEST_GROUP, PackedLinear, QuantizedReader, canonical, wna16_scheme
from dspark.runtime.spec.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from dspark.kernels.wna16 import Wna16Weight

BITS = 4
MIDDLE = 8
LEAVES = ("qweight", "qzeros", "scaled_zeros", "scales")
GEMM, GEMV, GEMV_FAST = "gemm", "gemv", "gemv_fast"
_ZERO_TOLERANCE = 2.0**-8  # of a zero point: float16 keeps eleven bits of -scale * zero


class AwqReader(QuantizedReader):
    """An AWQ checkpoint."""

    format = "awq"

    def plan_linears(self) -> dict[str, PackedLinear]:
        bits = self.quantization.get("bits", self.quantization.get("w_bit", BITS))
        if bits != BITS:
            raise UnsupportedError(f"'{self.path}' is AWQ of {bits} bits, supported: {BITS}", "convert another quantization of this model")
        return {module: self._plan(module) for module in self.modules_with("qweight")}

    def read_weight(self, module: str, linear: PackedLinear) -> Wna16Weight:
        from dspark.kernels.packing import pack_codes

        layout, outputs, inputs, group = self._layout(module)
        qweight = pack_codes(self._codes(module, layout).t(), BITS) if layout != GEMV else self.load(module, "qweight").t()
        zeros = None if linear.scheme.symmetric else self._zeros(module, layout, outputs, inputs // group)
        return canonical(qweight, self._scales(module, layout, inputs // group), zeros, BITS, inputs, group)

    def _plan(self, module: str) -> PackedLinear:
        layout, outputs, inputs, group = self._layout(module)
        zeros = self._zeros(module, layout, outputs, inputs // group)
        symmetric = zeros is None or bool((zeros == MIDDLE).all())
        scheme = wna16_scheme("awq", BITS, inputs, group, symmetric)
        return PackedLinear(scheme, (outputs, inputs), self.present(module, LEAVES))

    def _layout(self, module: str) -> tuple[str, int, int, int]:
        """(layout, N, K, group size) by the shapes. Raises UnsupportedError when they are of none of the three."""
        qweight, scales = self.info(module, "qweight"), self.info(module, "scales")
        if qweight is None or scales is None or len(qweight.shape) != 2 or len(scales.shape) != 2:
            raise self.misfit(module, "AWQ has qweight and scales, two dimensions each", *LEAVES)
        layout = awq_layout(qweight, scales)
        rows, columns = qweight.shape
        if layout == GEMM:
            if rows % scales.shape[0]:
                raise self.misfit(module, f"{scales.shape[0]} groups do not divide {rows} inputs", *LEAVES)
            return GEMM, columns * 8, rows, rows // scales.shape[0]
        if layout is None:
            what = f"{module} of '{self.path}': qweight {list(qweight.shape)} beside scales {list(scales.shape)} is no layout that is read"
            raise UnsupportedError(f"{what} (AWQ {GEMM}, {GEMV}, {GEMV_FAST})", "convert a checkpoint of version gemm")
        outputs, inputs = (rows, columns * 8) if layout == GEMV else (rows * 4, columns)
        padded = scales.shape[1] if layout == GEMV else scales.shape[0]
        group = self._padded_group(inputs, padded)
        if group is None:
            raise self.misfit(module, f"no group size makes {padded} padded groups of {inputs} inputs", *LEAVES)
        return layout, outputs, inputs, group

    def _padded_group(self, inputs: int, padded: int) -> int | None:
        """Group size where the number of groups is padded: the config's, else the one that gives this padding."""
        configured = self.quantization.get("group_size", self.quantization.get("q_group_size"))
        sizes = [int(configured)] if configured else [128, 64, 32]
        sizes = [inputs if size == -1 else size for size in sizes]
        fitting = [size for size in sizes if size >= SMALLEST_GROUP and inputs % size == 0 and padded_groups(inputs, size) == padded]
        return fitting[0] if len(fitting) == 1 else None

    def _codes(self, module: str, layout: str) -> torch.Tensor:
        """uint8 [N, K]"""
        from dspark.kernels.packing import unpack_awq_columns, unpack_awq_fast

        packed = self.load(module, "qweight")
        if layout == GEMM:
            return unpack_awq_columns(packed).t()
        if packed.shape[1] % 64:
            raise self.misfit(module, "the gemv_fast layout has inputs that 64 divides", *LEAVES)
        return unpack_awq_fast(packed)

    def _scales(self, module: str, layout: str, num_groups: int) -> torch.Tensor:
        """[G, N]"""
        scales = self.load(module, "scales")
        return scales[:, :num_groups].t() if layout == GEMV else scales[:num_groups]

    def _zeros(self, module: str, layout: str, outputs: int, num_groups: int) -> torch.Tensor | None:
        """uint8 [G, N], or None when the module has none."""
        from dspark.kernels.packing import unpack_awq_columns, unpack_columns

        leaf = next((leaf for leaf in ("qzeros", "scaled_zeros") if self.info(module, leaf) is not None), None)
        if leaf is None:
            return None
        stored = self.load(module, leaf)
        shape = self._zeros_shape(module, layout)
        if tuple(stored.shape) != shape:
            raise self.misfit(module, f"{leaf} must be {list(shape)}", *LEAVES)
        if layout == GEMM:
            return unpack_awq_columns(stored)
        if layout == GEMV:
            return unpack_columns(stored, BITS, num_groups).t()
        return self._whole_zeros(module, stored[:num_groups].float(), self.load(module, "scales")[:num_groups].float())

    def _zeros_shape(self, module: str, layout: str) -> tuple[int, ...]:
        scales = self.info(module, "scales")
        assert scales is not None
        if layout == GEMV_FAST:
            return scales.shape
        return (scales.shape[0], scales.shape[1] // 8)

    def _whole_zeros(self, module: str, products: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Zero points from float16 -scale * zero: whole numbers but for that rounding, which is undone.

        Raises InputError when they are not.
        """
        import torch

        safe = torch.where(scales == 0, torch.ones_like(scales), scales)
        ratio = -products / safe
        zeros = ratio.round()
        good = ((ratio - zeros).abs() <= _ZERO_TOLERANCE * zeros.clamp(min=1)) & (zeros >= 0) & (zeros < 2**BITS)
        if not bool(good.all()):
            what = f"{module} of '{self.path}' has zero points that are no whole numbers of 0 .. {2**BITS - 1}"
            raise InputError(what, "convert a checkpoint of version gemm")
        return zeros.to(torch.uint8)


def awq_layout(qweight: TensorInfo, scales: TensorInfo) -> str | None:
    """Which layout a module's shapes are of, or None."""
    if qweight.dtype == "I16":
        return GEMV_FAST if qweight.shape[0] * 4 == scales.shape[1] else None
    if qweight.dtype != "I32":
        return None
    if qweight.shape[1] * 8 == scales.shape[1]:
        return GEMM
    return GEMV if qweight.shape[0] == scales.shape[0] else None


def padded_groups(inputs: int, group_size: int) -> int:
    """Groups that the gemv layouts have room for: whole words of eight, two at a time for groups of 64, four for 32."""
    multiple = 1 if group_size >= 128 else 2 if group_size >= 64 else 4
    words = -(-(inputs // group_size) // 8)
    return -(-words // multiple) * multiple * 8
