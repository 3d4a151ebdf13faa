"""Signals that ask a job to stop: SIGTERM, SIGINT and SIGHUP.

Before the first step they end the run at once; from then on they set a flag that is looked at between steps, so that the running step's
results are kept. A further signal changes nothing: the stop is under way.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from dspark.runtime.spec.errors import StoppedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Context manager. `requested` is the signal's name, or None."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.immediate = True
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs of a shell ignore some on purpose
                self._previous[number] = signal.signal(number, self._handle)
        # A file-size limit (ulimit -f) is to be the error of a write, not the end of the process.
        self._previous[signal.SIGXFSZ] = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        self.requested = signal.Signals(number).name
        if first and self.immediate:
            raise StoppedError(f"stopped by {self.requested} before the first step", "the same command continues")

    def defer(self) -> None:
        """From now on only set the flag. Raises StoppedError when a signal has come already."""
        self.immediate = False
        if self.requested is not None:
            raise StoppedError(f"stopped by {self.requested} before the first step", "the same command continues")
