"""The ops a model is made of: what everyone imports. `Kernels` binds each to the implementation chosen for one run.

T tokens, H hidden size, I intermediate size, D head_dim, K inputs, N outputs. Arithmetic is float32 inside, results have the input's dtype.
"""

from collections.abc import Callable
from typing import Any

import torch

from dspark.kernels.batch import AttentionBatch, TreeMask
from dspark.kernels.dispatch import OPS, Selection, select
from dspark.kernels.experts import ExpertWeights
from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows, input_format
from dspark.kernels.reference.moe import MoeFn
from dspark.kernels.wna16 import Wna16Weight

__all__ = [
    "AttentionBatch",
    "ExpertWeights",
    "Fp8Weight",
    "InputFormat",
    "Int8Weight",
    "KVScales",
    "KernelFacts",
    "Kernels",
    "LinearFn",
    "MoeFn",
    "QuantizedRows",
    "Rows",
    "TreeMask",
    "Wna16Weight",
    "input_format",
]

Rows = torch.Tensor | QuantizedRows
"""Inputs of a linear: numbers, or codes where the linear takes such (`input_format`)."""
LinearFn = Callable[[Any], torch.Tensor]
"""x [T, K] -> [T, N]; x are `Rows`."""


class Kernels:
    """One implementation per op, chosen once from the facts of the run."""

    def __init__(self, facts: KernelFacts, choice: str = "auto") -> None:
        self.facts = facts
        self.choice = choice
        self.selections: dict[str, Selection] = {op: select(op, facts, choice) for op in OPS}
        bound = {op: selection.function for op, selection in self.selections.items()}
        self.rms_norm: Callable[..., torch.Tensor] = bound["rms_norm"]
        """(x [T, H], weight [H], eps) -> [T, H]; a weight may be float32 beside a 16-bit x"""
        self.add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = bound["add_rms_norm"]
        """(x [T, H], residual [T, H], weight [H], eps) -> (normed, new residual); the residual may be updated in place"""
        self.rope_store_kv: Callable[..., torch.Tensor] = bound["rope_store_kv"]
        """(qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, num_heads, kv_scales = None) -> q [T, num_heads, D]; qkv may
        be overwritten. kv_scales: of an 8-bit cache"""
        self.paged_attention: Callable[..., torch.Tensor] = bound["paged_attention"]
        """(q [T, num_heads, D], k_cache, v_cache, AttentionBatch, scale, window, softcap = 0, kv_scales = None) -> [T, num_heads * D]"""
        self.read_kv: Callable[..., tuple[torch.Tensor, torch.Tensor]] = bound["read_kv"]
        """(k_cache, v_cache, slot_mapping [T]) -> what is stored there, [T, num_kv_heads, D] each: the inner layout is the kernels' own"""
        self.silu_and_mul: Callable[[torch.Tensor], torch.Tensor] = bound["silu_and_mul"]
        """gate_up [T, 2 * I] -> [T, I]"""
        self.gelu_tanh_and_mul: Callable[[torch.Tensor], torch.Tensor] = bound["gelu_tanh_and_mul"]
        """the same with GELU in its tanh form"""
        self.rms_norm_quantize: Callable[..., QuantizedRows] = bound["rms_norm_quantize"]
        """(x [T, H], weight [H], eps, InputFormat): rms_norm, as the codes that the next linear takes"""
        self.add_rms_norm_quantize: Callable[..., tuple[QuantizedRows, torch.Tensor]] = bound["add_rms_norm_quantize"]
        """(x [T, H], residual [T, H], weight [H], eps, InputFormat) -> (codes, new residual)"""
        self.silu_and_mul_quantize: Callable[..., QuantizedRows] = bound["silu_and_mul_quantize"]
        """(gate_up [T, 2 * I], InputFormat)"""
        self.moe_mlp: Callable[..., torch.Tensor] = bound["moe_mlp"]
        """(x [T, H], router_logits [T, E], E functions [n, H] -> [n, H], top_k, renormalize) -> [T, H]: experts times their shares"""
        self.copy_blocks: Callable[..., None] = bound["copy_blocks"]
        """(k_cache, v_cache, source ids, target ids): whole blocks"""
        self.copy_slots: Callable[..., None] = bound["copy_slots"]
        """(k_cache, v_cache, source slots, target slots): single tokens; no target is the source of a later pair"""

    def dense_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearFn:
        """The function x [T, K] -> x @ weight [N, K].T + bias; the weight may be re-laid, drop your own reference to it."""
        return self.selections["make_dense_linear"].function(weight, bias, self.facts)

    def wna16_linear(self, weight: Wna16Weight, bias: torch.Tensor | None = None) -> LinearFn:
        """The same for a quantized weight, its inputs in the order of the weight's perm; other widths are widened to 4- or 8-bit lanes."""
        return self.selections["make_wna16_linear"].function(weight.in_lanes(), bias, self.facts)

    def fp8_linear(self, weight: Fp8Weight, bias: torch.Tensor | None = None) -> LinearFn:
        """The same for a weight of 8-bit floating-point numbers, inputs rounded to such where it says so (but see
        KernelFacts.exact_activations)."""
        return self.selections["make_fp8_linear"].function(weight, bias, self.facts)

    def int8_linear(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> LinearFn:
        """The same for 8-bit integers; inputs are quantized token by token (see KernelFacts.exact_activations)."""
        if self.facts.exact_activations:
            return self.dense_linear(weight.dense(self.facts.dtype), bias)
        return self.selections["make_int8_linear"].function(weight, bias, self.facts)

    @property
    def groups_experts(self) -> bool:
        """Whether all experts of a layer run in one launch a projection (`grouped_experts`); else each is a function of its own."""
        return self.selections["make_grouped_experts"].taken != "reference"

    def expert_weight(self, weight: Any) -> Any:
        """An expert's weight as `grouped_experts` takes it: codes widened to lanes, and dense where inputs must stay as they are."""
        if isinstance(weight, Wna16Weight):
            return weight.in_lanes()
        exact = isinstance(weight, Int8Weight) and self.facts.exact_activations
        return weight.dense(self.facts.dtype) if exact else weight

    def grouped_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: str) -> MoeFn:
        """(x [T, H], router_logits [T, E], top_k, renormalize) -> [T, H] of experts x -> down(activation(gate_up(x))) without biases, by
        their weights side by side; see `moe_mlp`. activation: see ModelConfig.hidden_act."""
        return self.selections["make_grouped_experts"].function(gate_up, down, activation, self.facts)

    def explain(self) -> dict[str, dict[str, Any]]:
        """Per op: the implementation taken and why others declined. For `dspark doctor` and the metrics."""
        return {op: {"taken": s.taken, "declined": dict(s.declined)} for op, s in self.selections.items()}
