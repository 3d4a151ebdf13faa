"""Is the GPU path right, and how fast is it? Triton kernels on the device against their reference, tiny models end to end, kernels and
models of real shapes by the clock, beside the limit of the card's data sheet and torch's own kernels. Downloads nothing.

    python benchmarks/gpu_check.py [--limit-s 480] [--json FILE] [--only TEXT] [--dry]

Runs from a checkout, installed or not, beside whatever torch, triton and transformers the machine has. The checks run in a worker process:
one that fails is reported and the next one goes on; one that breaks the device or hangs costs its worker, and a new one takes over after
it. In order of value (tests/support/gpu_plan.py). Ends with a table and JSON, whose `timings` benchmarks/roofline.py reads. Exit codes: 0
all passed or were skipped, 1 one failed or time ran out before all were run, 2 nothing could be checked.

--dry: a few checks of each kind with tiny shapes on the CPU, under Triton's interpreter. It says whether this script works.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECK_LIMIT_S = 90.0
"""One check, its compilation included; the first of a worker also waits for torch and the device."""
START_LIMIT_S = 180.0


@dataclass
class Result:
    name: str
    status: str
    """passed, skipped (with the reason), failed, died (its worker ended or hung) or not run"""
    detail: str = ""
    seconds: float = 0.0
    timings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def group(self) -> str:
        return self.name.partition("-")[0]


def make_importable() -> None:
    """Let `dspark.*` and the test support modules be found: as installed, or straight from this checkout's folders."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    if find_spec("dspark") is not None and find_spec("dspark.kernels") is not None:  # installed
        return
    for name in ("dspark", "dspark.kernels", "dspark.runtime", "dspark.converters"):
        folder = ROOT / name.removeprefix("dspark.")
        spec = spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        if name != "dspark":
            setattr(sys.modules["dspark"], name.removeprefix("dspark."), module)
        spec.loader.exec_module(module)


def wanted_checks(only: str, dry: bool) -> list[Any]:
    """The checks whose names contain a text."""
    from gpu_plan import all_checks, dry_checks

    return [check for check in (dry_checks() if dry else all_checks()) if only in check.name]


def work(first: int, only: str, dry: bool) -> int:
    """The worker: run the checks from number `first` on and print one JSON line each; stop where the device is broken."""
    make_importable()
    import torch
    from gpu_models import Skipped

    checks = wanted_checks(only, dry)
    print(json.dumps({"ready": True}), flush=True)
    for number, check in enumerate(checks[first:], first):
        start, status, timings = time.perf_counter(), "passed", []
        try:
            said = check.run()
            detail, timings = (said, []) if isinstance(said, str) else said
        except Skipped as reason:
            status, detail = "skipped", str(reason)
        except Exception as error:
            status, detail = "failed", f"{type(error).__name__}: {error}".strip()
        seconds = time.perf_counter() - start
        print(json.dumps({"number": number, "status": status, "detail": detail[:2000], "seconds": seconds, "timings": timings}), flush=True)
        if dry:
            continue
        try:
            torch.cuda.synchronize()
        except Exception:  # an illegal access is reported by every later call: only a new process gets rid of it
            print(json.dumps({"device_lost": True}), flush=True)
            return 3
    return 0


class Worker:
    """A worker process and the lines that it prints, read with a time limit."""

    def __init__(self, first: int, only: str, dry: bool) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(first), "--only", only, *(["--dry"] if dry else [])]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if dry:
            environment["TRITON_INTERPRET"] = "1"
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_message(self, limit_s: float) -> dict[str, Any] | None:
        """The next JSON line; None when the worker has ended. Raises queue.Empty when it says nothing for limit_s seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            if line is None or line.startswith("{"):
                return None if line is None else json.loads(line)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def run_all(names: list[str], start_worker: Callable[[int], Worker], deadline: float) -> list[Result]:
    """Run every check, in a new worker after one that dies or hangs, until the deadline (monotonic seconds)."""
    results: list[Result] = []
    while len(results) < len(names) and time.monotonic() < deadline:
        worker = start_worker(len(results))
        try:
            follow(worker, names, results, deadline)
        finally:
            worker.stop()
    return results + [Result(name, "not run", "out of time") for name in names[len(results) :]]


def follow(worker: Worker, names: list[str], results: list[Result], deadline: float) -> None:
    """Report what a worker says until it is through or lost. The check that a dead or silent worker was at is reported as died."""
    limit_s = START_LIMIT_S
    while len(results) < len(names):
        try:
            message = worker.next_message(min(limit_s, deadline - time.monotonic()))
        except queue.Empty:
            if time.monotonic() < deadline:
                report(results, Result(names[len(results)], "died", f"no answer in {limit_s:.0f} s"))
            return
        if message is None:
            report(results, Result(names[len(results)], "died", "the worker process ended"))
            return
        if message.get("device_lost"):
            return  # the failed check is reported already
        if "number" in message:
            name, timings = names[message["number"]], message.get("timings", [])
            report(results, Result(name, message["status"], message["detail"], message["seconds"], timings))
        limit_s = CHECK_LIMIT_S


def report(results: list[Result], result: Result) -> None:
    results.append(result)
    first_line = result.detail.splitlines()[0] if result.detail else ""
    print(f"{result.status:8} {result.name:52} {result.seconds:6.2f} s  {first_line[:200]}", flush=True)


def table(results: list[Result]) -> str:
    """One row per op: how many passed, were skipped, failed, died and were not run, and the time they took."""
    states = ("passed", "skipped", "failed", "died", "not run")
    lines = [f"{'op':20}" + "".join(f"{state:>9}" for state in states) + f"{'seconds':>9}"]
    for group in dict.fromkeys(result.group for result in results):
        rows = [result for result in results if result.group == group]
        counts = "".join(f"{sum(row.status == state for row in rows):9}" for state in states)
        lines.append(f"{group:20}{counts}{sum(row.seconds for row in rows):9.1f}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were seen on."""
    import torch
    import triton

    if not torch.cuda.is_available():
        return {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    major, minor = torch.cuda.get_device_capability()
    names = {"gpu": torch.cuda.get_device_name(), "capability": f"{major}.{minor}", "python": sys.version.split()[0]}
    return {**names, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=480.0, help="end within this many seconds (480)")
    parser.add_argument("--json", type=Path, help="write the results to this file (default: print them)")
    parser.add_argument("--only", default="", help="only checks whose name contains this text")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, under Triton's interpreter")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options.worker, options.only, options.dry)
    started = time.monotonic()
    make_importable()
    from gpu_checks import no_gpu_reason

    reason = no_gpu_reason()
    if reason is not None and not options.dry:
        print(reason)
        return 2
    names = [check.name for check in wanted_checks(options.only, options.dry)]
    print(f"{len(names)} checks on {machine()}", flush=True)
    results = run_all(names, lambda first: Worker(first, options.only, options.dry), started + options.limit_s - 10)
    bad = [result for result in results if result.status not in ("passed", "skipped")]
    for result in bad:
        if result.detail and result.status != "not run":
            print(f"\n{result.name} {result.status}:\n{result.detail}")
    timings = [record for result in results for record in result.timings]
    checks = [{name: value for name, value in vars(result).items() if name != "timings"} for result in results]
    document = {"machine": machine(), "seconds": time.monotonic() - started, "checks": checks}
    document["timings"] = [record for record in timings if "op" in record]
    document["model_steps"] = [record for record in timings if "op" not in record]
    text = json.dumps(document)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)
    print(f"\n{table(results)}\n{len(results) - len(bad)} of {len(results)} checks passed in {time.monotonic() - started:.0f} s")
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
