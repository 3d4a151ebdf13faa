"""What the layers of a draft model hold, slot by slot: enough to know which of a sequence's tokens need no computing."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np

from dspark.runtime.scheduling.sequence import Sequence

_SEED, _MASK = 0x5851F42D4C957F2D, (1 << 63) - 1
_EMPTY = 0


def chain(digest: int, token: int) -> int:
    """The digest of a beginning with one more token; never `_EMPTY`."""
    return ((digest ^ token) * 0x9E3779B97F4A7C15 + token + 1) & _MASK | 1


class SlotLedger:
    """For each slot a digest of the tokens up to it that its keys and values were computed from.

    Blocks change hands, are shared, copied and rewound without a word to a drafter. A slot is right for a sequence when its digest is the
    one of the sequence's own beginning, whoever wrote it; a wrong one costs acceptance and is found and computed again.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._digests = np.zeros((num_blocks, block_size), np.int64)

    def at(self, blocks: Tokens[int], position: int) -> int:
        """The digest up to and with a position of a block table; that of the empty beginning for -1."""
        if position < 0:
            return _SEED
        return int(self._digests[blocks[position // self.block_size], position % self.block_size])

    def knows(self, blocks: Tokens[int], position: int) -> bool:
        return self.at(blocks, position) != _EMPTY

    def write(self, blocks: Tokens[int], start: int, tokens: Tokens[int]) -> None:
        """Tokens were computed from `start` on, on what lay before them."""
        digest = self.at(blocks, start - 1)
        for position, token in enumerate(tokens, start):
            digest = chain(digest, token)
            self._digests[blocks[position // self.block_size], position % self.block_size] = digest

    def copy_block(self, source: int, target: int) -> None:
        """A whole block."""
        self._digests[target] = self._digests[source]

    def valid_len(self, seq: Sequence) -> int:
        """How many of a sequence's computed tokens are right here, counting on from what was known (Sequence.drafter_len, kept)."""
        blocks, place = seq.table.blocks, min(seq.drafter_len, seq.num_computed)
        digest = self.at(blocks, place - 1)
        tokens, size, digests = seq.token_ids, self.block_size, self._digests
        while place < seq.num_computed:
            digest = chain(digest, tokens[place])
            if digests[blocks[place // size], place % size] != digest:
                break
            place += 1
        seq.drafter_len = place
        return place
