"""The sampling kernels' work by the host's compiled loops: `DeviceRows` without Triton, which draws the very tokens that the host draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.kernels.triton import sampling as kernels
from dspark.runtime.sampling import device
from dspark.runtime.sampling.draw import argmax_rows, draw_rows
from dspark.runtime.sampling.sampler import DrawOptions


def edited(logits: torch.Tensor, edits: torch.Tensor) -> None:
    """`kernels.edit_logits`."""
    rows, tokens = edits[0].long(), edits[1].long()
    assert int(rows.max()) < logits.shape[0], "an edit of a row that is not there"
    factor, less, more = edits[2:].view(torch.float32)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / factor, values * factor) - less + more
    logits[rows, tokens] = torch.where(more == -torch.inf, more, values)


def drawn(logits: torch.Tensor, options: torch.Tensor, filters: bool) -> torch.Tensor:
    """`kernels.draw_rows` of rows without drafts."""
    assert options.shape == (logits.shape[0], kernels.NUM_OPTIONS) and options.is_contiguous()
    wide, table = logits.float().numpy(), options.numpy()
    tokens = argmax_rows(wide)
    rows = np.nonzero((table[:, kernels.IS_RANDOM] != 0) & (tokens >= 0))[0]
    if rows.size:
        own = table[rows]
        assert filters or not ((own[:, kernels.TOP_K] > 0) | (own[:, kernels.TOP_P].copy().view(np.float64) < 1.0)).any()
        inverse = own[:, kernels.INVERSE].astype(np.int32).view(np.float32)
        tokens[rows] = draw_rows(
            wide,
            tokens,
            DrawOptions(
                rows=rows,
                temperature=np.float32(1.0) / inverse,
                top_k=own[:, kernels.TOP_K].copy(),
                top_p=own[:, kernels.TOP_P].copy().view(np.float64),
                min_p=own[:, kernels.MIN_P].astype(np.int32).view(np.float32).astype(np.float64),
                keys=own[:, kernels.KEY].copy().view(np.uint64),
            ),
        )
    out = torch.zeros(logits.shape[0], 3, dtype=torch.int32)
    out[:, kernels.TOKEN] = torch.from_numpy(tokens)
    return out


def draw_by_the_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the host's loops do the kernels' work. Returns a list that gets the size of each copy to the host."""
    fetched: list[int] = []
    to_host = device._to_host

    def counted(tensor: torch.Tensor) -> np.ndarray:
        fetched.append(tensor.numel())
        return to_host(tensor)

    monkeypatch.setattr(kernels, "edit_logits", edited)
    monkeypatch.setattr(kernels, "draw_rows", lambda logits, options, filters, *rest: drawn(logits, options, filters))
    monkeypatch.setattr(device, "_to_host", counted)
    return fetched
