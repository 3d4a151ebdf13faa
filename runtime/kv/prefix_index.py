"""Which KV block holds the keys and values of which tokens, so that equal prompt beginnings are stored once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as TokenList

ROOT = 0

MAX_CHILDREN_COMPARED = 8
"""Blocks after one parent that `nearest` looks at, the latest ones: prompts of one template differ in thousands of ways behind it."""


class PrefixIndex:
    """A trie of full blocks. A node is (its parent, the block's tokens): the chain is compared token by token, never by a hash alone,
    so that one prompt can never be given another one's keys and values.

    Node numbers are never reused: entries under an evicted block become unreachable and leave when their own blocks are evicted.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # (parent node, tokens) -> (block, node)
        self._key_of_block: dict[int, tuple[int, bytes]] = {}
        self._children: dict[int, list[int]] = {}  # parent node -> its latest blocks
        self._entered_in: dict[int, int] = {}  # block -> step in which it was registered
        self._step = 0
        self._roots: dict[int, int] = {}
        self._next_node = ROOT + 1

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of_block

    def root(self, salt: int) -> int:
        """The node under which chains of one kind begin. Salt 0 is the ordinary kind; sequences whose keys depend on more than
        the tokens (dynamic rope: on the prompt's length) have one of their own."""
        if salt == 0:
            return ROOT
        if salt not in self._roots:
            self._roots[salt] = self._new_node()
        return self._roots[salt]

    def match(self, token_ids: TokenList[int], root: int, max_tokens: int) -> tuple[list[int], int]:
        """Blocks that hold the longest known beginning of token_ids[:max_tokens], in order, and the last one's node (root when none)."""
        blocks: list[int] = []
        node = root
        for start in range(0, min(len(token_ids), max_tokens) - self.block_size + 1, self.block_size):
            found = self._nodes.get((node, self._pack(token_ids, start)))
            if found is None:
                break
            blocks.append(found[0])
            node = found[1]
        return blocks, node

    def register(self, parent: int, token_ids: TokenList[int], start: int, block: int) -> int:
        """Say that `block` holds token_ids[start : start + block_size] after `parent`; returns its node.

        When another block is known for the same tokens that one stays, and its node is returned."""
        key = (parent, self._pack(token_ids, start))
        found = self._nodes.get(key)
        if found is not None:
            return found[1]
        if block in self._key_of_block:  # known after a parent that is evicted: nothing reaches that entry any more
            self.forget(block)
        node = self._new_node()
        self._nodes[key] = (block, node)
        self._key_of_block[block] = key
        self._entered_in[block] = self._step
        siblings = self._children.setdefault(parent, [])
        siblings.append(block)
        del siblings[:-MAX_CHILDREN_COMPARED]
        return node

    def nearest(self, parent: int, token_ids: TokenList[int], start: int, end: int) -> tuple[int, int]:
        """Of the blocks after `parent`, one whose tokens begin like token_ids[start:end], and how many are alike; (-1, 0) when none is.

        Blocks registered in the present step are passed over: they are not written yet, and what is alike must be copied first.
        """
        best, most = -1, 0
        for block in self._children.get(parent, ()):
            if self._entered_in[block] == self._step:
                continue
            tokens = array("i", self._key_of_block[block][1])
            alike = 0
            for ours, theirs in zip(token_ids[start:end], tokens, strict=False):
                if ours != theirs:
                    break
                alike += 1
            if alike > most:
                best, most = block, alike
        return best, most

    def next_step(self) -> None:
        """What is registered from now on belongs to the next step; what was registered before is written by then."""
        self._step += 1

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        key = self._key_of_block.pop(block)
        del self._nodes[key]
        del self._entered_in[block]
        siblings = self._children.get(key[0])
        if siblings is not None and block in siblings:
            siblings.remove(block)
            if not siblings:
                del self._children[key[0]]

    def _new_node(self) -> int:
        self._next_node += 1
        return self._next_node - 1

    def _pack(self, token_ids: TokenList[int], start: int) -> bytes:
        return array("i", token_ids[start : start + self.block_size]).tobytes()
