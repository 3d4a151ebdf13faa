"""Run as a script with TRITON_INTERPRET=1: the forms of Triton attention that a short test would not meet (contexts shared among programs,
the deterministic form) against the reference and against each other; one JSON line a check, as `triton_interpreter` says it.

    python triton_attention.py [NAME ...]      all checks without a name
"""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import Case, attention_batch, copied, expected, paged_attention_args
from random_kernel_cases import random_cases
from row_products import rows_alike
from tolerances import assert_matches
from tree_cases import BUSHY, COMB, FORKS, WIDE, random_tree
from triton_interpreter import report_all

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.triton import attention, attention_plan

F32, F16 = torch.float32, torch.float16
HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
SPLIT_SHAPES: dict[str, dict[str, Any]] = {
    "one_key": {"sequences": [(1, 1)], **HEADS},
    "decode": {"sequences": [(1, 5), (1, 64), (1, 65), (1, 200), (1, 257)], **HEADS},
    "decode_d80_mha": {"sequences": [(1, 190), (1, 3)], "num_heads": 2, "num_kv_heads": 2, "head_dim": 80, "block_size": 8},
    "decode_d128_group_9": {"sequences": [(1, 150)], "num_heads": 9, "num_kv_heads": 1, "head_dim": 128},
    "decode_d256_softcap": {"sequences": [(1, 150)], "num_heads": 2, "num_kv_heads": 1, "head_dim": 256, "softcap": 2.0},
    "decode_window": {"sequences": [(1, 300), (1, 40), (1, 130), (1, 97)], "window": 70, **HEADS},
    "decode_window_1": {"sequences": [(1, 300), (1, 1), (1, 64)], "window": 1, **HEADS},
    "decode_int8": {"sequences": [(1, 150), (1, 70)], "cache": "int8", **HEADS},
    "decode_fp8_window": {"sequences": [(1, 150), (1, 70)], "cache": "fp8", "window": 100, **HEADS},
    "verify": {"sequences": [(4, 200), (1, 129), (5, 5), (3, 67)], **HEADS},
    "verify_window": {"sequences": [(4, 200), (1, 129), (5, 5), (40, 200)], "window": 33, **HEADS},
    "chunk": {"sequences": [(70, 190)], "num_heads": 4, "num_kv_heads": 1, "head_dim": 64},
    "mixed_int8": {"sequences": [(7, 100), (1, 150), (30, 30)], "cache": "int8", **HEADS},
    "tree": {"sequences": [(16, 133), (1, 80), (10, 140)], "trees": [FORKS, None, BUSHY], **HEADS},
    "tree_window": {"sequences": [(16, 190), (15, 90)], "trees": [FORKS, COMB], "window": 50, **HEADS},
    "tree_wide_fp8": {"sequences": [(43, 150), (1, 90)], "trees": [WIDE, None], "cache": "fp8", **HEADS},
}


def shape_of(args: tuple[Any, ...]) -> attention_plan.AttentionShape:
    q, k_cache, _, batch, _, window, _, kv_scales = args
    return attention.shape_of(q, k_cache, batch, window, kv_scales)


def attend(plan: attention_plan.AttentionPlan, args: tuple[Any, ...], device: str = "cpu") -> torch.Tensor:
    return attention.run(plan, *copied(args, device)).cpu()


def split_plans(args: tuple[Any, ...], tile_counts: tuple[int, ...]) -> list[attention_plan.AttentionPlan]:
    """Plans in which programs share a context, so many key tiles each."""
    shape = shape_of(args)
    key_tile = attention_plan.plan(shape).tile.keys
    return [attention_plan.plan(shape, key_tile * count) for count in tile_counts]


def check_split(shape: dict[str, Any], dtype: torch.dtype, tile_counts: tuple[int, ...] = (1, 2), device: str = "cpu") -> None:
    """Shared contexts give what the reference gives, poisoned slots and table entries past a context untouched."""
    case = Case("paged_attention", "split", paged_attention_args, shape)
    args, want = case.args(dtype), expected(case, dtype)
    for plan in split_plans(args, tile_counts):
        assert plan.num_splits > 1 or shape_of(args).max_context_len <= plan.split_keys, plan
        assert_matches("paged_attention", {"y": attend(plan, args, device)}, want, dtype)


def check_deterministic(shape: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> None:
    """The deterministic form gives what the reference gives, and the same bits whether programs share a context or not."""
    case = Case("paged_attention", "deterministic", paged_attention_args, shape)
    args, want = case.args(dtype), expected(case, dtype)
    alone, shared = (attend(attention_plan.deterministic_plan(shape_of(args), share, chunk=64), args, device) for share in (False, True))
    assert_matches("paged_attention", {"y": alone}, want, dtype)
    assert torch.equal(alone, shared), "sharing a context changed bits"


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), tiles=st.integers(1, 4), dtype=st.sampled_from([F32, F16]))
def check_random(seed: int, tiles: int, dtype: torch.dtype) -> None:
    """Random shapes, trees, windows, caches and split sizes; both forms."""
    shape = random_cases("paged_attention", seed, 1)[0].shape
    check_split(shape, dtype, (tiles,))
    check_deterministic(shape, dtype)


def rows_of(batch: AttentionBatch, sequence: int, first: int, count: int, context: int) -> AttentionBatch:
    """A batch of `count` query tokens of one sequence, from its `first` query on, with keys up to `context`."""
    start = int(batch.query_start[sequence]) + first
    part = slice(start, start + count)
    return AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=batch.block_tables[sequence : sequence + 1],
        slot_mapping=batch.slot_mapping[part],
        positions=batch.positions[part],
        max_query_len=count,
        max_context_len=context,
    )


def deterministic(q: torch.Tensor, args: tuple[Any, ...], batch: AttentionBatch, share: bool, device: str = "cpu") -> torch.Tensor:
    own = (q, *args[1:3], batch, *args[4:])
    with rows_alike() if device == "cpu" else nullcontext():
        return attend(attention_plan.deterministic_plan(shape_of(own), share, chunk=64), own, device)


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def check_batch_invariance(seed: int) -> None:
    batch_invariance(seed, (F32, F16))


def batch_invariance(seed: int, dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> None:
    """A sequence computed beside others, alone, in chunks of any size, and token by token: the same bits."""
    dice = random.Random(seed)
    sequences = [(n, n + dice.choice([0, dice.randint(0, 150)])) for n in (dice.randint(1, dice.choice([1, 6, 90])) for _ in range(3))]
    options = {"window": dice.choice([None, None, dice.randint(1, 120)]), "softcap": dice.choice([0.0, 2.0])}
    options |= {"cache": dice.choice([None, "int8", "fp8"]), "block_size": dice.choice([8, 16])}
    dtype = dice.choice(dtypes)
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": dice.choice([32, 64, 80])}
    args = paged_attention_args(dtype, seed, sequences, **heads, **options)
    q, batch = args[0], args[3]
    together = deterministic(q, args, batch, False, device)
    sequence = dice.randrange(len(sequences))
    queries, context = sequences[sequence]
    begin = int(batch.query_start[sequence])
    first = 0
    while first < queries:
        count = min(dice.choice([1, 2, 17, queries]), queries - first)
        rows = slice(begin + first, begin + first + count)
        one = rows_of(batch, sequence, first, count, context - queries + first + count)
        alone = deterministic(q[rows], args, one, dice.random() < 0.5, device)
        assert torch.equal(alone, together[rows]), (seed, sequence, first, count)
        first += count


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def check_tree_nodes(seed: int) -> None:
    tree_nodes(seed, F32)


def tree_nodes(seed: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """A node of a draft tree has the bits of plain decoding: of its path as the last tokens of a sequence, one by one."""
    dice = random.Random(seed)
    nodes = dice.randint(1, 20)
    causal = dice.choice([1, 1, 30])
    context = dice.randint(causal, 150) + nodes
    tree = random_tree(nodes, dice)
    shape = {"window": dice.choice([None, dice.randint(1, 90)]), "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    args = paged_attention_args(dtype, seed, [(causal + nodes, context), (1, 70)], **shape, trees=[tree, None])
    q, k_cache, v_cache, batch = args[:4]
    together = deterministic(q, args, batch, False, device)
    node = dice.randrange(nodes)
    path = [n for n in range(nodes) if int(batch.tree.visible[causal + node]) >> n & 1]
    start = context - nodes
    plain, num_blocks = attention_batch([(len(path), start + len(path))], k_cache.shape[2], seed + 7)
    own_k, own_v = (torch.zeros(num_blocks, *cache.shape[1:], dtype=cache.dtype) for cache in (k_cache, v_cache))
    for position in range(start + len(path)):
        source = position if position < start else start + path[position - start]
        for cache, own in ((k_cache, own_k), (v_cache, own_v)):
            own[_place(plain, position, own)] = cache[_place(batch, source, cache)]
    rows = [causal + n for n in path]
    alone = deterministic(q[rows], (q, own_k, own_v, plain, *args[4:]), plain, True, device)
    assert torch.equal(alone, together[rows]), (seed, path)


def _place(batch: AttentionBatch, key: int, cache: torch.Tensor) -> tuple[int, slice, int]:
    block_size = cache.shape[2]
    return int(batch.block_tables[0, key // block_size]), slice(None), key % block_size


def check_the_engine_form() -> None:
    """What a deterministic run takes is that form, with parts of the size that the plan has."""
    case = Case("paged_attention", "long", paged_attention_args, {"sequences": [(1, 700), (2, 1100)], **HEADS})
    args = case.args(F32)
    form = attention.form("paged_attention", case.facts(F32, deterministic=True, interpreted=True))
    plans = [attention_plan.deterministic_plan(shape_of(args), share) for share in (False, True)]
    assert [plan.num_splits for plan in plans] == [1, 3]
    results = [form(*copied(args)), *(attend(plan, args) for plan in plans)]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert_matches("paged_attention", {"y": results[0]}, expected(case, F32), F32)


def check_the_chosen_split() -> None:
    """One long sequence is shared without being asked for."""
    case = Case("paged_attention", "long", paged_attention_args, {"sequences": [(1, 1100)], **HEADS})
    args = case.args(F32)
    assert attention_plan.plan(shape_of(args)).num_splits == 4
    assert_matches("paged_attention", {"y": attention.paged_attention(*copied(args))}, expected(case, F32), F32)


CHECKS: dict[str, Callable[[], Any]] = {
    **{f"split-{name}-float32": partial(check_split, shape, F32) for name, shape in SPLIT_SHAPES.items()},
    **{f"split-{name}-float16": partial(check_split, shape, F16) for name, shape in SPLIT_SHAPES.items()},
    **{f"deterministic-{name}": partial(check_deterministic, shape, F32) for name, shape in SPLIT_SHAPES.items()},
    "random": check_random,
    "batch_invariance": check_batch_invariance,
    "tree_nodes": check_tree_nodes,
    "engine_form": check_the_engine_form,
    "chosen_split": check_the_chosen_split,
}


def main() -> None:
    torch.set_num_threads(1)
    report_all({name: CHECKS[name] for name in sys.argv[1:] or CHECKS})


if __name__ == "__main__":
    main()
