"""`--dry-run`: what a job would do, without an engine: bad lines, prompt lengths, shared beginnings, the exit code to expect."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.runtime.jobs.index import LINE, SLOT, FixedFile
from dspark.runtime.jobs.lines import JobLine, LineError
from dspark.runtime.jobs.order import WorkFeed
from dspark.runtime.jobs.runner import Builder
from dspark.runtime.jobs.scan import check_duplicates, scan_input
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.request import Request

_LENGTH_STEP = 1.25
"""Bounds of the length table grow by this factor."""


class Lengths:
    """Token counts: total, largest, and percentiles to a quarter. Memory does not grow with their number."""

    def __init__(self) -> None:
        self.count = self.total = self.largest = 0
        self._buckets: dict[int, int] = {}

    def add(self, tokens: int) -> None:
        bound = 1
        while bound < tokens:
            bound = max(bound + 1, int(bound * _LENGTH_STEP))
        self._buckets[bound] = self._buckets.get(bound, 0) + 1
        self.count += 1
        self.total += tokens
        self.largest = max(self.largest, tokens)

    def summary(self) -> dict[str, int]:
        """total, max, and p50 and p90 as upper bounds."""
        found = {"total": self.total, "max": self.largest}
        for percent in (50, 90):
            rank = -(-self.count * percent // 100)
            for bound in sorted(self._buckets):
                rank -= self._buckets[bound]
                if rank <= 0:
                    found[f"p{percent}"] = min(bound, self.largest)
                    break
        return found


@dataclass(frozen=True)
class DryRun:
    """num_servable: lines that would go to the engine. prompt_tokens: see `Lengths.summary`. most_output_tokens: sum of what the lines may
    generate. shared_tokens: prompt tokens in whole blocks that the line before has too, in the order of work.

    num_answers: of the lines that can be served. longest_answer: tokens that one of them may have. longest_request: tokens of the longest
    prompt and answer together. context_tokens: over all tokens of answers as long as allowed, the sum of how many came before.
    """

    num_lines: int
    num_servable: int
    num_errors: int
    prompt_tokens: dict[str, int]
    most_output_tokens: int
    shared_tokens: int
    num_answers: int = 0
    longest_answer: int = 0
    longest_request: int = 0
    context_tokens: int = 0

    @property
    def exit_code(self) -> int:
        """What the job would exit with, if nothing stops it."""
        return 3 if self.num_errors else 0

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "exit_code": self.exit_code}


def dry_run(
    path: Path,
    builder: Builder,
    block_size: int,
    default_max_tokens: int,
    limit: int | None,
    allow_duplicate_ids: bool,
    on_error: Callable[[LineError], None],
    num_blocks: int | None = None,
) -> DryRun:
    """Go through the file as a job would, into a scratch directory. num_blocks: of the KV pool, None if that is not known.

    Raises what the job would raise before its first step.
    """
    lengths = Lengths()
    num_errors = most_output = shared = num_answers = longest_answer = longest_request = context = 0
    before: list[int] = []
    with tempfile.TemporaryDirectory(prefix="dspark-") as name:
        index = FixedFile(Path(name) / "lines.bin", LINE, create=True)
        slots = FixedFile(Path(name) / "slots.bin", SLOT, create=True)
        facts = scan_input(path, index, limit)
        if not allow_duplicate_ids:
            check_duplicates(path, index)
        slots.resize(len(index))
        for work in WorkFeed(path, index, slots, default_max_tokens):
            try:
                if work.line is None:
                    assert work.error is not None
                    raise work.error
                request = builder.build(work.line, work.key.at)
                _check_room(work.line, request, block_size, num_blocks)
            except LineError as error:
                num_errors += 1
                on_error(error)
                continue
            tokens, most, answers = request.prompt_token_ids, request.params.max_tokens or 0, request.params.n
            lengths.add(len(tokens))
            most_output += most * answers
            num_answers += answers
            longest_answer = max(longest_answer, most)
            longest_request = max(longest_request, len(tokens) + most)
            context += answers * (most * len(tokens) + most * (most - 1) // 2)
            shared += _shared_blocks(before, tokens, block_size) * block_size
            before = tokens
        index.close()
        slots.close()
    return DryRun(
        facts.num_lines,
        lengths.count,
        num_errors,
        lengths.summary(),
        most_output,
        shared,
        num_answers,
        longest_answer,
        longest_request,
        context,
    )


def _check_room(line: JobLine, request: Request, block_size: int, num_blocks: int | None) -> None:
    """Raise the LineError of a request that the engine would refuse since the whole pool cannot hold it."""
    longest = len(request.prompt_token_ids) + (request.params.max_tokens or 0)
    needed = -(-longest // block_size)
    if num_blocks is not None and needed > num_blocks:
        message = f"prompt and answer of up to {longest} tokens need {needed} KV blocks, the pool has {num_blocks}"
        raise LineError.at(line, RequestError(message, "kv_capacity_exceeded", "max_tokens"))


def _shared_blocks(before: list[int], tokens: list[int], block_size: int) -> int:
    """Whole blocks that both begin with; the last token of a prompt is always computed."""
    count = 0
    while (count + 1) * block_size < len(tokens):
        part = slice(count * block_size, (count + 1) * block_size)
        if before[part] != tokens[part]:
            break
        count += 1
    return count
