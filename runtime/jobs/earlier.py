"""How long answers were that this output holds already: of an unfinished job in its journal, else of a finished one in OUT itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from dspark.runtime.jobs.fingerprint import journal_directory

MOST_RECORDS = 10_000
"""Records that are looked at: enough for a mean."""


@dataclass(frozen=True)
class EarlierAnswers:
    """num_lines: answered lines that were looked at. tokens_per_line: of all answers of a line, in the mean. source: the file."""

    num_lines: int
    tokens_per_line: float
    source: Path


def earlier_answers(output: Path) -> EarlierAnswers | None:
    """The mean length of the answers at hand, None where there are none. Whose settings they were made with is not asked."""
    for path in (journal_directory(output) / "results.jsonl", output):
        lengths = list(islice(_lengths(path), MOST_RECORDS))
        if lengths:
            return EarlierAnswers(len(lengths), sum(lengths) / len(lengths), path)
    return None


def _lengths(path: Path) -> Iterator[int]:
    """Tokens of every answered line of a file of records; what is no record of an answer is passed over."""
    try:
        with path.open("rb") as file:
            for raw in file:
                tokens = _completion_tokens(raw)
                if tokens is not None:
                    yield tokens
    except OSError:
        return


def _completion_tokens(raw: bytes) -> int | None:
    try:
        record = orjson.loads(raw)
        record = record.get("out", record)
        usage: Any = record["usage"] if "usage" in record else record["response"]["body"]["usage"]
        return int(usage["completion_tokens"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
