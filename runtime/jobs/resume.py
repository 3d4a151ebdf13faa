"""Which line of the input each stored result belongs to.

A record names the position its line had: where key and id still agree there, that is its place (one look). The records of a file whose
lines have moved are joined by key and id: sorted arrays of bounded size against windows of the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from dspark.runtime.jobs.index import SLOT, STATE_FAILED, STATE_NONE, STATE_OK, WINDOW, FixedFile
from dspark.runtime.jobs.journal import StoredRecord

BATCH = 8192
JOIN_RECORDS = 1 << 20
FOUND = np.dtype(
    [
        ("at", "<u8"),
        ("number", "<u8"),
        ("key_hi", "<u8"),
        ("key_lo", "<u8"),
        ("id", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("state", "<u4"),
    ]
)
_LOW64 = (1 << 64) - 1


def place_records(records: Iterable[StoredRecord], index: FixedFile, slots: FixedFile, spill: Path, drop_failed: bool) -> int:
    """Fill `slots` (all zero, as long as the index) and return how many records found no line. spill: scratch file, removed at the end.

    Of several records of one line the last counts. drop_failed: failures are done again.
    """
    unplaced = FixedFile(spill, FOUND, create=True)
    num_unused = 0
    try:
        for batch in _batches(records):
            found = np.array([_row(record) for record in batch], FOUND)
            if drop_failed:
                num_unused += int(np.count_nonzero(found["state"] == STATE_FAILED))
                found = found[found["state"] != STATE_FAILED]
            unplaced.append(found[~_place_by_hint(found, index, slots)])
        for start in reversed(range(0, len(unplaced), JOIN_RECORDS)):  # later records first: they count more
            chunk = unplaced.read(start, JOIN_RECORDS)
            num_unused += len(chunk) - _join(chunk, index, slots)
    finally:
        unplaced.close()
        spill.unlink(missing_ok=True)
    return num_unused


def _row(record: StoredRecord) -> tuple[int, ...]:
    line = record.line
    state = STATE_OK if record.ok else STATE_FAILED
    return line.at, line.number, line.key >> 64, line.key & _LOW64, line.id, record.out_offset, record.out_length, state


def _batches(records: Iterable[StoredRecord]) -> Iterator[list[StoredRecord]]:
    iterator = iter(records)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _fits(found: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Whether each record may answer the line beside it; an error record names its line number, so that must agree too."""
    same = (found["key_hi"] == lines["key_hi"]) & (found["key_lo"] == lines["key_lo"]) & (found["id"] == lines["id"])
    return same & ((found["state"] == STATE_OK) | (found["number"] == lines["number"]))


def _slots_of(found: np.ndarray) -> np.ndarray:
    rows = np.empty(len(found), SLOT)
    for name in ("offset", "length", "state"):
        rows[name] = found[name]
    return rows


def _place_by_hint(found: np.ndarray, index: FixedFile, slots: FixedFile) -> np.ndarray:
    """Place the records whose hint holds; returns which those are."""
    placed = np.zeros(len(found), bool)
    windows = found["at"] // np.uint64(WINDOW)
    for window in np.unique(windows):
        start = int(window) * WINDOW
        if start >= len(index):
            continue
        lines = index.read(start, WINDOW)
        chosen = np.flatnonzero(windows == window)
        local = (found["at"][chosen] - np.uint64(start)).astype(np.int64)
        chosen, local = chosen[local < len(lines)], local[local < len(lines)]
        fits = _fits(found[chosen], lines[local])
        chosen, local = chosen[fits], local[fits]
        table = slots.read(start, WINDOW)
        table[local] = _slots_of(found[chosen])  # of repeated positions the last assignment stays
        slots.write(start, table)
        placed[chosen] = True
    return placed


def _join(found: np.ndarray, index: FixedFile, slots: FixedFile) -> int:
    """Place the records of one chunk in lines that have no result yet, each record once; returns how many were used."""
    order = np.argsort(_mix(found), kind="stable")
    found = found[order]
    mixed = _mix(found)
    used = np.zeros(len(found), bool)
    for start, lines in index.windows():
        table = slots.read(start, WINDOW)
        empty = np.flatnonzero(table["state"] == STATE_NONE)
        if not empty.size:
            continue
        wanted = _mix(lines[empty])
        candidate = np.searchsorted(mixed, wanted, side="right") - 1  # the last record of equal ones
        near = candidate >= 0
        empty, candidate = empty[near], candidate[near]
        good = _fits(found[candidate], lines[empty]) & ~used[candidate]
        empty, candidate = empty[good], candidate[good]
        candidate, first = np.unique(candidate, return_index=True)
        empty = empty[first]
        table[empty] = _slots_of(found[candidate])
        used[candidate] = True
        slots.write(start, table)
    return int(np.count_nonzero(used))


def _mix(records: np.ndarray) -> np.ndarray:
    """Key and id in one word for sorting; equality is checked on all of them."""
    return records["key_lo"] ^ (records["id"] * np.uint64(0x9E3779B97F4A7C15))
