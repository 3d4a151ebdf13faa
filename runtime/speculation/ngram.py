"""Drafts from text alone: what followed the same words earlier in the sequence, else in the answers of the job's other lines."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.errors import InputError
from dspark.runtime.speculation.draft import Draft, Verified
from dspark.runtime.speculation.suffix_index import SuffixIndex

MAX_DRAFT = 15
MEMORY_TOKENS = 1 << 18
"""Most tokens of finished answers that are remembered: some 40 MB."""
MIN_MEMORY_MATCH = 3
"""Tokens of other lines have to match longer than the line's own before they are believed."""
LONG_MATCH = 8


class NgramProposer:
    """Looks up the sequence's own prompt and answer, then the memory.

    source of its drafts: "ngram" or "memory" with the match's length up to 8, since longer matches hold longer.
    """

    name = "ngram"

    def __init__(self, max_tokens: int = MAX_DRAFT, memory: SuffixIndex | None = None) -> None:
        self.max_tokens = max_tokens
        self.memory = memory if memory is not None else SuffixIndex(MEMORY_TOKENS)
        self._own: dict[int, SuffixIndex] = {}

    def propose(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """The continuation of the longest match, of at most the room."""
        return [self._draft(seq, min(room, self.max_tokens)) for seq, room in zip(sequences, rooms, strict=True)]

    def _draft(self, seq: Sequence, room: int) -> Draft | None:
        index, tokens = self._index(seq), seq.token_ids
        place, length = index.find(tokens, len(tokens))
        found = index.tokens[place : place + room] if length else []
        source = "ngram"
        if length < LONG_MATCH:
            elsewhere, longer = self.memory.find(tokens)
            if longer > max(length, MIN_MEMORY_MATCH - 1) and elsewhere < len(self.memory):
                found, length, source = self.memory.tokens[elsewhere : elsewhere + room], longer, "memory"
        if not found:
            return None
        return Draft(tuple(found), (), f"{source}-{min(length, LONG_MATCH)}")

    def _index(self, seq: Sequence) -> SuffixIndex:
        """Of the sequence's own text, all of it entered."""
        index = self._own.get(id(seq))
        if index is None:
            index = self._own[id(seq)] = SuffixIndex()
        if len(index) < seq.num_tokens:
            index.extend(seq.token_ids[len(index) :])
        return index

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """Nothing: the text itself is what is looked up."""

    def forget(self, seq: Sequence) -> None:
        """A finished answer goes into the memory."""
        if self._own.pop(id(seq), None) is not None and seq.finish_reason is not None:
            self.memory.extend(seq.output_token_ids)


def load_memory(path: Path, vocab_size: int) -> SuffixIndex:
    """The memory that an earlier night left, an empty one where there is no file. Raises InputError for a file that is none."""
    memory = SuffixIndex(MEMORY_TOKENS)
    if path.exists():
        try:
            tokens = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"draft memory '{path}' cannot be read ({error})", "delete it, or name another file") from error
        if tokens.ndim != 1 or tokens.dtype != np.int32 or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size):
            raise InputError(f"draft memory '{path}' is not one of this model's vocabulary", "delete it, or name another file")
        memory.extend(tokens.tolist())
    return memory


def save_memory(path: Path, memory: SuffixIndex) -> None:
    """Write the memory for the next night, in one rename."""
    draft = path.with_name(f".{path.name}.part-{os.getpid()}")
    with draft.open("wb") as file:
        np.save(file, np.asarray(memory.tokens, np.int32), allow_pickle=False)
    draft.replace(path)
