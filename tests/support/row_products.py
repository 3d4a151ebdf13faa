"""Products of matrices for Triton's interpreter in which a row's bits do not depend on where the row stands, as on tensor cores.

numpy hands them to a library whose rows at a block's edge may be added up in another order (OpenBLAS on a CPU with AVX2 and nothing newer).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


def product_by_terms(a: Any, b: Any, dtype: Any = None) -> np.ndarray:
    """a [..., M, K] @ b [..., K, N], term after term for every element."""
    kind = np.result_type(a, b) if dtype is None else dtype
    a, b = np.asarray(a).astype(kind), np.asarray(b).astype(kind)
    total = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        total += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return total


@contextmanager
def rows_alike() -> Iterator[None]:
    """numpy.matmul is `product_by_terms` meanwhile."""
    with mock.patch.object(np, "matmul", product_by_terms):
        yield
