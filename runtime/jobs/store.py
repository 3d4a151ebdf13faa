"""Where results go and how OUT comes out of them.

`ResultStore` (input order): results collect in `OUT.journal/results.jsonl`; at the end OUT is written in input order under a temporary
name and renamed. `StreamStore` (completion order) is in `stream.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dspark.runtime.jobs.index import SLOT, STATE_FAILED, STATE_NONE, STATE_OK, FixedFile
from dspark.runtime.jobs.journal import Journal, LineKey, StoredRecord, encode_record
from dspark.runtime.jobs.output import AtomicFile
from dspark.runtime.jobs.resume import place_records
from dspark.runtime.jobs.seed import sums_path
from dspark.runtime.spec.errors import MachineError, StoppedError

RESULTS_NAME = "results.jsonl"
SLOTS_NAME = "slots.bin"
SPILL_NAME = "unplaced.bin"

Fill = Callable[[int], bytes]
"""Record for a position that has no result (a run that ended early and writes what it left out)."""


@dataclass
class Counts:
    """Lines with a result: answered, failed, and how many of both were there when the run began."""

    ok: int = 0
    failed: int = 0
    resumed: int = 0

    @property
    def done(self) -> int:
        return self.ok + self.failed


class ResultStore:
    """Results of one job, in input order. Every method may raise OSError (disk full): what was flushed stays sound."""

    journal: Journal
    num_damaged: int
    """Records of the journal that failed their checksum; their lines are done again."""

    def __init__(self, directory: Path, output: Path, errors: Path | None) -> None:
        self.directory = directory
        self.output = output
        self.errors = errors
        self.counts = Counts()
        self.num_damaged = 0
        self.journal = Journal(directory / RESULTS_NAME)
        self.slots = FixedFile(directory / SLOTS_NAME, SLOT, create=True)
        self._buffer: list[bytes] = []
        self._buffer_bytes = 0
        self._pending: list[tuple[int, int, int, int]] = []

    def load(self, index: FixedFile, retry_failed: bool) -> int:
        """Find the results that lines of the index have already; returns how many stored results serve no line."""
        self.slots.resize(0)
        self.slots.resize(len(index))
        unused = place_records(self._sound_records(), index, self.slots, self.directory / SPILL_NAME, retry_failed)
        self.num_damaged = self.journal.num_damaged
        self.counts = Counts()
        for _, window in self.slots.windows():
            self.counts.ok += int((window["state"] == STATE_OK).sum())
            self.counts.failed += int((window["state"] == STATE_FAILED).sum())
        self.counts.resumed = self.counts.done
        return unused

    def _sound_records(self) -> Iterator[StoredRecord]:
        return self.journal.read()

    def add(self, line: LineKey, ok: bool, record: bytes) -> None:
        """Take a result; it is on its way to disk after `flush`. record: one JSON line, with or without its line feed."""
        self._put(line, ok, record.rstrip(b"\n"))
        if ok:
            self.counts.ok += 1
        else:
            self.counts.failed += 1

    def _put(self, line: LineKey, ok: bool, record: bytes) -> None:
        self._put_in_journal(line, ok, record)

    def _put_in_journal(self, line: LineKey, ok: bool, out: bytes) -> None:
        data, lead = encode_record(line, ok, out)
        state = STATE_OK if ok else STATE_FAILED
        self._pending.append((line.at, self.journal.size + self._buffer_bytes + lead, len(out), state))
        self._buffer.append(data)
        self._buffer_bytes += len(data)

    def flush(self) -> None:
        """Hand what was added to the operating system (safe from a kill), and to the disk once a second (safe from a power cut)."""
        self._write_buffered()
        if self.journal.is_sync_due():
            self.sync()

    def _clear_buffer(self) -> None:
        self._buffer, self._buffer_bytes, self._pending = [], 0, []

    def _write_buffered(self) -> None:
        if not self._buffer:
            return
        data, pending = b"".join(self._buffer), self._pending
        self._clear_buffer()
        try:
            self.journal.append(data)
        except OSError:
            self._forget(pending)
            raise
        for at, offset, length, state in pending:
            self.slots.write(at, offset.to_bytes(8, "little") + length.to_bytes(4, "little") + state.to_bytes(4, "little"))

    def _forget(self, pending: list[tuple[int, int, int, int]]) -> None:
        """Count out results that could not be written: they are done again."""
        for *_, state in pending:
            if state == STATE_OK:
                self.counts.ok -= 1
            else:
                self.counts.failed -= 1

    def sync(self) -> None:
        """Flush and make everything durable."""
        self._write_buffered()
        self.journal.sync()

    def publish(self, stop: Callable[[], bool], fill: Fill | None = None) -> None:
        """Write OUT (and the errors file) in input order and rename them into place. Repeating it after a crash gives the same files.

        Raises StoppedError when `stop()` turns true on the way; the journal is whole and the next run writes OUT.
        """
        self.sync()
        with ExitStack() as stack:
            sums = stack.enter_context(AtomicFile(sums_path(self.output)))
            out = stack.enter_context(AtomicFile(self.output))
            errors = stack.enter_context(AtomicFile(self.errors)) if self.errors is not None else out
            self._copy_all(out, errors, sums, stop, fill)
            if self.errors is not None:
                errors.seal()
            out.seal()
            sums.publish()
            if self.errors is not None:
                errors.publish()
            out.publish()

    def _copy_all(self, out: AtomicFile, errors: AtomicFile, sums: AtomicFile, stop: Callable[[], bool], fill: Fill | None) -> None:
        for start, window in self.slots.windows():
            if stop():
                raise StoppedError(f"stopped while '{self.output}' was being written; all lines are done", "the same command writes it")
            for at, (offset, length, state) in enumerate(window.tolist(), start):
                if state == STATE_NONE:
                    if fill is None:
                        raise MachineError(f"line at position {at} has no result", "the same command continues")
                    record = fill(at).rstrip(b"\n")
                else:
                    record = os.pread(self.journal.fd, length, offset)
                target = out if state == STATE_OK else errors
                target.write(record + b"\n")
                sums.write(xxhash.xxh3_64_intdigest(record).to_bytes(8, "little"))

    def close(self) -> None:
        self.journal.close()
        self.slots.close()
