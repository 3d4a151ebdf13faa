"""The order of work: lines that begin alike next to each other, long ones early, a window of the file at a time.

Neighbours with one beginning find its KV blocks in the prefix cache, and a long answer that starts late would run alone at the end.
Only the lines of one window are in memory; results go back to input order by position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark.runtime.jobs.index import FLAG_TOO_LONG, STATE_NONE, FixedFile
from dspark.runtime.jobs.journal import LineKey
from dspark.runtime.jobs.lines import JobLine, LineError, parse_line
from dspark.runtime.jobs.scan import MAX_LINE_BYTES, read_line

WINDOW_LINES = 4096
WINDOW_BYTES = 32 << 20
PREFIX_LEVELS = (64, 256, 1024, 4096)
"""Characters of prompt text by which lines are grouped, coarse to fine."""

CHARACTERS_PER_TOKEN = 4
"""A guess that only the order depends on."""


@dataclass(frozen=True)
class Work:
    """One line to do: parsed, or the reason why it cannot be."""

    key: LineKey
    num_bytes: int
    line: JobLine | None
    error: LineError | None = None


def line_key(at: int, record: np.void) -> LineKey:
    """Key of an indexed line."""
    return LineKey(at, int(record["number"]), int(record["key_hi"]) << 64 | int(record["key_lo"]), int(record["id"]))


def load_work(fd: int, at: int, record: np.void) -> Work:
    """Read and parse one line of the index. Raises MachineError when the input has changed."""
    key = line_key(at, record)
    if record["flags"] & FLAG_TOO_LONG:
        message = f"the line is longer than {MAX_LINE_BYTES} bytes"
        return Work(key, 0, None, LineError(message, "line_too_long", line_number=key.number, content_hash=f"{key.key:032x}"))
    raw = read_line(fd, record)
    try:
        return Work(key, len(raw), parse_line(raw, key.number))
    except LineError as error:
        return Work(key, len(raw), None, error)


def prompt_text(line: JobLine) -> str:
    """Text whose beginning tells whether two prompts share theirs; no template is rendered for it."""
    if line.messages is not None:
        return "".join(f"{message['role']}\n{message.get('content') or ''}\n" for message in line.messages)
    if isinstance(line.prompt, str):
        return line.prompt
    return ",".join(map(str, line.prompt or ()))


def work_order(texts: list[str], costs: list[int]) -> list[int]:
    """Positions in the order of work. Texts with one beginning are adjacent, at each level the costliest group comes first."""
    keys: list[list[int]] = [[] for _ in texts]
    for level in PREFIX_LEVELS:
        groups: dict[str, int] = {}
        members = [groups.setdefault(text[:level], len(groups)) for text in texts]
        dearest = [0] * len(groups)
        for member, cost in zip(members, costs):
            dearest[member] = max(dearest[member], cost)
        for key, member in zip(keys, members):
            key += (-dearest[member], member)
    return sorted(range(len(texts)), key=lambda i: (keys[i], -costs[i], i))


class WorkFeed:
    """Iterator over the lines without a result, in the order of work. default_max_tokens: what a line gets that names none."""

    def __init__(self, path: Path, index: FixedFile, slots: FixedFile, default_max_tokens: int) -> None:
        self._path = path
        self._index = index
        self._slots = slots
        self._default_max_tokens = default_max_tokens

    def __iter__(self) -> Iterator[Work]:
        fd = os.open(self._path, os.O_RDONLY)
        try:
            for window in self._windows(fd):
                yield from self._ordered(window)
        finally:
            os.close(fd)

    def _windows(self, fd: int) -> Iterator[list[Work]]:
        window: list[Work] = []
        num_bytes = 0
        for start, records in self._index.windows(WINDOW_LINES):
            states = self._slots.read(start, WINDOW_LINES)["state"]
            for offset in np.flatnonzero(states == STATE_NONE).tolist():
                work = load_work(fd, start + offset, records[offset])
                window.append(work)
                num_bytes += work.num_bytes
                if num_bytes >= WINDOW_BYTES:
                    yield window
                    window, num_bytes = [], 0
            if len(window) >= WINDOW_LINES // 2:
                yield window
                window, num_bytes = [], 0
        if window:
            yield window

    def _ordered(self, window: list[Work]) -> Iterator[Work]:
        """Lines that cannot be parsed first: they cost nothing and their users learn of them at once."""
        yield from (work for work in window if work.line is None)
        good = [work for work in window if work.line is not None]
        texts = [prompt_text(work.line) for work in good if work.line is not None]
        costs = [len(text) // CHARACTERS_PER_TOKEN + self._max_tokens(work.line) for text, work in zip(texts, good)]
        for position in work_order(texts, costs):
            yield good[position]

    def _max_tokens(self, line: JobLine | None) -> int:
        value = line.options.get("max_tokens") if line is not None else None
        return self._default_max_tokens if value is None else int(value)
