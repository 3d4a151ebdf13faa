"""How converters use the cores: one torch thread, and a pool of threads over slices of rows.

Elementwise work on slices that fit the cache gains nothing from OpenMP inside one operation, and OpenMP's spinning threads lose a factor of
five as soon as another process wants the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from dspark.runtime.spec.cores import usable_cores

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch operations use the calling thread only inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def map_slices(function: Callable[[T], R], slices: Iterable[T]) -> list[R]:
    """The function over slices on all usable cores, results in order (so that sums over them do not depend on timing).

    The threads take over the caller's inference mode: what it allocated there may be written nowhere else.
    """
    import torch

    mode = torch.is_inference_mode_enabled()

    def run(piece: T) -> R:
        with torch.inference_mode(mode):
            return function(piece)

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(run, slices))
