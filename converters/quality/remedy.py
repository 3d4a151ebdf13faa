"""What to quantize with instead, when the measured loss is beyond a limit: a ladder of choices, smallest engine first.

Each rung has an estimate of the error's power relative to the present choice; the first one that is estimated to stay within the limit,
with a margin, is proposed. Estimates are rough on purpose: what is proposed is measured again by the same gate. docs/quality.md has the
measurements behind them.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from dspark.converters.quality.layers import LayerRow, worst_first
from dspark.converters.quantize import CALIBRATED_METHODS, SCALED_BY
from dspark.runtime.spec.quant import QuantScheme, preset

MARGIN = 1.5
"""A choice is proposed when its estimated loss is this many times below the limit."""

BIT_POWER = 0.25
"""Power of the error for each bit more: a step halves."""

SMALL_GROUP = 32
GROUP_POWER = {32: 0.8, 64: 1.0, 128: 1.2, -1: 2.0}
"""Power of the error by group size, relative to groups of 64."""

GPTQ_POWER = 0.7
"""Power of the outputs' error after GPTQ, relative to rounding to nearest."""

BETTER_8_BIT = {"int8": "smoothquant-gptq", "fp8": "gptq"}
"""storage -> its best method"""
BETTER_POWER, BETTER_AFTER_SMOOTHQUANT, W8A16_AFTER_W8A8, W8A16_AFTER_FP8 = 0.45, 0.8, 0.3, 0.1
"""The same for 8-bit schemes, relative to the scheme and method that they replace."""

BEST_HEAD = "w8a16"
"""What an output head is proposed in whose scheme has fewer bits."""

MOST_BITS = 7.0
"""Bits per weight beyond which 8 for all are proposed."""

MOST_RULES = 4
"""Patterns for single layers that a command line may still hold."""

_LAYER = re.compile(r"(model\.layers\.\d+)\..+")


@dataclass(frozen=True)
class Asked:
    """What the user asked `dspark quantize` for, as far as the engine's scheme does not say it.

    default_group_size: what it takes for 4 bits on this model. rules: PATTERN=SCHEME. The others are flags; calibration: the file of that
    flag, for what needs one.
    """

    default_group_size: int = -1
    rules: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    head_scheme: str | None = None
    target_bpw: float | None = None
    kv_cache_dtype: str | None = None
    fp8_inputs: str | None = None
    calibration: str = "FILE"


@dataclass(frozen=True)
class Remedy:
    """Flags of `dspark quantize`; None leaves a flag out."""

    scheme: str
    group_size: int | None = None
    method: str | None = None
    rules: tuple[str, ...] = ()
    target_bpw: float | None = None

    def flags(self, asked: Asked) -> str:
        """As they are typed into a shell, with those of the user's that still hold. A head of fewer than 8 bits gets 8: its error is in the
        logits, and no layer after it makes up for any."""
        head = None if asked.head_scheme is None else preset(asked.head_scheme)
        reads = self.method in CALIBRATED_METHODS or self.target_bpw is not None or asked.kv_cache_dtype is not None
        flags: list[tuple[str, str | float | None]] = [
            ("--scheme", self.scheme),
            ("--group-size", self.group_size),
            ("--method", self.method),
            ("--target-bpw", self.target_bpw),
            ("--head-scheme", None if head is None else BEST_HEAD if head.weight_bits < 8 else head.name),
            ("--fp8-inputs", asked.fp8_inputs if preset(self.scheme).storage == "fp8" else None),
            ("--kv-cache-dtype", asked.kv_cache_dtype),
            ("--calibration", asked.calibration if reads else None),
            *(("--ignore", pattern) for pattern in asked.ignore),
            *(("--rule", rule) for rule in self.rules),
        ]
        typed = [(flag, value if isinstance(value, str) else f"{value:g}") for flag, value in flags if value is not None]
        return shlex.join(chain.from_iterable(typed))


def find_remedy(scheme: QuantScheme | None, rows: list[LayerRow], asked: Asked, excess: float) -> Remedy | None:
    """The first rung that is estimated to lower the error's power by `excess` and a margin, else the last one.

    scheme: of most layers. None for a model that is not quantized, or has the most accurate scheme that there is.
    """
    if scheme is None:
        return None
    if asked.target_bpw is not None:
        return _more_bits(scheme, rows, asked, excess * MARGIN)
    rungs = list(_eight_bits(scheme, asked) if scheme.weight_bits >= 8 else _fewer_bits(scheme, rows, asked))
    if not rungs and asked.head_scheme is not None and preset(asked.head_scheme).weight_bits < 8:
        return Remedy(scheme.name, scheme.group_size)
    return next((remedy for remedy, power in rungs if power * excess * MARGIN <= 1.0), rungs[-1][0] if rungs else None)


def _more_bits(scheme: QuantScheme, rows: list[LayerRow], asked: Asked, factor: float) -> Remedy:
    """What makes the power of the error `factor` times smaller where --target-bpw chose the bits: more to spend, then 8 bits everywhere."""
    assert asked.target_bpw is not None
    method = scheme.method if scheme.method in CALIBRATED_METHODS else "gptq"
    if method != scheme.method:
        factor *= GPTQ_POWER
    few_bits = next((row.scheme for row in rows if row.scheme is not None and row.scheme.weight_bits < 8), scheme)
    wanted = asked.target_bpw + max(0.0, math.log(factor) / -math.log(BIT_POWER)) if math.isfinite(factor) else math.inf
    if wanted > MOST_BITS:
        return Remedy("w8a16")
    group = None if few_bits.group_size in (-1, asked.default_group_size) else few_bits.group_size
    return Remedy("w4a16" if scheme.symmetric else "w4a16-asym", group, method, target_bpw=math.ceil(10 * wanted) / 10)


def _eight_bits(scheme: QuantScheme, asked: Asked) -> Iterator[tuple[Remedy, float]]:
    if scheme.storage == "wna16":
        if scheme.group_size == -1 and asked.default_group_size != -1:
            yield Remedy(scheme.name, asked.default_group_size, rules=asked.rules), _relative(scheme, group_size=asked.default_group_size)
        return
    better = BETTER_8_BIT[scheme.storage]
    if scheme.method != better:
        power = BETTER_AFTER_SMOOTHQUANT if scheme.method in SCALED_BY else BETTER_POWER
        yield Remedy(scheme.name, method=better, rules=asked.rules), power
    yield Remedy("w8a16"), W8A16_AFTER_W8A8 if scheme.storage == "int8" else W8A16_AFTER_FP8


def _fewer_bits(scheme: QuantScheme, rows: list[LayerRow], asked: Asked) -> Iterator[tuple[Remedy, float]]:
    """(choice, its error's power relative to the present one): method and groups, single layers, bits, smaller groups, 8 bits."""
    group = asked.default_group_size if scheme.group_size == -1 else scheme.group_size
    method = scheme.method if scheme.method in CALIBRATED_METHODS else "gptq"
    four = "w4a16" if scheme.symmetric else "w4a16-asym"
    tuned = Remedy(scheme.name, group, method, asked.rules)
    if (group, method) != (scheme.group_size, scheme.method):
        yield tuned, _relative(scheme, group_size=group, method=method)
    if scheme.weight_bits == 4 and (found := worst_rules(rows)) is not None:
        yield replace(tuned, rules=(*asked.rules, *found[0])), _relative(scheme, group_size=group, method=method) * found[1]
    if scheme.weight_bits < 4:
        yield replace(tuned, scheme=four), _relative(scheme, group_size=group, method=method, weight_bits=4)
    if group > SMALL_GROUP and scheme.weight_bits <= 4:
        small = replace(tuned, scheme=four, group_size=SMALL_GROUP)
        yield small, _relative(scheme, group_size=SMALL_GROUP, method=method, weight_bits=4)
    yield Remedy("w8a16"), _relative(scheme, group_size=-1, method="rtn", weight_bits=8)


def worst_rules(rows: list[LayerRow]) -> tuple[tuple[str, ...], float] | None:
    """Rules that keep the layers with the largest errors in 8 bits, and the share of the error's power that is left.

    None when no few layers stand out: a quarter of them or less has to carry half of the power.
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
        if left <= 0.5 and count <= len(power) // 4:
            return tuple(f"{place}=w8a16" for place in worst[:count]), left
    return None


def _relative(scheme: QuantScheme, **changes: object) -> float:
    """Power of the error of a scheme with some fields changed, relative to the scheme's own."""
    return _power(replace(scheme, **changes)) / _power(scheme)  # type: ignore[arg-type]


def _power(scheme: QuantScheme) -> float:
    calibrated = GPTQ_POWER if scheme.method in CALIBRATED_METHODS else 1.0
    return BIT_POWER**scheme.weight_bits * GROUP_POWER.get(scheme.group_size, 1.0) * calibrated
