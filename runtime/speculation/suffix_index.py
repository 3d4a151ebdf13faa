"""Where a text has said before what it says now: the index behind n-gram drafts (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

KEY_TOKENS = 2
"""Tokens that must be equal for a place to be found at all; longer matches among the places found win."""
MAX_PLACES = 8
"""Places that are looked at, the latest first."""
MAX_MATCH = 16
_SHIFT = 32


class SuffixIndex:
    """A growing list of tokens; `find` gives the place whose past is most like the end of a text.

    capacity: beyond it the oldest half is dropped; None for no bound.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.tokens: list[int] = []
        self.capacity = capacity
        self._latest: dict[int, int] = {}  # key of two tokens -> the position behind them
        self._before: list[int] = []  # position -> the one before it with the same key, -1 for none

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        own, latest, before = self.tokens, self._latest, self._before
        for token in tokens:
            own.append(token)
            end = len(own)
            if end < KEY_TOKENS:
                before.append(-1)
                continue
            key = own[end - 2] << _SHIFT | token
            before.append(latest.get(key, -1))
            latest[key] = end
        if self.capacity is not None and len(own) > self.capacity:
            self._drop_oldest()

    def find(self, text: Sequence[int], end: int | None = None) -> tuple[int, int]:
        """(position in the index behind the best match with the end of `text`, its length), (-1, 0) where nothing matches.

        end: positions from there on do not count (the index holds the text itself: its own end is no match). Of equally long matches the
        latest wins.
        """
        best, longest = -1, 0
        for place, length in self.matches(text, end):
            if length > longest:
                best, longest = place, length
        return best, longest

    def matches(self, text: Sequence[int], end: int | None = None) -> Iterator[tuple[int, int]]:
        """(position behind it, length) of matches with the end of `text`, the latest first, MAX_PLACES at most; `end` as in `find`."""
        if len(text) < KEY_TOKENS:
            return
        own = self.tokens
        limit = len(own) if end is None else end
        place = self._latest.get(text[-2] << _SHIFT | text[-1], -1)
        looked_at = 0
        while place > 0 and looked_at < MAX_PLACES:
            if place < limit:
                length = KEY_TOKENS
                most = min(MAX_MATCH, place, len(text))
                while length < most and own[place - 1 - length] == text[-1 - length]:
                    length += 1
                yield place, length
                looked_at += 1
            place = self._before[place - 1]

    def _drop_oldest(self) -> None:
        kept = self.tokens[len(self.tokens) // 2 :]
        self.tokens, self._latest, self._before = [], {}, []
        self.extend(kept)
