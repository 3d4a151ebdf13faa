"""When the batch is divided: only where host and device together take longer than either, and halves cost about half."""

from __future__ import annotations

import pytest

from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.halves import Halves


def decodes(count: int) -> SchedulerOutput:
    plan = SchedulerOutput()
    for i in range(count):
        seq = Sequence(Request(i, [5, 6, 7], SamplingParams()), 0, i)
        seq.num_computed = 2
        plan.scheduled.append(ScheduledSequence(seq, 1))
    return plan


def steady(sequences: int, device: tuple[float, float], host: tuple[float, float], rounds: int = 40) -> tuple[Halves, list[bool]]:
    """A device and a host that cost so much a step and so much for each sequence, and a run that follows what is said."""
    halves, said = Halves(), []
    for _ in range(rounds):
        said.append(halves.pay(sequences))
        for count in [sequences // 2, sequences - sequences // 2] if said[-1] else [sequences]:
            halves.ran(decodes(count), device[0] + device[1] * count)
            halves.prepared(decodes(count), host[0] + host[1] * count)
    return halves, said


def test_halves_pay_where_both_sides_are_bound_by_their_sequences() -> None:
    assert all(steady(64, (1e-3, 3e-4), (0.0, 2e-4))[1][1:])


@pytest.mark.parametrize(
    ("sequences", "device", "host"),
    [
        (64, (2e-2, 1e-5), (0.0, 1e-4)),  # bound by reading weights: two halves read them twice
        (64, (1e-3, 3e-4), (0.0, 1e-6)),  # the host costs nothing to speak of
        (64, (1e-3, 3e-4), (2.5e-2, 0.0)),  # the host is slower than the device, and for half as slow
        (3, (1e-3, 3e-4), (0.0, 3e-4)),
    ],
)
def test_they_are_tried_and_left_where_they_do_not(sequences: int, device: tuple, host: tuple) -> None:
    halves, said = steady(sequences, device, host)
    assert sum(said) <= 1, "half a batch was never seen before the first try"
    assert not halves.pay(sequences)


def test_only_steps_that_decode_count() -> None:
    halves = Halves()
    prompt = decodes(8)
    prompt.scheduled[3].num_tokens = 5
    for _ in range(9):
        halves.ran(prompt, 1e-6)
        halves.ran(decodes(8), None)
        halves.prepared(decodes(8), 1e-3)
    assert not halves.pay(8) and set(halves.metrics()["device_ms"]) <= {"0"}


def test_a_lasting_change_is_followed() -> None:
    """Contexts grow, and what was cheap for the device is so no more."""
    halves, said = steady(64, (2e-2, 1e-5), (0.0, 1e-4))
    for _ in range(40):
        for count in (32, 64):
            halves.ran(decodes(count), 1e-3 + 3e-4 * count)
            halves.prepared(decodes(count), 2e-4 * count)
    assert not said[-1] and halves.pay(64)
