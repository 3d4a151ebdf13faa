"""One pass over the input file: where each line lies, what it is keyed by, and whether the file can be used at all."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import xxhash

from dspark.runtime.jobs.index import FLAG_TOO_LONG, FixedFile
from dspark.runtime.jobs.lines import LineError, parse_line
from dspark.runtime.spec.errors import InputError, MachineError

MAX_LINE_BYTES = 64 << 20
"""A longer line cannot be a request; it is skipped over in pieces and becomes an error record."""

READ_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
PACKED_MARKS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"PAR1": "parquet",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}
_CONTROL = bytes({*range(32), 127} - {9})
_SHORT_BYTES = 8
BLANK = b" \t\r\n"
DUPLICATE_SORT = 4 << 20
"""Ids sorted at once when duplicates are looked for: 32 MiB of hashes."""

_LINE = struct.Struct("<QQIIQQQ")
_LOW64 = (1 << 64) - 1


@dataclass(frozen=True)
class InputFacts:
    """What one pass found. digest: hex xxh3_128 of the bytes read. num_lines: lines that are not blank."""

    num_lines: int
    num_bytes: int
    digest: str


def open_input(path: Path) -> BufferedReader:
    """The input for reading. Raises InputError unless it is a readable regular file."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise InputError(
                f"input '{path}' is {kind}", "give a JSONL file; write a stream to a file first, so that the job can be continued"
            )
        return BufferedReader(FileIO(path), READ_BYTES)
    except OSError as error:
        raise InputError(f"input '{path}' cannot be read ({error.strerror})", "check the path") from error


def digest_of(path: Path, limit: int | None = None) -> str:
    """Hex xxh3_128 of the bytes that a scan with this limit would read."""
    digest = xxhash.xxh3_128()
    with open_input(path) as file:
        if limit is None:
            while block := file.read(READ_BYTES):
                digest.update(block)
        else:
            for _, number, raw in iter_lines(file, digest):
                limit -= raw is None or bool(strip_line(raw, number)[0])
                if limit <= 0:
                    break
    return digest.hexdigest()


def iter_lines(file: BinaryIO, digest: Any) -> Iterator[tuple[int, int, bytes | None]]:
    """(offset, number, bytes) of every line, blank ones too; bytes None for one that is too long. Only a line feed ends a line."""
    offset, number = 0, 0
    while raw := file.readline(MAX_LINE_BYTES):
        number += 1
        digest.update(raw)
        length, piece = len(raw), raw
        while len(piece) == MAX_LINE_BYTES and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE_BYTES)
            digest.update(piece)
            length += len(piece)
        yield offset, number, raw if length == len(raw) else None
        offset += length


def strip_line(raw: bytes, number: int) -> tuple[bytes, int]:
    """(line, lead): the line without white space at its ends and the file's byte order mark, and how many bytes it starts later."""
    line = raw.strip(BLANK)
    if number == 1 and line.startswith(BOM):
        line = line[len(BOM) :].lstrip(BLANK)
    return line, raw.find(line) if line else 0


def peek_id(line: bytes, number: int) -> str | None:
    """The custom_id that a line's record will carry, None for `line-N`. Agrees with `lines.parse_line` at a fraction of its cost."""
    try:
        body = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            return parse_line(line, number).custom_id
        except LineError as error:
            return error.custom_id if error.has_own_id else None
    if not isinstance(body, dict):
        return None
    given, other = body.get("custom_id"), body.get("id")
    if given is None or other is None:
        given = other if given is None else given
        return given if isinstance(given, str) else None
    return None


def id_hash(custom_id: str | None, number: int) -> int:
    """Hash of the effective custom_id: the given one, else `line-N`."""
    text = custom_id if custom_id is not None else f"line-{number}"
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _is_text(line: bytes) -> bool:
    """Whether somebody may have meant it as a line: UTF-8 without control characters."""
    if len(line.translate(None, _CONTROL)) < len(line):
        return False
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _check_start(path: Path, start: bytes) -> None:
    """Raises InputError for a file that begins like one of another kind."""
    if start[:2] in UTF16_MARKS:
        raise InputError(f"input '{path}' is UTF-16, allowed: UTF-8", f"type: iconv -f UTF-16 -t UTF-8 '{path}' > utf8.jsonl")
    for mark, kind in PACKED_MARKS.items():
        if start.startswith(mark):
            raise InputError(f"input '{path}' is a {kind} file, allowed: JSONL in UTF-8", "unpack it first")


def scan_input(path: Path, index: FixedFile, limit: int | None = None) -> InputFacts:
    """Fill the index with every line that is not blank (the first `limit` of them).

    Raises InputError when the file is UTF-16 or binary or is no regular file: in none of its lines could a request stand.
    """
    digest = xxhash.xxh3_128()
    packed: list[bytes] = []
    count, num_bytes = 0, 0
    readable, all_text = False, True
    with open_input(path) as file:
        _check_start(path, file.peek(_SHORT_BYTES))
        for offset, number, raw in iter_lines(file, digest):
            if raw is None:
                packed.append(_LINE.pack(offset, number, 0, FLAG_TOO_LONG, offset, number, id_hash(None, number)))
            else:
                num_bytes += len(raw)
                line, lead = strip_line(raw, number)
                if not line:
                    continue
                key = xxhash.xxh3_128_intdigest(line)
                given = peek_id(line, number)
                if not readable:
                    is_text = given is not None or _is_text(line)
                    all_text = all_text and is_text
                    readable = is_text and len(line) >= _SHORT_BYTES  # in binary files too, some scraps between line feeds are text
                packed.append(_LINE.pack(offset + lead, number, len(line), 0, key >> 64, key & _LOW64, id_hash(given, number)))
            count += 1
            if len(packed) >= 4096:
                index.append(b"".join(packed))
                packed.clear()
            if limit is not None and count >= limit:
                break
        index.append(b"".join(packed))
    if not readable and not all_text:
        raise InputError(
            f"input '{path}' is not UTF-8 text: none of its {count} lines can be read", "give a JSONL file in UTF-8, not compressed"
        )
    return InputFacts(count, num_bytes, digest.hexdigest())


def read_line(fd: int, record: np.void) -> bytes:
    """A line's bytes again. Raises MachineError when the file has changed since the scan."""
    line = os.pread(fd, int(record["length"]), int(record["offset"]))
    key = xxhash.xxh3_128_intdigest(line)
    if key >> 64 != int(record["key_hi"]) or key & _LOW64 != int(record["key_lo"]):
        raise MachineError(
            f"the input changed at line {int(record['number'])} while the job was running; what is done is kept",
            "the same command continues with the file as it is now",
        )
    return line


def find_duplicates(path: Path, index: FixedFile) -> tuple[str, int, int] | None:
    """(custom_id, line, line) of the first repeated id found, or None. Memory stays bounded: ids are sorted in buckets by their hash."""
    buckets = max(1, -(-len(index) // DUPLICATE_SORT))
    best: tuple[str, int, int] | None = None
    for bucket in range(buckets):
        repeated = _repeated_hashes(index, bucket, buckets)
        if repeated.size:
            found = _first_real_duplicate(path, index, repeated)
            if found is not None and (best is None or found[2] < best[2]):
                best = found
    return best


def _repeated_hashes(index: FixedFile, bucket: int, buckets: int) -> np.ndarray:
    parts = [window["id"][window["id"] % np.uint64(buckets) == bucket] for _, window in index.windows()]
    ids = np.concatenate(parts) if parts else np.empty(0, "<u8")
    ids.sort()
    return np.unique(ids[1:][ids[1:] == ids[:-1]])


def _first_real_duplicate(path: Path, index: FixedFile, repeated: np.ndarray) -> tuple[str, int, int] | None:
    """Equal hashes are compared as texts, by reading their lines again."""
    seen: dict[str, int] = {}
    with open_input(path) as file:
        for _, window in index.windows():
            for record in window[np.isin(window["id"], repeated)]:
                number = int(record["number"])
                given = None if record["flags"] & FLAG_TOO_LONG else peek_id(read_line(file.fileno(), record), number)
                text = given if given is not None else f"line-{number}"
                if text in seen:
                    return text, seen[text], number
                seen[text] = number
    return None


def check_duplicates(path: Path, index: FixedFile) -> None:
    """Raises InputError naming the two lines that share a custom_id."""
    found = find_duplicates(path, index)
    if found is not None:
        text, first, second = found
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise InputError(
            f"custom_id '{shown}' stands in line {first} and in line {second} of '{path}'",
            "make the ids different, or type --allow-duplicate-ids",
        )
