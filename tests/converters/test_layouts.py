"""The words of other programs' layouts, computed by hand."""

import torch

from dspark.converters.layouts import column_codes, group_index, natural_qweight, pack_awq_columns, pack_columns, zero_points
from dspark.kernels.packing import pack_codes, unpack_awq_columns, unpack_columns
from dspark.kernels.wna16 import Wna16Weight


def words(packed: torch.Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08X}" for word in packed.flatten()]


def codes(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.uint8)


def test_columns_follow_each_other_from_the_lowest_bit() -> None:
    assert words(pack_columns(codes(1, 2, 3, 4, 5, 6, 7, 8), 4)) == ["87654321"]
    assert words(pack_columns(codes(1, 2, 128, 255), 8)) == ["FF800201"]
    assert words(pack_columns(codes(*[0, 1, 2, 3] * 4), 2)) == ["E4E4E4E4"]


def test_three_bit_columns_run_over_the_words() -> None:
    assert words(pack_columns(codes(*[k % 8 for k in range(32)]), 3)) == ["88FAC688", "C688FAC6", "FAC688FA"]
    assert words(pack_columns(codes(*[3] * 32), 3)) == ["DB6DB6DB", "B6DB6DB6", "6DB6DB6D"]  # v1 zero points of a symmetric weight


def test_awq_puts_even_columns_before_odd_ones() -> None:
    assert words(pack_awq_columns(codes(0, 1, 2, 3, 4, 5, 6, 7))) == ["75316420"]


def test_packing_is_undone_by_the_readers() -> None:
    values = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(unpack_awq_columns(pack_awq_columns(values)), values)
    assert torch.equal(unpack_columns(pack_columns(values % 8, 3), 3, 64), values % 8)


def test_a_reordered_weight_goes_back_to_the_order_of_its_inputs() -> None:
    """diag(H) = 1 8 2 7 3 6 4 5 in groups of 4: inputs 1, 3, 5, 7 are the first group, 0, 2, 4, 6 the second."""
    natural = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 2)
    perm = torch.tensor([1, 3, 5, 7, 0, 2, 4, 6], dtype=torch.int32)
    scales = torch.ones(2, 2, dtype=torch.float16)
    weight = Wna16Weight(pack_codes(natural[perm.long()], 4), scales, None, 4, 8, perm)
    assert group_index(weight).tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert words(natural_qweight(weight)) == ["76543210", "76543210"]
    assert torch.equal(torch.cat(list(column_codes(weight)), 1), natural)


def test_symmetric_zero_points_are_spelled_out() -> None:
    weight = Wna16Weight(torch.zeros(4, 3, dtype=torch.int32), torch.ones(2, 3), None, 4, 32)
    assert zero_points(weight).tolist() == [[8, 8, 8]] * 2
    assert group_index(weight).tolist() == [0] * 16 + [1] * 16
