"""`dspark tune ENGINE`: which tiles of the GPU kernels are fastest on this machine, measured once for all later runs."""

# ruff: noqa: RUF009 - flag() and argument() return fields of frozen dataclasses
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.kv_cache import CACHE_CHOICES
from dspark.runtime.spec.manifest import load_manifest
from dspark_cli.console import Console
from dspark_cli.options import add_command, argument, flag

if TYPE_CHECKING:
    from dspark.kernels.triton.tuning.choices import Tuned


@dataclass(frozen=True)
class TuneOptions:
    """Flags of `dspark tune`. Those of a run that decide what is launched are to be what `dspark generate` will be given."""

    engine: Path = argument("engine directory", metavar="ENGINE")
    seconds: float = flag(300.0, "stop after so long; what is finished is kept, and the same command goes on", low=1, metavar="S")
    again: bool = flag(False, "measure again what was measured before", names="--again")
    max_num_seqs: int = flag(EngineConfig.max_num_seqs, "most sequences in one step of the runs to come", low=1, high=4096)
    max_num_batched_tokens: int = flag(EngineConfig.max_num_batched_tokens, "most tokens in one step of them", low=16, high=1 << 20)
    max_model_len: int | None = flag(None, "their longest prompt and answer together (default: the model's context)", low=1)
    block_size: int = flag(EngineConfig.block_size, "tokens in one block of their KV cache", choices=(8, 16, 32, 64))
    kv_cache_dtype: str = flag(
        EngineConfig.kv_cache_dtype, "numbers of their KV cache (auto: what the engine was calibrated for)", choices=CACHE_CHOICES
    )
    deterministic: bool = flag(False, "for deterministic runs, of which only products of 8-bit integers have tiles to choose")


def tune(console: Console, options: TuneOptions) -> int:
    """Measure on this machine's GPU which tiles of the Triton kernels are fastest for ENGINE, and keep them for later runs.

    Later runs on the same GPU, triton and version of dspark's kernels take them without being asked. Needs a GPU.
    """
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        deterministic=options.deterministic,
        autotune=options.seconds,
    )
    manifest = load_manifest(options.engine)
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "tune measures kernels on a GPU, and this machine has no usable one", "run it where the engine will run, or type: dspark doctor"
        )
    from dspark.kernels.triton.tuning.subjects import Load
    from dspark.runtime.engine import resolve_max_model_len
    from dspark.runtime.execution.autotune import autotune, tile_metrics
    from dspark.runtime.execution.loader import load_model

    max_model_len = resolve_max_model_len(manifest.model, config.max_model_len)
    model = load_model(
        options.engine,
        device="cuda",
        block_size=config.block_size,
        deterministic=config.deterministic,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    console.note(f"tune: '{options.engine}' for up to {options.seconds:g} s")
    load = Load(config.max_num_seqs, config.max_num_batched_tokens, max_model_len)
    done = autotune(model, load, options.seconds, options.again)
    book = model.kernels.facts.tiles
    report = tile_metrics(book, done)
    finished = {} if done.report is None else done.report.finished
    console.document({**report, "entries": {key: as_document(entry) for key, entry in finished.items()}})
    for key, entry in finished.items():
        console.data(line_of(key, entry))
    for problem in problems_of(report["autotune"]):
        console.problem(problem)
    console.note(last_line(report))
    return 0


def as_document(entry: Tuned) -> dict[str, Any]:
    """An entry as the cache file has it."""
    from dspark.kernels.triton.tuning.choices import as_json

    return as_json(entry)


def line_of(key: str, entry: Tuned) -> str:
    """One shape in one line: what it took, what it takes, and how."""
    from dspark.kernels.triton.tuning.choices import text

    before, now = entry.untuned_seconds * 1e6, entry.seconds * 1e6
    change = f"{before:8.1f} -> {now:8.1f} us ({before / now:.2f}x)" if now < before else f"{before:8.1f} us, as it was"
    return f"{key}: {change}  {text(entry.choice)}"


def problems_of(outcome: dict[str, Any]) -> list[str]:
    """What went wrong, in lines."""
    if "off" in outcome:
        return [f"nothing was measured: {outcome['off']}"]
    lines = [f"{key} is not measured: {reason}" for key, reason in outcome["failed"].items()]
    return [*lines, *(outcome[name] for name in ("stopped", "cache_problem") if outcome[name])]


def last_line(report: dict[str, Any]) -> str:
    """The end in one line."""
    outcome = report["autotune"]
    if "off" in outcome:
        return "tune: tiles stay as they are"
    left = f", {outcome['left']} left: the same command goes on" if outcome["left"] else ""
    known = f", {outcome['known']} known before" if outcome["known"] else ""
    counts = f"{outcome['measured']} shapes measured, {outcome['faster']} of them faster than before{known}{left}"
    return f"tune: {counts}; {outcome['seconds']:.0f} s; '{report['cache']}'"


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, tune, TuneOptions)
