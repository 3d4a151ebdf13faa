"""What a distillation can be asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DistillOptions:
    """budget_s: wall seconds for everything, answers and measurements too; None trains all epochs. resume: go on where an interrupted run
    with the same options stopped. device: as EngineConfig has it.

    The drafter. layers: of its backbone; taps: target layers it reads (see DraftConfig), None spreads num_taps of them; block_size: tokens
    of a draft; markov_rank: width of the previous-token bias.

    The data. max_prompts: lines that are used, chosen by content; sample_tokens: prompt and answer together; temperature: of the answers,
    where a line says nothing itself; held_out_share: lines that are only measured on, chosen by content, at most max_held_out of them.

    Training, with the values of the method's published recipe where a small machine allows them: batch_lines a step, `anchors` blocks of
    each, learning_rate after a linear warm-up over warm_up_share of the steps and a cosine to 0 from there, gradients' norm at most
    clip_norm. evaluations: how often the held-out lines are looked at; patience: that many looks without a better one end it.
    checkpoint_s: seconds between two checkpoints. memory_bytes: features beyond that lie in a file.
    """

    budget_s: float | None = None
    resume: bool = False
    device: str = "auto"
    seed: int = 42
    layers: int = 2
    num_taps: int = 3
    taps: tuple[int, ...] | None = None
    block_size: int = 5
    markov_rank: int = 64
    max_prompts: int = 1024
    sample_tokens: int = 512
    temperature: float = 0.0
    held_out_share: float = 0.1
    max_held_out: int = 64
    epochs: int = 5
    batch_lines: int = 8
    anchors: int = 32
    learning_rate: float = 6e-4
    warm_up_share: float = 0.04
    clip_norm: float = 1.0
    evaluations: int = 10
    patience: int = 4
    checkpoint_s: float = 60.0
    memory_bytes: int = 2 << 30

    def fingerprint(self) -> dict[str, Any]:
        """The options that a trained weight depends on, JSON-ready; a resumed run must have the same."""
        free = ("budget_s", "resume", "checkpoint_s", "memory_bytes", "device")
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items() if key not in free}
