"""What a row of logits is drawn for."""

from __future__ import annotations

from typing import Protocol

from dspark.runtime.spec.request import Request


class RowContext(Protocol):
    """What a row's draw depends on besides its logits: a sequence, or one with draft tokens behind it."""

    request: Request
    index: int
    prompt_len: int

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
