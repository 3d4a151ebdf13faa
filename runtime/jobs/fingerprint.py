"""What a result depends on besides its line, and the two small files that say so.

`OUT.journal/job.json` stands from the first step of a job to its end: there is an unfinished job. `.OUT.dspark.json` (the sidecar) stands
from the end of a job to the start of the next: OUT is a finished job's, and of which input and settings. What only changes the speed
(batch size, pool size, threads, kernels) is in neither.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from dspark.runtime.jobs.lock import HEADER_NAME
from dspark.runtime.jobs.output import write_atomic
from dspark.runtime.jobs.scan import READ_BYTES
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.manifest import MANIFEST_NAME
from dspark.runtime.spec.sampling_params import SamplingParams

JOURNAL_SCHEMA = 1
OUTPUT_SCHEMA = 1
Settings = dict[str, Any]


def new_job_name() -> str:
    """A name that no other job of this output has."""
    return f"{time.time_ns():x}-{os.getpid()}"


def job_fingerprint(
    engine_dir: Path, model_name: str, defaults: SamplingParams, config: EngineConfig, quantized_cache: str | None = None
) -> Settings:
    """Setting name -> value, JSON-ready. The engine counts by its manifest, which holds the hashes of everything in it.

    quantized_cache: dtype of an 8-bit KV cache, None for the model's own (which jobs begun before there was a choice do not name).
    """
    manifest = (engine_dir / MANIFEST_NAME).read_bytes()
    settings = {
        "engine": xxhash.xxh3_128_hexdigest(manifest),
        **({} if quantized_cache is None else {"kv-cache-dtype": quantized_cache}),
        "model-name": model_name,
        "output-schema": OUTPUT_SCHEMA,
        "seed": config.seed,
        "deterministic": config.deterministic,
        **({} if config.speculative_sampling == "coupled" else {"speculative-sampling": config.speculative_sampling}),
        "max-model-len": config.max_model_len,
        **{f"default {name}": value for name, value in asdict(defaults).items() if name != "seed"},
        "default seed": defaults.seed,
    }
    return orjson.loads(orjson.dumps(settings))


def differences(old: Settings, new: Settings) -> str:
    """The settings that differ, as text: name old -> new."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(
        "another engine" if name == "engine" else f"{name.removeprefix('default ')} {_show(old.get(name))}, now {_show(new.get(name))}"
        for name in names
    )


def _show(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)


@dataclass(frozen=True)
class JobHeader:
    """An unfinished job: what its results depend on, and how they are laid out.

    job: tells one job from another; a sidecar with the same one is this job's, so only removing the directory is left to do.
    """

    fingerprint: Settings
    order: str
    split_errors: bool
    job: str
    schema: int = JOURNAL_SCHEMA

    def save(self, directory: Path) -> None:
        """Write it durably: from now on the directory is an unfinished job."""
        write_atomic(directory / HEADER_NAME, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))

    def check_continues(self, old: JobHeader, directory: Path) -> None:
        """Raises InputError when this job must not go on with the old one's results."""
        changed = differences(old.fingerprint, self.fingerprint)
        if old.order != self.order:
            changed = changed or f"order {old.order}, now {self.order}"
        if self.order == "completion" and old.split_errors != self.split_errors:
            changed = changed or f"--errors {'given' if old.split_errors else 'not given'}, now the other way"
        if changed:
            raise InputError(
                f"'{directory}' holds an unfinished job with other settings: {changed}",
                "take the old settings to continue it, or type --fresh to drop it",
            )


def load_header(directory: Path) -> JobHeader | None:
    """The unfinished job in a journal directory, or None. Raises InputError when a newer dspark wrote it or it is damaged."""
    path = directory / HEADER_NAME
    if not path.exists():
        return None
    try:
        data = orjson.loads(path.read_bytes())
        header = JobHeader(dict(data["fingerprint"]), str(data["order"]), bool(data["split_errors"]), str(data["job"]), int(data["schema"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", "type --fresh to start over") from error
    if header.schema != JOURNAL_SCHEMA:
        raise InputError(
            f"'{path}' has schema {header.schema}, this dspark continues {JOURNAL_SCHEMA}",
            "continue it with the dspark that began it, or type --fresh",
        )
    return header


@dataclass(frozen=True)
class FileState:
    """Size in bytes and hex xxh3_128 of an output file."""

    num_bytes: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> FileState:
        digest = xxhash.xxh3_128()
        with open(path, "rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
            return cls(file.tell(), digest.hexdigest())

    def holds(self, path: Path) -> bool:
        """Whether the file is there and unchanged."""
        return path.is_file() and path.stat().st_size == self.num_bytes and FileState.of(path) == self


@dataclass(frozen=True)
class Sidecar:
    """A finished job. input_digest: of the bytes that were read, the first `limit` lines. errors: name of the errors file."""

    job: str
    fingerprint: Settings
    order: str
    limit: int | None
    input_digest: str
    num_lines: int
    num_failed: int
    output: FileState
    errors: str | None
    errors_state: FileState | None
    metrics: dict[str, Any]
    schema: int = JOURNAL_SCHEMA

    def save(self, path: Path) -> None:
        write_atomic(path, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def sidecar_path(output: Path) -> Path:
    """Where the sidecar of an output stands."""
    return output.with_name(f".{output.name}.dspark.json")


def journal_directory(output: Path) -> Path:
    """Where an output's unfinished job stands."""
    return output.with_name(f"{output.name}.journal")


def load_sidecar(path: Path) -> Sidecar | None:
    """The finished job of an output; None when there is none or the file cannot be read (then the job is simply done again)."""
    try:
        data = orjson.loads(path.read_bytes())
        if data.get("schema") != JOURNAL_SCHEMA:
            return None
        data["output"] = FileState(**data["output"])
        data["errors_state"] = FileState(**data["errors_state"]) if data["errors_state"] else None
        return Sidecar(**data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
