"""Logits of an engine as written against transformers' model of OUR config and OUR tensors, in float32.

The config and weights are ours on both sides, so that a fault in transformers' reader of some format is not taken for one of ours; that the
tensors were read rightly is what the readers' tests are for.

Activations that an engine quantizes (W8A8) stay as they are here, on both sides: a value on the border of two codes falls to either side by
the last bit of a sum, and a few layers on the logits are a third of the quantization's own error apart, which would hide a wrong weight.
The rounding itself is one op without parameters, held to its definition by the kernels' tests.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.audit.memory import layered_bytes, whole_bytes
from dspark.converters.audit.tokenizer import PROBE_TEXTS
from dspark.converters.audit.verdict import LogitDifference, judge
from dspark.converters.heap import large_blocks_mapped
from dspark.converters.mapping import parameter_count
from dspark.converters.threads import one_torch_thread
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

LONG_PROMPT_TOKENS = 256
_ONE_THREAD_BELOW = 10**9  # parameters; small products lose more to threads that wait for each other than they gain


def audit_logits(directory: Path, manifest: EngineManifest, free_bytes: int | None = None) -> dict[str, Any]:
    """The record: largest difference relative to the largest logit and more, or "summary" why there is none.

    free_bytes: memory that may be taken, default what is free; what does not fit whole is compared layer by layer, else not at all.
    Raises QualityError above the limit.
    """
    import torch

    from dspark.runtime.execution.memory import available_bytes

    config = manifest.model
    prompts = probe_prompts(directory, config)
    free = available_bytes() if free_bytes is None else free_bytes
    whole, layered = whole_bytes(config, prompts), layered_bytes(config, prompts)
    if free < min(whole, layered):
        needs = f"the model in float32 needs {whole / 1e9:.3g} GB of memory, layer by layer {layered / 1e9:.3g} GB"
        return {"summary": f"not audited: {needs}; {free / 1e9:.3g} GB are free"}
    threads = one_torch_thread() if parameter_count(config) < _ONE_THREAD_BELOW else nullcontext()
    with torch.inference_mode(), threads, large_blocks_mapped():
        if whole <= free:
            return compare_whole(directory, manifest, prompts)
        from dspark.converters.audit.layered import compare_by_layer

        return compare_by_layer(directory, manifest, prompts)


def compare_whole(directory: Path, manifest: EngineManifest, prompts: list[list[int]]) -> dict[str, Any]:
    """Both sides as whole models, one after the other. Raises QualityError."""
    expected = _reference_logits(directory, manifest, prompts)
    differences = []
    for got, want in zip(_engine_logits(directory, prompts), expected, strict=True):
        differences.append(LogitDifference())
        differences[-1].add(got, want)
    return judge(prompts, differences)


def probe_prompts(directory: Path, config: ModelConfig) -> list[list[int]]:
    """Token ids: two probe texts where there is a tokenizer, and a long prompt of ids spread over the vocabulary (past a short window)."""
    from dspark.runtime.jobs.tokenizer import load_codec

    spread = random.Random(0)
    window = config.sliding_window if config.sliding_window and config.sliding_window < 4 * LONG_PROMPT_TOKENS else 0
    length = min(max(LONG_PROMPT_TOKENS, window + 64), config.context_length)
    prompts = [[spread.randrange(config.vocab_size) for _ in range(length)]]
    if (directory / "tokenizer.json").is_file():
        codec = load_codec(directory)
        for text in PROBE_TEXTS[:2]:
            ids = [token for token in codec.encode(text, add_special_tokens=True) if token < config.vocab_size]
            prompts += [ids[: config.context_length]] if ids else []
    return prompts


def _reference_logits(directory: Path, manifest: EngineManifest, prompts: list[list[int]]) -> list[torch.Tensor]:
    import torch

    from dspark.converters.audit.reference import reference_model

    model = reference_model(directory, manifest)
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in prompts]


def _engine_logits(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    from dspark.runtime.execution.loader import load_model
    from dspark.runtime.execution.logits import logits_for

    model = load_model(directory, dtype="float32", device="cpu", kernels="reference", exact_activations=True)
    return [logits_for(model, tokens).float() for tokens in prompts]
