"""From a target's token ids to a draft model's and back: equal ids, or equal token strings where the vocabularies differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.errors import InputError

MIN_COVERAGE = 0.5
"""Share of the target's tokens that a draft must know: with less its drafts end before they help."""
MAPPED_NAME = "vocabulary.json"
"""A file beside a draft's own that says: its tokens are matched by their strings, and somebody has asked for that."""
_SHOWN = 40


@dataclass(frozen=True)
class VocabularyMatch:
    """Two vocabularies held against each other, string by string.

    pairs: (draft id, target id) of equal token strings. first_difference: the lowest id at which they differ, in words; "" when they are
    the same. num_target, num_draft: tokens that each tokenizer knows.
    """

    pairs: tuple[tuple[int, int], ...]
    first_difference: str
    num_target: int
    num_draft: int

    @property
    def is_same(self) -> bool:
        return not self.first_difference

    @property
    def coverage(self) -> float:
        """Share of the target's tokens that the draft has."""
        return len(self.pairs) / self.num_target if self.num_target else 0.0

    def describe(self) -> str:
        """In words, with figures."""
        if self.is_same:
            return f"the same {self.num_target} tokens"
        share = f"{len(self.pairs)} of the target's {self.num_target} tokens ({self.coverage:.1%})"
        return f"mapped by token strings, {share}; {self.first_difference}"

    def fault(self, is_mapped: bool) -> str | None:
        """Why a draft with this vocabulary cannot serve, None when it can. is_mapped: whether tokens may be matched by their strings."""
        known = f"its vocabulary has {len(self.pairs)} of the target's {self.num_target} tokens ({self.coverage:.1%})"
        if self.coverage < MIN_COVERAGE:
            return f"{known}, at least {MIN_COVERAGE:.0%} are needed: {self.first_difference}"
        return None if self.is_same or is_mapped else f"its vocabulary is another one: {self.first_difference}"


def match_vocabularies(target: Mapping[str, int], draft: Mapping[str, int]) -> VocabularyMatch:
    """Compare token strings, not sizes: models whose embeddings are padded differently are the same, models with swapped ids are not."""
    pairs = tuple(sorted((draft[token], target_id) for token, target_id in target.items() if token in draft))
    return VocabularyMatch(pairs, _first_difference(target, draft), len(target), len(draft))


def _first_difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    if target == draft:
        return ""
    ours, theirs = ({index: token for token, index in vocabulary.items()} for vocabulary in (target, draft))
    index = min(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))
    shown = [repr(token[:_SHOWN]) if token is not None else "no token" for token in (ours.get(index), theirs.get(index))]
    return f"id {index} is {shown[0]} in the target and {shown[1]} in the draft"


@dataclass
class DraftVocabulary:
    """to_draft int64 [target rows]: what is fed for a target's token, None when ids are the same. to_target int64 [draft rows]: the
    target's id of each of the draft's tokens, -1 where it has none; None when ids are the same. target_size: rows of its logits."""

    target_size: int
    to_draft: torch.Tensor | None
    to_target: torch.Tensor | None

    def __post_init__(self) -> None:
        if self.to_target is not None:
            self._is_known = self.to_target >= 0
            self._known = self._is_known.nonzero()[:, 0]
            self._equals = self.to_target[self._known]

    def feed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Target ids int64 [n] -> draft ids [n]."""
        return token_ids if self.to_draft is None else self.to_draft[token_ids]

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits [n, draft rows] -> float32 [n, target rows], -inf for tokens that it does not know.

        A row whose best token has no equal is -inf throughout: the draft ends there, since what it meant cannot be said.
        """
        if self.to_target is None:
            return logits.float()
        wide = torch.full((logits.shape[0], self.target_size), -torch.inf, device=logits.device)
        wide[:, self._equals] = logits[:, self._known].float()
        return wide.masked_fill_(~self._is_known[logits.argmax(-1)][:, None], -torch.inf)


def build_vocabulary(
    target: TextCodec, draft: TextCodec, target_rows: int, draft_rows: int, device: str, is_mapped: bool = False
) -> DraftVocabulary:
    """The tables between two models. rows: of their embeddings, which may be padded. is_mapped: see `VocabularyMatch.fault`.

    Raises InputError when the vocabularies differ and are not to be mapped, or the draft knows too little.
    """
    match = match_vocabularies(target.vocabulary, draft.vocabulary)
    fault = match.fault(is_mapped)
    if fault is not None:
        hint = "take a draft model of the target's family"
        if match.coverage >= MIN_COVERAGE:
            hint += ", or pair this one: dspark pair ENGINE --draft DIR --map-vocabulary"
        raise InputError(f"the draft model cannot serve: {fault}", hint)
    if match.is_same and target_rows == draft_rows:
        return DraftVocabulary(target_rows, None, None)
    to_draft = torch.zeros(target_rows, dtype=torch.int64)
    to_target = torch.full((draft_rows,), -1, dtype=torch.int64)
    usable = [(ours, theirs) for ours, theirs in match.pairs if ours < draft_rows and theirs < target_rows]
    for ours, theirs in usable:
        to_draft[theirs], to_target[ours] = ours, theirs
    for token, stand_in in _stand_ins(target, draft, {theirs for _, theirs in usable}, target_rows, draft_rows).items():
        to_draft[token] = stand_in
    return DraftVocabulary(target_rows, to_draft.to(device), to_target.to(device))


def _stand_ins(target: TextCodec, draft: TextCodec, known: set[int], target_rows: int, draft_rows: int) -> dict[int, int]:
    """For target tokens without an equal the first token that the draft would write their text with: near enough for a context."""
    unknown = [token for token in sorted(target.vocabulary.values()) if token not in known and token < target_rows]
    encoded = draft.encode_batch([target.decode([token], skip_special_tokens=False) for token in unknown])
    return {token: ids[0] for token, ids in zip(unknown, encoded, strict=True) if ids and ids[0] < draft_rows}
