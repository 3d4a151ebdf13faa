"""How far an implementation may be from the reference: (relative, absolute) per op and dtype, in one table.

float32 rows allow another order of summation, 16-bit rows one or two units in the last place of the output (float16: 2**-11,
bfloat16: 2**-8) plus, where the op rounds inside as well (softmax weights before the second product), a little more.
"""

import torch

_DEFAULT = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}
_EXACT = dict.fromkeys(_DEFAULT, (0.0, 0.0))
_OPS: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    "copy_blocks": _EXACT,
    "paged_attention": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 1e-2)},
    "make_dense_linear": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)},
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
        torch.testing.assert_close(actual[name], want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{op}: {n}: {m}")
