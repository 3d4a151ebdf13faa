"""Models of real shapes with random weights, made on the device, and the time of their steps beside the limit of the data sheet."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from device_clock import seconds_of

from dspark.kernels.packing import packed_rows
from dspark.runtime.execution.forward_batch import ForwardBatch, batch_of
from dspark.runtime.execution.loader import choose_kernels
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.decoder import Decoder, build_decoder
from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.ops import decode, step_ops
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig, QuantScheme, default_group_size, preset

MODELS = {
    "llama-3-8b": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 8192),
    "qwen3-4b": ModelConfig("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 1e-6, 40960, tie_word_embeddings=True, qk_norm=True),
    "tiny": ModelConfig("llama", 96, 64, 128, 2, 4, 2, 32, 1e-5, 256, dtype="float32"),
}
BLOCK_SIZE = 16
_ROOM_BYTES = 3 << 30
"""For activations, logits and what kernels keep between two launches."""


@dataclass(frozen=True)
class ModelCase:
    """A model in a scheme ("bf16" is dense in the model's own dtype), decoding (sequences, tokens of context each) after one another."""

    model: str
    scheme: str
    steps: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.model}-{self.scheme}"


_ALL_STEPS = ((1, 512), (1, 4096), (64, 512), (64, 4096))
CASES = (
    *(ModelCase(model, scheme, _ALL_STEPS) for model in ("llama-3-8b", "qwen3-4b") for scheme in ("w4a16", "bf16")),
    *(ModelCase(model, scheme, _ALL_STEPS[2:]) for model in ("llama-3-8b", "qwen3-4b") for scheme in ("w8a8", "fp8")),
)
TINY_CASES = tuple(ModelCase("tiny", scheme, ((1, 20), (3, 40))) for scheme in ("bf16", "w4a16", "w8a8", "fp8"))


def scheme_named(name: str, config: ModelConfig) -> QuantScheme | None:
    """w4a16 in the largest groups that divide the model's widths, fp8 with inputs rounded to float8; None for bf16."""
    if name == "bf16":
        return None
    if name == "w4a16":
        return replace(preset(name), group_size=default_group_size({config.hidden_size, config.intermediate_size}))
    return replace(preset("fp8"), inputs="dynamic") if name == "fp8" else preset(name)


class RandomWeights:
    """A WeightSource of tensors that have these shapes when they are dense: numbers of the size of weights, made on the device."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], quant: QuantConfig | None, dtype: torch.dtype, device: str) -> None:
        self._shapes, self._quant = shapes, quant
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str) -> torch.Tensor:
        module, leaf = name.rsplit(".", 1)
        shape = self._shapes.get(name) or self._shapes[f"{module}.weight"]
        scheme = self._quant.scheme_for(module) if self._quant and len(shape) == 2 else None
        if leaf in ("weight", "bias"):
            made = torch.empty(shape, dtype=self._dtype, device=self._device)
            return made.fill_(1.0) if len(shape) == 1 else made.uniform_(-1, 1, generator=self._generator).mul_(shape[1] ** -0.5)
        assert scheme is not None, name
        return self._part(leaf, scheme, *shape)

    def _part(self, leaf: str, scheme: QuantScheme, outputs: int, inputs: int) -> torch.Tensor:
        """One tensor of a quantized linear."""
        is_wide = scheme.storage != "wna16"
        if leaf == "scales":
            step = inputs**-0.5 * 2.0 ** (1 - scheme.weight_bits) if scheme.storage != "fp8" else inputs**-0.5 / 448
            shape = {"int8": (outputs,), "fp8": (outputs, 1)}.get(scheme.storage, (inputs // scheme.resolved_group_size(inputs), outputs))
            return torch.full(shape, step, dtype=torch.float32 if is_wide else torch.float16, device=self._device)
        assert leaf == "qweight", leaf
        if scheme.storage == "wna16":
            shape = (packed_rows(inputs, scheme.weight_bits), outputs)
            return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=self._device, generator=self._generator)
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=self._device, generator=self._generator)
        return codes if scheme.storage == "int8" else codes.clamp_(-126, 126).view(torch.float8_e4m3fn)  # 0x7F and 0xFF are no numbers


def model_check(case: ModelCase, device: str, sheet: Device | None, interpreted: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Build a model, time its steps, and hold them against the limit. Raises Skipped where it does not fit the device."""
    config = MODELS[case.model]
    scheme = scheme_named(case.scheme, config)
    quant = QuantConfig(scheme, ignore=("lm_head", "model.embed_tokens")) if scheme else None
    shape = ModelShape(config, quant)
    needed = max(shape.kv_bytes_per_token * sequences * (context + BLOCK_SIZE) for sequences, context in case.steps) + shape.weight_bytes
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if needed + _ROOM_BYTES > free:
            raise Skipped(f"needs {(needed + _ROOM_BYTES) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    kernels = "triton" if interpreted else "auto"
    chosen = choose_kernels(config, device=device, kernels=kernels, block_size=BLOCK_SIZE, interpreted=interpreted)
    model = build_decoder(config, quant, RandomWeights(FAMILIES[config.family].tensors(config), quant, chosen.facts.dtype, device), chosen)
    texts, records = [], []
    for sequences, context in case.steps:
        seconds, how = step_seconds(model, sequences, context, device)
        limit = sheet.total_seconds(step_ops(shape, decode(sequences, context))) if sheet else None
        share = "" if limit is None else f", {limit / seconds:.0%} of the limit"
        texts.append(f"{sequences} x {context}: {seconds * 1e3:.2f} ms{share}, {sequences / seconds:.0f} tokens/s{how}")
        records.append({"model": case.model, "scheme": case.scheme, "num_seqs": sequences, "context_tokens": context, "seconds": seconds})
    return "; ".join(texts), records


class Skipped(Exception):
    """A check that cannot be made here, and why."""


@torch.inference_mode()
def step_seconds(model: Decoder, sequences: int, context: int, device: str) -> tuple[float, str]:
    """Seconds of one decoding step, logits included, and a remark on how it ran: from a CUDA graph where it can be recorded."""
    blocks = -(-context // BLOCK_SIZE)
    caches = allocate_pool(model.config, sequences * blocks, BLOCK_SIZE, model.kernels.facts.kv_dtype, device)
    for k_cache, v_cache in caches:
        k_cache.uniform_(-1, 1)
        v_cache.uniform_(-1, 1)
    batch = decode_batch(sequences, context, model.config.vocab_size, device)
    rotations = RotaryTables(model.config, context, device).lookup(batch.attention.positions, batch.rope_lengths, context)

    def step() -> torch.Tensor:
        batch.attention.prepared.clear()
        return model.logits(model.forward(batch.token_ids, rotations, caches, batch.attention, batch.sample_rows))

    assert bool(step().isfinite().all()), "the logits are not finite"
    run, how = recorded(step, device)
    return seconds_of(run, device, turns=9, cold=False), how


def recorded(step: Callable[[], Any], device: str) -> tuple[Callable[[], Any], str]:
    """The step as a CUDA graph, or as it is with the reason."""
    if device != "cuda":
        return step, ""
    step()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return step, f" (not recorded: {str(error).splitlines()[0][:60]})"
    return graph.replay, ""


def decode_batch(sequences: int, context: int, vocab_size: int, device: str) -> ForwardBatch:
    """One token of each sequence, at the end of a context."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(1)).view(sequences, blocks)
    last = context - 1
    there = {
        "token_ids": torch.arange(sequences) * 7 % vocab_size,
        "rope_lengths": torch.full((sequences,), context),
        "sample_rows": torch.arange(sequences),
        "query_start": torch.arange(sequences + 1, dtype=torch.int32),
        "context_lens": torch.full((sequences,), context, dtype=torch.int32),
        "block_tables": tables.int(),
        "slot_mapping": tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        "positions": torch.full((sequences,), last),
    }
    return batch_of({name: tensor.to(device) for name, tensor in there.items()}, 1, context, context)
