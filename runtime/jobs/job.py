"""One `dspark generate`: from the paths that were typed to OUT, exactly once, whatever happens in between.

The life of an output's files: nothing -> `OUT.journal/` with `lock` only -> with `job.json`: an unfinished job ->
OUT renamed into place -> `.OUT.dspark.json`: a finished job -> the directory removed. Each arrow is one atomic step, and a run that finds
any of these states goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dspark.runtime.jobs.defaults import defaults_in_force
from dspark.runtime.jobs.engine_protocol import EngineProtocol
from dspark.runtime.jobs.fingerprint import (
    FileState,
    JobHeader,
    Sidecar,
    job_fingerprint,
    journal_directory,
    load_header,
    load_sidecar,
    new_job_name,
    sidecar_path,
)
from dspark.runtime.jobs.index import LINE, FixedFile
from dspark.runtime.jobs.lock import HEADER_NAME, LOCK_NAME, JobLock
from dspark.runtime.jobs.metrics import RunMetrics
from dspark.runtime.jobs.order import WorkFeed, load_work
from dspark.runtime.jobs.output import output_path, sync_directory
from dspark.runtime.jobs.responses import expired_record, failure_record
from dspark.runtime.jobs.runner import Answering, Builder, Reporter, Runner
from dspark.runtime.jobs.scan import InputFacts, check_duplicates, digest_of, open_input, scan_input
from dspark.runtime.jobs.seed import standing_results, sums_path
from dspark.runtime.jobs.signals import StopSignals
from dspark.runtime.jobs.store import ResultStore
from dspark.runtime.jobs.stream import StreamStore
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import StoppedError, UsageError
from dspark.runtime.spec.kv_cache import QUANTIZED_CACHES, choose_cache_dtype
from dspark.runtime.spec.manifest import EngineManifest, load_manifest
from dspark.runtime.spec.sampling_params import SamplingParams

INDEX_NAME = "lines.bin"
EXIT_DONE, EXIT_LINES_FAILED, EXIT_STOPPED = 0, 3, StoppedError.exit_code
ORDERS = ("input", "completion")


@dataclass(frozen=True)
class JobSpec:
    """What was asked for. sampling: defaults that were given. deadline_s: seconds since 1970 at which to stop, or None."""

    input: Path
    output: Path
    engine_dir: Path
    engine_config: EngineConfig
    sampling: dict[str, Any]
    errors: Path | None = None
    order: str = "input"
    fresh: bool = False
    retry_failed: bool = False
    allow_duplicate_ids: bool = False
    max_errors: int | None = None
    limit: int | None = None
    deadline_s: float | None = None
    write_expired: bool = False
    lock_timeout_s: float = 0.0


@dataclass(frozen=True)
class Loaders:
    """How a job gets its engine; called only when there is a line to do, so a finished job imports no torch.

    load: (engine directory, configuration) -> (engine, function that makes the builder from the defaults).
    load_builder: (engine directory, manifest, configuration, defaults) -> builder, without an engine, for a dry run.
    """

    load: Callable[[Path, EngineConfig], tuple[EngineProtocol, Callable[[SamplingParams], Builder]]]
    load_builder: Callable[[Path, EngineManifest, EngineConfig, SamplingParams], Builder]


class JobReporter(Reporter, Protocol):
    """Told of the stages of a job as well."""

    def started(self, num_lines: int, num_done: int, defaults: SamplingParams) -> None:
        """The input is read; num_done lines have a result from before."""

    def warned(self, text: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended. stopped: why it ended early, else None. metrics: the document for `--metrics`."""

    exit_code: int
    num_lines: int
    num_ok: int
    num_failed: int
    already_done: bool
    stopped: str | None
    metrics: dict[str, Any]


def run_job(spec: JobSpec, loaders: Loaders, reporter: JobReporter) -> JobResult:
    """Run or continue a job. Raises DsparkError and OSError; what was finished by then is kept."""
    output = output_path(spec.output, "output")
    errors = output_path(spec.errors, "errors file") if spec.errors is not None else None
    _check_paths(spec, output, errors)
    metrics = RunMetrics()
    with StopSignals() as signals:
        manifest = load_manifest(spec.engine_dir)
        lock = JobLock(journal_directory(output), output)
        lock.acquire(spec.lock_timeout_s)
        try:
            return _Job(spec, loaders, reporter, signals, metrics, manifest, lock, output, errors).run()
        finally:
            lock.release()


def _check_paths(spec: JobSpec, output: Path, errors: Path | None) -> None:
    open_input(spec.input).close()
    paths = {"the input": spec.input.resolve(), "the output": output}
    if errors is not None:
        paths["the errors file"] = errors
    if len(set(paths.values())) < len(paths):
        raise UsageError(f"{', '.join(paths)} must be different files", "give each its own name")
    if spec.write_expired and spec.order != "input":
        raise UsageError("--write-expired goes with --order input only", "leave one of them out")


class _Job:
    """The stages of one job, in the order in which they stand here."""

    def __init__(
        self,
        spec: JobSpec,
        loaders: Loaders,
        reporter: JobReporter,
        signals: StopSignals,
        metrics: RunMetrics,
        manifest: EngineManifest,
        lock: JobLock,
        output: Path,
        errors: Path | None,
    ) -> None:
        self.spec = spec
        self.loaders = loaders
        self.reporter = reporter
        self.signals = signals
        self.metrics = metrics
        self.lock = lock
        self.output = output
        self.errors = errors
        self.directory = lock.directory
        self.sidecar = sidecar_path(output)
        self.defaults = defaults_in_force(spec.sampling, spec.engine_dir)
        self.answering = Answering(manifest.created, str(manifest.lineage.get("name") or spec.engine_dir.resolve().name))
        cache = choose_cache_dtype(manifest.kv_cache, manifest.model.dtype, spec.engine_config.kv_cache_dtype)
        quantized = cache if cache in QUANTIZED_CACHES else None
        self.fingerprint = job_fingerprint(spec.engine_dir, self.answering.model_name, self.defaults, spec.engine_config, quantized)
        self.engine_metrics: dict[str, Any] = {}
        self.stopped: str | None = None

    def run(self) -> JobResult:
        header, finished = (None, None) if self.spec.fresh else self._earlier_job()
        if finished is not None and self._outputs_stand(finished):
            if not (self.spec.retry_failed and finished.num_failed):
                self.lock.remove_directory()  # with what a crash after the last step may have left
                return self._already_done(finished)
            if self.spec.order != "input":
                raise UsageError("--retry-failed on a finished job goes with --order input only", "type --fresh to do all lines again")
        new_header = JobHeader(self.fingerprint, self.spec.order, self.errors is not None, header.job if header else new_job_name())
        if header is not None:
            new_header.check_continues(header, self.directory)
        else:
            self._clear()
        index = FixedFile(self.directory / INDEX_NAME, LINE, create=True)
        try:
            facts = scan_input(self.spec.input, index, self.spec.limit)
            if not self.spec.allow_duplicate_ids:
                check_duplicates(self.spec.input, index)
            return self._run_indexed(index, facts, new_header, header is not None, finished)
        finally:
            index.close()

    def _earlier_job(self) -> tuple[JobHeader | None, Sidecar | None]:
        """(the unfinished job of this output, this very job finished): at most one of them. The outputs are not looked at yet."""
        header, sidecar = load_header(self.directory), load_sidecar(self.sidecar)
        if header is not None and sidecar is not None and header.job == sidecar.job:
            header = None  # finished; a crash came before its directory was removed
        if header is not None or sidecar is None:
            return header, None
        if (sidecar.fingerprint, sidecar.order, sidecar.limit) != (self.fingerprint, self.spec.order, self.spec.limit):
            return None, None
        return None, sidecar if sidecar.input_digest == digest_of(self.spec.input, self.spec.limit) else None

    def _outputs_stand(self, sidecar: Sidecar) -> bool:
        """Whether a finished job's files are as it left them and where they are wanted now."""
        if sidecar.errors != (str(self.errors) if self.errors else None) or not sidecar.output.holds(self.output):
            return False
        return self.errors is None or (sidecar.errors_state is not None and sidecar.errors_state.holds(self.errors))

    def _already_done(self, finished: Sidecar) -> JobResult:
        code = EXIT_LINES_FAILED if finished.num_failed else EXIT_DONE
        num_ok = finished.num_lines - finished.num_failed
        metrics = {**finished.metrics, "already_done": True}
        return JobResult(code, finished.num_lines, num_ok, finished.num_failed, True, None, metrics)

    def _clear(self) -> None:
        """Drop what another job left: from here on there is no unfinished job."""
        (self.directory / HEADER_NAME).unlink(missing_ok=True)
        for path in self.directory.iterdir():
            if path.name != LOCK_NAME:
                path.unlink()

    def _run_indexed(self, index: FixedFile, facts: InputFacts, header: JobHeader, continues: bool, seed: Sidecar | None) -> JobResult:
        """Everything after the input is read. Nothing but scratch files is written until the engine stands."""
        store = self._open_store(index, fresh=False) if continues else None
        if seed is not None and self.spec.order == "input":
            store = self._seeded_store(index, seed)
        num_before = store.counts.done if store else 0
        self.reporter.started(facts.num_lines, num_before, self.defaults)
        engine = None
        try:
            make_builder = None
            if num_before < facts.num_lines:
                engine, make_builder = self.loaders.load(self.spec.engine_dir, self.spec.engine_config)
            if not continues:
                self._begin(header)
            store = store or self._open_store(index, fresh=True)
            self.signals.defer()
            if engine is not None and make_builder is not None:
                self._generate(engine, make_builder(self.defaults), store, index)
            if self.stopped is None:
                store.publish(lambda: self.signals.requested is not None)
            elif self.spec.write_expired and self._is_late():
                store.publish(lambda: False, lambda at: self._expired(index, at))
            return self._finish(store, facts, header)
        finally:
            if engine is not None:
                engine.close()
            if store is not None:
                store.close()

    def _open_store(self, index: FixedFile, fresh: bool) -> ResultStore:
        if self.spec.order == "completion":
            store: ResultStore = StreamStore(self.directory, self.output, self.errors, fresh)
        else:
            store = ResultStore(self.directory, self.output, self.errors)
        unused = store.load(index, self.spec.retry_failed)
        if store.num_damaged:
            self.reporter.warned(f"{store.num_damaged} damaged records in '{self.directory}'; their lines are done again")
        if unused and not self.spec.retry_failed:
            self.reporter.warned(f"{unused} stored results belong to no line of '{self.spec.input}' any more; changed lines are done again")
        return store

    def _seeded_store(self, index: FixedFile, seed: Sidecar) -> ResultStore:
        """A store with what still stands in the files of this very job, finished before."""
        store = ResultStore(self.directory, self.output, self.errors)
        files = [self.output, *([Path(seed.errors)] if seed.errors else [])]
        for result in standing_results(files, sums_path(self.output), index, self.spec.retry_failed):
            store.add(result.line, result.ok, result.record)
            store.flush()
        store.sync()
        store.close()
        if not self.spec.retry_failed:
            self.reporter.warned(f"'{self.output}' is not as its job left it: lines that do not stand there any more are done again")
        return self._open_store(index, fresh=False)

    def _begin(self, header: JobHeader) -> None:
        """Make this the output's unfinished job: the header first, then the old sidecar goes."""
        header.save(self.directory)
        self.sidecar.unlink(missing_ok=True)
        sums_path(self.output).unlink(missing_ok=True)
        sync_directory(self.output.parent)

    def _generate(self, engine: EngineProtocol, builder: Builder, store: ResultStore, index: FixedFile) -> None:
        default_max_tokens = self.defaults.max_tokens or engine.max_model_len
        feed = iter(WorkFeed(self.spec.input, index, store.slots, default_max_tokens))
        runner = Runner(engine, builder, store, self.answering, self.metrics, self.reporter, self._stop_reason, self.spec.max_errors)
        self.metrics.begin_generate()
        try:
            self.stopped = runner.run(feed)
        finally:
            self.metrics.end_generate()
            for warning in engine.finish():
                self.reporter.warned(warning)
        self.engine_metrics = engine.metrics()

    def _is_late(self) -> bool:
        return self.spec.deadline_s is not None and time.time() >= self.spec.deadline_s

    def _stop_reason(self) -> str | None:
        if self.signals.requested is not None:
            return self.signals.requested
        return "--until is over" if self._is_late() else None

    def _expired(self, index: FixedFile, at: int) -> bytes:
        with open_input(self.spec.input) as file:
            work = load_work(file.fileno(), at, index.read(at, 1)[0])
        if work.line is not None:
            return expired_record(work.line)
        assert work.error is not None
        return failure_record(work.error)

    def _finish(self, store: ResultStore, facts: InputFacts, header: JobHeader) -> JobResult:
        """Say how it ended; a finished job leaves its sidecar and takes the journal away."""
        counts = store.counts
        code = EXIT_STOPPED if self.stopped else EXIT_LINES_FAILED if counts.failed else EXIT_DONE
        metrics = {
            **self.metrics.document(),
            "exit_code": code,
            "stopped": self.stopped,
            "already_done": False,
            "lines": {"total": facts.num_lines, "ok": counts.ok, "failed": counts.failed, "resumed": counts.resumed},
            "input_bytes": facts.num_bytes,
            "sampling_defaults": asdict(self.defaults),
            "engine_config": asdict(self.spec.engine_config),
            "engine": self.engine_metrics,
        }
        if self.stopped is None:
            Sidecar(
                job=header.job,
                fingerprint=self.fingerprint,
                order=self.spec.order,
                limit=self.spec.limit,
                input_digest=facts.digest,
                num_lines=facts.num_lines,
                num_failed=counts.failed,
                output=FileState.of(self.output),
                errors=str(self.errors) if self.errors else None,
                errors_state=FileState.of(self.errors) if self.errors else None,
                metrics=metrics,
            ).save(self.sidecar)
            self.lock.remove_directory()
        return JobResult(code, facts.num_lines, counts.ok, counts.failed, False, self.stopped, metrics)
