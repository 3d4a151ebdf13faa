"""A job directory for tests of `dspark generate`: its lines, its records, and the command with the stand-in engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standin_engine import load_standin, load_standin_builder, make_standin_engine_dir
from standin_job import run_standin

from dspark.runtime.jobs.job import Loaders

Generate = Callable[..., tuple[int, list[str]]]


def write_lines(path: Path, *lines: dict[str, Any] | str) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def questions(count: int, **options: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"q{i}", "prompt": f"question {i}", "max_tokens": 12, **options} for i in range(count)]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ENGINE = ("--engine", "engine")
"""Of the directory that `command` makes."""


def command(directory: Path, capfd: pytest.CaptureFixture[str]) -> Generate:
    """`dspark generate` in `directory`, which must be the working directory: arguments -> (exit code, lines of stderr). `loads` counts the
    engines that were loaded, `stdout` is the last one's."""
    make_standin_engine_dir(directory / "engine")

    def run(*arguments: str, load: Any = None) -> tuple[int, list[str]]:
        def counted(engine_dir: Path, config: Any) -> Any:
            run.loads += 1  # type: ignore[attr-defined]
            return (load or load_standin())(engine_dir, config)

        capfd.readouterr()
        code = run_standin(list(arguments), Loaders(counted, load_standin_builder))
        captured = capfd.readouterr()
        run.stdout = captured.out  # type: ignore[attr-defined]
        return code, captured.err.splitlines()

    run.loads = 0  # type: ignore[attr-defined]
    return run
