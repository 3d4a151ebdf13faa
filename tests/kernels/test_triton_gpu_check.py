"""The GPU check's own machinery, with workers that say what a test tells them: it must survive every way a kernel can fail."""

import importlib.util
import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreter_process import NEEDS_INTERPRETER

from dspark.runtime.roofline.devices import DEVICES
from dspark.runtime.roofline.measured import timed_kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
HANG = object()


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


class FakeWorker:
    """Says its messages, then ends (None), or hangs."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = [*messages, None]
        self.stopped = False

    def next_message(self, limit_s: float) -> Any:
        message = self.messages.pop(0)
        if message is HANG:
            raise queue.Empty
        return message

    def stop(self) -> None:
        self.stopped = True


def said(number: int, status: str = "passed") -> dict[str, Any]:
    return {"number": number, "status": status, "detail": "", "seconds": 0.1}


def statuses(gpu_check: ModuleType, workers: list[list[Any]], names: str, seconds: float = 60) -> tuple[list[str], list[int]]:
    """The status of every check and the check that each worker was started at."""
    starts, made = [], [FakeWorker(messages) for messages in workers]

    def start(first: int) -> FakeWorker:
        starts.append(first)
        return made[len(starts) - 1]

    results = gpu_check.run_all(list(names), start, time.monotonic() + seconds)
    assert all(worker.stopped for worker in made[: len(starts)])
    assert [result.name for result in results] == list(names)
    return [result.status for result in results], starts


def test_a_failed_check_is_reported_and_the_next_goes_on(gpu_check: ModuleType) -> None:
    messages = [{"ready": True}, said(0), said(1, "failed"), said(2)]
    assert statuses(gpu_check, [messages], "abc") == (["passed", "failed", "passed"], [0])


def test_a_lost_device_costs_the_failed_check_only(gpu_check: ModuleType) -> None:
    first = [{"ready": True}, said(0, "failed"), {"device_lost": True}]
    assert statuses(gpu_check, [first, [{"ready": True}, said(1), said(2)]], "abc") == (["failed", "passed", "passed"], [0, 1])


def test_a_dead_worker_costs_the_check_it_was_at(gpu_check: ModuleType) -> None:
    first = [{"ready": True}, said(0)]
    assert statuses(gpu_check, [first, [{"ready": True}, said(2)]], "abc") == (["passed", "died", "passed"], [0, 2])


def test_a_hanging_check_is_given_up(gpu_check: ModuleType) -> None:
    assert statuses(gpu_check, [[{"ready": True}, HANG], [said(1)]], "ab") == (["died", "passed"], [0, 1])


def test_a_worker_that_never_starts_ends_in_as_many_failures(gpu_check: ModuleType) -> None:
    assert statuses(gpu_check, [[], []], "ab") == (["died", "died"], [0, 1])


def test_what_time_does_not_allow_is_not_run(gpu_check: ModuleType) -> None:
    assert statuses(gpu_check, [], "ab", seconds=-1) == (["not run", "not run"], [])


def test_the_table_counts_per_op(gpu_check: ModuleType) -> None:
    rows = [gpu_check.Result("rms_norm-odd", "passed", "", 1.0), gpu_check.Result("rms_norm-wide", "failed", "", 0.5)]
    assert gpu_check.table(rows).splitlines()[1].split() == ["rms_norm", "1", "0", "1", "0", "0", "1.5"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "no GPU here: nothing checked\n")


def dry_run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a run on the CPU, under Triton's interpreter."""
    out = tmp_path / "checks.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--dry", "--limit-s", "900", "--json", str(out), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text())


@NEEDS_INTERPRETER
@pytest.mark.interpreter
def test_a_dry_run_writes_timings_that_roofline_reads(tmp_path: Path) -> None:
    code, document = dry_run(tmp_path, "--only", "time-attention_2x1")
    assert code == 0 and {check["status"] for check in document["checks"]} == {"passed"}
    kernels = timed_kernels(document, DEVICES["h100"])
    assert len(kernels) == len(document["checks"]) == 4 and all(kernel.seconds > kernel.limit_s > 0 for kernel in kernels)


@NEEDS_INTERPRETER
@pytest.mark.interpreter
@pytest.mark.slow
def test_every_kind_of_check_works_in_a_dry_run(tmp_path: Path) -> None:
    code, document = dry_run(tmp_path)
    assert code == 0 and {check["status"] for check in document["checks"]} == {"passed"}, document["checks"]
    assert {check["name"].partition("-")[0] for check in document["checks"]} >= {
        "paged_attention",
        "time",
        "model",
        "attention",
        "sampling",
        "tuning",
        "drafts",
    }
    assert len(document["model_steps"]) == 8 and len(timed_kernels(document, DEVICES["h100"])) == len(document["timings"])


def test_real_shapes_are_checked_before_edges(gpu_check: ModuleType) -> None:
    """The names do not need a GPU: right at real shapes, then fast, then every edge; none twice."""
    gpu_check.make_importable()
    from gpu_plan import all_checks

    names = [check.name for check in all_checks("cpu")]
    first = {prefix: next(i for i, name in enumerate(names) if name.startswith(prefix)) for prefix in ("time-", "model-", "sampling-")}
    assert names[0] == "paged_attention-decode_64-bf16" and len(set(names)) == len(names)
    assert (
        names.index("engine-llama-bfloat16") < first["time-"] < first["model-"] < first["sampling-"] < names.index("copy_blocks-one-bf16")
    )


def test_a_check_that_does_not_fit_is_skipped_with_its_reason(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check.make_importable()
    import gpu_models

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(gpu_models.Skipped, match=r"needs 5\d\.\d GB, 10\.0 GB are free"):
        gpu_models.model_check(gpu_models.CASES[1], "cuda", None)
