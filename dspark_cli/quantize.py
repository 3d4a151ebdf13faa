"""`dspark quantize`: an engine or any checkpoint -> a quantized engine directory."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.runtime.spec.engine_config import DEVICE_CHOICES
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.kv_cache import QUANTIZED_CACHES
from dspark.runtime.spec.openmp import bound_spinning
from dspark.runtime.spec.quant import GROUP_SIZES, PRESETS
from dspark_cli.console import Console
from dspark_cli.convert import DTYPES, ByteProgress, report_result
from dspark_cli.options import add_command, argument, flag

if TYPE_CHECKING:
    from dspark.converters.calibration.run import CalibratedRun
    from dspark.converters.gate import Gate
    from dspark.converters.pipeline import Result
    from dspark.converters.quantizers.base import SolverOptions

METHODS = ("rtn", "gptq", "awq", "awq-gptq", "smoothquant", "smoothquant-gptq")
ACTIVATIONS = ("memory", "disk")
FP8_INPUTS = ("dynamic", "static")


@dataclass(frozen=True)
class QuantizeOptions:
    """Flags of `dspark quantize`."""

    source: Path = argument("engine directory, or any checkpoint that convert reads")
    engine: Path = argument("engine directory to write")
    scheme: str | None = flag(None, "how weights are stored; required", choices=tuple(PRESETS))
    method: str = flag("rtn", "how codes are chosen; all but rtn need --calibration, rtn is better with it", choices=METHODS)
    group_size: int | None = flag(
        None,
        "inputs that share one step; -1: a whole row (default: 8 bit -1, fewer the largest of 128, 64, 32 that divides every layer)",
        choices=(*GROUP_SIZES, -1),
    )
    ignore: tuple[str, ...] = flag((), "glob of module names that stay as they are; repeatable", metavar="PATTERN")
    rule: tuple[str, ...] = flag((), "another scheme, or dense, for the modules that a glob names; repeatable", metavar="PATTERN=SCHEME")
    head_scheme: str | None = flag(
        None, "store the output head so too; one that is the embedding gets a copy of its own (default: as it is)", choices=tuple(PRESETS)
    )
    target_bpw: float | None = flag(None, "spend X bits per weight (steps included) on the layers by what each loses", low=2, high=8.5)
    calibration: Path | None = flag(None, "text to calibrate on: .jsonl lines in the batch format, or .txt", metavar="FILE")
    samples: int = flag(128, "most samples to take from the calibration file", low=1, high=65536)
    sample_tokens: int = flag(512, "longest sample, in tokens", low=2, high=65536)
    self_generate: bool = flag(False, "calibrate on the model's own greedy answers too, for lines that have none", names="--self-generate")
    fp8_inputs: str | None = flag(None, "round the inputs of float8 layers too, each token or with a calibrated scale", choices=FP8_INPUTS)
    act_order: bool = flag(True, "GPTQ: treat the inputs that matter most first")
    static_groups: bool = flag(True, "GPTQ: with --act-order groups stay neighbours; without, they are stored with a permutation")
    damp: float = flag(0.01, "GPTQ: damping of the Hessian, relative to its mean diagonal", low=0.0, high=1.0)
    kv_cache_dtype: str | None = flag(None, "calibrate scales for an 8-bit KV cache too; generate then takes it", choices=QUANTIZED_CACHES)
    gptaq: float | None = flag(None, "GPTQ: correct for the error of the inputs too, with this strength (0.25)", low=0.0, high=1.0)
    activations: str = flag("memory", "where activations between layers are kept", choices=ACTIVATIONS)
    resume: bool = flag(False, "go on with the layers that an interrupted run with the same settings has finished", names="--resume")
    eval: Path | None = flag(
        None, "text to measure the result on against the source, .txt or .jsonl (default: as --calibration)", metavar="FILE"
    )
    max_kl: float | None = flag(None, "exit 6 and publish nothing when the mean KL to the source is larger, in nats", low=0)
    max_ppl_increase: float | None = flag(None, "exit 6 and publish nothing when perplexity rises by more percent", low=0)
    dtype: str = flag("auto", "dtype of what is not quantized; auto: the checkpoint's own", choices=DTYPES)
    device: str = flag("auto", "where samples are taken through the model", choices=DEVICE_CHOICES)
    audit: bool = flag(True, "compare the engine with transformers on the same quantized weights before publishing")
    report: Path | None = flag(None, "write the table and the error by layer to FILE", metavar="FILE.html")
    force: bool = flag(False, "replace an engine that is already there")


def quantize(console: Console, options: QuantizeOptions) -> int:
    """Quantize an engine or a checkpoint.

    Exit code 6: the audit or a limit (--max-kl, --max-ppl-increase) refuses; nothing is published.
    """
    if options.scheme is None:
        raise UsageError("--scheme is missing", f"type --scheme with one of {', '.join(PRESETS)}")
    bound_spinning()
    from dspark.converters.pipeline import quantize as run
    from dspark.converters.quantize import parse_rule

    rules = tuple(parse_rule(str(rule)) for rule in options.rule)
    gate = gate_of(options)
    start = time.monotonic()
    console.note(f"quantizing {options.source} to {options.scheme}")
    calibrated, bar = calibrated_run(console, options)
    progress = None if calibrated is not None else ByteProgress(console)
    try:
        result = run(
            options.source,
            options.engine,
            options.scheme,
            options.method,
            options.group_size,
            options.ignore,
            options.dtype,
            options.audit,
            options.force,
            progress=progress,
            rules=rules,
            solver=solver_of(options),
            calibrated=calibrated,
            gate=gate,
            kv_cache_dtype=options.kv_cache_dtype,
            target_bpw=options.target_bpw,
            fp8_inputs=options.fp8_inputs,
            head_scheme=options.head_scheme,
        )
    finally:
        if progress is not None:
            progress.close()
        bar.close()
    show(console, options, result, gate)
    report_result(console, result, time.monotonic() - start)
    return 0


def calibrated_run(console: Console, options: QuantizeOptions) -> tuple[CalibratedRun | None, LayerBar]:
    """How the model is shown its samples, None when nothing looks at them; and the bar that shows it."""
    from dspark.converters.calibration.driver import WalkOptions
    from dspark.converters.calibration.run import CalibratedRun
    from dspark.converters.calibration.samples import SampleRequest

    bar = LayerBar(console)
    if options.calibration is None:
        return None, bar
    request = SampleRequest(options.calibration, options.samples, options.sample_tokens, options.self_generate)
    walk = WalkOptions(options.device, on_disk=options.activations == "disk")
    return CalibratedRun(request, walk, options.resume, bar), bar


def solver_of(options: QuantizeOptions) -> SolverOptions:
    """The solvers' options as the flags have them."""
    from dspark.converters.quantizers.base import SolverOptions

    return SolverOptions(act_order=options.act_order, static_groups=options.static_groups, damp=options.damp, gptaq_alpha=options.gptaq)


def gate_of(options: QuantizeOptions) -> Gate | None:
    """What the result is measured on. Raises UsageError for limits without a text to measure on."""
    from dspark.converters.gate import Gate
    from dspark.converters.quality.gate import QualityLimits
    from dspark.converters.quality.remedy import Asked

    limits = QualityLimits(options.max_kl, options.max_ppl_increase)
    file = options.eval or (options.calibration if limits else None)
    if file is None:
        if limits:
            raise UsageError("--max-kl and --max-ppl-increase need a text to measure on", "type --eval FILE with a .txt or .jsonl")
        return None
    asked = Asked(
        rules=tuple(map(str, options.rule)),
        ignore=options.ignore,
        head_scheme=options.head_scheme,
        target_bpw=options.target_bpw,
        kv_cache_dtype=options.kv_cache_dtype,
        fp8_inputs=options.fp8_inputs,
        calibration=str(options.calibration or file),
    )
    return Gate(file, limits, calibrated_on=file == options.calibration, asked=asked)


class LayerBar:
    """The driver's progress callback, drawn as a bar of layers with what the last one lost."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None

    def __call__(self, done: int, total: int, words: str) -> None:
        if self._bar is None:
            self._bar = self._console.progress(total, "layer")
        self._bar.advance(1)
        self._console.detail(words)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def show(console: Console, options: QuantizeOptions, result: Result, gate: Gate | None) -> None:
    """The table of layers with --verbose, the measured loss, the report."""
    from dspark.converters.quality.layers import layer_rows, layer_table
    from dspark.converters.quality.report import quality_report

    manifest = result.manifest
    for line in layer_table(layer_rows(manifest.quant, manifest.quality["layers"])):
        console.detail(line)
    evaluation = gate.evaluation if gate is not None else None
    for line in evaluation.lines() if evaluation is not None else ():
        console.note(line)
    if options.report is not None:
        options.report.write_text(quality_report(manifest, [evaluation] if evaluation else [], result.engine.name), encoding="utf-8")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, quantize, QuantizeOptions)
