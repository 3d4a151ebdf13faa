"""`dspark convert`: any checkpoint -> an engine directory."""

# ruff: noqa: RUF009 - flag() and argument() return dataclass fields
from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dspark.runtime.spec.errors import UsageError
from dspark_cli.console import Console
from dspark_cli.options import add_command, argument, flag

if TYPE_CHECKING:
    from dspark.converters.pipeline import Result

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ConvertOptions:
    """Flags of `dspark convert`."""

    source: Path = argument("checkpoint: a Hugging Face directory with safetensors weights, or a .gguf file")
    engine: Path = argument("engine directory to write")
    lora: tuple[str, ...] = flag((), "adapter to merge in, with its weight (1 when absent)", metavar="DIR[=WEIGHT]")
    requantize: bool = flag(True, "on a quantized base, quantize adapted layers again; --no-requantize keeps them dense")
    lora_base: Path | None = flag(None, "full-precision twin of a quantized base, to measure what the merge loses", metavar="DIR")
    dtype: str = flag("auto", "dtype of the weights; auto: the checkpoint's own", choices=DTYPES)
    audit: bool = flag(True, "compare logits, tokenizer and chat template with transformers before publishing")
    force: bool = flag(False, "replace an engine that is already there")


def convert(console: Console, options: ConvertOptions) -> int:
    """Convert a checkpoint to an engine directory."""
    from dspark.converters.pipeline import convert as run

    adapters = [parse_lora(str(text)) for text in options.lora]
    start = time.monotonic()
    console.note(f"converting {options.source}" + "".join(f" + {text}" for text in options.lora))
    progress = ByteProgress(console)
    try:
        result = run(
            options.source,
            options.engine,
            options.dtype,
            options.audit,
            options.force,
            progress,
            adapters,
            options.requantize,
            options.lora_base,
        )
    finally:
        progress.close()
    report_result(console, result, time.monotonic() - start)
    return 0


def parse_lora(text: str) -> tuple[Path, float]:
    """Directory and weight of one --lora; a directory whose own name has a "=" is taken as it stands. Raises UsageError."""
    path, separator, weight = text.rpartition("=")
    if not separator or Path(text).expanduser().is_dir():
        return Path(text).expanduser(), 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not path or not math.isfinite(value):
        raise UsageError(f"--lora is '{text}', allowed: DIR or DIR=WEIGHT with a number", "such as --lora my-adapter=0.5")
    return Path(path).expanduser(), value


class ByteProgress:
    """The converters' progress callback, drawn as a bar of megabytes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        self._done = 0

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        if self._bar is None:
            self._bar = self._console.progress(-(-total_bytes // 10**6), "MB")
        megabytes = done_bytes // 10**6
        self._bar.advance(megabytes - self._done)
        self._done = megabytes

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def report_result(console: Console, result: Result, seconds: float) -> None:
    """Notes first, then the one line that ends a conversion; the same as a document with --json."""
    manifest = result.manifest
    model, quality = manifest.model, manifest.quality
    for note in result.notes:
        console.note(f"note: {note}")
    scheme = describe_scheme(manifest.quant)
    parts = [model.family, model.dtype if scheme is None else scheme, f"{manifest.weight_bytes() / 1e6:.1f} MB"]
    if quality:
        parts.append(f"SQNR mean {quality['mean_sqnr_db']} dB, worst {quality['worst_sqnr_db']} dB ({quality['worst_layer']})")
        if "mean_error_before" in quality:
            before, after = quality["mean_error_before"], quality["mean_error_after"]
            parts.append(f"adapted layers {before:.2%} from a full-precision merge, {after:.2%} after quantizing again")
    parts.append(str(manifest.audit.get("summary", "not audited")))
    console.note(f"wrote {result.engine} in {seconds:.1f} s: {', '.join(parts)}")
    console.document(
        {
            "engine": str(result.engine),
            "family": model.family,
            "dtype": model.dtype,
            "scheme": scheme,
            "weight_bytes": manifest.weight_bytes(),
            "audit": manifest.audit,
            "quality": quality,
            "notes": result.notes,
            "seconds": round(seconds, 3),
        }
    )


def describe_scheme(quant: Any) -> str | None:
    """A quantization in words, such as "w4a16 group 64", or None."""
    return None if quant is None else str(quant.describe())


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, convert, ConvertOptions)
