"""Draft trees: their order, the best nodes of a draft model's candidates, continuations of a text merged into one tree."""

import itertools
import math
import random

import pytest

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import ROOT, Draft, Verified
from dspark.runtime.speculation.ngram_tree import LEAST_CHANCE, BranchRates, NgramTreeProposer
from dspark.runtime.speculation.speculator import chances
from dspark.runtime.speculation.trees import TopTokens, Tree, expand_tree, frontier, grow_tree


def as_draft(tree: Tree) -> Draft:
    return Draft(tree.token_ids, tree.survival, "a", tree.parents)


def assert_in_order(draft: Draft) -> None:
    """What the planner relies on: survival never rises along the list, a node comes after its parent, siblings differ."""
    found = chances(draft)
    assert found == sorted(found, reverse=True)
    assert all(draft.parent(node) < node for node in range(len(draft)))
    places = [(draft.parent(node), draft.token_ids[node]) for node in range(len(draft))]
    assert len(set(places)) == len(places)


def test_the_likeliest_nodes_of_all_are_taken() -> None:
    """Against every node of a full tree of three levels, sorted by the probability of its path."""
    dice = random.Random(3)
    for _ in range(50):
        rates = {}
        for depth in range(1, 4):
            for path in itertools.product(range(3), repeat=depth):
                rates[path] = dice.random()

        def children(path, rates=rates):
            return [(token, rates[(*path, token)], (*path, token)) for token in range(3)] if len(path) < 3 else []

        tree = grow_tree(children, (), 9)
        whole = sorted((math.prod(rates[path[:n]] for n in range(1, len(path) + 1)) for path in rates), reverse=True)
        assert_in_order(as_draft(tree))
        assert chances(as_draft(tree)) == pytest.approx(whole[:9])
        assert [tuple(tree.token_ids[n] for n in as_draft(tree).path(node)) for node in range(9)] == list(tree.states)


def test_unlikely_nodes_are_left_out_and_one_path_is_a_chain() -> None:
    tree = grow_tree(lambda depth: [(depth, 0.5, depth + 1)], 0, 40, 0.05)
    assert tree.token_ids == (0, 1, 2, 3) and tree.parents is None
    assert grow_tree(lambda state: [], 0, 4).token_ids == ()


def test_a_draft_models_candidates_by_hand() -> None:
    """Step 0 gives a (0.6) and b (0.3); both are run. Below a: c 0.5, d 0.4. Below b: e 0.9, f 0.05. Paths: a 0.6, b 0.3, c 0.3, e 0.27,
    d 0.24. With a width of 2 the next step runs c and e; below c: g 0.9 (0.27)."""
    log = math.log
    first = TopTokens([[10, 11]], [[log(0.6), log(0.3)]])
    assert frontier([first], 2) == [(0, 0), (0, 1)]
    second = TopTokens([[12, 13], [14, 15]], [[log(0.5), log(0.4)], [log(0.9), log(0.05)]])
    assert frontier([first, second], 2) == [(0, 0), (1, 0)]
    third = TopTokens([[16, 17], [18, 19]], [[log(0.9), log(0.1)], [log(0.1), -math.inf]])
    tree = expand_tree([first, second, third], 2, 6)
    draft = as_draft(tree)
    assert_in_order(draft)
    assert set(tree.token_ids) == {10, 11, 12, 13, 14, 16}
    assert {tree.token_ids[n]: [tree.token_ids[m] for m in draft.path(n)] for n in range(6)} == {
        10: [10],
        11: [11],
        12: [10, 12],
        13: [10, 13],
        14: [11, 14],
        16: [10, 12, 16],
    }
    assert expand_tree([first, second, third], 2, 1).parents is None
    assert len(expand_tree([first, second, third], 2, 99).token_ids) == 2 + 4 + 3


def test_expansion_keeps_the_best_of_what_was_looked_at() -> None:
    """Random candidates: the nodes kept are the likeliest of all rows, and their order suits the planner."""
    dice = random.Random(8)
    for _ in range(60):
        width, top = dice.randint(1, 4), dice.randint(1, 4)
        steps: list[TopTokens] = []
        rows, before = 1, [1.0]
        every: list[float] = []
        for _ in range(dice.randint(1, 4)):
            probs = [[dice.random() / top for _ in range(top)] for _ in range(rows)]
            steps.append(TopTokens([list(range(top))] * rows, [[math.log(p) for p in row] for row in probs]))
            every += [before[row] * p for row in range(rows) for p in probs[row]]
            chosen = frontier(steps, width)
            before = [before[row] * probs[row][column] for row, column in chosen]
            rows = len(chosen)
        total = dice.randint(1, len(every) + 2)
        tree = expand_tree(steps, width, total)
        assert_in_order(as_draft(tree))
        assert chances(as_draft(tree)) == pytest.approx(sorted(every, reverse=True)[:total])


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request(0, tokens, SamplingParams()), 0, 0)


FORK = [1, 2, 3, 4, 5, 90, 1, 2, 3, 6, 7, 91, 1, 2, 3]


def test_continuations_that_part_become_branches() -> None:
    """After "1 2 3" once came 4 5, once 6 7: the later place first, since both match equally far."""
    draft = NgramTreeProposer(9).propose([sequence(FORK)], [9])[0]
    assert draft is not None and draft.parents is not None and draft.source == "ngram-tree"
    assert_in_order(draft)
    assert min(chances(draft)) > LEAST_CHANCE
    paths = {tuple(draft.token_ids[n] for n in draft.path(node)) for node in range(len(draft))}
    assert (6,) in paths and (4,) in paths and (6, 7) in paths
    assert draft.token_ids[0] == 6
    assert NgramTreeProposer(9).propose([sequence(FORK)], [1])[0].token_ids == (6,)


def test_continuations_that_agree_are_a_chain_and_none_is_none() -> None:
    draft = NgramTreeProposer(6).propose([sequence([1, 2, 3, 4, 9, 8, 1, 2, 3, 4, 9, 7, 1, 2, 3])], [2])[0]
    assert draft is not None and draft.token_ids == (4, 9) and draft.parents is None
    assert NgramTreeProposer().propose([sequence([1, 2, 3, 4])], [5]) == [None]


def test_other_lines_answers_branch_too() -> None:
    proposer = NgramTreeProposer(8)
    for tail in ([40, 41, 42], [50, 51, 52]):
        other = sequence([30, 31, 32])
        other.token_ids += [33, 34, 35, *tail]
        proposer.propose([other], [4])
        other.finish_reason = "stop"
        proposer.forget(other)
    draft = proposer.propose([sequence([7, 33, 34, 35])], [8])[0]
    assert draft is not None and {draft.token_ids[n] for n in range(len(draft)) if draft.parent(n) == ROOT} == {40, 50}


def test_rates_are_learned_where_a_node_was_reached() -> None:
    """The first branch fails each time, the second is right: it becomes the likelier one."""
    proposer = NgramTreeProposer(2)
    seq = sequence(FORK)
    for _ in range(40):
        draft = proposer.propose([seq], [2])[0]
        right = draft.token_ids.index(4) if 4 in draft.token_ids else None
        proposer.learn(seq, draft, Verified([0], None, () if right is None else (right,)))
    draft = proposer.propose([seq], [2])[0]
    assert draft.token_ids[0] == 4
    assert_in_order(draft)


def test_what_is_not_reached_teaches_nothing() -> None:
    proposer, seq = NgramTreeProposer(4), sequence(FORK)
    draft = proposer.propose([seq], [4])[0]
    node = draft.token_ids.index(6)
    proposer.learn(seq, draft, Verified([6, 0], None, (node,)))
    rates = proposer.rates
    assert rates.rate(("ngram", 3, 0)) > 0.6 and rates.rate(("ngram", 4, 0)) < 0.6, "the first child was right, its own child was not"
    assert rates.rate(("ngram", 3, 1)) == 0.25, "a sibling of the right child was never tried"
    assert BranchRates().rate(("memory", 3, 2)) == 0.15


def test_a_cut_tree_is_learned_from_as_far_as_it_was_verified() -> None:
    proposer, seq = NgramTreeProposer(4), sequence(FORK)
    draft = proposer.propose([seq], [4])[0].cut(1)
    assert draft.parents is None
    proposer.learn(seq, draft, Verified([0], None, ()))
    assert proposer.rates.rate(("ngram", 3, 0)) < 0.6 and proposer.rates.rate(("ngram", 3, 1)) == 0.25
