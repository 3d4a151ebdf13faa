"""What to quantize with instead, when the measured loss is beyond a limit: a ladder of choices, smallest engine first.

Each rung has an estimate of the error's power relative to the present choice; the first one that is estimated to stay within the limit,
with a margin, is proposed. Estimates are rough on purpose: a step halves with each bit (6 dB, a factor of 4 in power), the other factors
are those below. What is proposed is measured again by the same gate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dspark.converters.quality.layers import LayerRow, worst_first
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

MARGIN = 1.5
"""A choice is proposed when its estimated loss is this many times below the limit."""

SMALL_GROUP = 32
GROUP_POWER = {32: 0.8, 64: 1.0, 128: 1.2, -1: 2.0}
"""Power of the error by group size, relative to groups of 64."""

GPTQ_POWER = 0.7
"""Power of the output error after GPTQ, relative to rounding to nearest."""

MOST_RULES = 4
"""Patterns for single layers that a command line may still hold."""

_LAYER = re.compile(r"(model\.layers\.\d+)\..+")


@dataclass(frozen=True)
class Remedy:
    """Flags of `dspark quantize`; None leaves a flag out."""

    scheme: str
    group_size: int | None = None
    method: str | None = None
    rules: tuple[str, ...] = ()

    def flags(self) -> str:
        """As they are typed."""
        parts = [f"--scheme {self.scheme}"]
        if self.group_size is not None:
            parts.append(f"--group-size {self.group_size}")
        if self.method is not None:
            parts.append(f"--method {self.method}")
        return " ".join([*parts, *(f"--rule '{rule}'" for rule in self.rules)])


def find_remedy(quant: QuantConfig | None, rows: list[LayerRow], default_group_size: int, excess: float) -> Remedy | None:
    """The first rung that is estimated to lower the error's power by `excess` and a margin, else the finest that there is.

    None when the engine is not quantized by `dspark quantize`, or is at the finest already.
    """
    if quant is None or quant.modules is not None:
        return None
    rungs = list(_ladder(quant.scheme, rows, default_group_size))
    return next((remedy for remedy, power in rungs if power * excess * MARGIN <= 1.0), rungs[-1][0] if rungs else None)


def _ladder(scheme: QuantScheme, rows: list[LayerRow], default_group_size: int) -> Iterator[tuple[Remedy, float]]:
    """(choice, its error's power relative to the present one), smallest engine first."""
    if scheme.weight_bits >= 8:
        if scheme.name != "w8a16":
            yield Remedy("w8a16"), 0.0
        return
    group = default_group_size if scheme.group_size == -1 else scheme.group_size
    tuned = replace(scheme, group_size=group, method=_solver(scheme.method))
    if tuned != scheme:
        yield _remedy(tuned), _relative(tuned, scheme)
    if scheme.weight_bits == 4 and (rules := worst_rules(rows)):
        yield replace(_remedy(tuned), rules=rules[0]), _relative(tuned, scheme) * rules[1]
    four = replace(tuned, name=_renamed(scheme, 4), weight_bits=4)
    if scheme.weight_bits < 4:
        yield _remedy(four), _relative(four, scheme)
    if four.group_size > SMALL_GROUP:
        small = replace(four, group_size=SMALL_GROUP)
        yield _remedy(small), _relative(small, scheme)
    yield Remedy(_renamed(scheme, 8)), 0.0


def worst_rules(rows: list[LayerRow]) -> tuple[tuple[str, ...], float] | None:
    """Rules that keep the layers with the largest errors in 8 bits, and the share of the error's power that is left.

    None when no few layers stand out: they have to carry half of the power.
    """
    power: dict[str, float] = {}
    for row in worst_first(rows):
        match = _LAYER.fullmatch(row.module)
        place = f"{match[1]}.*" if match else row.module
        power[place] = power.get(place, 0.0) + 10.0 ** ((row.error_db or 0.0) / 10.0)
    total = math.fsum(power.values())
    worst = sorted(power, key=lambda place: -power[place])[:MOST_RULES]
    for count in range(1, len(worst) + 1):
        left = 1.0 - math.fsum(power[place] for place in worst[:count]) / total
        if left <= 0.5 and count < len(power):
            return tuple(f"{place}=w8a16" for place in worst[:count]), left
    return None


def _solver(method: str) -> str:
    return "gptq" if method == "rtn" else method


def _renamed(scheme: QuantScheme, bits: int) -> str:
    return f"w{bits}a16" + ("" if scheme.symmetric else "-asym")


def _remedy(scheme: QuantScheme) -> Remedy:
    return Remedy(scheme.name, scheme.group_size, scheme.method)


def _relative(new: QuantScheme, old: QuantScheme) -> float:
    return _power(new) / _power(old)


def _power(scheme: QuantScheme) -> float:
    group = GROUP_POWER.get(scheme.group_size, 1.0)
    return 4.0**-scheme.weight_bits * group * (1.0 if scheme.method == "rtn" else GPTQ_POWER)
