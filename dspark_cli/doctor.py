"""`dspark doctor`: what this machine has, and which kernel each op takes here and why."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from dspark.runtime.spec.cores import usable_cores
from dspark.runtime.spec.engine_config import DEVICE_CHOICES, KERNEL_CHOICES
from dspark.runtime.spec.errors import UsageError
from dspark_cli.console import Console
from dspark_cli.options import add_command, flag

PACKAGES = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "triton", "gguf", "typer", "peft")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DoctorOptions:
    """Flags of `dspark doctor`. The shape is the one whose kernels are asked; the defaults are a small Llama's."""

    device: str = flag("auto", "device to ask about", choices=DEVICE_CHOICES)
    kernels: str = flag("auto", "which kernels to consider", choices=KERNEL_CHOICES)
    dtype: str = flag("bfloat16", "arithmetic type to ask about", choices=DTYPES)
    deterministic: bool = flag(False, "ask for batch-invariant kernels")
    interpreter: bool = flag(False, "ask as for a run under Triton's interpreter, which needs no GPU (with --device cpu)")


def package_versions() -> dict[str, str | None]:
    """Installed version of each package, None when it is absent."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine_facts() -> dict[str, Any]:
    """Processor, memory and GPUs; sizes in bytes."""
    import psutil
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                {"name": properties.name, "memory_bytes": properties.total_memory, "capability": f"{properties.major}.{properties.minor}"}
            )
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": usable_cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_free_bytes": psutil.virtual_memory().available,
        "gpus": gpus,
    }


def kernel_choices(options: DoctorOptions, has_gpu: bool) -> dict[str, dict[str, Any]]:
    """Per op: what is taken and why others declined."""
    import torch

    from dspark.kernels.ops import KernelFacts, Kernels

    device = options.device if options.device != "auto" else "cuda" if has_gpu and not options.interpreter else "cpu"
    if options.interpreter and device != "cpu":
        raise UsageError(f"--interpreter asks about the CPU, --device is {device}", "leave --device out")
    facts = KernelFacts(
        device,
        getattr(torch, options.dtype),
        head_dim=64,
        num_heads=9,
        num_kv_heads=3,
        block_size=16,
        deterministic=options.deterministic,
        interpreted=options.interpreter,
    )
    return Kernels(facts, options.kernels).explain()


def tile_facts(has_gpu: bool) -> dict[str, Any]:
    """Which table of tiles this machine's GPU has, where what was measured of it is kept, and how many shapes were."""
    from dspark.kernels.triton.tuning.cache import cache_directory

    if not has_gpu:
        return {"table": None, "measured": False, "cache": str(cache_directory()), "tuned": 0, "problem": None}
    from dspark.kernels.triton.tuning.machine import known_tiles

    book = known_tiles()
    table = book.shipped
    found = {"table": None if table is None else table.name, "measured": table is not None and table.measured}
    return {**found, "cache": book.cache, "tuned": len(book.tuned), "problem": book.problem}


def tile_line(facts: dict[str, Any], has_gpu: bool) -> str:
    """The same in one line."""
    if not has_gpu:
        return f"tiles none without a GPU; measured ones would be kept in '{facts['cache']}'"
    marked = "" if facts["measured"] or facts["table"] is None else ", unmeasured"
    table = "by shape alone, no table for this GPU" if facts["table"] is None else f"table of {facts['table']}{marked}"
    return f"tiles {table}; {facts['tuned']} shapes measured here, '{facts['cache']}'"


def doctor(console: Console, options: DoctorOptions) -> int:
    """Versions, devices, and which kernel each op takes here and why."""
    facts = machine_facts()
    has_gpu = bool(facts["gpus"])
    report = {"versions": package_versions(), "machine": facts, "kernels": kernel_choices(options, has_gpu), "tiles": tile_facts(has_gpu)}
    console.document(report)
    console.data(f"python {facts['python']} ({sys.executable}) on {facts['system']}")
    console.data("  ".join(f"{name} {found or 'absent'}" for name, found in report["versions"].items()))
    console.data(
        f"cores {facts['cores']} ({facts['cpu_capability']})  memory {facts['memory_bytes'] / 2**30:.1f} GiB, "
        f"{facts['memory_free_bytes'] / 2**30:.1f} GiB free"
    )
    for gpu in facts["gpus"]:
        console.data(f"gpu {gpu['name']}  {gpu['memory_bytes'] / 2**30:.1f} GiB  sm_{gpu['capability'].replace('.', '')}")
    if not facts["gpus"]:
        console.data("gpu none")
    console.data(tile_line(report["tiles"], has_gpu))
    width = max(len(op) for op in report["kernels"])
    for op, choice in report["kernels"].items():
        declined = "; ".join(f"{name}: {reason}" for name, reason in choice["declined"].items())
        console.data(f"{op:<{width}} {choice['taken']:<10}{'  (' + declined + ')' if declined else ''}")
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, doctor, DoctorOptions)
