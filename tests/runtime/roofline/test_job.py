"""A job at the limit: its least number of steps, the mean step, and that no other way to spread its tokens takes less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.job import JobTokens, Limits, at_the_limit, from_step_times, mean_step, num_steps
from dspark.runtime.roofline.ops import Group, Step, step_ops
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.cost import StepCost

MODEL = ModelShape(ModelConfig("llama", 1000, 64, 160, 2, 4, 2, 16, 1e-6, 4096))
DEVICE = Device("a device", 1e9, {"float32": 2e9, "bfloat16": 8e9})
JOB = JobTokens(10, 10, 1000, 200, 500, 60, 500 * 125)
"""Ten prompts of 100 tokens, 20 of each known; answers of 50 in the mean and 60 at most."""


@pytest.mark.parametrize(
    ("limits", "job", "steps"),
    [
        (Limits(4, 512), JOB, 125),
        (Limits(64, 512), JOB, 60),
        (Limits(64, 16), JOB, 81),
        (Limits(64, 512), replace(JOB, output_tokens=10, longest_answer=1), 2),
    ],
    ids=["sequences", "the longest answer", "tokens", "no decoding"],
)
def test_steps_that_there_must_be(limits: Limits, job: JobTokens, steps: int) -> None:
    """500 tokens of answers at 4 a step; 800 of prompts and 490 of answers at 16 a step."""
    assert num_steps(job, limits) == steps


def test_the_mean_step_has_its_share_of_everything() -> None:
    step = mean_step(JOB, 100)
    assert step == Step((Group(4.9, 1, 125), Group(0.1, 80, 100, 1)))
    assert step.num_tokens == pytest.approx(JOB.computed_tokens / 100) and step.num_rows == pytest.approx(5)
    assert mean_step(replace(JOB, output_tokens=10), 100).groups == (Group(0.1, 80, 100, 1),)


def test_several_answers_of_a_prompt_share_its_computation() -> None:
    step = mean_step(replace(JOB, num_answers=30), 100)
    assert step.num_tokens == pytest.approx((800 + 470) / 100) and step.num_rows == pytest.approx(5)


def test_the_estimate_is_steps_times_the_mean_step() -> None:
    found = at_the_limit(MODEL, DEVICE, JOB, Limits(4, 512))
    assert found.seconds == pytest.approx(125 * DEVICE.total_seconds(step_ops(MODEL, mean_step(JOB, 125))))
    assert (found.num_steps, found.tokens_per_step) == (125, pytest.approx(1290 / 125))
    assert sum(found.parts.values()) == pytest.approx(1)
    assert found.parts["head"] > found.parts["attention"]  # a vocabulary of 1000 beside 64 dimensions


def test_shorter_answers_are_never_longer_than_allowed() -> None:
    short = JOB.shortened(20)
    assert (short.output_tokens, short.longest_answer, short.context_tokens) == (200, 20, 200 * 110)
    assert JOB.shortened(1000).output_tokens == 500 and JOB.shortened(0.2).output_tokens == 10


def test_measured_step_times_stand_in_for_the_data_sheet_as_far_as_they_reach() -> None:
    """10.3 tokens a step, at 1 ms a token; measurements up to 64 tokens reach as far as 1.6 times that."""
    cost = StepCost({4: 0.004, 64: 0.064})
    found = from_step_times(cost, JOB, Limits(4, 512))
    assert found is not None and (found.num_steps, found.seconds) == (125, pytest.approx(125 * 0.010))
    assert from_step_times(cost, JOB.shortened(1), Limits(4, 512)) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=12), st.integers(1, 400))
def test_no_other_way_to_spread_tokens_over_as_many_steps_takes_less(sizes: list[int], context: int) -> None:
    """What makes it a bound: the time of a step is convex in its tokens."""
    if sum(sizes) == 0:
        return
    uneven = sum(DEVICE.total_seconds(step_ops(MODEL, Step((Group(size, 1, context),)))) for size in sizes)
    mean = Step((Group(sum(sizes) / len(sizes), 1, context),))
    assert len(sizes) * DEVICE.total_seconds(step_ops(MODEL, mean)) <= uneven * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 200))
def test_more_to_generate_never_takes_less(limit: int, few: int, more: int) -> None:
    limits = Limits(limit, 512)
    times = [at_the_limit(MODEL, DEVICE, JOB.shortened(length), limits).seconds for length in (few, few + more)]
    assert times[0] <= times[1] * (1 + 1e-9)
