"""Drafting heads on Triton's kernels, under Triton's interpreter: what they ask of the kernels differs from what a target asks."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "support" / "draft_device.py"
TOO_OLD = find_spec("triton") is None or tuple(map(int, version("triton").split(".")[:2])) < (3, 7)

pytestmark = [pytest.mark.interpreter, pytest.mark.slow, pytest.mark.skipif(TOO_OLD, reason="needs triton 3.7 or later")]


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "zlab-dflash", "eagle3-original", "draft-model"])
def test_heads_draft_what_they_draft_on_the_reference_kernels(kind: str) -> None:
    """Keys and values without queries, rows folded into heads, a spare block behind the pool's; and tokens that are drawn on the device,
    each fed to the next depth there."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, str(SCRIPT), kind], env=environment, capture_output=True, text=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["id"] for row in rows] == [kind], done.stderr[-4000:]
    assert rows[0]["error"] is None, rows[0]["error"]
