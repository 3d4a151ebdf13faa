"""AWQ checkpoints, module by module: the three layouts, told apart by shapes, hold the same integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import State, llama_config, llama_state
from quantized_checkpoints import Integers, awq_fast_parts, awq_gemm_parts, awq_gemv_parts, integers, save_quantized, stream_down

from dspark.converters.detect import open_checkpoint
from dspark.converters.readers.awq import AwqReader, padded_groups
from dspark.runtime.spec.errors import InputError, UnsupportedError

MODULE = "model.layers.0.mlp.down_proj"  # 128 outputs, 256 inputs
GENERATOR = torch.Generator().manual_seed(8)
LAYOUTS: dict[str, Callable[[Integers], State]] = {"gemm": awq_gemm_parts, "gemv": awq_gemv_parts, "gemv_fast": awq_fast_parts}


def quantized(group_size: int = 64, symmetric: bool = False) -> Integers:
    return integers(torch.randn(128, 256, generator=GENERATOR) * 0.1 + 0.05, 4, group_size, symmetric)


def reader(tmp_path: Path, parts: State, **config: Any) -> AwqReader:
    state = {name: tensor.half() for name, tensor in llama_state(llama_config()).items() if name != f"{MODULE}.weight"}
    described = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", **config}
    source = save_quantized(tmp_path / "ckpt", llama_config(), {**state, **{f"{MODULE}.{leaf}": t for leaf, t in parts.items()}}, described)
    opened = open_checkpoint(source)
    assert isinstance(opened, AwqReader)
    return opened


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("says_group", [True, False])
def test_integers_are_kept(tmp_path: Path, layout: str, group_size: int, says_group: bool) -> None:
    """The version in the config is not looked at; where groups are padded, the config's size is, or the only one that fits."""
    q = quantized(group_size)
    parts = LAYOUTS[layout](q)
    found = reader(tmp_path, parts, **({"group_size": group_size} if says_group else {}))
    got = found.read_quantized(MODULE)
    assert torch.equal(got["qweight"], stream_down(q.codes, 4))
    assert torch.equal(got["zeros"].long(), q.zeros)
    assert torch.equal(got["scales"], q.scales)
    assert torch.equal(found.read(f"{MODULE}.weight"), q.dense())


def test_padding_of_groups_by_hand() -> None:
    """K 256: 2, 4 and 8 groups in one word of eight each, kept in one, two and four words."""
    assert [padded_groups(256, size) for size in (128, 64, 32)] == [8, 16, 32]
    assert [padded_groups(4096, size) for size in (4096, 128, 64, 32)] == [8, 32, 64, 128]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_points_of_eight_everywhere_are_symmetric(tmp_path: Path, layout: str) -> None:
    found = reader(tmp_path, LAYOUTS[layout](quantized(symmetric=True)), group_size=64)
    assert found.quantized()[MODULE].symmetric and set(found.read_quantized(MODULE)) == {"qweight", "scales"}


def test_one_group(tmp_path: Path) -> None:
    """group_size -1 means all inputs."""
    q = quantized(-1)
    found = reader(tmp_path, awq_gemm_parts(q), group_size=-1)
    assert found.quantized()[MODULE].group_size == -1
    assert torch.equal(found.read(f"{MODULE}.weight"), q.dense())


def test_zero_points_between_whole_numbers_are_refused(tmp_path: Path) -> None:
    parts = awq_fast_parts(quantized())
    parts["qzeros"][0, 0] = -parts["scales"][0, 0] * 3.5
    with pytest.raises(InputError, match="zero points that are no whole numbers of 0"):
        reader(tmp_path, parts, group_size=64).tensors()


def test_other_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="AWQ of 8 bits, supported: 4"):
        reader(tmp_path, awq_gemm_parts(quantized()), bits=8).tensors()


def test_groups_that_do_not_divide_are_named(tmp_path: Path) -> None:
    parts = awq_gemm_parts(quantized())
    parts = {**parts, "scales": parts["scales"][:3].contiguous(), "qzeros": parts["qzeros"][:3].contiguous()}
    with pytest.raises(InputError, match=f"{MODULE} of .* 3 groups do not divide 256 inputs"):
        reader(tmp_path, parts).tensors()


def test_zero_points_of_another_shape_are_named(tmp_path: Path) -> None:
    parts = awq_gemm_parts(quantized())
    with pytest.raises(InputError, match=r"qzeros \[4, 15\].*qzeros must be \[4, 16\]"):
        reader(tmp_path, {**parts, "qzeros": parts["qzeros"][:, :15].contiguous()}).tensors()
