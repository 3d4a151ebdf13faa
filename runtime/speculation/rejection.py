"""Which tokens of a draft are kept: the classic rejection rule, an option beside the coupled one (`verify`).

Texts have the law of plain decoding, on the very distribution that it would draw from (penalties, bias, min_tokens, temperature, top-k,
top-p, min-p), but they are other texts, and they depend on the drafts. A draft token x is kept with probability min(1, p(x) / q(x)); q is
what it was drawn from, and 1 at x for a draft without distributions, which is certain of its tokens. The first token that is not kept is
replaced by a draw from max(0, p - q). When all are kept that were verified, a draw from p follows: what a draft had beyond them counts as
never proposed. So how much is verified must not depend on the tokens that it decides on, nor on later ones
(`planner.schedule_early_stop`).

What is drawn here depends on the request's key, the sample index, the position and the draft. Its streams are others than those that tokens
are drawn with elsewhere, so that no draft knows them.
"""

from __future__ import annotations

import numpy as np
import torch

from dspark.runtime.sampling.device import DeviceRows, DraftColumns
from dspark.runtime.sampling.filters import usable_temperature
from dspark.runtime.sampling.reject import DraftRows, reject_rows
from dspark.runtime.sampling.rng import ACCEPTANCE, REPLACEMENTS, row_key
from dspark.runtime.sampling.sampler import RowContext, Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence
from dspark.runtime.speculation.draft import Verified
from dspark.runtime.speculation.verify import rows_of, verify_coupled


def verify_rejection(sampler: Sampler, logits: torch.Tensor, sampling: list[ScheduledSequence]) -> list[Verified]:
    """logits [rows, V] of all rows of `rows_of`, sequence after sequence -> what each sequence gains. Drafts are chains."""
    if all(item.seq.request.params.is_greedy for item in sampling):
        return verify_coupled(sampler, logits, sampling)
    contexts = [row for item in sampling for row in rows_of(item)]
    if sampler.device_rows is not None:
        return _verified_on_device(sampler, sampler.device_rows, logits, sampling, contexts)
    rows, best, gaps = sampler.rows(logits, contexts)
    drafts = draft_rows(sampling, contexts, rows.shape[1])
    accepted, follows = reject_rows(rows, best, drafts)
    gained = []
    for item, first, kept, follow in zip(sampling, drafts.first.tolist(), accepted.tolist(), follows.tolist(), strict=True):
        tokens = [*(item.draft.token_ids[:kept] if item.draft else ()), follow]
        gained.append(Verified(tokens, gaps[first : first + kept + 1] if gaps else None, tuple(range(kept))))
    return gained


def _verified_on_device(
    sampler: Sampler, device_rows: DeviceRows, logits: torch.Tensor, sampling: list[ScheduledSequence], contexts: list[RowContext]
) -> list[Verified]:
    """The same where the logits are: every row says whether its draft token is kept and what follows if not, and one copy brings it all."""
    drawn, _ = sampler.drawn_on_device(device_rows, logits, contexts, draft_columns(sampling))
    gained, first = [], 0
    for item in sampling:
        length, kept = len(item.draft) if item.draft else 0, 0
        while kept < length and drawn.is_kept[first + kept]:
            kept += 1
        tokens = [*(item.draft.token_ids[:kept] if item.draft else ()), int(drawn.tokens[first + kept])]
        gaps = drawn.gaps[first : first + kept + 1].tolist() if sampler.record_gaps else None
        gained.append(Verified(tokens, gaps, tuple(range(kept))))
        first += length + 1
    return gained


def draft_columns(sampling: list[ScheduledSequence]) -> DraftColumns:
    """The sequences' drafts beside their rows: a sequence's last row has none."""
    tokens: list[int] = []
    sources: list[int] = []
    drawn_from: list[torch.Tensor] = []
    num_drawn = 0
    for item in sampling:
        draft = item.draft
        if draft:
            assert draft.parents is None, "the rejection rule verifies chains"
            has_source = draft.distributions is not None and not item.seq.request.params.is_greedy
            tokens += draft.token_ids
            sources += range(num_drawn, num_drawn + len(draft)) if has_source else [-1] * len(draft)
            if has_source:
                assert draft.distributions is not None
                drawn_from.append(draft.distributions[: len(draft)].float())
                num_drawn += len(draft)
        tokens.append(-1)
        sources.append(-1)
    return DraftColumns(np.asarray(tokens, np.int64), np.asarray(sources, np.int64), torch.cat(drawn_from) if drawn_from else None)


def draft_rows(sampling: list[ScheduledSequence], contexts: list[RowContext], vocab_size: int) -> DraftRows:
    """The sequences' drafts and options as arrays. contexts: of all their rows."""
    tokens: list[int] = []
    drawn_from, source, start, length = [], [], [], []
    num_drawn = 0
    for item in sampling:
        draft = item.draft
        start.append(len(tokens))
        length.append(len(draft) if draft else 0)
        source.append(-1)
        if not draft:
            continue
        assert draft.parents is None, "the rejection rule verifies chains"
        tokens += draft.token_ids
        if draft.distributions is not None and not item.seq.request.params.is_greedy:
            source[-1] = num_drawn
            num_drawn += len(draft)
            drawn_from.append(np.asarray(draft.distributions.cpu().numpy(), np.float32))
    params = [item.seq.request.params for item in sampling]
    keys = [[row_key(row.request.draw_key, row.index, row.num_tokens, stream) for row in contexts] for stream in (ACCEPTANCE, REPLACEMENTS)]
    first = np.zeros(len(sampling), np.int64)
    np.cumsum(np.asarray(length[:-1], np.int64) + 1, out=first[1:])
    return DraftRows(
        first=first,
        length=np.asarray(length, np.int64),
        tokens=np.asarray(tokens, np.int64),
        start=np.asarray(start, np.int64),
        drawn_from=np.concatenate(drawn_from) if drawn_from else np.empty((0, vocab_size), np.float32),
        source=np.asarray(source, np.int64),
        is_random=np.asarray([not p.is_greedy for p in params], np.bool_),
        temperature=np.asarray([usable_temperature(p.temperature) for p in params], np.float32),
        top_k=np.asarray([p.top_k for p in params], np.int64),
        top_p=np.asarray([p.top_p for p in params], np.float64),
        min_p=np.asarray([p.min_p for p in params], np.float64),
        acceptance=np.asarray(keys[0], np.uint64),
        replacement=np.asarray(keys[1], np.uint64),
    )
