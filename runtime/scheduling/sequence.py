"""One answer in the making: its tokens, how far they are computed, and the blocks it holds."""

from __future__ import annotations

from enum import Enum

from dspark.runtime.kv.manager import BlockTable
from dspark.runtime.spec.request import Request


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Answer number `index` of a request.

    token_ids: prompt and answer so far. num_computed: how many of them have their keys and values stored. cache_salt: see PrefixIndex.root.
    num_drafted, num_accepted: draft tokens that were verified for it, and those kept.
    num_pending: tokens behind token_ids that steps in flight will draw: counted in num_tokens, and not known yet. pending_row: row of the
    newest one among the draws of its step.
    drafter_len: how many of its tokens are known to lie in the layers of a drafter that keeps count (see DraftModel).
    rope_len: the length that a rope which follows the sequence's length counts at least, for each of its tokens.
    """

    __slots__ = (
        "cache_salt",
        "drafter_len",
        "finish_reason",
        "first_token_at_s",
        "index",
        "min_top2_gap",
        "num_accepted",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_pending",
        "num_preemptions",
        "pending_row",
        "prompt_len",
        "rank",
        "request",
        "rope_len",
        "status",
        "stop_reason",
        "stopper",
        "table",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, rank: int, cache_salt: int = 0) -> None:
        self.request = request
        self.index = index
        self.rank = (request.priority, rank, index)
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.cache_salt = cache_salt
        self.rope_len = self.prompt_len
        self.num_computed = 0
        self.num_pending = 0
        self.pending_row = -1
        self.table = BlockTable()
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopper: object | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.drafter_len = 0
        self.first_token_at_s = 0.0
        self.min_top2_gap: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]
