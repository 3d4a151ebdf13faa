"""The forms of Triton attention for contexts that several programs share and for deterministic runs, under Triton's interpreter; how a
step's form is chosen."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interpreter_process import NEEDS_INTERPRETER, run_interpreted

from dspark.kernels.triton.attention_plan import (
    DETERMINISTIC_CHUNK,
    LEAST_SPLIT_KEYS,
    MOST_PART_BYTES,
    MOST_SPLIT_KEYS,
    AttentionShape,
    deterministic_plan,
    plan,
)

SUPPORT = Path(__file__).parents[1] / "support"
FAST = (
    *(f"split-{name}-float32" for name in ("one_key", "decode_window", "decode_d80_mha", "decode_int8", "verify_window", "tree")),
    *(f"split-{name}-float16" for name in ("decode_d128_group_9", "decode_d256_softcap", "decode_fp8_window", "mixed_int8")),
    *(f"deterministic-{name}" for name in ("decode_window", "verify", "tree_window", "mixed_int8")),
    "batch_invariance",
    "tree_nodes",
)
"""The rest is slow: every shape in both types, random shapes, long contexts."""


def all_checks() -> list[str]:
    if find_spec("triton") is None:
        return list(FAST)
    from triton_attention import CHECKS

    return list(CHECKS)


def parameters() -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in all_checks()]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    own = [item for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in own if "name" in item.callspec.params]
    return run_interpreted(SUPPORT / "triton_attention.py", *dict.fromkeys(names))


@NEEDS_INTERPRETER
@pytest.mark.interpreter
@pytest.mark.parametrize("name", parameters())
def test_form_of_attention(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]


def shape(**changes: Any) -> AttentionShape:
    base: dict[str, Any] = {"num_sequences": 1, "max_query_len": 1, "max_context_len": 4096, "num_kv_heads": 8, "group": 4, "block_d": 128}
    base |= {"itemsize": 2, "cache": "number", "window": None, "has_tree": False, "multiprocessors": 132} | changes
    return AttentionShape(**{"num_tokens": base["num_sequences"] * base["max_query_len"], **base})


def test_a_lone_sequence_fills_the_device() -> None:
    chosen = plan(shape())
    assert chosen.num_splits == 16 and chosen.split_keys == LEAST_SPLIT_KEYS
    assert plan(shape(max_context_len=100_000)).num_splits == 2 * 132 // 8
    assert MOST_SPLIT_KEYS - 64 <= plan(shape(max_context_len=100_000, multiprocessors=20)).split_keys <= MOST_SPLIT_KEYS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_sequences": 64},
        {"max_context_len": LEAST_SPLIT_KEYS},
        {"max_query_len": 2048, "max_context_len": 4000},
        {"window": 128},
        {"num_kv_heads": 32, "num_sequences": 8},
    ],
    ids=str,
)
def test_contexts_stay_whole_where_sharing_brings_nothing(changes: dict[str, Any]) -> None:
    assert plan(shape(**changes)).num_splits == 1


def test_a_few_queries_are_shared_too() -> None:
    assert plan(shape(max_query_len=5)).num_splits == 16
    assert plan(shape(max_query_len=16, has_tree=True)).num_splits > 1


def test_one_long_sequence_among_many_is_shared() -> None:
    assert plan(shape(num_sequences=64, max_context_len=5 * MOST_SPLIT_KEYS)).split_keys == MOST_SPLIT_KEYS


def test_parts_have_a_bounded_size() -> None:
    chosen = plan(shape(num_sequences=4, max_query_len=600, max_context_len=100_000))
    assert chosen.num_splits * 2400 * 32 * 130 * 4 <= MOST_PART_BYTES


@pytest.mark.parametrize("window", [1, 100, 1000, 5000])
@pytest.mark.parametrize("split_keys", [64, 192, 1024])
def test_splits_reach_every_key_of_a_window(window: int, split_keys: int) -> None:
    """Whatever the context's length: the last split of the first program to the last key."""
    for context in (*range(4000, 4200), 1, 64, 65):
        form = plan(shape(window=window, max_context_len=context), split_keys)
        first = max(context - window, 0) // form.tile.keys * form.tile.keys // split_keys
        assert (first + form.num_splits) * split_keys >= context


def test_deterministic_runs_have_one_tile() -> None:
    forms = [
        deterministic_plan(shape(num_sequences=sequences, max_query_len=queries, max_context_len=context, has_tree=tree))
        for sequences, queries, context in ((1, 1, 1), (1, 1, 100_000), (300, 1, 4000), (2, 700, 4000), (9, 5, 900))
        for tree in (False, True)
    ]
    assert len({form.tile for form in forms}) == 1
    assert not any(form.fused or form.decode for form in forms)
    assert {form.chunk or form.split_keys for form in forms} == {DETERMINISTIC_CHUNK} and {form.num_splits > 1 for form in forms} == {
        False,
        True,
    }
