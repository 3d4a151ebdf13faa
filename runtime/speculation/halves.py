"""Whether a device is kept busier by two halves of the batch in turn: one is verified while the host has the other one drafted."""

from __future__ import annotations

from typing import Any

from dspark.runtime.scheduling.plan import SchedulerOutput
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.planner import MIN_GAIN

LEAST_SEQUENCES = 4
"""Fewer are not divided."""


class Halves:
    """Learns what steps cost the device by their rows, and the host by their sequences: all that it does between two steps.

    Whole steps take turns with the host, halves work beside it; but a half costs a device that is bound by reading weights nearly as much
    as the whole. Sizes smaller than any that was seen are hoped to cost in proportion: so halves are tried, and then known.
    """

    def __init__(self) -> None:
        self._device, self._host = StepCost({0: 0.0}), StepCost({0: 0.0})
        self._rows_each = 1.0
        self.num_steps = 0

    def ran(self, plan: SchedulerOutput, device_s: float | None) -> None:
        """A step is done. device_s: see `StepOutput`."""
        if device_s is None or not plan.sampling or any(item.num_tokens > 1 for item in plan.scheduled):
            return
        self._rows_each = plan.num_tokens / len(plan.scheduled)
        self._device.observe(_size(plan.num_tokens), device_s)

    def prepared(self, plan: SchedulerOutput, host_s: float) -> None:
        """The host has committed a step and planned this one, drafts and all."""
        self._host.observe(_size(len(plan.scheduled)), host_s)

    def pay(self, num_sequences: int) -> bool:
        """Whether two steps of half the sequences are expected to be done sooner than one of all."""
        if num_sequences < LEAST_SEQUENCES or not self._device.is_known or not self._host.is_known:
            return False
        rows, half = num_sequences * self._rows_each, num_sequences / 2
        whole = self._device.estimate(round(rows)) + self._host.estimate(num_sequences)
        halves = 2 * max(self._device.estimate(round(rows / 2)), self._host.estimate(round(half)))
        return MIN_GAIN * halves < whole

    def metrics(self) -> dict[str, Any]:
        """JSON-ready. steps: planned while the other half was verified."""
        device, host = self._device.record(), self._host.record()
        return {"steps": self.num_steps, "device_ms": device, "host_ms": host}


def _size(count: int) -> int:
    """Two significant bits: few sizes, so that each is measured often."""
    low = max(count.bit_length() - 2, 0)
    return count >> low << low
