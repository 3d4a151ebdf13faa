"""What happens to one layer: its linears are observed, scaled where the method says so, and solved.

gptq              stage by stage: what a stage reads is computed with the stages before it already quantized (Frantar et al. 2022)
awq               all stages are observed as they are; the best scales are moved into the operations before, then codes are chosen
smoothquant       the same with SmoothQuant's scales
awq-gptq,
smoothquant-gptq  scales as above; then the scaled layer is gone through again, stage by stage as gptq does
rtn               as gptq, but every weight is rounded to nearest: the inputs weight the search for the clipping
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch

from dspark.converters.calibration.layer_pass import STAGES, LayerPass, Slot
from dspark.converters.calibration.scale_layer import ScaledLayer, scale_layer
from dspark.converters.quantize import SCALED_BY, SOLVED_IN_ORDER, QuantPlan, finite_weight, layer_entry
from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, quantizer
from dspark.converters.quantizers.statistics import LayerStatistics, StatisticsAccumulator
from dspark.kernels.ops import Kernels
from dspark.runtime.execution.layer_walk import WalkLayer, build_walk_layer
from dspark.runtime.layers.linear import build_weight, load_linear
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.model_config import ModelConfig

Observed = dict[str, LayerStatistics]
"""module -> statistics of its inputs; modules that read one input share one object"""


@dataclass
class LayerResult:
    """Tensors of one layer as the engine stores them, and each quantized module's entry for the report.

    value_scales: what the layer's values were divided by after they were observed [num_kv_heads * head_dim], None for nothing.
    """

    tensors: dict[str, torch.Tensor]
    report: dict[str, dict[str, Any]] = field(default_factory=dict)
    value_scales: torch.Tensor | None = None


class LayerQuantizer:
    """Quantizes the layers of one model, one after the other, by a plan."""

    def __init__(self, model: ModelConfig, plan: QuantPlan, kernels: Kernels) -> None:
        self._model, self._plan, self._kernels = model, plan, kernels
        self._dtype: torch.dtype = getattr(torch, model.dtype)

    def run(self, layer_pass: LayerPass, state: dict[str, torch.Tensor], full: LayerPass | None = None) -> LayerResult:
        """Take one layer through its stages. state: the layer's tensors by name, as the checkpoint has them.

        full: a pass of the layer as it is, over the stream of the model as it is, whose inputs GPTAQ compares with. Both passes are
        finished when this returns: their walks hold the layer's results.
        """
        if self._plan.method not in SCALED_BY:
            return self._staged(layer_pass, state, state, full)
        scaled = self._scaled(layer_pass, state)
        if self._plan.method in SOLVED_IN_ORDER:
            stored = {name: tensor.to(self._dtype) for name, tensor in scaled.tensors.items()}
            layer_pass.restart(self._build(layer_pass.built.index, stored))
            result = self._staged(layer_pass, scaled.tensors, stored)
        else:
            layer_pass.finish()
            result = LayerResult({})
            for slot in layer_pass.slots:
                self._solve(slot.modules, scaled.tensors, scaled.observed, result)
        for module, note in scaled.notes.items():
            if module in result.report:
                result.report[module]["scaling"] = note
        result.value_scales = scaled.value_scales
        return self._with_dense(result, scaled.tensors)

    def _staged(
        self, layer_pass: LayerPass, state: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], full: LayerPass | None = None
    ) -> LayerResult:
        """stored: the state as the engine has what is not quantized."""
        result = LayerResult({})
        for stage in STAGES:
            slots = [slot for slot in layer_pass.slots if slot.stage == stage]
            observed = self.observe(layer_pass, stage, full)
            for slot in slots:
                self._install(slot, self._solve(slot.modules, state, observed, result), stored)
        layer_pass.finish()
        if full is not None:
            full.finish()
        return self._with_dense(result, state)

    def _scaled(self, layer_pass: LayerPass, state: dict[str, torch.Tensor]) -> ScaledLayer:
        observed: Observed = {}
        for stage in STAGES:
            observed |= self.observe(layer_pass, stage)
        by, index = SCALED_BY[self._plan.method], layer_pass.built.index
        return scale_layer(by, self._model, index, state, observed, self._plan.config, self._dtype)

    def observe(self, layer_pass: LayerPass, stage: str, full: LayerPass | None = None) -> Observed:
        """Statistics of what each module of a stage reads, beside its inputs in `full`. Raises InputError when an input is not finite."""
        sums: dict[int, StatisticsAccumulator] = {}
        slots: dict[int, Slot] = {}
        beside = full.inputs(stage) if full is not None else repeat(None)
        for batch, full_batch in zip(layer_pass.inputs(stage), beside, strict=False):
            full_inputs = repeat(None) if full_batch is None else (x for _, x in full_batch)
            for (slot, x), full_x in zip(batch, full_inputs, strict=False):
                if id(slot) not in sums:
                    sums[id(slot)], slots[id(slot)] = StatisticsAccumulator(x.shape[-1], cross=full is not None), slot
                try:
                    sums[id(slot)].add(x.cpu(), full_x if full_x is None else full_x.cpu())
                except InputError as error:
                    raise InputError(f"{slot.modules[0]}: {error.message}", "calibrate in bfloat16 or float32: --dtype") from error
        observed: Observed = {}
        for key, accumulator in sums.items():
            observed |= dict.fromkeys(slots[key].modules, accumulator.finish())
        return observed

    def _solve(
        self, modules: Iterable[str], state: dict[str, torch.Tensor], observed: Observed, result: LayerResult
    ) -> dict[str, QuantizedWeight]:
        """Codes of those modules that are quantized; their tensors and entries go to the result."""
        solved = {}
        for module in modules:
            if module not in self._plan.layers:
                continue
            scheme, weight = self._plan.scheme_for(module), finite_weight(module, state[f"{module}.weight"])
            options = self._plan.solver or DEFAULTS
            solved[module] = quantizer(scheme.method)(weight, scheme, observed.get(module), options)
            result.tensors |= solved[module].tensors(module)
            result.report[module] = layer_entry(solved[module], scheme)
        return solved

    def _install(self, slot: Slot, solved: dict[str, QuantizedWeight], state: dict[str, torch.Tensor]) -> None:
        """Run the slot with its quantized weights from now on, as dense ones: their products are those of the codes but for rounding."""
        if solved:
            dtype = self._kernels.facts.dtype
            dense = {f"{module}.weight": weight.weight.dense(dtype) for module, weight in solved.items()}
            slot.install(load_linear(list(slot.modules), DictWeights({**state, **dense}, self._kernels), None, self._kernels))

    def rebuild(self, index: int, result: LayerResult, state: dict[str, torch.Tensor]) -> WalkLayer:
        """The layer that a run goes on with after `run` has given this result: quantized weights where it installed them."""
        tensors = dict(state)
        if self._plan.method in SOLVED_IN_ORDER or self._plan.method not in SCALED_BY:
            tensors |= {name: tensor for name, tensor in result.tensors.items() if name in state}  # norms are scaled
            for module in result.report:
                scheme = self._plan.scheme_for(module)
                parts = {leaf: result.tensors[f"{module}.{leaf}"] for leaf in scheme.leaves()}
                tensors[f"{module}.weight"] = build_weight(module, scheme, parts).dense(self._kernels.facts.dtype)
        return self._build(index, tensors)

    def _build(self, index: int, tensors: dict[str, torch.Tensor]) -> WalkLayer:
        return build_walk_layer(self._model, index, None, DictWeights(tensors, self._kernels), self._kernels)

    def _with_dense(self, result: LayerResult, state: dict[str, torch.Tensor]) -> LayerResult:
        """Add what stays dense: norms, biases, modules that are not quantized."""
        for name, tensor in state.items():
            if name.removesuffix(".weight") not in result.report:
                result.tensors[name] = tensor.to(self._dtype)
        return result


class DictWeights:
    """A WeightSource over tensors by name, in the run's dtype and on its device; a tensor may be taken again."""

    def __init__(self, tensors: dict[str, torch.Tensor], kernels: Kernels) -> None:
        self._tensors, self._facts = tensors, kernels.facts

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> torch.Tensor:
        """The tensor; KeyError where there is none."""
        return self._tensors[name].to(self._facts.device, self._facts.dtype)
