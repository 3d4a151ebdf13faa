"""The quality gate: a measured comparison against the user's limits, and what to type when it is beyond them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspark.converters.quality.layers import LayerRow, LayersReport, layer_rows, worst_first
from dspark.converters.quality.measure import Comparison
from dspark.converters.quality.remedy import Asked, find_remedy
from dspark.runtime.spec.errors import QualityError
from dspark.runtime.spec.quant import QuantConfig

SHOWN_LAYERS = 3


@dataclass(frozen=True)
class QualityLimits:
    """max_kl: nats, of the mean over tokens. max_ppl_increase: percent of the baseline's perplexity. None: no limit."""

    max_kl: float | None = None
    max_ppl_increase: float | None = None

    def __bool__(self) -> bool:
        return self.max_kl is not None or self.max_ppl_increase is not None


@dataclass(frozen=True)
class Violation:
    """A limit that a measured value is beyond. shown: both in words."""

    flag: str
    measured: float
    limit: float
    shown: str


def violations(comparison: Comparison, limits: QualityLimits) -> list[Violation]:
    """The limits that are broken. A value that is no number breaks every limit."""
    found = []
    kl, increase = comparison.mean_kl, comparison.ppl_increase
    if limits.max_kl is not None and not kl <= limits.max_kl:
        found.append(Violation("--max-kl", kl, limits.max_kl, f"mean KL to the baseline is {kl:.4g} nats, --max-kl is {limits.max_kl:g}"))
    if limits.max_ppl_increase is not None and not increase <= limits.max_ppl_increase:
        shown = f"perplexity is {increase:.4g} % above the baseline's, --max-ppl-increase is {limits.max_ppl_increase:g}"
        found.append(Violation("--max-ppl-increase", increase, limits.max_ppl_increase, shown))
    return found


def check(
    comparison: Comparison,
    limits: QualityLimits,
    quant: QuantConfig | None,
    layers: LayersReport,
    asked: Asked | None = None,
    outcome: str = "nothing was published",
) -> None:
    """Raise QualityError (exit code 6) when a limit is broken.

    Its line has the measured value and the limit, the worst layers, and the flags of `dspark quantize` that are likely to stay within it.
    quant and layers: of the candidate, as its manifest has them. asked: what the user typed, to be typed again.
    outcome: what came of the candidate, said before the remedy ("" for nothing to say).
    """
    broken = violations(comparison, limits)
    if not broken:
        return
    rows = layer_rows(quant, layers)
    message = f"quality gate: {'; '.join(v.shown for v in broken)}"
    if worst := worst_words(rows):
        message += f"; {worst}"
    asked = asked or Asked()
    remedy = find_remedy(quant.scheme if quant else None, rows, asked, max(excess(v) for v in broken))
    advice = f"quantize again with: {remedy.flags(asked)}" if remedy else raised_limits(broken)
    raise QualityError(message, f"{outcome}; {advice}" if outcome else advice)


def excess(violation: Violation) -> float:
    """How many times a value is over its limit: the factor by which the error's power has to fall.

    KL is quadratic in a small error of the weights, so proportional to its power; so is, about, the logarithm of the perplexity's ratio.
    """
    if violation.limit <= 0 or not math.isfinite(violation.measured):
        return math.inf
    if violation.flag == "--max-ppl-increase":
        return math.log1p(violation.measured / 100) / math.log1p(violation.limit / 100)
    return violation.measured / violation.limit


def worst_words(rows: list[LayerRow]) -> str:
    """The layers with the largest error, in words; "" when none was measured."""
    worst = worst_first(rows)[:SHOWN_LAYERS]
    if not worst:
        return ""
    of = "outputs" if worst[0].of_outputs else "weights"
    return f"largest error of {of}: " + ", ".join(f"{row.module} ({row.error_db:.1f} dB)" for row in worst)


def raised_limits(broken: list[Violation]) -> str:
    """What to type when no other scheme is more accurate."""
    raised = " ".join(f"{v.flag} {_above(v.measured)}" for v in broken if math.isfinite(v.measured))
    return f"type {raised} to accept it, or keep the model as it is" if raised else "keep the model as it is"


def _above(value: float) -> str:
    """A limit of two digits that the value stays within."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.6g}"
