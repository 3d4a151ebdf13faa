"""`dspark pair`: whether a draft fits an engine, what drafts best on given lines, and the winner written into the engine."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.converters.distill.data import prompt_digest
from dspark.converters.drafts.checkpoint import read_draft
from dspark.converters.drafts.store import store_draft
from dspark.converters.writer import remove_stale, replace_directory
from dspark.runtime.engine import Engine
from dspark.runtime.jobs.lines import parse_line
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError, RequestError
from dspark.runtime.spec.manifest import MANIFEST_NAME, EngineManifest, load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.choice import HEADS_NAME, Choice
from dspark.runtime.speculation.draft_vocabulary import MAPPED_NAME, MIN_COVERAGE, VocabularyMatch, match_vocabularies
from dspark.runtime.speculation.pairing import DRAFT_FOLDER, PAIRING_NAME, Pairing

MIN_RATIO = 1.03
"""A method wins only when it is so many times as fast as plain decoding: below that it is noise."""
LONGEST_ANSWER = 128
"""Tokens of a sample's answer at most."""
SPECIALS = ("bos_token", "eos_token")


def check_draft_model(engine_dir: Path, draft_dir: Path, map_vocabulary: bool = False) -> tuple[VocabularyMatch, list[str]]:
    """Hold an engine that is to draft against its target. Returns (vocabularies, notes); raises InputError with every mismatch at once.

    map_vocabulary: whether tokens of another vocabulary are matched by their strings; without, it is a mismatch.
    """
    target, draft = load_manifest(engine_dir), load_manifest(draft_dir)
    ours, theirs = load_codec(engine_dir), load_codec(draft_dir)
    match = match_vocabularies(ours.vocabulary, theirs.vocabulary)
    fault = match.fault(map_vocabulary)
    faults = [fault] if fault is not None else []
    for name in SPECIALS:
        wanted, found = ours.special_tokens.get(name), theirs.special_tokens.get(name)
        if wanted != found:
            faults.append(f"its {name} is {found!r}, the target's {wanted!r}")
    strings = [_strings(codec, manifest.model.eos_token_ids) for codec, manifest in ((ours, target), (theirs, draft))]
    if not strings[0] & strings[1]:
        faults.append(f"its answers end with {sorted(strings[1])}, the target's with {sorted(strings[0])}")
    if draft.model.context_length < 2:
        faults.append(f"its context holds {draft.model.context_length} tokens")
    if faults:
        hint = "take a draft model of the target's family"
        if fault is not None and match.coverage >= MIN_COVERAGE and len(faults) == 1:
            hint += ", or add --map-vocabulary: then its tokens are matched by their strings"
        raise InputError(f"the draft model '{draft_dir}' cannot serve: {'; '.join(faults)}", hint)
    notes = [f"vocabulary: {match.describe()}"]
    if draft.model.context_length < target.model.context_length:
        notes.append(
            f"the draft's context is {draft.model.context_length} tokens, the target's {target.model.context_length}: no drafts beyond it"
        )
    if draft.weight_bytes() > target.weight_bytes():
        notes.append("the draft is larger than the target")
    return match, notes


def _strings(codec: Any, ids: tuple[int, ...]) -> set[str]:
    return {token for index in ids if (token := codec.id_to_token(index)) is not None}


def prepare_draft(engine_dir: Path, source: Path, staging: Path, map_vocabulary: bool = False) -> tuple[str, list[str]]:
    """Check a draft and lay it out as the engine will hold it, in `staging` (created). Returns (its method, notes).

    source: an engine, stored heads, or a published draft checkpoint. map_vocabulary: see `check_draft_model`; it is kept with the draft.
    Raises InputError or UnsupportedError with every mismatch.
    """
    if (source / MANIFEST_NAME).is_file():
        match, notes = check_draft_model(engine_dir, source, map_vocabulary)
        shutil.copytree(source, staging, ignore=shutil.ignore_patterns(DRAFT_FOLDER, PAIRING_NAME, MAPPED_NAME))
        if not match.is_same:
            (staging / MAPPED_NAME).write_text(json.dumps({"mapped": match.describe()}, ensure_ascii=False) + "\n", encoding="utf-8")
        return "draft-model", notes
    if (source / HEADS_NAME).is_file():
        from dspark.runtime.speculation.heads.stored import load_stored

        stored = load_stored(source)
        shutil.copytree(source, staging)
        return stored.config.method, []
    target = load_manifest(engine_dir).model
    draft = read_draft(source, target)
    staging.mkdir()
    stored = store_draft(draft, staging, target.dtype)
    return stored.config.method, [f"packaging: {draft.packaging}"]


def sample_requests(
    path: Path, engine_dir: Path, manifest: EngineManifest, count: int, learned: frozenset[str] = frozenset(), enough: int = 1
) -> tuple[list[Request], list[str]]:
    """The first usable lines of a batch file as a job would answer them, but for the length. Raises InputError when none can be used.

    learned: `prompt_digest` of prompts that the draft was trained on. Lines with them are left out where `enough` others are found.
    """
    builder = PromptBuilder(load_codec(engine_dir), SamplingParams(), manifest.model.context_length, manifest.model.vocab_size)
    requests: list[Request] = []
    known: list[Request] = []
    refused: list[str] = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if len(requests) == count:
                    break
                if not raw.strip():
                    continue
                try:
                    request = builder.build(parse_line(raw, number), len(requests))
                except RequestError as error:
                    refused.append(f"line {number}: {error.message}")
                    continue
                most = min(request.params.max_tokens or LONGEST_ANSWER, LONGEST_ANSWER)
                params = replace(request.params, max_tokens=most, min_tokens=min(request.params.min_tokens, most))
                request = replace(request, params=params)
                if prompt_digest(request.prompt_token_ids) not in learned:
                    requests.append(request)
                elif len(known) < count:
                    known.append(request)
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror or error})", "give a JSONL file of the job") from error
    notes = [f"{len(refused)} lines left out, the first is {refused[0]}"] if refused else []
    if known and len(requests) < enough:
        taken = count - len(requests)
        notes.append(f"{len(known[:taken])} of the lines measured on were learned from: the draft looks a little better than it is")
        requests += known[:taken]
    if not requests:
        why = refused[0] if refused else "it is empty"
        raise InputError(f"no line of '{path}' can be used ({why})", "give a JSONL file in the batch format: docs/lines.md")
    return [replace(request, request_id=number) for number, request in enumerate(requests)], notes


@dataclass
class Measured:
    """One alternative's runs over the sample, added up. differing: lines whose text was not that of plain decoding (rounding at ties)."""

    method: str
    cpu_s: float = 0.0
    wall_s: float = 0.0
    tokens: int = 0
    differing: int = 0
    speculation: dict[str, Any] | None = None

    def row(self, plain: Measured, on_cpu: bool) -> dict[str, Any]:
        """JSON-ready. ratio: tokens a second over plain decoding's, by CPU time on a CPU, where other work is no cost of ours."""
        own, other = (self.cpu_s, plain.cpu_s) if on_cpu else (self.wall_s, plain.wall_s)
        found = self.speculation or {}
        return {
            "method": self.method,
            "tokens_per_step": found.get("tokens_per_step", 1.0),
            "tokens_per_s": round(self.tokens / self.wall_s, 2),
            "tokens_per_cpu_s": round(self.tokens / self.cpu_s, 2),
            "ratio": round((self.tokens / own) / (plain.tokens / other), 4),
            "acceptance": found.get("acceptance", {}),
            "draft_s": found.get("draft_s"),
            "verify_s": found.get("verify_s"),
            "differing_lines": self.differing,
        }


def measure(
    engine: Engine, alternatives: list[Choice], requests: list[Request], rounds: int, told: Callable[[str], None]
) -> list[Measured]:
    """Answer the sample with every alternative in turn, `rounds` times after one that only learns what steps cost and drafts are worth, as
    a job finds it in the pairing. The first one is plain decoding. Each starts with an empty KV cache."""
    found = [Measured(choice.method) for choice in alternatives]
    points: dict[str, float] = {}
    learned: dict[str, dict[str, Any]] = {}
    texts: dict[int, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for entry, choice in zip(found, alternatives, strict=True):
            before = learned.get(choice.method, {})
            drafter: dict[str, Any] = {key: before[key] for key in ("confidence", "draft_ms_per_token") if key in before}
            known = Pairing(choice.method, None, engine.executor.machine, before.get("acceptance", {}), points, drafter)
            run = engine.again(replace(choice, pairing=known))
            cpu, wall = time.process_time(), time.monotonic()
            for request in requests:
                run.add(request)
            answers = {output.request_id: [completion.token_ids for completion in output.completions] for output in run.drain()}
            cpu, wall = time.process_time() - cpu, time.monotonic() - wall
            entry.speculation = run.metrics()["speculation"]
            if entry.speculation is not None:
                learned[choice.method] = entry.speculation
                points = entry.speculation["step_cost_ms"] or points
            texts = texts or answers
            told(f"{entry.method}: {wall:.1f} s")
            if turn:
                entry.cpu_s += cpu
                entry.wall_s += wall
                entry.tokens += sum(len(tokens) for line in answers.values() for tokens in line)
                entry.differing = sum(answers[key] != texts[key] for key in texts)
    return found


def best_of(rows: list[dict[str, Any]]) -> str:
    """The method with the highest ratio, "off" unless it beats plain decoding."""
    best = max(rows, key=lambda row: row["ratio"])
    return best["method"] if best["ratio"] >= MIN_RATIO else "off"


def store_pairing(engine_dir: Path, pairing: Pairing, staging: Path | None) -> None:
    """Put draft and pairing.json into the engine, each in one rename, the draft first: whatever moment this is killed at, the engine loads.

    staging: the prepared draft, which is moved; None leaves a draft that is there.
    """
    if staging is not None:
        target = engine_dir / DRAFT_FOLDER
        marker = next((name for name in (MANIFEST_NAME, HEADS_NAME) if (target / name).is_file()), MANIFEST_NAME)
        replace_directory(staging, target, force=True, marker=marker, noun="draft")
    temporary = engine_dir / f".{PAIRING_NAME}.tmp-{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            file.write(pairing.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(engine_dir / PAIRING_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def staging_directory(engine_dir: Path) -> Path:
    """Where a draft is laid out before it is moved into place; what dead processes left there is removed."""
    remove_stale(engine_dir / DRAFT_FOLDER)
    return engine_dir / f".{DRAFT_FOLDER}.tmp-{os.getpid()}"


def load_engine(engine_dir: Path, config: EngineConfig) -> Engine:
    """The engine with the configured drafter, warmed up."""
    engine = Engine.from_directory(engine_dir, config, load_codec(engine_dir))
    engine.warm_up()
    return engine
