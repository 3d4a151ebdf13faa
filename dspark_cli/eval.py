"""`dspark eval ENGINE`: perplexity, and with a baseline how far the engine's distributions are from it."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.runtime.spec.engine_config import DEVICE_CHOICES, KERNEL_CHOICES
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.openmp import bound_spinning
from dspark_cli.console import Console
from dspark_cli.convert import DTYPES, describe_scheme
from dspark_cli.options import add_command, argument, flag

if TYPE_CHECKING:
    from dspark.converters.quality.evaluation import Evaluation
    from dspark.converters.quality.gate import QualityLimits
    from dspark.converters.quality.measure import Progress
    from dspark.converters.quality.subject import Subject
    from dspark.converters.quality.windows import TokenSet


@dataclass(frozen=True)
class EvalOptions:
    """Flags of `dspark eval`."""

    engine: Path = argument("engine directory")
    baseline: Path | None = flag(None, "engine to compare with, or a checkpoint that is not quantized", metavar="DIR")
    text: Path | None = flag(None, "measure on a text in UTF-8, in windows of the context length", metavar="FILE")
    prompts: Path | None = flag(None, "measure on lines in the batch format, as the chat template renders them", metavar="FILE.jsonl")
    context_length: int | None = flag(None, "tokens of a window (default: 2048, or the model's context where that is less)", low=2)
    max_eval_tokens: int | None = flag(None, "stop after N tokens of each file (default: all of it)", low=2)
    max_kl: float | None = flag(None, "exit 6 when the mean KL to the baseline is larger, in nats", low=0)
    max_ppl_increase: float | None = flag(None, "exit 6 when perplexity is more than X percent above the baseline's", low=0)
    dtype: str = flag("auto", "dtype of the runs; auto: each engine's own", choices=DTYPES)
    device: str = flag("auto", "where to run", choices=DEVICE_CHOICES)
    kernels: str = flag("auto", "which kernels to take", choices=KERNEL_CHOICES)
    threads: int | None = flag(None, "CPU threads (default: the cores this process may use)", low=1, high=1024)
    report: Path | None = flag(None, "write tables and the error by layer to FILE", metavar="FILE.html")


def eval(console: Console, options: EvalOptions) -> int:
    """Perplexity of an engine, and how far it is from a baseline.

    With --baseline: KL divergence of the next token's distribution, mean and 99th percentile, and how often the likeliest token agrees.
    Exit code 6: a limit (--max-kl, --max-ppl-increase) is broken.
    """
    if options.text is None and options.prompts is None:
        raise UsageError("nothing to measure on is given", "type --text FILE or --prompts FILE.jsonl")
    if options.baseline is None and (options.max_kl is not None or options.max_ppl_increase is not None):
        raise UsageError("--max-kl and --max-ppl-increase need a baseline", "add --baseline DIR")
    report_path = check_report_path(options)
    bound_spinning()
    from dspark.converters.quality.gate import QualityLimits
    from dspark.converters.quality.subject import open_subject

    started = time.monotonic()
    engine = open_subject(options.engine, engine_only=True)
    baseline = open_subject(options.baseline) if options.baseline is not None else None
    limits = QualityLimits(options.max_kl, options.max_ppl_increase)
    evaluations = [measure(console, options, engine, baseline, tokens, limits) for tokens in read_tokens(options, engine, baseline)]
    if report_path is not None:
        write_report(report_path, engine, evaluations)
    show(console, options, engine, evaluations, time.monotonic() - started)
    check_limits(engine, evaluations)
    return 0


def read_tokens(options: EvalOptions, engine: Subject, baseline: Subject | None) -> list[TokenSet]:
    """What the given files hold, checked against both models. Raises InputError and UsageError."""
    from dspark.converters.quality.subject import check_same_tokens
    from dspark.converters.quality.windows import line_samples, resolve_context, text_windows
    from dspark.runtime.jobs.tokenizer import load_codec

    context = resolve_context(engine.config, options.context_length)
    if baseline is not None:
        context = resolve_context(baseline.config, options.context_length or min(context, baseline.config.context_length))
    codec = load_codec(engine.path)
    found = []
    if options.text is not None:
        found.append(text_windows(options.text, codec, engine.config, context, options.max_eval_tokens))
    if options.prompts is not None:
        found.append(line_samples(options.prompts, codec, engine.config, context, options.max_eval_tokens))
    if baseline is not None:
        for tokens in found:
            check_same_tokens(tokens, codec, baseline)
    return found


def measure(
    console: Console, options: EvalOptions, engine: Subject, baseline: Subject | None, tokens: TokenSet, limits: QualityLimits
) -> Evaluation:
    """Walk the engine and the baseline over one file's samples."""
    from dspark.converters.quality.evaluation import Evaluation
    from dspark.converters.quality.measure import compare, score
    from dspark.converters.quality.subject import run_dtype
    from dspark.runtime.execution.loader import resolve_device
    from dspark.runtime.execution.single import set_threads
    from dspark.runtime.spec.cores import usable_cores

    device = resolve_device(options.device)
    set_threads(options.threads or usable_cores())
    console.note(f"eval: '{options.engine}' on '{tokens.path}': {tokens.describe()}")
    for note in tokens.notes:
        console.note(f"note: {note}")
    dtype = None if options.dtype == "auto" else options.dtype

    def walk(subject: Subject, name: str) -> tuple[Any, str]:
        chosen = subject.kernels(dtype, device, options.kernels)
        states = with_bar(console, "layer", lambda progress: subject.states(chosen, tokens.samples, progress))
        console.detail(f"{name}: {subject.config.num_layers} layers in {run_dtype(chosen)} on {device}")
        return states, run_dtype(chosen)

    ours, our_dtype = walk(engine, "engine")
    if baseline is None or options.baseline is None:
        scores = with_bar(console, "token", lambda progress: score(ours, tokens.samples, progress))
        return Evaluation(tokens, scores, (our_dtype,), limits=limits)
    theirs, their_dtype = walk(baseline, "baseline")
    found = with_bar(console, "token", lambda progress: compare(theirs, ours, tokens.samples, progress))
    return Evaluation(tokens, found, (our_dtype, their_dtype), options.baseline.resolve().name, limits)


def with_bar(console: Console, unit: str, body: Callable[[Progress], Any]) -> Any:
    """Run `body` with a callback of (done, in all) that draws a bar."""
    bar: Any = None
    before = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, before
        bar = console.progress(total, unit) if bar is None else bar
        bar.advance(done - before)
        before = done

    try:
        return body(progress)
    finally:
        if bar is not None:
            bar.close()


def show(console: Console, options: EvalOptions, engine: Subject, evaluations: list[Evaluation], seconds: float) -> None:
    """The figures, with --verbose the table of layers, and all of it as one document with --json."""
    from dspark.converters.quality.layers import layer_rows, layer_table

    manifest = engine.manifest
    assert manifest is not None
    for evaluation in evaluations:
        for line in evaluation.lines():
            console.data(line)
    layers = manifest.quality.get("layers", {})
    if console.verbose and layers:
        for line in layer_table(layer_rows(manifest.quant, layers)):
            console.data(line)
    console.note(f"measured in {seconds:.1f} s")
    console.document(
        {
            "engine": str(options.engine),
            "baseline": None if options.baseline is None else str(options.baseline),
            "scheme": describe_scheme(manifest.quant),
            "passed": all(not evaluation.broken() for evaluation in evaluations) if evaluations[0].limits else None,
            "evaluations": [evaluation.record() for evaluation in evaluations],
            "layers": layers,
            "seconds": round(seconds, 3),
        }
    )


def check_limits(engine: Subject, evaluations: list[Evaluation]) -> None:
    """Raise QualityError for the first file on which a limit is broken."""
    from dspark.converters.mapping import linear_modules
    from dspark.converters.quality.gate import check
    from dspark.converters.quality.remedy import Asked
    from dspark.runtime.spec.quant import default_group_size

    assert engine.manifest is not None
    group = default_group_size({inputs for _, inputs in linear_modules(engine.config).values()})
    for evaluation in evaluations:
        if evaluation.comparison is not None:
            layers = engine.manifest.quality.get("layers", {})
            check(evaluation.comparison, evaluation.limits, engine.manifest.quant, layers, Asked(group), outcome="")


def check_report_path(options: EvalOptions) -> Path | None:
    """Where the report goes; that it cannot be written is to be known before the work. Raises UsageError or InputError."""
    if options.report is None:
        return None
    from dspark.runtime.jobs.output import output_path

    real = output_path(options.report, "report")
    if real in {path.resolve() for path in (options.text, options.prompts) if path is not None}:
        raise UsageError(f"--report is '{options.report}', which is what is measured on", "give it a name of its own")
    return real


def write_report(path: Path, engine: Subject, evaluations: list[Evaluation]) -> None:
    """The HTML report, whole or not at all."""
    from dspark.converters.quality.report import quality_report
    from dspark.runtime.jobs.output import write_atomic

    assert engine.manifest is not None
    write_atomic(path, quality_report(engine.manifest, evaluations, engine.path.resolve().name).encode())


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, eval, EvalOptions)
