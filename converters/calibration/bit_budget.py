"""`--target-bpw`: the bits of each group of linears, chosen so that the model loses least at a given size.

Every group of linears that run as one function (q, k, v; gate and up; ...) is rounded at each of BITS on the statistics of its inputs,
which measures the noise in its outputs relative to their energy. Then bits are bought where they take away most noise per byte, from the
coarsest everywhere on, until the size is reached.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dspark.converters.calibration.layer_pass import STAGES, LayerPass
from dspark.converters.calibration.layer_quantizer import LayerQuantizer
from dspark.converters.mapped_weights import MappedWeights
from dspark.converters.mapping import EMBEDDING, MappedModel
from dspark.converters.quantize import QuantPlan, finite_weight
from dspark.converters.quantizers.base import SolverOptions, quantizer
from dspark.kernels.ops import Kernels
from dspark.runtime.execution.layer_walk import LayerWalk, build_walk_layer
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.quant import QuantConfig, QuantScheme, default_group_size, preset

BITS = (2, 3, 4, 8)
_NOISE_OF_NOTHING = 1e-12  # a layer without measured noise: nothing is gained by more bits


@dataclass(frozen=True)
class Choice:
    """One way to store a group of linears. noise: of its outputs, relative to their energy, summed over its modules."""

    schemes: dict[str, QuantScheme]
    num_bits: int
    noise: float


Menu = dict[tuple[str, ...], list[Choice]]
"""modules of a group -> its choices, coarsest first"""


def measure_choices(layer_pass: LayerPass, observer: LayerQuantizer, model: MappedModel, plan: QuantPlan) -> Menu:
    """The choices of one layer's groups. The pass is finished: its walk holds the layer's result, not quantized."""
    menu: Menu = {}
    for stage in STAGES:
        observed = observer.observe(layer_pass, stage)
        for slot in layer_pass.slots:
            modules = tuple(module for module in slot.modules if module in plan.layers)
            if slot.stage == stage and modules:
                menu[modules] = [_choice(bits, modules, model, plan, observed) for bits in BITS]
    layer_pass.finish()
    return menu


def _choice(bits: int, modules: tuple[str, ...], model: MappedModel, plan: QuantPlan, observed: dict) -> Choice:  # type: ignore[type-arg]
    schemes, num_bits, noise = {}, 0, 0.0
    for module in modules:
        scheme = _scheme(bits, plan, plan.layers[module][1])
        weight = finite_weight(module, model.read(f"{module}.weight"))
        result = quantizer("rtn")(weight, scheme, observed.get(module), plan.solver or SolverOptions())
        decibels = result.output_sqnr_db if result.output_sqnr_db is not None else result.sqnr_db
        noise += _NOISE_OF_NOTHING if decibels is None else 10 ** (-decibels / 10)
        schemes[module] = replace(scheme, method=plan.method)
        num_bits += 8 * result.num_bytes()
    return Choice(schemes, num_bits, noise)


def _scheme(bits: int, plan: QuantPlan, inputs: int) -> QuantScheme:
    base = plan.config.scheme
    found = preset(f"w{bits}a16{'' if base.symmetric else '-asym'}")
    if bits == 8:
        return replace(found, group_size=-1)
    fitting = base.group_size if base.group_size != -1 and inputs % base.group_size == 0 else default_group_size({inputs})
    return replace(found, group_size=fitting)


def choose_bits(menu: Menu, num_weights: int, target_bpw: float) -> dict[str, QuantScheme]:
    """A scheme for every module of the menu, together within target_bpw bits (codes, steps and zero points) per weight.

    Raises UsageError when the coarsest choices are larger than that.
    """
    budget = target_bpw * num_weights
    taken = dict.fromkeys(menu, 0)
    size = sum(choices[0].num_bits for choices in menu.values())
    if size > budget:
        raise UsageError(f"--target-bpw is {target_bpw:g}, the smallest is {size / num_weights:.2f} bits per weight", "type more")
    offers: list[tuple[float, tuple[str, ...], int]] = []

    def offer(group: tuple[str, ...]) -> None:
        """The step up that takes away most noise per bit from where a group stands."""
        choices, at = menu[group], taken[group]
        steps = [
            ((choices[at].noise - choices[to].noise) / max(choices[to].num_bits - choices[at].num_bits, 1), to)
            for to in range(at + 1, len(choices))
        ]
        if steps:
            gain, to = max(steps)
            heapq.heappush(offers, (-gain, group, to))

    for group in menu:
        offer(group)
    while offers:
        gain, group, to = heapq.heappop(offers)
        more = menu[group][to].num_bits - menu[group][taken[group]].num_bits
        if gain < 0 and size + more <= budget:
            size, taken[group] = size + more, to
            offer(group)
    return {module: scheme for group, at in taken.items() for module, scheme in menu[group][at].schemes.items()}


def spend_bits(model: MappedModel, plan: QuantPlan, samples: list[list[int]], kernels: Kernels, target_bpw: float) -> None:
    """Take the samples through the model as it is, and give every layer of the plan its scheme.

    Raises UsageError as `choose_bits`, InputError for values that are not finite.
    """
    config, walk = model.config, LayerWalk(model.config, samples, kernels)
    observer = LayerQuantizer(config, plan, kernels)
    weights = MappedWeights(model, kernels.facts.dtype, kernels.facts.device)
    walk.start(weights.take(EMBEDDING))
    menu: Menu = {}
    for index in range(config.num_layers):
        layer_pass = LayerPass(walk, build_walk_layer(config, index, None, weights, kernels), walk.matrix)
        menu |= measure_choices(layer_pass, observer, model, plan)
    num_weights = sum(outputs * inputs for module, (outputs, inputs) in plan.layers.items() if any(module in group for group in menu))
    schemes = choose_bits(menu, num_weights, target_bpw)
    plan.layers = {module: shape for module, shape in plan.layers.items() if module in schemes}
    plan.config = QuantConfig.of_modules(schemes)
    counts = _counted(scheme.weight_bits for scheme in schemes.values())
    shown = ", ".join(f"{bits} bits in {count} layers" for bits, count in sorted(counts.items()))
    plan.notes.append(f"--target-bpw {target_bpw:g}: {shown}")


def _counted(values: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts
