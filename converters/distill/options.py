"""What a distillation can be asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("dspark", "draft-model")
LAYERS = {"dspark": 2, "draft-model": 4}
"""Layers of each kind where nothing else is asked for."""
LEARNING_RATES = {"dspark": 6e-4, "draft-model": 4e-4}


@dataclass(frozen=True)
class DistillOptions:
    """budget_s: wall seconds for everything, answers and measurements too; None trains all epochs. resume: go on where an interrupted run
    with the same options stopped. device, threads: as EngineConfig has them.

    The draft. kind: "dspark", a head on the target's features that starts from random numbers, or "draft-model", a decoder of the target's
    family with its embedding and output head that starts from some of its layers. layers: of either, None for LAYERS; block_size: tokens of
    a draft. Of a head: taps, target layers it reads (see DraftConfig), None spreads num_taps of them; markov_rank: width of the
    previous-token bias. Of a draft model: kept_layers, the target's layers it starts from, None chooses them.

    The data. max_prompts: lines that are used, chosen by content; sample_tokens: prompt and answer together; temperature: of the answers,
    where a line says nothing itself; held_out_share: lines that are only measured on, chosen by content, at most max_held_out of them.
    answers: of each prompt that is trained on; those after the first are drawn at extra_temperature, whatever the line says.

    Training, with the values of the method's published recipe where a small machine allows them: batch_lines a step, `anchors` blocks of
    each, learning_rate (None for LEARNING_RATES) after a linear warm-up over warm_up_share of the steps and a cosine to 0 from there,
    gradients' norm at most clip_norm. ce_weight, kl_weight, tv_weight: what a draft model's loss is made of (a head's is the recipe's);
    prompt_weight: of a prompt's tokens in it, an answer's weigh 1. evaluations: how often the held-out lines are looked at; patience: that
    many looks in a row without a longer expected length or a smaller loss end it. checkpoint_s: seconds between two checkpoints.
    memory_bytes: features beyond that lie in a file.
    """

    budget_s: float | None = None
    resume: bool = False
    device: str = "auto"
    threads: int | None = None
    seed: int = 42
    kind: str = "dspark"
    layers: int | None = None
    kept_layers: tuple[int, ...] | None = None
    num_taps: int = 3
    taps: tuple[int, ...] | None = None
    block_size: int = 5
    markov_rank: int = 64
    max_prompts: int = 1024
    sample_tokens: int = 512
    temperature: float = 0.0
    held_out_share: float = 0.1
    max_held_out: int = 64
    answers: int = 1
    extra_temperature: float = 0.7
    epochs: int = 5
    batch_lines: int = 8
    anchors: int = 32
    learning_rate: float | None = None
    warm_up_share: float = 0.04
    clip_norm: float = 1.0
    ce_weight: float = 0.0
    kl_weight: float = 1.0
    tv_weight: float = 0.0
    prompt_weight: float = 0.3
    evaluations: int = 10
    patience: int = 4
    checkpoint_s: float = 60.0
    memory_bytes: int = 2 << 30

    @property
    def num_layers(self) -> int:
        """Layers of the draft."""
        if self.kind == "draft-model" and self.kept_layers is not None:
            return len(self.kept_layers)
        return LAYERS[self.kind] if self.layers is None else self.layers

    @property
    def highest_rate(self) -> float:
        """The learning rate after the warm-up."""
        return LEARNING_RATES[self.kind] if self.learning_rate is None else self.learning_rate

    def fingerprint(self) -> dict[str, Any]:
        """The options that a trained weight depends on, JSON-ready; a resumed run must have the same."""
        free = ("budget_s", "resume", "checkpoint_s", "memory_bytes", "device", "threads")
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items() if key not in free}
