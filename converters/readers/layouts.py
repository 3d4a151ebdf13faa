"""Which program packed the `qweight` tensors of a checkpoint: several use these names, and their shapes tell them apart."""

from __future__ import annotations

from pathlib import Path

from dspark.converters.readers.base import TensorInfo
from dspark.converters.readers.quantized import QuantizedReader

_MARLIN_WIDTHS = (2, 4)
"""Columns of Marlin's qweight [K / 16, N * bits / 2] over N, for 4 and 8 bits."""


def packed_layout(path: Path) -> str:
    """ "gptq", "awq" or "marlin" by the first module that has codes and scales; "unknown" when there is none or none of the three fits."""
    reader = QuantizedReader(path)
    for module in reader.modules_with("qweight"):
        qweight, scales = reader.info(module, "qweight"), reader.info(module, "scales")
        if qweight is not None and scales is not None and len(qweight.shape) == len(scales.shape) == 2:
            return layout_of(qweight, scales, reader.info(module, "g_idx") is not None, reader.info(module, "qzeros") is not None)
    return "unknown"


def layout_of(qweight: TensorInfo, scales: TensorInfo, has_g_idx: bool, has_zeros: bool) -> str:
    """The layout of one module by its shapes.

    GPTQ's qweight has a column for each output, as its scales have. So may AWQ's gemv layout by chance, in which rows are outputs: then the
    rows agree too, which in GPTQ would be groups of one word.
    """
    (rows, columns), (scale_rows, outputs) = qweight.shape, scales.shape
    if columns == outputs and qweight.dtype == "I32" and (has_g_idx or rows != scale_rows):
        return "gptq"
    if not has_zeros and any(columns == width * outputs for width in _MARLIN_WIDTHS) and qweight.dtype == "I32":
        return "marlin"
    if qweight.dtype == "I16" or columns * 8 == outputs or rows == scale_rows:
        return "awq"
    return "unknown"
