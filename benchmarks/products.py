"""GFLOP/s of one core in products of SmolLM2's shapes: this package's, and torch's of the same weight, by the number of rows.

    python benchmarks/products.py [--rows 1,2,4,5,8,64,256] [--cold]

bf16: `make_dense_linear` as a run takes it, beside torch's linear in bfloat16 and in float32, and oneDNN's with weights re-laid. w8a8,
w4a16: as a run takes them, the quantization of inputs included. Operations are 2 * rows * K * N; the least of three timings counts.
--cold goes through many weights of a shape in turn, more than the caches hold, as the layers of a model do; without it one weight stays
in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numba
import torch

from dspark.kernels.cpu.int8 import make_int8_linear
from dspark.kernels.cpu.linear import library_product, make_dense_linear, make_wna16_linear
from dspark.kernels.facts import KernelFacts
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.packing import pack_codes
from dspark.kernels.wna16 import Wna16Weight

SHAPES = ((576, 1536), (1536, 576), (576, 960), (576, 49152))
"""Inputs and outputs: gate or up, down, q with k and v, head."""
NAMES = ["torch bf16", "torch fp32", "onednn bf16", "bf16", "w8a8", "w4a16"]
Product = Callable[[torch.Tensor], torch.Tensor]


COLD_BYTES = 128 << 20
"""Weights that --cold goes through, as bfloat16: several times what two cores have of the last cache."""


def products(inputs: int, outputs: int, names: list[str]) -> dict[str, Product]:
    """Name -> x [M, K] bfloat16 -> y, of new weights."""
    facts = KernelFacts("cpu", torch.bfloat16, head_dim=64, num_heads=9, num_kv_heads=3, block_size=16)
    weight = torch.randn(outputs, inputs).bfloat16()
    wide, thin = weight.float(), weight.clone()
    codes = torch.randint(0, 16, (inputs, outputs), dtype=torch.uint8)
    packed = Wna16Weight(pack_codes(codes, 4), torch.rand(inputs // 64, outputs) / 64, None, 4, inputs)
    integers = Int8Weight(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) / 100)
    makers: dict[str, Callable[[], Product]] = {
        "torch bf16": lambda: lambda x: torch.nn.functional.linear(x, thin),
        "torch fp32": lambda: lambda x: torch.nn.functional.linear(x.float(), wide),
        "onednn bf16": lambda: library_product(weight, None),
        "bf16": lambda: make_dense_linear(weight, None, facts),
        "w8a8": lambda: make_int8_linear(integers, None, facts),
        "w4a16": lambda: make_wna16_linear(packed, None, facts),
    }
    return {name: makers[name]() for name in names}


def in_turn(made: list[Product]) -> Product:
    """A product that takes the next of several weights each time."""
    turn = itertools.cycle(made)
    return lambda x: next(turn)(x)


def rate(product: Product, x: torch.Tensor, operations: int) -> float:
    """GFLOP/s."""
    product(x)
    started = time.perf_counter()
    product(x)
    count = max(1, int(0.1 / max(time.perf_counter() - started, 1e-6)))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(count):
            product(x)
        best = min(best, (time.perf_counter() - started) / count)
    return operations / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 5, 8, 64, 256])
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    torch.manual_seed(0)
    for inputs, outputs in SHAPES:
        copies = -(-COLD_BYTES // (2 * inputs * outputs)) if args.cold else 1
        made = {name: in_turn([products(inputs, outputs, [name])[name] for _ in range(copies)]) for name in NAMES}
        for rows in args.rows:
            x = torch.randn(rows, inputs).bfloat16()
            found = {name: rate(product, x, 2 * rows * inputs * outputs) for name, product in made.items()}
            print(
                f"{inputs:5} x {outputs:5}, {rows:3} rows: " + "  ".join(f"{name} {value:.0f}" for name, value in found.items()), flush=True
            )


if __name__ == "__main__":
    main()
