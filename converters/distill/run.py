"""`dspark pair --distill`: prompts in, a stored drafter out.

result = distill("engine", "prompts.jsonl", "draft", DistillOptions(budget_s=1200), print)
result.before.mean_length, result.after.mean_length
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dspark.converters.distill.acceptance import Acceptance, held_out_rounds, summarize_rounds
from dspark.converters.distill.calibrate import errors_by_position, fit_temperatures
from dspark.converters.distill.data import DistillData, answer, load_answers, prompts_digest, read_prompts, save_answers, split
from dspark.converters.distill.features import collect
from dspark.converters.distill.model import Parameters, new_parameters
from dspark.converters.distill.options import DistillOptions
from dspark.converters.distill.shape import choose_mask_token, draft_config
from dspark.converters.distill.train import Report, Trained, Trainer
from dspark.converters.drafts.store import store_draft
from dspark.converters.writer import hash_file
from dspark.runtime.execution.loader import load_model, resolve_device
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.errors import LockedError, UsageError
from dspark.runtime.spec.manifest import MANIFEST_NAME, EngineManifest, load_manifest
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.replay import Round
from dspark.runtime.speculation.heads.stored import StoredDraft

PACKAGING = "dspark distill"
ANSWERING_SHARE = 0.4
"""Of a budget: answers take at most this much of it, and begin no new wave beyond."""
_ANSWERS_NAME, _LOCK_NAME = "answers.json", "lock"


@dataclass(frozen=True)
class DistillResult:
    """before, after: acceptance on the held-out lines with random weights and with the trained ones. calibration: errors of the estimates
    by draft position, without and with the temperatures. training: see Trained."""

    stored: StoredDraft
    before: Acceptance
    after: Acceptance
    calibration: tuple[list[float], list[float]]
    training: Trained
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _TrainedDraft:
    """A DraftSource."""

    config: DraftConfig
    parameters: Parameters
    packaging: str = PACKAGING

    def read(self, name: str) -> torch.Tensor:
        return self.parameters[name].detach().cpu()


def distill(
    engine_dir: str | Path, prompts_path: str | Path, out_dir: str | Path, options: DistillOptions, progress: Report | None = None
) -> DistillResult:
    """Train a DSpark drafter for an engine on its own answers to the lines of a batch file, and store it in out_dir (a new directory, as
    `load_drafter` reads it). Work in progress lies beside it until then; an interrupted run goes on from there with options.resume.

    Raises InputError for an unusable engine or prompts file, UsageError for an out_dir that exists or options that do not fit, LockedError
    when another run works on it, MachineError when training diverges.
    """
    began, engine, out = time.monotonic(), Path(engine_dir), Path(os.path.realpath(out_dir))
    if out.exists():
        raise UsageError(f"'{out_dir}' exists already", "name another directory, or remove it")
    manifest, codec = load_manifest(engine), load_codec(engine)
    with _work_directory(out, options.resume) as work:
        run = _Run(engine, manifest, codec, Path(prompts_path), options, work, began)
        result = run.finish(progress)
        (work / "draft").rename(out)
    shutil.rmtree(work, ignore_errors=True)
    return result


class _Run:
    def __init__(
        self, engine: Path, manifest: EngineManifest, codec: TextCodec, prompts: Path, options: DistillOptions, work: Path, began_s: float
    ) -> None:
        self._engine, self._manifest, self._codec = engine, manifest, codec
        self._prompts, self._options, self._work, self._began_s = prompts, options, work, began_s
        self._device = resolve_device(options.device)
        self._plan: dict[str, Any] = {"target": hash_file(engine / MANIFEST_NAME), **options.fingerprint()}
        self._notes: list[str] = []
        self._num_files = 0

    def finish(self, progress: Report | None) -> DistillResult:
        options = self._options
        data = self._answers()
        mask = choose_mask_token(self._codec, self._manifest.model, (token for line in data.lines for token in line.tokens))
        config = draft_config(self._manifest.model, options, mask)
        samples = [line.tokens for line in data.lines]
        features, vocabulary = collect(self._engine, self._manifest, samples, config.taps, self._device, self._allocate)

        def rounds(name: str, parameters: Parameters) -> list[Round]:
            self._store(name, config, parameters)
            return held_out_rounds(self._work / name, load_model(self._engine, device=self._device), data, features)

        measured = time.monotonic()
        before = summarize_rounds(rounds("untrained", new_parameters(config, options.seed)), config.block_size)
        measure_s = time.monotonic() - measured
        plan = {**self._plan, "prompts": data.prompts_digest, "lines": data.digest}
        trainer = Trainer(config, data, features, vocabulary, options, self._work, plan, progress)
        deadline = None if options.budget_s is None else self._began_s + options.budget_s - measure_s
        trained = trainer.run(deadline)
        found = rounds("trained", trained.parameters)
        after = summarize_rounds(found, config.block_size)
        temperatures, calibration = _calibrated(found, config.block_size)
        lineage = self._lineage(data, trained, before, after, calibration)
        stored = self._store("draft", replace(config, temperatures=temperatures), trained.parameters, lineage)
        return DistillResult(stored, before, after, calibration, trained, data.notes)

    def _answers(self) -> DistillData:
        """The target's answers, kept from an interrupted run or made now."""
        options, path = self._options, self._work / _ANSWERS_NAME
        requests = read_prompts(self._prompts, self._codec, self._manifest.model, options, self._notes)
        digest = prompts_digest(requests)
        made_from = {"target": self._plan["target"], "prompts": digest, "tokens": options.sample_tokens, "temperature": options.temperature}
        lines = load_answers(path, made_from, requests) if options.resume else None
        if lines is None:
            deadline = None if options.budget_s is None else self._began_s + ANSWERING_SHARE * options.budget_s
            lines = answer(self._engine, requests, self._codec, options.device, deadline)
            if len(lines) < len(requests):
                self._notes.append(f"distill: the budget let {len(lines)} of {len(requests)} prompts be answered")
            save_answers(path, made_from, lines)
        return split(lines, digest, options, self._notes)

    def _store(self, name: str, config: DraftConfig, parameters: Parameters, lineage: dict[str, Any] | None = None) -> StoredDraft:
        directory = self._work / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return store_draft(_TrainedDraft(config, parameters), directory, self._manifest.model.dtype, lineage=lineage)

    def _lineage(
        self, data: DistillData, trained: Trained, before: Acceptance, after: Acceptance, calibration: tuple[list[float], list[float]]
    ) -> dict[str, Any]:
        """Names no path: the same run elsewhere gives the same record."""
        return {
            "target_manifest_xxh3": self._plan["target"],
            "prompts_file": self._prompts.name,
            "prompts_xxh3": data.prompts_digest,
            "lines": {"training": len(data.training), "held_out": len(data.held_out)},
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
