"""How far an implementation may be from the reference: (relative, absolute) per op and dtype, in one table.

float32 rows allow another order of summation, 16-bit rows one or two units in the last place of the output (float16: 2**-11,
bfloat16: 2**-8) plus, where the op rounds inside as well (softmax weights before the second product), a little more.
"""

import torch

from dspark.kernels.kv_cache import CODE_LIMITS

_DEFAULT = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}
_EXACT = dict.fromkeys(_DEFAULT, (0.0, 0.0))
_OPS: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    "copy_blocks": _EXACT,
    "copy_slots": _EXACT,
    "paged_attention": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 1e-2)},
    "make_dense_linear": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)},
    "make_int8_linear": _EXACT,
    "make_fp8_linear": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)},
    "make_wna16_linear": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)},
}


def tolerance(op: str, dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol) for one op's outputs."""
    return _OPS.get(op, _DEFAULT)[dtype]


def assert_matches(op: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Compare everything an op wrote with what the reference wrote; NaN equals NaN (poisoned slots must stay poisoned)."""
    assert actual.keys() == expected.keys()
    rtol, atol = tolerance(op, dtype)
    for name, want in expected.items():
        if want.dtype in CODE_LIMITS:
            assert_codes_match(f"{op}: {name}", actual[name], want, exact=(rtol, atol) == (0.0, 0.0))
            continue
        torch.testing.assert_close(actual[name], want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{op}: {n}: {m}")


def assert_codes_match(name: str, actual: torch.Tensor, want: torch.Tensor, exact: bool = False) -> None:
    """Numbers of an 8-bit cache: at most one in 50 (one alone in a small cache) is a neighbour of the right one, none is further away."""
    assert actual.dtype == want.dtype, f"{name}: {actual.dtype}"
    steps = (_ordinal(actual) - _ordinal(want)).abs()
    off = int((steps > 0).sum())
    assert not off or (not exact and int(steps.max()) <= 1 and off <= max(1, steps.numel() // 50)), (
        f"{name}: {off} of {steps.numel()} numbers differ, by up to {int(steps.max())} steps"
    )


def _ordinal(codes: torch.Tensor) -> torch.Tensor:
    """Neighbouring numbers have neighbouring ordinals; both zeros have 0."""
    bits = codes.view(torch.int8).int()
    return bits if codes.dtype == torch.int8 else torch.where(bits < 0, -(bits & 0x7F), bits)
