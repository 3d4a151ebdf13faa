"""Every Triton kernel and tiny engines on a real GPU (`make gpu-check` runs the same checks with a time limit and a table)."""

import pytest
from gpu_checks import Check, gpu_engine_checks, gpu_kernel_checks, no_gpu_reason
from gpu_plan import attention_form_checks, draft_checks, sampling_checks

REASON = no_gpu_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.mark.parametrize("check", gpu_kernel_checks(), ids=lambda check: check.name)
def test_kernel_on_gpu(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", gpu_engine_checks(), ids=lambda check: check.name)
def test_engine_on_gpu(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", [*attention_form_checks("cuda"), *sampling_checks("cuda")], ids=lambda check: check.name)
def test_forms_of_attention_and_drawing_on_gpu(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", draft_checks("cuda"), ids=lambda check: check.name)
def test_drafting_on_gpu(check: Check) -> None:
    check.run()
