"""What every Triton op shares: the reasons to decline a run, and the one place where kernels are launched.

No module that the dispatcher imports imports triton at its top: the jitted code lives in `*_kernels.py`, imported at the first call,
so that a machine without triton can still ask why it was declined.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from dspark.kernels.facts import KernelFacts

MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def decline(facts: KernelFacts) -> str | None:
    """The reason why no Triton kernel takes this run, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if facts.dtype not in DTYPES:
        return f"has no {_name(facts.dtype)}"
    if facts.interpreted:
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the interpreter needs TRITON_INTERPRET=1 before triton is imported"
        if facts.dtype is torch.bfloat16:
            return "bfloat16 arithmetic is wrong under Triton's interpreter"
        return None
    device = capability(facts)
    if device < MIN_CAPABILITY:
        return f"needs compute capability 8.0, the device has {device[0]}.{device[1]}"
    return None


def capability(facts: KernelFacts) -> tuple[int, int]:
    """Compute capability of the device. The interpreter has every instruction. `benchmarks/aot.py` replaces this function."""
    return (9, 0) if facts.interpreted else torch.cuda.get_device_capability()


def decline_head_dim(facts: KernelFacts) -> str | None:
    """The reason for which a kernel that holds whole heads in registers declines."""
    if facts.head_dim > MAX_HEAD_DIM:
        return f"head_dim {facts.head_dim} is above {MAX_HEAD_DIM}"
    return None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **config: Any) -> None:
    """Run a jitted kernel over a grid; an empty grid (an empty batch) runs nothing. No kernel is told the stride of a vector: each must be
    contiguous (see `vector`), or it would read others' elements. Raises ValueError for one that is not.

    `benchmarks/aot.py` replaces this function to compile what would have been launched.
    """
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dim() == 1 and arg.shape[0] > 1 and arg.stride(0) != 1:
            raise ValueError(f"{kernel} takes vectors that are contiguous, not one of {arg.shape[0]} elements {arg.stride(0)} apart")
    if all(grid):
        kernel[grid](*args, **config)


def cache_codes(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """("number", "int8" or "fp8", the caches as kernels take them): float8 as uint8, since GPUs before 8.9 have no such type."""
    if k_cache.dtype == torch.float8_e4m3fn:
        return "fp8", k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    return "int8" if k_cache.dtype == torch.int8 else "number", k_cache, v_cache


def vector(values: torch.Tensor) -> torch.Tensor:
    """A vector [n] as kernels take it: a column of a table is not."""
    return values if values.shape[0] < 2 or values.stride(0) == 1 else values.contiguous()


def require(condition: bool, text: Callable[[], str]) -> None:
    """Raise ValueError(text()) unless the condition holds: a shape that no kernel here can run is a programming error."""
    if not condition:
        raise ValueError(text())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
