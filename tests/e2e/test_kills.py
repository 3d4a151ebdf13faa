"""`dspark generate` with the real engine, stopped in every way there is, ends with the OUT of a run that nobody disturbed.

tests/runtime/jobs kills the same job a hundred times with a stand-in for the engine. Here the processes import torch, load weights
and compute: a tiny model for every run of the tests, the sample model for the slow ones.
"""

from __future__ import annotations

import errno
import importlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_runs import tiny_engine
from sample_model import needs_sample_model, prompt_lines, sample_engine

from dspark.kernels.compile_cache import prepare_cache
from dspark_cli.app import run

PROGRAM = """
import resource, sys
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from dspark_cli.app import run
sys.exit(run(sys.argv[2:]))
"""
PATIENCE_S = 300


@dataclass
class Work:
    """A job, its undisturbed OUT, and how often it is to be killed."""

    engine: Path
    lines: list[dict[str, Any]]
    num_kills: int
    expected: bytes = b""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prepare(self, directory: Path) -> Path:
        directory.mkdir()
        (directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return directory

    def arguments(self, directory: Path) -> list[str]:
        return ["generate", *(str(directory / name) for name in ("in.jsonl", "out.jsonl")), "--engine", str(self.engine), *FLAGS]

    def start(self, directory: Path, file_limit: int = 0) -> subprocess.Popen[bytes]:
        """A process of its own; what it prints goes to stderr.txt."""
        command = [sys.executable, "-P", "-c", PROGRAM, str(file_limit), *self.arguments(directory)]
        with open(directory / "stderr.txt", "wb") as file:
            self.running.append(subprocess.Popen(command, stderr=file, cwd=directory))
        return self.running[-1]

    def finish(self, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """Continue to the end: what the journal held is not done again, OUT is right to the byte, nothing is left over."""
        held = num_results(directory)
        capfd.readouterr()
        assert run(self.arguments(directory)) == 0
        assert (f"({held} done before)" if held else "lines of") in capfd.readouterr().err
        self.check(directory)

    def check(self, directory: Path) -> None:
        assert (directory / "out.jsonl").read_bytes() == self.expected
        known = {"in.jsonl", "out.jsonl", "stderr.txt", ".out.jsonl.dspark.json", ".out.jsonl.dspark.sums"}
        assert {path.name for path in directory.iterdir()} <= known


FLAGS = ("--max-num-seqs", "4", "--threads", "1")


def tiny_work(directory: Path) -> Work:
    """About a second of generating."""
    draw = random.Random(11)
    prompts = [[draw.randrange(3, 320) for _ in range(draw.randint(1, 30))] for _ in range(120)]
    lines = [
        {"custom_id": f"t{i}", "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "temperature": i % 2, "seed": i}
        for i, prompt in enumerate(prompts)
    ]
    return Work(tiny_engine(directory), lines, 2)


def sample_work(directory: Path) -> Work:
    lines = prompt_lines(20, 16)
    for line in lines[::3]:
        line["temperature"] = 0.7
    return Work(sample_engine(), lines, 10)


MAKERS = {"tiny": tiny_work, "smollm2": sample_work}


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=[pytest.mark.slow, needs_sample_model])])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    base = tmp_path_factory.mktemp(request.param)
    made = MAKERS[request.param](base)
    undisturbed = made.prepare(base / "undisturbed")
    assert run([*made.arguments(undisturbed), "--quiet"]) == 0
    made.expected = (undisturbed / "out.jsonl").read_bytes()
    assert made.expected.count(b"\n") == len(made.lines)
    yield made
    for process in made.running:
        process.kill()


def num_results(directory: Path) -> int:
    """Whole records in the journal."""
    journal = directory / "out.jsonl.journal" / "results.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_for(process: subprocess.Popen[bytes], directory: Path, count: int) -> None:
    """Until the journal holds so many results, or the process is at its end."""
    deadline = time.monotonic() + PATIENCE_S
    while num_results(directory) < count and process.poll() is None:
        assert time.monotonic() < deadline, (directory / "stderr.txt").read_text()
        time.sleep(0.005)


def test_sigkill_at_random_moments_loses_and_repeats_nothing(work: Work, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At the start, while weights are loaded, between results, at the end: the same command goes on, to the same bytes."""
    chance = random.Random(4)
    num_kills, num_jobs, stopped_at = 0, 0, []
    directory = work.prepare(tmp_path / "job0")
    while num_kills < work.num_kills:
        process = work.start(directory)
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 4))
        else:
            left = len(work.lines) - num_results(directory)
            wait_for(process, directory, num_results(directory) + chance.randint(1, max(1, left // 2)))
            time.sleep(chance.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), (directory / "stderr.txt").read_text()
        if code == 0:
            work.check(directory)
            num_jobs += 1
            directory = work.prepare(tmp_path / f"job{num_jobs}")
        else:
            num_kills += 1
            stopped_at.append(num_results(directory))
    work.finish(directory, capfd)
    assert any(0 < count < len(work.lines) for count in stopped_at), stopped_at


def test_sigterm_ends_the_step_and_the_same_command_continues(work: Work, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = work.prepare(tmp_path / "job")
    process = work.start(directory)
    wait_for(process, directory, len(work.lines) // 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 4
    last = (directory / "stderr.txt").read_text().splitlines()[-1]
    found = re.fullmatch(r"stopped: (\d+) of (\d+) lines done \(SIGTERM\); the same command continues", last)
    assert found is not None, last
    assert int(found[1]) == num_results(directory) < int(found[2]) == len(work.lines)
    assert not (directory / "out.jsonl").exists()
    work.finish(directory, capfd)


def test_a_file_that_may_not_grow_exits_7_and_the_same_command_continues(
    work: Work, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk in mid-run: what is done is kept."""
    directory = work.prepare(tmp_path / "job")
    process = work.start(directory, file_limit=len(work.expected) * 2 // 3)
    assert process.wait() == 7, (directory / "stderr.txt").read_text()
    lines = (directory / "stderr.txt").read_text().splitlines()
    assert "a file may not grow further" in lines[-1] and "the same command continues" in lines[-1] and len(lines) == 2
    assert 0 < num_results(directory) < len(work.lines)
    work.finish(directory, capfd)


KERNEL = """
import numba
@numba.njit(cache=True)
def plus_one(x):
    return x + 1
"""


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_under_the_kernel_cache_costs_no_job(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels may lie on another disk than OUT: a job whose own files have room ended with 7, however often it was typed."""
    from numba.core.caching import IndexDataCacheFile

    def refuse(*_: Any) -> None:
        raise OSError(error, "no room")

    prepare_cache()
    monkeypatch.setattr(IndexDataCacheFile, "save", refuse)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"kernel_{error}.py").write_text(KERNEL)
    assert importlib.import_module(f"kernel_{error}").plus_one(1) == 2


READ_ONLY = """
import numba.core.caching
def refuse(self):
    raise PermissionError(13, "no")
numba.core.caching._CacheLocator.ensure_cache_path = refuse
import dspark.kernels.cpu.elementwise, dspark.runtime.sampling.draw
"""


def test_no_place_for_the_kernel_cache_is_no_error() -> None:
    """A read-only installation and no home, as containers have it: the import itself failed, as "a bug in dspark"."""
    done = subprocess.run([sys.executable, "-P", "-c", READ_ONLY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
