"""Compile every Triton kernel ahead of time, without a GPU, and print registers, spills and shared memory.

    python benchmarks/aot.py [--arch 80 --arch 90] [--only decode] [--json FILE]

The launchers themselves run, on tensors without storage ("meta"), with the launch replaced by a recorder: what is compiled is what would
have been launched for that model on an A100, L40S or H100, tile for tile, their shipped tables included. Must run without TRITON_INTERPRET.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.triton import elementwise
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.limits import CARDS, SHARED_BYTES
from dspark.kernels.triton.tuning.tables import table_for

sys.path.insert(0, str(Path(__file__).resolve().parent))
from aot_attention import CACHE_TYPES, attention_runs
from aot_gemms import gemm_runs, moe_runs
from aot_sampling import sampling_runs

SHARED_LIMIT = {10 * major + minor: limit for (major, minor), limit in SHARED_BYTES.items()}
"""Bytes of shared memory one block may use, by compute capability."""
_CARD = {80: "a100", 89: "l40s", 90: "h100"}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


MODELS = (
    ModelShape("SmolLM2-135M", 576, 1536, 9, 3, 64),
    ModelShape("Qwen3-4B", 2560, 9728, 32, 8, 128),
    ModelShape("Llama-3-8B", 4096, 14336, 32, 8, 128),
    ModelShape("head_dim 80", 2560, 6912, 32, 32, 80),
    ModelShape("head_dim 96", 3072, 8192, 32, 8, 96),
    ModelShape("head_dim 256", 2048, 16384, 8, 1, 256),
    ModelShape("float32 D=64", 576, 1536, 9, 3, 64, torch.float32),
    ModelShape("float32 D=128", 4096, 14336, 32, 8, 128, torch.float32),
    ModelShape("float32 D=256", 2048, 16384, 8, 1, 256, torch.float32),
)
"""Real models first, then the head sizes and the dtype that most threaten registers."""


@dataclass
class Launch:
    """One recorded launch, ready to compile."""

    label: str
    kernel: Any
    args: tuple[Any, ...]
    config: dict[str, Any]


@dataclass
class Row:
    """One compiled kernel. stack_bytes: local memory a thread, which for these kernels is what was spilled."""

    kernel: str
    label: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    mma: str
    sass: str
    """The matrix instruction of the machine code: HMMA, IMMA and QMMA, on Hopper HGMMA, IGMMA and QGMMA where rows suffice."""
    widest_read: int
    """Bytes that one thread reads from global memory at once, at most: 16 where a kernel that is bound by memory can be fast."""
    narrowest_copy: int
    """Bytes that one thread copies to shared memory at once, at least (cp.async takes 4, 8 or 16); 0 without such copies."""
    seconds: float


def record(run: Callable[[], Any], label: str) -> list[Launch]:
    """The launches that `run` would do."""
    launches: list[Launch] = []
    real = launcher.launch
    launcher.launch = lambda kernel, grid, *args, **config: launches.append(Launch(label, kernel, args, config))
    try:
        run()
    finally:
        launcher.launch = real
    return launches


def tiles_of(arch: int) -> TileBook:
    """What a card of this capability would take, nothing being measured."""
    if arch not in _CARD:
        return TileBook()
    limits = CARDS[_CARD[arch]]
    return TileBook(limits, table_for(limits))


def elementwise_launches(model: ModelShape, tiles: TileBook) -> Iterator[Launch]:
    """Every elementwise kernel that a step of this model launches."""
    dtype, heads, kv_heads, dim = model.dtype, model.num_heads, model.num_kv_heads, model.head_dim

    def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    tokens = 512
    x, weight, head_weight = meta(tokens, model.hidden), meta(model.hidden), meta(dim)
    cache = meta(1000, kv_heads, 16, dim)
    coded = {kind: meta(1000, kv_heads, 16, dim, of=cache_dtype) for kind, cache_dtype in CACHE_TYPES.items()}
    scales = KVScales(meta(kv_heads, dim, of=torch.float32), meta(kv_heads, dim, of=torch.float32))
    qkv, angle = meta(tokens, (heads + 2 * kv_heads) * dim), meta(tokens, dim // 2, of=torch.float32)
    slots, ids = meta(tokens, of=torch.int64), meta(4, of=torch.int64)
    for norm in (None, head_weight):
        name = f"{model.name}{'' if norm is None else ' q/k norm'}"

        rope = partial(elementwise.rope_store_kv, qkv, angle, angle, norm, norm, 1e-5)
        yield from record(partial(rope, cache, cache, slots, heads), name)
        for kind, pages in coded.items():
            yield from record(partial(rope, pages, pages, slots, heads, scales), f"{name} {kind}")
    yield from record(lambda: elementwise.rms_norm(x, weight, 1e-5), model.name)
    yield from record(lambda: elementwise.add_rms_norm(x, x, weight, 1e-5), model.name)
    yield from record(lambda: elementwise.silu_and_mul(meta(tokens, 2 * model.intermediate)), model.name)
    yield from record(lambda: elementwise.gelu_tanh_and_mul(meta(tokens, 2 * model.intermediate)), model.name)
    yield from record(lambda: elementwise.copy_blocks(cache, cache, ids, ids), model.name)
    yield from record(lambda: elementwise.copy_slots(cache, cache, ids, ids), model.name)


def attention_launches(model: ModelShape, tiles: TileBook) -> Iterator[Launch]:
    """The same for attention."""
    for run, label in attention_runs(model.name, model.num_heads, model.num_kv_heads, model.head_dim, model.dtype, tiles):
        yield from record(run, label)


def sampling_launches(model: ModelShape, tiles: TileBook) -> Iterator[Launch]:
    """The same for drawing tokens, which depends on no model."""
    for run, label in sampling_runs(model.dtype) if model is MODELS[0] else ():
        yield from record(run, label)


def product_launches(model: ModelShape, tiles: TileBook) -> Iterator[Launch]:
    """The same for matrix products, and the quantization of what goes into them. They do not depend on head_dim."""
    if model not in MODELS[:3] and model.name != "float32 D=128":
        return
    facts = KernelFacts("cuda", model.dtype, model.head_dim, model.num_heads, model.num_kv_heads, 16, tiles=tiles)
    runs = list(gemm_runs(model.name, model.hidden, model.intermediate, model.dtype, facts))
    for run, label in runs + (list(moe_runs(model.dtype, facts)) if model is MODELS[0] else []):
        yield from record(run, label)


PARTS: dict[str, tuple[Callable[[ModelShape, TileBook], Iterator[Launch]], ...]] = {
    "elementwise": (elementwise_launches,),
    "attention": (attention_launches,),
    "sampling": (sampling_launches,),
    "products": (product_launches,),
}
PARTS["all"] = tuple(function for functions in PARTS.values() for function in functions)


def compile_launch(launch: Launch, arch: int) -> Row:
    """Compile one launch as Triton's own JIT would specialise it (integers of 1 folded, multiples of 16 and pointers marked)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    options = {name: launch.config[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in launch.config}
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, name in enumerate(names):
        value = launch.args[position] if position < len(launch.args) else launch.config[name]
        if position >= len(launch.args) or (isinstance(value, int) and value == 1):
            signature[name], constants[(position,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attrs[(position,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    start = time.perf_counter()
    compiled = triton.compile(ASTSource(launch.kernel, signature, constants, attrs), target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.perf_counter() - start
    text = disassembled(compiled.asm["cubin"])
    registers, stack = resource_usage(text)
    ptx = compiled.asm["ptx"]
    return Row(
        kernel=launch.kernel.__name__,
        label=launch.label,
        arch=arch,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        warps=options.get("num_warps", 4),
        mma=matrix_instruction(ptx),
        sass=matrix_code(text),
        widest_read=widest_read(text),
        narrowest_copy=narrowest_copy(ptx),
        seconds=seconds,
    )


def matrix_instruction(ptx: str) -> str:
    """ "mma" or "wgmma" and the type of its operands ("mma s8"), "" where there is none."""
    found = re.search(r"(wgmma|mma)\.(?:mma_async\.)?sync\.[\w.]*?\.(bf16|f16|tf32|s8|e4m3)\.", ptx)
    return f"{found[1]} {found[2]}" if found else ""


def narrowest_copy(ptx: str) -> int:
    """Bytes of the narrowest asynchronous copy to shared memory, 0 where there is none."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)[,;]", ptx)
    return min((int(size, 0) for size in sizes), default=0)


def matrix_code(text: str) -> str:
    """The matrix instruction of the machine code, "" where there is none."""
    found = re.search(r"\b(HGMMA|IGMMA|QGMMA|HMMA|IMMA|QMMA)\.", text)
    return found[1] if found else ""


def widest_read(text: str) -> int:
    """Bytes of the widest read of global memory by one thread, to a register (LDG) or to shared memory (LDGSTS)."""
    widths = re.findall(r"\bLDG(?:STS)?\.E(?:\.(?!64|128)\w+)*(?:\.(64|128))?", text)
    return max((int(width or 32) // 8 for width in widths), default=0)


def resource_usage(text: str) -> tuple[int, int]:
    """(registers a thread, bytes of local memory a thread) of the one kernel that was disassembled."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump told no registers: {text[:500]}")
    return int(found[1]), int(found[2])


def disassembled(cubin: bytes) -> str:
    """What cuobjdump, which comes with triton, says about a cubin: its use of resources and its machine code."""
    import tempfile

    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = [
            subprocess.run([str(tools / "cuobjdump"), flag, file.name], capture_output=True, text=True, check=True, env=environment).stdout
            for flag in ("-res-usage", "-sass")
        ]
    return "\n".join(said)


def table(archs: list[int], only: str = "", part: str = "all") -> Iterator[Row]:
    """Compile each different launch of all MODELS for each architecture."""
    for arch in archs:
        seen = set()
        launcher.capability = lambda facts, arch=arch: divmod(arch, 10)
        tiles = tiles_of(arch)
        for model in MODELS:
            for launch in (launch for launches in PARTS[part] for launch in launches(model, tiles)):
                key = (launch.kernel.__name__, tuple(map(_identity, launch.args)), tuple(sorted(launch.config.items())))
                if key not in seen and only in f"{launch.kernel.__name__} {launch.label}":
                    seen.add(key)
                    yield compile_launch(launch, arch)


def _identity(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else (type(value), value == 1, value % 16 == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", help="compute capability as 80 or 90; may be repeated (80, 89 and 90)")
    parser.add_argument("--only", default="", help="only kernels whose name and label contain this text")
    parser.add_argument("--part", choices=list(PARTS), default="all", help="only these kernels (all)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        print("aot: unset TRITON_INTERPRET: the interpreter compiles nothing", file=sys.stderr)
        return 2
    rows = []
    titles = f"{'sm':>3} {'regs':>5} {'stack':>6} {'shared':>7} {'warps':>5} {'mma':10} {'sass':6} {'read':>4} {'s':>5}"
    print(f"{'kernel':22} {'shape':40} {titles}")
    for row in table(options.arch or [80, 89, 90], options.only, options.part):
        rows.append(row)
        numbers = f"{row.arch:3} {row.registers:5} {row.stack_bytes:6} {row.shared_bytes:7} {row.warps:5}"
        print(f"{row.kernel:22} {row.label:40} {numbers} {row.mma:10} {row.sass:6} {row.widest_read:4} {row.seconds:5.1f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    over = [row for row in rows if row.shared_bytes > SHARED_LIMIT[row.arch]]
    for row in over:
        print(f"over the shared memory of sm_{row.arch}: {row.kernel} {row.label}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
