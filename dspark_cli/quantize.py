"""`dspark quantize`: an engine or any checkpoint -> a quantized engine directory."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import typer

from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.quant import GROUP_SIZES, PRESETS
from dspark_cli.console import Console
from dspark_cli.convert import DTYPES, TensorProgress, report_result
from dspark_cli.options import add_command, argument, flag

METHODS = ("rtn",)


@dataclass(frozen=True)
class QuantizeOptions:
    """Flags of `dspark quantize`."""

    source: Path = argument("engine directory, or any checkpoint that convert reads")
    engine: Path = argument("engine directory to write")
    scheme: str | None = flag(None, "how weights are stored; required", choices=tuple(PRESETS))
    method: str = flag("rtn", "how codes are chosen", choices=METHODS)
    group_size: int | None = flag(
        None,
        "inputs that share one step; -1: a whole row (default: 8 bit -1, 4 bit the largest of 128, 64, 32 that divides every layer)",
        choices=(*GROUP_SIZES, -1),
    )
    ignore: tuple[str, ...] = flag((), "glob of module names that stay as they are; repeatable", metavar="PATTERN")
    dtype: str = flag("auto", "dtype of what is not quantized; auto: the checkpoint's own", choices=DTYPES)
    audit: bool = flag(True, "compare the engine with transformers on the same quantized weights before publishing")
    force: bool = flag(False, "replace an engine that is already there")


def quantize(console: Console, options: QuantizeOptions) -> int:
    """Quantize an engine or a checkpoint."""
    from dspark.converters.pipeline import quantize as run

    if options.scheme is None:
        raise UsageError("--scheme is missing", f"type --scheme with one of {', '.join(PRESETS)}")
    start = time.monotonic()
    console.note(f"quantizing {options.source} to {options.scheme}")
    progress = TensorProgress(console)
    try:
        result = run(
            options.source,
            options.engine,
            options.scheme,
            options.method,
            options.group_size,
            options.ignore,
            options.dtype,
            options.audit,
            options.force,
            progress,
        )
    finally:
        progress.close()
    for module, entry in result.manifest.quality["layers"].items():
        console.detail(f"{module}: {entry['sqnr_db']} dB, {entry['bytes']} bytes")
    report_result(console, result, time.monotonic() - start)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, quantize, QuantizeOptions)
