"""Tables, the record and the HTML report: they say what was measured, and stand alone."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

from dspark.converters.quality.chart import error_chart, worst_of_each
from dspark.converters.quality.evaluation import Evaluation
from dspark.converters.quality.gate import QualityLimits
from dspark.converters.quality.layers import layer_rows, layer_table, worst_first
from dspark.converters.quality.measure import Comparison, Scores
from dspark.converters.quality.report import quality_report
from dspark.converters.quality.windows import TokenSet
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

W4, W8 = QuantScheme("w4a16", 4, group_size=64, method="gptq"), QuantScheme("w8a16", 8)
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
QUANT = QuantConfig.of_modules(dict(zip(MODULES, (W4, W4, W8), strict=True)))
LAYERS = {
    MODULES[0]: {"sqnr_db": 20.0, "output_sqnr_db": 25.0, "bytes": 1000},
    MODULES[1]: {"sqnr_db": 21.0, "output_sqnr_db": 15.5, "bytes": 2000},
    MODULES[2]: {"sqnr_db": None, "bytes": 4000},
}
TOKENS = TokenSet(Path("dir/<notes>.txt"), "text", "ab" * 16, 8, [[1] * 8] * 3, ("2 tokens behind the last whole window are not used",))
COMPARISON = Comparison(Scores(21, 2.0), Scores(21, 2.1), 0.05, 0.004, 0.7, 1.5, 0.9, 0.02)


def evaluation(limits: QualityLimits | None = None) -> Evaluation:
    return Evaluation(TOKENS, COMPARISON, ("bfloat16", "float32"), "base", limits or QualityLimits())


def manifest(**quality: object) -> EngineManifest:
    from tiny_models import make_tiny_model

    from dspark.runtime.models.hf_config import model_config_from_hf

    return EngineManifest(model_config_from_hf(make_tiny_model("llama").config.to_dict()), {}, QUANT, quality=dict(quality))


def test_the_table_has_bits_error_and_bytes() -> None:
    """An error is negative decibels, larger when worse; a module without one is not ranked."""
    rows = layer_rows(QUANT, LAYERS)
    assert [(row.bits, row.error_db, row.num_bytes, row.kind) for row in rows] == [
        (4, -25.0, 1000, "q_proj"),
        (4, -15.5, 2000, "down_proj"),
        (8, None, 4000, "down_proj"),
    ]
    assert [row.module for row in worst_first(rows)] == [MODULES[1], MODULES[0]]
    head, *lines = layer_table(rows)
    assert head.split() == ["layer", "scheme", "bits", "error", "of", "outputs", "bytes"]
    assert lines[1].split() == [MODULES[1], "w4a16", "group", "64", "4", "-15.50", "dB", "2,000"]
    assert len({len(line) for line in (head, *lines)}) == 1


def test_weights_are_the_measure_where_no_outputs_are() -> None:
    plain = {module: {key: value for key, value in entry.items() if key != "output_sqnr_db"} for module, entry in LAYERS.items()}
    rows = layer_rows(QUANT, plain)
    assert [row.error_db for row in rows] == [-20.0, -21.0, None] and not rows[0].of_outputs
    assert layer_rows(None, {}) == []


def test_the_record_is_json_and_says_on_what() -> None:
    record = evaluation(QualityLimits(0.1, 5)).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["file"] == "<notes>.txt" and record["context_length"] == 8 and record["samples"] == 3 and record["tokens"] == 21
    assert record["mean_kl"] == 0.05 and record["p99_kl"] == 0.7 and record["top1_agreement"] == 0.9
    assert math.isclose(record["perplexity"], math.exp(2.1)) and math.isclose(record["ppl_increase_pct"], 100 * math.expm1(0.1))
    assert record["passed"] is False and record["limits"] == {"max_kl": 0.1, "max_ppl_increase_pct": 5}
    assert (record["dtype"], record["baseline_dtype"], record["baseline"]) == ("bfloat16", "float32", "base")


def test_a_record_without_baseline_or_limits_claims_neither() -> None:
    record = Evaluation(TOKENS, Scores(21, 2.0), ("float32",)).record()
    assert not {"mean_kl", "baseline", "passed"} & set(record)
    assert "passed" not in evaluation().record()


def test_infinite_figures_are_null_in_the_record() -> None:
    """JSON knows no infinity, and a broken engine must not break the report of it."""
    record = Evaluation(TOKENS, Scores(21, 800.0), ("float32",)).record()
    assert record["perplexity"] is None
    worse = Comparison(Scores(21, 2.0), Scores(21, 800.0), 700.0, None, 700.0, 700.0, 0.0, None)
    found = Evaluation(TOKENS, worse, ("float32",) * 2, "base", QualityLimits(None, 5.0))
    assert found.record()["ppl_increase_pct"] is None and found.record()["passed"] is False


class Tags(HTMLParser):
    """Counts tags and checks that they are closed; collects text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.open: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_is_whole_escaped_and_stands_alone() -> None:
    document = quality_report(manifest(layers=LAYERS), [evaluation(QualityLimits(0.01, 50))], "<b>engine & co</b>")
    found = Tags(document)
    assert found.addresses == [] and "script" not in found.count and "b" not in found.count
    assert "<b>engine & co</b>" in found.text and "<notes>.txt" in found.text
    assert "mean KL to the baseline is 0.05 nats, --max-kl is 0.01" in found.text and "--max-ppl-increase" not in found.text
    assert all(module in found.text for module in MODULES)
    assert "mixed: w4a16 group 64 (2 layers), w8a16 per channel (1 layer)" in found.text
    assert found.count["svg"] == 1


def test_a_dense_engine_has_no_chart() -> None:
    found = Tags(quality_report(manifest(), [Evaluation(TOKENS, Scores(21, 2.0), ("float32",))], "e"))
    assert "svg" not in found.count and "baseline" not in found.text and "7.3891" in found.text


def test_the_chart_draws_a_bar_per_layer_and_kind() -> None:
    """Of a layer's experts the worst: thousands of bars would be nothing to look at."""
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(2) for e in range(3)]
    layers = {name: {"sqnr_db": 20.0 + number, "bytes": 1} for number, name in enumerate(names)}
    rows = layer_rows(None, layers)
    assert [(place, row.module, error) for place, row, error in worst_of_each(rows)] == [("0", names[0], -20.0), ("1", names[3], -23.0)]
    drawn = Tags(error_chart(rows))
    assert drawn.count["title"] == 2 and drawn.count["rect"] == 2 + 1  # and the legend's
    assert f"{names[0]}: -20.00 dB" in drawn.text
    assert error_chart(layer_rows(None, {"a": {"sqnr_db": None}})) == ""


def test_worse_bars_are_higher() -> None:
    drawn = error_chart(layer_rows(QUANT, LAYERS))
    heights = [float(part.split('"')[0]) for part in drawn.split('height="')[2:] if "dB" in part.split("</rect>")[0]]
    assert len(heights) == 2 and heights[1] > heights[0] > 0
