"""The sampling kernels of `aot.py`: greedy rows, random rows, rows with cuts, and verified drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dspark.kernels.triton import sampling

VOCABULARY = 128_256
"""That of Llama 3; a row has as many logits."""


def sampling_runs(dtype: torch.dtype) -> Iterator[tuple[Callable[[], Any], str]]:
    """What to record, and its label."""

    def meta(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    name = "128k tokens"
    rows = meta(64, VOCABULARY, of=dtype)
    options = meta(64, sampling.NUM_OPTIONS, of=torch.int64)
    yield partial(sampling.edit_logits, meta(64, VOCABULARY, of=torch.float32), meta(5, 1000, of=torch.int32)), f"{name} edits"
    for filters, verify, gaps in ((False, False, False), (True, False, False), (True, True, True)):
        words = [word for word, wanted in (("cuts", filters), ("drafts", verify), ("gaps", gaps)) if wanted]
        drawn_from = meta(40, VOCABULARY, of=torch.float32) if verify else None
        yield partial(sampling.draw_rows, rows, options, filters, drawn_from, verify, gaps), " ".join([name, *words])
