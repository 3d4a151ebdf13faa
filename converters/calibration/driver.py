"""A model quantized layer by layer: memory holds one layer, its statistics, and the residual stream of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dspark.converters.calibration.layer_pass import LayerPass
from dspark.converters.calibration.layer_quantizer import DictWeights, LayerQuantizer, LayerResult
from dspark.converters.calibration.samples import CalibrationSet
from dspark.converters.calibration.work import WorkDirectory
from dspark.converters.mapped_weights import MappedWeights
from dspark.converters.mapping import EMBEDDING, MappedModel
from dspark.converters.quantize import SCALED_BY, SOLVED_IN_ORDER, QuantPlan, stored_tensors
from dspark.converters.quantizers.kv_cache import KVObserver
from dspark.kernels.ops import Kernels
from dspark.runtime.execution.layer_walk import LayerWalk, WalkLayer, build_walk_layer
from dspark.runtime.execution.loader import choose_kernels, resolve_device
from dspark.runtime.spec.model_config import ModelConfig

LayerProgress = Callable[[int, int, str], None]
"""(layers done, layers in all, what the last one lost)"""


@dataclass(frozen=True)
class WalkOptions:
    """How the samples are taken through the model. dtype: of activations, None for the model's own (float32 where a CPU is slow in that).

    on_disk: activations between layers live in files instead of memory.
    """

    device: str = "auto"
    dtype: str | None = None
    on_disk: bool = False

    def kernels(self, config: ModelConfig) -> Kernels:
        """The kernels of the walk."""
        return choose_kernels(config, self.resolved_dtype(config.dtype), resolve_device(self.device))

    def resolved_dtype(self, model_dtype: str) -> str:
        """float16 overflows in the feed-forward block of some families, and most CPUs compute it slowly."""
        if self.dtype is not None:
            return self.dtype
        return "bfloat16" if model_dtype != "float32" and _fast_bfloat16(resolve_device(self.device)) else "float32"


def _fast_bfloat16(device: str) -> bool:
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class CalibratedQuantization:
    """Everything that one run of a calibrated method needs; `tensors` does it."""

    def __init__(
        self,
        model: MappedModel,
        plan: QuantPlan,
        calibration: CalibrationSet,
        work: WorkDirectory,
        options: WalkOptions,
        progress: LayerProgress | None = None,
    ) -> None:
        self._model, self._plan, self._work, self._progress = model, plan, work, progress
        config = model.config
        self._kernels = options.kernels(config)
        self._on_disk = options.on_disk
        self._walk = LayerWalk(config, calibration.samples, self._kernels)
        if self._on_disk:
            self._walk.residual = self._allocate(*self._walk.residual.shape)
        self._quantizer = LayerQuantizer(config, plan, self._kernels)
        self._full: LayerWalk | None = None
        if plan.solver is not None and plan.solver.gptaq_alpha is not None:
            self._full = LayerWalk(config, calibration.samples, self._kernels)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the engine, by name; the plan's report is filled on the way. Raises InputError for values that are not finite."""
        model, config = self._model, self._model.config
        yield EMBEDDING, model.read_cast(EMBEDDING)
        for walk in self._walks():
            walk.start(MappedWeights(model, self._kernels.facts.dtype, self._kernels.facts.device).take(EMBEDDING))
        for index in range(config.num_layers):
            result = self._layer(index)
            self._plan.report |= result.report
            yield from result.tensors.items()
            if self._progress is not None:
                self._progress(index + 1, config.num_layers, _summary(index, result))
        yield from self._rest()

    def _layer(self, index: int) -> LayerResult:
        state = {name: self._model.read_cast(name) for name in layer_names(self._model, index)}
        if index < self._work.num_done:
            result = self._work.load(index)
            self._walk.advance(self._quantizer.rebuild(index, result, state))  # as the earlier run went on: the same bits come out
            if self._full is not None:
                self._full.advance(self._built(index, state))
            return result
        observer = KVObserver(self._kernels) if self._plan.kv_cache is not None else None
        full = LayerPass(self._full, self._built(index, state), self._allocate) if self._full is not None else None
        repeats = self._plan.method in SCALED_BY and self._plan.method in SOLVED_IN_ORDER
        layer_pass = LayerPass(self._walk, self._built(index, state), self._allocate, observer, repeats)
        result = self._quantizer.run(layer_pass, state, full)
        if observer is not None and self._plan.kv_cache is not None:
            if result.value_scales is not None and observer.v_absmax is not None:
                observer.v_absmax = observer.v_absmax / result.value_scales.view_as(observer.v_absmax)
            self._plan.kv_cache = replace(self._plan.kv_cache, num_tokens=observer.num_tokens)
            result.tensors |= observer.tensors(index, self._plan.kv_cache)
        self._work.save(index, result)
        return result

    def _walks(self) -> list[LayerWalk]:
        return [self._walk] if self._full is None else [self._walk, self._full]

    def _built(self, index: int, state: dict[str, torch.Tensor]) -> WalkLayer:
        """The layer as it is."""
        return build_walk_layer(self._model.config, index, None, DictWeights(state, self._kernels), self._kernels)

    def _rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The final norm and the head, which is quantized without looking at its inputs."""
        for name in self._model.shapes:
            if name != EMBEDDING and not name.startswith("model.layers."):
                yield from stored_tensors(name, self._model, self._plan)

    def _allocate(self, rows: int, columns: int) -> torch.Tensor:
        if self._on_disk:
            return self._work.allocate(rows, columns, self._kernels.facts.dtype)
        return self._walk.matrix(rows, columns)


def layer_names(model: MappedModel, index: int) -> list[str]:
    """Names of one layer's tensors."""
    return [name for name in model.shapes if name.startswith(f"model.layers.{index}.")]


def _summary(index: int, result: LayerResult) -> str:
    errors = {module: entry.get("output_sqnr_db", entry.get("sqnr_db")) for module, entry in result.report.items()}
    known = {module: error for module, error in errors.items() if error is not None}
    if not known:
        return f"layer {index}"
    worst = min(known, key=lambda module: known[module])
    return f"layer {index}: worst {worst.rsplit('.', 1)[-1]} {known[worst]:.1f} dB"
