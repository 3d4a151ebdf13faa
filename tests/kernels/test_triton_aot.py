"""Every Triton kernel but the matrix products compiles for sm_80 and sm_90 at the shapes of real models, without spilling, inside the
shared memory. The products: test_triton_gemm_aot.py.

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
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
MAX_STACK_BYTES = 8
KNOWN_STACK_BYTES = {("rope_store_kv_kernel", "float32 D=128 fp8"): 24}
"""Kernels that keep more on the stack, and how much: a float32 run with an 8-bit cache, which no job takes for speed."""
"""Local memory a thread. ptxas leaves 8 bytes in the 64-register decode kernel at head_dim 64 (one loop-invariant pointer)."""
KERNELS = {
    "rms_norm_kernel",
    "add_rms_norm_kernel",
    "silu_and_mul_kernel",
    "gelu_tanh_and_mul_kernel",
    "rope_store_kv_kernel",
    "copy_blocks_kernel",
    "copy_slots_kernel",
    "decode_kernel",
    "prefill_kernel",
}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("aot")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONSAFEPATH": "1"}
    out = folder / "aot.json"
    command = [sys.executable, str(SCRIPT), "--part", "rest", "--arch", "80", "--arch", "90", "--json", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles(rows: list[dict[str, Any]], arch: int) -> None:
    assert {row["kernel"] for row in rows if row["arch"] == arch} == KERNELS


def test_nothing_spills(rows: list[dict[str, Any]]) -> None:
    allowed = {row["label"]: KNOWN_STACK_BYTES.get((row["kernel"], row["label"]), MAX_STACK_BYTES) for row in rows}
    assert [row for row in rows if row["stack_bytes"] > allowed[row["label"]]] == []


def test_shared_memory_fits(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["shared_bytes"] > SHARED_LIMIT[row["arch"]]] == []


def test_matrix_products_use_tensor_cores(rows: list[dict[str, Any]]) -> None:
    """16-bit products that fall back to multiply-adds would be right and useless."""
    dots = [row for row in rows if row["kernel"] in ("decode_kernel", "prefill_kernel") and "float32" not in row["label"]]
    assert [row for row in dots if not row["mma"]] == []
