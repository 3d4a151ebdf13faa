"""Random inputs for every kernel op, on the shapes where kernels break; the same ones for every implementation.

`*_args(dtype, seed, ...)` builds the argument tuple of one op. `CASES[op]` lists the named edge shapes. `run(case, function, dtype)`
calls an implementation on copies and returns everything that it wrote, results and caches alike, so that two implementations
are compared by comparing two dicts. Linear ops are makers: their tuple is (weight, bias, x) and `run` applies the made function to x.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cache_cases import CACHE_SHAPES, MIXED, draw_caches, poisoned
from tree_cases import TREE_SHAPES, copy_slots_args, with_trees

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.dispatch import implementation
from dspark.kernels.facts import KernelFacts
from dspark.kernels.packing import pack_codes
from dspark.kernels.wna16 import Wna16Weight

EPS = 1e-5
Args = tuple[Any, ...]


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- elementwise ---------------------------------------------------------------------------------------------------------------


def rms_norm_args(dtype: torch.dtype, seed: int, num_tokens: int, hidden: int) -> Args:
    """(x [T, H], weight [H], eps)"""
    g = _generator(seed)
    return _randn(g, num_tokens, hidden, dtype=dtype), 1 + 0.1 * _randn(g, hidden, dtype=dtype), EPS


def add_rms_norm_args(dtype: torch.dtype, seed: int, num_tokens: int, hidden: int) -> Args:
    """(x [T, H], residual [T, H], weight [H], eps)"""
    g = _generator(seed)
    x, residual = _randn(g, num_tokens, hidden, dtype=dtype), _randn(g, num_tokens, hidden, dtype=dtype)
    return x, residual, 1 + 0.1 * _randn(g, hidden, dtype=dtype), EPS


def silu_and_mul_args(dtype: torch.dtype, seed: int, num_tokens: int, intermediate: int) -> Args:
    """(gate_up [T, 2 * I],)"""
    return (2 * _randn(_generator(seed), num_tokens, 2 * intermediate, dtype=dtype),)


gelu_tanh_and_mul_args = silu_and_mul_args


def rope_store_kv_args(
    dtype: torch.dtype,
    seed: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    qk_norm: bool = False,
    block_size: int = 16,
    cache: str | None = None,
) -> Args:
    """(qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, num_heads, kv_scales); slots are scattered, no two alike."""
    g = _generator(seed)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    num_blocks = max(1, 2 * -(-num_tokens // block_size))
    qkv = _randn(g, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angle = torch.rand(num_tokens, rotary_dim // 2, generator=g) * 2 * math.pi
    q_norm, k_norm = ((1 + 0.1 * _randn(g, head_dim, dtype=dtype)) if qk_norm else None for _ in range(2))
    k_cache, v_cache, kv_scales = draw_caches(g, (num_blocks, num_kv_heads, block_size, head_dim), dtype, cache)
    slots, _ = columns(*(torch.randperm(num_blocks * block_size, generator=g)[:num_tokens] for _ in range(2)))
    return qkv, angle.cos(), angle.sin(), q_norm, k_norm, EPS, k_cache, v_cache, slots, num_heads, kv_scales


def columns(*vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The vectors as columns of a table, whose elements are not side by side: a kernel that takes them so reads another column's."""
    return torch.stack(vectors, 1).unbind(1)


def copy_blocks_args(
    dtype: torch.dtype, seed: int, num_pairs: int, num_kv_heads: int, head_dim: int, block_size: int = 16, cache: str | None = None
) -> Args:
    """(k_cache, v_cache, source [n], target [n])"""
    g = _generator(seed)
    num_blocks = 2 * num_pairs + 3
    k_cache, v_cache, _ = draw_caches(g, (num_blocks, num_kv_heads, block_size, head_dim), dtype, cache)
    order = torch.randperm(num_blocks, generator=g)
    return k_cache, v_cache, *columns(order[:num_pairs], order[num_pairs : 2 * num_pairs])


# ---- attention -----------------------------------------------------------------------------------------------------------------


def attention_batch(sequences: list[tuple[int, int]], block_size: int, seed: int = 0) -> tuple[AttentionBatch, int]:
    """The batch of sequences given as (number of query tokens, context length), and the number of blocks of its cache.

    Blocks are scattered. Table entries past a context point outside the cache: a kernel that follows one crashes or reads garbage.
    """
    g = _generator(seed + 1)
    blocks_of = [-(-context // block_size) for _, context in sequences]
    num_blocks = sum(blocks_of) + 2
    order = torch.randperm(num_blocks, generator=g)
    tables = torch.full((len(sequences), max(blocks_of, default=0) + (2 if sequences else 0)), 1 << 24, dtype=torch.int32)
    positions, slots, used = [], [], 0
    for i, (queries, context) in enumerate(sequences):
        own = order[used : used + blocks_of[i]]
        used += blocks_of[i]
        tables[i, : len(own)] = own.int()
        position = torch.arange(context - queries, context)
        positions.append(position)
        slots.append(own[position // block_size] * block_size + position % block_size)
    counts = torch.tensor([0, *(queries for queries, _ in sequences)])
    empty = torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_start=counts.cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots) if slots else empty,
        positions=torch.cat(positions) if positions else empty,
        max_query_len=max((queries for queries, _ in sequences), default=0),
        max_context_len=max((context for _, context in sequences), default=0),
    )
    return batch, num_blocks


def paged_attention_args(
    dtype: torch.dtype,
    seed: int,
    sequences: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    window: int | None = None,
    softcap: float = 0.0,
    cache: str | None = None,
    trees: list[list[int] | None] | None = None,
) -> Args:
    """(q, k_cache, v_cache, batch, scale, window, softcap, kv_scales). Slots that no query may see are poisoned. trees: see with_trees."""
    g = _generator(seed)
    batch, num_blocks = attention_batch(sequences, block_size, seed)
    if trees is not None:
        batch = with_trees(batch, sequences, trees)
    q = _randn(g, batch.num_tokens, num_heads, head_dim, dtype=dtype)
    owned = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    for i, (_, context) in enumerate(sequences):
        position = torch.arange(context)
        owned[batch.block_tables[i, position // block_size].long() * block_size + position % block_size] = True
    k_cache, v_cache, kv_scales = draw_caches(g, (num_blocks, num_kv_heads, block_size, head_dim), dtype, cache)
    k_cache, v_cache = (poisoned(drawn, owned.view(num_blocks, 1, block_size, 1)) for drawn in (k_cache, v_cache))
    return q, k_cache, v_cache, batch, head_dim**-0.5, window, softcap, kv_scales


# ---- linear --------------------------------------------------------------------------------------------------------------------


def dense_linear_args(dtype: torch.dtype, seed: int, num_tokens: int, in_features: int, out_features: int, bias: bool = False) -> Args:
    """(weight [N, K], bias [N] or None, x [T, K])"""
    g = _generator(seed)
    weight = _randn(g, out_features, in_features, dtype=torch.float32).mul(in_features**-0.5).to(dtype)
    return weight, _randn(g, out_features, dtype=dtype) if bias else None, _randn(g, num_tokens, in_features, dtype=dtype)


def wna16_linear_args(
    dtype: torch.dtype,
    seed: int,
    num_tokens: int,
    in_features: int,
    out_features: int,
    bits: int = 4,
    symmetric: bool = True,
    group_size: int = 64,
    bias: bool = False,
) -> Args:
    """(Wna16Weight, bias [N] or None, x [T, K]); every code occurs, also those that no quantizer would choose."""
    g = _generator(seed)
    num_groups = in_features // (in_features if group_size == -1 else group_size)
    codes = torch.randint(0, 2**bits, (in_features, out_features), generator=g).to(torch.uint8)
    scales = (0.5 + torch.rand(num_groups, out_features, generator=g)) * 2.0 ** (1 - bits) * in_features**-0.5
    zeros = None if symmetric else torch.randint(0, 2**bits, (num_groups, out_features), generator=g).to(torch.uint8)
    weight = Wna16Weight(pack_codes(codes, bits), scales.half(), zeros, bits, in_features)
    return weight, _randn(g, out_features, dtype=dtype) if bias else None, _randn(g, num_tokens, in_features, dtype=dtype)


# ---- named edge cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One op on one shape. shape: keyword arguments of the op's `*_args` function."""

    op: str
    name: str
    make: Callable[..., Args]
    shape: dict[str, Any] = field(default_factory=dict)

    def args(self, dtype: torch.dtype, seed: int = 0) -> Args:
        return self.make(dtype, seed, **self.shape)

    def facts(self, dtype: torch.dtype, device: str = "cpu", **overrides: Any) -> KernelFacts:
        """The facts of a run in which this case could occur."""
        known = {name: self.shape.get(name, default) for name, default in _FACT_DEFAULTS.items()}
        return KernelFacts(device=device, dtype=dtype, **{**known, **overrides})

    @property
    def is_empty(self) -> bool:
        """No token at all: outputs have no rows, caches stay as they are."""
        return self.shape.get("num_tokens") == 0 or self.shape.get("sequences") == []

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


_FACT_DEFAULTS = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
MAKERS = {
    "rms_norm": rms_norm_args,
    "add_rms_norm": add_rms_norm_args,
    "silu_and_mul": silu_and_mul_args,
    "gelu_tanh_and_mul": gelu_tanh_and_mul_args,
    "rope_store_kv": rope_store_kv_args,
    "copy_blocks": copy_blocks_args,
    "copy_slots": copy_slots_args,
    "paged_attention": paged_attention_args,
    "make_dense_linear": dense_linear_args,
    "make_wna16_linear": wna16_linear_args,
}
_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    op: {
        "empty": {"num_tokens": 0, "hidden": 64},
        "one_token": {"num_tokens": 1, "hidden": 576},
        "odd": {"num_tokens": 5, "hidden": 67},
        "wide": {"num_tokens": 3, "hidden": 4096},
    }
    for op in ("rms_norm", "add_rms_norm")
}
_SHAPES |= {
    op: {
        "empty": {"num_tokens": 0, "intermediate": 96},
        "one_token": {"num_tokens": 1, "intermediate": 1536},
        "odd": {"num_tokens": 5, "intermediate": 77},
        "many": {"num_tokens": 33, "intermediate": 256},
    }
    for op in ("silu_and_mul", "gelu_tanh_and_mul")
}
_SHAPES |= {
    "rope_store_kv": {
        "empty": {"num_tokens": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        "one_token": {"num_tokens": 1, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        "d80": {"num_tokens": 7, "num_heads": 4, "num_kv_heads": 4, "head_dim": 80},
        "d96_partial": {"num_tokens": 5, "num_heads": 4, "num_kv_heads": 1, "head_dim": 96, "rotary_dim": 48},
        "d80_partial_32": {"num_tokens": 5, "num_heads": 2, "num_kv_heads": 2, "head_dim": 80, "rotary_dim": 32},
        "d128_norm": {"num_tokens": 19, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128, "qk_norm": True},
        "d96_norm": {"num_tokens": 3, "num_heads": 3, "num_kv_heads": 3, "head_dim": 96, "qk_norm": True},
        "d256": {"num_tokens": 3, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "block_size": 32},
        "d64_no_rope": {"num_tokens": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 0},
    },
    "copy_slots": {},
    "copy_blocks": {
        "none": {"num_pairs": 0, "num_kv_heads": 2, "head_dim": 64},
        "one": {"num_pairs": 1, "num_kv_heads": 3, "head_dim": 80},
        "some": {"num_pairs": 5, "num_kv_heads": 2, "head_dim": 128, "block_size": 32},
    },
    "paged_attention": {
        "empty": {"sequences": [], "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        "one_token": {"sequences": [(1, 1)], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        "decode": {"sequences": [(1, 5), (1, 16), (1, 17), (1, 70)], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        "decode_d80_mha": {"sequences": [(1, 3), (1, 40)], "num_heads": 2, "num_kv_heads": 2, "head_dim": 80},
        "decode_d96_gqa4": {"sequences": [(1, 31), (1, 32)], "num_heads": 8, "num_kv_heads": 2, "head_dim": 96},
        "decode_d128_gqa8": {"sequences": [(1, 50)], "num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
        "decode_d256": {"sequences": [(1, 20)], "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "block_size": 32},
        "decode_window": {"sequences": [(1, 5), (1, 70)], "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "window": 20},
        "decode_long": {"sequences": [(1, 700)], "num_heads": 3, "num_kv_heads": 1, "head_dim": 64},
        "prefill": {"sequences": [(1, 1), (16, 16), (37, 37)], "num_heads": 3, "num_kv_heads": 1, "head_dim": 64},
        "prefill_d80_mha": {"sequences": [(9, 9)], "num_heads": 2, "num_kv_heads": 2, "head_dim": 80},
        "prefill_d96_gqa4": {"sequences": [(20, 20)], "num_heads": 4, "num_kv_heads": 1, "head_dim": 96},
        "prefill_d128_gqa8": {"sequences": [(33, 33)], "num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
        "prefill_d256": {"sequences": [(12, 12)], "num_heads": 2, "num_kv_heads": 1, "head_dim": 256},
        "prefill_window": {"sequences": [(70, 70), (3, 3)], "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "window": 17},
        "window_1": {"sequences": [(4, 9), (1, 3)], "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "window": 1},
        "chunk": {"sequences": [(3, 300)], "num_heads": 4, "num_kv_heads": 1, "head_dim": 64},
        "chunk_window": {"sequences": [(40, 150)], "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "window": 50},
        "softcap": {"sequences": [(1, 33), (20, 41)], "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "softcap": 0.5},
        "softcap_window": {"sequences": [(1, 70), (9, 40)], "num_heads": 2, "num_kv_heads": 1, "head_dim": 256}
        | {"softcap": 50.0, "window": 20},
        "mixed": {"sequences": MIXED, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        "mixed_block_32": {"sequences": MIXED, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 32},
    },
    "make_dense_linear": {
        "empty": {"num_tokens": 0, "in_features": 64, "out_features": 32},
        "one_token": {"num_tokens": 1, "in_features": 576, "out_features": 192},
        "odd_bias": {"num_tokens": 5, "in_features": 67, "out_features": 35, "bias": True},
        "many": {"num_tokens": 65, "in_features": 128, "out_features": 256},
    },
    "make_wna16_linear": {
        "empty": {"num_tokens": 0, "in_features": 64, "out_features": 32},
        "w4_one_token": {"num_tokens": 1, "in_features": 576, "out_features": 192},
        "w4_g32": {"num_tokens": 5, "in_features": 96, "out_features": 40, "group_size": 32, "bias": True},
        "w4_g128_asym": {"num_tokens": 3, "in_features": 256, "out_features": 64, "symmetric": False, "group_size": 128},
        "w4_g64_asym_many": {"num_tokens": 70, "in_features": 128, "out_features": 72, "symmetric": False, "bias": True},
        "w4_one_group_tail": {"num_tokens": 2, "in_features": 100, "out_features": 33, "group_size": -1},
        "w4_one_group_asym": {"num_tokens": 17, "in_features": 160, "out_features": 48, "symmetric": False, "group_size": -1},
        "w8_g64": {"num_tokens": 1, "in_features": 192, "out_features": 64, "bits": 8},
        "w8_g128_asym": {"num_tokens": 18, "in_features": 128, "out_features": 96, "bits": 8, "symmetric": False, "group_size": 128},
        "w8_one_group_tail": {"num_tokens": 4, "in_features": 70, "out_features": 31, "bits": 8, "group_size": -1, "bias": True},
    },
}
CASES: dict[str, list[Case]] = {
    op: [Case(op, name, MAKERS[op], shape) for name, shape in {**shapes, **CACHE_SHAPES.get(op, {}), **TREE_SHAPES.get(op, {})}.items()]
    for op, shapes in _SHAPES.items()
}
ALL_CASES: list[Case] = [case for cases in CASES.values() for case in cases]


# ---- running -------------------------------------------------------------------------------------------------------------------


def copied(value: Any, device: str | torch.device = "cpu") -> Any:
    """A deep copy of an argument with its tensors on `device`: ops write into caches and may overwrite their inputs."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        return tuple(copied(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: copied(getattr(value, f.name), device) for f in dataclasses.fields(value) if f.init})
    return value


def call(op: str, function: Callable[..., Any], args: Args, facts: KernelFacts) -> dict[str, torch.Tensor]:
    """Run an op on these very arguments; everything it wrote, by name."""
    if op.startswith("make_"):
        weight, bias, x = args
        return {"y": function(weight, bias, facts)(x)}
    result = function(*args)
    if op == "add_rms_norm":
        return {"normed": result[0], "residual": result[1]}
    if op == "rope_store_kv":
        return {"q": result, "k_cache": args[6], "v_cache": args[7]}
    if op in ("copy_blocks", "copy_slots"):
        return {"k_cache": args[0], "v_cache": args[1]}
    if op.endswith("_quantize"):
        rows, residual = result if isinstance(result, tuple) else (result, None)
        return {"codes": rows.codes, "scales": rows.scales} | ({} if residual is None else {"residual": residual})
    return {"y": result}


def run(
    case: Case, function: Callable[..., Any], dtype: torch.dtype, seed: int = 0, device: str = "cpu", **facts: Any
) -> dict[str, torch.Tensor]:
    """One implementation on one case: inputs are made on the CPU, copied to `device`, outputs come back to the CPU."""
    outputs = call(case.op, function, copied(case.args(dtype, seed), device), case.facts(dtype, device, **facts))
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def expected(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the reference writes; for an empty batch what must come out, known without running anything."""
    if not case.is_empty:
        return run(case, implementation("reference", case.op), dtype, seed)
    args, shape = case.args(dtype, seed), case.shape
    none = torch.empty(0, dtype=dtype)
    if case.op == "rope_store_kv":
        return {"q": none.view(0, shape["num_heads"], shape["head_dim"]), "k_cache": args[6], "v_cache": args[7]}
    if case.op == "paged_attention":
        return {"y": none.view(0, shape["num_heads"] * shape["head_dim"])}
    if case.op == "add_rms_norm":
        return {"normed": args[0], "residual": args[1]}
    if case.op.endswith("_quantize"):
        codes = torch.empty(0, args[0].shape[1] // (2 if "mul" in case.op else 1), dtype=torch.uint8)
        codes = codes.view(torch.int8 if args[-1].kind == "int8" else torch.float8_e4m3fn)
        rows = {"codes": codes, "scales": torch.empty(0)}
        return rows | ({"residual": args[1]} if case.op.startswith("add") else {})
    width = shape.get("hidden") or shape.get("intermediate") or shape["out_features"]
    return {"y": none.view(0, width)}
