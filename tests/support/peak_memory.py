"""The most anonymous memory that a process takes, Linux only."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


def peak_anon_bytes(command: list[str]) -> int:
    """Run a command to its end; the most anonymous memory seen, sampled every 20 ms. Mapped files do not count."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    most = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        most = max([most, *(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.02)
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    return most
