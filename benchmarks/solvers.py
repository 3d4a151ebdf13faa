"""What the solvers of `dspark quantize` cost: CPU seconds of calibration statistics and of solving every layer of SmolLM2-135M.

    python benchmarks/solvers.py [--tokens 65536] [--group-size 64]

Weights and inputs are random; neither's values change the work. Run it with OMP_WAIT_POLICY=PASSIVE where other work shares the cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dspark.converters.quantizers.base import DEFAULTS, quantizer
from dspark.converters.quantizers.statistics import CHUNK_TOKENS, LayerStatistics, StatisticsAccumulator
from dspark.converters.threads import one_torch_thread
from dspark.runtime.spec.quant import PRESETS, QuantScheme

NUM_LAYERS = 30
LINEARS = ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,)))
"""Inputs, and the outputs of the linears that read them."""


def cpu_seconds(work: Callable[[], object], repeat: int = 3) -> float:
    """The least of a few runs, after one that compiles."""
    work()
    measured = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        measured.append(time.process_time() - start)
    return min(measured)


def inputs_of(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(tokens, width, generator=generator) * torch.rand(width, generator=generator)).to(dtype)


def accumulate(x: torch.Tensor) -> LayerStatistics:
    accumulator = StatisticsAccumulator(x.shape[1])
    accumulator.add(x)
    return accumulator.finish()


def plain_product(x: torch.Tensor) -> torch.Tensor:
    """The same Hessian the obvious way: float32 products of whole chunks."""
    hessian = torch.zeros(x.shape[1], x.shape[1])
    for chunk in x.split(CHUNK_TOKENS):
        wide = chunk.float()
        hessian.addmm_(wide.t(), wide)
    return hessian


def print_statistics(tokens: int) -> None:
    print(f"statistics of {tokens} tokens, CPU seconds")
    for width in (576, 1536):
        x = inputs_of(tokens, width, torch.bfloat16)
        wide = x.float()
        ours, full, plain = (cpu_seconds(partial(work, data)) for work, data in ((accumulate, x), (accumulate, wide), (plain_product, x)))
        print(f"  {width:5d} inputs: bfloat16 {ours:.2f}, float32 {full:.2f}; the Hessian alone by float32 products {plain:.2f}")


def print_solvers(group_size: int) -> None:
    print(f"all {NUM_LAYERS} layers of SmolLM2-135M, CPU seconds")
    statistics = [accumulate(inputs_of(4096, width, torch.bfloat16)) for width, _ in LINEARS]
    weights = {(rows, width): torch.randn(rows, width) * 0.05 for width, outputs in LINEARS for rows in outputs}
    for method in ("rtn", "gptq"):
        for scheme in PRESETS.values():
            if method == "gptq" and scheme.storage == "fp8":
                continue
            grouped = replace(scheme, group_size=group_size) if scheme.storage == "wna16" else scheme
            seconds = cpu_seconds(partial(solve_layer, method, grouped, weights, statistics))
            print(f"  {method:4s} {grouped.describe():34s} {seconds * NUM_LAYERS:6.1f}")


def solve_layer(method: str, scheme: QuantScheme, weights: dict[tuple[int, int], torch.Tensor], statistics: list[LayerStatistics]) -> None:
    """All linears of one layer, with nothing left over from the one before."""
    for (width, outputs), observed in zip(LINEARS, statistics, strict=True):
        observed.factors.clear()
        for rows in outputs:
            quantizer(method)(weights[rows, width], scheme, observed if method == "gptq" else None, DEFAULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--group-size", type=int, default=64)
    options = parser.parse_args()
    with one_torch_thread():
        print_statistics(options.tokens)
        print_solvers(options.group_size)


if __name__ == "__main__":
    main()
