"""What a proposer offers for one sequence, and what came of it. Integers and floats only: planning needs no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ROOT = -1


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow the newest token of a sequence (the anchor), to be verified in one step.

    token_ids: nodes in an order in which a node comes after its parent. parents: index of each node's parent, ROOT for those that follow
    the anchor; None for a chain, where each follows the one before. survival: estimate that a node is accepted given that its parent is, in
    (0, 1]; it steers how much is verified and never what is kept. source: the proposer's name. distributions: for each node the
    probabilities float32 [V] it was drawn from, which the rejection rule needs; None where a draft is certain of its tokens or the coupled
    rule is in force.
    """

    token_ids: tuple[int, ...]
    survival: tuple[float, ...]
    source: str
    parents: tuple[int, ...] | None = None
    distributions: Any = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def parent(self, node: int) -> int:
        """Index of a node's parent, ROOT for one that follows the anchor."""
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> list[int]:
        """The nodes from the anchor's child to this one, in order; [] for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent(node)
        return nodes[::-1]

    def depth(self, node: int) -> int:
        """Tokens from the anchor to a node: 1 for the anchor's children, 0 for ROOT."""
        return len(self.path(node))

    def masks(self) -> list[int]:
        """For each node the nodes on its path, itself among them, as bits (`kernels.batch.TreeMask`)."""
        found: list[int] = []
        for node in range(len(self)):
            parent = self.parent(node)
            found.append(1 << node | (found[parent] if parent >= 0 else 0))
        return found

    def longest(self) -> int:
        """Most tokens that can be accepted."""
        return len(self) if self.parents is None else max((self.depth(node) for node in range(len(self))), default=0)

    def cut(self, num_nodes: int) -> Draft:
        """The first nodes only; whole, since a node comes after its parent. What is left of a tree may be a chain."""
        if num_nodes >= len(self):
            return self
        parents = None if self.parents is None else self.parents[:num_nodes]
        return replace(
            self,
            token_ids=self.token_ids[:num_nodes],
            survival=self.survival[:num_nodes],
            parents=None if parents == tuple(range(-1, num_nodes - 1)) else parents,
            distributions=None if self.distributions is None else self.distributions[:num_nodes],
        )


@dataclass(frozen=True)
class Verified:
    """What one sequence gained in a step: the accepted nodes' tokens in order, then the target's own token.

    top2_gaps: largest minus second largest logit where each token was chosen, when recorded. nodes: the accepted nodes of the draft.
    """

    token_ids: list[int]
    top2_gaps: list[float] | None = None
    nodes: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return len(self.nodes)
