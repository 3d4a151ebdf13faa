"""What the quantizing peers' runners share: arguments, threads, and the clock around load, quantize and save. Standard library only.

A runner calls `setup()` before it imports a heavy library, marks `loaded()`, `quantized()` and `saved()` on the `Run` that it gets back,
and ends with `write()`. Times are seconds, memory is bytes; CPU time is user + system of the process and its ended children.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import measure


def cpu_time_s() -> float:
    """User + system time so far, of this process with all its threads and of ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Run:
    """One quantization. rows: the calibration samples, token ids; out: where the checkpoint goes, an absolute path."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.out = args.model.resolve(), args.out.resolve()
        lines = args.samples.read_text(encoding="utf-8").splitlines()[: args.rows]
        self.rows: list[list[int]] = [json.loads(line)["prompt"] for line in lines]
        self._result = args.result.resolve()
        self._scratch = tempfile.TemporaryDirectory(prefix="dspark-quantize-")
        os.chdir(self._scratch.name)  # some write logs and modules where they are called
        self._figures: dict[str, float] = {}
        self._mark()

    def loaded(self) -> None:
        """Everything is imported and the model is in memory."""
        self._phase("load")

    def quantized(self) -> None:
        """The codes are there, not yet on the disk."""
        self._phase("quantize")

    def saved(self) -> None:
        """The checkpoint is on the disk."""
        self._phase("save")

    def add_tokenizer(self) -> None:
        """Put the source's tokenizer and generation config beside the weights, where the peer has not."""
        for path in self.model.glob("*.json"):
            if (path.name.startswith("tokenizer") or path.name == "generation_config.json") and not (self.out / path.name).exists():
                shutil.copy(path, self.out / path.name)

    def write(self, peer: str, version: str, settings: dict) -> None:
        """Write the result file. settings: what the peer was told that is not its default."""
        os.chdir(self.model)
        self._scratch.cleanup()
        figures = {
            "peer": peer,
            "version": version,
            "settings": settings,
            "threads": self.args.threads,
            "rows": len(self.rows),
            "row_tokens": len(self.rows[0]) if self.rows else 0,
            **self._figures,
            "own_peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        self._result.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    def _mark(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_time_s()

    def _phase(self, name: str) -> None:
        wall, cpu = time.perf_counter(), cpu_time_s()
        self._figures |= {f"{name}_wall_s": wall - self._wall, f"{name}_cpu_s": cpu - self._cpu}
        self._mark()


def setup(parser: argparse.ArgumentParser) -> Run:
    """Add the common arguments, parse, limit the threads and read the samples."""
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory to quantize")
    parser.add_argument("--samples", type=Path, required=True, help="JSONL file, a list of token ids under `prompt` in each line")
    parser.add_argument("--rows", type=int, default=None, help="only the first ones")
    parser.add_argument("--out", type=Path, required=True, help="directory of the quantized checkpoint")
    parser.add_argument("--result", type=Path, required=True, help="where the JSON result goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()
    measure.limit_threads(args.threads)
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    return Run(args)
