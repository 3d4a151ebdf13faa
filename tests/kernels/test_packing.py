"""Bit layouts, by hand: the words below are worked out on paper from each format's rule."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.packing import (
    add_one_to_lanes,
    pack_codes,
    packed_rows,
    unpack_awq_columns,
    unpack_awq_fast,
    unpack_codes,
    unpack_columns,
    unpack_planes,
    unpack_whole_lanes,
)


def column(codes: list[int]) -> torch.Tensor:
    """Codes of one output, [K, 1]."""
    return torch.tensor(codes, dtype=torch.uint8)[:, None]


def words(*values: int) -> torch.Tensor:
    """int32 words from their unsigned values."""
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32)


def only(position: int, code: int, count: int = 32) -> list[int]:
    return [code if index == position else 0 for index in range(count)]


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, [1, 2, 3, 4, 5, 6, 7, 8], (0x87654321,)),
        (8, [1, 2, 128, 255], (0xFF800201,)),
        (2, [0, 1, 2, 3] * 4, (0xE4E4E4E4,)),
        (3, [k % 8 for k in range(32)], (0x88FAC688, 0xC688FAC6, 0xFAC688FA)),
        (3, only(10, 7), (0xC0000000, 0x00000001, 0)),  # two bits in the first word, one in the second
        (3, only(21, 7), (0, 0x80000000, 0x00000003)),  # one and two
        (3, only(11, 7), (0, 0x0000000E, 0)),
        (3, only(20, 7), (0, 0x70000000, 0)),
        (3, only(22, 7), (0, 0, 0x0000001C)),
        (3, only(31, 7), (0, 0, 0xE0000000)),
        (4, [15, 15, 15], (0x00000FFF,)),  # the tail of a word is zero
        (5, only(6, 31, 7), (0xC0000000, 0x00000007)),
    ],
)
def test_codes_are_one_bit_stream_along_the_inputs(bits: int, codes: list[int], packed: tuple[int, ...]) -> None:
    assert torch.equal(pack_codes(column(codes), bits)[:, 0], words(*packed))
    assert unpack_codes(words(*packed)[:, None], bits, len(codes))[:, 0].tolist() == codes
    assert unpack_columns(words(*packed)[None], bits, len(codes))[0].tolist() == codes


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("inputs", [1, 31, 32, 96, 100])
def test_packing_is_undone(bits: int, inputs: int) -> None:
    codes = torch.randint(0, 2**bits, (inputs, 5), generator=torch.Generator().manual_seed(inputs), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (packed_rows(inputs, bits), 5)
    assert torch.equal(unpack_codes(packed, bits, inputs), codes)


def test_awq_words_hold_their_columns_in_another_order() -> None:
    assert unpack_awq_columns(words(0x75316420)[None])[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert unpack_awq_columns(words(0x0000000F, 0x000000F0)[None])[0].nonzero().flatten().tolist() == [0, 8 + 2]


def test_awq_fast_layout() -> None:
    """Single codes: (output 1, input 0) is the low nibble of int16 16 of the first row; (output 0, input 1) that of int16 1."""
    for position, place in ((16, (1, 0)), (1, (0, 1))):
        packed = torch.zeros(1, 64, dtype=torch.int16)
        packed[0, position] = 0x000F
        codes = unpack_awq_fast(packed)
        assert codes.nonzero().tolist() == [list(place)] and int(codes[place]) == 15
    row = [0x8080, 0x9191, 0xA2A2, 0xB3B3, 0xC4C4, 0xD5D5, 0xE6E6, 0xF7F7] * 2
    packed = torch.zeros(1, 64, dtype=torch.int16)
    packed[0, :16] = torch.tensor([value - 2**16 if value >= 2**15 else value for value in row], dtype=torch.int16)
    assert unpack_awq_fast(packed)[0].tolist() == [k % 16 for k in range(64)]
    assert int(unpack_awq_fast(packed)[1:].sum()) == 0


def test_planes_of_three_bits() -> None:
    """k % 8: two low bits in two words, the top bit of all 32 in a third."""
    packed = words(0xE4E4E4E4, 0xE4E4E4E4, 0xF0F0F0F0)[:, None]
    assert unpack_planes(packed, 3)[:, 0].tolist() == [k % 8 for k in range(32)]
    assert unpack_planes(words(0x87654321)[:, None].expand(4, 1).contiguous(), 4)[:8, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_whole_lanes_leave_bits_over() -> None:
    """Three bits, ten codes a word: code 10 begins the second word."""
    packed = words(0o7654321076 & 0x3FFFFFFF, 0o5)[None]
    assert unpack_whole_lanes(packed, 3, 11)[0].tolist() == [6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5]


def test_one_added_to_lanes_carries() -> None:
    """Zero points 0 .. 7 less one in whole words: the borrow of the first lane is paid back."""
    stored = words(0x654320FF)[None]
    assert unpack_columns(add_one_to_lanes(stored, 4), 4, 8)[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert torch.equal(add_one_to_lanes(words(0x7F7F7F7F)[None], 8), words(0x80808080)[None])
    assert torch.equal(add_one_to_lanes(words(0x55555555)[None], 2), words(0xAAAAAAAA)[None])
