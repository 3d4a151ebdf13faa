"""How much is verified: estimates, costs, the choice, and that the random rule never looks ahead."""

import itertools
import random

import pytest

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.acceptance import Acceptance
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.draft import ROOT, Draft, Verified
from dspark.runtime.speculation.planner import MIN_GAIN, admit_most_likely, best_counts, candidates, schedule_early_stop
from dspark.runtime.speculation.speculator import Speculator, chances


def chain(length: int, source: str = "a") -> Draft:
    return Draft(tuple(range(length)), (0.5,) * length, source)


def accepted(count: int) -> Verified:
    return Verified(list(range(count + 1)), None, tuple(range(count)))


def best_by_trying(survivals, num_planned, seconds) -> float:
    plain = len(survivals) / seconds(num_planned)
    best = plain
    for counts in itertools.product(*(range(len(row) + 1) for row in survivals)):
        expected = len(survivals) + sum(sum(row[:count]) for row, count in zip(survivals, counts))
        best = max(best, expected / seconds(num_planned + sum(counts)))
    return best


def test_the_choice_is_the_best_of_all() -> None:
    """Against every combination, on random survivals and costs that rise in steps, where stopping early would be stuck."""
    dice = random.Random(0)
    for _ in range(200):
        survivals = []
        for _ in range(dice.randint(1, 3)):
            row, value = [], 1.0
            for _ in range(dice.randint(1, 3)):
                value *= dice.random()
                row.append(value)
            survivals.append(row)
        levels = sorted(dice.random() for _ in range(40))
        seconds = lambda tokens, levels=levels: 0.2 + levels[tokens // 3]  # noqa: E731
        counts = best_counts(survivals, len(survivals), seconds)
        expected = len(survivals) + sum(sum(row[:count]) for row, count in zip(survivals, counts))
        rate, best = expected / seconds(len(survivals) + sum(counts)), best_by_trying(survivals, len(survivals), seconds)
        assert rate == pytest.approx(best) or (not any(counts) and best < MIN_GAIN * rate)


def test_nothing_is_verified_where_every_token_costs_its_full_price() -> None:
    assert best_counts([[0.9, 0.8], [0.99]], 2, lambda tokens: float(tokens)) == [0, 0]
    assert best_counts([[0.9, 0.8], [0.99]], 2, lambda tokens: 1.0) == [2, 1]


def simulate(schedule, rounds: int = 40_000) -> float:
    """The paper's counterexample (appendix A): P(first token = A) under a schedule, whose truth is 0.7."""
    dice, count_a = random.Random(5), 0
    cost = {1: 1.0, 2: 0.5, 3: 0.45}
    for _ in range(rounds):
        first = "A" if dice.random() < 0.5 else "B"  # q = (0.5, 0.5)
        survivals = [[0.8, 0.8 * (0.9 if first == "A" else 0.0)]]
        length = schedule(survivals, 1, lambda tokens: 1.0 / cost[tokens])[0]
        p = {"A": 0.7, "B": 0.3}
        if length >= 1:
            kept = dice.random() < min(1.0, p[first] / 0.5)
            token = first if kept else "A"  # the residual of (0.7, 0.3) over (0.5, 0.5) is A alone
        else:
            token = "A" if dice.random() < 0.7 else "B"
        count_a += token == "A"
    return count_a / rounds


def test_the_papers_counterexample() -> None:
    """Stopping early keeps the law; a global search over the present confidences looks at the token it decides on."""
    assert simulate(schedule_early_stop) == pytest.approx(0.70, abs=0.01)
    assert simulate(best_counts) == pytest.approx(0.85, abs=0.01), "the counterexample no longer shows what it is for"
    assert simulate(lambda survivals, planned, seconds: admit_most_likely(survivals, 1)) == pytest.approx(0.70, abs=0.01)


def test_ties_keep_earlier_tokens_first() -> None:
    order = [(sequence, node) for _, sequence, node in candidates([[0.5, 0.5, 0.0], [0.5]])]
    assert order == [(0, 0), (1, 0), (0, 1)]


def test_step_costs_are_interpolated_and_never_fall() -> None:
    """A large step that is cheap shows that a smaller one was disturbed."""
    cost = StepCost({1: 1.0, 8: 2.0})
    assert cost.estimate(1) == 1.0 and cost.estimate(8) == 2.0
    assert cost.estimate(4) == pytest.approx(1.0 + 3 / 7)
    assert cost.estimate(15) == pytest.approx(3.0)
    cost.observe(16, 1.5)
    assert cost.estimate(8) == cost.estimate(16) == 1.5
    assert not StepCost({4: 1.0}).is_known


def test_disturbed_steps_do_not_count() -> None:
    cost = StepCost({1: 1.0, 8: 2.0})
    for seconds in (9.0, 1.1, 30.0, 1.2):
        cost.observe(1, seconds)
    assert cost.estimate(1) == 1.1
    for _ in range(9):
        cost.observe(1, 1.5)
    assert cost.estimate(1) == 1.5, "the machine has become slower"


def test_acceptance_follows_what_happened_by_depth_and_source() -> None:
    acceptance = Acceptance()
    before = acceptance.survival("a", 3)
    assert before == [0.6, 0.6, 0.6]
    for _ in range(500):
        acceptance.learn(chain(4), accepted(2))
        acceptance.learn(chain(4, "b"), accepted(0))
    rates = acceptance.survival("a", 4)
    assert rates[0] > 0.95 and rates[1] > 0.95 and rates[2] < 0.05
    assert acceptance.survival("b", 1)[0] < 0.05
    assert acceptance.record()["a"]["by_position"] == [1.0, 1.0, 0.0]


def test_survival_of_a_tree_is_along_its_paths() -> None:
    tree = Draft((1, 2, 3, 4), (0.5, 0.8, 0.5, 0.5), "a", (ROOT, 0, 0, 2))
    assert chances(tree) == [0.5, 0.4, 0.25, 0.125]
    assert tree.path(3) == [0, 2, 3] and tree.depth(3) == 3 and tree.longest() == 3
    assert chances(chain(3)) == [0.5, 0.25, 0.125]
    assert tree.cut(3).parents == (ROOT, 0, 0) and len(tree.cut(9)) == 4
    assert tree.cut(2).parents is None, "what is left is a chain, which needs no mask"
    assert tree.masks() == [0b1, 0b11, 0b101, 0b1101] and chain(2).masks() == [0b1, 0b11]


def test_sequences_without_a_draft_count_too() -> None:
    """One draft among many sequences: what it gains is small beside what all of them pay for a longer step."""
    seconds = StepCost({32: 1.0, 33: 1.03}).estimate
    assert best_counts([[0.6]], 1, lambda tokens: seconds(tokens + 31)) == [1]
    assert best_counts([[0.6]], 32, seconds, num_rows=32) == [0]


def test_no_step_is_made_much_longer_than_any_that_was_measured() -> None:
    cost = StepCost({1: 1.0, 4: 1.0})
    assert cost.reach(1) == 7 and cost.reach(40) == 41
    assert best_counts([[0.99] * 15], 1, cost.estimate, most_tokens=cost.reach(1)) == [6]


@pytest.mark.parametrize(("distributions", "verified"), [(None, 3), ("q", 0)])
def test_drafts_with_distributions_are_cut_by_stopping_early(distributions: object, verified: int) -> None:
    """A second token pays only with the third and fourth: a search over all of them looks at what comes of the first."""

    class OneDraft:
        name, max_tokens = "a", 3

        def propose(self, sequences: list, rooms: list[int]) -> list[Draft]:
            return [Draft((1, 2, 3), (0.5, 0.9, 0.9), "a", None, [distributions] * 3 if distributions else None)]

    speculator = Speculator([OneDraft()], cost=StepCost({1: 1.0, 2: 1.6, 3: 1.62, 4: 1.64}))
    seq = Sequence(Request(0, [1], SamplingParams()), 0, 0)
    drafts = [speculator.propose([seq], [3], 1, 1)[0] for _ in range(3)][1:]
    assert [len(draft) if draft else 0 for draft in drafts] == [verified] * 2
