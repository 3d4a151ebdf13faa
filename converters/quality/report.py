"""The quality report: one HTML file that needs nothing else, no script and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dspark.converters.quality.chart import error_chart
from dspark.converters.quality.evaluation import Evaluation
from dspark.converters.quality.layers import LayerRow, layer_rows, worst_first
from dspark.runtime.spec.manifest import EngineManifest

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: #b00020; font-weight: 600; } .good { color: #1a7f37; font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: #444; }
"""


def quality_report(manifest: EngineManifest, evaluations: Sequence[Evaluation], title: str) -> str:
    """The whole document. title: the engine's name. The layers are those of the manifest's report; a dense engine has none."""
    rows = layer_rows(manifest.quant, manifest.quality.get("layers", {}))
    body = [f"<h1>{escape(title)}</h1>", _facts(manifest)]
    body += [_evaluation(evaluation) for evaluation in evaluations]
    if rows:
        body += ["<h2>Error by layer</h2>", error_chart(rows), _worst(rows), "<h2>Layers</h2>", _layers(rows)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: quality</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _facts(manifest: EngineManifest) -> str:
    quant = manifest.quant
    facts = [("family", manifest.model.family), ("dtype", manifest.model.dtype)]
    facts.append(("scheme", "none: not quantized" if quant is None else quant.describe()))
    if quant is not None:
        facts.append(("method", quant.scheme.method))
    facts.append(("weights", f"{manifest.weight_bytes() / 1e6:,.1f} MB"))
    return _pairs(facts)


def _evaluation(evaluation: Evaluation) -> str:
    """One file's figures as a table, with the verdict where there were limits."""
    tokens, comparison = evaluation.tokens, evaluation.comparison
    facts = [("measured on", f"{tokens.describe()}, {evaluation.scores.num_tokens:,} tokens scored")]
    facts += [("note", note) for note in tokens.notes]
    facts.append(("dtype of the run", evaluation.dtypes[0]))
    facts.append(("perplexity", f"{evaluation.scores.perplexity:.4f}"))
    if comparison is not None:
        facts += [
            ("baseline", f"{evaluation.baseline} ({evaluation.dtypes[-1]})"),
            ("its perplexity", f"{comparison.baseline.perplexity:.4f}"),
            ("increase", _with_error(comparison.ppl_increase, comparison.ppl_increase_se, "%")),
            ("mean KL", _with_error(comparison.mean_kl, comparison.mean_kl_se, "nats")),
            ("99th percentile of KL", f"{comparison.p99_kl:.4f} nats"),
            ("largest KL", f"{comparison.max_kl:.4f} nats"),
            ("top-1 agreement", f"{100 * comparison.top1_agreement:.2f} %"),
        ]
    return f"<h2>{escape(tokens.path.name)}</h2>" + _pairs(facts) + _verdict(evaluation)


def _verdict(evaluation: Evaluation) -> str:
    if evaluation.comparison is None or not evaluation.limits:
        return ""
    broken = evaluation.broken()
    if not broken:
        return '<p class="good">within the limits</p>'
    return "".join(f'<p class="bad">{escape(violation.shown)}</p>' for violation in broken)


def _worst(rows: list[LayerRow]) -> str:
    worst = worst_first(rows)[:5]
    return "<p>Largest error: " + ", ".join(f"{escape(row.module)} ({row.error_db:.1f} dB)" for row in worst) + "</p>" if worst else ""


def _layers(rows: list[LayerRow]) -> str:
    of = "outputs" if rows[0].of_outputs else "weights"
    head = f'<tr><th>layer</th><th>scheme</th><th class="n">bits</th><th class="n">error of {of}, dB</th><th class="n">bytes</th></tr>'
    cells = []
    for row in rows:
        scheme = "dense" if row.scheme is None else row.scheme.describe()
        bits = "" if row.bits is None else row.bits
        error = "-" if row.error_db is None else f"{row.error_db:.2f}"
        cells.append(
            f'<tr><td>{escape(row.module)}</td><td>{escape(scheme)}</td><td class="n">{bits}</td>'
            f'<td class="n">{error}</td><td class="n">{row.num_bytes:,}</td></tr>'
        )
    return f"<table>{head}{''.join(cells)}</table>"


def _pairs(facts: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts) + "</table>"


def _with_error(value: float, error: float | None, unit: str) -> str:
    return f"{value:.6g} {unit}" + ("" if error is None else f", standard error {error:.2g}")
