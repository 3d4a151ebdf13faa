"""Streams, colour, and the exit code of each kind of failure."""

from __future__ import annotations

import errno
import io
import json
import logging
from pathlib import Path

import pytest

from dspark.runtime.spec.errors import DsparkError, InputError, LockedError, MachineError, QualityError, StoppedError, UsageError
from dspark_cli.console import Console, guarded, has_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FAILURES = [
    (UsageError("a is b", "type c"), 2, "error: a is b; type c"),
    (InputError("no file"), 2, "error: no file"),
    (StoppedError("stopped: 1 of 2", "the same command continues"), 4, "stopped: 1 of 2; the same command continues"),
    (LockedError("held"), 5, "error: held"),
    (QualityError("too far off"), 6, "error: too far off"),
    (MachineError("gone"), 7, "error: gone"),
    (KeyboardInterrupt(), 4, "stopped; the same command continues"),
    (MemoryError(), 7, "error: out of memory; what is done is kept, the same command continues; free memory or lower --max-num-seqs"),
    (
        OSError(errno.ENOSPC, "x", "f"),
        7,
        "error: the disk is full ('f'); what is done is kept, the same command continues; make room first",
    ),
    (OSError(errno.EFBIG, "x"), 7, "error: a file may not grow further; what is done is kept, the same command continues; make room first"),
    (
        PermissionError(errno.EACCES, "Permission denied", "f"),
        2,
        "error: 'f': Permission denied; check that the path exists and may be used",
    ),
]


@pytest.mark.parametrize(("error", "code", "line"), FAILURES, ids=lambda value: type(value).__name__)
def test_each_failure_is_one_line_and_its_code(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise error

    assert guarded(Console("test"), body) == code
    captured = capsys.readouterr()
    assert captured.err == line + "\n" and captured.out == ""


def test_a_message_with_line_feeds_is_still_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Console("test").error("two\nlines\tand a tab")
    assert capsys.readouterr().err == "error: two lines and a tab\n"


def test_a_bug_names_the_log_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def body() -> None:
        raise ZeroDivisionError("a slip")

    assert guarded(Console("test"), body) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: a bug in dspark: ZeroDivisionError: a slip; please report it with '") and line.count("\n") == 1
    text = Path(line.split("'")[1]).read_text()
    assert "Traceback" in text and "a slip" in text


def test_memory_errors_of_torch_count_as_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """torch raises OutOfMemoryError on a GPU and a RuntimeError on the CPU; neither may be imported here."""
    gpu = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    for error in (gpu, cpu):

        def body(error: Exception = error) -> None:
            raise error

        assert guarded(Console("test"), body) == 7
        assert capsys.readouterr().err.startswith("error: out of memory")


def test_a_reader_that_has_gone_is_no_news(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise BrokenPipeError

    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    assert guarded(Console("test"), body) == 0
    assert capsys.readouterr().err == ""


def test_colour_only_on_a_terminal_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Terminal()) and not has_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Terminal())


def test_data_and_notes_go_apart(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("test")
    console.data("result")
    console.document({"a": 1})
    console.note("starting")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("result\n", "starting\n")
    console.configure(json=True, quiet=True, verbose=False, log_file=None)
    console.data("result")
    console.document({"a": 1})
    console.note("starting")
    console.problem("look out")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1} and captured.err == "warning: look out\n"


def test_library_warnings_are_lines_and_details_go_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("test")
    console.configure(json=False, quiet=False, verbose=False, log_file=tmp_path / "log")
    logging.getLogger("dspark.kernels").info("the fast kernel declined")
    logging.getLogger("dspark.kernels").warning("slow\npath")
    console.detail("a detail")
    assert capsys.readouterr().err == "warning: slow path\n"
    text = (tmp_path / "log").read_text()
    assert "declined" in text and "a detail" in text and "slow" in text


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    console = Console("test")
    bar = console.progress(10, "line")
    bar.advance(4, tokens_per_s=9)
    console.problem("above the bar")
    bar.close()
    assert "warning: above the bar\n" in terminal.getvalue() and "line/s" in terminal.getvalue()
    plain = io.StringIO()
    monkeypatch.setattr("sys.stderr", plain)
    bar = Console("test").progress(10, "line")
    bar.advance(4)
    bar.close()
    assert plain.getvalue() == ""


def test_errors_know_their_codes() -> None:
    codes = {cls.__name__: cls.exit_code for cls in DsparkError.__subclasses__()}
    assert codes["StoppedError"] == 4 and codes["LockedError"] == 5 and codes["QualityError"] == 6 and codes["MachineError"] == 7
