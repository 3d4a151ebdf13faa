"""Packing for the layouts of other programs: the way back of what the readers unpack. Bits are shifted in `kernels.packing` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dspark.kernels.wna16 import Wna16Weight

_COLUMNS = 1024  # outputs that are unpacked at a time; a multiple of every word's lanes


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """A bit stream along the last dimension: uint8 [R, C] -> int32 [R, ceil(C * bits / 32)]."""
    from dspark.kernels.packing import pack_codes

    return pack_codes(codes.t(), bits).t().contiguous()


def pack_awq_columns(codes: torch.Tensor) -> torch.Tensor:
    """AWQ "gemm": uint8 [R, C] of 4-bit codes, C a multiple of 8 -> int32 [R, C / 8], eight columns to a word in AWQ's order."""
    from dspark.kernels.packing import AWQ_LANES

    rows, columns = codes.shape
    ordered = codes.reshape(rows, columns // 8, 8)[:, :, list(AWQ_LANES)].reshape(rows, columns)
    return pack_columns(ordered, 4)


def column_codes(weight: Wna16Weight) -> Iterator[torch.Tensor]:
    """Codes uint8 [K, n] in the order of the inputs, some outputs at a time: those of a whole weight take eight times its room."""
    import torch

    from dspark.kernels.packing import unpack_codes

    for part in weight.qweight.split(_COLUMNS, 1):
        codes = unpack_codes(part, weight.bits, weight.in_features)
        yield codes if weight.perm is None else torch.empty_like(codes).index_copy_(0, weight.perm.long(), codes)


def packed_by_columns(weight: Wna16Weight, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The packed codes of all outputs side by side. pack: codes [K, n] -> words whose columns are these outputs."""
    import torch

    return torch.cat([pack(codes) for codes in column_codes(weight)], 1)


def natural_qweight(weight: Wna16Weight) -> torch.Tensor:
    """int32 [ceil(K * bits / 32), N]: a bit stream along the inputs in their own order, which is GPTQ's `qweight`."""
    from dspark.kernels.packing import pack_codes

    return weight.qweight if weight.perm is None else packed_by_columns(weight, lambda codes: pack_codes(codes, weight.bits))


def group_index(weight: Wna16Weight) -> torch.Tensor:
    """int32 [K]: the group of each input."""
    import torch

    groups = torch.arange(weight.in_features, dtype=torch.int32) // weight.group_size
    return groups if weight.perm is None else torch.empty_like(groups).index_copy_(0, weight.perm.long(), groups)


def zero_points(weight: Wna16Weight) -> torch.Tensor:
    """uint8 [G, N], spelled out where the weight is symmetric."""
    import torch

    return torch.full(weight.scales.shape, 2 ** (weight.bits - 1), dtype=torch.uint8) if weight.zeros is None else weight.zeros
