"""What a device does, in the order it was told, while the host goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Block until all work before it is done."""


class DeviceQueue(Protocol):
    """Work is done in the order in which it is given, at once or later: it must not read what the host changes meanwhile."""

    def run(self, work: Callable[[], None]) -> Event:
        """Give work; the event comes to pass when it is done."""


class CudaQueue:
    """The current stream: `work` starts kernels and copies behind those that were started before, and waits for none of them."""

    def run(self, work: Callable[[], None]) -> Event:
        work()
        event = torch.cuda.Event()
        event.record()
        return _CudaEvent(event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
