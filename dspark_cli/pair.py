"""`dspark pair ENGINE`: which way of drafting is fastest on a job's own lines; the winner is kept in the engine."""

# ruff: noqa: RUF009 - flag() and argument() return fields of frozen dataclasses
from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.runtime.spec.engine_config import DEVICE_CHOICES, KERNEL_CHOICES, SPECULATIVE_CHOICES, EngineConfig
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.openmp import bound_spinning
from dspark_cli.console import Console
from dspark_cli.options import add_command, argument, flag

if TYPE_CHECKING:
    from dspark.runtime.speculation.choice import Choice

SHOWN_POSITIONS = 6


@dataclass(frozen=True)
class PairOptions:
    """Flags of `dspark pair`."""

    engine: Path = argument("engine directory; the winner is stored in it")
    draft: Path | None = flag(
        None,
        "a draft: an engine with a small model, or a published DSpark, DFlash or EAGLE-3 head (default: the engine's own)",
        metavar="DIR",
    )
    method: str = flag("auto", "what to store; auto: the fastest on the lines of --prompts", choices=SPECULATIVE_CHOICES)
    prompts: Path | None = flag(None, "lines of the job to measure on, JSONL", metavar="FILE")
    max_num_seqs: int = flag(64, "the job's batch size: most sequences in one step", low=1, high=4096)
    samples: int = flag(128, "lines to measure on", low=1, high=100000)
    rounds: int = flag(2, "runs of each alternative that count; one more learns what steps cost", low=1, high=20)
    device: str = flag("auto", "where to run", choices=DEVICE_CHOICES)
    kernels: str = flag("auto", "which kernels to take", choices=KERNEL_CHOICES)
    threads: int | None = flag(None, "CPU threads (default: the cores this process may use)", low=1, high=1024)
    dry_run: bool = flag(False, "check and measure, store nothing", names="--dry-run")


def pair(console: Console, options: PairOptions) -> int:
    """Check a draft against an engine, measure the ways of drafting on the job's own lines, store the fastest.

    The engine gets draft/ and pairing.json, which --speculative auto reads. No text changes, whatever is stored.
    Exit codes: 0 stored (or "off": plain decoding is fastest), 2 the draft does not fit, with every mismatch named.
    """
    bound_spinning()
    from dspark.converters.drafts.pairing import prepare_draft, staging_directory
    from dspark.runtime.spec.manifest import load_manifest
    from dspark.runtime.speculation.choice import DRAFT_METHODS, draft_method
    from dspark.runtime.speculation.pairing import DRAFT_FOLDER

    load_manifest(options.engine)
    if options.method == "auto" and options.prompts is None:
        raise UsageError("nothing is given to measure on", "add --prompts FILE with lines of the job, or name a --method")
    own = options.engine / DRAFT_FOLDER
    staging: Path | None = None
    method: str | None = None
    directory: Path | None = None
    try:
        if options.draft is not None:
            if not options.draft.is_dir():
                raise InputError(f"'{options.draft}' is no directory, so it is no draft", "name an engine or a draft checkpoint")
            staging = staging_directory(options.engine)
            method, notes = prepare_draft(options.engine, options.draft, staging)
            directory = staging
            for note in notes:
                console.note(f"note: {note}")
        elif own.is_dir():
            method, directory = draft_method(own), own
        if options.method in DRAFT_METHODS and options.method != method:
            found = "there is no draft" if method is None else f"the draft is for {method}"
            raise UsageError(f"--method is {options.method}, but {found}", "give one with --draft DIR")
        return _decide(console, options, method, directory, staging)
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _decide(console: Console, options: PairOptions, method: str | None, directory: Path | None, staging: Path | None) -> int:
    """Measure if there are lines, print the table, store."""
    from dspark.converters.drafts.pairing import best_of, load_engine, measure, sample_requests, store_pairing
    from dspark.runtime.spec.manifest import load_manifest
    from dspark.runtime.speculation.choice import DRAFT_METHODS
    from dspark.runtime.speculation.pairing import DRAFT_FOLDER, Pairing

    manifest = load_manifest(options.engine)
    with_draft = directory is not None and options.method not in ("off", "ngram")
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(512, options.max_num_seqs),
        device=options.device,
        kernels=options.kernels,
        threads=options.threads,
        speculative="auto" if with_draft else "off",
        draft=str(directory) if with_draft else None,
    )
    engine = load_engine(options.engine, config)
    try:
        machine = engine.executor.machine
        rows: list[dict[str, Any]] = []
        winner = options.method
        cost: dict[str, float] = {}
        conditions: dict[str, Any] = {}
        if options.prompts is not None:
            requests, notes = sample_requests(options.prompts, options.engine, manifest, options.samples)
            for note in notes:
                console.note(f"note: {note}")
            console.note(f"pair: {len(requests)} lines of '{options.prompts}', {options.max_num_seqs} at a time, {options.rounds} rounds")
            measured = measure(engine, _alternatives(options.method, method, directory), requests, options.rounds, console.detail)
            rows = [entry.row(measured[0], machine.device == "cpu") for entry in measured]
            winner = best_of(rows) if options.method == "auto" else options.method
            cost = next((entry.speculation["step_cost_ms"] for entry in measured if entry.speculation and entry.method == winner), {})
            cost = cost or next((entry.speculation["step_cost_ms"] for entry in reversed(measured) if entry.speculation), {})
            conditions = {"lines": len(requests), "max_num_seqs": options.max_num_seqs, "rounds": options.rounds}
            for line in table(rows, winner):
                console.data(line)
    finally:
        engine.close()
    acceptance: dict[str, Any] = next((row["acceptance"] for row in rows if row["method"] == winner), {})
    folder = DRAFT_FOLDER if winner in DRAFT_METHODS or (staging is None and (options.engine / DRAFT_FOLDER).is_dir()) else None
    pairing = Pairing(winner, folder, machine, acceptance, cost, rows, conditions, int(time.time()))
    if not options.dry_run:
        store_pairing(options.engine, pairing, staging if winner in DRAFT_METHODS else None)
    console.note(
        f"{'would store' if options.dry_run else 'stored'}: {winner}" + (" (plain decoding is fastest)" if winner == "off" else "")
    )
    console.document({"engine": str(options.engine), "method": winner, "stored": not options.dry_run, "measured": rows})
    return 0


def _alternatives(wanted: str, method: str | None, directory: Path | None) -> list[Choice]:
    """Plain decoding first, then what is asked about."""
    from dspark.runtime.speculation.choice import Choice

    found = [Choice("off")]
    if wanted in ("auto", "ngram"):
        found.append(Choice("ngram"))
    if method is not None and wanted in ("auto", method):
        found.append(Choice(method, directory))
    return found


def table(rows: list[dict[str, Any]], winner: str) -> list[str]:
    """The measurement, a line for each alternative; the stored one is marked."""
    lines = [f"  {'method':<12} {'tokens/step':>11} {'tokens/s':>9} {'tokens/CPU-s':>12} {'ratio':>6}  acceptance by position"]
    for row in rows:
        mark = "*" if row["method"] == winner else " "
        figures = (
            f"{row['tokens_per_step'] or 1.0:>11.2f} {row['tokens_per_s']:>9.1f} {row['tokens_per_cpu_s']:>12.1f} {row['ratio']:>6.2f}"
        )
        lines.append(f"{mark} {row['method']:<12} {figures}  {_by_position(row['acceptance'])}")
    return lines


def _by_position(acceptance: dict[str, Any]) -> str:
    """All sources together, weighted by what was tried."""
    shown = []
    for depth in range(SHOWN_POSITIONS):
        entries = [(entry["by_position"][depth], entry["tried"][depth]) for entry in acceptance.values() if depth < len(entry["tried"])]
        tried = sum(count for _, count in entries)
        if not tried:
            break
        shown.append(f"{sum(rate * count for rate, count in entries) / tried:.2f}")
    return " ".join(shown)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, pair, PairOptions)
