"""8-bit KV caches: what is stored for a number, by hand and at the limits, and what attention reads."""

import pytest
import torch
from cache_cases import CACHE_DTYPES
from kernel_cases import attention_batch

from dspark.kernels.dispatch import implementation
from dspark.kernels.kv_cache import CODE_LIMITS, KVScales, from_codes, to_codes
from dspark.kernels.reference.attention import paged_attention
from dspark.kernels.reference.elementwise import read_kv, rope_store_kv

INT8, FP8 = torch.int8, torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def stored_by(candidate: str, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers float32 [T, D] of one head as values of a cache, by an implementation's own store."""
    num_tokens, head_dim = numbers.shape
    qkv = torch.cat([torch.zeros(num_tokens, 2 * head_dim), numbers], 1)
    caches = [torch.zeros(-(-num_tokens // 16), 1, 16, head_dim).to(dtype) for _ in range(2)]
    turn = torch.zeros(num_tokens, 0)
    slots = torch.arange(num_tokens)
    store, read = (implementation(candidate, op) for op in ("rope_store_kv", "read_kv"))
    store(qkv, turn, turn, None, None, 1e-5, *caches, slots, 1, KVScales(torch.ones_like(scale)[None], scale[None]))
    return read(*caches, slots)[1][:, 0]


@pytest.mark.parametrize("candidate", ["reference", "cpu"])
@pytest.mark.parametrize(
    "dtype, x, scale, want",
    [
        (INT8, [0.0, 0.5, 1.5, -2.5, 127.4, 127.5, -128.0, 1e9], 1.0, [0, 0, 2, -2, 127, 127, -127, 127]),
        (INT8, [0.3, -0.3, 12.7, 12.8], 0.1, [3, -3, 127, 127]),
        (INT8, [NAN, INF, -INF], 1.0, [0, 127, -127]),
        # 2**-9 is the smallest subnormal and half of it a tie, 2**-6 the smallest normal number, 448 the limit
        (FP8, [0.0, 0.002, 2**-10, 3 * 2**-10, 2**-6, -(2**-7)], 1.0, [0.0, 2**-9, 0.0, 2**-8, 2**-6, -(2**-7)]),
        (FP8, [17.0, 19.0, -3.3, 448.0, 463.0, 465.0, -1e30], 1.0, [16.0, 20.0, -3.25, 448.0, 448.0, 448.0, -448.0]),
        (FP8, [NAN, INF, -INF], 1.0, [0.0, 448.0, -448.0]),
        (FP8, [4.48, 9.0], 0.01, [448.0, 448.0]),
    ],
)
def test_what_is_stored_for_a_number(candidate: str, dtype: torch.dtype, x: list[float], scale: float, want: list[float]) -> None:
    """Nearest even, saturated: a number past the calibrated range must not wrap around (int8) or become NaN (fp8)."""
    numbers = torch.tensor(x).repeat(16, 1)[:, : len(x)]
    padded = torch.nn.functional.pad(numbers, (0, 16 - len(x)))
    stored = stored_by(candidate, padded, torch.full((16,), scale), dtype)
    assert stored.dtype == dtype
    assert stored[:, : len(x)].float().tolist() == [want] * 16


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_compiled_rounding_is_torchs_own(dtype: torch.dtype) -> None:
    """Every neighbourhood of a tie and of the limits, and random numbers of all sizes: bit for bit."""
    codes = torch.arange(-127, 128).float() if dtype == INT8 else torch.arange(256).to(torch.uint8).view(FP8).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, ties, ties.nextafter(torch.tensor(INF)), ties.nextafter(torch.tensor(-INF))])
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randn(4096, generator=generator) * 2.0 ** torch.randint(-14, 11, (4096,), generator=generator)
    numbers = torch.cat([near, sizes])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 16)
    stored = stored_by("cpu", numbers, torch.ones(16), dtype)
    assert torch.equal(stored.view(torch.uint8), to_codes(numbers, torch.ones(16), dtype).view(torch.uint8) & _sign_of(numbers, dtype))


def _sign_of(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits to compare: all, but no sign where a float8 number is rounded from a negative zero."""
    return torch.where(numbers == 0, 0x7F, 0xFF).to(torch.uint8) if dtype == FP8 else torch.full(numbers.shape, 0xFF, dtype=torch.uint8)


def test_two_keys_by_hand() -> None:
    """Scores 2 * 0 and 2 * 0.5 * ln 3 with a scale of ln(3) / 4 a step; weights 1/4 and 3/4 of the values -10 and 30 are 20."""
    batch, num_blocks = attention_batch([(1, 2)], block_size=2)
    k_cache, v_cache = (torch.zeros(num_blocks, 1, 2, 1, dtype=INT8) for _ in range(2))
    block = int(batch.block_tables[0, 0])
    k_cache[block, 0, :, 0] = torch.tensor([0, 2])
    v_cache[block, 0, :, 0] = torch.tensor([-1, 3])
    scales = KVScales(torch.tensor(3.0).log().view(1, 1) / 4, torch.tensor([[10.0]]))
    out = paged_attention(torch.full((1, 1, 1), 2.0), k_cache, v_cache, batch, 1.0, None, 0.0, scales)
    torch.testing.assert_close(out, torch.tensor([[20.0]]))


def test_scales_belong_to_heads_and_channels() -> None:
    """Two heads of two channels, four different steps: a mix-up of their order shows."""
    k_scale, v_scale = torch.tensor([[0.5, 1.0], [2.0, 4.0]]), torch.tensor([[1.0, 0.25], [8.0, 2.0]])
    qkv = torch.tensor([[9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])
    k_cache, v_cache = (torch.zeros(1, 2, 2, 2, dtype=INT8) for _ in range(2))
    turn, slots = torch.zeros(1, 0), torch.tensor([1])
    rope_store_kv(qkv, turn, turn, None, None, 1e-5, k_cache, v_cache, slots, 2, KVScales(k_scale, v_scale))
    k, v = read_kv(k_cache, v_cache, slots)
    assert k.tolist() == [[[2, 2], [2, 1]]]  # 3 / 2 is a tie
    assert v.tolist() == [[[5, 24], [1, 4]]]
    assert from_codes(v, v_scale).tolist() == [[[5.0, 6.0], [8.0, 8.0]]]
    assert not k_cache[:, :, 0].any() and not v_cache[:, :, 0].any()


@pytest.mark.parametrize("cache", CACHE_DTYPES)
def test_error_of_a_stored_number_is_half_a_step(cache: str) -> None:
    dtype = CACHE_DTYPES[cache]
    x = torch.randn(500, 2, 16, generator=torch.Generator().manual_seed(4))
    scale = x.abs().amax(0) / CODE_LIMITS[dtype]
    error = (from_codes(to_codes(x, scale, dtype), scale) - x).abs()
    step = scale if dtype == INT8 else torch.maximum(x.abs() / 8, scale * 2.0**-9)
    assert bool((error <= step * 0.5001).all())
