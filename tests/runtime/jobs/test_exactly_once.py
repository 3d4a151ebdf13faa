"""A job that is killed, at any instant and any number of times, ends with the OUT of one that was not."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_server import JobServer
from standin_engine import make_standin_engine_dir

NUM_LINES = 150
NUM_RECORDS = 146  # the rest is blank
FLAGS = ("in.jsonl", "out.jsonl", "--engine", "engine", "--max-num-seqs", "8", "--quiet")
MODES = {
    "input": (),
    "errors": ("--errors", "errors.jsonl"),
    "completion": ("--order", "completion"),
    "completion-errors": ("--order", "completion", "--errors", "errors.jsonl"),
}


def write_input(directory: Path, num_lines: int = NUM_LINES) -> None:
    make_standin_engine_dir(directory / "engine")
    lines = []
    for i in range(num_lines):
        line = {"custom_id": f"id-{i}", "prompt": f"{'shared beginning ' * (i % 3)}question {i}", "max_tokens": 24}
        lines.append("{broken" if i % 29 == 7 else "" if i % 31 == 3 else json.dumps(line))
    (directory / "in.jsonl").write_text("\n".join(lines) + "\n")


def outputs(directory: Path) -> dict[str, bytes]:
    """Every file that a job leaves, by name; the order of lines does not count in completion order."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name in ("out.jsonl", "errors.jsonl")}


def normal(files: dict[str, bytes], mode: str) -> dict[str, list[bytes]]:
    sort = mode.startswith("completion")
    return {name: sorted(data.split(b"\n")) if sort and name == "out.jsonl" else data.split(b"\n") for name, data in files.items()}


def left_over(directory: Path) -> set[str]:
    known = {"in.jsonl", "out.jsonl", "errors.jsonl", "engine", "stdout.txt", "stderr.txt"}
    known |= {".out.jsonl.dspark.json", ".out.jsonl.dspark.sums"}
    return {path.name for path in directory.iterdir()} - known


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()


@pytest.mark.parametrize("mode", MODES)
def test_sigkill_at_random_moments_loses_and_repeats_nothing(server: JobServer, tmp_path: Path, mode: str) -> None:
    """25 kills in each of four modes, over as many jobs as that takes."""
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    write_input(undisturbed)
    began = time.monotonic()
    assert server.run(undisturbed, *FLAGS, *MODES[mode], delay_ms=1) == 3
    length_s = time.monotonic() - began
    expected = normal(outputs(undisturbed), mode)
    chance = random.Random(mode)
    num_kills, job = 0, 0
    while num_kills < 25:
        job += 1
        directory = tmp_path / f"job{job}"
        directory.mkdir()
        write_input(directory, NUM_LINES)
        code = -signal.SIGKILL
        while code != 3 and num_kills < 25:
            running = server.start(directory, *FLAGS, *MODES[mode], delay_ms=1)
            time.sleep(chance.uniform(0, length_s))
            running.signal(signal.SIGKILL)
            code = running.wait()
            assert code in (3, -signal.SIGKILL), running.stderr
            if code == 3:
                length_s *= 0.8  # the machine is faster than it was when the length was measured
            else:
                num_kills += 1
        assert server.run(directory, *FLAGS, *MODES[mode]) == 3
        assert normal(outputs(directory), mode) == expected
        assert not left_over(directory)


@pytest.mark.parametrize("mode", ["input", *(pytest.param(mode, marks=pytest.mark.slow) for mode in list(MODES)[1:])])
def test_a_kill_at_every_file_operation_is_recovered(server: JobServer, tmp_path: Path, mode: str) -> None:
    """Die before the first file operation, then before the second, and so on to the end; a write is left half done."""
    flags = ("in.jsonl", "out.jsonl", "--engine", "engine", "--max-num-seqs", "4", "--quiet", *MODES[mode])
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    write_input(undisturbed, 9)
    assert server.run(undisturbed, *flags) == 3
    expected = normal(outputs(undisturbed), mode)
    for number in range(1, 400):
        directory = tmp_path / f"at{number}"
        directory.mkdir()
        write_input(directory, 9)
        code = server.run(directory, *flags, die_at=number)
        if code == 3:
            break
        assert code == -signal.SIGKILL
        assert server.run(directory, *flags) == 3, (number, (directory / "stderr.txt").read_text())
        assert normal(outputs(directory), mode) == expected, number
        assert not left_over(directory), number
    assert 30 < number < 399


def test_sigterm_keeps_the_running_steps_results_and_continues(server: JobServer, tmp_path: Path) -> None:
    write_input(tmp_path)
    running = server.start(tmp_path, *FLAGS, delay_ms=10)
    journal = tmp_path / "out.jsonl.journal" / "results.jsonl"
    while not journal.exists() or not journal.stat().st_size:
        time.sleep(0.01)
    running.signal(signal.SIGTERM)
    running.signal(signal.SIGTERM)  # a second one changes nothing
    assert running.wait() == 4
    done = len(journal.read_bytes().splitlines())
    assert 0 < done < NUM_LINES
    assert server.run(tmp_path, *[flag for flag in FLAGS if flag != "--quiet"]) == 3
    stderr = (tmp_path / "stderr.txt").read_text()
    assert f"({done} done before)" in stderr
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == NUM_RECORDS


def test_a_stopped_run_says_how_to_go_on(server: JobServer, tmp_path: Path) -> None:
    write_input(tmp_path)
    running = server.start(tmp_path, *[flag for flag in FLAGS if flag != "--quiet"], delay_ms=100)  # not over before it is stopped
    journal = tmp_path / "out.jsonl.journal" / "results.jsonl"
    while not journal.exists() or not journal.stat().st_size:
        time.sleep(0.01)
    running.signal(signal.SIGINT)
    assert running.wait() == 4
    last = running.stderr.splitlines()[-1]
    assert last.startswith("stopped: ") and f"of {NUM_RECORDS} lines done (SIGINT); the same command continues" in last
    assert not (tmp_path / "out.jsonl").exists()


def test_a_second_run_of_one_output_exits_5_and_waits_if_asked(server: JobServer, tmp_path: Path) -> None:
    """Each run has a directory of its own, for what it prints."""
    write_input(tmp_path)
    flags = ("../in.jsonl", "../out.jsonl", "--engine", "../engine", "--max-num-seqs", "8")
    places = [tmp_path / name for name in ("first", "second", "third")]
    for place in places:
        place.mkdir()
    first = server.start(places[0], *flags, delay_ms=200)
    while not (tmp_path / "out.jsonl.journal" / "job.json").exists():
        time.sleep(0.01)
    second = server.start(places[1], *flags)
    assert second.wait() == 5
    assert len(second.stderr.splitlines()) == 1 and f"another run (process {first.pid})" in second.stderr
    third = server.start(places[2], *flags, "--lock-timeout", "60")
    first.signal(signal.SIGTERM)
    assert first.wait() == 4
    assert third.wait() == 3
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == NUM_RECORDS


@pytest.mark.parametrize("mode", MODES)
def test_a_file_size_limit_exits_7_and_the_same_command_continues(server: JobServer, tmp_path: Path, mode: str) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    write_input(undisturbed)
    assert server.run(undisturbed, *FLAGS, *MODES[mode]) == 3
    limited = tmp_path / "limited"
    limited.mkdir()
    write_input(limited)
    for limit in (14_000, 18_000, 22_000):
        running = server.start(limited, *FLAGS, *MODES[mode], file_limit=limit)
        assert running.wait() == 7, running.stderr
        last = running.stderr.splitlines()[-1]
        assert "may not grow further" in last and "the same command continues" in last
    assert server.run(limited, *FLAGS, *MODES[mode]) == 3
    assert normal(outputs(limited), mode) == normal(outputs(undisturbed), mode)
    assert not left_over(limited)


@pytest.mark.slow
def test_a_kill_while_a_damaged_output_is_mended_is_recovered(server: JobServer, tmp_path: Path) -> None:
    """The answers that still stand are taken over by a new job; killed anywhere on the way, it ends with the same OUT."""
    flags = ("in.jsonl", "out.jsonl", "--engine", "engine", "--max-num-seqs", "4", "--quiet")
    for number in range(1, 400):
        directory = tmp_path / f"at{number}"
        directory.mkdir()
        write_input(directory, 9)
        assert server.run(directory, *flags) == 3
        expected = (directory / "out.jsonl").read_bytes()
        rows = expected.split(b"\n")
        (directory / "out.jsonl").write_bytes(b"\n".join(rows[:3] + rows[4:])[:-9])
        code = server.run(directory, *flags, die_at=number)
        if code != 3:
            assert server.run(directory, *flags) == 3, (number, (directory / "stderr.txt").read_text())
        assert (directory / "out.jsonl").read_bytes() == expected, number
        assert not left_over(directory), number
        if code == 3:
            break
    assert 30 < number < 399
