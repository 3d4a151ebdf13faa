"""Trees of n-gram drafts: where a text went on in more than one way after the same words, several of them are verified at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import ROOT, Draft, Verified
from dspark.runtime.speculation.ngram import LONG_MATCH, MAX_DRAFT, MIN_MEMORY_MATCH, NgramProposer
from dspark.runtime.speculation.suffix_index import SuffixIndex
from dspark.runtime.speculation.trees import grow_tree

MAX_NODES = 31
LEAST_CHANCE = 0.02
"""Nodes that are accepted with their paths less often than this are not offered."""
_DECAY_AT = 2048
_PRIOR_TRIED = 2.0
_PRIORS = (0.6, 0.25, 0.15)
_Key = tuple[str, int, int]


class BranchRates:
    """P(a node is accepted | its parent is, and no likelier sibling), by what is known of it before: whose text it is from ("ngram",
    "memory"), how many tokens match up to it, and how many likelier siblings it has."""

    def __init__(self) -> None:
        self._counts: dict[_Key, list[float]] = {}

    def rate(self, key: _Key) -> float:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        return (accepted + _PRIOR_TRIED * _PRIORS[key[2]]) / (tried + _PRIOR_TRIED)

    def learn(self, key: _Key, accepted: bool) -> None:
        entry = self._counts.setdefault(key, [0.0, 0.0])
        entry[0] += accepted
        entry[1] += 1.0
        if entry[1] > _DECAY_AT:
            entry[0] /= 2
            entry[1] /= 2


@dataclass(frozen=True)
class _Match:
    """A place in a text whose past is like the end of a sequence. tokens[place] is what followed; `length` tokens match before it."""

    tokens: list[int]
    place: int
    length: int
    source: str


@dataclass(frozen=True)
class _Node:
    """The matches that agree with a path. key: what the chance of its last token was estimated by."""

    matches: tuple[_Match, ...]
    depth: int
    key: _Key


class NgramTreeProposer(NgramProposer):
    """Merges the continuations of several matches into a trie and offers its likeliest nodes: a chain where they agree.

    max_tokens: most nodes. source of its drafts: "ngram-tree".
    """

    name = "ngram-tree"

    def __init__(self, max_tokens: int = MAX_NODES, memory: SuffixIndex | None = None) -> None:
        super().__init__(max_tokens, memory)
        self.rates = BranchRates()
        self._offered: dict[int, tuple[_Node, ...]] = {}

    def _draft(self, seq: Sequence, room: int) -> Draft | None:
        matches = self._matches(seq)
        if not matches:
            return None
        tree = grow_tree(self._branches, _Node(tuple(matches), 0, ("", 0, 0)), room, LEAST_CHANCE)
        if not tree.token_ids:
            return None
        self._offered[id(seq)] = tree.states
        return Draft(tree.token_ids, tree.survival, self.name, tree.parents)

    def _matches(self, seq: Sequence) -> list[_Match]:
        """In the sequence's own text, then in the memory where those are short, longer ones first, later ones first among equals."""
        index, tokens = self._index(seq), seq.token_ids
        found = [_Match(index.tokens, place, length, "ngram") for place, length in index.matches(tokens, len(tokens))]
        if max((match.length for match in found), default=0) < LONG_MATCH:
            memory = self.memory
            elsewhere = (_Match(memory.tokens, place, length, "memory") for place, length in memory.matches(tokens))
            found += [match for match in elsewhere if match.length >= MIN_MEMORY_MATCH and match.place < len(memory)]
        return sorted(found, key=lambda match: -match.length)

    def _branches(self, node: _Node) -> Iterable[tuple[int, float, _Node]]:
        """What the matches say of the next token: the one of the longest match first, of equally long ones that of most."""
        if node.depth == MAX_DRAFT:
            return
        groups: dict[int, list[_Match]] = {}
        for match in node.matches:
            at = match.place + node.depth
            if at < len(match.tokens):
                groups.setdefault(match.tokens[at], []).append(match)
        left = 1.0
        for rank, (token, group) in enumerate(sorted(groups.items(), key=lambda entry: (-entry[1][0].length, -len(entry[1])))):
            best = group[0]
            key = (best.source, min(best.length + node.depth, LONG_MATCH), min(rank, len(_PRIORS) - 1))
            rate = self.rates.rate(key)
            yield token, left * rate, _Node(tuple(group), node.depth + 1, key)
            left *= 1.0 - rate

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """Count every node that was reached: at each accepted place its children up to the one that was right."""
        offered = self._offered.pop(id(seq), None)
        if offered is None or len(offered) < len(draft):
            return
        accepted = set(verified.nodes)
        settled: set[int] = set()  # places whose right child was met
        for node in range(len(draft)):
            parent = draft.parent(node)
            if (parent == ROOT or parent in accepted) and parent not in settled:
                self.rates.learn(offered[node].key, node in accepted)
                if node in accepted:
                    settled.add(parent)

    def forget(self, seq: Sequence) -> None:
        self._offered.pop(id(seq), None)
        super().forget(seq)
