"""Run as a script with TRITON_INTERPRET=1: every Triton kernel against the reference, one JSON line a check.

A process of its own because the variable must be set before triton is first imported and then holds for the whole process.
bfloat16 is left out: Triton's interpreter computes it wrongly.
"""

import json
import time
import traceback

import torch
from kernel_cases import ALL_CASES, Case, expected, random_cases, run
from tolerances import assert_matches

from dspark.kernels.dispatch import decline_reason, implementation

DTYPES = {"float32": torch.float32, "float16": torch.float16}
CASES: list[Case] = [
    *(case for case in ALL_CASES if case.op != "make_dense_linear"),
    *random_cases("paged_attention", 1, 16),
    *random_cases("make_wna16_linear", 2, 10),
]
CHECKS: list[tuple[Case, str]] = [(case, dtype) for case in CASES for dtype in DTYPES]


def check_id(case: Case, dtype: str) -> str:
    return f"{case}-{dtype}"


def check(case: Case, dtype: torch.dtype) -> None:
    """One case: the dispatcher would take the Triton kernel, and it writes what the reference writes."""
    reason = decline_reason("triton", case.op, case.facts(dtype, interpreted=True))
    assert reason is None, reason
    actual = run(case, implementation("triton", case.op), dtype, interpreted=True)
    assert_matches(case.op, actual, expected(case, dtype), dtype)


def main() -> None:
    torch.set_num_threads(1)
    for case, dtype in CHECKS:
        start, error = time.perf_counter(), None
        try:
            check(case, DTYPES[dtype])
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"id": check_id(case, dtype), "error": error, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
