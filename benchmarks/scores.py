"""How far an engine is from its baseline on given token rows: cross-entropy, KL divergence and top-1 agreement, in float32.

The figures are those of `dspark eval`, by its own code, but kept for each row: two quantizers are compared row by row, in which the rows'
own difficulty has no part.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from dspark.converters.quality.measure import FinalStates, compare
from dspark.converters.quality.subject import open_subject

FIGURES = ("nll", "kl", "agreement")
Scores = dict[str, list[float]]
"""Figure -> a number per row, in the rows' order. nll and kl are means over the row's scored tokens, in nats; agreement is 0 to 1."""


def states_of(engine: Path, rows: list[list[int]]) -> FinalStates:
    """The engine's residual stream of all rows, in float32."""
    subject = open_subject(engine, engine_only=True)
    return subject.states(subject.kernels("float32", "cpu", "auto"), rows)


def row_scores(baseline: FinalStates, candidate: FinalStates, rows: list[list[int]]) -> Scores:
    """The candidate against the baseline, each row by itself."""
    found: Scores = {figure: [] for figure in FIGURES}
    for row, end in zip(rows, accumulate(map(len, rows)), strict=True):
        part = slice(end - len(row), end)
        base, ours = (replace(model, states=model.states[part]) for model in (baseline, candidate))
        comparison = compare(base, ours, [row])
        found["nll"].append(comparison.candidate.mean_nll)
        found["kl"].append(comparison.mean_kl)
        found["agreement"].append(comparison.top1_agreement)
    return found


def score(
    engines: dict[str, Path], baseline: Path, rows: list[list[int]], finished: Callable[[str, Scores], None] = lambda name, found: None
) -> dict[str, Scores]:
    """Scores of every engine and, under "baseline", of the baseline itself. finished is called as each is there."""
    reference = states_of(baseline, rows)
    found: dict[str, Scores] = {}
    for name, path in {"baseline": baseline, **engines}.items():
        model = reference if name == "baseline" else states_of(path, rows)
        found[name] = row_scores(reference, model, rows)
        finished(name, found[name])
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def standard_error(values: list[float]) -> float:
    """Of the mean of independent values; nan for fewer than two."""
    if len(values) < 2:
        return math.nan
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def summarize(scores: Scores, baseline: Scores) -> dict[str, float]:
    """Perplexity, its increase over the baseline in percent, mean KL, agreement; each `_se` is a standard error over the rows.

    The increase is paired: a row's difference of nll, which the row's own difficulty has no part in.
    """
    increases = [ours - base for ours, base in zip(scores["nll"], baseline["nll"], strict=True)]
    return {
        "ppl": math.exp(mean(scores["nll"])),
        "ppl_increase_pct": 100 * math.expm1(mean(increases)),
        "ppl_increase_pct_se": 100 * standard_error(increases) * math.exp(mean(increases)),
        "kl": mean(scores["kl"]),
        "kl_se": standard_error(scores["kl"]),
        "agreement_pct": 100 * mean(scores["agreement"]),
    }


def paired(ours: Scores, theirs: Scores) -> dict[str, float]:
    """Ours against theirs row by row: relative difference of perplexity and of mean KL in percent, with standard errors.

    Negative: ours is nearer to the baseline. The error of the ratio of mean KLs is that of the paired differences (delta method).
    """
    nll = [a - b for a, b in zip(ours["nll"], theirs["nll"], strict=True)]
    ratio = mean(ours["kl"]) / mean(theirs["kl"]) if mean(theirs["kl"]) else math.nan
    residuals = [a - ratio * b for a, b in zip(ours["kl"], theirs["kl"], strict=True)]
    return {
        "ppl_pct": 100 * math.expm1(mean(nll)),
        "ppl_pct_se": 100 * standard_error(nll) * math.exp(mean(nll)),
        "kl_pct": 100 * (ratio - 1),
        "kl_pct_se": 100 * standard_error(residuals) / mean(theirs["kl"]) if mean(theirs["kl"]) else math.nan,
    }


def read_rows(path: Path) -> list[dict]:
    """Lines of a samples file: `custom_id` and `prompt`, a list of token ids."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stored(path: Path, key: dict) -> Scores | None:
    """Scores kept in a file, if they were made of the same engine, baseline and rows."""
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["scores"] if document["key"] == key else None


def store(path: Path, key: dict, scores: Scores) -> None:
    """Keep scores; a file that is there is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"key": key, "scores": scores}) + "\n", encoding="utf-8")
    os.replace(partial, path)
