"""Which tokens of a draft are kept: the coupled rule.

Every row of a step draws the target's own token, with the noise that belongs to the token's position and on the distribution that plain
decoding would use there (penalties and min_tokens count the draft's tokens before it). A draft token is accepted when it is the token drawn
in its place. So what comes out is the text of plain decoding, whatever the draft was and however much of it was verified.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.runtime.sampling.sampler import RowContext, Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.draft import ROOT, Draft, Verified

Verify = Callable[[Sampler, torch.Tensor, list[ScheduledSequence]], list[Verified]]
"""logits [rows, V] of all rows of `rows_of`, sequence after sequence -> what each sequence gains"""


class DraftedRow:
    """A sequence with the tokens of one path of its draft behind it: what the sampler must know of a row that follows draft tokens."""

    __slots__ = ("_path", "_seq", "index", "prompt_len", "request")

    def __init__(self, seq: Sequence, path: list[int]) -> None:
        self._seq, self._path = seq, path
        self.request: Request = seq.request
        self.index, self.prompt_len = seq.index, seq.prompt_len

    @property
    def token_ids(self) -> list[int]:
        return self._seq.token_ids + self._path

    @property
    def num_tokens(self) -> int:
        return self._seq.num_tokens + len(self._path)

    @property
    def num_output_tokens(self) -> int:
        return self._seq.num_output_tokens + len(self._path)


def rows_of(item: ScheduledSequence) -> list[RowContext]:
    """The contexts of a sequence's rows: after its newest token, then after each node of its draft."""
    rows: list[RowContext] = [item.seq]
    if item.draft:
        draft = item.draft
        rows += [DraftedRow(item.seq, [draft.token_ids[n] for n in draft.path(node)]) for node in range(len(draft))]
    return rows


def verify_coupled(sampler: Sampler, logits: torch.Tensor, sampling: list[ScheduledSequence]) -> list[Verified]:
    """logits [rows, V] of all rows of `rows_of`, sequence after sequence -> what each sequence gains."""
    contexts = [row for item in sampling for row in rows_of(item)]
    return gained_coupled(sampling, *sampler.sample(logits, contexts))


def gained_coupled(sampling: list[ScheduledSequence], drawn: list[int], gaps: list[float] | None = None) -> list[Verified]:
    """The target's tokens of all rows of `rows_of`, and their top-two gaps if recorded -> what each sequence gains."""
    gained, first = [], 0
    for item in sampling:
        rows = [0] if item.draft is None else accepted_rows(item.draft, drawn[first : first + 1 + len(item.draft)])
        tokens = [drawn[first + row] for row in rows]
        gained.append(Verified(tokens, [gaps[first + row] for row in rows] if gaps else None, tuple(row - 1 for row in rows[1:])))
        first += 1 + (len(item.draft) if item.draft else 0)
    return gained


def accepted_rows(draft: Draft, drawn: list[int]) -> list[int]:
    """The rows that stand on accepted nodes, the anchor's row 0 first. drawn: the token of each row, node n standing in row n + 1."""
    children: dict[tuple[int, int], int] = {}
    for node in range(len(draft)):
        children.setdefault((draft.parent(node), draft.token_ids[node]), node)  # of equal siblings the first counts
    rows, node = [0], ROOT
    while (child := children.get((node, drawn[rows[-1]]))) is not None:
        node = child
        rows.append(node + 1)
    return rows
