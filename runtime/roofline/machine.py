"""The machine that this runs on as a `Device`: a GPU by its data sheet, a CPU by what large products and copies reach. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from dspark.kernels.cpu.linear import make_dense_linear, supports
from dspark.kernels.facts import KernelFacts
from dspark.runtime.roofline.devices import Device, find_device

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_BYTES, LEAST_BYTES = 128 << 20, 4 << 20
"""Of the buffers that are copied."""
_PRODUCTS = ((16, 256), (256, 1024))
"""(rows, inputs and outputs) of the products that are timed, small to large."""
_ENOUGH_S = 0.02
"""A product that takes so long is not made larger: some CPUs multiply 16-bit numbers by way of scalars."""
_TURNS = 4
_TICK_S = 1e-6
"""Less than that is no CPU time but a clock that has not moved on."""


def this_gpu() -> tuple[str, int, Device | None]:
    """Name and bytes of the GPU, and its data sheet if it is known."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, properties.total_memory, find_device(properties.name, properties.total_memory)


def measured_cpu(threads: int, arithmetics: Iterable[str], working_bytes: int, turns: int = _TURNS) -> Device:
    """This CPU with so many threads, in under a second where nothing else runs.

    working_bytes: what a step goes through, such as all weights; what fits the cache is timed in the cache. Changes torch's number of
    threads. Rates are measured for `arithmetics` and float32.
    """
    size = min(max(working_bytes, LEAST_BYTES), MOST_BYTES)
    rates: dict[str, float] = {}
    for count in dict.fromkeys((1, threads)):  # some products are slower on several threads than on one
        torch.set_num_threads(count)
        for name in dict.fromkeys((*arithmetics, "float32")):
            rates[name] = max(rates.get(name, 0.0), product_rate(name, turns))
    return Device(
        f"this CPU, {threads} {'thread' if threads == 1 else 'threads'}",
        memory_bandwidth(size, turns),
        rates,
        cache_bytes=cache_bytes(),
        source=f"measured: products of {_PRODUCTS[-1][0]} rows, reading and copying {size >> 20} MiB",
    )


def memory_bandwidth(num_bytes: int, turns: int = _TURNS) -> float:
    """Bytes a second: of reading a buffer, or of copying it if that is faster (a byte copied is one read and one written)."""
    source = torch.ones(num_bytes // 4)
    target = torch.ones_like(source)
    read = num_bytes / _best_s(source.sum, turns)
    return max(read, 2 * num_bytes / _best_s(lambda: target.copy_(source), turns))


def product_rate(arithmetic: str, turns: int = _TURNS) -> float:
    """Multiplications and additions a second of a matrix product: the one that dense layers run, or torch's of int8."""
    best = 0.0
    for rows, width in _PRODUCTS:
        run = _int8_product(rows, width) if arithmetic == "int8" else _product(_DTYPES[arithmetic], rows, width)
        run()  # kernels are made at the first call
        seconds = _best_s(run, turns)
        best = max(best, 2 * rows * width * width / seconds)
        if seconds > _ENOUGH_S:
            break
    return best


def cache_bytes(folder: Path = _CACHES) -> int:
    """Of the processor's last-level cache, 0 where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in folder.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=0)


def _product(dtype: torch.dtype, rows: int, width: int) -> Callable[[], object]:
    x, weight = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    facts = KernelFacts("cpu", dtype, head_dim=64, num_heads=1, num_kv_heads=1, block_size=16)
    if supports("make_dense_linear", facts) is not None:
        return lambda: torch.nn.functional.linear(x, weight)
    linear = make_dense_linear(weight, None, facts)
    return lambda: linear(x)


def _int8_product(rows: int, width: int) -> Callable[[], object]:
    x, weight = torch.ones(rows, width, dtype=torch.int8), torch.ones(width, width, dtype=torch.int8)
    return lambda: torch._int_mm(x, weight)


def _best_s(run: Callable[[], object], turns: int) -> float:
    """The shortest of some runs, each by the clock or by the CPU time of its threads, whichever is less: other work only ever adds, and
    where it takes the cores away from all runs, the clock would make a machine of a thousandth of the speed."""
    threads, best = torch.get_num_threads(), float("inf")
    for _ in range(turns):
        started, used = time.perf_counter(), time.process_time()
        run()
        used, seconds = time.process_time() - used, time.perf_counter() - started
        best = min(best, seconds, max(used / threads, _TICK_S))
    return best
