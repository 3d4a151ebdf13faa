"""Norms, gated activations, rotary embedding and KV store of the CPU, row by row: vectors of 16, what fills none, and every odd number."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numba
import numpy as np
import pytest
import torch
from kernel_cases import rope_store_kv_args
from tolerances import assert_matches

from dspark.kernels.cpu import elementwise as cpu
from dspark.kernels.cpu.int8 import _quantize
from dspark.kernels.cpu.views import as_array
from dspark.kernels.kv_cache import KVScales, to_codes
from dspark.kernels.quant_math import quantize_tokens
from dspark.kernels.reference import elementwise as reference

NAN, INF = float("nan"), float("inf")
WIDTHS = (1, 15, 16, 17, 40, 63, 64, 80, 576)
DTYPES = (torch.float32, torch.bfloat16)
BF16 = torch.bfloat16
SPECIAL = [NAN, INF, -INF, 3.3e38, -3.3e38, 1e30, -1e30, 1e-39, -1e-39, 0.0, -0.0, 500.0, -500.0, 90.0, -90.0, 88.6, -88.6, -88.3]
SPECIAL += [88.0, -88.0, -87.4, 87.6, -87.6, -86.0, 16.5, -16.5, 1.0, -1.0, 1e-4]
both = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
gated = pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def any_bf16(seed: int, *shape: int) -> torch.Tensor:
    """Any 16 bits: all exponents alike, NaN, infinity and subnormal numbers among them."""
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator(seed)).to(torch.int16).view(BF16)


def assert_same_bits(actual: torch.Tensor, want: torch.Tensor) -> None:
    """Alike to the last bit, zeros' signs too; any NaN equals any other."""
    kind = torch.int16 if want.dtype == BF16 else torch.int32
    assert actual.dtype == want.dtype and actual.shape == want.shape
    same = (actual.view(kind) == want.view(kind)) | (actual.isnan() & want.isnan())
    assert bool(same.all()), f"{int((~same).sum())} differ: {actual[~same][:4].tolist()} for {want[~same][:4].tolist()}"


@pytest.fixture
def threads() -> Iterator[None]:
    """Two threads, where the machine has them."""
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    yield
    numba.set_num_threads(before)


@pytest.mark.parametrize("width", WIDTHS)
@both
def test_norms_equal_the_reference(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (randn(seed, 5, width, dtype=dtype) for seed in range(3))
    normed, kept = cpu.add_rms_norm(x, residual.clone(), weight[0], 1e-5)
    want, sums = reference.add_rms_norm(x, residual, weight[0], 1e-5)
    assert_matches("add_rms_norm", {"normed": normed}, {"normed": want}, dtype)
    assert_same_bits(kept, sums)
    assert_same_bits(cpu.rms_norm(kept, weight[0], 1e-5), normed)
    assert_matches(
        "rms_norm", {"y": cpu.rms_norm(x, weight[0].float(), 1e-5)}, {"y": reference.rms_norm(x, weight[0].float(), 1e-5)}, dtype
    )


@pytest.mark.parametrize("width", [1, 17, 576])
def test_a_sum_is_rounded_as_torch_does(width: int) -> None:
    """Random bits on both sides: half of the sums are one of them, the rest ties, cancellations, overflows, subnormal and not numbers."""
    x, residual = any_bf16(1, 400, width), any_bf16(2, 400, width)
    near = (residual.float() * (1 + randn(3, 400, width) / 50)).to(BF16)  # sums of numbers of one size, which have ties
    for first in (x, near, -near):
        _, kept = cpu.add_rms_norm(first, residual.clone(), torch.ones(width), 1e-5)
        assert_same_bits(kept, (first.float() + residual.float()).to(BF16))


def test_ties_round_to_even() -> None:
    """1 + k/512 for bfloat16's 1/128: a quarter, a half and three quarters of a step."""
    step = torch.tensor([0.25, 0.5, 0.75, 1.5, 2.5]) / 128
    _, kept = cpu.add_rms_norm(torch.ones(1, 5, dtype=BF16), step.to(BF16)[None], torch.ones(5), 1e-5)
    assert ((kept - 1) * 128).tolist() == [[0.0, 0.0, 1.0, 2.0, 2.0]]


@both
def test_a_broken_row_of_a_norm_leaves_its_neighbours_alone(dtype: torch.dtype) -> None:
    x, weight = randn(4, 7, 40, dtype=dtype), randn(5, 40, dtype=dtype)
    clean = cpu.rms_norm(x, weight, 1e-5)
    for i, number in enumerate((NAN, INF, -INF)):
        x[i, 15 + i] = number  # the first in a vector's last lane, the others in the next one
        x[i + 3, 39] = number  # where no vector is filled
    out = cpu.rms_norm(x, weight, 1e-5)
    assert_same_bits(out[6], clean[6])
    assert bool(out[[0, 3]].isnan().all())
    for i in (1, 2, 4, 5):
        broken = 15 + i if i < 3 else 39
        assert bool(out[i, broken].isnan()) and int(out[i].count_nonzero()) == 1


@both
def test_a_norm_of_huge_and_of_tiny_rows(dtype: torch.dtype) -> None:
    x = randn(6, 3, 80, dtype=dtype) * torch.tensor([[1e18], [1e-18], [0.0]], dtype=dtype)
    assert_matches("rms_norm", {"y": cpu.rms_norm(x, torch.ones(80), 1e-30)}, {"y": reference.rms_norm(x, torch.ones(80), 1e-30)}, dtype)


@gated
@pytest.mark.parametrize("width", WIDTHS)
@both
def test_gated_activations_equal_the_reference(op: str, dtype: torch.dtype, width: int) -> None:
    gate_up = 4 * randn(7, 5, 2 * width, dtype=dtype)
    assert_matches(op, {"y": getattr(cpu, op)(gate_up)}, {"y": getattr(reference, op)(gate_up)}, dtype)


@gated
@both
def test_gates_that_no_exponential_bears(op: str, dtype: torch.dtype) -> None:
    """Also: a number alone in a row, which fills no vector, has the bits that it has among others."""
    gate = torch.tensor(SPECIAL, dtype=dtype)
    row = torch.cat([gate, torch.full_like(gate, 2.0)])[None]
    out, want = getattr(cpu, op)(row), getattr(reference, op)(row)
    assert_matches(op, {"y": out}, {"y": want}, dtype)
    alone = getattr(cpu, op)(torch.stack([gate, torch.full_like(gate, 2.0)], 1))
    assert_same_bits(alone[:, 0], out[0])
    repeated = gate[:, None].repeat(1, 16)
    assert_same_bits(getattr(cpu, op)(torch.cat([repeated, torch.full_like(repeated, 2.0)], 1)), alone.repeat(1, 16))


def test_silu_is_good_to_a_few_units_in_the_last_place() -> None:
    gate = torch.linspace(-86, 86, 40001)
    want = gate.double() * gate.double().sigmoid()
    out = cpu.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0].double()
    assert float(((out - want).abs() / want.abs().clamp_min(1e-37)).max()) < 4 * 2.0**-23


@gated
def test_an_activation_is_rounded_as_torch_does(op: str) -> None:
    """float32 numbers that bfloat16 holds, computed for float32 and for bfloat16: subnormal results too."""
    gate_up = torch.cat([any_bf16(8, 40, 112), 2.0 ** torch.randint(-130, 100, (40, 112), generator=generator(9)).float().to(BF16)], 1)
    gate_up[:, :100:3] = -80.0 - randn(10, 40, 34, dtype=BF16).abs()
    wide = getattr(cpu, op)(gate_up.float())
    assert int(((wide.abs() < 2.0**-126) & (wide != 0)).sum()) > 0
    assert_same_bits(getattr(cpu, op)(gate_up), wide.to(BF16))


@pytest.mark.parametrize("width", [40, 576])
@both
def test_rows_alone_and_together_have_the_same_bits(threads: None, dtype: torch.dtype, width: int) -> None:
    """Enough of them for the parallel loops, alone in the serial ones."""
    rows = 2 * cpu.SERIAL_ELEMENTS // width + 3
    x, residual, gate_up = randn(11, rows, width, dtype=dtype), randn(12, rows, width, dtype=dtype), randn(13, rows, 2 * width, dtype=dtype)
    weight = randn(14, width, dtype=dtype)
    kept = residual.clone()
    together = [cpu.rms_norm(x, weight, 1e-5), cpu.add_rms_norm(x, kept, weight, 1e-5)[0], kept, cpu.silu_and_mul(gate_up)]
    together.append(cpu.gelu_tanh_and_mul(gate_up))
    for first, last in ((0, 1), (1, 4), (rows - 1, rows)):
        part = residual[first:last].clone()
        alone = [cpu.rms_norm(x[first:last], weight, 1e-5), cpu.add_rms_norm(x[first:last], part, weight, 1e-5)[0], part]
        alone += [cpu.silu_and_mul(gate_up[first:last]), cpu.gelu_tanh_and_mul(gate_up[first:last])]
        for one, all_ in zip(alone, together, strict=True):
            assert_same_bits(one, all_[first:last])


@pytest.mark.parametrize("zero_point", [0, 128])
@pytest.mark.parametrize("width", WIDTHS)
@both
def test_rows_going_into_a_product_are_quantized_by_the_rule(dtype: torch.dtype, width: int, zero_point: int) -> None:
    """Ties too, and steps of which the largest number of a row is 127.5: it must become 127 or -128."""
    x = randn(15, 12, width, dtype=dtype) * 2.0 ** torch.arange(-60, 60, 10)[:, None].to(dtype)
    x[:3] = torch.randint(-255, 256, (3, width), generator=generator(16)) / 2
    x[:3, -1] = torch.tensor([127.5, -127.5, 127.5])
    x[3, 0], x[4, -1], x[5, -1], x[6], x[7] = NAN, INF, -INF, 0.0, 2.0**-101
    codes, steps = np.zeros((12, width + 5), np.uint8), np.zeros(12, np.float32)
    _quantize(as_array(x), np.int32(zero_point), codes, steps)
    want, scales = quantize_tokens(x.float())
    assert_same_bits(torch.from_numpy(steps), scales[:, 0])
    assert torch.equal(torch.from_numpy(codes[:, :width]), (want.int() + zero_point).to(torch.uint8))
    assert not codes[:, width:].any()


# ---- rotary embedding and KV store ---------------------------------------------------------------------------------------------

CACHES = (None, "int8", "fp8")


def dimension_major(cache: torch.Tensor) -> torch.Tensor:
    """A view of the key cache [num_blocks, num_kv_heads, block_size, head_dim] in the order that its shape says."""
    blocks, heads, block_size, head_dim = cache.shape
    return cache.view(blocks, heads, head_dim, block_size).transpose(2, 3)


def stored(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    block_size = cache.shape[2]
    return cache[slots // block_size, :, slots % block_size]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "qk_norm", "block_size"),
    [(64, 64, False, 16), (64, 24, False, 16), (80, 80, True, 16), (16, 2, True, 48), (96, 64, True, 32), (128, 0, False, 16)],
)
@both
def test_rope_and_store(dtype: torch.dtype, head_dim: int, rotary_dim: int, qk_norm: bool, block_size: int, cache: str | None) -> None:
    """q, k and v as the reference has them; what is stored are just the codes of k and v as they were rounded to qkv's dtype."""
    args = rope_store_kv_args(dtype, 1, 9, 5, 3, head_dim, rotary_dim, qk_norm, block_size, cache)
    qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, slots, num_heads, scales = args
    slots, rows = slots.contiguous(), qkv.clone()
    before = k_cache.view(torch.uint8).clone(), v_cache.view(torch.uint8).clone()
    q = cpu.rope_store_kv(rows, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, slots, num_heads, scales)

    heads = qkv.view(9, 11, head_dim)
    query, key, value = heads[:, :5], heads[:, 5:8], heads[:, 8:]
    if q_norm is not None:
        query, key = reference.rms_norm(query, q_norm, eps), reference.rms_norm(key, k_norm, eps)
    want = {"q": reference.rotate(query, cos, sin), "k": reference.rotate(key, cos, sin), "v": value}
    _, key, value = rows.view(9, 11, head_dim).split([5, 3, 3], 1)
    assert_matches("rope_store_kv", {"q": q, "k": key, "v": value}, want, dtype)

    keys, written = dimension_major(k_cache), slots
    for found, x, scale in ((keys, key, scales and scales.k), (v_cache, value, scales and scales.v)):
        expected = x if scale is None else to_codes(x, scale, found.dtype)
        assert torch.equal(stored(found, written).float(), expected.float())
    untouched = torch.ones(k_cache.shape[0] * block_size, dtype=torch.bool)
    untouched[slots] = False
    others = untouched.nonzero()[:, 0]
    for after, old in ((keys, dimension_major(before[0].view(k_cache.dtype))), (v_cache, before[1].view(v_cache.dtype))):
        assert torch.equal(stored(after, others).float(), stored(old, others).float())


@both
def test_keys_and_values_without_queries(dtype: torch.dtype) -> None:
    """A draft head stores those of the target's features: each key is normed once, as it is beside queries."""
    args = list(rope_store_kv_args(dtype, 4, 6, 4, 2, 32, 32, True))
    args[8] = args[8].contiguous()
    alone = args.copy()
    alone[0], alone[6], alone[7], alone[9] = args[0][:, 4 * 32 :].contiguous(), args[6].clone(), args[7].clone(), 0
    cpu.rope_store_kv(*args)
    cpu.rope_store_kv(*alone)
    assert torch.equal(alone[0], args[0][:, 4 * 32 :])
    assert all(torch.equal(stored(one, args[8]), stored(other, args[8])) for one, other in zip(alone[6:8], args[6:8], strict=True))


@pytest.mark.parametrize("cache", CACHES)
def test_a_negative_slot_is_stored_nowhere(cache: str | None) -> None:
    args = list(rope_store_kv_args(BF16, 2, 4, 4, 2, 64, cache=cache))
    before = [cache.view(torch.uint8).clone() for cache in args[6:8]]
    args[8] = torch.tensor([-1, -1, -5, -16])
    want = reference.rotate(args[0].view(4, 8, 64)[:, :4], *args[1:3])
    q = cpu.rope_store_kv(*args)
    assert_matches("rope_store_kv", {"q": q}, {"q": want}, BF16)
    assert all(torch.equal(cache.view(torch.uint8), old) for cache, old in zip(args[6:8], before, strict=True))


@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@both
def test_numbers_of_all_sizes_as_codes(dtype: torch.dtype, code: torch.dtype) -> None:
    """Any bits divided by scales of many sizes: just the codes that torch makes of the quotients."""
    tokens, head_dim = 160, 64
    numbers = any_bf16(20, tokens, 2 * head_dim).to(dtype)
    numbers[::2] = 8 * randn(21, tokens // 2, 2 * head_dim, dtype=dtype)
    scales = KVScales(*(2.0 ** (6 * randn(seed, 1, head_dim)) for seed in (22, 23)))
    qkv = torch.cat([torch.zeros(tokens, head_dim, dtype=dtype), numbers], 1)
    k_cache, v_cache = (torch.zeros(tokens // 16, 1, 16, head_dim).to(code) for _ in range(2))
    turn, slots = torch.zeros(tokens, 0), torch.randperm(tokens, generator=generator(24))
    cpu.rope_store_kv(qkv, turn, turn, None, None, 1e-5, k_cache, v_cache, slots, 1, scales)
    for cache, x, scale in ((dimension_major(k_cache), numbers[:, :head_dim], scales.k), (v_cache, numbers[:, head_dim:], scales.v)):
        assert torch.equal(stored(cache, slots)[:, 0].float(), to_codes(x, scale, code).float())


def test_a_plain_cache_keeps_every_bit() -> None:
    numbers = any_bf16(25, 16, 128)
    qkv = torch.cat([torch.zeros(16, 64, dtype=BF16), numbers], 1)
    k_cache, v_cache = (torch.zeros(1, 1, 16, 64, dtype=BF16) for _ in range(2))
    turn, slots = torch.zeros(16, 0), torch.arange(16)
    cpu.rope_store_kv(qkv, turn, turn, None, None, 1e-5, k_cache, v_cache, slots, 1)
    kept = torch.cat([stored(dimension_major(k_cache), slots)[:, 0], stored(v_cache, slots)[:, 0]], 1)
    assert torch.equal(kept.view(torch.int16), numbers.view(torch.int16))


def test_rows_of_bfloat16_in_a_cache_of_float32() -> None:
    args = list(rope_store_kv_args(BF16, 3, 5, 4, 2, 64))
    args[6:9] = args[6].float(), args[7].float(), args[8].contiguous()
    cpu.rope_store_kv(*args)
    heads = args[0].view(5, 8, 64)
    assert torch.equal(stored(dimension_major(args[6]), args[8]), heads[:, 4:6].float())
    assert torch.equal(stored(args[7], args[8]), heads[:, 6:].float())


def test_a_cache_of_codes_needs_scales() -> None:
    args = rope_store_kv_args(BF16, 3, 5, 4, 2, 64, cache="int8")
    with pytest.raises(ValueError, match="scales"):
        cpu.rope_store_kv(*args[:8], args[8].contiguous(), args[9])


def test_a_turn_by_hand() -> None:
    """A quarter turn takes (a, b) to (-b, a), half a turn to (-a, -b); what is past the rotated numbers stays."""
    head = torch.arange(1.0, 17.0)
    qkv = head.repeat(2, 3)
    angle = torch.tensor([[math.pi / 2] * 4, [math.pi] * 4])
    caches = (torch.zeros(1, 1, 16, 16) for _ in range(2))
    q = cpu.rope_store_kv(qkv, angle.cos(), angle.sin(), None, None, 1e-5, *caches, torch.tensor([3, 5]), 1)
    want = torch.stack([torch.cat([-head[4:8], head[:4], head[8:]]), torch.cat([-head[:8], head[8:]])])
    torch.testing.assert_close(q[:, 0], want)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rotary_dim", [64, 24])
@both
def test_tokens_alone_and_together_have_the_same_bits(threads: None, dtype: torch.dtype, rotary_dim: int, cache: str | None) -> None:
    tokens = 2 * cpu.SERIAL_ELEMENTS // (11 * 64) + 3
    args = list(rope_store_kv_args(dtype, 4, tokens, 5, 3, 64, rotary_dim, True, 16, cache))
    args[8] = args[8].contiguous()
    rows, k_cache, v_cache = args[0].clone(), args[6].clone(), args[7].clone()
    together = cpu.rope_store_kv(rows, *args[1:6], k_cache, v_cache, *args[8:])
    for t in (0, 1, 57, tokens - 1):
        single, keys, values = args[0][t : t + 1].clone(), args[6].clone(), args[7].clone()
        few = [single, *(x[t : t + 1] for x in args[1:3]), *args[3:6], keys, values, args[8][t : t + 1], *args[9:]]
        assert_same_bits(cpu.rope_store_kv(*few)[0], together[t])
        slot = args[8][t : t + 1]
        assert torch.equal(stored(dimension_major(keys), slot).float(), stored(dimension_major(k_cache), slot).float())
        assert torch.equal(stored(values, slot).float(), stored(v_cache, slot).float())
