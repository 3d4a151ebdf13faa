"""Where a factor for each channel can move: from a linear's inputs into the operation that makes them, without changing the model.

Scaling the columns of every linear that reads an operation's result by s, and dividing that result by s, leaves the function as it is. The
result is divided inside the operation: in a norm's weight, in the rows of v_proj (attention averages values channel by channel) or in those
of up_proj (a gated block multiplies by its up branch). Every module that reads the result must be in the group, dense ones such as a router
too: one that is missing makes another model.

Source: AWQ (arXiv 2306.00978), SmoothQuant (arXiv 2211.10438); the table of groups follows AutoAWQ's and llm-compressor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark.runtime.models.base import norm_names
from dspark.runtime.spec.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

NORM_QKV, VALUE_OUT, NORM_MLP, UP_DOWN = "norm_qkv", "value_out", "norm_mlp", "up_down"
KINDS = (NORM_QKV, VALUE_OUT, NORM_MLP, UP_DOWN)
_UNSMOOTHED_QKV = ("gemma3_text",)
"""Families whose q and k AWQ leaves alone: a norm over each head follows them, and a scaling that is best for the linears' own outputs
made Gemma 3 worse than rounding does (llm-compressor #2522)."""


@dataclass(frozen=True)
class ScalingGroup:
    """One operation and all that read its result.

    kind: one of KINDS. previous: name of the norm or linear module that is divided. linears: names of every module whose columns are
    multiplied. observed: the one of them whose input is the operation's whole result (an expert sees its own tokens only). channels: width
    of that input. norm_offset: the norm multiplies by 1 + weight.
    repeats, head_dim (VALUE_OUT): query heads that read each head of values, and its width; the factors of those heads must be equal.
    """

    kind: str
    previous: str
    linears: tuple[str, ...]
    observed: str
    channels: int
    norm_offset: bool = False
    repeats: int = 1
    head_dim: int = 0

    @property
    def is_norm(self) -> bool:
        return self.kind in (NORM_QKV, NORM_MLP)

    def legal_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """The nearest legal factors to scales [..., channels]: those of query heads that share a head of values become their mean."""
        if self.repeats == 1:
            return scales
        shared = scales.unflatten(-1, (-1, self.repeats, self.head_dim)).mean(-2, keepdim=True)
        return shared.expand(*shared.shape[:-2], self.repeats, self.head_dim).flatten(-3)

    def previous_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Legal factors of the linears' inputs [channels] -> of the previous operation's outputs, one for each."""
        return scales if self.repeats == 1 else scales.unflatten(-1, (-1, self.repeats, self.head_dim))[:, 0].flatten()


def scaling_groups(config: ModelConfig, layer_index: int) -> list[ScalingGroup]:
    """Every group of one layer, in order of use. Blocks that read the residual stream without a norm before them have none."""
    layer, norms = f"model.layers.{layer_index}", norm_names(config)
    attention, groups = f"{layer}.self_attn", []
    if norms.before_attention:
        groups.append(_norm_group(config, NORM_QKV, f"{layer}.{norms.before_attention}", tuple(f"{attention}.{p}_proj" for p in "qkv")))
    groups.append(_value_group(config, attention))
    if norms.before_mlp:
        groups.append(_norm_group(config, NORM_MLP, f"{layer}.{norms.before_mlp}", _mlp_readers(config, layer_index)))
    return groups + [_up_group(block, width) for block, width in _gated_blocks(config, layer_index)]


def awq_groups(config: ModelConfig, layer_index: int) -> list[ScalingGroup]:
    """The groups that AWQ scales."""
    groups = scaling_groups(config, layer_index)
    return [group for group in groups if not (group.kind == NORM_QKV and config.family in _UNSMOOTHED_QKV)]


def smoothquant_groups(config: ModelConfig, layer_index: int) -> list[ScalingGroup]:
    """The groups that SmoothQuant scales: all. (The paper has those behind a norm, but a gated block's inner channels are the ones with the
    largest outliers, and the rows that are divided for them have steps of their own: nothing is lost there.)"""
    return scaling_groups(config, layer_index)


def _norm_group(config: ModelConfig, kind: str, norm: str, linears: tuple[str, ...]) -> ScalingGroup:
    return ScalingGroup(kind, norm, linears, linears[0], config.hidden_size, config.norm_offset)


def _value_group(config: ModelConfig, attention: str) -> ScalingGroup:
    output, width = f"{attention}.o_proj", config.num_heads * config.head_dim
    repeats = config.num_heads // config.num_kv_heads
    return ScalingGroup(VALUE_OUT, f"{attention}.v_proj", (output,), output, width, repeats=repeats, head_dim=config.head_dim)


def _up_group(block: str, width: int) -> ScalingGroup:
    down = f"{block}.down_proj"
    return ScalingGroup(UP_DOWN, f"{block}.up_proj", (down,), down, width)


def _mlp_readers(config: ModelConfig, layer_index: int) -> tuple[str, ...]:
    """What reads the norm before the feed-forward block; a router, which sees every token, stands first."""
    mlp = f"model.layers.{layer_index}.mlp"
    routers: list[str] = []
    if config.has_experts(layer_index):
        routers = [f"{mlp}.gate"] + ([f"{mlp}.shared_expert_gate"] if config.shared_expert_intermediate_size else [])
    blocks = [block for block, _ in _gated_blocks(config, layer_index)]
    return (*routers, *(f"{block}.{part}_proj" for block in blocks for part in ("gate", "up")))


def _gated_blocks(config: ModelConfig, layer_index: int) -> list[tuple[str, int]]:
    """Name and inner width of each gated feed-forward block of a layer: one, or the shared expert and all experts."""
    mlp = f"model.layers.{layer_index}.mlp"
    if not config.has_experts(layer_index):
        return [(mlp, config.intermediate_size)]
    shared = config.shared_expert_intermediate_size
    blocks = [(f"{mlp}.shared_expert", shared)] if shared else []
    return blocks + [(f"{mlp}.experts.{expert}", config.moe_intermediate_size) for expert in range(config.num_experts)]
