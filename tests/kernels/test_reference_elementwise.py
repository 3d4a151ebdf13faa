"""Reference norms, rope, activation, KV store and block copy against torch's own functions and numbers worked out by hand."""

import math

import pytest
import torch
from kernel_cases import CASES, Case, rms_norm_args, rope_store_kv_args

from dspark.kernels.reference import elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_equals_torch(dtype: torch.dtype) -> None:
    x, weight, eps = rms_norm_args(dtype, 0, 7, 67)
    want = torch.nn.functional.rms_norm(x.float(), (67,), weight.float(), eps).to(dtype)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, eps), want)


def test_rms_norm_by_hand() -> None:
    """(3, 4): mean square 12.5."""
    out = elementwise.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]]))


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    """The next layer reads the residual in its dtype: 256 + 1 is 256 in bfloat16, and that is what is normed."""
    x, residual = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16), torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16)
    normed, summed = elementwise.add_rms_norm(x, residual, torch.ones(2, dtype=torch.bfloat16), 0.0)
    assert summed.tolist() == [[256.0, 256.0]]
    assert normed.tolist() == [[1.0, 1.0]]


def test_gelu_tanh_and_mul_on_paper() -> None:
    """gelu(1) = (1 + tanh(sqrt(2 / pi) * 1.044715)) / 2 = (1 + tanh(0.833562)) / 2 = 0.841192, and far out the gate itself or nothing."""
    out = elementwise.gelu_tanh_and_mul(torch.tensor([[1.0, -20.0, 20.0, 10.0, 3.0, 0.5]]))
    torch.testing.assert_close(out, torch.tensor([[8.41192, 0.0, 10.0]]), rtol=1e-6, atol=1e-6)


def test_silu_and_mul_takes_the_gate_first() -> None:
    out = elementwise.silu_and_mul(torch.tensor([[1.0, -2.0, 10.0, 100.0]]))
    torch.testing.assert_close(out, torch.tensor([[10 / (1 + math.exp(-1)), -200 / (1 + math.exp(2))]]))


def test_rotation_is_half_split_by_hand() -> None:
    """A quarter turn takes (first, second) to (-second, first); dimensions past the rotated ones stay."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    out = elementwise.rotate(x, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert out.tolist() == [[[-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]]]


@pytest.mark.parametrize("case", [c for c in CASES["rope_store_kv"] if not c.is_empty and "cache" not in c.shape], ids=str)
def test_rope_store_kv_token_by_token(case: Case) -> None:
    """Each head rotated as complex numbers in float64, stored at its own slot, every other slot untouched."""
    qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, slots, num_heads, _ = case.args(torch.float32)
    head_dim, block_size, half = k_cache.shape[3], k_cache.shape[2], cos.shape[1]
    heads = qkv.double().view(qkv.shape[0], -1, head_dim)
    num_kv_heads = k_cache.shape[1]
    want_k, want_v = k_cache.clone(), v_cache.clone()

    def turned(x: torch.Tensor, norm: torch.Tensor | None, token: int) -> torch.Tensor:
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, (head_dim,), norm.double(), eps)
        angle = torch.complex(cos[token].double(), sin[token].double())
        pair = torch.complex(x[..., :half], x[..., half : 2 * half]) * angle
        return torch.cat([pair.real, pair.imag, x[..., 2 * half :]], -1).float()

    want_q = torch.stack([turned(heads[t, :num_heads], q_norm, t) for t in range(heads.shape[0])])
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        want_k[block, :, offset] = turned(heads[token, num_heads : num_heads + num_kv_heads], k_norm, token)
        want_v[block, :, offset] = heads[token, num_heads + num_kv_heads :].float()
    q = elementwise.rope_store_kv(qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, slots, num_heads)
    torch.testing.assert_close(q, want_q)
    torch.testing.assert_close(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


def test_rope_keeps_lengths() -> None:
    args = rope_store_kv_args(torch.float32, 3, 5, 4, 2, 64)
    before = args[0].view(5, -1, 64)[:, :4].norm(dim=-1)
    torch.testing.assert_close(elementwise.rope_store_kv(*args).norm(dim=-1), before)


def test_copy_blocks_copies_whole_blocks() -> None:
    k_cache, v_cache = torch.arange(6.0).view(3, 1, 2, 1), -torch.arange(6.0).view(3, 1, 2, 1)
    elementwise.copy_blocks(k_cache, v_cache, torch.tensor([0]), torch.tensor([2]))
    assert k_cache.flatten().tolist() == [0, 1, 2, 3, 0, 1]
    assert v_cache.flatten().tolist() == [0, -1, -2, -3, 0, -1]


def test_copy_slots_moves_a_path_towards_its_beginning() -> None:
    """Slot 1 is where slot 2 goes and whence slot 0 comes; the block's other heads and slots stay."""
    k_cache, v_cache = torch.arange(16.0).view(2, 2, 4, 1), torch.arange(16.0).view(2, 2, 4, 1) + 100
    elementwise.copy_slots(k_cache, v_cache, torch.tensor([1, 2, 6]), torch.tensor([0, 1, 2]))
    assert k_cache[0].flatten().tolist() == [1, 2, 10, 3, 5, 6, 14, 7] and k_cache[1].flatten().tolist() == list(range(8, 16))
    assert v_cache[0].flatten().tolist() == [101, 102, 110, 103, 105, 106, 114, 107]
