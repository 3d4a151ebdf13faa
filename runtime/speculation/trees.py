"""Draft trees: which nodes are worth verifying, and the order in which they stand.

Nodes are ordered by the probability that they are accepted with all before them on their path, likely ones first: it never rises along the
list, so the planner may cut a tree anywhere, and its first n nodes are its best n.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dspark.runtime.speculation.draft import ROOT

State = TypeVar("State")
LEAST_SURVIVAL = 1e-6


@dataclass(frozen=True)
class Tree(Generic[State]):
    """Nodes in order. parents: of each node, None where the tree is a chain. survival: estimate of P(a node is accepted | its parent is).
    states: what the nodes were grown with."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None
    survival: tuple[float, ...]
    states: tuple[State, ...]


def grow_tree(
    children: Callable[[State], Iterable[tuple[int, float, State]]], root: State, max_nodes: int, least: float = 0.0
) -> Tree[State]:
    """The max_nodes likeliest nodes of a tree that is known by its branchings, found without looking at the rest of it.

    children: (token, survival, state) of the nodes below one; tokens differ. least: nodes that survive less often with their paths are left
    out.
    """
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    states: list[State] = []
    open_: list[tuple[float, int, int, int, float, State]] = []
    count = 0

    def look_below(node: int, chance: float, state: State) -> None:
        nonlocal count
        for token, own, below in children(state):
            own = min(max(own, LEAST_SURVIVAL), 1.0)
            if chance * own > least:
                count += 1
                heapq.heappush(open_, (-(chance * own), count, node, token, own, below))

    look_below(ROOT, 1.0, root)
    while open_ and len(tokens) < max_nodes:
        negative, _, parent, token, own, state = heapq.heappop(open_)
        tokens.append(token)
        parents.append(parent)
        survival.append(own)
        states.append(state)
        look_below(len(tokens) - 1, -negative, state)
    is_chain = parents == list(range(-1, len(tokens) - 1))
    return Tree(tuple(tokens), None if is_chain else tuple(parents), tuple(survival), tuple(states))


@dataclass(frozen=True)
class TopTokens:
    """What a draft model gave for the rows of one step: in each row the likeliest tokens, all different, with their log-probabilities."""

    token_ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]


def frontier(steps: Sequence[TopTokens], width: int) -> list[tuple[int, int]]:
    """The (row, column) of the last step's tokens to run next: the `width` likeliest ones along their paths, in the order of their rows in
    the next step. Steps before the last one were run so; the first has one row, behind the newest token."""
    rows: list[tuple[int, int]] = []
    chances = [1.0]
    for step in steps:
        entries = [
            (chances[row] * _survival(log_prob), row, column)
            for row, log_probs in enumerate(step.log_probs)
            for column, log_prob in enumerate(log_probs)
            if log_prob > -math.inf
        ]
        best = sorted(entries, key=lambda entry: (-entry[0], entry[1], entry[2]))[:width]
        rows, chances = [(row, column) for _, row, column in best], [chance for chance, _, _ in best]
    return rows


def expand_tree(steps: Sequence[TopTokens], width: int, total_tokens: int) -> Tree[tuple[int, int, int]]:
    """The total_tokens likeliest nodes of all that were looked at (EAGLE-2, Li et al. 2024, arXiv 2406.16858: expand, then rerank).

    steps: as they were run, step t + 1 on the rows that `frontier(steps[: t + 1], width)` names. States are (step, row, column).
    """
    below: list[dict[tuple[int, int], int]] = [{} for _ in steps]  # (row, column) -> the row of the next step that went on from it
    for step in range(len(steps) - 1):
        below[step] = {place: row for row, place in enumerate(frontier(steps[: step + 1], width))}

    def children(state: tuple[int, int, int]) -> Iterable[tuple[int, float, tuple[int, int, int]]]:
        step, row, column = state
        following = 0 if step < 0 else below[step].get((row, column))
        if following is None or step + 1 >= len(steps):
            return
        top = steps[step + 1]
        for index, (token, log_prob) in enumerate(zip(top.token_ids[following], top.log_probs[following], strict=True)):
            if log_prob > -math.inf:
                yield token, _survival(log_prob), (step + 1, following, index)

    return grow_tree(children, (-1, 0, 0), total_tokens)


def _survival(log_prob: float) -> float:
    return min(max(math.exp(log_prob), LEAST_SURVIVAL), 1.0)
