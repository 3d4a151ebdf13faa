"""What a device does, in the order it was told, while the host goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in the queue."""

    def wait(self) -> float | None:
        """Block until all work before it is done. Returns the seconds from the end of the work before to the end of its own on the device,
        None where the device keeps no time."""


class DeviceQueue(Protocol):
    """Work is done in the order in which it is given, at once or later: it must not read what the host changes meanwhile."""

    def run(self, work: Callable[[], None]) -> Event:
        """Give work; the event comes to pass when it is done."""

    def beside(self) -> AbstractContextManager[Any]:
        """What is started inside runs beside the queue's work and does not wait for it. It may read what the host has seen done, and the
        host must have seen it done before the queue's work may read what it wrote."""


class CudaQueue:
    """The current stream: `work` starts kernels and copies behind those that were started before, and waits for none of them. What runs
    beside it has a stream of its own."""

    def __init__(self) -> None:
        self._beside = torch.cuda.Stream()

    def run(self, work: Callable[[], None]) -> Event:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        return _CudaEvent(began, ended)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._beside)


class _CudaEvent:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def wait(self) -> float:
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3
