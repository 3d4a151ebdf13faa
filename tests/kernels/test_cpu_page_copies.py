"""Copies inside a paged cache on CPU, against the reference on the same numbers."""

import pytest
import torch

from dspark.kernels.cpu.page_copies import copy_blocks, copy_slots
from dspark.kernels.reference import elementwise as reference

BLOCKS, HEADS, BLOCK, HEAD = 9, 3, 16, 32
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    k, v = (torch.randint(-100, 100, (BLOCKS, HEADS, BLOCK, HEAD)).to(dtype) for _ in range(2))
    return k, v


def inside_out(k: torch.Tensor) -> torch.Tensor:
    """Keys as the CPU kernels keep them, dimension-major, and back from [.., HEAD, BLOCK]."""
    return k.transpose(2, 3).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_whole_and_nothing_else_is_touched(dtype: torch.dtype) -> None:
    k, v = caches(dtype)
    want_k, want_v = k.clone(), v.clone()
    pairs = torch.tensor([[1, 5], [8, 0], [3, 7]])  # columns of a table of pairs are not contiguous
    want_k[[5, 0, 7]], want_v[[5, 0, 7]] = k[[1, 8, 3]].clone(), v[[1, 8, 3]].clone()
    copy_blocks(k, v, pairs[:, 0], pairs[:, 1])
    assert torch.equal(k.view(torch.uint8), want_k.view(torch.uint8)) and torch.equal(v.view(torch.uint8), want_v.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("pairs", [[], [(3, 20)], [(20, 19), (37, 20), (38, 21), (143, 22)]], ids=["none", "one", "a path"])
def test_slots_are_copied_as_the_reference_does(dtype: torch.dtype, pairs: list[tuple[int, int]]) -> None:
    """A path that moves towards its beginning: a slot is the target of one pair and the source of an earlier one."""
    k, v = caches(dtype)
    want_k, want_v = k.clone(), v.clone()
    source, target = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in range(2))
    reference.copy_slots(want_k, want_v, source, target)
    stored = inside_out(k).view(k.shape)
    copy_slots(stored, v, source, target)
    assert torch.equal(stored.view(BLOCKS, HEADS, HEAD, BLOCK).transpose(2, 3), want_k) and torch.equal(v, want_v)
