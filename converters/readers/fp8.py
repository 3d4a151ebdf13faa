"""FP8 checkpoints outside compressed-tensors: weights of float8 (e4m3) with a scale for each block of 128 x 128 (DeepSeek, Qwen), each
output, or the tensor.

    NAME.weight            float8_e4m3fn [N, K]
    NAME.weight_scale_inv  [ceil(N / 128), ceil(K / 128)] (or weight_scale); despite the name the weight is weight * weight_scale_inv

The engine computes with these weights and 16-bit activations; what a checkpoint says about quantizing activations is noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.converters.readers.quantized import DAMAGED, PackedLinear, QuantizedReader
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    from dspark.kernels.fp8 import Fp8Weight

E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale", "activation_scale", "input_scale_ub")
DEFAULT_BLOCK = (128, 128)
WHOLE = -1
_NAN = 0x7F


class Fp8Reader(QuantizedReader):
    """A checkpoint with float8 weights."""

    format = "fp8"

    def plan_linears(self) -> dict[str, PackedLinear]:
        plan = {module: plan_fp8(self, module, self._block(), "fp8") for module in fp8_modules(self)}
        if plan and str(self.quantization.get("activation_scheme", "none")) != "none":
            self.notes.append("activations stay in 16 bits: the checkpoint's FP8 activations are not used")
        return plan

    def read_weight(self, module: str, linear: PackedLinear) -> Fp8Weight:
        return read_fp8(self, module, linear)

    def _block(self) -> tuple[int, int]:
        said = self.quantization.get("weight_block_size")
        return (int(said[0]), int(said[1])) if isinstance(said, list | tuple) and len(said) == 2 else DEFAULT_BLOCK


def fp8_modules(reader: QuantizedReader) -> list[str]:
    """Modules whose weight is float8. Raises UnsupportedError for e5m2, which none of our kernels reads."""
    found = []
    for module in reader.modules_with("weight"):
        info = reader.info(module, "weight")
        if info is not None and info.dtype == E5M2:
            raise UnsupportedError(
                f"{module}.weight of '{reader.path}' is float8 e5m2, supported: e4m3", "convert the unquantized checkpoint"
            )
        if info is not None and info.dtype == E4M3:
            found.append(module)
    return found


def plan_fp8(reader: QuantizedReader, module: str, block: tuple[int, int], method: str) -> PackedLinear:
    """The plan of one float8 module; the shape of its scales says for which blocks they are, `block` the size where it is a grid.

    Raises InputError when scales are missing or fit no blocks.
    """
    weight = reader.info(module, "weight")
    assert weight is not None
    leaf = next((leaf for leaf in SCALES if reader.info(module, leaf) is not None), None)
    if leaf is None or len(weight.shape) != 2:
        raise reader.misfit(module, f"a float8 weight needs two dimensions and {' or '.join(SCALES)}", "weight")
    scale = reader.info(module, leaf)
    assert scale is not None
    found = block_of(scale.shape, (weight.shape[0], weight.shape[1]), block)
    if found is None:
        raise reader.misfit(module, f"scales are for the tensor, each output, or blocks of {block[0]} x {block[1]}", "weight", leaf)
    scheme = QuantScheme("fp8", 8, True, -1, method, storage="fp8", block=found)
    return PackedLinear(scheme, (weight.shape[0], weight.shape[1]), ("weight", leaf, *reader.present(module, UNUSED)))


def block_of(scales: tuple[int, ...], weight: tuple[int, int], block: tuple[int, int]) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale, WHOLE for all of them; None when the scales fit nothing."""
    grid = (-(-weight[0] // block[0]), -(-weight[1] // block[1]))
    if scales == grid:
        return block
    if scales in ((), (1,), (1, 1)):
        return (WHOLE, WHOLE)
    if scales in ((weight[0],), (weight[0], 1)):
        return (1, WHOLE)
    if len(scales) == 2 and scales[0] == weight[0] and weight[1] % scales[1] == 0:
        return (1, weight[1] // scales[1])
    return None


def read_fp8(reader: QuantizedReader, module: str, linear: PackedLinear) -> Fp8Weight:
    """The weight of one float8 module. Raises InputError when it holds NaN."""
    import torch

    from dspark.kernels.fp8 import Fp8Weight

    outputs, inputs = linear.shape
    block = linear.scheme.block
    assert block is not None
    weight = reader.load(module, "weight")
    if bool(((weight.view(torch.uint8) & _NAN) == _NAN).any()):
        raise InputError(f"{module}.weight of '{reader.path}' has values that are not finite", DAMAGED)
    rows, columns = (size if size != WHOLE else length for size, length in zip(block, (outputs, inputs), strict=True))
    scales = reader.load(module, linear.parts[1]).float().reshape(-(-outputs // rows), -(-inputs // columns))
    return Fp8Weight(weight, scales, block)
