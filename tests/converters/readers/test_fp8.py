"""FP8 checkpoints: which block a scale is for, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import State, llama_config, llama_state
from quantized_checkpoints import fp8_weight, save_quantized

from dspark.converters.detect import open_checkpoint
from dspark.converters.readers.fp8 import Fp8Reader, block_of
from dspark.runtime.spec.errors import InputError, UnsupportedError

MODULE = "model.layers.0.mlp.down_proj"  # 128 outputs, 256 inputs
GENERATOR = torch.Generator().manual_seed(10)


def reader(tmp_path: Path, parts: State, **config: Any) -> Fp8Reader:
    state = {name: tensor.bfloat16() for name, tensor in llama_state(llama_config()).items() if name != f"{MODULE}.weight"}
    described = {"quant_method": "fp8", **config}
    source = save_quantized(tmp_path / "ckpt", llama_config(), {**state, **{f"{MODULE}.{leaf}": t for leaf, t in parts.items()}}, described)
    opened = open_checkpoint(source)
    assert isinstance(opened, Fp8Reader)
    return opened


@pytest.mark.parametrize(
    ("scales", "weight", "block"),
    [
        ((), (200, 300), (-1, -1)),
        ((1,), (200, 300), (-1, -1)),
        ((200, 1), (200, 300), (1, -1)),
        ((200,), (200, 300), (1, -1)),
        ((2, 3), (200, 300), (128, 128)),
        ((1, 1), (64, 64), (128, 128)),
        ((200, 3), (200, 300), (1, 100)),
        ((3, 2), (200, 300), None),
        ((2, 3, 1), (200, 300), None),
    ],
)
def test_shapes_of_scales_say_their_block(scales: tuple[int, ...], weight: tuple[int, int], block: tuple[int, int] | None) -> None:
    assert block_of(scales, weight, (128, 128)) == block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    codes, scales, _ = fp8_weight(torch.randn(128, 256, generator=GENERATOR), (64, 64))
    scales = scales.to(dtype)
    found = reader(tmp_path, {"weight": codes, "weight_scale_inv": scales}, weight_block_size=[64, 64], activation_scheme="dynamic")
    got = found.read_quantized(MODULE)
    assert torch.equal(got["qweight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(got["scales"], scales.float())
    want = codes.float() * scales.float().repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert torch.equal(found.read(f"{MODULE}.weight"), want)
    assert found.notes == ["activations stay in 16 bits: the checkpoint's FP8 activations are not used"]
    assert found.storage_dtype() == "bfloat16"


def test_scales_of_whole_tensors(tmp_path: Path) -> None:
    """Static FP8 of other programs: weight_scale, and an input_scale that is not used."""
    codes, scales, dense = fp8_weight(torch.randn(128, 256, generator=GENERATOR), (-1, -1))
    found = reader(tmp_path, {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(1.0)})
    assert torch.equal(found.read(f"{MODULE}.weight"), dense)
    assert f"{MODULE}.input_scale" not in found.tensors()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    codes, scales, _ = fp8_weight(torch.randn(128, 256, generator=GENERATOR), (128, 128))
    codes.view(torch.uint8)[0, 0] = 0xFF
    with pytest.raises(InputError, match=f"{MODULE}.weight .* not finite"):
        reader(tmp_path, {"weight": codes, "weight_scale_inv": scales}).read_quantized(MODULE)


def test_weights_without_fitting_scales_are_named(tmp_path: Path) -> None:
    codes, scales, _ = fp8_weight(torch.randn(128, 256, generator=GENERATOR), (64, 64))
    with pytest.raises(InputError, match="scales are for the tensor, each output, or blocks of 128 x 128"):
        reader(tmp_path, {"weight": codes, "weight_scale_inv": scales}).tensors()


def test_e5m2_is_refused(tmp_path: Path) -> None:
    parts = {"weight": torch.zeros(128, 256, dtype=torch.float8_e5m2), "weight_scale_inv": torch.ones(1, 2)}
    with pytest.raises(UnsupportedError, match="float8 e5m2, supported: e4m3"):
        reader(tmp_path, parts).tensors()
