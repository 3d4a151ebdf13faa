"""The append-only log of results: one readable JSON line each, with a checksum; a torn tail is found and cut.

    {"at":5,"line":6,"key":"<32 hex>","id":"<16 hex>","ok":true,"out":<the record for OUT>,"sum":"<16 hex>"}

at: position among the lines that are not blank (a hint). line: line number. key: xxh3_128 of the line. id: xxh3_64 of its effective
custom_id. sum: xxh3_64 of everything before it. What a result belongs to is decided by key and id alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from dspark.runtime.jobs.index import write_all

SYNC_INTERVAL_S = 1.0
_SUM_LEAD = b',"sum":"'
_SUM_END = b'"}\n'
_TAIL_BYTES = len(_SUM_LEAD) + 16 + len(_SUM_END)
_OUT_LEAD = b',"out":'
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class LineKey:
    """What a result belongs to. number: line number; error records hold it, so they serve no other line."""

    at: int
    number: int
    key: int
    id: int


@dataclass(frozen=True)
class StoredRecord:
    """A record found in the log. out_offset, out_length: where its `out` lies in the log, in bytes."""

    line: LineKey
    ok: bool
    out_offset: int
    out_length: int
    out: bytes


def encode_record(line: LineKey, ok: bool, out: bytes) -> tuple[bytes, int]:
    """(record with its line feed, offset of `out` within it). out: JSON without a line feed."""
    head = b'{"at":%d,"line":%d,"key":"%032x","id":"%016x","ok":%s' % (line.at, line.number, line.key, line.id, b"true" if ok else b"false")
    body = head + _OUT_LEAD + out
    return body + _SUM_LEAD + b"%016x" % xxhash.xxh3_64_intdigest(body) + _SUM_END, len(head) + len(_OUT_LEAD)


def decode_record(raw: bytes, offset: int) -> StoredRecord | None:
    """The record of one line of the log, None when it is damaged. offset: where the line starts in the log."""
    body, tail = raw[:-_TAIL_BYTES], raw[-_TAIL_BYTES:]
    if tail != _SUM_LEAD + b"%016x" % xxhash.xxh3_64_intdigest(body) + _SUM_END:
        return None
    # Inside a JSON text a quote is escaped, so the first match is the key itself.
    split = body.find(_OUT_LEAD)
    head = orjson.loads(body[:split] + b"}")
    start = split + len(_OUT_LEAD)
    line = LineKey(head["at"], head["line"], int(head["key"], 16), int(head["id"], 16))
    return StoredRecord(line, head["ok"], offset + start, len(body) - start, body[start:])


class AppendFile:
    """A file that only grows, by whole writes: a write that fails leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.size = os.fstat(self._fd).st_size
        self._dirty = False

    @property
    def fd(self) -> int:
        """Descriptor, for reading."""
        return self._fd

    def append(self, data: bytes) -> None:
        """Write all of it or nothing. Raises OSError (disk full, size limit)."""
        try:
            write_all(self._fd, data, self.size)
        except OSError as error:
            os.ftruncate(self._fd, self.size)
            error.filename = error.filename or str(self.path)
            raise
        self.size += len(data)
        self._dirty = True

    def truncate(self, size: int) -> None:
        """Cut the file."""
        if size < self.size:
            os.ftruncate(self._fd, size)
            self.size = size
            self._dirty = True

    def sync(self) -> None:
        """Make everything written durable."""
        if self._dirty:
            os.fsync(self._fd)
            self._dirty = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Journal(AppendFile):
    """The log of results. Open it, read what it holds once, then append."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_damaged = 0
        """Whole lines that failed their checksum in the last `read`; their lines are done again."""
        self._synced_at = time.monotonic()

    def read(self) -> Iterator[StoredRecord]:
        """Every sound record in order. A tail without a line feed is cut; a damaged line further up is counted and passed over."""
        self.num_damaged = 0
        offset = 0
        with open(self.path, "rb", buffering=_READ_BYTES) as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                record = decode_record(raw, offset)
                offset += len(raw)
                if record is None:
                    self.num_damaged += 1
                else:
                    yield record
        self.truncate(offset)

    def is_sync_due(self) -> bool:
        """Whether SYNC_INTERVAL_S has passed since the last sync."""
        return time.monotonic() - self._synced_at >= SYNC_INTERVAL_S

    def sync(self) -> None:
        super().sync()
        self._synced_at = time.monotonic()
