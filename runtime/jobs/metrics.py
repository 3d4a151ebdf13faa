"""What a run measured, as one JSON-ready document. Memory does not grow with the number of lines."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dspark.runtime.spec.request import RequestOutput

METRICS_SCHEMA = 1
PERCENTILES = (50, 90, 99)
_RATIO = math.log(1.02)
_SMALLEST_S = 1e-6


class Histogram:
    """Durations in seconds, in buckets 2 % wide: percentiles are right to a hundredth."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.largest = 0.0

    def add(self, seconds: float) -> None:
        bucket = int(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S) / _RATIO)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.largest = max(self.largest, seconds)

    def percentile(self, percent: float) -> float | None:
        """Middle of the bucket that holds it; None when nothing was added."""
        rank = math.ceil(self.count * percent / 100)
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(_SMALLEST_S * math.exp((bucket + 0.5) * _RATIO), self.largest)
        return None

    def summary(self) -> dict[str, float | None]:
        """p50, p90, p99 and max in seconds."""
        return {**{f"p{percent}": self.percentile(percent) for percent in PERCENTILES}, "max": self.largest if self.count else None}


def process_start_s() -> float:
    """When this process was started, on the clock of time.monotonic(); now, where the system does not say."""
    now = time.monotonic()
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if 0 <= age < 86400 else now


def memory_status(names: Iterable[str]) -> dict[str, int]:
    """Lines of /proc/self/status in bytes, such as VmHWM and RssAnon; empty where there is no such file."""
    found: dict[str, int] = {}
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for row in file:
                name, _, value = row.partition(":")
                if name in names:
                    found[name] = int(value.split()[0]) * 1024
    except OSError:
        return {}
    return found


@dataclass
class RunMetrics:
    """Counters of one run. Times are on the monotonic clock, in seconds."""

    started_at_s: float = field(default_factory=process_start_s)
    generate_started_at_s: float | None = None
    generate_ended_at_s: float | None = None
    first_token_at_s: float | None = None
    generate_cpu_started_s: float = 0.0
    generate_cpu_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    lines_by_acceptance: list[int] = field(default_factory=lambda: [0] * 10)
    ttft: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    peak_anon_bytes: int = 0

    def begin_generate(self) -> None:
        """The engine is loaded; the first step is next."""
        self.generate_started_at_s = time.monotonic()
        self.generate_cpu_started_s = time.process_time()

    def end_generate(self) -> None:
        """The last step is over."""
        self.generate_ended_at_s = time.monotonic()
        self.generate_cpu_s = time.process_time() - self.generate_cpu_started_s

    def observe(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self.prompt_tokens += output.num_prompt_tokens
        self.output_tokens += sum(len(completion.token_ids) for completion in output.completions)
        self.cached_tokens += output.num_cached_tokens
        self.preemptions += output.num_preemptions
        if output.num_drafted:
            self.drafted_tokens += output.num_drafted
            self.accepted_tokens += output.num_accepted
            self.lines_by_acceptance[min(10 * output.num_accepted // output.num_drafted, 9)] += 1
        if output.first_token_at_s:
            self.ttft.add(output.first_token_at_s - output.added_at_s)
            self.first_token_at_s = min(self.first_token_at_s or output.first_token_at_s, output.first_token_at_s)
        if output.finished_at_s:
            self.latency.add(output.finished_at_s - output.added_at_s)

    def sample_memory(self) -> None:
        """Look at the anonymous memory in use (mapped weight pages are not in it)."""
        self.peak_anon_bytes = max(self.peak_anon_bytes, memory_status(("RssAnon",)).get("RssAnon", 0))

    @property
    def generate_s(self) -> float:
        """Seconds from the first step to the last, or to now."""
        if self.generate_started_at_s is None:
            return 0.0
        end = self.generate_ended_at_s if self.generate_ended_at_s is not None else time.monotonic()
        return end - self.generate_started_at_s

    def document(self) -> dict[str, Any]:
        """The metrics, JSON-ready."""
        self.sample_memory()
        seconds = self.generate_s
        first = self.first_token_at_s
        return {
            "schema": METRICS_SCHEMA,
            "time": {
                "wall_s": time.monotonic() - self.started_at_s,
                "first_token_s": None if first is None else first - self.started_at_s,
                "generate_s": seconds,
                "cpu_s": time.process_time(),
                "generate_cpu_s": self.generate_cpu_s,
            },
            "tokens": {
                "prompt": self.prompt_tokens,
                "output": self.output_tokens,
                "cached": self.cached_tokens,
                "output_per_s": self.output_tokens / seconds if seconds else None,
                "prompt_per_s": self.prompt_tokens / seconds if seconds else None,
                "output_per_cpu_s": self.output_tokens / self.generate_cpu_s if self.generate_cpu_s else None,
            },
            "ttft_s": self.ttft.summary(),
            "latency_s": self.latency.summary(),
            "preemptions": self.preemptions,
            "speculation": {
                "lines": sum(self.lines_by_acceptance),
                "draft_tokens": self.drafted_tokens,
                "accepted_tokens": self.accepted_tokens,
                "lines_by_acceptance": self.lines_by_acceptance,
            },
            "memory": {"peak_rss_bytes": memory_status(("VmHWM",)).get("VmHWM"), "peak_anon_bytes": self.peak_anon_bytes or None},
        }
