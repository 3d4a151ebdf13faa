"""Every Triton kernel but the matrix products compiles for sm_80, sm_89 and sm_90 at the shapes of real models, without spilling, inside
the shared memory, to the instructions that make it fast. The products: test_triton_gemm_aot.py.

In a subprocess without TRITON_INTERPRET; no GPU needed. `python benchmarks/aot.py` prints the same table.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "aot.py"
ARCHS = (80, 89, 90)
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
MAX_STACK_BYTES = 8
"""Local memory a thread. ptxas leaves so much in kernels of 64 and of 255 registers (loop-invariant pointers)."""
KNOWN_STACK_BYTES = {
    ("rope_store_kv_kernel", "float32 D=128 fp8"): 24,
    ("decode_kernel", "float32 D=64 S=1 n=1 int8"): 16,
    ("decode_kernel", "float32 D=64 S=1 n=1 window softcap"): 16,
    ("decode_kernel", "float32 D=256 S=1 n=1 window softcap"): 16,
    ("decode_kernel", "float32 D=256 S=64 n=1 window softcap"): 16,
    ("prefill_kernel", "float32 D=128 deterministic S=64 n=1"): 16,
    ("prefill_kernel", "float32 D=128 deterministic S=8 n=512 window softcap"): 16,
    ("prefill_kernel", "float32 D=128 deterministic S=8 n=512 fp8"): 24,
    ("prefill_kernel", "head_dim 256 deterministic S=8 n=512 window softcap"): 16,
}
"""Kernels that keep more, and how much: multiply-adds of float32, which no job takes for speed, and a deterministic run's widest tile."""
KERNELS = {
    "elementwise": {
        "rms_norm_kernel",
        "add_rms_norm_kernel",
        "silu_and_mul_kernel",
        "gelu_tanh_and_mul_kernel",
        "rope_store_kv_kernel",
        "copy_blocks_kernel",
        "copy_slots_kernel",
    },
    "attention": {"decode_kernel", "prefill_kernel", "merge_kernel"},
    "sampling": {"edit_kernel", "draw_kernel"},
}
"""Part of `aot.py` -> its kernels."""
READS_FAST = KERNELS["elementwise"] - {"copy_slots_kernel"} | {"decode_kernel", "prefill_kernel", "draw_kernel"}
"""Kernels that are bound by memory, in some step, and read long rows."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]


@pytest.fixture(scope="module", params=list(KERNELS))
def part(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rows(part: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("aot")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONSAFEPATH": "1"}
    out = folder / "aot.json"
    command = [sys.executable, str(SCRIPT), "--part", part, "--json", str(out), *(f"--arch={arch}" for arch in ARCHS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


def test_every_kernel_compiles(rows: list[dict[str, Any]], part: str) -> None:
    for arch in ARCHS:
        assert {row["kernel"] for row in rows if row["arch"] == arch} == KERNELS[part]


def test_nothing_spills(rows: list[dict[str, Any]]) -> None:
    def allowed(row: dict[str, Any]) -> int:
        return KNOWN_STACK_BYTES.get((row["kernel"], row["label"]), MAX_STACK_BYTES)

    assert [row for row in rows if row["stack_bytes"] > allowed(row)] == []


def test_shared_memory_fits(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["shared_bytes"] > SHARED_LIMIT[row["arch"]]] == []


def test_matrix_products_use_tensor_cores(rows: list[dict[str, Any]]) -> None:
    """16-bit products that fall back to multiply-adds would be right and useless. On Hopper, prefill has an instruction of its own."""
    dots = [row for row in rows if row["kernel"] in ("decode_kernel", "prefill_kernel") and "float32" not in row["label"]]
    assert [row for row in dots if row["sass"] not in ("HMMA", "HGMMA")] == []
    prefill = [row for row in dots if row["arch"] == 90 and "n=512" in row["label"] and "deterministic" not in row["label"]]
    assert [row for row in prefill if row["sass"] != "HGMMA"] == []


def test_memory_is_read_in_wide_pieces(rows: list[dict[str, Any]]) -> None:
    """16 bytes a thread: narrower reads cannot keep enough of them under way."""
    assert [row for row in rows if row["kernel"] in READS_FAST and row["widest_read"] < 16] == []
