"""Bytes and FLOPs of steps: sums done by hand for a small model, and what must hold for every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.roofline.ops import Group, Op, Step, by_name, decode, expected_experts, prefill, step_ops, verify
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

MODEL = ModelConfig("llama", 1000, 64, 160, 2, 4, 2, 16, 1e-6, 4096)
"""Heads of 16: q is 64 wide, k and v 32 each; two layers; two bytes a number."""
SCHEMES: dict[str, QuantScheme] = {
    "w8a16": QuantScheme("w8a16", 8),
    "w4a16": QuantScheme("w4a16", 4, group_size=32),
    "w8a8": QuantScheme("w8a8", 8, storage="int8"),
    "fp8": QuantScheme("fp8", 8, storage="fp8", block=(1, -1), inputs="dynamic"),
}


def ops_of(step: Step, config: ModelConfig = MODEL, scheme: QuantScheme | None = None, **more: object) -> dict[str, Op]:
    quant = QuantConfig(scheme) if scheme is not None else None
    return by_name(step_ops(ModelShape(config, quant, **more), step))  # type: ignore[arg-type]


def test_a_decoding_step_by_hand() -> None:
    """Three sequences with 10 tokens in the cache after the step: T = R = 3."""
    ops = ops_of(decode(3, 10))
    assert list(ops) == [
        "embedding",
        "norms",
        "qkv_proj",
        "rope_store_kv",
        "attention",
        "o_proj",
        "gate_up_proj",
        "activation",
        "down_proj",
        "head",
    ]
    bf16 = "bfloat16"
    assert ops["embedding"] == Op("embedding", "float32", 0, 3 * 64 * 2, 0, 3 * 64 * 2)
    assert ops["qkv_proj"] == Op("qkv_proj", bf16, 2 * (2 * 3 * 64 * 128), 2 * (64 * 128 * 2), 0, 2 * (3 * (64 + 128) * 2))
    assert ops["o_proj"] == Op("o_proj", bf16, 2 * (2 * 3 * 64 * 64), 2 * (64 * 64 * 2), 0, 2 * (3 * (64 + 64) * 2))
    assert ops["gate_up_proj"] == Op("gate_up_proj", bf16, 2 * (2 * 3 * 64 * 320), 2 * (64 * 320 * 2), 0, 2 * (3 * (64 + 320) * 2))
    assert ops["down_proj"] == Op("down_proj", bf16, 2 * (2 * 3 * 160 * 64), 2 * (160 * 64 * 2), 0, 2 * (3 * (160 + 64) * 2))
    assert ops["head"] == Op("head", bf16, 2 * 3 * 64 * 1000, 64 * 1000 * 2, 0, 3 * (64 + 1000) * 2)
    assert ops["activation"] == Op("activation", "float32", 2 * (6 * 3 * 160), 0, 0, 2 * (3 * 3 * 160 * 2))
    # scores and sums: 2 products of 2 FLOPs for each of 4 heads, 16 dimensions, 10 keys; k and v of 2 heads; q in, result out
    assert ops["attention"] == Op("attention", bf16, 2 * (3 * 4 * 4 * 16 * 10), 0, 2 * (3 * 10 * 2 * 2 * 16 * 2), 2 * (3 * 2 * 4 * 16 * 2))
    # 8 heads in, 4 out again, 4 into the cache; cosines and sines of 8 pairs; 3 FLOPs for each number of 6 heads
    rope = Op("rope_store_kv", "float32", 2 * (3 * 3 * 6 * 16), 0, 2 * (3 * 4 * 16 * 2), 2 * 3 * ((8 + 4) * 16 * 2 + 2 * 8 * 4))
    assert ops["rope_store_kv"] == rope
    # two plain norms (the first and the last), three that add, and the last addition without one
    rows = 3 * 64
    assert ops["norms"] == Op("norms", "float32", rows * (2 * 4 + 3 * 5 + 1), 5 * 64 * 2, 0, rows * 2 * (2 * 2 + 3 * 4 + 3))


@pytest.mark.parametrize(
    ("name", "arithmetic", "bytes_of_down"),
    [
        ("w8a16", "bfloat16", 160 * 64 + 64 * 2),
        ("w4a16", "bfloat16", 160 * 64 // 2 + 5 * 64 * 2),
        ("w8a8", "int8", 160 * 64 + 64 * 4),
        ("fp8", "fp8", 160 * 64 + 64 * 4),
    ],
)
def test_a_scheme_changes_bytes_and_arithmetic_of_the_layers_and_nothing_else(name: str, arithmetic: str, bytes_of_down: int) -> None:
    plain, found = ops_of(decode(3, 10)), ops_of(decode(3, 10), scheme=SCHEMES[name])
    assert found["down_proj"] == replace(plain["down_proj"], arithmetic=arithmetic, weight_bytes=2 * bytes_of_down)
    assert {key: op for key, op in found.items() if not key.endswith("_proj")} == {
        key: op for key, op in plain.items() if not key.endswith("_proj")
    }


def test_an_8_bit_cache_halves_what_attention_reads_and_the_store_writes() -> None:
    plain, found = ops_of(decode(3, 10)), ops_of(decode(3, 10), kv_dtype="fp8")
    for name in ("attention", "rope_store_kv"):
        assert found[name] == replace(plain[name], kv_bytes=plain[name].kv_bytes / 2)


def test_a_prefill_computes_one_row_beyond_the_last_attention() -> None:
    """Two prompts of 6 tokens: 1 + 2 + ... + 6 keys are seen by each, the cache is read once."""
    ops = ops_of(prefill(2, 6))
    assert ops["qkv_proj"].flops == 2 * (2 * 12 * 64 * 128)
    assert ops["o_proj"].flops == (12 + 2) * 2 * 64 * 64
    assert ops["down_proj"].flops == (12 + 2) * 2 * 160 * 64
    assert ops["head"].flops == 2 * 2 * 64 * 1000
    assert ops["attention"].flops == 2 * (4 * 4 * 16 * 2 * 21)
    assert ops["attention"].kv_bytes == 2 * (2 * 6 * 2 * 2 * 16 * 2)


def test_a_verified_step_wants_all_its_logits_and_reads_the_cache_once() -> None:
    drafted, plain = ops_of(verify(3, 12, 3)), ops_of(decode(3, 12))
    assert drafted["head"].flops == 3 * plain["head"].flops and drafted["head"].weight_bytes == plain["head"].weight_bytes
    assert drafted["attention"].kv_bytes == plain["attention"].kv_bytes
    assert drafted["attention"].flops == 2 * (3 * 4 * 4 * 16 * (10 + 11 + 12))


@pytest.mark.parametrize("window", [1, 4, 9, 12, 40])
@pytest.mark.parametrize(("query", "context"), [(1, 1), (1, 12), (5, 12), (12, 12), (3, 4)])
def test_keys_of_a_window_are_counted_one_by_one(window: int, query: int, context: int) -> None:
    group = Group(1, query, context)
    visible = [range(max(0, last - window + 1), last + 1) for last in range(context - query, context)]
    assert group.keys_seen(window) == sum(len(keys) for keys in visible)
    assert group.keys_read(window) == len(set().union(*visible))


def test_experts_are_read_once_each_and_multiplied_for_every_token() -> None:
    """4 experts, 2 a token, 3 tokens: 4 (1 - (1/2) ** 3) = 3.5 of them are expected to be taken."""
    config = replace(MODEL, family="qwen2_moe", num_experts=4, experts_per_token=2, moe_intermediate_size=32, qkv_bias=True)
    ops = ops_of(decode(3, 10), config)
    assert ops["experts"].flops == 2 * (3 * 2 * 3 * 2 * 64 * 32)
    assert ops["experts"].weight_bytes == pytest.approx(2 * 3.5 * 3 * 64 * 32 * 2)
    assert ops["router"].weight_bytes == 2 * 4 * 64 * 2
    assert "shared_down_proj" not in ops and "down_proj" not in ops
    shared = ops_of(decode(3, 10), replace(config, shared_expert_intermediate_size=48))
    assert shared["shared_down_proj"].weight_bytes == 2 * 48 * 64 * 2 and shared["router"].weight_bytes == 2 * 5 * 64 * 2
    assert shared["experts"] == ops["experts"]


def test_expected_experts_against_every_choice_of_two_tokens() -> None:
    """3 experts, 2 a token: of the 9 equally likely pairs of choices 3 take two experts and 6 take all three."""
    assert expected_experts(3, 2, 2) == pytest.approx((3 * 2 + 6 * 3) / 9)
    assert expected_experts(8, 2, 1) == pytest.approx(2)
    assert expected_experts(8, 8, 1) == 8


def test_ranks_split_the_work_and_add_up_over_the_link() -> None:
    whole, half = ops_of(decode(3, 10)), ops_of(decode(3, 10), tensor_parallel=2)
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "attention", "head"):
        assert half[name].flops == whole[name].flops / 2, name
    assert half["norms"] == whole["norms"]
    reduced = 4 * (2 * 1 / 2 * 3 * 64 * 2)  # two of each layer, 2 (n - 1) / n of the rows
    assert half["all_reduce"].link_bytes == reduced + 1 / 2 * 3 * 1000 * 2
    assert "all_reduce" not in whole


def test_families_with_other_norms() -> None:
    """Gemma norms before and after both blocks, OLMo only after; both add without a norm once or always."""
    rows = 3 * 64
    both = ops_of(decode(3, 10), replace(MODEL, post_norms=True))["norms"]
    after = ops_of(decode(3, 10), replace(MODEL, post_norms=True, pre_norms=False))["norms"]
    assert both.flops == rows * (4 + 4 * 4 + 3 * 5 + 1 + 4)
    assert after.flops == rows * (4 * 4 + 4 * 1 + 4)


def test_groups_that_cannot_be_are_refused() -> None:
    for numbers in ((1, 5, 4), (1, 0, 4), (-1, 1, 4)):
        with pytest.raises(ValueError, match="cannot be"):
            Group(*numbers)


def total(step: Step, scheme: QuantScheme | None = None, **more: object) -> Op:
    ops = list(step_ops(ModelShape(MODEL, QuantConfig(scheme) if scheme else None, **more), step))  # type: ignore[arg-type]
    return Op("all", "", sum(op.flops for op in ops), sum(op.num_bytes for op in ops))


steps = st.builds(
    lambda seqs, query, before, rows: Step((Group(seqs, query, query + before, min(rows, query)),)),
    st.integers(1, 300),
    st.integers(1, 200),
    st.integers(0, 3000),
    st.integers(1, 200),
)


@settings(deadline=None)
@given(steps, st.integers(0, 50), st.integers(0, 50))
def test_more_sequences_or_more_context_never_take_less(step: Step, sequences: int, context: int) -> None:
    group = step.groups[0]
    more = Step((replace(group, num_seqs=group.num_seqs + sequences, context_tokens=group.context_tokens + context),))
    before, after = total(step), total(more)
    assert after.weight_bytes >= before.weight_bytes and after.flops >= before.flops


@settings(deadline=None)
@given(steps, st.sampled_from((32, -1)), st.booleans())
def test_fewer_bits_are_fewer_bytes_and_the_same_work(step: Step, group_size: int, symmetric: bool) -> None:
    schemes = [QuantScheme(f"w{bits}", bits, symmetric, group_size) for bits in (2, 3, 4, 8)]
    found = [total(step, scheme) for scheme in schemes] + [total(step)]
    sizes = [op.weight_bytes for op in found]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    assert {op.flops for op in found} == {found[0].flops}


@settings(deadline=None)
@given(steps, st.sampled_from((1, 2, 4)))
def test_more_ranks_never_do_more_each(step: Step, ranks: int) -> None:
    one, split = total(step), total(step, tensor_parallel=ranks)
    assert split.weight_bytes <= one.weight_bytes + 4 * 4 * step.num_tokens * 64 * 2 and split.flops <= one.flops * (1 + 1 / 64)


@settings(deadline=None)
@given(steps)
def test_one_group_of_many_is_many_groups_of_one(step: Step) -> None:
    group = step.groups[0]
    apart = Step((replace(group, num_seqs=1), replace(group, num_seqs=group.num_seqs - 1)))
    together, split = total(step), total(apart)
    assert together.flops == pytest.approx(split.flops) and together.weight_bytes == pytest.approx(split.weight_bytes)
