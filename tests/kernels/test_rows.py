"""Rounded row counts: the extra rows are never seen, and there are few sizes."""

import torch

from dspark.kernels.cpu.rows import empty_rows, rounded_rows, with_room


def test_few_sizes_cover_all_row_counts() -> None:
    """Each size is a compiled kernel for each weight shape: a job that meets every count must not compile one for each."""
    sizes = [rounded_rows(n) for n in range(1, 577)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert max(size / n for n, size in enumerate(sizes, 1) if n > 16) < 1.2
    assert len(set(sizes)) <= 45
    assert rounded_rows(64) == 64 and rounded_rows(1) == 1 and rounded_rows(512) == 512


def test_room_is_used_in_place() -> None:
    x = empty_rows(5, 7, torch.float32)
    x.fill_(1.0)
    wide = with_room(x, 8)
    assert wide.shape == (8, 7) and wide.data_ptr() == x.data_ptr()


def test_a_tensor_without_room_is_copied() -> None:
    """A view into a bigger matrix: what lies behind it belongs to somebody else or is not there at all."""
    whole = torch.arange(12.0).view(4, 3)
    for x in (whole, whole[1:], whole.t()):
        wide = with_room(x, 8)
        assert wide.shape[0] == 8 and torch.equal(wide[: x.shape[0]], x)
        assert wide.data_ptr() != x.data_ptr()
