"""The time of single kernels at the shapes of Llama-3-8B, beside the bytes that they must move and torch's own kernels.

A timing is an entry that `benchmarks/roofline.py --measured` reads (docs/roofline.md), and, where torch has such a kernel, `torch_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from device_clock import seconds_of
from gpu_models import BLOCK_SIZE, RandomWeights, decode_batch

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.dispatch import implementation
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.triton import sampling
from dspark.runtime.layers.linear import build_weight
from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.measured import timed_kernels
from dspark.runtime.spec.quant import QuantConfig, QuantScheme, preset

Record = dict[str, Any]
Run = Callable[[], Any]
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Shapes:
    """What is timed. attention: (sequences, query tokens, context tokens). linears: (outputs, inputs). The rest are rows of each."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: tuple[tuple[int, int, int], ...]
    linears: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    norm_rows: tuple[int, ...]
    hidden: int
    vocab_size: int
    drawn_rows: tuple[int, ...]
    schemes: tuple[str, ...] = ("w4a16", "w8a8", "fp8")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


LLAMA = Shapes(
    torch.bfloat16,
    *(32, 8, 128),
    attention=((1, 1, 4096), (64, 1, 4096), (1, 2048, 2048), (1, 1, 512), (64, 1, 512), (1, 8, 4096)),
    linears=((28672, 4096), (4096, 14336)),
    rows=(1, 64, 512),
    norm_rows=(64, 2048),
    hidden=4096,
    vocab_size=128256,
    drawn_rows=(1, 64),
)
TINY = Shapes(
    torch.float32,
    *(4, 2, 32),
    attention=((2, 1, 40), (1, 5, 20)),
    linears=((64, 128),),
    rows=(2,),
    norm_rows=(3,),
    hidden=64,
    vocab_size=500,
    drawn_rows=(2,),
)


def timing_runs(shapes: Shapes, device: str) -> list[tuple[str, Callable[[], tuple[Record, Run, Run | None]]]]:
    """(name, what makes the record, the call to time and torch's own), what matters most first."""
    found: list[tuple[str, Callable[[], tuple[Record, Run, Run | None]]]] = []
    for sequences, queries, context in shapes.attention:
        name = f"attention_{sequences}x{queries}_in_{context}"
        found.append((name, partial(_attention, shapes, device, sequences, queries, context)))
    decodes = [step for step in shapes.attention if step[1] == 1]
    for scheme in shapes.schemes:
        for outputs, inputs in shapes.linears:
            for rows in shapes.rows:
                found.append((f"{scheme}_{rows}x{inputs}_to_{outputs}", partial(_linear, shapes, device, scheme, rows, outputs, inputs)))
    for kind in CACHE_DTYPES:
        for sequences, queries, context in decodes[:2]:
            name = f"attention_{sequences}x{queries}_in_{context}_{kind}"
            found.append((name, partial(_attention, shapes, device, sequences, queries, context, kind)))
    for sequences, queries, context in decodes[:2]:
        name = f"attention_{sequences}x{queries}_in_{context}_deterministic"
        found.append((name, partial(_attention, shapes, device, sequences, queries, context, "", True)))
    for rows in shapes.norm_rows:
        found += [(f"{op}_{rows}", partial(_rows, shapes, device, op, rows)) for op in ("add_rms_norm", "rms_norm", "silu_and_mul")]
    return found


def timing_check(make: Callable[[], tuple[Record, Run, Run | None]], device: str, sheet: Device | None) -> tuple[str, list[Record]]:
    """Time one of `timing_runs`: a line of text, and the record."""
    with torch.inference_mode():
        record, run, torch_run = make()
        record["seconds"] = seconds_of(run, device)
        if torch_run is not None:
            record["torch_seconds"] = seconds_of(torch_run, device)
    texts = [f"{record['seconds'] * 1e6:.1f} us"]
    if sheet is not None:
        found = timed_kernels({"timings": [record]}, sheet)[0]
        texts.append(f"limit {found.limit_s * 1e6:.1f} us of {found.bound}, {found.fraction:.0%} of its speed")
    if "torch_seconds" in record:
        texts.append(f"torch {record['torch_seconds'] * 1e6:.1f} us")
    return ", ".join(texts), [record]


def draw_check(shapes: Shapes, rows: int, options: dict[str, Any], device: str) -> tuple[str, list[Record]]:
    """The time of drawing tokens; torch.argmax of the same rows beside it."""
    logits = torch.randn(rows, shapes.vocab_size, device=device).to(shapes.dtype)
    columns = torch.zeros(rows, sampling.NUM_OPTIONS, dtype=torch.int64)
    if options:
        ones = torch.ones(rows, dtype=torch.float32).view(torch.int32)
        columns[:, sampling.IS_RANDOM], columns[:, sampling.INVERSE], columns[:, sampling.KEY] = 1, ones, torch.arange(rows)
        columns[:, sampling.TOP_K] = options.get("top_k", 0)
        columns[:, sampling.TOP_P] = torch.full((rows,), options.get("top_p", 1.0), dtype=torch.float64).view(torch.int64)
    columns = columns.to(device)
    seconds = seconds_of(lambda: sampling.draw_rows(logits, columns, "top_k" in options or "top_p" in options), device)
    argmax = seconds_of(lambda: logits.argmax(-1), device)
    return f"{seconds * 1e6:.1f} us, torch.argmax {argmax * 1e6:.1f} us", []


def _attention(
    shapes: Shapes, device: str, sequences: int, queries: int, context: int, kind: str = "", deterministic: bool = False
) -> tuple[Record, Run, Run | None]:
    heads, kv_heads, dim, dtype = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, shapes.dtype
    blocks = -(-context // BLOCK_SIZE)
    batch = decode_batch(sequences, context, 100, device).attention
    if queries > 1:
        batch = _last_queries(batch, queries, context)
    pages = [torch.randn(sequences * blocks, kv_heads, BLOCK_SIZE, dim, device=device).to(dtype) for _ in range(2)]
    scales = None
    if kind:
        pages = [(page * 20).to(CACHE_DTYPES[kind]) for page in pages]
        scales = KVScales(*(torch.full((kv_heads, dim), 0.05, device=device) for _ in range(2)))
    q = torch.randn(sequences * queries, heads, dim, device=device).to(dtype)
    facts = KernelFacts(device, dtype, dim, heads, kv_heads, BLOCK_SIZE, deterministic=deterministic, interpreted=device == "cpu")
    from dspark.kernels.triton import attention

    run = partial(attention.form("paged_attention", facts), q, *pages, batch, dim**-0.5, None, 0.0, scales)
    record = {
        "op": "paged_attention",
        "num_seqs": sequences,
        "query_tokens": queries,
        "context_tokens": context,
        "dtype": shapes.dtype_name,
    }
    record |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "window": None, "kv_dtype": kind or shapes.dtype_name}
    if kind or deterministic or queries not in (1, context):
        return record, run, None
    dense_q = q.view(sequences, queries, heads, dim).transpose(1, 2).contiguous()
    dense = [torch.randn(sequences, kv_heads, context, dim, device=device).to(dtype) for _ in range(2)]
    torch_run = partial(torch.nn.functional.scaled_dot_product_attention, dense_q, *dense, is_causal=queries > 1, enable_gqa=True)
    return record, run, torch_run


def _last_queries(batch: AttentionBatch, queries: int, context: int) -> AttentionBatch:
    """The same contexts, with so many queries at the end of each."""
    device = batch.context_lens.device
    positions = torch.arange(context - queries, context, device=device)
    tables = batch.block_tables.long()
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(batch.num_sequences + 1, dtype=torch.int32, device=device) * queries
    every = positions.repeat(batch.num_sequences)
    return replace(batch, query_start=starts, slot_mapping=slots.reshape(-1), positions=every, max_query_len=queries)


def _linear(shapes: Shapes, device: str, name: str, rows: int, outputs: int, inputs: int) -> tuple[Record, Run, Run | None]:
    """A quantized linear as a model has it, the rounding of its inputs included; torch's product of dense weights beside it."""
    scheme = scheme_for(name, inputs)
    op, weight = quantized_weight(shapes, device, name, outputs, inputs)
    facts = KernelFacts(device, shapes.dtype, 64, 1, 1, BLOCK_SIZE, interpreted=device == "cpu")
    linear = implementation("triton", op)(weight, None, facts)
    x = torch.randn(rows, inputs, device=device).to(shapes.dtype)
    dense = torch.randn(outputs, inputs, device=device).to(shapes.dtype)
    record = {"op": "linear", "rows": rows, "outputs": outputs, "inputs": inputs, "dtype": shapes.dtype_name, "scheme": asdict(scheme)}
    return record, partial(linear, x), partial(torch.nn.functional.linear, x, dense)


def scheme_for(name: str, inputs: int) -> QuantScheme:
    """A scheme of a linear with so many inputs."""
    scheme = preset(name)
    if scheme.storage == "wna16":
        scheme = replace(scheme, group_size=128 if inputs % 128 == 0 else 32)
    return replace(scheme, inputs="dynamic") if name == "fp8" else scheme


def quantized_weight(shapes: Shapes, device: str, name: str, outputs: int, inputs: int) -> tuple[str, Any]:
    """(the op that takes it, a random weight)"""
    scheme = scheme_for(name, inputs)
    source = RandomWeights({"linear.weight": (outputs, inputs)}, QuantConfig(scheme), shapes.dtype, device)
    weight = build_weight("linear", scheme, {leaf: source.take(f"linear.{leaf}") for leaf in scheme.leaves()})
    return {"wna16": "make_wna16_linear", "int8": "make_int8_linear", "fp8": "make_fp8_linear"}[scheme.storage], weight


def _rows(shapes: Shapes, device: str, op: str, rows: int) -> tuple[Record, Run, Run | None]:
    size, dtype = shapes.hidden, shapes.dtype
    x, weight = torch.randn(rows, size, device=device).to(dtype), torch.ones(size, device=device, dtype=dtype)
    function = implementation("triton", op)
    record = {"op": op, "rows": rows, "size": size, "dtype": shapes.dtype_name}
    if op == "silu_and_mul":
        return record, partial(function, torch.cat([x, x], 1)), None
    if op == "rms_norm":
        return record, partial(function, x, weight, 1e-5), partial(torch.nn.functional.rms_norm, x, (size,), weight, 1e-5)
    return record, partial(function, x, x.clone(), weight, 1e-5), None
