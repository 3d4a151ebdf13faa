"""`dspark generate` with the stand-in engine: the same flags, files and exit codes. standin_job.py STEP_DELAY_MS IN OUT [flags]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import typer
from standin_engine import load_standin, load_standin_builder

from dspark.runtime.jobs.job import Loaders
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark_cli.app import run
from dspark_cli.console import Console
from dspark_cli.generate import JobOptions, run_generate
from dspark_cli.options import add_command


def run_standin(arguments: list[str], loaders: Loaders) -> int:
    """What `dspark generate ARGUMENTS` does, with another engine; returns the exit code."""
    application = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

    def generate(console: Console, options: JobOptions, config: EngineConfig, sampling: dict[str, Any]) -> int:
        """Stand-in job."""
        return run_generate(console, options, config, sampling, loaders)

    add_command(application, generate, JobOptions, EngineConfig, SamplingParams)
    return run(arguments, application)


if __name__ == "__main__":
    delay_s = float(sys.argv[1]) / 1000
    sys.exit(run_standin(sys.argv[2:], Loaders(load_standin(delay_s), load_standin_builder)))
