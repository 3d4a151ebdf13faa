"""Draft trees of the kernel cases: their masks, edge shapes, and the paths that move when a tree was verified."""

import dataclasses
import random
from typing import Any

import torch
from cache_cases import draw_caches

from dspark.kernels.batch import AttentionBatch, TreeMask

BUSHY = [-1, -1, 0, 0, 1, 2, 2, 4, 5]
FORKS = [-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 8, 8, 10, 10, 12]
"""Parents of the nodes, -1 for those below the newest token."""
COMB = [-1, -1, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]
"""A wrong sibling before each token of the deepest path."""
WIDE = [-1] * 20 + list(range(20)) + [20, 39]

TREE_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "copy_slots": {
        "none": {"num_paths": 0, "num_kv_heads": 2, "head_dim": 64},
        "one": {"num_paths": 1, "num_kv_heads": 3, "head_dim": 80},
        "some": {"num_paths": 5, "num_kv_heads": 2, "head_dim": 128, "block_size": 32},
        "many": {"num_paths": 40, "num_kv_heads": 1, "head_dim": 64},
        "int8": {"num_paths": 4, "num_kv_heads": 2, "head_dim": 80, "cache": "int8"},
        "fp8": {"num_paths": 4, "num_kv_heads": 2, "head_dim": 64, "cache": "fp8"},
    },
    "paged_attention": {
        "tree": {"sequences": [(10, 40)], "trees": [BUSHY], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        "tree_beside_others": {"sequences": [(16, 33), (1, 20), (5, 9), (7, 7), (10, 25)], "trees": [FORKS, None, None, None, BUSHY]}
        | {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
        "tree_behind_a_chunk": {"sequences": [(30, 50)], "trees": [COMB], "num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
        "tree_wide": {"sequences": [(43, 60), (43, 43)], "trees": [WIDE, WIDE], "num_heads": 2, "num_kv_heads": 1, "head_dim": 80},
        "tree_63_chain": {"sequences": [(64, 70)], "trees": [list(range(-1, 62))], "num_heads": 2, "num_kv_heads": 2, "head_dim": 64},
        "tree_window": {"sequences": [(16, 70), (15, 90)], "trees": [FORKS, COMB], "num_heads": 4, "num_kv_heads": 2}
        | {"head_dim": 64, "window": 20},
        "tree_window_3": {"sequences": [(16, 40), (15, 33)], "trees": [FORKS, COMB], "num_heads": 2, "num_kv_heads": 1}
        | {"head_dim": 64, "window": 3},
        "tree_window_1": {"sequences": [(15, 40)], "trees": [COMB], "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "window": 1},
        "tree_softcap_window": {"sequences": [(15, 40)], "trees": [COMB], "num_heads": 2, "num_kv_heads": 1, "head_dim": 256}
        | {"window": 17, "softcap": 2.0},
        "tree_int8": {"sequences": [(10, 40), (1, 9)], "trees": [BUSHY, None], "num_heads": 4, "num_kv_heads": 2}
        | {"head_dim": 64, "cache": "int8"},
    },
}
"""Op -> name of the case -> its shape."""


def random_tree(num_nodes: int, dice: random.Random) -> list[int]:
    """Parents of a tree's nodes, -1 for those below the newest token: bushy ones, deep ones, chains."""
    reach = dice.choice([1, 2, 4, num_nodes])
    return [dice.randint(max(-1, node - reach), node - 1) for node in range(num_nodes)]


def with_trees(batch: AttentionBatch, sequences: list[tuple[int, int]], trees: list[list[int] | None]) -> AttentionBatch:
    """The batch with draft trees, given by their nodes' parents, as the last queries of some sequences: masks, and positions by depth."""
    visible, start = torch.zeros_like(batch.positions), batch.context_lens.clone()
    positions = batch.positions.clone()
    for i, ((_, context), parents) in enumerate(zip(sequences, trees, strict=True)):
        nodes = parents or []
        start[i] = context - len(nodes)
        first = int(batch.query_start[i + 1]) - len(nodes)
        for node, parent in enumerate(nodes):
            above = int(visible[first + parent]) if parent >= 0 else 0
            visible[first + node] = above | 1 << node
            positions[first + node] = context - len(nodes) + above.bit_count()
    return dataclasses.replace(batch, positions=positions, tree=TreeMask(visible, start))


def copy_slots_args(
    dtype: torch.dtype, seed: int, num_paths: int, num_kv_heads: int, head_dim: int, block_size: int = 16, cache: str | None = None
) -> tuple[torch.Tensor, ...]:
    """(k_cache, v_cache, source [n], target [n]): paths of trees of up to 30 nodes that move to where their trees begin.

    Sources and targets are columns of a table, whose elements are not side by side.
    """
    g, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    num_blocks = 3 * num_paths + 2
    k_cache, v_cache, _ = draw_caches(g, (num_blocks, num_kv_heads, block_size, head_dim), dtype, cache)
    order = torch.randperm(num_blocks, generator=g).tolist()
    source, target = [], []
    for path in range(num_paths):
        slots = [order[3 * path + i // block_size] * block_size + i % block_size for i in range(3 * block_size)]
        start = dice.randint(0, block_size)
        nodes = sorted(dice.sample(range(min(30, 2 * block_size)), dice.randint(1, 6)))
        source += [slots[start + node] for depth, node in enumerate(nodes) if node != depth]
        target += [slots[start + depth] for depth, node in enumerate(nodes) if node != depth]
    source_column, target_column = torch.tensor([source, target], dtype=torch.int64).t().contiguous().unbind(1)
    return k_cache, v_cache, source_column, target_column
