"""How much of a drafter's drafts is accepted, measured with the drafter as it is served, on lines that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.converters.distill.data import DistillData
from dspark.converters.distill.features import Features
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.speculation.heads.replay import KnownAnswer, Round, replay_stored


@dataclass(frozen=True)
class Acceptance:
    """mean_length: tokens a round brings, the target's own one among them. by_position: of the drafts whose first k tokens were accepted,
    the share that is accepted at k + 1 as well."""

    rounds: int
    mean_length: float
    by_position: tuple[float, ...]

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
