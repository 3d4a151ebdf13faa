"""The CPU kernels against the reference, on every edge shape."""

import dataclasses

import pytest
import torch
from kernel_cases import ALL_CASES, Case, call, copied, expected, paged_attention_args
from random_kernel_cases import random_cases
from tolerances import assert_matches
from tree_cases import FORKS

from dspark.kernels.dispatch import candidates, decline_reason, implementation


def swap_key_order(cache: torch.Tensor) -> torch.Tensor:
    """Key cache between the plain order [block_size, head_dim] and the CPU kernels' dimension-major one, in the same shape."""
    blocks, heads, block_size, head_dim = cache.shape
    return cache.transpose(2, 3).contiguous().view(blocks, heads, block_size, head_dim)


def swap_back(cache: torch.Tensor) -> torch.Tensor:
    blocks, heads, block_size, head_dim = cache.shape
    return cache.reshape(blocks, heads, head_dim, block_size).transpose(2, 3)


def run_cpu(case: Case, dtype: torch.dtype, **facts) -> dict[str, torch.Tensor]:
    args = list(copied(case.args(dtype, 0)))
    if case.op == "paged_attention":
        args[1] = swap_key_order(args[1])
    if case.op == "rope_store_kv":
        args[6] = swap_key_order(args[6])
    if case.op == "copy_slots":
        args[0] = swap_key_order(args[0])
    outputs = call(case.op, implementation("cpu", case.op), tuple(args), case.facts(dtype, **facts))
    if case.op == "rope_store_kv":
        outputs["k_cache"] = swap_back(outputs["k_cache"])
    if case.op == "copy_slots":
        outputs["k_cache"] = swap_back(outputs["k_cache"])
    return outputs


CASES = [case for case in ALL_CASES if "cpu" in candidates(case.op)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case: Case, dtype: torch.dtype) -> None:
    reason = decline_reason("cpu", case.op, case.facts(dtype))
    if reason is not None:
        pytest.skip(f"declines: {reason}")
    assert_matches(case.op, run_cpu(case, dtype), expected(case, dtype), dtype)


@pytest.mark.parametrize("case", [c for seed in range(3) for c in random_cases("paged_attention", seed, 12)], ids=str)
def test_attention_equals_reference_on_random_shapes(case: Case) -> None:
    if decline_reason("cpu", case.op, case.facts(torch.float32)) is not None:
        pytest.skip("declines")
    assert_matches(case.op, run_cpu(case, torch.float32), expected(case, torch.float32), torch.float32)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("case", random_cases("make_wna16_linear", 5, 12), ids=str)
def test_quantized_linear_equals_reference_on_random_shapes(case: Case, shadow: bool) -> None:
    dtype = torch.bfloat16
    assert_matches(case.op, run_cpu(case, dtype, weight_shadow=shadow), expected(case, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """The last query of a prompt must get the same bits as one decode step, alone or in a batch: batch invariance hangs on it."""
    args = list(copied(paged_attention_args(dtype, 3, [(40, 90), (1, 33), (17, 17)], 9, 3, 64)))
    args[1] = swap_key_order(args[1])
    attend = implementation("cpu", "paged_attention")
    together = attend(*args)
    batch = args[3]
    rows = batch.query_start.tolist()
    for i, context in enumerate(batch.context_lens.tolist()):
        last = rows[i + 1] - 1
        alone = dataclasses.replace(
            batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=batch.context_lens[i : i + 1],
            block_tables=batch.block_tables[i : i + 1],
            slot_mapping=batch.slot_mapping[last : last + 1],
            positions=batch.positions[last : last + 1],
            max_query_len=1,
            max_context_len=context,
        )
        single = attend(args[0][last : last + 1], args[1], args[2], alone, *args[4:])
        assert torch.equal(single[0], together[last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_deterministic_linear_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    from kernel_cases import dense_linear_args

    weight, bias, x = dense_linear_args(dtype, 1, 150, 576, 192, True)
    case = next(c for c in CASES if c.op == "make_dense_linear")
    linear = implementation("cpu", "make_dense_linear")(weight, bias, case.facts(dtype, deterministic=True))
    whole = linear(x)
    for start, stop in [(0, 1), (3, 10), (64, 129), (149, 150)]:
        assert torch.equal(linear(x[start:stop]), whole[start:stop])


def test_ops_that_share_the_cache_come_from_one_implementation() -> None:
    """The CPU kernels keep keys dimension-major: a reference attention over such pages would read nonsense."""
    from dspark.kernels.dispatch import CACHE_OPS, select
    from dspark.kernels.facts import KernelFacts

    for head_dim, block_size, dtype in [(64, 16, torch.float32), (40, 16, torch.float32), (64, 8, torch.bfloat16), (64, 16, torch.float16)]:
        facts = KernelFacts("cpu", dtype, head_dim, 4, 2, block_size)
        assert len({select(op, facts).taken for op in CACHE_OPS}) == 1


@pytest.mark.parametrize("softcap, window", [(0.0, None), (2.0, 20), (0.0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_node_of_a_tree_gets_the_bits_of_its_path_alone(dtype: torch.dtype, softcap: float, window: int | None) -> None:
    """With --deterministic a tree must leave the very text of plain decoding: the path, moved to its positions, and one query behind it."""
    args = list(copied(paged_attention_args(dtype, 5, [(16, 60)], 9, 3, 64, window=window, softcap=softcap, trees=[FORKS])))
    args[1] = swap_key_order(args[1])
    q, k_cache, v_cache, batch = args[:4]
    attend, copy_slots = implementation("cpu", "paged_attention"), implementation("cpu", "copy_slots")
    together, start = attend(*args), 45
    slots = batch.slot_mapping
    for node in range(15):
        path = [n for n in range(15) if int(batch.tree.visible[node + 1]) >> n & 1]
        k_moved, v_moved = k_cache.clone(), v_cache.clone()
        copy_slots(k_moved, v_moved, slots[[n + 1 for n in path]], slots[1 : len(path) + 1])
        alone = dataclasses.replace(
            batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([start + len(path)], dtype=torch.int32),
            slot_mapping=slots[len(path)],
            positions=torch.tensor([start + len(path) - 1]),
            max_query_len=1,
            tree=None,
        )
        single = attend(q[node + 1 : node + 2], k_moved, v_moved, alone, *args[4:])
        assert torch.equal(single[0], together[node + 1])
