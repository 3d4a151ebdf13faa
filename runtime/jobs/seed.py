"""The answers of a finished job as results of a new one, so that `--retry-failed` does only the failures again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from dspark.runtime.jobs.index import FixedFile
from dspark.runtime.jobs.journal import LineKey
from dspark.runtime.jobs.order import line_key
from dspark.runtime.jobs.scan import READ_BYTES, id_hash
from dspark.runtime.spec.errors import InputError


def is_failure(record: dict[str, Any]) -> bool:
    """Whether an output line is an error record, in either shape."""
    response = record.get("response")
    return record.get("error") is not None or (isinstance(response, dict) and response.get("status_code") != 200)


def answered_lines(output: Path, errors: Path | None, index: FixedFile) -> Iterator[tuple[LineKey, bytes]]:
    """(key, record) of every answered line of an OUT in input order. errors: where its failures went, if not into OUT.

    Raises InputError when the files do not belong to the index.
    """
    with open(output, "rb", buffering=READ_BYTES) as out_file:
        failed = _failed_ids(errors)
        next_failed = next(failed, None)
        for start, window in index.windows():
            for at, row in enumerate(window, start):
                key = line_key(at, row)
                if errors is not None and next_failed == (key.number, key.id):
                    next_failed = next(failed, None)
                    continue
                record = _read_record(out_file, key)
                if not is_failure(orjson.loads(record)):
                    yield key, record
        if next_failed is not None or out_file.read(1):
            raise _mismatch()


def _failed_ids(errors: Path | None) -> Iterator[tuple[int, int]]:
    """(line number, id hash) of each record of the errors file."""
    if errors is None:
        return
    with open(errors, "rb", buffering=READ_BYTES) as file:
        for raw in file:
            record = orjson.loads(raw)
            detail = record.get("error") or record["response"]["body"]["error"]
            yield detail["line"], id_hash(record["custom_id"], detail["line"])


def _read_record(file: BinaryIO, key: LineKey) -> bytes:
    raw = file.readline()
    if not raw or id_hash(orjson.loads(raw).get("custom_id"), key.number) != key.id:
        raise _mismatch()
    return raw


def _mismatch() -> InputError:
    return InputError("OUT does not go with the input, so the failed lines cannot be told", "type --fresh to do all lines again")
