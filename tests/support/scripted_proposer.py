"""Proposers that know the answers, and use it for good or ill."""

from __future__ import annotations

import zlib

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft, Verified

KINDS = ("perfect", "near", "random", "adversarial")


class ScriptedProposer:
    """answers: (request id, index) -> token ids of plain decoding. kind: one of KINDS.

    perfect: the answer to come; near: with a wrong token now and then; random: any tokens; adversarial: never the right one.
    """

    name = "scripted"

    def __init__(self, kind: str, answers: dict[tuple[int, int], list[int]], vocab_size: int, max_tokens: int) -> None:
        self.kind, self.answers, self.vocab_size, self.max_tokens = kind, answers, vocab_size, max_tokens

    def propose(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        return [self.draft(seq, min(room, self.max_tokens)) for seq, room in zip(sequences, rooms, strict=True)]

    def draft(self, seq: Sequence, room: int) -> Draft | None:
        done = seq.num_output_tokens
        coming = self.answers[seq.request.request_id, seq.index][done : done + room]
        dice = zlib.crc32(repr((seq.request.request_id, seq.index, done)).encode())
        if self.kind == "near" and coming and dice % 3:
            coming[dice % len(coming)] = (coming[dice % len(coming)] + 1) % self.vocab_size
        elif self.kind == "random":
            coming = [(dice >> i) % self.vocab_size for i in range(room)]
        elif self.kind == "adversarial":
            coming = [(token + 1 + dice % 7) % self.vocab_size for token in coming]
        return Draft(tuple(coming), (), self.kind) if coming else None

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """Nothing."""

    def forget(self, seq: Sequence) -> None:
        """Nothing."""
