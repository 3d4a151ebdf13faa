"""Which nodes of a draft are kept."""

import pytest

from dspark.runtime.speculation.draft import ROOT, Draft
from dspark.runtime.speculation.verify import accepted_rows


@pytest.mark.parametrize(
    ("drawn", "rows"),
    [([7, 0, 0, 0], [0]), ([1, 7, 0, 0], [0, 1]), ([1, 2, 7, 0], [0, 1, 2]), ([1, 2, 3, 9], [0, 1, 2, 3]), ([2, 2, 3, 9], [0])],
)
def test_a_chain_is_kept_up_to_the_first_difference(drawn: list[int], rows: list[int]) -> None:
    assert accepted_rows(Draft((1, 2, 3), (1.0,) * 3, "a"), drawn) == rows


def test_a_tree_is_followed_along_the_branch_that_was_drawn() -> None:
    """anchor -> 1 -> 5        nodes: 0 is 1, 1 is 2, 2 is 5 below 1, 3 is 6 below 2, 4 is 7 below 2's 6
    anchor -> 2 -> 6 -> 7"""
    tree = Draft((1, 2, 5, 6, 7), (1.0,) * 5, "a", (ROOT, ROOT, 0, 1, 3))
    assert accepted_rows(tree, [2, 0, 6, 0, 7, 9]) == [0, 2, 4, 5]
    assert accepted_rows(tree, [1, 5, 0, 8, 0, 0]) == [0, 1, 3]
    assert accepted_rows(tree, [3, 0, 0, 0, 0, 0]) == [0]
    assert accepted_rows(tree, [2, 0, 5, 0, 0, 0]) == [0, 2], "a token that stands below the other branch only"
