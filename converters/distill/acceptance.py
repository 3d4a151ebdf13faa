"""How much of a drafter's drafts is accepted, measured with the drafter as it is served, on lines that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.converters.distill.data import DistillData
from dspark.converters.distill.features import Features
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.speculation.heads.replay import KnownAnswer, Round, replay_draft_model, replay_stored


@dataclass(frozen=True)
class Acceptance:
    """mean_length: tokens a round brings, the target's own one among them. by_position: of the drafts whose first k tokens were accepted,
    the share that is accepted at k + 1 as well."""

    rounds: int
    mean_length: float
    by_position: tuple[float, ...]

    def describe(self) -> str:
        """In words, with figures."""
        return f"{self.mean_length:.2f} tokens a round, acceptance by position {' '.join(f'{share:.2f}' for share in self.by_position)}"

    def to_json(self) -> dict[str, Any]:
        shares = [round(share, 4) for share in self.by_position]
        return {"rounds": self.rounds, "mean_accepted_length": round(self.mean_length, 4), "acceptance_by_position": shares}


def summarize_rounds(rounds: Sequence[Round], num_positions: int) -> Acceptance:
    """Count what rounds came to."""
    tried = [sum(entry.accepted >= k and len(entry.survival) > k for entry in rounds) for k in range(num_positions)]
    kept = [sum(entry.accepted > k for entry in rounds) for k in range(num_positions)]
    shares = tuple(count / total if total else 0.0 for count, total in zip(kept, tried, strict=True))
    return Acceptance(len(rounds), sum(entry.committed for entry in rounds) / max(len(rounds), 1), shares)


def held_out_rounds(draft_dir: Path, target: Decoder, data: DistillData, features: Features) -> list[Round]:
    """Every round of the held-out lines with a stored draft beside its target. Its estimates are not divided by temperatures."""
    facts = target.kernels.facts
    first = len(data.training)
    answers = [
        KnownAnswer(line.request, line.tokens, features.tapped[features.rows(first + index)].to(facts.device, facts.dtype))
        for index, line in enumerate(data.held_out)
    ]
    return replay_stored(draft_dir, target, answers)


def draft_model_rounds(draft_dir: Path, target: Decoder, codec: TextCodec, data: DistillData, num_positions: int) -> list[Round]:
    """The same with a draft model, which needs no features of its target's."""
    answers = [KnownAnswer(line.request, line.tokens, torch.empty(len(line.tokens), 0)) for line in data.held_out]
    return replay_draft_model(draft_dir, target, codec, answers, num_positions)
