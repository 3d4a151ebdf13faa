"""LoRA adapters as PEFT saves them, merged into a checkpoint while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.converters.lora.adapter import Adapter
from dspark.converters.lora.quantized import QuantizedLoraReader
from dspark.converters.lora.reader import LoraReader
from dspark.converters.packed import PackedSource
from dspark.converters.readers.base import CheckpointReader
from dspark.runtime.spec.errors import UsageError


def with_adapters(
    base: CheckpointReader, adapters: Sequence[tuple[Path, float]], requantize: bool = True, full_base: CheckpointReader | None = None
) -> CheckpointReader:
    """`base` itself when there are no adapters, else with them merged in.

    adapters: directory and weight of each. requantize, full_base: see `QuantizedLoraReader`. Raises UsageError for those
    two where there is no adapter or nothing quantized, and what the readers raise.
    """
    packed = isinstance(base, PackedSource)
    flag = "--no-requantize" if not requantize else "--lora-base" if full_base is not None else None
    if flag is not None and not (adapters and packed):
        what = "the base is not quantized" if adapters else "there is no --lora"
        raise UsageError(f"{flag} says how to merge an adapter into a quantized base, but {what}", f"leave out {flag}")
    opened = [Adapter(path, weight) for path, weight in adapters]
    if not opened:
        return base
    return QuantizedLoraReader(base, opened, requantize, full_base) if packed else LoraReader(base, opened)
