"""What the peers' runners and the harness share: arguments, threads, the clock, CPU time and memory. Standard library only.

Times are seconds, memory is bytes. A runner calls `setup()` before it imports a heavy library, marks the moments of its run on the
`Recorder` that it gets back, and ends with `write()`.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat that follow the command name; the first is the state (field 3 of proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def process_age_s(pid: int) -> float:
    """Seconds since the process was started, to about 0.01."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - int(stat_fields(pid)[19]) / TICKS


def tree(pid: int) -> list[int]:
    """The process and all its living descendants."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                queue += map(int, children.read_text().split())
            except OSError:  # that thread has just ended
                continue
    return found


def cpu_s(pid: int) -> float:
    """User and system time of the process tree so far, ended children that were waited for included."""
    total = 0
    for member in tree(pid):
        try:
            total += sum(map(int, stat_fields(member)[11:15]))
        except OSError:
            continue
    return total / TICKS


class MemoryWatch(threading.Thread):
    """Samples a process tree: peak resident memory and peak anonymous memory (resident pages that no file backs), each summed over it."""

    def __init__(self, pid: int, interval_s: float = 0.2):
        super().__init__(daemon=True)
        self.pid, self.interval_s = pid, interval_s
        self.peak_rss_bytes = self.peak_anon_bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        self.sample()
        while not self._done.wait(self.interval_s):
            self.sample()

    def sample(self) -> None:
        rss = anon = 0
        for member in tree(self.pid):
            try:
                lines = Path(f"/proc/{member}/status").read_text().splitlines()
            except OSError:
                continue
            kib = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines) if key in ("VmRSS", "RssAnon")}
            rss += 1024 * kib.get("VmRSS", 0)
            anon += 1024 * kib.get("RssAnon", 0)
        self.peak_rss_bytes, self.peak_anon_bytes = max(self.peak_rss_bytes, rss), max(self.peak_anon_bytes, anon)

    def stop(self) -> None:
        self._done.set()
        self.join()


def limit_threads(threads: int, environ: dict | os._Environ = os.environ) -> None:
    """Bind this process, and what it starts, to its first `threads` cores, and set the thread counts of the usual libraries."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        environ[name] = str(threads)
    environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    environ["HF_HUB_OFFLINE"] = "1"


class Recorder:
    """The figures of one run of a peer."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.lines = [json.loads(text) for text in args.workload.read_text(encoding="utf-8").split("\n") if text.strip()]
        self.figures: dict[str, object] = {}
        self._memory = MemoryWatch(os.getpid())
        self._memory.start()

    def ready(self) -> None:
        """The model is loaded and takes requests."""
        self.figures["startup_s"] = process_age_s(os.getpid())

    def first_token(self) -> None:
        """A one-token answer to the first line, asked for once before the timed part, has come."""
        self.figures["first_token_s"] = process_age_s(os.getpid())

    def start(self) -> None:
        """Generation of the whole workload begins: templates, tokenizing and detokenizing count."""
        self._wall, self._cpu = time.perf_counter(), cpu_s(os.getpid())

    def stop(self) -> None:
        """All answers are there."""
        self.figures["generate_wall_s"] = time.perf_counter() - self._wall
        self.figures["generate_cpu_s"] = cpu_s(os.getpid()) - self._cpu

    def write(self, peer: str, version: str, prompt_tokens: int, output_tokens: int, texts: list[str]) -> None:
        """Write the result file. `output_tokens` counts only what the lines asked for."""
        self._memory.stop()
        result = {
            "peer": peer,
            "version": version,
            "threads": self.args.threads,
            "lines": len(self.lines),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            **self.figures,
            "peak_rss_bytes": self._memory.peak_rss_bytes,
            "peak_anon_bytes": self._memory.peak_anon_bytes,
            "tokens_per_s": output_tokens / self.figures["generate_wall_s"],
            "tokens_per_cpu_s": output_tokens / self.figures["generate_cpu_s"],
            "texts": texts[:3],
        }
        self.args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def setup(parser: argparse.ArgumentParser) -> Recorder:
    """Add the common arguments, parse, limit the threads and read the workload."""
    parser.add_argument("--workload", type=Path, required=True, help="JSONL file in the flat shape; run greedy, eos ignored")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON result goes")
    args = parser.parse_args()
    limit_threads(args.threads)
    return Recorder(args)
