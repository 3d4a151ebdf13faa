"""A draft model that starts from some of its target's layers: its geometry, its first weights, and its differentiable form.

Embedding and output head are the target's own, frozen; the layers and the final norm are trained. The numbers of `TrainableDecoder` are
those of `runtime.models.decoder`, which serves the weights (tested for every family that it takes).

Letters: T tokens, H width, D width of a head, N outputs of a linear module, K its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import gelu, linear, silu

from dspark.converters.distill.learner import Parameters
from dspark.converters.distill.model import turned
from dspark.converters.distill.options import DistillOptions
from dspark.runtime.execution.loader import EngineWeights, choose_kernels
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.rope import RotaryEmbedding
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.base import norm_names
from dspark.runtime.spec.errors import UnsupportedError, UsageError
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig

VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
"""What a draft model has in common with its target."""


def choose_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Layers of the target to start from: the first half of them from its beginning, the rest spread up to its last one.

    The first layers make words of tokens and the last one makes logits of them; what lies between changes the stream little.
    """
    first = (count + 1) // 2
    rest = count - first
    spread = [round(first - 1 + (num_layers - first) * (i + 1) / rest) for i in range(rest)]
    return (*range(first), *spread)


def small_config(target: ModelConfig, options: DistillOptions) -> tuple[ModelConfig, tuple[int, ...]]:
    """(geometry of the draft model, the target's layers it starts from).

    Raises UsageError for layers that the target does not have, UnsupportedError for targets whose layers cannot be trained here.
    """
    if target.num_experts:
        raise UnsupportedError(f"a draft model cannot be made of a target with experts ({target.family})", "type --draft-kind dspark")
    if options.num_layers < 1 or options.num_layers > target.num_layers:
        raise UsageError(f"a draft model of {options.num_layers} layers", f"allowed: 1 to the target's {target.num_layers}")
    kept = options.kept_layers if options.kept_layers is not None else choose_layers(target.num_layers, options.num_layers)
    if sorted(set(kept)) != list(kept) or kept[0] < 0 or kept[-1] >= target.num_layers:
        raise UsageError(f"layers {list(kept)} to start from", f"name layers 0 to {target.num_layers - 1}, ascending")

    def of_kept(values: tuple[bool, ...]) -> tuple[bool, ...]:
        return tuple(values[layer] for layer in kept) if values else ()

    config = replace(target, num_layers=len(kept), sliding_layers=of_kept(target.sliding_layers), rope_layers=of_kept(target.rope_layers))
    return config, kept


def trained_names(config: ModelConfig) -> list[str]:
    """Names of the tensors that are trained, in the engine's order."""
    return [name for name in FAMILIES[config.family].tensors(config) if name not in VOCABULARY_TENSORS]


def first_parameters(engine_dir: Path, manifest: EngineManifest, config: ModelConfig, kept: tuple[int, ...], device: str) -> Parameters:
    """Float32 leaves with the numbers of the target's layers `kept`; quantized ones as they are served."""
    kernels = choose_kernels(manifest.model, "float32", device, exact_activations=True)
    weights = EngineWeights(engine_dir, manifest, torch.float32, device)
    made: Parameters = {}
    for name in trained_names(config):
        source = name
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            source = f"model.layers.{kept[int(index)]}.{rest}"
        module = source.removesuffix(".weight")
        if source in weights:
            made[name] = weights.take(source)
        else:
            # Unit vectors make the dense weight of any storage. The biases are tensors of their own, whichever comes first.
            inputs = FAMILIES[config.family].tensors(config)[name][1]
            function = load_linear([module], _WithoutBias(weights), manifest.quant, kernels)
            made[name] = function(torch.eye(inputs, device=device)).T.contiguous()
    return {name: tensor.float().detach().clone().requires_grad_() for name, tensor in made.items()}


class _WithoutBias:
    """A WeightSource in which no module has a bias."""

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias") and name in self._weights

    def take(self, name: str) -> torch.Tensor:
        return self._weights.take(name)


class TrainableDecoder:
    """parameters: see `first_parameters`. embed: token ids int64 [T] -> rows [T, H] (the target's, frozen). max_len: longest sequence."""

    def __init__(self, config: ModelConfig, parameters: Parameters, embed: Callable[[torch.Tensor], torch.Tensor], max_len: int) -> None:
        self.config, self.parameters, self._embed = config, parameters, embed
        device = next(iter(parameters.values())).device
        self._ropes = {
            rope: RotaryEmbedding(rope, config.head_dim, max_len, config.max_position, device)
            for rope in config.ropes()
            if rope.partial_rotary_factor > 0
        }

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] of one sequence -> normed states [T, H], what the output head is applied to."""
        config, names = self.config, norm_names(self.config)
        positions = torch.arange(len(tokens), device=tokens.device)
        h = self._embed(tokens)
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            x = self._attend(index, self._norm(h, layer, names.before_attention), positions)
            h = h + config.residual_multiplier * self._norm(x, layer, names.after_attention)
            x = self._mlp(f"{layer}.mlp", self._norm(h, layer, names.before_mlp))
            h = h + config.residual_multiplier * self._norm(x, layer, names.after_mlp)
        return self._norm(h, "model", "norm")

    def _norm(self, x: torch.Tensor, module: str, name: str | None) -> torch.Tensor:
        """RMS norm by the factor of `module.name` over the last dimension; x itself where there is no such norm."""
        if name is None:
            return x
        factor = self.parameters[f"{module}.{name}.weight"]
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * (1 + factor if self.config.norm_offset else factor)

    def _linear(self, module: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.parameters[f"{module}.weight"], self.parameters.get(f"{module}.bias"))

    def _mlp(self, module: str, x: torch.Tensor) -> torch.Tensor:
        gate = self._linear(f"{module}.gate_proj", x)
        active = silu(gate) if self.config.hidden_act == "silu" else gelu(gate, approximate="tanh")
        return self._linear(f"{module}.down_proj", active * self._linear(f"{module}.up_proj", x))

    def _attend(self, index: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> the attention block's result [T, H]."""
        config, layer = self.config, f"model.layers.{index}.self_attn"
        num_kv, group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        q, k, v = (self._linear(f"{layer}.{which}_proj", x) for which in "qkv")
        if config.qk_norm and config.full_width_qk_norm:
            q, k = self._norm(q, layer, "q_norm"), self._norm(k, layer, "k_norm")
        q, k, v = (tensor.unflatten(-1, (-1, dim)) for tensor in (q, k, v))
        if config.qk_norm and not config.full_width_qk_norm:
            q, k = self._norm(q, layer, "q_norm"), self._norm(k, layer, "k_norm")
        rope = self._ropes.get(config.rope_of_layer(index))
        if rope is not None:
            lengths = torch.full_like(positions, len(positions)) if rope.follows_length else None
            turns = rope.lookup(positions, lengths)
            q, k = turned(q, *turns), turned(k, *turns)
        scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        q = q.unflatten(1, (num_kv, group)).permute(1, 2, 0, 3) * scale
        scores = q @ k.permute(1, 2, 0)[:, None]
        if config.attention_softcap:
            scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
        distance = positions[:, None] - positions[None]
        window = config.window_of_layer(index)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = (shares @ v.transpose(0, 1)[:, None]).permute(2, 0, 1, 3).reshape(len(positions), -1)
        return self._linear(f"{layer}.o_proj", out)
