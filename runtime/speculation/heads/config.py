"""What a drafting head is, in numbers, whatever packaging it came in. Standard library only.

Sources: DSpark (arXiv 2607.05147) and its reference code DeepSpec; DFlash (z-lab); EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and the
options of EAGLE-3.1 (`fc_norm`, `norm_output`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dspark.runtime.spec.model_config import ModelConfig

METHODS = ("dspark", "dflash", "eagle3")
MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DraftConfig:
    """One drafting head.

    model: the geometry of its own layers; vocab_size is the target's. taps: target layers whose outputs (raw residual stream after them,
    0-based, -1 for the embedding's) it reads, ascending; of a target with target_num_layers layers, target_hidden_size wide.
    draft_vocab_size: tokens it can propose, below model.vocab_size where the checkpoint has a table of them (`d2t`).
    own_embedding, own_head: whether it has tensors of its own, or uses the target's.

    Block drafters (dspark, dflash). block_size: rows of a block. mask_token_id: the token of all rows but the first. sample_from_anchor:
    row k (from 0) predicts the token k + 1 places after the anchor, the first row too; without it row k fills its own place and the first
    row's output is not used. markov: kind of the previous-token bias, None without; markov_rank its width. confidence: the head that
    estimates acceptance; confidence_with_markov: it reads the previous token's embedding besides. temperatures: what its output for
    each draft position is divided by (sequential temperature scaling), () for 1.

    EAGLE-3. norm_before_residual: the residual of its layer is the normed feature. norm_before_fc: one norm over all tapped features side
    by side. fc_norm: a norm over each of them. norm_output: the normed output goes back in, not the raw one. trained_steps: length of the
    chains it was trained on, None when the checkpoint does not say.
    """

    method: str
    model: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    target_num_layers: int
    draft_vocab_size: int
    own_embedding: bool = True
    own_head: bool = True
    block_size: int = 0
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    markov: str | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    temperatures: tuple[float, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    trained_steps: int | None = None

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether it proposes from a part of the target's vocabulary only."""
        return self.draft_vocab_size < self.model.vocab_size

    @property
    def drafts_per_block(self) -> int:
        """Tokens that one pass of a block drafter proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DraftConfig:
        """Inverse of `to_json`. Raises TypeError or KeyError for an unknown or missing key."""
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            raise TypeError(f"unknown draft keys {unknown}")
        values = {**data, "model": ModelConfig.from_json(data["model"])}
        for name in ("taps", "temperatures"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)
