"""Checks that need Triton's interpreter, run in a process of their own (see `triton_interpreter`)."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed triton, without importing it."""
    if find_spec("triton") is None:
        return 0, 0
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


NEEDS_INTERPRETER = pytest.mark.skipif(
    triton_version() < (3, 7), reason="needs triton 3.7: the interpreter of triton 3.6 does not work with the numpy of today"
)


def run_interpreted(script: Path, *names: str, limit_s: float = 900) -> dict[str, dict[str, Any]]:
    """check id -> the line that the script printed about it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(script.parent)}
    done = subprocess.run([sys.executable, str(script), *names], env=environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {row["id"]: row for row in rows}
