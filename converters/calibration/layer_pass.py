"""One decoder layer over all samples, stopped before each group of linears so that they can be observed and replaced.

A layer's linears form four stages, each fed by the one before: q, k, v; o; gate and up of every feed-forward block (and the router);
down. `inputs` shows what the linears of a stage read, batch of samples after batch, computed with whatever stands in the stages before; so
a stage that is quantized before the next one is looked at makes the next one see its error, and the layer is computed once in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dspark.runtime.execution.layer_walk import LayerWalk, WalkBatch, WalkLayer
from dspark.runtime.layers.mlp import FeedForward, GatedMLP
from dspark.runtime.layers.moe import MixtureOfExperts

QKV, OUT, GATE_UP, DOWN = "qkv", "out", "gate_up", "down"
STAGES = (QKV, OUT, GATE_UP, DOWN)
KVObserver = Callable[[tuple[torch.Tensor, torch.Tensor], torch.Tensor], None]
"""((k_cache, v_cache) of one batch, unquantized; slot_mapping of its tokens) -> None"""
Allocate = Callable[[int, int], torch.Tensor]
"""(rows, columns) -> an uninitialised matrix of the run's dtype, in memory or in a file"""


@dataclass
class Slot:
    """Modules that read one input and run as one function, and where that function hangs: `owner.attribute`.

    modules: their names, in the order of their outputs.
    """

    stage: str
    modules: tuple[str, ...]
    owner: Any
    attribute: str

    @property
    def function(self) -> Callable[[torch.Tensor], torch.Tensor]:
        found: Callable[[torch.Tensor], torch.Tensor] = getattr(self.owner, self.attribute)
        return found

    def install(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put a function in place of what runs now."""
        setattr(self.owner, self.attribute, function)


class LayerPass:
    """The stages of one layer, to be gone through in the order of STAGES, then `finish`.

    walk: its residual stream holds the layer's input and, after `finish`, its result. observe_kv: shown the keys and values of each batch.
    repeats: the stages are gone through twice, with a `restart` in between; the layer's input is kept for it.
    """

    def __init__(
        self, walk: LayerWalk, built: WalkLayer, allocate: Allocate, observe_kv: KVObserver | None = None, repeats: bool = False
    ) -> None:
        self.walk, self.built = walk, built
        self._input = allocate(walk.num_tokens, walk.config.hidden_size).copy_(walk.residual) if repeats else None
        self.slots = layer_slots(built)
        self._observe_kv = observe_kv
        facts, config = walk.kernels.facts, walk.config
        self._heads = allocate(walk.num_tokens, config.num_heads * config.head_dim)
        self._mlp_input = allocate(walk.num_tokens, config.hidden_size)
        self._empty = torch.empty(0, dtype=facts.dtype, device=facts.device)

    def restart(self, built: WalkLayer) -> None:
        """Begin anew with another form of the same layer. Its keys and values are not shown again."""
        assert self._input is not None
        self.walk.residual.copy_(self._input)
        self.built, self.slots = built, layer_slots(built)
        self._input = self._observe_kv = None

    def inputs(self, stage: str) -> Iterator[list[tuple[Slot, torch.Tensor]]]:
        """For each batch, the slots of the stage and what each reads [n, K]; an expert that no token of a batch goes to is absent."""
        slots = [slot for slot in self.slots if slot.stage == stage]
        for batch in self.walk.batches:
            yield self._inputs(stage, slots, batch)

    @torch.inference_mode()
    def _inputs(self, stage: str, slots: list[Slot], batch: WalkBatch) -> list[tuple[Slot, torch.Tensor]]:
        """Of one batch. (A generator must not yield from within inference mode: its caller would run in it, and two of them in turns would
        leave it on.)"""
        if stage == QKV:
            return [(slots[0], self.walk.normed(self.built, self.walk.residual[batch.rows]))]
        if stage == OUT:
            return [(slots[0], self._attend(batch))]
        if stage == GATE_UP:
            self._add_attention(batch)
            if len(slots) == 1:  # without experts the block's input is what its first linear reads
                return [(slots[0], self._mlp_input[batch.rows])]
        return self._caught(batch, slots)

    def finish(self) -> None:
        """Add the feed-forward block's result to the stream: the layer is done."""
        layer = self.built.layer
        with torch.inference_mode():
            for batch in self.walk.batches:
                residual = self.walk.residual[batch.rows].clone()
                _, self.walk.residual[batch.rows] = layer.after_mlp(layer.mlp(self._mlp_input[batch.rows]), residual)

    def _attend(self, batch: WalkBatch) -> torch.Tensor:
        """Attention's result, kept for the stages behind the output projection."""
        walk, attention = self.walk, self.built.layer.attention
        hidden = walk.normed(self.built, walk.residual[batch.rows])
        cache = walk.cache(batch)
        heads = attention(hidden, *batch.rotations[self.built.layer.rotation], cache, batch.attention)
        if self._observe_kv is not None:
            self._observe_kv(cache, batch.attention.slot_mapping)
        self._heads[batch.rows] = heads
        return heads

    def _add_attention(self, batch: WalkBatch) -> None:
        """The output projection and the step onto the stream; what goes into the feed-forward block is kept."""
        layer = self.built.layer
        hidden = layer.attention.o_proj(self._heads[batch.rows])
        hidden, residual = layer.after_attention(hidden, self.walk.residual[batch.rows].clone())
        self._mlp_input[batch.rows], self.walk.residual[batch.rows] = hidden, residual

    def _caught(self, batch: WalkBatch, slots: list[Slot]) -> list[tuple[Slot, torch.Tensor]]:
        """Run the feed-forward block with the slots' functions replaced by nets, which keep what they are given and return zeros."""
        caught: list[tuple[Slot, torch.Tensor]] = []
        blocked = [slot for slot in self.slots if slot in slots or slot.stage == DOWN]
        before = [slot.function for slot in blocked]
        routers = [slot for slot in slots if slot.attribute in ("router", "gate")]
        try:
            for slot, function in zip(blocked, before, strict=True):
                slot.install(_Net(slot, function, caught if slot in slots else None, runs=slot in routers))
            self.built.layer.mlp(self._mlp_input[batch.rows])
        finally:
            for slot, function in zip(blocked, before, strict=True):
                slot.install(function)
        return caught


@dataclass
class _Net:
    """Stands in for a linear: notes its input, and returns zeros instead of computing (a router runs: it decides who reads what)."""

    slot: Slot
    function: Any
    caught: list[tuple[Slot, torch.Tensor]] | None
    runs: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.caught is not None and x.shape[0]:
            self.caught.append((self.slot, x))
        return self.function(x) if self.runs else x.new_zeros(x.shape[0], self.slot_outputs(x))

    def slot_outputs(self, x: torch.Tensor) -> int:
        """Width of the function's result, from a product over no rows."""
        return int(self.function(x[:0]).shape[-1])


def layer_slots(built: WalkLayer) -> list[Slot]:
    """Every linear function of a layer, in order of use."""
    name, layer = f"model.layers.{built.index}", built.layer
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    slots = [
        Slot(QKV, tuple(f"{attention}.{part}_proj" for part in "qkv"), layer.attention, "qkv_proj"),
        Slot(OUT, (f"{attention}.o_proj",), layer.attention, "o_proj"),
    ]
    if not isinstance(layer.mlp, MixtureOfExperts):
        return slots + _gated_slots(mlp, layer.mlp)
    slots.append(Slot(GATE_UP, (f"{mlp}.gate",), layer.mlp, "router"))
    if layer.mlp.shared is not None:
        slots.append(Slot(GATE_UP, (f"{mlp}.shared_expert_gate",), layer.mlp.shared, "gate"))
        slots += _gated_slots(f"{mlp}.shared_expert", layer.mlp.shared.expert)
    for index, expert in enumerate(layer.mlp.experts):
        slots += _gated_slots(f"{mlp}.experts.{index}", expert)
    return slots


def _gated_slots(name: str, block: FeedForward) -> list[Slot]:
    assert isinstance(block, GatedMLP)
    return [
        Slot(GATE_UP, (f"{name}.gate_proj", f"{name}.up_proj"), block, "gate_up_proj"),
        Slot(DOWN, (f"{name}.down_proj",), block, "down_proj"),
    ]
