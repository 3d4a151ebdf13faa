"""The one line from a checkpoint to an engine: reader -> [lora] -> mapping -> [quantizer] -> writer, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.audit import audit_engine
from dspark.converters.cache_scales import carried_scales
from dspark.converters.detect import open_checkpoint
from dspark.converters.lora import with_adapters
from dspark.converters.lora.reader import LoraReader
from dspark.converters.mapping import MappedModel, map_checkpoint, with_own_head
from dspark.converters.packed import engine_names, engine_tensors, packed_config, refuse_packed
from dspark.converters.quantize import CALIBRATED_METHODS, HEAD_MODULE, QuantPlan, QuantRequest, plan_quantization, quantized_tensors
from dspark.converters.quantizers.kv_cache import few_tokens_note
from dspark.converters.threads import one_torch_thread
from dspark.converters.writer import EngineWriter, check_target, hash_file
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.manifest import EngineManifest

if TYPE_CHECKING:
    import torch

    from dspark.converters.calibration.run import CalibratedRun
    from dspark.converters.gate import Gate
    from dspark.converters.quantizers.base import SolverOptions

Progress = Callable[[int, int, str], None]
"""(bytes done, bytes in all, name of the tensor just written); bytes of the weights as if none were quantized"""
TOOLS = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


@dataclass
class Result:
    """What a conversion made. manifest: as written."""

    engine: Path
    manifest: EngineManifest
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    engine_dir: str | Path,
    dtype: str = "auto",
    audit: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    adapters: Sequence[tuple[Path, float]] = (),
    requantize: bool = True,
    lora_base: Path | None = None,
) -> Result:
    """Convert any checkpoint to an engine directory, with adapters (directory and weight of each) merged in.

    requantize, lora_base: for adapters on a quantized base; whether adapted layers are quantized again, and its full-precision twin.
    Raises InputError or UnsupportedError for a checkpoint that cannot be used, UsageError for a target that may not be written,
    QualityError when the audit refuses; in every case nothing is left behind.
    """
    check_target(Path(engine_dir), force)
    full = open_checkpoint(lora_base) if lora_base is not None else None
    model = map_checkpoint(with_adapters(open_checkpoint(source), adapters, requantize, full), dtype)
    return _write(_Job(model, Path(engine_dir), force, audit, progress), lambda writer: engine_tensors(model), engine_names(model))


def quantize(
    source: str | Path,
    engine_dir: str | Path,
    scheme: str,
    method: str = "rtn",
    group_size: int | None = None,
    ignore: tuple[str, ...] = (),
    dtype: str = "auto",
    audit: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    rules: tuple[tuple[str, str], ...] = (),
    solver: SolverOptions | None = None,
    calibrated: CalibratedRun | None = None,
    gate: Gate | None = None,
    kv_cache_dtype: str | None = None,
    target_bpw: float | None = None,
    fp8_inputs: str | None = None,
    head_scheme: str | None = None,
) -> Result:
    """Quantize an engine, or any checkpoint that `convert` reads. dtype: of what stays dense.

    head_scheme: of the output head, which stays dense without; one that is the embedding gets a copy of its own.
    calibrated: how the model is shown its samples, which every method then looks at; gate: what the result is measured on and held to.
    Raises as `convert`, `plan_quantization`, `load_samples` and `Gate.check` do.
    """
    check_target(Path(engine_dir), force)
    model = map_checkpoint(open_checkpoint(source), dtype)
    refuse_packed(model)
    if head_scheme is not None:
        model, rules = with_own_head(model), (*rules, (HEAD_MODULE, head_scheme))
    plan = plan_quantization(model, QuantRequest(scheme, method, group_size, ignore, rules, solver, kv_cache_dtype, target_bpw, fp8_inputs))
    plan.has_text = calibrated is not None
    if plan.needs_text and calibrated is None:
        others = "--kv-cache-dtype" if kv_cache_dtype else "--target-bpw" if target_bpw else "--fp8-inputs static"
        what = f"--method {method}" if method in CALIBRATED_METHODS else others
        raise UsageError(f"{what} looks at text", "type --calibration FILE with a .txt, or the job's own .jsonl")
    job = _Job(model, Path(engine_dir), force, audit, progress, plan, gate)
    if calibrated is None:
        return _write(job, lambda writer: quantized_tensors(model, plan), plan.names(model))
    with calibrated.open(model, plan, Path(engine_dir)) as run:
        result = _write(job, run.tensors, run.names())
        run.discard()
        return result


@dataclass(frozen=True)
class _Job:
    model: MappedModel
    engine_dir: Path
    force: bool
    audit: bool
    progress: Progress | None
    plan: QuantPlan | None = None
    gate: Gate | None = None


Tensors = Callable[[EngineWriter], Iterator[tuple[str, "torch.Tensor"]]]
"""writer (its directory has the tokenizer by then) -> every tensor of the engine"""


def _write(job: _Job, tensors: Tensors, names: list[str]) -> Result:
    """The part that all conversions share: write, audit, measure, publish."""
    model, plan = job.model, job.plan
    bundle = model.reader.tokenizer()
    notes = [*getattr(model.reader, "notes", ()), *model.notes, *tokenizer_notes(model, bundle)] + ([plan.group_note] if plan else [])
    carried = carried_scales(model, calibrated=plan is not None and plan.kv_cache is not None)
    names, notes = [*names, *carried.names], [*notes, *carried.notes]
    with EngineWriter(job.engine_dir, names, job.force) as writer:
        if bundle is not None:
            writer.add_tokenizer(bundle)
        generation = model.reader.generation_config()
        if generation is not None:
            writer.add_json("generation_config.json", generation)
        with nullcontext() if plan is not None and plan.has_text else one_torch_thread():
            sizes = dense_bytes(model)
            total, done = sum(sizes.values()), 0
            for name, tensor in chain(tensors(writer), carried.tensors()):
                writer.add(name, tensor)
                done += sizes.get(f"{name.removesuffix('.qweight')}.weight" if name.endswith(".qweight") else name, 0)
                if job.progress is not None:
                    job.progress(done, total, name)
        notes += plan.notes if plan else []
        notes += few_tokens_note(plan.kv_cache) if plan and plan.kv_cache else []
        measured = plan.quality if plan else getattr(model.reader, "quality", dict)
        record: dict[str, Any] = {"lineage": lineage(model), "notes": tuple(notes), "quality": measured()}
        record["kv_cache"] = carried.config or (plan.kv_cache if plan else None)
        manifest = writer.finish(model.config, plan.config if plan else packed_config(model), **record)
        if job.audit:
            manifest = replace(manifest, audit=audit_engine(writer.directory, model.reader))
        else:
            manifest = replace(manifest, audit={"summary": "not audited: --no-audit"})
        manifest.save(writer.directory)
        if job.gate is not None and plan is not None:
            evaluation = job.gate.check(writer.directory, model, plan)
            manifest = replace(manifest, quality={**manifest.quality, "evaluation": evaluation})
            manifest.save(writer.directory)
        writer.publish()
    return Result(writer.target, manifest, notes)


def dense_bytes(model: MappedModel) -> dict[str, int]:
    """Bytes of each weight in the engine's dtype as if none were quantized."""
    width = 4 if model.config.dtype == "float32" else 2
    return {name: math.prod(shape) * width for name, shape in model.shapes.items()}


def tokenizer_notes(model: MappedModel, bundle: Any) -> list[str]:
    """What the user should know of the tokenizer: that there is none, or that it has tokens which the model cannot read."""
    if bundle is None:
        return ["the checkpoint has no tokenizer: only prompts given as token ids can be served"]
    notes = list(bundle.notes)
    size = bundle.size()
    if size > model.config.vocab_size:
        notes.append(
            f"the tokenizer has {size} tokens, the embedding {model.config.vocab_size} rows: a prompt with one of the other "
            f"{size - model.config.vocab_size} cannot be served"
        )
    return notes


def lineage(model: MappedModel) -> dict[str, Any]:
    """Where an engine comes from: source name and format, its files with sizes and hashes, adapters, the versions of the tools."""
    merged, reader = model.reader, model.reader
    if isinstance(merged, LoraReader):
        reader = merged.base
    record: dict[str, Any] = {"source": Path(reader.path).resolve().name, "format": reader.format, "files": _hashes(reader.files())}
    if isinstance(merged, LoraReader):
        record["adapters"] = [
            {
                "source": adapter.path.resolve().name,
                "weight": adapter.weight,
                "base_model": adapter.config.base_model,
                "files": _hashes(adapter.files()),
            }
            for adapter in merged.adapters
        ]
    record["tools"] = {name: version(name) for name in TOOLS}
    earlier = getattr(reader, "lineage", None)
    if earlier is not None:
        record["made_of"] = earlier()
    return record


def _hashes(files: list[Path]) -> dict[str, Any]:
    return {path.name: {"bytes": path.stat().st_size, "xxh3": hash_file(path)} for path in files}
