"""The answers of a finished job as results of a new one: when OUT was damaged, or its failures are to be done again.

Beside the sidecar a finished job in input order leaves `.OUT.dspark.sums`: xxh3_64 of every record, 8 bytes per line, in input order.
A line that still stands in OUT (or in the errors file) with the hash of a position is that position's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from dspark.runtime.jobs.index import FixedFile
from dspark.runtime.jobs.journal import LineKey
from dspark.runtime.jobs.order import line_key
from dspark.runtime.jobs.scan import READ_BYTES

SUM = np.dtype("<u8")


def sums_path(output: Path) -> Path:
    """Where the hashes of a finished OUT's records stand."""
    return output.with_name(f".{output.name}.dspark.sums")


def is_failure(record: dict[str, Any]) -> bool:
    """Whether an output line is an error record, in either shape."""
    response = record.get("response")
    return record.get("error") is not None or (isinstance(response, dict) and response.get("status_code") != 200)


@dataclass(frozen=True)
class SeedResult:
    """One result taken over."""

    line: LineKey
    ok: bool
    record: bytes


def standing_results(files: list[Path], sums: Path, index: FixedFile, drop_failed: bool) -> Iterator[SeedResult]:
    """Results of a finished job that still stand in its files, each position once. Nothing when the hashes are not there.

    Two words per line are held in memory: 160 MB for ten million lines, on this rare path only.
    """
    if not sums.is_file() or sums.stat().st_size != len(index) * SUM.itemsize:
        return
    wanted = np.fromfile(sums, SUM)
    order = np.argsort(wanted, kind="stable")
    wanted = wanted[order]
    taken = np.zeros(len(wanted), bool)
    for path in files:
        for raw in _lines(path):
            digest = np.uint64(xxhash.xxh3_64_intdigest(raw))
            place = int(np.searchsorted(wanted, digest))
            while place < len(wanted) and wanted[place] == digest and taken[place]:
                place += 1  # equal records of equal lines
            if place == len(wanted) or wanted[place] != digest:
                continue
            ok = not is_failure(orjson.loads(raw))
            if ok or not drop_failed:
                taken[place] = True
                at = int(order[place])
                yield SeedResult(line_key(at, index.read(at, 1)[0]), ok, raw)


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with open(path, "rb", buffering=READ_BYTES) as file:
            for raw in file:
                yield raw.rstrip(b"\n")
