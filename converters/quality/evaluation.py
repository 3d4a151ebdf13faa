"""One evaluation: what was measured, on what, as a manifest and a report have it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dspark.converters.quality.gate import QualityLimits, Violation, violations
from dspark.converters.quality.measure import Comparison, Scores
from dspark.converters.quality.windows import TokenSet


@dataclass(frozen=True)
class Evaluation:
    """One file's figures. result: a comparison where there is a baseline. baseline: its name; dtypes: of the runs, the engine's first."""

    tokens: TokenSet
    result: Scores | Comparison
    dtypes: tuple[str, ...]
    baseline: str | None = None
    limits: QualityLimits = field(default_factory=QualityLimits)

    @property
    def comparison(self) -> Comparison | None:
        return self.result if isinstance(self.result, Comparison) else None

    @property
    def scores(self) -> Scores:
        """The engine's own."""
        return self.result.candidate if isinstance(self.result, Comparison) else self.result

    def broken(self) -> list[Violation]:
        """The limits that the comparison is beyond."""
        return [] if self.comparison is None else violations(self.comparison, self.limits)

    def record(self) -> dict[str, Any]:
        """JSON value. A figure that is not finite is null."""
        tokens = self.tokens
        figures: dict[str, Any] = {
            "file": tokens.path.name,
            "kind": tokens.kind,
            "xxh3": tokens.xxh3,
            "context_length": tokens.context_length,
            "samples": len(tokens.samples),
            "tokens": self.scores.num_tokens,
            "dtype": self.dtypes[0],
            "perplexity": self.scores.perplexity,
        }
        comparison = self.comparison
        if comparison is not None:
            figures |= {
                "baseline": self.baseline,
                "baseline_dtype": self.dtypes[-1],
                "baseline_perplexity": comparison.baseline.perplexity,
                "ppl_increase_pct": comparison.ppl_increase,
                "ppl_increase_pct_se": comparison.ppl_increase_se,
                "mean_kl": comparison.mean_kl,
                "mean_kl_se": comparison.mean_kl_se,
                "p99_kl": comparison.p99_kl,
                "max_kl": comparison.max_kl,
                "top1_agreement": comparison.top1_agreement,
            }
            if self.limits:
                figures["limits"] = {"max_kl": self.limits.max_kl, "max_ppl_increase_pct": self.limits.max_ppl_increase}
                figures["passed"] = not self.broken()
        if tokens.notes:
            figures["notes"] = list(tokens.notes)
        return {key: _finite(value) for key, value in figures.items()}

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [f"{self.tokens.kind:<12} {self.tokens.path.name}: {self.tokens.describe()}, {self.scores.num_tokens} tokens scored"]
        lines += [f"{'note':<12} {note}" for note in self.tokens.notes]
        comparison = self.comparison
        if comparison is None:
            return [*lines, f"{'perplexity':<12} {self.scores.perplexity:.4f}"]
        increase = f"{comparison.ppl_increase:+.3f} %{_error(comparison.ppl_increase_se)}"
        return [
            *lines,
            f"{'perplexity':<12} {self.scores.perplexity:.4f}, baseline {comparison.baseline.perplexity:.4f}: {increase}",
            f"{'mean KL':<12} {comparison.mean_kl:.6f}{_error(comparison.mean_kl_se)} nats, p99 {comparison.p99_kl:.4f}, "
            f"largest {comparison.max_kl:.4f}",
            f"{'top-1':<12} {100 * comparison.top1_agreement:.2f} % of the tokens agree",
        ]


def _error(value: float | None) -> str:
    return "" if value is None else f" (standard error {value:.2g})"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
