"""Mixture-of-experts feed-forward layer: a router picks a few experts for each token; a shared expert may serve all tokens besides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import ExpertWeights, Kernels, LinearFn, MoeFn
from dspark.runtime.layers.linear import load_linear, load_weights
from dspark.runtime.layers.mlp import FeedForward, load_gated_mlp
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig


@dataclass
class SharedExpert:
    """x [T, H] -> sigmoid(gate(x)) * expert(x), float32 [T, H]."""

    gate: LinearFn
    expert: FeedForward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sigmoid of g is computed as the softmax of (g, 0): a softmax treats each row on its own, where elementwise functions round
        otherwise in a vector's tail, so that a token's value would depend on its place in the batch."""
        gate = self.gate(x).float()
        share = torch.softmax(torch.cat([gate, torch.zeros_like(gate)], -1), -1)[:, :1]
        return self.expert(x).float() * share


@dataclass
class MixtureOfExperts:
    """x [T, H] -> share-weighted sum of experts_per_token experts and the shared one [T, H]. See ModelConfig; router: x -> [T, E].

    experts: one function each, or none where `grouped` runs them all at once.
    """

    router: LinearFn
    experts: list[FeedForward]
    experts_per_token: int
    norm_topk_prob: bool
    shared: SharedExpert | None
    kernels: Kernels
    grouped: MoeFn | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits, top_k, renormalize = self.router(x), self.experts_per_token, self.norm_topk_prob
        if self.grouped is not None:
            y = self.grouped(x, logits, top_k, renormalize)
        else:
            y = self.kernels.moe_mlp(x, logits, self.experts, top_k, renormalize)
        return y if self.shared is None else (y.float() + self.shared(x)).to(x.dtype)


def load_moe(
    name: str, config: ModelConfig, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels, group: bool = False
) -> MixtureOfExperts:
    """The block whose modules stand below `name`. Every expert's linears are modules of their own, each with its own scheme.

    group: run all experts at once where the kernels do that and the experts are alike; there are no functions of single ones then.
    """

    def gated(module: str) -> FeedForward:
        return load_gated_mlp(f"{name}.{module}", config.hidden_act, quant, weights, kernels)

    def linear(module: str) -> LinearFn:
        return load_linear([f"{name}.{module}"], weights, quant, kernels)

    experts = [f"{name}.experts.{expert}" for expert in range(config.num_experts)]
    together = group and kernels.groups_experts and ungroupable(experts, config, quant, weights) is None
    return MixtureOfExperts(
        router=linear("gate"),
        experts=[] if together else [load_gated_mlp(expert, config.hidden_act, quant, weights, kernels) for expert in experts],
        experts_per_token=config.experts_per_token,
        norm_topk_prob=config.norm_topk_prob,
        shared=SharedExpert(linear("shared_expert_gate"), gated("shared_expert")) if config.shared_expert_intermediate_size else None,
        kernels=kernels,
        grouped=_load_grouped(experts, config.hidden_act, quant, weights, kernels) if together else None,
    )


def ungroupable(experts: list[str], config: ModelConfig, quant: QuantConfig | None, weights: WeightSource) -> str | None:
    """Why these experts cannot run in one launch, or None."""
    for leaves in (("gate_proj", "up_proj"), ("down_proj",)):
        modules = [f"{expert}.{leaf}" for expert in experts for leaf in leaves]
        if any(f"{module}.bias" in weights for module in modules):
            return "they have biases"
        schemes = {quant.scheme_for(module) if quant else None for module in modules}
        if len(schemes) != 1:
            return "their schemes differ"
        scheme = schemes.pop()
        if scheme is None:
            continue
        if scheme.act_order:
            return "each has an order of inputs of its own"
        if scheme.inputs == "static":
            return "each has an input scale of its own"
        if scheme.block is not None and config.moe_intermediate_size % max(scheme.block[0], 1) and len(leaves) == 2:
            return "a block of scales would span gate and up projection"
    return None


def _load_grouped(experts: list[str], activation: str, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> MoeFn:
    gate_up, down = ExpertWeights(len(experts)), ExpertWeights(len(experts))
    for index, expert in enumerate(experts):
        gate_up.put(index, kernels.expert_weight(load_weights([f"{expert}.gate_proj", f"{expert}.up_proj"], weights, quant)[1]))
        down.put(index, kernels.expert_weight(load_weights([f"{expert}.down_proj"], weights, quant)[1]))
    return kernels.grouped_experts(gate_up, down, activation)
