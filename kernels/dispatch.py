"""THE dispatch point: which implementation of each op a run takes, and why the others declined.

An implementation is a module with functions named like the ops and, optionally, `supports(op, facts) -> str | None`: None accepts, a text
is the reason to decline; and `form(op, facts) -> function`, where an op has several forms and the run decides. Candidates are asked in
order; the reference is last and never declines. A candidate that accepts and then raises is an error: nothing is retried on another one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from dspark.kernels.facts import KernelFacts

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rope_store_kv",
    "paged_attention",
    "read_kv",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "moe_mlp",
    "copy_blocks",
    "copy_slots",
    "make_dense_linear",
    "make_wna16_linear",
    "make_fp8_linear",
    "make_int8_linear",
    "make_grouped_experts",
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "silu_and_mul_quantize",
)

CACHE_OPS = ("rope_store_kv", "paged_attention", "read_kv", "copy_blocks", "copy_slots")
"""Ops that share the KV cache. Its inner layout is the implementation's own, so one implementation takes all of them or none."""

_ELEMENTWISE = ("rms_norm", "add_rms_norm", "rope_store_kv", "read_kv", "silu_and_mul", "gelu_tanh_and_mul", "copy_blocks", "copy_slots")
_QUANTIZE = ("rms_norm_quantize", "add_rms_norm_quantize", "silu_and_mul_quantize")
_MODULES: dict[str, dict[str, str]] = {
    "triton": {
        **dict.fromkeys(_ELEMENTWISE, "dspark.kernels.triton.elementwise"),
        "paged_attention": "dspark.kernels.triton.attention",
        "make_wna16_linear": "dspark.kernels.triton.wna16",
        "make_fp8_linear": "dspark.kernels.triton.fp8",
        "make_int8_linear": "dspark.kernels.triton.int8",
        "make_grouped_experts": "dspark.kernels.triton.moe",
        **dict.fromkeys(_QUANTIZE, "dspark.kernels.triton.quantize"),
    },
    "cpu": {
        **dict.fromkeys(_ELEMENTWISE, "dspark.kernels.cpu.elementwise"),
        **dict.fromkeys(("copy_blocks", "copy_slots"), "dspark.kernels.cpu.page_copies"),
        "paged_attention": "dspark.kernels.cpu.attention",
        "moe_mlp": "dspark.kernels.cpu.moe",
        "make_dense_linear": "dspark.kernels.cpu.linear",
        "make_wna16_linear": "dspark.kernels.cpu.linear",
        "make_fp8_linear": "dspark.kernels.cpu.linear",
        "make_int8_linear": "dspark.kernels.cpu.int8",
    },
    "reference": {
        **dict.fromkeys(_ELEMENTWISE, "dspark.kernels.reference.elementwise"),
        "paged_attention": "dspark.kernels.reference.attention",
        "moe_mlp": "dspark.kernels.reference.moe",
        "make_dense_linear": "dspark.kernels.reference.linear",
        "make_wna16_linear": "dspark.kernels.reference.linear",
        "make_fp8_linear": "dspark.kernels.reference.linear",
        "make_int8_linear": "dspark.kernels.reference.linear",
        "make_grouped_experts": "dspark.kernels.reference.moe",
        **dict.fromkeys(_QUANTIZE, "dspark.kernels.reference.quantize"),
    },
}
CHOICES: dict[str, tuple[str, ...]] = {
    "auto": ("triton", "cpu", "reference"),
    "triton": ("triton", "reference"),
    "reference": ("reference",),
}


@dataclass
class Selection:
    """The implementation one op takes. declined: candidate name -> reason, in the order asked."""

    op: str
    taken: str
    function: Callable[..., Any]
    declined: dict[str, str] = field(default_factory=dict)


def decline_reason(candidate: str, op: str, facts: KernelFacts) -> str | None:
    """Why a candidate does not take an op, or None when it does."""
    module_name = _MODULES[candidate].get(op)
    if module_name is None:
        return "has no such kernel"
    if candidate == "triton" and facts.device != "cuda" and not facts.interpreted:
        return f"needs a GPU, the device is {facts.device}"
    if candidate == "cpu" and facts.device != "cpu":
        return f"needs the CPU, the device is {facts.device}"
    module = import_module(module_name)
    if not hasattr(module, op):
        return "has no such kernel"
    supports = getattr(module, "supports", None)
    return supports(op, facts) if supports else None


def select(op: str, facts: KernelFacts, choice: str = "auto") -> Selection:
    """Ask the candidates of `choice` in order. Raises KeyError for an unknown op or choice (a programming error)."""
    declined: dict[str, str] = {}
    for candidate in CHOICES[choice]:
        reason = decline_reason(candidate, op, facts)
        if reason is None and op in CACHE_OPS:
            others = {other: decline_reason(candidate, other, facts) for other in CACHE_OPS}
            reason = next((f"does not take {other}, which shares the cache: it {why}" for other, why in others.items() if why), None)
        if reason is None:
            module = import_module(_MODULES[candidate][op])
            form = getattr(module, "form", None)
            return Selection(op, candidate, form(op, facts) if form else getattr(module, op), declined)
        declined[candidate] = reason
    raise AssertionError(f"the reference declined {op}: {declined}")


def candidates(op: str) -> list[str]:
    """Names of the implementations that have this op, the reference last."""
    return [name for name in CHOICES["auto"] if op in _MODULES[name] and hasattr(import_module(_MODULES[name][op]), op)]


def implementation(candidate: str, op: str) -> Callable[..., Any]:
    """One candidate's function, whether or not it would be chosen (tests compare them)."""
    return getattr(import_module(_MODULES[candidate][op]), op)
