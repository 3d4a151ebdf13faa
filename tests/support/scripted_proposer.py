"""Proposers that know the answers, and use it for good or ill."""

from __future__ import annotations

import random
import zlib

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import ROOT, Draft, Verified

KINDS = ("perfect", "near", "random", "adversarial")
TREE_KINDS = ("siblings", "wrong-branch-first", "random-tree")


class ScriptedProposer:
    """answers: (request id, index) -> token ids of plain decoding. kind: one of KINDS or TREE_KINDS.

    perfect: the answer to come; near: with a wrong token now and then; random: any tokens; adversarial: never the right one.
    siblings: the answer to come among wrong siblings at each depth; wrong-branch-first: behind a branch of wrong tokens that is as long;
    random-tree: a tree of any shape, in which some nodes go on rightly.
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
        if self.kind in TREE_KINDS and coming:
            return self.tree(coming, room, random.Random(dice))
        if self.kind == "near" and coming and dice % 3:
            coming[dice % len(coming)] = (coming[dice % len(coming)] + 1) % self.vocab_size
        elif self.kind == "random":
            coming = [(dice >> i) % self.vocab_size for i in range(room)]
        elif self.kind == "adversarial":
            coming = [(token + 1 + dice % 7) % self.vocab_size for token in coming]
        return Draft(tuple(coming), (), self.kind) if coming else None

    def tree(self, coming: list[int], room: int, dice: random.Random) -> Draft:
        """Of exactly `room` nodes, or fewer where the answer ends."""
        tokens: list[int] = []
        parents: list[int] = []
        right = [ROOT]  # the nodes that stand on the answer to come

        def add(token: int, parent: int) -> None:
            if parent == right[-1] and len(right) <= len(coming) and token == coming[len(right) - 1]:
                right.append(len(tokens))
            tokens.append(token)
            parents.append(parent)

        def wrong(depth: int) -> int:
            return (coming[min(depth, len(coming) - 1)] + dice.randint(1, self.vocab_size - 1)) % self.vocab_size

        if self.kind == "siblings":
            while len(tokens) < room and len(right) <= len(coming):
                depth, parent = len(right) - 1, right[-1]
                for token in dice.sample([wrong(depth), coming[depth], wrong(depth)], 3)[: room - len(tokens)]:
                    add(token, parent)
        elif self.kind == "wrong-branch-first":
            length = min(room // 2, len(coming))
            for depth in range(length):
                add(wrong(depth), depth - 1)
            for depth in range(min(room - length, len(coming))):
                add(coming[depth], right[-1])
        else:
            for _ in range(room):
                parent = right[-1] if dice.random() < 0.4 else dice.randint(ROOT, len(tokens) - 1)
                depth = right.index(parent) if parent in right else 0
                add(coming[min(depth, len(coming) - 1)] if dice.random() < 0.6 else wrong(depth), parent)
        return Draft(tuple(tokens), (), self.kind, tuple(parents))

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """Nothing."""

    def forget(self, seq: Sequence) -> None:
        """Nothing."""
