"""`--order completion`: every result goes straight to OUT; the journal beside it holds keys.

A record's `out` is then [offset, length, "xxh3_64"] of its line in OUT, OUT is written before the record, and both are synced in that
order. On a restart OUT is cut behind the last line that has a sound record and the hash that it names: a result without a record is done
again, a record without its result is dropped, so each line stands in OUT once. With an errors file, failures stay in the journal and are
written in input order at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import orjson
import xxhash

from dspark.runtime.jobs.index import STATE_FAILED, STATE_NONE, FixedFile
from dspark.runtime.jobs.journal import AppendFile, Journal, LineKey, StoredRecord, encode_record
from dspark.runtime.jobs.output import AtomicFile, sync_directory
from dspark.runtime.jobs.store import RESULTS_NAME, Fill, ResultStore
from dspark.runtime.spec.errors import StoppedError

NEW_KEYS_NAME = "keys.rebuilt"
NEW_OUT_NAME = "out.rebuilt"
_WRITE_BYTES = 1 << 20


class StreamStore(ResultStore):
    """Results of one job, in the order in which they finish."""

    def __init__(self, directory: Path, output: Path, errors: Path | None, fresh: bool) -> None:
        """fresh: no unfinished job is being continued, so whatever stands in OUT is an older job's and goes."""
        self._finish_rebuild(directory, output)
        super().__init__(directory, output, errors)
        self._out = AppendFile(output)
        if fresh:
            self._out.truncate(0)
            self.journal.truncate(0)
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._has_gap = False

    @staticmethod
    def _finish_rebuild(directory: Path, output: Path) -> None:
        """Complete or drop a rebuild that a crash cut short: it counts from the moment its keys are in place."""
        if (directory / NEW_KEYS_NAME).exists():
            (directory / NEW_KEYS_NAME).unlink()
            (directory / NEW_OUT_NAME).unlink(missing_ok=True)
        elif (directory / NEW_OUT_NAME).exists():
            os.replace(directory / NEW_OUT_NAME, output)
            sync_directory(output.parent)

    def load(self, index: FixedFile, retry_failed: bool) -> int:
        unused = super().load(index, retry_failed)
        if unused or self.num_damaged or self._has_gap:
            # OUT holds lines of edited requests, or failures that are to be done again: they must not stay.
            damaged = self.num_damaged
            self._rebuild()
            super().load(index, False)
            self.num_damaged = damaged
        return unused

    def _sound_records(self) -> Iterator[StoredRecord]:
        """Records whose line stands in OUT as they say. Both files are cut behind the last one."""
        end = 0
        sound_journal_bytes = 0
        self._has_gap = False
        with open(self._out.path, "rb", buffering=_WRITE_BYTES) as out:
            for record in self.journal.read():
                inline = record.out[:1] == b"{"
                if not inline:
                    offset, length, digest = orjson.loads(record.out)
                    out.seek(offset)
                    if offset < end or digest != f"{xxhash.xxh3_64_intdigest(out.read(length)):016x}" or out.read(1) != b"\n":
                        break
                    self._has_gap = self._has_gap or offset != end
                    end = offset + length + 1
                sound_journal_bytes = record.out_offset + record.out_length
                yield record
            else:
                sound_journal_bytes = -1
        self._out.truncate(end)
        if sound_journal_bytes >= 0:
            self._cut_journal(sound_journal_bytes)

    def _cut_journal(self, inside: int) -> None:
        """Cut the journal behind the record that reaches past `inside`."""
        tail = os.pread(self.journal.fd, 256, inside)
        self.journal.truncate(inside + tail.index(b"\n") + 1 if inside else 0)

    def _rebuild(self) -> None:
        """Keep only the results that lines of the input use."""
        # One word per result, sorted: 80 MB for ten million, on this rare path only.
        parts = [window["offset"][window["state"] != STATE_NONE] for _, window in self.slots.windows()]
        used = np.sort(np.concatenate(parts)) if parts else np.empty(0, "<u8")
        position = 0
        with open(self.directory / NEW_OUT_NAME, "wb") as new_out, open(self.directory / NEW_KEYS_NAME, "wb") as new_keys:
            for record in self.journal.read():
                near = int(np.searchsorted(used, np.uint64(record.out_offset)))
                if near == len(used) or int(used[near]) != record.out_offset:
                    continue
                out = record.out
                if out[:1] != b"{":
                    offset, length, digest = orjson.loads(out)
                    new_out.write(os.pread(self._out.fd, length + 1, offset))
                    out = orjson.dumps([position, length, digest])
                    position += length + 1
                new_keys.write(encode_record(record.line, record.ok, out)[0])
            for file in (new_out, new_keys):
                file.flush()
                os.fsync(file.fileno())
        self.journal.close()
        self._out.close()
        os.replace(self.directory / NEW_KEYS_NAME, self.directory / RESULTS_NAME)
        sync_directory(self.directory)
        self._finish_rebuild(self.directory, self.output)
        self.journal = Journal(self.directory / RESULTS_NAME)
        self._out = AppendFile(self.output)

    def _put(self, line: LineKey, ok: bool, record: bytes) -> None:
        if not ok and self.errors is not None:
            self._put_in_journal(line, ok, record)
            return
        place = [self._out.size + self._lines_bytes, len(record), f"{xxhash.xxh3_64_intdigest(record):016x}"]
        self._put_in_journal(line, ok, orjson.dumps(place))
        self._lines.append(record + b"\n")
        self._lines_bytes += len(record) + 1

    def _write_buffered(self) -> None:
        if self._lines:
            data, size = b"".join(self._lines), self._out.size
            self._lines, self._lines_bytes = [], 0
            try:
                self._out.append(data)
                super()._write_buffered()
            except OSError:
                self._forget(self._pending)
                self._clear_buffer()
                with suppress(OSError):
                    self._out.truncate(size)
                raise
        else:
            super()._write_buffered()

    def flush(self) -> None:
        self._write_buffered()
        if self.journal.is_sync_due():
            self.sync()

    def sync(self) -> None:
        self._write_buffered()
        self._out.sync()
        self.journal.sync()

    def publish(self, stop: Callable[[], bool], fill: Fill | None = None) -> None:
        """OUT is there already; write the errors file."""
        self.sync()
        if self.errors is None:
            return
        with AtomicFile(self.errors) as errors:
            for _, window in self.slots.windows():
                if stop():
                    raise StoppedError(f"stopped while '{self.errors}' was being written; all lines are done", "the same command writes it")
                for offset, length, state in window.tolist():
                    if state == STATE_FAILED:
                        errors.write(os.pread(self.journal.fd, length, offset) + b"\n")
            errors.publish()

    def close(self) -> None:
        super().close()
        self._out.close()
