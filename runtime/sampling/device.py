"""Drawing where the logits are: options go to the device in one copy, tokens come back in one, and rows of logits stay there.

The law, the noise and the order of options are those of the host's loops (`draw`, `reject`); exponentials are the device's, so a token may
be another one where two race within rounding of each other or one stands within rounding of a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.kernels.ops import Kernels
from dspark.kernels.staging import stage
from dspark.kernels.triton import sampling as kernels
from dspark.runtime.sampling.filters import usable_temperature
from dspark.runtime.sampling.penalties import changes_logits, forbidden_ids, usable_penalty
from dspark.runtime.sampling.rng import ACCEPTANCE, REPLACEMENTS, TOKENS, row_key, uniform
from dspark.runtime.sampling.rows import RowContext

Draw = Callable[[torch.Tensor], torch.Tensor]
"""logits [rows, V] on the device -> int64 [rows]: a token for each row, -1 where none has a finite logit; nothing waits for the device."""


@dataclass
class DraftColumns:
    """Draft tokens beside their rows: tokens int64 [rows], -1 where there is none; sources int64 [rows], the row of drawn_from float32
    [n, V] (on the device) that a token was drawn from, -1 for one that is certain."""

    tokens: np.ndarray
    sources: np.ndarray
    drawn_from: torch.Tensor | None


@dataclass
class DrawnRows:
    """What came back from the device: tokens int64 [rows] (-1: no finite logit), whether each draft is kept, top-two gaps float32."""

    tokens: np.ndarray
    is_kept: np.ndarray
    gaps: np.ndarray


class DeviceRows:
    """Rows of logits on the device -> tokens."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def draws_alone(self, row: RowContext) -> bool:
        """Whether a row's token can be drawn while its newest token is known to the device only: no option looks at the tokens."""
        params = row.request.params
        return params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0

    def prepare(self, rows: Sequence[RowContext], positions: Sequence[int]) -> Draw:
        """What draws these rows' tokens. Their options are read now. positions: of the tokens to draw; a row's newest one may be unknown to
        the host yet."""
        edits, options = self._edits(rows, positions), row_options(rows, positions)
        filters = has_filters(rows)
        return lambda logits: kernels.draw_rows(*_uploaded(logits, edits, options), filters)[:, kernels.TOKEN].long()

    def draw(
        self, logits: torch.Tensor, rows: Sequence[RowContext], gaps: bool = False, drafts: DraftColumns | None = None
    ) -> tuple[DrawnRows, torch.Tensor]:
        """Draw and wait for it, in one copy to the host. Also the rows [rows, V] as the requests' options left them, on the device."""
        positions = [row.num_tokens for row in rows]
        options = row_options(rows, positions, drafts)
        logits, there = _uploaded(logits, self._edits(rows, positions), options)
        drawn_from = None if drafts is None else drafts.drawn_from
        out = _to_host(kernels.draw_rows(logits, there, has_filters(rows), drawn_from, drafts is not None, gaps))
        found = DrawnRows(
            out[:, kernels.TOKEN].astype(np.int64), out[:, kernels.IS_KEPT] != 0, np.ascontiguousarray(out[:, kernels.GAP]).view(np.float32)
        )
        return found, logits

    def _edits(self, rows: Sequence[RowContext], positions: Sequence[int]) -> np.ndarray:
        """What `kernels.edit_logits` takes, int32 [5, n]."""
        parts = [
            row_edits(row, number, position, self._eos_token_ids)
            for number, (row, position) in enumerate(zip(rows, positions, strict=True))
            if changes_logits(row.request.params, position - row.prompt_len)
        ]
        return np.concatenate(parts, 1) if parts else np.empty((5, 0), np.int32)


def device_rows_for(choice: Kernels, eos_token_ids: frozenset[int]) -> DeviceRows | None:
    """What draws a run's tokens on its device, or None where the host does."""
    facts = choice.facts
    if choice.choice == "reference" or (facts.device != "cuda" and not facts.interpreted) or kernels.supports(facts) is not None:
        return None
    return DeviceRows(eos_token_ids)


def has_filters(rows: Sequence[RowContext]) -> bool:
    """Whether a row is cut by top-k or top-p."""
    return any(not p.is_greedy and (p.top_k > 0 or p.top_p < 1.0) for p in (row.request.params for row in rows))


def row_edits(row: RowContext, number: int, position: int, eos_token_ids: frozenset[int]) -> np.ndarray:
    """The options of one row that `penalties.process_row` applies, as edits int32 [5, n] of row `number`."""
    params, num_output = row.request.params, position - row.prompt_len
    none = np.empty(0, np.int64)
    seen, generated, counts = none, none, none
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(row.token_ids))
    if num_output and (params.presence_penalty or params.frequency_penalty):
        generated, counts = np.unique(np.asarray(row.token_ids[row.prompt_len :]), return_counts=True)
    biased = np.asarray([token for token, _ in params.logit_bias], np.int64)
    forbidden = np.asarray(forbidden_ids(params, num_output, eos_token_ids), np.int64)
    tokens = np.unique(np.concatenate([seen, generated, biased, forbidden]))
    factor, less, more = (np.full(tokens.shape[0], value, np.float32) for value in (1.0, 0.0, 0.0))
    factor[np.searchsorted(tokens, seen)] = usable_penalty(params.repetition_penalty)
    penalty = np.float32(params.presence_penalty) + counts.astype(np.float32) * np.float32(params.frequency_penalty)
    less[np.searchsorted(tokens, generated)] = penalty
    np.add.at(more, np.searchsorted(tokens, biased), np.asarray([bias for _, bias in params.logit_bias], np.float32))
    more[np.searchsorted(tokens, forbidden)] = -np.inf
    places = np.full(tokens.shape[0], number, np.int32), tokens.astype(np.int32)
    return np.stack([*places, *(values.view(np.int32) for values in (factor, less, more))])


def row_options(rows: Sequence[RowContext], positions: Sequence[int], drafts: DraftColumns | None = None) -> np.ndarray:
    """What `kernels.draw_rows` takes, int64 [rows, NUM_OPTIONS]."""
    out = np.zeros((len(rows), kernels.NUM_OPTIONS), np.int64)
    params = [row.request.params for row in rows]
    out[:, kernels.IS_RANDOM] = [not p.is_greedy for p in params]
    temperatures = np.asarray([1.0 if p.is_greedy else usable_temperature(p.temperature) for p in params], np.float32)
    out[:, kernels.INVERSE] = (np.float32(1.0) / temperatures).view(np.int32)
    out[:, kernels.TOP_K] = [p.top_k for p in params]
    out[:, kernels.TOP_P] = np.asarray([p.top_p for p in params], np.float64).view(np.int64)
    out[:, kernels.MIN_P] = np.asarray([p.min_p for p in params], np.float32).view(np.int32)

    def keys(stream: int) -> list[int]:
        return [
            0 if row.request.params.is_greedy else row_key(row.request.draw_key, row.index, position, stream)
            for row, position in zip(rows, positions, strict=True)
        ]

    out[:, kernels.KEY] = np.asarray(keys(TOKENS if drafts is None else REPLACEMENTS), np.uint64).view(np.int64)
    if drafts is not None:
        out[:, kernels.DRAFT], out[:, kernels.SOURCE] = drafts.tokens, drafts.sources
        out[:, kernels.CHANCE] = np.asarray([uniform(key) for key in keys(ACCEPTANCE)], np.float64).view(np.int64)
    return out


def _to_host(tensor: torch.Tensor) -> np.ndarray:
    """The one place that waits for the device."""
    return tensor.cpu().numpy()


def _uploaded(logits: torch.Tensor, edits: np.ndarray, options: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The edited logits and the options [rows, NUM_OPTIONS], after one copy to the device."""
    edits_there, options_there = stage([edits, options], str(logits.device))
    if edits.shape[1]:
        logits = logits.float()
        kernels.edit_logits(logits, edits_there)
    return logits, options_there
