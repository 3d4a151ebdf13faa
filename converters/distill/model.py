"""The block drafter as a differentiable function: many blocks of one sequence in one pass.

Its numbers are those of `runtime.speculation.heads.block`, which serves the weights (tested). Training packs the blocks of a sequence:
every block sees the features before its own anchor and its own rows, and nothing of the other blocks (arXiv 2607.05147, section 3).

Letters: A blocks (anchors), G rows of a block, N tokens of context, H width, D width of a head, r Markov rank, R rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import embedding, linear, silu

from dspark.converters.distill.learner import Parameters
from dspark.runtime.layers.rope import RotaryEmbedding
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.tensors import draft_tensors

_INIT_STD = 0.02


def new_parameters(config: DraftConfig, seed: int, device: str = "cpu") -> Parameters:
    """Float32 leaves by canonical name: matrices drawn with deviation 0.02, norms 1, biases 0. The same seed gives the same ones on any
    device."""
    generator = torch.Generator().manual_seed(seed)
    made: Parameters = {}
    for name, shape in draft_tensors(config).items():
        if name.endswith("norm.weight") or "layernorm" in name:
            made[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            made[name] = torch.zeros(shape)
        else:
            made[name] = torch.randn(shape, generator=generator) * _INIT_STD
    return {name: tensor.to(device).requires_grad_() for name, tensor in made.items()}


class TrainableDraft:
    """parameters: see `new_parameters`. embed: token ids int64 [...] -> rows [..., H] (the target's, frozen). max_len: longest sequence."""

    def __init__(self, config: DraftConfig, parameters: Parameters, embed: Callable[[torch.Tensor], torch.Tensor], max_len: int) -> None:
        model = config.model
        self.config, self.parameters, self._embed = config, parameters, embed
        device = next(iter(parameters.values())).device
        self._rope = RotaryEmbedding(model.rope, model.head_dim, max_len + config.block_size, model.max_position, device)

    def states(self, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Normed states [A, G, H] of blocks after each anchor. features [N, taps * H] of the tokens int64 [>= N]; anchors int64 [A]: their
        positions, each at most N."""
        config, weight = self.config, self.parameters
        rows, num_context = config.block_size, int(anchors.max())
        context = self._norm(linear(features[:num_context].float(), weight["fc.weight"]), "hidden_norm")
        ids = torch.full((len(anchors), rows), int(config.mask_token_id or 0), dtype=torch.int64, device=anchors.device)
        ids[:, 0] = tokens[anchors]
        h = self._embed(ids)
        positions = anchors[:, None] + torch.arange(rows, device=anchors.device)
        before = torch.arange(num_context, device=anchors.device)
        turns, context_turns = self._rope.lookup(positions.flatten()), self._rope.lookup(before)
        hidden = before[None] >= anchors[:, None]
        for index in range(config.model.num_layers):
            layer = f"layers.{index}"
            x = self._norm(h, f"{layer}.input_layernorm")
            h = h + linear(self._attend(layer, x, context, turns, context_turns, hidden), weight[f"{layer}.self_attn.o_proj.weight"])
            h = h + self._mlp(f"{layer}.mlp", self._norm(h, f"{layer}.post_attention_layernorm"))
        return self._norm(h, "norm")

    def markov(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """previous int64 [R] -> their embeddings [R, r] and the biases they put on the logits [R, V]."""
        embedded = embedding(previous, self.parameters["markov_head.markov_w1.weight"])
        return embedded, linear(embedded, self.parameters["markov_head.markov_w2.weight"])

    def confidence(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """states [R, H], embedded [R, r] of the tokens before -> scores [R], whose sigmoid is the estimate."""
        weight, bias = (self.parameters[f"confidence_head.proj.{leaf}"] for leaf in ("weight", "bias"))
        return linear(torch.cat([states, embedded], -1), weight, bias)[:, 0]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.model.rms_norm_eps)
        return x * scale * self.parameters[f"{name}.weight"]

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.parameters
        inner = silu(linear(x, weight[f"{name}.gate_proj.weight"])) * linear(x, weight[f"{name}.up_proj.weight"])
        return linear(inner, weight[f"{name}.down_proj.weight"])

    def _heads(self, layer: str, which: str, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """q, k or v [T, heads, D] of x [T, H], normed and turned where turns are given."""
        projected = linear(x, self.parameters[f"{layer}.self_attn.{which}_proj.weight"]).unflatten(-1, (-1, self.config.model.head_dim))
        return projected if turns is None else turned(self._norm(projected, f"{layer}.self_attn.{which}_norm"), *turns)

    def _attend(
        self,
        layer: str,
        x: torch.Tensor,
        context: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        context_turns: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """x [A, G, H] over the context [N, H] and each block's own rows -> [A, G, heads * D]. hidden bool [A, N]: what is not before the
        anchor."""
        blocks, rows = x.shape[:2]
        model, flat = self.config.model, x.flatten(0, 1)
        num_kv, group, dim = model.num_kv_heads, model.num_heads // model.num_kv_heads, model.head_dim
        q = self._heads(layer, "q", flat, turns).view(blocks, rows, num_kv, group, dim).permute(2, 0, 1, 3, 4)
        q = q.reshape(num_kv, blocks, rows * group, dim) * dim**-0.5
        k_own, v_own = (
            self._heads(layer, which, flat, turn).view(blocks, rows, num_kv, dim).permute(2, 0, 1, 3)
            for which, turn in (("k", turns), ("v", None))
        )
        k_context, v_context = (
            self._heads(layer, which, context, turn).transpose(0, 1) for which, turn in (("k", context_turns), ("v", None))
        )
        before = (q.flatten(1, 2) @ k_context.transpose(1, 2)).unflatten(1, (blocks, rows * group))
        before = before.masked_fill(hidden[None, :, None], -torch.inf)
        shares = torch.cat([before, q @ k_own.transpose(2, 3)], -1).softmax(-1)
        of_context, of_own = shares.split([context.shape[0], rows], -1)
        out = (of_context.flatten(1, 2) @ v_context).unflatten(1, (blocks, rows * group)) + of_own @ v_own
        return out.view(num_kv, blocks, rows, group, dim).permute(1, 2, 0, 3, 4).reshape(blocks, rows, -1)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with its first 2 * P values rotated by halves; cos, sin [T, P]."""
    pairs = cos.shape[-1]
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
