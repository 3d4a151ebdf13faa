"""All that benchmarks/gpu_check.py does, in order of value: a run that is cut short has seen what matters most."""

from __future__ import annotations

from functools import partial

import gpu_drafts
import gpu_models
import gpu_timings
import gpu_tuning
import torch
import triton_attention
import triton_sampling
from gpu_checks import BF16, FP32, LARGE_CASES, Check, gpu_engine_checks, gpu_kernel_checks
from kernel_cases import CASES
from triton_interpreter import check_kernel

from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.machine import this_gpu


def all_checks(device: str = "cuda") -> list[Check]:
    """What is right at real shapes, what is fast, then every edge. device "cpu" is for the names alone."""
    sheet = this_gpu()[2] if device == "cuda" else None
    kernels, engines = gpu_kernel_checks(), gpu_engine_checks()
    large = {f"{case}-bf16" for case in LARGE_CASES}
    at_real_shapes = [check for check in kernels if check.name in large]
    rest = [check for check in kernels if check.name not in large]
    timings = timing_checks(gpu_timings.LLAMA, device, sheet)
    models = model_checks(gpu_models.CASES, device, sheet)
    forms = [*attention_form_checks(device), *sampling_checks(device)]
    tuning = tuning_checks(gpu_timings.LLAMA, device)
    return [*at_real_shapes, *engines[:3], *draft_checks(device), *timings, *models, *tuning, *forms, *engines[3:], *rest]


def dry_checks() -> list[Check]:
    """A few of each kind with tiny shapes on a CPU under Triton's interpreter: whether the checks themselves work."""
    ops = ("paged_attention", "make_wna16_linear", "rms_norm")
    kernels = [Check(f"{case}-fp32", partial(_interpreted, case)) for op in ops for case in CASES[op][:2]]
    timings = timing_checks(gpu_timings.TINY, "cpu", None)
    models = model_checks(gpu_models.TINY_CASES, "cpu", None, interpreted=True)
    forms = [*attention_form_checks("cpu")[:1], *sampling_checks("cpu")[:1]]
    drafts = [Check("drafts-siblings", partial(gpu_drafts.drafts_check, "siblings", "cpu", tokens=6))]
    return [*kernels, *timings, *models, *tuning_checks(gpu_timings.TINY, "cpu")[-2:], *forms, *drafts]


def _interpreted(case: triton_attention.Case) -> str:
    check_kernel(case, FP32)
    return "equal"


def timing_checks(shapes: gpu_timings.Shapes, device: str, sheet: Device | None) -> list[Check]:
    """Kernels by the clock."""
    runs = gpu_timings.timing_runs(shapes, device)
    checks = [Check(f"time-{name}", partial(gpu_timings.timing_check, make, device, sheet)) for name, make in runs]
    for rows in shapes.drawn_rows:
        for name, options in (("greedy", {}), ("random", {"top_p": 1.0, "top_k": 0}), ("top_p", {"top_p": 0.9, "top_k": 50})):
            checks.append(Check(f"time-draw_{name}_{rows}", partial(gpu_timings.draw_check, shapes, rows, options, device)))
    return checks


def model_checks(cases: tuple[gpu_models.ModelCase, ...], device: str, sheet: Device | None, interpreted: bool = False) -> list[Check]:
    """Steps of whole models by the clock."""
    return [Check(f"model-{case}", partial(gpu_models.model_check, case, device, sheet, interpreted)) for case in cases]


def tuning_checks(shapes: gpu_timings.Shapes, device: str) -> list[Check]:
    """What measuring tiles brings at a few shapes."""
    return [Check(f"tuning-{name}", run) for name, run in gpu_tuning.tuning_runs(shapes, device)]


def attention_form_checks(device: str) -> list[Check]:
    """Shared contexts and the deterministic form: right, and the same to the last bit whatever the batch."""
    dtype = BF16 if device == "cuda" else FP32
    beside = partial(_done, triton_attention.batch_invariance)
    checks = [Check(f"attention-batch_invariance_{seed}", partial(beside, seed, (dtype,), device)) for seed in range(8)]
    checks += [Check(f"attention-tree_nodes_{seed}", partial(_done, triton_attention.tree_nodes, seed, dtype, device)) for seed in range(4)]
    for name, shape in triton_attention.SPLIT_SHAPES.items():
        checks.append(Check(f"attention-split_{name}", partial(_done, triton_attention.check_split, shape, dtype, (1, 2), device)))
        checks.append(Check(f"attention-deterministic_{name}", partial(_done, triton_attention.check_deterministic, shape, dtype, device)))
    return checks


def draft_checks(device: str) -> list[Check]:
    """Whole engines that draft: halves in turn, replayed steps, a draft model on a stream of its own; greedy, and drawn at random."""
    how = [(kind, 0.0) for kind in gpu_drafts.KINDS] + [("draft-model", 1.0)]
    return [
        Check(f"drafts-{kind}{'-drawn' if temperature else ''}", partial(gpu_drafts.drafts_check, kind, device, temperature))
        for kind, temperature in how
    ]


def sampling_checks(device: str) -> list[Check]:
    """Tokens that are drawn on the device, against the slow clear forms on the host."""
    checks = [
        Check("sampling-noise", partial(_done, triton_sampling.check_noise, device)),
        Check("sampling-edits", partial(_done, triton_sampling.check_edits, device)),
        Check("sampling-cuts", partial(_done, triton_sampling.check_cuts_among_equals, device)),
    ]
    checks += [
        Check(f"sampling-best_{str(dtype)[6:]}", partial(_done, triton_sampling.check_best, dtype, device))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    for kind in triton_sampling.KINDS:
        checks.append(Check(f"sampling-draws_{kind}", partial(_done, triton_sampling.check_draws, kind, 9000, device)))
    return checks


def _done(check: object, *arguments: object) -> str:
    assert callable(check)
    check(*arguments)
    return "right"
