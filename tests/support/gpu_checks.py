"""Correctness checks of the GPU path, shared by benchmarks/gpu_check.py and tests/gpu: kernels, then whole engines.

A check is a name and a function that returns a short text (the largest error, say) and raises when something is wrong. In order of value:
a run that is cut short has checked what matters most.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from expert_cases import KINDS, close, expert_layer_inputs, on_device, stacks
from gemm_cases import GEMM_CASES, LARGE_GEMM_CASES
from kernel_cases import (
    CASES,
    Case,
    expected,
    paged_attention_args,
    rms_norm_args,
    rope_store_kv_args,
    run,
    wna16_linear_args,
)
from kv_engines import calibrated
from random_kernel_cases import random_cases
from tolerances import assert_matches

from dspark.kernels.dispatch import decline_reason, implementation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_OPS_BY_VALUE = (
    "paged_attention",
    "make_wna16_linear",
    "rope_store_kv",
    "add_rms_norm",
    "rms_norm",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "copy_blocks",
)

_LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LARGE_CASES = [
    Case("paged_attention", "decode_64", paged_attention_args, {"sequences": [(1, 37 * i % 611 + 1) for i in range(64)], **_LLAMA}),
    Case("paged_attention", "prefill_500", paged_attention_args, {"sequences": [(500, 500), (130, 700)], **_LLAMA}),
    Case("paged_attention", "mixed_window", paged_attention_args, {"sequences": [(300, 420), *[(1, 400)] * 9], "window": 128, **_LLAMA}),
    Case("rope_store_kv", "llama_700", rope_store_kv_args, {"num_tokens": 700, **_LLAMA}),
    Case("rms_norm", "llama_700", rms_norm_args, {"num_tokens": 700, "hidden": 4096}),
    *(
        Case("make_wna16_linear", f"llama_w{bits}_{rows}", wna16_linear_args, {"num_tokens": rows, "bits": bits, **shape})
        for rows in (1, 40, 64, 300)
        for bits, shape in (
            (4, {"in_features": 4096, "out_features": 1024, "group_size": 128, "symmetric": False}),
            (8, {"in_features": 1024, "out_features": 4096, "group_size": -1}),
        )
    ),
]
"""Shapes at which every launch configuration is met and the grids are full; the reference still takes seconds on a CPU."""


@dataclass(frozen=True)
class Check:
    """run: a text, or a text and what was timed."""

    name: str
    run: Callable[[], str | tuple[str, list[dict[str, Any]]]]


def no_gpu_reason() -> str | None:
    """Why nothing can be checked here, or None."""
    if not torch.cuda.is_available():
        return "no GPU here: nothing checked"
    if find_spec("triton") is None:
        return "triton is not installed: nothing checked"
    return None


def gpu_kernel_checks() -> list[Check]:
    """Every Triton kernel on the device: all edge shapes in bf16, then the large ones, then fp16, random shapes and fp32."""
    edge = _edge_cases()
    randoms = random_cases("paged_attention", 11, 12) + random_cases("make_wna16_linear", 12, 12)
    large = LARGE_CASES + LARGE_GEMM_CASES
    wanted = [(edge, BF16), (large, BF16), (edge, FP16), (large, FP16), (randoms, BF16), (edge, FP32)]
    checks = [Check(f"{case}-{_short(dtype)}", partial(kernel_check, case, dtype)) for cases, dtype in wanted for case in cases]
    return checks + [
        Check(f"make_grouped_experts-{kind.replace(' ', '_')}_{tokens}-{_short(dtype)}", partial(experts_check, kind, tokens, dtype))
        for kind in KINDS
        for tokens, dtype in ((1, BF16), (70, BF16), (300, FP16))
    ]


def _edge_cases() -> list[Case]:
    return [case for op in _OPS_BY_VALUE for case in CASES[op]] + [case for cases in GEMM_CASES.values() for case in cases]


def experts_check(kind: str, tokens: int, dtype: torch.dtype) -> str:
    """All experts in one launch on the device against the loop on the CPU."""
    weights, (x, logits) = stacks(kind, dtype, 1, 8, 256, 128), expert_layer_inputs(dtype, tokens, 8, 256)
    case = Case("make_grouped_experts", kind, stacks)
    assert decline_reason("triton", case.op, case.facts(dtype, "cuda")) is None
    want = implementation("reference", case.op)(*weights, "silu", case.facts(dtype))(x, logits, 2, True)
    layer = implementation("triton", case.op)(*map(on_device, weights), "silu", case.facts(dtype, "cuda"))
    actual = layer(x.cuda(), logits.cuda(), 2, True)
    torch.cuda.synchronize()
    close(kind, dtype, actual.cpu(), want)
    return f"max error {_largest_error(actual.cpu(), want):.1e}"


def kernel_check(case: Case, dtype: torch.dtype) -> str:
    """One kernel on the device against the reference on the CPU, on the same random input."""
    reason = decline_reason("triton", case.op, case.facts(dtype, "cuda"))
    assert reason is None, f"triton declines: {reason}"
    actual = run(case, implementation("triton", case.op), dtype, device="cuda")
    torch.cuda.synchronize()
    want = expected(case, dtype)
    assert_matches(case.op, actual, want, dtype)
    return f"max error {max(_largest_error(actual[name], want[name]) for name in want):.1e}"


def gpu_engine_checks() -> list[Check]:
    """Tiny random models through the whole engine, GPU against CPU reference, greedy."""
    wide = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
    table: list[tuple[str, str, str | None, dict[str, Any]]] = [
        ("llama", "float32", None, wide),
        ("llama", "bfloat16", None, wide),
        ("llama", "bfloat16", "w4a16", wide),
        ("llama", "float32", "w4a16-asym", wide),
        ("qwen3", "float32", None, {}),
        ("mistral", "float32", None, {}),
        ("qwen2", "float32", None, {}),
        ("llama", "float16", "w8a16", wide),
        ("llama", "float32", "w8a8", wide),
        ("llama", "bfloat16", "fp8", wide),
        ("mixtral", "float32", None, {}),
        ("qwen3_moe", "float32", "w4a16", {}),
    ]
    checks = []
    for family, dtype, scheme, overrides in table:
        name = f"engine-{family}-{dtype}{'' if scheme is None else '-' + scheme}"
        checks.append(Check(name, partial(engine_check, family, dtype, scheme, {"device": "cuda"}, overrides)))
    for cache in ("int8", "fp8"):
        check = partial(engine_check, "llama", "float32", None, {"device": "cuda"}, wide, cache=cache)
        checks.append(Check(f"engine-llama-float32-{cache}-cache", check))
    for graphs in ("auto", "off"):
        check = partial(engine_check, "llama", "float32", None, {"device": "cuda", "cuda_graphs": graphs}, wide, tokens=48, ahead=True)
        checks.append(Check(f"engine-llama-float32-ahead-graphs-{graphs}", check))
    return checks


def engine_check(
    family: str,
    dtype: str,
    scheme: str | None,
    settings: dict[str, Any],
    overrides: dict[str, Any],
    interpreted: bool = False,
    tokens: int = 16,
    cache: str | None = None,
    ahead: bool = False,
) -> str:
    """The engine with `settings` gives the tokens of the engine on the CPU with reference kernels, or differs first at a near-tie.

    cache: "int8" or "fp8" for an engine that is calibrated for such a KV cache. ahead: record no gaps, which is the host's work, so that
    steps are planned ahead and replayed.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = write_tiny_engine(Path(folder), family, dtype, scheme, overrides)
        if cache is not None:
            engine_dir = calibrated(engine_dir, Path(folder) / cache, cache, [[(11 * i) % 300 + 5 for i in range(200)]])
        want = generate(engine_dir, {"device": "cpu", "kernels": "reference"}, tokens)
        actual = generate(engine_dir, settings, tokens, interpreted, ahead)
    near_tie = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.25}[dtype]
    equal = 0
    for i, ((seen, gap), (right, right_gap)) in enumerate(zip(actual, want, strict=True)):
        assert len(seen) == len(right) or min(gap, right_gap) < near_tie, f"prompt {i}: {len(seen)} tokens, {len(right)} expected"
        if seen == right:
            equal += 1
            continue
        first = next((k for k, pair in enumerate(zip(seen, right)) if pair[0] != pair[1]), min(len(seen), len(right)))
        assert min(gap, right_gap) < near_tie, (
            f"prompt {i}: token {first} differs and the smallest top-two gap is {min(gap, right_gap):.3g}"
        )
    assert equal * 2 >= len(want), f"only {equal} of {len(want)} answers are equal: too many for ties"
    return f"{equal} of {len(want)} answers equal"


def write_tiny_engine(folder: Path, family: str, dtype: str, scheme: str | None, overrides: dict[str, Any]) -> Path:
    """A random checkpoint as an engine directory. Not through `convert`: its audit and tool versions are not what is checked here."""
    from tiny_models import make_tiny_checkpoint

    from dspark.converters.detect import open_checkpoint
    from dspark.converters.mapping import map_checkpoint
    from dspark.converters.packed import engine_tensors
    from dspark.converters.quantize import QuantRequest, plan_quantization, quantized_tensors
    from dspark.converters.writer import EngineWriter

    checkpoint = make_tiny_checkpoint(folder / "checkpoint", family, **overrides)
    model = map_checkpoint(open_checkpoint(checkpoint), dtype)
    plan = plan_quantization(model, QuantRequest(scheme)) if scheme else None
    names = plan.names(model) if plan else list(model.shapes)
    with EngineWriter(folder / "engine", names) as writer:
        for name, tensor in quantized_tensors(model, plan) if plan else engine_tensors(model):
            writer.add(name, tensor)
        writer.finish(model.config, plan.config if plan else None, lineage={})
        writer.publish()
    return folder / "engine"


class NoText:
    """Token ids in, token ids out: these engines have no tokenizer to speak of."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return ""


def generate(
    engine_dir: Path, settings: dict[str, Any], tokens: int, interpreted: bool = False, ahead: bool = False
) -> list[tuple[list[int], float]]:
    """Greedy answers to prompts that share a prefix, exceed the token budget and differ in length: (token ids, smallest top-two gap)."""
    from dspark.runtime.engine import Engine
    from dspark.runtime.spec.engine_config import EngineConfig
    from dspark.runtime.spec.request import Request
    from dspark.runtime.spec.sampling_params import SamplingParams

    shared = [(7 * i) % 300 + 5 for i in range(40)]
    prompts = [[11], [5, 6, 7], shared, shared + [9], shared[:33] + [50, 51], [(13 * i) % 300 + 5 for i in range(90)]]
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory_bytes=8 << 20, **settings)
    engine = Engine.from_directory(engine_dir, config, NoText(), record_gaps=not ahead, interpreted=interpreted)
    try:
        for i, prompt in enumerate(prompts):
            engine.add(Request(i, prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)))
        outputs = sorted(engine.drain(), key=lambda output: output.request_id)
        if settings.get("kernels") != "reference":
            taken = engine.metrics()["kernels"]
            assert taken["paged_attention"] == "triton", f"the engine did not take the Triton kernels: {taken}"
        if ahead:
            metrics = engine.metrics()
            graphs = metrics["cuda_graphs"]
            assert metrics["steps_ahead"] > 0, "no step was planned ahead"
            assert settings.get("cuda_graphs") == "off" or graphs.get("steps_replayed", 0) > 0, f"no step was replayed: {graphs}"
    finally:
        engine.close()
    return [(list(output.completions[0].token_ids), math.inf if ahead else output.min_top2_gap or 0.0) for output in outputs]


def _largest_error(actual: torch.Tensor, want: torch.Tensor) -> float:
    difference = (actual.double() - want.double()).abs().nan_to_num(0.0)
    return float(difference.max()) if difference.numel() else 0.0


def _short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
