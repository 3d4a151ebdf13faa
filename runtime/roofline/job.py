"""How long a whole job takes at a machine's limit: as many steps as there must be, each the mean of all.

An operation's time is the larger of straight lines in the tokens of its step, so that no way to spread tokens over a number of steps takes
less than an even one. (With experts not quite: how many are taken together bends the other way.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.ops import Group, Step, step_ops
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.speculation.cost import StepCost


@dataclass(frozen=True)
class JobTokens:
    """What a job computes. prompt_tokens: of all requests; shared_tokens: those of them that are in the KV cache already.

    output_tokens: of all answers together; longest_answer: tokens of the longest one; context_tokens: over all tokens of answers, the sum
    of how many came before (what attention reads).
    """

    num_requests: int
    num_answers: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: float
    longest_answer: float
    context_tokens: float

    @property
    def computed_tokens(self) -> float:
        """Tokens that go through the model. An answer's first token comes out of its prompt's last one."""
        return self.prompt_tokens - self.shared_tokens + self.output_tokens - self.num_answers

    def shortened(self, tokens_per_answer: float) -> JobTokens:
        """The same job with answers of so many tokens in the mean, all of one length, none longer than now."""
        output = min(max(tokens_per_answer, 1.0) * self.num_answers, self.output_tokens)
        mean = output / self.num_answers
        context = output * (self.prompt_tokens / self.num_requests + mean / 2)
        return JobTokens(
            self.num_requests, self.num_answers, self.prompt_tokens, self.shared_tokens, output, mean, min(context, self.context_tokens)
        )


@dataclass(frozen=True)
class Limits:
    """What bounds a step: sequences at once and tokens at once."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class JobEstimate:
    """num_steps: of which at least so many are needed. seconds: of all of them. parts: operation -> its share of the seconds."""

    num_steps: int
    tokens_per_step: float
    seconds: float
    parts: dict[str, float]


def num_steps(tokens: JobTokens, limits: Limits) -> int:
    """The least number of steps: each gives a sequence one token, and is full at a number of sequences and of tokens."""
    by_answers = -(-tokens.output_tokens // limits.max_num_seqs)
    by_tokens = -(-tokens.computed_tokens // limits.max_num_batched_tokens)
    return max(int(by_answers), int(by_tokens), int(tokens.longest_answer), 1)


def mean_step(tokens: JobTokens, steps: int) -> Step:
    """One of so many equal steps: some answers go on, some prompts are computed."""
    groups = []
    decoded = tokens.output_tokens - tokens.num_answers
    if decoded > 0:
        groups.append(Group(decoded / steps, 1, max(tokens.context_tokens / tokens.output_tokens, 1)))
    computed = (tokens.prompt_tokens - tokens.shared_tokens) / tokens.num_requests
    mean = tokens.prompt_tokens / tokens.num_requests
    groups.append(Group(tokens.num_requests / steps, max(computed, 1), max(mean, computed, 1), tokens.num_answers / tokens.num_requests))
    return Step(tuple(groups))


def at_the_limit(shape: ModelShape, device: Device, tokens: JobTokens, limits: Limits) -> JobEstimate:
    """The least time of a job without drafts. Raises ValueError for a device without a rate for the model's arithmetic."""
    steps = num_steps(tokens, limits)
    times: defaultdict[str, float] = defaultdict(float)
    for op in step_ops(shape, mean_step(tokens, steps)):
        times[op.name] += device.seconds(op)
    total = sum(times.values())
    return JobEstimate(steps, tokens.computed_tokens / steps, steps * total, {name: part / total for name, part in times.items()})


def from_step_times(cost: StepCost, tokens: JobTokens, limits: Limits) -> JobEstimate | None:
    """The time of a job from what steps were measured to take, None where its steps are larger than measurements reach."""
    steps = num_steps(tokens, limits)
    per_step = tokens.computed_tokens / steps
    if per_step > cost.reach(0):
        return None
    return JobEstimate(steps, per_step, steps * cost.estimate(max(round(per_step), 1)), {})
