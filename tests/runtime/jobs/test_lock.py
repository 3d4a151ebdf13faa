"""One run per output, signals, files that appear whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dspark.runtime.jobs.fingerprint import JobHeader, Sidecar, load_header, load_sidecar
from dspark.runtime.jobs.lock import HEADER_NAME, JobLock
from dspark.runtime.jobs.output import AtomicFile, output_path, write_atomic
from dspark.runtime.jobs.signals import StopSignals
from dspark.runtime.spec.errors import InputError, LockedError, StoppedError, UsageError


def lock_of(tmp_path: Path) -> JobLock:
    return JobLock(tmp_path / "out.journal", tmp_path / "out")


def test_the_second_is_refused_and_names_the_first(tmp_path: Path) -> None:
    first, second = lock_of(tmp_path), lock_of(tmp_path)
    first.acquire(0)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        second.acquire(0.2)
    first.release()
    second.acquire(0)
    second.release()
    assert not (tmp_path / "out.journal").exists()


def test_a_waiter_never_holds_a_lock_on_a_directory_that_is_gone(tmp_path: Path) -> None:
    """The finished job removes the directory while others wait for its lock: exactly one of them has the next one at a time."""
    first = lock_of(tmp_path)
    first.acquire(0)
    (tmp_path / "out.journal" / "results.jsonl").write_text("x")
    holders: list[int] = []
    most: list[int] = []

    def wait() -> None:
        lock = lock_of(tmp_path)
        lock.acquire(30)
        holders.append(1)
        most.append(len(holders))
        time.sleep(0.02)
        assert (tmp_path / "out.journal" / "lock").exists()
        holders.pop()
        lock.release()

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    first.remove_directory()
    first.release()
    for thread in threads:
        thread.join(30)
    assert most == [1, 1, 1, 1]
    assert not (tmp_path / "out.journal").exists()


def test_an_unfinished_job_keeps_its_directory(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.acquire(0)
    JobHeader({"seed": 1}, "input", False, "a").save(lock.directory)
    lock.release()
    assert (lock.directory / HEADER_NAME).exists()


def test_headers_of_other_settings_or_versions_are_refused(tmp_path: Path) -> None:
    header = JobHeader({"seed": 1, "default top_k": 5, "engine": "x"}, "input", False, "a")
    header.save(tmp_path)
    assert load_header(tmp_path) == header
    for changed, words in (
        ({**header.fingerprint, "seed": 2}, "seed 1, now 2"),
        ({**header.fingerprint, "default top_k": None}, "top_k 5, now unset"),
        ({**header.fingerprint, "engine": "y"}, "another engine"),
    ):
        with pytest.raises(InputError, match=words):
            JobHeader(changed, "input", False, "b").check_continues(header, tmp_path)
    with pytest.raises(InputError, match="order input, now completion"):
        JobHeader(header.fingerprint, "completion", False, "b").check_continues(header, tmp_path)
    JobHeader(header.fingerprint, "input", True, "b").check_continues(header, tmp_path)
    JobHeader(header.fingerprint, "input", False, "a", schema=99).save(tmp_path)
    with pytest.raises(InputError, match="schema 99"):
        load_header(tmp_path)
    (tmp_path / HEADER_NAME).write_text("{")
    with pytest.raises(InputError, match="damaged"):
        load_header(tmp_path)


def test_a_damaged_sidecar_is_no_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert load_sidecar(path) is None
    for text in ("", "[]", '{"schema": 1}', '{"schema": 2}'):
        path.write_text(text)
        assert load_sidecar(path) is None
    assert Sidecar.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), AtomicFile(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["f"]


def test_output_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        output_path(tmp_path, "output")
    with pytest.raises(UsageError, match="no regular file"):
        output_path(Path("/dev/null"), "output")
    with pytest.raises(InputError, match="is no directory"):
        output_path(tmp_path / "no" / "out", "output")


def test_signals_end_the_run_at_once_before_the_first_step_and_set_a_flag_after() -> None:
    with StopSignals() as signals, pytest.raises(StoppedError, match="SIGTERM before the first step"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    with StopSignals() as signals:
        signals.defer()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested in ("SIGINT", "SIGTERM")


def test_a_stop_that_a_library_swallowed_counts_before_the_first_step() -> None:
    with StopSignals() as signals:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except Exception:  # as some libraries do around their optional imports
            pass
        with pytest.raises(StoppedError):
            signals.defer()


def test_ignored_signals_stay_ignored() -> None:
    """nohup and a shell's background jobs ignore some on purpose."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)
