"""The quantizing step of the pipeline: which layers, in which groups, checked before any work; then one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dspark.converters.mapping import MappedModel, linear_modules, router_patterns
from dspark.converters.quantizers.base import SolverOptions, quantizer, stored_names
from dspark.converters.readers.base import summarize
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.quant import GROUP_SIZES, QuantConfig, default_group_size, preset

if TYPE_CHECKING:
    import torch

ALLOWED_GROUP_SIZES = (*GROUP_SIZES, -1)


@dataclass
class QuantPlan:
    """A checked decision. layers: module -> (outputs, inputs) of every layer that is quantized. report: filled as layers are done."""

    config: QuantConfig
    layers: dict[str, tuple[int, int]]
    group_note: str
    report: dict[str, dict[str, Any]] = field(default_factory=dict)

    def names(self, model: MappedModel) -> list[str]:
        """Every tensor name that the engine will hold."""
        names: list[str] = []
        for name in model.shapes:
            module = name.removesuffix(".weight")
            names += stored_names(module, self.config.scheme) if module in self.layers and name != module else [name]
        return names

    def quality(self) -> dict[str, Any]:
        """The manifest's record: per layer SQNR and bytes, their mean and the worst."""
        measured = {module: entry["sqnr_db"] for module, entry in self.report.items() if entry["sqnr_db"] is not None}
        worst = min(measured, key=lambda module: measured[module]) if measured else None
        return {
            "method": self.config.scheme.method,
            "mean_sqnr_db": round(sum(measured.values()) / len(measured), 3) if measured else None,
            "worst_layer": worst,
            "worst_sqnr_db": measured[worst] if worst else None,
            "quantized_bytes": sum(entry["bytes"] for entry in self.report.values()),
            "layers": self.report,
        }


def plan_quantization(
    model: MappedModel, scheme_name: str, method: str = "rtn", group_size: int | None = None, ignore: tuple[str, ...] = ()
) -> QuantPlan:
    """Decide scheme, groups and layers.

    Raises UsageError for an unknown scheme or method, a group size that does not divide every layer's inputs (naming the layers), or an
    --ignore pattern that matches no layer.
    """
    quantizer(method)
    base = preset(scheme_name)
    default = QuantConfig(base)
    modules = linear_modules(model.config)
    idle = [pattern for pattern in ignore if not any(fnmatchcase(module, pattern) for module in modules)]
    if idle:
        example = "such as model.layers.0.* or *.down_proj"
        raise UsageError(f"--ignore {summarize(idle)} matches no layer", f"patterns match module names, {example}")
    config = QuantConfig(base, tuple(dict.fromkeys((*default.ignore, *router_patterns(model.config), *ignore))))
    layers = {module: shape for module, shape in modules.items() if config.scheme_for(module) is not None}
    if not layers:
        raise UsageError("--ignore leaves no layer to quantize", "use fewer patterns")
    chosen, note = choose_group_size(group_size, base.weight_bits, {inputs for _, inputs in layers.values()})
    check_group_size(chosen, layers)
    check_packing(base.weight_bits, layers)
    return QuantPlan(replace(config, scheme=replace(base, group_size=chosen, method=method)), layers, note)


def choose_group_size(wanted: int | None, bits: int, widths: set[int]) -> tuple[int, str]:
    """The group size and a sentence that says why. 8 bits lose little with one step per output row, 4 bits need small groups."""
    if wanted is not None:
        return wanted, f"group size {wanted}"
    if bits >= 8:
        return -1, f"group size -1 (one step per output row, the default for {bits} bit)"
    size = default_group_size(widths)
    shown = ", ".join(map(str, sorted(widths)))
    return size, f"group size {size} (the largest of {', '.join(map(str, GROUP_SIZES))} that divides the input widths {shown})"


def check_group_size(size: int, layers: dict[str, tuple[int, int]]) -> None:
    """Raise UsageError for a size that is not offered, or that does not divide a layer's inputs."""
    if size not in ALLOWED_GROUP_SIZES:
        raise UsageError(f"--group-size is {size}, allowed: {', '.join(map(str, ALLOWED_GROUP_SIZES))}")
    bad = [f"{module} ({inputs} inputs)" for module, (_, inputs) in layers.items() if size != -1 and inputs % size]
    if bad:
        fitting = [s for s in ALLOWED_GROUP_SIZES if s == -1 or all(inputs % s == 0 for _, inputs in layers.values())]
        raise UsageError(
            f"group size {size} does not divide the inputs of {summarize(bad, 3)}", f"type --group-size {' or '.join(map(str, fitting))}"
        )


def check_packing(bits: int, layers: dict[str, tuple[int, int]]) -> None:
    """Raise UsageError for layers whose codes do not fill whole 32-bit words along the inputs: no kernel or other program reads those."""
    per_word = 32 // bits
    bad = [f"{module} ({inputs} inputs)" for module, (_, inputs) in layers.items() if inputs % per_word]
    if bad:
        what = f"{bits}-bit codes fill words of {per_word} inputs, which do not divide {summarize(bad, 3)}"
        raise UsageError(what, "keep those layers as they are with --ignore PATTERN")


def quantized_tensors(model: MappedModel, plan: QuantPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the engine, layers of the plan quantized; the report is filled on the way.

    Raises InputError for a weight with values that are not finite.
    """
    import torch

    quantize = quantizer(plan.config.scheme.method)
    for name in model.shapes:
        module = name.removesuffix(".weight")
        if module == name or module not in plan.layers:
            yield name, model.read_cast(name)
            continue
        weight = model.read(name).to(torch.float32)
        if not bool(weight.isfinite().all()):
            raise InputError(f"{name} has values that are not finite", "the checkpoint is damaged: use another copy")
        result = quantize(weight, plan.config.scheme, None, SolverOptions())
        plan.report[module] = result.entry()
        del weight
        yield from result.tensors(module).items()
