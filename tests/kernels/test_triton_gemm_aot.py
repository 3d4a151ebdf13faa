"""The Triton matrix products compile for sm_80, sm_89 and sm_90 at the shapes of real models: no spills, inside the shared memory, with
the instruction of their operands, and with 16-byte copies of their weights.

In a subprocess without TRITON_INTERPRET; no GPU needed. `python benchmarks/aot.py --part products` prints the same table.
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
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
MAX_STACK_BYTES = 8
"""Local memory a thread. ptxas leaves one pointer there in the widened fp8 product."""
PRODUCTS = ("wna16_kernel", "int8_kernel", "fp8_kernel", "dense_kernel")
KERNELS = {*PRODUCTS, "sum_splits_kernel", "combine_kernel", "quantize_kernel", "norm_quantize_kernel", "silu_and_mul_kernel"}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]


@pytest.fixture(scope="module", params=[80, 89, 90])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("aot")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONSAFEPATH": "1"}
    out = folder / "aot.json"
    command = [sys.executable, str(SCRIPT), "--part", "products", "--arch", str(request.param), "--json", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


def test_products_compile_as_they_should(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows} == KERNELS
    assert [row for row in rows if row["stack_bytes"] > MAX_STACK_BYTES] == [], "spills"
    assert [row for row in rows if row["shared_bytes"] > SHARED_LIMIT[row["arch"]]] == []


def test_products_use_the_instruction_of_their_operands(rows: list[dict[str, Any]]) -> None:
    """A product that falls back to wider operands, or to multiply-adds, would be right and useless. Widened float32 asks for those."""
    for row in rows:
        dynamic = "dynamic" in row["label"] or "experts fp8" in row["label"]
        operands = "s8" if row["kernel"] == "int8_kernel" else "e4m3" if dynamic and row["arch"] >= 89 else "bf16"
        if row["kernel"] not in PRODUCTS or (operands == "bf16" and "float32" in row["label"]):
            continue
        assert row["mma"].endswith(f" {operands}"), row
        if row["arch"] == 90 and row["label"].endswith("M=512"):
            assert row["mma"].startswith("wgmma"), row


def test_few_rows_copy_16_bytes_a_thread(rows: list[dict[str, Any]]) -> None:
    """They are bound by reading the weight, 4-bit words included."""
    few = [row for row in rows if row["kernel"] in PRODUCTS and row["label"].endswith((" M=1", " M=32")) and "float32" not in row["label"]]
    assert few and [row for row in few if row["narrowest_copy"] < 16] == []
