"""Adapters on a quantized base: each adapted layer is dequantized, merged in float32 and quantized again with the scheme that it had.

Layers without adapter keep their integers bit for bit. What is quantized again loses about as much a second time, so the loss is measured:
the noise of the second quantization for every layer, and, when the full-precision base is given, the distance to an adapter merged into
that, before and after. Keeping the adapted layers dense instead loses nothing and costs their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark.converters.lora.adapter import Adapter
from dspark.converters.lora.reader import LoraReader
from dspark.converters.packed import PackedSource
from dspark.converters.readers.base import CheckpointReader, TensorInfo
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    import torch

METHOD = "rtn"
_FP8_MAX, _INT8_MAX = 448.0, 127.0


@dataclass(frozen=True)
class _Loss:
    """Of one layer. sqnr_db: of the second quantization. before, after: relative distance to the merged full-precision weight, or None."""

    sqnr_db: float | None
    num_bytes: int
    before: float | None = None
    after: float | None = None


class QuantizedLoraReader(LoraReader):
    """`base`, whose linears are quantized, with adapters merged in. requantize False: adapted layers become dense.

    full_base: the same model unquantized, for measuring alone. Raises InputError when its layers have other shapes.
    """

    def __init__(
        self, base: CheckpointReader, adapters: Sequence[Adapter], requantize: bool = True, full_base: CheckpointReader | None = None
    ):
        if not isinstance(base, PackedSource):
            raise TypeError(f"{type(base).__name__} is no source of quantized layers")
        self._packed: PackedSource = base
        super().__init__(base, adapters)
        schemes = base.quantized()
        adapted = [module for module in schemes if any(patch.changes("weight") for patch in self._patches.get(module, ()))]
        self._again = {module: replace(schemes[module], method=METHOD, act_order=False) for module in adapted} if requantize else {}
        self._kept = {module: scheme for module, scheme in schemes.items() if module not in adapted}
        self._losses: dict[str, _Loss] = {}
        for module in adapted:
            if not requantize:
                name = f"{module}.weight"
                self._infos[name] = TensorInfo(base.storage_dtype(), self._infos[name].shape)
        if adapted:
            what = f"quantized again ({METHOD}, the scheme they had)" if requantize else "kept dense"
            self.notes.append(f"{len(adapted)} adapted layers of the quantized base are {what}, {len(self._kept)} keep their integers")
        self._full = LoraReader(full_base, adapters) if full_base is not None else None
        self._check_full(adapted)

    def quantized(self) -> dict[str, QuantScheme]:
        """Scheme of every quantized module."""
        return {**self._kept, **self._again}

    def read_quantized(self, module: str) -> dict[str, torch.Tensor]:
        """The engine's tensors of a quantized module, by the last part of their names; the loss is noted on the way."""
        if module not in self._again:
            return self._packed.read_quantized(module)
        import torch

        merged = self.read(f"{module}.weight")
        weight = requantize(merged, self._again[module])
        stored = weight.dense(torch.float32)
        parts: dict[str, torch.Tensor] = weight.parts()
        before = after = None
        if self._full is not None:
            wanted = self._full.read(f"{module}.weight").float()
            before, after = _distance(merged, wanted), _distance(stored, wanted)
        self._losses[module] = _Loss(_sqnr_db(merged, stored), sum(part.nbytes for part in parts.values()), before, after)
        return parts

    def quality(self) -> dict[str, Any]:
        """The manifest's record of what the second quantization lost, in the form of `QuantPlan.quality`; empty when there was none."""
        if not self._losses:
            return {}
        measured = {module: loss.sqnr_db for module, loss in self._losses.items() if loss.sqnr_db is not None}
        worst = min(measured, key=lambda module: measured[module]) if measured else None
        record: dict[str, Any] = {
            "method": f"{METHOD} after merging",
            "mean_sqnr_db": round(sum(measured.values()) / len(measured), 3) if measured else None,
            "worst_layer": worst,
            "worst_sqnr_db": measured[worst] if worst else None,
            "quantized_bytes": sum(loss.num_bytes for loss in self._losses.values()),
            "layers": {module: {"sqnr_db": loss.sqnr_db, "bytes": loss.num_bytes} for module, loss in self._losses.items()},
        }
        pairs = {m: (loss.before, loss.after) for m, loss in self._losses.items() if loss.before is not None and loss.after is not None}
        if pairs:
            record["mean_error_before"] = round(sum(before for before, _ in pairs.values()) / len(pairs), 6)
            record["mean_error_after"] = round(sum(after for _, after in pairs.values()) / len(pairs), 6)
            for module, (before, after) in pairs.items():
                record["layers"][module] |= {"error_before": round(before, 6), "error_after": round(after, 6)}
        return record

    def _check_full(self, modules: list[str]) -> None:
        if self._full is None:
            return
        found = self._full.tensors()
        names = [f"{module}.weight" for module in modules]
        wrong = [name for name in names if name not in found or found[name].shape != self._infos[name].shape]
        if wrong:
            what = f"'{self._full.path}' has no {wrong[0]} of shape {list(self._infos[wrong[0]].shape)}"
            raise InputError(what, "name the full-precision base of this model with --lora-base")


def requantize(weight: torch.Tensor, scheme: QuantScheme) -> Any:
    """The kernels' weight (`parts()`, `dense(dtype)`) of a float32 weight [N, K] in any storage."""
    import torch

    if scheme.storage == "wna16":
        from dspark.converters.quantizers.rtn import quantize_rtn

        return quantize_rtn(weight, scheme).weight
    if scheme.storage == "int8":
        from dspark.kernels.int8 import Int8Weight

        scales = (weight.abs().amax(1) / _INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        return Int8Weight((weight / scales[:, None]).round_().to(torch.int8), scales)
    from dspark.kernels.fp8 import Fp8Weight

    block = scheme.block or (-1, -1)
    scales, spread = _block_scales(weight, block)
    return Fp8Weight((weight / spread).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales, block)


def _block_scales(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [blocks of outputs, blocks of inputs] whose largest value becomes FP8's largest, and the same spread over the weight."""
    import torch

    rows, columns = (extent if size == -1 else size for size, extent in zip(block, weight.shape, strict=True))
    grid = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
    padded = torch.nn.functional.pad(weight.abs(), (0, grid[1] * columns - weight.shape[1], 0, grid[0] * rows - weight.shape[0]))
    largest = padded.reshape(grid[0], rows, grid[1], columns).amax((1, 3))
    scales = (largest / _FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    spread = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return scales, spread


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted."""
    norm = float(want.double().norm())
    return float((got.double() - want.double()).norm()) / norm if norm > 0 else 0.0


def _sqnr_db(signal: torch.Tensor, stored: torch.Tensor) -> float | None:
    from dspark.converters.quantizers.measure import decibels, energy

    return decibels(energy(signal), energy(stored.double() - signal.double()))
