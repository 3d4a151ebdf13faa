"""How fast could it be? Bytes and arithmetic of a model's step over a machine's peaks, and measurements beside that limit.

    python benchmarks/roofline.py llama-3-8b --device h200 --scheme w4a16 --batch 1 --batch 64 --context 1024
    python benchmarks/roofline.py ENGINE --device cpu --ops                 this machine, measured first
    python benchmarks/roofline.py ENGINE --device cpu --measured metrics.json    what dspark generate --metrics wrote
    python benchmarks/roofline.py --device h100 --measured FILE.json        kernels that were timed (docs/roofline.md has the format)

A limit is no forecast: every operation at the machine's peak, one after the other, nothing between them. Exit codes: 0, 2 for what cannot
be read.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.runtime.models import FAMILIES
from dspark.runtime.roofline.devices import DEVICES, Device
from dspark.runtime.roofline.measured import Measured, measured_job, timed_kernels
from dspark.runtime.roofline.ops import Op, Step, by_name, decode, prefill, step_ops, verify
from dspark.runtime.roofline.weights import HEAD, ModelShape
from dspark.runtime.spec.errors import DsparkError, InputError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig, QuantScheme, default_group_size, preset

MODELS = {
    "llama-3-8b": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 8192),
    "qwen3-4b": ModelConfig("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 1e-6, 40960, tie_word_embeddings=True, qk_norm=True),
    "smollm2-135m": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 8192, tie_word_embeddings=True),
}
"""Shapes out of the models' own config.json files."""
SCHEMES = ("bf16", "w8a16", "w4a16", "w8a8", "fp8", "fp8-inputs")
"""fp8: float8 weights, 16-bit activations. fp8-inputs: both in float8."""
MODES = {"decode": "a token of each sequence", "verify": "--query tokens of each, all logits", "prefill": "--query tokens of each prompt"}


@dataclass(frozen=True)
class Row:
    """One step on one device. times: operation -> seconds at the limit; memory_s: those in which memory is the slowest."""

    model: str
    scheme: str
    batch: int
    ops: dict[str, Op]
    times: dict[str, float]
    memory_s: float
    weight_bytes: int
    kv_bytes_per_token: int
    tokens: float

    @property
    def seconds(self) -> float:
        return sum(self.times.values())


def scheme_named(name: str, widths: set[int], group_size: int | None) -> QuantScheme | None:
    """A scheme for inputs of these widths; None for bf16. Raises UsageError for an unknown name."""
    if name == "bf16":
        return None
    if name == "fp8-inputs":
        return replace(preset("fp8"), inputs="dynamic")
    scheme = preset(name)
    return scheme if scheme.storage != "wna16" else replace(scheme, group_size=group_size or default_group_size(widths))


def shape_named(options: argparse.Namespace, name: str) -> tuple[str, ModelShape]:
    """(what it is called, its shape): one of MODELS with the scheme that is asked for, or an engine as it is."""
    kv_dtype, ranks = options.kv_dtype or "", options.tensor_parallel
    layout = "cpu" if options.device == "cpu" else "stored"
    if name not in MODELS:
        if not Path(name).is_dir():
            raise InputError(f"'{name}' is no directory and no known model", f"give an engine, or one of {', '.join(MODELS)}")
        manifest = load_manifest(name)
        kv_dtype = kv_dtype or (manifest.kv_cache.dtype if manifest.kv_cache else "")
        scheme = manifest.quant.describe() if manifest.quant else manifest.model.dtype
        return scheme, ModelShape(manifest.model, manifest.quant, kv_dtype, layout, ranks)
    config = MODELS[name]
    if options.head_scheme != "bf16":
        config = replace(config, tie_word_embeddings=False)
    linears = {
        tensor.removesuffix(".weight"): shape
        for tensor, shape in FAMILIES[config.family].tensors(config).items()
        if len(shape) == 2 and not tensor.startswith("model.embed")
    }
    layers = scheme_named(options.scheme, {shape[1] for module, shape in linears.items() if module != HEAD}, options.group_size)
    head = scheme_named(options.head_scheme, {config.hidden_size}, options.group_size)
    modules = {module: head if module == HEAD else layers for module in linears}
    chosen = {module: scheme for module, scheme in modules.items() if scheme is not None}
    described = (layers.describe() if layers else "bf16") + (f", head {head.describe()}" if head else "")
    return described, ModelShape(config, QuantConfig.of_modules(chosen) if chosen else None, kv_dtype, layout, ranks)


def step_of(options: argparse.Namespace, batch: int) -> Step:
    """The step that is asked for. Raises InputError for a context that cannot hold its queries."""
    if options.mode != "decode" and options.query > options.context:
        raise InputError(f"--query is {options.query}, --context is {options.context}", "type --context with as many tokens or more")
    if options.mode == "prefill":
        return prefill(batch, options.query, options.context)
    return decode(batch, options.context) if options.mode == "decode" else verify(batch, options.context, options.query)


def rows(options: argparse.Namespace, device: Device, shapes: dict[str, tuple[str, ModelShape]]) -> Iterator[Row]:
    for name, (scheme, shape) in shapes.items():
        for batch in options.batch:
            step = step_of(options, batch)
            ops = by_name(step_ops(shape, step))
            times, memory_s = dict.fromkeys(ops, 0.0), 0.0
            labels = {(op.name, op.arithmetic): label for label, op in ops.items()}
            for op in step_ops(shape, step):
                times[labels[op.name, op.arithmetic]] += device.seconds(op)
                memory_s += device.seconds(op) if device.bound(op) == "memory" else 0.0
            tokens = step.num_rows if options.mode == "decode" else step.num_tokens
            yield Row(name, scheme, batch, ops, times, memory_s, shape.weight_bytes, shape.kv_bytes_per_token, tokens)


def summary(found: list[Row]) -> str:
    """One line a step."""
    lines = [
        f"{'model':16} {'scheme':34} {'batch':>5} {'weights':>9} {'KV/token':>9} {'read':>9} {'GFLOP':>9} {'ms':>9} {'tokens/s':>10} memory"
    ]
    for row in found:
        read, flops = sum(op.num_bytes for op in row.ops.values()), sum(op.flops for op in row.ops.values())
        sizes = f"{row.weight_bytes / 1e9:6.2f} GB {row.kv_bytes_per_token / 1e3:6.1f} kB {read / 1e9:6.2f} GB {flops / 1e9:9.1f}"
        speed = f"{1e3 * row.seconds:9.3f} {row.tokens / row.seconds:10.0f} {row.memory_s / row.seconds:6.0%}"
        lines.append(f"{row.model[-16:]:16} {row.scheme[:34]:34} {row.batch:5} {sizes} {speed}")
    return "\n".join(lines)


def operations(row: Row) -> str:
    """One line for each operation of a step, all layers together."""
    lines = [f"{row.model}, {row.scheme}, batch {row.batch}", f"{'':24} {'MB':>10} {'GFLOP':>10} {'ms':>9} {'share':>6}"]
    for name, op in row.ops.items():
        seconds = row.times[name]
        share = f"{100 * seconds / row.seconds:5.1f} %"
        lines.append(f"{name:24} {op.num_bytes / 1e6:10.2f} {op.flops / 1e9:10.2f} {1e3 * seconds:9.4f} {share:>6}")
    return "\n".join(lines)


def comparison(measured: list[Measured]) -> str:
    """Measurements beside the limit."""
    lines = [f"{'measured':52} {'ms':>10} {'limit, ms':>10} {'of the limit':>13}  bound"]
    for entry in measured:
        lines.append(f"{entry.name:52} {1e3 * entry.seconds:10.4f} {1e3 * entry.limit_s:10.4f} {entry.fraction:12.1%}  {entry.bound}")
    return "\n".join(lines)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise InputError(f"'{path}' holds no JSON object")
    return document


def device_named(options: argparse.Namespace, shapes: dict[str, tuple[str, ModelShape]]) -> Device:
    """A data sheet, or this CPU measured."""
    if options.device != "cpu":
        return DEVICES[options.device]
    from dspark.runtime.roofline.machine import measured_cpu
    from dspark.runtime.spec.cores import usable_cores

    arithmetics = {linear.arithmetic for _, shape in shapes.values() for linear in shape.linears.values()}
    working = max((shape.weight_bytes for _, shape in shapes.values()), default=1 << 30)
    return measured_cpu(options.threads or usable_cores(), sorted(arithmetics) or ["bfloat16"], working)


def compare(options: argparse.Namespace, device: Device, shapes: dict[str, tuple[str, ModelShape]]) -> list[Measured]:
    """--measured: the timings of kernels in it, else it is a job's metrics and belongs to the one engine that is given."""
    document = read_json(options.measured)
    if "timings" in document or "engine" not in document:
        return timed_kernels(document, device)
    if len(shapes) != 1:
        raise InputError(f"'{options.measured}' is a job's metrics, and {len(shapes)} models are given", "give the engine that ran it")
    return [measured_job(document, next(iter(shapes.values()))[1], device)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="*", metavar="MODEL", help=f"an engine directory, or one of {', '.join(MODELS)}")
    made.add_argument("--device", choices=(*DEVICES, "cpu"), default="h200", help="whose limits (h200); cpu: this one, measured")
    made.add_argument("--scheme", choices=SCHEMES, default="bf16", help="of the layers of a known model (bf16)")
    made.add_argument("--head-scheme", choices=SCHEMES, default="bf16", help="of its head (bf16)")
    made.add_argument("--group-size", type=int, help="of w4a16 and w8a16 (the largest of 128, 64, 32 that fits)")
    made.add_argument("--kv-dtype", choices=("float32", "bfloat16", "float16", "int8", "fp8"), help="numbers of the KV cache")
    made.add_argument("--mode", choices=MODES, default="decode", help="; ".join(f"{name}: {words}" for name, words in MODES.items()))
    made.add_argument("--batch", type=int, action="append", help="sequences; may be repeated (1 and 64)")
    made.add_argument("--context", type=int, default=1024, help="tokens of each in the cache after the step (1024)")
    made.add_argument("--query", type=int, default=1, help="tokens of each that are computed, for verify and prefill")
    made.add_argument("--tensor-parallel", type=int, default=1, help="ranks (1)")
    made.add_argument("--threads", type=int, help="of the CPU")
    made.add_argument("--ops", action="store_true", help="a line for each operation as well")
    made.add_argument("--measured", type=Path, metavar="FILE.json", help="timed kernels, or the metrics of a job of the engine")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    return made


def run(options: argparse.Namespace) -> None:
    """Print what is asked for. Raises DsparkError and ValueError."""
    shapes = {name: shape_named(options, name) for name in options.models}
    device = device_named(options, shapes)
    rates = ", ".join(f"{rate / 1e12:.4g} TFLOP/s {name}" for name, rate in device.rates.items())
    print(f"{device.name}: {device.bandwidth / 1e9:.4g} GB/s, {rates}; {device.source}\n")
    document: dict[str, Any] = {"device": vars(device)}
    if options.measured is not None:
        measured = compare(options, device, shapes)
        print(comparison(measured))
        document["measured"] = [{**vars(entry), "fraction": entry.fraction} for entry in measured]
    else:
        found = list(rows(options, device, shapes))
        print(summary(found))
        if options.ops:
            print("\n" + "\n\n".join(operations(row) for row in found))
        document["steps"] = [
            {**vars(row), "ops": {name: vars(op) for name, op in row.ops.items()}, "seconds": row.seconds} for row in found
        ]
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.batch = options.batch or [1, 64]
    if not options.models and options.measured is None:
        options.models = list(MODELS)
    try:
        run(options)
    except (DsparkError, ValueError) as error:
        print(f"roofline: {error.one_line() if isinstance(error, DsparkError) else error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
