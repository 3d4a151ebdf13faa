"""Row counts of matrix products, rounded up to few sizes.

oneDNN compiles a kernel for every number of rows it meets: 0.7 ms and 0.6 MB each, for each of a model's weight shapes. A long job meets
every number up to its token budget, a gigabyte of kernels. So products run on rounded row counts; the tensors that feed them are allocated
with room for the extra rows, whose contents are arbitrary and whose results are dropped.
"""

import torch


def rounded_rows(num_rows: int) -> int:
    """The next size that products run at: 1, 2, then multiples of 4 up to 64, of 8 up to 128, of 16 up to 256, of 32 beyond."""
    if num_rows <= 2:
        return num_rows
    step = 4 if num_rows <= 64 else 8 if num_rows <= 128 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def empty_rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised matrix [num_rows, width] with room behind it for the rounded number of rows."""
    rounded = rounded_rows(num_rows)
    rows = torch.empty((rounded, width), dtype=dtype)
    return rows if rounded == num_rows else rows[:num_rows]


def with_room(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [M, K] as [num_rows, K], num_rows >= M: in place where its memory goes on (see empty_rows), else copied. The rows from M on are
    arbitrary."""
    width = x.shape[1]
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() and room >= num_rows * width:
        return x.as_strided((num_rows, width), (width, 1))
    copy = x.new_empty((num_rows, width))
    copy[: x.shape[0]] = x
    return copy
