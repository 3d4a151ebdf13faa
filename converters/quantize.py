"""The quantizing step of the pipeline: which layers, in which way, checked before any work; then one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dspark.converters.mapping import MappedModel, linear_modules, router_patterns
from dspark.converters.readers.base import summarize
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.kv_cache import KVCacheConfig, scale_names
from dspark.runtime.spec.quant import GROUP_SIZES, PRESETS, QuantConfig, QuantScheme, default_group_size, preset

if TYPE_CHECKING:
    import torch

    from dspark.converters.quantizers.base import QuantizedWeight, SolverOptions

ALLOWED_GROUP_SIZES = (*GROUP_SIZES, -1)
METHODS = {
    "wna16": ("rtn", "gptq", "awq", "awq-gptq"),
    "int8": ("rtn", "gptq", "smoothquant", "smoothquant-gptq"),
    "fp8": ("rtn", "gptq"),
}
"""storage -> the methods that choose its codes"""
SCALED_BY = {"awq": "awq", "awq-gptq": "awq", "smoothquant": "smoothquant", "smoothquant-gptq": "smoothquant"}
"""method -> how it scales the inputs of linears before any code is chosen; methods that do not are not here"""
SOLVED_IN_ORDER = ("gptq", "awq-gptq", "smoothquant-gptq")
"""Methods by which each stage of a layer sees its inputs with the stages before already quantized."""
CALIBRATED_METHODS = tuple(dict.fromkeys((*SOLVED_IN_ORDER, *SCALED_BY)))
HEAD_MODULE = "lm_head"
DENSE = "dense"
"""What a rule says instead of a scheme for layers that stay as they are."""


@dataclass(frozen=True)
class QuantRequest:
    """What the user asked for. rules: (pattern of module names, scheme or DENSE); of several that match the last one counts.

    solver: SolverOptions, None for their defaults. kv_cache_dtype: of a cache to calibrate besides, see `spec.kv_cache.QUANTIZED_CACHES`.
    fp8_inputs: "dynamic" or "static" to round the inputs of float8 layers too. target_bpw: bits per weight to spend on the layers by what
    each loses (see `calibration.bit_budget`).
    """

    scheme: str
    method: str = "rtn"
    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    solver: SolverOptions | None = None
    kv_cache_dtype: str | None = None
    target_bpw: float | None = None
    fp8_inputs: str | None = None


@dataclass
class QuantPlan:
    """A checked decision. layers: module -> (outputs, inputs) of every layer that is quantized.

    report, notes: filled as layers are done. calibration: the record of what the quantizer was shown; held_out: samples of the same file
    that it was not. has_text: there are samples, so that rounding to nearest looks at them too.
    """

    config: QuantConfig
    method: str
    layers: dict[str, tuple[int, int]]
    group_note: str
    solver: SolverOptions | None = None
    report: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    held_out: list[list[int]] = field(default_factory=list)
    has_text: bool = False
    kv_cache: KVCacheConfig | None = None
    target_bpw: float | None = None

    @property
    def needs_text(self) -> bool:
        """Whether samples have to be taken through the model."""
        return self.method in CALIBRATED_METHODS or self.kv_cache is not None or self.target_bpw is not None or self.static_inputs

    @property
    def static_inputs(self) -> bool:
        """Whether the scale of some layer's inputs is to be calibrated."""
        return any(scheme.inputs == "static" for scheme in self.config.schemes())

    def scheme_for(self, module: str) -> QuantScheme:
        """The scheme of a layer of the plan."""
        scheme = self.config.scheme_for(module)
        assert scheme is not None
        return scheme

    def names(self, model: MappedModel) -> list[str]:
        """Every tensor name that the engine will hold."""
        names: list[str] = []
        for name in model.shapes:
            module = name.removesuffix(".weight")
            stored = module in self.layers and name != module
            names += [f"{module}.{leaf}" for leaf in self.scheme_for(module).leaves()] if stored else [name]
        if self.kv_cache is not None:
            names += [name for layer in range(model.config.num_layers) for name in scale_names(layer)]
        return names

    def quality(self) -> dict[str, Any]:
        """The manifest's record: per layer SQNR and bytes, their mean and the worst."""
        measured = {module: entry["sqnr_db"] for module, entry in self.report.items() if entry["sqnr_db"] is not None}
        worst = min(measured, key=lambda module: measured[module]) if measured else None
        return {
            "method": self.method,
            "mean_sqnr_db": round(sum(measured.values()) / len(measured), 3) if measured else None,
            "worst_layer": worst,
            "worst_sqnr_db": measured[worst] if worst else None,
            "quantized_bytes": sum(entry["bytes"] for entry in self.report.values()),
            **({"calibration": self.calibration} if self.calibration else {}),
            "layers": self.report,
        }


def plan_quantization(model: MappedModel, request: QuantRequest) -> QuantPlan:
    """Decide scheme, groups and layers.

    Raises UsageError for an unknown scheme or method, a method that does not make the scheme, a group size that does not divide every
    layer's inputs (naming the layers), or an --ignore or --rule pattern that matches no layer.
    """
    from dspark.converters.quantizers.base import DEFAULTS, stored_scheme
    from dspark.converters.quantizers.kv_cache import kv_cache_config

    base = preset(request.scheme)
    check_method(request.method, base)
    if request.fp8_inputs is not None and base.storage != "fp8":
        raise UsageError(f"--fp8-inputs is {request.fp8_inputs}, but {base.name} has no float8 weights", "type --scheme fp8 or fp8-block")
    modules = linear_modules(model.config)
    check_patterns("--ignore", request.ignore, modules)
    check_patterns("--rule", tuple(pattern for pattern, _ in request.rules), modules)
    defaults = QuantConfig(base).ignore
    ignored = QuantConfig(base, tuple(dict.fromkeys((*defaults, *router_patterns(model.config), *request.ignore))))
    solver = request.solver or DEFAULTS
    chosen = {module: _scheme_of(module, ignored, request) for module in modules}
    layers = {module: modules[module] for module, scheme in chosen.items() if scheme is not None}
    if not layers:
        raise UsageError("--ignore leaves no layer to quantize", "use fewer patterns")
    size, note = _group_sizes(request, base, {module: scheme for module, scheme in chosen.items() if scheme is not None}, layers)
    method = {storage: _method_for(storage, request.method) for storage in METHODS}
    schemes = {}
    for module in layers:
        scheme = chosen[module]
        assert scheme is not None
        grouped = replace(scheme, group_size=size[scheme.name]) if scheme.storage == "wna16" else scheme
        schemes[module] = replace(grouped, method="rtn" if module == HEAD_MODULE else method[scheme.storage])
        if schemes[module].storage == "fp8":
            schemes[module] = replace(schemes[module], inputs=request.fp8_inputs)
        if schemes[module].method in SOLVED_IN_ORDER:
            schemes[module] = stored_scheme(schemes[module], solver)
    check_packing(schemes, layers)
    plain = not request.rules
    config = replace(ignored, scheme=next(iter(schemes.values()))) if plain else QuantConfig.of_modules(schemes)
    if solver.gptaq_alpha is not None and (request.method != "gptq" or base.storage == "fp8" or model.config.num_experts):
        raise UsageError("--gptaq corrects GPTQ's integer codes on models without experts", "leave --gptaq out")
    kv_cache = kv_cache_config(request.kv_cache_dtype) if request.kv_cache_dtype else None
    if request.target_bpw is not None and (request.rules or base.storage != "wna16" or not solver.static_groups):
        raise UsageError("--target-bpw chooses bits by itself", "leave --rule and --no-static-groups out, and take a w*a16 scheme")
    return QuantPlan(config, request.method, layers, note, solver, kv_cache=kv_cache, target_bpw=request.target_bpw)


def check_method(method: str, scheme: QuantScheme) -> None:
    """Raise UsageError for a method that there is not, or that does not make this scheme."""
    known = dict.fromkeys(name for names in METHODS.values() for name in names)
    if method not in known:
        raise UsageError(f"--method is {method}, allowed: {', '.join(known)}")
    allowed = METHODS[scheme.storage]
    if method not in allowed:
        raise UsageError(f"--method {method} does not make {scheme.name}, allowed for it: {', '.join(allowed)}")


def _method_for(storage: str, method: str) -> str:
    """What chooses the codes of a storage in a run of a method that may not make it: the nearest one that does."""
    if method in METHODS[storage]:
        return method
    return "gptq" if method in SOLVED_IN_ORDER and "gptq" in METHODS[storage] else "rtn"


def check_patterns(flag: str, patterns: tuple[str, ...], modules: dict[str, tuple[int, int]]) -> None:
    """Raise UsageError for patterns that match no layer."""
    idle = [pattern for pattern in patterns if not any(matches(module, pattern) for module in modules)]
    if idle:
        example = "such as model.layers.0.* or *.down_proj"
        raise UsageError(f"{flag} {summarize(idle)} matches no layer", f"patterns match module names, {example}")


def matches(module: str, pattern: str) -> bool:
    """Whether a glob names a module; its leading "model." may be left out."""
    return fnmatchcase(module, pattern) or fnmatchcase(module.removeprefix("model."), pattern)


def parse_rule(text: str) -> tuple[str, str]:
    """Pattern and scheme of one --rule. Raises UsageError."""
    pattern, separator, scheme = text.rpartition("=")
    if not separator or not pattern or scheme not in (*PRESETS, DENSE):
        allowed = f"PATTERN=SCHEME with one of {', '.join(PRESETS)}, {DENSE}"
        raise UsageError(f"--rule is '{text}', allowed: {allowed}", "such as --rule 'layers.0.*=w8a16'")
    return pattern, scheme


def _scheme_of(module: str, ignored: QuantConfig, request: QuantRequest) -> QuantScheme | None:
    """The scheme that the rules, or else the default, give to a module; None where it stays dense."""
    for pattern, scheme in reversed(request.rules):
        if matches(module, pattern):
            return None if scheme == DENSE else preset(scheme)
    patterns = ignored.ignore
    return None if any(matches(module, pattern) for pattern in patterns) else ignored.scheme


def _group_sizes(
    request: QuantRequest, base: QuantScheme, chosen: dict[str, QuantScheme], layers: dict[str, tuple[int, int]]
) -> tuple[dict[str, int], str]:
    """Group size by scheme name, and a sentence on that of the main scheme. --group-size holds for the main scheme."""
    sizes, note = {}, ""
    for scheme in {scheme.name: scheme for scheme in chosen.values()}.values():
        own = {module: layers[module] for module, found in chosen.items() if found.name == scheme.name}
        wanted = request.group_size if scheme.name == base.name else None
        if scheme.storage != "wna16":
            if wanted is not None:
                raise UsageError(f"--group-size is {wanted}, but {scheme.name} has no groups of inputs", "leave --group-size out")
            sizes[scheme.name], words = -1, scheme.describe()
        else:
            sizes[scheme.name], words = choose_group_size(wanted, scheme.weight_bits, {inputs for _, inputs in own.values()})
            check_group_size(sizes[scheme.name], own)
        if scheme.name == base.name or not note:
            note = words
    return sizes, note


def choose_group_size(wanted: int | None, bits: int, widths: set[int]) -> tuple[int, str]:
    """The group size and a sentence that says why. 8 bits lose little with one step per output row, fewer need small groups."""
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


def check_packing(schemes: dict[str, QuantScheme], layers: dict[str, tuple[int, int]]) -> None:
    """Raise UsageError for layers whose codes do not fill whole 32-bit words along the inputs: no kernel or other program reads those."""
    bad = [
        f"{module} ({layers[module][1]} inputs of {scheme.weight_bits} bits)"
        for module, scheme in schemes.items()
        if scheme.storage == "wna16" and layers[module][1] * scheme.weight_bits % 32
    ]
    if bad:
        raise UsageError(
            f"codes must fill whole 32-bit words, not so in {summarize(bad, 3)}", "keep those layers as they are with --ignore PATTERN"
        )


def quantized_tensors(model: MappedModel, plan: QuantPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the engine, layers of the plan quantized without looking at inputs; the report is filled on the way.

    Raises InputError for a weight with values that are not finite.
    """
    for name in model.shapes:
        yield from stored_tensors(name, model, plan)


def stored_tensors(name: str, model: MappedModel, plan: QuantPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """What the engine stores for one of the model's tensors; see `quantized_tensors`."""
    from dspark.converters.quantizers.base import DEFAULTS, quantizer

    module = name.removesuffix(".weight")
    if module == name or module not in plan.layers:
        yield name, model.read_cast(name)
        return
    scheme, weight = plan.scheme_for(module), finite_weight(module, model.read(name))
    result = quantizer(scheme.method)(weight, scheme, None, plan.solver or DEFAULTS)
    plan.report[module] = layer_entry(result, scheme)
    yield from result.tensors(module).items()


def finite_weight(module: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight in float32. Raises InputError when it has values that are not finite."""
    import torch

    wide = weight.to(torch.float32)
    if not bool(wide.isfinite().all()):
        raise InputError(f"{module}.weight has values that are not finite", "the checkpoint is damaged: use another copy")
    return wide


def layer_entry(result: QuantizedWeight, scheme: QuantScheme) -> dict[str, Any]:
    """One layer's entry in the manifest's record. Errors in decibels of signal to noise, what was not measured left out."""
    entry = {
        "scheme": scheme.describe(),
        "bits": scheme.weight_bits,
        "sqnr_db": result.sqnr_db,
        "output_sqnr_db": result.output_sqnr_db,
        "bytes": result.num_bytes(),
        "damp": result.damp_used,
        "notes": list(result.notes),
    }
    return {key: value for key, value in entry.items() if key == "sqnr_db" or value not in (None, [])}
