"""When the Triton kernels decline, with which reason, and that asking costs no import of triton."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_cases import wna16_linear_args

from dspark.kernels.dispatch import select
from dspark.kernels.facts import KernelFacts
from dspark.kernels.triton import attention, elementwise, wna16
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.launch import launch, require


def facts(**overrides: Any) -> KernelFacts:
    base: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    return KernelFacts(**{**base, "interpreted": True, **overrides})


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if triton were installed and had been imported under the interpreter; nothing is launched."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launcher, "find_spec", lambda name: object())


def test_declines_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    for module in (elementwise, attention, wna16):
        assert module.supports("rms_norm", facts()) == "triton is not installed"


def test_declines_the_interpreter_that_is_not_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in (elementwise.supports("rms_norm", facts()) or "")


@pytest.mark.usefixtures("interpreter")
def test_declines_what_the_kernels_lack() -> None:
    assert elementwise.supports("rms_norm", facts()) is None
    assert "bfloat16" in (elementwise.supports("rms_norm", facts(dtype=torch.bfloat16)) or "")
    assert elementwise.supports("rms_norm", facts(dtype=torch.float64)) == "has no float64"
    assert elementwise.supports("rms_norm", facts(head_dim=512)) is None
    assert elementwise.supports("rope_store_kv", facts(head_dim=512)) == "head_dim 512 is above 256"
    assert attention.supports("paged_attention", facts(head_dim=512)) == "head_dim 512 is above 256"


@pytest.mark.usefixtures("interpreter")
def test_deterministic_runs_are_taken() -> None:
    """By all of them, attention in a form of its own."""
    wanted = facts(deterministic=True)
    for module, op in (
        (elementwise, "rms_norm"),
        (elementwise, "rope_store_kv"),
        (attention, "paged_attention"),
        (wna16, "make_wna16_linear"),
    ):
        assert module.supports(op, wanted) is None
    assert select("paged_attention", wanted, "triton").function is attention.deterministic_paged_attention
    assert select("paged_attention", facts(), "triton").function is attention.paged_attention


def test_declines_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    on_gpu = facts(device="cuda", interpreted=False, dtype=torch.float16)
    assert elementwise.supports("rms_norm", on_gpu) == "needs compute capability 8.0, the device has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert elementwise.supports("rms_norm", on_gpu) is None


def test_wna16_refuses_weights_that_it_cannot_run() -> None:
    weight, bias, _ = wna16_linear_args(torch.float16, 0, num_tokens=1, in_features=48, out_features=8, group_size=24)
    with pytest.raises(ValueError, match="group size that 16 divides, not 24"):
        wna16.make_wna16_linear(weight, bias, facts())
    weight, bias, _ = wna16_linear_args(torch.float16, 0, num_tokens=1, in_features=64, out_features=8, bits=3)
    with pytest.raises(ValueError, match="not 3"):
        wna16.make_wna16_linear(weight, bias, facts())


def test_an_empty_grid_launches_nothing() -> None:
    launch(None, (0,))
    launch(None, (4, 0))


def test_require_tells_what_is_wrong() -> None:
    require(True, lambda: "unused")
    with pytest.raises(ValueError, match="because"):
        require(False, lambda: "because")


def test_choosing_kernels_never_imports_triton() -> None:
    """On a CPU run the 700 MB package stays untouched: not when dispatching, not when the launcher modules are imported."""
    code = """
import sys, torch
from dspark.kernels.ops import KernelFacts, Kernels
import dspark.kernels.triton.attention, dspark.kernels.triton.elementwise, dspark.kernels.triton.wna16
before = "triton" in sys.modules
Kernels(KernelFacts("cpu", torch.float32, 64, 4, 2, 16), "triton")
print(before, "triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_vector_whose_elements_are_apart_is_never_launched() -> None:
    """A kernel would read the elements between them: of (source, target) pairs it read targets as sources, and copied the wrong blocks."""
    pairs = torch.arange(12).view(6, 2)
    source = pairs.unbind(1)[0]
    launched: list[list[int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **config: launched.append(args[0].tolist())

    with pytest.raises(ValueError, match="6 elements 2 apart"):
        launch(Kernel(), (1,), source)
    launch(Kernel(), (1,), launcher.vector(source))
    launch(Kernel(), (1,), source[:1])
    assert launched == [[0, 2, 4, 6, 8, 10], [0]]
    assert launcher.vector(pairs[0]).data_ptr() == pairs[0].data_ptr(), "what is contiguous is not copied"
