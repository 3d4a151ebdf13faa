"""Linears of 8-bit floating-point numbers on Triton: name and signature of `kernels.reference.linear.make_fp8_linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows
from dspark.kernels.reference.linear import rounding_inputs
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.gemm import Product, multiply
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.quantize import quantize_rows
from dspark.kernels.triton.tuning.book import book_of
from dspark.kernels.triton.tuning.keys import ProductKind

FP8_CAPABILITY, HOPPER = (8, 9), (9, 0)
UNIT = 256.0
"""What 1 of a widened number stands for; see `codes_kernels.unit`."""


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op."""
    return launcher.decline(facts)


def decline_fp8_product(facts: KernelFacts) -> str | None:
    """Why inputs are not multiplied as float8 here but rounded to such numbers and multiplied in their own dtype, or None."""
    capability = launcher.capability(facts)
    if capability < FP8_CAPABILITY:
        return f"products of float8 numbers need compute capability 8.9, the device has {capability[0]}.{capability[1]}"
    return None


def swaps(tile: GemmTile, facts: KernelFacts) -> bool:
    """Whether weights are the rows of a product of float8 numbers: where Hopper would not use its instruction for them otherwise."""
    return tile.rows < 64 <= tile.cols and launcher.capability(facts) >= HOPPER


def make_fp8_linear(weight: Fp8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, K] @ weight.T + bias -> [T, N], float32 accumulation; inputs rounded to float8 where the weight says so.

    Codes are multiplied as they are and the sums scaled, where the reference rounds code * scale to x's dtype first: fewer roundings.
    Raises ValueError for blocks whose inputs 16 (32 with float8 inputs) does not divide.
    """
    if weight.inputs is None or facts.exact_activations:
        return WidenedLinear(weight, bias, facts)
    if decline_fp8_product(facts):
        return rounding_inputs(WidenedLinear(weight, bias, facts), weight, facts)
    return Fp8Linear(weight, bias, facts)


class ScaledCodes:
    """float8 codes [..., N, K] with their scales as the kernel takes them; one more dimension in front for experts.

    scales: float32 [..., N] times `unit`, None with `blocks`, where each block of inputs has its own. depth: the largest K step.
    own: the kernel's arguments. Raises ValueError where no step of at least `least_step` divides a block.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], unit: float, least_step: int) -> None:
        codes, scales = codes.contiguous(), scales.float() * unit
        out_features, in_features = codes.shape[-2:]
        outputs = out_features if block[0] == -1 else block[0]
        inputs = in_features if block[1] == -1 else block[1]
        self.blocks = inputs < in_features
        self.step = inputs if self.blocks else 0
        self.shape = int(out_features), int(in_features)
        self.depth = 128
        self.scales: torch.Tensor | None = None
        if self.blocks:
            self.depth = next((depth for depth in (128, 64, 32, 16) if inputs % depth == 0), 0)
            launcher.require(
                self.depth >= least_step, lambda: f"the Triton fp8 kernel needs blocks of inputs that {least_step} divides, not {inputs}"
            )
        else:
            self.scales = scales.repeat_interleave(outputs, -2)[..., :out_features, 0].contiguous()
        block_scales = scales.contiguous()
        self.own: tuple[Any, ...] = (codes, block_scales, *block_scales.shape[-2:], outputs, inputs)

    def as_bytes(self) -> tuple[Any, ...]:
        """`own` with the codes as uint8, for GPUs that have no such type."""
        return self.own[0].view(torch.uint8), *self.own[1:]

    def kind(self, facts: KernelFacts, widened: bool, num_experts: int = 0, rows: str = "") -> ProductKind:
        """What tiles of such a weight are looked up by. widened: multiplied in x's dtype. rows: which rows experts have."""
        storage = ", ".join([f"blocks of {self.step}" if self.blocks else "channels", *([rows] if rows else [])])
        return ProductKind(
            "fp8 widened" if widened else "fp8",
            storage,
            *self.shape,
            str(facts.dtype).removeprefix("torch."),
            facts.dtype.itemsize if widened else 1,
            8,
            min(self.depth, 64) if widened else self.depth,
            self.step,
            num_experts,
            facts.deterministic,
        )


class Fp8Linear:
    """x [T, K], or the same as `QuantizedRows`, -> [T, N]: float8 numbers on both sides."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> None:
        self._codes = ScaledCodes(weight.qweight, weight.scales, weight.block, 1.0, 32)
        self._bias, self._facts, self.weight_bytes = bias, facts, self._codes.own[0].nbytes
        self.takes = InputFormat("fp8") if weight.inputs == "dynamic" else InputFormat("fp8 static", weight.input_scale)
        self._tiles = book_of(facts).products(self._codes.kind(facts, widened=False), self)

    def __call__(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.takes)
        return self.multiply(rows, self._tiles[rows.codes.shape[0]])

    def sample(self, num_rows: int) -> QuantizedRows:
        """Random inputs."""
        return quantize_rows(random_rows(num_rows, self._codes, self._facts), self.takes)

    def multiply(self, inputs: QuantizedRows, tile: GemmTile) -> torch.Tensor:
        """The product with a tile."""
        from dspark.kernels.triton.fp8_kernels import fp8_kernel

        codes = self._codes
        out = torch.empty(inputs.codes.shape[0], codes.shape[0], dtype=inputs.dtype, device=inputs.codes.device)
        product = Product(inputs.codes, out, inputs.scales, codes.scales, self._bias)
        multiply(fp8_kernel, product, codes.own, tile, BLOCKS=codes.blocks, WIDEN=False, SWAP=swaps(tile, self._facts))
        return out


class WidenedLinear:
    """x [T, K] -> [T, N]: float8 weights, widened on their way to the tensor cores, and inputs as they are. Needs no float8 in hardware."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> None:
        self._codes = ScaledCodes(weight.qweight, weight.scales, weight.block, UNIT, 16)
        self._bias, self._facts, self.weight_bytes = bias, facts, self._codes.own[0].nbytes
        self._tiles = book_of(facts).products(self._codes.kind(facts, widened=True), self)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self._tiles[x.shape[0]])

    def sample(self, num_rows: int) -> torch.Tensor:
        """Random inputs."""
        return random_rows(num_rows, self._codes, self._facts)

    def multiply(self, inputs: torch.Tensor, tile: GemmTile) -> torch.Tensor:
        """The product with a tile."""
        from dspark.kernels.triton.fp8_kernels import fp8_kernel

        x, codes = inputs if inputs.stride(-1) == 1 else inputs.contiguous(), self._codes
        out = torch.empty(x.shape[0], codes.shape[0], dtype=x.dtype, device=x.device)
        product = Product(x, out, scales=codes.scales, bias=self._bias)
        multiply(fp8_kernel, product, codes.as_bytes(), tile, BLOCKS=codes.blocks, WIDEN=True, SWAP=False)
        return out


def random_rows(num_rows: int, codes: ScaledCodes, facts: KernelFacts) -> torch.Tensor:
    """Inputs of a linear [num_rows, K]."""
    return torch.randn(num_rows, codes.shape[1], device=codes.own[0].device).to(facts.dtype)
