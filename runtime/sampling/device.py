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

    def ahead(self, rows: Sequence[RowContext], widths: Sequence[int], keep_spreads: bool) -> DrawsAhead:
        """Draws at several positions, one after the other; all rows must draw alone. See DrawsAhead."""
        assert all(self.draws_alone(row) for row in rows), "an option looks at tokens that the host does not know"
        places = [(rows[:width], [row.num_tokens + depth for row in rows[:width]]) for depth, width in enumerate(widths)]
        return DrawsAhead(rows, widths, keep_spreads, [row_options(*place) for place in places], [self._edits(*place) for place in places])

    def _edits(self, rows: Sequence[RowContext], positions: Sequence[int]) -> np.ndarray:
        """What `kernels.edit_logits` takes, int32 [5, n]."""
        parts = [
            row_edits(row, number, position, self._eos_token_ids)
            for number, (row, position) in enumerate(zip(rows, positions, strict=True))
            if changes_logits(row.request.params, position - row.prompt_len)
        ]
        return np.concatenate(parts, 1) if parts else np.empty((5, 0), np.int32)


class DrawsAhead:
    """Draws at the positions from each row's next one on, of which the host sees none before all are drawn.

    widths: rows that take part at each position, the first ones. keep_spreads: keep the probabilities that tokens are drawn from. options,
    edits: for each position what `kernels.draw_rows` and `kernels.edit_logits` take. arrays: what goes to the device beforehand, with other
    things; `place` is given it there.
    """

    def __init__(
        self, rows: Sequence[RowContext], widths: Sequence[int], keep_spreads: bool, options: list[np.ndarray], edits: list[np.ndarray]
    ) -> None:
        params = [row.request.params for row in rows]
        self.widths = list(widths)
        self._filters = has_filters(rows)
        self._is_tempered = any(not p.is_greedy and p.temperature != 1.0 for p in params)
        temperatures = [1.0 if p.is_greedy else usable_temperature(p.temperature) for p in params]
        cuts = [[p.is_greedy for p in params], [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        dtypes = np.bool_, np.int64, np.float64, np.float32
        columns = [np.asarray(temperatures, np.float32), *map(np.asarray, cuts, dtypes)]
        self.arrays = [*options, *edits, *(column[:, None] for column in columns)]
        self.spreads: torch.Tensor | None = None
        self._keep, self._num_rows = keep_spreads, len(rows)
        self._there: list[torch.Tensor] = []
        self._drawn: list[torch.Tensor] = []

    def place(self, there: Sequence[torch.Tensor]) -> None:
        """Take `arrays`, on the device."""
        self._there = list(there)

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [width, V] of the next position -> a token for each row int64 [width], one that exists where none can be drawn; and the
        rows float32 [width, V] as the requests' options left them. spreads float32 [rows, positions, V] get the rows' probabilities."""
        depth, count = len(self._drawn), len(self.widths)
        width, options, edits = self.widths[depth], self._there[depth], self._there[count + depth]
        logits = logits.float()
        if edits.shape[1]:
            kernels.edit_logits(logits, edits)
        tokens = kernels.draw_rows(logits, options, self._filters)[:, kernels.TOKEN]
        self._drawn.append(tokens)
        tokens = tokens.clamp(min=0).long()
        if self._keep:
            if self.spreads is None:
                self.spreads = logits.new_empty(self._num_rows, count, logits.shape[1])
            self.spreads[:width, depth] = self._spread(logits, tokens)
        return tokens, logits

    def _spread(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        width = logits.shape[0]
        temperature, is_greedy, top_k, top_p, min_p = (column[:width] for column in self._there[2 * len(self.widths) :])
        drawn = spread_rows(logits, temperature, top_k, top_p, min_p, self._filters)
        return torch.where(is_greedy, torch.zeros_like(drawn).scatter_(1, tokens[:, None], 1.0), drawn)

    def sureness(self, rows: torch.Tensor) -> torch.Tensor:
        """`sureness` of rows [width, V] at the requests' temperatures."""
        return sureness(rows, self._there[2 * len(self.widths)][: rows.shape[0]] if self._is_tempered else None)

    def fetch(self, others: Sequence[torch.Tensor]) -> tuple[list[list[int]], list[list[float]]]:
        """Wait for the draws, in one copy to the host: the tokens of each position, -1 where none could be drawn, and other float32 [width]
        of each position (others: of all positions, or none)."""
        found = _to_host(torch.cat([*self._drawn, *(other.float().view(torch.int32) for other in others)]))
        ends = np.cumsum(self.widths)[:-1]
        tokens, rest = found[: sum(self.widths)], found[sum(self.widths) :].view(np.float32)
        values = [part.tolist() for part in np.split(rest, ends)] if others else []
        return [part.tolist() for part in np.split(tokens, ends)], values


def sureness(rows: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Probability of the best token of each row float32 [n, V] -> float32 [n]. temperatures float32 [n, 1], None where all are 1."""
    rows = rows if temperatures is None else rows / temperatures
    return (rows.amax(-1) - rows.logsumexp(-1)).exp()


def spread_rows(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, has_cuts: bool = True
) -> torch.Tensor:
    """`filters.probabilities` of rows float32 [n, V] side by side, without waiting for them. Options [n, 1]: float32, int64, float64 and
    float32. has_cuts: whether any row has top-k or top-p."""
    probs = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    keep = probs >= min_p * probs.amax(-1, keepdim=True)
    if has_cuts:
        ranked, order = torch.sort(probs, descending=True, stable=True)
        stays = torch.arange(probs.shape[1], device=probs.device) < top_k.masked_fill(top_k <= 0, probs.shape[1])
        ranked = torch.where(stays, ranked, torch.zeros_like(ranked))
        mass_before = ranked.cumsum(-1, dtype=torch.float64) - ranked
        stays &= (mass_before < top_p * ranked.sum(-1, keepdim=True, dtype=torch.float64)) | (top_p >= 1.0)
        keep &= torch.zeros_like(keep).scatter_(1, order, stays)
    kept = probs * keep
    return kept / kept.sum(-1, keepdim=True)


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
