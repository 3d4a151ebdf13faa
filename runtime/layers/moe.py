"""Mixture-of-experts feed-forward layer: a router picks a few experts for each token; a shared expert may serve all tokens besides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import Kernels, LinearFn
from dspark.runtime.layers.linear import load_linear
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
    """x [T, H] -> share-weighted sum of experts_per_token experts and the shared one [T, H]. See ModelConfig; router: x -> [T, E]."""

    router: LinearFn
    experts: list[FeedForward]
    experts_per_token: int
    norm_topk_prob: bool
    shared: SharedExpert | None
    kernels: Kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.kernels.moe_mlp(x, self.router(x), self.experts, self.experts_per_token, self.norm_topk_prob)
        return y if self.shared is None else (y.float() + self.shared(x)).to(x.dtype)


def load_moe(name: str, config: ModelConfig, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> MixtureOfExperts:
    """The block whose modules stand below `name`. Every expert's linears are modules of their own, each with its own scheme."""

    def gated(module: str) -> FeedForward:
        return load_gated_mlp(f"{name}.{module}", config.hidden_act, quant, weights, kernels)

    def linear(module: str) -> LinearFn:
        return load_linear([f"{name}.{module}"], weights, quant, kernels)

    return MixtureOfExperts(
        router=linear("gate"),
        experts=[gated(f"experts.{expert}") for expert in range(config.num_experts)],
        experts_per_token=config.experts_per_token,
        norm_topk_prob=config.norm_topk_prob,
        shared=SharedExpert(linear("shared_expert_gate"), gated("shared_expert")) if config.shared_expert_intermediate_size else None,
        kernels=kernels,
    )
