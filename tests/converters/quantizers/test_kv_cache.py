"""Scales of the KV cache from what calibration sees."""

from pathlib import Path

import pytest
import torch
from engine_runs import tiny_engine
from kv_engines import observe

from dspark.converters.quantizers.kv_cache import KVObserver, few_tokens_note, kv_cache_config, kv_scales
from dspark.kernels.ops import KernelFacts, Kernels
from dspark.runtime.spec.errors import InputError

ABSMAX = torch.tensor([[2.0, 8.0], [0.0, 1.0], [0.0, 0.0]])
"""Three heads of two channels: the smaller one is the quantile of a head."""


@pytest.mark.parametrize(
    ("dtype", "granularity", "margin", "want"),
    [
        ("int8", "channel", 1.0, [[2 / 127, 8 / 127], [1 / 256 / 127, 1 / 127], [1 / 256 / 127] * 2]),
        ("int8", "channel", 1.5, [[3 / 127, 12 / 127], [1.5 / 256 / 127, 1.5 / 127], [1.5 / 256 / 127] * 2]),
        ("fp8", "head", 1.0, [[8 / 448] * 2, [1 / 448] * 2, [1 / 448] * 2]),
        ("int8", "tensor", 1.0, [[8 / 127] * 2] * 3),
    ],
)
def test_scales_by_hand(dtype: str, granularity: str, margin: float, want: list[list[float]]) -> None:
    """A channel that was always zero must not get the scale 0, nor one so small that its first word saturates."""
    scales = kv_scales(ABSMAX, kv_cache_config(dtype, granularity, margin))
    torch.testing.assert_close(scales, torch.tensor(want))
    assert scales.dtype == torch.float32 and scales.is_contiguous()


def test_only_outliers_have_a_scale_of_their_own() -> None:
    """Eleven channels: the tenth in size, 5, is the range of all that are smaller; a small range saturates on other text first."""
    absmax = torch.tensor([[0.0, 1.0, 2.0, 3.0, 90.0, 4.0, 4.5, 0.5, 5.0, 1.5, 2.5]])
    scales = kv_scales(absmax, kv_cache_config("int8", margin=1.0)) * 127
    torch.testing.assert_close(scales, torch.where(absmax == 90, 90.0, 5.0))


def test_little_text_is_noted() -> None:
    assert few_tokens_note(kv_cache_config("int8", num_tokens=2048)) == []
    assert "calibrated on 154 tokens" in few_tokens_note(kv_cache_config("int8", num_tokens=154))[0]


@pytest.mark.parametrize(("dtype", "granularity", "margin"), [("int4", "head", 1.0), ("int8", "token", 1.0), ("int8", "head", 0.9)])
def test_nonsense_is_refused(dtype: str, granularity: str, margin: float) -> None:
    with pytest.raises(ValueError, match="no KV cache of"):
        kv_cache_config(dtype, granularity, margin)


def observed(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> KVObserver:
    """Batches of keys and values [T, heads, 16], put into caches by the reference."""
    kernels = Kernels(KernelFacts("cpu", torch.float32, 16, 1, batches[0][0].shape[1], 16), "reference")
    observer = KVObserver(kernels)
    for keys, values in batches:
        num_tokens, num_kv_heads, _ = keys.shape
        caches = tuple(torch.full((2, num_kv_heads, 16, 16), 99.0) for _ in range(2))  # slots of nobody hold anything
        qkv = torch.cat([torch.zeros(num_tokens, 16), keys.flatten(1), values.flatten(1)], 1)
        slots, turn = torch.arange(num_tokens) + 3, torch.zeros(num_tokens, 0)
        kernels.rope_store_kv(qkv, turn, turn, None, None, 1e-5, *caches, slots, 1)
        observer(caches, slots)
    return observer


def test_largest_magnitudes_over_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(n, 2, 16, generator=generator), torch.randn(n, 2, 16, generator=generator)) for n in (5, 20, 1)]
    observer = observed(batches)
    assert torch.equal(observer.k_absmax, torch.cat([keys for keys, _ in batches]).abs().amax(0))
    assert torch.equal(observer.v_absmax, torch.cat([values for _, values in batches]).abs().amax(0))
    assert observer.num_tokens == 26
    tensors = observer.tensors(3, kv_cache_config("int8"))
    assert list(tensors) == ["model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_scale"]


def test_values_that_are_not_finite_are_an_error() -> None:
    values = torch.zeros(2, 1, 16)
    values[1, 0, 3] = float("nan")
    with pytest.raises(InputError, match="layer 7 computes values that are not finite"):
        observed([(torch.ones(2, 1, 16), values)]).tensors(7, kv_cache_config("fp8"))
    with pytest.raises(ValueError, match="has seen no token"):
        KVObserver(Kernels(KernelFacts("cpu", torch.float32, 16, 1, 1, 16), "reference")).tensors(0, kv_cache_config("fp8"))


def test_a_model_is_observed_alike_through_any_cache_layout(tmp_path: Path) -> None:
    """The CPU kernels keep keys dimension-major: read as plain pages, the channels of a head would be mixed with its tokens."""
    engine = tiny_engine(tmp_path, "qwen3")
    samples = [list(range(5, 45)), [7], list(range(100, 133))]
    for ours, reference in zip(observe(engine, samples), observe(engine, samples, kernels="reference"), strict=True):
        torch.testing.assert_close(ours.k_absmax, reference.k_absmax)
        torch.testing.assert_close(ours.v_absmax, reference.v_absmax)
        assert ours.num_tokens == 74
