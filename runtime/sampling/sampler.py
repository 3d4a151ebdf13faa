"""Logits -> tokens. One row per draw; a row's token depends on its own logits, options, history and key alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.kernels.cpu.views import KINDS, as_array
from dspark.runtime.sampling.device import DeviceRows, DraftColumns, DrawnRows
from dspark.runtime.sampling.draw import argmax_rows, draw_rows, top2_gaps
from dspark.runtime.sampling.filters import usable_temperature
from dspark.runtime.sampling.penalties import changes_logits, process_row
from dspark.runtime.sampling.rng import row_key
from dspark.runtime.sampling.rows import RowContext as RowContext
from dspark.runtime.spec.errors import MachineError


@dataclass
class DrawOptions:
    """Options of the rows that are drawn at random, as arrays over these rows: row numbers, filters and 64-bit keys."""

    rows: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    keys: np.ndarray


class Sampler:
    """Greedy choice and random draws over the processed distribution.

    The draw is an exponential race: the token with the smallest E / p, which is the largest log p + Gumbel noise.
    device_rows: where rows are drawn instead of on the host, if anywhere.
    """

    def __init__(self, eos_token_ids: frozenset[int], record_gaps: bool = False, device_rows: DeviceRows | None = None) -> None:
        self.eos_token_ids = eos_token_ids
        self.record_gaps = record_gaps
        self.device_rows = device_rows

    def sample(self, logits: torch.Tensor, sequences: Sequence[RowContext]) -> tuple[list[int], list[float] | None]:
        """logits [rows, V] (any float type, changed in place), row i for sequences[i] -> a token per row, and top-two gaps if recorded.

        Raises MachineError for a row with a NaN or without a finite best logit: any token for it would be an invented one.
        """
        if self.device_rows is not None:
            drawn, _ = self.drawn_on_device(self.device_rows, logits, sequences)
            return drawn.tokens.tolist(), drawn.gaps.tolist() if self.record_gaps else None
        if not self.record_gaps and all(takes_the_best(seq) for seq in sequences):
            stored = logits if logits.dtype in KINDS else logits.float()
            return _checked(argmax_rows(as_array(stored.cpu())), sequences).tolist(), None
        wide, tokens, gaps = self.rows(logits, sequences)
        return self._drawn(wide, tokens, sequences), gaps

    def rows(self, logits: torch.Tensor, sequences: Sequence[RowContext]) -> tuple[np.ndarray, np.ndarray, list[float] | None]:
        """Rows float32 [rows, V] on the host as the requests' options leave them, the best token of each, and top-two gaps if recorded.

        Raises as `sample` does.
        """
        wide, tokens = self._best(logits, sequences)
        _checked(tokens, sequences)
        return wide, tokens, top2_gaps(wide, tokens).tolist() if self.record_gaps else None

    def sample_drafts(self, logits: torch.Tensor, sequences: Sequence[RowContext]) -> tuple[list[int], torch.Tensor]:
        """The same draw for rows that a draft model made: -1 instead of an error where none of its tokens is possible, and the rows
        float32 [rows, V] as the request's options left them, where they were drawn."""
        if self.device_rows is not None:
            drawn, rows = self.device_rows.draw(logits, sequences)
            return drawn.tokens.tolist(), rows.float()
        wide, tokens = self._best(logits, sequences)
        return self._drawn(wide, tokens, sequences), torch.from_numpy(wide)

    def drawn_on_device(
        self, device_rows: DeviceRows, logits: torch.Tensor, sequences: Sequence[RowContext], drafts: DraftColumns | None = None
    ) -> tuple[DrawnRows, torch.Tensor]:
        """`DeviceRows.draw`. Raises as `sample` does."""
        drawn, rows = device_rows.draw(logits, sequences, self.record_gaps, drafts)
        _checked(drawn.tokens, sequences)
        return drawn, rows

    def _best(self, logits: torch.Tensor, sequences: Sequence[RowContext]) -> tuple[np.ndarray, np.ndarray]:
        """Rows on the host with the requests' options applied, and the best token of each, -1 where there is none."""
        wide = logits.float().cpu().numpy()
        for row, seq in enumerate(sequences):
            params = seq.request.params
            if changes_logits(params, seq.num_output_tokens):
                process_row(wide[row], params, seq.token_ids, seq.prompt_len, self.eos_token_ids)
        return wide, argmax_rows(wide)

    def _drawn(self, wide: np.ndarray, best: np.ndarray, sequences: Sequence[RowContext]) -> list[int]:
        """The best tokens, drawn ones in their place where a row is drawn at random."""
        random_rows = [row for row, seq in enumerate(sequences) if best[row] >= 0 and not seq.request.params.is_greedy]
        if random_rows:
            options = draw_options(random_rows, sequences)
            best[options.rows] = draw_rows(wide, best, options)
        return best.tolist()


def takes_the_best(seq: RowContext) -> bool:
    """Whether a row's token is that of its largest logit as the model gives them: then they need not be widened to float32."""
    params = seq.request.params
    return params.is_greedy and not changes_logits(params, seq.num_output_tokens)


def _checked(tokens: np.ndarray, sequences: Sequence[RowContext]) -> np.ndarray:
    """The best tokens. Raises MachineError where there is none."""
    if (tokens < 0).any():
        seq = sequences[int(np.argmax(tokens < 0))]
        raise no_finite_logits(seq, seq.num_tokens)
    return tokens


def draw_options(rows: list[int], sequences: Sequence[RowContext]) -> DrawOptions:
    """Gather the options of the random rows."""
    params = [sequences[row].request.params for row in rows]
    keys = [row_key(sequences[row].request.draw_key, sequences[row].index, sequences[row].num_tokens) for row in rows]
    return DrawOptions(
        rows=np.asarray(rows, np.int64),
        temperature=np.asarray([usable_temperature(p.temperature) for p in params], np.float32),
        top_k=np.asarray([p.top_k for p in params], np.int64),
        top_p=np.asarray([p.top_p for p in params], np.float64),
        min_p=np.asarray([p.min_p for p in params], np.float64),
        keys=np.asarray(keys, np.uint64),
    )


def no_finite_logits(seq: RowContext, position: int) -> MachineError:
    """What to raise when no token can be drawn for a position."""
    return MachineError(
        f"the model gave no finite logits for request {seq.request.request_id} at token {position} (answer {seq.index}): "
        "its arithmetic overflowed or its weights are damaged",
        "convert the checkpoint again with a wider --dtype, then run the same command",
    )
