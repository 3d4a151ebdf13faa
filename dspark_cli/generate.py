# ruff: noqa: RUF009 - flag() and argument() return fields of frozen dataclasses
"""`dspark generate IN OUT`: the flags of a job, and what it prints."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.openmp import bound_spinning
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark_cli.console import Console, Progress
from dspark_cli.options import add_command, argument, flag

if TYPE_CHECKING:
    from dspark.runtime.jobs.job import JobResult, Loaders
    from dspark.runtime.jobs.lines import LineError
    from dspark.runtime.jobs.metrics import RunMetrics
    from dspark.runtime.spec.manifest import EngineManifest

SHOWN_PROBLEMS = 20
"""Error lines printed one by one; the rest is counted in the last line and stands in OUT."""

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class JobOptions:
    """Flags of the job itself."""

    input: Path = argument("requests, JSONL", metavar="IN")
    output: Path = argument("answers, JSONL; appears when it is whole", metavar="OUT")
    engine: Path | None = flag(None, "engine directory (made by dspark convert or dspark quantize)", metavar="DIR")
    errors: Path | None = flag(None, "write error records to FILE instead of OUT", metavar="FILE")
    order: str = flag("input", "order of OUT; completion streams to OUT as lines finish", choices=("input", "completion"))
    resume: bool = flag(True, "continue an unfinished job of OUT, or drop it (default: resume)", names="--resume/--fresh")
    retry_failed: bool = flag(False, "do lines again that ended as error records", names="--retry-failed")
    allow_duplicate_ids: bool = flag(False, "accept lines with the same custom_id", names="--allow-duplicate-ids")
    max_errors: int | None = flag(None, "stop after N error records of this run", low=1, metavar="N")
    limit: int | None = flag(None, "only the first N lines", low=1, metavar="N")
    until: str | None = flag(None, "stop at a time of day or after a while, such as 06:00, 90m or 7h30m", metavar="HH:MM|DURATION")
    write_expired: bool = flag(False, "with --until: write OUT with batch_expired records for lines left out", names="--write-expired")
    dry_run: bool = flag(False, "check the lines and tell what the job would do; writes nothing, needs no GPU", names="--dry-run")
    metrics: Path | None = flag(None, "write the run's metrics to FILE", metavar="FILE.json")
    lock_timeout: float = flag(0.0, "seconds to wait for another run of the same OUT", low=0, metavar="S")


def parse_deadline(text: str, now: datetime) -> float:
    """--until as seconds since 1970: the next HH:MM, or a while from now. Raises UsageError."""
    if match := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
        hour, minute = int(match[1]), int(match[2])
        if hour < 24 and minute < 60:
            moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (moment if moment > now else moment + timedelta(days=1)).timestamp()
    elif re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        return now.timestamp() + sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
    raise UsageError(f"--until is '{text}', allowed: HH:MM or a duration such as 90m or 7h30m")


class ConsoleReporter:
    """A job's progress on the console: a bar on a terminal, elsewhere one line at the start and one per problem."""

    def __init__(self, console: Console, options: JobOptions) -> None:
        self._console = console
        self._options = options
        self._bar: Progress | None = None
        self._num_problems = 0

    def started(self, num_lines: int, num_done: int, defaults: SamplingParams) -> None:
        from dspark.runtime.jobs.defaults import describe

        before = f" ({num_done} done before)" if num_done else ""
        self._console.note(
            f"generate: {num_lines} lines{before} of '{self._options.input}' with '{self._options.engine}'; defaults: {describe(defaults)}"
        )
        self._bar = self._console.progress(num_lines, "line", num_done)

    def warned(self, text: str) -> None:
        self._console.problem(text)

    def finished(self, count: int, metrics: RunMetrics) -> None:
        if self._bar is not None:
            seconds = metrics.generate_s
            self._bar.advance(count, tokens_per_s=round(metrics.output_tokens / seconds) if seconds else 0)

    def failed(self, error: LineError) -> None:
        self._num_problems += 1
        text = f"line {error.line_number} ('{error.custom_id[:60]}'): {error.message}"
        if self._num_problems <= SHOWN_PROBLEMS:
            self._console.problem(text)
        else:
            self._console.detail(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._num_problems > SHOWN_PROBLEMS:
            self._console.problem(f"{self._num_problems - SHOWN_PROBLEMS} further error lines are not shown; all stand in the output")


def last_line(result: JobResult, options: JobOptions) -> str:
    """The run's end in one line."""
    if result.already_done:
        errors = f", {result.num_failed} of them errors" if result.num_failed else ""
        return f"already done: '{options.output}' holds all {result.num_lines} lines of '{options.input}'{errors}"
    if result.stopped is not None:
        done = result.num_ok + result.num_failed
        return f"stopped: {done} of {result.num_lines} lines done ({result.stopped}); the same command continues"
    tokens, seconds = result.metrics["tokens"], result.metrics["time"]["generate_s"]
    rate = f", {tokens['output']} tokens in {seconds:.1f} s ({tokens['output'] / seconds:.0f} tokens/s)" if seconds else ""
    failed = f", {result.num_failed} errors" if result.num_failed else ""
    return f"done: {result.num_ok} of {result.num_lines} lines answered{failed}{rate}; '{options.output}'"


def run_generate(console: Console, options: JobOptions, config: EngineConfig, sampling: dict[str, Any], loaders: Loaders) -> int:
    """Run the job and report it; returns the exit code. Tests come in here with a stand-in for the engine."""
    from dspark.runtime.jobs.job import JobSpec, run_job

    if options.engine is None:
        raise UsageError("no engine is given", 'type --engine DIR, or write engine = "DIR" into dspark.toml')
    if options.write_expired and options.until is None:
        raise UsageError("--write-expired needs --until", "add --until HH:MM")
    check_metrics_path(options)
    if options.dry_run:
        from dspark_cli.dry_run import run_dry

        return run_dry(console, options, config, sampling, loaders, ConsoleReporter(console, options))
    spec = JobSpec(
        input=options.input,
        output=options.output,
        engine_dir=options.engine,
        engine_config=config,
        sampling=sampling,
        errors=options.errors,
        order=options.order,
        fresh=not options.resume,
        retry_failed=options.retry_failed,
        allow_duplicate_ids=options.allow_duplicate_ids,
        max_errors=options.max_errors,
        limit=options.limit,
        deadline_s=parse_deadline(options.until, datetime.now()) if options.until else None,
        write_expired=options.write_expired,
        lock_timeout_s=options.lock_timeout,
    )
    reporter = ConsoleReporter(console, options)
    try:
        result = run_job(spec, loaders, reporter)
    finally:
        reporter.close()
    console.note(last_line(result, options))
    console.document(result.metrics)
    if options.metrics is not None:
        write_metrics(options.metrics, result.metrics)
    return result.exit_code


def check_metrics_path(options: JobOptions) -> None:
    """A metrics file that cannot be written is to be known before the job, not after. Raises UsageError or InputError."""
    if options.metrics is None:
        return
    from dspark.runtime.jobs.output import output_path

    real = output_path(options.metrics, "metrics file")
    if real in {path.resolve() for path in (options.input, options.output, options.errors) if path is not None}:
        raise UsageError(f"--metrics is '{options.metrics}', which is another file of the job", "give it a name of its own")


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """The metrics document, whole or not at all."""
    import orjson

    from dspark.runtime.jobs.output import output_path, write_atomic

    data = orjson.dumps(metrics, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str)
    write_atomic(output_path(path, "metrics file"), data)


def load_engine(engine_dir: Path, config: EngineConfig) -> Any:
    """The real engine and the maker of its request builder; imports torch."""
    bound_spinning()
    from dspark.runtime.engine import Engine
    from dspark.runtime.jobs.prompts import PromptBuilder
    from dspark.runtime.jobs.tokenizer import load_codec

    codec = load_codec(engine_dir)
    with ThreadPoolExecutor(1) as pool:  # the templates' second passes while the weights are read
        warming = pool.submit(codec.warm_up)
        engine = Engine.from_directory(engine_dir, config, codec)
        engine.warm_up()
        warming.result()  # raises here what was raised there
    return engine, lambda defaults: PromptBuilder(codec, defaults, engine.max_model_len, engine.vocab_size, config.seed)


def load_builder(engine_dir: Path, manifest: EngineManifest, config: EngineConfig, defaults: SamplingParams) -> Any:
    """The real request builder without an engine."""
    from dspark.runtime.jobs.prompts import PromptBuilder
    from dspark.runtime.jobs.tokenizer import load_codec

    context = manifest.model.context_length
    max_model_len = min(config.max_model_len or context, context)
    return PromptBuilder(load_codec(engine_dir), defaults, max_model_len, manifest.model.vocab_size, config.seed)


def generate(console: Console, options: JobOptions, config: EngineConfig, sampling: dict[str, Any]) -> int:
    """Answer every line of IN, exactly once, in order, into OUT.

    A stopped or killed run is continued by the same command. Exit codes: 0 all answered, 3 some lines are error records,
    4 stopped before the end, 5 another run holds OUT, 7 the machine failed (disk, memory).
    """
    from dspark.runtime.jobs.job import Loaders

    return run_generate(console, options, config, sampling, Loaders(load_engine, load_builder))


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, generate, JobOptions, EngineConfig, SamplingParams)
