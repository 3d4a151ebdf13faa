"""`dspark export`: an engine -> a checkpoint that other programs load."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import typer

from dspark.runtime.spec.errors import UsageError
from dspark_cli.console import Console
from dspark_cli.convert import ByteProgress
from dspark_cli.options import add_command, argument, flag

FORMATS = ("hf", "gptq", "awq", "compressed-tensors")


@dataclass(frozen=True)
class ExportOptions:
    """Flags of `dspark export`."""

    engine: Path = argument("engine directory to read")
    out: Path = argument("checkpoint directory to write")
    format: str | None = flag(None, "layout of the checkpoint; required; hf: dense, whatever the engine is", choices=FORMATS)
    force: bool = flag(False, "replace a checkpoint that was exported before")


def export(console: Console, options: ExportOptions) -> int:
    """Write an engine as a checkpoint for other programs."""
    from dspark.converters.exporters.base import export as run

    if options.format is None:
        raise UsageError("--format is missing", f"type --format with one of {', '.join(FORMATS)}")
    start = time.monotonic()
    console.note(f"exporting {options.engine} as {options.format}")
    progress = ByteProgress(console)
    try:
        result = run(options.engine, options.out, options.format, options.force, progress)
    finally:
        progress.close()
    seconds = time.monotonic() - start
    for note in result.notes:
        console.note(f"note: {note}")
    layers = f"{result.quantized} quantized layers, " if result.quantized else ""
    console.note(f"wrote {result.directory} in {seconds:.1f} s: {options.format}, {layers}{result.num_bytes / 1e6:.1f} MB")
    console.document(
        {
            "directory": str(result.directory),
            "format": options.format,
            "quantized_layers": result.quantized,
            "weight_bytes": result.num_bytes,
            "notes": list(result.notes),
            "seconds": round(seconds, 3),
        }
    )
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, export, ExportOptions)
