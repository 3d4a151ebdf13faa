"""Engine directory -> loaded decoder. Every tensor of the manifest is used exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from dspark.kernels.ops import KernelFacts, Kernels
from dspark.kernels.triton.tuning.machine import known_tiles
from dspark.runtime.models.decoder import Decoder, build_decoder
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.kv_cache import choose_cache_dtype, is_scale
from dspark.runtime.spec.manifest import EngineManifest, load_manifest
from dspark.runtime.spec.model_config import ModelConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""8-bit KV caches; any other name of a cache's dtype is the model's own."""


class EngineWeights:
    """The WeightSource of an engine directory: shards are memory-mapped and read tensor by tensor, each held against its hash.

    Every byte is read here anyway, and a damaged weight would make wrong text with exit code 0.
    """

    def __init__(self, directory: Path, manifest: EngineManifest, dtype: torch.dtype, device: str) -> None:
        self._directory = directory
        self._records = manifest.tensors
        self._dtype = dtype
        self._device = device
        self._shards: dict[str, object] = {}
        self._left = set(manifest.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def take(self, name: str) -> torch.Tensor:
        """Floating-point weights in the run's dtype (those of quantized weights and scales of the KV cache keep theirs), on its device."""
        record = self._records.get(name)
        if record is None:
            raise InputError(f"the engine has no tensor '{name}'", "convert the checkpoint again")
        if name not in self._left:
            raise InputError(f"tensor '{name}' is used twice", "convert the checkpoint again")
        self._left.discard(name)
        tensor = self._shard(record.shard).get_tensor(name)  # type: ignore[attr-defined]
        if tuple(tensor.shape) != record.shape:
            raise InputError(
                f"tensor '{name}' has shape {list(tensor.shape)}, the manifest says {list(record.shape)}", "convert the checkpoint again"
            )
        if xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy()) != record.xxh3:
            raise InputError(
                f"tensor '{name}' in '{record.shard}' is not what was written: its hash differs from the manifest's",
                "convert the checkpoint again",
            )
        tensor = tensor.to(self._device)  # first: out of the map in one copy, and rounded where it is wanted
        if tensor.is_floating_point() and not name.endswith((".qweight", ".scales")) and not is_scale(name):
            tensor = tensor.to(self._dtype)
        return tensor

    def check_all_taken(self) -> None:
        """Raise InputError naming the tensors that no layer asked for."""
        if self._left:
            names = sorted(self._left)
            raise InputError(f"{len(names)} tensors of the engine are not used: {', '.join(names[:5])}", "convert the checkpoint again")

    def _shard(self, shard: str) -> object:
        if shard not in self._shards:
            path = self._directory / shard
            if Path(shard).name != shard or not path.is_file():
                raise InputError(f"weight file '{shard}' is missing from '{self._directory}'", "convert the checkpoint again")
            try:
                self._shards[shard] = safe_open(path, framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own type without a public base
                raise InputError(f"weight file '{path}' is damaged ({error})", "convert the checkpoint again") from error
        return self._shards[shard]


def resolve_device(device: str) -> str:
    """ "auto" -> "cuda" where there is one, else "cpu". Raises UsageError when a GPU is asked for and absent."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, but this machine has no usable GPU", "type --device cpu, or run: dspark doctor")
    return device


def load_model(
    engine_dir: str | Path,
    dtype: str | None = None,
    device: str = "cpu",
    kernels: str = "auto",
    block_size: int = 16,
    deterministic: bool = False,
    weight_shadow: bool = False,
    interpreted: bool = False,
    exact_activations: bool = False,
    kv_cache_dtype: str = "model",
) -> Decoder:
    """Load an engine. dtype: of weights and activations, default the manifest's. kv_cache_dtype: as `choose_cache_dtype` has it.

    Raises InputError when the directory is unusable, UsageError for kernels or a cache that this engine cannot have here.
    """
    directory = Path(engine_dir)
    manifest = load_manifest(directory)
    chosen = choose_kernels(
        manifest.model,
        dtype,
        device,
        kernels,
        block_size=block_size,
        deterministic=deterministic,
        weight_shadow=weight_shadow,
        interpreted=interpreted,
        exact_activations=exact_activations,
        cache_dtype=cache_dtype_of(manifest, kv_cache_dtype),
    )
    weights = EngineWeights(directory, manifest, chosen.facts.dtype, device)
    model = build_decoder(manifest.model, manifest.quant, weights, chosen)
    weights.check_all_taken()
    return model


def cache_dtype_of(manifest: EngineManifest, wanted: str = "auto") -> torch.dtype | None:
    """KernelFacts.cache_dtype for --kv-cache-dtype, the default being what an engine is served with. Raises as `choose_cache_dtype`."""
    return CACHE_DTYPES.get(choose_cache_dtype(manifest.kv_cache, manifest.model.dtype, wanted))


def choose_kernels(
    config: ModelConfig, dtype: str | None = None, device: str = "cpu", kernels: str = "auto", block_size: int = 16, **facts: Any
) -> Kernels:
    """The kernels of a run of this model. dtype: default the model's own; facts: the flags of KernelFacts. On a GPU they take the
    tiles that are known for it.

    Raises UsageError for Triton kernels without a GPU.
    """
    if kernels == "triton" and device != "cuda" and not facts.get("interpreted"):
        raise UsageError(
            f"--kernels is triton, which needs a GPU, and the device is {device}", "type --kernels auto or --kernels reference"
        )
    if device == "cuda" and kernels != "reference":
        facts.setdefault("tiles", known_tiles())
    known = KernelFacts(
        device=device,
        dtype=TORCH_DTYPES[dtype or config.dtype],
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        **facts,
    )
    return Kernels(known, kernels)
