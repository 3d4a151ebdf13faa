"""The dispatch point: who is asked, in which order, who declines and with which reason."""

from types import ModuleType
from typing import Any

import pytest
import torch

from dspark.kernels import dispatch
from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Kernels


def facts(device: str = "cpu", dtype: torch.dtype = torch.float32, **overrides: Any) -> KernelFacts:
    return KernelFacts(device, dtype, head_dim=64, num_heads=9, num_kv_heads=3, block_size=16, **overrides)


def module(**functions: Any) -> ModuleType:
    made = ModuleType("fake")
    made.__dict__.update(functions)
    return made


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """One op, `silu_and_mul`, with a fake module for each candidate."""
    modules = {name: module(silu_and_mul=f"{name} function") for name in ("triton", "cpu", "reference")}
    monkeypatch.setattr(dispatch, "_MODULES", {name: {"silu_and_mul": name} for name in modules})
    monkeypatch.setattr(dispatch, "import_module", modules.__getitem__)
    return modules


def test_every_op_has_a_reference() -> None:
    for op in dispatch.OPS:
        selection = dispatch.select(op, facts(), "reference")
        assert (selection.taken, selection.declined) == ("reference", {})
        assert callable(selection.function)


def test_first_candidate_that_accepts_is_taken(fakes: dict[str, ModuleType]) -> None:
    selection = dispatch.select("silu_and_mul", facts())
    assert (selection.taken, selection.function) == ("cpu", "cpu function")
    assert selection.declined == {"triton": "needs a GPU, the device is cpu"}


def test_on_a_gpu_triton_comes_first(fakes: dict[str, ModuleType]) -> None:
    selection = dispatch.select("silu_and_mul", facts("cuda"))
    assert (selection.taken, selection.declined) == ("triton", {})


def test_under_the_interpreter_triton_runs_on_the_cpu(fakes: dict[str, ModuleType]) -> None:
    assert dispatch.select("silu_and_mul", facts(interpreted=True)).taken == "triton"


def test_reasons_are_kept_in_the_order_asked(fakes: dict[str, ModuleType]) -> None:
    asked = []

    def supports(op: str, seen: KernelFacts) -> str:
        asked.append((op, seen.head_dim))
        return "not today"

    fakes["triton"].__dict__["supports"] = supports
    selection = dispatch.select("silu_and_mul", facts("cuda"))
    assert selection.taken == "reference"
    assert list(selection.declined.items()) == [("triton", "not today"), ("cpu", "needs the CPU, the device is cuda")]
    assert asked == [("silu_and_mul", 64)]


def test_a_module_without_the_function_declines(fakes: dict[str, ModuleType]) -> None:
    del fakes["cpu"].__dict__["silu_and_mul"]
    selection = dispatch.select("silu_and_mul", facts())
    assert (selection.taken, selection.declined["cpu"]) == ("reference", "has no such kernel")


def test_a_candidate_that_raises_is_an_error(fakes: dict[str, ModuleType]) -> None:
    """A broken kernel must never be hidden behind the reference."""

    def supports(op: str, seen: KernelFacts) -> str | None:
        raise RuntimeError("broken")

    fakes["cpu"].__dict__["supports"] = supports
    with pytest.raises(RuntimeError, match="broken"):
        dispatch.select("silu_and_mul", facts())


def test_the_choice_limits_the_candidates(fakes: dict[str, ModuleType]) -> None:
    assert dispatch.select("silu_and_mul", facts(), "reference").taken == "reference"
    assert list(dispatch.select("silu_and_mul", facts(), "triton").declined) == ["triton"]  # the CPU kernels are not asked


def test_unknown_names_are_programming_errors() -> None:
    with pytest.raises(KeyError):
        dispatch.select("rms_norm", facts(), "fastest")
    with pytest.raises(KeyError):
        dispatch.implementation("reference", "no_such_op")
    with pytest.raises(KeyError):
        dispatch.implementation("no_such_candidate", "rms_norm")


def test_candidates_end_with_the_reference(fakes: dict[str, ModuleType]) -> None:
    assert dispatch.candidates("silu_and_mul") == ["triton", "cpu", "reference"]
    assert dispatch.implementation("cpu", "silu_and_mul") == "cpu function"


def test_explain_names_every_op_and_reason() -> None:
    explained = Kernels(facts(), "triton").explain()
    assert set(explained) == set(dispatch.OPS)
    assert explained["rms_norm"] == {"taken": "reference", "declined": {"triton": "needs a GPU, the device is cpu"}}
    assert explained["make_dense_linear"]["declined"] == {"triton": "has no such kernel"}


def test_kernels_bind_the_selected_functions() -> None:
    kernels = Kernels(facts(), "reference")
    x = torch.randn(3, 8)
    assert torch.equal(kernels.rms_norm(x, torch.ones(8), 1e-5), dispatch.implementation("reference", "rms_norm")(x, torch.ones(8), 1e-5))
    weight = torch.randn(4, 8)
    assert torch.equal(kernels.dense_linear(weight)(x), x @ weight.T)
    assert facts().query_group == 3
