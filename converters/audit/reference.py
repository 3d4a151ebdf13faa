"""The other side of the audit: transformers' model of an engine's config, with the engine's weights as dense float32 tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.audit.verdict import refusal
from dspark.converters.mapping import fuse_state
from dspark.converters.readers.safetensors import open_safetensors
from dspark.runtime.models.hf_config import hf_config_from_model
from dspark.runtime.spec.kv_cache import is_scale
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig

if TYPE_CHECKING:
    import torch


class DenseWeights:
    """An engine's weights read from its files, dequantized, in float32."""

    def __init__(self, directory: Path, manifest: EngineManifest) -> None:
        self._manifest = manifest
        shards = sorted({record.shard for record in manifest.tensors.values()})
        self._handles = {shard: open_safetensors(directory / shard) for shard in shards}

    def state(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Name -> tensor of the weights whose names begin with `prefix`."""
        state = {}
        for name in self._manifest.tensors:
            if name.startswith(prefix) and not is_scale(name):  # transformers has no 8-bit cache
                state.update(self._dense(name))
        return state

    def _dense(self, name: str) -> dict[str, torch.Tensor]:
        """The weight of one stored tensor: a quantized linear's comes with its codes, and with its other tensors nothing."""
        import torch

        from dspark.runtime.layers.linear import build_weight

        quant = self._manifest.quant
        module, _, leaf = name.rpartition(".")
        scheme = quant.scheme_for(module) if quant else None
        if scheme is None or leaf not in scheme.leaves():
            return {name: self._read(name).float()}
        if leaf != "qweight":
            return {}
        weight = build_weight(module, scheme, {part: self._read(f"{module}.{part}") for part in scheme.leaves()})
        return {f"{module}.weight": weight.dense(torch.float32)}

    def _read(self, name: str) -> torch.Tensor:
        return self._handles[self._manifest.tensors[name].shard].get_tensor(name)


def dense_state(directory: Path, manifest: EngineManifest) -> dict[str, torch.Tensor]:
    """Every weight of an engine as a dense float32 tensor by its name."""
    return DenseWeights(directory, manifest).state()


def reference_model(directory: Path, manifest: EngineManifest) -> Any:
    """transformers' model in float32 with the engine's config and weights."""
    model = empty_model(manifest.model)
    place(model, fuse_state(manifest.model, dense_state(directory, manifest)), tied=manifest.model.tie_word_embeddings)
    if manifest.model.tie_word_embeddings:
        model.tie_weights()
    return model


def empty_model(config: ModelConfig) -> Any:
    """transformers' model of a config in evaluation mode, its parameters on the meta device: `place` gives it weights."""
    import torch
    import transformers

    described = hf_config_from_model(config)
    theirs = transformers.AutoConfig.for_model(**described)
    theirs._attn_implementation = "eager"
    with torch.device("meta"):  # no random initialisation of weights that are replaced at once
        model = getattr(transformers, described["architectures"][0])(theirs)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=theirs)  # its buffers are computed, not loaded
    embed = model.model.embed_tokens
    if hasattr(embed, "scalar_embed_scale"):  # so is Gemma's factor on the embedding
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale)
    return model.eval()


def place(module: Any, state: dict[str, torch.Tensor], tied: bool = False) -> None:
    """Make the tensors of `state` the parameters of a module. tied: its head is the embedding.

    Raises QualityError when the module has others or more.
    """
    missing, unexpected = module.load_state_dict(state, strict=False, assign=True)
    if tied:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise refusal(f"transformers finds tensors missing ({missing[:3]}) or unexpected ({unexpected[:3]})")
