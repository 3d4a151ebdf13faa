"""`dspark pair --distill`: prompts in, a stored draft out.

result = distill("engine", "prompts.jsonl", "draft", DistillOptions(budget_s=1200), print)
result.before.mean_length, result.after.mean_length
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dspark.converters.distill.acceptance import Acceptance, summarize_rounds
from dspark.converters.distill.calibrate import errors_by_position, fit_temperatures
from dspark.converters.distill.data import (
    MIN_ANSWER_TOKENS,
    AnsweredLine,
    DistillData,
    answer,
    extra_requests,
    load_answers,
    prompt_digest,
    prompts_digest,
    read_prompts,
    save_answers,
    split,
)
from dspark.converters.distill.features import collect
from dspark.converters.distill.kinds import Target, choose_kind
from dspark.converters.distill.learner import Parameters
from dspark.converters.distill.options import KINDS, DistillOptions
from dspark.converters.distill.train import Report, Trained, Trainer
from dspark.converters.writer import hash_file
from dspark.runtime.execution.loader import resolve_device
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.errors import LockedError, UsageError
from dspark.runtime.spec.manifest import MANIFEST_NAME, load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.heads.replay import Round
from dspark.runtime.speculation.heads.stored import load_stored

ANSWERING_SHARE = 0.4
"""Of a budget: answers take at most this much of it, and begin no new wave beyond."""
_ANSWERS_NAME, _LOCK_NAME = "answers.json", "lock"


Told = Callable[[str], None]
"""Takes a line about what has just been done."""


@dataclass(frozen=True)
class DistillResult:
    """lineage: what the stored draft says it was made from. before, after: acceptance on the held-out lines with the first weights and with
    the trained ones. calibration: errors of a head's estimates by draft position, without and with the temperatures. training: see Trained.
    """

    lineage: dict[str, Any]
    before: Acceptance
    after: Acceptance
    calibration: tuple[list[float], list[float]]
    training: Trained
    notes: tuple[str, ...]


def distill(
    engine_dir: str | Path,
    prompts_path: str | Path,
    out_dir: str | Path,
    options: DistillOptions,
    progress: Report | None = None,
    told: Told | None = None,
) -> DistillResult:
    """Train a draft for an engine on its own answers to the lines of a batch file, and store it in out_dir (a new directory) as
    `dspark pair --draft` takes it: a head, or an engine. Work in progress lies beside it until then; an interrupted run goes on from there
    with options.resume.

    Raises InputError for an unusable engine or prompts file, UsageError for an out_dir that exists or options that do not fit, LockedError
    when another run works on it, MachineError when training diverges.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    began, engine, out = time.monotonic(), Path(engine_dir), Path(os.path.realpath(out_dir))
    if out.exists():
        raise UsageError(f"'{out_dir}' exists already", "name another directory, or remove it")
    if options.kind not in KINDS:
        raise UsageError(f"a draft of kind '{options.kind}'", f"allowed: {', '.join(KINDS)}")
    target = Target(engine, load_manifest(engine), load_codec(engine), resolve_device(options.device))
    with _work_directory(out, options.resume) as work:
        result = _Run(target, Path(prompts_path), options, work, began, told or _silent).finish(progress)
        (work / "draft").rename(out)
    shutil.rmtree(work, ignore_errors=True)
    return result


def lineage_of(draft_dir: Path) -> dict[str, Any]:
    """What a stored draft of either kind says it was made from. Raises InputError when it is no draft."""
    is_engine = (draft_dir / MANIFEST_NAME).is_file()
    return load_manifest(draft_dir).lineage if is_engine else load_stored(draft_dir).lineage


def is_made_from(draft_dir: Path, engine_dir: Path, prompts_path: Path, options: DistillOptions) -> bool:
    """Whether a finished draft came of these prompts and options beside this engine. Raises InputError when any of them is unusable."""
    lineage = lineage_of(draft_dir)
    manifest, codec = load_manifest(engine_dir), load_codec(engine_dir)
    prompts = prompts_digest(read_prompts(prompts_path, codec, manifest.model, options, []))
    made_from = (hash_file(engine_dir / MANIFEST_NAME), prompts, options.fingerprint())
    return made_from == tuple(lineage.get(key) for key in ("target_manifest_xxh3", "prompts_xxh3", "options"))


def _silent(line: str) -> None:
    pass


class _Run:
    def __init__(self, target: Target, prompts: Path, options: DistillOptions, work: Path, began_s: float, told: Told) -> None:
        self._target, self._prompts, self._options, self._work, self._began_s = target, prompts, options, work, began_s
        self._told = told
        self._plan: dict[str, Any] = {"target": hash_file(target.directory / MANIFEST_NAME), **options.fingerprint()}
        self._notes: list[str] = []
        self._num_files = 0

    def finish(self, progress: Report | None) -> DistillResult:
        options, target = self._options, self._target
        data = self._answers()
        num_tokens = sum(len(line.tokens) - line.prompt_len for line in data.training)
        self._told(f"{len(data.training)} answers of {num_tokens} tokens to learn from, {len(data.held_out)} held out")
        kind = choose_kind(target, options, data)
        samples = [line.tokens for line in data.lines]
        features, vocabulary = collect(target.directory, target.manifest, samples, kind.taps, target.device, self._allocate)
        learner = kind.learner(data, features, vocabulary)

        def rounds(name: str, parameters: Parameters) -> list[Round]:
            shutil.rmtree(self._work / name, ignore_errors=True)
            kind.store(self._work / name, parameters, {})
            return kind.rounds(self._work / name, data, features)

        measured = time.monotonic()
        before = summarize_rounds(rounds("untrained", learner.parameters), kind.num_positions)
        measure_s = time.monotonic() - measured
        self._told(f"before training, on the held-out lines: {before.describe()}")
        plan = {**self._plan, "prompts": data.prompts_digest, "lines": data.digest}
        trainer = Trainer(learner, len(data.training), options, self._work, plan, progress)
        deadline = None if options.budget_s is None else self._began_s + options.budget_s - measure_s
        trained = trainer.run(deadline)
        found = rounds("trained", trained.parameters)
        after = summarize_rounds(found, kind.num_positions)
        self._told(f"after {trained.steps} steps ({trained.stopped}), the best of step {trained.best_step}: {after.describe()}")
        temperatures, calibration = _calibrated(found, kind.num_positions) if kind.has_confidence else ((), ([], []))
        lineage = self._lineage(data, trained, before, after, calibration)
        shutil.rmtree(self._work / "draft", ignore_errors=True)
        kind.store(self._work / "draft", trained.parameters, lineage, temperatures)
        return DistillResult(lineage, before, after, calibration, trained, data.notes)

    def _answers(self) -> DistillData:
        """The target's answers, kept from an interrupted run or made now."""
        options, path, target = self._options, self._work / _ANSWERS_NAME, self._target
        requests = read_prompts(self._prompts, target.codec, target.manifest.model, options, self._notes)
        digest = prompts_digest(requests)
        chosen = {key: self._plan[key] for key in ("target", "sample_tokens", "temperature", "answers", "extra_temperature")}
        made_from = {"prompts": digest, **chosen}
        deadline = None if options.budget_s is None else self._began_s + ANSWERING_SHARE * options.budget_s
        first = self._answered(path, made_from, requests, deadline)
        data = split(first, digest, options, self._notes)
        extra = extra_requests(data.training, options, len(requests))
        if extra:
            again = self._answered(path.with_stem("more-answers"), {**made_from, "lines": data.digest}, extra, deadline)
            again = [line for line in again if len(line.tokens) - line.prompt_len >= MIN_ANSWER_TOKENS]
            data = replace(data, training=[*data.training, *again])
        return replace(data, notes=tuple(self._notes))

    def _answered(self, path: Path, made_from: dict[str, Any], requests: Sequence[Request], deadline: float | None) -> list[AnsweredLine]:
        lines = load_answers(path, made_from, requests) if self._options.resume else None
        if lines is None:
            lines = answer(self._target.directory, requests, self._target.codec, self._options.device, deadline, self._options.threads)
            if len(lines) < len(requests):
                self._notes.append(f"distill: the budget let {len(lines)} of {len(requests)} prompts be answered")
            save_answers(path, made_from, lines)
        return lines

    def _lineage(
        self, data: DistillData, trained: Trained, before: Acceptance, after: Acceptance, calibration: tuple[list[float], list[float]]
    ) -> dict[str, Any]:
        """Names no path: the same run elsewhere gives the same record."""
        return {
            "target_manifest_xxh3": self._plan["target"],
            "prompts_file": self._prompts.name,
            "prompts_xxh3": data.prompts_digest,
            "lines": {"training": len(data.training), "held_out": len(data.held_out)},
            "training_prompts": sorted({prompt_digest(line.request.prompt_token_ids) for line in data.training}),
            "answer_tokens": sum(len(line.tokens) - line.prompt_len for line in data.training),
            "options": self._options.fingerprint(),
            "steps": trained.steps,
            "best_step": trained.best_step,
            "stopped": trained.stopped,
            "history": trained.history,
            "held_out": {"before": before.to_json(), "after": after.to_json()},
            "calibration_error": {"before": [round(e, 4) for e in calibration[0]], "after": [round(e, 4) for e in calibration[1]]},
        }

    def _allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """In memory up to the bound, else in a file that the system may write out whenever memory is short."""
        if rows * columns * dtype.itemsize <= self._options.memory_bytes:
            return torch.empty(rows, columns, dtype=dtype)
        self._num_files += 1
        path = self._work / f"features-{self._num_files}"
        matrix = torch.from_file(str(path), shared=True, size=rows * columns, dtype=dtype).view(rows, columns)
        path.unlink()  # the mapping keeps it; a killed run leaves nothing behind
        return matrix


def _calibrated(rounds: list[Round], num_positions: int) -> tuple[tuple[float, ...], tuple[list[float], list[float]]]:
    """Temperatures, and the calibration errors without and with them."""
    survival, accepted = [entry.survival for entry in rounds], [entry.accepted for entry in rounds]
    fitted = fit_temperatures(survival, accepted, num_positions)
    errors = [errors_by_position(survival, accepted, temperatures, num_positions) for temperatures in ((), fitted)]
    return fitted, (errors[0], errors[1])


@contextmanager
def _work_directory(out: Path, resume: bool) -> Iterator[Path]:
    """`.NAME.distill` beside the draft, which only one run may use. Kept when something goes wrong, so that it can be resumed."""
    work = out.parent / f".{out.name}.distill"
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(work / _LOCK_NAME, timeout=0).acquire()
    except Timeout:
        raise LockedError(f"another run is distilling to this place ('{work}' is locked)", "wait for it") from None
    with lock:
        for path in [] if resume else [path for path in work.iterdir() if path.name != _LOCK_NAME]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield work
