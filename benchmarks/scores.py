"""How far an engine is from its baseline on given token rows: cross-entropy, KL divergence and top-1 agreement, in float32.

The baseline's logits are computed once per row for all engines that are scored together, and never stored: a row of 512 tokens of
SmolLM2 is 100 MB.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for

FIGURES = ("nll", "kl", "agreement")
Scores = dict[str, list[float]]
"""Figure -> a number per row, in the rows' order."""


def row_scores(logits: torch.Tensor, log_base: torch.Tensor, tokens: list[int]) -> dict[str, float]:
    """Means over the T - 1 positions that have a next token; nll and kl in nats. logits: float32 [T, V]; log_base: log-probabilities of the
    baseline, [T, V]; kl is KL(baseline || engine)."""
    log_probs = torch.log_softmax(logits[:-1], -1)
    base = log_base[:-1]
    targets = torch.tensor(tokens[1:])[:, None]
    return {
        "nll": -float(log_probs.gather(1, targets).mean()),
        "kl": float((base.exp() * (base - log_probs)).sum(-1).mean()),
        "agreement": float((log_probs.argmax(-1) == base.argmax(-1)).float().mean()),
    }


@torch.inference_mode()
def score(
    engines: dict[str, Path], baseline: Path, rows: list[list[int]], progress: Callable[[int], None] = lambda done: None
) -> dict[str, Scores]:
    """Scores of every engine and, under "baseline", of the baseline itself. progress is called with the number of rows done."""
    reference = load_model(baseline, dtype="float32")
    models = {name: load_model(path, dtype="float32") for name, path in engines.items()}
    found: dict[str, Scores] = {name: {figure: [] for figure in FIGURES} for name in ("baseline", *engines)}
    for done, tokens in enumerate(rows, 1):
        base_logits = logits_for(reference, tokens)
        log_base = torch.log_softmax(base_logits, -1)
        for name in found:
            logits = base_logits if name == "baseline" else logits_for(models[name], tokens)
            for figure, value in row_scores(logits, log_base, tokens).items():
                found[name][figure].append(value)
        progress(done)
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
