"""Random runs of the scheduler over an executor that checks every read: every request ends, with the answer it gets alone."""

from __future__ import annotations

from fake_executor import FakeRun, FakeSpeculator
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

PREFIXES = ([0, 1, 2, 3, 4, 5, 0, 2] * 3, [0, 1, 2, 3, 4, 5, 0, 2, 1, 1, 1, 1], [5] * 16)
UNSHRUNK = (Phase.explicit, Phase.generate)  # a failing run shrinks for minutes: remove this to see the smallest one
EXAMPLES = settings(max_examples=150, stateful_step_count=25, derandomize=True, deadline=None, phases=UNSHRUNK)

shapes = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 7, 9, 16, 64]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "recompute_at": st.sampled_from([None, None, 20]),
        "speculator": st.sampled_from([None, 1, 3, 6]).map(lambda depth: depth and FakeSpeculator(depth)),
    }
)
requests = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(PREFIXES),
        "cut": st.integers(1, 24),
        "tail": st.lists(st.integers(0, 2), max_size=3),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "draw_key": st.integers(0, 2),
        "salt": st.sampled_from([0, 0, 0, 1]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
    }
)


def make_request(request_id: int, spec: dict) -> Request:
    params = SamplingParams(max_tokens=spec["max_tokens"], ignore_eos=spec["ignore_eos"], n=spec["n"])
    return Request(request_id, spec["prefix"][: spec["cut"]] + spec["tail"], params, spec["draw_key"], spec["priority"])


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive at any time into pools that hold from one request to all of them."""

    @initialize(shape=shapes, num_tokens=st.sampled_from([40, 44, 64, 96, 400]))
    def start(self, shape: dict, num_tokens: int) -> None:
        self.run_ = FakeRun(num_blocks=-(-num_tokens // shape["block_size"]), **shape)
        self.num_requests = 0

    @rule(specs=st.lists(requests, min_size=1, max_size=4))
    def arrive(self, specs: list[dict]) -> None:
        for spec in specs:
            request = make_request(self.num_requests, spec)
            if self.run_.fits(request):
                self.run_.add(request, spec["salt"])
                self.num_requests += 1

    @precondition(lambda self: self.run_.scheduler.num_unfinished)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.run_.scheduler.num_unfinished:
                self.run_.step()

    def teardown(self) -> None:
        if hasattr(self, "run_"):
            total = sum(seq.prompt_len + seq.request.params.max_tokens for seq in self.run_.sequences)
            self.run_.finish(max_steps=total + 1)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = EXAMPLES


@given(shape=shapes, specs=st.lists(requests, min_size=1, max_size=10))
@settings(max_examples=250, derandomize=True, deadline=None, phases=UNSHRUNK)
def test_a_pool_for_the_largest_request_alone_serves_all_of_them(shape: dict, specs: list[dict]) -> None:
    """Preemption must not become a loop when two sequences can never run side by side. The first in rank gains a token in each step, so
    the steps are bounded by the tokens."""
    all_requests = [make_request(i, {**spec, "priority": 0}) for i, spec in enumerate(specs)]
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in all_requests)
    run = FakeRun(num_blocks=-(-longest // shape["block_size"]), **shape)
    for request, spec in zip(all_requests, specs):
        run.add(request, spec["salt"])
    run.finish(max_steps=sum(seq.prompt_len + seq.request.params.max_tokens for seq in run.sequences))
