"""Drafting heads once more, in plain torch from the published tensors: one sequence, no cache, everything computed anew for each draft.

Written from the method's description alone. `trap` builds one of the faults in that other implementers reported, so that a test can show
that it would be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from draft_checkpoints import EPS, HIDDEN, MASK, THETA, VOCAB_SIZE, MadeDraft, target_ids
from torch.nn.functional import linear, silu

from dspark.runtime.sampling.filters import probabilities
from dspark.runtime.sampling.rng import exponential_noise, row_key
from dspark.runtime.spec.request import Request


@dataclass
class Expected:
    """What a draft must be: tokens, the distributions at the request's options (before which penalties are not applied), estimates."""

    tokens: list[int] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] turned by its positions, dimension d with d + D / 2."""
    half = x.shape[-1] // 2
    angles = positions.float()[:, None] / THETA ** (torch.arange(half) / half)[None]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Reference:
    """One head beside its target, a transformers model. trap: name of a fault to build in."""

    def __init__(self, made: MadeDraft, target: Any, trap: str = "") -> None:
        self.truth, self.tensors, self.target, self.trap = made.truth, made.tensors, target, trap
        self.path: tuple[int, ...] | None = None
        self._known: list[tuple[list[int], torch.Tensor]] = []
        base = target.get_input_embeddings().weight.detach()
        self.embedding = made.tensors.get("embed_tokens.weight", base)
        self.ids = target_ids(made.tensors) if "d2t" in made.tensors else torch.arange(VOCAB_SIZE)
        self.head = made.tensors.get("lm_head.weight")
        if self.head is None:
            self.head = target.get_output_embeddings().weight.detach()[self.ids]

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    @torch.no_grad()
    def features(self, tokens: list[int]) -> torch.Tensor:
        """Tapped states of every token side by side [T, taps * H]."""
        for known, found in self._known:  # a token's states depend on what is before it alone
            if known[: len(tokens)] == tokens:
                return found[: len(tokens)]
        states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        shift = {"tap before the layer": -1, "tap after the next layer": 1}.get(self.trap, 0)
        found = torch.cat([states[max(state + shift, 0)][0] for state in self.truth.states], -1)
        self._known.append((tokens, found))
        return found

    @torch.no_grad()
    def draft(self, tokens: list[int], limit: int, request: Request, index: int = 0, path: tuple[int, ...] | None = None) -> Expected:
        """The draft after `tokens`, whose last one the target has not computed. path: tokens that are taken instead of drawn ones."""
        self.path = path
        return self._eagle(tokens, limit, request, index) if self.truth.method == "eagle3" else self._block(tokens, limit, request, index)

    def heads(self, layer: str, which: str, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """q, k or v [T, heads, D], normed and turned where positions are given."""
        projected = self.project(f"{layer}.self_attn.{which}_proj", x).unflatten(-1, (-1, self.truth.head_dim))
        if positions is None:
            return projected
        if self.truth.qk_norm:
            projected = norm(projected, self.weight(f"{layer}.self_attn.{which}_norm"))
        return rope(projected, positions)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """q [T, heads, D] over k, v [K, kv heads, D]; hidden bool [T, K]: what may not be seen."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        return self.project(
            f"{layer}.mlp.down_proj", silu(self.project(f"{layer}.mlp.gate_proj", x)) * self.project(f"{layer}.mlp.up_proj", x)
        )

    # ------------------------------------------------------------------------------------------------------- block drafters

    def block_states(self, tokens: list[int], rows: int) -> torch.Tensor:
        """Normed states of the block's rows [rows, H]."""
        count = len(tokens) - 1
        known = count - 3 if self.trap == "context without the last tokens" else count
        context = norm(linear(self.features(tokens[:count])[:known], self.weight("fc")), self.weight("hidden_norm"))
        mask = 0 if self.trap == "another mask token" else MASK
        h = self.embedding[torch.tensor([tokens[-1], *[mask] * (rows - 1)])]
        start = count - 1 if self.trap == "block at the last feature" else count
        positions, before = start + torch.arange(rows), torch.arange(known)
        for index in range(self.truth.layers):
            layer = f"layers.{index}"
            x = norm(h, self.weight(f"{layer}.input_layernorm"))
            c = norm(context, self.weight(f"{layer}.input_layernorm")) if self.trap == "context through the input norm" else context
            k = torch.cat([self.heads(layer, "k", c, before), self.heads(layer, "k", x, positions)])
            v = torch.cat([self.heads(layer, "v", c, None), self.heads(layer, "v", x, None)])
            hidden = None
            if self.trap == "causal block":
                hidden = torch.arange(known + rows)[None] > known + torch.arange(rows)[:, None]
            attended = self.attend(self.heads(layer, "q", x, positions), k, v, hidden)
            h = h + self.project(f"{layer}.self_attn.o_proj", attended)
            h = h + self.mlp(layer, norm(h, self.weight(f"{layer}.post_attention_layernorm")))
        return norm(h, self.weight("norm"))

    def _block(self, tokens: list[int], limit: int, request: Request, index: int) -> Expected:
        truth = self.truth
        anchor_first = truth.anchor_first != (self.trap == "rows shifted")
        rows = min(truth.block, limit + 1)
        states = self.block_states(tokens, rows)[0 if anchor_first else 1 :]
        expected, path, memory = Expected(), [tokens[-1]], torch.zeros(truth.rank)
        for state in states[:limit]:
            logits = self.head @ state
            if truth.markov and self.trap != "no Markov bias":
                bias, memory = self.bias(path[-2] if self.trap == "bias of the token before" and len(path) > 1 else path[-1], state, memory)
                logits = logits + bias
            previous = path[-1]
            token, distribution = self.choose(logits, request, index, len(tokens), len(path) - 1)
            path.append(token)
            if truth.confidence:
                seen = token if self.trap == "estimate from the token itself" else previous
                expected.survival.append(self.confidence(state, seen))
            expected.tokens.append(token)
            expected.distributions.append(distribution)
        return expected

    def bias(self, previous: int, state: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e, w2 = self.weight("markov_head.markov_w1")[previous], self.weight("markov_head.markov_w2")
        if self.truth.markov == "vanilla":
            return w2 @ e, memory
        if self.truth.markov == "gated":
            return w2 @ (torch.sigmoid(self.project("markov_head.gate_proj", torch.cat([state, e]))) * e), memory
        gate, candidate, out = self.project("markov_head.joint_proj", torch.cat([memory, e, state])).chunk(3)
        memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        return w2 @ torch.tanh(out), memory

    def confidence(self, state: torch.Tensor, previous: int) -> float:
        x = state
        if self.truth.markov and self.truth.confidence_with_markov:
            x = torch.cat([state, self.weight("markov_head.markov_w1")[previous]])
        return float(torch.sigmoid(self.project("confidence_head.proj", x)))

    # -------------------------------------------------------------------------------------------------------------- EAGLE-3

    def fused(self, tokens: list[int]) -> torch.Tensor:
        """The fused features of every token [T, H]."""
        features = self.features(tokens)
        if self.truth.norm_before_fc:
            features = norm(features, self.weight("input_norm"))
        if self.truth.fc_norm:
            parts = features.split(HIDDEN, -1)
            features = torch.cat([norm(part, self.weight(f"fc_norm.{i}")) for i, part in enumerate(parts)], -1)
        return linear(features, self.weight("fc"))

    def eagle_layer(self, fed: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """The layer over all pairs (feature [T, H], token) from position 0: its raw output for the last pair [H]."""
        layer = "layers.0"
        normed = norm(fed, self.weight(f"{layer}.hidden_norm"))
        embedded = norm(self.embedding[torch.tensor(tokens)], self.weight(f"{layer}.input_layernorm"))
        x = torch.cat([normed, embedded] if self.trap == "feature before embedding" else [embedded, normed], -1)
        at = torch.arange(len(tokens))
        k, v, q = self.heads(layer, "k", x, at), self.heads(layer, "v", x, None), self.heads(layer, "q", x, at)[-1:]
        before_residual = self.truth.norm_before_residual != (self.trap == "the other residual")
        h = (normed if before_residual else fed)[-1:] + self.project(f"{layer}.self_attn.o_proj", self.attend(q, k, v))
        return (h + self.mlp(layer, norm(h, self.weight(f"{layer}.post_attention_layernorm"))))[0]

    def _eagle(self, tokens: list[int], limit: int, request: Request, index: int) -> Expected:
        fed, paired = self.fused(tokens[:-1]), tokens[1:]
        if self.trap == "a feature with its own token":
            paired = tokens[:-1]
        if self.trap == "a pair for the first token":
            fed, paired = torch.cat([torch.zeros(1, HIDDEN), fed]), tokens
        if self.trap == "context without the last tokens":
            fed, paired = torch.cat([fed[:-4], fed[-1:]]), [*paired[:-4], paired[-1]]
        expected = Expected()
        for step in range(limit):
            raw = self.eagle_layer(fed, paired)
            normed = norm(raw, self.weight("norm"))
            token, distribution = self.choose(self.head @ normed, request, index, len(tokens), step)
            expected.tokens.append(token)
            expected.distributions.append(distribution)
            back = normed if self.truth.norm_output != (self.trap == "the other output goes back") else raw
            fed, paired = torch.cat([fed, back[None]]), [*paired, token]
        return expected

    def choose(self, logits: torch.Tensor, request: Request, index: int, start: int, step: int) -> tuple[int, torch.Tensor]:
        """Draft token number `step` (from 0) after `start` tokens: what its position's noise draws, and what it is drawn from."""
        params = request.params
        wide = torch.full((VOCAB_SIZE,), -torch.inf)
        ids = torch.arange(len(self.ids)) if self.trap == "draft tokens for target tokens" else self.ids
        wide[ids] = logits
        if params.is_greedy:
            token = int(wide.argmax())
            chances = torch.nn.functional.one_hot(torch.tensor(token), VOCAB_SIZE).float()
        else:
            chances = probabilities(wide, params.temperature, params.top_k, params.top_p, params.min_p)
            noise = exponential_noise([row_key(request.draw_key, index, start + step)], VOCAB_SIZE)[0]
            token = int((noise / chances).argmin())
        return (token if self.path is None else self.path[step]), chances
