"""Run as a script with TRITON_INTERPRET=1: Triton kernels, or whole engines on them, against the reference; one JSON line a check.

    python triton_interpreter.py [NAME ...]      NAME: a check's own name, or "kernels" for all of these

A process of its own because the variable must be set before triton is first imported and then holds for the whole process.
bfloat16 is left out: Triton's interpreter computes it wrongly.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_checks import engine_check
from kernel_cases import ALL_CASES, Case, expected, run
from random_kernel_cases import random_cases
from tolerances import assert_matches

from dspark.kernels.dispatch import decline_reason, implementation

DTYPES = {"float32": torch.float32, "float16": torch.float16}
CASES: list[Case] = [
    *(case for case in ALL_CASES if case.op != "make_dense_linear"),
    *random_cases("paged_attention", 1, 16),
    *random_cases("make_wna16_linear", 2, 10),
]
KERNEL_CHECKS: list[tuple[Case, str]] = [(case, dtype) for case in CASES for dtype in DTYPES]
_WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
ENGINE_CHECKS: dict[str, tuple[str, str, str | None, dict[str, Any], str | None]] = {
    "engine-llama-w4a16": ("llama", "float32", "w4a16", _WIDE, None),
    "engine-mistral-w8a16": ("mistral", "float32", "w8a16", {}, None),
    "engine-qwen3-fp16": ("qwen3", "float16", None, {}, None),
    "engine-qwen2": ("qwen2", "float32", None, {}, None),
    "engine-llama-w8a8": ("llama", "float32", "w8a8", _WIDE, None),
    "engine-mixtral": ("mixtral", "float32", None, {}, None),
    "engine-qwen3_moe-w4a16": ("qwen3_moe", "float32", "w4a16", {}, None),
    "engine-llama-fp8": ("llama", "float32", "fp8", _WIDE, None),
    "engine-llama-int8-cache": ("llama", "float32", None, _WIDE, "int8"),
    "engine-llama-fp8-cache": ("llama", "float32", None, _WIDE, "fp8"),
    "engine-llama-deterministic": ("llama", "float32", None, _WIDE, None),
}
"""Name -> family, dtype, scheme, changes to the tiny model, KV cache (as `engine_check` takes them)."""
_SETTINGS: dict[str, dict[str, Any]] = {"engine-llama-deterministic": {"deterministic": True}}


def check_id(case: Case, dtype: str) -> str:
    return f"{case}-{dtype}"


def check_kernel(case: Case, dtype: torch.dtype) -> None:
    """One case: the dispatcher would take the Triton kernel, and it writes what the reference writes."""
    reason = decline_reason("triton", case.op, case.facts(dtype, interpreted=True))
    assert reason is None, reason
    actual = run(case, implementation("triton", case.op), dtype, interpreted=True)
    assert_matches(case.op, actual, expected(case, dtype), dtype)


def checks(names: list[str]) -> dict[str, Callable[[], Any]]:
    """The named checks."""
    settings = {"device": "cpu", "kernels": "triton"}
    known: dict[str, Callable[[], Any]] = {
        name: partial(
            engine_check, family, dtype, scheme, settings | _SETTINGS.get(name, {}), overrides, interpreted=True, tokens=4, cache=cache
        )
        for name, (family, dtype, scheme, overrides, cache) in ENGINE_CHECKS.items()
    }
    kernels = {check_id(case, dtype): partial(check_kernel, case, DTYPES[dtype]) for case, dtype in KERNEL_CHECKS}
    known |= kernels
    wanted = [key for name in names for key in (kernels if name == "kernels" else [name])]
    return {name: known[name] for name in wanted}


def report_all(named: dict[str, Callable[[], Any]]) -> None:
    """Run checks and print one JSON line each: id, error (a traceback, or null), seconds."""
    for name, check in named.items():
        start, error = time.perf_counter(), None
        try:
            check()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"id": name, "error": error, "seconds": time.perf_counter() - start}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    report_all(checks(sys.argv[1:]))


if __name__ == "__main__":
    main()
