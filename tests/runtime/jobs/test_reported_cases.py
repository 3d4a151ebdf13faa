"""Inputs that broke other tools, run as whole jobs with the stand-in engine (support/case_lines.py holds them)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import case_lines
import pytest
from job_server import JobServer
from standin_engine import make_standin_engine_dir

SHAPES = case_lines.SHAPES


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()


class Case:
    """One directory with an engine; jobs over the named files."""

    def __init__(self, server: JobServer, directory: Path, shape: str) -> None:
        self.server, self.directory, self.shape = server, directory, shape
        make_standin_engine_dir(directory / "engine")

    def run(self, name: str, *flags: str) -> int:
        (self.directory / "in.jsonl").write_bytes(case_lines.file(name, self.shape))
        return self.again(*flags)

    def again(self, *flags: str) -> int:
        return self.server.run(self.directory, "in.jsonl", "out.jsonl", "--engine", "engine", *flags)

    @property
    def stderr(self) -> list[str]:
        return (self.directory / "stderr.txt").read_text().splitlines()

    def records(self) -> list[dict[str, Any]]:
        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no strict JSON")

        data = (self.directory / "out.jsonl").read_bytes()
        assert not data or data.endswith(b"\n")
        return [json.loads(line, parse_constant=refuse) for line in data.split(b"\n")[:-1]]

    def ids(self) -> list[str]:
        return [record["custom_id"] for record in self.records()]

    def texts(self) -> dict[str, str]:
        return {record["custom_id"]: text for record in self.records() if (text := answer(record)) is not None}


def answer(record: dict[str, Any]) -> str | None:
    """Text of an answered record, None of a failed one."""
    if "response" not in record:
        return record["text"] if record["error"] is None else None
    choices = record["response"]["body"].get("choices")
    return (choices[0].get("text") or choices[0]["message"]["content"]) if choices else None


@pytest.fixture(params=SHAPES)
def case(request: pytest.FixtureRequest, server: JobServer, tmp_path: Path) -> Case:
    return Case(server, tmp_path, request.param)


@pytest.mark.parametrize("name", ["B24_bom", "B25_crlf", "B25_blank_lines", "B25_no_final_newline"])
def test_b24_b25_odd_line_ends_give_the_answers_of_the_plain_file(case: Case, name: str) -> None:
    assert case.run("plain") == 0
    plain = case.texts()
    assert list(plain) == ["r0", "r1", "r2"]
    assert case.run(name, "--fresh") == 0
    assert case.texts() == plain


def test_b24_utf16_is_refused_before_anything_is_written(case: Case) -> None:
    assert case.run("B24_utf16") == 2
    assert len(case.stderr) == 1 and "UTF-16" in case.stderr[0]
    assert not (case.directory / "out.jsonl").exists() and not list(case.directory.glob("*.journal"))


@pytest.mark.parametrize("name", ["B24_bom_only", "B25_empty_file"])
def test_b24_b25_no_requests_are_an_empty_output(case: Case, name: str) -> None:
    assert case.run(name) == 0
    assert case.records() == []
    assert case.again() == 0 and "already done" in case.stderr[0]


def test_b25_lines_that_are_no_objects_are_error_records_of_their_own(case: Case) -> None:
    assert case.run("B25_nonobject_lines") == 3
    assert {"r0", "r1", "r3", "r5"} <= set(case.texts())
    failed = [record for record in case.records() if answer(record) is None]
    lines = [line for line in case_lines.file("B25_nonobject_lines", case.shape).split(b"\n") if line.strip()]
    assert len(case.records()) == len(lines)
    assert failed and all((record["error"] or record["response"]["body"]["error"])["line"] for record in failed)


def test_b25_unicode_line_separators_do_not_split_a_line(case: Case) -> None:
    assert case.run("B25_unicode_line_separators") == 0
    assert len(case.records()) == 3


def test_b25_nan_and_wrong_numbers_are_errors_and_the_output_is_strict_json(case: Case) -> None:
    assert case.run("B25_nan_numbers") == 3
    assert {"r0", "r4"} <= set(case.texts())
    assert b"NaN" not in b"".join(line for line in (case.directory / "out.jsonl").read_bytes().split(b"\n") if b'"message"' not in line)


def test_b26_duplicate_ids_are_refused_or_kept_apart(case: Case) -> None:
    assert case.run("B26_duplicate_ids") == 2
    assert "'same' stands in line 1 and in line 3" in case.stderr[0]
    assert not (case.directory / "out.jsonl").exists()
    assert case.again("--allow-duplicate-ids") == 0
    assert case.ids() == ["same", "other", "same", "", ""]
    assert len({answer(record) for record in case.records()}) == 5


def test_b26_missing_and_odd_ids(case: Case) -> None:
    assert case.run("B26_missing_and_odd_ids") == 3
    assert [record["custom_id"] for record in case.records()] == ["line-1", "line-2", "7", "line-4", "line-5", "line-6"]
    assert list(case.texts()) == ["line-1", "7", "line-4"]


def test_b27_long_and_empty_prompts_are_records_in_their_place(case: Case) -> None:
    assert case.run("B27_long_and_empty", "--max-model-len", "256") == 3
    ids = [row[0] for row in case_lines.requests("B27_long_and_empty")]
    assert case.ids() == ids
    texts = case.texts()
    assert {"ok1", "ok2", "ok3"} <= set(texts) and not {"long", "empty", "null", "nofield", "emptylist"} & set(texts)


def test_b38_a_cut_output_redoes_only_what_is_missing(case: Case) -> None:
    """k2 and k7 fail; lines k4 and k9 are deleted, the last line is torn: 12 records again, none twice, those of the first run."""
    assert case.run("B38_resume") == 3
    whole = (case.directory / "out.jsonl").read_bytes()
    rows = whole.split(b"\n")[:-1]
    assert [json.loads(row)["custom_id"] for row in rows] == [f"k{i}" for i in range(12)]
    kept = [row for i, row in enumerate(rows) if i not in (4, 9)]
    (case.directory / "out.jsonl").write_bytes(b"\n".join(kept)[:-17])
    assert case.again() == 3
    assert any("(9 done before)" in line for line in case.stderr)
    assert (case.directory / "out.jsonl").read_bytes() == whole
    kept[0], kept[5] = kept[5], kept[0]
    (case.directory / "out.jsonl").write_bytes(b"\n".join(kept) + b"\n")
    assert case.again() == 3
    assert (case.directory / "out.jsonl").read_bytes() == whole


def test_b39_one_huge_line_is_an_error_within_seconds(case: Case) -> None:
    began = time.monotonic()
    assert case.run("B39_one_huge_line") == 3
    assert list(case.texts()) == ["ok"] and len(case.records()) == 2
    assert time.monotonic() - began < 60


def write_big(path: Path, count: int, width: int) -> None:
    with open(path, "wb") as file:
        file.writelines(case_lines.big_lines(count, width=width))


def resident_bytes(pid: int) -> int:
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith("VmRSS"):
            return int(row.split()[1]) * 1024
    return 0


def watch_job(server: JobServer, directory: Path, num_lines: int) -> tuple[float, list[tuple[int, int]]]:
    """(seconds to the first result in the journal, [(results, resident bytes)]) of a job that is killed at half its lines."""
    journal = directory / "out.jsonl.journal" / "results.jsonl"
    began = time.monotonic()
    running = server.start(directory, "in.jsonl", "out.jsonl", "--engine", "engine", "--max-num-seqs", "256", "--quiet")
    first_s, seen = 0.0, []
    while True:
        time.sleep(0.1)
        size = journal.stat().st_size if journal.exists() else 0
        if size and not first_s:
            first_s = time.monotonic() - began
        if size:
            seen.append((size // 200, resident_bytes(running.pid)))
        if size // 200 > num_lines // 2:
            break
        assert time.monotonic() - began < 300
    running.signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    return first_s, seen


def check_flat(seen: list[tuple[int, int]]) -> None:
    """Resident memory does not grow once the first fifth of the results is there."""
    warm = [size for _, size in seen[len(seen) // 5 :]]
    assert max(warm) - warm[0] < 24 << 20


@pytest.mark.slow
def test_b39_60000_lines_stream_in_and_out(server: JobServer, tmp_path: Path) -> None:
    make_standin_engine_dir(tmp_path / "engine")
    write_big(tmp_path / "in.jsonl", 60_000, 1600)
    first_s, seen = watch_job(server, tmp_path, 60_000)
    assert first_s < 60
    check_flat(seen)
    half = (tmp_path / "out.jsonl.journal" / "results.jsonl").read_bytes().split(b"\n")[:-1]
    assert len(half) > 20_000 and all(json.loads(row)["out"]["error"] is None for row in half[::997])
    assert server.run(tmp_path, "in.jsonl", "out.jsonl", "--engine", "engine", "--max-num-seqs", "256", "--quiet") == 0
    with open(tmp_path / "out.jsonl", "rb") as file:
        assert [json.loads(line)["custom_id"] for line in file] == [f"m{i}" for i in range(60_000)]


@pytest.mark.slow
def test_200000_lines_keep_memory_flat_and_give_results_within_seconds(server: JobServer, tmp_path: Path) -> None:
    make_standin_engine_dir(tmp_path / "engine")
    write_big(tmp_path / "in.jsonl", 200_000, 100)
    first_s, seen = watch_job(server, tmp_path, 200_000)
    assert first_s < 60
    check_flat(seen)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB, where mounting is permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("order", ["input", "completion"])
def test_a_full_disk_exits_7_and_the_same_command_continues(server: JobServer, tmp_path: Path, small_disk: Path, order: str) -> None:
    make_standin_engine_dir(tmp_path / "engine")
    with open(tmp_path / "in.jsonl", "w") as file:
        file.writelines(json.dumps({"custom_id": f"i{i}", "prompt": f"question {i}", "max_tokens": 20}) + "\n" for i in range(200))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(48 << 10))
    arguments = ("in.jsonl", "disk/out.jsonl", "--engine", "engine", "--quiet", "--order", order)
    running = server.start(tmp_path, *arguments)
    assert running.wait() == 7, running.stderr
    assert len(running.stderr.splitlines()) == 1 and "the disk is full" in running.stderr
    ballast.unlink()
    code = server.run(tmp_path, *arguments)
    if code == 7:  # 96 KiB hold the journal but not OUT beside it: room is made by a larger disk
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        code = server.run(tmp_path, *arguments)
    assert code == 0
    ids = [json.loads(line)["custom_id"] for line in (small_disk / "out.jsonl").read_bytes().splitlines()]
    assert (ids if order == "input" else sorted(ids, key=lambda i: int(i[1:]))) == [f"i{i}" for i in range(200)]
    assert not [name for name in os.listdir(small_disk) if name.endswith((".journal", ".dspark-tmp"))]
