"""What several files of tests of the command use."""

from pathlib import Path

import pytest
from command_job import Generate, command


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Generate:
    """`command_job.command` in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return command(tmp_path, capfd)
