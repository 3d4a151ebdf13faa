"""Generated token ids -> text: stop strings at any token boundary, characters cut between tokens.

Two rules. The text of an answer is the decoding of all its tokens together, so a character that max_tokens cuts becomes U+FFFD.
Of several stop texts the one that is complete first ends the answer (of those complete at the same character, the one that begins
first): as if the text came character by character, whatever the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
MAX_WINDOW = 32
"""Tokens that are decoded again at each step at most; a character has four bytes, so more of them are not waiting for one."""
KEPT_TOKENS = 8
OPEN_BYTES = 3
"""Most bytes of a character that is not complete, each of which some decoders show as a U+FFFD of its own."""


class IncrementalDetokenizer:
    """Follows one answer token by token and says when a stop text is complete. One `append` decodes a bounded number of tokens.

    Stop texts are looked for in generated text only, and only from the min_tokens-th token on. With no stop texts nothing is decoded.
    """

    def __init__(self, codec: TextCodec, params: SamplingParams) -> None:
        self._codec = codec
        self._params = params
        self._num_tokens = 0
        self._longest_stop = max(map(len, params.stop), default=0)
        self._window: list[int] = []  # tokens whose decoding may still change, after the piece of text that is their context
        self._piece_start = 0  # index in the window of the first token after the last point where no character was open
        self._known = 0  # characters of the window's decoding that are final and searched
        self._tail = ""  # the end of the final text, as long as a stop text may still begin in it

    def append(self, token_id: int) -> str | None:
        """Take the next token. Returns the stop text that it completes: the answer ends with this token. None: go on."""
        self._num_tokens += 1
        if not self._params.stop:
            return None
        skip = self._params.skip_special_tokens
        if skip and token_id in self._codec.special_ids:
            return None
        new_text = self._advance(token_id, skip)
        if not new_text:
            return None
        text = self._tail + new_text
        found = None
        if self._num_tokens >= self._params.min_tokens:
            found = first_stop(text, self._params.stop, len(self._tail))
        self._tail = text[max(0, len(text) - self._longest_stop + 1) :] if self._longest_stop > 1 else ""
        return None if found is None else found[2]

    def _advance(self, token_id: int, skip: bool) -> str:
        """Text that this token makes final. A trailing U+FFFD may be a character whose other bytes are to come: it waits."""
        window = self._window
        window.append(token_id)
        text = self._codec.decode(window, skip)
        stable = len(text.rstrip(REPLACEMENT))
        is_full = len(window) > MAX_WINDOW
        if is_full:
            stable = max(stable, len(text) - OPEN_BYTES)
        new_text = text[self._known : stable]
        self._known = max(self._known, stable)
        if is_full:
            self._cut_window(max(0, len(window) - KEPT_TOKENS), skip)
        elif new_text and stable == len(text):
            # Keep the newest piece: some decoders treat the first token of a text differently (no leading blank).
            self._cut_window(self._piece_start, skip)
            self._piece_start = len(self._window)
        return new_text

    def _cut_window(self, start: int, skip: bool) -> None:
        self._window = self._window[start:]
        self._piece_start = 0
        text = self._codec.decode(self._window, skip)
        self._known = max(len(text.rstrip(REPLACEMENT)), len(text) - OPEN_BYTES)


def first_stop(text: str, stops: Sequence[str], searched: int = 0) -> tuple[int, int, str] | None:
    """(start, end, stop text) of the stop that is complete first, ending after `searched` characters; None without one."""
    best = None
    for stop in stops:
        start = text.find(stop, max(0, searched - len(stop) + 1))
        if start >= 0:
            key = (start + len(stop), start)
            if best is None or key < best[0]:
                best = (key, stop)
    return None if best is None else (best[0][1], best[0][0], best[1])


def final_text(codec: TextCodec, token_ids: Sequence[int], params: SamplingParams, stop: int | str | None = None) -> str:
    """The text of a finished answer.

    token_ids: all its tokens, the last one included. stop: the stop text that `append` returned, or the id of the stop_token_ids that
    ended it, or None. A stop text (id) and what the last token brings after it are cut off; include_stop_str_in_output keeps the stop.
    """
    skip = params.skip_special_tokens
    if isinstance(stop, int):
        return codec.decode(token_ids if params.include_stop_str_in_output else token_ids[:-1], skip)
    text = codec.decode(token_ids, skip)
    if stop is None:
        return text
    too_early = codec.decode(token_ids[: params.min_tokens - 1], skip) if params.min_tokens > 1 else ""
    found = first_stop(text, params.stop, len(too_early.rstrip(REPLACEMENT)))
    if found is None:
        # Only after bytes that are no UTF-8: some decoders then show a whole run of bytes as U+FFFD, good characters among them.
        return text
    return text[: found[1] if params.include_stop_str_in_output else found[0]]
