"""A model to measure: an engine, or a checkpoint that none was made of yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark.converters.detect import open_checkpoint
from dspark.converters.mapped_weights import MappedWeights
from dspark.converters.mapping import MappedModel, map_checkpoint
from dspark.converters.packed import refuse_packed
from dspark.converters.quality.measure import FinalStates, Progress, Samples, final_states
from dspark.converters.quality.windows import TokenSet
from dspark.kernels.ops import Kernels
from dspark.runtime.execution.loader import CACHE_DTYPES, EngineWeights, cache_dtype_of, choose_kernels
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.manifest import MANIFEST_NAME, EngineManifest, load_manifest
from dspark.runtime.spec.model_config import ModelConfig


@dataclass(frozen=True)
class Subject:
    """A model to measure: an engine, or a dense checkpoint as `dspark convert` would write it. manifest: an engine's."""

    path: Path
    config: ModelConfig
    manifest: EngineManifest | None
    mapped: MappedModel | None

    def kernels(self, dtype: str | None, device: str, kernels: str) -> Kernels:
        """Those that would serve it. dtype: default its own."""
        cache_dtype = cache_dtype_of(self.manifest) if self.manifest is not None else None
        return choose_kernels(self.config, dtype, device, kernels, cache_dtype=cache_dtype)

    def states(self, kernels: Kernels, samples: Samples, progress: Progress | None = None) -> FinalStates:
        """Walk the model. Raises InputError for a damaged engine."""
        dtype, device = kernels.facts.dtype, kernels.facts.device
        if self.manifest is None:
            assert self.mapped is not None
            return final_states(self.config, None, MappedWeights(self.mapped, dtype, device), kernels, samples, progress)
        weights = EngineWeights(self.path, self.manifest, dtype, device)
        found = final_states(self.config, self.manifest.quant, weights, kernels, samples, progress)
        weights.check_all_taken()
        return found


def open_subject(path: Path, engine_only: bool = False) -> Subject:
    """Raises InputError for what is neither an engine nor (unless engine_only) a checkpoint that can be converted and is not quantized."""
    if engine_only or (path / MANIFEST_NAME).is_file():
        manifest = load_manifest(path)
        return Subject(path, manifest.model, manifest, None)
    mapped = map_checkpoint(open_checkpoint(path))
    refuse_packed(mapped)
    return Subject(path, mapped.config, None, mapped)


def run_dtype(kernels: Kernels) -> str:
    """The dtype of a run in words, such as "bfloat16" or "bfloat16 with an int8 KV cache"."""
    facts = kernels.facts
    dtype = str(facts.dtype).removeprefix("torch.")
    cache = next((name for name, cached in CACHE_DTYPES.items() if cached == facts.cache_dtype), None)
    return dtype if cache is None else f"{dtype} with an {cache} KV cache"


def check_same_tokens(tokens: TokenSet, codec: TextCodec, baseline: Subject) -> None:
    """Raise UsageError when an id of the samples means another token to the baseline. A checkpoint without tokenizer.json is not asked."""
    if not (baseline.path / "tokenizer.json").is_file():
        return
    other = load_codec(baseline.path)
    for token in sorted({token for sample in tokens.samples for token in sample}):
        ours, theirs = codec.id_to_token(token), other.id_to_token(token)
        if ours != theirs:
            what = f"token {token} is {ours!r} to the engine and {theirs!r} to the baseline"
            raise UsageError(what, "compare engines of the same model")
