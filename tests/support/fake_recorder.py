"""A recorder without a GPU: what is recorded is done again on the same memory, with everything the host knew at the time of recording."""

from __future__ import annotations

from collections.abc import Callable

import torch


class FakeRecorder:
    """fails_at: number of the recording that cannot be made, None for none."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.num_recorded = self.num_replayed = 0
        self._fails_at = fails_at

    def __call__(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self.num_recorded == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        result = work().clone()
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            result.copy_(work())
            return result

        return replay
